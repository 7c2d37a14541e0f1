"""Unmarked prompts against documents: what is measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.plain_prompts import (
    DOCUMENTS,
    TEMPLATES,
    TOOL_RESULT,
    as_tool_result,
    first_time,
    form_named,
    measure,
)
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


@pytest.mark.parametrize("name", [DOCUMENTS, *TEMPLATES, TOOL_RESULT])
def test_the_same_passages_are_reused_as_documents_and_in_a_prompt(
    evaluation_engine: Engine, name: str
) -> None:
    form = form_named(name)
    stale = measure(
        evaluation_engine, QUESTION, form, replace(PLAIN, recompute_ratio=0.0), answer_tokens=4
    )
    exact = measure(
        evaluation_engine, QUESTION, form, replace(PLAIN, recompute_ratio=1.0), answer_tokens=4
    )
    # The last 32 tokens of the last message are always computed; in a tool's result they belong to the last passage.
    assert stale.reused > (0.5 if name == TOOL_RESULT else 0.9)
    assert stale.kl > 1e-4 > abs(exact.kl)
    assert exact.right == exact.full_right == stale.full_right


def test_forms_can_be_compared_along_the_same_answer(evaluation_engine: Engine) -> None:
    config = replace(PLAIN, recompute_ratio=0.0)
    own, gold = (
        measure(
            evaluation_engine,
            QUESTION,
            form_named(DOCUMENTS),
            config,
            answer_tokens=4,
            along_gold=along_gold,
        )
        for along_gold in (False, True)
    )
    assert own.reused == gold.reused
    assert own.kl != gold.kl
    assert gold.kl > 1e-4


def test_a_tool_result_holds_the_passages_after_the_call(evaluation_engine: Engine) -> None:
    asked = as_tool_result(QUESTION)
    prompt = evaluation_engine.prompts_with(asked.tools).build(
        asked.text, asked.chunks, history=asked.history
    )
    text = evaluation_engine.decoder.tokenizer.decode(prompt.token_ids)
    called = text.index(QUESTION.text, text.index(QUESTION.text) + 1)
    assert called < text.index(PASSAGES[0].text) < text.index(PASSAGES[2].text.strip())


def test_the_first_time_is_timed_in_pairs(evaluation_engine: Engine) -> None:
    ratio = first_time(evaluation_engine, QUESTION, form_named("langchain"), PLAIN, pairs=2)
    assert ratio > 0.0
