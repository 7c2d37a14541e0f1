"""Selectors choose the tokens of reused chunks that are recomputed.

A selector is a pure function from facts about a chunk-cache to a score for each of its tokens. The tokens with the
highest scores are recomputed, as many as the budget allows. To add a selector, write a function from `TokenFacts` to
scores and register it in `SELECTORS` as a `Selector`; `tests/planning/test_selectors.py` draws from all names. It does
not know the budget: a fact that it lacks becomes a field of `TokenFacts`, filled in `planner.with_selection` and in
`tests/planning/test_arrays.py`. What was tried and lost is in docs/decisions/choosing-tokens.md.
`ReuseMethod.selector` of `planning.config` then accepts the name, and so do flag, environment and file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cachecraft_rag.errors import ConfigError

# Weight of the question's attention relative to the attention at capture. Both scores are 1 on average. The value was
# the best of those tried on validation questions (docs/decisions/choosing-tokens.md).
QUESTION_WEIGHT = 0.25

BudgetScope = Literal["chunk", "prompt"]


@dataclass(frozen=True)
class TokenFacts:
    """Facts about one reused chunk, the input of a selector.

    tokens       number of tokens in the chunk
    seed         seed of random numbers, 0 or more; differs between chunks, equal in every run
    token_inter  float32 `[tokens]`: attention to earlier chunks at capture (eq. 14); None if no chunk stood before
    probed       float32 `[tokens]`: the probe's scores, 1 on average over all reused chunks; None without a probe
    """

    tokens: int
    seed: int
    token_inter: np.ndarray | None = None
    probed: np.ndarray | None = None


Score = Callable[[TokenFacts], np.ndarray | None]


@dataclass(frozen=True)
class Selector:
    """A method of choosing the tokens to recompute.

    score   returns float `[tokens]`, higher = recomputed first; None if it cannot score the chunk: then `leading` does
    probes  True if the selector needs the attention of the question (see `compute.stale_tokens.probe`)
    """

    score: Score
    probes: bool = False


def cache_craft(facts: TokenFacts) -> np.ndarray | None:
    """Return the score of eq. 14, float32 `[tokens]`: attention to earlier chunks at capture; None without any."""
    return facts.token_inter


def leading(facts: TokenFacts) -> np.ndarray:
    """Return EPIC's score, float64 `[tokens]`: first tokens first, because they served as attention sinks.

    >>> leading(TokenFacts(4, seed=0)).tolist()
    [1.0, 0.75, 0.5, 0.25]
    """
    return np.arange(facts.tokens, 0, -1) / facts.tokens


def random(facts: TokenFacts) -> np.ndarray:
    """Return random scores, float64 `[tokens]`: the RANDOM-RECOMP baseline of Cache-Craft §5.1.4."""
    return np.random.default_rng(facts.seed).random(facts.tokens)


def question(facts: TokenFacts) -> np.ndarray:
    """Return attention to earlier chunks at capture plus weighted attention from the question, float `[tokens]`.

    The first is 1 on average in the chunk, the second over all reused chunks, before its weight of 0.25. `leading`
    replaces a missing first one, 0 a missing second one. The question's attention alone is better on most questions but
    fails badly on some (docs/decisions/choosing-tokens.md).

    >>> facts = TokenFacts(4, seed=0, token_inter=np.array([0.5, 0.4, 0.1, 0.1]), probed=np.array([0, 0, 8.0, 0.1]))
    >>> select([facts], [2], SELECTORS["question"])[0].tolist()
    [0, 2]
    """
    attention = leading(facts) if facts.token_inter is None else facts.token_inter
    scores = attention / max(float(attention.mean()), 1e-12)
    if facts.probed is None:
        return scores
    return scores + QUESTION_WEIGHT * facts.probed


SELECTORS: Mapping[str, Selector] = MappingProxyType(
    {
        "cache_craft": Selector(cache_craft),
        "leading": Selector(leading),
        "random": Selector(random),
        "question": Selector(question, probes=True),
    }
)


def selector_named(name: str) -> Selector:
    """Return the selector with this name; for an unknown name raise ConfigError, which lists the known ones."""
    try:
        return SELECTORS[name]
    except KeyError:
        known_names = ", ".join(sorted(SELECTORS))
        raise ConfigError(f"unknown selector {name!r}; choose one of {known_names}") from None


def select(
    facts: Sequence[TokenFacts],
    budgets: Sequence[int],
    selector: Selector,
    *,
    budget_scope: BudgetScope = "chunk",
    excluded: Sequence[NDArray[np.int64]] = (),
    spent: Sequence[int] = (),
) -> list[NDArray[np.int64]]:
    """Return the tokens to recompute in each reused chunk: for each an int64 array of ascending offsets in the chunk.

    Args:
        facts: facts about each chunk.
        budgets: number of tokens to recompute in each chunk; 0: none, in both scopes.
        selector: gives each token its score, see `Selector`.
        budget_scope: "chunk" spends each chunk's budget in that chunk. "prompt" adds them and spends the sum on the
            best tokens of all chunks, their scores weighted by budget per token; unscored chunks keep their own budget.
        excluded: for each chunk, int64 offsets of the tokens that must not be chosen; () excludes none.
        spent: for each chunk, how much of its budget is already used, for tokens that are `excluded`; () means none.

    >>> few, many = np.array([0.1, 0.2, 0.1]), np.array([0.5, 0.3, 0.9])
    >>> facts = [TokenFacts(3, seed=0, token_inter=few), TokenFacts(3, seed=0, token_inter=many)]
    >>> [chosen.tolist() for chosen in select(facts, [1, 1], SELECTORS["cache_craft"])]
    [[1], [2]]
    >>> [chosen.tolist() for chosen in select(facts, [1, 1], SELECTORS["cache_craft"], budget_scope="prompt")]
    [[], [0, 2]]
    """
    chosen: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)] * len(facts)
    # (chunk, weighted scores) of chunks that share one budget
    pool: list[tuple[int, np.ndarray]] = []
    pooled_budget = 0

    for index, (chunk_facts, budget) in enumerate(zip(facts, budgets, strict=True)):
        remaining = budget - (spent[index] if spent else 0)
        if budget <= 0 or (budget_scope == "chunk" and remaining <= 0):
            continue

        selector_scores = selector.score(chunk_facts)
        scores = (
            leading(chunk_facts) if selector_scores is None else selector_scores.astype(np.float64)
        )
        if excluded:
            scores[excluded[index]] = -np.inf

        is_pooled = budget_scope != "chunk" and selector_scores is not None
        if is_pooled:
            pool.append((index, scores * (budget / chunk_facts.tokens)))
            pooled_budget += remaining
        else:
            chosen[index] = _highest(scores, max(0, remaining))

    if pool:
        pooled_scores = np.concatenate([scores for _, scores in pool])
        best = _highest(pooled_scores, max(0, pooled_budget))
        edges = np.cumsum([0, *(len(scores) for _, scores in pool)])
        cuts = np.searchsorted(best, edges)
        for place, (index, _) in enumerate(pool):
            chosen[index] = best[cuts[place] : cuts[place + 1]] - edges[place]
    return chosen


def _highest(scores: np.ndarray, budget: int) -> NDArray[np.int64]:
    """Return the indices of the `budget` highest scores, ascending; of equal scores the first ones.

    A score of -inf or NaN is never chosen.
    """
    candidates = np.flatnonzero(scores > -np.inf)
    if len(candidates) <= budget:
        return candidates
    if budget == 0:
        return candidates[:0]
    # a partition takes a tenth of the time of a sort
    values = scores[candidates]
    lowest = np.partition(values, -budget)[-budget]
    is_chosen = values > lowest
    ties = np.flatnonzero(values == lowest)
    is_chosen[ties[: budget - np.count_nonzero(is_chosen)]] = True
    chosen: NDArray[np.int64] = candidates[is_chosen]
    return chosen
