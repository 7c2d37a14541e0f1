"""A token bucket: keeps reads below a rate of bytes per second, across all threads that share it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator

_BURST_S = 0.005  # so much may be read at once after a pause
_PIECE_BYTES = 64 << 10  # a throttled read is handed out in such pieces, so that a new rate is felt soon


class Throttle:
    """Limits a rate; without one it costs nothing.

    Attributes:
        bytes_per_s: the rate; may be changed at any time, from any thread.
    """

    def __init__(self, bytes_per_s: float = math.inf) -> None:
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._tokens, self._filled = 0.0, time.perf_counter()

    def pieces(self, buffer: memoryview) -> Iterator[tuple[memoryview, int]]:
        """`buffer` in pieces and their offsets, each handed out when the rate allows it."""
        if self.bytes_per_s == math.inf:
            yield buffer, 0
            return
        for start in range(0, len(buffer), _PIECE_BYTES):
            piece = buffer[start : start + _PIECE_BYTES]
            self._take(len(piece))
            yield piece, start

    def _take(self, nbytes: int) -> None:
        """Wait for `nbytes`; the bucket goes into debt, so the next caller waits for them too."""
        with self._lock:
            now = time.perf_counter()
            filled = self._tokens + (now - self._filled) * self.bytes_per_s
            self._tokens, self._filled = min(filled, self.bytes_per_s * _BURST_S) - nbytes, now
            due = now - self._tokens / self.bytes_per_s if self._tokens < 0 else now
        while (left := due - time.perf_counter()) > 0:
            time.sleep(min(left, 0.05))
            if self.bytes_per_s == math.inf:
                return
