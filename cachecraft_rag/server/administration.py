"""Requests that change shared chunk-caches: priming, eviction and readmission; their bodies and their replies."""

from __future__ import annotations

import hmac
from collections.abc import Collection
from dataclasses import asdict

from cachecraft_rag.checks import check_flag
from cachecraft_rag.engine.base import AnswerEngine
from cachecraft_rag.server.documents import read_body, read_chunk_ids, read_priming
from cachecraft_rag.server.wire import ADMIN_HEADER
from cachecraft_rag.store import ChunkCacheStore, RowFilter

_NEEDS_KEY = f"to prime and evict, this server asks for its admin key in the header {ADMIN_HEADER}"
CLOSED = "this server primes and evicts for no client: start it with --admin-key-file"


def refusal_of(given: str, keys: Collection[str] | None) -> str:
    """Return why a request may change nothing; "" if it may. `given`: the value of its `ADMIN_HEADER`, "" without one.

    `keys`: one of which the header must have; None: every client may; (): none may.
    """
    if keys is None or any(hmac.compare_digest(given.encode(), key.encode()) for key in keys):
        return ""
    return _NEEDS_KEY if keys else CLOSED


def prime(engine: AnswerEngine, body: bytes) -> dict[str, object]:
    """Capture one document's chunks for all sessions of the engine's namespace; with "estimate": true only estimate it.

    The body is {"documents": [{"text": …}, …]}, in order, perhaps with "related", such a list: a document of one chunk
    is captured after these. Chunks that are stored after the same neighbours are skipped. Returns {"captured": number
    of stored captures, with the instruction's}; for an estimate {"missing": {variant id: tokens}, "disk": the fields of
    `DiskSpace`}.
    """
    asked = read_priming(body, context_length=engine.decoder.context_length)
    primer = engine.primer(related=lambda _: asked.related)
    if asked.estimate:
        return {"missing": primer.missing(asked.chunks), "disk": asdict(engine.disk_space())}
    return {"captured": primer.prime(asked.chunks)}


def evict(engine: AnswerEngine, body: bytes) -> dict[str, object]:
    """Remove the chunk-caches of chunks in the engine's namespace, of all sessions; those on a remote stay.

    The body is {"chunk_ids": [id, …]}. With "removed": true the chunks, known or not, were removed with their
    documents: chunk-caches captured after them leave too, also from a remote, and none is stored until `readmit`. In
    both cases waiting audits and new variants with these chunks are dropped. Returns {"variants": number removed here,
    "nbytes": their bytes on disk}.
    """
    given = read_body(body, ("chunk_ids", "removed"))
    ids = read_chunk_ids(given)
    is_removed = given.get("removed", False)
    check_flag("removed", is_removed)
    store = _store_of(engine)
    if is_removed:
        return asdict(store.remove_chunks(ids, namespace=engine.namespace))
    return asdict(store.evict(RowFilter(namespace=engine.namespace, chunk_ids=ids)))


def readmit(engine: AnswerEngine, body: bytes) -> dict[str, object]:
    """Let chunks that `evict` removed with their documents be stored again in the engine's namespace; ignore others.

    The body is {"chunk_ids": [id, …]}. Returns {"removed": ids of all chunks that stay removed there, sorted}.
    """
    ids = read_chunk_ids(read_body(body, ("chunk_ids",)))
    return {"removed": sorted(_store_of(engine).readmit_chunks(ids, namespace=engine.namespace))}


def _store_of(engine: AnswerEngine) -> ChunkCacheStore:
    assert isinstance(engine.store, ChunkCacheStore), "a server has its store"
    return engine.store
