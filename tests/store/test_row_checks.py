"""Rows are checked before use: alone, and against model and prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cachecraft_rag.store.row_checks import RowBounds, row_error, scores_are_wrong
from cachecraft_rag.types.captures import TokenScores
from cachecraft_rag.types.kv_layout import KVLayout
from cachecraft_rag.types.variants import Variant, VariantKey

LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=8, dtype="bfloat16")
BOUNDS = RowBounds(LAYOUT, 100, {"chunk": (10, "tokens")})


def make(prefix: tuple[str, ...] = ("system", "a"), tokens: int = 10) -> Variant:
    key = VariantKey("ns", "model", "chunk", prefix)
    numbers = (
        tokens,
        "tokens",
        (0.5,) * len(prefix),
        0.3,
        0.6,
        1.0,
        None,
        "raw",
        LAYOUT.nbytes(tokens),
        0.0,
        1e9,
    )
    return Variant(key, key.variant_id, *numbers)


def test_a_sound_row_passes() -> None:
    assert (row_error(make()), BOUNDS.flaw(make())) == ("", "")
    assert BOUNDS.with_layout(make()).payload_facts.layout == LAYOUT


@pytest.mark.parametrize(
    ("variant", "flaw"),
    [
        (make(tokens=9), "it says it has 9 tokens, and the chunk has 10"),
        (make(tokens=11), "it says it has 11 tokens, and the chunk has 10"),
        (replace(make(), nbytes=1), "it says it has 1 bytes"),
        (make(("system", "a", "a")), "a segment stands twice"),
        (make(tuple(map(str, range(91)))), "longer than the model's context"),
    ],
)
def test_rows_beyond_the_bounds_are_flawed(variant: Variant, flaw: str) -> None:
    assert flaw in BOUNDS.flaw(variant)


def test_another_tokenisation_is_left_to_the_planner() -> None:
    assert BOUNDS.flaw(replace(make(tokens=9), tokens_digest="other")) == ""
    assert "context" in BOUNDS.flaw(replace(make(tokens=10**12), tokens_digest="other", nbytes=1))


@pytest.mark.parametrize(
    "change",
    [
        {"exact_share": 1.5},
        {"exact_share": -0.1},
        {"exact_share": 1e308},
        {"cci": 1.1},
        {"cci": "0.6"},
        {"intra": 11.0},
        {"intra": None},
        {"inter": (0.1,)},
        {"inter": (0.1, float("nan"))},
        {"inter": (-0.1, 0.3)},
        {"reuse_frequency": 1e300},
        {"reuse_frequency": -1.0},
        {"created": -1.0},
        {"created": float("inf")},
        {"tokens": 10.0},
        {"tokens": True},
        {"tokens": 2**70},
        {"nbytes": 0},
        {"primed": 1},
        {"session": 7},
        {"tokens_digest": b"tokens"},
        {"codec": None},
        {"codec": "\ud800"},
        {"key": VariantKey("n", "f", "c", (1, 2))},
    ],
)
def test_fields_out_of_range_or_of_another_kind_are_unsound(change: dict[str, Any]) -> None:
    assert row_error(replace(make(), **change))


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), 3e38])
def test_token_scores_are_attention(value: float) -> None:
    right = np.linspace(0.0, 1.0, 10, dtype=np.float32)
    assert not scores_are_wrong(TokenScores(right), 10)
    assert scores_are_wrong(TokenScores(right), 9)
    wrong = right.copy()
    wrong[3] = value
    assert scores_are_wrong(TokenScores(wrong), 10)
