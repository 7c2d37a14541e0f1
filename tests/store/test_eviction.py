"""The eviction score: what it prefers, what a use adds to it, and how it ages."""

from __future__ import annotations

import math

import pytest

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.store.eviction import POLICIES, Standing, Use, policy_named, worth, worth_gained


def standing(*uses: float, tokens: int = 100, nbytes: int = 400, exact_share: float = 1.0) -> Standing:
    """Of a chunk with uses of these CFOs."""
    used = Use(0.0, 0.0)
    for cfo in uses:
        used += Use.of(cfo, tokens)
    return Standing("chunk", "variant", tokens, nbytes, exact_share, used)


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


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_gains_add_up_to_the_worth(share: float) -> None:
    found = worth(saved=0.0, exact_share=share)
    for gain in (1.0, 2.5, 0.25):
        found += worth_gained(gain, exact_share=share)
    assert found == pytest.approx(worth(saved=3.75, exact_share=share))


def test_one_exact_hit_on_a_long_chunk_does_not_outweigh_sixty_ordinary_ones() -> None:
    ordinary = [0.15] * 60
    assert score(0.0, tokens=1000, nbytes=4000) < score(*ordinary) / 10
    assert score(0.0, tokens=1000, policy="f_r") > score(*ordinary, policy="f_r")  # as published


def test_what_takes_fewer_bytes_for_the_same_tokens_stays_longer() -> None:
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
