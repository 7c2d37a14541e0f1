"""From how many tokens on an engine reuses prompts: real captures and requests, and given times for the decision."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import StoreError
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.types.prompts import Prompt
from tests.conftest import DEVICE

MakeEngine = Callable[..., Engine]
CHUNKS = [Chunk("Empty the kettle before you descale it."), Chunk("The toaster has a crumb tray.")]


def answer(engine: Engine) -> list[str]:
    """Outcomes of the chunks of one question, once its captures are stored."""
    given = engine.stream("How?", CHUNKS, sampling=SamplingParams(max_new_tokens=2))
    for _ in given:
        pass
    assert engine.settle(60)
    return [chunk.outcome for chunk in given.stats.chunks]


def by_length(seconds: dict[int, tuple[float, float]]) -> Callable[[Prompt, ReuseConfig], float]:
    """Times of prompts that are near these lengths: in full, and with reuse."""

    def ask(prompt: Prompt, config: ReuseConfig) -> float:
        nearest = min(seconds, key=lambda tokens: abs(tokens - prompt.bounds[-1]))
        return seconds[nearest][config.reuse]

    return ask


@pytest.fixture(autouse=True)
def no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachecraft_rag.engine.engine._WARM_UP_S", 0.0)


def test_measuring_leaves_the_stored_chunks_and_the_count_of_requests_as_they_were(
    engine: Engine,
) -> None:
    answer(engine)
    stored = engine.store.rows()
    counted = {"outcome": "length"}
    value = engine.request_counts.registry.get_sample_value
    assert value("cachecraft_requests_total", counted) == 1
    # by real times, so either way is right; the context takes no second length
    assert engine.measure_min_prompt_tokens() in (0, 1025)
    assert engine.store.rows() == stored
    assert value("cachecraft_requests_total", counted) == 1


def test_reuse_is_timed_over_the_chunk_caches_of_the_tenant(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: set[str] = set()
    find = engine.store.find

    def noting(namespace: str, *given: Any, **how: Any) -> Any:
        looked_up.add(namespace)
        return find(namespace, *given, **how)

    monkeypatch.setattr(engine.store, "find", noting)
    engine.for_tenant("acme").measure_min_prompt_tokens()
    assert looked_up == {"acme"}


def test_a_prompt_is_timed_with_and_without_reuse(engine: Engine) -> None:
    times = engine._timing().times(1024)
    assert times is not None
    assert min(times.full_s, times.reused_s) > 0


def test_shorter_prompts_than_the_measured_length_are_computed_in_full(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(engine)
    timing = engine._timing()
    slow = replace(timing, ask=by_length({1024: (0.1, 0.2)}))
    monkeypatch.setattr(engine, "_timing", lambda: slow)
    assert engine.measure_min_prompt_tokens() == engine.min_prompt_tokens == 1025
    assert answer(engine) == ["computed", "computed"]
    fast = replace(timing, ask=by_length({1024: (0.2, 0.1)}))
    monkeypatch.setattr(engine, "_timing", lambda: fast)
    assert engine.measure_min_prompt_tokens() == engine.min_prompt_tokens == 0
    assert "computed" not in answer(engine)


def test_longer_prompts_are_timed_until_reuse_is_sooner(engine: Engine) -> None:
    seconds = {1024: (0.1, 0.3), 2048: (0.2, 0.3), 4096: (0.4, 0.3), 8192: (0.8, 0.3)}
    timing = replace(engine._timing(), ask=by_length(seconds), context_length=9000)
    assert timing.min_prompt_tokens() == 4096
    assert engine.store.rows() == []


def test_a_gpu_without_memory_for_a_long_prompt_ends_the_measurement(engine: Engine) -> None:
    def ask(prompt: Prompt, config: ReuseConfig) -> float:
        if prompt.bounds[-1] > 1500:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 0.3 if config.reuse else 0.1

    timing = replace(engine._timing(), ask=ask, context_length=9000)
    assert timing.min_prompt_tokens() == 1025
    assert engine.store.rows() == []


@pytest.mark.parametrize(
    "config",
    [
        ReuseConfig(reuse=False),
        ReuseConfig(min_prompt_tokens=0),
        ReuseConfig.paper(),
        ReuseConfig(
            method=ReuseMethod(scope="prefix")
        ),  # never reuses moved chunks, which would be timed
    ],
)
def test_nothing_is_measured_where_the_settings_say_what_to_do(
    make_engine: MakeEngine, config: ReuseConfig
) -> None:
    timing = replace(make_engine(config=config)._timing(), ask=refuse)
    assert timing.min_prompt_tokens() == 0


def refuse(_prompt: Prompt, _config: ReuseConfig) -> float:
    """In place of a request that must not be made."""
    raise AssertionError("a prompt was timed")


@pytest.mark.parametrize("limit", ["bytes", "variants"])
def test_a_store_without_room_evicts_nothing_for_the_measurement(
    decoder_of_letters: Callable[[], Decoder],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    limit: str,
) -> None:
    decoder = decoder_of_letters()
    limits: dict[str, int] = {"disk_bytes": decoder.layout.nbytes(600)}
    if limit == "variants":
        limits = {"max_variants": 3}
    with (
        ChunkCacheStore.open(tmp_path, **limits) as store,
        Engine(decoder, store, new_variants="off") as engine,
        caplog.at_level(logging.INFO, "cachecraft_rag"),
    ):
        answer(engine)
        stored = store.rows()
        assert len(stored) == 3
        assert replace(engine._timing(), ask=refuse).min_prompt_tokens() == 0
        assert store.rows() == stored
    assert "no room" in caplog.text


def test_what_others_share_gets_no_made_up_prompts(
    decoder_of_letters: Callable[[], Decoder], tmp_path: Path
) -> None:
    with (
        ChunkCacheStore.open(tmp_path, remote="memory://") as store,
        Engine(decoder_of_letters(), store, new_variants="off") as engine,
    ):
        assert replace(engine._timing(), ask=refuse).min_prompt_tokens() == 0
        assert store.rows() == []


def test_an_engine_measures_at_its_start_on_a_gpu_only(
    decoder_of_letters: Callable[[], Decoder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoder_of_letters()
    decoder.model.save_pretrained(tmp_path / "model")
    decoder.tokenizer.save_pretrained(tmp_path / "model")
    measured: list[Engine] = []

    def fail(engine: Engine) -> Any:
        measured.append(engine)
        raise StoreError("its folder is gone")

    monkeypatch.setattr(Engine, "measure_min_prompt_tokens", fail)
    start = {"store": tmp_path / "store", "device": DEVICE, "dtype": "float32"}
    if DEVICE == "cpu":
        with Engine.from_pretrained(str(tmp_path / "model"), **start) as engine:
            assert engine.min_prompt_tokens == 0
        assert measured == []
    else:
        with pytest.raises(StoreError, match="is gone"):
            Engine.from_pretrained(str(tmp_path / "model"), **start)
        with pytest.raises(StoreError, match="closed"):
            measured[0].store.rows()
