"""Chunk-caches of a prompt still to be loaded: shared by the readers and the pass that may compute them instead.

Both work on one list of extents under one lock. Readers take extents from the back, the front takes tokens from the
first extent that is not complete; what either has taken the other leaves alone. An extent that the front takes whole
while it is being read is dropped when its layer is through.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol, Self

import torch
from torch import Tensor

from cachecraft_rag.store.codecs.base import ONE_THREAD
from cachecraft_rag.store.layout import READ_ERRORS, StoredVariant, unreadable
from cachecraft_rag.store.loading.rate import Meter
from cachecraft_rag.types import LoadFailure, Unavailable

# From the back, extents are read together: a read of few bytes costs the computing cores as much as one of many.
_RUN = 4
_PARTS = 4  # but no more than this part of what is left at once: near the front, every extent counts


class KVSink(Protocol):
    """Destination of loaded chunk-caches."""

    def place(self, layer: int, chunk: Tensor, start: int) -> None:
        """Take over one layer `[2, tokens, kv_heads, head_dim]`, raw keys and values, at position `start`."""


@dataclass(eq=False, slots=True)
class Extent:
    """A stretch of one stored chunk-cache.

    start        position in the prompt of the chunk's first token
    first, last  the extent's tokens, counted in the chunk; `last` is behind them
    taken        how many of them, from the first on, are computed instead
    layers       how many layers are there, from the first on
    lost         reason why the rest failed to load, or None
    kept         whether memory keeps the chunk-cache when it has come whole
    waiting      of what memory does not keep: how many first layers came before there was a place for them
    """

    stored: StoredVariant
    start: int
    first: int
    last: int
    taken: int = 0
    layers: int = 0
    busy: bool = False
    placed: bool = False
    lost: Unavailable | None = None
    kept: bool = True
    waiting: int = 0

    @property
    def positions(self) -> range:
        """Positions in the prompt of the tokens that are not computed."""
        return range(self.start + self.first + self.taken, self.start + self.last)

    def adjoins(self, other: Extent) -> bool:
        """True if both are one stretch of a chunk, wanted as a whole, with equally many layers there."""
        if self.stored is not other.stored or self.layers != other.layers:
            return False
        return (other.last == self.first and not self.taken) or (self.last == other.first and not other.taken)


@dataclass(frozen=True, slots=True)
class _Read:
    """Adjoining extents of one chunk, and the layer of them to be read.

    own  where in the chunk-cache's tensor it goes; None = into memory of the reader, and from there to its place
    """

    extents: Sequence[Extent]
    layer: int
    own: Tensor | None


@dataclass
class PendingLoads:
    """The extents of one request, in prompt order. Every method may be called from any thread.

    meter        of what comes
    layer_first  True: layer by layer, in few large reads; False: whole extents, while a front is computed. Both from
                 the back.
    reads        how many have ended: while this stands still, nothing comes
    waited_s     seconds spent in `wait`
    on_change    called by readers whenever something has come, or will not come any more
    """

    layers: int
    extents: Sequence[Extent]
    meter: Meter
    layer_first: bool = True
    reads: int = 0
    waited_s: float = 0.0
    on_change: Callable[[], object] | None = None
    _closed: bool = False
    _sink: KVSink | None = None
    # Taken by itself and not through the condition, whose `__exit__` is Python: Ctrl-C in its first line would lose it.
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _changed: threading.Condition = field(init=False)

    def __post_init__(self) -> None:
        self._changed = threading.Condition(self._lock)

    @classmethod
    def of_nothing(cls, layers: int) -> Self:
        """For a request that has everything at hand."""
        return cls(layers, (), Meter(None))

    # -- for the threads that read ------------------------------------------------------------------------------------

    def read(self) -> None:
        """Read until nothing is left to be read; several threads may run this at once."""
        scratch: Tensor | None = None
        while (job := self._next()) is not None:
            extents, layer, out = job.extents, job.layer, job.own
            stored = extents[0].stored
            lost: Unavailable | None = Unavailable(
                stored.variant.variant_id, LoadFailure.UNREADABLE, "reading it failed"
            )
            nbytes = stored.token_bytes * (extents[-1].last - extents[0].first) / self.layers
            self.meter.begin(nbytes)
            started = time.thread_time()
            try:
                if out is None:  # the disk's copy of what a remote sends is made of the buffers that it filled
                    old = None if stored.sequential else scratch
                    out = scratch = stored.scratch(extents[-1].last - extents[0].first, old)
                stored.read(layer, extents[0].first, extents[-1].last, out=out)
                lost = None
            except READ_ERRORS as error:
                lost = unreadable(stored.variant.variant_id, error)
            finally:  # whatever happens, no pass may wait for this extent any longer
                self.meter.end(nbytes, came=lost is None, cpu_s=time.thread_time() - started)
                self._note(job, lost, out)

    def _note(self, job: _Read, lost: Unavailable | None, out: Tensor | None) -> None:
        extents = job.extents
        with self._lock:  # nothing may be taken to be computed while its stored values are being placed
            self.reads += 1
            if lost is None and out is not None and self._sink is not None and not extents[0].kept:
                try:
                    self._put(job, out, self._sink)
                except READ_ERRORS as error:
                    lost = unreadable(extents[0].stored.variant.variant_id, error)
            for extent in extents:
                extent.busy = False
                extent.layers += lost is None
            if lost is not None and not self._closed and any(extent.positions for extent in extents):
                self._lose(extents[0].stored, lost)
            self._changed.notify_all()
        if self.on_change is not None:
            self.on_change()

    def _put(self, job: _Read, out: Tensor, sink: KVSink) -> None:
        """Place tokens just read, except those taken to be computed."""
        step = max(1, ONE_THREAD // max(1, out[0, 0].numel()))  # see `codecs.base.stretches`
        with torch.inference_mode():
            for extent in job.extents:
                begin = extent.start + job.extents[0].first  # position of the first token of `out`
                where = extent.positions
                for first in range(where.start, where.stop, step):
                    last = min(first + step, where.stop)
                    sink.place(job.layer, out[:, first - begin : last - begin], first)

    def fail(self, code: LoadFailure, reason: str) -> None:
        """Mark everything incomplete as failed, when nothing is being read."""
        with self._lock:
            for extent in self.extents:
                self._lose(extent.stored, Unavailable(extent.stored.variant.variant_id, code, reason))
            self._changed.notify_all()
        if self.on_change is not None:
            self.on_change()

    def _next(self) -> _Read | None:
        with self._lock:
            left = list(self._incomplete())
            free = [extent for extent in left if not extent.busy]
            if not left:
                self.meter.stop()
            if self._closed or not free:
                return None
            if self.layer_first:
                first = min(extent.layers for extent in free)  # from the back: a front may still be computed
                chosen = next(_runs(one for one in reversed(free) if one.layers == first))[::-1]
            else:
                most = max(1, min(_RUN, len(free) // _PARTS))
                chosen = next(_runs(free[: -most - 1 : -1]))[::-1]
            chosen = chosen[-((len(left) + 1) // 2) :]  # at most half of what is left: both readers share a layer
            if not (self.reads or self.meter.warm):
                chosen = chosen[-1:]  # the less is asked for, the sooner it is known how fast it comes
            for extent in chosen:
                extent.busy = True
            layer, stored = chosen[0].layers, chosen[0].stored
            if not chosen[0].kept and self._sink is not None:
                return _Read(chosen, layer, None)
            return _Read(chosen, layer, stored.own(layer, chosen[0].first, chosen[-1].last))

    def _lose(self, stored: StoredVariant, lost: Unavailable) -> None:
        """Mark the rest of this chunk as lost; complete, verified extents stay good."""
        for extent in self.extents:
            if extent.stored is stored and extent.layers < self.layers:
                extent.lost = lost

    # -- for the pass that computes -----------------------------------------------------------------------------------

    def send_to(self, sink: KVSink) -> None:
        """From now on readers place what memory does not keep as soon as it has come, and hold a layer of it at most.

        For a sink that any thread may write to. What has come before is placed, and let go, by the next `place`.
        """
        with self._lock:
            self._sink = sink
            for extent in self.extents:
                extent.waiting = 0 if extent.kept or extent.placed else extent.layers

    def take(self, tokens: float) -> list[int]:
        """Take up to this many tokens from the front of what is incomplete, to be computed; returns their positions."""
        positions: list[int] = []
        with self._lock:
            room = round(min(tokens, sum(len(extent.positions) for extent in self._incomplete())))
            for extent in self._incomplete():
                left = room - len(positions)
                if left <= 0:
                    break
                positions += extent.positions[:left]
                extent.taken += min(left, len(extent.positions))
                if not extent.positions and extent.stored.sequential:  # what is in flight would hold a connection
                    extent.stored.close()
        return positions

    def failed(self) -> list[int]:
        """Positions that failed to load; each is returned once and must be computed from then on."""
        positions: list[int] = []
        with self._lock:
            for extent in self.extents:
                if extent.lost is not None:
                    positions += extent.positions
                    extent.taken = extent.last - extent.first
        return positions

    def incomplete(self) -> list[int]:
        """Positions that are not complete and are not computed."""
        with self._lock:
            return [position for extent in self._incomplete() for position in extent.positions]

    def left(self) -> tuple[list[int], list[int], float]:
        """Of one moment: `incomplete`, how many of them stand before the end of each extent, and `bytes_left`."""
        with self._lock:
            borders = accumulate(len(extent.positions) for extent in self._incomplete())
            return self.incomplete(), list(borders), self.bytes_left()

    def bytes_left(self) -> float:
        """Bytes still to be read: an extent of which a part is computed is read as a whole."""
        with self._lock:
            left = [(one, (one.last - one.first) * (self.layers - one.layers)) for one in self._incomplete()]
        return sum(extent.stored.token_bytes * token_layers for extent, token_layers in left) / self.layers

    def depth(self) -> int:
        """Number of layers that are there of everything that will come."""
        with self._lock:
            return min((extent.layers for extent in self._incomplete()), default=self.layers)

    def lost(self, stored: StoredVariant) -> Unavailable | None:
        """Reason why a part of this chunk failed to load, or None."""
        found = (extent.lost for extent in self.extents if extent.stored is stored and extent.lost is not None)
        return next(found, None)

    def wait(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `ready`, which is asked whenever something has come; False after `timeout` seconds."""
        started = time.perf_counter()
        try:
            with self._lock:
                return self._changed.wait_for(ready, timeout)
        finally:
            self.waited_s += time.perf_counter() - started

    def place(self, layer: int, sink: KVSink, *, below: int | None = None) -> None:
        """Put one layer of what has come into `sink`; of what stands before the position `below`, only if complete."""
        self._place_waiting()
        with self._lock:
            stretches = list(_stretches(self._to_place(layer, below)))
        for stored, start, first, last in stretches:
            sink.place(layer, stored.own(layer, first, last), start + first)

    def _place_waiting(self) -> None:
        """Place all layers of what came before `send_to`, chunk by chunk, and let go of it."""
        if self._sink is None:
            return
        for stored in {id(one.stored): one.stored for one in self.extents if not one.kept}.values():
            with self._lock:
                early = [one for one in self.extents if one.stored is stored and one.waiting]
            for layer in range(max((extent.waiting for extent in early), default=0)):
                for _, start, first, last in _stretches(one for one in early if one.waiting > layer):
                    self._sink.place(layer, stored.own(layer, first, last), start + first)
            for extent in early:
                extent.waiting = 0
            stored.release()

    def _to_place(self, layer: int, below: int | None) -> Iterator[Extent]:
        """Extents for `place`: those not placed as soon as they come."""
        for extent in self.extents:
            if extent.placed or extent.layers <= layer or not (extent.kept or self._sink is None):
                continue
            if below is not None:
                if extent.layers < self.layers or extent.positions.stop > below:
                    continue
                extent.placed = layer == self.layers - 1
            yield extent

    def close(self) -> None:
        """Read no more. What is in flight ends soon."""
        with self._lock:
            self._closed, self._sink = True, None
            self._changed.notify_all()
        for stored in {id(extent.stored): extent.stored for extent in self.extents}.values():
            stored.close()

    def _incomplete(self) -> Iterator[Extent]:
        return (
            extent
            for extent in self.extents
            if extent.layers < self.layers and extent.lost is None and extent.positions
        )


def _runs(extents: Iterable[Extent]) -> Iterator[list[Extent]]:
    """Cut extents, ascending or descending, into runs that adjoin."""
    run: list[Extent] = []
    for one in extents:
        if run and not one.adjoins(run[-1]):
            yield run
            run = []
        run.append(one)
    if run:
        yield run


def _stretches(extents: Iterable[Extent]) -> Iterator[tuple[StoredVariant, int, int, int]]:
    """(chunk, its place in the prompt, first token, token behind the last) of what adjoins and is not computed."""
    for run in _runs(one for one in extents if one.positions):
        yield run[0].stored, run[0].start, run[0].first + run[0].taken, run[-1].last
