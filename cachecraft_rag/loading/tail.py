"""What of a prompt is still to be loaded: shared by the threads that read it and the pass that may compute it instead.

Both ends work on one list of runs under one lock. Readers take runs from the back, the front takes tokens from the
first run that is not complete; what either has taken the other leaves alone. A run that the front takes whole while
it is being read is dropped when its layer is through.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from cachecraft_rag.loading.speeds import Meter
from cachecraft_rag.prefill import MergedKV
from cachecraft_rag.tiers.layout import READ_ERRORS, StoredVariant, unreadable
from cachecraft_rag.types import Unavailable


@dataclass(eq=False, slots=True)
class Run:
    """A stretch of one stored chunk-cache.

    start        position in the prompt of the chunk's first token
    first, last  the run's tokens, counted in the chunk; `last` is behind them
    taken        so many of them, from the first on, are computed instead
    layers       so many layers are there, from the first on
    lost         why the rest will not come, where that is so
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

    @property
    def positions(self) -> range:
        """Where in the prompt the tokens lie that nobody computes."""
        return range(self.start + self.first + self.taken, self.start + self.last)


@dataclass(frozen=True, slots=True)
class Job:
    """Adjoining runs of one chunk, and the layer of them to be read."""

    runs: Sequence[Run]
    layer: int


@dataclass
class Tail:
    """The runs of one request, in prompt order. Every method may be called from any thread.

    meter        of what comes
    layer_first  False: whole runs from the back (Cake); True: layer by layer, for the last pass
    reads        so many have ended: while this stands still, nothing comes
    """

    layers: int
    runs: Sequence[Run]
    meter: Meter
    layer_first: bool = False
    reads: int = 0
    _closed: bool = False
    # Taken by itself and not through the condition, whose `__exit__` is Python: Ctrl-C in its first line would lose it.
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _changed: threading.Condition = field(init=False)

    def __post_init__(self) -> None:
        self._changed = threading.Condition(self._lock)

    # -- the readers' end ---------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Read until nothing is left to be read; several threads may run this at once."""
        while (job := self._next()) is not None:
            runs, layer = job.runs, job.layer
            stored = runs[0].stored
            lost: Unavailable | None = Unavailable(stored.variant.variant_id, "reading it failed")
            nbytes = stored.token_bytes * (runs[-1].last - runs[0].first) / self.layers
            self.meter.begin(nbytes)
            try:
                stored.read(layer, runs[0].first, runs[-1].last)
                lost = None
            except READ_ERRORS as error:
                lost = unreadable(stored.variant.variant_id, error)
            finally:  # whatever happens, nobody may wait for this run any longer
                self.meter.end(nbytes, came=lost is None)
                self._note(runs, lost)

    def _note(self, runs: Sequence[Run], lost: Unavailable | None) -> None:
        with self._lock:
            self.reads += 1
            for run in runs:
                run.busy = False
                run.layers += lost is None
            if lost is not None and not self._closed and any(run.positions for run in runs):
                self._lose(runs[0].stored, lost)
            self._changed.notify_all()

    def give_up(self, reason: str) -> None:
        """Nobody will read."""
        with self._lock:
            for run in self.runs:
                self._lose(run.stored, Unavailable(run.stored.variant.variant_id, reason))
            self._changed.notify_all()

    def _next(self) -> Job | None:
        with self._lock:
            left = list(self._incomplete())
            free = [run for run in left if not run.busy]
            if not left:
                self.meter.stop()
            if self._closed or not free:
                return None
            chosen = [free[-1]]
            if self.layer_first:
                chosen = [min(free, key=lambda run: run.layers)]
                for run in free[free.index(chosen[0]) + 1 :]:  # what adjoins is read at once
                    last = chosen[-1]
                    if run.stored is not last.stored or run.layers != last.layers or run.first != last.last:
                        break
                    chosen.append(run)
            for run in chosen:
                run.busy = True
            return Job(chosen, chosen[0].layers)

    def _lose(self, stored: StoredVariant, lost: Unavailable) -> None:
        """What is complete and verified of this chunk stays good; the rest will not come."""
        for run in self.runs:
            if run.stored is stored and run.layers < self.layers:
                run.lost = lost

    # -- the front's end ----------------------------------------------------------------------------------------------

    def take(self, tokens: float) -> list[int]:
        """Take up to so many tokens from the front of what is incomplete, to be computed; returns their positions."""
        positions: list[int] = []
        with self._lock:
            room = round(min(tokens, sum(len(run.positions) for run in self._incomplete())))
            for run in self._incomplete():
                left = room - len(positions)
                if left <= 0:
                    break
                positions += run.positions[:left]
                run.taken += min(left, len(run.positions))
                if not run.positions and run.stored.sequential:  # what is in flight would hold a connection
                    run.stored.close()
        return positions

    def holes(self) -> list[int]:
        """Positions that turned out not to come; each is told once, and is the front's from then on."""
        positions: list[int] = []
        with self._lock:
            for run in self.runs:
                if run.lost is not None:
                    positions += run.positions
                    run.taken = run.last - run.first
        return positions

    def incomplete(self) -> list[int]:
        """Positions that are not complete and that nobody computes."""
        with self._lock:
            return [position for run in self._incomplete() for position in run.positions]

    def bytes_left(self) -> float:
        """What is still to be read."""
        with self._lock:
            left = [(run, len(run.positions) * (self.layers - run.layers)) for run in self._incomplete()]
        return sum(run.stored.token_bytes * token_layers for run, token_layers in left) / self.layers

    def depth(self) -> int:
        """So many layers are there of everything that will come."""
        with self._lock:
            return min((run.layers for run in self._incomplete()), default=self.layers)

    def taken(self, stored: StoredVariant) -> list[int]:
        """Which tokens of this chunk are computed instead, ascending."""
        with self._lock:
            runs = [run for run in self.runs if run.stored is stored]
            return [token for run in runs for token in range(run.first, run.first + run.taken)]

    def lost(self, stored: StoredVariant) -> Unavailable | None:
        """Why a part of this chunk did not come, where that is so."""
        return next((run.lost for run in self.runs if run.stored is stored and run.lost is not None), None)

    def wait(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `ready`, which is asked whenever something has come; False after `timeout` seconds."""
        with self._lock:
            return self._changed.wait_for(ready, timeout)

    def place(self, layer: int, merged: MergedKV, *, below: int | None = None) -> None:
        """Put one layer of what has come into `merged`; `below` a position, only what is complete."""
        with self._lock:
            stretches = list(self._stretches(layer, below))
        for stored, start, first, last in stretches:
            merged.place(layer, stored.kv[layer, :, first:last], start + first)

    def _stretches(self, layer: int, below: int | None) -> Iterator[tuple[StoredVariant, int, int, int]]:
        """(chunk, its place in the prompt, first token, token behind the last) of what adjoins and is to be placed."""
        stretch: tuple[StoredVariant, int, int, int] | None = None
        for run in self.runs:
            if run.placed or run.layers <= layer or not run.positions:
                continue
            if below is not None:
                if run.layers < self.layers or run.positions.stop > below:
                    continue
                run.placed = layer == self.layers - 1
            first = run.first + run.taken
            if stretch is not None and stretch[0] is run.stored and stretch[3] == first:
                stretch = (*stretch[:3], run.last)
                continue
            if stretch is not None:
                yield stretch
            stretch = (run.stored, run.start, first, run.last)
        if stretch is not None:
            yield stretch

    def close(self) -> None:
        """Read no more. What is in flight ends soon."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        for stored in {id(run.stored): run.stored for run in self.runs}.values():
            stored.close()

    def _incomplete(self) -> Iterator[Run]:
        return (run for run in self.runs if run.layers < self.layers and run.lost is None and run.positions)
