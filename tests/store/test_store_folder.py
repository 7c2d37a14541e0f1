"""A store whose folder cannot be written, or is taken away while it is open."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import StoreError
from cachecraft_rag.retrievers.index.faiss_store import FaissStore
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore, RowFilter
from cachecraft_rag.store.catalog.eviction_rules import EvictionRule
from cachecraft_rag.store.remote import RemoteConfig, RemoteTuning
from cachecraft_rag.types.captures import Capture, TokenScores
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.types.kv_layout import KVLayout
from cachecraft_rag.types.store_reasons import Unavailable
from cachecraft_rag.types.variants import LoadedVariant, Variant, VariantKey

LAYOUT = KVLayout(layers=2, kv_heads=1, head_dim=4, dtype="float32")
CHUNKS = [Chunk("Empty the kettle before you descale it."), Chunk("The toaster has a crumb tray.")]
NOBODY = 65534


def capture(chunk: str = "chunk") -> Capture:
    key = VariantKey("ns", "model", chunk, ("system",))
    scores = TokenScores(np.zeros(3, np.float32))
    return Capture(
        key, LAYOUT, "tokens", torch.ones(LAYOUT.shape(3)), scores, (0.1,), 0.3, 0.6, 1.0
    )


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_folder_that_cannot_be_tidied_up_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "writers" / "0123.lock").mkdir(parents=True)
    with pytest.raises(StoreError, match="cannot hold a store"):
        ChunkCacheStore.open(tmp_path)


def test_a_lock_file_that_cannot_be_deleted_does_not_keep_the_store_open(tmp_path: Path) -> None:
    store = ChunkCacheStore.open(tmp_path)
    store.put(capture()).result()
    shutil.rmtree(tmp_path / "writers")
    (tmp_path / "writers").touch()
    store.close()
    with pytest.raises(StoreError):
        store.rows()


# -- taken away -------------------------------------------------------------------------------------------------------


def deleted(root: Path) -> None:
    shutil.rmtree(root)


def replaced(root: Path) -> None:
    shutil.rmtree(root)
    with ChunkCacheStore.open(root) as other:
        other.put(capture("other")).result()


def moved(root: Path) -> None:
    root.rename(root.with_name("elsewhere"))


@pytest.mark.parametrize("take_away", [deleted, replaced, moved])
def test_a_folder_that_vanishes_is_noticed_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, take_away: Callable[[Path], None]
) -> None:
    root = tmp_path / "caches"
    store = ChunkCacheStore.open(root)
    store.put(capture()).result()
    (variant,) = store.find("ns", "model", ["chunk"]).variants["chunk"]
    take_away(root)
    left = sorted(root.rglob("*.safetensors"))
    with caplog.at_level(logging.WARNING, "cachecraft_rag"):
        for _ in range(3):
            assert store.find("ns", "model", ["chunk"]).variants == {"chunk": []}
            store.used(variant.variant_id, 0.5, 3)
        dropped = store.put(capture("another")).result()
        assert isinstance(dropped, Unavailable)
        assert "folder is gone" in dropped.reason
        assert store.token_scores([variant.variant_id])[variant.variant_id].inter is None
        stats = store.stats()
        assert (stats.variants, stats.disk_bytes) == (0, 0)
        assert stats.captures == {"stored": 1, "folder_gone": 1}
        assert store.flush()
        for ask in (store.check, store.rows, lambda: store.evict(RowFilter(namespace="ns"))):
            with pytest.raises(StoreError, match="deleted"):
                ask()
        store.close()
    assert len(warnings_of(caplog)) == 1, warnings_of(caplog)
    assert str(root) in warnings_of(caplog)[0]
    assert sorted(root.rglob("*.safetensors")) == left  # nothing was put in its place
    if take_away is replaced:
        with ChunkCacheStore.open(root) as other:
            assert other.check().findings == ()
            assert len(other.find("ns", "model", ["other"]).variants["other"]) == 1
    else:
        assert not root.exists()


def test_a_remote_is_not_used_while_it_is_not_known_what_was_removed(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    patient = RemoteTuning(lookup_timeout_s=5.0, connect_timeout_s=5.0, read_timeout_s=5.0)
    remote = RemoteConfig(f"file://{tmp_path}/shared", tuning=patient)
    with (
        ChunkCacheStore.open(tmp_path / "sender", remote=remote) as sender,
        ChunkCacheStore.open(tmp_path / "caches", remote=remote) as store,
    ):
        sender.put(capture()).result()
        assert sender.flush(10)
        assert len(store.find("ns", "model", ["chunk"]).variants["chunk"]) == 1
        shutil.rmtree(tmp_path / "caches")
        assert store.find("ns", "model", ["chunk"]).variants == {"chunk": []}


def test_a_remote_gets_nothing_while_it_is_not_known_what_was_removed(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    remote = RemoteConfig(f"file://{tmp_path}/shared")
    with ChunkCacheStore.open(tmp_path / "caches", remote=remote) as store:
        shutil.rmtree(tmp_path / "caches")
        store.put(capture()).result()
        assert store.flush(10)
    assert not [path for path in (tmp_path / "shared").rglob("*") if path.is_file()]


def test_closing_does_no_harm_to_a_store_that_is_open_in_its_place(tmp_path: Path) -> None:
    root = tmp_path / "caches"
    store = ChunkCacheStore.open(root)
    store.put(capture()).result()
    shutil.rmtree(root)
    with ChunkCacheStore.open(root) as other:
        other.put(capture("other")).result()
        assert store.find("ns", "model", ["chunk"]).variants == {"chunk": []}
        store.close()
        assert (root / "catalog.sqlite-wal").exists()  # SQLite deletes it by name
        with ChunkCacheStore.open(root) as third:
            assert third.stats().variants == 1


def test_an_engine_goes_on_answering_without_its_folder(tiny_decoder: Any, tmp_path: Path) -> None:
    how = {"sampling": SamplingParams(max_new_tokens=6)}
    with (
        ChunkCacheStore.open(tmp_path / "caches") as store,
        Engine(tiny_decoder("Llama"), store) as engine,
    ):
        first = "".join(engine.stream("Which tray?", CHUNKS, **how))  # type: ignore[arg-type]
        engine.write_back.wait_for([chunk.chunk_id for chunk in CHUNKS])
        shutil.rmtree(tmp_path / "caches")
        again = engine.stream("Which tray?", CHUNKS, **how)  # type: ignore[arg-type]
        assert "".join(again) == first
        assert {chunk.outcome for chunk in again.stats.chunks} == {"computed"}
    assert not (tmp_path / "caches").exists()


# -- full -------------------------------------------------------------------------------------------------------------

FullDisk = Callable[[], AbstractContextManager[None]]


def test_a_store_on_a_full_disk_answers_and_frees_space(
    tmp_path: Path, full_disk: FullDisk
) -> None:
    root = tmp_path / "caches"
    with ChunkCacheStore.open(root) as store:
        for name in ("chunk", "another", "third"):
            assert isinstance(store.put(capture(name)).result(), Variant)
    with full_disk(), ChunkCacheStore.open(root, disk_bytes=10**6) as store:
        (variant,) = store.find("ns", "model", ["chunk"]).variants["chunk"]
        assert isinstance(store.load(variant), LoadedVariant)
        assert isinstance(store.put(capture("new")).result(), Unavailable)
        assert (store.stats().variants, len(store.rows()), store.check().findings) == (3, 3, ())
        assert store.evict(RowFilter(chunk_ids=("another",))).variants == 1
        assert len(list(root.rglob("*.safetensors"))) == 2
        # its row cannot leave yet
        assert [finding.kind for finding in store.check().findings] == ["missing file"]
        (gone,) = store.find("ns", "model", ["another"]).variants["another"]
        assert isinstance(store.open_variant(gone), Unavailable)  # memory has let go of it
    with ChunkCacheStore.open(root) as store:
        store.check(repair=True)
        assert isinstance(store.put(capture("new")).result(), Variant)
        assert store.check().findings == ()


# -- read-only --------------------------------------------------------------------------------------------------------


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A folder that another user can reach and read; pytest's own are closed to others."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def as_nobody(action: Callable[[], object]) -> Any:
    """Result of an action in a process of a user who may write nothing; it runs in a fork, so imports are here."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # since 3.12: this process has threads
        pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            result = json.dumps({"result": action()})
        except BaseException as error:  # noqa: BLE001 - reported to the parent
            result = json.dumps({"error": f"{type(error).__name__}: {error}"})
        os.write(writing, result.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as report:
        said = json.loads(report.read())
    os.waitpid(pid, 0)
    assert "error" not in said, said["error"]
    return said["result"]


def look(root: Path, rules: Sequence[EvictionRule] = ()) -> dict[str, Any]:
    """All that may be asked of a store that cannot be written, and what it says."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("cachecraft_rag").addHandler(handler)
    with ChunkCacheStore.open(root, disk_bytes=10**6, rules=rules) as store:
        (variant,) = store.find("ns", "model", ["chunk"]).variants["chunk"]
        loaded = store.load(variant)
        assert isinstance(loaded, LoadedVariant)
        store.used(variant.variant_id, 0.5, 3)
        dropped = store.put(capture("new")).result()
        assert isinstance(dropped, Unavailable)
        assert store.flush()
        report = store.check()
        refused = []
        for ask in (
            lambda: store.evict(RowFilter(namespace="ns")),
            lambda: store.check(repair=True),
        ):
            try:
                ask()
            except StoreError as error:
                refused.append("written" in str(error))
        found = {
            "sum": float(loaded.kv.sum()),
            "rows": len(store.rows()),
            "variants": store.stats().variants,
            "findings": [finding.what for finding in report.findings],
            "dropped": dropped.reason,
            "refused": refused,
            "loads": store.stats().loads,
        }
    return found | {"warnings": said}


@pytest.mark.parametrize("state", ["closed", "open elsewhere"])
def test_a_read_only_store_serves_and_lists_what_it_holds(open_to_all: Path, state: str) -> None:
    root = open_to_all / "caches"
    with ChunkCacheStore.open(root) as store:
        store.put(capture()).result()
        if state == "open elsewhere":
            found = as_nobody(lambda: look(root))
    before = sorted(root.rglob("*"))
    if state == "closed":
        found = as_nobody(lambda: look(root))
    warned = found.pop("warnings")
    assert found == {
        "sum": float(torch.ones(LAYOUT.shape(3)).sum()),
        "rows": 1,
        "variants": 1,
        "findings": [],
        "dropped": "the store is read-only",
        "refused": [True, True],
        "loads": {"disk": 1},
    }
    assert len(warned) == 1, warned
    assert "nothing is added" in warned[0]
    assert sorted(root.rglob("*")) == before


def test_a_read_only_store_keeps_what_its_rules_would_evict_and_says_so(open_to_all: Path) -> None:
    root = open_to_all / "caches"
    with ChunkCacheStore.open(root) as store:
        store.put(capture()).result()
    found = as_nobody(lambda: look(root, rules=[lambda _row, _now: True]))
    assert found["rows"] == 1
    assert ["or evicted by the rules" in warning for warning in found["warnings"]] == [True]


def test_a_read_only_index_is_searched(open_to_all: Path) -> None:
    folder = open_to_all / "index"
    with FaissStore.open(folder, dim=2, embedder_fingerprint="x@1") as index:
        index.upsert("one", CHUNKS, np.eye(2))

    def search() -> list[str]:
        with FaissStore.open(folder, dim=2, embedder_fingerprint="x@1") as index:
            return [hit.text for hit in index.search([0.0, 1.0], 1)]

    assert as_nobody(search) == [CHUNKS[1].text]


def test_a_folder_that_is_no_store_and_cannot_become_one_is_refused(open_to_all: Path) -> None:
    def open_it() -> str:
        try:
            ChunkCacheStore.open(open_to_all / "new")
        except StoreError as error:
            return str(error)
        return "opened"

    assert "writable" in as_nobody(open_it)
