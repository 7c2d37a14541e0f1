"""The eviction score: what it prefers, and what a use adds to it."""

from __future__ import annotations

import pytest

from cachecraft_rag.store.eviction import eviction_score, reuse_gain, score_gain


def test_a_use_gains_at_most_one_for_each_token() -> None:
    assert reuse_gain(1.0, 50) == 1.0
    assert reuse_gain(0.25, 50) == 4.0
    assert reuse_gain(0.0, 50) == 50.0
    assert reuse_gain(0.0001, 50) == 50.0


def test_one_use_outranks_an_unused_one_and_an_exact_capture_an_inexact_one() -> None:
    scores = [
        eviction_score(reuse_frequency=frequency, exact_share=share)
        for frequency, share in [(0.0, 0.0), (0.0, 0.5), (0.0, 1.0), (1.5, 0.0), (1.5, 1.0), (4.0, 0.5)]
    ]
    assert scores == sorted(scores)
    assert len(set(scores)) == len(scores)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_gains_add_up_to_the_score(share: float) -> None:
    score = eviction_score(reuse_frequency=0.0, exact_share=share)
    for gain in (1.0, 2.5, 0.25):
        score += score_gain(gain, exact_share=share)
    assert score == pytest.approx(eviction_score(reuse_frequency=3.75, exact_share=share))
