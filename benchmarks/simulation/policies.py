"""Eviction policies of a replay: the store's own, and the best possible one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from functools import partial

from benchmarks.simulation.trace import Trace
from cachecraft_rag.store.eviction import POLICIES, Policy, VariantFacts


class Rival:
    """A policy that remembers; this one never prefers anything. Calls come in the order of the trace."""

    name = "rival"

    def score(self, standing: VariantFacts, clock: float) -> float:
        """See `store.eviction.Policy`; `standing.chunk_id` is the chunk's number in the trace."""
        return 0.0

    def asked(self, request: int) -> None:
        """Note that the request of this number begins."""

    def admits(self, chunk: int, lowest: float | None) -> bool:
        """Return True if a capture is to be stored; `lowest` is the score of what would leave first, if one must."""
        return True

    def victims(self, excess: int) -> list[str]:
        """Variants to remove so that at least `excess` bytes become free; none if the scores decide."""
        return []

    def added(self, variant_id: str, chunk: int, nbytes: int) -> None:
        """Note that a variant was stored."""

    def evicted(self, variant_id: str) -> None:
        """Note that a variant was removed."""


class Oracle(Rival):
    """Belady: the variant needed again last leaves, and one needed later than everything stored is not stored."""

    name = "oracle"

    def __init__(self, trace: Trace) -> None:
        self._uses: list[list[int]] = [[] for _ in trace.tokens]
        for number, request in enumerate(trace.requests):
            for chunk in request:
                self._uses[chunk].append(number)
        self._end = len(trace.requests)
        self._now = 0

    def _next(self, chunk: int) -> int:
        uses = self._uses[chunk]
        place = bisect_right(uses, self._now)
        return uses[place] if place < len(uses) else self._end

    def score(self, standing: VariantFacts, clock: float) -> float:
        """See `Rival`."""
        return -float(self._next(int(standing.chunk_id)))

    def asked(self, request: int) -> None:
        """See `Rival`."""
        self._now = request

    def admits(self, chunk: int, lowest: float | None) -> bool:
        """See `Rival`."""
        coming = self._next(chunk)
        return coming < self._end and (lowest is None or -float(coming) >= lowest)


# trace, bytes of the disk; a new process must be able to import it
Maker = Callable[[Trace, int], Policy]


def _stateless(policy: Policy, trace: Trace, disk_bytes: int) -> Policy:
    return policy


def _oracle(trace: Trace, disk_bytes: int) -> Policy:
    return Oracle(trace)


MAKERS: Mapping[str, Maker] = {
    name: partial(_stateless, policy) for name, policy in POLICIES.items()
} | {"oracle": _oracle}
