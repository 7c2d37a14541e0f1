"""The load benchmark: who asks what and when, its figures, and a run against a server without vLLM."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import reserved_memory
from benchmarks.load import Measurement, Rate
from benchmarks.load_client import Servers
from benchmarks.load_figures import Answered, Figures, break_even, crossing, figures, ratio
from benchmarks.load_requests import REUSE, REUSE_OFF, VLLM_ALONE, Mix, body, drawn
from benchmarks.local_server import serving
from benchmarks.own_instruction import Server
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError, ServerError
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.progress import Progress

MIX = Mix(documents_share=0.5, chunks=3, words=20, pool=9)


def test_documents_and_other_users_share_one_poisson_process() -> None:
    arrivals = drawn(MIX, 4000, 5.0, 1.0, new="x")
    assert sum(bool(arrival.documents) for arrival in arrivals) == 2000
    gaps = np.diff([arrival.at_s for arrival in arrivals if arrival.documents])
    assert gaps.mean() == pytest.approx(0.4, rel=0.1)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1), "exponential"


def test_the_hit_rate_decides_how_many_documents_are_stored_and_nothing_else() -> None:
    stored = set(MIX.stored())
    runs = {rate: drawn(MIX, 40, 1.0, rate, new="x") for rate in (0.0, 0.25, 0.5, 1.0)}
    hits: dict[float, set[tuple[int, int]]] = {}
    for rate, arrivals in runs.items():
        found = [
            ((number, place), text in stored)
            for number, arrival in enumerate(arrivals)
            for place, text in enumerate(arrival.documents)
        ]
        hits[rate] = {where for where, is_stored in found if is_stored}
        assert len(hits[rate]) == rate * len(found)
    assert hits[0.25] < hits[0.5] < hits[1.0]
    times = [[(one.at_s, one.question) for one in arrivals] for arrivals in runs.values()]
    assert all(other == times[0] for other in times)


def test_each_document_that_is_not_stored_occurs_once_in_all_runs() -> None:
    new = [
        text
        for rate in (0.0, 0.5)
        for arrival in drawn(MIX, 40, 1.0, rate, new=f"{rate}")
        for text in arrival.documents
        if text not in MIX.stored()
    ]
    assert len(new) == len(set(new)) == 90


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"documents_share": 1.5}, "documents_share"),
        ({"chunks": 30}, "raise --pool"),
        ({"pool": 10**6}, "lower --pool or --words"),
        ({"others_tokens": 1}, "others_tokens"),
    ],
)
def test_a_mix_that_cannot_be_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Mix(**wrong).stored()


def test_requests_without_any_document_are_refused() -> None:
    with pytest.raises(ConfigError, match="raise --documents-share"):
        drawn(Mix(documents_share=0.1), 4, 1.0, 0.0, new="x")


def test_all_sides_are_asked_the_same() -> None:
    (arrival,) = [one for one in drawn(MIX, 2, 1.0, 1.0, new="x") if one.documents]
    asked = {side: body(arrival, side, MIX, salt="s") for side in (REUSE, REUSE_OFF, VLLM_ALONE)}
    texts = [document["text"] for document in asked[REUSE]["documents"]]
    assert texts == list(arrival.documents)
    assert asked[REUSE_OFF] == asked[REUSE] | {"cachecraft": {"reuse": False, "capture": False}}
    (message,) = asked[VLLM_ALONE]["messages"]
    assert message["content"].split("\n\n")[-1] == arrival.question
    assert message["content"].startswith(texts[-1]), "the best one is last"


def answered(arrival_s: float, *tokens_s: float, with_documents: bool = False) -> Answered:
    return Answered(arrival_s, tokens_s, 100, with_documents)


def test_times_between_tokens_are_those_of_other_users() -> None:
    found = figures(
        [
            answered(0.0, 0.5, 0.6, 0.7, 1.7),
            answered(1.0, 1.5, 4.0, with_documents=True),
        ],
        found_share=1.0,
        left_to_vllm=0,
    )
    assert found.between_tokens.count == 3
    assert found.between_tokens.p50 == pytest.approx(0.1)
    assert found.between_tokens.p99 == pytest.approx(0.1 + 0.98 * 0.9)
    assert found.longest_s == pytest.approx(1.0)
    assert (found.while_filled.count, found.while_filled.p50) == (1, pytest.approx(1.0))
    assert (found.ttft.p50, found.others_ttft.p50) == (0.5, 0.5)
    assert found.requests_per_s == pytest.approx(2 / 4.0)
    assert found.tokens_per_s == pytest.approx(6 / 4.0)


def test_without_other_users_nothing_is_between_tokens() -> None:
    found = figures([answered(0.0, 1.0, 2.0, with_documents=True)], found_share=0.0, left_to_vllm=0)
    assert found.between_tokens.count == 0
    assert math.isnan(found.between_tokens.p50)
    assert math.isnan(found.others_ttft.p99)


def run_of(*ttft_s: float) -> Figures:
    return figures(
        [answered(0.0, each, with_documents=True) for each in ttft_s],
        found_share=0.0,
        left_to_vllm=0,
    )


@pytest.mark.parametrize(
    ("ratios", "crossed"),
    [
        ([1.5, 1.25, 0.75, 0.5], 1.5 / 3),
        ([1.5, 0.9, 1.1, 0.6], (2 + 0.2) / 3),  # the last time
        ([0.9, 0.8, 0.7, 0.6], 0.0),
        ([2.0, 1.8, 1.6, 1.4], math.inf),
        ([1.0, 1.0, 1.0, 1.0], 0.0),
    ],
)
def test_reuse_breaks_even_where_the_ratio_falls_to_1(ratios: list[float], crossed: float) -> None:
    rates = [0.0, 1 / 3, 2 / 3, 1.0]
    assert crossing(dict(zip(rates, ratios, strict=True))) == pytest.approx(crossed)


def test_the_break_even_hit_rate_has_an_interval_over_requests() -> None:
    baseline = run_of(1.0, 2.0, 3.0, 2.0)
    slower = run_of(1.5, 3.0, 4.5, 3.0)
    faster = run_of(0.5, 1.0, 1.5, 1.0)
    assert ratio(slower, baseline).mean == pytest.approx(1.5)
    found = break_even({0.0: (slower, baseline), 1.0: (faster, baseline)})
    assert (found.low, found.mean, found.high) == pytest.approx((0.5, 0.5, 0.5))
    never = break_even({0.0: (slower, baseline), 1.0: (slower, baseline)})
    assert (never.low, never.mean, never.high) == (math.inf, math.inf, math.inf)
    mixed = run_of(0.5, 1.0, 1.5, 9.0)  # one of four requests decides
    found = break_even({0.0: (slower, baseline), 1.0: (mixed, baseline)})
    assert found.low < 1.0 < found.high


def test_memory_reserved_on_gpus_costs_concurrency() -> None:
    rows = {(row.server, row.context): row for row in reserved_memory.rows()}
    assert len(rows) == len(reserved_memory.SERVERS) * len(reserved_memory.CONTEXTS)
    for row in rows.values():
        without, with_it = row.at_once
        assert with_it == pytest.approx(without * (1 - row.lost_share))
        assert 0.0 <= row.lost_share < 1.0
    row = rows["Llama-3-8B, 1 GPU", 8192]
    assert row.token == 2 * 32 * 8 * 128 * 2
    weights = 8.03e9 * 2
    assert row.free == pytest.approx(0.9 * 80e9 - weights, rel=0.001)


def test_the_results_have_the_memory_as_it_is_counted() -> None:
    page = (Path(__file__).parents[2] / "docs" / "results" / "speed.md").read_text("utf-8")
    for row in reserved_memory.rows():
        assert f"| {' | '.join(reserved_memory.cells(row))} |" in page


@pytest.fixture
def server(tiny_decoder: Callable[..., Decoder], tmp_path: Path) -> Iterator[str]:
    """Address of a server without vLLM."""
    config = EngineConfig(new_variants="off")
    with (
        ChunkCacheStore.open(tmp_path / "store") as store,
        Engine(tiny_decoder("Llama"), store, new_variants="off") as engine,
        serving(engine, config) as url,
    ):
        yield url.removesuffix("/v1/chat/completions")


SMALL = [
    *("--requests", "6", "--qps", "50", "--documents-share", "0.5"),
    *("--chunks", "2", "--words", "12", "--pool", "4", "--others-tokens", "4"),
]


def test_a_running_server_is_measured_at_each_hit_rate(
    server: str, benchmark_json: Callable[..., Any], as_loud_as_before: None
) -> None:
    report = benchmark_json("load", "--server", server, "--rates", "1,0,0.5", *SMALL)
    assert [run["hit_rate"] for run in report["runs"]] == [0.0, 0.5, 1.0]
    for run in report["runs"]:
        assert set(run["sides"]) == {REUSE, REUSE_OFF}
        for side in run["sides"].values():
            assert len(side["ttft_s"]) == 3
            assert side["between_tokens"]["count"] > 0
            assert side["prompt_tokens"] == run["sides"][REUSE]["prompt_tokens"]
        assert run["sides"][REUSE]["found_share"] == run["hit_rate"]
        assert run["sides"][REUSE]["left_to_vllm"] == 0
    assert (report["qps"], report["requests"], report["left_out"]) == (50.0, 6, [])
    assert len(report["memory"]) == len(list(reserved_memory.rows()))


def test_the_tables_name_what_was_measured(
    server: str, benchmark_output: Callable[..., str], as_loud_as_before: None
) -> None:
    shown = benchmark_output("load", "--server", server, "--rates", "1", *SMALL)
    assert "reuse off" in shown
    assert "6 requests a run, 50.00 a second" in shown
    assert "Llama-3-70B, 4 GPUs" in shown


def test_hit_rates_without_time_are_named(
    server: str, benchmark_json: Callable[..., Any], as_loud_as_before: None
) -> None:
    without_count = [*SMALL[2:], "--minutes", "0"]
    report = benchmark_json("load", "--server", server, "--rates", "1,0", *without_count)
    assert [run["hit_rate"] for run in report["runs"]] == [1.0]
    assert report["left_out"] == [0.0]


def test_what_was_measured_before_a_stop_is_kept(server: str) -> None:
    steps: list[Progress] = []

    def stop_in_the_second_run(step: Progress) -> None:
        steps.append(step)
        if step.done == 14:
            raise KeyboardInterrupt

    rate = Rate(rates="1,0", qps=50.0, requests=6)
    mix = Mix(chunks=2, words=12, pool=4, others_tokens=4)
    with closing(Server(server)) as ours:
        report = Measurement(Servers(ours), mix, rate, 0.0, stop_in_the_second_run).report()
    assert [run.hit_rate for run in report.runs] == [1.0]
    assert report.left_out == (0.0,)
    assert steps[-1].done == 14


def test_a_refused_request_ends_the_measurement_with_the_server_s_reason(
    server: str, benchmark_json: Callable[..., Any], as_loud_as_before: None
) -> None:
    with pytest.raises(ServerError, match=r"refused a request: .*context"):
        benchmark_json("load", "--server", server, *SMALL, "--others-tokens", "100000")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("--vllm-server", "http://127.0.0.1:1"), "--server"),
        (("--rates", "2"), "from 0 to 1"),
        (("--rates", "often"), "not a list of numbers"),
        (("--load", "0"), "above 0"),
    ],
)
def test_options_that_cannot_be_are_refused_before_a_server_starts(
    wrong: tuple[str, ...], message: str, benchmark_json: Callable[..., Any]
) -> None:
    with pytest.raises(ConfigError, match=message):
        benchmark_json("load", *wrong)
