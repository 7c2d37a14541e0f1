"""Prompts that nobody marked against documents: what is measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.plain_prompts import TEMPLATES, first_time, measure
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.evaluation.dataset import EvaluationQuestion
from cachecraft_rag.evaluation.measuring import PLAIN
from cachecraft_rag.types.documents import Chunk

PASSAGES = tuple(
    Chunk(
        f"The mill of {town} dates from {year} and leaks, which nobody in {town} has minded since {year + 40}. "
        * 2
    )
    for town, year in (("Arden", 1701), ("Brook", 1802), ("Corry", 1903))
)
QUESTION = EvaluationQuestion(
    "q", "When was the mill of Brook built, and does it leak?", PASSAGES, ("1802",)
)


@pytest.mark.parametrize("template", [None, *TEMPLATES.values()])
def test_the_same_passages_are_reused_as_documents_and_in_a_prompt(
    evaluation_engine: Engine, template: str | None
) -> None:
    stale = measure(
        evaluation_engine, QUESTION, template, replace(PLAIN, recompute_ratio=0.0), answer_tokens=4
    )
    exact = measure(
        evaluation_engine, QUESTION, template, replace(PLAIN, recompute_ratio=1.0), answer_tokens=4
    )
    assert stale.reused > 0.9
    assert stale.kl > 1e-4 > abs(exact.kl)
    assert exact.right == exact.full_right == stale.full_right


def test_the_first_time_is_timed_in_pairs(evaluation_engine: Engine) -> None:
    ratio = first_time(evaluation_engine, QUESTION, TEMPLATES["langchain"], PLAIN, pairs=2)
    assert ratio > 0.0
