"""The eviction score: what it prefers, what a use adds to it, and how it ages."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.store import ChunkCacheStore, Listed
from cachecraft_rag.store.catalog.eviction_rules import SECONDS_BETWEEN_RUNS
from cachecraft_rag.store.eviction import POLICIES, Use, VariantFacts, policy_named, worth
from cachecraft_rag.store.layout import StoredVariant
from cachecraft_rag.types.captures import Capture, TokenScores
from cachecraft_rag.types.kv_layout import KVLayout
from cachecraft_rag.types.variants import VariantKey

DAY = 86_400.0


def standing(
    *uses: float, tokens: int = 100, nbytes: int = 400, exact_share: float = 1.0
) -> VariantFacts:
    """Of a chunk with uses of these CFOs."""
    used = Use(0.0, 0.0)
    for cfo in uses:
        used += Use.of(cfo, tokens)
    return VariantFacts("chunk", "variant", tokens, nbytes, exact_share, used)


def score(*uses: float, policy: str = "saving", clock: float = 0.0, **facts: float) -> float:
    return policy_named(policy).score(standing(*uses, **facts), clock)


def test_a_use_gains_at_most_one_for_each_token() -> None:
    assert Use.of(1.0, 50) == Use(1.0, 0.0)
    assert Use.of(0.25, 50) == Use(4.0, 0.75)
    assert Use.of(0.0, 50) == Use(50.0, 1.0)
    assert Use.of(0.0001, 50) == Use(50.0, 0.9999)
    assert Use.of(4.0, 50) == Use.of(math.nan, 50) == Use(1.0, 0.0)


def test_one_use_outranks_an_unused_one_and_an_exact_capture_an_inexact_one() -> None:
    scores = [
        worth(saved=saved, exact_share=share)
        for saved, share in [(0.0, 0.0), (0.0, 0.5), (0.0, 1.0), (1.5, 0.0), (1.5, 1.0), (4.0, 0.5)]
    ]
    assert scores == sorted(scores)
    assert len(set(scores)) == len(scores)


def test_one_exact_hit_on_a_long_chunk_does_not_outweigh_sixty_ordinary_ones() -> None:
    ordinary = [0.15] * 60
    assert score(0.0, tokens=1000, nbytes=4000) < score(*ordinary) / 10
    assert score(0.0, tokens=1000, policy="f_r") > score(*ordinary, policy="f_r")  # as published


def test_smaller_captures_of_equally_many_tokens_stay_longer() -> None:
    assert score(0.2, nbytes=400) == 4 * score(0.2, nbytes=1600)


def test_scores_age_with_the_clock_and_the_published_one_does_not() -> None:
    busy_once = score(*[0.1] * 9)
    assert score(0.1, clock=0.0) < busy_once < score(0.1, clock=busy_once)
    assert score(0.1, policy="f_r", clock=99.0) == score(0.1, policy="f_r", clock=0.0) == 10.0


def test_policies_by_name() -> None:
    assert set(POLICIES) == {"saving", "f_r"}
    assert all(policy.name == name for name, policy in POLICIES.items())
    with pytest.raises(ConfigError, match="saving, f_r"):
        policy_named("lru")


# -- rules on age and last use ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MaxChunkAge:
    """Evicts chunk-caches that were captured more than `seconds` ago."""

    seconds: float

    def __call__(self, row: Listed, now: float) -> bool:
        return now - row.variant.created > self.seconds


def unused_for_a_day(row: Listed, now: float) -> bool:
    return now - row.last_used > DAY


class Clock:
    """The time of day as a test sets it."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    chosen = Clock()
    monkeypatch.setattr(time, "time", chosen)
    return chosen


def add(store: ChunkCacheStore, chunk: str) -> None:
    layout = KVLayout(layers=1, kv_heads=1, head_dim=8, dtype="float32")
    key = VariantKey("ns", "model", chunk, ("system",))
    kv = torch.zeros(layout.shape(4))
    capture = Capture(key, layout, "tokens", kv, TokenScores(), (0.1,), 0.3, 0.6, 1.0, None)
    store.put(capture).result()


def use(store: ChunkCacheStore, chunk: str) -> None:
    (variant,) = store.find("ns", "model", [chunk]).variants[chunk]
    store.used(variant.variant_id, recomputed=0.2, tokens=variant.tokens)
    assert store.flush()


def chunks(store: ChunkCacheStore) -> set[str]:
    assert store.flush()
    return {row.variant.key.chunk_id for row in store.rows()}


def test_chunk_caches_beyond_a_maximum_age_leave_when_the_store_is_opened(
    tmp_path: Path, clock: Clock
) -> None:
    with ChunkCacheStore.open(tmp_path) as store:
        add(store, "old")
        clock.now += DAY
        add(store, "young")

    clock.now += DAY / 2
    with ChunkCacheStore.open(tmp_path, rules=[MaxChunkAge(DAY)]) as store:
        assert chunks(store) == {"young"}
        assert store.stats().evictions["disk"] == {"rule": 1}
        assert len(list(tmp_path.rglob("*.safetensors"))) == 1


@pytest.mark.parametrize("noticed_by", [add, use])
def test_chunk_caches_that_grow_too_old_leave_memory_and_disk_while_the_store_is_used(
    tmp_path: Path, clock: Clock, noticed_by: Callable[[ChunkCacheStore, str], None]
) -> None:
    with ChunkCacheStore.open(tmp_path, rules=[MaxChunkAge(DAY)]) as store:
        add(store, "old")
        clock.now += DAY - 2 * SECONDS_BETWEEN_RUNS
        add(store, "young")
        assert chunks(store) == {"old", "young"}
        memory = store.stats().host_bytes

        clock.now += 3 * SECONDS_BETWEEN_RUNS
        noticed_by(store, "young")
        assert chunks(store) == {"young"}
        assert store.stats().host_bytes == memory / 2


def test_a_rule_on_the_last_use_spares_what_is_used(tmp_path: Path, clock: Clock) -> None:
    with ChunkCacheStore.open(tmp_path) as store:
        add(store, "used")
        add(store, "unused")
        clock.now += DAY
        use(store, "used")

    clock.now += DAY / 2
    with ChunkCacheStore.open(tmp_path, eviction="f_r", rules=[unused_for_a_day]) as store:
        assert chunks(store) == {"used"}
        (row,) = store.rows()
        assert (row.variant.created, row.last_used) == (clock.now - 1.5 * DAY, clock.now - DAY / 2)


def test_a_store_without_rules_evicts_nothing_by_age(tmp_path: Path, clock: Clock) -> None:
    with ChunkCacheStore.open(tmp_path) as store:
        add(store, "old")
    clock.now += 1000 * DAY
    with ChunkCacheStore.open(tmp_path) as store:
        assert chunks(store) == {"old"}


def broken(row: Listed, now: float) -> bool:
    raise ZeroDivisionError("a mistake of this rule")


def test_a_broken_rule_does_not_open_the_store_and_removes_nothing(tmp_path: Path) -> None:
    with ChunkCacheStore.open(tmp_path) as store:
        add(store, "old")
    with pytest.raises(ZeroDivisionError):
        ChunkCacheStore.open(tmp_path, rules=[broken])
    with ChunkCacheStore.open(tmp_path) as store:
        assert chunks(store) == {"old"}


def test_a_rule_that_breaks_while_the_store_is_used_is_logged_and_removes_nothing(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with ChunkCacheStore.open(tmp_path, rules=[broken]) as store:
        for chunk in ("first", "second"):
            clock.now += 2 * SECONDS_BETWEEN_RUNS
            add(store, chunk)
        assert chunks(store) == {"first", "second"}
    assert "a mistake of this rule" in caplog.text


def test_a_chunk_cache_that_a_rule_evicts_while_it_is_read_is_read_to_its_end(
    tmp_path: Path, clock: Clock
) -> None:
    with ChunkCacheStore.open(tmp_path, host_bytes=0, rules=[MaxChunkAge(DAY)]) as store:
        add(store, "old")
        (variant,) = store.find("ns", "model", ["old"]).variants["old"]
        (reading,) = store.open_variants([variant])
        assert isinstance(reading, StoredVariant)
        clock.now += 2 * DAY
        add(store, "young")
        assert chunks(store) == {"young"}
        reading.allocate()
        with closing(reading):
            assert reading.read_all().sum() == 0


@pytest.mark.parametrize("rules", [unused_for_a_day, [DAY]])
def test_rules_that_are_not_a_list_of_functions_are_refused(tmp_path: Path, rules: object) -> None:
    with pytest.raises(ConfigError, match="rules must be"):
        ChunkCacheStore.open(tmp_path, rules=rules)  # type: ignore[arg-type]
