"""The remote tier against real servers: what it keeps apart, what it survives, what it never gives away."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
import redis
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.store.layout import Encoded, StoredVariant, encode, size_of
from cachecraft_rag.store.remote import RemoteConfig, RemoteStream, RemoteTier, RemoteTuning
from cachecraft_rag.store.remote.base import PIECE_BYTES
from cachecraft_rag.store.remote.breaker import LONGEST_PAUSE, Breaker
from cachecraft_rag.store.remote.rows import Row, decode_row, place_of
from cachecraft_rag.types.captures import TokenScores
from cachecraft_rag.types.kv_layout import KVLayout
from cachecraft_rag.types.store_reasons import Unavailable
from cachecraft_rag.types.variants import PayloadFacts, Variant, VariantKey

LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=8, dtype="bfloat16")
LARGE = KVLayout(layers=6, kv_heads=4, head_dim=64, dtype="bfloat16")  # 2.4 MB with 400 tokens
MakeTier = Callable[..., RemoteTier]


def variant_of(
    chunk: str = "chunk",
    *,
    namespace: str = "ns",
    fingerprint: str = "model",
    prefix: tuple[str, ...] = ("system",),
    layout: KVLayout = LAYOUT,
    tokens: int = 10,
    session: str | None = None,
    created: float = 1e9,
    exact_share: float = 1.0,
) -> Variant:
    key = VariantKey(namespace, fingerprint, chunk, prefix)
    inter = tuple(0.5 for _ in prefix)
    numbers = (
        tokens,
        "tokens",
        inter,
        0.3,
        0.6,
        exact_share,
        session,
        "raw",
        layout.nbytes(tokens),
        0.0,
        created,
    )
    return Variant(key, key.variant_id, *numbers)


def tensor_of(variant: Variant, layout: KVLayout = LAYOUT) -> torch.Tensor:
    generator = torch.Generator().manual_seed(int(variant.variant_id[:8], 16))
    return torch.randn(layout.shape(variant.tokens), generator=generator).bfloat16()


def encoded_of(variant: Variant, layout: KVLayout = LAYOUT) -> Encoded:
    return encode(variant, layout, tensor_of(variant, layout))


def scores_of(variant: Variant) -> TokenScores:
    return TokenScores(np.linspace(0.0, 1.0, variant.tokens, dtype=np.float32))


def same(one: TokenScores, other: TokenScores) -> bool:
    return np.array_equal(one.inter, other.inter)


def send(tier: RemoteTier, *variants: Variant, layout: KVLayout = LAYOUT) -> None:
    for variant in variants:
        assert tier.put(variant, encoded_of(variant, layout), scores_of(variant))
    assert tier.flush(60)


def found(
    tier: RemoteTier, chunk: str = "chunk", namespace: str = "ns", fingerprint: str = "model"
) -> list[Variant]:
    return tier.find(namespace, fingerprint, [chunk]).variants[chunk]


def payload(stream: RemoteStream | Unavailable, step: int = 1 << 30) -> bytes:
    assert isinstance(stream, RemoteStream), stream
    with stream:
        whole = bytearray(stream.nbytes)
        for start in range(0, len(whole), step):
            stream.read_into(memoryview(whole)[start : start + step])
    return bytes(whole)


def tensor_from(stream: RemoteStream | Unavailable, variant: Variant) -> torch.Tensor:
    assert isinstance(stream, RemoteStream), stream
    with stream:
        stored = StoredVariant(stream, variant)
        stored.allocate()
        return stored.read_all()


def eventually(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def make_tier() -> Iterator[MakeTier]:
    """Makes tiers that are closed in the end; generous with time, so that a busy machine is no failure."""
    made: list[RemoteTier] = []

    def make(url: str, *, budget_bytes: int | None = None, **changes: Any) -> RemoteTier:
        patient = {
            "lookup_timeout_s": 5.0,
            "connect_timeout_s": 5.0,
            "read_timeout_s": 5.0,
            "close_timeout_s": 1.0,
        }
        config = RemoteConfig(url, budget_bytes=budget_bytes)
        made.append(RemoteTier(config.with_tuning(**(patient | changes))))
        return made[-1]

    yield make
    for tier in made:
        tier.close()


@pytest.fixture(params=["redis", "s3", "file"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "redis":
        return f"redis://127.0.0.1:{request.getfixturevalue('make_redis')().port}/0"
    if request.param == "s3":
        return request.getfixturevalue("s3_bucket")(request.getfixturevalue("s3_server"))
    return request.getfixturevalue("shared_folder")


@pytest.fixture
def shared_folder(tmp_path: Path) -> str:
    (tmp_path / "shared").mkdir()
    return f"file://{tmp_path}/shared"


@pytest.fixture
def redis_url(make_redis: Callable[..., Any]) -> str:
    return f"redis://127.0.0.1:{make_redis().port}/0"


def everything(url: str) -> dict[bytes, bytes]:
    """All keys and values on a remote, whatever they are."""
    if not url.startswith("redis"):
        store = obstore.store.from_url(url)
        paths = [meta["path"] for batch in obstore.list(store) for meta in batch]
        return {path.encode(): bytes(obstore.get(store, path).bytes()) for path in paths}
    with redis.Redis.from_url(url) as server:
        return {key: server.dump(key) for key in server.scan_iter()} | {
            key + b" as text": repr(plain(server, key)).encode() for key in server.scan_iter()
        }


def plain(server: redis.Redis, key: bytes) -> Any:
    kinds = {b"hash": server.hgetall, b"string": server.get}
    return kinds[server.type(key)](key)


def change_payload(url: str, change: Callable[[bytes], bytes]) -> None:
    change_where(url, b"/v3:data/", ".cache", change)


def change_rows(url: str, change: Callable[[bytes], bytes]) -> None:
    change_where(url, b"/v3:rows/", ".row", change)


def change_where(url: str, key_part: bytes, ending: str, change: Callable[[bytes], bytes]) -> None:
    changed = 0
    if url.startswith("redis"):
        with redis.Redis.from_url(url) as server:
            for key in list(server.scan_iter()):
                if key_part in key and server.type(key) == b"hash":
                    for name, value in server.hgetall(key).items():
                        changed += 1
                        server.hset(key, name, change(value))
                elif key_part in key:
                    changed += 1
                    server.set(key, change(server.get(key)))
    else:
        store = obstore.store.from_url(url)
        for path in [meta["path"] for batch in obstore.list(store) for meta in batch]:
            if path.endswith(ending):
                changed += 1
                obstore.put(store, path, change(bytes(obstore.get(store, path).bytes())))
    assert changed


def flipped(data: bytes, at: int = -1) -> bytes:
    at %= len(data)
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


# -- what is shared, and what is not ----------------------------------------------------------------------------------


def test_another_engine_serves_a_sent_chunk_cache_byte_for_byte(
    url: str, make_tier: MakeTier
) -> None:
    variant = variant_of(layout=LARGE, tokens=400, prefix=("system", "ünïcode"))
    send(make_tier(url), variant, layout=LARGE)
    reader = make_tier(url)
    (there,) = found(reader)
    assert there == dataclasses.replace(variant, home="remote")
    encoded = encoded_of(variant, LARGE)
    assert size_of(encoded) > 2 * PIECE_BYTES
    for step in (1 << 30, PIECE_BYTES, 700_001):
        assert payload(reader.open(there), step) == b"".join(encoded)
    assert torch.equal(tensor_from(reader.open(there), variant), tensor_of(variant, LARGE))
    scores = reader.token_scores([there.variant_id, "unknown"])
    assert same(scores[there.variant_id], scores_of(variant))
    assert same(scores["unknown"], TokenScores())
    assert reader.find("ns", "model", ["other"]).variants == {"other": []}
    stats = reader.stats()
    assert (stats.variants, stats.reads, stats.lookups) == (1, {"whole": 4}, {"answered": 2})
    assert stats.nbytes is not None
    assert stats.nbytes == size_of(encoded)


def test_namespaces_and_fingerprints_never_cross(url: str, make_tier: MakeTier) -> None:
    tenants = [
        ("a", "bc"),
        ("ab", "c"),
        ("a", "b"),
        ("a/b", "c"),
        ("../a", "b"),
        ("", "abc"),
        ("ä", "\0*"),
    ]
    tier = make_tier(url)
    variants = [
        variant_of(namespace=namespace, fingerprint=fingerprint)
        for namespace, fingerprint in tenants
    ]
    send(tier, *variants)
    reader = make_tier(url)
    for variant, (namespace, fingerprint) in zip(variants, tenants, strict=True):
        (there,) = found(reader, namespace=namespace, fingerprint=fingerprint)
        assert there.key == variant.key
        assert torch.equal(tensor_from(reader.open(there), there), tensor_of(variant))
    for stranger in [("b", "bc"), ("a", "c"), ("", ""), ("a", "bc "), ("*", "*")]:
        assert found(reader, namespace=stranger[0], fingerprint=stranger[1]) == []


def test_an_odd_answer_is_a_failed_look_up(redis_url: str, make_tier: MakeTier) -> None:
    """redis-py takes options from the URL, and with this one its answers are texts instead of bytes."""
    variant = variant_of()
    send(make_tier(redis_url), variant)
    reader = make_tier(f"{redis_url}?decode_responses=1")
    key = variant.key
    result = reader.find(key.namespace, key.fingerprint, [key.chunk_id])
    assert (result.variants, bool(result.remote)) == ({key.chunk_id: []}, True)


def test_a_row_that_was_moved_is_not_believed(redis_url: str, make_tier: MakeTier) -> None:
    tier, mine, yours = (
        make_tier(redis_url),
        variant_of(namespace="mine"),
        variant_of(namespace="yours"),
    )
    send(tier, mine, yours)
    with redis.Redis.from_url(redis_url) as server:
        keys = [f"cachecraft/v3:rows/{place_of(variant.key)}" for variant in (mine, yours)]
        rows = [server.hgetall(key) for key in keys]
        # to another tenant
        server.hset(keys[1], mapping=dict(zip(rows[1], rows[0].values(), strict=True)))
        # to another name
        server.hset(keys[0], mapping={name[:-1] + b"1": row for name, row in rows[0].items()})
        server.copy(
            *(
                f"cachecraft/v3:data/{place_of(mine.key)}/".encode() + name
                for name in server.hkeys(keys[0])
            )
        )
    assert found(tier, namespace="yours") == []
    assert [variant.created for variant in found(tier, namespace="mine")] == [mine.created]


def test_private_variants_never_leave(url: str, make_tier: MakeTier) -> None:
    tier = make_tier(url)
    private = variant_of("a secret chunk", session="my session", prefix=("system", "my own words"))
    assert not tier.put(private, encoded_of(private), scores_of(private))
    send(tier, variant_of("shared chunk"))
    there = everything(url)
    stored = b"".join([*there, *there.values()])
    assert b"shared chunk" in stored  # the scan sees what is there
    values = bytes(tensor_of(private).view(torch.uint8).numpy().tobytes())
    for secret in (
        b"a secret chunk",
        b"my session",
        b"my own words",
        private.variant_id.encode(),
        values[:64],
    ):
        assert secret not in stored


def test_an_identity_is_sent_once(url: str, make_tier: MakeTier) -> None:
    first, second = make_tier(url), make_tier(url)
    send(first, variant_of())
    send(second, variant_of(created=2e9))
    assert second.stats().captures == {"already there": 1}
    assert [variant.created for variant in found(second)] == [1e9]
    assert second.stats().variants == 1


def test_removing_takes_payload_and_row(url: str, make_tier: MakeTier) -> None:
    tier = make_tier(url)
    send(tier, variant_of(), variant_of("other"))
    (there,) = found(tier)
    tier.remove(there)
    eventually(lambda: tier.stats().variants == 1)
    assert found(tier) == []
    with pytest.raises(FileNotFoundError):
        payload(tier.open(there))
    assert len(found(tier, "other")) == 1


# -- budgets ----------------------------------------------------------------------------------------------------------

NBYTES = size_of(encoded_of(variant_of()))


def contents(url: str) -> int:
    """Bytes of payloads and rows that are really there."""
    if not url.startswith("redis"):
        return sum(
            meta["size"] for batch in obstore.list(obstore.store.from_url(url)) for meta in batch
        )
    with redis.Redis.from_url(url) as server:
        keys = list(server.scan_iter())
        payloads = sum(server.strlen(key) for key in keys if b":data/" in key)
        return payloads + sum(
            len(row) for key in keys if b":rows/" in key for row in server.hvals(key)
        )


def test_a_folder_keeps_its_budget_with_several_writers_and_after_a_restart(
    shared_folder: str, make_tier: MakeTier
) -> None:
    budget = 40 * (NBYTES + 700)
    tiers = [make_tier(shared_folder, budget_bytes=budget) for _ in range(2)]
    most = 0
    for n in range(30):
        for who, tier in enumerate(tiers):
            send(tier, variant_of(f"chunk {who} {n}", created=1e9 + n))
            most = max(most, contents(shared_folder))
    assert budget // 2 < contents(shared_folder) <= most <= budget + budget // 16
    assert tiers[0].stats().budget == budget
    smaller = make_tier(shared_folder, budget_bytes=budget // 2)
    send(smaller, variant_of("the last one", created=2e9))
    assert contents(shared_folder) <= budget // 2
    assert found(smaller, "the last one")
    assert not found(smaller, "chunk 0 0")


def test_a_folder_keeps_entries_that_were_read_and_drops_the_oldest(
    shared_folder: str, make_tier: MakeTier
) -> None:
    tier = make_tier(shared_folder)
    send(tier, *(variant_of(f"chunk {n}", created=1e9 + n) for n in range(6)))
    for number, path in enumerate(
        sorted(Path(shared_folder[7:]).rglob("*.cache"), key=lambda path: path.name[-20:])
    ):
        for one in (path, path.with_suffix(".row")):
            os.utime(one, (1e9 + number, 1e9 + number))
    payload(tier.open(found(tier, "chunk 0")[0]))
    send(make_tier(shared_folder, budget_bytes=4 * (NBYTES + 1000)), variant_of("new", created=3e9))
    left = {chunk for chunk in [*(f"chunk {n}" for n in range(6)), "new"] if found(tier, chunk)}
    assert {"chunk 0", "chunk 5", "new"} <= left
    assert not {"chunk 1", "chunk 2"} & left


def test_a_chunk_cache_larger_than_a_folders_budget_is_not_sent(
    shared_folder: str, make_tier: MakeTier
) -> None:
    tier = make_tier(shared_folder, budget_bytes=NBYTES - 1)
    send(tier, variant_of())
    assert tier.stats().captures == {"no room": 1}
    assert contents(shared_folder) == 0


@pytest.mark.parametrize("policy", ["allkeys-lru", "noeviction"])
def test_redis_keeps_to_its_maxmemory(policy: str, make_redis: Any, make_tier: MakeTier) -> None:
    server = make_redis(maxmemory="12mb", **{"maxmemory-policy": policy})
    tier = make_tier(f"redis://127.0.0.1:{server.port}/0")
    variants = [
        variant_of(f"chunk {n}", layout=LARGE, tokens=400, created=1e9 + n) for n in range(8)
    ]
    send(tier, *variants, layout=LARGE)
    stats = tier.stats()
    assert stats.budget == 12 << 20
    assert stats.nbytes is not None
    assert stats.nbytes < 12 << 20
    assert stats.breaker == "closed"
    there = [variant for variant in variants if found(tier, variant.key.chunk_id)]
    assert 1 <= len(there) < len(variants)
    if policy == "noeviction":
        assert stats.captures == {"sent": len(there), "no room": len(variants) - len(there)}
        assert stats.variants == len(there)
    else:
        assert stats.captures == {"sent": len(variants)}
    served = 0
    for variant in there:
        try:
            for offered in found(tier, variant.key.chunk_id):
                assert torch.equal(
                    tensor_from(tier.open(offered), offered), tensor_of(variant, LARGE)
                )
                served += 1
        except OSError:  # a full server evicts at any command, also for the buffers of a read
            assert policy == "allkeys-lru"
    assert served >= 1


@pytest.mark.parametrize("part", [b"/v3:data/", b"/v3:rows/"])
def test_a_key_that_redis_evicted_is_a_miss_and_is_sent_again(
    part: bytes, redis_url: str, make_tier: MakeTier
) -> None:
    tier = make_tier(redis_url)
    send(tier, variant_of())
    with redis.Redis.from_url(redis_url) as server:
        server.delete(*(key for key in server.scan_iter() if part in key))
    assert found(tier) == []
    send(tier, variant_of(created=2e9))
    assert [variant.created for variant in found(tier)] == [2e9]


def test_a_chunk_keeps_the_newest_variants(url: str, make_tier: MakeTier) -> None:
    tier = make_tier(url, variants_per_chunk=2)
    send(tier, *(variant_of(prefix=("system", str(n)), created=1e9 + n) for n in range(4)))
    assert {variant.key.origin_prefix[1] for variant in found(tier)} == {"2", "3"}
    assert tier.stats().variants == 2


def test_an_upload_that_breaks_leaves_nothing(
    make_redis: Any, make_tier: MakeTier, make_proxy: Any
) -> None:
    server = make_redis()
    url, proxy = f"redis://127.0.0.1:{server.port}/0", make_proxy(server.port)
    lost = make_tier(f"redis://127.0.0.1:{proxy.port}/0", put_timeout_s=0.5)
    assert found(lost) == []
    proxy.stall_up_after = PIECE_BYTES
    large = variant_of(layout=LARGE, tokens=400)
    assert lost.put(large, encoded_of(large, LARGE), TokenScores())
    assert lost.flush(60)
    assert lost.stats(ask=False).captures == {"too slow": 1}
    tier = make_tier(url)
    assert found(tier) == []
    assert contents(url) == 0
    send(tier, large, layout=LARGE)
    assert len(found(tier)) == 1


def test_a_full_queue_drops(make_redis: Any, make_tier: MakeTier) -> None:
    server = make_redis()
    tier = make_tier(
        f"redis://127.0.0.1:{server.port}/0", queue_bytes=2 * (NBYTES + 1000), put_timeout_s=2.0
    )
    server.stop()
    took = [
        tier.put(variant_of(str(n)), encoded_of(variant_of(str(n))), TokenScores())
        for n in range(6)
    ]
    assert took[:2] == [True, True]
    assert took[-1] is False
    assert tier.stats().queued_bytes <= 2 * (NBYTES + 1000)
    assert tier.flush(60)
    server.go_on()
    captures = tier.stats().captures
    assert captures["too slow"] >= 2
    assert captures["too slow"] + captures["too many are waiting"] == 6


# -- damage -----------------------------------------------------------------------------------------------------------


def test_damaged_rows_are_misses_and_give_way_to_sound_ones(url: str, make_tier: MakeTier) -> None:
    tier = make_tier(url)
    send(tier, variant_of())
    change_rows(url, flipped)
    assert found(tier) == []
    eventually(lambda: contents(url) == 0)
    send(tier, variant_of(created=2e9))
    assert [variant.created for variant in found(tier)] == [2e9]
    assert torch.equal(
        tensor_from(tier.open(found(tier)[0]), variant_of()), tensor_of(variant_of())
    )


SENT = dataclasses.replace(
    variant_of(prefix=("system", "b")), payload_facts=PayloadFacts(nbytes=5000)
)
ROW = Row(SENT, scores_of(variant_of())).encode()


def read_row(raw: bytes, chunk: str = "chunk") -> Row:
    return decode_row(raw, namespace="ns", fingerprint="model", chunk_id=chunk)


@given(st.integers(0, len(ROW) - 1), st.integers(1, 255))
def test_a_change_of_any_byte_of_a_row_is_noticed(at: int, bits: int) -> None:
    with pytest.raises(ValueError, match="row"):
        read_row(ROW[:at] + bytes([ROW[at] ^ bits]) + ROW[at + 1 :])


@given(st.binary(max_size=80))
def test_noise_is_no_row(noise: bytes) -> None:
    for raw in (noise, ROW[:32] + noise, ROW[: len(noise)]):
        with pytest.raises(ValueError, match="row"):
            read_row(raw)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": 0},
        {"tokens": "10"},
        {"tokens": True},
        {"nbytes": -1},
        {"inter": (0.1,)},
        {"cci": float("nan")},
        {"intra": None},
        {"created": float("inf")},
        {"codec": 7},
        {"tokens_digest": None},
        {"variant_id": "0" * 32},
        {"reuse_frequency": "1"},
    ],
)
def test_a_well_formed_row_that_says_nonsense_is_no_row(change: dict[str, Any]) -> None:
    assert read_row(ROW).variant.key.origin_prefix == ("system", "b")
    raw = Row(dataclasses.replace(read_row(ROW).variant, **change), TokenScores()).encode()
    with pytest.raises(ValueError, match="row"):
        read_row(raw)
    with pytest.raises(ValueError, match="another variant"):
        read_row(ROW, chunk="another chunk")


def rewritten(raw: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """The row with other fields, as somebody else would have written it."""
    fields = json.loads(raw[32:])
    change(fields)
    text = json.dumps(fields, separators=(",", ":")).encode()
    return raw[:16] + xxhash.xxh3_64_hexdigest(text).encode() + text


@pytest.mark.parametrize("value", ["AAAA", "AAAAAA==", "?", 7])
def test_a_row_with_scores_of_other_tokens_is_no_row(value: object) -> None:
    raw = rewritten(ROW, lambda fields: fields.update(token_inter=value))
    with pytest.raises(ValueError, match="row damaged"):
        read_row(raw)


@settings(deadline=None)
@given(st.data())
def test_no_wrong_tensor_comes_of_a_changed_payload(data: st.DataObject) -> None:
    variant = variant_of()
    with RemoteTier(RemoteConfig("memory://")) as tier:
        sound = encoded_of(variant)
        whole = b"".join(sound)
        at, length = (
            data.draw(st.integers(0, len(whole) - 1)),
            data.draw(st.integers(0, len(whole))),
        )
        wrong = data.draw(
            st.sampled_from([flipped(whole, at), whole[:length], whole + b"x", whole[::-1]])
        )
        assert tier.put(variant, (memoryview(wrong),), TokenScores())
        assert tier.flush(60)
        if wrong == whole or not found(tier):
            return
        stream = tier.open(found(tier)[0])
        with pytest.raises((ValueError, OSError)):
            tensor_from(stream, variant)


def test_a_truncated_payload_is_an_error_and_leaves(url: str, make_tier: MakeTier) -> None:
    tier = make_tier(url)
    variant = variant_of(layout=LARGE, tokens=400)
    send(tier, variant, layout=LARGE)
    change_payload(url, lambda data: data[: PIECE_BYTES + 5])
    (there,) = found(tier)
    with pytest.raises(OSError, match="truncated"):
        tensor_from(tier.open(there), variant)
    eventually(lambda: found(tier) == [])
    assert tier.stats().reads == {"short": 1}
    assert tier.stats().breaker == "closed"


def test_an_entry_evicted_meanwhile_is_gone_and_no_failure(url: str, make_tier: MakeTier) -> None:
    tier = make_tier(url, failures=1)
    send(tier, variant_of())
    (there,) = found(tier)
    make_tier(url).find("ns", "model", ["chunk"])
    other = make_tier(url)
    other.remove(found(other)[0])
    eventually(lambda: contents(url) == 0)
    with pytest.raises(FileNotFoundError):
        payload(tier.open(there))
    assert tier.stats().breaker == "closed"


# -- servers that are slow, hang or die -------------------------------------------------------------------------------


def impatient(make_tier: MakeTier, url: str, **changes: Any) -> RemoteTier:
    quick = {
        "lookup_timeout_s": 0.1,
        "connect_timeout_s": 0.3,
        "read_timeout_s": 0.3,
        "cool_down_s": 0.2,
    }
    return make_tier(url, **(quick | changes))


def misses_until_left_alone(tier: RemoteTier) -> None:
    """Three look-ups that fail or end at their limit, then misses without a request."""
    for _ in range(3):
        assert found(tier) == []
    assert tier.stats().breaker != "closed"
    before = tier.stats().lookups.get("left alone", 0)
    for _ in range(20):
        assert found(tier) == []
    assert tier.stats().lookups["left alone"] == before + 20


def test_a_server_that_hangs_costs_three_waits_and_comes_back(
    make_redis: Any, make_tier: MakeTier
) -> None:
    server = make_redis()
    tier = impatient(make_tier, f"redis://127.0.0.1:{server.port}/0")
    send(tier, variant_of())
    eventually(lambda: len(found(tier)) == 1)
    server.stop()
    misses_until_left_alone(tier)
    assert isinstance(tier.open(variant_of()), Unavailable)
    server.go_on()
    eventually(lambda: len(found(tier)) == 1)
    assert tier.stats().breaker == "closed"


def test_a_killed_server_is_a_miss_and_a_restarted_one_is_used_again(
    make_redis: Any, make_tier: MakeTier
) -> None:
    server = make_redis()
    tier = impatient(make_tier, f"redis://127.0.0.1:{server.port}/0")
    send(tier, variant_of())
    seen: list[Variant] = []
    eventually(lambda: seen.extend(found(tier)) or seen)
    there = seen[0]
    server.kill()
    stream = tier.open(there)
    with pytest.raises(OSError):  # noqa: PT011 - whatever the system says
        payload(stream)
    misses_until_left_alone(tier)
    make_redis(server.port)
    eventually(lambda: tier.stats().breaker == "closed")
    assert found(tier) == []  # an empty server now
    send(tier, variant_of(created=2e9))
    eventually(lambda: len(found(tier)) == 1)


def test_a_latency_of_minutes_is_not_waited_for(
    make_redis: Any, make_tier: MakeTier, make_proxy: Any
) -> None:
    proxy = make_proxy(make_redis().port)
    tier = impatient(make_tier, f"redis://127.0.0.1:{proxy.port}/0")
    send(tier, variant_of())
    proxy.delay_s = 600.0
    misses_until_left_alone(tier)
    pause_s = tier._connection.breaker._pause_s
    # Two probes took too long.
    eventually(lambda: found(tier) == [] and tier._connection.breaker._pause_s >= 4 * pause_s)
    assert tier.stats().breaker != "closed"
    misses_until_left_alone(tier)


@pytest.fixture(params=["redis", "s3"])
def proxied(request: pytest.FixtureRequest, make_proxy: Any) -> tuple[Any, str]:
    """A proxy before a server, and a URL that leads through it."""
    if request.param == "redis":
        proxy = make_proxy(request.getfixturevalue("make_redis")().port)
        return proxy, f"redis://127.0.0.1:{proxy.port}/0"
    server = request.getfixturevalue("s3_server")
    proxy = make_proxy(server.port)
    return proxy, request.getfixturevalue("s3_bucket")(server, port=proxy.port)


def test_a_transfer_that_stalls_gives_what_came_and_ends_in_time(
    proxied: tuple[Any, str], make_tier: MakeTier
) -> None:
    proxy, address = proxied
    variant = variant_of(layout=LARGE, tokens=400)
    send(make_tier(address), variant, layout=LARGE)
    tier = make_tier(address, read_timeout_s=1.0, connect_timeout_s=1.0, cool_down_s=600)
    (there,) = found(tier)
    proxy.stall_after = 3 * PIECE_BYTES // 2
    encoded = encoded_of(variant, LARGE)
    whole = b"".join(encoded)
    for _ in range(3):
        first, second = bytearray(PIECE_BYTES // 2), bytearray(2 * PIECE_BYTES)
        stream = tier.open(there)
        assert isinstance(stream, RemoteStream)
        with stream:
            stream.read_into(memoryview(first))  # layer 0, while the rest never comes
            assert bytes(first) == whole[: len(first)]
            with pytest.raises(TimeoutError):
                stream.read_into(memoryview(second)[: len(whole) - len(first)])
    assert tier.stats().breaker == "open"  # look-ups succeeded all the while
    assert isinstance(tier.open(there), Unavailable)


def test_a_transfer_survives_connections_that_break(
    proxied: tuple[Any, str], make_tier: MakeTier
) -> None:
    proxy, address = proxied
    variant = variant_of(layout=LARGE, tokens=400)
    tier = make_tier(address)
    send(tier, variant, layout=LARGE)
    (there,) = found(tier)
    proxy.cut_after = 3 * PIECE_BYTES // 2
    assert torch.equal(tensor_from(tier.open(there), variant), tensor_of(variant, LARGE))


def test_closing_a_stream_ends_a_read_at_once_and_spoils_nothing(
    make_redis: Any, make_tier: MakeTier, make_proxy: Any
) -> None:
    server = make_redis()
    tier = make_tier(f"redis://127.0.0.1:{server.port}/0", read_timeout_s=600)
    variants = [variant_of(str(n), layout=LARGE, tokens=400) for n in range(4)]
    send(tier, *variants, layout=LARGE)
    there = [found(tier, str(n))[0] for n in range(4)]
    proxy = make_proxy(server.port)
    slow = make_tier(f"redis://127.0.0.1:{proxy.port}/0", read_timeout_s=600)
    assert len(found(slow, "0")) == 1
    proxy.stall_after = PIECE_BYTES // 2
    stream = slow.open(there[0])
    ended: list[object] = []

    def read() -> None:
        try:
            stream.read_into(memoryview(bytearray(stream.nbytes)))
        except OSError as error:
            ended.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.1)  # it should be waiting by now; if not, it finds the stream closed
    stream.close()
    stream.close()
    reader.join(60)
    (error,) = ended
    assert "closed" in str(error)
    with pytest.raises(OSError, match="closed"):
        stream.read_into(memoryview(bytearray(1)))
    # Cancelled in the middle of an answer, the connections must not hand the rest of it to the next request.
    for variant, step in [(v, n) for n in (10, 100_000, PIECE_BYTES + 3) for v in there]:
        cancelled = tier.open(variant)
        cancelled.read_into(memoryview(bytearray(step)))
        cancelled.close()
        assert torch.equal(tensor_from(tier.open(variant), variant), tensor_of(variant, LARGE))
        assert len(found(tier, variant.key.chunk_id)) == 1


def test_closing_sends_what_is_waiting(url: str, make_tier: MakeTier) -> None:
    tier = make_tier(url, close_timeout_s=10.0)
    variants = [variant_of(str(n)) for n in range(20)]
    for variant in variants:
        assert tier.put(variant, encoded_of(variant), TokenScores())
    tier.close()
    assert make_tier(url).stats().variants == 20


def test_closing_takes_no_longer_than_it_may(make_redis: Any, make_tier: MakeTier) -> None:
    server = make_redis()
    before = set(threading.enumerate())
    tier = make_tier(f"redis://127.0.0.1:{server.port}/0", close_timeout_s=0.5)
    assert found(tier) == []
    server.stop()
    tier.put(variant_of(), encoded_of(variant_of()), TokenScores())
    closing = threading.Thread(target=tier.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()  # though the server says nothing for ever
    tier.close()
    eventually(lambda: set(threading.enumerate()) <= before)
    assert found(tier) == []
    assert isinstance(tier.open(variant_of()), Unavailable)
    assert tier.put(variant_of(), encoded_of(variant_of()), TokenScores()) is False
    assert tier.stats().variants is None
    server.go_on()


def test_a_program_that_forgets_to_close_sends_what_it_put(
    redis_url: str, make_tier: MakeTier, tmp_path: Path
) -> None:
    program = """if True:
        import sys, torch
        from cachecraft_rag.store import ChunkCacheStore
        from cachecraft_rag.types.captures import Capture, TokenScores
        from cachecraft_rag.types.kv_layout import KVLayout
        from cachecraft_rag.types.variants import VariantKey
        layout = KVLayout(layers=1, kv_heads=1, head_dim=4, dtype="float32")
        store = ChunkCacheStore.open(sys.argv[1], remote=sys.argv[2])
        key = VariantKey("ns", "model", "forgotten", ("system",))
        store.put(Capture(key, layout, "tokens", torch.zeros(layout.shape(2)), TokenScores(), (0.1,), 0.3, 0.6, 1.0))
    """
    command = [sys.executable, "-c", program, str(tmp_path), redis_url]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert done.stderr == ""
    assert len(found(make_tier(redis_url), "forgotten")) == 1


# -- secrets, settings, the breaker -----------------------------------------------------------------------------------


def test_passwords_are_never_shown(
    make_redis: Any, make_tier: MakeTier, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server = make_redis(requirepass="hunter2@x")
    right = make_tier(f"redis://:hunter2%40x@127.0.0.1:{server.port}/0")
    send(right, variant_of())
    wrong = make_tier(
        f"redis://:hunter3@127.0.0.1:{server.port}/0?client_name=hunter4", cool_down_s=0.01
    )
    for _ in range(5):
        assert found(wrong) == []
    wrong.put(variant_of("x"), encoded_of(variant_of("x")), TokenScores())
    assert wrong.flush(5)
    with pytest.raises(ConfigError) as refused:
        RemoteTier(RemoteConfig("redis://:hunter5@host/0?socket_timeout=hunter6"))
    with pytest.raises(ConfigError) as unknown:
        RemoteConfig("http://me:hunter7@host")
    text = (
        caplog.text
        + repr(wrong.stats())
        + repr(wrong.config)
        + str(refused.value)
        + str(unknown.value)
    )
    assert "failed and is not asked for a while" in text
    assert "redis://***@127.0.0.1" in text
    assert "hunter" not in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"url": "ftp://host"}, "is not the URL of a remote; write one such as redis://"),
        ({"url": "host:6379"}, "is not the URL of a remote"),
        ({"url": ""}, "is not the URL of a remote"),
        ({"url": "redis://host:port"}, "is not the URL of a remote"),
        ({"url": "s3://"}, "names no host, bucket or path"),
        ({"url": "unix://"}, "names no host, bucket or path"),
        ({"budget_bytes": 0}, "budget_bytes is 0; it must be a whole number, at least 1"),
        ({"budget_bytes": 1 << 30}, "only; set `maxmemory` of the server instead"),
        (
            {"url": "s3://bucket", "budget_bytes": 1 << 30},
            "only; set life-cycle rules of the bucket instead",
        ),
        ({"key": b"0123456789abcdef"}, "key must be text, not bytes"),
        ({"key": 5}, "key must be text, not int"),
        ({"key_file": 5}, "key_file must be a path"),
        ({"tuning": {"read_timeout_s": 1}}, "write RemoteTuning\\(read_timeout_s=…\\)"),
        ({"read_timeout_s": 1.0}, "Did you mean tuning=RemoteTuning\\(read_timeout_s=…\\)?"),
    ],
)
def test_a_wrong_setting_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RemoteConfig(**({"url": "redis://host:6379/0"} | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"read_timeout_s": -1.0}, "read_timeout_s is -1.0; it must be a number, above 0"),
        ({"cool_down_s": float("nan")}, "cool_down_s is nan; it must be a number"),
        ({"failures": 0}, "failures is 0; it must be a whole number, at least 1"),
    ],
)
def test_a_wrong_setting_of_the_tuning_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RemoteTuning(**change)


def test_without_the_library_it_says_what_to_type() -> None:
    program = (
        "import sys; sys.modules['redis'] = None; sys.modules['obstore'] = None\n"
        "from cachecraft_rag.store.remote import RemoteConfig, RemoteTier\n"
        "for url in ('redis://host', 's3://bucket'):\n"
        "    try: RemoteTier(RemoteConfig(url))\n"
        "    except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.count("pip install 'cachecraft-rag[remote]'") == 2
    assert done.stdout.count("MissingPackageError") == 2


def test_the_breaker_opens_waits_probes_and_closes() -> None:
    now = [0.0]
    breaker = Breaker(failures=3, cool_down_s=10, clock=lambda: now[0])
    assert [breaker.failed("lookup") for _ in range(2)] == [False, False]
    breaker.succeeded("lookup")  # only failures in a row count
    assert [breaker.failed("lookup") for _ in range(3)] == [False, False, True]
    assert (breaker.state, breaker.allows(), breaker.opened) == ("open", False, 1)
    assert not breaker.failed("lookup")  # one that was under way: it is open already
    now[0] = 9.9
    assert not breaker.take_probe()
    now[0] = 10.0
    assert breaker.take_probe()
    assert not breaker.take_probe()  # one at a time
    assert not breaker.allows()
    breaker.failed("probe")
    now[0] = 29.9
    assert not breaker.take_probe()  # twice as long
    now[0] = 30.0
    assert breaker.take_probe()
    breaker.succeeded("probe")
    assert breaker.allows()
    assert breaker.failed("lookup")  # on probation: one failure is enough
    now[0] = 69.9
    assert not breaker.take_probe()
    now[0] = 70.0
    assert breaker.take_probe()
    breaker.succeeded("probe")
    breaker.succeeded("lookup")
    assert [breaker.failed("lookup") for _ in range(3)] == [False, False, True]
    now[0] = 80.0
    assert breaker.take_probe()  # all is forgotten


def test_a_breaker_that_opens_at_once_forgets_its_pauses_too() -> None:
    now = [0.0]
    breaker = Breaker(failures=1, cool_down_s=10, clock=lambda: now[0])
    for _ in range(3):
        assert breaker.failed("lookup")
        now[0] += 10.0
        assert breaker.take_probe(), "the pause is the first one's again"
        breaker.succeeded("probe")
        breaker.succeeded("lookup")


def test_the_breaker_counts_by_kind_and_pauses_no_longer_than_it_may() -> None:
    now = [0.0]
    breaker = Breaker(failures=2, cool_down_s=1, clock=lambda: now[0])
    assert not breaker.failed("read")
    breaker.succeeded("lookup")
    assert breaker.failed("read")
    for _ in range(10):
        now[0] += LONGEST_PAUSE
        assert breaker.take_probe()
        breaker.failed("probe")
    assert breaker.opened == 1
