"""A circuit breaker: after a few failures in a row the remote is left alone until a probe succeeds."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Literal

State = Literal["closed", "open", "probing"]
LONGEST_PAUSE = 16  # × the cool-down


class Breaker:
    """Closed: requests pass. Open: they do not. Probing: they do not, and one probe is on its way.

    Failures are counted by kind: with look-ups that succeed and reads that stall, the reads would never be noticed.
    Once a probe has closed it again, one more failure of a kind that had opened it opens it for twice as long: the
    probe is cheaper than the real thing and proves less. Any thread may call any method.
    """

    def __init__(self, *, failures: int, cool_down_s: float, clock: Callable[[], float]) -> None:
        self._limit = failures
        self._cool_down_s = cool_down_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failures: Counter[str] = Counter()
        self._state: State = "closed"
        self._pause_s = 0.0
        self._since = 0.0
        self.opened = 0  # how often so far

    @property
    def state(self) -> State:
        """The current state."""
        return self._state

    def allows(self) -> bool:
        """Return True if a request may go to the remote."""
        return self._state == "closed"

    def take_probe(self) -> bool:
        """Return True once when the cool-down is over: the caller probes and reports the outcome of "probe"."""
        with self._lock:
            due = self._state == "open" and self._clock() - self._since >= self._pause_s
            if due:
                self._state = "probing"
            return due

    def succeeded(self, kind: str) -> None:
        """Record a request of this kind that succeeded."""
        with self._lock:
            if kind != "probe":
                if self._failures.pop(kind, 0) and not self._failures:
                    self._pause_s = 0.0
            elif self._state == "probing":
                self._state = "closed"
                for failed, count in self._failures.items():
                    self._failures[failed] = min(count, self._limit - 1)

    def failed(self, kind: str) -> bool:
        """Record a failed or slow request of this kind; return True if that has just opened the breaker."""
        with self._lock:
            if kind != "probe":
                self._failures[kind] += 1
            opens = self._state == "closed" and self._failures[kind] >= self._limit
            if opens or (kind == "probe" and self._state == "probing"):
                self._pause_s = min(max(2 * self._pause_s, self._cool_down_s), LONGEST_PAUSE * self._cool_down_s)
                self.opened += opens
                self._state = "open"
                self._since = self._clock()
            return opens
