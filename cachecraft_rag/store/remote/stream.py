"""A payload that is read in order while it is still being transferred from a remote."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Literal

from cachecraft_rag.store.closeable import Closeable
from cachecraft_rag.store.layout import Encoded
from cachecraft_rag.store.remote.signing import SLICE_BYTES
from cachecraft_rag.types.variants import TierName

End = Literal["whole", "gone", "short", "failed"]
Piece = bytes | memoryview


class RemoteStream(Closeable):
    """Reads a payload from front to back: the header first, then layer 0, 1, … A `layout.ByteSource`.

    `nbytes` is the length of the whole payload. The next piece is fetched while the caller uses the last one. One
    thread reads; any other may call `close`, which ends a current read at once. Only the reading thread writes to a
    buffer, so once `read_into` has returned or raised, the caller owns the buffer again.
    """

    tier: TierName = "remote"
    sequential = True

    def __init__(
        self,
        pieces: AsyncIterator[Piece],
        nbytes: int,
        *,
        submit: Callable[[Coroutine[object, object, Piece]], Future[Piece]],
        timeout_s: float,
        first_timeout_s: float,
        ended: Callable[[End], None],
        confirms: Callable[[int, bytearray], bool] | None = None,
    ) -> None:
        """Begin to fetch.

        `submit` hands a coroutine to the tier's event loop. `ended` is called once, in the thread that reads, with the
        outcome, unless the stream is closed before, or a signature does not match. `confirms` verifies each slice of
        `SLICE_BYTES` before any of it is handed out. Time limits are for each piece, and for the first one.
        """
        self._confirms = confirms
        self._slices = 0
        self._unconfirmed = memoryview(b"")
        self.nbytes = nbytes
        self._pieces: AsyncIterator[Piece] | None = pieces
        self._submit = submit
        self._ended = ended
        self._timeout_s = timeout_s
        self._first_timeout_s = first_timeout_s
        self._lock = threading.Lock()
        self._over = False
        self._left = memoryview(b"")
        self._taken = 0
        self._parts: list[memoryview] = []
        self._next = submit(_step(pieces, first_timeout_s))

    def read(self, buffer: memoryview, at: int) -> None:
        """Fill the whole buffer from byte `at` on: where the last read ended, or OSError is raised. See `read_into`."""
        if at != self._taken:
            raise OSError(errno.ESPIPE, "a remote is read from front to back")
        self.read_into(buffer)

    def encoded(self) -> Encoded | None:
        """Return the payload as the buffers that were filled, never to be changed; None until all of it was read."""
        return tuple(self._parts) if self._taken == self.nbytes else None

    def read_into(self, buffer: memoryview) -> None:
        """Fill the whole buffer (bytes, writable) with the next bytes, and wait for them.

        The outcome is reported when the last byte was read, or at the first error of the remote: TimeoutError if it
        pauses for too long, FileNotFoundError if it has no such payload, other OSErrors, also for a buffer that goes
        beyond `nbytes`. ValueError, not reported, if the signature does not match. After an error a part of the buffer
        may have been written, and the stream is of no more use.
        """
        if self._taken + buffer.nbytes > self.nbytes:
            self._fail(
                "short",
                OSError(errno.EIO, "the remote's payload has fewer bytes than its header says"),
            )
        done = 0
        while done < buffer.nbytes:
            if not self._left:
                self._left = (
                    self._piece() if self._confirms is None else self._confirmed(self._confirms)
                )
            step = min(len(self._left), buffer.nbytes - done)
            buffer[done : done + step] = self._left[:step]
            self._left = self._left[step:]
            done += step
        self._taken += done
        self._parts.append(buffer)
        if self._taken == self.nbytes:
            self._end("whole")

    def close(self) -> None:
        """Cancel the transfer at once, without reporting an outcome; a second call does nothing.

        A read, also in another thread, then ends with OSError, or with bytes that had arrived.
        """
        with self._lock:
            self._pieces = None  # the loop closes a generator without references
            under_way = self._next
        under_way.cancel()

    def _confirmed(self, confirms: Callable[[int, bytearray], bool]) -> memoryview:
        """Return the next slice, verified."""
        wanted = min(SLICE_BYTES, self.nbytes - self._slices * SLICE_BYTES)
        whole = bytearray()
        while len(whole) < wanted:
            if not self._unconfirmed:
                self._unconfirmed = self._piece()
            step = min(len(self._unconfirmed), wanted - len(whole))
            whole += self._unconfirmed[:step]
            self._unconfirmed = self._unconfirmed[step:]
        if not confirms(self._slices, whole):
            raise ValueError("its bytes are not those that were signed")
        self._slices += 1
        return memoryview(whole)

    def _piece(self) -> memoryview:
        """Return the next piece, which is never empty."""
        coming = self._next
        try:
            # The coroutine has its own time limit; this one is for an event loop that hangs.
            piece = coming.result(self._first_timeout_s + self._timeout_s)
        except CancelledError:
            raise OSError(errno.ECANCELED, "closed while it was read from the remote") from None
        except OSError as error:  # a TimeoutError too
            self._fail("failed", error)
        if not len(piece):
            if self._taken == 0 and not self._over:
                self._fail("gone", FileNotFoundError(errno.ENOENT, "gone from the remote"))
            self._fail("short", OSError(errno.EIO, "the remote's payload is truncated"))
        with self._lock:
            if self._pieces is None:
                raise OSError(errno.ECANCELED, "closed while it was read from the remote")
            try:
                self._next = self._submit(_step(self._pieces, self._timeout_s))
            except RuntimeError as error:
                raise OSError(errno.ECANCELED, "the remote tier is closed") from error
        return memoryview(piece)

    def _fail(self, end: End, error: OSError) -> None:
        self._end(end)
        raise error

    def _end(self, end: End) -> None:
        if not self._over:
            self._over = True
            self._ended(end)


async def _step(pieces: AsyncIterator[Piece], timeout_s: float) -> Piece:
    """Return the next piece, or an empty one after the last."""
    async with asyncio.timeout(timeout_s):
        return await anext(pieces, b"")
