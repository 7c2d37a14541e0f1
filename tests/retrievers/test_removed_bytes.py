"""What an attacker with the folders finds after a removal, also after kills and a power cut: nothing of the document.

Run as a script, this file removes a document again and again, each time in a process that is killed one step later.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cachecraft_rag.errors import IndexStoreError, StoreError
from cachecraft_rag.retrievers.index.faiss_store import FaissStore
from cachecraft_rag.retrievers.index.removal import evict_removed, remove_documents
from cachecraft_rag.serving.audits.audit import Audit, AuditText
from cachecraft_rag.serving.audits.audit_log import AuditLog, audits_in
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.captures import Capture, TokenScores
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.types.kv_layout import KVLayout
from cachecraft_rag.types.variants import Variant, VariantKey

DIM = 8
LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=8, dtype="float32")
SECRET = "secret.md"
STEPS_KILLED = 24


class LeavesRemovedRows(sqlite3.Connection):
    """A connection of a build of SQLite that leaves removed rows in the file, whatever its settings."""

    def execute(self, query: str, *values: Any) -> sqlite3.Cursor:
        return super().execute(query.replace("secure_delete = ON", "secure_delete = OFF"), *values)


@pytest.fixture(autouse=True)
def sqlite_that_leaves_removed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = partial(sqlite3.connect, factory=LeavesRemovedRows)
    monkeypatch.setattr("cachecraft_rag.store.database.sqlite3.connect", connect)


def vector_of(text: str) -> np.ndarray:
    vector = np.random.default_rng(sum(text.encode())).standard_normal(DIM).astype(np.float32)
    return vector / np.linalg.norm(vector)


def text_of(doc_id: str) -> str:
    return f"The text of {doc_id} is this. " + "word " * (5 * len(doc_id) % 90)


def chunk_of(doc_id: str) -> Chunk:
    return Chunk(text_of(doc_id), {"title": f"Heading of {doc_id}"})


def capture_of(doc_id: str, prefix: tuple[str, ...] = ("system",)) -> Capture:
    """A chunk-cache; every value follows from the variant's id."""
    key = VariantKey("ns", "model", chunk_of(doc_id).chunk_id, prefix)
    seed = int(key.variant_id[:8], 16)
    kv = torch.randn(LAYOUT.shape(10), generator=torch.Generator().manual_seed(seed))
    scores = TokenScores(np.random.default_rng(seed).random(10, dtype=np.float32))
    return Capture(key, LAYOUT, "tokens", kv, scores, (0.1,) * len(prefix), 0.3, 0.6, 1.0)


def shaped() -> list[Capture]:
    """The chunk-caches of the secret and after it."""
    return [capture_of(SECRET), capture_of("a.md", ("system", chunk_of(SECRET).chunk_id))]


def secrets() -> dict[str, bytes]:
    captures = shaped()
    return {
        "text": text_of(SECRET).encode()[:30],
        "title": b"Heading of secret.md",
        "vector": vector_of(text_of(SECRET)).tobytes(),
        "answer": b"The secret answer",
    } | {
        f"{name} {number}": content
        for number, capture in enumerate(captures)
        for name, content in {
            "keys": capture.kv[0, 0].numpy().tobytes()[:64],
            "values": capture.kv[1, 1].numpy().tobytes()[:64],
            "scores": np.asarray(capture.token_scores.inter, "<f4").tobytes(),
        }.items()
    }


def found_in(folder: Path) -> list[str]:
    """Names of the secrets that a file of the folder holds."""
    content = b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())
    return [name for name, secret in secrets().items() if secret in content]


def audit(text: AuditText | None) -> Audit:
    return Audit("request", 1.0, 5, (), 0, 0.0, 5, "focus", 0.5, "asked", {"reused": 1}, text=text)


def open_index(folder: Path) -> FaissStore:
    return FaissStore.open(folder / "index", dim=DIM, embedder_fingerprint="tiny@0123")


def prepare(folder: Path) -> Path:
    """Make a folder with an index and a store, closed, in which every secret is found."""
    names = [f"{number}.md" for number in range(40)] + ["a.md", SECRET]
    random.Random(1).shuffle(names)
    with open_index(folder) as index:
        for name in names:
            text = text_of(name)
            index.upsert(name, [chunk_of(name)], vector_of(text)[None])
        index.save()
    with ChunkCacheStore.open(folder / "store") as store:
        for capture in (*map(capture_of, names), *shaped()):
            assert isinstance(store.put(capture).result(), Variant)
    with closing(AuditLog(folder / "store", kept=9)) as log:
        log.add("ns", "model", audit(AuditText("How?", "The secret answer", "", "")))
    older = folder / "store" / "set-aside" / "variants"
    older.mkdir(parents=True)
    (older / "old.safetensors").write_bytes(secrets()["keys 0"])
    assert found_in(folder) == list(secrets())
    return folder


def remove(folder: Path) -> None:
    with open_index(folder) as index, ChunkCacheStore.open(folder / "store") as store:
        remove_documents(index, [SECRET], caches=store)


@pytest.mark.parametrize("end", ["open", "closed"])
def test_no_file_holds_anything_of_a_removed_document(tmp_path: Path, end: str) -> None:
    folder = prepare(tmp_path)
    with open_index(folder) as index, ChunkCacheStore.open(folder / "store") as store:
        index.search(vector_of("question"), 3)
        remove_documents(index, [SECRET], caches=store)
        left = len(store.rows(limit=1000))
        assert left == 41  # nothing else has left
        if end == "open":
            assert found_in(folder) == []
    assert found_in(folder) == []
    assert [one.text for one in audits_in(folder / "store")] == [None]


def test_a_process_killed_at_any_step_of_a_removal_leaves_nothing_after_reopening(
    tmp_path: Path,
) -> None:
    prepared = prepare(tmp_path / "prepared")
    command = [sys.executable, __file__, str(prepared), str(tmp_path)]
    subprocess.run(command, check=True, timeout=400)
    killed = sorted(tmp_path.glob("killed *"))
    assert len(killed) >= STEPS_KILLED // 2
    removed = 0
    for folder in killed:
        with open_index(folder) as index, ChunkCacheStore.open(folder / "store") as store:
            is_removed = not index.holds(SECRET)
            if is_removed:
                evict_removed(index, store)
        if is_removed:
            removed += 1
            assert found_in(folder) == [], folder.name
    assert 0 < removed < len(killed)


def test_bytes_are_removed_at_the_next_opening_if_the_process_was_killed_before_the_rewriting(
    tmp_path: Path,
) -> None:
    folder = prepare(tmp_path / "folder")
    killed = tmp_path / "killed"
    with open_index(folder) as index:
        index.delete_document(SECRET)
        shutil.copytree(folder, killed)  # as a kill here would leave it
    assert "text" in found_in(killed / "index")
    open_index(killed).close()
    assert found_in(killed / "index") == []


def test_an_unfinished_index_file_of_a_killed_process_leaves_with_a_removed_vector(
    tmp_path: Path,
) -> None:
    folder = prepare(tmp_path)
    unfinished = folder / "index" / "index.faiss.0123.tmp"
    unfinished.write_bytes(vector_of(text_of(SECRET)).tobytes())
    remove(folder)
    assert found_in(folder) == []


# -- disks that fail --------------------------------------------------------------------------------------------------


def failing_sync(place: Path, is_failing: Callable[[], bool]) -> Callable[[int], None]:
    """An `os.fsync` that fails for folders below `place`."""
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if is_failing() and path.is_dir() and path.is_relative_to(place):
            raise OSError(errno.EIO, "the disk is broken")
        sync(descriptor)

    return fsync


def test_a_removal_whose_files_cannot_be_synced_says_so_and_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepare(tmp_path)
    broken = True
    fsync = failing_sync(folder / "store" / "variants", lambda: broken)
    monkeypatch.setattr(os, "fsync", fsync)
    with open_index(folder) as index, ChunkCacheStore.open(folder / "store") as store:
        with pytest.raises(StoreError, match=r"after a power cut .*the disk is broken.*again"):
            remove_documents(index, [SECRET], caches=store)
        assert index.removed_chunks()
        broken = False
        evict_removed(index, store)  # as the next `documents remove` or `index` does
        assert index.removed_chunks() == {}
    assert found_in(folder) == []


def test_a_removal_whose_index_file_cannot_be_synced_says_so_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepare(tmp_path)
    broken = True
    monkeypatch.setattr(os, "fsync", failing_sync(folder / "index", lambda: broken))
    with open_index(folder) as index, ChunkCacheStore.open(folder / "store") as store:
        with pytest.raises(IndexStoreError, match="the disk is broken"):
            remove_documents(index, [SECRET], caches=store)
        broken = False
        assert remove_documents(index, [SECRET], caches=store).documents == (SECRET,)
    assert found_in(folder) == []


class PowerCut:
    """The state of a folder's files after a power cut: unlinked files return unless their folder was synced.

    SQLite's own files are copied without the journal: what a `FULL` commit syncs, a checkpoint has copied.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._unsynced: dict[Path, bytes] = {}
        self._unlink = os.unlink
        self._fsync = os.fsync
        monkeypatch.setattr(os, "unlink", self.unlink)
        monkeypatch.setattr(os, "fsync", self.fsync)

    def unlink(self, path: Any, **where: Any) -> None:
        file = Path(path)
        if not where and file.is_file() and file.is_relative_to(self._folder):
            self._unsynced[file] = file.read_bytes()
        self._unlink(path, **where)

    def fsync(self, descriptor: int) -> None:
        synced = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        self._unsynced = {
            file: content for file, content in self._unsynced.items() if file.parent != synced
        }
        self._fsync(descriptor)

    def happens(self, after: Path) -> Path:
        journals = shutil.ignore_patterns("*-wal", "*-shm")
        shutil.copytree(self._folder, after, ignore=journals)
        for file, content in self._unsynced.items():
            if file.suffix in (".safetensors", ".faiss"):
                place = after / file.relative_to(self._folder)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content)
        return after


@pytest.mark.parametrize("moved_by", ["nothing", "an eviction"])
def test_a_power_cut_after_a_removal_brings_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved_by: str
) -> None:
    folder = prepare(tmp_path / "folder")
    power = PowerCut(folder, monkeypatch)
    with open_index(folder) as index, ChunkCacheStore.open(folder / "store") as store:
        if (
            moved_by == "an eviction"
        ):  # to make room: its files have no rows when the document leaves
            for number in range(100):
                store.put(capture_of(f"new {number}")).result()
            full = ChunkCacheStore.open(folder / "store", max_variants=20)
            full.close()
        remove_documents(index, [SECRET], caches=store)
        after = power.happens(tmp_path / "after")
    assert found_in(after) == []
    with open_index(after) as index, ChunkCacheStore.open(after / "store") as store:
        assert not index.holds(SECRET)
        assert chunk_of(SECRET).chunk_id not in {
            row.variant.key.chunk_id for row in store.rows(limit=1000)
        }
        assert store.check().findings == ()


# -- the process that is killed ---------------------------------------------------------------------------------------


class Steps:
    """Counts statements of SQLite and changes of files; the process is killed at one of them."""

    def __init__(self) -> None:
        self.count = 0
        self.last = -1

    def step(self) -> None:
        self.count += 1
        if self.count == self.last:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*values: Any, **named: Any) -> Any:
            self.step()
            return call(*values, **named)

        return counted


def kill_at_each_step(prepared: Path, into: Path) -> None:
    """Remove in a fork that is killed at a step; the first one counts the steps."""
    steps = Steps()

    class Counted(LeavesRemovedRows):
        def execute(self, query: str, *values: Any) -> sqlite3.Cursor:
            steps.step()
            return super().execute(query, *values)

    connect = sqlite3.connect
    sqlite3.connect = partial(connect, factory=Counted)  # type: ignore[assignment]
    for name in ("unlink", "fsync", "rename", "replace", "rmdir"):
        setattr(os, name, steps.before(getattr(os, name)))
    total = run_in_fork(steps, shutil.copytree(prepared, into / "whole"), last=-1)
    dice = random.Random(7)
    for last in sorted(dice.sample(range(1, total + 1), min(STEPS_KILLED, total))):
        run_in_fork(steps, shutil.copytree(prepared, into / f"killed {last}"), last=last)


def run_in_fork(steps: Steps, folder: Path, *, last: int) -> int:
    """Return the number of steps, 0 of a killed one."""
    reader, writer = os.pipe()
    process = os.fork()
    if not process:
        with open_index(folder) as index, ChunkCacheStore.open(folder / "store") as store:
            steps.count = 0
            steps.last = last
            remove_documents(index, [SECRET], caches=store)
            os.write(writer, str(steps.count).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(process, 0)
    count = os.read(reader, 20)
    os.close(reader)
    return int(count or 0)


if __name__ == "__main__":
    kill_at_each_step(Path(sys.argv[1]), Path(sys.argv[2]))
