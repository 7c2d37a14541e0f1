"""A lock that is handed on in the order of asking.

`threading.Lock` may be taken again by the thread that just gave it up, so a request in a tight decode loop could
starve the others.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class FairLock:
    """A non-reentrant lock; waiting threads get it first come, first served. Use it as a context manager."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._held = False

    def __enter__(self) -> None:
        with self._guard:
            if not self._held:
                self._held = True
                return
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
        try:
            gate.acquire()  # released by the holder before us, who leaves `_held` set for us
        except BaseException:  # Ctrl-C: a turn handed to somebody who has left would never be given back
            with self._guard:
                if gate in self._waiting:
                    self._waiting.remove(gate)
                else:
                    self._hand_on()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._guard:
            self._hand_on()

    def _hand_on(self) -> None:
        """Wake the next in line; the caller holds `_guard`."""
        if self._waiting:
            self._waiting.popleft().release()
        else:
            self._held = False
