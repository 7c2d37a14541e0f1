"""Captures: newly computed chunks, recorded during a pass and described after it.

A capture is stored with its raw keys and values and with the attention statistics that the planner needs later (eq. 3,
4, 9–11 and the token scores of eq. 14). Statistics need attention weights, which fast attention kernels never
form. On a CPU the pass keeps the queries of captured chunks, and an `AttentionAccumulator` computes the statistics once
the answer is out. Rejected there: explicit softmax inside the pass. On a GPU the attention kernel adds up the weights
while it runs, and no queries are kept: they take twice as much memory as keys and values, and a second sweep over all
keys would take time from other requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cachecraft_rag.compute.stack import AttentionSettings
from cachecraft_rag.kernels.attention_mass import segment_mass
from cachecraft_rag.kernels.memory import empty, to_host
from cachecraft_rag.kernels.visibility import Visibility
from cachecraft_rag.planning.scoring import context_impact
from cachecraft_rag.types.captures import TokenScores
from cachecraft_rag.types.kv_layout import KVLayout


@dataclass(frozen=True)
class RecordedChunk:
    """A chunk computed in one pass.

    segment  index of its segment in the prompt
    start    its first position
    stop     the position after its last
    kv       `[layers, 2, tokens, kv_heads, head_dim]`, raw keys and values
    layers   layers recorded so far
    queries  layer → `[tokens, heads, head_dim]`, rotated
    mass     float32 `[tokens, segments up to its own]`, the attention of its tokens as returned by `attention_mass`,
             summed over the recorded layers. None if the pass keeps queries instead of measuring attention
    """

    segment: int
    start: int
    stop: int
    kv: Tensor
    layers: set[int] = field(default_factory=set)
    queries: dict[int, Tensor] = field(default_factory=dict)
    mass: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Memory of the tensors of this capture, in bytes; it grows while queries are kept."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Return the tensors that this capture holds itself: `kv`, `mass` if it was measured, and the queries."""
        mass = () if self.mass is None else (self.mass,)
        return [self.kv, *mass, *self.queries.values()]


class CaptureRecorder:
    """Copies raw keys and values of newly computed chunks out of the passes of one prompt.

    It also keeps their queries, or adds up their attention. A capture is complete once all layers are recorded;
    `settings` are the attention settings of the layers so far.

    Args:
        layout: layout of a chunk-cache.
        like: a tensor with the dtype and device of the recorded keys and values.
        spans: (segment, start, stop) of each chunk to capture, ascending.
        measured: `[segments + 1]`, segment bounds of the prompt, if the passes measure attention and call `add_mass`;
            None if queries are kept instead.
    """

    def __init__(
        self,
        layout: KVLayout,
        like: Tensor,
        spans: Sequence[tuple[int, int, int]],
        *,
        measured: Sequence[int] | None = None,
    ) -> None:
        """Make a recorder for these chunks."""
        self._measured = measured
        self._layout = layout
        self._like = like
        self._spans = spans
        self._recorded: dict[int, RecordedChunk] = {}  # by segment
        self.settings: list[AttentionSettings] = []

    @property
    def captures(self) -> tuple[RecordedChunk, ...]:
        """The complete captures that were not forgotten, in prompt order; () without any."""
        complete = [
            capture
            for capture in self._recorded.values()
            if len(capture.layers) == self._layout.layers
        ]
        return tuple(sorted(complete, key=lambda capture: capture.segment))

    def forget(self, segment: int) -> None:
        """Drop the capture of a segment; does nothing without one. A later pass may capture the segment again."""
        self._recorded.pop(segment, None)

    def move_to_host(self) -> None:
        """Move the keys and values of complete captures from a GPU to main memory, page-locked if there is room."""
        for capture in self.captures:
            kv = to_host(capture.kv, pinned=True)
            self._recorded[capture.segment] = replace(capture, kv=kv)

    @property
    def missing(self) -> frozenset[int]:
        """Indices of the segments that should have been captured and are not among `captures`; empty if all are."""
        wanted = frozenset(segment for segment, _start, _stop in self._spans)
        return wanted - {capture.segment for capture in self.captures}

    @property
    def needs_keys(self) -> bool:
        """True if queries are kept, and captures are described later with the keys of the whole prompt."""
        return self._measured is None

    def with_all_heads(
        self, gather: Callable[[Tensor], Tensor], mean: Callable[[Tensor], Tensor]
    ) -> CaptureRecorder:
        """Return a recorder with the heads of all tensor-parallel ranks on the first rank; it is empty on other ranks.

        Only complete captures are joined. Every rank must have recorded the same chunks, and calls this at the same
        time. The collectives: `gather` joins the ranks' `[…, heads, head_dim]` on the first rank and returns no heads
        on others, `mean` averages a statistic.
        """
        joined = CaptureRecorder(self._layout, self._like, self._spans, measured=self._measured)
        joined.settings = self.settings
        if self.needs_keys:  # otherwise the passes have measured, each with its own sinks
            joined.settings = [
                settings
                if settings.sinks is None
                else replace(settings, sinks=gather(settings.sinks[:, None])[:, 0])
                for settings in self.settings
            ]
        for capture in self.captures:  # ascending: in the same order on every rank
            kv = gather(capture.kv.to(self._like.device))
            if capture.kv.device != kv.device:
                kv = to_host(kv, pinned=True)
            mass = None if capture.mass is None else mean(capture.mass)
            queries: dict[int, Tensor] = {}
            if mass is None:
                layers = range(self._layout.layers)
                stacked = torch.stack([capture.queries[layer] for layer in layers])
                queries = dict(enumerate(gather(stacked)))
            if kv.numel():
                joined._recorded[capture.segment] = replace(
                    capture, kv=kv.contiguous(), queries=queries, mass=mass
                )
        return joined

    def locate(self, positions: NDArray[np.int64]) -> list[tuple[RecordedChunk, slice]]:
        """Return the captures among the ascending positions of a pass, int64 `[rows]`, each with a slice of the rows.

        A chunk is captured only by a pass that computes all of its tokens. New captures get their memory here.
        """
        edges = [edge for _segment, start, stop in self._spans for edge in (start, stop)]
        edge_rows = np.searchsorted(positions, edges).tolist()

        places: list[tuple[RecordedChunk, slice]] = []
        spans_with_rows = zip(self._spans, edge_rows[::2], edge_rows[1::2], strict=True)
        for (segment, start, stop), first_row, end_row in spans_with_rows:
            # this pass computes some of its tokens, or none
            if end_row - first_row != stop - start:
                continue
            if segment not in self._recorded:
                kv = empty(self._layout.shape(stop - start), self._like.dtype, self._like.device)
                mass = None
                if self._measured is not None:
                    # Explicit dtype: transformers changes the process's default while it loads another model.
                    mass = torch.zeros(
                        stop - start, segment + 1, dtype=torch.float32, device=kv.device
                    )
                self._recorded[segment] = RecordedChunk(segment, start, stop, kv, mass=mass)
            places.append((self._recorded[segment], slice(first_row, end_row)))
        return places

    def record(
        self,
        layer: int,
        places: Sequence[tuple[RecordedChunk, slice]],
        qkv: tuple[Tensor, Tensor, Tensor],
        settings: AttentionSettings,
    ) -> None:
        """Keep one layer of the captures that `locate` has returned, in place of what was kept of it.

        `qkv` are rotated queries `[rows, heads, head_dim]`, raw keys and values `[rows, kv_heads, head_dim]`. Keys and
        values are copied; queries are kept as views, unless the passes measure attention. Then a layer is complete only
        after `add_mass`.
        """
        if layer == len(self.settings):
            self.settings.append(settings)
        queries, keys, values = qkv
        for capture, rows in places:
            capture.kv[layer, 0] = keys[rows]
            capture.kv[layer, 1] = values[rows]
            if capture.mass is None:
                capture.queries[layer] = queries[rows]
                capture.layers.add(layer)

    def edges(self, places: Sequence[tuple[RecordedChunk, slice]]) -> Tensor | None:
        """Return the bounds of the segments of which a pass measures these rows' attention; None if it measures none.

        int64 `[segments + 1]`, from the system's segment to the last capture's.
        """
        if self._measured is None or not places:
            return None
        last = max(capture.segment for capture, _rows in places)
        return torch.tensor(list(self._measured[: last + 2]), device=self._like.device)

    def add_mass(
        self, layer: int, places: Sequence[tuple[RecordedChunk, slice]], mass: Tensor
    ) -> None:
        """Add the attention measured in one layer, float32 `[rows, segments of edges]`; a repeated layer is ignored."""
        for capture, rows in places:
            if capture.mass is not None and layer not in capture.layers:
                capture.mass.add_(mass[rows, : capture.segment + 1])
                capture.layers.add(layer)


@dataclass(frozen=True)
class AttentionStatistics:
    """A capture's attention statistics; the fields are those of `Variant` and `Capture`."""

    inter: tuple[float, ...]
    intra: float
    cci: float
    token_scores: TokenScores


class AttentionAccumulator:
    """Adds up one capture's attention layer by layer, so that the work can be done in small pieces between requests.

    If the pass has measured the attention, do not call `add_layer`.

    Args:
        capture: the recorded chunk.
        settings: attention settings of each layer, from the recorder.
        bounds: `[segments + 1]`, segment bounds of the prompt; segment 0 is the system's.
    """

    def __init__(
        self,
        capture: RecordedChunk,
        settings: Sequence[AttentionSettings],
        *,
        bounds: Sequence[int],
    ) -> None:
        self._capture = capture
        self._settings = settings
        self._bounds = list(bounds)

        device = capture.kv.device
        self._edges = torch.tensor(self._bounds[: capture.segment + 2], device=device)
        self._positions = torch.arange(capture.start, capture.stop, device=device)
        self._visible: dict[int | None, Visibility] = {}
        # Explicit dtype: see `CaptureRecorder.locate`.
        self._mass = (
            torch.zeros(
                capture.stop - capture.start,
                capture.segment + 1,
                dtype=torch.float32,
                device=device,
            )
            if capture.mass is None
            else capture.mass
        )

    @torch.inference_mode()
    def add_layer(self, layer: int, keys: Tensor) -> None:
        """Add one layer, once, with its rotated keys `[keys, kv_heads, head_dim]`, to the capture's end at least."""
        settings = self._settings[layer]
        visible = self._visible.setdefault(
            settings.window, Visibility(self._positions, window=settings.window)
        )
        mass = segment_mass(
            self._capture.queries[layer],
            keys[: self._capture.stop],
            visible,
            self._edges,
            scale=settings.scale,
            softcap=settings.softcap,
            sinks=settings.sinks,
        )
        self._mass += mass

    def statistics(self) -> AttentionStatistics:
        """Return averages over all layers of `settings` (eq. 10), once they are added, and scores derived from them.

        `inter` has one value for each segment before the capture, beginning with that of the system. The token scores
        are unknown (`inter` None) if no chunk precedes the capture. On a GPU it waits for the work that this thread has
        launched.
        """
        # [tokens, segments up to the capture's]
        mass = self._mass.cpu().numpy() / len(self._settings)
        segment = self._capture.segment
        prior = mass[:, 1:segment]  # the chunks before it; the system segment is in every prompt
        lengths = [self._bounds[i + 1] - self._bounds[i] for i in range(1, segment)]
        intra = float(mass[:, segment].sum())
        cci = context_impact(
            inter=prior.sum(0).tolist(),
            prefix_tokens=lengths,
            intra=intra,
            tokens=self._capture.stop - self._capture.start,
        )
        scores = TokenScores(prior.sum(1).astype(np.float32) if segment > 1 else None)
        inter = tuple(mass[:, :segment].sum(0).tolist())
        return AttentionStatistics(inter, intra, cci, scores)
