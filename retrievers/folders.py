"""List the files below a folder, and what is wrong with the others. No file is opened here.

One file that cannot be read never loses the rest of a folder: it becomes a `Problem` beside the documents.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cachecraft_rag.errors import DocumentError
from cachecraft_rag.retrievers.reading.documents import (
    SUFFIXES,
    SourceFile,
    printable,
    unsupported,
)

Opener = Callable[[str, int], int]  # as for Python's `open`


class OutsideError(DocumentError):
    """Raised by an opener for a file or folder that may not be read; the kind of its problem is `outside`."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A file or folder that gave no document, or not all of it, and the reason.

    kind  `incomplete`: its document lacks something, or a splitter's chunks had to be cut; `unsupported`: not a kind of
          file that is read, a broken link, or two names that are written alike; `inaccessible`: it cannot be opened, a
          package is missing, or the user's opener, reader or splitter failed, so an earlier reading of it stays;
          `unreadable`: its content was seen and gives no text, or cannot be split; `outside`: it leads out of the
          folder, or was replaced by something that may, and was not read
    """

    doc_id: str
    kind: Literal["incomplete", "unsupported", "inaccessible", "unreadable", "outside"]
    reason: str


@dataclass(frozen=True, slots=True)
class Listing:
    """The readable files of a folder, and the problems with others, both sorted by `doc_id`."""

    files: tuple[SourceFile, ...]
    problems: tuple[Problem, ...]


def list_files(
    path: str | os.PathLike[str],
    *,
    follow_links: bool = False,
    opener: Opener | None = None,
    more: Container[str] = (),
) -> Listing:
    """List the files to read at `path`: itself, or all below it whose suffix (".pdf") is in `SUFFIXES` or `more`.

    Names that begin with a dot are skipped silently; other kinds of file, and what cannot be opened, are problems. A
    link is followed if it leads to a place in the folder, or with `follow_links`; otherwise it is a problem. Each
    folder is entered once, under its own name rather than a link's, so loops end. An `opener` opens folders instead of
    their names; those that it refuses (DocumentError) are problems. A `doc_id` is the POSIX path below `path`, "" for
    `path` itself, and the name of a single file. Raises DocumentError as `require_readable`.
    """
    root = Path(path)
    file = require_readable(root, more)
    if file is not None:
        return Listing((file,), ())
    files: dict[str, SourceFile] = {}
    problems: list[Problem] = []
    found = _walk(root, more, opener, follow_links=follow_links)
    for item in sorted(found, key=lambda item: (item.doc_id, str(item))):
        if isinstance(item, Problem):
            problems.append(item)
        # `\xff.md` may be a name, or how a byte is written
        elif files.setdefault(item.doc_id, item) is not item:
            reason = (
                f"{printable(item.path)}: another file's name is written the same way; rename it"
            )
            problems.append(Problem(item.doc_id, "unsupported", reason))
    return Listing(tuple(files.values()), tuple(problems))


def require_readable(path: Path, more: Container[str] = ()) -> SourceFile | None:
    """Return the file at a path, with its name as `doc_id`; None for a folder.

    DocumentError for anything else: nothing, a device, or a suffix in neither `SUFFIXES` nor `more` (lower case).
    """
    file = _found(path, printable(path.name), None, more)
    if isinstance(file, Problem):
        raise DocumentError(file.reason)
    return file


def inaccessible(path: Path, error: OSError) -> str:
    """Return the message for a file or folder that exists but cannot be opened."""
    return f"{printable(path)}: cannot be opened ({error.strerror or error}); check its permissions and the disk"


def _walk(
    root: Path, more: Container[str], opener: Opener | None, *, follow_links: bool
) -> Iterator[SourceFile | Problem]:
    """Yield the files below a root, and the problems with others. Links to folders wait until the end."""
    real_root = root.resolve()
    folders = [(root, "")]
    links: list[tuple[Path, str]] = []
    entered: set[Path] = set()
    while folders or links:
        folder, below = folders.pop() if folders else links.pop(0)
        real = folder.resolve()
        # A link to a folder that holds the root would bring in the root's neighbours: as much a loop as one below.
        if real in entered or (real != real_root and real in real_root.parents):
            continue
        entered.add(real)
        try:
            names = sorted(_names(folder, opener))
        except OSError as error:
            yield Problem(below, "inaccessible", inaccessible(folder, error))
            continue
        except OutsideError as error:
            yield Problem(below, "outside", str(error))
            continue
        except DocumentError as error:  # of an opener
            yield Problem(below, "inaccessible", str(error))
            continue
        for name in names:
            if name.startswith("."):
                continue
            path = folder / name
            doc_id = f"{below}/{printable(name)}".lstrip("/")
            file = _found(path, doc_id, None if follow_links else real_root, more)
            if file is not None:
                yield file
            else:
                (links if path.is_symlink() else folders).append((path, doc_id))


def _names(folder: Path, opener: Opener | None) -> list[str]:
    """Return the names in a folder, which the opener opens if there is one."""
    if opener is None or os.listdir not in os.supports_fd:
        return os.listdir(folder)
    descriptor = opener(str(folder), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return os.listdir(descriptor)
    finally:
        os.close(descriptor)


def _found(
    path: Path, doc_id: str, root: Path | None, more: Container[str]
) -> SourceFile | Problem | None:
    """Return the file or the problem at a path, such as a link out of `root`; None for a folder to enter."""
    try:
        mode = path.stat().st_mode  # a link to itself raises here
        is_outside = path.is_symlink() and root and not path.resolve().is_relative_to(root)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in it
        missing = (
            "there is no such file or folder; check the spelling. If it was deleted on purpose, index an empty folder "
            "in its place: that removes its documents"
        )
        is_link = os.path.islink(path)
        reason = "a link that leads nowhere; mend or remove it" if is_link else missing
        return Problem(doc_id, "unsupported", f"{printable(path)}: {reason}")
    except OSError as error:
        return Problem(doc_id, "inaccessible", inaccessible(path, error))
    if is_outside:
        advice = "if you trust it, pass --follow-links (follow_links=True)"
        reason = f"{printable(path)}: a link that leads out of the folder is not followed; {advice}"
        return Problem(doc_id, "outside", reason)
    if stat.S_ISDIR(mode):
        return None
    suffix = path.suffix.lower()
    if stat.S_ISREG(mode) and (suffix in SUFFIXES or suffix in more):
        return SourceFile(path, doc_id)
    device = (
        "is a pipe, socket or device, not a file; copy its content into a file, or leave it out"
    )
    reason = unsupported(path) if stat.S_ISREG(mode) else f"{printable(path)}: {device}"
    return Problem(doc_id, "unsupported", reason)
