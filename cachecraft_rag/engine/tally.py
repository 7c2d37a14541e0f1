"""What an engine has done so far: requests, chunks and tokens by outcome, and how long requests took.

Plain counters that are always kept; `engine.metrics` shows them to Prometheus, where that is installed.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

from cachecraft_rag.engine.stats import RequestStats

REFUSED = "refused"
TTFT_BOUNDS = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOTAL_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often which numbers were seen: times in seconds, or rows.

    bounds  upper ends of the buckets but for the last, which has none
    counts  how many were in each bucket; one more than bounds
    total   the sum of all
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float = 0.0

    @classmethod
    def of(cls, bounds: tuple[float, ...]) -> Histogram:
        """An empty one."""
        return cls(bounds, (0,) * (len(bounds) + 1))

    def plus(self, seen: float) -> Histogram:
        """With one number more.

        >>> Histogram.of((1.0, 2.0)).plus(1.5).plus(9.0)
        Histogram(bounds=(1.0, 2.0), counts=(0, 1, 1), total=10.5)
        """
        place = bisect_left(self.bounds, seen)
        counts = (*self.counts[:place], self.counts[place] + 1, *self.counts[place + 1 :])
        return Histogram(self.bounds, counts, self.total + seen)

    @property
    def cumulative(self) -> tuple[int, ...]:
        """How many were in each bucket or one before it."""
        return tuple(accumulate(self.counts))


@dataclass(frozen=True, slots=True)
class Counts:
    """The state of a `Tally`.

    requests  by how they ended, see `stats.Finish`; and "refused": what was asked cannot be answered, so no model ran
    chunks    of all requests that were not refused, by outcome and reason, see `stats.ChunkStats`
    tokens    "reused", "recomputed" and "computed" of prompts, and "generated"
    ttft_s    of requests that had a first token
    total_s   of all requests that were not refused
    """

    requests: Mapping[str, int]
    chunks: Mapping[tuple[str, str], int]
    tokens: Mapping[str, int]
    ttft_s: Histogram
    total_s: Histogram


class Tally:
    """Counts the requests of one engine. Any thread may call any method, but no finaliser: they take a lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[str] = Counter()
        self._chunks: Counter[tuple[str, str]] = Counter()
        self._tokens: Counter[str] = Counter()
        self._ttft_s, self._total_s = Histogram.of(TTFT_BOUNDS), Histogram.of(TOTAL_BOUNDS)

    def add(self, stats: RequestStats) -> None:
        """Count a request that has ended."""
        with self._lock:
            self._requests[str(stats.finish)] += 1
            self._chunks.update((chunk.outcome, str(chunk.reason_code)) for chunk in stats.chunks)
            self._total_s = self._total_s.plus(stats.total_s)
            if not stats.ttft_s:  # it failed before: nothing is known of what was computed
                return
            self._ttft_s = self._ttft_s.plus(stats.ttft_s)
            self._tokens["reused"] += stats.tokens_reused
            self._tokens["recomputed"] += stats.tokens_recomputed
            self._tokens["computed"] += stats.tokens_computed
            self._tokens["generated"] += stats.tokens_generated

    def refuse(self) -> None:
        """Count a request that could not be made."""
        with self._lock:
            self._requests[REFUSED] += 1

    def counts(self) -> Counts:
        """The state now."""
        with self._lock:
            told = (self._requests, self._chunks, self._tokens)
            requests, chunks, tokens = (MappingProxyType(dict(one)) for one in told)
            return Counts(requests, chunks, tokens, self._ttft_s, self._total_s)
