"""The shared SQLite file: what is done in a block happens as a whole, one writer at a time, readers at any time."""

from __future__ import annotations

import contextlib
import re
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from cachecraft_rag.errors import CacheCraftError, StoreError
from cachecraft_rag.retrievers.index.schema import DATABASE
from cachecraft_rag.retrievers.index.schema import open_database as open_index
from cachecraft_rag.serving.audits.audit_log import AUDIT_FILE, AuditLog, audits_in
from cachecraft_rag.store.catalog import Catalog
from cachecraft_rag.store.catalog.schema import CATALOG_KIND, DiskFullError
from cachecraft_rag.store.database import Database

FIRST = ("CREATE TABLE words (word TEXT NOT NULL UNIQUE)",)
SECOND = ("ALTER TABLE words ADD COLUMN uses INTEGER NOT NULL DEFAULT 7",)


def open_database(
    path: Path, *migrations: tuple[str, ...], busy_timeout_s: float = 5.0
) -> Database:
    migrations = migrations or (FIRST,)
    kind = replace(CATALOG_KIND, migrations=migrations, newest=len(migrations))
    return Database(path, kind=kind, busy_timeout_s=busy_timeout_s)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = open_database(tmp_path / "words.sqlite")
    yield opened
    opened.close()


def insert(database: Database, *words: str) -> None:
    with database.writing() as connection:
        for word in words:
            connection.execute("INSERT INTO words VALUES (?)", (word,))


def words(database: Database) -> list[str]:
    with database.reading() as connection:
        return [word for (word,) in connection.execute("SELECT word FROM words ORDER BY word")]


def test_a_block_happens_as_a_whole_or_not_at_all(database: Database) -> None:
    insert(database, "kettle")
    with pytest.raises(StoreError, match="IntegrityError"):
        insert(database, "fridge", "kettle")
    with contextlib.suppress(KeyboardInterrupt), database.writing() as connection:
        connection.execute("INSERT INTO words VALUES ('toaster')")
        raise KeyboardInterrupt
    assert words(database) == ["kettle"]


def test_a_reader_does_not_wait_for_a_writer(database: Database) -> None:
    found: list[list[str]] = []
    with database.writing() as connection:
        connection.execute("INSERT INTO words VALUES ('kettle')")
        reader = threading.Thread(target=lambda: found.append(words(database)))
        reader.start()
        reader.join(timeout=60)
        assert found == [[]]  # and sees nothing that is not committed
    assert words(database) == ["kettle"]


def test_an_older_file_is_brought_up_to_date_with_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "words.sqlite"
    old = open_database(path)
    insert(old, "kettle")
    old.close()
    for _ in range(2):  # the second opening has nothing left to do
        new = open_database(path, FIRST, SECOND)
        with new.reading() as connection:
            assert connection.execute("SELECT word, uses FROM words").fetchall() == [("kettle", 7)]
        new.close()
    with pytest.raises(StoreError, match=r"newer version.*Upgrade"):
        open_database(path)


def test_threads_that_open_a_new_file_at_once_all_succeed(tmp_path: Path) -> None:
    path, errors = tmp_path / "words.sqlite", list[StoreError]()

    def use(word: str) -> None:
        try:
            opened = open_database(path)
            insert(opened, word)
            opened.close()
        except StoreError as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(str(n),)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM words").fetchone() == (8,)


def test_a_folder_that_cannot_be_written_is_named_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "words.sqlite").mkdir()  # for root, the only place that cannot be written
    with pytest.raises(StoreError, match=r"words\.sqlite cannot be written.*choose another one"):
        open_database(tmp_path / "words.sqlite")


def test_a_full_disk_can_be_read_and_is_written_again_once_it_has_room(
    tmp_path: Path, full_disk: Callable[[], AbstractContextManager[None]]
) -> None:
    path = tmp_path / "words.sqlite"
    made = open_database(path)
    insert(made, "kettle")
    made.close()
    with full_disk():
        opened, another = open_database(path), open_database(path)
        assert words(opened) == words(another) == ["kettle"]
        assert opened.problems() == []
        with pytest.raises(DiskFullError, match=r"words\.sqlite cannot grow: the disk is full"):
            insert(opened, "toaster")
        assert words(opened) == ["kettle"]
        with pytest.raises(DiskFullError):
            open_database(tmp_path / "new.sqlite")
    insert(opened, "toaster")
    assert words(another) == ["kettle", "toaster"]
    for one in (opened, another):
        one.close()
        with pytest.raises(StoreError, match="closed"):
            words(one)


def test_nothing_works_after_close(database: Database) -> None:
    database.close()
    with pytest.raises(StoreError, match="closed"):
        words(database)


def test_all_of_a_snapshot_is_of_one_moment(database: Database) -> None:
    insert(database, "kettle")
    with database.snapshot() as connection:
        before = connection.execute("SELECT count(*) FROM words").fetchone()
        insert(database, "toaster")
        assert connection.execute("SELECT count(*) FROM words").fetchone() == before == (1,)
    assert words(database) == ["kettle", "toaster"]


def test_a_snapshot_within_a_snapshot_is_an_error_and_no_standstill(database: Database) -> None:
    with (
        pytest.raises(StoreError, match="within a transaction"),
        database.snapshot(),
        database.snapshot(),
    ):
        raise AssertionError("never reached")
    assert words(database) == []


@pytest.mark.parametrize("folder", ["cachecraft_rag", "retrievers", "benchmarks"])
def test_no_query_numbers_its_placeholders(folder: str) -> None:
    # Python takes `?1` for a name, warns from 3.12 on and refuses it from 3.14 on; this test also runs on 3.11.
    numbered = [
        f"{path}: {line.strip()}"
        for path in (Path(__file__).parents[2] / folder).rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"\?[0-9]", line) and not line.lstrip().startswith("#")
    ]
    assert numbered == []


def test_a_flipped_bit_in_the_names_of_tables_raises_only_store_errors(tmp_path: Path) -> None:
    AuditLog(tmp_path, kept=1).close()
    content = (tmp_path / AUDIT_FILE).read_bytes()
    name = content.index(b"CREATE TABLE audits") + len(b"CREATE TABLE ")
    for place in range(name, name + 400):
        damaged = bytearray(content)
        damaged[place] ^= 0x80
        (tmp_path / AUDIT_FILE).write_bytes(damaged)
        with suppress(StoreError):
            audits_in(tmp_path)


LOCKS = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA locking_mode = EXCLUSIVE")
connection.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""
FILES: dict[str, Callable[[Path], AbstractContextManager[object]]] = {
    DATABASE: lambda folder: closing(
        open_index(folder, dim=8, fingerprint="tiny@0123", wait_s=0.05)[0]
    ),
    "catalog.sqlite": lambda folder: closing(
        Catalog(folder / "catalog.sqlite", busy_timeout_s=0.05)
    ),
    AUDIT_FILE: lambda folder: closing(AuditLog(folder, kept=9, busy_timeout_s=0.05)),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_another_process_locks_says_which_process_and_what_to_do(
    tmp_path: Path, name: str
) -> None:
    FILES[name](tmp_path).__exit__(None, None, None)
    command = [sys.executable, "-c", LOCKS, str(tmp_path / name)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        said = rf"is locked by another process( \(id {other.pid}\))?\. Wait until"
        with pytest.raises(CacheCraftError, match=said) as caught, FILES[name](tmp_path):
            pass
        assert "disk" not in str(caught.value)
        other.kill()
