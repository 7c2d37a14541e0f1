"""Eviction scores, for memory and disk: the lowest score leaves first, among equal scores the oldest.

Scores are plain numbers that change only when a variant is used, so a catalog can index them. Ageing works by a clock:
each new score starts from it, and it follows the scores of evicted variants (the inflation of
GreedyDual-Size-Frequency, Cherkasova 1998). The caller keeps the clock and passes it in, so all functions are pure.

To score in another way, write a `Policy` and register it in `POLICIES`; `StoreConfig.eviction` then accepts its
name. A policy sees neither age nor time: `catalog.eviction_rules` removes variants by these, whatever their score.
Limits on sums, such as `variants_per_chunk`, run in `Catalog.commit`, each with its field in `Limits` and its
`EvictionReason`.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

from cachecraft_rag.errors import ConfigError


class Use(NamedTuple):
    """Value of one use of a variant, or the sum of several. A tuple for speed: each request creates many.

    frequency  increase of f_r (Cache-Craft §3.3): 1 / r, where r is the share of the chunk's tokens that were
               recomputed, at least one token. The paper recomputes CFO of them, so it writes 1 / CFO
    saved      saved computation, as a fraction of the whole chunk: 1 - r

    >>> Use.of(0.25, 100), Use.of(0.0, 100)
    (Use(frequency=4.0, saved=0.75), Use(frequency=100.0, saved=1.0))
    >>> Use.of(0.25, 100) + Use.of(1.0, 100)
    Use(frequency=5.0, saved=0.75)
    """

    frequency: float
    saved: float

    @classmethod
    def of(cls, recomputed: float, tokens: int) -> Use:
        """Return one use of a chunk of `tokens` (1 or more); `recomputed` is cut to 0 to 1, and NaN counts as 1."""
        share = max(recomputed, 0.0) if recomputed <= 1.0 else 1.0
        return cls(1.0 / max(share, 1.0 / tokens), 1.0 - share)

    def __add__(self, other: Use) -> Use:  # type: ignore[override]  # no concatenation
        """Return the sum of both uses."""
        frequency, saved = self
        other_frequency, other_saved = other
        return Use(frequency + other_frequency, saved + other_saved)


class VariantFacts(NamedTuple):
    """Facts about a variant for a policy. A tuple for speed: one is created at every use of every variant.

    chunk_id, variant_id  ids of the variant
    tokens, nbytes        number of tokens, and bytes in memory or on disk
    exact_share           see `types.variants.Variant`
    used                  sum of all uses so far
    """

    chunk_id: str
    variant_id: str
    tokens: int
    nbytes: int
    exact_share: float
    used: Use = Use(0.0, 0.0)


class Policy(Protocol):
    """Formula of the eviction score. `score` is called when a variant enters catalog or memory, and at each use."""

    @property
    def name(self) -> str:
        """Name in the catalog. When it changes, the catalog computes all scores again at its opening, from clock 0."""

    def score(self, facts: VariantFacts, clock: float) -> float:
        """Return the new score of a variant; the one with the lowest score is evicted first.

        `clock` begins at 0 and is moved by `ticked` and `ticked_by_return`; a score may start from it, to age others.
        """


def worth(*, saved: float, exact_share: float) -> float:
    """Return (1 + saved) · (1 + exact share): more saving and more exact captures keep a variant longer.

    `saved` sums the `Use.saved` of all uses; `exact_share` is from 0 to 1. 1 + saved: the request that computed the
    chunk counts too. Otherwise every unused variant would be worth 0, and exact captures among them could not be
    preferred. 1 + exact share: otherwise a capture without any exact context would stay at 0 however often it is used.

    >>> worth(saved=0.0, exact_share=1.0), worth(saved=3.0, exact_share=0.5)
    (2.0, 6.0)
    """
    return (1.0 + saved) * (1.0 + exact_share)


def ticked(clock: float, score: float, *, used: bool) -> float:
    """Return the clock after a variant with this score was evicted.

    It moves to that score, or a tenth of the way if the variant was never used; it never goes back. GreedyDual always
    moves to the score: then a series of chunks that are requested once ages the others and soon evicts them
    (docs/decisions/eviction.md).

    >>> ticked(1.0, 5.0, used=True), ticked(1.0, 5.0, used=False), ticked(5.0, 1.0, used=True)
    (5.0, 1.4, 5.0)
    """
    return clock + max(0.0, score - clock) * (1.0 if used else 0.1)


def ticked_by_return(clock: float, lowest: float) -> float:
    """Return the clock after an evicted variant was stored again: halfway to the lowest score, but never back.

    The variant should not have been evicted, so the scores of the variants that stayed instead were too high.

    >>> ticked_by_return(1.0, 5.0), ticked_by_return(5.0, 1.0)
    (3.0, 5.0)
    """
    return clock + max(0.0, lowest - clock) / 2


@dataclass(frozen=True, slots=True)
class Saving:
    """The clock plus the computation saved so far per byte, less for inexact captures. The default.

    Saving is measured in tokens, which for one model is proportional to seconds. For f_r a use counts 1 / CFO, so one
    use after the origin prefix counts as much as the chunk has tokens. Here it counts 1, and a use that had to fix a
    tenth counts 0.9. A new chunk enters at the clock plus its worth when it was evicted, so a chunk that is requested
    once is evicted next, and one that is soon requested again is not.

    >>> Saving().score(VariantFacts("c", "v", tokens=100, nbytes=400, exact_share=1.0, used=Use(9.0, 3.0)), clock=5.0)
    7.0
    """

    name: str = "saving"

    def score(self, facts: VariantFacts, clock: float) -> float:
        """Return the new score: `clock` plus the variant's `worth` times its tokens per byte; 0 bytes count as 1."""
        _, _, tokens, nbytes, exact_share, (_, saved) = facts
        return clock + worth(saved=saved, exact_share=exact_share) * (tokens / max(nbytes, 1))


@dataclass(frozen=True, slots=True)
class ReuseFrequency:
    """f_r as published (Cache-Craft §3.3): Σ 1 / CFO, without ageing and without regard to size.

    >>> ReuseFrequency().score(VariantFacts("c", "v", tokens=100, nbytes=400, exact_share=0.0, used=Use(9.0, 3.0)), 5.0)
    9.0
    """

    name: str = "f_r"

    def score(self, facts: VariantFacts, clock: float) -> float:
        """Return the new score: f_r, the sum of 1 / CFO over all uses; `clock` does not count."""
        return facts.used.frequency


class Scored(Protocol):
    """An item with an eviction score; among equal scores the lower `order` leaves first."""

    score: float
    order: float


class LowestScored:
    """The item of a dictionary with the lowest score, from a heap that may hold outdated entries.

    A missing entry only delays its item: the heap is rebuilt once it has no valid entry, or too many outdated ones. So
    an interrupt at any line costs order, nothing else. Rejected: a scan for the minimum, which would hold the GIL for a
    millisecond per 10,000 items.
    """

    def __init__(self, items: Mapping[str, Scored]) -> None:
        self._items = items
        self._heap: list[tuple[float, float, str]] = []

    def push(self, name: str) -> None:
        """Note the score of an item that was added or whose score changed."""
        item = self._items[name]
        heapq.heappush(self._heap, (item.score, item.order, name))
        # mostly outdated entries: rebuild it, amortised O(1)
        if len(self._heap) > 2 * len(self._items) + 64:
            self._rebuild()

    def name(self) -> str | None:
        """Return the name of the item with the lowest score, of equal ones the lowest `order`; None without items.

        An item that was added, or whose score changed, may be passed over until `push`.
        """
        while True:
            while self._heap:
                score, order, name = self._heap[0]
                item = self._items.get(name)
                if item is not None and (item.score, item.order) == (score, order):
                    return name
                heapq.heappop(self._heap)
            if not self._items:
                return None
            self._rebuild()

    def _rebuild(self) -> None:
        heap = [(item.score, item.order, name) for name, item in self._items.items()]
        heapq.heapify(heap)
        self._heap = heap


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {policy.name: policy for policy in (Saving(), ReuseFrequency())}
)


def policy_named(name: str) -> Policy:
    """Return the policy of that name, "saving" or "f_r": always the same object."""
    try:
        return POLICIES[name]
    except KeyError:
        raise ConfigError(
            f"unknown eviction policy {name!r}; choose one of {', '.join(POLICIES)}"
        ) from None
