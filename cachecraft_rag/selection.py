"""Selectors: which tokens of a reused chunk are recomputed.

A selector is a pure function from what is known of a chunk-cache to a ranking of its tokens, best first; the budget
is cut from the front of the ranking. `SELECTORS` is the one registry; a new selector is a function and a line there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from cachecraft_rag.errors import ConfigError


@dataclass(frozen=True)
class TokenFacts:
    """What a selector may look at.

    tokens       length of the chunk
    token_inter  float32 `[tokens]`: attention of each token to the chunks before it at birth (eq. 14); None when none
                 stood there
    seed         for selectors that draw; differs from chunk to chunk, the same in every run
    """

    tokens: int
    token_inter: np.ndarray | None
    seed: int


Selector = Callable[[TokenFacts], np.ndarray]


def craft(facts: TokenFacts) -> np.ndarray:
    """Cache-Craft eq. 14: the most contextualised tokens first; leading tokens where nothing stood before the chunk
    at birth.

    >>> craft(TokenFacts(3, np.array([0.1, 0.9, 0.5], dtype=np.float32), seed=0)).tolist()
    [1, 2, 0]
    >>> craft(TokenFacts(3, None, seed=0)).tolist()
    [0, 1, 2]
    """
    if facts.token_inter is None:
        return leading(facts)
    return np.argsort(-facts.token_inter, kind="stable")


def leading(facts: TokenFacts) -> np.ndarray:
    """EPIC's choice: a chunk's first tokens, which at birth took the role of an attention sink."""
    return np.arange(facts.tokens)


def random(facts: TokenFacts) -> np.ndarray:
    """The RANDOM-RECOMP baseline of Cache-Craft §5.1.3: any order."""
    return np.random.default_rng(facts.seed).permutation(facts.tokens)


SELECTORS: Mapping[str, Selector] = MappingProxyType({"craft": craft, "leading": leading, "random": random})


def selector_named(name: str) -> Selector:
    """The selector of that name; ConfigError lists the known ones."""
    try:
        return SELECTORS[name]
    except KeyError:
        raise ConfigError(f"unknown selector {name!r}; choose one of {', '.join(sorted(SELECTORS))}") from None


def select(facts: TokenFacts, budget: int, selector: Selector) -> np.ndarray:
    """The `budget` best-ranked tokens, ascending (int64), each at most once.

    >>> select(TokenFacts(4, np.array([0.0, 0.3, 0.1, 0.9], dtype=np.float32), seed=0), 2, craft).tolist()
    [1, 3]
    """
    return np.sort(selector(facts)[: max(0, min(budget, facts.tokens))]).astype(np.int64)
