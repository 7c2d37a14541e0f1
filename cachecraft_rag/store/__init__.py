"""The chunk-cache store: rows in a catalog, tensors in memory, in files and on a remote, and the rules that keep them
in step.

    with ChunkCacheStore.open("chunk-caches/", disk_bytes=20 << 30) as store:  # remote="redis://…" to share them
        variants = store.lookup(namespace, fingerprint, chunk_ids)  # rows only, a millisecond
        loaded = store.load(variants[chunk_ids[0]][0])              # from memory, else disk, else the remote
        store.put(capture)                                          # returns at once; a background thread writes

A variant that cannot be served is a miss with a reason. A store of another version is set aside and built anew.
A capture that cannot be written is dropped with a logged reason. Neither raises an error. Only `open` and the
administrator's methods (`stats`, `rows`, `evict`, `check`) raise `StoreError`.

Needs POSIX file locks (Linux, macOS) and a local disk: SQLite's WAL does not work over network file systems.

The names are imported on first use (PEP 562): indexing documents needs small modules of this package, but not torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

_HOME = {
    "CATALOG_FILE": "durable",
    "CheckReport": "durable",
    "ChunkCacheStore": "chunk_store",
    "Evicted": "durable",
    "Finding": "durable",
    "Listed": "catalog_records",
    "RowFilter": "catalog_records",
    "StoreConfig": "config",
    "StoreStats": "config",
}


def __getattr__(name: str) -> object:
    """Import a public name from its module when it is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value  # the next access finds it without this function
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not, for completion in a shell."""
    return sorted([*globals(), *__all__])
