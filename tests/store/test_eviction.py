"""The eviction score: what it prefers, what a use adds to it, and how it ages."""

from __future__ import annotations

import math

import pytest

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.store.eviction import POLICIES, Use, VariantFacts, policy_named, worth


def standing(
    *uses: float, tokens: int = 100, nbytes: int = 400, exact_share: float = 1.0
) -> VariantFacts:
    """Of a chunk with uses of these CFOs."""
    used = Use(0.0, 0.0)
    for cfo in uses:
        used += Use.of(cfo, tokens)
    return VariantFacts("chunk", "variant", tokens, nbytes, exact_share, used)


def score(*uses: float, policy: str = "saving", clock: float = 0.0, **facts: float) -> float:
    return policy_named(policy).score(standing(*uses, **facts), clock)


def test_a_use_gains_at_most_one_for_each_token() -> None:
    assert Use.of(1.0, 50) == Use(1.0, 0.0)
    assert Use.of(0.25, 50) == Use(4.0, 0.75)
    assert Use.of(0.0, 50) == Use(50.0, 1.0)
    assert Use.of(0.0001, 50) == Use(50.0, 0.9999)
    assert Use.of(4.0, 50) == Use.of(math.nan, 50) == Use(1.0, 0.0)


def test_one_use_outranks_an_unused_one_and_an_exact_capture_an_inexact_one() -> None:
    scores = [
        worth(saved=saved, exact_share=share)
        for saved, share in [(0.0, 0.0), (0.0, 0.5), (0.0, 1.0), (1.5, 0.0), (1.5, 1.0), (4.0, 0.5)]
    ]
    assert scores == sorted(scores)
    assert len(set(scores)) == len(scores)


def test_one_exact_hit_on_a_long_chunk_does_not_outweigh_sixty_ordinary_ones() -> None:
    ordinary = [0.15] * 60
    assert score(0.0, tokens=1000, nbytes=4000) < score(*ordinary) / 10
    assert score(0.0, tokens=1000, policy="f_r") > score(*ordinary, policy="f_r")  # as published


def test_smaller_captures_of_equally_many_tokens_stay_longer() -> None:
    assert score(0.2, nbytes=400) == 4 * score(0.2, nbytes=1600)


def test_scores_age_with_the_clock_and_the_published_one_does_not() -> None:
    busy_once = score(*[0.1] * 9)
    assert score(0.1, clock=0.0) < busy_once < score(0.1, clock=busy_once)
    assert score(0.1, policy="f_r", clock=99.0) == score(0.1, policy="f_r", clock=0.0) == 10.0


def test_policies_by_name() -> None:
    assert set(POLICIES) == {"saving", "f_r"}
    assert all(policy.name == name for name, policy in POLICIES.items())
    with pytest.raises(ConfigError, match="saving, f_r"):
        policy_named("lru")
