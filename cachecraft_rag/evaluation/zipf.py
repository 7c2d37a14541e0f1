"""Zipf's law: how often what is popular is asked for."""

from __future__ import annotations

import bisect
import itertools
from random import Random


class Zipf:
    """Draws numbers from 0 on; number n - 1 has a probability ∝ n^-exponent.

    >>> Zipf(3, exponent=1.0).draw(Random(0))
    2
    """

    def __init__(self, count: int, *, exponent: float) -> None:
        self._sums = list(itertools.accumulate((n + 1) ** -exponent for n in range(count)))

    def draw(self, dice: Random) -> int:
        """One number; takes one from `dice`."""
        return bisect.bisect(self._sums, dice.random() * self._sums[-1])
