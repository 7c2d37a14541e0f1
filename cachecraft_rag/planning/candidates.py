"""Candidates for new variants (Cache-Craft §3.3): chunks that were fixed after a prefix, most valuable first.

Pure bookkeeping, without tensors, clock or lock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Self

from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.planning.planner import Plan, SegmentPlan
from cachecraft_rag.types.prompts import Prompt, Segment

Owner = tuple[str, str | None]  # (namespace, session)
_Path = tuple[Owner, tuple[str, ...]]  # owner, and ids of the segments up to the one to be captured


@dataclass(frozen=True, slots=True)
class Candidate:
    """The beginning of a prompt whose chunks were reused and fixed; one pass over it captures all of them.

    segments  the instruction and the chunks up to the last fixed one
    fixed     segment index → number of tokens that a variant after this prefix would save per use
    session   session that owns the private text in it; None if all text is public
    never_stored  indices of segments that may not be stored yet in any context: found segments, and the fixed passages
              that stand in for their neighbours
    namespace  tenant of the request; "": the engine's own
    """

    segments: tuple[Segment, ...]
    fixed: Mapping[int, int]
    session: str | None = None
    never_stored: frozenset[int] = frozenset()
    namespace: str = ""

    @classmethod
    def of(
        cls,
        prompt: Prompt,
        plan: Plan,
        config: ReuseConfig,
        *,
        session: str | None,
        namespace: str = "",
    ) -> Self | None:
        """Return the candidate whose captures would have made the fixed chunks of this request exact; None without any.

        If `session` is None, the first private segment and all after it are left out: they are reused within a session.
        """
        segments = prompt.segments
        fixed = {index: n for index, planned in enumerate(plan) if (n := _spent(planned, config))}
        private = next(
            (index for index, segment in enumerate(segments) if segment.private), len(segments)
        )
        if session is None:
            fixed = {index: n for index, n in fixed.items() if index < private}
        if not fixed:
            return None
        end = max(fixed) + 1
        owner = session if private < end else None
        return cls(segments[:end], fixed, owner, namespace=namespace)

    @property
    def identity(self) -> _Path:
        """Key ((namespace, session), segment ids), equal for candidates of the same tenant, session and segments."""
        return (self.namespace, self.session), tuple(
            segment.segment_id for segment in self.segments
        )

    def paths(self) -> Iterator[tuple[_Path, int]]:
        """Yield each capture to be made, (owner, ids up to its own) as in `identity`, and the tokens saved per use."""
        owner, ids = self.identity
        for index, tokens in self.fixed.items():
            yield (owner, ids[: index + 1]), tokens


def _spent(planned: SegmentPlan, config: ReuseConfig) -> int:
    """Return how many more tokens are recomputed because of a segment, in it or in others (`budget_scope`).

    At least 1 in a new context, even with a CFO of 0: a variant makes it exact. In the baselines it may be 0.
    """
    if not planned.to_fix or planned.variant is None:
        return 0
    if planned.in_full:
        return planned.variant.tokens
    share = planned.cfo if config.ratio_in_use is None else config.ratio_in_use
    spent = math.ceil((share or 0.0) * planned.variant.tokens)

    return spent if config.method.is_baseline else max(1, spent)


class Candidates:
    """Waiting candidates, at most `most`, and the tokens that each capture would have saved. Has no lock."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: dict[_Path, Candidate] = {}  # the latest request last
        self._would_have_saved: Counter[_Path] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def value(self, candidate: Candidate) -> int:
        """Return how many tokens the candidate's captures would have saved, over each `add` with such a capture."""
        return sum(self._would_have_saved[path] for path, _ in candidate.paths())

    def add(self, candidate: Candidate) -> Candidate | None:
        """Add a candidate, or merge it with the one of the same `identity`; return the one that had to leave for it.

        That is the least valuable, maybe this one itself, if there are more than `most`; otherwise None.
        """
        known = self._waiting.pop(candidate.identity, None)
        self._would_have_saved.update(dict(candidate.paths()))
        if known is not None:  # this request may have fixed other chunks of the same prompt
            fixed = {**known.fixed, **candidate.fixed}
            candidate = replace(
                candidate, fixed=fixed, never_stored=known.never_stored | candidate.never_stored
            )
        self._waiting[candidate.identity] = candidate
        if len(self._waiting) <= self._most:
            return None
        least = min(self._waiting.values(), key=self.value)
        self.remove(least)
        return least

    def best(self, among: Callable[[Candidate], bool] | None = None) -> Candidate | None:
        """Return, and keep, the most valuable candidate `among` accepts, of equals the latest; None without any."""
        latest_first = reversed(self._waiting.values())
        candidates = [candidate for candidate in latest_first if among is None or among(candidate)]
        return max(candidates, key=self.value, default=None)

    def remove(self, candidate: Candidate) -> None:
        """Remove a candidate if it waits, and the count of each of its captures that no other candidate has."""
        waiting = self._waiting.pop(candidate.identity, candidate)
        wanted = {path for other in self._waiting.values() for path, _ in other.paths()}
        for path, _ in waiting.paths():
            if path not in wanted:
                del self._would_have_saved[path]

    def having(self, segment_ids: Set[str]) -> list[Candidate]:
        """Return the candidates with at least one of these segments, in the order of their latest `add`; a new list."""
        return [
            candidate
            for candidate in self._waiting.values()
            if any(segment.segment_id in segment_ids for segment in candidate.segments)
        ]

    def clear(self) -> int:
        """Remove all candidates and counts; return the number of candidates removed."""
        count = len(self._waiting)
        self._waiting.clear()
        self._would_have_saved.clear()
        return count
