"""Reads stored chunk-caches in the background: begins with the plan, ends with the answer's first token."""

from __future__ import annotations

from collections.abc import Sequence

from cachecraft_rag.store.loading.rate import Meter
from cachecraft_rag.store.loading.pending import Run, Tail
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.layout import StoredVariant

_READERS = 2  # of one request: one waits for the disk while the other verifies


class Loader:
    """Loads for the requests of one engine, and remembers how fast each tier was.

    Args:
        store: whose threads read, and which keeps in memory what came whole.
        layers: of the model.
    """

    def __init__(self, store: ChunkCacheStore, layers: int) -> None:
        self._store, self._layers = store, layers
        self._bytes_per_s: dict[str, float] = {}

    def begin(self, stored: Sequence[tuple[StoredVariant, int]]) -> Tail:
        """Begin to read; `stored` are opened variants and the positions they take in the prompt, in prompt order."""
        runs = [Run(one, start, first, last) for one, start in stored for first, last in one.runs]
        known = [self._bytes_per_s[one.tier] for one, _ in stored if one.tier in self._bytes_per_s]
        tail = Tail(self._layers, runs, Meter(min(known, default=None)))
        started = [self._store.read_in_background(tail.read) for _ in range(min(_READERS, len(runs)))]
        if runs and not any(started):
            tail.give_up("the store was closed meanwhile")
        return tail

    def end(self, tail: Tail) -> None:
        """Stop reading. What came whole stays in memory; what proved missing or damaged leaves the store."""
        tail.close()
        tiers = {run.stored.tier for run in tail.runs}
        if len(tiers) == 1 and tail.meter.bytes_per_s:  # of a mixture, nobody knows whose the rate is
            self._bytes_per_s[tiers.pop()] = tail.meter.bytes_per_s
        for stored in {id(run.stored): run.stored for run in tail.runs}.values():
            runs = [run for run in tail.runs if run.stored is stored]
            if (lost := tail.lost(stored)) is not None:
                self._store.lost(stored.variant, lost)
            elif any(run.layers for run in runs):
                self._store.keep(stored, whole=all(run.layers == self._layers for run in runs))
