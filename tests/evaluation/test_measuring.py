"""One measurement: methods that are exact measure as exact, budgets are kept, and preparations are charged."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.dataset import Dataset, EvaluationQuestion
from cachecraft_rag.evaluation.measuring import (
    METHODS,
    NEAR_TIE,
    PLAIN,
    Record,
    Reference,
    Trial,
    measure,
    methods_named,
    reference_of,
    trials_of,
)
from cachecraft_rag.evaluation.origins import CONDITIONS, Origins
from cachecraft_rag.types.documents import Chunk


def trial(name: str, ratio: float | None = None) -> Trial:
    return Trial(METHODS[name], ratio)


def prepared(engine: Engine, dataset: Dataset, origin: str = "unrelated") -> Reference:
    """The third question's reference, the questions before it in the store."""
    origins = Origins(CONDITIONS[origin], engine, dataset, 0, 8)
    for question in dataset.questions[:2]:
        origins.before(question)
        origins.after(question)
    origins.before(dataset.questions[2])
    return reference_of(engine, dataset.questions[2], answer_tokens=8)


def assert_exact(record: Record, kl: float) -> None:
    assert abs(record.kl) <= kl
    assert (record.top1, record.rouge_l) == (1.0, 1.0)
    assert record.f1 == record.reference_f1


def test_trials_are_every_method_at_every_ratio_it_takes() -> None:
    found = trials_of(methods_named(["default", "full_cache"]), [0.3, 0.15, 0.3])
    assert [one.label for one in found] == ["default@0.15", "default@0.3", "full_cache"]
    assert [one.config.recompute_ratio for one in found] == [0.15, 0.3, 0.0]
    assert trials_of(methods_named(["full_cache"]), [])[0].ratio is None


def test_cfo_in_place_of_a_ratio_is_the_engine_s_default() -> None:
    found = trials_of(methods_named(["default", "full_cache"]), [0.3, None])
    assert [one.label for one in found] == ["default", "default@0.3", "full_cache"]
    assert found[0].config == PLAIN
    assert found[0].config.recompute_ratio is None
    halving = replace(
        METHODS["default"],
        name="halving",
        prepare=lambda _engine, question, _ratio: halved(question),
    )
    with pytest.raises(ConfigError, match="halving need a number"):
        trials_of([halving], [None])


def test_ratios_out_of_range_or_missing_are_refused() -> None:
    for ratio in (0.0, 1.01):
        with pytest.raises(ConfigError, match="a ratio must lie above 0"):
            trials_of(methods_named(["default"]), [ratio])
    with pytest.raises(ConfigError, match="default need a recompute ratio"):
        trials_of(methods_named(["default"]), [])


@pytest.mark.parametrize("origin", list(CONDITIONS))
def test_full_prefill_and_prefix_caching_are_exact_in_every_condition(
    evaluation_engine: Engine, town_dataset: Dataset, origin: str
) -> None:
    reference = prepared(evaluation_engine, town_dataset, origin)
    full = measure(evaluation_engine, reference, trial("full_recompute"))
    assert_exact(full, 1e-6)
    assert full.recomputed == 1.0
    assert_exact(measure(evaluation_engine, reference, trial("prefix_cache")), 1e-5)


def test_everything_recomputed_is_exact_and_nothing_costs_most(
    evaluation_engine: Engine, town_dataset: Dataset
) -> None:
    reference = prepared(evaluation_engine, town_dataset)
    everything = measure(evaluation_engine, reference, trial("default", 1.0))
    assert_exact(everything, 1e-6)
    assert everything.recomputed == 1.0
    nothing = measure(evaluation_engine, reference, trial("full_cache"))
    assert nothing.recomputed == 0.0
    half = measure(evaluation_engine, reference, trial("default", 0.5))
    assert nothing.kl > half.kl > 1e-5


@pytest.mark.parametrize("name", [name for name, one in METHODS.items() if one.takes_ratio])
def test_the_budget_is_kept(evaluation_engine: Engine, town_dataset: Dataset, name: str) -> None:
    reference = prepared(evaluation_engine, town_dataset)
    tokens = [chunk.tokens for chunk in reference.answer.stats.chunks]
    record = measure(evaluation_engine, reference, trial(name, 0.25))
    budget = sum(math.ceil(count / 4) for count in tokens)
    assert record.recomputed == pytest.approx(budget / sum(tokens))


def test_measuring_leaves_the_store_as_it_is(
    evaluation_engine: Engine, town_dataset: Dataset
) -> None:
    reference = prepared(evaluation_engine, town_dataset)
    before = {row.variant.variant_id for row in evaluation_engine.store.rows()}
    for name in ("full_recompute", "prefix_cache", "full_cache", "default"):
        measure(
            evaluation_engine, reference, trial(name, 0.2 if METHODS[name].takes_ratio else None)
        )
    evaluation_engine.write_back.wait_for([chunk.chunk_id for chunk in reference.question.passages])
    assert {row.variant.variant_id for row in evaluation_engine.store.rows()} == before


def test_the_margin_is_full_prefill_s_at_the_first_token_that_differs(
    evaluation_engine: Engine, town_dataset: Dataset
) -> None:
    reference = prepared(evaluation_engine, town_dataset)
    assert measure(evaluation_engine, reference, trial("full_recompute")).margin is None
    tokens = reference.answer.tokens
    vocabulary = reference.answer.logits.shape[-1]
    other_tokens = (*tokens[:1], (tokens[1] + 1) % vocabulary, *tokens[2:])
    other = replace(reference, answer=replace(reference.answer, tokens=other_tokens))
    departing = measure(evaluation_engine, other, trial("full_recompute"))
    highest = reference.answer.logits[1].double().softmax(-1).topk(2).values
    assert departing.margin == pytest.approx(float(highest[0] - highest[1]))
    assert replace(departing, margin=NEAR_TIE / 2).is_near_tie
    assert not replace(departing, margin=NEAR_TIE * 2).is_near_tie


def test_without_gold_answers_there_is_nothing_to_compare_with(
    evaluation_engine: Engine, town_dataset: Dataset
) -> None:
    question = replace(town_dataset.questions[0], answers=())
    found = measure(
        evaluation_engine,
        reference_of(evaluation_engine, question, answer_tokens=4),
        trial("full_recompute"),
    )
    assert (found.f1, found.reference_f1) == (None, None)


@contextmanager
def halved(question: EvaluationQuestion) -> Iterator[list[Chunk]]:
    """Keep the first half of each chunk and none of the second chunk, and take some time."""
    time.sleep(0.2)
    yield [
        Chunk(chunk.text[: len(chunk.text) // 2])
        for i, chunk in enumerate(question.passages)
        if i != 1
    ]


def test_a_preparation_s_time_counts_and_its_passages_are_answered_over(
    evaluation_engine: Engine, town_dataset: Dataset
) -> None:
    reference = prepared(evaluation_engine, town_dataset)
    method = replace(
        METHODS["full_recompute"],
        name="half",
        takes_ratio=True,
        prepare=lambda _engine, question, _ratio: halved(question),
    )
    found = measure(evaluation_engine, reference, Trial(method, 0.5))
    assert found.ttft_s > 0.2
    assert 0.3 < found.recomputed < 0.4  # half of two chunks of three, and their empty lines
    assert found.kl > 0


def test_names_are_known() -> None:
    assert [method.name for method in methods_named(["default", "full_cache", "default"])] == [
        "default",
        "full_cache",
    ]
    with pytest.raises(ConfigError, match=r"best: no such method; there are .*full_recompute"):
        methods_named(["best"])
    with pytest.raises(
        ConfigError, match=r"full: .*full_recompute \(prefill of the whole prompt\) or full_cache"
    ):
        methods_named(["full"])
