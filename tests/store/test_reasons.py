"""Every capture dropped, load failed and eviction is counted by a stable code, and logged with it."""

from __future__ import annotations

import logging
import math
import resource
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cachecraft_rag.store import ChunkCacheStore, RowFilter
from cachecraft_rag.store.config import StoreTuning
from cachecraft_rag.types.captures import Capture, TokenScores
from cachecraft_rag.types.kv_layout import KVLayout
from cachecraft_rag.types.store_reasons import CaptureDrop, EvictionReason, LoadFailure, Unavailable
from cachecraft_rag.types.variants import Variant, VariantKey

LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=8, dtype="bfloat16")
FILE = 4096 + LAYOUT.nbytes(10)  # the file of a capture of 10 tokens


def make(
    chunk: str = "chunk", prefix: tuple[str, ...] = (), *, tokens: int = 10, **changes: Any
) -> Capture:
    key = VariantKey("ns", "model", chunk, prefix)
    kv = torch.ones(LAYOUT.shape(tokens), dtype=torch.bfloat16)
    given = Capture(
        key, LAYOUT, "tokens", kv, TokenScores(), tuple(0.1 for _ in prefix), 0.3, 0.6, 1.0
    )
    return replace(given, **changes)


def stored(store: ChunkCacheStore, capture: Capture) -> Variant:
    result = store.put(capture).result()
    assert isinstance(result, Variant), result
    return result


def dropped(store: ChunkCacheStore, capture: Capture) -> CaptureDrop | LoadFailure:
    result = store.put(capture).result()
    assert isinstance(result, Unavailable)
    return result.code


@pytest.fixture(autouse=True)
def events(caplog: pytest.LogCaptureFixture) -> Callable[[str], Counter[str]]:
    """Number of log records of an event, by reason."""
    caplog.set_level(logging.INFO, logger="cachecraft_rag")

    def of(event: str) -> Counter[str]:
        fields = [getattr(record, "cachecraft", {}) for record in caplog.records]
        return Counter(one["reason"] for one in fields if one.get("event") == event)

    return of


def test_captures_that_are_dropped(
    tmp_path: Path,
    full_disk: Callable[[], AbstractContextManager[None]],
    events: Callable[[str], Counter[str]],
) -> None:
    with ChunkCacheStore.open(
        tmp_path / "store", disk_bytes=20 * FILE, tuning=StoreTuning(queue_bytes=30 * FILE)
    ) as store:
        assert dropped(store, make(tokens=2000)) == "too_large"
        assert dropped(store, make(intra=math.nan)) == "flawed"
        with full_disk():
            assert dropped(store, make("no room on the disk")) == "catalog_error"
        store.count_drop("early", CaptureDrop.WRITE_BACK_FULL, "too many wait")
        stored(store, make())
    assert dropped(store, make("late")) == "closed"
    with ChunkCacheStore.open(tmp_path / "small", tuning=StoreTuning(queue_bytes=1)) as small:
        assert dropped(small, make()) == "queue_full"
    with ChunkCacheStore.open(tmp_path / "int8", codec="int8") as lossy:
        infinite = make(
            prefix=("system",), kv=torch.full(LAYOUT.shape(10), math.inf, dtype=torch.bfloat16)
        )
        assert dropped(lossy, infinite) == "not_encodable"
    counted = dict.fromkeys(
        ["too_large", "flawed", "catalog_error", "write_back_full", "closed"], 1
    )
    assert store._writer.counts()[1] == counted | {"stored": 1}
    assert events("capture_dropped") == counted | {"queue_full": 1, "not_encodable": 1}


def test_a_capture_whose_file_finds_no_room(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ChunkCacheStore.open(tmp_path / "store") as store:
        try:
            # enough for the catalog
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
            assert dropped(store, make(tokens=20_000)) == "disk_full"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_loads_that_fail(tmp_path: Path, events: Callable[[str], Counter[str]]) -> None:
    root = tmp_path / "store"
    with ChunkCacheStore.open(root) as store:
        variants = [stored(store, make(f"chunk {n}")) for n in range(4)]
    paths = [store._durable.disk.path(one.variant_id, one.created) for one in variants]
    with ChunkCacheStore.open(root) as store:
        paths[0].unlink()
        data = bytearray(paths[1].read_bytes())
        data[-1] ^= 1
        paths[1].write_bytes(data)
        paths[2].unlink()
        paths[2].mkdir()  # it can be opened, and not be read: nothing says that it is lost for good
        failed = [store.load(one) for one in variants[:3]]
        failed.append(store.load(replace(variants[3], home="remote")))
        assert [one.code for one in failed if isinstance(one, Unavailable)] == [
            "missing",
            "damaged",
            "unreadable",
            "no_remote",
        ]
        store.flush()
        stats = store.stats()
        assert stats.load_failures == {
            "disk": {"missing": 1, "damaged": 1, "unreadable": 1},
            "remote": {"no_remote": 1},
        }
        assert stats.evictions == {"disk": {"damaged": 2}}
        assert events("load_failed") == {
            "missing": 1,
            "damaged": 1,
            "unreadable": 1,
            "no_remote": 1,
        }
        assert events("eviction") == {"damaged": 2}


def test_evictions(tmp_path: Path, events: Callable[[str], Counter[str]]) -> None:
    limits = {"disk_bytes": 4 * FILE, "max_variants": 4, "variants_per_chunk": 2}
    with ChunkCacheStore.open(
        tmp_path / "store", **limits, host_bytes=2 * LAYOUT.nbytes(10)
    ) as store:
        stored(store, make())
        stored(store, make())  # takes the first one's place
        for n in range(2):
            stored(store, make(prefix=(f"{n}",)))
        assert store.stats().evictions["disk"] == {"replaced": 1, "chunk_cap": 1}
        for n in range(3):
            stored(store, make(f"{n}"))
        assert store.stats().evictions["disk"] == {"replaced": 1, "chunk_cap": 1, "budget": 1}
        store.evict(RowFilter(chunk_ids=("2",)))
        stats = store.stats()
    assert stats.evictions["disk"] == {
        "replaced": 1,
        "chunk_cap": 1,
        "budget": 1,
        "administrator": 1,
    }
    assert stats.evictions["host"].keys() == {EvictionReason.BUDGET}
    with ChunkCacheStore.open(tmp_path / "store", max_variants=1, disk_bytes=1 << 30) as store:
        assert store.stats().evictions == {"disk": {"count_cap": 2}}
        stored(store, make("one more"))
        assert store.stats().evictions == {"disk": {"count_cap": 3}}
    assert events("eviction") == {
        "replaced": 1,
        "chunk_cap": 1,
        "budget": 1,
        "administrator": 1,
        "count_cap": 3,
    }


def test_every_chunk_cache_that_was_stored_is_there_or_has_left_for_a_reason(
    tmp_path: Path,
) -> None:
    with ChunkCacheStore.open(
        tmp_path / "store", disk_bytes=7 * FILE, variants_per_chunk=2
    ) as store:
        for n in range(60):
            stored(store, make(f"chunk {n % 2 if n < 30 else n}", (f"{n % 7}",)))
        stats = store.stats()
    assert stats.captures == {"stored": 60}
    assert sum(stats.evictions["disk"].values()) == 60 - stats.variants
    assert {"budget", "chunk_cap"} <= stats.evictions["disk"].keys()
