"""Current computing speed of this machine, from its last passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

_FEW_ROWS = 96  # a pass of fewer is mostly fixed cost
_WEIGHT = 0.5  # of the newest pass in the average
_MOST_APART = 2.0  # a piece's row may take this many times as long as one of a whole prompt's pass

PassKind = Literal["last", "piece", "whole"]
"""last   the question's: it also places what is reused
piece  of a front: it places little
whole  a prompt from its first token to its last: it attends by torch's causal kernel, so its rows take less
"""


class ComputeSpeed:
    """Seconds of a pass: a fixed part, and a part for each row that grows with the keys it attends to.

    Args:
        keys_per_row: attending to this many keys costs as much as the rest of a row, see `Stack.keys_per_row`.

    Attributes:
        piece_s: the fixed part of a pass that places little: a decoding step. The rest is in its rows' time.
    """

    def __init__(self, keys_per_row: float) -> None:
        self._keys_per_row = keys_per_row
        self._row_s: float | None = None  # of the last pass and of pieces
        self._whole_row_s: float | None = None
        self._apart = 1.0  # the first / the second
        self.piece_s = 0.0
        self._few_s: float | None = None  # of a last pass of few rows, apart from them

    def rows(self, positions: Sequence[int] | NDArray[np.int64]) -> float:
        """Rows at these positions, in rows that attend to nothing."""
        return float(len(positions) + np.sum(positions, dtype=np.float64) / self._keys_per_row)

    @property
    def known(self) -> bool:
        """True once a pass was measured."""
        return self._row_s is not None

    def seconds(self, rows: float, *, passes: float = 1.0) -> float:
        """Time of rows (see `rows`) in this many passes; needs `known`."""
        assert self._row_s is not None, "no pass was measured yet"
        return passes * self._pass_s + rows * self._row_s

    def whole_s(self, rows: float) -> float:
        """Time of a whole prompt of this many rows in one pass; needs `known`."""
        assert self._row_s is not None, "no pass was measured yet"
        return self.piece_s + rows * (self._whole_row_s or self._row_s)

    @property
    def _pass_s(self) -> float:
        """The fixed part. A question's pass also places chunk-caches, and packs weights that a step does not."""
        return self.piece_s if self._few_s is None else self._few_s

    def measured(self, rows: float, seconds: float, *, kind: PassKind = "last") -> None:
        """Record a pass; one with few rows is mostly fixed cost and updates that only.

        Taking the fixed part of a question's pass for that of a piece would make its rows look several times as fast as
        they are.
        """
        if rows < _FEW_ROWS and self._row_s is not None:
            if kind == "last":
                self._few_s = _average(self._few_s, max(seconds - rows * self._row_s, 0.0))
            return
        row_s = max(seconds - (self._pass_s if kind == "last" else self.piece_s), 0.2 * seconds) / rows
        if kind == "whole":
            self._whole_row_s = _average(self._whole_row_s, row_s)
            self._row_s = _average(self._row_s, row_s * self._apart)  # a machine that slows down does so for both
            return
        self._row_s = _average(self._row_s, row_s)
        if self._whole_row_s is not None:
            self._apart = min(max(self._row_s / self._whole_row_s, 1.0), _MOST_APART)

    def stepped(self, seconds: float) -> None:
        """Record a decoding step: one row, so nearly all of it is the fixed part. The fastest counts most."""
        self.piece_s = min(seconds, 0.98 * self.piece_s + 0.02 * seconds) if self.piece_s else seconds


def _average(old: float | None, new: float) -> float:
    return new if old is None else _WEIGHT * new + (1.0 - _WEIGHT) * old
