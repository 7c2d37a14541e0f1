"""Percentile bootstrap intervals over questions (Efron, 1979), with a fixed seed.

A resample draws as many questions as there are, with replacement; the values of one question stay together. With few
questions the intervals are too narrow: 95 % intervals hold the true mean in 92 % of draws of 20 questions, 94 % of 100.
ValueError without questions, for lists of different lengths, a number that is not finite, and more hits than questions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

RESAMPLES = 10_000
_DRAWS_AT_ONCE = 4_000_000  # 32 MB of random numbers


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean, ratio or share over all questions, and the ends of its interval (of resamples, or Wilson's)."""

    mean: float
    low: float
    high: float


def mean_interval(
    values: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0, level: float = 0.95
) -> Interval:
    """Return the mean over questions, `[questions]`, and its interval of `level`; the same each time.

    >>> mean_interval([2.0, 2.0, 2.0])
    Interval(mean=2.0, low=2.0, high=2.0)
    """
    columns = _columns(values)
    return _interval(float(columns.mean()), _resampled(columns, resamples, seed)[0], level)


def paired_interval(
    a: ArrayLike, b: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0, level: float = 0.95
) -> Interval:
    """Return the mean of a − b, in the same order of questions, and its interval.

    >>> paired_interval([3.0, 8.0], [2.0, 7.0])  # the questions differ, the methods' difference does not
    Interval(mean=1.0, low=1.0, high=1.0)
    """
    first, second = _columns(a, b)
    return mean_interval(first - second, resamples=resamples, seed=seed, level=level)


def share_interval(hits: int, count: int) -> Interval:
    """Return the share hits / count with its 95 % score interval (Wilson, 1927), which also holds for few questions.

    >>> round(share_interval(0, 19).high, 3), round(share_interval(4, 24).low, 3)
    (0.168, 0.067)
    """
    if not 0 <= hits <= count or not count:
        raise ValueError(f"{hits} of {count} is no share")
    z = 1.959963984540054  # 97.5 % of a normal distribution lies below it
    share = hits / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = (
        z / (1 + z * z / count) * (share * (1 - share) / count + z * z / (4 * count * count)) ** 0.5
    )
    return Interval(
        share,
        max(middle - half, 0.0) if hits else 0.0,
        min(middle + half, 1.0) if hits < count else 1.0,
    )


def ratio_interval(
    a: ArrayLike, b: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0, level: float = 0.95
) -> Interval:
    """Return mean(a) / mean(b), in the same order of questions; both are resampled together.

    Resamples whose mean of b is 0 have no ratio and are left out. ValueError if mean(b) is 0.

    >>> ratio_interval([1.0, 4.0], [2.0, 8.0])
    Interval(mean=0.5, low=0.5, high=0.5)
    """
    columns = _columns(a, b)
    whole, base = columns.mean(axis=1)
    if base == 0:
        raise ValueError("a ratio to a mean of 0 has no value")
    tops, bases = _resampled(columns, resamples, seed)
    return _interval(float(whole / base), tops[bases != 0] / bases[bases != 0], level)


def _columns(*values: ArrayLike) -> NDArray[np.float64]:
    """`[methods, questions]`."""
    rows = [np.asarray(row, dtype=np.float64) for row in values]
    if any(row.ndim != 1 or row.shape != rows[0].shape for row in rows):
        raise ValueError(
            f"each method needs one value per question, not shapes {[row.shape for row in rows]}"
        )
    columns = np.stack(rows)
    if columns.size == 0 or not np.isfinite(columns).all():
        raise ValueError("an interval needs at least one question, and a finite number for each")
    return columns


def _resampled(columns: NDArray[np.float64], resamples: int, seed: int) -> NDArray[np.float64]:
    """Means of the resamples, `[methods, resamples]`; one draw of questions serves all methods."""
    draw = np.random.default_rng(seed)
    count = columns.shape[1]
    batch = max(1, _DRAWS_AT_ONCE // count)
    sizes = [min(batch, resamples - done) for done in range(0, resamples, batch)]
    return np.concatenate(
        [columns[:, draw.integers(count, size=(size, count))].mean(-1) for size in sizes], axis=1
    )


def _interval(mean: float, resampled: NDArray[np.float64], level: float) -> Interval:
    outside = (1 - level) / 2
    low, high = np.quantile(resampled, [outside, 1 - outside])
    return Interval(mean, float(low), float(high))
