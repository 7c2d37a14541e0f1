"""The store as the engine and an administrator meet it: put, lookup, load, budgets, eviction, check, refusals."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from cachecraft_rag.errors import ConfigError, StoreError
from cachecraft_rag.store import ChunkCacheStore, RowFilter, StoreConfig
from cachecraft_rag.store.background_writer import variant_of
from cachecraft_rag.store.catalog import Catalog
from cachecraft_rag.store.codecs import CODECS
from cachecraft_rag.store.config import StoreTuning
from cachecraft_rag.store.files.disk import DiskTier
from cachecraft_rag.store.layout import StoredVariant, encode
from cachecraft_rag.store.memory import MemoryTier
from cachecraft_rag.store.row_checks import RowBounds
from cachecraft_rag.types.captures import Capture, TokenScores
from cachecraft_rag.types.kv_layout import HeadShare, KVLayout
from cachecraft_rag.types.progress import Progress
from cachecraft_rag.types.store_reasons import Unavailable
from cachecraft_rag.types.variants import LoadedVariant, Variant, VariantKey

LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=8, dtype="bfloat16")
FILE = 4096 + LAYOUT.nbytes(10)  # the file of a capture of 10 tokens


def make(
    chunk: str = "chunk",
    prefix: tuple[str, ...] = ("system",),
    *,
    tokens: int = 10,
    exact_share: float = 1.0,
    session: str | None = None,
    namespace: str = "ns",
    fingerprint: str = "model",
    cci: float = 0.6,
) -> Capture:
    key = VariantKey(namespace, fingerprint, chunk, prefix)
    generator = torch.Generator().manual_seed(int(key.variant_id[:8], 16))
    kv = torch.randn(LAYOUT.shape(tokens), generator=generator).bfloat16()
    ascending = np.linspace(0.0, 1.0, tokens, dtype=np.float32)
    scores = TokenScores(ascending)
    inter = tuple(0.1 for _ in prefix)
    return Capture(key, LAYOUT, "tokens", kv, scores, inter, 0.3, cci, exact_share, session)


def stored(store: ChunkCacheStore, capture: Capture) -> Variant:
    result = store.put(capture).result()
    assert isinstance(result, Variant), result
    return result


def only(store: ChunkCacheStore, chunk: str = "chunk", session: str | None = None) -> Variant:
    (variant,) = store.find("ns", "model", [chunk], session=session).variants[chunk]
    return variant


def serves(store: ChunkCacheStore, capture: Capture, tier: str) -> None:
    loaded = store.load(only(store, capture.key.chunk_id, capture.session))
    assert isinstance(loaded, LoadedVariant)
    assert loaded.tier == tier
    assert torch.equal(loaded.kv, capture.kv)


def stored_on_disk(root: Path) -> Variant:
    with ChunkCacheStore.open(root) as store:
        return stored(store, make())


def files(root: Path) -> list[Path]:
    return sorted((root / "variants").rglob("*.safetensors"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkCacheStore]:
    with ChunkCacheStore.open(tmp_path / "store") as opened:
        yield opened


# -- put, lookup, load ------------------------------------------------------------------------------------------------


def test_a_capture_is_found_and_served_from_memory(store: ChunkCacheStore) -> None:
    capture = make()
    variant = stored(store, capture)
    assert only(store) == variant
    assert (variant.key, variant.tokens, variant.codec, variant.session) == (
        capture.key,
        10,
        "raw",
        None,
    )
    assert (variant.nbytes, variant.reuse_frequency) == (LAYOUT.nbytes(10), 0.0)
    loaded = store.load(variant)
    assert isinstance(loaded, LoadedVariant)
    assert loaded.tier == "host"
    assert loaded.kv is capture.kv
    scores = store.token_scores([variant.variant_id])[variant.variant_id]
    assert scores.inter is not None
    assert np.array_equal(scores.inter, np.linspace(0.0, 1.0, 10, dtype=np.float32))


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("codec", CODECS)
def test_a_rank_s_memory_holds_its_own_heads_only(tmp_path: Path, codec: str, tier: str) -> None:
    """Half of the bytes on each of two ranks, contiguous; the file has all heads for any number of ranks."""
    shares = [HeadShare(rank, 2) for rank in (0, 1)]
    root = tmp_path / "store"
    with ChunkCacheStore.open(root, codec=codec, share=shares[0]) as first:
        stored(first, make())
        assert first.stats().host_bytes == LAYOUT.nbytes(10) // 2
    with ChunkCacheStore.open(root) as alone:
        whole = load(alone, "chunk")
    parts = []
    for share in shares:
        with ChunkCacheStore.open(root, codec=codec, share=share) as opened:
            if tier == "host":
                load(opened, "chunk")  # memory keeps what was loaded
            loaded = opened.load(only(opened))
            assert isinstance(loaded, LoadedVariant)
            assert loaded.tier == tier
            assert loaded.kv.is_contiguous()
            assert opened.stats().host_bytes == loaded.kv.nbytes == LAYOUT.nbytes(10) // 2
            parts.append(loaded.kv)
    assert torch.equal(torch.cat(parts, dim=3), whole)


def test_a_rank_s_heads_are_read_outside_of_the_pass_that_asks_for_them(tmp_path: Path) -> None:
    root = tmp_path / "store"
    stored_on_disk(root)
    with ChunkCacheStore.open(root, share=HeadShare(1, 2)) as opened:
        with torch.inference_mode():
            (reading,) = opened.open_variants([only(opened)])
        assert isinstance(reading, StoredVariant)
        kv = reading.read_all()
        opened.keep(reading)
        assert torch.equal(kv, make().kv[:, :, :, 1:])


def test_a_relative_folder_stays_where_it_is_when_the_process_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with ChunkCacheStore.open("store") as store:
        monkeypatch.chdir(tmp_path / "elsewhere")
        stored(store, make())
        store.flush()
    assert len(files(tmp_path / "store")) == 1
    assert not list((tmp_path / "elsewhere").iterdir())


def test_memory_and_disk_remove_exactly_one_file_of_a_variant(tmp_path: Path) -> None:
    variant = stored_on_disk(tmp_path)
    tiers: list[MemoryTier | DiskTier] = [MemoryTier(1 << 20), DiskTier(tmp_path / "variants")]
    first, second = (tier.read(variant) for tier in tiers)
    assert first is None
    assert isinstance(second, LoadedVariant)
    for tier in tiers:
        tier.remove(variant.variant_id, variant.created + 1)  # of another file: nothing happens
    assert isinstance(tiers[1].read(variant), LoadedVariant)
    for tier in tiers:
        tier.remove(variant.variant_id, variant.created)
        tier.remove(variant.variant_id, variant.created)
        assert not isinstance(tier.read(variant), LoadedVariant)
    assert torch.equal(second.kv, make().kv)  # what was read stays valid


def test_a_capture_that_comes_while_the_interpreter_ends_is_stored(tmp_path: Path) -> None:
    program = """if True:
        import sys, time, torch
        from concurrent.futures import ThreadPoolExecutor
        from cachecraft_rag.store import ChunkCacheStore
        from cachecraft_rag.types.captures import Capture, TokenScores
        from cachecraft_rag.types.kv_layout import KVLayout
        from cachecraft_rag.types.variants import VariantKey
        layout = KVLayout(layers=1, kv_heads=1, head_dim=4, dtype="float32")
        key = VariantKey("ns", "model", "late", ("system",))
        capture = Capture(key, layout, "tokens", torch.zeros(layout.shape(2)), TokenScores(), (0.1,), 0.3, 0.6, 1.0)
        store = ChunkCacheStore.open(sys.argv[1])
        probe = ThreadPoolExecutor(1)
        def late():
            try:
                while True:
                    probe.submit(int)
                    time.sleep(0.01)
            except RuntimeError:  # the interpreter ends; an engine that was not closed still has captures under way now
                store.put(capture)
        ThreadPoolExecutor(1).submit(late)
    """
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert done.stderr == ""
    with ChunkCacheStore.open(tmp_path) as store:
        assert only(store, "late").tokens == 2


def test_after_a_restart_the_disk_serves_and_memory_then_keeps(tmp_path: Path) -> None:
    capture = make()
    with ChunkCacheStore.open(tmp_path) as store:
        store.put(capture)  # close waits for it
    with ChunkCacheStore.open(tmp_path) as store:
        serves(store, capture, "disk")
        serves(store, capture, "host")
        assert store.stats().loads == {"disk": 1, "host": 1}


def test_variants_are_opened_in_order_and_what_is_missing_is_named(tmp_path: Path) -> None:
    captures = [make(f"chunk {n}") for n in range(12)]
    with ChunkCacheStore.open(tmp_path) as store:
        variants = [stored(store, capture) for capture in captures]
    with ChunkCacheStore.open(tmp_path, host_bytes=0, tuning=StoreTuning(readers=3)) as store:
        absent = dataclasses.replace(variants[0], variant_id="0" * 32)
        opened = store.open_variants([*variants[6:], absent, *variants[:6]])
        for capture, one in zip(captures[6:] + captures[:6], opened[:6] + opened[7:], strict=True):
            assert isinstance(one, StoredVariant)
            assert torch.equal(one.read_all(), capture.kv)
            store.keep(one)
        assert isinstance(opened[6], Unavailable)
        assert opened[6].reason == "file is missing"
        assert store.open_variants([]) == []
        assert store.stats().loads == {"disk": 12}
        assert store.stats().load_failures == {"disk": {"missing": 1}}


def test_used_tensors_move_to_the_device_and_the_least_used_back_to_the_host(
    tmp_path: Path,
) -> None:
    captures = [make(f"chunk {n}") for n in range(3)]
    room = {
        "device": "cpu",
        "device_bytes": 2 * captures[0].kv.nbytes,
        "host_bytes": 3 * captures[0].kv.nbytes,
    }
    with ChunkCacheStore.open(tmp_path, **room) as store:
        variants = [stored(store, capture) for capture in captures]

        def tier_of(n: int) -> str:
            held = store.open_variant(variants[n])
            assert isinstance(held, LoadedVariant)
            assert torch.equal(held.kv, captures[n].kv)
            return held.tier

        def settled(n: int) -> str:  # a promotion happens in the background
            until = time.monotonic() + 60
            while tier_of(n) != "device" and time.monotonic() < until:
                time.sleep(0.01)
            return tier_of(n)

        assert tier_of(0) == "host"
        assert settled(0) == settled(1) == "device"
        store.used(variants[0].variant_id, 0.1, 100)
        store.used(variants[2].variant_id, 0.1, 100)
        assert settled(2) == "device"  # in place of 1, which was never used
        assert store.stats().device_bytes == room["device_bytes"]
        assert tier_of(0) == "device"
        assert tier_of(1) == "host"
        store.evict(RowFilter(chunk_ids=("chunk 0",)))
        assert isinstance(store.open_variant(variants[0]), Unavailable)  # from everywhere


def test_namespaces_and_fingerprints_never_cross(store: ChunkCacheStore) -> None:
    tenants = [("a", "model"), ("b", "model"), ("a", "another model")]
    captures = [
        make(namespace=namespace, fingerprint=fingerprint) for namespace, fingerprint in tenants
    ]
    for capture in captures:
        stored(store, capture)
    for capture, (namespace, fingerprint) in zip(captures, tenants, strict=True):
        (variant,) = store.find(namespace, fingerprint, ["chunk"]).variants["chunk"]
        assert variant.key == capture.key
        loaded = store.load(variant)
        assert isinstance(loaded, LoadedVariant)
        assert torch.equal(loaded.kv, capture.kv)
    assert store.find("b", "another model", ["chunk"]).variants == {"chunk": []}


def test_private_variants_are_seen_by_their_session_alone(store: ChunkCacheStore) -> None:
    shared = stored(store, make())
    mine = stored(store, make(prefix=("system", "my words"), session="me"))
    assert store.find("ns", "model", ["chunk"], session="me").variants["chunk"] in (
        [shared, mine],
        [mine, shared],
    )
    for other in (None, "you", "", "ME"):
        assert store.find("ns", "model", ["chunk"], session=other).variants["chunk"] == [shared]


def test_the_same_identity_put_again_replaces_in_one_step(store: ChunkCacheStore) -> None:
    old = stored(store, make(cci=0.6))
    newer = make(cci=0.9)
    newer.kv.fill_(7.0)
    new = stored(store, newer)
    assert only(store) == new
    assert new.variant_id == old.variant_id
    serves(store, newer, "host")
    assert isinstance(store.load(old), Unavailable)  # never the new bytes for the old row
    assert len(files(store.root)) == 1
    assert store.flush(10)
    assert only(store) == new  # and the attempt did not take the new row away


def test_replacing_is_seen_whole_by_a_reader_at_every_moment(tmp_path: Path) -> None:
    captures = [make(cci=0.5 + n / 100) for n in range(30)]
    for n, capture in enumerate(captures):
        capture.kv.fill_(n)
    with (
        ChunkCacheStore.open(tmp_path / "s") as writer,
        ChunkCacheStore.open(tmp_path / "s", host_bytes=0) as reader,
    ):
        stored(writer, captures[0])
        done = threading.Event()

        def write() -> None:
            for capture in captures[1:]:
                stored(writer, capture)
            done.set()

        thread = threading.Thread(target=write)
        thread.start()
        while not done.is_set():
            variant = only(reader)  # always exactly one row
            loaded = reader.load(variant)
            if isinstance(loaded, LoadedVariant):
                assert loaded.kv.unique().tolist() == [round((variant.cci - 0.5) * 100)]
        thread.join()
        assert only(reader).cci == captures[-1].cci
        assert reader.check().findings == ()


def test_put_returns_at_once_whatever_the_disk_does(tmp_path: Path) -> None:
    with ChunkCacheStore.open(
        tmp_path, tuning=StoreTuning(busy_timeout_s=120)
    ) as store:  # so long nothing is given up
        other = Catalog(tmp_path / "catalog.sqlite")
        with other.standstill():  # nothing can be committed now
            futures = [store.put(make(f"chunk {n}")) for n in range(20)]
            for n in range(20):
                store.used(f"{n:032x}", 0.5, 10)
            assert not any(future.done() for future in futures)
            assert not store.flush(timeout=0.05)
            assert store.stats().queued_bytes == 20 * LAYOUT.nbytes(10)
            assert store.find("ns", "model", ["chunk 1"]).variants == {
                "chunk 1": []
            }  # reading goes on
        assert all(isinstance(future.result(120), Variant) for future in futures)
        other.close()


def test_a_full_queue_drops_the_capture_with_a_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ChunkCacheStore.open(
        tmp_path, tuning=StoreTuning(queue_bytes=2 * LAYOUT.nbytes(10))
    ) as store:
        other = Catalog(tmp_path / "catalog.sqlite")
        with other.standstill():
            kept = [store.put(make(f"kept {n}")) for n in range(2)]
            dropped = [store.put(make(f"dropped {n}")).result() for n in range(2)]
        other.close()
        assert all(
            isinstance(result, Unavailable) and "too many captures" in result.reason
            for result in dropped
        )
        assert all(isinstance(future.result(10), Variant) for future in kept)
        # what was dropped does not fill memory either
        assert store.stats().host_bytes == 2 * LAYOUT.nbytes(10)
        assert store.stats().captures == {"queue_full": 2, "stored": 2}
    warnings = [record for record in caplog.records if "too many captures" in record.getMessage()]
    # the second one is for those who want details
    assert [record.levelno for record in warnings] == [logging.WARNING]


def test_a_cancelled_capture_frees_its_place(tmp_path: Path) -> None:
    with ChunkCacheStore.open(tmp_path) as store:
        other = Catalog(tmp_path / "catalog.sqlite")
        with other.standstill():
            first, second = store.put(make("first")), store.put(make("second"))
            assert second.cancel()
        other.close()
        assert isinstance(first.result(10), Variant)
        assert store.flush(10)
        assert store.stats().queued_bytes == 0
        assert store.stats().host_bytes == LAYOUT.nbytes(10)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cci": float("nan")}, "out of range"),
        ({"inter": (float("inf"),)}, "out of range"),
        ({"token_scores": TokenScores(inter=np.zeros(9, dtype=np.float32))}, "token scores"),
        ({"token_scores": TokenScores(np.zeros((10, 1), dtype=np.float32))}, "token scores"),
    ],
)
def test_a_capture_with_impossible_scores_is_dropped(
    store: ChunkCacheStore, change: dict[str, object], reason: str
) -> None:
    result = store.put(dataclasses.replace(make(), **change)).result()  # type: ignore[arg-type]
    assert isinstance(result, Unavailable)
    assert reason in result.reason
    assert store.find("ns", "model", ["chunk"]).variants == {"chunk": []}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda kv: kv.float(),
        lambda kv: kv[:, :1],
        lambda kv: kv.transpose(1, 2),
        lambda kv: kv[:, :, :0],
        lambda kv: kv[0],
    ],
    ids=["dtype", "shape", "strides", "empty", "dimensions"],
)
def test_a_tensor_that_contradicts_its_layout_is_a_mistake_of_the_caller(
    store: ChunkCacheStore, spoil: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    capture = make()
    with pytest.raises(StoreError, match="contiguous CPU tensor"):
        store.put(dataclasses.replace(capture, kv=spoil(capture.kv)))


# -- codecs -----------------------------------------------------------------------------------------------------------


def test_a_store_holds_several_codecs_and_serves_them_all_to_any_opening(tmp_path: Path) -> None:
    captures = {codec: make(codec, tokens=64) for codec in CODECS}
    for codec, capture in captures.items():
        with ChunkCacheStore.open(tmp_path, codec=codec) as store:
            assert stored(store, capture).codec == codec
            assert torch.equal(load(store, codec), capture.kv)  # memory keeps what was computed
    with ChunkCacheStore.open(tmp_path) as store:
        errors = {
            codec: (load(store, codec).float() - capture.kv.float()).abs().max()
            for codec, capture in captures.items()
        }
        sizes = {row.variant.codec: row.file_bytes for row in store.rows()}
        assert (
            store.stats().disk_bytes
            == sum(sizes.values())
            == sum(path.stat().st_size for path in files(tmp_path))
        )
        assert store.check().findings == ()
    assert errors["raw"] == 0 < errors["int8"] < 0.05 < errors["entropy"] < 0.5
    assert sizes["raw"] > sizes["int8"] > sizes["entropy"]


def load(store: ChunkCacheStore, chunk: str) -> torch.Tensor:
    loaded = store.load(only(store, chunk))
    assert isinstance(loaded, LoadedVariant)
    return loaded.kv


def test_the_budget_counts_encoded_bytes(tmp_path: Path) -> None:
    budget = 4 * (4096 + LAYOUT.nbytes(500))
    with ChunkCacheStore.open(tmp_path, disk_bytes=budget, codec="int8") as store:
        for n in range(12):
            stored(store, make(f"chunk {n}", tokens=500))
        stats = store.stats()
    assert stats.variants == 6  # 1.6 × smaller with 8 dimensions per scale
    assert stats.disk_bytes <= budget


def test_a_capture_that_fits_only_encoded_is_stored(tmp_path: Path) -> None:
    capture = make(tokens=500)
    with ChunkCacheStore.open(tmp_path, disk_bytes=LAYOUT.nbytes(500) - 1, codec="int8") as store:
        stored(store, capture)
    with ChunkCacheStore.open(tmp_path, codec="raw") as store:
        assert "larger than the whole byte budget" in str(
            store.put(make("other", tokens=500)).result()
        )


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("not enough memory")])
def test_a_capture_without_memory_to_encode_it_is_dropped(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object) -> None:
        raise error

    monkeypatch.setattr("cachecraft_rag.store.background_writer.encode", fail)
    with ChunkCacheStore.open(tmp_path) as store:
        result = store.put(make()).result()
        assert isinstance(result, Unavailable)
        assert "memory" in result.reason
        assert store.stats().captures == {"failed": 1}
        assert store.stats().host_bytes == 0


def test_a_mistake_while_encoding_is_not_called_lack_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object) -> None:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr("cachecraft_rag.store.background_writer.encode", fail)
    with (
        ChunkCacheStore.open(tmp_path) as store,
        pytest.raises(RuntimeError, match="shapes do not fit"),
    ):
        store.put(make()).result()


def test_a_capture_that_a_lossy_codec_cannot_take_is_dropped_with_the_reason(
    tmp_path: Path,
) -> None:
    capture = make()
    capture.kv[1, 0, 3, 0, 2] = float("nan")
    with ChunkCacheStore.open(tmp_path, codec="int8") as store:
        result = store.put(capture).result()
        assert isinstance(result, Unavailable)
        assert "NaN" in result.reason
        assert store.stats().captures == {"not_encodable": 1}
        assert store.stats().host_bytes == store.stats().disk_bytes == 0


def test_a_codec_that_is_not_installed_stops_the_opening_and_leaves_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkCacheStore.open(tmp_path, codec="entropy") as store:
        variant = stored(store, make())
    monkeypatch.setitem(sys.modules, "zstandard", None)  # how Python remembers that an import fails
    with pytest.raises(ConfigError, match="pip install"):
        ChunkCacheStore.open(tmp_path, codec="entropy")
    with pytest.raises(ConfigError, match="codec unknown"):
        ChunkCacheStore.open(tmp_path, codec="zip")
    with ChunkCacheStore.open(tmp_path) as store:
        result = store.load(variant)
        assert isinstance(result, Unavailable)
        assert "pip install" in result.reason
        store.check(repair=True)
    monkeypatch.undo()
    with ChunkCacheStore.open(tmp_path) as store:
        assert isinstance(store.load(only(store)), LoadedVariant)


# -- use and eviction -------------------------------------------------------------------------------------------------


def test_uses_raise_the_frequency_by_one_over_cfo(tmp_path: Path) -> None:
    with ChunkCacheStore.open(tmp_path) as store:
        variant = stored(store, make())
        for cfo in (0.5, 0.0, 4.0, float("nan")):
            store.used(variant.variant_id, cfo, 10)
        store.used("0" * 32, 0.5, 10)  # evicted meanwhile: no harm
    with ChunkCacheStore.open(tmp_path) as store:
        assert only(store).reuse_frequency == 2.0 + 10.0 + 1.0 + 1.0


def test_uses_that_could_not_be_written_are_written_later(tmp_path: Path) -> None:
    with ChunkCacheStore.open(tmp_path, tuning=StoreTuning(busy_timeout_s=0.01)) as store:
        variant = stored(store, make())
        other = Catalog(tmp_path / "catalog.sqlite")
        with other.standstill():
            store.used(variant.variant_id, 0.5, 10)
            assert store.flush(10)
        other.close()
        assert only(store).reuse_frequency == 0.0
        store.used(variant.variant_id, 0.5, 10)
        assert store.flush(10)
        assert only(store).reuse_frequency == 4.0


def test_a_locked_catalog_drops_captures_and_raises_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ChunkCacheStore.open(tmp_path, tuning=StoreTuning(busy_timeout_s=0.01)) as store:
        other = Catalog(tmp_path / "catalog.sqlite")
        with other.standstill():
            result = store.put(make()).result(10)
        other.close()
        assert isinstance(result, Unavailable)
        assert "locked by another process" in result.reason
        assert "locked by another process" in caplog.text
        stored(store, make())


def test_the_byte_budget_evicts_the_least_used(tmp_path: Path) -> None:
    with ChunkCacheStore.open(tmp_path, disk_bytes=3 * FILE) as store:
        variants = [stored(store, make(f"chunk {n}")) for n in range(3)]
        store.used(variants[0].variant_id, 0.5, 10)
        store.used(variants[2].variant_id, 0.9, 10)
        assert store.flush(10)
        stored(store, make("newcomer"))
        found = store.find("ns", "model", ["chunk 0", "chunk 1", "chunk 2", "newcomer"]).variants
        assert [len(variants) for variants in found.values()] == [1, 0, 1, 1]
        assert (
            store.stats().disk_bytes
            == sum(path.stat().st_size for path in files(tmp_path))
            == 3 * FILE
        )
        # memory does not keep what no look-up can find
        assert store.stats().host_bytes == 3 * LAYOUT.nbytes(10)
    # a smaller budget holds from the opening on
    with ChunkCacheStore.open(tmp_path, disk_bytes=2 * FILE - 1) as store:
        assert (store.stats().variants, len(files(tmp_path))) == (1, 1)
        assert only(store, "chunk 0") == dataclasses.replace(variants[0], reuse_frequency=2.0)


def test_exact_captures_are_kept_among_equals(tmp_path: Path) -> None:
    with ChunkCacheStore.open(tmp_path, max_variants=2) as store:
        stored(store, make("exact"))
        stored(store, make("inexact", exact_share=0.4))
        stored(store, make("newcomer"))
        assert [row.variant.key.chunk_id for row in store.rows()] == ["newcomer", "exact"]


def test_a_chunk_has_at_most_m_variants(tmp_path: Path) -> None:
    with ChunkCacheStore.open(tmp_path, variants_per_chunk=2) as store:
        for n in range(5):
            stored(store, make(prefix=("system", f"before {n}")))
            stored(store, make("another", prefix=("system", f"before {n}"), namespace="elsewhere"))
        kept = store.find("ns", "model", ["chunk"]).variants["chunk"]
        assert {variant.key.origin_prefix[1] for variant in kept} == {"before 3", "before 4"}
        assert len(files(tmp_path)) == store.stats().variants == 4
        assert store.stats().chunks == 2


def test_the_eviction_policy_is_the_folders(tmp_path: Path) -> None:
    with ChunkCacheStore.open(tmp_path, eviction="f_r") as store:
        exact, often = stored(store, make("exact once")), stored(store, make("often"))
        store.used(exact.variant_id, 0.0, 10)  # f_r = 10, saved 1
        for _ in range(3):
            store.used(often.variant_id, 0.5, 10)  # f_r = 6, saved 1.5
        assert store.flush(10)
        assert [row.variant.key.chunk_id for row in store.rows()] == ["exact once", "often"]
    with ChunkCacheStore.open(tmp_path) as store:  # who only looks at a store does not change it
        assert store.eviction == "f_r"
        assert [row.variant.key.chunk_id for row in store.rows()] == ["exact once", "often"]
    with ChunkCacheStore.open(tmp_path, eviction="saving") as store:
        assert [row.variant.key.chunk_id for row in store.rows()] == ["often", "exact once"]
    with pytest.raises(ConfigError, match="saving, f_r"):
        ChunkCacheStore.open(tmp_path, eviction="lru")


def test_a_capture_larger_than_the_budget_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ChunkCacheStore.open(tmp_path, disk_bytes=FILE) as store:
        small = stored(store, make("small"))
        for tokens in (11, 1000):  # the first fits without its header, the second not at all
            result = store.put(make("big", tokens=tokens)).result()
            assert isinstance(result, Unavailable)
            assert "larger than the whole byte budget" in result.reason
        assert only(store, "small") == small
    assert "larger than the whole byte budget" in caplog.text


def test_budgets_hold_under_eight_threads(tmp_path: Path) -> None:
    budget, over = 8 * FILE, []
    settings = {
        "disk_bytes": budget,
        "host_bytes": 5 * LAYOUT.nbytes(10),
        "max_variants": 7,
        "variants_per_chunk": 2,
    }
    with ChunkCacheStore.open(tmp_path, **settings) as store:

        def work(seed: int) -> None:
            for n in range(12):
                capture = make(f"chunk {(seed * 5 + n) % 9}", ("system", f"{seed % 4}"))
                store.put(capture)
                variants = store.find("ns", "model", [f"chunk {n % 9}"]).variants[f"chunk {n % 9}"]
                for variant, loaded in zip(variants, map(store.load, variants), strict=True):
                    expected = make(variant.key.chunk_id, variant.key.origin_prefix).kv
                    assert isinstance(loaded, Unavailable) or torch.equal(loaded.kv, expected)
                    store.used(variant.variant_id, 0.3, 10)
                stats = store.stats()
                if (
                    stats.disk_bytes > budget
                    or stats.host_bytes > 5 * LAYOUT.nbytes(10)
                    or stats.variants > 7
                ):
                    over.append(stats)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.flush(30)
        assert not over
        assert store.stats().captures == {"stored": 96}
        assert (
            sum(path.stat().st_size for path in files(tmp_path))
            == store.stats().disk_bytes
            <= budget
        )
        assert store.check().findings == ()


def test_evict_by_filter_age_and_size(store: ChunkCacheStore) -> None:
    for n in range(6):
        stored(store, make(f"chunk {n}", namespace=f"ns {n % 2}"))
    with pytest.raises(ConfigError, match="filter or down_to_bytes"):
        store.evict()
    assert store.evict(RowFilter(created_before=time.time() - 60)).variants == 0
    gone = store.evict(RowFilter(namespace="ns 1", chunk_ids=("chunk 3",)))
    assert (gone.variants, gone.nbytes) == (1, FILE)
    assert store.evict(down_to_bytes=3 * FILE).variants == 2
    assert len(files(store.root)) == 3
    assert store.evict(RowFilter(created_before=time.time() + 60)).variants == 3
    assert (store.stats().disk_bytes, store.stats().host_bytes, files(store.root)) == (0, 0, [])


# -- damage -----------------------------------------------------------------------------------------------------------


def spoil_truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def spoil_flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-17] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (Path.unlink, "file is missing"),
        (spoil_truncate, "truncated"),
        (spoil_flip, "data damaged: checksum of layer 2"),
    ],
)
def test_a_damaged_file_is_a_miss_with_a_reason_and_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None], reason: str
) -> None:
    with ChunkCacheStore.open(tmp_path) as store:
        stored(store, make("whole"))
        stored(store, make())
    with ChunkCacheStore.open(tmp_path) as store:
        variant = only(store)
        spoil(next(path for path in files(tmp_path) if path.name.startswith(variant.variant_id)))
        for _ in range(3):
            result = store.load(variant)
            assert isinstance(result, Unavailable)
            assert reason in result.reason or result.reason == "file is missing"
        assert store.flush(10)
        assert store.find("ns", "model", ["chunk"]).variants == {"chunk": []}
        assert len(files(tmp_path)) == 1
        serves(store, make("whole"), "disk")
        stored(store, make())  # and the chunk can be captured again
        assert store.check().findings == ()
    assert caplog.text.count("Removed chunk-cache") == 1


def test_a_row_that_was_changed_is_refused_with_a_reason_and_goes(tmp_path: Path) -> None:
    with ChunkCacheStore.open(tmp_path) as store:
        stored(store, make("whole"))
        stored(store, make())
        with closing(sqlite3.connect(tmp_path / "catalog.sqlite")) as database, database:
            database.execute("UPDATE variants SET tokens = 9 WHERE chunk_id = 'chunk'")
        found = store.find("ns", "model", ["chunk", "whole", "nowhere"])
        assert [len(offers) for offers in found.variants.values()] == [0, 1, 0]
        assert found.refused == {
            "chunk": "its row in the catalog is damaged: its checksum is wrong"
        }
        assert store.stats().lookups == {"found": 1, "refused": 1, "not_stored": 1}
        assert store.flush(10)
        assert len(files(tmp_path)) == 1
        stored(store, make())  # and the chunk can be captured again
        serves(store, make("whole"), "host")


def test_a_row_with_the_id_of_another_is_served_nothing_of_it(tmp_path: Path) -> None:
    with ChunkCacheStore.open(tmp_path) as store:
        other, variant = stored(store, make("other")), stored(store, make())
        swapped = dataclasses.replace(variant, variant_id=other.variant_id, created=other.created)
        result = store.load(swapped)
        assert isinstance(result, Unavailable)
        assert "file is of another variant" in result.reason


def test_check_finds_a_row_that_was_changed_and_repair_removes_it(tmp_path: Path) -> None:
    with ChunkCacheStore.open(tmp_path) as store:
        stored(store, make())
        with closing(sqlite3.connect(tmp_path / "catalog.sqlite")) as database, database:
            database.execute("UPDATE variants SET exact_share = 0.5")
        assert [finding.kind for finding in store.check().findings] == ["damaged row"]
        assert [finding.action for finding in store.check(repair=True).findings] == [
            "row and file removed"
        ]
        assert store.check().findings == ()
        assert files(tmp_path) == []


def test_an_id_with_a_nul_does_not_stand_for_the_id_before_it(tmp_path: Path) -> None:
    with ChunkCacheStore.open(tmp_path) as store:
        stored(store, make("a"))
        with pytest.raises(ConfigError, match="without NUL"):
            store.evict(RowFilter(chunk_ids=("a\0b",)))
        assert store.stats().variants == 1


def test_repair_says_which_files_it_could_not_delete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkCacheStore.open(tmp_path) as store:
        stored(store, make())
        with closing(sqlite3.connect(tmp_path / "catalog.sqlite")) as database, database:
            database.execute("UPDATE variants SET exact_share = 0.5")
        (file,) = files(tmp_path)
        without_row = file.with_name(file.name.replace(file.name[:4], "0000", 1))
        without_row.write_bytes(b"left")
        unlink = Path.unlink

        def refuse(path: Path, missing_ok: bool = False) -> None:
            if path.parent == file.parent:
                raise PermissionError("not this file")
            unlink(path, missing_ok)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", refuse)
            actions = {
                finding.kind: finding.action for finding in store.check(repair=True).findings
            }
        assert actions == {
            "damaged row": "row removed, but not its file (see the log)",
            "file without row": "the file cannot be deleted (see the log)",
        }
        assert sorted(files(tmp_path)) == sorted([file, without_row])


@pytest.mark.parametrize("value", ["'many'", "7", "-1"])
def test_a_store_with_damaged_sums_opens_and_repair_counts_them_again(
    tmp_path: Path, value: str
) -> None:
    def damage() -> None:
        with closing(sqlite3.connect(tmp_path / "catalog.sqlite")) as database, database:
            database.execute(f"UPDATE totals SET variants = {value}")

    with ChunkCacheStore.open(tmp_path) as store:
        stored(store, make())
    damage()
    with ChunkCacheStore.open(tmp_path) as store:
        damage()
        (finding,) = store.check().findings
        assert (finding.kind, finding.action) == ("catalog", "would be counted again")
        (finding,) = store.check(repair=True).findings
        assert finding.action == "counted again"
        assert store.check().findings == ()
        assert store.stats().variants == 1
        stored(store, make("another"))
        assert store.stats().variants == 2


def test_a_row_of_another_model_is_refused_and_removed(tmp_path: Path) -> None:
    with ChunkCacheStore.open(tmp_path, host_bytes=0) as store:
        right = stored(store, make())
        bounds = RowBounds(LAYOUT, 100, {"chunk": (10, "tokens")})
        (served,) = store.find("ns", "model", ["chunk"], bounds=bounds).variants["chunk"]
        assert (served, served.payload_facts.layout) == (right, LAYOUT)
        for wrong in (
            RowBounds(LAYOUT, 100, {"chunk": (11, "tokens")}),
            RowBounds(dataclasses.replace(LAYOUT, layers=2), 100, {"chunk": (10, "tokens")}),
            RowBounds(LAYOUT, 5, {"chunk": (10, "tokens")}),
        ):
            found = store.find("ns", "model", ["chunk"], bounds=wrong)
            assert (found.variants, list(found.refused)) == ({"chunk": []}, ["chunk"])
            assert store.flush(10)
            assert files(tmp_path) == []
            stored(store, make())


def test_check_reports_everything_and_repair_leaves_nothing(tmp_path: Path) -> None:
    with ChunkCacheStore.open(tmp_path) as store:
        variants = {name: stored(store, make(name)) for name in ("whole", "lost", "cut", "flipped")}
        paths = {
            name: next((tmp_path / "variants").rglob(f"{v.variant_id}*"))
            for name, v in variants.items()
        }
        paths["lost"].unlink()
        spoil_truncate(paths["cut"])
        spoil_flip(paths["flipped"])
        orphan = paths["whole"].with_name("0" * 32 + paths["whole"].name[32:])
        orphan.write_bytes(b"nobody knows me")
        leftover = paths["whole"].with_name(f".{paths['whole'].name}.deadbeef.tmp")
        leftover.write_bytes(b"half")
        stranger = tmp_path / "variants" / "notes.txt"
        stranger.write_text("mine")
        expected = {
            (paths["lost"], "missing file"),
            (paths["cut"], "damaged file"),
            (paths["flipped"], "damaged file"),
            (orphan, "file without row"),
            (leftover, "leftover of a writer"),
            (stranger, "foreign file"),
        }
        steps: list[Progress] = []
        report = store.check(progress=steps.append)
        assert {(finding.path, finding.kind) for finding in report.findings} == expected
        assert {finding.action for finding in report.findings} == {"would be removed", "left alone"}
        assert (report.rows, report.files, report.repaired) == (4, 6, False)
        assert steps == [Progress(n, 4, "") for n in range(1, 5)]
        assert orphan.exists()  # nothing was touched
        report = store.check(repair=True)
        assert {(finding.path, finding.kind) for finding in report.findings} == expected
        assert [one.path for one in report.findings if not one.repaired] == [stranger]
        assert [finding.path for finding in store.check().findings] == [stranger]
        stranger.unlink()
        assert store.check().findings == ()
        assert store.stats().disk_bytes == FILE
        serves(store, make("whole"), "host")


def test_check_leaves_living_writers_alone(tmp_path: Path) -> None:
    with (
        ChunkCacheStore.open(tmp_path) as writer,
        ChunkCacheStore.open(tmp_path, host_bytes=0) as checker,
    ):
        done = threading.Event()

        def write() -> None:
            for n in range(60):
                stored(writer, make(f"chunk {n % 20}"))
            done.set()

        thread = threading.Thread(target=write)
        thread.start()
        while not done.is_set():
            assert checker.check(repair=True).findings == ()
        thread.join()
        assert writer.stats().captures == {"stored": 60}
        assert (writer.stats().variants, len(files(tmp_path))) == (20, 20)


def test_a_damaged_catalog_is_refused_at_opening_with_a_way_out(tmp_path: Path) -> None:
    with ChunkCacheStore.open(tmp_path) as store:
        stored(store, make())
    (tmp_path / "catalog.sqlite").write_bytes(b"\x00garbage" * 4096)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"catalog\.sqlite is damaged.*start again"):
            ChunkCacheStore.open(tmp_path)
    assert list((tmp_path / "writers").iterdir()) == []  # the failed attempts left no locks


def test_a_catalog_damaged_while_open_means_misses_not_errors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ChunkCacheStore.open(tmp_path) as store:
        variant = stored(store, make())
        for name in ("catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-shm"):
            with (tmp_path / name).open("r+b") as file:
                file.write(b"\xff" * (tmp_path / name).stat().st_size)
        assert store.find("ns", "model", ["chunk"]).variants == {"chunk": []}
        scores = store.token_scores([variant.variant_id])[variant.variant_id]
        assert scores.inter is None
        assert isinstance(store.put(make("another")).result(10), Unavailable)
        store.used(variant.variant_id, 0.5, 10)
        assert store.flush(10)
        with pytest.raises(StoreError):
            store.stats()
    assert "Nothing can be reused" in caplog.text


def test_a_place_that_cannot_hold_a_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="Choose a writable folder"):
        ChunkCacheStore.open(tmp_path / "file")
    (tmp_path / "store" / "catalog.sqlite").mkdir(parents=True)
    with pytest.raises(StoreError, match="cannot be written"):
        ChunkCacheStore.open(tmp_path / "store")


def test_a_locked_catalog_is_opened_but_not_changed(tmp_path: Path) -> None:
    with ChunkCacheStore.open(tmp_path):
        other = Catalog(tmp_path / "catalog.sqlite")
        with other.standstill():
            ChunkCacheStore.open(
                tmp_path, tuning=StoreTuning(busy_timeout_s=0.05)
            ).close()  # reading waits for no writer
            with pytest.raises(StoreError, match="locked by another process"):
                ChunkCacheStore.open(
                    tmp_path, tuning=StoreTuning(busy_timeout_s=0.05), disk_bytes=10**9
                )
        other.close()


# -- settings and life ------------------------------------------------------------------------------------------------


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ram: no such store setting; there are codec, device"):
        ChunkCacheStore.open(tmp_path, ram=5)
    for setting, value in (
        ("disk_bytes", 0),
        ("variants_per_chunk", -1),
        ("host_bytes", -1),
    ):
        with pytest.raises(ConfigError, match=setting):
            ChunkCacheStore.open(tmp_path, **{setting: value})
    with pytest.raises(ConfigError, match="readers"):
        StoreTuning(readers=0)
    for made in (StoreConfig, partial(ChunkCacheStore.open, tmp_path)):
        with pytest.raises(ConfigError, match=r"Did you mean tuning=StoreTuning\(readers=…\)?"):
            made(readers=3)
    assert not (tmp_path / "catalog.sqlite").exists()
    with pytest.raises(dataclasses.FrozenInstanceError):
        StoreConfig().disk_bytes = 5  # type: ignore[misc]


def test_limits_once_set_stay_with_the_folder(tmp_path: Path) -> None:
    with ChunkCacheStore.open(
        tmp_path, disk_bytes=5 * FILE, max_variants=4, host_bytes=1000
    ) as store:
        for n in range(4):
            stored(store, make(f"chunk {n}"))
    with ChunkCacheStore.open(tmp_path, max_variants=3) as store:  # one changes, the others stay
        config = store.config
        assert (config.disk_bytes, config.max_variants, config.variants_per_chunk) == (
            5 * FILE,
            3,
            64,
        )
        assert config.host_bytes == StoreConfig().host_bytes  # that one belongs to the process
        assert store.stats().variants == 3
    with ChunkCacheStore.open(tmp_path) as store:
        assert store.config == StoreConfig(
            disk_bytes=5 * FILE, max_variants=3, variants_per_chunk=64
        )


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = ChunkCacheStore.open(tmp_path)
    variant = stored(store, make())
    store.close()
    store.close()
    for call in (
        lambda: store.find("ns", "model", []),
        lambda: store.load(variant),
        lambda: store.open_variants([]),
        store.rows,
        store.evict,
        store.check,
    ):
        with pytest.raises(StoreError, match="is closed"):
            call()
    result = store.put(make()).result()
    assert isinstance(result, Unavailable)
    assert result.reason == "the store is closed"
    assert store.flush(1)


def test_rows_are_paged_and_filtered(store: ChunkCacheStore) -> None:
    for n in range(7):
        stored(store, make(f"chunk {n}", namespace=f"ns {n % 2}"))
    assert len(store.rows()) == 7
    assert [row.variant.key.chunk_id for row in store.rows(RowFilter(namespace="ns 1"))] == [
        "chunk 5",
        "chunk 3",
        "chunk 1",
    ]
    assert [row.file_bytes for row in store.rows(offset=5, limit=5)] == [FILE, FILE]


def test_stats_count_what_happened(store: ChunkCacheStore) -> None:
    variant = stored(store, make())
    store.find("ns", "model", ["chunk", "unknown", "nowhere"])
    store.load(variant)
    stats = store.stats()
    assert (stats.variants, stats.chunks, stats.disk_bytes, stats.host_bytes) == (
        1,
        1,
        FILE,
        LAYOUT.nbytes(10),
    )
    assert (stats.lookups, stats.loads, stats.captures) == (
        {"found": 1, "not_stored": 2},
        {"host": 1},
        {"stored": 1},
    )
    assert (stats.disk_budget, stats.host_budget, stats.queued_bytes) == (20 << 30, 2 << 30, 0)


# -- private variants -------------------------------------------------------------------------------------------------


def test_private_variants_of_one_identity_lie_side_by_side(store: ChunkCacheStore) -> None:
    captures = [make(session=session) for session in (None, "ada", "bob")]
    assert len({stored(store, capture).variant_id for capture in captures}) == 3
    assert stored(store, captures[1]).variant_id == stored(store, captures[1]).variant_id
    assert len(store.rows()) == 3
    for session in ("ada", "bob"):
        found = store.find("ns", "model", ["chunk"], session=session).variants["chunk"]
        assert {variant.session for variant in found} == {None, session}


def test_a_private_row_of_before_sessions_had_their_own_is_still_read(
    store: ChunkCacheStore,
) -> None:
    capture = make(session="ada")
    old = dataclasses.replace(
        variant_of(capture, codec="raw", created=1.0), variant_id=capture.key.variant_id
    )
    assert store._durable.write(old, encode(old, LAYOUT, capture.kv), capture.token_scores) is None
    serves(store, capture, "disk")
    new = stored(store, capture)
    assert {row.variant.variant_id for row in store.rows()} == {old.variant_id, new.variant_id}


def test_a_store_takes_ids_and_variants_from_generators(store: ChunkCacheStore) -> None:
    variant = stored(store, make())
    assert store.find("ns", "model", (name for name in ["chunk"])).variants == {"chunk": [variant]}  # type: ignore[arg-type]
    assert len(store.open_variants(one for one in [variant])) == 1  # type: ignore[arg-type]


def test_what_an_administrator_removed_stays_removed_after_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[int, bool]] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino, path.exists()))
        sync(descriptor)

    with ChunkCacheStore.open(tmp_path / "store") as store:
        stored(store, make("secret"))
        stored(store, make("kept"))
        chosen = RowFilter(chunk_ids=("secret",))
        path = next(
            path
            for path in files(tmp_path / "store")
            if only(store, "secret").variant_id in path.name
        )
        monkeypatch.setattr(os, "fsync", noted)
        assert store.evict(chosen).variants == 1
        assert (path.parent.stat().st_ino, False) in synced
        # Only what was synced is on the disk: the catalog without its journal, which SQLite syncs before it copies it.
        after = tmp_path / "after"
        shutil.copytree(tmp_path / "store", after, ignore=shutil.ignore_patterns("*-wal", "*-shm"))
    with ChunkCacheStore.open(after) as store:
        assert [row.variant.key.chunk_id for row in store.rows()] == ["kept"]
