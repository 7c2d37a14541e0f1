"""The way of an answer's pieces from the step loop to its reader: a thread, or a task of an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue

from cachecraft_rag.observability.stats import Finish
from cachecraft_rag.serving.request import RequestProgress
from cachecraft_rag.serving.step_loop import Handle
from cachecraft_rag.store.processes import HomeProcess

AHEAD = 4  # tokens that wait for the reader; then the answer is not decoded further


@dataclass(frozen=True, slots=True)
class Piece:
    """The text of a token, if any is certain, the tokens generated so far, and how the answer has ended, if so."""

    text: str
    generated: int = 0
    finish: Finish | None = None
    error: BaseException | None = None


class Outlet:
    """The loop's end: pieces that the reader has not taken yet; any number of them where it is not `bounded`."""

    def __init__(self, *, bounded: bool = True) -> None:
        self._bounded = bounded
        self.pieces: SimpleQueue[Piece] = SimpleQueue()
        self.arrival: Callable[[], object] | None = None  # wakes a task that waits for a piece

    def put(self, piece: Piece) -> None:
        """Hand over a piece. Takes no lock."""
        self.pieces.put(piece)
        if (wake := self.arrival) is not None:
            wake()

    def has_room(self) -> bool:
        """Return whether one more piece may wait."""
        return not self._bounded or self.pieces.qsize() < AHEAD

    def text(self) -> str:
        """Take all pieces that are there."""
        return "".join(self.pieces.get_nowait().text for _ in range(self.pieces.qsize()))


class Reader(Handle, Iterator[str]):
    """The reader's end: begins the answer with the first piece, and gives it up when it is closed or gone.

    Args:
        progress: takes up what the pieces tell.
        begin: hands the request over to the loop.
        wake: wakes the loop.
        home: the process that the loop runs in.
    """

    __slots__ = ("_begin", "_begun", "_home", "_outlet", "_progress", "_wake")

    def __init__(
        self,
        progress: RequestProgress,
        begin: Callable[[Reader, Outlet], object],
        wake: Callable[[], object],
        home: HomeProcess,
    ) -> None:
        super().__init__()
        self._progress, self._begin, self._wake, self._home = progress, begin, wake, home
        self._outlet, self._begun = Outlet(), False

    def __next__(self) -> str:
        while not self.closed:
            self._start()
            piece = self._outlet.pieces.get()
            self._wake()  # there is room for one more
            if self.closed:  # by another thread
                self._outlet.pieces.put(piece)  # type: ignore[unreachable]  # for a further thread that waits
                break
            self._progress.generated = max(self._progress.generated, piece.generated)
            if piece.finish is not None or piece.error is not None:
                self._progress.finish, self.closed = piece.finish, True
                self._outlet.pieces.put(Piece(""))
            if piece.error is not None:
                raise piece.error
            if piece.text:
                return piece.text
        raise StopIteration

    def close(self) -> None:
        """Want no more; a thread that waits for the next piece goes on. Takes no lock; any thread may call this."""
        if not self.closed:
            self.closed = True
            self._outlet.put(Piece(""))
            self._wake()

    async def arrived(self) -> None:
        """Wait in an event loop until the next piece has come, or the end."""
        if not self.closed:
            self._start()
        loop = asyncio.get_running_loop()
        while not self.closed and self._outlet.pieces.empty():
            came = asyncio.Event()

            def wake(came: asyncio.Event = came) -> None:
                with suppress(RuntimeError):  # the event loop was closed
                    loop.call_soon_threadsafe(came.set)

            self._outlet.arrival = wake
            try:
                if self._outlet.pieces.empty():
                    await came.wait()
            finally:
                self._outlet.arrival = None

    def _start(self) -> None:
        self._home.require()
        if not self._begun:
            self._begun = True
            self._begin(self, self._outlet)
