"""Cache-Craft's equations on cases worked out by hand, and their bounds on all others."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.planning.scoring import (
    adjusted_overlap,
    context_impact,
    fix_overhead,
    order_penalty,
    prefix_overlap,
)

NAMES = [f"chunk {n}" for n in range(8)]
ATTENTION = st.floats(0, 1e6)


@st.composite
def prefixes(draw: st.DrawFn) -> tuple[list[float], list[str], dict[str, int]]:
    """Inter attention, the old prefix, and where the chunks of the new one stand."""
    old = draw(st.lists(st.sampled_from(NAMES), unique=True))
    new = draw(st.lists(st.sampled_from(NAMES), unique=True))
    inter = draw(st.lists(ATTENTION, min_size=len(old), max_size=len(old)))
    return inter, old, {name: place for place, name in enumerate(new, start=1)}


@pytest.mark.parametrize(
    ("inter", "old", "new", "beta"),
    [
        ([0.3, 0.1], ["a", "b"], {"a": 1, "c": 2}, 0.75),  # .3 / .4
        # all there, elsewhere: that is γ's concern
        ([0.3, 0.1], ["a", "b"], {"b": 2, "a": 7}, 1.0),
        ([0.3, 0.1], ["a", "b"], {}, 0.0),
        ([0.3, 0.1], ["a", "b"], {"c": 1}, 0.0),
        ([], [], {}, 1.0),  # trap 3: 0/0
        ([], [], {"a": 1}, 0.0),
        ([0.0, 0.0], ["a", "b"], {"c": 1}, 1.0),  # it looked at nothing of what is gone
    ],
)
def test_prefix_overlap_eq_6(
    inter: list[float], old: list[str], new: dict[str, int], beta: float
) -> None:
    assert prefix_overlap(inter, old, new) == pytest.approx(beta)


def test_an_overlap_needs_a_number_for_each_chunk() -> None:
    with pytest.raises(ValueError, match="zip"):
        prefix_overlap([0.3], ["a", "b"], {"a": 1})


@pytest.mark.parametrize(
    ("old", "new", "gamma"),
    [
        ("abcd", "abcd", 0.0),
        ("abcd", "dcba", 1.0),
        ("abcd", "abdc", 1 / 6),  # one of six pairs
        ("abcd", "bxcya", 2 / 3),  # of ab, ac, bc the first two
        ("ab", "a", 0.0),  # trap 4: fewer than two in common
        ("ab", "xy", 0.0),
        ("", "ab", 0.0),
    ],
)
def test_order_penalty_eq_7(old: str, new: str, gamma: float) -> None:
    # places need not be next to each other
    places = {chunk: 10 * place for place, chunk in enumerate(new)}
    assert order_penalty(list(old), places) == pytest.approx(gamma)


def test_adjusted_overlap_eq_8() -> None:
    assert adjusted_overlap(0.5, 0.0) == 0.5
    assert adjusted_overlap(0.5, 1.0) == 0.0
    assert adjusted_overlap(0.9, 1 / 3) == pytest.approx(0.6)


def test_context_impact_eq_9_to_11() -> None:
    # a = 4/(5·10) + 3/(5·20) = .11; b = 5.5/5² = .22; sigmoid(.5)
    found = context_impact(inter=[4.0, 3.0], prefix_tokens=[10, 20], intra=5.5, tokens=5)
    assert found == pytest.approx(1 / (1 + math.exp(-0.5)))


def test_context_impact_is_never_below_one_half() -> None:
    # Trap 2: a/b is never negative. α has to be calibrated with that in mind.
    assert context_impact(inter=[0.0], prefix_tokens=[10], intra=5.0, tokens=5) == 0.5
    assert fix_overhead(alpha=0.3, cci=0.5, adjusted=0.0) == pytest.approx(0.15)


def test_context_impact_of_a_single_token() -> None:
    assert context_impact(inter=[0.5], prefix_tokens=[10], intra=0.0, tokens=1) == 1.0
    assert context_impact(inter=[], prefix_tokens=[], intra=0.0, tokens=1) == 0.5
    # no overflow
    assert context_impact(inter=[1e9], prefix_tokens=[1], intra=1e-9, tokens=1) == pytest.approx(
        1.0
    )


@pytest.mark.parametrize(
    ("alpha", "cci", "adjusted", "cfo"),
    [
        (1.0, 0.6, 0.5, 0.3),
        (3.0, 0.6, 0.0, 1.0),
        (0.0, 1.0, 0.0, 0.0),
        (2.0, 0.6, 1.0, 0.0),
        (2.0, 0.5, 0.0, 1.0),
    ],
)
def test_fix_overhead_eq_12_is_clipped(
    alpha: float, cci: float, adjusted: float, cfo: float
) -> None:
    assert fix_overhead(alpha=alpha, cci=cci, adjusted=adjusted) == pytest.approx(cfo)


@given(prefixes(), ATTENTION, st.integers(1, 2000), st.floats(0, 100))
def test_every_score_is_a_share(
    prefix: tuple[list[float], list[str], dict[str, int]], intra: float, tokens: int, alpha: float
) -> None:
    inter, old, new = prefix
    beta, gamma = prefix_overlap(inter, old, new), order_penalty(old, new)
    adjusted = adjusted_overlap(beta, gamma)
    cci = context_impact(inter=inter, prefix_tokens=[7] * len(inter), intra=intra, tokens=tokens)
    cfo = fix_overhead(alpha=alpha, cci=cci, adjusted=adjusted)
    assert 0 <= beta <= 1
    assert 0 <= gamma <= 1
    assert 0 <= adjusted <= beta
    assert 0.5 <= cci <= 1
    assert 0 <= cfo <= 1


@given(prefixes())
def test_the_same_prefix_again_needs_no_fixing(
    prefix: tuple[list[float], list[str], dict[str, int]],
) -> None:
    inter, old, _ = prefix
    same = {name: place for place, name in enumerate(old)}
    adjusted = adjusted_overlap(prefix_overlap(inter, old, same), order_penalty(old, same))
    assert fix_overhead(alpha=1.0, cci=1.0, adjusted=adjusted) == pytest.approx(0.0, abs=1e-9)
