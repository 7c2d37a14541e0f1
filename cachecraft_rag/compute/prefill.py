"""Partial prefill: compute only some rows of a prompt, over a merged K/V buffer that stored chunk-caches fill in
(§3.4.3).

MergedKV        the K/V of one request, rotated, in prompt order; decode goes on in it
Watcher         sees each layer's queries and keys: for early termination, or to choose tokens
RowPass         one pass of some rows through the layers: rotate, correct, scatter, attend
PartialPrefill  the passes of one prompt: pieces from the front, then the last one with the question
Supply          what fills the positions that a pass does not compute, layer by layer
prefill         one pass with everything at hand
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from cachecraft_rag.compute.capture import AttentionSettings, CaptureRecorder
from cachecraft_rag.compute.drift_correction import Drift
from cachecraft_rag.engine.decoder import Decoder
from cachecraft_rag.kernels.attention import RowBlock, attention, attention_mass, row_blocks
from cachecraft_rag.kernels.gather import place, scatter_rows
from cachecraft_rag.kernels.memory import empty
from cachecraft_rag.kernels.rope import rotate
from cachecraft_rag.planning.early_termination import FocusMonitor


class MergedKV:
    """Keys and values of one request.

    Attributes:
        kv: `[layers, 2, capacity, kv_heads, head_dim]`: rotated keys, then values; filled up to the position computed
        last.
        cos, sin: `[capacity, rotary_dim]`, of all positions.
    """

    def __init__(self, decoder: Decoder, capacity: int) -> None:
        self.kv = empty(decoder.layout.shape(capacity), decoder.dtype, decoder.device)
        self._device = decoder.device
        self.cos, self.sin = decoder.rope(torch.arange(capacity, device=decoder.device))

    def place(self, layer: int, chunk: Tensor, start: int, *, rotated_from: int | None = None) -> None:
        """Put one layer `[2, tokens, kv_heads, head_dim]` of a stored chunk-cache at its new position.

        `rotated_from`: where its keys shall believe to begin, if that is another position.
        """
        shift = 0 if rotated_from is None else start - rotated_from
        cos, sin = self.cos.roll(shift, 0) if shift else self.cos, self.sin.roll(shift, 0) if shift else self.sin
        place(self.kv[layer], chunk.to(self._device, non_blocking=True), start, cos=cos, sin=sin)


class Watcher(Protocol):
    """Sees what a pass attends to, layer by layer."""

    def observe(self, layer: int, q: Tensor, k: Tensor, settings: AttentionSettings) -> None:
        """Look at one layer: rotated `q` `[rows, heads, head_dim]` of the pass, and all rotated keys `k`."""
        ...


class FocusWatcher:
    """Measures how much the question's rows look at each chunk, layer by layer, until the focused chunks are known."""

    def __init__(self, monitor: FocusMonitor, question: tuple[int, int], chunk_bounds: Tensor) -> None:
        self.monitor = monitor
        self._positions = torch.arange(*question, device=chunk_bounds.device)
        self._bounds = chunk_bounds
        self._blocks: dict[int | None, tuple[RowBlock, ...]] = {}

    def observe(self, layer: int, q: Tensor, k: Tensor, settings: AttentionSettings) -> None:
        """See `Watcher.observe`; the question's rows are the last ones."""
        if self.monitor.focused is not None:
            return
        if settings.window not in self._blocks:
            self._blocks[settings.window] = row_blocks(self._positions, window=settings.window)
        mass, _ = attention_mass(
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
        recorder: CaptureRecorder | None = None,
        watcher: Watcher | None = None,
        drift: Drift | None = None,
        absent: Tensor | None = None,
    ) -> None:
        self._merged, self.recorder, self._watcher = merged, recorder, watcher
        self._drift, self.absent = drift, absent
        self.move_to(positions)

    def move_to(self, positions: Tensor) -> None:
        """Go on with other rows, at these ascending positions `[rows]`."""
        self.positions = positions
        self._cos, self._sin = self._merged.cos[positions], self._merged.sin[positions]
        self._blocks: dict[int | None, tuple[RowBlock, ...]] = {}
        self._captures = self.recorder.locate(positions) if self.recorder is not None else []
        if self._drift is not None:
            self._drift.locate(positions)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """See `models.LayerPass`."""
        if window not in self._blocks:
            self._blocks[window] = row_blocks(self.positions, window=window, absent=self.absent)
        merged, settings = self._merged.kv[layer], AttentionSettings(scale, window, softcap)
        queries, keys = rotate(q, self._cos, self._sin), rotate(k, self._cos, self._sin)
        if self._drift is not None:
            self._drift.correct(merged, keys, v)
        scatter_rows(merged, keys, v, self.positions)
        if self.recorder is not None:
            self.recorder.record(layer, self._captures, (queries, k, v), settings)
        if self._watcher is not None:
            self._watcher.observe(layer, queries, merged[0], settings)
        return attention(queries, merged[0], merged[1], self._blocks[window], scale=scale, softcap=softcap)


@dataclass(frozen=True)
class Reused:
    """A stored chunk-cache and the place it takes in this prompt: `kv` `[layers, 2, tokens, kv_heads, head_dim]`.

    `rotated_from` is where its keys shall believe to begin: elsewhere in an ablation only.
    """

    start: int
    kv: Tensor
    rotated_from: int | None = None


class Supply(Protocol):
    """What fills the positions that a pass does not compute."""

    def place(self, layer: int, merged: MergedKV) -> Sequence[int]:
        """Put what belongs to `layer` into `merged`, waiting for it where it must.

        Returns ascending positions to be computed from here on, because they will not come (in time).
        """
        ...


@dataclass(frozen=True)
class AtHand:
    """A supply that is all there."""

    reused: Sequence[Reused]

    def place(self, layer: int, merged: MergedKV) -> Sequence[int]:
        """See `Supply.place`."""
        for reused in self.reused:
            merged.place(layer, reused.kv[layer], reused.start, rotated_from=reused.rotated_from)
        return ()


@dataclass(frozen=True)
class PrefillInput:
    """What a partial prefill computes and what it takes over.

    token_ids    of the whole prompt
    bounds       `[segments + 1]` positions; the first segment is the system's, the last the question's
    positions    ascending positions to compute in the first layer; the question's are among them
    reused       chunk-caches that fill the other positions
    owners       for each of `positions` the segment whose recomputation may be ended early, or -1
    captures       indices of the segments to record
    capacity     positions to make room for: the prompt and the answer
    """

    token_ids: Sequence[int]
    bounds: Sequence[int]
    positions: Sequence[int]
    reused: Sequence[Reused] = ()
    owners: Sequence[int] = ()
    captures: Sequence[int] = ()
    capacity: int = 0


@dataclass(frozen=True)
class PrefillOutput:
    """`logits` `[vocabulary]` of the last position, the buffer to decode in, and the recorded captures (perhaps none)."""

    logits: Tensor
    merged: MergedKV
    recorder: CaptureRecorder
    monitor: FocusMonitor | None
    row_layers: int  # rows computed, summed over passes and layers: what early termination saves is seen here


class PartialPrefill:
    """The prefill of one prompt, in one or several passes over one buffer.

    Passes may be run at any time and from any thread, one after the other. A row sees all positions before its own, so
    they have to be computed or placed by then, in the same pass or in one before.
    """

    def __init__(
        self,
        decoder: Decoder,
        token_ids: Sequence[int],
        bounds: Sequence[int],
        *,
        captures: Sequence[int] = (),
        capacity: int = 0,
    ) -> None:
        """Make room; arguments as in `PrefillInput`."""
        self._decoder, self._bounds = decoder, bounds
        self._ids = torch.tensor(token_ids, device=decoder.device)
        self.merged = MergedKV(decoder, max(capacity, bounds[-1]))
        spans = [(i, bounds[i], bounds[i + 1]) for i in captures]
        self.recorder = CaptureRecorder(decoder.layout, self.merged.kv, spans)
        self.row_layers = 0

    @property
    def layers(self) -> int:
        """Of the model."""
        return self._decoder.layout.layers

    @torch.inference_mode()
    def compute(self, positions: Sequence[int], supply: Supply, *, drift: Drift | None = None) -> None:
        """Run rows at these ascending positions through all layers; nothing is asked of them but their K/V."""
        self._run(RowPass(self.merged, self._where(positions), recorder=self.recorder, drift=drift), supply)

    @torch.inference_mode()
    def look(
        self,
        positions: Sequence[int],
        supply: Supply,
        *,
        layers: int,
        watcher: Watcher | None = None,
        absent: Sequence[int] = (),
    ) -> None:
        """Run rows through the first `layers` layers only, to see something; a later pass computes them again.

        `absent` are positions that hold nothing yet: no row sees them.
        """
        missing = self._where(absent) if absent else None
        if missing is not None:
            self.merged.kv[:layers, :, missing] = 0  # whatever memory held could be no number
        self._run(RowPass(self.merged, self._where(positions), watcher=watcher, absent=missing), supply, layers=layers)

    @torch.inference_mode()
    def finish(
        self,
        positions: Sequence[int],
        supply: Supply,
        *,
        owners: Mapping[int, int] = MappingProxyType({}),
        monitor: FocusMonitor | None = None,
        edge: int = 0,
        drift: Drift | None = None,
        logits_to_keep: int = 1,
    ) -> PrefillOutput:
        """Run the last pass, the question's rows among its ascending positions.

        Args:
            owners: position → the segment whose recomputation may be ended early; read when that is decided.
            monitor: early termination (§3.2.2); its chunks are the segments between the first and the last.
            edge: no row before this position is ended early.
            drift: how tokens that are not computed follow those that are.
            logits_to_keep: so many last rows' logits are returned, `[keep, vocabulary]`, when it is not 1.
        """
        watcher = None
        if monitor is not None:
            chunk_bounds = torch.tensor(self._bounds[1:-1], device=self._decoder.device)
            watcher = FocusWatcher(monitor, (self._bounds[-2], self._bounds[-1]), chunk_bounds)
        rows = RowPass(self.merged, self._where(positions), recorder=self.recorder, watcher=watcher, drift=drift)
        hidden = self._run(rows, supply, monitor=monitor, owners=owners, edge=edge)
        logits = self._decoder.logits(hidden[:, -logits_to_keep:])
        logits = logits[0] if logits_to_keep == 1 else logits
        return PrefillOutput(logits, self.merged, self.recorder, monitor, self.row_layers)

    def _where(self, positions: Sequence[int]) -> Tensor:
        return torch.tensor(positions, device=self._decoder.device)

    def _run(
        self,
        rows: RowPass,
        supply: Supply,
        *,
        layers: int | None = None,
        monitor: FocusMonitor | None = None,
        owners: Mapping[int, int] = MappingProxyType({}),
        edge: int = 0,
    ) -> Tensor:
        hidden = self._decoder.embed(self._ids[rows.positions])
        for layer in range(layers or self.layers):
            if late := supply.place(layer, self.merged):
                hidden = self._join(rows, hidden, late, layer)
            hidden = self._layer(layer, hidden, rows)
            if monitor is not None and monitor.layer == layer:  # decided just now
                keep = _focused_rows(rows.positions, owners, monitor) | (rows.positions < edge)
                rows.move_to(rows.positions[keep])
                hidden = hidden[:, keep]
        return hidden

    def _layer(self, layer: int, hidden: Tensor, rows: RowPass) -> Tensor:
        self.row_layers += len(rows.positions)
        return self._decoder.layer(layer, hidden, positions=rows.positions, layer_pass=rows)

    def _join(self, rows: RowPass, hidden: Tensor, late: Sequence[int], layer: int) -> Tensor:
        """Bring more rows up to `layer` and in among the others; returns all hidden states `[1, rows, hidden]`.

        In the layers below, everything is at hand, or the pass would not have come to this one.
        """
        where = self._where(late)
        catching_up = RowPass(self.merged, where, recorder=rows.recorder, absent=rows.absent)
        more = self._decoder.embed(self._ids[where])
        for below in range(layer):
            more = self._layer(below, more, catching_up)
        positions, order = torch.cat((rows.positions, where)).sort()
        rows.move_to(positions)
        return torch.cat((hidden, more), dim=1)[:, order]


def prefill(
    decoder: Decoder, work: PrefillInput, *, monitor: FocusMonitor | None = None, logits_to_keep: int = 1
) -> PrefillOutput:
    """Run the rows of `work` through all layers, in one pass; `monitor` and `logits_to_keep` as in `finish`."""
    passes = PartialPrefill(decoder, work.token_ids, work.bounds, captures=work.captures, capacity=work.capacity)
    owners = dict(zip(work.positions, work.owners, strict=False))
    return passes.finish(
        work.positions, AtHand(work.reused), owners=owners, monitor=monitor, logits_to_keep=logits_to_keep
    )


def _focused_rows(positions: Tensor, owners: Mapping[int, int], monitor: FocusMonitor) -> Tensor:
    """bool `[rows]`: everything but the recomputed tokens of unfocused chunks."""
    focused = {chunk + 1 for chunk in monitor.focused or ()}  # the monitor counts chunks, `owners` segments
    dropped = [position for position, owner in owners.items() if owner >= 0 and owner not in focused]
    return ~torch.isin(positions, positions.new_tensor(dropped))


@torch.inference_mode()
def decode_along(decoder: Decoder, merged: MergedKV, tokens: Sequence[int], position: int) -> Tensor:
    """Logits `[tokens, vocabulary]` after each of these tokens, the first at `position`; their K/V join the buffer."""
    where = torch.arange(position, position + len(tokens), device=decoder.device)
    rows = RowPass(merged, where)
    hidden = decoder.embed(torch.tensor(tokens, device=decoder.device))
    for layer in range(decoder.layout.layers):
        hidden = decoder.layer(layer, hidden, positions=where, layer_pass=rows)
    return decoder.logits(hidden)


def decode_step(decoder: Decoder, merged: MergedKV, token: int, position: int) -> Tensor:
    """Logits `[vocabulary]` after one more token at `position`, whose K/V join the buffer."""
    return decode_along(decoder, merged, [token], position)[0]
