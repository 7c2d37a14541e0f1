"""The registry: each baseline does what defines it, through the same engine."""

from __future__ import annotations

import math

import pytest

from cachecraft_rag.engine.engine import Engine, ScoredAnswer
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.formats.dataset import Dataset
from cachecraft_rag.evaluation.quality.methods import ABLATIONS, METHODS, methods_named
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.types import Chunk

PER_CHUNK = ["random", "craft", "h2o", "leading", "value_deviation"]


@pytest.fixture
def chunks(evaluation_engine: Engine, town_dataset: Dataset) -> list[Chunk]:
    """Three chunks of one prompt that captured all of them, in another order than there."""
    chosen = list(town_dataset.documents[0][:3])
    evaluation_engine.score_answer("What?", chosen, max_new_tokens=2, config=ReuseConfig(reuse=False))
    evaluation_engine.write_back.wait_for([chunk.chunk_id for chunk in chosen])
    return [chosen[2], chosen[0], chosen[1]]


def by(engine: Engine, chunks: list[Chunk], name: str, ratio: float = 0.0) -> ScoredAnswer:
    config = {**METHODS, **ABLATIONS}[name].config(ratio)
    assert not config.capture
    return engine.score_answer("What?", chunks, max_new_tokens=2, config=config)


def outcomes(found: ScoredAnswer) -> list[str]:
    return [chunk.outcome for chunk in found.stats.chunks]


def test_full_recompute_reuses_nothing(evaluation_engine: Engine, chunks: list[Chunk]) -> None:
    assert outcomes(by(evaluation_engine, chunks, "full_recompute")) == ["computed"] * 3


def test_full_cache_recomputes_nothing(evaluation_engine: Engine, chunks: list[Chunk]) -> None:
    found = by(evaluation_engine, chunks, "full_cache")
    assert outcomes(found) == ["reused"] * 3
    assert found.stats.tokens_recomputed == 0


def test_prefix_cache_takes_what_stands_where_it_stood(evaluation_engine: Engine, chunks: list[Chunk]) -> None:
    assert outcomes(by(evaluation_engine, chunks, "prefix_cache")) == ["computed"] * 3
    as_captured = [chunks[1], chunks[2], chunks[0]]
    assert outcomes(by(evaluation_engine, as_captured, "prefix_cache")) == ["exact"] * 3
    assert outcomes(by(evaluation_engine, [chunks[1], chunks[0]], "prefix_cache")) == ["exact", "computed"]


def test_set_cache_takes_it_in_any_order(evaluation_engine: Engine, chunks: list[Chunk]) -> None:
    found = by(evaluation_engine, chunks, "set_cache")
    assert outcomes(found) == ["reused"] * 3
    assert found.stats.tokens_recomputed == 0
    longer = [*chunks, Chunk("Nobody has seen this before.")]
    assert outcomes(by(evaluation_engine, longer, "set_cache")) == ["reused"] * 3 + ["computed"]


@pytest.mark.parametrize("name", PER_CHUNK)
@pytest.mark.parametrize("ratio", [0.1, 0.5])
def test_each_chunk_keeps_to_its_budget(
    evaluation_engine: Engine, chunks: list[Chunk], name: str, ratio: float
) -> None:
    for chunk in by(evaluation_engine, chunks, name, ratio).stats.chunks:
        assert chunk.recomputed == math.ceil(ratio * chunk.tokens)


@pytest.mark.parametrize("name", ["default", "question", "no_drift"])
def test_one_budget_for_the_whole_prompt(evaluation_engine: Engine, chunks: list[Chunk], name: str) -> None:
    found = by(evaluation_engine, chunks, name, 0.3).stats
    assert found.tokens_recomputed == sum(math.ceil(0.3 * chunk.tokens) for chunk in found.chunks)


def test_selectors_choose_different_tokens(evaluation_engine: Engine, chunks: list[Chunk]) -> None:
    logits = [by(evaluation_engine, chunks, name, 0.2).logits[0] for name in PER_CHUNK]
    different = [logits[0]]
    for one in logits[1:]:
        if all((one - other).abs().max() > 1e-4 for other in different):
            different.append(one)
    assert len(different) >= 4  # two may agree on so little text


def test_alpha_decides_where_no_ratio_does(evaluation_engine: Engine, chunks: list[Chunk]) -> None:
    spent = [by(evaluation_engine, chunks, f"alpha_{alpha}").stats.tokens_recomputed for alpha in (0.25, 0.5, 1)]
    assert 0 < spent[0] < spent[1] < spent[2]
    assert "computed" in outcomes(by(evaluation_engine, chunks, "alpha_3"))  # CFO is 1


def test_names_are_known_and_groups_stand_for_theirs() -> None:
    assert [method.name for method in methods_named(["craft", "default", "craft"])] == ["craft", "default"]
    assert [method.name for method in methods_named(["ablations"])] == list(ABLATIONS)
    with pytest.raises(ConfigError, match="unknown method best; choose among full_recompute"):
        methods_named(["best"])
    assert {"default", "craft", "random", "full_cache", "prefix_cache"} <= set(METHODS)
