"""Chunk-caches of a prompt that were not in memory at its planning, shared by their readers and the computing pass.

Both work on one list of extents under one lock. Readers take extents from the end, the pass takes tokens from the first
incomplete extent. If the pass takes all of an extent while it is being read, the extent is dropped once its current
layer has been read.

A prompt of 16,384 tokens has 256 extents of 32 layers, and each read needs the next extent. So counts and cursors are
kept up to date instead of searching the list again; `python -m benchmarks loader-bookkeeping` measures this.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

import torch
from torch import Tensor

from cachecraft_rag.store.codecs.base import ONE_THREAD
from cachecraft_rag.store.layout import READ_ERRORS, StoredVariant, unreadable
from cachecraft_rag.store.loading.rate import Meter
from cachecraft_rag.types.store_reasons import LoadFailure, Unavailable

# The CPU time of one read in so many is measured: reading the clock costs as much as the rest of a read's bookkeeping.
_TIMED = 8
# Most neighbouring extents per read: a small read costs the computing cores as much as a large one.
_RUN = 4
# A read takes at most one in so many of the remaining extents, because near the computed tokens each extent counts.
_PARTS = 4


class KVSink(Protocol):
    """Destination of loaded chunk-caches."""

    def place(self, layer: int, chunk: Tensor, start: int) -> None:
        """Copy a layer of a chunk, raw `[2, tokens, kv_heads, head_dim]`, to the prompt's positions from `start` on.

        The memory of `chunk` is used again after the call. Several threads may call it at the same time, for different
        places.
        """

    def place_all(self, layer: int, chunks: Sequence[tuple[Tensor, int]]) -> None:
        """Do the work of `place` for several chunks, each with its position. Only the computing thread calls it."""


@dataclass(eq=False, slots=True)
class Extent:
    """A range of tokens of one stored chunk-cache.

    start        position in the prompt of the chunk's first token
    first, last  tokens of the extent, counted within the chunk; `last` is exclusive
    taken        number of its first tokens that are computed instead of loaded, or left out
    layers       number of first layers that are loaded
    busy         True while it is being read
    placed       True once its last layer was placed before the whole prompt was loaded, see `PendingLoads.place`
    lost         reason why the remaining layers failed to load, or None
    kept         True if memory keeps the chunk-cache once it is loaded
    waiting      number of first layers, of a chunk-cache that memory does not keep, that were loaded before `send_to`
    index        index in the list of extents
    is_open      True while layers are missing and will be read: it is not loaded, lost or taken
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
    index: int = 0
    is_open: bool = True

    @property
    def is_taken(self) -> bool:
        """True if all tokens of the extent are computed instead of loaded, or left out."""
        return self.taken >= self.last - self.first

    @property
    def positions(self) -> range:
        """Positions in the prompt of its tokens that are neither computed nor left out; empty if `is_taken`."""
        return range(self.start + self.first + self.taken, self.start + self.last)

    def adjoins(self, other: Extent) -> bool:
        """Return True if both are neighbours in one chunk, have equally many layers loaded, and can be read as one.

        For that, no token of the later one may be taken.
        """
        if self.stored is not other.stored or self.layers != other.layers:
            return False
        return (other.last == self.first and not self.taken) or (
            self.last == other.first and not other.taken
        )


@dataclass(frozen=True, slots=True)
class _Read:
    """Adjoining extents of one chunk, and the layer to be read.

    own  destination in the chunk-cache's tensor; None: a buffer of the reader, which is placed and used again
    """

    extents: Sequence[Extent]
    layer: int
    own: Tensor | None


@dataclass
class PendingLoads:
    """The extents of one request, in prompt order. Every method may be called from any thread.

    An extent is incomplete (`Extent.is_open`) until it is loaded, lost or taken; it stays in the list. A token is taken
    once it is to be computed or left out; an extent is, once all its tokens are.

    layers       number of the model's layers, which each extent needs
    meter        measures the load rate
    layer_first  True: readers load layer by layer, in few large reads; False: whole extents, while the beginning of the
                 prompt is computed. Both begin at the end of the prompt
    reads        number of finished reads; while it does not change, loading makes no progress
    waited_s     seconds of waiting for loads: in `wait`, and what callers add that wait in another way
    on_change    called by readers after each read, successful or not, and by `fail`
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
    # Used directly, not through the condition: Ctrl-C in the first line of its Python `__exit__` would leave it locked.
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _changed: threading.Condition = field(init=False)

    def __post_init__(self) -> None:
        self._changed = threading.Condition(self._lock)
        self._by_chunk: dict[int, list[Extent]] = {}
        for index, extent in enumerate(self.extents):
            extent.index = index
            extent.is_open = (
                extent.layers < self.layers and extent.lost is None and not extent.is_taken
            )
            self._by_chunk.setdefault(id(extent.stored), []).append(extent)
        self._stretches: list[tuple[StoredVariant, int, int, int]] | None = None
        self._has_lost = any(extent.lost is not None for extent in self.extents)

        self._tokens = sum(extent.last - extent.first for extent in self.extents)

        # Counts of incomplete extents: all, those not being read, and by the number of layers that are there.
        incomplete = list(self._incomplete())
        self._left = len(incomplete)
        self._free = sum(not extent.busy for extent in incomplete)
        self._at_depth = [0] * (self.layers + 1)
        for extent in incomplete:
            self._at_depth[extent.layers] += 1
        self._depth = 0

        # Cursors. No extent before `_front` and none from `_back` on is incomplete. No free extent has fewer layers
        # than `_level`, and those that have as many are before `_cursor`.
        self._front = 0
        self._back = len(self.extents)
        self._level = 0
        self._cursor = len(self.extents)

    @classmethod
    def of_nothing(cls, layers: int) -> Self:
        """Return the loads of a request that needs none: without extents, and complete."""
        return cls(layers, (), Meter(None))

    # -- for the threads that read ------------------------------------------------------------------------------------

    def read(self) -> None:
        """Read until each extent left is being read by another thread, or until `close`; several threads may run this.

        After each read the layer is placed, if `send_to` was called and memory does not keep the chunk-cache, and
        `on_change` is called. Incomplete extents of a chunk-cache that cannot be read become `lost`.
        """
        scratch: Tensor | None = None
        for number in itertools.count():
            job = self._next()
            if job is None:
                return
            extents = job.extents
            layer = job.layer
            out = job.own
            stored = extents[0].stored
            came = False
            lost: Unavailable | None = None
            nbytes = stored.token_bytes * (extents[-1].last - extents[0].first) / self.layers
            self.meter.begin(nbytes)
            started = time.thread_time() if number % _TIMED == 0 else None
            try:
                if out is None:
                    # Buffers that a remote has filled become the copy on disk, so they are not used again.
                    old = None if stored.sequential else scratch
                    out = scratch = stored.scratch(extents[-1].last - extents[0].first, old)
                stored.read(layer, extents[0].first, extents[-1].last, out=out)
                came = True
            except READ_ERRORS as error:
                lost = unreadable(stored.variant.variant_id, error)
            # even after an unexpected exception, no pass may wait for this extent any longer
            finally:
                cpu_s = None if started is None else time.thread_time() - started
                self.meter.end(nbytes, came=came, cpu_s=cpu_s)
                if not came and lost is None:
                    lost = Unavailable(
                        stored.variant.variant_id, LoadFailure.UNREADABLE, "reading it failed"
                    )
                self._note(job, lost, out)

    def _note(self, job: _Read, lost: Unavailable | None, out: Tensor | None) -> None:
        extents = job.extents
        with self._lock:  # the pass must not take tokens while their stored values are being placed
            self.reads += 1
            if lost is None and out is not None and self._sink is not None and not extents[0].kept:
                try:
                    self._put(job, out, self._sink)
                except READ_ERRORS as error:
                    lost = unreadable(extents[0].stored.variant.variant_id, error)
            self._was_read(extents, came=lost is None)
            if (
                lost is not None
                and not self._closed
                and any(extent.positions for extent in extents)
            ):
                self._lose(extents[0].stored, lost)
            self._changed.notify_all()
        if self.on_change is not None:
            self.on_change()

    def _put(self, job: _Read, out: Tensor, sink: KVSink) -> None:
        """Place the tokens of a read, except those that are computed."""
        step = max(1, ONE_THREAD // max(1, out[0, 0].numel()))  # see `codecs.base.stretches`
        with torch.inference_mode():
            for extent in job.extents:
                begin = extent.start + job.extents[0].first  # position of the first token of `out`
                where = extent.positions
                for first in range(where.start, where.stop, step):
                    last = min(first + step, where.stop)
                    sink.place(job.layer, out[:, first - begin : last - begin], first)

    def fail(self, code: LoadFailure, reason: str) -> None:
        """Mark all incomplete extents as `lost`, and call `on_change`. To be called while no extent is being read."""
        with self._lock:
            for extents in self._by_chunk.values():
                stored = extents[0].stored
                self._lose(stored, Unavailable(stored.variant.variant_id, code, reason))
            self._changed.notify_all()
        if self.on_change is not None:
            self.on_change()

    def _next(self) -> _Read | None:
        with self._lock:
            if not self._left:
                self.meter.stop()
            if self._closed or not self._free:
                return None
            # At most half of the remaining extents, so that both readers share a layer.
            most = (self._left + 1) // 2
            if not (self.reads or self.meter.warm):
                most = 1  # the smaller the first read, the sooner the rate is known
            if self.layer_first:
                chosen = self._lowest_layer(most)
            else:
                chosen = self._last_extents(min(most, max(1, min(_RUN, self._free // _PARTS))))
            for extent in chosen:
                extent.busy = True
            self._free -= len(chosen)
            layer = chosen[0].layers
            stored = chosen[0].stored
            if not chosen[0].kept and self._sink is not None:
                return _Read(chosen, layer, None)
            return _Read(chosen, layer, stored.own(layer, chosen[0].first, chosen[-1].last))

    def _lowest_layer(self, most: int) -> list[Extent]:
        """Return the last adjoining free extents with the fewest layers, at most `most`, at least one."""
        chosen = self._at_level(most)
        if not chosen:
            self._level = min(
                extent.layers for extent in self.extents if extent.is_open and not extent.busy
            )
            self._cursor = len(self.extents)
            chosen = self._at_level(most)
        return chosen

    def _at_level(self, most: int) -> list[Extent]:
        """Return the last adjoining free extents with `_level` layers, at most `most`, and move the cursor to them."""
        chosen: list[Extent] = []
        extents = self.extents
        level = self._level
        cursor = self._cursor
        while cursor and len(chosen) < most:
            extent = extents[cursor - 1]
            is_candidate = extent.layers == level and extent.is_open and not extent.busy
            if chosen and not (is_candidate and extent.adjoins(chosen[-1])):
                break
            if is_candidate:
                chosen.append(extent)
            cursor -= 1
        self._cursor = cursor
        return chosen[::-1]

    def _last_extents(self, most: int) -> list[Extent]:
        """Return the last adjoining free extents, at most `most`, at least one."""
        while not self.extents[self._back - 1].is_open:
            self._back -= 1
        chosen: list[Extent] = []
        for index in range(self._back - 1, -1, -1):
            extent = self.extents[index]
            if extent.busy or not extent.is_open:
                continue
            if chosen and not extent.adjoins(chosen[-1]):
                break
            chosen.append(extent)
            if len(chosen) == most:
                break
        return chosen[::-1]

    def _lose(self, stored: StoredVariant, lost: Unavailable) -> None:
        """Mark the incomplete extents of this chunk as lost; complete extents were verified and stay usable."""
        self._has_lost = True
        for extent in self._by_chunk[id(stored)]:
            if extent.layers < self.layers:
                extent.lost = lost
                if extent.is_open:
                    self._leave(extent)

    # -- counts and cursors; the caller holds the lock ----------------------------------------------------------------

    def _incomplete(self) -> Iterator[Extent]:
        return (extent for extent in self.extents if extent.is_open)

    def _leave(self, extent: Extent) -> None:
        """Remove an extent that is complete, lost or taken from the counts."""
        extent.is_open = False
        self._left -= 1
        self._at_depth[extent.layers] -= 1
        if not extent.busy:
            self._free -= 1

    def _was_read(self, extents: Sequence[Extent], *, came: bool) -> None:
        """Record the end of a read of extents that have equally many layers, and move the cursor so as to find them."""
        layers = extents[0].layers + came
        open_extents = 0
        for extent in extents:
            extent.busy = False
            extent.layers = layers
            open_extents += extent.is_open
        self._free += open_extents
        if not came:
            return
        self._at_depth[layers - 1] -= open_extents
        self._at_depth[layers] += open_extents
        if layers == self.layers:
            for extent in extents:
                if extent.is_open:
                    self._leave(extent)
        last = extents[-1].index
        if layers < self._level or (layers == self._level and last >= self._cursor):
            self._level = layers
            self._cursor = last + 1

    # -- for the pass that computes -----------------------------------------------------------------------------------

    def send_to(self, sink: KVSink) -> None:
        """Let readers place chunk-caches that memory does not keep as soon as each layer is loaded.

        Then each reader holds at most one layer of them. The sink is used from any thread, until `close`. Layers that
        were loaded before are placed, and their memory released, by the next `place`.
        """
        with self._lock:
            self._sink = sink
            self._stretches = None
            for extent in self.extents:
                extent.waiting = 0 if extent.kept or extent.placed else extent.layers

    def take(self, tokens: float) -> list[int]:
        """Take up to this many tokens, rounded, from the first incomplete extents to compute them.

        Returns their positions, ascending. Infinity takes all. Tokens of an extent that is being read may be taken too.
        Once all tokens of one are taken, it is read no further, and the source of a `sequential` chunk-cache is closed.
        """
        positions: list[int] = []
        wanted = round(tokens) if tokens < math.inf else self._tokens
        with self._lock:
            self._stretches = None
            while self._left and len(positions) < wanted:
                extent = self.extents[self._front]
                if not extent.is_open:
                    self._front += 1
                    continue
                taken = extent.positions[: wanted - len(positions)]
                positions += taken
                self._take_first(extent, len(taken))
        return positions

    def compute(self, positions: Iterable[int]) -> None:
        """Take these positions to compute them, loaded or not; they must be the first untaken of their extents."""
        wanted = frozenset(positions)
        if not wanted:
            return
        with self._lock:
            self._stretches = None
            for extent in self.extents:
                tokens = len(wanted.intersection(extent.positions))
                if extent.is_open and tokens:
                    self._take_first(extent, tokens)
                else:
                    extent.taken += tokens

    def leave_out(self, positions: Iterable[int]) -> None:
        """Read no further layers of extents whose untaken tokens are all among these positions; they become taken.

        For tokens that are computed in any case: the caller does not count them as computed instead of loaded.
        """
        unused = frozenset(positions)
        if not unused:
            return
        with self._lock:
            self._stretches = None
            for extent in list(self._incomplete()):
                if unused.issuperset(extent.positions):
                    self._take_first(extent, len(extent.positions))
            self._changed.notify_all()

    def _take_first(self, extent: Extent, tokens: int) -> None:
        """Read this many more first tokens of an open extent no further; the caller holds the lock."""
        if tokens == len(extent.positions):
            self._leave(extent)
        extent.taken += tokens
        # otherwise the transfer would hold a connection
        if extent.is_taken and extent.stored.sequential:
            extent.stored.close()

    def failed(self) -> list[int]:
        """Return, once, the positions that failed to load, in prompt order; the caller must compute them."""
        positions: list[int] = []
        with self._lock:
            if not self._has_lost:
                return positions
            self._stretches = None
            for extent in self.extents:
                if extent.lost is not None:
                    positions += extent.positions
                    extent.taken = extent.last - extent.first
            self._has_lost = False
        return positions

    def give_up(self, positions: Iterable[int]) -> None:
        """Mark extents with any of these positions as lost, because another rank could not read them.

        They are loaded and placed no further, and of them `failed` names only those that failed here too.
        """
        unusable = frozenset(positions)
        if not unusable:
            return
        with self._lock:
            self._stretches = None
            for extent in self.extents:
                if extent.lost is not None or unusable.isdisjoint(extent.positions):
                    continue
                if extent.is_open:
                    self._leave(extent)
                extent.taken = extent.last - extent.first
                extent.lost = Unavailable(
                    extent.stored.variant.variant_id,
                    LoadFailure.UNREADABLE,
                    "another rank could not read it",
                )
            self._changed.notify_all()

    def is_complete(self) -> bool:
        """Return True if no extent is left to be read: each one is loaded, lost or taken."""
        with self._lock:
            return not self._left

    def incomplete(self) -> list[int]:
        """Return, in prompt order, the positions still to be loaded, those of partly loaded extents included."""
        with self._lock:
            return [position for extent in self._incomplete() for position in extent.positions]

    def left(self) -> tuple[list[int], list[int], float]:
        """Return, as of one moment: `incomplete`, their count up to the end of each such extent, and `bytes_left`."""
        with self._lock:
            borders = itertools.accumulate(len(extent.positions) for extent in self._incomplete())
            return self.incomplete(), list(borders), self.bytes_left()

    def bytes_left(self) -> float:
        """Return the stored bytes that are still to be read; partly taken extents count as a whole."""
        with self._lock:
            left = [
                (extent, (extent.last - extent.first) * (self.layers - extent.layers))
                for extent in self._incomplete()
            ]
        return (
            sum(extent.stored.token_bytes * token_layers for extent, token_layers in left)
            / self.layers
        )

    def depth(self) -> int:
        """Return how many first layers each incomplete extent has at least; the model's number if there is none."""
        with self._lock:
            while self._depth < self.layers and not self._at_depth[self._depth]:
                self._depth += 1
            return self._depth

    def lost(self, stored: StoredVariant) -> Unavailable | None:
        """Return why a part of this chunk-cache, an object of `chunks`, failed to load; None if none did."""
        reasons = (extent.lost for extent in self.of(stored) if extent.lost is not None)
        return next(reasons, None)

    def chunks(self) -> list[StoredVariant]:
        """Return all opened chunk-caches in prompt order, each once: also those loaded, lost or taken by now."""
        return [extents[0].stored for extents in self._by_chunk.values()]

    def of(self, stored: StoredVariant) -> Sequence[Extent]:
        """Return all extents of this chunk-cache in order. Raises KeyError unless it is an object of `chunks`."""
        return self._by_chunk[id(stored)]

    def wait(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `ready()` is true; return True then, False after `timeout` seconds (None: no limit).

        `ready` is called at once, and after each read, `fail`, `leave_out`, `give_up` and `close`, with the lock held.
        The time counts in `waited_s`.
        """
        started = time.perf_counter()
        try:
            with self._lock:
                return self._changed.wait_for(ready, timeout)
        finally:
            self.waited_s += time.perf_counter() - started

    def place(self, layer: int, sink: KVSink, *, below: int | None = None) -> None:
        """Put one layer into `sink`, of the extents that have loaded it. Taken tokens are left out.

        Extents that have not loaded it are left out without waiting; `failed` names those that are lost. Chunk-caches
        that readers place themselves (see `send_to`) are left out too, but all their layers that were loaded before
        `send_to` go to its sink. With `below`, only fully loaded extents that end at or before this position are
        placed, and none again after its last layer.
        """
        self._place_waiting()
        with self._lock:
            if below is None and not self._has_lost and layer < self.depth():
                # This layer of all extents is loaded: the ranges stay the same until tokens are taken or placed.
                if self._stretches is None:
                    self._stretches = list(_stretches(self._to_place(layer, None)))
                stretches = self._stretches
            else:
                self._stretches = None
                stretches = list(_stretches(self._to_place(layer, below)))
        if stretches:
            chunks = [
                (stored.own(layer, first, last), start + first)
                for stored, start, first, last in stretches
            ]
            sink.place_all(layer, chunks)

    def _place_waiting(self) -> None:
        """Place all layers that were loaded before `send_to`, chunk by chunk, and release their memory."""
        if self._sink is None:
            return
        for stored in self.chunks():
            if self.of(stored)[0].kept:
                continue
            with self._lock:
                early = [extent for extent in self.of(stored) if extent.waiting]
            for layer in range(max((extent.waiting for extent in early), default=0)):
                for _, start, first, last in _stretches(
                    extent for extent in early if extent.waiting > layer
                ):
                    self._sink.place(layer, stored.own(layer, first, last), start + first)
            for extent in early:
                extent.waiting = 0
            stored.release()

    def _to_place(self, layer: int, below: int | None) -> Iterator[Extent]:
        """Yield the extents for `place`, without those that readers place themselves."""
        for extent in self.extents:
            if extent.placed or extent.layers <= layer or not (extent.kept or self._sink is None):
                continue
            if below is not None:
                if extent.layers < self.layers or extent.positions.stop > below:
                    continue
                extent.placed = layer == self.layers - 1
            yield extent

    def close(self) -> bool:
        """Start no more reads, and close the sources of all chunk-caches, but not their tensors. Does not wait.

        Current reads end soon. Extents that are incomplete stay so; they do not become `lost`. Returns False if they
        were closed before.
        """
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            self._sink = None
            self._stretches = None
            self._changed.notify_all()
        for stored in self.chunks():
            stored.close()
        return True


def _stretches(extents: Iterable[Extent]) -> Iterator[tuple[StoredVariant, int, int, int]]:
    """Yield (chunk, its position in the prompt, first token, end) of adjoining ranges that are not computed."""
    stored: StoredVariant | None = None
    start = first = last = 0
    for extent in extents:
        taken = extent.taken
        if stored is extent.stored and not taken and extent.first == last:
            last = extent.last
            continue
        if taken >= extent.last - extent.first:
            continue
        if stored is not None:
            yield stored, start, first, last
        stored = extent.stored
        start = extent.start
        first = extent.first + taken
        last = extent.last
    if stored is not None:
        yield stored, start, first, last
