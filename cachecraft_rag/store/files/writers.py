"""Running writers of a store, across processes.

Every open store holds an exclusive lock on a small file named by a random token. The system releases the lock when the
process ends, even if it is killed. Rejected: a process id as the name, because ids are reused, and differ between
containers that share the folder.
"""

from __future__ import annotations

import fcntl
import os
import threading
import uuid
from contextlib import suppress
from pathlib import Path

_LONGEST_TOKEN = 64  # ours have 32 characters


class Writers:
    """Tokens of the writers on a folder, including this store's token."""

    def __init__(self, folder: Path) -> None:
        """Choose a token, which counts as alive after `enter`."""
        self.folder = folder
        self.token = uuid.uuid4().hex
        self._descriptor = -1
        self._lock = threading.Lock()

    def enter(self) -> None:
        """Count as alive until `leave`: create this token's lock file and lock it. A second call does nothing.

        Called before every write, because readers need no file.
        """
        with self._lock:
            if self._descriptor >= 0:
                return
            self.folder.mkdir(parents=True, exist_ok=True)
            while True:
                descriptor = os.open(
                    self._path(self.token), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666
                )
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                # Between the two calls another process may have deleted the file as that of a dead writer.
                if self._path(self.token).exists():
                    self._descriptor = descriptor
                    return
                os.close(descriptor)

    def _path(self, token: str) -> Path:
        return self.folder / f"{token}.lock"

    def is_alive(self, token: str) -> bool:
        """Return True if the writer of this token still runs; always for this object's own token.

        False is final once that writer has entered: tokens are never used twice. Raises OSError if its lock file cannot
        be opened.
        """
        if token == self.token:
            return True
        # from a damaged row, so not a token
        if not (isinstance(token, str) and token.isalnum() and len(token) <= _LONGEST_TOKEN):
            return False
        try:
            descriptor = os.open(self._path(token), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            # A shared lock: two processes that check at the same time do not take each other for the owner.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def remove_stale_locks(self) -> None:
        """Delete the lock files of killed writers, whose other files the caller has removed before."""
        for path in self.folder.glob("*.lock"):
            if not self.is_alive(path.stem):
                path.unlink(missing_ok=True)

    def leave(self) -> None:
        """Undo `enter`, if it was called: delete the lock file, or leave that to the next opening, and release it."""
        with self._lock:
            if self._descriptor >= 0:
                with suppress(OSError):
                    self._path(self.token).unlink(missing_ok=True)
                os.close(self._descriptor)
                self._descriptor = -1
