"""Eviction as document stores see it, on this machine or on a server's."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from cachecraft_rag.store.catalog_records import RowFilter
from cachecraft_rag.store.durable import Evicted


@runtime_checkable
class Caches(Protocol):
    """Chunk-caches that can be evicted. Two implementations stand: `ChunkCacheStore` and `vllm.client.ServerCaches`."""

    def evict(self, chosen: RowFilter | None = None) -> Evicted:
        """Remove the chosen chunk-caches; returns how many, and the bytes they took on disk."""
        ...
