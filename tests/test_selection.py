"""Selectors: rankings of a chunk's tokens and the cut by a budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.selection import SELECTORS, TokenFacts, select, selector_named

SCORES = st.lists(st.floats(0, 10, width=32), min_size=1, max_size=60)


@given(SCORES, st.integers(-2, 80), st.sampled_from(sorted(SELECTORS)), st.booleans())
def test_a_selection_is_ascending_distinct_and_of_the_budgets_size(
    scores: list[float], budget: int, name: str, known: bool
) -> None:
    facts = TokenFacts(len(scores), np.array(scores, dtype=np.float32) if known else None, seed=3)
    chosen = select(facts, budget, selector_named(name))
    assert len(chosen) == max(0, min(budget, len(scores)))
    assert (np.diff(chosen) > 0).all()
    assert chosen.dtype == np.int64
    assert all(0 <= token < len(scores) for token in chosen)


@given(SCORES)
def test_craft_takes_no_token_before_a_more_contextual_one(scores: list[float]) -> None:
    facts = TokenFacts(len(scores), np.array(scores, dtype=np.float32), seed=0)
    for budget in range(len(scores)):
        chosen = set(select(facts, budget, SELECTORS["craft"]).tolist())
        left = set(range(len(scores))) - chosen
        assert not chosen or min(scores[t] for t in chosen) >= max(scores[t] for t in left)


def test_ties_go_to_the_earlier_token() -> None:
    facts = TokenFacts(4, np.ones(4, dtype=np.float32), seed=0)
    assert select(facts, 2, SELECTORS["craft"]).tolist() == [0, 1]


def test_without_scores_craft_takes_the_leading_tokens() -> None:
    facts = TokenFacts(10, None, seed=0)
    assert select(facts, 3, SELECTORS["craft"]).tolist() == [0, 1, 2]
    assert select(facts, 3, SELECTORS["leading"]).tolist() == [0, 1, 2]


def test_random_is_the_same_in_every_run_and_another_for_each_chunk() -> None:
    draws = [tuple(select(TokenFacts(100, None, seed=seed), 20, SELECTORS["random"])) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert draws[0] != tuple(range(20))


def test_an_unknown_selector_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'best'; choose one of craft, leading, random"):
        selector_named("best")
