"""Which writers of a store are alive, across processes.

Every open store holds an exclusive lock on a small file named by a random token; the system releases the lock when the
process ends, however it ends. A process id in the file's name was rejected: ids are used again, and mean nothing to
another container that shares the folder.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterator
from pathlib import Path


class Presence:
    """This store's own token, and a way to ask about those of others."""

    def __init__(self, folder: Path, *, announce: bool = True) -> None:
        """Announce a new writer in `folder`, which is created; one that only reads says nothing. Raises OSError."""
        self.folder = folder
        self.token = uuid.uuid4().hex
        self._descriptor = -1
        if not announce:
            return
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            self._descriptor = os.open(self._path(self.token), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            # Between the two calls another process may have taken the file for a dead writer's and deleted it.
            if self._path(self.token).exists():
                return
            os.close(self._descriptor)

    def _path(self, token: str) -> Path:
        return self.folder / f"{token}.lock"

    def is_alive(self, token: str) -> bool:
        """Whether the writer of this token still runs. False is final: tokens are never used twice."""
        if token == self.token:
            return True
        if not (isinstance(token, str) and token.isalnum()):  # of a damaged row: no token of ours
            return False
        try:
            descriptor = os.open(self._path(token), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            # Shared: two who ask do not take each other for the owner.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def dead(self) -> Iterator[str]:
        """Tokens of writers that ended without saying so."""
        for path in self.folder.glob("*.lock"):
            if not self.is_alive(path.stem):
                yield path.stem

    def bury(self, token: str) -> None:
        """Delete the lock file of a dead writer; call it when nothing of that writer is left."""
        self._path(token).unlink(missing_ok=True)

    def leave(self) -> None:
        """Say goodbye: from now on this writer counts as gone."""
        if self._descriptor >= 0:
            self.bury(self.token)
            os.close(self._descriptor)
