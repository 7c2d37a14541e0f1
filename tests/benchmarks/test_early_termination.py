"""Early termination against a flat budget of the same cost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.early_termination import RULES, RuleComparison, compare_rules
from cachecraft_rag.engine.decoder import Decoder
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.dataset import handbook_dataset
from cachecraft_rag.evaluation.intervals import Interval
from cachecraft_rag.evaluation.origins import Origins, condition_named
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types import Progress


def test_every_rule_is_compared_with_what_it_leaves(tiny_decoder: Callable[..., Decoder], tmp_path: Path) -> None:
    dataset = handbook_dataset(passages=3, limit=3, seed=1)
    seen: list[Progress] = []
    with (
        ChunkCacheStore.open(tmp_path) as store,
        Engine(tiny_decoder("Llama", num_hidden_layers=8), store, best_last=False) as engine,
    ):
        origins = Origins(condition_named("unrelated"), engine, dataset, 1, 4)
        found = compare_rules(engine, dataset, origins, ratio=0.3, answer_tokens=4, progress=seen.append)
    assert [(one.method, one.rule) for one in found] == [(m, r) for m in ("craft", "default") for r in RULES]
    assert seen == [Progress(done, 3, "") for done in range(3)]
    for one in found:
        assert 0.0 <= one.saved < 1.0
        assert one.difference.mean == pytest.approx(one.kl.mean - one.flat_kl.mean)
        assert one.kl.mean > 0.0
        if one.saved == 0.0:  # the flat budget is then the same budget
            assert one.difference.mean == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(("low", "high", "wins"), [(-0.2, -0.1, True), (-0.2, 0.1, False), (0.1, 0.2, False)])
def test_only_the_whole_interval_wins(low: float, high: float, wins: bool) -> None:
    kl = Interval(0.1, 0.0, 0.2)
    compared = RuleComparison("craft", "gap", kl, kl, Interval((low + high) / 2, low, high), 0.3)
    assert compared.wins is wins
    assert json.loads(json.dumps(compared.as_dict()))["wins"] is wins


def test_the_command_compares_every_rule(
    tiny_decoder: Callable[..., Decoder],
    benchmark_json: Callable[..., Any],
    tmp_path: Path,
    as_loud_as_before: None,
) -> None:
    decoder = tiny_decoder("Llama")
    decoder.model.save_pretrained(tmp_path)
    decoder.tokenizer.save_pretrained(tmp_path)
    arguments = ("--model", tmp_path, "--limit", "1", "--passages", "2", "--answer-tokens", "4")
    report = benchmark_json("early-termination", *arguments)
    assert (report["questions"], report["passages"]) == (1, 2)
    assert {one["rule"] for one in report["rules"]} == set(RULES)
    with pytest.raises(ConfigError, match="change from question to question"):
        benchmark_json("early-termination", *arguments, "--origin", "stream")
