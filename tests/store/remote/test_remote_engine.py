"""Engines that share a remote: hits across processes and stores, and answers that no failing remote changes."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import redis
import torch

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.config import Loading, ReuseConfig, ReuseMethod
from cachecraft_rag.serving.generation import Generation
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore, StoreConfig
from cachecraft_rag.store.catalog.schema import DiskFullError
from cachecraft_rag.store.codecs import CODECS
from cachecraft_rag.store.layout import StoredVariant
from cachecraft_rag.store.loading.pending import Extent, PendingLoads
from cachecraft_rag.store.loading.rate import Meter
from cachecraft_rag.store.remote import RemoteConfig, RemoteTuning
from cachecraft_rag.types.captures import Capture, TokenScores
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.types.kv_layout import KVLayout
from cachecraft_rag.types.store_reasons import Unavailable
from cachecraft_rag.types.variants import LoadedVariant, Variant, VariantKey

KETTLE = Chunk("Empty the kettle before you descale it with vinegar. " * 3)
TOASTER = Chunk("The toaster has a crumb tray; pull it out to the left. " * 3)
CHUNKS = [KETTLE, TOASTER]
QUESTION = "How do I descale the kettle?"
SHORT = SamplingParams(max_new_tokens=12)
# a busy machine is no failure
PATIENT = RemoteTuning(lookup_timeout_s=5.0, connect_timeout_s=5.0, read_timeout_s=5.0)
QUICK = RemoteTuning(
    lookup_timeout_s=0.5, connect_timeout_s=0.5, read_timeout_s=0.5, cool_down_s=600.0
)
LAYERWISE = ReuseConfig(method=ReuseMethod(alpha=0.3, loading="layerwise"))
MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def decoder(tiny_decoder: Callable[..., Decoder]) -> Decoder:
    # Wide enough that a chunk-cache is larger than what sockets and proxies hold back.
    return tiny_decoder("Llama", num_key_value_heads=4, head_dim=64)


@pytest.fixture
def make_engine(decoder: Decoder, tmp_path: Path) -> Iterator[MakeEngine]:
    """Makes engines, each with a new empty store.

    Layer-wise: with Cake's two ends a machine that computes sooner than it loads would not use what is stored.
    """
    made: list[tuple[Engine, ChunkCacheStore]] = []

    def make(
        url: str | None,
        *,
        tuning: RemoteTuning = PATIENT,
        loading: Loading = "layerwise",
        **settings: Any,
    ) -> Engine:
        remote = RemoteConfig(url, tuning=tuning) if url else None
        store = ChunkCacheStore.open(tmp_path / f"store {len(made)}", remote=remote, **settings)
        made.append(
            (
                Engine(
                    decoder,
                    store,
                    config=ReuseConfig(method=ReuseMethod(alpha=0.3, loading=loading)),
                ),
                store,
            )
        )
        return made[-1][0]

    yield make
    for engine, store in made:
        engine.close()
        store.close()


def ask(engine: Engine, chunks: list[Chunk] = CHUNKS, **how: Any) -> Generation:
    """A whole answer, its captures in the store and on the remote."""
    answer = engine.stream(QUESTION, chunks, **({"sampling": SHORT} | how))
    for _ in answer:
        pass
    engine.write_back.wait_for(
        [chunk.chunk_id for chunk in chunks] + [engine.prompts.system.segment_id]
    )
    assert engine.store.flush(60)
    return answer


def happened(answer: Generation) -> list[tuple[str, str | None]]:
    return [(chunk.outcome, chunk.tier) for chunk in answer.stats.chunks]


EXACT_FROM = {tier: [("exact", tier)] * len(CHUNKS) for tier in ("remote", "host", "disk")}
COMPUTED = [("computed", None)] * len(CHUNKS)


@pytest.fixture(params=["redis", "s3"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "redis":
        return f"redis://127.0.0.1:{request.getfixturevalue('make_redis')().port}/0"
    return request.getfixturevalue("s3_bucket")(request.getfixturevalue("s3_server"))


def test_a_second_store_is_served_from_the_remote_then_from_its_own_disk(
    url: str, make_engine: MakeEngine, tmp_path: Path, decoder: Decoder
) -> None:
    first, second = make_engine(url), make_engine(url)
    captured = ask(first)
    assert happened(captured) == COMPUTED
    assert first.store.stats().remote.captures == {"sent": 3}
    served = ask(second)
    assert happened(served) == EXACT_FROM["remote"]
    assert served.text == captured.text
    stats = second.store.stats()
    assert stats.loads == {"remote": 3}
    assert (stats.remote.lookups, stats.remote.reads) == ({"answered": 1}, {"whole": 3})
    assert stats.variants == 3  # kept here
    assert happened(ask(second)) == EXACT_FROM["host"]
    assert second.store.stats().remote.lookups == {"answered": 1}  # what is here is not asked for
    root = second.store.root
    second.close()
    second.store.close()
    with ChunkCacheStore.open(root) as alone, Engine(decoder, alone, config=LAYERWISE) as engine:
        again = ask(engine)
        assert happened(again) == EXACT_FROM["disk"]
        assert again.text == captured.text
        assert alone.check().findings == ()
        moved = ask(engine, [TOASTER, KETTLE])  # token scores came along
        assert {chunk.outcome for chunk in moved.stats.chunks} == {"reused"}
        scores = engine.store.token_scores([row.variant.variant_id for row in alone.rows()])
        assert any(one.inter is not None for one in scores.values())


def test_what_is_recomputed_in_full_is_not_fetched(url: str, make_engine: MakeEngine) -> None:
    first, second = make_engine(url), make_engine(url)
    ask(first)
    everything = ReuseConfig(
        recompute_ratio=1.0, capture=False, method=ReuseMethod(loading="layerwise")
    )
    answer = ask(second, CHUNKS[::-1], config=everything)
    assert happened(answer) == [("reused", None)] * len(CHUNKS)
    assert answer.stats.exact
    assert answer.text == ask(first, CHUNKS[::-1], config=ReuseConfig.full_prefill()).text
    stats = second.store.stats()
    assert stats.loads == {"remote": 1}  # the instruction
    assert stats.remote.reads == {"whole": 1}


SECOND_PROCESS = """if True:
    import json, sys
    from cachecraft_rag.serving.sampling import SamplingParams
    from cachecraft_rag.planning.config import ReuseConfig
    from cachecraft_rag.engine.engine import Engine
    from cachecraft_rag.model.decoder import Decoder
    from cachecraft_rag.store import ChunkCacheStore
    from cachecraft_rag.store.layout import StoredVariant
    from cachecraft_rag.store.remote import RemoteConfig
    from cachecraft_rag.types.documents import Chunk
    model, folder, question, texts, *urls = json.loads(sys.argv[1])
    chunks, short = [Chunk(text) for text in texts], SamplingParams(max_new_tokens=12)
    decoder = Decoder.load(model, dtype="float32", device="cpu")
    for place, url in enumerate(urls):
        remote = RemoteConfig(url).with_tuning(lookup_timeout_s=5.0, connect_timeout_s=5.0, read_timeout_s=5.0)
        with (
            ChunkCacheStore.open(f"{folder}/{place}", remote=remote) as store,
            Engine(decoder, store, config=ReuseConfig().with_method(alpha=0.3, loading="layerwise")) as engine,
        ):
            answer = engine.stream(question, chunks, sampling=short)
            for _ in answer: pass
            happened = [(chunk.outcome, chunk.tier) for chunk in answer.stats.chunks]
            print(json.dumps([happened, answer.text, store.stats().loads]))
"""


def test_a_second_process_is_served_the_caches_of_the_first(
    decoder: Decoder, make_redis: Any, s3_server: Any, s3_bucket: Any, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    decoder.model.save_pretrained(model)
    decoder.tokenizer.save_pretrained(model)
    same = Decoder.load(str(model), dtype="float32", device="cpu")
    urls = [f"redis://127.0.0.1:{make_redis().port}/0", s3_bucket(s3_server)]
    texts = []
    for place, url in enumerate(urls):
        with (
            ChunkCacheStore.open(
                tmp_path / f"first {place}", remote=RemoteConfig(url, tuning=PATIENT)
            ) as store,
            Engine(same, store, config=LAYERWISE) as engine,
        ):
            texts.append(ask(engine).text)
    arguments = [
        str(model),
        str(tmp_path / "second"),
        QUESTION,
        [chunk.text for chunk in CHUNKS],
        *urls,
    ]
    command = [sys.executable, "-W", "ignore", "-c", SECOND_PROCESS, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    for line, text in zip(done.stdout.splitlines(), texts, strict=True):
        outcomes, answer, loads = json.loads(line)
        assert outcomes == [["exact", "remote"]] * len(CHUNKS)
        assert answer == text
        assert loads == {"remote": 3}


def test_another_tenant_or_model_gets_nothing(
    url: str, make_engine: MakeEngine, tiny_decoder: Any
) -> None:
    ask(make_engine(url))
    stranger, other_model = make_engine(url), make_engine(url)
    stranger = Engine(stranger.decoder, stranger.store, namespace="stranger")
    other_model = Engine(
        tiny_decoder("Llama", seed=7, num_key_value_heads=4, head_dim=64),
        other_model.store,
        namespace="default",
    )
    for engine in (stranger, other_model):
        with engine:
            assert happened(ask(engine)) == COMPUTED


def test_captures_after_private_text_stay_local(
    url: str, decoder: Decoder, make_engine: MakeEngine
) -> None:
    shared = make_engine(url)
    with Engine(decoder, shared.store, system="My PIN is 4711.", private_system=True) as private:
        ask(private, session="me")
        assert [variant.session for row in shared.store.rows() if (variant := row.variant)] == [
            "me"
        ] * 3
        assert shared.store.stats().remote.variants == 0
        assert happened(ask(private, session="me")) == EXACT_FROM["host"]
    ask(shared)
    assert shared.store.stats().remote.variants == 3


# -- remotes that fail in the middle of a request ---------------------------------------------------------------------


def primed(make_engine: MakeEngine, url: str) -> str:
    """Chunk-caches on the remote; returns the answer of an engine without one."""
    ask(make_engine(url))
    return ask(make_engine(None)).text


@pytest.mark.parametrize(
    ("fault", "loading"),
    [
        ("SIGSTOP", "cake"),
        ("latency", "layerwise"),
        *(
            pytest.param(fault, loading, marks=pytest.mark.slow)
            for fault in ("SIGKILL", "SIGSTOP", "latency", "stall", "cut")
            for loading in ("cake", "layerwise")
            if (fault, loading) not in (("SIGSTOP", "cake"), ("latency", "layerwise"))
        ),
    ],
)
def test_no_fault_of_the_remote_is_waited_for_beyond_its_time_outs(
    fault: str, loading: Loading, make_engine: MakeEngine, make_redis: Any, make_proxy: Any
) -> None:
    server = make_redis()
    text = primed(make_engine, f"redis://127.0.0.1:{server.port}/0")
    proxy = make_proxy(server.port)
    engine = make_engine(
        f"redis://127.0.0.1:{proxy.port}/0", tuning=QUICK, loading=loading, host_bytes=0
    )
    assert engine.store.find("default", "nothing", ["warm"]).variants == {"warm": []}
    find = engine.store.find

    def find_then_break(*args: Any, **how: Any) -> Any:
        found = find(*args, **how)  # the rows come, and then it happens
        {"SIGKILL": server.kill, "SIGSTOP": server.stop}.get(fault, lambda: None)()
        proxy.delay_s = 3600.0 if fault == "latency" else 0.0
        if fault in ("stall", "cut"):
            setattr(proxy, f"{fault}_after", 300_000)
        return found

    engine.store.find = find_then_break  # type: ignore[method-assign]
    broken = ask(engine)  # it ends, and the faults do not
    engine.store.find = find  # type: ignore[method-assign]
    assert broken.text == text
    assert engine.store.stats().remote.reads.get("whole", 0) < 3
    engine.store.evict(down_to_bytes=0)
    for _ in range(3):  # the breaker counts look-ups on their own
        engine.store.find("default", engine.decoder.fingerprint, ["x"])
    # Cake computes what stalls, and nothing has failed
    if loading == "layerwise" or fault not in ("stall", "cut"):
        assert engine.store.stats().remote.breaker == "open"
        before = engine.store.stats().remote.lookups.get("left alone", 0)
        for _ in range(100):
            assert engine.store.find("default", engine.decoder.fingerprint, ["x"]).variants == {
                "x": []
            }
        # none of them waited
        assert engine.store.stats().remote.lookups["left alone"] == before + 100
    again = ask(engine)
    assert again.text == text
    if fault == "SIGSTOP":
        server.go_on()


@pytest.mark.parametrize("fault", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.slow)])
def test_an_s3_server_that_dies_in_the_middle_is_a_miss(
    fault: str, make_engine: MakeEngine, own_s3_server: Any, s3_bucket: Any
) -> None:
    url = s3_bucket(own_s3_server)
    text = primed(make_engine, url)
    engine = make_engine(url, tuning=QUICK)
    find = engine.store.find

    def find_then_break(*args: Any, **how: Any) -> Any:
        found = find(*args, **how)
        {"SIGKILL": own_s3_server.kill, "SIGSTOP": own_s3_server.stop}[fault]()
        return found

    engine.store.find = find_then_break  # type: ignore[method-assign]
    assert ask(engine).text == text  # it ends, and the server stays as it is
    if fault == "SIGSTOP":
        own_s3_server.go_on()


@pytest.mark.parametrize("change", ["flip", "truncate", "swap"])
def test_a_damaged_payload_is_a_miss_and_is_replaced(
    change: str, make_engine: MakeEngine, make_redis: Any
) -> None:
    url = f"redis://127.0.0.1:{make_redis().port}/0"
    text = primed(make_engine, url)
    with redis.Redis.from_url(url) as server:
        keys = sorted(key for key in server.scan_iter() if b":data/" in key)
        payloads = [server.get(key) for key in keys]
        for place, key in enumerate(keys):
            data = payloads[place]
            middle = len(data) // 2
            wrong = {
                "flip": data[:middle] + bytes([data[middle] ^ 16]) + data[middle + 1 :],
                "truncate": data[:middle],
                "swap": payloads[place - 1],
            }
            server.set(key, wrong[change])
    engine = make_engine(url)
    answer = ask(engine)
    assert answer.text == text
    assert happened(answer) == COMPUTED
    stats = engine.store.stats()
    assert stats.loads == {}
    assert sum(stats.load_failures["remote"].values()) == 3
    assert stats.load_failures.keys() == {"remote"}
    assert answer.stats.chunks[0].reason
    third = ask(make_engine(url))  # what the second engine bore has taken the damaged ones' place
    assert happened(third) == EXACT_FROM["remote"]
    assert third.text == text


# -- the store alone --------------------------------------------------------------------------------------------------

LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=8, dtype="bfloat16")


def capture(
    chunk: str = "chunk", prefix: tuple[str, ...] = ("system",), session: str | None = None
) -> Capture:
    key = VariantKey("ns", "model", chunk, prefix)
    generator = torch.Generator().manual_seed(int(key.variant_id[:8], 16))
    kv = torch.randn(LAYOUT.shape(100), generator=generator).bfloat16()
    return Capture(
        key, LAYOUT, "tokens", kv, TokenScores(), tuple(0.1 for _ in prefix), 0.3, 0.6, 1.0, session
    )


def open_store(folder: Path, url: str, **changes: Any) -> ChunkCacheStore:
    remote = RemoteConfig(url, tuning=PATIENT).with_tuning(**changes)
    return ChunkCacheStore.open(folder, remote=remote)


def put(store: ChunkCacheStore, *captures: Capture) -> None:
    for one in captures:
        assert isinstance(store.put(one).result(), Variant)
    assert store.flush(10)


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_travels(codec: str, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    url, one = RemoteConfig(f"file://{tmp_path}/shared", tuning=PATIENT), capture()
    with ChunkCacheStore.open(tmp_path / "a", remote=url, codec=codec, host_bytes=0) as first:
        put(first, one)
        own = first.load(first.find("ns", "model", ["chunk"]).variants["chunk"][0])
    with ChunkCacheStore.open(tmp_path / "b", remote=url, host_bytes=0) as second:
        for tier in ("remote", "disk"):
            (variant,) = second.find("ns", "model", ["chunk"]).variants["chunk"]
            assert variant.codec == codec
            loaded = second.load(variant)
            assert isinstance(loaded, LoadedVariant)
            assert isinstance(own, LoadedVariant)
            assert loaded.tier == tier
            assert torch.equal(loaded.kv, own.kv)
            assert second.flush(5)
        assert second.check().findings == ()


def test_a_variant_on_the_remote_that_is_opened_twice_can_be_read_twice(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    url = f"file://{tmp_path}/shared"
    with open_store(tmp_path / "a", url) as first:
        put(first, capture())
    remote = RemoteConfig(url, tuning=PATIENT)
    with ChunkCacheStore.open(tmp_path / "b", remote=remote, host_bytes=0) as second:
        (variant,) = second.find("ns", "model", ["chunk"]).variants["chunk"]
        for stored in second.open_variants([variant, variant]):
            assert isinstance(stored, StoredVariant)
            placed = torch.empty_like(capture().kv)
            extent = Extent(stored, 0, 0, 100, kept=second.keeps(stored))
            loads = PendingLoads(LAYOUT.layers, [extent], Meter(None))
            loads.send_to(Into(placed))
            loads.read()
            loads.close()
            assert torch.equal(placed, capture().kv)


def test_the_local_copy_of_what_memory_has_no_room_for_is_sound(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    url, layers = f"file://{tmp_path}/shared", LAYOUT.layers
    with open_store(tmp_path / "a", url) as first:
        put(first, capture())
    remote = RemoteConfig(url, tuning=PATIENT)
    with ChunkCacheStore.open(tmp_path / "b", remote=remote, host_bytes=0) as second:
        (stored,) = second.open_variants(second.find("ns", "model", ["chunk"]).variants["chunk"])
        assert isinstance(stored, StoredVariant)
        placed = torch.empty(layers, 2, 100, LAYOUT.kv_heads, LAYOUT.head_dim, dtype=torch.bfloat16)
        loads = PendingLoads(
            layers, [Extent(stored, 0, 0, 100, kept=second.keeps(stored))], Meter(None)
        )
        loads.send_to(Into(placed))
        loads.read()
        loads.close()
        second.keep(stored)
        assert torch.equal(placed, capture().kv)
        assert second.flush(5)
        assert second.check().findings == ()
        loaded = second.load(second.find("ns", "model", ["chunk"]).variants["chunk"][0])
        assert isinstance(loaded, LoadedVariant)
        assert loaded.tier == "disk"
        assert torch.equal(loaded.kv, capture().kv)


class Into:
    """A sink that fills a tensor."""

    def __init__(self, kv: torch.Tensor) -> None:
        self.kv = kv

    def place(self, layer: int, chunk: torch.Tensor, start: int) -> None:
        self.kv[layer, :, start : start + chunk.shape[1]] = chunk

    def place_all(self, layer: int, chunks: Sequence[tuple[torch.Tensor, int]]) -> None:
        for chunk, start in chunks:
            self.place(layer, chunk, start)


def test_the_local_copy_goes_first_and_enough_is_enough(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    url = f"file://{tmp_path}/shared"
    with open_store(tmp_path / "a", url) as first:
        put(first, capture(), capture(prefix=("system", "b")))
    with (
        open_store(tmp_path / "b", url) as second,
        open_store(tmp_path / "c", url, ask_below=3) as curious,
    ):
        for store in (second, curious):
            put(store, capture())
        assert [v.home for v in second.find("ns", "model", ["chunk"]).variants["chunk"]] == ["disk"]
        assert [v.home for v in curious.find("ns", "model", ["chunk"]).variants["chunk"]] == [
            "disk",
            "remote",
        ]


def test_a_capture_too_large_for_the_disk_is_still_sent(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    url = f"file://{tmp_path}/shared"
    with ChunkCacheStore.open(tmp_path / "a", remote=url, disk_bytes=100, codec="int8") as small:
        assert isinstance(small.put(capture()).result(), Unavailable)
    with ChunkCacheStore.open(tmp_path / "b", remote=url, disk_bytes=100) as other:
        (variant,) = other.find("ns", "model", ["chunk"]).variants["chunk"]
        loaded = other.load(variant)
        assert isinstance(loaded, LoadedVariant)
        assert other.flush(5)
        again = other.load(variant)
        assert isinstance(again, LoadedVariant)
        assert again.tier == "host"  # memory keeps it although the disk does not
        assert other.stats().variants == 0


@pytest.mark.parametrize(
    ("method", "error", "reason"),
    [
        ("catalog.catalog.Catalog.reserve", DiskFullError("no room"), "catalog_error"),
        ("files.disk.DiskTier.write", OSError(errno.ENOSPC, "no room"), "disk_full"),
        ("files.disk.DiskTier.write", PermissionError("not yours"), "file_error"),
    ],
)
def test_a_capture_that_the_disk_refuses_is_sent_unless_its_chunk_was_removed(
    method: str, error: Exception, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shared").mkdir()
    url = f"file://{tmp_path}/shared"
    chunks = ["kept", "removed", "after it"]
    with open_store(tmp_path / "a", url) as store:
        store.remove_chunks(["removed"])
        monkeypatch.setattr(f"cachecraft_rag.store.{method}", Mock(side_effect=error))
        for one in (*map(capture, chunks[:2]), capture(chunks[2], ("system", "removed"))):
            refused = store.put(one).result()
            assert isinstance(refused, Unavailable)
            assert refused.code == reason
        assert store.flush(10)
    monkeypatch.undo()
    with open_store(tmp_path / "b", url) as other:
        variants = other.find("ns", "model", chunks).variants
    assert {chunk for chunk in chunks if variants[chunk]} == {"kept"}


def test_a_capture_that_finds_a_full_disk_is_sent_unless_its_chunk_was_removed(
    url: str, full_disk: Callable[[], AbstractContextManager[None]], tmp_path: Path
) -> None:
    with open_store(tmp_path / "a", url) as store:
        store.remove_chunks(["removed"])
        with full_disk():
            for chunk in ("kept", "removed"):
                assert isinstance(store.put(capture(chunk)).result(), Unavailable)
            assert store.flush(10)
    with open_store(tmp_path / "b", url) as other:
        variants = other.find("ns", "model", ["kept", "removed"]).variants
    assert {chunk for chunk in variants if variants[chunk]} == {"kept"}


def test_many_threads_fetch_the_same_variant_once_to_disk(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    url, one = f"file://{tmp_path}/shared", capture()
    with open_store(tmp_path / "a", url) as first:
        put(first, one)
    with ChunkCacheStore.open(tmp_path / "b", remote=url, host_bytes=0) as second:
        (variant,) = second.find("ns", "model", ["chunk"]).variants["chunk"]
        results: list[Any] = []
        threads = [
            threading.Thread(target=lambda: results.append(second.load(variant))) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert second.flush(5)
        assert [torch.equal(result.kv, one.kv) for result in results] == [True] * 8
        assert second.stats().variants == 1
        assert second.check().findings == ()


def test_settings_reach_the_store_and_wrong_ones_are_named(tmp_path: Path) -> None:
    config = StoreConfig(remote="redis://:secret@127.0.0.1:1/0", disk_bytes=5000)
    assert "secret" not in repr(config)
    with ChunkCacheStore.open(tmp_path, config, host_bytes=7) as store:
        assert (store.config.disk_bytes, store.config.host_bytes) == (5000, 7)
        assert isinstance(store.config.remote, RemoteConfig)
        assert store.find("ns", "model", ["chunk"]).variants == {"chunk": []}
        stats = store.stats()
        assert stats.remote is not None
        assert (stats.remote.variants, stats.remote.url) == (None, "redis://***@127.0.0.1:1/0")
    with ChunkCacheStore.open(tmp_path) as store:
        assert (store.config.disk_bytes, store.config.remote) == (5000, None)
        assert store.stats().remote is None
    with pytest.raises(ConfigError, match="is not the URL of a remote"):
        ChunkCacheStore.open(tmp_path, remote="nowhere")
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="cannot be used"):
        ChunkCacheStore.open(tmp_path, remote="redis://host/0?db=x")
    assert set(threading.enumerate()) <= before
