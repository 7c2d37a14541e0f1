"""Births: chunks computed afresh, recorded during a pass and described after it.

What is stored of a birth is its raw keys and values; what the planner later needs of it are its attention statistics
(eq. 3, 4, 9–11 and the token scores of eq. 14). Those need attention weights, which fast attention kernels never
form. So the pass keeps the born chunks' queries, and a `BirthDescriber` computes the statistics once the answer is out.
Rejected: explicit softmax inside the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cachecraft_rag.kernels.attention import attention_mass, row_blocks
from cachecraft_rag.kernels.memory import empty
from cachecraft_rag.scoring import context_impact
from cachecraft_rag.types import KVLayout


@dataclass(frozen=True)
class AttentionSettings:
    """How a layer attends: factor on the scores, sliding window in tokens and soft cap of the scores (None = none)."""

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class RecordedBirth:
    """A chunk computed in this pass.

    segment      its index in the prompt
    start, stop  its positions
    kv           `[layers, 2, tokens, kv_heads, head_dim]`, raw
    queries      per layer `[tokens, heads, head_dim]`, rotated
    """

    segment: int
    start: int
    stop: int
    kv: Tensor
    queries: list[Tensor]


class BirthRecorder:
    """Copies raw keys and values of newly computed chunks out of a pass and keeps their queries."""

    def __init__(self, layout: KVLayout, like: Tensor, spans: Sequence[tuple[int, int, int]]) -> None:
        """`like` gives dtype and device; `spans` are (segment, start, stop), ascending."""
        self.births = tuple(
            RecordedBirth(segment, start, stop, empty(layout.shape(stop - start), like.dtype, like.device), [])
            for segment, start, stop in spans
        )
        self.settings: list[AttentionSettings] = []
        self._rows: list[slice] = []

    def locate(self, positions: Tensor) -> None:
        """Find each birth among the pass's ascending positions `[rows]`; its rows adjoin, for it is computed whole."""
        starts = torch.searchsorted(positions, positions.new_tensor([b.start for b in self.births]))
        lengths = [birth.stop - birth.start for birth in self.births]
        self._rows = [slice(row, row + length) for row, length in zip(starts.tolist(), lengths, strict=True)]

    def record(self, layer: int, q: Tensor, k: Tensor, v: Tensor, settings: AttentionSettings) -> None:
        """Keep one layer: rotated `q` `[rows, heads, head_dim]`, raw `k` and `v` `[rows, kv_heads, head_dim]`."""
        self.settings.append(settings)
        for birth, rows in zip(self.births, self._rows, strict=True):
            birth.kv[layer, 0] = k[rows]
            birth.kv[layer, 1] = v[rows]
            birth.queries.append(q[rows])


@dataclass(frozen=True)
class BirthStatistics:
    """As in `types.Variant` and `types.Birth`; `token_inter` is None when no chunk stood before."""

    inter: tuple[float, ...]
    intra: float
    cci: float
    token_inter: np.ndarray | None


class BirthDescriber:
    """Adds up one birth's attention layer by layer, so that the work can be done in small pieces between requests.

    Args:
        birth, settings: from the recorder.
        bounds: `[segments + 1]` of the prompt; segment 0 is the system's.
        sink_tokens: so many first tokens of the prompt no sum counts: most attention falls on them, and says nothing.
    """

    def __init__(
        self, birth: RecordedBirth, settings: Sequence[AttentionSettings], *, bounds: Sequence[int], sink_tokens: int
    ) -> None:
        self._birth, self._settings, self._bounds = birth, settings, list(bounds)
        device = birth.kv.device
        edges = self._bounds[: birth.segment + 2]
        edges[0] = min(sink_tokens, edges[1])
        self._edges = torch.tensor(edges, device=device)
        self._positions = torch.arange(birth.start, birth.stop, device=device)
        self._mass = torch.zeros(birth.stop - birth.start, birth.segment + 1, device=device)

    @torch.inference_mode()
    def add_layer(self, layer: int, keys: Tensor) -> None:
        """Add one layer, from the rotated `keys` `[keys, kv_heads, head_dim]` down to the birth's end."""
        use = self._settings[layer]
        blocks = row_blocks(self._positions, window=use.window)
        self._mass += attention_mass(
            self._birth.queries[layer],
            keys,
            blocks,
            self._positions,
            self._edges,
            scale=use.scale,
            softcap=use.softcap,
        )

    def statistics(self) -> BirthStatistics:
        """The averages over the layers added (eq. 10) and what follows from them."""
        mass = self._mass.cpu().numpy() / len(self._settings)  # [tokens, segments up to the birth's own]
        own = self._birth.segment
        prior = mass[:, 1:own]  # the chunks before it; the system segment is in every prompt and tells nothing
        lengths = [self._bounds[i + 1] - self._bounds[i] for i in range(1, own)]
        intra = float(mass[:, own].sum())
        cci = context_impact(
            inter=prior.sum(0).tolist(), prefix_tokens=lengths, intra=intra, tokens=self._birth.stop - self._birth.start
        )
        token_inter = prior.sum(1).astype(np.float32) if own > 1 else None
        return BirthStatistics(tuple(mass[:, :own].sum(0).tolist()), intra, cci, token_inter)
