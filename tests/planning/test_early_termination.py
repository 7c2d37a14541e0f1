"""Focused chunks: Algorithm 1 on hand-worked scores, and the window of agreeing layers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.planning.early_termination import (
    FocusMonitor,
    chunks_in_focus,
    focus_score,
    focused_count,
)


@pytest.mark.parametrize(
    ("scores", "count"),
    [
        # p = .976, .012, .012: the first gap is not among those that are looked at
        ([9.0, 1.0, 0.9, 0.8], 1),
        ([9.0, 8.9, 1.0, 0.9], 2),  # p = .012, .975, .012; -p·log p of gaps 2 and 3: .024, .054
        ([5.0, 4.0, 3.0, 0.0], 1),  # p = .2, .2, .6; .32 and .31: the largest gap loses
        ([3.0, 2.0, 1.0], 1),
        ([3.0, 2.0], 2),  # two chunks: there is nothing to choose from
        ([3.0], 1),
        ([2.0, 2.0, 2.0], 3),  # nothing sets one apart
        ([], 1),
    ],
)
def test_how_many_chunks_are_focused(scores: list[float], count: int) -> None:
    assert focused_count(scores) == count


def test_it_cuts_one_chunk_above_the_gap_it_chose() -> None:
    scores = [6.0, 5.5, 5.0, 1.0, 0.5]  # gaps .5 .5 4 .5
    steps = [-(gap / 5.5) * math.log(gap / 5.5) for gap in (0.5, 4.0, 0.5)]
    assert focused_count(scores) == steps.index(max(steps)) + 1 == 2


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=12))
def test_at_least_one_and_at_most_all(scores: list[float]) -> None:
    assert 1 <= focused_count(sorted(scores, reverse=True)) <= len(scores)


def test_the_first_layer_whose_window_agrees_decides() -> None:
    monitor = FocusMonitor(3, window=3)
    seen = [
        monitor.observe(layer, mass)
        for layer, mass in enumerate(
            [[1.0, 5.0, 0.0], [9.0, 0.0, 0.0], [9.0, 0.0, 0.0], [9.0, 0.0, 0.0]]
        )
    ]
    # cumulative: 1 5 0 → {1}; 10 5 0 → tie of gaps: {0}; 19 5 0 → {0}; 28 5 0 → {0}
    assert seen == [False, False, False, True]
    assert (monitor.focused, monitor.layer) == (frozenset({0}), 3)
    assert not monitor.observe(4, [0.0, 99.0, 0.0])
    assert monitor.focused == frozenset({0})


def test_scores_add_up_over_layers() -> None:
    monitor = FocusMonitor(3, window=1)
    assert monitor.observe(0, [0.4, 0.6, 0.0])
    assert monitor.focused == frozenset({1})
    slow = FocusMonitor(3, window=2)
    assert not slow.observe(0, [10.0, 0.0, 0.0])
    assert slow.observe(1, [0.0, 6.0, 0.0])  # this layer alone would name the other chunk
    assert slow.focused == frozenset({0})


def test_a_window_that_never_agrees_never_decides() -> None:
    monitor = FocusMonitor(3, window=2)
    for layer in range(8):
        assert not monitor.observe(
            layer, [4.0**layer, 0.0, 0.0] if layer % 2 else [0.0, 4.0**layer, 0.0]
        )
    assert monitor.focused is None
    assert monitor.layer is None


def test_equal_scores_go_to_the_earlier_chunk() -> None:
    monitor = FocusMonitor(3, window=1)
    assert monitor.observe(0, [0.0, 2.0, 2.0])
    assert monitor.focused == frozenset({1})


# -- by the probe -----------------------------------------------------------------------------------------------------


def test_a_chunk_that_stands_nearer_scores_no_more_than_the_root_of_its_attention() -> None:
    """All tokens get four times as much there; the root of that is taken back."""
    attention = np.array([*np.full(30, 0.01), 0.5, 0.25])
    assert focus_score(4 * attention) == pytest.approx(2 * focus_score(attention))


def test_tokens_that_the_probe_did_not_see_do_not_count() -> None:
    attention = np.array([0.5, 0.25, 0.25])
    assert focus_score(np.concatenate([attention, np.zeros(50)])) == focus_score(attention)
    assert focus_score(np.zeros(50)) == 0.0


@given(st.dictionaries(st.integers(1, 20), st.floats(0, 1e6), max_size=12))
def test_the_chunk_that_the_question_attends_to_most_is_in_focus(scores: dict[int, float]) -> None:
    focused = chunks_in_focus(scores)
    assert focused <= set(scores)
    assert {chunk for chunk, score in scores.items() if score == max(scores.values())} <= focused
