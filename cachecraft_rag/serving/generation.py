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
        """Return the next piece, or raise StopIteration after the last one."""

    def close(self) -> object:
        """End the answer: no further piece is made. A second call does nothing.

        Any thread may call this. A generator raises ValueError while another thread is in it.
        """


class Generation(Iterator[str], AsyncIterator[str]):
    """An answer as an iterator of text pieces, also for `async for`. `text` and `stats` are complete once it has ended.

    The first piece raises BusyError and WaitTimeoutError; any piece the errors of the model, the store or the server.
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

        `ended` counts the answer; its second argument names the kind of exception. `later` calls a function in another
        thread, without a lock. Pieces with a method `arrived` can be waited for in an event loop.
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
            self._progress.finish = "failed"
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
        """End the answer here, unless it has ended; its captures are kept. Any thread and finalisers may call this.

        The answer is counted, with `finish` "closed", if a piece was asked for; otherwise `finish` stays None. A thread
        that reads it gets no further piece: at once in this process, with the next piece over vLLM or a server.
        """
        self._closing = True
        with suppress(ValueError):  # Python's error if the generator runs in another thread
            self._pieces.close()
            if self._begun and self._end():
                self._later(self._ended, self._stats, None)

    async def aclose(self) -> None:
        """End the answer here without waiting: calls `close`. A second call does nothing."""
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_open", None):
            self.close()

    @property
    def stats(self) -> RequestStats:
        """Statistics of the request so far, computed at each access; `finish` is None until the answer ends."""
        return self._stats()

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token ids drawn so far, with the token that ended the answer; may be ahead of `text`."""
        return tuple(self._progress.tokens)

    def report(self) -> dict[str, object]:
        """Return `RequestProgress.report`: outcomes of the segments, times and counts as plain values, for JSON."""
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
