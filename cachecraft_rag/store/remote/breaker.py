"""A circuit breaker: after a few failures in a row the remote is not asked until a probe succeeds."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Literal

State = Literal["closed", "open", "probing"]
LONGEST_PAUSE = 16  # longest pause as a multiple of the cool-down


class Breaker:
    """Closed: requests pass. Open: requests do not pass. Probing: requests do not pass, and a probe is running.

    Failures are counted by kind: otherwise look-ups that succeed would hide reads that stall. After a probe has closed
    the breaker, one more failure of the kind that had opened it opens it for twice as long, because a probe is cheaper
    than a request and proves less. A pause is at most 16 times `cool_down_s` seconds. Any thread may call any method.

    Attributes:
        opened: how often the breaker has opened while it was closed; a probe that fails does not count.
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
        self.opened = 0  # number of times that it has opened

    @property
    def state(self) -> State:
        """The current state: "closed", "open" or "probing". "open" lasts until `take_probe` returns True."""
        return self._state

    def allows(self) -> bool:
        """Return True if a request may go to the remote: the breaker is closed. The state does not change."""
        return self._state == "closed"

    def take_probe(self) -> bool:
        """Return True once when the pause of an open breaker is over; the breaker is then probing.

        The caller then probes, and calls `succeeded` or `failed` with the kind "probe".
        """
        with self._lock:
            due = self._state == "open" and self._clock() - self._since >= self._pause_s
            if due:
                self._state = "probing"
            return due

    def succeeded(self, kind: str) -> None:
        """Record a request of this kind that succeeded: its failures are forgotten. An open breaker stays open.

        Once no kind has failures left, the next pause is `cool_down_s` seconds again. The kind "probe" forgets no
        failures, but closes a probing breaker.
        """
        with self._lock:
            if kind != "probe":
                had_failed = self._failures.pop(kind, None) is not None
                if had_failed and not self._failures:
                    self._pause_s = 0.0
            elif self._state == "probing":
                self._state = "closed"
                for failed, count in self._failures.items():
                    self._failures[failed] = min(count, self._limit - 1)

    def failed(self, kind: str) -> bool:
        """Record a failed or slow request of this kind; return True if that has just opened a closed breaker.

        It opens at the limit of failures of one kind: for `cool_down_s` seconds at first, later for twice the last
        pause. The kind "probe" opens a probing breaker again, for twice as long, and returns False.
        """
        with self._lock:
            if kind != "probe":
                self._failures[kind] += 1
            opens = self._state == "closed" and self._failures[kind] >= self._limit
            if opens or (kind == "probe" and self._state == "probing"):
                self._pause_s = min(
                    max(2 * self._pause_s, self._cool_down_s), LONGEST_PAUSE * self._cool_down_s
                )
                self.opened += opens
                self._state = "open"
                self._since = self._clock()
            return opens
