"""How fast this machine computes just now, from what it just did."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_FEW_ROWS = 48  # a pass of fewer is mostly fixed cost
_WEIGHT = 0.5  # of the newest pass in the average


class ComputeSpeed:
    """Seconds of a pass: a fixed part, and a part for each row that grows with the keys it attends to.

    Args:
        keys_per_row: attending to this many keys costs as much as the rest of a row, see `Stack.keys_per_row`.
    """

    def __init__(self, keys_per_row: float) -> None:
        self._keys_per_row = keys_per_row
        self._row_s: float | None = None
        self._step_s = 0.0
        self._few_s: float | None = None  # of a pass of few rows, apart from them

    def rows(self, positions: Sequence[int] | NDArray[np.int64]) -> float:
        """Rows at these positions, in rows that attend to nothing."""
        return float(len(positions) + np.sum(positions, dtype=np.float64) / self._keys_per_row)

    @property
    def known(self) -> bool:
        """Whether any pass was measured yet."""
        return self._row_s is not None

    def seconds(self, rows: float, *, passes: float = 1.0) -> float:
        """What rows (see `rows`) in this many passes take; needs `known`."""
        assert self._row_s is not None, "no pass was measured yet"
        return passes * self._pass_s + rows * self._row_s

    @property
    def _pass_s(self) -> float:
        """The fixed part. A question's pass also places what is reused, and packs weights that a step does not."""
        return self._step_s if self._few_s is None else self._few_s

    @property
    def piece_s(self) -> float:
        """The fixed part of a pass that places little: what a decoding step takes. The rest is in its rows' time."""
        return self._step_s

    def measured(self, rows: float, seconds: float, *, piece: bool = False) -> None:
        """Take note of a pass; of one with few rows, most of the time goes elsewhere: it tells the fixed part.

        Args:
            piece: it places little, see `piece_s`. Taking the fixed part of a question's pass for its own would make
                its rows look several times as fast as they are.
        """
        if rows < _FEW_ROWS and self._row_s is not None:
            fixed = max(seconds - rows * self._row_s, 0.0)
            if not piece:
                self._few_s = fixed if self._few_s is None else _WEIGHT * fixed + (1.0 - _WEIGHT) * self._few_s
            return
        row_s = max(seconds - (self.piece_s if piece else self._pass_s), 0.2 * seconds) / rows
        self._row_s = row_s if self._row_s is None else _WEIGHT * row_s + (1.0 - _WEIGHT) * self._row_s

    def stepped(self, seconds: float) -> None:
        """Take note of a decoding step: one row, so nearly all of it is the fixed part. The fastest tells most."""
        self._step_s = min(seconds, 0.98 * self._step_s + 0.02 * seconds) if self._step_s else seconds
