"""The benchmark of the quality target asks every question and audits each answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import quality_target
from benchmarks.quality_target import StreamSettings, agreement_of, stream_of
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.dataset import Dataset
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.types.progress import Progress

QUESTIONS = 20
SETTINGS = StreamSettings(target=0.9, requests=QUESTIONS, answer_tokens=3)


def repeated(dataset: Dataset, count: int) -> Dataset:
    questions = tuple(dataset.questions[number % len(dataset.questions)] for number in range(count))
    return Dataset(dataset.name, dataset.documents, questions)


def test_each_question_is_asked_with_the_target_and_with_fixed_ratios_until_one_holds(
    tiny_decoder: Callable[..., Decoder], town_dataset: Dataset, tmp_path: Path
) -> None:
    shown: list[Progress] = []
    results = list(
        quality_target.measure(
            tiny_decoder("Llama"),
            repeated(town_dataset, QUESTIONS),
            tmp_path / "caches",
            SETTINGS,
            ratios=[1.0, 0.05],
            seed=0,
            progress=shown.append,
        )
    )
    controlled, *fixed = results
    assert controlled.fixed_ratio is None
    assert len(controlled.answers) == QUESTIONS
    assert controlled.answers[0].ratio == 0.15  # before the first audits

    # The smallest comes first, and the comparison ends with the one that holds the target in every tenth.
    assert [result.fixed_ratio for result in fixed] in ([0.05], [0.05, 1.0])
    assert [result.holds(SETTINGS) for result in fixed] == [False] * (len(fixed) - 1) + [True]
    for result in fixed:
        *held, last = map(agreement_of, result.tenths(QUESTIONS))
        assert min(held, default=1.0) >= 0.9
        assert (last >= 0.9) == result.holds(SETTINGS)
    assert shown[-1].done == shown[-1].total == QUESTIONS


def test_recomputing_every_token_agrees_at_every_place(
    tiny_decoder: Callable[..., Decoder], town_dataset: Dataset, tmp_path: Path
) -> None:
    settings = StreamSettings(target=0.9, requests=10, answer_tokens=3)
    *_, whole = quality_target.measure(
        tiny_decoder("Llama"),
        repeated(town_dataset, 10),
        tmp_path / "caches",
        settings,
        ratios=[1.0],
        seed=0,
        progress=lambda _: None,
    )
    assert whole.agreement.mean == 1.0
    assert whole.holds(settings)


def test_to_the_end_every_ratio_answers_every_question(
    tiny_decoder: Callable[..., Decoder], town_dataset: Dataset, tmp_path: Path
) -> None:
    # Without the option a ratio that misses the target ends early, and one that holds it is the last.
    settings = StreamSettings(target=0.9, requests=10, answer_tokens=3, to_the_end=True)
    controlled, low, whole = quality_target.measure(
        tiny_decoder("Llama"),
        repeated(town_dataset, 10),
        tmp_path / "caches",
        settings,
        ratios=[1.0, 0.05],
        seed=0,
        progress=lambda _: None,
    )
    assert [len(result.answers) for result in (controlled, low, whole)] == [10, 10, 10]
    assert (low.fixed_ratio, whole.fixed_ratio) == (0.05, 1.0)
    assert whole.holds(settings)


def test_a_stream_holds_each_question_once_in_random_order() -> None:
    stream = stream_of(None, passages=3, requests=240, seed=1)
    assert len({question.question_id for question in stream.questions}) == 240
    other = stream_of(None, passages=3, requests=240, seed=2)
    assert [question.question_id for question in stream.questions] != [
        question.question_id for question in other.questions
    ]
    known = {chunk.chunk_id for document in stream.documents for chunk in document}
    asked = {chunk.chunk_id for question in stream.questions for chunk in question.passages}
    assert asked <= known


def test_too_few_questions_and_odd_numbers_of_requests_are_refused() -> None:
    with pytest.raises(ConfigError, match="name a file of more with --data"):
        stream_of(None, passages=3, requests=250, seed=0)
    with pytest.raises(ConfigError, match="multiple of 10"):
        StreamSettings(target=0.98, requests=25, answer_tokens=4)
