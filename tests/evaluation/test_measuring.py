"""One measurement: methods that are exact measure as exact, budgets are kept, and compressors are charged."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.compression.mapreduce import MapReduce
from cachecraft_rag.evaluation.formats.dataset import Dataset
from cachecraft_rag.evaluation.quality.conditions import CONDITIONS, origins_of
from cachecraft_rag.evaluation.quality.measuring import Record, Reference, Trial, measure, reference_of, trials_of
from cachecraft_rag.evaluation.quality.methods import METHODS, methods_named
from cachecraft_rag.types import Chunk


def trial(name: str, ratio: float | None = None) -> Trial:
    return Trial(METHODS[name], ratio)


def prepared(engine: Engine, dataset: Dataset, origin: str = "unrelated") -> Reference:
    """The third question's reference, the questions before it in the store."""
    origins = origins_of(CONDITIONS[origin], engine, dataset, seed=0, answer_tokens=8)
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
    found = trials_of(methods_named(["craft", "full_cache"]), [0.3, 0.15, 0.3])
    assert [one.label for one in found] == ["craft@0.15", "craft@0.3", "full_cache"]
    assert [one.config.recompute_ratio for one in found] == [0.15, 0.3, 0.0]
    assert trials_of(methods_named(["full_cache"]), [])[0].ratio is None


def test_ratios_out_of_range_or_missing_are_refused() -> None:
    for ratio in (0.0, 1.01):
        with pytest.raises(ConfigError, match="a ratio must lie above 0"):
            trials_of(methods_named(["craft"]), [ratio])
    with pytest.raises(ConfigError, match="craft need a recompute ratio"):
        trials_of(methods_named(["craft"]), [])


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
    everything = measure(evaluation_engine, reference, trial("craft", 1.0))
    assert_exact(everything, 1e-6)
    assert everything.recomputed == 1.0
    nothing = measure(evaluation_engine, reference, trial("full_cache"))
    assert nothing.recomputed == 0.0
    half = measure(evaluation_engine, reference, trial("craft", 0.5))
    assert nothing.kl > half.kl > 1e-4


@pytest.mark.parametrize("name", [name for name, one in METHODS.items() if one.takes_ratio and not one.compression])
def test_the_budget_is_kept(evaluation_engine: Engine, town_dataset: Dataset, name: str) -> None:
    reference = prepared(evaluation_engine, town_dataset)
    tokens = [chunk.tokens for chunk in reference.answer.stats.chunks]
    found = measure(evaluation_engine, reference, trial(name, 0.25))
    assert found.recomputed == pytest.approx(sum(-(-one // 4) for one in tokens) / sum(tokens))


def test_measuring_leaves_the_store_as_it_is(evaluation_engine: Engine, town_dataset: Dataset) -> None:
    reference = prepared(evaluation_engine, town_dataset)
    before = {row.variant.variant_id for row in evaluation_engine.store.rows()}
    for name in ("full_recompute", "prefix_cache", "full_cache", "default"):
        measure(evaluation_engine, reference, trial(name, 0.2 if METHODS[name].takes_ratio else None))
    evaluation_engine.write_back.wait_for([chunk.chunk_id for chunk in reference.question.passages])
    assert {row.variant.variant_id for row in evaluation_engine.store.rows()} == before


def test_without_gold_answers_there_is_nothing_to_compare_with(
    evaluation_engine: Engine, town_dataset: Dataset
) -> None:
    question = replace(town_dataset.questions[0], answers=())
    found = measure(
        evaluation_engine, reference_of(evaluation_engine, question, answer_tokens=4), trial("full_recompute")
    )
    assert (found.f1, found.jaccard, found.reference_f1, found.reference_jaccard) == (None,) * 4


class Halving:
    """Keeps the first half of each chunk, none of the second chunk, and takes its time."""

    def compress(self, question: str, chunks: Sequence[Chunk], ratio: float) -> tuple[Chunk, ...]:
        """See `Compressor`."""
        time.sleep(0.2)
        return tuple(Chunk("" if i == 1 else chunk.text[: len(chunk.text) // 2]) for i, chunk in enumerate(chunks))


def test_a_compressor_s_time_counts_and_empty_chunks_are_left_out(
    evaluation_engine: Engine, town_dataset: Dataset
) -> None:
    reference = prepared(evaluation_engine, town_dataset)
    found = measure(evaluation_engine, reference, trial("lingua2", 0.5), compressor=Halving())
    assert found.ttft_s > 0.2
    assert 0.3 < found.recomputed < 0.4  # half of two chunks of three, and their empty lines
    assert found.kl > 0


def test_mapreduce_runs_over_the_model_itself(evaluation_engine: Engine, town_dataset: Dataset) -> None:
    reference = prepared(evaluation_engine, town_dataset)
    found = measure(evaluation_engine, reference, trial("mapreduce", 0.3), compressor=MapReduce(evaluation_engine))
    assert found.recomputed < 0.5
    assert_exact(
        measure(evaluation_engine, reference, trial("mapreduce", 1.0), compressor=MapReduce(evaluation_engine)), 1e-6
    )


def test_a_compressing_method_without_compressor_is_refused(evaluation_engine: Engine, town_dataset: Dataset) -> None:
    reference = reference_of(evaluation_engine, town_dataset.questions[0], answer_tokens=4)
    with pytest.raises(ConfigError, match="needs its compressor"):
        measure(evaluation_engine, reference, trial("lingua2", 0.5))
