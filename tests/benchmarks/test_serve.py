"""The benchmark of a service: the same requests for all sides, and what is counted of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.serve import (
    PREFIX_CACHE,
    ServeReport,
    ServeSettings,
    arrivals,
    as_plain,
    drawn,
    measure,
    print_serve,
)
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.types.progress import Progress

# All arrive at about the same time: what is counted does not depend on how fast the machine is. No chunk is recomputed
# in full for being the last: it is a third of so small a request, and more than prefix caching computes.
SETTINGS = ServeSettings(
    requests=8,
    warmup=4,
    qps=(1000.0, 2000.0),
    ratios=(0.0, 0.15),
    chunks=6,
    chunk_tokens=24,
    top_k=3,
    questions=30,
    answer_tokens=2,
    nearest_share=0.0,
)


@pytest.fixture(scope="module")
def decoder(tiny_decoder: Callable[..., Decoder]) -> Decoder:
    return tiny_decoder("Llama")


@pytest.fixture(scope="module")
def measured(decoder: Decoder) -> tuple[ServeReport, list[Progress]]:
    steps: list[Progress] = []
    return measure(decoder, SETTINGS, progress=steps.append), steps


def test_arrivals_have_the_rate_and_are_no_clockwork() -> None:
    times = arrivals(4000, 5.0, seed=1)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times[-1] == pytest.approx(800, rel=0.1)
    # 1/e are longer than the mean
    assert sum(gap > 0.2 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.04)
    assert arrivals(4000, 5.0, seed=1) == times != arrivals(4000, 5.0, seed=2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"requests": 3},
        {"loads": ()},
        {"loads": (0.0,)},
        {"qps": (-1.0,)},
        {"ratios": (1.5,)},
        {"top_k": 40},
        {"warmup": 1},
        {"variation": 2.0},
        {"decode_rows": 0},
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any], decoder: Decoder) -> None:
    with pytest.raises(ConfigError):
        drawn(decoder, ServeSettings(**wrong))


def test_every_side_answers_everything(measured: tuple[ServeReport, list[Progress]]) -> None:
    report, steps = measured
    assert [load.qps for load in report.loads] == [1000.0, 2000.0]
    assert all(list(load.sides) == [PREFIX_CACHE, "reuse@0", "reuse@0.15"] for load in report.loads)
    assert [step.done for step in steps] == list(range(1, 3 * (4 + 2 * 8) + 1))
    assert {step.total for step in steps} == {60}
    for load in report.loads:
        for side in load.sides.values():
            assert 0.0 < side.p50_ttft_s <= side.p99_ttft_s
            assert side.throughput > 0.0
            assert len(side.hits) == 4
    assert set(report.capacity) == {PREFIX_CACHE, "reuse@0", "reuse@0.15"}


def test_reuse_computes_each_chunk_once_and_prefix_caching_again_and_again(
    measured: tuple[ServeReport, list[Progress]], decoder: Decoder
) -> None:
    report, _ = measured
    different = len({chunk.chunk_id for one in drawn(decoder, SETTINGS) for chunk in one.chunks})
    last = report.loads[-1].sides
    for name in ("reuse@0", "reuse@0.15"):  # though many wait for the same chunk at the same time
        assert last[name].variants == {1: different}
        assert last[name].variants_per_chunk == 1.0
        assert last[name].hits == (3.0,) * 4
    assert last[PREFIX_CACHE].variants_per_chunk > 1.5
    assert sum(last[PREFIX_CACHE].hits) < 11.0  # of 12
    assert (
        last["reuse@0"].computed_share
        < last["reuse@0.15"].computed_share
        < last[PREFIX_CACHE].computed_share
    )


def test_what_is_shown(
    measured: tuple[ServeReport, list[Progress]], capsys: pytest.CaptureFixture[str]
) -> None:
    report, _ = measured
    plain = json.loads(json.dumps(as_plain(report)))
    assert [load["qps"] for load in plain["loads"]] == [1000.0, 2000.0]
    for load in plain["loads"]:
        for side in ("prefix_cache", "reuse@0.15"):
            assert {"throughput", "p50_ttft_s", "p99_ttft_s", "hits", "variants"} <= load[
                side
            ].keys()
            assert [hits for _, hits, _ in load[side]["series"]] == [
                3
            ] * 8 or side == "prefix_cache"
        assert load["prefix_cache"]["ttft_ratio"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
        assert load["prefix_cache"]["answer_ratio"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
        for side in ("prefix_cache", "reuse@0.15"):
            assert load[side]["p50_answer_s"] >= load[side]["p50_ttft_s"]
            assert load[side]["p99_answer_s"] >= load[side]["p50_answer_s"]
    print_serve(report)
    shown = capsys.readouterr().out
    assert "reuse@0.15" in shown
    assert f"{report.requests} requests at each load" in " ".join(shown.split())
