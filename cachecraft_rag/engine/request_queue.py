"""The queue in front of the engine: who may plan and prefill now, who waits, and who is turned away.

One request at a time has the turn, from the look-up to its first token; the first that entered is the next. Decoding is
outside: its steps and the next request's passes alternate on the engine's `FairLock`.

As with that lock, no interruption may lose a turn. A turn ends with one call into C, which opens the place's gate; that
the next one is told so at once is a courtesy, and whoever waits looks for itself now and then.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from cachecraft_rag.errors import BusyError, WaitTimeoutError

_LOOK_S = 1.0  # how often one who waits looks whether it has been forgotten
_TOLD = 2  # so many are told when a turn ends: whose turn it is, and who comes next

# The place that an asynchronous request took in its event loop, for the thread that runs it, see `async_bridge`.
ENTERED: ContextVar[Place | None] = ContextVar("cachecraft_place", default=None)


class LeftQueue(Exception):
    """The request was closed while it waited. Never reaches a user."""


@dataclass(frozen=True, slots=True)
class QueueCounts:
    """The state of a `RequestQueue`.

    waiting    requests that wait for their turn now
    rejected   that found it full, since the engine was opened
    timed_out  that waited too long
    """

    waiting: int
    rejected: int
    timed_out: int


class RequestQueue:
    """Gives turns in the order of entering. Any thread may call any method.

    A place whose thread has not come yet, because an event loop has none free, lets others pass and keeps its rank.

    Args:
        max_waiting: most requests that wait, besides the one that has the turn.
        timeout_s: longest wait; None = no limit.
    """

    def __init__(self, max_waiting: int, timeout_s: float | None = None) -> None:
        self.max_waiting, self.timeout_s = max_waiting, timeout_s
        self._guard = threading.Lock()  # of what follows
        # In the order of entering; the one that has the turn among them. Weak: one that is dropped is given up.
        self._places: list[weakref.ref[Place]] = []
        self._turn: Place | None = None
        self._rejected = self._timed_out = 0

    def enter(self) -> Place:
        """Take a place, without waiting; use it in one `with` block, or tell it to `leave`.

        Raises:
            BusyError: as many are waiting as may.
        """
        with self._guard:
            if len(self._here()) <= self.max_waiting:
                place = Place(self)
                self._places.append(weakref.ref(place))
                return place
            self._rejected += 1
        raise BusyError(
            f"{self.max_waiting} requests are waiting already; ask again later, or raise max_waiting (EngineConfig)"
        )

    def place(self) -> Place:
        """The place that an event loop took for this thread's request, or a new one. Errors as `enter`."""
        entered = ENTERED.get()
        return entered if entered is not None and entered.of(self) else self.enter()

    def counts(self) -> QueueCounts:
        """The state now."""
        with self._guard:
            waiting = len(self._here()) - (self._turn is not None)
            return QueueCounts(waiting, self._rejected, self._timed_out)

    def hand_on(self) -> None:
        """Tell those who come next that a turn may have ended."""
        with self._guard:
            coming = self._coming()
        for place in coming[:_TOLD]:
            place.tell()

    def _here(self) -> list[Place]:
        """Who has not left; the caller holds the guard."""
        here = [place for ref in self._places if (place := ref()) is not None and not place.gone]
        self._places = [weakref.ref(place) for place in here]
        if self._turn is not None and self._turn.gone:
            self._turn = None
        return here

    def _coming(self) -> list[Place]:
        """Who waits in a thread; the caller holds the guard."""
        return [place for place in self._here() if place.present and place is not self._turn]

    def _rank(self, place: Place) -> int:
        """How many come before it; 0: it has the turn now."""
        with self._guard:
            rank = self._coming().index(place) + (self._turn is not None)
            if rank == 0:
                self._turn = place
            return rank

    def _expired(self) -> WaitTimeoutError:
        with self._guard:
            self._timed_out += 1
        return WaitTimeoutError(
            f"the request waited longer than {self.timeout_s:g} s for its turn; ask again later, or raise "
            "wait_timeout_s (EngineConfig)"
        )


class Place:
    """One place in the queue: `with place:` waits for the turn, and ends it.

    Attributes:
        when_next: called once while waiting, as soon as only one is before it, to prepare what can be prepared.
        present: a thread waits here, or has the turn.
        waited_s: seconds from `with` to the turn.
    """

    __slots__ = (
        "__exit__", "__weakref__", "_calls", "_entered", "_gate", "_left", "_queue", "present", "waited_s", "when_next"
    )  # fmt: skip

    __exit__: Callable[..., None]

    def __init__(self, queue: RequestQueue) -> None:
        self._queue, self._entered = queue, time.monotonic()
        self._gate: SimpleQueue[object] = SimpleQueue()  # something is in it once this place has been given up
        self._calls: SimpleQueue[None] = SimpleQueue()  # wake the thread that waits here
        self._left = self.present = False
        self.when_next: Callable[[], object] | None = None
        self.waited_s = 0.0
        # Looked up by `with` before it enters. A Python method here could be interrupted before its first line.
        self.__exit__ = self._gate.put

    def __enter__(self) -> None:
        """Wait for the turn. Raises LeftQueue, WaitTimeoutError."""
        started = time.monotonic()
        try:
            with self._queue._guard:
                self.present = True
            while not self._left and (rank := self._queue._rank(self)):
                if rank == 1 and self.when_next is not None:
                    prepare, self.when_next = self.when_next, None
                    prepare()
                    continue
                self._wait()
            if self._left:
                raise LeftQueue
            self.waited_s = time.monotonic() - started
        except BaseException:  # Ctrl-C among them
            self._gate.put(None)
            self._queue.hand_on()
            raise

    @property
    def gone(self) -> bool:
        """Whether it has been given up."""
        return not self._gate.empty() or (self._left and not self.present)

    def of(self, queue: RequestQueue) -> bool:
        """Whether it is a place of this queue that nobody has used."""
        return self._queue is queue and not self.present

    def leave(self) -> None:
        """Wait no longer; without effect on a turn. Takes no lock, so finalisers may call this."""
        self._left = True
        self.tell()

    def end_turn(self) -> None:
        """Let the next one plan, before the end of the block: this request computes nothing at the moment."""
        if not self.gone:
            self._gate.put(None)
            self._queue.hand_on()

    def tell(self) -> None:
        """Have the thread that waits here look."""
        self._calls.put(None)

    def _wait(self) -> None:
        timeout, left = self._queue.timeout_s, _LOOK_S
        if timeout is not None:
            left = min(left, self._entered + timeout - time.monotonic())
            if left <= 0.0:
                raise self._queue._expired()
        with suppress(Empty):
            self._calls.get(timeout=left)
