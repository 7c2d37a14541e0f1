"""Metrics against values worked out by hand, and against their defining properties."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.metrics import (
    divergence,
    normalised_words,
    rouge_l,
    squad_f1,
)


def test_words_lose_case_punctuation_articles_and_spaces_in_this_order() -> None:
    assert normalised_words("  An apple,\tA-Team; the\nthesis ") == ["apple", "ateam", "thesis"]
    assert normalised_words("U.S.A.") == ["usa"]
    # punctuation is ASCII's, as in SQuAD
    assert normalised_words("«Привет», 日本 — the") == ["«привет»", "日本", "—"]


@pytest.mark.parametrize(
    ("prediction", "golds", "f1"),
    [
        ("Denver Broncos", ["the Denver Broncos!"], 1.0),
        ("24", ["25"], 0.0),
        ("red red fox", ["red fox fox"], 2 / 3),  # a bag, not a set
        ("six of them were there", ["six", "of them six"], 0.75),  # 3 of 5 and of 3
        ("the", [""], 1.0),
        ("", ["something"], 0.0),
        ("", ["something", "the"], 1.0),
    ],
)
def test_answers_against_golds(prediction: str, golds: list[str], f1: float) -> None:
    assert squad_f1(prediction, golds) == pytest.approx(f1)


def test_no_gold_answer_is_an_error_and_not_a_zero() -> None:
    with pytest.raises(ValueError, match="empty"):
        squad_f1("anything", [])


@pytest.mark.parametrize(
    ("reference", "prediction", "expected"),
    [
        ("", "", 1.0),
        (" \n", "", 1.0),
        ("something", "", 0.0),
        ("水は青い", "水は青い", 1.0),  # no token that rouge_score knows, and yet the same
        ("He was running races", "he runs a race", 0.75),  # he run race, 3 of 4 and 3 of 4 words
        ("a b c d", "d c b a", 0.25),  # order counts
    ],
)
def test_rouge_l(reference: str, prediction: str, expected: float) -> None:
    assert rouge_l(reference, prediction) == pytest.approx(expected)


def test_rouge_l_without_its_package_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(ConfigError, match=r"cachecraft-rag\[eval\]"):
        rouge_l("one answer", "another")


def test_divergence_is_of_the_distributions_and_not_symmetric() -> None:
    generator = torch.Generator().manual_seed(3)
    reference, other = torch.randn(2, 7, 50, generator=generator)
    kl, top1 = divergence(reference, other)
    by_torch = torch.nn.functional.kl_div(
        other.log_softmax(-1), reference.log_softmax(-1), reduction="batchmean", log_target=True
    )
    assert kl == pytest.approx(float(by_torch), rel=1e-5)
    assert (
        top1
        == sum(int(a.argmax() == b.argmax()) for a, b in zip(reference, other, strict=True)) / 7
    )
    assert divergence(other, reference)[0] != pytest.approx(kl, rel=1e-3)
    # a shift changes nothing
    assert divergence(reference, reference + 5.0) == (pytest.approx(0.0, abs=1e-12), 1.0)


def test_divergence_sees_what_float32_would_lose() -> None:
    reference = torch.zeros(1, 49_152)
    other = reference.clone()
    # variance / 2 of one logit among many: 1e-6 · 1/V · (1 − 1/V) / 2, below float32's rounding
    other[0, 0] = 1e-3
    assert divergence(reference, other)[0] == pytest.approx(1e-6 / 49_152 / 2, rel=1e-2)


def test_divergence_where_tokens_are_ruled_out() -> None:
    ruled_out = torch.tensor([[0.0, 0.0, -math.inf]])
    assert divergence(ruled_out, torch.zeros(1, 3))[0] == pytest.approx(math.log(1.5))
    assert divergence(ruled_out, ruled_out) == (0.0, 1.0)
    assert divergence(torch.zeros(1, 3), ruled_out)[0] == math.inf


@pytest.mark.parametrize("shape", [(2, 4), (3,), (0, 5)])
def test_divergence_refuses_what_does_not_compare(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="cannot compare logits"):
        divergence(torch.zeros(3, 4) if shape == (2, 4) else torch.zeros(shape), torch.zeros(shape))
