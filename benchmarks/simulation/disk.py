"""The catalog's eviction rules over plain dictionaries: the same scores, clock and memory of what left, no files."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from benchmarks.simulation.policies import Rival
from cachecraft_rag.store.catalog_records import Limits
from cachecraft_rag.store.eviction import (
    LowestScored,
    Policy,
    Use,
    VariantFacts,
    ticked,
    ticked_by_return,
)
from cachecraft_rag.types.variants import Variant

_LEAST_REMEMBERED = 1000


@dataclass(slots=True)
class _Row:
    """A stored variant of a chunk; `order` is when it was captured."""

    variant: Variant
    chunk: int
    used: Use
    score: float
    order: float


class Disk:
    """Stored variants within limits.

    Attributes:
        nbytes: of all variants.
        evicted: number of variants that had to leave so far.
    """

    def __init__(self, policy: Policy, limits: Limits) -> None:
        self._policy, self._limits = policy, limits
        self._rival = policy if isinstance(policy, Rival) else Rival()
        self._rows: dict[str, _Row] = {}
        self._of_chunk: dict[int, list[str]] = {}
        self._lowest = LowestScored(self._rows)
        # chunk → uses, place in the line
        self._departed: OrderedDict[int, tuple[Use, int]] = OrderedDict()
        self._clock = 0.0
        self.nbytes = self.evicted = 0

    def variants(self, chunk: int) -> list[Variant]:
        """Variants of a chunk, in the order of a catalog."""
        return [self._rows[name].variant for name in sorted(self._of_chunk.get(chunk, ()))]

    def variants_per_chunk(self) -> list[int]:
        """Number of variants of each stored chunk."""
        return [len(names) for names in self._of_chunk.values()]

    def record_use(self, variant: Variant, use: Use) -> None:
        """See `Catalog.record_uses`."""
        row = self._rows[variant.variant_id]
        row.used += use
        row.score = self._score(variant, row.chunk, row.used)
        self._lowest.push(variant.variant_id)

    def add(self, variant: Variant, chunk: int) -> list[Variant] | None:
        """Store a variant and return those that made room for it; None if it is stored already, or refused."""
        name, nbytes, limits = variant.variant_id, variant.nbytes, self._limits
        if nbytes > limits.disk_bytes or name in self._rows:
            return None
        excess = self.nbytes + nbytes - limits.disk_bytes
        first = self._lowest.name() if excess > 0 else None
        if not self._rival.admits(chunk, None if first is None else self._rows[first].score):
            return None
        gone = [self._remove(victim) for victim in self._rival.victims(excess)]
        while (
            self.nbytes + nbytes > limits.disk_bytes and (lowest := self._lowest.name()) is not None
        ):
            gone.append(self._leave(lowest))
        beside = sorted(
            self._of_chunk.get(chunk, ()),
            key=lambda one: (self._rows[one].score, self._rows[one].order),
        )
        used = Use(0.0, 0.0)
        known, place = self._departed.pop(chunk, (None, 0))
        if (
            known is not None
            and not beside
            and place > self._last_place() - self._most_remembered()
        ):
            used = known
            if (lowest := self._lowest.name()) is not None:
                self._clock = ticked_by_return(self._clock, self._rows[lowest].score)
        gone += [
            self._remove(one)
            for one in beside[: max(0, len(beside) + 1 - limits.variants_per_chunk)]
        ]
        score = self._score(variant, chunk, used)
        self._rival.added(name, chunk, nbytes)  # last: S3-FIFO counts uses, and a capture is none
        while (
            len(self._rows) >= limits.max_variants and (lowest := self._lowest.name()) is not None
        ):
            gone.append(self._leave(lowest))
        self._rows[name] = _Row(variant, chunk, used, score, variant.created)
        self._lowest.push(name)
        self._of_chunk.setdefault(chunk, []).append(name)
        self.nbytes += nbytes
        self.evicted += len(gone)
        return gone

    def _score(self, variant: Variant, chunk: int, used: Use) -> float:
        facts = (
            str(chunk),
            variant.variant_id,
            variant.tokens,
            variant.nbytes,
            variant.exact_share,
        )
        return self._policy.score(VariantFacts(*facts, used), self._clock)

    def _leave(self, name: str) -> Variant:
        """Remove a variant that makes way for others: the clock moves, and the chunk is remembered."""
        row = self._rows[name]
        self._clock = max(self._clock, ticked(self._clock, row.score, used=row.used.saved > 0.0))
        self._departed.pop(row.chunk, None)
        self._departed[row.chunk] = row.used + Use(0.0, 1.0), self._last_place() + 1
        if len(self._departed) > self._most_remembered():
            self._departed.popitem(last=False)
        return self._remove(name)

    def _last_place(self) -> int:
        return next((place for _, place in reversed(self._departed.values())), 0)

    def _most_remembered(self) -> int:
        return max(_LEAST_REMEMBERED, len(self._rows))

    def _remove(self, name: str) -> Variant:
        row = self._rows.pop(name)
        names = self._of_chunk[row.chunk]
        names.remove(name)
        if not names:
            del self._of_chunk[row.chunk]
        self.nbytes -= row.variant.nbytes
        self._rival.evicted(name)
        return row.variant
