"""Current rate of loading."""

from __future__ import annotations

import math
import threading
import time

_MEMORY_S = 0.5  # what is longer ago counts for little: a rate that changes is noticed within a part of a second
_PRIOR_S = 0.05  # an earlier request's rate counts like this much time of measuring
_ENOUGH_S = 0.1  # of measuring, where there was none


class Meter:
    """The rate of one request's loading: bytes per second, weighted towards the last half second.

    Silence counts: while nothing comes, the rate falls.
    """

    def __init__(self, expected: float | None, *, cpu_s_per_byte: float = 0.0) -> None:
        """`expected` and `cpu_s_per_byte` are those of an earlier request; None = the rate is not known."""
        self._lock = threading.Lock()
        self._seconds = _PRIOR_S if expected is not None else 0.0
        self._bytes = (expected or 0.0) * self._seconds
        self._at = time.perf_counter()
        self._in_flight = 0.0
        self._rate = expected or 0.0  # as it was when something came last
        self._stopped = False
        self._known = expected is not None
        self._expected_cpu = cpu_s_per_byte
        self._read_bytes = 0.0
        self._cpu_s = 0.0

    def stop(self) -> None:
        """End the measurement: silence counts no longer."""
        with self._lock:
            self._advance()
            self._stopped = True

    @property
    def warm(self) -> bool:
        """True if the rate can be relied on: known before, or measured for long enough."""
        with self._lock:
            self._advance()
            return self._known or self._seconds >= _ENOUGH_S

    def begin(self, nbytes: float) -> None:
        """Record that this many bytes were asked for."""
        with self._lock:
            self._advance()
            self._in_flight += nbytes

    def end(self, nbytes: float, *, came: bool, cpu_s: float = 0.0) -> None:
        """Record that they came, or will not come; `cpu_s` is the CPU time of reading, verifying and decoding."""
        with self._lock:
            self._advance()
            self._in_flight = max(0.0, self._in_flight - nbytes)
            if came and self._seconds:
                self._bytes += nbytes
                self._rate = (self._bytes + self._in_flight / 2) / self._seconds
            self._read_bytes += nbytes
            self._cpu_s += cpu_s

    @property
    def came(self) -> bool:
        """True if the rate was measured, now or by an earlier request; else it is the highest that is possible."""
        return self._rate > 0.0

    @property
    def cpu_s_per_byte(self) -> float:
        """CPU time of reading, of verifying and decoding for the most part; as expected until something was read."""
        with self._lock:
            return self._cpu_s / self._read_bytes if self._read_bytes else self._expected_cpu

    @property
    def cores(self) -> float:
        """Number of cores that reading keeps busy at this rate."""
        return self.cpu_s_per_byte * self.bytes_per_s

    @property
    def bytes_per_s(self) -> float:
        """The rate when something came last, unless it would be lower if all in flight came now; but not for ever.

        Before anything has come it is the highest that is possible; 0 when nothing is known or was asked for.
        """
        with self._lock:
            self._advance()
            most = (self._bytes + self._in_flight) / self._seconds if self._seconds else 0.0
            return min(self._rate or most, most)

    def _advance(self) -> None:
        if self._stopped:
            return
        now = time.perf_counter()
        kept = math.exp((self._at - now) / _MEMORY_S)
        self._bytes *= kept
        self._in_flight *= kept
        self._seconds = self._seconds * kept + _MEMORY_S * (1.0 - kept)
        self._at = now
