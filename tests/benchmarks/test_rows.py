"""Ways to spend recomputed rows: budgets by focus, rotated and retrieved passages, and a whole small run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import rows
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.dataset import load_dataset
from cachecraft_rag.evaluation.lookalikes import lookalikes_dataset
from cachecraft_rag.planning.selectors import TokenFacts

HUNDRED = Path(rows.__file__).with_name("hundred.json")


def facts(*attention: float) -> list[TokenFacts]:
    """Chunks of ten tokens that the question attends to so much."""
    return [TokenFacts(10, seed=0, probed=np.full(10, one, dtype=np.float32)) for one in attention]


def test_the_chunk_that_the_question_attends_to_most_gets_all_its_tokens() -> None:
    assert rows.focused_in_full(facts(0.3, 2.0, 1.5), [2, 2, 2]) == [2, 10, 2]


def test_before_the_probe_budgets_stay() -> None:
    assert rows.focused_in_full([TokenFacts(10, seed=0)], [2]) == [2]


def test_rotating_puts_the_answers_page_in_each_place_equally_often() -> None:
    dataset = rows.rotated(lookalikes_dataset(half="tune", passages=4, limit=8, seed=0))
    places = []
    for question in dataset.questions:
        page = f"{question.question_id.rpartition('#')[0]}.md"
        places.append([one.metadata["source"] for one in question.passages].index(page))
    assert places == [0, 1, 2, 3, 0, 1, 2, 3]


def test_only_lookalike_pages_can_be_rotated() -> None:
    with pytest.raises(ConfigError, match="--order rotated is for --data lookalikes"):
        rows.rotated(load_dataset(HUNDRED, passages=2, limit=2, seed=0))


def test_retrieved_passages_are_as_many_and_the_best_is_last() -> None:
    given = load_dataset(HUNDRED, passages=3, limit=4, seed=0)
    found = rows.retrieved(given)
    assert [len(one.passages) for one in found.questions] == [3] * 4
    best = [question.passages[-1].text for question in found.questions]
    needed = [question.answers for question in found.questions]
    hits = [
        any(answer in text for answer in answers)
        for text, answers in zip(best, needed, strict=True)
    ]
    assert sum(hits) >= 2


def test_a_way_with_a_ratio_runs_at_this_one_only() -> None:
    one, other = rows.chosen("nearest@0.15, scattered")
    assert (one.name, one.takes_ratio, other.takes_ratio) == ("nearest@0.15", False, True)
    assert one.config(0.9).recompute_ratio == 0.15
    with pytest.raises(ConfigError, match="Did you mean nearest"):
        rows.chosen("farthest@0.15")


def test_the_command_compares_ways(
    benchmark_json: Callable[..., Any], demo_model: Path, tmp_path: Path
) -> None:
    found = benchmark_json(
        "rows",
        *("--data", HUNDRED, "--limit", "2", "--passages", "2", "--answer-tokens", "3"),
        *("--ways", "full_cache,scattered@0.3,focused@0.1,only_in_focus@0.3", "--threads", "1"),
        *("--out", tmp_path / "out", "--json"),
    )
    computed = {name: one["recomputed"] for name, one in found["methods"].items()}
    assert computed["full_cache"] == 0.0
    # too few chunks for a focus to spare anything
    assert 0.0 < computed["only_in_focus@0.3"] == computed["scattered@0.3"] < 0.35
    assert computed["focused@0.1"] > 0.35  # one of two chunks in full
