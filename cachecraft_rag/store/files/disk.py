"""The disk tier: one file per variant, written once, never changed; see `store.layout` for its contents."""

from __future__ import annotations

import errno
import math
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from cachecraft_rag.store.catalog_records import FileRef
from cachecraft_rag.store.layout import READ_ERRORS, Encoded, StoredVariant, open_source, unreadable
from cachecraft_rag.types.store_reasons import Damaged, LoadFailure, Unavailable
from cachecraft_rag.types.variants import LoadedVariant, TierName, Variant

# Of a file, or of a temporary one, which begins with a dot and names its writer.
_NAME = re.compile(
    r"(\.)?(?P<id>[0-9a-f]{32})-(?P<created>[0-9a-f]{16})\.safetensors(?(1)\.[0-9a-f]+\.tmp)"
)
_ID = re.compile(r"[0-9a-f]{32}")
_WRITER = re.compile(r"[0-9a-f]+")

_BURST_S = 0.005  # seconds of reading that a pause saves up
_PIECE_BYTES = 64 << 10  # bytes per piece of a throttled read, so that a new rate takes effect soon


class Throttle:
    """A token bucket that keeps the reads of all threads below a rate; without a rate it costs nothing.

    Attributes:
        bytes_per_s: rate limit in bytes per second, above 0; infinity: no limit. Any thread may change it at any time.
    """

    def __init__(self, bytes_per_s: float = math.inf) -> None:
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._tokens = 0.0
        self._filled = time.perf_counter()

    def pieces(self, buffer: memoryview) -> Iterator[tuple[memoryview, int]]:
        """Yield `buffer` in pieces of up to 64 KiB with offsets, each once the rate allows it; whole without a rate."""
        if self.bytes_per_s == math.inf:
            yield buffer, 0
            return
        for start in range(0, len(buffer), _PIECE_BYTES):
            piece = buffer[start : start + _PIECE_BYTES]
            self._take(len(piece))
            yield piece, start

    def _take(self, nbytes: int) -> None:
        """Wait for `nbytes`. They are taken before the wait, so the next caller waits for them too."""
        with self._lock:
            now = time.perf_counter()
            filled = self._tokens + (now - self._filled) * self.bytes_per_s
            self._tokens = min(filled, self.bytes_per_s * _BURST_S) - nbytes
            self._filled = now
            due = now - self._tokens / self.bytes_per_s if self._tokens < 0 else now
        while (left := due - time.perf_counter()) > 0:
            time.sleep(min(left, 0.05))
            if self.bytes_per_s == math.inf:
                return


class _Descriptor:
    """An open file, closed after its last reader: otherwise a read could use another file with the same number."""

    number = -1  # Ctrl-C may come before it is set

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


class _File:
    """A file as a `layout.ByteSource`."""

    tier: TierName = "disk"
    sequential = False

    def __init__(self, path: Path, throttle: Throttle) -> None:
        self._opened: _Descriptor | None = _Descriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        self._throttle = throttle

    @property
    def nbytes(self) -> int:
        return os.fstat(self._held().number).st_size

    def read(self, buffer: memoryview, at: int) -> None:
        for piece, offset in self._throttle.pieces(buffer):
            held = self._held()
            if _transfer(os.preadv, held.number, piece, at=at + offset) != len(piece):
                raise OSError(errno.EIO, "the file shrank while it was read")

    def close(self) -> None:
        self._opened = None

    def _held(self) -> _Descriptor:
        if (opened := self._opened) is None:
            raise OSError(errno.EBADF, "the file was closed")
        return opened


class DiskTier:
    """Files below `root`, in two levels of folders that are named by the first digits of a variant's id."""

    def __init__(self, root: Path, throttle: Throttle | None = None) -> None:
        """Use the folder `root`, which `write` creates; `throttle` limits how fast it is read."""
        self.root = root
        self.throttle = throttle or Throttle()

    def path(self, variant_id: str, created: float) -> Path:
        """Return the path of this variant's file.

        `created` is part of the name: a replacement gets another file, so an old row never refers to a new file. For
        what is no id or time, as in a damaged row, it is a path in `root` that no file has.
        """
        if not (
            isinstance(created, float | int)
            and isinstance(variant_id, str)
            and _ID.fullmatch(variant_id)
        ):
            return self.root / "none"  # the id of a damaged row must not lead out of the folder
        name = f"{variant_id}-{struct.pack('>d', created).hex()}.safetensors"
        return self.root / variant_id[:2] / variant_id[2:4] / name

    def _temporary(self, path: Path, writer: str) -> Path:
        if not _WRITER.fullmatch(writer):
            return self.root / "none"
        return path.with_name(f".{path.name}.{writer}.tmp")

    def write(self, variant: Variant, encoded: Encoded, *, writer: str) -> None:
        """Write the file completely, wait until it is synced, and then give it its name.

        A file of the same id and time is replaced. `writer`, a `Writers.token`, marks the temporary file. After an
        error neither file exists, unless only the last step failed, which syncs the folder.
        """
        path = self.path(variant.variant_id, variant.created)
        temporary = self._temporary(path, writer)
        self._make_folder(path.parent)
        try:
            descriptor = os.open(
                temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666
            )
            try:
                at = 0
                for part in encoded:
                    at += _transfer(os.pwritev, descriptor, part, at=at)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.rename(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)

    def open(self, variant: Variant) -> StoredVariant | Unavailable:
        """Open the file and verify its header; return the opened variant, without an allocated tensor, or the reason.

        The reason is a `Damaged` for a missing or damaged file and one of another variant, which can never be read.
        """
        try:
            source = _File(self.path(variant.variant_id, variant.created), self.throttle)
        except FileNotFoundError:
            return Damaged(variant.variant_id, LoadFailure.MISSING, "file is missing")
        except OSError as error:
            why = f"file cannot be opened: {error.strerror}"
            return Unavailable(variant.variant_id, LoadFailure.UNREADABLE, why)
        return open_source(source, variant)

    def read(self, variant: Variant) -> LoadedVariant | Unavailable:
        """Return the whole tensor, with every byte verified, or the reason why it cannot be read.

        The file is closed again, and nothing is kept or counted. For the reasons see `open`.
        """
        stored = self.open(variant)
        if isinstance(stored, Unavailable):
            return stored
        try:
            stored.allocate()
            return LoadedVariant(variant.variant_id, stored.read_all(), "disk")
        except READ_ERRORS as error:
            return unreadable(variant.variant_id, error)
        finally:
            stored.close()

    def remove(self, variant_id: str, created: float) -> None:
        """Delete the file, if it exists; its folder stays."""
        self.path(variant_id, created).unlink(missing_ok=True)

    def sync_removed(self, files: Iterable[FileRef]) -> None:
        """Sync the folders of deleted files, so that a power cut brings none back."""
        for folder in {self.path(file.variant_id, file.created).parent for file in files}:
            if folder.is_dir():
                sync_folder(folder)

    def leftovers(self, variant_id: str, created: float, writer: str) -> list[Path]:
        """Return the existing files, temporary and final, of a variant that `writer` was about to create or delete."""
        path = self.path(variant_id, created)
        return [part for part in (self._temporary(path, writer), path) if part.exists()]

    def scan(self) -> Iterator[tuple[Path, FileRef]]:
        """Yield the path of every file below the root, temporary ones too, with its size, and id and time of its name.

        A file whose name is not of this store has the id "" and the time 0.0. A folder that cannot be listed, and what
        cannot be looked at, is left out.
        """
        for folder, _, names in os.walk(self.root):
            for name in names:
                path = Path(folder, name)
                try:
                    nbytes = path.lstat().st_size
                except (FileNotFoundError, PermissionError):
                    continue
                if (match := _NAME.fullmatch(name)) is None:
                    yield path, FileRef("", 0.0, nbytes)
                    continue
                created: float = struct.unpack(">d", bytes.fromhex(match["created"]))[0]
                yield path, FileRef(match["id"], created, nbytes)

    def _make_folder(self, folder: Path) -> None:
        """Create the folder and sync every changed parent: otherwise a power cut could lose a synced file."""
        missing = [folder, *folder.parents]
        missing = missing[: next(i for i, parent in enumerate(missing) if parent.is_dir())]
        for new in reversed(missing):
            new.mkdir(exist_ok=True)  # another process may have created it
            sync_folder(new.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _transfer(
    call: Callable[[int, list[memoryview], int], int],
    descriptor: int,
    buffer: memoryview,
    *,
    at: int,
) -> int:
    """Repeat `preadv` or `pwritev` until the end of the buffer or the file; return the bytes transferred.

    A call transfers at most 2 GiB on Linux, and may transfer less at any time.
    """
    done = 0
    while done < len(buffer):
        moved = call(descriptor, [buffer[done:]], at + done)
        if moved == 0:
            break
        done += moved
    return done
