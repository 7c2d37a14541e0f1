"""A fork of a process that has an engine open: every door of it says what to do, and nothing hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import traceback
import urllib.request
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ForkError
from cachecraft_rag.observability.metrics import serve_metrics
from cachecraft_rag.retrievers.index.faiss_store import FaissStore
from cachecraft_rag.serving.priming import Primer
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore, RowFilter
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.types.prompts import Prompt

CHUNKS = [Chunk("Empty the kettle before you descale it."), Chunk("The toaster has a crumb tray.")]
SHORT = SamplingParams(max_new_tokens=4)


def in_a_fork(action: Callable[[], None]) -> None:
    """Run it in a forked child, for ten seconds at most, and fail as it fails."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # since 3.12: this process has threads, which is the point
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        message = b""
        try:
            action()
        except BaseException:  # noqa: BLE001 - reported to the parent
            message = traceback.format_exc().encode()
        finally:
            os.write(writing, message)
            os._exit(1 if message else 0)
    os.close(writing)
    with os.fdopen(reading, "rb") as report:
        message = report.read()
    status = os.waitpid(pid, 0)[1]
    assert status == 0, message.decode() or f"the child ended with status {status}: it hung"


def refuses(*doors: Callable[[], object]) -> Callable[[], None]:
    """Return True if each of these raises ForkError in a fork."""

    def knock() -> None:
        for number, door in enumerate(doors):
            try:
                door()
            except ForkError as error:
                advice = str(error)
            else:
                raise AssertionError(f"door {number} is open")
            assert "spawn" in advice

    return knock


def test_a_fork_leaves_the_metrics_server_alone(engine: Any) -> None:
    with serve_metrics(engine, 0) as server:
        in_a_fork(server.close)
        url = f"http://127.0.0.1:{server.port}/metrics"
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert answer.status == 200


@pytest.fixture
def engine(tiny_decoder: Any, tmp_path: Path) -> Any:
    with (
        ChunkCacheStore.open(tmp_path / "caches") as store,
        Engine(tiny_decoder("Llama"), store) as made,
    ):
        for _ in made.stream("Which tray?", CHUNKS, sampling=SHORT):
            pass
        made.write_back.wait_for([chunk.chunk_id for chunk in CHUNKS])
        yield made


def test_a_fork_may_not_ask_a_used_engine(engine: Engine) -> None:
    begun = engine.stream("Which kettle?", CHUNKS, sampling=SHORT)
    in_a_fork(
        refuses(
            lambda: engine.stream("Which tray?", CHUNKS, sampling=SHORT),
            lambda: engine.score_answer("Which tray?", CHUNKS),
            lambda: Primer(engine).prime(CHUNKS),
            lambda: engine.capture(Prompt((engine.prompts.system,)), [0], primed=True),
            lambda: list(begun),
        )
    )
    assert "".join(begun) == begun.text  # the parent goes on
    assert {chunk.outcome for chunk in begun.stats.chunks} == {"exact"}


def test_a_fork_may_not_use_an_open_store(engine: Engine) -> None:
    store, fingerprint = engine.store, engine.decoder.fingerprint
    ids = [chunk.chunk_id for chunk in CHUNKS]
    (variant,) = store.find("default", fingerprint, ids).variants[ids[0]]
    in_a_fork(
        refuses(
            lambda: store.find("default", fingerprint, ids),
            lambda: store.token_scores([variant.variant_id]),
            lambda: store.open_variants([variant]),
            lambda: store.load(variant),
            lambda: store.used(variant.variant_id, 0.5, 3),
            lambda: store.read_in_background(lambda: None),
            store.stats,
            store.rows,
            store.check,
            store.flush,
            lambda: store.evict(RowFilter(chunk_ids=tuple(ids))),
        )
    )
    assert store.stats().variants == 3


def test_closing_in_a_fork_waits_for_nothing_and_takes_nothing_from_the_parent(
    engine: Engine, tmp_path: Path
) -> None:
    index = FaissStore.open(tmp_path / "index", dim=2, embedder_fingerprint="x@1")
    index.upsert("one", [CHUNKS[0]], np.array([[1.0, 0.0]]))
    with (
        engine.store._lock,
        engine.write_back._guard,
        index._db._read_lock,
    ):  # as another thread may have them at that moment

        def close() -> None:
            engine.close()
            engine.store.close()
            index.close()
            refuses(lambda: index.search([1.0, 0.0], 1), index.documents, index.stats)()

        in_a_fork(close)
    assert engine.store._durable._writers._path(engine.store._durable._writers.token).exists()
    assert [hit.text for hit in index.search([1.0, 0.0], 1)] == [CHUNKS[0].text]
    index.close()


def test_a_forked_worker_may_open_its_own_where_the_parent_has_computed_nothing(
    tmp_path: Path,
) -> None:
    script = textwrap.dedent(
        """
        import os, sys
        from cachecraft_rag.store import ChunkCacheStore

        store = ChunkCacheStore.open(sys.argv[1])
        pid = os.fork()
        if pid == 0:
            with ChunkCacheStore.open(sys.argv[1]) as own:
                assert own.stats().variants == 0
            sys.exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        store.close()
        """
    )
    command = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path / "caches")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
