"""Captures: newly computed chunks, recorded during a pass and described after it.

A capture is stored with its raw keys and values and with the attention statistics that the planner needs later (eq. 3,
4, 9–11 and the token scores of eq. 14). Statistics need attention weights, which fast attention kernels never
form. So the pass keeps the queries of captured chunks, and an `AttentionAccumulator` computes the statistics once the
answer is out. Rejected: explicit softmax inside the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cachecraft_rag.compute.stack import AttentionSettings
from cachecraft_rag.kernels.attention_mass import attention_mass
from cachecraft_rag.kernels.memory import empty
from cachecraft_rag.kernels.visibility import Visibility
from cachecraft_rag.planning.scoring import context_impact
from cachecraft_rag.types import KVLayout, TokenScores


@dataclass(frozen=True)
class RecordedChunk:
    """A chunk computed in one pass.

    segment      its index in the prompt
    start, stop  its positions
    kv           `[layers, 2, tokens, kv_heads, head_dim]`, raw
    queries      layer → `[tokens, heads, head_dim]`, rotated
    """

    segment: int
    start: int
    stop: int
    kv: Tensor
    queries: dict[int, Tensor]

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return self.kv.nbytes + sum(queries.nbytes for queries in self.queries.values())


class CaptureRecorder:
    """Copies raw keys and values of newly computed chunks out of the passes of one prompt and keeps their queries."""

    def __init__(self, layout: KVLayout, like: Tensor, spans: Sequence[tuple[int, int, int]]) -> None:
        """`like` gives dtype and device; `spans` are (segment, start, stop), ascending."""
        self._layout, self._like, self._spans = layout, like, spans
        self._found: dict[int, RecordedChunk] = {}
        self.settings: list[AttentionSettings] = []

    @property
    def captures(self) -> tuple[RecordedChunk, ...]:
        """The chunks that were computed through all layers, ascending."""
        whole = [capture for capture in self._found.values() if len(capture.queries) == self._layout.layers]
        return tuple(sorted(whole, key=lambda capture: capture.segment))

    def forget(self, segment: int) -> None:
        """Drop the capture of a segment, if there is one."""
        self._found.pop(segment, None)

    @property
    def missing(self) -> frozenset[int]:
        """Segments that were to be captured and were not."""
        return frozenset(segment for segment, *_ in self._spans) - {one.segment for one in self.captures}

    def with_all_heads(self, gather: Callable[[Tensor], Tensor]) -> CaptureRecorder:
        """The same of all tensor-parallel ranks on the first one; nothing on the others. All must have the same chunks.

        Args:
            gather: a collective that joins the ranks' `[…, heads, head_dim]` on the first one, and gives others none.
        """
        whole = CaptureRecorder(self._layout, self._like, self._spans)
        whole.settings = self.settings
        for one in self.captures:  # ascending: in the same order on every rank
            kv = gather(one.kv)
            queries = gather(torch.stack([one.queries[layer] for layer in range(self._layout.layers)]))
            if kv.numel():
                whole._found[one.segment] = replace(one, kv=kv.contiguous(), queries=dict(enumerate(queries)))
        return whole

    def locate(self, positions: NDArray[np.int64]) -> list[tuple[RecordedChunk, slice]]:
        """The captures among the ascending positions `[rows]` of a pass, and their rows.

        A chunk is captured only by a pass that computes all of its tokens.
        """
        rows = np.searchsorted(positions, [edge for _, *span in self._spans for edge in span]).tolist()
        found = []
        for (segment, start, stop), first, last in zip(self._spans, rows[::2], rows[1::2], strict=True):
            if last - first != stop - start:  # this pass computes some of its tokens, or none
                continue
            if segment not in self._found:
                kv = empty(self._layout.shape(stop - start), self._like.dtype, self._like.device)
                self._found[segment] = RecordedChunk(segment, start, stop, kv, {})
            found.append((self._found[segment], slice(first, last)))
        return found

    def record(
        self,
        layer: int,
        places: Sequence[tuple[RecordedChunk, slice]],
        qkv: tuple[Tensor, Tensor, Tensor],
        settings: AttentionSettings,
    ) -> None:
        """Keep one layer of the captures that `locate` found.

        Args:
            qkv: rotated queries `[rows, heads, head_dim]`, raw keys and values `[rows, kv_heads, head_dim]`.
            settings: how the layer attends.
        """
        if layer == len(self.settings):
            self.settings.append(settings)
        q, k, v = qkv
        for capture, rows in places:
            capture.kv[layer, 0] = k[rows]
            capture.kv[layer, 1] = v[rows]
            capture.queries[layer] = q[rows]


@dataclass(frozen=True)
class AttentionStatistics:
    """A capture's attention statistics; the fields are those of `types.Variant` and `types.Capture`."""

    inter: tuple[float, ...]
    intra: float
    cci: float
    token_scores: TokenScores


class AttentionAccumulator:
    """Adds up one capture's attention layer by layer, so that the work can be done in small pieces between requests.

    Args:
        capture, settings: from the recorder.
        bounds: `[segments + 1]` of the prompt; segment 0 is the system's.
    """

    def __init__(self, capture: RecordedChunk, settings: Sequence[AttentionSettings], *, bounds: Sequence[int]) -> None:
        self._capture, self._settings, self._bounds = capture, settings, list(bounds)
        device = capture.kv.device
        self._edges = torch.tensor(self._bounds[: capture.segment + 2], device=device)
        self._positions = torch.arange(capture.start, capture.stop, device=device)
        self._visible: dict[int | None, Visibility] = {}
        # The dtype is named: transformers changes the process's default while it loads another model.
        self._mass = torch.zeros(capture.stop - capture.start, capture.segment + 1, dtype=torch.float32, device=device)

    @torch.inference_mode()
    def add_layer(self, layer: int, keys: Tensor) -> None:
        """Add one layer, from the rotated `keys` `[keys, kv_heads, head_dim]` down to the capture's end."""
        use = self._settings[layer]
        visible = self._visible.setdefault(use.window, Visibility(self._positions, window=use.window))
        mass, _ = attention_mass(
            self._capture.queries[layer],
            keys[: self._capture.stop],
            visible,
            self._edges,
            scale=use.scale,
            softcap=use.softcap,
        )
        self._mass += mass

    def statistics(self) -> AttentionStatistics:
        """The averages over the layers added (eq. 10) and what follows from them."""
        mass = self._mass.cpu().numpy() / len(self._settings)  # [tokens, segments up to the capture's own]
        own = self._capture.segment
        prior = mass[:, 1:own]  # the chunks before it; the system segment is in every prompt and tells nothing
        lengths = [self._bounds[i + 1] - self._bounds[i] for i in range(1, own)]
        intra = float(mass[:, own].sum())
        cci = context_impact(
            inter=prior.sum(0).tolist(),
            prefix_tokens=lengths,
            intra=intra,
            tokens=self._capture.stop - self._capture.start,
        )
        scores = TokenScores(prior.sum(1).astype(np.float32) if own > 1 else None)
        return AttentionStatistics(tuple(mass[:, :own].sum(0).tolist()), intra, cci, scores)
