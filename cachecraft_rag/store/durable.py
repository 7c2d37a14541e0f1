"""Consistent rows and files: the part of a store that survives the process.

Order of a write: make room, note the file as at risk, write to a temporary name, sync, rename, insert the row, commit.
Order of an eviction: delete the row, commit, unlink, settle. So at any time a kill leaves either a whole chunk-cache
with its row, or a file that the catalog notes as at risk, which is removed when the store is opened next. Such files,
and files that are about to be deleted, count until then: the byte budget holds at any time, in all processes.

On a full disk SQLite cannot delete a row. Then files are deleted first, which makes room; a row without a file counts
as a miss.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from cachecraft_rag.errors import StoreError
from cachecraft_rag.store.catalog import Catalog, DiskFullError, OtherVersionError
from cachecraft_rag.store.catalog.eviction_rules import SECONDS_BETWEEN_RUNS, EvictionRule
from cachecraft_rag.store.catalog_records import DamagedRow, FileRef, Limits, Listed, RowFilter
from cachecraft_rag.store.eviction import Policy
from cachecraft_rag.store.files.audit_file import forget_texts
from cachecraft_rag.store.files.disk import DiskTier, Throttle, sync_folder
from cachecraft_rag.store.files.writers import Writers
from cachecraft_rag.store.layout import Encoded, size_of
from cachecraft_rag.types.captures import TokenScores
from cachecraft_rag.types.progress import Progress
from cachecraft_rag.types.store_reasons import CaptureDrop, Damaged, EvictionReason, Unavailable
from cachecraft_rag.types.variants import Variant

FindingKind = Literal[
    "missing file",
    "damaged file",
    "damaged row",
    "file without row",
    "leftover of a writer",
    "foreign file",
    "catalog",
]
_NOT_DELETED = "the file cannot be deleted (see the log)"
_KILLED = "its process ended in the middle"
_ATTEMPTS = 5  # attempts to make room before other writers take it
CATALOG_FILE = "catalog.sqlite"
SET_ASIDE = "set-aside"  # folder of the chunk-caches of another version
logger = logging.getLogger("cachecraft_rag.store")


@dataclass(frozen=True, slots=True)
class Finding:
    """A flaw: its kind, its place, the reason in words, the action in words, and whether it is repaired.

    The action is the one that the check took, or would take with `repair`. For a flaw that a check never repairs it is
    advice, or says that the file was left alone.
    """

    kind: FindingKind
    path: Path
    what: str
    action: str
    repaired: bool = False


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Result of a check.

    rows      number of rows, damaged ones included
    files     number of files in the folder of chunk-caches, temporary and foreign ones included
    nbytes    bytes of these files
    repaired  True if the check was asked to repair, also if nothing had to be repaired
    findings  the flaws; empty without any
    """

    rows: int
    files: int
    nbytes: int
    repaired: bool
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Evicted:
    """Number of the variants that were evicted, and their bytes on disk."""

    variants: int
    nbytes: int


@runtime_checkable
class Caches(Protocol):
    """Chunk-caches that can be evicted: `ChunkCacheStore`, of all tenants, or `client.http.ServerCaches`, of one."""

    def evict(self, chosen: RowFilter | None = None) -> Evicted:
        """Remove the chosen chunk-caches; return their number and their bytes on disk.

        Both accept a filter by chunk ids alone; for others see `ChunkCacheStore.evict`.
        """

    def remove_chunks(self, chunk_ids: Sequence[str]) -> Evicted:
        """Remove what holds these chunks or was captured after one, even indirectly; refuse it until readmitted."""

    def readmit_chunks(self, chunk_ids: Sequence[str]) -> frozenset[str]:
        """Let these chunks be stored again; return the ids of all that are still removed. () only returns them."""


class DurableVariants:
    """The catalog and the disk tier of one store folder, changed only in an order that survives a kill.

    Every method may be called from any thread. `on_removed(variant_id, created)` is called, in that thread, for every
    variant whose row was removed here, not by another process, so that memory can drop it.
    """

    def __init__(
        self,
        root: Path,
        *,
        limits: Mapping[str, int],
        defaults: Limits,
        busy_timeout_s: float,
        on_removed: Callable[[str, float], None],
        throttle: Throttle | None = None,
        policy: Policy | None = None,
        rules: Sequence[EvictionRule] = (),
    ) -> None:
        """Open the folder, remove files left by killed writers, and apply the limits and the rules.

        `limits` are stored with the folder; other limits keep their stored values, by default `defaults`.
        """
        self._on_removed = on_removed
        self._busy_timeout_s = busy_timeout_s
        self._rules = tuple(rules)
        self._rules_applied = -math.inf
        self._lock = threading.Lock()
        self._unsettled: list[FileRef] = []
        self._interrupted: list[FileRef] = []
        self._evictions: Counter[EvictionReason] = Counter()
        path = root / CATALOG_FILE
        try:
            self.catalog = _opened(
                partial(Catalog, path, busy_timeout_s=busy_timeout_s, policy=policy), path
            )
            self._writers = Writers(root / "writers")
            self._file = _identity(path)
        except OSError as error:
            raise _unusable(root, error) from error
        self.read_only = self.catalog.read_only
        self.disk = DiskTier(root / "variants", throttle)
        self._gone = False
        try:
            self.limits = replace(defaults, **(self.catalog.limits() | dict(limits)))
            if self.read_only:
                return
            with suppress(DiskFullError):  # done when the store is opened next
                if leftovers := self._sweep(repair=True):
                    logger.info(
                        "Removed %d unfinished files of writers that were killed", len(leftovers)
                    )
                self.catalog.set_limits(limits)
            over, why = self.catalog.over(self.limits)
            if over:
                self._evict(over, why)
            self.apply_rules()
        except OSError as error:
            self.close()
            raise _unusable(root, error) from error
        except BaseException:  # Ctrl-C too: the folder is released
            self.close()
            raise

    def close(self) -> None:
        """Close the catalog and delete the lock file, now or at the next opening; a second call does nothing."""
        self._writers.leave()
        self.catalog.close()

    def gone(self) -> bool:
        """Return True if the folder was deleted or replaced since it was opened (for good), or is out of reach now.

        SQLite continues with a deleted file without noticing, and new files would be in a folder without a catalog.
        """
        try:
            self._gone = self._gone or _identity(self.catalog.path) != self._file
        except (FileNotFoundError, NotADirectoryError):
            self._gone = True
        except OSError:  # temporarily out of reach
            return True
        return self._gone

    def evictions(self) -> dict[EvictionReason, int]:
        """Return reason → number of variants that this process removed, also those whose rows stay on a full disk."""
        with self._lock:
            return dict(self._evictions)

    def write(
        self,
        variant: Variant,
        encoded: Encoded,
        token_scores: TokenScores,
        *,
        extra_variant: bool = False,
        sources: Sequence[Variant] = (),
    ) -> Unavailable | None:
        """Store a variant, and evict others if needed; return None, or the reason why it cannot be stored.

        It takes the place of an older variant of the same identity. Others are evicted for the byte budget, the number
        of variants, and the number of variants of its chunk. For `extra_variant` and `sources` see
        `types.captures.Capture`. Raises OSError if its file cannot be written. After an error the file is deleted,
        now or when the store is opened next, and if it was begun, `on_removed` is called for the variant itself.
        """
        if self.read_only:
            return Unavailable(variant.variant_id, CaptureDrop.READ_ONLY, "the store is read-only")
        if self.gone():
            return Unavailable(
                variant.variant_id, CaptureDrop.FOLDER_GONE, "the store's folder is gone"
            )
        writer = self._writers.token
        limits = self.limits
        nbytes = size_of(encoded)
        if nbytes > limits.disk_bytes:
            return too_large(variant, nbytes, limits)
        self._writers.enter()
        self.finish_interrupted()
        for _ in range(_ATTEMPTS):
            gone = self.catalog.reserve(variant, file_bytes=nbytes, writer=writer, limits=limits)
            if not gone:
                break
            self.delete(gone)
        if gone is None or gone:
            why = "no room: other writers have taken the whole byte budget"
            return Unavailable(variant.variant_id, CaptureDrop.NO_ROOM, why)
        try:
            self.disk.write(variant, encoded, writer=writer)
            gone = self.catalog.commit(
                variant,
                token_scores,
                file_bytes=nbytes,
                writer=writer,
                limits=limits,
                extra_variant=extra_variant,
                sources=sources,
            )
        except (OSError, StoreError):
            self.delete([FileRef(variant.variant_id, variant.created)])
            raise
        if gone is None:
            self.delete([FileRef(variant.variant_id, variant.created)])
            return Unavailable(
                variant.variant_id,
                CaptureDrop.REMOVED,
                "its chunk, or what it was captured after, was removed",
            )
        self.delete(gone)
        return None

    def discard(self, file: FileRef, chunk_id: str, reason: str) -> None:
        """Remove row and file of a variant that can never be served, with a warning. Counts as `DAMAGED`.

        Does nothing if the row was evicted or replaced since the look-up, in a read-only store, or without its folder.
        """
        if self.read_only or self.gone():
            return
        if self._remove([file], EvictionReason.DAMAGED):
            path = self.disk.path(file.variant_id, file.created)
            logger.warning("Removed chunk-cache %s of chunk %s: %s", path, chunk_id, reason)

    def evict(self, chosen: RowFilter, *, down_to_bytes: int | None = None) -> Evicted:
        """Remove the chosen rows and their files: all, or the lowest-scored until at most `down_to_bytes` are left.

        These bytes are of all files. Chosen chunk ids are no longer remembered as evicted (see `Catalog.commit`). On
        a full disk files are deleted and rows stay as misses.
        """
        files = self.catalog.chosen(chosen, down_to_bytes=down_to_bytes)
        gone = self._evict(files, EvictionReason.ADMINISTRATOR, forget=chosen.chunk_ids or ())
        if gone:
            self.catalog.compact()
        return Evicted(len(gone), sum(file.file_bytes for file in gone))

    def remove_chunks(
        self, chunk_ids: Sequence[str], *, namespace: str | None, refused: Sequence[str]
    ) -> list[Listed | DamagedRow]:
        """Remove all variants that hold or were shaped by these chunks; refuse such ones of `refused` from now on.

        The refusal is noted first: no process stores such a variant after the rows were read here. The texts of the
        namespace's audits are deleted, and so is the folder of an older version's chunk-caches, because no catalog says
        what shaped them. Returns the removed rows (see `Catalog.shaped_by`). `namespace` None means all.
        """
        removed_rows: list[Listed | DamagedRow] = []
        try:
            self.catalog.removals.note(refused, namespace)
        except DiskFullError:
            removed_rows = self._remove_shaped(chunk_ids, namespace)
            self.catalog.removals.note(refused, namespace)
        removed_rows += self._remove_shaped(chunk_ids, namespace)
        self.catalog.compact()  # evicted rows have left bytes there too
        root = self.catalog.path.parent
        try:
            self._finish_deletions(())
            _remove_folder(root / SET_ASIDE)
        except OSError as error:
            raise StoreError(
                f"{root}: chunk-caches of removed chunks may still be there, or come back after a power cut ({error}). "
                "Check the disk and the folder's permissions, and repeat the removal."
            ) from error
        forget_texts(root, namespace, busy_timeout_s=self._busy_timeout_s)
        return removed_rows

    def rules_are_due(self) -> bool:
        """Return True if there are rules, not applied within `SECONDS_BETWEEN_RUNS`, and the store can be written."""
        passed = time.time() - self._rules_applied
        is_recent = 0.0 <= passed < SECONDS_BETWEEN_RUNS
        return bool(self._rules) and not is_recent and not self.read_only

    def apply_rules(self) -> None:
        """Remove rows and files that one of the rules evicts now, if `rules_are_due` and the folder is there."""
        if not self.rules_are_due() or self.gone():
            return
        now = time.time()
        self._rules_applied = now
        files = [file_of(row) for row in self.catalog.ruled_out(self._rules, now)]
        if files:
            self._evict(files, EvictionReason.RULE)

    def _remove_shaped(
        self, chunk_ids: Sequence[str], namespace: str | None
    ) -> list[Listed | DamagedRow]:
        rows = self.catalog.shaped_by(chunk_ids, namespace=namespace)
        files = [file_of(row) for row in rows]
        self._evict(files, EvictionReason.ADMINISTRATOR, forget=chunk_ids)
        return rows

    def _evict(
        self, files: list[FileRef], why: EvictionReason, *, forget: Sequence[str] = ()
    ) -> list[FileRef]:
        """Remove rows, then their files; on a full disk the files first."""
        try:
            return self._remove(files, why, forget=forget)
        except DiskFullError:
            if self.read_only or self.gone():
                raise
            for file in files:
                with suppress(OSError):
                    self.disk.remove(file.variant_id, file.created)
        try:
            return self._remove(files, why, forget=forget)
        except DiskFullError as error:
            logger.warning(
                "Files were deleted; their rows stay, as misses, until the disk has room: %s", error
            )
            gone = [replace(file, evicted=why) for file in files]
            self.delete(gone)
            return gone

    def _remove(
        self, files: list[FileRef], why: EvictionReason, *, forget: Sequence[str] = ()
    ) -> list[FileRef]:
        """Remove rows, then their files; after Ctrl-C in between, the next `finish_interrupted` deletes the files."""
        try:
            gone = self.catalog.remove(files, writer=self._writers.token, why=why, forget=forget)
            self.delete(gone)
        except Exception:
            raise
        except BaseException:  # Ctrl-C: rows may be gone whose files are still there
            self._interrupted.extend(files)
            raise
        return gone

    @property
    def has_interrupted(self) -> bool:
        """True if a removal of rows and files ended with Ctrl-C and was not finished."""
        return bool(self._interrupted)

    def finish_interrupted(self) -> None:
        """Delete files whose rows were removed just before Ctrl-C; they would take up room."""
        files = list(self._interrupted)
        without_row = [file for file in files if not self.catalog.holds(file)]
        self.delete(without_row)
        for file in files:
            with suppress(ValueError):  # another thread has removed it
                self._interrupted.remove(file)

    def delete(self, files: Iterable[FileRef]) -> None:
        """Delete these files, which have no row, then settle them in the catalog. Never raises.

        Those with a reason in `FileRef.evicted` are counted and logged. A file that cannot be deleted is logged, and
        stays in `files_at_risk` until a later call, or the next opening of the store, succeeds.
        """
        files = list(files)
        with self._lock:
            self._evictions.update(file.evicted for file in files if file.evicted is not None)
        for file in files:
            if file.evicted is not None:
                fields = {
                    "event": "eviction",
                    "variant_id": file.variant_id,
                    "reason": file.evicted,
                }
                logger.info(
                    "Chunk-cache %s left: %s",
                    file.variant_id,
                    file.evicted,
                    extra={"cachecraft": fields},
                )
            self._on_removed(file.variant_id, file.created)
        with suppress(OSError):
            self._finish_deletions(files)

    def _finish_deletions(self, files: Iterable[FileRef]) -> None:
        """Delete these files, and those that earlier calls could not delete, and settle them.

        Raises OSError, after a warning in the log, if one stays or its deletion is not synced; the next call tries
        again.
        """
        with self._lock:
            files = list(dict.fromkeys((*self._unsettled, *files)))
        deleted, failure = self._deleted(files)
        settled: set[FileRef] = set()
        if deleted:
            try:
                self.catalog.settle(deleted)
                settled.update(deleted)
            except StoreError as error:  # most likely a full disk
                logger.info("Deleted files are settled in the catalog later: %s", error)
        with self._lock:
            others = [file for file in self._unsettled if file not in files]
            self._unsettled = others + [file for file in files if file not in settled]
        if failure is not None:
            logger.warning(
                "An evicted file stays until the next eviction, or until the store is opened again: %s",
                failure,
            )
            raise failure

    def _deleted(self, files: Sequence[FileRef]) -> tuple[list[FileRef], OSError | None]:
        """Delete files; return those that are gone for good, and the last error of the others."""
        deleted: list[FileRef] = []
        failure: OSError | None = None
        for file in files:
            try:
                self.disk.remove(file.variant_id, file.created)
                deleted.append(file)
            except OSError as error:
                failure = error
        try:
            self.disk.sync_removed(deleted)
        except OSError as error:
            return [], error
        return deleted, failure

    def check(self, *, repair: bool, progress: Callable[[Progress], None] | None) -> CheckReport:
        """Compare rows and files, with `repair` remove what is damaged, and report it; see `ChunkCacheStore.check`.

        Raises OSError on a disk error or if a lock file cannot be opened, and StoreError to repair a read-only store.
        """
        if repair and self.read_only:
            raise StoreError(
                f"{self.catalog.path.parent} cannot be written. Make it writable for this user to repair it."
            )
        findings = [
            Finding(
                "catalog",
                self.catalog.path,
                text,
                f"delete the folder {self.catalog.path.parent} to start again",
            )
            for text in self.catalog.problems()
        ]
        findings += self._sweep(repair=repair)
        # before the rows: files written after this are not leftovers
        files = list(self.disk.scan())
        total = self.catalog.totals().variants
        rows = 0
        for rows, row in enumerate(self.catalog.scan(), start=1):
            findings += self._check_row(row, repair=repair)
            if progress is not None:
                progress(Progress(rows, max(total, rows), ""))
        reported = {finding.path for finding in findings}
        for path, file in files:
            if path not in reported:
                findings += self._check_file(path, file, repair=repair)
        if flaw := self.catalog.check_sums(repair=repair):
            action = "counted again" if repair else "would be counted again"
            findings.append(Finding("catalog", self.catalog.path, flaw, action, repaired=repair))
        return CheckReport(
            rows, len(files), sum(file.file_bytes for _, file in files), repair, tuple(findings)
        )

    def _sweep(self, *, repair: bool) -> list[Finding]:
        """Find files, reservations and locks of dead writers; with `repair` remove them."""
        findings: list[Finding] = []
        for writer, files in self.catalog.at_risk().items():
            if self._writers.is_alive(writer):
                continue
            finished = []
            for file in files:
                paths = self.disk.leftovers(file.variant_id, file.created, writer)
                if repair and all(_unlink(path) for path in paths):
                    finished.append(file)
                findings += [
                    _finding("leftover of a writer", path, _KILLED, repair=repair) for path in paths
                ]
            if finished:
                self.disk.sync_removed(finished)
                self.catalog.settle(finished)
        if repair:
            self._writers.remove_stale_locks()
        return findings

    def _check_row(self, row: Listed | DamagedRow, *, repair: bool) -> list[Finding]:
        if isinstance(row, DamagedRow):
            kind: FindingKind = "damaged row"
            file = row.file
            reason = row.reason
            path = self.disk.path(file.variant_id, file.created)
        else:
            file = FileRef(row.variant.variant_id, row.variant.created)
            path = self.disk.path(file.variant_id, file.created)
            result = self.disk.read(row.variant)
            # evicted while it was read
            if not isinstance(result, Unavailable) or not self.catalog.holds(file):
                return []
            if not isinstance(result, Damaged):
                return [Finding("damaged file", path, result.reason, "left alone: this may pass")]
            kind = "damaged file" if path.exists() else "missing file"
            reason = result.reason
        if repair:
            self._remove([file], EvictionReason.DAMAGED)
        return [_finding(kind, path, reason, repair=repair)]

    def _check_file(self, path: Path, file: FileRef, *, repair: bool) -> list[Finding]:
        if not file.variant_id:
            return [Finding("foreign file", path, "no file of this store", "left alone")]
        if path.suffix == ".tmp":  # its name ends with the name of its writer
            if self._writers.is_alive(path.name.split(".")[-2]):
                return []
            if repair:
                _unlink(path)  # its writer is dead, so no lock is needed
            return [_finding("leftover of a writer", path, _KILLED, repair=repair)]
        if self.catalog.holds(file, or_at_risk=True):  # true for most files
            return []
        # Between this check and the deletion no writer may reserve room for this file or commit its row.
        with nullcontext() if self.read_only else self.catalog.standstill():
            if self.catalog.holds(file, or_at_risk=True) or not path.exists():
                return []
            if repair:
                _unlink(path)
        return [
            _finding(
                "file without row",
                path,
                f"{file.file_bytes} bytes that no row names",
                repair=repair,
            )
        ]


def file_of(row: Listed | DamagedRow) -> FileRef:
    """Return the file of a row, with its size."""
    if isinstance(row, DamagedRow):
        return row.file
    return FileRef(row.variant.variant_id, row.variant.created, row.file_bytes)


def _unusable(root: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{root} cannot hold a store ({error}). Choose a writable folder on a local disk."
    )


def _opened(open_it: Callable[[], Catalog], path: Path) -> Catalog:
    """Open the catalog at `path`. A catalog of another version is moved away with its files, and a new one made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # no other process may move the files away
    with suppress(OtherVersionError), _locked(path.parent, fcntl.LOCK_SH):
        return open_it()
    with _locked(path.parent, fcntl.LOCK_EX):
        try:
            return open_it()  # another process has moved it away
        except OtherVersionError:
            aside = path.parent / SET_ASIDE
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            # The catalog is moved last: until then a kill leaves a store of the other version. Its journal is moved
            # before it: otherwise SQLite would apply it to the new catalog.
            for name in ("variants", f"{path.name}-wal", f"{path.name}-shm", path.name):
                with suppress(FileNotFoundError):
                    path.with_name(name).rename(aside / name)
        logger.warning(
            "%s was made by another version of cachecraft-rag: its chunk-caches are computed again. The old ones are "
            "in %s, which may be deleted",
            path.parent,
            aside,
        )
        return open_it()


@contextmanager
def _locked(folder: Path, how: int) -> Iterator[None]:
    """Hold a lock on the folder, across processes; `how` is `fcntl.LOCK_SH` or `LOCK_EX`."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


def too_large(variant: Variant, nbytes: int, limits: Limits) -> Unavailable:
    """Return the reason `TOO_LARGE` for a capture of `nbytes` bytes, in words; the size itself is not checked."""
    why = f"larger than the whole byte budget: {nbytes} of {limits.disk_bytes} bytes"
    return Unavailable(variant.variant_id, CaptureDrop.TOO_LARGE, why)


def _identity(path: Path) -> tuple[int, int]:
    """Return device and inode of a file."""
    status = path.stat()
    return status.st_dev, status.st_ino


def _remove_folder(folder: Path) -> None:
    """Delete a folder, if it exists, and sync its parent."""
    if folder.exists():
        shutil.rmtree(folder)
        sync_folder(folder.parent)


def _unlink(path: Path) -> bool:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("A leftover file cannot be deleted: %s", error)
        return False
    return True


def _finding(kind: FindingKind, path: Path, what: str, *, repair: bool) -> Finding:
    """Return a finding; with `repair`, after the attempt to remove it, whose outcome it names."""
    has_row = kind in ("missing file", "damaged file", "damaged row")
    if not repair:
        action = "would be removed"
    elif path.exists():
        action = "row removed, but not its file (see the log)" if has_row else _NOT_DELETED
    else:
        action = "row and file removed" if has_row else "file removed"
    return Finding(kind, path, what, action, repaired=repair and not path.exists())
