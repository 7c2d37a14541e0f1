"""Current load rate."""

from __future__ import annotations

import math
import threading
import time

_MEMORY_S = 0.5  # time constant of the exponential average, in seconds
_PRIOR_S = 0.05  # weight of an earlier request's rate, in seconds of measurement
# seconds of measurement after which the rate is reliable without an earlier request
_ENOUGH_S = 0.1


class Meter:
    """Load rate of one request: bytes per second, weighted towards the last half second, from its creation on.

    While no bytes arrive, the rate falls.
    """

    def __init__(self, expected: float | None, *, cpu_s_per_byte: float = 0.0) -> None:
        """`expected` and `cpu_s_per_byte` are those of an earlier request; None: the rate is unknown."""
        self._lock = threading.Lock()
        self._seconds = _PRIOR_S if expected is not None else 0.0
        self._bytes = (expected or 0.0) * self._seconds
        self._at = time.perf_counter()
        self._in_flight = 0.0
        self._rate = expected or 0.0  # rate at the time of the latest arrival
        self._stopped = False
        self._known = expected is not None
        self._expected_cpu = cpu_s_per_byte
        self._timed_bytes = 0.0  # of reads whose CPU time was measured
        self._cpu_s = 0.0

    def stop(self) -> None:
        """End the measurement: from now on the rate does not fall with time. A second call does nothing."""
        with self._lock:
            self._advance()
            self._stopped = True

    @property
    def warm(self) -> bool:
        """True if the rate is reliable: known from an earlier request, or measured for about 0.1 seconds."""
        with self._lock:
            self._advance()
            return self._known or self._seconds >= _ENOUGH_S

    def begin(self, nbytes: float) -> None:
        """Record that a read of `nbytes` bytes has begun; its `end` names the same number."""
        with self._lock:
            self._advance()
            self._in_flight += nbytes

    def end(self, nbytes: float, *, came: bool, cpu_s: float | None = None) -> None:
        """Record that a read of `nbytes` has ended; they count towards the rate only if it `came` successfully.

        `cpu_s` are its CPU seconds, with those of verifying and decoding, also of a failed read; None: not measured.
        """
        with self._lock:
            self._advance()
            self._in_flight = max(0.0, self._in_flight - nbytes)
            if came and self._seconds:
                self._bytes += nbytes
                self._rate = (self._bytes + self._in_flight / 2) / self._seconds
            if cpu_s is not None:
                self._timed_bytes += nbytes
                self._cpu_s += cpu_s

    @property
    def came(self) -> bool:
        """True once a read was successful, or if an earlier request's rate is known; otherwise the rate is a bound."""
        return self._rate > 0.0

    @property
    def cpu_s_per_byte(self) -> float:
        """CPU seconds per byte, mostly for verifying and decoding; before a read was measured, those expected."""
        with self._lock:
            return self._cpu_s / self._timed_bytes if self._timed_bytes else self._expected_cpu

    @property
    def cores(self) -> float:
        """Number of cores that reading keeps busy, a fraction in general; 0 while it is unknown."""
        return self.cpu_s_per_byte * self.bytes_per_s

    @property
    def bytes_per_s(self) -> float:
        """Load rate in bytes per second: of the latest arrival, or if all current reads ended now, whichever is lower.

        Before the first arrival the earlier request's rate, and without one an upper bound, 0 until a read begins.
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
