"""The reader's view of an answer: pieces of text, and statistics."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Protocol, TypeVar

from cachecraft_rag.observability.stats import RequestStats
from cachecraft_rag.serving.request import Request, RequestProgress, stats_of

T = TypeVar("T")
OnEnd = Callable[[Callable[[], RequestStats], str | None], object]


class Pieces(Protocol):
    """Pieces of an answer's text; closing it ends the answer."""

    def __next__(self) -> str:
        """Return the next piece, or raise StopIteration after the last one.

        Raises:
            BusyError, WaitTimeoutError: by the first piece, if too many requests wait, or this one waited too long.
            StoreError: the store of an engine on this machine is closed; by the first piece.
            ConfigError: the answer's grammar lets it neither go on nor end, a server refuses the request, or vLLM does
                not support a setting of reuse.
            ContextLengthError: a server refuses the request because of the model's context.
            UnsupportedModelError: a layer of a model in this process does something that its survey did not show.
            ServerError: a server makes the answer and fails.
            ForkError: this process is a fork of the one that made the engine.
            RuntimeError, MemoryError: the model fails, such as torch without memory; over vLLM, RuntimeError also if
                the engine is closed.
            CancelledError: over vLLM, the engine was closed meanwhile; also vLLM's own exceptions.
        """

    def close(self) -> object:
        """End the answer: no further piece is made. A second call does nothing.

        Any thread may call this. A generator raises ValueError while another thread is in it; the pieces of an engine
        in this process raise nothing.
        """


class Generation(Iterator[str], AsyncIterator[str]):
    """An answer as an iterator of text pieces, also for `async for`. `text` and `stats` are complete once it has ended.

    The first piece raises BusyError if too many requests are waiting, WaitTimeoutError after too long a wait, and
    StoreError if the engine's store is closed. Any piece raises ServerError if a server makes the answer and fails;
    ConfigError if an answer that keeps to a schema can neither go on nor end, or a server refuses the request
    (ContextLengthError because of the model's context); ForkError in a fork of the engine's process;
    UnsupportedModelError if a layer of a model in this process does something that its survey did not show; and
    RuntimeError or MemoryError if the model fails, such as torch without memory. Over vLLM, a piece raises RuntimeError
    if the engine is closed, CancelledError if it was closed meanwhile, and vLLM's own exceptions.
    """

    def __init__(
        self,
        request: Request,
        progress: RequestProgress,
        pieces: Pieces,
        *,
        layers: int,
        ended: OnEnd,
        later: Callable[..., object],
    ) -> None:
        """Wrap the pieces of an engine.

        Args:
            pieces: an iterator with a method `arrived` if an event loop may wait for the next one.
            ended: counts the answer once it has ended; its second argument names the kind of exception.
            later: calls a function later in another thread, without a lock.
        """
        self._request = request
        self._progress = progress
        self._pieces = pieces
        self._layers = layers
        self._ended = ended
        self._later = later
        self._open = [True]  # `pop` is atomic: an answer ends once
        self._begun = False
        self._closing = False
        self.text = ""

    def __next__(self) -> str:
        if self._closing or not self._open:
            raise StopIteration
        self._begun = True
        try:
            piece = next(self._pieces)
        except StopIteration:
            if self._end():
                self._ended(self._stats, None)
            raise
        except BaseException as error:  # Ctrl-C too ends the answer
            self._progress.failed()
            self._pieces.close()
            if self._end():
                self._ended(self._stats, type(error).__name__)
            raise
        if self._closing:  # by another thread, while this one was in its step
            self.close()  # type: ignore[unreachable]
            raise StopIteration
        self.text += piece
        return piece

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> str:
        """Return the next piece without blocking the event loop. A cancelled task ends the answer."""
        try:
            arrived = getattr(self._pieces, "arrived", None)
            if arrived is not None:
                await arrived()
                return next(self)
            # a future holds no StopIteration
            pieces = await _in_a_thread(lambda: list(islice(self, 1)))
        except StopIteration:
            raise StopAsyncIteration from None
        except asyncio.CancelledError:
            self.close()
            raise
        if not pieces:
            raise StopAsyncIteration
        return pieces[0]

    def close(self) -> None:
        """End the answer here; its captures are kept, in the background. Any thread and finalisers may call this.

        An answer under way is counted and logged, and its `finish` is "closed". If no piece was asked for, nothing was
        computed, nothing is counted, and `finish` stays None. Another thread that reads it gets no further piece. If
        that thread waits for one, its wait ends at once with an engine in this process, and with the next piece over
        vLLM or a server. A second call does nothing. Raises nothing, except RuntimeError if the answer is to be counted
        in a new thread and the system has no room for one.
        """
        self._closing = True
        with suppress(ValueError):  # Python's error if the generator runs in another thread
            self._pieces.close()
            if self._begun and self._end():
                self._later(self._ended, self._stats, None)

    async def aclose(self) -> None:
        """End the answer here without waiting: calls `close`. A second call does nothing.

        Raises nothing, except RuntimeError if the answer is to be counted in a new thread and the system has no room
        for one.
        """
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_open", None):
            self.close()

    @property
    def stats(self) -> RequestStats:
        """Statistics of the request so far, computed at each access.

        `finish` has no value while the answer goes on, and for an answer that was closed before a piece was asked for.
        """
        return self._stats()

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token ids drawn so far, with the token that ended the answer; may be ahead of `text`."""
        return tuple(self._progress.tokens)

    def report(self) -> dict[str, object]:
        """Return what became of each segment, as plain values: `RequestProgress.reported` takes them over."""
        return self._progress.report()

    def _stats(self) -> RequestStats:
        return stats_of(self._request, self._progress, self._layers)

    def _end(self) -> bool:
        """Note that the answer has ended; returns False if that was noted before."""
        try:
            self._open.pop()
        except IndexError:
            return False
        self._progress.end(self._request, "closed")
        return True


async def _in_a_thread(step: Callable[[], T]) -> T:
    """Run a step in a thread. A cancellation is raised once it is done, because a thread cannot be stopped."""
    context = contextvars.copy_context()
    future = asyncio.get_running_loop().run_in_executor(None, context.run, step)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        future.exception()  # retrieved, or asyncio would log that it never was
        raise cancelled
    return future.result()
