"""Replays of traces without tensors: the counts add up, the policies do what their names say, the oracle is best."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulate import MAKERS, S3FIFO
from benchmarks.simulation.replay import Outcome, Setting, attention, replay
from benchmarks.simulation.sweep import Grid, as_fields, needed, run
from benchmarks.simulation.trace import Trace
from benchmarks.traffic import Traffic, draw_trace
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.store.eviction import VariantFacts

PER_TOKEN = 1000


def simulated(
    requests: list[tuple[int, ...]], policy: str = "saving", chunks: float = 99, **setting: Any
) -> Outcome:
    """A replay of chunks of 100 tokens each, with room for so many of them."""
    trace = Trace(tuple(requests), (100,) * (1 + max(map(max, requests))))
    return replay(
        trace,
        Setting(
            policy,
            int(chunks * 100 * PER_TOKEN),
            bytes_per_token=PER_TOKEN,
            makers=MAKERS,
            **setting,
        ),
    )


def sessions() -> Trace:
    """Conversations that come back to the same few chunks, one after the other."""
    requests = []
    for session in range(30):
        own = range(10 * session, 10 * session + 10)
        requests += [tuple(own[(turn + n) % 10] for n in range(5)) for turn in range(12)]
    return Trace(tuple(requests), (100,) * 300)


# -- one replay -------------------------------------------------------------------------------------------------------


def test_a_repeated_request_is_reused_exactly_and_one_in_another_order_is_fixed() -> None:
    outcome = simulated([(0, 1, 2), (0, 1, 2), (2, 1, 0)])
    assert outcome.outcomes == {"not_stored": 3, "exact": 3, "reused": 3}
    assert (outcome.computed, outcome.exact, outcome.reused) == (300, 300, 300)
    assert 0 < outcome.recomputed <= 3 * 25  # α = 0.25 and CCI < 1
    assert outcome.saved == 1.0 - (300 + outcome.recomputed) / 900
    assert outcome.variants_per_chunk == {1: 3}


def test_new_variants_make_what_was_fixed_exact_the_next_time() -> None:
    orders = [(0, 1, 2), (2, 1, 0), (1, 2, 0)] * 4
    once, always = simulated(orders), simulated(orders, new_variants="always")
    assert once.recomputed > 2 * always.recomputed > 0
    assert always.exact > once.exact
    assert once.variants_per_chunk == {1: 3}
    assert max(always.variants_per_chunk) == 3
    capped = simulated(orders, new_variants="always", variants_per_chunk=2)
    assert max(capped.variants_per_chunk) == 2
    assert always.recomputed < capped.recomputed
    few = simulated(orders, new_variants="always", max_variants=4)
    assert sum(n * chunks for n, chunks in few.variants_per_chunk.items()) == 4


@pytest.mark.parametrize("policy", ["saving", "f_r", "lru", "s3-fifo", "oracle"])
def test_every_outcome_adds_up_and_no_budget_is_exceeded(policy: str) -> None:
    trace = draw_trace(Traffic(requests=400, questions=60, drift=0.2, seed=3))
    budget = sum(trace.tokens) * PER_TOKEN // 5
    how = {"host_bytes": budget // 4, "bytes_per_token": PER_TOKEN, "makers": MAKERS}
    setting = Setting(policy, budget, new_variants="always", **how)
    outcome = replay(trace, setting)
    assert sum(outcome.outcomes.values()) == sum(map(len, trace.requests))
    assert outcome.computed + outcome.exact + outcome.reused == trace.asked_tokens
    assert sum(outcome.loads.values()) == outcome.outcomes["exact"] + outcome.outcomes["reused"]
    assert outcome.disk_bytes <= budget
    assert outcome.host_bytes <= budget // 4
    assert outcome.evicted > 0
    assert replay(trace, setting) == outcome


@pytest.mark.parametrize(
    ("policy", "counts"),
    [
        ("saving", (680521, 24732, 985909, 252795, 3403, 2853)),
        ("f_r", (838582, 21876, 851359, 229284, 3786, 2849)),
        ("lru", (807878, 24277, 866176, 245171, 3751, 2766)),
        ("s3-fifo", (685110, 21664, 1002351, 231764, 3326, 2847)),
        ("oracle", (848291, 27084, 786636, 284298, 2457, 2995)),
    ],
)
def test_a_replay_evicts_what_the_catalog_did(policy: str, counts: tuple[int, ...]) -> None:
    """Counts of replays that ran on the SQLite catalog itself: only a change of the rules changes them.

    Newer: all, since a variant captured alone is the last choice after other chunks.
    """
    trace = draw_trace(Traffic(requests=1500, questions=120, drift=0.1, seed=5))
    budget = int(0.2 * sum(trace.tokens) * PER_TOKEN)
    how = {"host_bytes": budget // 4, "bytes_per_token": PER_TOKEN, "makers": MAKERS}
    outcome = replay(trace, Setting(policy, budget, new_variants="always", **how))
    tokens = (outcome.computed, outcome.recomputed, outcome.exact, outcome.reused)
    assert (*tokens, outcome.evicted, outcome.loads["host"]) == counts


def test_nothing_can_be_kept_in_a_budget_below_one_chunk() -> None:
    outcome = simulated([(0, 1), (0, 1)], chunks=0.5)
    assert (outcome.saved, outcome.disk_bytes, outcome.evicted) == (0.0, 0, 0)


# -- policies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "hits"),
    # 0 is used twice, then 1 and 2 come, 0 is asked for again, 3 comes, and then all are asked for
    [("lru", {0, 2, 3}), ("oracle", {0, 1, 2}), ("saving", {0, 2, 3})],
)
def test_chunks_kept_by_each_policy(policy: str, hits: set[int]) -> None:
    asked = [0, 0, 1, 2, 0, 3]
    kept = set()
    for last in range(4):
        future = [last] if policy != "oracle" else [0, 1, 2, 3]
        outcome = simulated([(chunk,) for chunk in (*asked, *future)], policy, chunks=3)
        if policy == "oracle":
            # 3 is not stored: it comes last
            assert outcome.outcomes == {"not_stored": 5, "exact": 5}
            return
        kept |= {last} if outcome.outcomes["not_stored"] == 4 else set()
    assert kept == hits


def test_a_scan_does_not_empty_the_store() -> None:
    warm = [(chunk,) for chunk in range(8)] * 6
    scan = [(chunk,) for chunk in range(100, 130)]
    saved = {
        policy: simulated([*warm, *scan, *warm], policy, chunks=10).outcomes["exact"]
        for policy in ("saving", "s3-fifo", "lru")
    }
    assert saved["saving"] == saved["s3-fifo"] == 40 + 48
    assert saved["lru"] == 40 + 40


def test_formerly_popular_chunks_make_way_for_popular_ones() -> None:
    def days() -> list[tuple[int, ...]]:
        return [(10 * day + n,) for day in range(6) for _ in range(10) for n in range(8)]

    saved = {
        policy: simulated(days(), policy, chunks=10).saved
        for policy in ("saving", "f_r", "s3-fifo")
    }
    assert saved["saving"] >= saved["s3-fifo"] - 0.05
    assert saved["saving"] >= 0.7
    assert saved["f_r"] < 0.6 * saved["saving"]


def test_s3_fifo_forgets_what_left() -> None:
    policy = S3FIFO(1000)
    for n in range(50):
        policy.added(f"v{n}", 0, 10)
        policy.score(VariantFacts("c", f"v{n}", 1, 10, 1.0), 0.0)
        policy.evicted(f"v{n}")
    assert sum(len(value) for value in vars(policy).values() if isinstance(value, dict)) == 0


def test_replays_in_several_processes_come_to_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # New processes import `benchmarks` from a folder on their path. It is not the repository's root, for the reason
    # that pyproject.toml gives at `addopts`.
    (tmp_path / "benchmarks").symlink_to(Path(__file__).parents[2] / "benchmarks")
    monkeypatch.syspath_prepend(str(tmp_path))
    trace = draw_trace(Traffic(requests=200, questions=40))
    grid, steps = Grid(policies=("saving", "f_r"), budgets=(0.1, 0.5)), []
    apart = list(run(trace, grid, Setting("saving", 1), processes=2, progress=steps.append))
    assert apart == list(run(trace, grid, Setting("saving", 1), processes=1))
    assert [cell.policy for cell in apart] == ["oracle", "saving", "f_r"] * 2
    assert [one.done for one in steps] == list(range(0, 1400, 200))


# -- sweeps: the default against the others ---------------------------------------------------------------------------


def shares(trace: Trace, budget: float = 0.2) -> dict[str, float]:
    cells = list(run(trace, Grid(budgets=(budget,)), Setting("saving", 1, makers=MAKERS)))
    return {cell.policy: cell.of_oracle for cell in cells}


def test_on_conversations_the_default_saves_what_the_oracle_does() -> None:
    found = shares(sessions())
    assert found["oracle"] == 1.0
    assert found["saving"] >= 0.98
    assert (
        found["saving"]
        >= max(share for policy, share in found.items() if policy != "oracle") - 0.01
    )
    assert found["f_r"] < 0.6


def test_the_answer_to_how_much_is_needed() -> None:
    trace = draw_trace(Traffic(requests=500, questions=50, drift=0.0, seed=1))
    cells = list(
        run(
            trace,
            Grid(policies=("saving",), budgets=(1.0, 0.1, 0.5), max_variants=(5,)),
            Setting("saving", 1),
        )
    )
    assert [(cell.policy, cell.budget) for cell in cells][:3] == [
        ("oracle", 1.0),
        ("saving", 1.0),
        ("saving", 1.0),
    ]
    saved = {
        cell.budget: cell.outcome.saved
        for cell in cells
        if cell.max_variants > 5 and cell.policy == "saving"
    }
    enough = needed(cells, share=0.85)
    assert enough is not None
    assert saved[enough.budget] >= 0.85 * saved[1.0]
    assert all(saved[budget] < 0.85 * saved[1.0] for budget in saved if budget < enough.budget)
    fields = json.loads(json.dumps(as_fields(cells, 500)))
    assert set(fields["policies"]) == {"oracle", "saving"}
    assert set(fields["policies"]["saving"]) == {"1", "0.1", "0.5"}
    assert fields["policies"]["saving"]["1"]["of_oracle"] == pytest.approx(1.0, abs=0.05)
    assert [(row["max_variants"], row["policy"]) for row in fields["limits"]] == [(5, "saving")]
    assert fields["limits"][0]["saved"] < fields["policies"]["saving"]["1"]["saved"]


def test_drawn_traffic_is_zipf_and_drifts() -> None:
    still = draw_trace(Traffic(requests=4000, questions=100, drift=0.0, variation=0.0))
    counts = sorted((still.requests.count(one) for one in set(still.requests)), reverse=True)
    assert len(counts) <= 100
    assert counts[0] == pytest.approx(4000 / 5.19, rel=0.15)  # H(100) = 5.19
    assert counts[1] == pytest.approx(counts[0] / 2, rel=0.25)
    moving = draw_trace(Traffic(requests=4000, questions=100, drift=0.5, variation=0.0))
    assert len(moving.tokens) > 3 * len(still.tokens)
    assert not set(moving.requests[:200]) >= set(moving.requests[-200:])
    with pytest.raises(ConfigError, match="topic"):
        Traffic(top_k=5, topic=5)


def test_made_up_attention_lies_between_none_and_half() -> None:
    drawn = [attention(a, b) for a in range(60) for b in range(60)]
    assert 0.0 < min(drawn) <= max(drawn) < 0.5
    assert sum(drawn) / len(drawn) == pytest.approx(1 / 8, rel=0.1)


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_compares_policies_and_draws_them(
    benchmark_json: Callable[..., Any], tmp_path: Path
) -> None:
    figure = tmp_path / "figure.png"
    small = ("--requests", "60", "--questions", "9", "--processes", "1", "--budgets", "0.5")
    fields = benchmark_json("simulate", *small, "--plot", figure)
    assert fields["requests"] == 60
    assert set(fields["policies"]) == set(MAKERS)
    assert figure.stat().st_size > 1000
    assert set(benchmark_json("simulate", *small, "--policies", "lru")["policies"]) == {
        "oracle",
        "lru",
    }
    with pytest.raises(ConfigError, match="policy must be"):
        benchmark_json("simulate", *small, "--policies", "best")
