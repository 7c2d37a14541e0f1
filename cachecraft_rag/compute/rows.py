"""Positions of a prompt that are computed, with their reasons: immutable arrays over the whole prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Self

import numpy as np
from numpy.typing import NDArray


class RowReason(IntEnum):
    """Why a position is a row of a pass.

    STORED      not a row: its keys and values come from a chunk-cache
    NEW         no chunk-cache has it
    RECOMPUTED  a chunk-cache has it, and it was chosen to be recomputed
    NOT_LOADED  a chunk-cache has it, but loading it failed, or computing it was faster
    """

    STORED = 0
    NEW = 1
    RECOMPUTED = 2
    NOT_LOADED = 3


@dataclass(frozen=True, eq=False)
class Rows:
    """The positions of one prompt; no array is ever written to.

    bounds   `[segments + 1]`: segment i covers the positions `bounds[i]:bounds[i + 1]`
    segment  int64 `[tokens]`
    reason   uint8 `[tokens]`, `RowReason`
    done     bool `[tokens]`, computed by an earlier pass
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
        """The rows of a prompt with these segments; positions neither new nor recomputed are stored.

        >>> rows = Rows.of([0, 2, 5], new=[3, 4], recomputed=[0])
        >>> rows.open().tolist(), rows.segment.tolist()
        ([0, 3, 4], [0, 0, 1, 1, 1])
        """
        tokens = bounds[-1]
        segment = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        empty = cls(tuple(bounds), segment, np.zeros(tokens, np.uint8), np.zeros(tokens, bool))
        return empty.mark(recomputed, RowReason.RECOMPUTED).mark(new, RowReason.NEW)

    def mark(self, positions: Iterable[int], reason: RowReason) -> Self:
        """A copy with this reason at these positions.

        >>> Rows.of([0, 3]).mark([1], RowReason.NOT_LOADED).reason.tolist()
        [0, 3, 0]
        """
        changed = self.reason.copy()
        changed[_indices(positions)] = reason
        return replace(self, reason=changed)

    def finish(self, positions: Iterable[int]) -> Self:
        """A copy in which these positions are computed."""
        done = self.done.copy()
        done[_indices(positions)] = True
        return replace(self, done=done)

    def open(self, below: int | None = None) -> NDArray[np.int64]:
        """Ascending positions that are still to be computed, those before `below` only."""
        return np.flatnonzero((self.reason[:below] != RowReason.STORED) & ~self.done[:below])

    def span(self, segment: int) -> slice:
        """The positions of a segment."""
        return slice(self.bounds[segment], self.bounds[segment + 1])

    def offsets(self, segment: int, *reasons: RowReason) -> NDArray[np.int64]:
        """Offsets of a segment's tokens that are computed for one of these reasons, ascending."""
        return np.flatnonzero(np.isin(self.reason[self.span(segment)], reasons))


def _indices(positions: Iterable[int]) -> NDArray[np.int64]:
    return np.fromiter(positions, np.int64) if not isinstance(positions, np.ndarray) else positions
