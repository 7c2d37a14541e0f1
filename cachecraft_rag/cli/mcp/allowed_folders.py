"""The folders that an agent may index."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cachecraft_rag.errors import ConfigError, DocumentError
from cachecraft_rag.retrievers.folders import OutsideError
from cachecraft_rag.retrievers.reading.documents import printable


@dataclass(frozen=True, slots=True)
class AllowedFolder:
    """A folder as the operator named it, and where it really is.

    named  absolute path with the operator's own spelling; it names the documents, as with `cachecraft index`
    real   the same without links
    """

    named: Path
    real: Path


class AllowedFolders:
    """The folders that the operator allowed; everything outside them is refused.

    ConfigError if one of the paths is not a folder.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        self._folders: list[AllowedFolder] = []
        for folder in folders:
            # pathlib raises for paths it cannot reach instead of returning False
            if not os.path.isdir(folder):
                raise ConfigError(
                    f"--allow {printable(folder)}: there is no such folder; check the spelling, or make it"
                )
            self._folders.append(AllowedFolder(Path(os.path.abspath(folder)), folder.resolve()))

    def __bool__(self) -> bool:
        return bool(self._folders)

    def __str__(self) -> str:
        return ", ".join(printable(folder.named) for folder in self._folders)

    def path_of(self, text: str) -> Path:
        """Return where a path that an agent sent leads, if that is an allowed folder or below one.

        It is absolute, below `~`, or relative to the first allowed folder that has it; the result is
        `AllowedFolder.named`, and below it has no links or `..`. DocumentError if it leads out of the allowed folders
        (the message does not say whether it exists), to a hidden file or folder, or nowhere.
        """
        if not text.strip():
            raise DocumentError(f"the path is empty; name a file or folder below {self}")
        if "\0" in text:
            raise DocumentError(
                f"the path holds a NUL character; name a file or folder below {self}"
            )
        is_missing = False
        for folder in self._folders:
            target = _resolved(folder.real / os.path.expanduser(text))
            if target is None or not target.is_relative_to(folder.real):
                continue
            below = target.relative_to(folder.real)
            if any(part.startswith(".") for part in below.parts):
                raise DocumentError(
                    f"{text}: hidden files and folders are not indexed; name another"
                )
            if os.path.lexists(target):
                return folder.named / below
            is_missing = True
        if is_missing:
            raise DocumentError(
                f"{text}: there is no such file or folder below {self}; check the spelling"
            )
        raise DocumentError(
            f"{text}: is outside the folders that may be indexed ({self}); name a path below one of them, or ask the "
            "operator to start the server with --allow for its folder"
        )

    def open(self, path: str, flags: int) -> int:
        """Open a file or folder below an allowed folder and return its descriptor; an opener for Python's `open`.

        Links in the path are resolved first. The real path is then opened folder by folder without following links, so
        a link that replaces a part of it meanwhile is refused. Systems that cannot do that (Windows) open the real path
        by its name, and compare afterwards what was opened with what is there.

        OutsideError if the path leads out of the allowed folders, changed while it was opened, or is of another kind.
        """
        real = Path(os.path.realpath(path))
        if not any(real.is_relative_to(folder.real) for folder in self._folders):
            raise OutsideError(
                f"{printable(path)}: now leads out of the folders that may be indexed ({self}), so it was not read; "
                "put the file back, or restart the server if an allowed folder has moved"
            )
        try:
            descriptor = _opened_without_links(real, flags)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):  # met a link, or a file as a folder
                raise OutsideError(_replaced(path)) from error
            raise
        if not _is_at(real, descriptor, is_folder=bool(flags & getattr(os, "O_DIRECTORY", 0))):
            os.close(descriptor)
            raise OutsideError(_replaced(path))
        return descriptor


def _opened_without_links(real: Path, flags: int) -> int:
    """Open a path without links, refusing links that replaced parts of it where the system can."""
    if os.open not in os.supports_dir_fd:
        return os.open(real, flags)
    # O_PATH: the folders above an allowed one may be closed to listing
    folder_flags = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW
    folder = os.open(real.anchor, folder_flags)
    try:
        for name in real.parts[1:-1]:
            below = os.open(name, folder_flags, dir_fd=folder)
            os.close(folder)
            folder = below
        # O_NONBLOCK: a pipe would wait for its writer
        return os.open(real.name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)


def _is_at(real: Path, descriptor: int, *, is_folder: bool) -> bool:
    """Return True if a folder or regular file is open, and was opened without links or is still what `real` names."""
    opened = os.fstat(descriptor)
    if not (stat.S_ISDIR if is_folder else stat.S_ISREG)(opened.st_mode):
        return False
    if os.open in os.supports_dir_fd:
        return True
    return Path(os.path.realpath(real)) == real and os.path.samestat(opened, os.lstat(real))


def _replaced(path: str) -> str:
    return (
        f"{printable(path)}: was replaced while it was opened, so it was not read; index it again"
    )


def _resolved(path: Path) -> Path | None:
    """Return a path without links and `..`; None for links that form a loop, and for text that no path can have."""
    try:
        resolved = path.resolve()
    # RuntimeError: a loop, before Python 3.13; ValueError: half a surrogate pair, which no path has
    except (OSError, RuntimeError, ValueError):
        return None
    return None if os.path.islink(resolved) else resolved
