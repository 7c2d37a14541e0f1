"""Guard against use after a fork: threads, locks and connections to SQLite do not survive one."""

from __future__ import annotations

import os

from cachecraft_rag.errors import ForkError


class HomeProcess:
    """The process that created this object. A forked child has its memory, but none of its threads."""

    def __init__(self, what: str) -> None:
        """`what` names the object in messages."""
        self._what = what
        self._pid = os.getpid()

    @property
    def here(self) -> bool:
        """True in that process, False in a fork of it."""
        return os.getpid() == self._pid

    def require(self) -> None:
        """Raise ForkError in a forked child, with advice; do nothing in the process that created this object."""
        if not self.here:
            raise ForkError(
                f"The {self._what} was opened in process {self._pid} and cannot be used in its fork ({os.getpid()}): "
                "its threads do not run there. Fork first and open one in each child. If a model has already run, "
                "start processes with spawn instead: multiprocessing.get_context('spawn')."
            )
