"""Selectors: rankings of a chunk's tokens and the cut by a budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.planning.selectors import SELECTORS, TokenFacts, select, selector_named

SCORES = st.lists(st.floats(0, 10, width=32), min_size=1, max_size=60)


def chosen_of(facts: TokenFacts, budget: int, name: str) -> list[int]:
    return select([facts], [budget], selector_named(name))[0].tolist()


def facts_of(scores: list[float], *, seed: int = 0) -> TokenFacts:
    return TokenFacts(len(scores), seed, token_inter=np.array(scores, dtype=np.float32))


@given(
    SCORES, st.integers(-2, 80), st.sampled_from(sorted(SELECTORS)), st.booleans(), st.booleans()
)
def test_a_selection_is_ascending_distinct_and_of_the_budgets_size(
    scores: list[float], budget: int, name: str, known: bool, seen: bool
) -> None:
    array = np.array(scores, dtype=np.float32)
    facts = TokenFacts(
        len(scores), 3, token_inter=array if known else None, probed=array[::-1] if seen else None
    )
    chosen = select([facts], [budget], selector_named(name))[0]
    assert len(chosen) == max(0, min(budget, len(scores)))
    assert (np.diff(chosen) > 0).all()
    assert chosen.dtype == np.int64
    assert all(0 <= token < len(scores) for token in chosen)


@given(SCORES)
def test_no_token_is_taken_before_one_with_a_higher_score(scores: list[float]) -> None:
    for budget in range(len(scores)):
        chosen = set(chosen_of(facts_of(scores), budget, "cache_craft"))
        left = set(range(len(scores))) - chosen
        assert not chosen or min(scores[t] for t in chosen) >= max(scores[t] for t in left)


@given(
    st.lists(SCORES, min_size=1, max_size=5), st.floats(0, 1), st.sampled_from(sorted(SELECTORS))
)
def test_sharing_spends_the_same_budget(chunks: list[list[float]], ratio: float, name: str) -> None:
    facts = [facts_of(scores, seed=place) for place, scores in enumerate(chunks)]
    budgets = [int(ratio * len(scores)) for scores in chunks]
    shared = select(facts, budgets, selector_named(name), budget_scope="prompt")
    assert sum(map(len, shared)) == sum(budgets)
    for chosen, budget in zip(shared, budgets, strict=True):
        assert len(chosen) == 0 or budget > 0  # a chunk that needs no fixing gets none


def test_what_is_done_is_not_chosen_again() -> None:
    facts = [facts_of([0.9, 0.8, 0.7, 0.6]), facts_of([0.5, 0.4])]
    excluded = [np.array([0, 1]), np.array([0])]
    own = select(facts, [1, 1], SELECTORS["cache_craft"], excluded=excluded)
    assert [chosen.tolist() for chosen in own] == [[2], [1]]
    # Both budgets are half a chunk.
    shared = select(
        facts, [2, 1], SELECTORS["cache_craft"], budget_scope="prompt", excluded=excluded
    )
    assert [chosen.tolist() for chosen in shared] == [[2, 3], [1]]


def test_what_one_chunk_has_overspent_the_others_do_without() -> None:
    facts = [facts_of([0.9, 0.8, 0.7, 0.6]), facts_of([0.5, 0.4, 0.3, 0.2])]
    excluded = [np.array([0, 1, 2]), np.empty(0, np.int64)]
    shared = select(
        facts,
        [2, 2],
        SELECTORS["cache_craft"],
        budget_scope="prompt",
        excluded=excluded,
        spent=[3, 0],
    )
    assert [chosen.tolist() for chosen in shared] == [[3], []]  # four in all, three are gone
    own = select(facts, [2, 2], SELECTORS["cache_craft"], excluded=excluded, spent=[3, 0])
    assert [chosen.tolist() for chosen in own] == [[], [0, 1]]


def test_ties_go_to_the_earlier_token() -> None:
    assert chosen_of(facts_of([1.0] * 4), 2, "cache_craft") == [0, 1]


@pytest.mark.parametrize("name", ["cache_craft", "leading", "question"])
def test_without_scores_the_leading_tokens_are_taken(name: str) -> None:
    assert chosen_of(TokenFacts(10, 0), 3, name) == [0, 1, 2]


def test_the_question_and_the_capture_both_count() -> None:
    inter, seen = np.array([4, 0, 0, 0], dtype=np.float32), np.array([0, 0, 0, 4], dtype=np.float32)
    facts = TokenFacts(4, 0, token_inter=inter, probed=seen)
    assert chosen_of(facts, 2, "question") == [0, 3]


def test_random_is_the_same_in_every_run_and_another_for_each_chunk() -> None:
    draws = [tuple(chosen_of(TokenFacts(100, seed), 20, "random")) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert draws[0] != tuple(range(20))


def test_an_unknown_selector_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'best'; choose one of .*cache_craft, .*leading"):
        selector_named("best")
