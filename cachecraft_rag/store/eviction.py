"""Eviction order: one score for memory and disk; the lowest leaves first, among equals the oldest.

Scores are plain numbers that change only when a variant is used, so a catalog can index them. They age all the same:
each is counted from a clock, which follows the scores of what had to leave (the inflation of GreedyDual-Size-Frequency,
Cherkasova 1998). The caller keeps the clock and hands it in, so everything here is a pure function.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

from cachecraft_rag.errors import ConfigError


class Use(NamedTuple):
    """Worth of one use of a variant, or of several. A tuple for speed: each request makes many.

    frequency  what it adds to f_r (Cache-Craft §3.3): 1 / CFO, with CFO bounded below by one token of the chunk
    saved      what it saved, in computations of the whole chunk: 1 - CFO

    >>> Use.of(0.25, 100), Use.of(0.0, 100)
    (Use(frequency=4.0, saved=0.75), Use(frequency=100.0, saved=1.0))
    >>> Use.of(0.25, 100) + Use.of(1.0, 100)
    Use(frequency=5.0, saved=0.75)
    """

    frequency: float
    saved: float

    @classmethod
    def of(cls, cfo: float, tokens: int) -> Use:
        """One use of a chunk of `tokens` tokens. NaN (which SQLite refuses) and CFO above 1 count as 1."""
        cfo = max(cfo, 0.0) if cfo <= 1.0 else 1.0
        return cls(1.0 / max(cfo, 1.0 / tokens), 1.0 - cfo)

    def __add__(self, other: Use) -> Use:  # type: ignore[override]  # no concatenation
        """Both uses."""
        frequency, saved = self
        more, also = other
        return Use(frequency + more, saved + also)


class VariantFacts(NamedTuple):
    """Facts for a policy. A tuple for speed: one is made at every use of every variant.

    chunk_id, variant_id  whose standing it is
    tokens, nbytes        of the chunk; and what it takes where it lies
    exact_share           see `types.Variant`
    used                  all uses so far
    """

    chunk_id: str
    variant_id: str
    tokens: int
    nbytes: int
    exact_share: float
    used: Use = Use(0.0, 0.0)


class Policy(Protocol):
    """Rule for the score. `score` is called when a variant is stored and at each use, never in between."""

    @property
    def name(self) -> str:
        """Name in the catalog, which computes scores of another policy again when it is opened."""

    def score(self, standing: VariantFacts, clock: float) -> float:
        """The score from now on; `clock` is 0 at first and moves as `ticked` and `ticked_by_return` say."""


def worth(*, saved: float, exact_share: float) -> float:
    """(1 + saved) · (1 + exact share): the more a variant saves and the more exact its capture, the longer it stays.

    1 + saved: the request that computed the chunk asked for it too; else every unused variant would be worth 0, and
    exact captures could not be preferred among them. 1 + exact share instead of exact share: a capture without any
    exact context would stay at 0 however often it serves; like this it needs at most twice the use.

    >>> worth(saved=0.0, exact_share=1.0), worth(saved=3.0, exact_share=0.5)
    (2.0, 6.0)
    """
    return (1.0 + saved) * (1.0 + exact_share)


def ticked(clock: float, score: float, *, used: bool) -> float:
    """The clock after something with this score had to leave: all the way to it, or a tenth of it if it was never used.

    GreedyDual always goes all the way. Then a run of chunks that are asked for once ages the others, and soon evicts
    them (docs/decisions/eviction.md has the numbers).

    >>> ticked(1.0, 5.0, used=True), ticked(1.0, 5.0, used=False), ticked(5.0, 1.0, used=True)
    (5.0, 1.4, 5.0)
    """
    return clock + max(0.0, score - clock) * (1.0 if used else 0.1)


def ticked_by_return(clock: float, lowest: float) -> float:
    """The clock after something came back that had to leave: half the way to the lowest score.

    It should not have left, so the score of what stayed instead was too high.

    >>> ticked_by_return(1.0, 5.0), ticked_by_return(5.0, 1.0)
    (3.0, 5.0)
    """
    return clock + max(0.0, lowest - clock) / 2


@dataclass(frozen=True, slots=True)
class Saving:
    """The clock, and the computation saved so far per byte, less for inexact captures. The default.

    Saved is counted in tokens: with one model, seconds are the same times a constant. f_r counts 1 / CFO for a use, so
    one use after the origin prefix counts as much as the chunk has tokens; here it counts 1, as one that had to fix
    a tenth counts 0.9. A new chunk enters at the clock plus its worth when it left, so a chunk that is asked for
    once is the next to leave, and one that comes back soon is not.

    >>> Saving().score(VariantFacts("c", "v", tokens=100, nbytes=400, exact_share=1.0, used=Use(9.0, 3.0)), clock=5.0)
    7.0
    """

    name: str = "saving"

    def score(self, standing: VariantFacts, clock: float) -> float:
        """See `Policy.score`."""
        _, _, tokens, nbytes, exact_share, (_, saved) = standing
        return clock + worth(saved=saved, exact_share=exact_share) * (tokens / max(nbytes, 1))


@dataclass(frozen=True, slots=True)
class ReuseFrequency:
    """f_r as published (Cache-Craft §3.3): Σ 1 / CFO, without ageing, whatever a variant takes.

    >>> ReuseFrequency().score(VariantFacts("c", "v", tokens=100, nbytes=400, exact_share=0.0, used=Use(9.0, 3.0)), 5.0)
    9.0
    """

    name: str = "f_r"

    def score(self, standing: VariantFacts, clock: float) -> float:
        """See `Policy.score`."""
        return standing.used.frequency


class Scored(Protocol):
    """Something that has an eviction score; among equal scores the lower `order` leaves first."""

    score: float
    order: float


class LowestScored:
    """The lowest-scored item of a dictionary, kept in a heap with void entries: a new score is a push.

    The dictionary is the truth and the heap only a hint, rebuilt where it misses an item, so a caller interrupted at
    any line loses nothing. A scan for the minimum was rejected: it would hold the GIL for a millisecond per 10,000
    items.
    """

    def __init__(self, items: Mapping[str, Scored]) -> None:
        self._items = items
        self._heap: list[tuple[float, float, str]] = []

    def push(self, name: str) -> None:
        """Note the score of an item that was added or whose score changed."""
        item = self._items[name]
        heapq.heappush(self._heap, (item.score, item.order, name))
        if len(self._heap) > 2 * len(self._items) + 64:  # mostly void entries: start afresh, amortised O(1)
            self._rebuild()

    def name(self) -> str | None:
        """Name of the lowest-scored item; None if there are no items."""
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


POLICIES: Mapping[str, Policy] = MappingProxyType({policy.name: policy for policy in (Saving(), ReuseFrequency())})


def policy_named(name: str) -> Policy:
    """The policy of that name; ConfigError lists the known ones."""
    try:
        return POLICIES[name]
    except KeyError:
        raise ConfigError(f"unknown eviction policy {name!r}; choose one of {', '.join(POLICIES)}") from None
