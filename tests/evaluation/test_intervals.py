"""Bootstrap intervals: they hold the truth as often as they say, and pairing is worth what it should be."""

from __future__ import annotations

import numpy as np
import pytest

from cachecraft_rag.evaluation import intervals
from cachecraft_rag.evaluation.intervals import (
    Interval,
    mean_interval,
    paired_interval,
    ratio_interval,
)


def width(interval: Interval) -> float:
    return interval.high - interval.low


@pytest.mark.parametrize("skewed", [False, True])
def test_the_mean_is_inside_as_often_as_the_level_says(skewed: bool) -> None:
    random = np.random.default_rng(5)
    draws = (
        random.exponential(2.0, size=(300, 50))
        if skewed
        else random.normal(2.0, 3.0, size=(300, 50))
    )
    for level, fewest, most in ((0.95, 0.89, 0.99), (0.8, 0.72, 0.87)):
        found = [mean_interval(draw, resamples=500, seed=1, level=level) for draw in draws]
        assert fewest <= np.mean([one.low <= 2.0 <= one.high for one in found]) <= most


def test_the_interval_of_a_mean_has_the_width_of_its_standard_error() -> None:
    values = np.random.default_rng(0).normal(size=400)
    assert width(mean_interval(values)) == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.05)
    assert mean_interval(values).mean == pytest.approx(values.mean())


def test_pairing_narrows_where_questions_differ_more_than_methods() -> None:
    random = np.random.default_rng(2)
    hardness = random.normal(5.0, 2.0, size=60)
    a, b = hardness + random.normal(0.3, 0.2, size=60), hardness + random.normal(0.0, 0.2, size=60)
    paired = paired_interval(a, b)
    assert paired.mean == pytest.approx(a.mean() - b.mean())
    assert paired.low > 0  # seen
    assert mean_interval(a).low < mean_interval(b).high  # while the two intervals alone overlap
    assert width(paired) < width(mean_interval(a)) / 4
    # Against questions that are not the same ones, the difference is lost.
    assert width(paired_interval(a, random.permutation(b))) > 4 * width(paired)


def test_the_ratio_is_of_means_and_its_questions_stay_together() -> None:
    random = np.random.default_rng(4)
    b = random.exponential(1.0, size=80)
    a = 0.5 * b * random.normal(1.0, 0.1, size=80)
    found = ratio_interval(a, b)
    assert found.mean == pytest.approx(a.mean() / b.mean())
    assert found.low < 0.5 < found.high
    assert width(found) < width(ratio_interval(random.permutation(a), b)) / 4
    scaled = ratio_interval(3 * a, b)
    assert (scaled.low, scaled.high) == (
        pytest.approx(3 * found.low),
        pytest.approx(3 * found.high),
    )


def test_the_ratio_covers() -> None:
    random = np.random.default_rng(7)
    inside = 0
    for _ in range(300):
        b = random.exponential(1.0, size=60)
        found = ratio_interval(b * random.uniform(0.5, 1.0, size=60), b, resamples=500)
        inside += found.low <= 0.75 <= found.high
    assert 0.89 <= inside / 300 <= 0.99


def test_resamples_without_a_ratio_are_left_out() -> None:
    found = ratio_interval([0.0, 0.0, 1.0], [0.0, 0.0, 2.0])  # 8 of 27 resamples have only zeros
    assert found == Interval(0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="mean of 0"):
        ratio_interval([1.0, 2.0], [0.0, 0.0])


def test_the_same_seed_gives_the_same_interval_and_another_one_nearly() -> None:
    values = np.random.default_rng(9).normal(size=30)
    first = mean_interval(values, seed=3)
    assert first == mean_interval(list(values), seed=3)
    assert first != mean_interval(values, seed=4)
    assert first.low == pytest.approx(mean_interval(values, seed=4).low, abs=0.02)


def test_resampling_in_parts_draws_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(9).normal(size=30)
    # three resamples of 30 at once; the generator goes on
    monkeypatch.setattr(intervals, "_DRAWS_AT_ONCE", 100)
    in_parts = mean_interval(values, resamples=1000)
    monkeypatch.undo()
    assert in_parts == mean_interval(values, resamples=1000)


def test_one_question_has_an_interval_without_width() -> None:
    assert mean_interval([0.25]) == Interval(0.25, 0.25, 0.25)


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")], [[1.0, 2.0]]])
def test_missing_or_infinite_values_are_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="question"):
        mean_interval(values)


def test_unequal_lengths_are_refused() -> None:
    for interval in (paired_interval, ratio_interval):
        with pytest.raises(ValueError, match=r"\(2,\), \(3,\)"):
            interval([1.0, 2.0], [1.0, 2.0, 3.0])
