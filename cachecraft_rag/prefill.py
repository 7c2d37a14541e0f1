"""Partial prefill: compute only some rows of a prompt, over a merged K/V buffer that stored chunk-caches fill in
(§3.4.3).

MergedKV        the K/V of one request, rotated, in prompt order; decode goes on in it
RowPass         one pass of some rows through the layers: rotate, scatter, attend
FocusWatcher    measures what the question looks at, for early termination
prefill         the loop over layers that ties them together
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cachecraft_rag.births import AttentionSettings, BirthRecorder
from cachecraft_rag.focus import FocusMonitor
from cachecraft_rag.kernels.attention import RowBlock, attention, attention_mass, row_blocks
from cachecraft_rag.kernels.gather import place, scatter_rows
from cachecraft_rag.kernels.memory import empty
from cachecraft_rag.kernels.rope import rotate
from cachecraft_rag.models import Decoder


class MergedKV:
    """Keys and values of one request.

    Attributes:
        kv: `[layers, 2, capacity, kv_heads, head_dim]`: rotated keys, then values; filled up to the position computed
        last.
        cos, sin: `[capacity, rotary_dim]`, of all positions.
    """

    def __init__(self, decoder: Decoder, capacity: int) -> None:
        self.kv = empty(decoder.layout.shape(capacity), decoder.dtype, decoder.device)
        self.cos, self.sin = decoder.rope(torch.arange(capacity, device=decoder.device))

    def place(self, layer: int, chunk: Tensor, start: int) -> None:
        """Put one layer `[2, tokens, kv_heads, head_dim]` of a stored chunk-cache at its new position."""
        place(self.kv[layer], chunk, start, cos=self.cos, sin=self.sin)


class FocusWatcher:
    """Measures how much the question's rows look at each chunk, layer by layer, until the focused chunks are known."""

    def __init__(self, monitor: FocusMonitor, question: tuple[int, int], chunk_bounds: Tensor) -> None:
        self.monitor = monitor
        self._positions = torch.arange(*question, device=chunk_bounds.device)
        self._bounds = chunk_bounds
        self._blocks: dict[int | None, tuple[RowBlock, ...]] = {}

    def observe(self, layer: int, q: Tensor, k: Tensor, settings: AttentionSettings) -> None:
        """Look at one layer: rotated `q` `[rows, heads, head_dim]`, the question last, and all rotated keys `k`."""
        if self.monitor.focused is not None:
            return
        if settings.window not in self._blocks:
            self._blocks[settings.window] = row_blocks(self._positions, window=settings.window)
        mass = attention_mass(
            q[-len(self._positions) :],
            k,
            self._blocks[settings.window],
            self._positions,
            self._bounds,
            scale=settings.scale,
            softcap=settings.softcap,
        )
        self.monitor.observe(layer, mass.sum(0).tolist())


class RowPass:
    """The rows of one pass and what their attention does in every layer."""

    def __init__(
        self,
        merged: MergedKV,
        positions: Tensor,
        *,
        recorder: BirthRecorder | None = None,
        watcher: FocusWatcher | None = None,
    ) -> None:
        self._merged, self._recorder, self._watcher = merged, recorder, watcher
        self._narrow(positions)

    def _narrow(self, positions: Tensor) -> None:
        self.positions = positions
        self._cos, self._sin = self._merged.cos[positions], self._merged.sin[positions]
        self._blocks: dict[int | None, tuple[RowBlock, ...]] = {}
        if self._recorder is not None:
            self._recorder.locate(positions)

    def keep(self, rows: Tensor) -> None:
        """Go on with fewer rows: `rows` is a bool mask over the present ones."""
        self._narrow(self.positions[rows])

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """See `models.LayerPass`."""
        if window not in self._blocks:
            self._blocks[window] = row_blocks(self.positions, window=window)
        merged, settings = self._merged.kv[layer], AttentionSettings(scale, window, softcap)
        queries = rotate(q, self._cos, self._sin)
        scatter_rows(merged, rotate(k, self._cos, self._sin), v, self.positions)
        if self._recorder is not None:
            self._recorder.record(layer, queries, k, v, settings)
        if self._watcher is not None:
            self._watcher.observe(layer, queries, merged[0], settings)
        return attention(queries, merged[0], merged[1], self._blocks[window], scale=scale, softcap=softcap)


@dataclass(frozen=True)
class Reused:
    """A stored chunk-cache and the place it takes in this prompt: `kv` `[layers, 2, tokens, kv_heads, head_dim]`."""

    start: int
    kv: Tensor


@dataclass(frozen=True)
class PrefillInput:
    """What a partial prefill computes and what it takes over.

    token_ids    of the whole prompt
    bounds       `[segments + 1]` positions; the first segment is the system's, the last the question's
    positions    ascending positions to compute in the first layer; the question's are among them
    reused       chunk-caches that fill the other positions
    owners       for each of `positions` the segment whose recomputation may be ended early, or -1
    births       indices of the segments to record
    capacity     positions to make room for: the prompt and the answer
    """

    token_ids: Sequence[int]
    bounds: Sequence[int]
    positions: Sequence[int]
    reused: Sequence[Reused] = ()
    owners: Sequence[int] = ()
    births: Sequence[int] = ()
    capacity: int = 0


@dataclass(frozen=True)
class PrefillOutput:
    """`logits` `[vocabulary]` of the last position, the buffer to decode in, and the recorded births (perhaps none)."""

    logits: Tensor
    merged: MergedKV
    recorder: BirthRecorder
    monitor: FocusMonitor | None
    row_layers: int  # rows computed, summed over layers: what early termination saves is seen here


@torch.inference_mode()
def prefill(
    decoder: Decoder, work: PrefillInput, *, monitor: FocusMonitor | None = None, logits_to_keep: int = 1
) -> PrefillOutput:
    """Run the rows of `work` through all layers.

    Args:
        monitor: early termination (§3.2.2); its chunks are the segments between the first and the last.
        logits_to_keep: so many last rows' logits are returned, `[keep, vocabulary]`, when it is not 1.
    """
    device = decoder.device
    positions = torch.tensor(work.positions, device=device)
    ids = torch.tensor(work.token_ids, device=device)[positions]
    merged = MergedKV(decoder, max(work.capacity, work.bounds[-1]))
    spans = [(i, work.bounds[i], work.bounds[i + 1]) for i in work.births]
    recorder = BirthRecorder(decoder.layout, merged.kv, spans)
    watcher = None
    if monitor is not None:
        chunk_bounds = torch.tensor(work.bounds[1:-1], device=device)
        watcher = FocusWatcher(monitor, (work.bounds[-2], work.bounds[-1]), chunk_bounds)
    rows = RowPass(merged, positions, recorder=recorder, watcher=watcher)
    hidden, row_layers = decoder.embed(ids), 0
    for layer in range(decoder.layout.layers):
        for reused in work.reused:
            merged.place(layer, reused.kv[layer], reused.start)
        hidden = decoder.layer(layer, hidden, positions=rows.positions, layer_pass=rows)
        row_layers += len(rows.positions)
        if monitor is not None and monitor.layer == layer:  # decided just now
            keep = _focused_rows(work, monitor, device)
            rows.keep(keep)
            hidden = hidden[:, keep]
    logits = decoder.logits(hidden[:, -logits_to_keep:])
    return PrefillOutput(logits[0] if logits_to_keep == 1 else logits, merged, recorder, monitor, row_layers)


def _focused_rows(work: PrefillInput, monitor: FocusMonitor, device: torch.device) -> Tensor:
    """bool `[rows]`: everything but the recomputed tokens of unfocused chunks."""
    focused = {chunk + 1 for chunk in monitor.focused or ()}  # the monitor counts chunks, `owners` segments
    return torch.tensor([owner < 0 or owner in focused for owner in work.owners], device=device)


@torch.inference_mode()
def decode_step(decoder: Decoder, merged: MergedKV, token: int, position: int) -> Tensor:
    """Logits `[vocabulary]` after one more token at `position`, whose K/V join the buffer."""
    where = torch.tensor([position], device=decoder.device)
    rows = RowPass(merged, where)
    hidden = decoder.embed(torch.tensor([token], device=decoder.device))
    for layer in range(decoder.layout.layers):
        hidden = decoder.layer(layer, hidden, positions=where, layer_pass=rows)
    return decoder.logits(hidden)[0]
