"""Work in idle time, the same for all engines: what begins next, how it gives way, how it ends, and what is logged.

A kind of work (`new_variants.VariantWork`, `audits.audit_work.AuditWork`) says what waits and what becomes of a result.
An engine brings the `Runner`, which computes the pieces: `loop_runner.LoopRunner` one at a time in this process,
`vllm.idle.threads.ThreadRunner` one or several over vLLM.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from asyncio import CancelledError
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from cachecraft_rag.types.prompts import Segment


class HasSegments(Protocol):
    """A piece of work: the segments of its prompt name the chunks that it needs."""

    @property
    def segments(self) -> Sequence[Segment]:
        """Segments of its prompt."""

    @property
    def namespace(self) -> str:
        """Tenant of the request; "": the engine's own."""


Piece = TypeVar("Piece", bound=HasSegments)
Result = TypeVar("Result")
Among = Callable[[Piece], bool]
GivenUp = Literal["failed", "closed", "removed"]


class Runner(Protocol[Piece, Result]):
    """Computes pieces of work, and hands each to `IdleWork.finish`.

    expected_errors  errors after which the next piece may succeed; after any other, no more work is done
    """

    expected_errors: tuple[type[Exception], ...]

    def wake(self, work: IdleWork[Piece, Result]) -> None:
        """Begin the next piece if the runner is free; called after a piece was added or has ended. Returns at once."""

    def give_up(self, piece: Piece) -> None:
        """Ask for an early end of a piece under way, if the engine can; its result is not wanted any more."""


@dataclass(eq=False)
class _Running(Generic[Piece]):
    """A piece under way.

    removed   ids of its chunks that were removed since it began
    given_up  whether its result is not wanted any more, and it is counted as dropped
    """

    piece: Piece
    removed: set[str] = field(default_factory=set)
    given_up: bool = False


class IdleWork(ABC, Generic[Piece, Result]):
    """One kind of work in idle time. Any thread may call any method, unless the runner needs a particular one.

    A piece of the engine's own tenant ("") counts as one of any tenant that a method is given. Subclasses implement the
    methods without a body; those with an underscore are called with the lock `_changed` held.

    Args:
        runner: computes the pieces.
        logger: takes failures.
        failure: first words of the log message about a failure.
    """

    def __init__(
        self, runner: Runner[Piece, Result], *, logger: logging.Logger, failure: str
    ) -> None:
        self._runner = runner
        self._logger = logger
        self._failure = failure
        self._has_failed = False  # the last piece
        self._changed = threading.Condition()
        self._running: list[_Running[Piece]] = []
        self._closed = False

    @abstractmethod
    def _peek(self, among: Among[Piece] | None = None) -> Piece | None:
        """Return the next piece, of those for which `among` returns True; None if no piece may begin now."""

    @abstractmethod
    def _begun(self, piece: Piece) -> None:
        """Note that a piece is under way."""

    @abstractmethod
    def _having(self, chunk_ids: Collection[str]) -> Sequence[Piece]:
        """Return the pieces that wait, and have at least one of these chunks."""

    @abstractmethod
    def _clear(self) -> None:
        """Drop all pieces that wait, and count them as closed."""

    @abstractmethod
    def _drop(self, piece: Piece, reason: GivenUp) -> None:
        """Remove a piece, if it waits, and count why it was not done."""

    @abstractmethod
    def _done(self, piece: Piece, result: Result | None, *, given_up: bool) -> None:
        """Take a result; of a piece that was given up it is not wanted any more. None: the piece gave way."""

    @property
    def busy(self) -> bool:
        """True while a piece is under way or could begin."""
        with self._changed:
            return bool(self._running) or self._peek() is not None

    def under_way(self) -> list[Piece]:
        """Return the pieces that are being computed."""
        with self._changed:
            return [running.piece for running in self._running]

    def running(self, chunk_ids: Collection[str], namespace: str | None = None) -> bool:
        """Return True if a piece is under way whose prompt has at least one of these chunks of a tenant (None: all)."""
        with self._changed:
            return any(held(running.piece, chunk_ids, namespace) for running in self._running)

    def removed(self, piece: Piece) -> frozenset[str]:
        """Return the ids of the chunks of a piece under way that were removed since it began."""
        with self._changed:
            return frozenset(self._running_of(piece).removed)

    def forget(self, chunk_ids: Collection[str], namespace: str | None = None) -> None:
        """Drop and count the pieces with these chunks of a tenant (None: all), because the chunks were removed.

        Those under way are asked to end, and are not waited for.
        """
        with self._changed:
            for running in self._running:
                removed = held(running.piece, chunk_ids, namespace)
                if removed:
                    running.removed |= removed
                    self._give_up(running, "removed")
            for piece in self._having(chunk_ids):
                if held(piece, chunk_ids, namespace):
                    self._drop(piece, "removed")
            self._changed.notify_all()

    def close(self) -> None:
        """Drop and count all pieces. Those under way are asked to end, and are not waited for."""
        with self._changed:
            self._closed = True
            for running in self._running:
                self._give_up(running, "closed")
            self._clear()
            self._changed.notify_all()

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until it is not `busy`, or is closed; False after `timeout` seconds (None: no limit)."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closed or not self.busy, timeout)

    # -- for the runner -----------------------------------------------------------------------------------------------

    def next(self, among: Among[Piece] | None = None, *, wait: bool = False) -> Piece | None:
        """Return the next piece that `among` accepts, under way from now on; None if none may begin, or after `close`.

        With `wait` it waits for a piece or `close`, without limit.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._closed or self._peek(among) is not None)
            piece = None if self._closed else self._peek(among)
            if piece is not None:
                self._begun(piece)
                self._running.append(_Running(piece))
            return piece

    def finish(
        self, piece: Piece, result: Result | None = None, error: BaseException | None = None
    ) -> None:
        """Take the result of a piece, or its error, which is logged; with neither it was given up or gave way.

        CancelledError, or one that is not among the runner's `expected_errors`, closes the work. Wakes the runner.
        """
        if error is not None:
            self._log(error)
        # as from the requests of an event loop that ends
        if isinstance(error, CancelledError):
            self.close()
        with self._changed:
            running = self._running_of(piece)
            self._running.remove(running)
            if error is None:
                self._done(piece, result, given_up=running.given_up)
            elif not running.given_up:
                self._drop(piece, "failed")
            self._has_failed = error is not None
            self._changed.notify_all()
        if error is not None and not isinstance(error, self._runner.expected_errors):
            self.close()
        self._runner.wake(self)

    def _running_of(self, piece: Piece) -> _Running[Piece]:
        (running,) = (running for running in self._running if running.piece is piece)
        return running

    def _log(self, error: BaseException) -> None:
        if isinstance(error, CancelledError):
            self._logger.info("%s: the server is ending", self._failure)
        elif not self._closed:
            # of several failures in a row, such as after the end of vLLM, only the first is an error
            level = logging.DEBUG if self._has_failed else logging.ERROR
            self._logger.log(level, self._failure, exc_info=error)

    def _give_up(self, running: _Running[Piece], reason: GivenUp) -> None:
        if not running.given_up:
            running.given_up = True
            self._drop(running.piece, reason)
            self._runner.give_up(running.piece)


def held(piece: HasSegments, chunk_ids: Collection[str], namespace: str | None = None) -> set[str]:
    """Return which of these chunks of a tenant (None: all) a piece needs; a piece of tenant "" is of every tenant."""
    if namespace is not None and piece.namespace not in ("", namespace):
        return set()
    return {segment.segment_id for segment in piece.segments}.intersection(chunk_ids)
