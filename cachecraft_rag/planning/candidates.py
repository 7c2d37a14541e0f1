"""New variants worth computing (Cache-Craft §3.3): chunks fixed behind a prefix, most requested first.

Pure bookkeeping: no tensor, no clock, no lock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Self

from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.planning.planner import Plan, SegmentPlan
from cachecraft_rag.types import Prompt, Segment

_Path = tuple[str | None, tuple[str, ...]]  # whose it is, and the segments up to the one to be captured


@dataclass(frozen=True, slots=True)
class Candidate:
    """The beginning of a prompt with chunks that were reused and fixed; one pass over it captures all of them.

    segments  the instruction and the chunks, up to the last one that was fixed
    fixed     segment → tokens that its variant behind this prefix would save each time
    session   whose private text stands in it; None where nothing is private
    first     segments of text that nobody marked, and what stands in for their neighbours: nothing of them may be
              stored yet
    """

    segments: tuple[Segment, ...]
    fixed: Mapping[int, int]
    session: str | None = None
    first: frozenset[int] = frozenset()

    @classmethod
    def of(cls, prompt: Prompt, plan: Plan, config: ReuseConfig, *, session: str | None) -> Self | None:
        """Captures that a request would have made; None if nothing was fixed, or nobody could reuse them.

        A chunk that comes after private text belongs to the session, and without one to nobody. So a prompt counts up
        to its private text, or belongs to the session as a whole.
        """
        segments = prompt.segments
        fixed = {index: n for index, planned in enumerate(plan.segments) if (n := _spent(planned, config))}
        private = next((index for index, segment in enumerate(segments) if segment.private), len(segments))
        if session is None:
            fixed = {index: n for index, n in fixed.items() if index < private}
        if not fixed:
            return None
        end = max(fixed) + 1
        return cls(segments[:end], fixed, session if private < end else None)

    @property
    def identity(self) -> _Path:
        """Key shared by all requests with the same chunks in the same order."""
        return self.session, tuple(segment.segment_id for segment in self.segments)

    def paths(self) -> Iterator[tuple[_Path, int]]:
        """Captures to be made, and the tokens that each saves per use."""
        session, ids = self.identity
        for index, tokens in self.fixed.items():
            yield (session, ids[: index + 1]), tokens


def _spent(planned: SegmentPlan, config: ReuseConfig) -> int:
    """Tokens that fixing a segment adds to those recomputed, in this chunk or in others (`budget_scope`)."""
    if not planned.to_fix or planned.variant is None:
        return 0
    if planned.in_full:
        return planned.variant.tokens
    share = planned.cfo if config.recompute_ratio is None else config.recompute_ratio
    return math.ceil((share or 0.0) * planned.variant.tokens)


class Candidates:
    """Waiting candidates, at most `most`, and the tokens that each chunk behind each prefix would have saved."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: dict[_Path, Candidate] = {}  # the one asked for last at the end
        self._would_have_saved: Counter[_Path] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def value(self, candidate: Candidate) -> int:
        """Tokens that its variants would have saved since they were first requested."""
        return sum(self._would_have_saved[path] for path, _ in candidate.paths())

    def add(self, candidate: Candidate) -> Candidate | None:
        """Count one request for it; returns the least valuable candidate if there are too many (perhaps this one)."""
        known = self._waiting.pop(candidate.identity, None)
        self._would_have_saved.update(dict(candidate.paths()))
        if known is not None:  # the same chunks, of which others may have been fixed this time
            fixed = {**known.fixed, **candidate.fixed}
            candidate = replace(candidate, fixed=fixed, first=known.first | candidate.first)
        self._waiting[candidate.identity] = candidate
        if len(self._waiting) <= self._most:
            return None
        least = min(self._waiting.values(), key=self.value)
        self.remove(least)
        return least

    def best(self, among: Callable[[Candidate], bool] | None = None) -> Candidate | None:
        """The most valuable candidate among these, or all, and of equals the latest; it is not removed."""
        some = [one for one in reversed(self._waiting.values()) if among is None or among(one)]
        return max(some, key=self.value, default=None)

    def remove(self, candidate: Candidate) -> None:
        """Remove a candidate, and the count of its captures unless another candidate has them too."""
        self._waiting.pop(candidate.identity, None)
        wanted = {path for other in self._waiting.values() for path, _ in other.paths()}
        for path, _ in candidate.paths():
            if path not in wanted:
                del self._would_have_saved[path]

    def having(self, segment_ids: Set[str]) -> list[Candidate]:
        """Candidates with one of these segments."""
        return [one for one in self._waiting.values() if not segment_ids.isdisjoint(one.identity[1])]

    def clear(self) -> int:
        """Remove all; returns their number."""
        count = len(self._waiting)
        self._waiting.clear()
        self._would_have_saved.clear()
        return count
