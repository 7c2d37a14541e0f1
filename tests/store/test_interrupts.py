"""Ctrl-C at any moment: no transaction, lock or reservation stays, and the process and others go on.

TESTS_INTERRUPTS  number of interrupts at random moments, 2,000 by default.
"""

from __future__ import annotations

import contextlib
import gc
import linecache
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from cachecraft_rag.retrievers.index.faiss_store import FaissStore
from cachecraft_rag.store import ChunkCacheStore, RowFilter
from cachecraft_rag.store.config import StoreTuning
from cachecraft_rag.store.database import Database
from cachecraft_rag.types.captures import Capture, TokenScores
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.types.kv_layout import KVLayout
from cachecraft_rag.types.variants import Variant, VariantKey
from tests.engines import untraced
from tests.store.test_database import insert, open_database, words

__all__ = ["untraced"]

LAYOUT = KVLayout(layers=2, kv_heads=1, head_dim=8, dtype="float32")
SETTINGS: dict[str, Any] = {
    "disk_bytes": 400_000,
    "host_bytes": 20_000,
    "tuning": StoreTuning(busy_timeout_s=0.5),
}
INTERRUPTS = int(os.environ.get("TESTS_INTERRUPTS", "2000"))
WRITE_IN_ANOTHER_PROCESS = """
import sys
from cachecraft_rag.retrievers.index.faiss_store import FaissStore
from cachecraft_rag.store import ChunkCacheStore
from tests.store.test_interrupts import SETTINGS, capture
from cachecraft_rag.types.variants import Variant

with ChunkCacheStore.open(sys.argv[1], **SETTINGS) as store:
    stored = store.put(capture(999)).result()
    assert isinstance(stored, Variant), stored
if len(sys.argv) > 2:
    with FaissStore.open(sys.argv[2]) as index:
        index.delete_document("document 1")
"""


def capture(number: int) -> Capture:
    """A capture of twelve tokens; every number is a separate chunk."""
    key = VariantKey("ns", "model", f"chunk {number}", ("system",))
    kv = torch.full(LAYOUT.shape(12), float(number % 100))
    return Capture(key, LAYOUT, "tokens", kv, TokenScores(), (0.1,), 0.3, 0.6, 1.0)


def interrupted_at_line(
    number: int, action: Callable[[], object], *, within: str, events: tuple[str, ...]
) -> bool:
    """Run `action` with Ctrl-C at the given place of the package; returns False if it has fewer places.

    Python raises KeyboardInterrupt when it enters a function and after calls, so both are simulated by a tracer. A
    `with` line is left out: its second event is the release of a lock, which no signal can precede.
    """
    left = number

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        name = frame.f_code.co_filename
        if within not in name and not name.endswith("contextlib.py"):
            return None
        if event in events and "with " not in linecache.getline(name, frame.f_lineno):
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = open_database(tmp_path / "words.sqlite", busy_timeout_s=0.2)
    yield opened
    opened.close()


@contextlib.contextmanager
def other_thread_can_use(database: Database) -> Iterator[None]:
    """Check in another thread that neither lock is held; that thread is given up after a minute."""
    yield
    done: list[list[str]] = []

    def use() -> None:
        with database.writing() as connection:
            connection.execute("INSERT OR REPLACE INTO words VALUES ('from a thread')")
        done.append(words(database))

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    thread.join(60)
    assert done, "a lock is still held"


def read_in_a_snapshot(database: Database) -> None:
    with database.snapshot() as connection:
        connection.execute("SELECT count(*) FROM words").fetchone()


@pytest.mark.parametrize("events", [("line",), ("call",)], ids=["at a line", "at a call"])
def test_ctrl_c_at_any_place_leaves_no_transaction_open(
    database: Database, events: tuple[str, ...]
) -> None:
    second = open_database(database.path, busy_timeout_s=0.2)
    places = 0

    def use() -> None:
        insert(database, f"word {places}")
        read_in_a_snapshot(database)

    while interrupted_at_line(places, use, within="store/database.py", events=events):
        places += 1
        for connection in (database._reader, database._writer):
            assert connection is not None
            assert not connection.in_transaction
        insert(database, f"after {places}")
        read_in_a_snapshot(database)
        insert(second, f"second {places}")
        with other_thread_can_use(database):
            pass
    assert places > 10
    second.close()


def test_ctrl_c_right_after_begin_leaves_no_transaction_open(database: Database) -> None:
    """A signal that arrives while BEGIN waits for another writer is raised as soon as BEGIN has returned."""
    second = open_database(database.path, busy_timeout_s=30)
    writing, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with second.writing():
            writing.set()
            go_on.wait(60)

    def on_alarm(*_: object) -> None:
        raise KeyboardInterrupt

    slow = open_database(database.path, busy_timeout_s=30)
    holder = threading.Thread(target=hold)
    holder.start()
    assert writing.wait(60)
    before = signal.signal(signal.SIGALRM, on_alarm)
    # The alarm is pending before the other writer ends: BEGIN is in C and returns only after that.
    timer = threading.Timer(0.3, go_on.set)
    timer.start()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt), slow.writing():
            raise AssertionError("never reached")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    timer.join()
    holder.join()
    assert slow._writer is not None
    assert not slow._writer.in_transaction
    insert(slow, "goes on")
    insert(database, "as well")
    second.close()
    slow.close()


def test_ctrl_c_at_any_line_of_an_eviction_leaves_no_room_taken(tmp_path: Path) -> None:
    with ChunkCacheStore.open(tmp_path, **SETTINGS) as store:
        places = 0
        while True:
            for number in range(2):
                assert isinstance(store.put(capture(number)).result(60), Variant)

            def evict() -> None:
                store.evict(down_to_bytes=0)

            if not interrupted_at_line(
                places, evict, within="cachecraft_rag/store/", events=("line",)
            ):
                break
            places += 1
            assert store.flush(60)
            store.evict(down_to_bytes=0)
            assert store.stats().disk_bytes == 0
        assert places > 50
        assert list((tmp_path / "variants").rglob("*.safetensors")) == []


def test_ctrl_c_at_any_line_of_putting_leaves_the_queue_empty(tmp_path: Path) -> None:
    with ChunkCacheStore.open(tmp_path, **SETTINGS) as store:
        places = 0

        def put() -> None:
            store.used(store.put(capture(1)).result(60).variant_id, 0.5, 12)

        while interrupted_at_line(places, put, within="cachecraft_rag/store/", events=("line",)):
            places += 1
            assert store.flush(60)
            assert store.stats().queued_bytes == 0
        assert places > 50
        put()
        assert store.flush(60)
        assert store.rows()[0].variant.reuse_frequency > 0


class Alarms:
    """Ctrl-C at random moments of a block, raised by a timer signal in the main thread."""

    def __init__(self, seed: int) -> None:
        self.raised = 0
        self._dice = random.Random(seed)
        self._armed = False

    def __enter__(self) -> Alarms:
        self._before = signal.signal(signal.SIGALRM, self._on_alarm)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def _on_alarm(self, *_: object) -> None:
        if self._armed:
            self._armed = False
            self.raised += 1
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """No interrupt while the block runs: Python's own executors can be left locked by one."""
        armed = self._armed
        self._armed = False
        yield
        self._armed = armed

    def during(self, action: Callable[[], object], *, at_most_s: float) -> None:
        """Repeat `action` until it is interrupted, after a random time up to `at_most_s`."""
        try:
            self._armed = True
            signal.setitimer(signal.ITIMER_REAL, self._dice.uniform(1e-5, at_most_s), 1e-3)
            while self._armed:
                action()
        except KeyboardInterrupt:
            pass
        finally:
            self._armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("untraced")  # coverage's own lock would stay locked
# A signal that arrives in a finalizer is reported and swallowed by Python.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_process_and_another_one_go_on_after_thousands_of_interrupts(tmp_path: Path) -> None:
    dice = random.Random(3)
    vector = np.eye(4, dtype=np.float32)
    store = ChunkCacheStore.open(tmp_path / "caches", **SETTINGS)
    index = FaissStore.open(tmp_path / "index", dim=4, embedder_fingerprint="model@1")

    def put_and_load() -> None:
        with alarms.held():
            variant = store.put(capture(dice.randrange(60))).result(60)
            store.used(variant.variant_id, 0.5, 12)
        if isinstance(variant, Variant):
            store.load(variant)

    def look_up() -> None:
        names = [f"chunk {dice.randrange(60)}" for _ in range(4)]
        store.find("ns", "model", names)
        store.seen_texts(names)
        store.stats()

    def evict() -> None:
        store.evict(RowFilter(chunk_ids=(f"chunk {dice.randrange(60)}",)))
        store.evict(down_to_bytes=dice.randrange(400_000))

    def change_index() -> None:
        texts = [f"text {dice.randrange(100)} {n}" for n in range(4)]
        index.upsert(f"document {dice.randrange(5)}", [Chunk(text) for text in texts], vector)

    def search_index() -> None:
        index.search(vector[dice.randrange(4)], 3)
        index.stats()

    actions: list[tuple[Callable[[], object], float]] = [
        (put_and_load, 0.01),
        (look_up, 0.005),
        (evict, 0.01),
        (lambda: store.check(repair=True), 0.03),
        (change_index, 0.01),
        (search_index, 0.005),
        (lambda: ChunkCacheStore.open(tmp_path / "caches", **SETTINGS).close(), 0.02),
        (lambda: FaissStore.open(tmp_path / "index").close(), 0.01),
    ]
    change_index()
    search_index()  # imports faiss, which does not survive an interrupt
    with Alarms(4) as alarms:
        while alarms.raised < INTERRUPTS:
            action, at_most_s = actions[dice.randrange(len(actions))]
            alarms.during(action, at_most_s=at_most_s)
            if alarms.raised % 100 == 0:
                assert store.flush(60)
                assert isinstance(store.put(capture(77)).result(60), Variant)
                change_index()
                search_index()
    gc.collect()
    command = [
        sys.executable,
        "-c",
        WRITE_IN_ANOTHER_PROCESS,
        str(tmp_path / "caches"),
        str(tmp_path / "index"),
    ]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
    store.check(repair=True)
    store.evict(down_to_bytes=0)
    stats = store.stats()
    assert (stats.variants, stats.disk_bytes, stats.queued_bytes) == (0, 0, 0)
    assert store.check().findings == ()
    assert list((tmp_path / "caches" / "variants").rglob("*.safetensors*")) == []
    store.close()
    index.close()
