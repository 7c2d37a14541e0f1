"""Current computing speed of this machine, from its last passes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

# A pass of fewer rows consists mostly of its fixed cost.
_FEW_ROWS = 96

# Weight of the newest pass in the average.
_NEWEST_WEIGHT = 0.5

# Weight of the newest decode step in the average of steps; a faster step replaces the average.
_STEP_WEIGHT = 0.02

# Largest ratio of the row time of a piece to that of a whole prompt.
_MAX_ROW_RATIO = 2.0

# Smallest fraction of a pass that is counted as the time of its rows.
_MIN_ROWS_FRACTION = 0.2

PassKind = Literal["last", "piece", "whole"]
"""
last   the pass that contains the question; it also places reused chunk-caches
piece  a pass over a piece of the front; it places little
whole  one pass over a whole prompt; it uses torch's causal kernel, so its rows take less time
"""


class ComputeSpeed:
    """Estimate of the time of a pass: a fixed cost, and a cost per row that grows with the keys it attends to.

    Args:
        keys_per_row: number of keys that cost as much to attend to as the rest of a row, see `Stack.keys_per_row`.

    Attributes:
        piece_s: fixed cost in seconds of a pass that places little, measured on decode steps; 0 before.
    """

    def __init__(self, keys_per_row: float) -> None:
        self._keys_per_row = keys_per_row
        self.piece_s = 0.0
        self._row_s: float | None = None  # per row, in last passes and pieces
        self._whole_row_s: float | None = None  # per row, in passes over a whole prompt
        self._row_ratio = 1.0  # of the two above
        # fixed cost of a last pass, from those with few rows
        self._last_pass_s: float | None = None
        # passes that a GPU computes: rows, clock, kind
        self._later: deque[tuple[float, Callable[[], float | None], PassKind]] = deque()

    def rows(self, positions: Sequence[int] | NDArray[np.int64]) -> float:
        """Return the cost of rows at these positions; a row at p attends to p keys, and one without keys costs 1."""
        keys = np.sum(positions, dtype=np.float64)
        return float(len(positions) + keys / self._keys_per_row)

    @property
    def known(self) -> bool:
        """True once a pass was recorded by `measured`, or `measured_later` and computed; decode steps do not count."""
        self._settle()
        return self._row_s is not None

    def seconds(self, rows: float, *, passes: float = 1.0) -> float:
        """Return the seconds of rows, in the units of `rows`, in so many passes; the speed must be `known`."""
        self._settle()
        assert self._row_s is not None, "no pass was measured yet"
        return passes * self._fixed_s + rows * self._row_s

    def whole_s(self, rows: float) -> float:
        """Return the seconds of one pass over a whole prompt of so many `rows`; the speed must be `known`."""
        self._settle()
        assert self._row_s is not None, "no pass was measured yet"
        return self.piece_s + rows * (self._whole_row_s or self._row_s)

    @property
    def _fixed_s(self) -> float:
        """Fixed cost of a last pass, which also places chunk-caches and packs weights that a decode step does not."""
        return self.piece_s if self._last_pass_s is None else self._last_pass_s

    def measured(self, rows: float, seconds: float, *, kind: PassKind = "last") -> None:
        """Record a pass: its rows in units of `rows`, at least one, and its time in seconds.

        The first pass, and each pass of at least 96 rows (in these units), update the time per row: the first sets it,
        and a later one moves it half of the way to the new value. After the first pass, a last pass of fewer rows
        updates only the fixed cost of last passes, and so short a pass of another kind updates nothing. A "whole" pass
        has a time per row for such passes only, and moves the other in proportion.
        """
        if rows < _FEW_ROWS and self._row_s is not None:
            if kind == "last":
                fixed_s = max(seconds - rows * self._row_s, 0.0)
                self._last_pass_s = _average(self._last_pass_s, fixed_s)
            return

        fixed_s = self._fixed_s if kind == "last" else self.piece_s
        row_s = max(seconds - fixed_s, _MIN_ROWS_FRACTION * seconds) / rows
        if kind == "whole":
            self._whole_row_s = _average(self._whole_row_s, row_s)
            # A machine that slows down does so for both kinds of rows.
            self._row_s = _average(self._row_s, row_s * self._row_ratio)
            return

        self._row_s = _average(self._row_s, row_s)
        if self._whole_row_s is not None:
            ratio = self._row_s / self._whole_row_s
            self._row_ratio = min(max(ratio, 1.0), _MAX_ROW_RATIO)

    def measured_later(
        self, rows: float, clock: Callable[[], float | None], *, kind: PassKind
    ) -> None:
        """Record a pass once `clock` returns its time in seconds: None until a GPU has computed the pass."""
        self._later.append((rows, clock, kind))

    def _settle(self) -> None:
        """Record the passes of `measured_later` that are computed by now."""
        while self._later:
            rows, clock, kind = self._later[0]
            seconds = clock()
            if seconds is None:
                return
            self._later.popleft()
            self.measured(rows, seconds, kind=kind)

    def stepped(self, seconds: float) -> None:
        """Record the time in seconds of a decode step, which is almost entirely fixed cost.

        A faster step than `piece_s` replaces it, and a slower one raises it by a fiftieth of the difference.
        """
        if not self.piece_s:
            self.piece_s = seconds
            return
        average = (1.0 - _STEP_WEIGHT) * self.piece_s + _STEP_WEIGHT * seconds
        self.piece_s = min(seconds, average)


def _average(old: float | None, new: float) -> float:
    if old is None:
        return new
    return _NEWEST_WEIGHT * new + (1.0 - _NEWEST_WEIGHT) * old
