"""One SQLite file shared by threads and processes: connections, transactions, migrations, errors that say what to do.

The catalog of chunk-caches and the retrieval index are such files. WAL, `BEGIN IMMEDIATE` and a busy timeout let
several processes use one. Within a process one connection reads and another writes, each behind its own lock: a reader
never waits for a write.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cachecraft_rag.errors import CacheCraftError, StoreError


@dataclass(frozen=True)
class Kind:
    """What one kind of file has of its own.

    migrations  statements that bring a file from version n to n + 1, numbered by position. Append-only: a released
                migration never changes, a new one is added behind it
    pragmas     what a connection that writes is set to, besides WAL
    error       of every failure
    what        how messages call the file at this path
    message     what an error of SQLite means, and what to do about it
    journal     SQLite's journal mode; "OFF" is for a file that only one thread uses and nobody keeps
    """

    migrations: Sequence[Sequence[str]]
    pragmas: Sequence[str]
    error: type[CacheCraftError]
    what: Callable[[Path], str]
    message: Callable[[Path, sqlite3.Error], str]
    journal: Literal["WAL", "OFF"] = "WAL"


class Database:
    """A SQLite file. Any thread may call any method; every failure of SQLite is the error of its kind.

    Args:
        path: the file, made if it is not there.
        kind: what it is.
        busy_timeout_s: how long to wait for another process's transaction.
    """

    def __init__(self, path: Path, *, kind: Kind, busy_timeout_s: float, read_only: bool = False) -> None:
        """Open or create it and update its schema; `read_only`: open it as it is. Raises the kind's error."""
        self.path = path
        self.read_only = read_only
        self._kind = kind
        self._busy_timeout_s = busy_timeout_s
        self._read_lock = threading.RLock()  # a second transaction in the same thread is an error, and no standstill
        self._write_lock = threading.RLock()
        self._of_thread = threading.local()
        self._writer = self._connect()
        try:
            self._when_free(self._compare if read_only else self._prepare)
            self._reader = self._connect()
        except CacheCraftError:
            self._writer.close()
            raise

    def close(self) -> None:
        """Close both connections; any later call raises the kind's error."""
        with self._read_lock:
            self._reader.close()
        with self._write_lock:
            self._writer.close()

    def reading(self) -> AbstractContextManager[sqlite3.Connection]:
        """The connection that reads, for this thread alone while the block runs."""
        joined = self._joined()
        return self._reading() if joined is None else nullcontext(joined)

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._errors(), self._read_lock:
            yield self._reader

    @contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """As `reading`, in one transaction: all that is read in the block is of one moment."""
        with self.reading() as connection:
            connection.execute("BEGIN DEFERRED")
            try:
                yield connection
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    def writing(self) -> AbstractContextManager[sqlite3.Connection]:
        """The connection that writes, in a transaction that is committed at the end or rolled back on any error.

        No other writer, in any process, gets in between.
        """
        joined = self._joined()
        return self._writing() if joined is None else nullcontext(joined)

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        if self.read_only:
            raise self._error("cannot be written. Make its folder writable for this user to change it")
        with self._errors(), self._transaction() as connection:
            yield connection

    @contextmanager
    def one_transaction(self) -> Iterator[None]:
        """All that this thread reads and writes in the block is one transaction; other writers wait for its end."""
        with self.writing() as connection:
            self._of_thread.joined = connection
            try:
                yield
            finally:
                self._of_thread.joined = None

    def _joined(self) -> sqlite3.Connection | None:
        joined: sqlite3.Connection | None = getattr(self._of_thread, "joined", None)
        return joined

    def problems(self) -> list[str]:
        """What SQLite's own integrity check finds wrong; empty when all is well. Reads the whole file."""
        with self._errors(), closing(self._connect()) as connection:  # its own connection: readers must not wait for it
            return [text for (text,) in connection.execute("PRAGMA quick_check") if text != "ok"]

    def _connect(self) -> sqlite3.Connection:
        with self._errors():
            wait = self._busy_timeout_s
            if self.read_only:
                return connect_read_only(self.path, timeout_s=wait)
            return sqlite3.connect(self.path, timeout=wait, isolation_level=None, check_same_thread=False)

    def _when_free(self, action: Callable[[], None]) -> None:
        """Run `action`, again and again for as long as the busy timeout while the file is locked.

        SQLite's own busy timeout does not cover the switch to WAL, on which two processes that create a file collide.
        """
        give_up = time.monotonic() + self._busy_timeout_s
        with self._errors():
            while True:
                try:
                    return action()
                except sqlite3.OperationalError as error:
                    if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > give_up:
                        raise
                time.sleep(0.01)

    def _prepare(self) -> None:
        """Set the file's modes and bring the schema up to date; safe when several processes do it at once."""
        for mode in (*self._kind.pragmas, f"journal_mode = {self._kind.journal}"):
            self._writer.execute(f"PRAGMA {mode}")
        newest = len(self._kind.migrations)
        with self._transaction() as connection:
            version: int = connection.execute("PRAGMA user_version").fetchone()[0]
            if version > newest:
                raise self._error(
                    f"was made by a newer version of cachecraft-rag (schema {version}, this one knows {newest}). "
                    "Upgrade the package or choose another folder"
                )
            for statement in (line for migration in self._kind.migrations[version:] for line in migration):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {newest}")

    def _compare(self) -> None:
        """See that a file which cannot be changed has this version's schema."""
        version: int = self._writer.execute("PRAGMA user_version").fetchone()[0]
        if version != len(self._kind.migrations):
            raise self._error(
                f"was made by another version of cachecraft-rag (schema {version}, this one knows "
                f"{len(self._kind.migrations)}) and cannot be written. Open it once where it can be, or use that one"
            )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._write_lock:
            # IMMEDIATE: a transaction that first reads and then writes would fail at once, without waiting, when
            # another process wrote in between.
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:  # SQLite rolls back by itself on some errors, a full disk among them
                    self._writer.execute("ROLLBACK")
                raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn every error of SQLite into the error of our kind, which says what to do."""
        try:
            yield
        except sqlite3.Error as error:
            raise self._kind.error(self._kind.message(self.path, error)) from error

    def _error(self, text: str) -> CacheCraftError:
        return self._kind.error(f"{self._kind.what(self.path)} {text}.")


def connect_read_only(path: Path, *, timeout_s: float) -> sqlite3.Connection:
    """A connection to a file that this user cannot change, in a folder that may not be written either.

    Where SQLite's helper files are there, another process may be writing: the file is then read along with them. Where
    they are not, and cannot be made, no process has it open, and it is read as it lies there. Raises sqlite3.Error.
    """
    place = path.absolute().as_uri()
    connection = sqlite3.connect(
        f"{place}?mode=ro", uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=False
    )
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        return connection
    except sqlite3.OperationalError as error:
        connection.close()
        journal = path.with_name(f"{path.name}-wal")
        locked_out = error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
        if not locked_out or (journal.exists() and journal.stat().st_size):
            raise
    return sqlite3.connect(
        f"{place}?mode=ro&immutable=1", uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=False
    )


def can_be_written(path: Path) -> bool:
    """Whether this user may change a database: the file, and its folder, where SQLite keeps files beside it."""
    return os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)


def fetched(connection: sqlite3.Connection, query: str, parameters: tuple[object, ...]) -> list[Any]:
    """All rows; text that is no text comes as half surrogate pairs, so that one row does not hide all others."""
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


def _message(path: Path, error: sqlite3.Error) -> str:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the primary code; the upper bits refine it
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        advice = "is locked by another process. Wait until its `store check` or `store evict` ends, or stop it"
    elif code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        advice = (
            f"is damaged. It only indexes a cache: delete the folder {path.parent} to start again; no document is lost"
        )
    elif code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        advice = "cannot be written. Make the folder writable for this user or choose another one for the store"
    elif code == sqlite3.SQLITE_FULL:
        advice = "cannot grow: the disk is full. Free some space, or lower the store's byte budget"
    elif code == sqlite3.SQLITE_IOERR:  # a full disk too: SQLite finds no room for the small file its processes share
        advice = (
            f"cannot be used: the disk is full or broken. To make room, delete the folder {path.parent}: it is only a "
            "cache"
        )
    else:
        advice = "cannot be used. Check the disk, then try `store check`"
    return f"{path} {advice} ({type(error).__name__}: {error})."


def kind_of_cache(migrations: Sequence[Sequence[str]], *, scratch: bool = False) -> Kind:
    """A file that indexes a cache.

    `synchronous=NORMAL` with WAL never corrupts; after a power cut the last commits may be gone, which costs a cache an
    entry and never gives it a wrong one. 8 KiB pages: a row of the catalog has some 600 bytes, and a page should hold
    more than a handful of them. The connection that writes keeps up to 32 MiB of pages: SQLite's own 2 MiB hold three
    thousand rows. What that brings was not measured by itself.

    `scratch`: nobody keeps the file or opens it a second time, so it has no journal and stays in the cache (256 MiB).
    With one, SQLite copies each page that a statement with a trigger changes to a temporary file, for it may fail.
    """
    lasting = ("synchronous = NORMAL", "journal_size_limit = 16777216", "cache_size = -32768")
    passing = ("synchronous = OFF", "cache_size = -262144")
    return Kind(
        migrations=migrations,
        pragmas=("page_size = 8192", *(passing if scratch else lasting)),
        journal="OFF" if scratch else "WAL",
        error=StoreError,
        what=str,
        message=_message,
    )
