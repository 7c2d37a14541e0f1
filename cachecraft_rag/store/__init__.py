"""The chunk-cache store: rows in a catalog, tensors in memory, in files and on a remote, and the rules that keep them
in step.

    with ChunkCacheStore.open("chunk-caches/", disk_bytes=20 << 30) as store:  # remote="redis://…" to share them
        variants = store.find(namespace, fingerprint, chunk_ids).variants  # rows only, a millisecond
        loaded = store.load(variants[chunk_ids[0]][0])              # from memory, else disk, else the remote
        store.put(capture)                                          # returns at once; a background thread writes

A variant that cannot be served is a miss with a reason. A store of another version is set aside and built again, if its
folder can be written. A capture that cannot be written is dropped with a logged reason. None of these raises an error.

Needs POSIX file locks (Linux, macOS) and a local disk: SQLite's WAL does not work over network file systems.
"""

from cachecraft_rag.store.catalog_records import Listed, RowFilter
from cachecraft_rag.store.chunk_store import ChunkCacheStore
from cachecraft_rag.store.config import StoreConfig, StoreStats
from cachecraft_rag.store.durable import CATALOG_FILE, CheckReport, Evicted, Finding

__all__ = [
    "CATALOG_FILE",
    "CheckReport",
    "ChunkCacheStore",
    "Evicted",
    "Finding",
    "Listed",
    "RowFilter",
    "StoreConfig",
    "StoreStats",
]
