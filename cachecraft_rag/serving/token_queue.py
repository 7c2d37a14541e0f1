"""The queue of an answer's pieces from the step loop to its reader: a thread, or a task of an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue

from cachecraft_rag.observability.stats import Finish
from cachecraft_rag.serving.loop.task import Handle
from cachecraft_rag.serving.request import RequestProgress
from cachecraft_rag.store.processes import HomeProcess

MAX_UNREAD = 4  # tokens that wait for the reader; beyond it the answer is not decoded further


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """A piece of an answer.

    text       text of a token; empty while no text is certain
    generated  tokens generated so far
    finish     how the answer ended; None while it goes on
    error      exception that ended the answer
    """

    text: str
    generated: int = 0
    finish: Finish | None = None
    error: BaseException | None = None


_WAKE_UP = AnswerPiece("")  # makes a waiting thread look whether the answer was closed


class TokenQueue:
    """The loop's end: pieces that the reader has not taken yet; without limit if it is not `bounded`."""

    def __init__(self, *, bounded: bool = True) -> None:
        self._bounded = bounded
        self.pieces: SimpleQueue[AnswerPiece] = SimpleQueue()
        self.on_arrival: Callable[[], object] | None = None  # wakes a task that waits for a piece

    def put(self, piece: AnswerPiece) -> None:
        """Hand over a piece, also beyond `has_room`, and wake the task that waits for it. Takes no lock."""
        self.pieces.put(piece)
        on_arrival = self.on_arrival
        if on_arrival is not None:
            on_arrival()

    def has_room(self) -> bool:
        """Return True if a further piece may wait: fewer than `MAX_UNREAD` do, or the queue is not bounded."""
        return not self._bounded or self.pieces.qsize() < MAX_UNREAD

    def text(self) -> str:
        """Take all pieces that have arrived, and return their text, without waiting. For a single reader."""
        return "".join(self.pieces.get_nowait().text for _ in range(self.pieces.qsize()))


class Reader(Handle, Iterator[str]):
    """The reader's end: begins the answer with the first piece; the answer is given up once this is closed or gone.

    Args:
        progress: takes up what the reader has read.
        begin: hands the request over to the loop.
        wake: wakes the loop.
        home: the process that the loop runs in.
    """

    __slots__ = ("_begin", "_begun", "_home", "_progress", "_queue", "_wake")

    def __init__(
        self,
        progress: RequestProgress,
        begin: Callable[[Reader, TokenQueue], object],
        wake: Callable[[], object],
        home: HomeProcess,
    ) -> None:
        super().__init__()
        self._progress = progress
        self._begin = begin
        self._wake = wake
        self._home = home
        self._queue = TokenQueue()
        self._begun = False

    def __next__(self) -> str:
        while not self.closed:
            self._start()
            piece = self._queue.pieces.get()
            self._wake()  # there is room for a further piece
            if self.closed:  # by another thread
                self._queue.pieces.put(piece)  # type: ignore[unreachable]  # for a further thread that waits
                break

            self._progress.generated = max(self._progress.generated, piece.generated)
            if piece.finish is not None or piece.error is not None:
                self._progress.finish = piece.finish
                self.closed = True
                self._queue.pieces.put(_WAKE_UP)
            if piece.error is not None:
                raise piece.error
            if piece.text:
                return piece.text
        raise StopIteration

    def close(self) -> None:
        """Give up the answer, or never begin it. Takes no lock; for any thread. A waiting thread gets StopIteration."""
        if not self.closed:
            self.closed = True
            self._queue.put(_WAKE_UP)
            self._wake()

    async def arrived(self) -> None:
        """Wait in an event loop until the next piece has arrived, or the answer has ended; for one task at a time.

        Begins the answer, if nothing was read before. Takes no piece, but `__next__` then need not wait.
        """
        if not self.closed:
            self._start()
        loop = asyncio.get_running_loop()
        while not self.closed and self._queue.pieces.empty():
            event = asyncio.Event()

            def set_event(event: asyncio.Event = event) -> None:
                with suppress(RuntimeError):  # the event loop was closed
                    loop.call_soon_threadsafe(event.set)

            self._queue.on_arrival = set_event
            try:
                if self._queue.pieces.empty():
                    await event.wait()
            finally:
                self._queue.on_arrival = None

    def _start(self) -> None:
        self._home.require()
        if not self._begun:
            self._begun = True
            self._begin(self, self._queue)
