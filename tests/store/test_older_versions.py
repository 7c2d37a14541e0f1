"""A store, a remote and an index that an older version wrote: opened without an error, computed again, tidied away.

`tests/data/written-by-2258dc9.tar.xz` was written by that commit: `store/` with seven chunk-caches (raw, int8, entropy;
one private), a calibration and a retrieval index; `remote/`, a shared folder; the vectors of the index.
"""

from __future__ import annotations

import logging
import shutil
import sqlite3
import tarfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from cachecraft_rag.engine.decoder import Decoder
from cachecraft_rag.planning.calibration import load_calibration
from cachecraft_rag.retrievers.faiss_store import FaissStore
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.catalog import Catalog
from cachecraft_rag.store.catalog_records import RowFilter
from cachecraft_rag.store.layout import STORED_BY_OLDER
from cachecraft_rag.store.remote import RemoteConfig
from cachecraft_rag.types import Chunk, digest

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
PATIENT = {"lookup_timeout_s": 10.0, "connect_timeout_s": 10.0, "read_timeout_s": 10.0}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def remote_of(old: Path) -> RemoteConfig:
    return RemoteConfig(f"file://{old}/remote", **PATIENT)


def test_the_catalog_opens_and_says_why_nothing_is_served(old: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with ChunkCacheStore.open(old / "store" / "caches", remote=remote_of(old)) as store:
        assert store.stats().variants == 7
        assert len(store.rows()) == 7
        assert store.check().findings == tuple(
            finding for finding in store.check().findings if STORED_BY_OLDER in finding.what
        )
        found = store.find("default", MODEL, NAMES)
        assert found.variants == {name: [] for name in NAMES}
        stored = {row.variant.key.chunk_id for row in store.rows()}
        assert found.refused.keys() <= set(NAMES)
        assert set(found.refused.values()) == {STORED_BY_OLDER}
        assert store.flush(60)
        assert store.rows(RowFilter(chunk_ids=tuple(NAMES))) == []
        assert store.find("default", MODEL, NAMES).refused == {}
        assert stored - set(NAMES) == {row.variant.key.chunk_id for row in store.rows()}  # the instruction's
    assert caplog.messages == []  # after an upgrade there may be thousands


def test_rows_and_files_are_tidied_away_once_met(old: Path) -> None:
    root = old / "store" / "caches"
    with closing(Catalog(root / "catalog.sqlite")) as catalog:
        names = sorted({row.variant.key.chunk_id for row in catalog.rows(RowFilter())})  # type: ignore[union-attr]
    with ChunkCacheStore.open(root) as store:
        assert set(store.find("default", MODEL, names, session="a stranger").refused) <= set(names)
        assert store.flush(60)
        assert store.rows() == []
        assert store.check().findings == ()
    assert files(root / "variants") == []


def test_another_tenant_and_an_unknown_kind_of_identity_meet_nothing(old: Path) -> None:
    with ChunkCacheStore.open(old / "store" / "caches") as store:
        for namespace, fingerprint in (("other", MODEL), ("default", "model")):
            assert store.find(namespace, fingerprint, NAMES).refused == {}
        assert store.flush(60)
        assert len(store.rows()) == 7


def test_a_private_row_is_no_reason_for_another_session(old: Path) -> None:
    with ChunkCacheStore.open(old / "store" / "caches") as store:
        rows = store.rows()
        (private,) = [row.variant for row in rows if row.variant.session is not None]
        name = private.key.chunk_id
        alone = sum(row.variant.key.chunk_id == name for row in rows) == 1
        shared = [row for row in rows if row.variant.key.chunk_id == name and row.variant.session is None]
        if not alone:
            store.evict(RowFilter(chunk_ids=(name,)))
    if shared:  # put the private one back alone
        shutil.rmtree(old)
        old.mkdir()
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(old, filter="data")
        with closing(sqlite3.connect(old / "store" / "caches" / "catalog.sqlite")) as connection, connection:
            connection.execute("DELETE FROM variants WHERE chunk_id = ? AND session IS NULL", (name,))
    with ChunkCacheStore.open(old / "store" / "caches") as store:
        assert store.find("default", MODEL, [name], session="a stranger").refused == {}
    with ChunkCacheStore.open(old / "store" / "caches") as store:
        assert store.rows(RowFilter(chunk_ids=(name,))) == []


def test_rows_of_a_newer_identity_are_left_alone(old: Path) -> None:
    root = old / "store" / "caches"
    ChunkCacheStore.open(root).close()  # brings the catalog up to date
    with closing(sqlite3.connect(root / "catalog.sqlite")) as connection, connection:
        connection.execute("UPDATE scopes SET fingerprint = '3-' || fingerprint")  # no checksum is right any more
    before = files(root / "variants")
    with ChunkCacheStore.open(root) as store:
        assert store.find("default", MODEL, NAMES).refused == {}
        store.check(repair=True)
        assert store.stats().variants == 7
    assert files(root / "variants") == before


def test_an_engine_computes_again_and_leaves_the_old_remote_as_it_is(
    old: Path, tiny_decoder: Callable[..., Decoder], caplog: pytest.LogCaptureFixture
) -> None:
    from cachecraft_rag.engine.engine import Engine
    from cachecraft_rag.engine.sampling import SamplingParams

    decoder = tiny_decoder("Llama")
    caplog.set_level(logging.WARNING)
    there = {path: path.read_bytes() for path in files(old / "remote")}
    with (
        ChunkCacheStore.open(old / "store" / "caches", remote=remote_of(old)) as store,
        Engine(decoder, store) as engine,
    ):
        assert load_calibration(old / "store", decoder.fingerprint) is None
        first, second = (engine.stream("How?", CHUNKS, sampling=SamplingParams(max_new_tokens=4)) for _ in range(2))
        text = "".join(first)
        outcomes = {chunk.chunk_id: (chunk.outcome, chunk.reason) for chunk in first.stats.chunks}
        engine.write_back.wait_for([*NAMES, engine.prompts.system.segment_id])
        assert store.flush(60)
        assert "".join(second) == text
        assert [chunk.outcome for chunk in second.stats.chunks] == ["exact"] * len(CHUNKS)
        assert {row.variant.key.fingerprint for row in store.rows(RowFilter(chunk_ids=tuple(NAMES)))} == {
            decoder.fingerprint
        }
        assert store.check(repair=True).rows
        assert store.check().findings == ()
    assert {outcome for outcome, _ in outcomes.values()} == {"computed"}
    assert STORED_BY_OLDER in {reason for _, reason in outcomes.values()}
    assert {path: path.read_bytes() for path in there} == there
    assert any("cachecraft/v3" in str(path) for path in files(old / "remote"))
    assert caplog.messages == []


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
