"""A store, a remote and an index that an older version wrote: the store is set aside, the others stay as they are.

`tests/data/written-by-2258dc9.tar.xz` was written by that commit: `store/` with seven chunk-caches (raw, int8, entropy;
one private), a calibration and a retrieval index; `remote/`, a shared folder; the vectors of the index.
"""

from __future__ import annotations

import logging
import sqlite3
import tarfile
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from cachecraft_rag.errors import StoreError
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.calibration import load_calibration
from cachecraft_rag.retrievers.index.faiss_store import FaissStore
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.catalog import schema
from cachecraft_rag.store.catalog_records import RowFilter
from cachecraft_rag.store.remote import RemoteConfig, RemoteTuning
from cachecraft_rag.types.digests import digest
from cachecraft_rag.types.documents import Chunk

ARCHIVE = Path(__file__).parents[1] / "data" / "written-by-2258dc9.tar.xz"
TEXTS = [
    "Empty the kettle before you descale it with vinegar.",
    "The toaster has a crumb tray; pull it out to the left.",
    "Set the fridge to four degrees.",
    "The oven door locks above 300 degrees.",
    "Wash the filter of the hood every month.",
]
CHUNKS = [Chunk(text) for text in TEXTS]
NAMES = [chunk.chunk_id for chunk in CHUNKS]
MODEL = "2-" + digest("any model, by today's identity")
PATIENT = RemoteTuning(lookup_timeout_s=10.0, connect_timeout_s=10.0, read_timeout_s=10.0)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def remote_of(old: Path) -> RemoteConfig:
    return RemoteConfig(f"file://{old}/remote", tuning=PATIENT)


def test_a_store_of_another_version_is_set_aside_with_one_warning(
    old: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = old / "store" / "caches"
    before = {path.relative_to(root): path.read_bytes() for path in files(root / "variants")}
    for version, next_version in (
        ("an older", 999_999),
        ("a newer", schema._VERSION - 1),
        ("the last", 1),
    ):
        with ChunkCacheStore.open(root) as store:
            assert store.stats().variants == 0
            assert store.find("default", MODEL, NAMES).variants == {name: [] for name in NAMES}
            assert store.check().findings == ()
            assert len(caplog.messages) == 1, (version, caplog.messages)
            assert "set-aside" in caplog.messages[0]
        caplog.clear()
        kept = {
            path.relative_to(root / "set-aside"): path.read_bytes()
            for path in files(root / "set-aside/variants")
        }
        assert kept == (before if version == "an older" else {})  # only the last one is kept
        with closing(sqlite3.connect(root / "catalog.sqlite")) as connection:
            connection.execute(f"PRAGMA user_version = {next_version}")
    with ChunkCacheStore.open(root):
        pass


def test_processes_that_meet_an_older_store_at_once_set_it_aside_once(
    old: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stores: list[ChunkCacheStore] = []
    threads = [
        threading.Thread(
            target=lambda: stores.append(ChunkCacheStore.open(old / "store" / "caches"))
        )
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stores) == 6
    assert len(caplog.messages) == 1
    for store in stores:
        assert store.stats().variants == 0  # of one catalog, and none is gone
        store.close()
    assert caplog.messages[1:] == []


def test_a_read_only_store_of_another_version_is_refused_with_a_way_out(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cachecraft_rag.store.database.can_be_written", lambda _: False)
    with pytest.raises(StoreError, match=r"made by another version.*cannot be written"):
        ChunkCacheStore.open(old / "store" / "caches")


def test_an_engine_computes_again_and_leaves_the_old_remote_as_it_is(
    old: Path, tiny_decoder: Callable[..., Decoder], caplog: pytest.LogCaptureFixture
) -> None:
    from cachecraft_rag.engine.engine import Engine
    from cachecraft_rag.serving.sampling import SamplingParams

    decoder = tiny_decoder("Llama")
    caplog.set_level(logging.WARNING)
    there = {path: path.read_bytes() for path in files(old / "remote")}
    with (
        ChunkCacheStore.open(old / "store" / "caches", remote=remote_of(old)) as store,
        Engine(decoder, store) as engine,
    ):
        assert load_calibration(old / "store", decoder.fingerprint) is None
        first, second = (
            engine.stream("How?", CHUNKS, sampling=SamplingParams(max_new_tokens=4))
            for _ in range(2)
        )
        text = "".join(first)
        outcomes = {chunk.outcome for chunk in first.stats.chunks}
        engine.write_back.wait_for([*NAMES, engine.prompts.system.segment_id])
        assert store.flush(60)
        assert "".join(second) == text
        assert [chunk.outcome for chunk in second.stats.chunks] == ["exact"] * len(CHUNKS)
        assert {
            row.variant.key.fingerprint for row in store.rows(RowFilter(chunk_ids=tuple(NAMES)))
        } == {decoder.fingerprint}
        assert store.check(repair=True).rows
        assert store.check().findings == ()
    assert outcomes == {"computed"}
    assert {path: path.read_bytes() for path in there} == there
    assert any("cachecraft/v3" in str(path) for path in files(old / "remote"))
    assert len(caplog.messages) == 1


def test_the_retrieval_index_opens_as_it_is(old: Path) -> None:
    vectors = np.load(old / "vectors.npy")
    folder = old / "store" / "index"
    with FaissStore.open(folder, dim=8, embedder_fingerprint="tiny@0123456789abcdef") as index:
        assert index.stats().chunks == 5
        for text, vector in zip(TEXTS, vectors, strict=True):
            (hit,) = index.search(vector, 1)
            assert hit.text == text
            assert hit.score == pytest.approx(1.0)
    with FaissStore.open(folder) as index:
        assert (index.dim, index.embedder) == (8, "tiny@0123456789abcdef")
