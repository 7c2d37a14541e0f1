"""A lock that is handed on in the order of asking.

`threading.Lock` may be taken again by the thread that just gave it up, so a request in a tight decode loop could
starve the others.

It is a queue of tickets (a CLH lock): each waits for the one before it, and leaving it is one call into C. Python
raises KeyboardInterrupt, and what `PyThreadState_SetAsyncExc` sends, between two of its own instructions only. So no
interruption can lose the lock, which one in the first line of a Python `__exit__` would.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class FairLock:
    """A non-reentrant lock; waiting threads get it first come, first served: `with lock.take(): …`."""

    def __init__(self) -> None:
        self._guard = threading.Lock()  # of `_last`
        self._last: Ticket | None = None

    def take(self) -> Ticket:
        """A ticket, to be used in one `with` block: entering it waits for its turn, leaving it hands the lock on."""
        return Ticket(self)


class Ticket:
    """One place in line. `before` is whom it waits for; None once it has had its turn."""

    __slots__ = ("__exit__", "_gate", "_lock", "before")

    __exit__: Callable[..., None]

    def __init__(self, lock: FairLock) -> None:
        self._lock = lock
        self._gate = threading.Lock()  # open once this ticket has left, with or without its turn
        self._gate.acquire()
        self.before: Ticket | None = None
        # Looked up by `with` before it enters. A Python method here could be interrupted before its first line.
        self.__exit__ = self._gate.__exit__

    def __enter__(self) -> None:
        try:
            with self._lock._guard:
                self.before, self._lock._last = self._lock._last, self
            while (before := self.before) is not None:
                with before._gate:  # stays open: every later ticket passes as well
                    pass
                self.before = before.before  # None: it had its turn; else it left early, and we take its place
        except BaseException:  # Ctrl-C, here or while waiting
            self._gate.release()
            raise

    @property
    def gone(self) -> bool:
        """Whether it has left the line."""
        return not self._gate.locked()
