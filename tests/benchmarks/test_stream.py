"""A stream of repeated questions: what is drawn, and what is counted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.stream import (
    StreamReport,
    StreamSettings,
    Window,
    draw,
    over_seeds,
    print_stream,
    questions_of,
    run,
)
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.dataset import Dataset
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.store import ChunkCacheStore


def test_popular_questions_come_often_and_the_same_seed_draws_the_same(
    town_dataset: Dataset,
) -> None:
    settings = StreamSettings(requests=600, warmup=0, exponent=1.0)
    drawn = draw(town_dataset.questions, settings)
    assert drawn == draw(town_dataset.questions, settings)
    counts = [
        count for _, count in Counter(question.question_id for question in drawn).most_common()
    ]
    expected = [600 / (n + 1) / sum(1 / (m + 1) for m in range(6)) for n in range(6)]
    assert all(abs(count - wanted) < 50 for count, wanted in zip(counts, expected, strict=True))


def test_the_last_requests_recompute_less_at_no_higher_divergence(
    town_dataset: Dataset, tiny_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    settings = StreamSettings(requests=24, warmup=3, window=8, answer_tokens=2)
    reports = {}
    for word in ("off", "idle"):
        with (
            ChunkCacheStore.open(tmp_path / word) as store,
            Engine(tiny_decoder("Llama"), store, best_last=False, new_variants=word) as engine,  # type: ignore[arg-type]
        ):
            config = ReuseConfig(method=ReuseMethod(alpha=0.6, loading="layerwise"))
            reports[word] = run(engine, town_dataset.questions, settings, config=config)
    off, idle = reports["off"].windows, reports["idle"].windows
    assert [window.requests for window in idle] == [8, 8, 8]
    for one, other in zip(off, idle, strict=True):
        assert (
            one.reused + one.recomputed + one.computed
            == other.reused + other.recomputed + other.computed
        )
    assert idle[-1].recomputed < 0.6 * off[-1].recomputed
    assert idle[-1].kl <= off[-1].kl
    assert idle[-1].overlap > off[-1].overlap
    assert idle[-1].new_variants > 0
    assert [window.new_variants for window in off] == [0, 0, 0]
    assert off[-1].idle_tokens == 0 < idle[-1].idle_tokens
    assert idle[-1].variants_per_chunk > off[-1].variants_per_chunk == 1.0
    assert sum(idle[-1].variants.values()) == sum(off[-1].variants.values())  # the same chunks
    assert reports["idle"].ratio == pytest.approx(idle[-1].recomputed / idle[0].recomputed)
    assert reports["idle"].kl_ratio == pytest.approx(idle[-1].kl / idle[0].kl)


def test_new_orders_repeat_questions_but_not_their_prefixes(
    town_dataset: Dataset, tiny_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    reports = []
    for new_orders in (False, True):
        settings = StreamSettings(
            requests=24, warmup=3, window=12, answer_tokens=1, new_orders=new_orders, with_kl=False
        )
        drawn = draw(town_dataset.questions, settings)
        assert [question.question_id for question in drawn] == [
            question.question_id
            for question in draw(town_dataset.questions, StreamSettings(24, 3, window=12))
        ]
        with (
            ChunkCacheStore.open(tmp_path / str(new_orders)) as store,
            Engine(tiny_decoder("Llama"), store, best_last=False) as engine,
        ):
            config = ReuseConfig(method=ReuseMethod(alpha=0.6, loading="layerwise"))
            reports.append(run(engine, town_dataset.questions, settings, config=config))
    same, new = reports
    for report in reports:
        assert all(window.kl is None for window in report.windows)
        assert all(window.chunks == 36 for window in report.windows)
        assert report.windows[-1].hits == 36  # every chunk was asked for by then
        assert report.windows[-1].all_hit == 12
    # all of it is a repeated prefix, or hardly anything
    assert same.windows[-1].prefix_computed == 0 < new.windows[-1].prefix_computed
    found = over_seeds([new, new])
    assert found["chunk hits, last window"] == [1.0, 1.0]
    window = [one.recomputed + one.computed for one in new.windows]
    prefix = sum(one.prefix_computed for one in new.windows)
    assert found["of prefix caching"][0] == pytest.approx(sum(window) / prefix)
    idle = new.windows[-1].idle_tokens - new.warmup_idle_tokens
    assert idle >= 0
    assert found["with idle tokens"][0] == pytest.approx((sum(window) + idle) / prefix)
    assert found["last / first"][0] == pytest.approx(window[1] / window[0])


def test_a_window_must_divide_the_requests() -> None:
    with pytest.raises(ConfigError, match="no multiple"):
        StreamSettings(requests=120, window=50)


def test_questions_are_the_handbooks_and_those_of_a_file(
    tmp_path: Path, squad_article: Callable[..., Any]
) -> None:
    own = questions_of(None, passages=2, limit=3, seed=0)
    towns = {"Arden": 1701, "Brook": 1802, "Corry": 1903}
    data = tmp_path / "squad.json"
    data.write_text(json.dumps({"version": "1.1", "data": [squad_article("mill", towns)]}))
    both = questions_of(data, passages=2, limit=2, seed=0)
    assert both[: len(own)] == own
    assert len(both) == len(own) + 2


def test_the_command_reports(
    tiny_decoder: Callable[..., Decoder],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    benchmark_json: Callable[..., Any],
    as_loud_as_before: None,
) -> None:
    monkeypatch.setattr(
        "cachecraft_rag.model.decoder.Decoder.load", lambda *_, **__: tiny_decoder("Llama")
    )
    sizes = [
        "--requests",
        "2",
        "--warmup",
        "1",
        "--window",
        "1",
        "--passages",
        "2",
        "--answer-tokens",
        "1",
    ]
    found = benchmark_json("stream", *sizes)
    windows = tuple(Window(**window | {"variants": {1: 2}}) for window in found["windows"])
    assert [window.requests for window in windows] == [1, 1]
    assert {"streams", "by seed"} == set(
        benchmark_json("stream", *sizes, "--seeds", "2", "--new-orders", "--no-kl")
    )
    assert found["questions"] == len(questions_of(None, passages=2, limit=1, seed=0))
    print_stream(StreamReport(windows, found["questions"], found["model"], found["dtype"]))
    assert "Chunks by number of variants: 1: 2" in capsys.readouterr().out


def test_the_share_of_the_last_chunk_is_an_option(
    tiny_decoder: Callable[..., Decoder],
    monkeypatch: pytest.MonkeyPatch,
    benchmark_json: Callable[..., Any],
    as_loud_as_before: None,
) -> None:
    monkeypatch.setattr(
        "cachecraft_rag.model.decoder.Decoder.load", lambda *_, **__: tiny_decoder("Llama")
    )
    asked = [
        "--requests",
        "8",
        "--warmup",
        "8",
        "--window",
        "8",
        "--passages",
        "2",
        "--answer-tokens",
        "1",
        "--no-kl",
    ]
    never, always = (
        benchmark_json(
            "stream", *asked, "--new-orders", "--new-variants", "off", "--nearest-share", share
        )["windows"][0]["recomputed"]
        for share in ("0", "1")
    )
    assert never < always
