"""Eviction policies to compare with ours, in the place where the catalog has its own.

Where a number per variant says it all, the catalog evicts by that number, as it does by ours. S3-FIFO moves between
queues instead, so it frees the room itself before the catalog has to.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from types import MappingProxyType

from cachecraft_rag.evaluation.simulation.trace import Trace
from cachecraft_rag.store.eviction import Policy, ReuseFrequency, Saving, Standing


class Simulated:
    """A policy whose memory is its own; this one never prefers anything. Every call comes in the order of the trace."""

    name = "simulated"

    def score(self, standing: Standing, clock: float) -> float:
        """See `store.eviction.Policy`."""
        return 0.0

    def asked(self, request: int) -> None:
        """The request of this number in the trace begins."""

    def admits(self, chunk: int, excess: int) -> bool:
        """Whether a capture is stored at all; `excess` bytes would have to leave for it."""
        return True

    def victims(self, excess: int) -> list[str]:
        """Variants to remove so that at least so many bytes become free; none where the scores decide."""
        return []

    def came(self, variant_id: str, chunk: int, nbytes: int) -> None:
        """A variant was stored."""

    def left(self, variant_id: str) -> None:
        """A variant was removed."""


class LRU(Simulated):
    """What was not used for the longest time leaves."""

    name = "lru"

    def __init__(self) -> None:
        self._ticks = itertools.count(1)

    def score(self, standing: Standing, clock: float) -> float:
        """See `store.eviction.Policy`."""
        return float(next(self._ticks))


class FIFO(LRU):
    """What came first leaves."""

    name = "fifo"

    def __init__(self) -> None:
        super().__init__()
        self._scores: dict[str, float] = {}

    def score(self, standing: Standing, clock: float) -> float:
        """See `store.eviction.Policy`."""
        return self._scores.setdefault(standing.variant_id, float(next(self._ticks)))

    def left(self, variant_id: str) -> None:
        """See `Simulated`."""
        self._scores.pop(variant_id, None)


class LFU(Simulated):
    """What was used least often since it came leaves."""

    name = "lfu"

    def __init__(self) -> None:
        self._uses: Counter[str] = Counter()

    def score(self, standing: Standing, clock: float) -> float:
        """See `store.eviction.Policy`."""
        self._uses[standing.variant_id] += 1
        return float(self._uses[standing.variant_id])

    def left(self, variant_id: str) -> None:
        """See `Simulated`."""
        self._uses.pop(variant_id, None)


class S3FIFO(Simulated):
    """Two queues and a list of ghosts (Yang et al., SOSP 2023), by bytes; the small queue has a tenth of the budget."""

    name = "s3-fifo"

    def __init__(self, budget: int) -> None:
        self._small_budget = budget // 10
        self._small: deque[str] = deque()
        self._main: deque[str] = deque()
        self._small_bytes = 0
        self._held: dict[str, tuple[int, int, bool]] = {}  # chunk, bytes, whether in the small queue
        self._uses: dict[str, int] = {}
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    def score(self, standing: Standing, clock: float) -> float:
        """Count the use; the number decides nothing."""
        if standing.variant_id in self._uses:
            self._uses[standing.variant_id] = min(3, self._uses[standing.variant_id] + 1)
        return 0.0

    def victims(self, excess: int) -> list[str]:
        """See `Simulated`."""
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

    def came(self, variant_id: str, chunk: int, nbytes: int) -> None:
        """See `Simulated`."""
        known = chunk in self._ghosts
        self._ghosts.pop(chunk, None)
        (self._main if known else self._small).append(variant_id)
        self._small_bytes += 0 if known else nbytes
        self._held[variant_id] = (chunk, nbytes, not known)
        self._uses[variant_id] = 0

    def left(self, variant_id: str) -> None:
        """See `Simulated`; what others removed, because a chunk had too many variants, leaves its queue as well."""
        if variant_id in self._held:
            _, nbytes, small = self._held.pop(variant_id)
            self._uses.pop(variant_id)
            (self._small if small else self._main).remove(variant_id)
            self._small_bytes -= nbytes if small else 0


class Oracle(Simulated):
    """Belady: what is needed again last leaves, and what is needed later than all that is stored is not stored."""

    name = "oracle"

    def __init__(self, trace: Trace) -> None:
        self._uses: list[list[int]] = [[] for _ in trace.tokens]
        for number, request in enumerate(trace.requests):
            for chunk in request:
                self._uses[chunk].append(number)
        self._end = len(trace.requests)
        self._now = 0
        self._chunks: dict[str, int] = {}
        self._heap: list[tuple[float, str]] = []  # entries of before are void

    def _next(self, chunk: int) -> int:
        uses = self._uses[chunk]
        place = bisect_right(uses, self._now)
        return uses[place] if place < len(uses) else self._end

    def score(self, standing: Standing, clock: float) -> float:
        """See `store.eviction.Policy`."""
        score = -float(self._next(self._chunks[standing.variant_id]))
        heapq.heappush(self._heap, (score, standing.variant_id))
        return score

    def asked(self, request: int) -> None:
        """See `Simulated`."""
        self._now = request

    def admits(self, chunk: int, excess: int) -> bool:
        """See `Simulated`."""
        coming = self._next(chunk)
        if coming >= self._end:
            return False
        if excess <= 0:
            return True
        while self._heap and not self._valid():
            heapq.heappop(self._heap)
        return not self._heap or -float(coming) >= self._heap[0][0]

    def _valid(self) -> bool:
        score, variant_id = self._heap[0]
        return variant_id in self._chunks and -float(self._next(self._chunks[variant_id])) == score

    def came(self, variant_id: str, chunk: int, nbytes: int) -> None:
        """See `Simulated`."""
        self._chunks[variant_id] = chunk

    def left(self, variant_id: str) -> None:
        """See `Simulated`."""
        self._chunks.pop(variant_id, None)


Maker = Callable[[Trace, int], Policy]
MAKERS: Mapping[str, Maker] = MappingProxyType(
    {
        "saving": lambda trace, budget: Saving(),
        "f_r": lambda trace, budget: ReuseFrequency(),
        "lru": lambda trace, budget: LRU(),
        "lfu": lambda trace, budget: LFU(),
        "fifo": lambda trace, budget: FIFO(),
        "s3-fifo": lambda trace, budget: S3FIFO(budget),
        "oracle": lambda trace, budget: Oracle(trace),
    }
)
