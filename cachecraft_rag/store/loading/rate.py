"""How fast this machine computes and loads just now, from what it just did."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable

_MEMORY_S = 0.5  # what is longer ago counts for little: a rate that changes is noticed within a part of a second
_PRIOR_S = 0.05  # an earlier request's rate counts like so much time of measuring
_FEW_ROWS = 48  # a pass of fewer is mostly fixed cost
_WEIGHT = 0.5  # of the newest pass in the average


class ComputeSpeed:
    """Seconds of a pass: a fixed part, and a part for each row that grows with the keys it attends to.

    Args:
        keys_per_row: attending to so many keys costs as much as the rest of a row, see `Decoder.keys_per_row`.
    """

    def __init__(self, keys_per_row: float) -> None:
        self._keys_per_row = keys_per_row
        self._row_s: float | None = None
        self._pass_s = 0.0

    def rows(self, positions: Iterable[int]) -> float:
        """Rows at these positions, in rows that attend to nothing."""
        return math.fsum(1.0 + position / self._keys_per_row for position in positions)

    @property
    def known(self) -> bool:
        """Whether any pass was measured yet."""
        return self._row_s is not None

    def seconds(self, rows: float, *, passes: float = 1.0) -> float:
        """What rows (see `rows`) in so many passes take; needs `known`."""
        assert self._row_s is not None, "no pass was measured yet"
        return passes * self._pass_s + rows * self._row_s

    def measured(self, rows: float, seconds: float) -> None:
        """Take note of a pass; of one with few rows, most of the time goes elsewhere."""
        if rows < _FEW_ROWS and self.known:
            return
        row_s = max(seconds - self._pass_s, 0.2 * seconds) / rows
        self._row_s = row_s if self._row_s is None else _WEIGHT * row_s + (1.0 - _WEIGHT) * self._row_s

    def stepped(self, seconds: float) -> None:
        """Take note of a decoding step: one row, so nearly all of it is the fixed part. The quickest tells most."""
        self._pass_s = min(seconds, 0.98 * self._pass_s + 0.02 * seconds) if self._pass_s else seconds


class Meter:
    """The rate of one request's loading: bytes per second, weighted towards the last half second.

    Silence counts: while nothing comes, the rate falls.
    """

    def __init__(self, expected: float | None) -> None:
        """`expected` is the rate to start from, of an earlier request; None = nobody knows."""
        self._lock = threading.Lock()
        self._seconds = _PRIOR_S if expected is not None else 0.0
        self._bytes = (expected or 0.0) * self._seconds
        self._at = time.perf_counter()
        self._credit = 0.0  # for what is in flight
        self._stopped = False
        self.warm = expected is not None  # whether the rate says something from the first moment on

    def stop(self) -> None:
        """Nothing more is to come: silence counts no longer."""
        with self._lock:
            self._advance()
            self._stopped = True

    def begin(self, nbytes: float) -> None:
        """So many bytes were asked for."""
        with self._lock:
            self._advance()
            self._credit += nbytes / 2

    def end(self, nbytes: float, *, came: bool) -> None:
        """They came, or will not."""
        with self._lock:
            self._advance()
            self._credit = max(0.0, self._credit - nbytes / 2)
            self._bytes += nbytes * came

    @property
    def bytes_per_s(self) -> float:
        """The rate; 0 when nothing is known or nothing was asked for.

        What is in flight counts half, so that a large piece is not mistaken for a pause; but not for ever.
        """
        with self._lock:
            self._advance()
            return (self._bytes + self._credit) / self._seconds if self._seconds else 0.0

    def _advance(self) -> None:
        if self._stopped:
            return
        now = time.perf_counter()
        kept = math.exp((self._at - now) / _MEMORY_S)
        self._bytes *= kept
        self._credit *= kept
        self._seconds = self._seconds * kept + _MEMORY_S * (1.0 - kept)
        self._at = now
