"""Everything that is opened closes with its block, also when the block fails, and may be closed twice."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import IndexStoreError, StoreError
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.retrievers.index.faiss_store import FaissStore
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.closeable import Closeable
from cachecraft_rag.types.documents import Chunk


class Mishap(Exception):
    pass


def leave_by_mishap(opened: Closeable) -> None:
    with contextlib.suppress(Mishap), opened as same:
        assert same is opened
        raise Mishap
    opened.close()


def test_a_store_and_an_index(tmp_path: Path) -> None:
    store = ChunkCacheStore.open(tmp_path / "caches")
    leave_by_mishap(store)
    with pytest.raises(StoreError, match="closed"):
        store.find("ns", "model", ["chunk"])
    index = FaissStore.open(tmp_path / "index", dim=3, embedder_fingerprint="model@1")
    leave_by_mishap(index)
    with pytest.raises(IndexStoreError, match="closed"):
        index.stats()


def test_an_engine_stores_what_it_bore_and_leaves_no_thread(
    tiny_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    before = set(threading.enumerate())
    with ChunkCacheStore.open(tmp_path / "caches") as store:
        engine = Engine(tiny_decoder("Llama"), store)
        list(engine.stream("Why?", [Chunk("The kettle boils.")]))
        leave_by_mishap(engine)
        assert store.stats().variants == 2  # the chunk and the system segment
    assert set(threading.enumerate()) <= before
