"""The request "which of these chunks do you hold", for routers that send a session where its chunks are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from cachecraft_rag.engine.base import AnswerEngine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.server.documents import read_body, read_chunk_ids, read_documents
from cachecraft_rag.server.wire import MOST_DOCUMENTS
from cachecraft_rag.store import ChunkCacheStore


def holds(engine: AnswerEngine, body: bytes, *, session: str | None) -> dict[str, object]:
    """Return what the server holds of chunks, from its catalog: no model runs, and no remote is asked.

    The body is {"chunk_ids": [id, …]} or {"documents": [{"text": …}, …]}, at most 1,000. Returns {"chunks": the fields
    of `HeldChunk` in the order given, "tokens": their sum}; private chunk-caches of `session` count too.
    """
    ids = _chunk_ids(read_body(body, ("chunk_ids", "documents")))
    store = engine.store
    assert isinstance(store, ChunkCacheStore), "a server has its store"
    held = store.held(engine.namespace, engine.decoder.fingerprint, ids, session=session)
    return {
        "chunks": [asdict(chunk) for chunk in held],
        "tokens": sum(chunk.tokens for chunk in held),
    }


def _chunk_ids(body: Mapping[str, object]) -> tuple[str, ...]:
    if ("chunk_ids" in body) == ("documents" in body):
        raise ConfigError('write {"chunk_ids": ["…"]} or {"documents": [{"text": "…"}]}')
    if "documents" in body:
        return tuple(chunk.chunk_id for chunk in read_documents(body["documents"]))
    ids = read_chunk_ids(body)
    if len(ids) > MOST_DOCUMENTS:
        raise ConfigError(f"{len(ids)} ids are too many; ask for at most {MOST_DOCUMENTS} at once")
    return ids
