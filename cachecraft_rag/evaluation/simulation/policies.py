"""Eviction policies to compare with ours.

A policy that ranks variants by one number runs in the place of ours. S3-FIFO moves variants between queues instead, so
it frees the room itself.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from types import MappingProxyType

from cachecraft_rag.evaluation.simulation.trace import Trace
from cachecraft_rag.store.eviction import Policy, ReuseFrequency, Saving, VariantFacts


class Rival:
    """A policy with a memory of its own; this one never prefers anything. Calls come in the order of the trace."""

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


class LRU(Rival):
    """The least recently used variant leaves."""

    name = "lru"

    def __init__(self) -> None:
        self._ticks = itertools.count(1)

    def score(self, standing: VariantFacts, clock: float) -> float:
        """See `Rival`."""
        return float(next(self._ticks))


class S3FIFO(Rival):
    """Two queues and a list of ghosts (Yang et al., SOSP 2023), by bytes; the small queue has a tenth of the budget."""

    name = "s3-fifo"

    def __init__(self, budget: int) -> None:
        self._small_budget = budget // 10
        self._small: deque[str] = deque()
        self._main: deque[str] = deque()
        self._small_bytes = 0
        self._held: dict[str, tuple[int, int, bool]] = {}  # chunk, bytes, True in the small queue
        self._uses: dict[str, int] = {}
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    def score(self, standing: VariantFacts, clock: float) -> float:
        """Count the use; the number decides nothing."""
        if standing.variant_id in self._uses:
            self._uses[standing.variant_id] = min(3, self._uses[standing.variant_id] + 1)
        return 0.0

    def victims(self, excess: int) -> list[str]:
        """See `Rival`."""
        gone: list[str] = []
        while excess > 0 and (self._small or self._main):
            small = bool(self._small) and (self._small_bytes >= self._small_budget or not self._main)
            variant_id = (self._small if small else self._main).popleft()
            chunk, nbytes, _ = self._held[variant_id]
            uses = self._uses[variant_id]
            if uses > (1 if small else 0):
                self._main.append(variant_id)
                self._uses[variant_id] = 0 if small else uses - 1
                self._held[variant_id] = (chunk, nbytes, False)
            else:
                gone.append(variant_id)
                excess -= nbytes
                del self._held[variant_id], self._uses[variant_id]
                if small:
                    self._ghosts[chunk] = None
            self._small_bytes -= nbytes if small else 0
        while len(self._ghosts) > len(self._held):
            self._ghosts.popitem(last=False)
        return gone

    def added(self, variant_id: str, chunk: int, nbytes: int) -> None:
        """See `Rival`."""
        known = chunk in self._ghosts
        self._ghosts.pop(chunk, None)
        (self._main if known else self._small).append(variant_id)
        self._small_bytes += 0 if known else nbytes
        self._held[variant_id] = (chunk, nbytes, not known)
        self._uses[variant_id] = 0

    def evicted(self, variant_id: str) -> None:
        """Take a variant out of its queue when it left for another reason, such as too many variants of its chunk."""
        if variant_id in self._held:
            _, nbytes, small = self._held.pop(variant_id)
            self._uses.pop(variant_id)
            (self._small if small else self._main).remove(variant_id)
            self._small_bytes -= nbytes if small else 0


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


Maker = Callable[[Trace, int], Policy]
MAKERS: Mapping[str, Maker] = MappingProxyType(
    {
        "saving": lambda trace, budget: Saving(),
        "f_r": lambda trace, budget: ReuseFrequency(),
        "lru": lambda trace, budget: LRU(),
        "s3-fifo": lambda trace, budget: S3FIFO(budget),
        "oracle": lambda trace, budget: Oracle(trace),
    }
)
