"""Reads stored chunk-caches in the background: begins with the plan, ends with the answer's first token."""

from __future__ import annotations

from collections.abc import Sequence, Set

from cachecraft_rag.store.chunk_store import ChunkCacheStore
from cachecraft_rag.store.layout import StoredVariant
from cachecraft_rag.store.loading.pending import Extent, PendingLoads
from cachecraft_rag.store.loading.rate import Meter
from cachecraft_rag.types.store_reasons import LoadFailure

_READERS = 2  # of one request: one waits for the disk while the other verifies


class Loader:
    """Loads for the requests of one engine, and remembers how fast each tier was.

    Args:
        store: its threads read, and it keeps in memory what was read as a whole.
        layers: number of the model's layers.
    """

    def __init__(self, store: ChunkCacheStore, layers: int) -> None:
        self._store = store
        self._layers = layers
        self._bytes_per_s: dict[str, float] = {}
        self._cpu_s_per_byte: dict[str, float] = {}

    def begin(
        self, stored: Sequence[tuple[StoredVariant, int]], unused: Set[int] = frozenset()
    ) -> PendingLoads:
        """Begin to read in at most two threads of the store; return the loads at once. Hand them to `end`.

        The expected rate is the lowest of those remembered for the tiers of the variants. After the store was closed,
        or without room for a thread, all extents fail with `LoadFailure.CLOSED`.

        Args:
            stored: pairs in prompt order: an opened variant whose tensor is allocated, and its first token's position.
            unused: positions that need not be read; extents with other tokens too are read nevertheless.
        """
        extents = [
            Extent(variant, start, first, last, kept=self._store.keeps(variant))
            for variant, start in stored
            for first, last in variant.extents
        ]
        tiers = {variant.tier for variant, _ in stored}
        rates = [self._bytes_per_s[tier] for tier in tiers if tier in self._bytes_per_s]
        costs = [self._cpu_s_per_byte.get(tier, 0.0) for tier in tiers]
        meter = Meter(min(rates, default=None), cpu_s_per_byte=max(costs, default=0.0))
        loads = PendingLoads(self._layers, extents, meter)
        loads.leave_out(unused)
        started = [
            self._store.read_in_background(loads.read) for _ in range(min(_READERS, len(extents)))
        ]
        if extents and not any(started):
            loads.fail(LoadFailure.CLOSED, "the store was closed meanwhile")
        return loads

    def end(self, loads: PendingLoads) -> None:
        """Stop reading and close all chunk-caches of the request. Reads that run end soon; this does not wait for them.

        Chunk-caches of which a part failed to load are passed to `ChunkCacheStore.lost`, others of which a layer was
        read to `keep`. The rate is remembered if it is known and all were in one tier. A second call does nothing.
        """
        if not loads.close():
            return
        tiers = {extent.stored.tier for extent in loads.extents}
        if len(tiers) == 1 and loads.meter.came:  # of a mixture, it is not known whose the rate is
            tier = tiers.pop()
            self._bytes_per_s[tier] = loads.meter.bytes_per_s
            self._cpu_s_per_byte[tier] = loads.meter.cpu_s_per_byte
        for stored in loads.chunks():
            extents = loads.of(stored)
            if (lost := loads.lost(stored)) is not None:
                self._store.lost(stored.variant, lost)
            elif any(extent.layers for extent in extents):
                self._store.keep(
                    stored, whole=all(extent.layers == self._layers for extent in extents)
                )
