"""One SQLite file shared by threads and processes: connections, transactions, migrations, errors that say what to do.

The catalog of chunk-caches and the retrieval index are such files. WAL, `BEGIN IMMEDIATE` and a busy timeout let
several processes use one. Within a process one connection reads and another writes, each under its own lock: a reader
never waits for a write.

On a full disk SQLite finds no room for the small file that its processes share. Each call then opens a connection for
itself alone, which needs no such file, until there is room again: what is stored can be read, and removed.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from cachecraft_rag.errors import CacheCraftError

logger = logging.getLogger("cachecraft_rag.store.database")
# Values for the `?` of a query, or for its names. Not for `?1`: Python 3.14 takes it for a name and refuses a tuple.
Parameters = tuple[object, ...] | Mapping[str, object]

# Removed rows are overwritten: most builds of SQLite would leave their text in the file.
_PRAGMAS = ("secure_delete = ON",)
_MOST_NOTES = 2**31 - 1
_ERASE_WAIT_S = 1.0  # for readers of the journal, which delay only the erasure


class Failure(StrEnum):
    """Kinds of SQLite's errors, each with other advice."""

    LOCKED = "locked"
    DAMAGED = "damaged"
    NOT_WRITABLE = "not_writable"
    FULL = "full"  # a broken disk may give the same
    OTHER = "other"


_CODES = {
    Failure.LOCKED: (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED),
    Failure.DAMAGED: (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB),
    Failure.NOT_WRITABLE: (
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PERM,
    ),
    Failure.FULL: (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR),
}


def failure_of(error: sqlite3.Error) -> Failure:
    """Return the kind of an error of SQLite; `OTHER` also for one without a code."""
    # the primary code; the upper bits refine it
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if "Could not decode" in str(error):  # of Python's module: a text is no UTF-8
        return Failure.DAMAGED
    return next((failure for failure, codes in _CODES.items() if code in codes), Failure.OTHER)


def locked_by(path: Path) -> str:
    """Return "is locked by another process", with its id where the system tells; whether it is, is not checked."""
    inodes = set()
    for file in (path, path.with_name(f"{path.name}-shm")):
        with suppress(OSError):
            inodes.add(str(file.stat().st_ino))
    holders = set()
    with suppress(OSError):  # only Linux has it
        for line in Path("/proc/locks").read_text().splitlines():
            *_, mode, process, place, _, _ = line.split()
            if mode == "WRITE" and place.rpartition(":")[2] in inodes:
                holders.add(process)
    ids = ", ".join(sorted(holders - {str(os.getpid()), "0", "-1"}))
    return f"is locked by another process{f' (id {ids})' if ids else ''}"


@dataclass(frozen=True)
class Kind:
    """Properties of one kind of file.

    migrations  statements that bring a file from one version to the next. Append-only: a released migration never
                changes, a new one is added after it
    pragmas     settings of a connection that writes, besides WAL
    error       raised for every failure
    what        name of the file at this path, in messages
    message     meaning of an error of SQLite, and what to do about it
    newest      version that the last migration makes; a file from before the first cannot be brought up to date
    other_version, disk_full  raised instead of `error` for these two failures, the first only for a file that can be
                written; None: `error`
    """

    migrations: Sequence[Sequence[str]]
    pragmas: Sequence[str]
    error: type[CacheCraftError]
    what: Callable[[Path], str]
    message: Callable[[Path, sqlite3.Error], str]
    newest: int
    other_version: type[CacheCraftError] | None = None
    disk_full: type[CacheCraftError] | None = None


class Database:
    """A SQLite file. Any thread may call any method.

    Every failure of SQLite is raised as the kind's error: `Kind.disk_full` on a full or broken disk, if the kind has
    one, otherwise `Kind.error`.

    Args:
        path: the file, made if it does not exist.
        kind: properties of the file.
        busy_timeout_s: longest wait for another process's transaction, in seconds.
    """

    def __init__(self, path: Path, *, kind: Kind, busy_timeout_s: float) -> None:
        """Open or create it and update its schema; one that this user cannot change is opened as it is."""
        self.path = path
        self.read_only = os.path.isfile(path) and not can_be_written(path)
        if not self.read_only:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._kind = kind
        self._busy_timeout_s = busy_timeout_s
        # a second transaction in the same thread is an error, and no standstill
        self._read_lock = threading.RLock()
        self._write_lock = threading.RLock()
        self._open_lock = threading.RLock()
        self._reader: sqlite3.Connection | None = None  # both are None on a full disk
        self._writer: sqlite3.Connection | None = None
        self._closed = False
        with self._errors():
            try:
                self._open()
            except sqlite3.OperationalError as error:
                if self.read_only or not _is_full(error):
                    raise
                with suppress(sqlite3.Error), Block(self._exclusive()) as connection:
                    if _version(connection) != 0:
                        self._compare(connection)
                        return
                raise

    def close(self) -> None:
        """Close both connections, after blocks that run in other threads; a second call does nothing.

        All other calls but `problems` then fail.
        """
        with self._open_lock:
            self._closed = True
        with self._read_lock:
            if self._reader is not None:
                self._reader.close()
        with self._write_lock:
            if self._writer is not None:
                self._writer.close()

    def reading(self) -> Block:
        """Return a block that lends the connection that reads, for this thread alone; it may be nested."""
        return Block(self._reading(""))

    def snapshot(self) -> Block:
        """Return a block that lends the connection that reads, in one transaction; it may not be nested."""
        return Block(self._reading("BEGIN DEFERRED"))

    def writing(self, *, removes: bool = False) -> Block:
        """Return a block that lends the connection that writes, in a transaction; no other writer gets in between.

        It may not be nested, and an exception in it undoes its changes. With `removes` it removes content for good
        (`note_removal`): once the block has ended, no power cut takes it back. For a read-only file the call raises.
        """
        if self.read_only:
            raise self._error(
                "cannot be written. Make its folder writable for this user to change it"
            )
        return Block(self._writing(removes=removes))

    @property
    def must_be_compacted(self) -> bool:
        """True if content was removed, by any process, and `compact` has not succeeded since; False if read-only."""
        with self.reading() as connection:
            return not self.read_only and _removal_note(connection) != 0

    def compact(self) -> None:
        """Write the whole file again without removed content, and empty the journal, if content was removed.

        SQLite overwrites a removed row, but no earlier copies of it that moved within a page. Takes time and room on
        the disk in proportion to the file. If it fails, a warning is logged, and the next call, in any process, tries
        again. Raises the kind's error if the file cannot even be read.
        """
        if not self.must_be_compacted:
            return
        try:
            is_compact = self._compacted()
        except CacheCraftError as error:
            logger.warning(
                "Removed content may stay in %s until the next removal or opening: %s",
                self.path,
                error,
            )
            return
        if not is_compact:
            logger.warning(
                "%s-wal is in use, or the disk is full: it may still hold removed text. The next removal or opening "
                "empties it, or closing the file in every process",
                self.path,
            )

    def _compacted(self) -> bool:
        """Compact the file; return False if the journal is in use, or the disk is full."""
        if self._writer is None:
            return False
        with Block(self._writing(begin="")) as connection:
            note = _removal_note(connection)
            connection.execute("VACUUM")
        if not self.erase():
            return False
        with Block(self._writing()) as connection:
            if _removal_note(connection) == note:  # nothing was removed meanwhile
                connection.execute("PRAGMA application_id = 0")
        return True

    def erase(self) -> bool:
        """Move the journal into the file and empty it, because its pages may still hold removed rows.

        Returns False if another reader or writer is still using the journal after a second; the next call, or the last
        process that closes the file, empties it. Returns True, and empties nothing, if the file is read-only, or
        without a connection for writing, as on a full disk.
        """
        if self.read_only:
            return True
        with self._errors():
            self._reopen()
        if self._writer is None:
            return True
        wait = int(1000 * self._busy_timeout_s)
        with Block(self._writing(begin="")) as connection:
            connection.execute(f"PRAGMA busy_timeout = {min(int(1000 * _ERASE_WAIT_S), wait)}")
            try:
                busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
            finally:
                connection.execute(f"PRAGMA busy_timeout = {wait}")
        return not busy

    def _reading(self, begin: str) -> Generator[sqlite3.Connection, None, None]:
        with self._errors():
            self._reopen()
            if self._reader is None:
                with Block(self._exclusive()) as connection:
                    yield from _transaction(connection, begin)
            else:
                with self._read_lock:
                    yield from _transaction(self._reader, begin, after_interrupt=self._renew_reader)

    def _writing(
        self, begin: str = "BEGIN IMMEDIATE", *, removes: bool = False
    ) -> Generator[sqlite3.Connection, None, None]:
        # IMMEDIATE: a transaction that first reads and then writes would fail at once, without waiting, when another
        # process wrote in between.
        with self._errors():
            self._reopen()
            if self._writer is None:
                with Block(self._exclusive()) as connection:
                    yield from self._committing(connection, begin, removes=removes)
            else:
                with self._write_lock:
                    yield from self._committing(
                        self._writer, begin, removes=removes, after_interrupt=self._renew_writer
                    )

    def _committing(
        self,
        connection: sqlite3.Connection,
        begin: str,
        *,
        removes: bool,
        after_interrupt: Callable[[], None] | None = None,
    ) -> Generator[sqlite3.Connection, None, None]:
        """Yield the connection in a transaction that writes, with `removes` in one that SQLite syncs."""
        if not removes:
            yield from _transaction(connection, begin, after_interrupt=after_interrupt)
            return
        level = connection.execute("PRAGMA synchronous").fetchone()[0]
        connection.execute("PRAGMA synchronous = FULL")
        try:
            # The note changes a page: without one nothing would be synced, nor transactions before this one.
            yield from _transaction(
                connection, begin, at_start=note_removal, after_interrupt=after_interrupt
            )
        finally:
            with suppress(sqlite3.Error):  # the connection was replaced after Ctrl-C
                connection.execute(f"PRAGMA synchronous = {level}")

    def problems(self) -> list[str]:
        """Return at most 100 findings of SQLite's `PRAGMA quick_check` as sentences; [] when all is well.

        It does not compare indexes with their tables. Works after `close` too.
        """
        with self._errors():
            self._reopen()
            # Its own connection: readers must not wait for it.
            with (
                Block(self._exclusive())
                if self._reader is None
                else closing(self._connect()) as connection
            ):
                return [
                    text for (text,) in connection.execute("PRAGMA quick_check") if text != "ok"
                ]

    def _connect(self) -> sqlite3.Connection:
        wait = self._busy_timeout_s
        if self.read_only:
            return connect_read_only(self.path, timeout_s=wait)
        return sqlite3.connect(
            self.path, timeout=wait, isolation_level=None, check_same_thread=False
        )

    def _connect_writer(self) -> sqlite3.Connection:
        """Open the connection that writes; the first one creates the file or updates its schema."""
        writer = self._connect()
        try:
            self._when_free(
                lambda: self._compare(writer) if self.read_only else self._prepare(writer)
            )
        except BaseException:  # Ctrl-C too: no connection stays open
            writer.close()
            raise
        return writer

    def _open(self) -> None:
        writer = self._connect_writer()
        try:
            self._reader = self._connect()
        except BaseException:  # Ctrl-C too: no connection stays open
            writer.close()
            raise
        self._writer = writer

    def _renew_reader(self) -> None:
        """Replace the reader after Ctrl-C in a block: a cursor in the traceback would keep its old view."""
        old = self._reader
        if old is not None and not self._closed:
            with suppress(sqlite3.Error):
                self._reader = self._connect()
                old.close()

    def _renew_writer(self) -> None:
        """Replace the connection that writes, after Ctrl-C in a block: an open cursor would keep it from writing."""
        old = self._writer
        if old is not None and not self._closed:
            with suppress(sqlite3.Error, CacheCraftError):
                self._writer = self._connect_writer()
                old.close()

    def _reopen(self) -> None:
        """Open both connections if the disk was full and has room now."""
        if self._writer is not None:
            return
        with self._open_lock:
            if self._closed:
                raise sqlite3.ProgrammingError("Cannot operate on a closed database.")
            if self._writer is None:
                try:
                    self._open()
                except sqlite3.OperationalError as error:
                    if not _is_full(error):
                        raise

    def _exclusive(self) -> Generator[sqlite3.Connection, None, None]:
        """Yield a connection that keeps in memory what processes would share in a file."""
        with self._open_lock:
            connection = self._connect()
            try:
                # The locking mode is first: the other statements may look for that file.
                for mode in ("locking_mode = EXCLUSIVE", *_PRAGMAS, *self._kind.pragmas):
                    connection.execute(f"PRAGMA {mode}")
                self._when_free(lambda: _version(connection))
                yield connection
            finally:
                connection.close()

    def _when_free(self, action: Callable[[], object]) -> None:
        """Run `action`, and repeat it while the file is locked, for as long as the busy timeout.

        SQLite's own busy timeout does not cover the switch to WAL, on which two processes that create a file collide.
        """
        give_up = time.monotonic() + self._busy_timeout_s
        while True:
            try:
                action()
                return
            except sqlite3.OperationalError as error:
                if (
                    error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY
                    or time.monotonic() > give_up
                ):
                    raise
            time.sleep(0.01)

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Set the file's modes and bring the schema up to date; safe when several processes do it at once."""
        if _is_of_another_program(connection):
            raise self._error(
                "is a database of another program. Move it away, or choose another folder"
            )
        for mode in (*_PRAGMAS, *self._kind.pragmas, "journal_mode = WAL"):
            connection.execute(f"PRAGMA {mode}")
        newest = self._kind.newest
        first = newest - len(self._kind.migrations)
        if _version(connection) == newest:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            return
        with Block(_transaction(connection, "BEGIN IMMEDIATE")):
            version = _version(connection)
            if version and not first < version <= newest:
                raise self._other_version(version)
            done = max(version - first, 0)
            for statement in (
                line for migration in self._kind.migrations[done:] for line in migration
            ):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {newest}")

    def _compare(self, connection: sqlite3.Connection) -> None:
        """Raise the kind's error unless a file that cannot be changed has this version's schema."""
        if (version := _version(connection)) != self._kind.newest:
            raise self._other_version(version)

    def _other_version(self, version: int) -> CacheCraftError:
        kind = self._kind
        error = self._kind.other_version or self._kind.error
        advice = (
            "Upgrade the package or choose another folder"
            if version > kind.newest
            else "Choose another folder"
        )
        if self.read_only:
            advice = "It cannot be written: open it once where it can be, or use that version"
            error = kind.error
        age = "a newer" if version > kind.newest else "another"
        text = f"was made by {age} version of cachecraft-rag (schema {version}, this one knows {kind.newest}). {advice}"
        return error(f"{kind.what(self.path)} {text}.")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn every error of SQLite into the error of our kind, which says what to do."""
        try:
            yield
        except sqlite3.Error as error:
            kind = self._kind.disk_full if _is_full(error) else None
            raise (kind or self._kind.error)(self._kind.message(self.path, error)) from error
        except UnicodeDecodeError as error:  # of a damaged text in SQLite's own tables and messages
            damaged = sqlite3.DatabaseError(str(error))
            damaged.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise self._kind.error(self._kind.message(self.path, damaged)) from error

    def _error(self, text: str) -> CacheCraftError:
        return self._kind.error(f"{self._kind.what(self.path)} {text}.")


class Block:
    """A `with` block on a connection that survives Ctrl-C at any moment.

    The generator holds the lock and the transaction; its own `with` and `try` release them. Closing it ends both, also
    when an interrupt falls between the generator and the caller's block. `contextlib.contextmanager` was rejected:
    after an interrupt in its `__enter__` the generator stays open while the traceback lives, which is long in
    a notebook. Here only an interrupt at the first instruction of `__exit__` does that.
    """

    def __init__(self, steps: Generator[sqlite3.Connection, None, None]) -> None:
        self._steps = steps

    def __enter__(self) -> sqlite3.Connection:
        try:
            return next(self._steps)
        except BaseException:  # Ctrl-C too: the lock and the transaction end
            self._close()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                next(self._steps, None)
            else:
                self._steps.throw(error)
        except BaseException as raised:
            if error is None or raised is not error:
                raise
            # The caller's `with` raises it again. A traceback with this frame would refer to itself, and keep cursors
            # open until the next garbage collection.
            error.__traceback__ = trace
        finally:
            self._close()

    def _close(self) -> None:
        self._steps.close()


def _transaction(
    connection: sqlite3.Connection,
    begin: str,
    *,
    at_start: Callable[[sqlite3.Connection], None] | None = None,
    after_interrupt: Callable[[], None] | None = None,
) -> Generator[sqlite3.Connection, None, None]:
    """Yield the connection once, in a transaction started by the statement `begin`, or in none if that is empty."""
    if begin and connection.in_transaction:
        raise sqlite3.ProgrammingError("cannot start a transaction within a transaction")
    # BEGIN is inside: Ctrl-C can be raised after the statement and before the next line.
    try:
        if begin:
            connection.execute(begin)
        if at_start is not None:
            at_start(connection)
        yield connection
        if begin:
            connection.execute("COMMIT")
    except BaseException as error:  # Ctrl-C too: the transaction ends
        # SQLite itself rolls back on some errors, a full disk among them
        if begin and connection.in_transaction:
            connection.execute("ROLLBACK")
        if after_interrupt is not None and not isinstance(error, Exception):
            after_interrupt()
        raise


def note_removal(connection: sqlite3.Connection) -> None:
    """Note in the file (as `application_id`, which changes each time) that `Database.compact` is due."""
    connection.execute(f"PRAGMA application_id = {_removal_note(connection) % _MOST_NOTES + 1}")


def _removal_note(connection: sqlite3.Connection) -> int:
    note: int = connection.execute("PRAGMA application_id").fetchone()[0]
    return note


def _version(connection: sqlite3.Connection) -> int:
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return version


def _is_of_another_program(connection: sqlite3.Connection) -> bool:
    """Return True for a file that has tables and no version: all of ours have one."""
    # One statement: another process may be making the file.
    query = "SELECT (SELECT count(*) FROM sqlite_master), (SELECT user_version FROM pragma_user_version)"
    tables, version = connection.execute(query).fetchone()
    return bool(tables) and not version


def _is_full(error: sqlite3.Error) -> bool:
    """Return True for SQLite's errors on a full disk; a broken one may give the same."""
    return failure_of(error) is Failure.FULL


def connect_read_only(path: Path, *, timeout_s: float) -> sqlite3.Connection:
    """Return a connection that only reads, for a file that this user cannot change in a folder that may be read-only.

    If SQLite's helper files exist or can be made, changes by other processes are seen, and `timeout_s` is the longest
    wait for a lock, in seconds. Otherwise no process has the file open, and it is read without helper files and locks,
    unless a journal with content is left. SQLite's errors are raised as they are. The caller closes the connection.
    """
    place = path.absolute().as_uri()
    connect = partial(
        sqlite3.connect, uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=False
    )
    connection = connect(f"{place}?mode=ro")
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        return connection
    except sqlite3.DatabaseError as error:
        connection.close()
        if not isinstance(error, sqlite3.OperationalError):
            raise
        journal = path.with_name(f"{path.name}-wal")
        locked_out = error.sqlite_errorcode & 0xFF in (
            sqlite3.SQLITE_CANTOPEN,
            sqlite3.SQLITE_READONLY,
        )
        if not locked_out or (journal.exists() and journal.stat().st_size):
            raise
    return connect(f"{place}?mode=ro&immutable=1")


def can_be_written(path: Path) -> bool:
    """Return True if the database file exists and this user may write it and its folder, for SQLite's helper files."""
    return os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)


def fetched(connection: sqlite3.Connection, query: str, parameters: Parameters) -> list[Any]:
    """Return all rows of a query, one tuple each, [] without rows. Text that is no UTF-8 holds surrogates."""
    try:
        return connection.execute(query, parameters).fetchall()
    except sqlite3.OperationalError as error:
        if "decode" not in str(error):
            raise
    connection.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
    try:
        return connection.execute(query, parameters).fetchall()
    finally:
        connection.text_factory = str
