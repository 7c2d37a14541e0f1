"""Selectors: which tokens of the reused chunks are recomputed.

A selector is a pure function from facts about a chunk-cache to a score for each of its tokens; the budget goes to
the highest. `SELECTORS` is the one registry; a new selector is a function and a line there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np

from cachecraft_rag.errors import ConfigError

QUESTION_WEIGHT = 0.25  # of the question's attention beside the attention at capture; both are 1 on average
BudgetScope = Literal["chunk", "prompt"]


@dataclass(frozen=True)
class TokenFacts:
    """Facts about a chunk for a selector.

    tokens       length of the chunk
    seed         for selectors that draw; differs from chunk to chunk, the same in every run
    token_inter  float32 `[tokens]`: attention of each token to the chunks before it at capture (eq. 14); None where
                 there were none
    probed       float32 `[tokens]`: the probe's score of each token, 1 on average over all reused chunks;
                 None where there was no probe
    """

    tokens: int
    seed: int
    token_inter: np.ndarray | None = None
    probed: np.ndarray | None = None


Score = Callable[[TokenFacts], np.ndarray | None]


@dataclass(frozen=True)
class Selector:
    """A way to choose tokens.

    score   float `[tokens]`, higher = recomputed first; None where it has no score for a chunk: then `leading` decides
    probes  True: it needs to see what the question attends to, see `compute.probe`
    """

    score: Score
    probes: bool = False


def cache_craft(facts: TokenFacts) -> np.ndarray | None:
    """Cache-Craft eq. 14: the most contextualised tokens first; no score where no chunk stood before at capture."""
    return facts.token_inter


def leading(facts: TokenFacts) -> np.ndarray:
    """EPIC's choice: a chunk's first tokens, which at capture took the role of an attention sink.

    >>> leading(TokenFacts(4, seed=0)).tolist()
    [1.0, 0.75, 0.5, 0.25]
    """
    return np.arange(facts.tokens, 0, -1) / facts.tokens


def random(facts: TokenFacts) -> np.ndarray:
    """The RANDOM-RECOMP baseline of Cache-Craft §5.1.4: any order."""
    return np.random.default_rng(facts.seed).random(facts.tokens)


def question(facts: TokenFacts) -> np.ndarray:
    """Attention from the token to other chunks at capture, and from the question to it now.

    Eq. 14's score (`leading` where no chunk stood before it) plus a quarter of the question's attention, each divided
    by its mean. The question alone is better on most questions and fails badly on some (docs/log.md).

    >>> facts = TokenFacts(4, seed=0, token_inter=np.array([0.5, 0.4, 0.1, 0.1]), probed=np.array([0, 0, 8.0, 0.1]))
    >>> select([facts], [2], SELECTORS["question"])[0].tolist()
    [0, 2]
    """
    inter = facts.token_inter if facts.token_inter is not None else leading(facts)
    scores = inter / max(float(inter.mean()), 1e-12)
    return scores if facts.probed is None else scores + QUESTION_WEIGHT * facts.probed


SELECTORS: Mapping[str, Selector] = MappingProxyType(
    {
        "cache_craft": Selector(cache_craft),
        "leading": Selector(leading),
        "random": Selector(random),
        "question": Selector(question, probes=True),
    }
)


def selector_named(name: str) -> Selector:
    """The selector of that name; ConfigError lists the known ones."""
    try:
        return SELECTORS[name]
    except KeyError:
        raise ConfigError(f"unknown selector {name!r}; choose one of {', '.join(sorted(SELECTORS))}") from None


def select(
    facts: Sequence[TokenFacts],
    budgets: Sequence[int],
    selector: Selector,
    *,
    budget_scope: BudgetScope = "chunk",
    done: Sequence[frozenset[int]] = (),
    spent: Sequence[int] = (),
) -> list[np.ndarray]:
    """The tokens to recompute of each reused chunk, ascending (int64).

    Args:
        facts, budgets: for each chunk, its facts and the number of tokens to recompute.
        budget_scope: "chunk" keeps to each chunk's budget. "prompt" adds the budgets up and spends them on the best
            tokens of all chunks; a chunk's scores count in proportion to its budget per token (for eq. 14's budgets:
            to its CFO), so a chunk that needs no fixing gets none. Chunks without a score keep their own.
        done: for each chunk, tokens that must not be chosen.
        spent: for each chunk, the part of its budget that is used up.

    >>> few, many = np.array([0.1, 0.2, 0.1]), np.array([0.5, 0.3, 0.9])
    >>> facts = [TokenFacts(3, seed=0, token_inter=few), TokenFacts(3, seed=0, token_inter=many)]
    >>> [chosen.tolist() for chosen in select(facts, [1, 1], SELECTORS["cache_craft"])]
    [[1], [2]]
    >>> [chosen.tolist() for chosen in select(facts, [1, 1], SELECTORS["cache_craft"], budget_scope="prompt")]
    [[], [0, 2]]
    """
    chosen: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * len(facts)
    pool: list[tuple[int, np.ndarray]] = []
    for index, (known, budget) in enumerate(zip(facts, budgets, strict=True)):
        left = budget - (spent[index] if spent else 0)
        if budget <= 0 or (budget_scope == "chunk" and left <= 0):
            continue
        scores = selector.score(known)
        own = leading(known) if scores is None else scores.astype(np.float64)
        own[sorted(done[index]) if done else []] = -np.inf
        if scores is None or budget_scope == "chunk":
            chosen[index] = _best(own, max(0, left))
        else:
            pool.append((index, own * (budget / known.tokens)))
    if pool:
        left = sum(budgets[index] - (spent[index] if spent else 0) for index, _ in pool)
        best = _best(np.concatenate([scores for _, scores in pool]), max(0, left))
        edges = np.cumsum([0, *(len(scores) for _, scores in pool)])
        for (index, _), start, stop in zip(pool, edges, edges[1:], strict=False):
            chosen[index] = best[(best >= start) & (best < stop)] - start
    return chosen


def _best(scores: np.ndarray, budget: int) -> np.ndarray:
    """Indices of the `budget` highest scores, ascending; -inf is never chosen."""
    order = np.argsort(-scores, kind="stable")[:budget]
    return np.sort(order[scores[order] > -np.inf]).astype(np.int64)
