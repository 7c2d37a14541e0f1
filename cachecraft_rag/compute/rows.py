"""Positions of a prompt that are computed, and why: immutable arrays over the whole prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Self

import numpy as np
from numpy.typing import NDArray


class RowReason(IntEnum):
    """Reason why a position is a row of a pass.

    STORED            not a row: its keys and values are taken from a chunk-cache
    NEW               no chunk-cache contains it
    RECOMPUTED        a chunk-cache contains it, and it was selected for recomputation
    COMPUTED_INSTEAD  a chunk-cache contains it, but it is computed instead of loaded: loading failed, stood still, or
                      was expected to take longer
    """

    STORED = 0
    NEW = 1
    RECOMPUTED = 2
    COMPUTED_INSTEAD = 3


@dataclass(frozen=True, eq=False)
class Rows:
    """The positions of one prompt. The arrays are never written to.

    bounds   `[segments + 1]`; segment i covers the positions `bounds[i]:bounds[i + 1]`
    segment  int64 `[tokens]`, segment of each position
    reason   uint8 `[tokens]`, `RowReason` of each position
    done     bool `[tokens]`, True if an earlier pass computed the position
    """

    bounds: tuple[int, ...]
    segment: NDArray[np.int64]
    reason: NDArray[np.uint8]
    done: NDArray[np.bool_]

    @classmethod
    def of(
        cls,
        bounds: Sequence[int],
        *,
        new: Iterable[int] = (),
        recomputed: Iterable[int] = (),
    ) -> Self:
        """Return the rows of a prompt with these segment bounds; positions in neither set are stored, in both new.

        >>> rows = Rows.of([0, 2, 5], new=[3, 4], recomputed=[0])
        >>> rows.open().tolist(), rows.segment.tolist()
        ([0, 3, 4], [0, 0, 1, 1, 1])
        """
        tokens = bounds[-1]
        segment = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        reason = np.zeros(tokens, np.uint8)
        reason[_indices(recomputed)] = RowReason.RECOMPUTED
        reason[_indices(new)] = RowReason.NEW
        return cls(tuple(bounds), segment, reason, np.zeros(tokens, bool))

    def mark(self, positions: Iterable[int], reason: RowReason) -> Self:
        """Return a copy with this reason at these positions; all other positions keep their reasons.

        >>> Rows.of([0, 3]).mark([1], RowReason.COMPUTED_INSTEAD).reason.tolist()
        [0, 3, 0]
        """
        changed = self.reason.copy()
        changed[_indices(positions)] = reason
        return replace(self, reason=changed)

    def finish(self, positions: Iterable[int]) -> Self:
        """Return a copy in which these positions are done, besides those that are done already."""
        done = self.done.copy()
        done[_indices(positions)] = True
        return replace(self, done=done)

    def open(self, below: int | None = None) -> NDArray[np.int64]:
        """Return the positions, not STORED and not done, only those `below` if given: int64 `[rows]`, ascending."""
        is_row = self.reason[:below] != RowReason.STORED
        return np.flatnonzero(is_row & ~self.done[:below])

    def span(self, segment: int) -> slice:
        """Return the positions of a segment as a slice."""
        return slice(self.bounds[segment], self.bounds[segment + 1])

    def offsets(self, segment: int, *reasons: RowReason) -> NDArray[np.int64]:
        """Return the offsets in a segment of tokens with one of these reasons, int64, ascending."""
        return np.flatnonzero(_is_one_of(self.reason[self.span(segment)], reasons))

    def having(self, *reasons: RowReason) -> NDArray[np.bool_]:
        """Return bool `[tokens]`: True where a position has one of these reasons, whether it is done or not."""
        return _is_one_of(self.reason, reasons)


def _is_one_of(reason: NDArray[np.uint8], wanted: Iterable[RowReason]) -> NDArray[np.bool_]:
    is_one_of = np.zeros(len(reason), bool)
    for value in wanted:
        is_one_of |= reason == value
    return is_one_of


def _indices(positions: Iterable[int]) -> NDArray[np.int64]:
    if isinstance(positions, np.ndarray):
        return positions
    if isinstance(positions, range):
        return np.arange(positions.start, positions.stop, positions.step)
    return np.fromiter(positions, np.int64)
