"""Removing chunks from the index together with their chunk-caches: of all tenants, or of the one of `ServerCaches`."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from cachecraft_rag.checks import check_text, listed
from cachecraft_rag.errors import (
    CacheCraftError,
    ConfigError,
    DocumentError,
    ServerError,
    StoreError,
)
from cachecraft_rag.retrievers.index.faiss_store import FaissStore
from cachecraft_rag.retrievers.index.filters import composed
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.durable import Caches

GRACE_S = 60.0  # an upsert of a framework is a deletion, then embedding, then an addition
logger = logging.getLogger("cachecraft_rag.retrievers.index.removal")


@dataclass(frozen=True, slots=True)
class RemovalReport:
    """Documents removed by doc_id, chunks left without any document, and the number of chunk-caches deleted.

    `chunk_caches` counts all that `evict_removed` deleted, also for earlier removals; `nbytes` is their disk space.
    """

    documents: tuple[str, ...]
    chunk_ids: tuple[str, ...]
    chunk_caches: int
    nbytes: int


def remove_documents(
    index: FaissStore, names: Iterable[str], *, caches: Caches | None = None
) -> RemovalReport:
    """Remove documents by `doc_id`, or all whose `doc_id` begins with a name that ends in a slash (`docs/`).

    A chunk that another document has too stays, with its chunk-caches. Files stay, and `index_folder` adds them again.
    Each document is one transaction: if the index fails, those before it stay removed. Chunk-caches that could not be
    deleted, now or by an earlier call, are deleted by the next call; without `caches` they are left alone.

    Raises DocumentError for a name that no document has; no document was removed then. After a StoreError or
    ServerError the documents were removed, if all names are known, but not their chunk-caches.
    """
    known = [document.doc_id for document in index.documents()]
    chosen: dict[str, None] = {}
    for name in listed("names", names):
        check_text("a document's name", name, empty=False)
        wanted = composed(name)
        named = [
            doc_id
            for doc_id in known
            if composed(doc_id) == wanted
            or (name.endswith("/") and composed(doc_id).startswith(wanted))
        ]
        if not named:
            # an earlier call may have removed it, but not its chunk-caches
            evict_removed(index, caches)
            near = get_close_matches(name, known, n=1, cutoff=0.5)
            meant = f"did you mean {near[0]}?" if near else "`cachecraft documents ls` lists them"
            raise DocumentError(f"{name}: there is no such document in the index; {meant}")
        chosen |= dict.fromkeys(named)
    gone = [chunk_id for doc_id in chosen for chunk_id in index.delete_document(doc_id).removed]
    index.compact()
    try:
        freed = evict_removed(index, caches)
    except (StoreError, ServerError) as error:
        raise type(error)(
            f"the documents left the index, but their chunk-caches could not be deleted: {error} They are deleted by "
            "the next `documents remove` or `index`, or when the store is opened again."
        ) from error
    return RemovalReport(tuple(chosen), tuple(gone), *freed)


def evict_removed(index: FaissStore, caches: Caches | None) -> tuple[int, int]:
    """Delete the chunk-caches of all chunks that left the index and are not back; return how many, and their bytes.

    Those that were captured after such a chunk are deleted too. None of either kind is stored again until the chunk is
    back in the index and this is called. The index keeps a note of these chunks (`FaissStore.removed_chunks`) until
    this succeeds, in any process. Without `caches` nothing is done: (0, 0), and the notes stay.
    """
    if caches is None:
        return 0, 0
    removed = index.removed_chunks()
    freed = evict_chunks(caches, removed)
    if removed:
        index.forget_removed(removed.values())
    if isinstance(caches, ChunkCacheStore) or index.has_removed:
        _readmit(index, caches)
    return freed


def _readmit(index: FaissStore, caches: Caches) -> None:
    """Let chunks that are back in the index be stored again; a failure is logged, and the next call tries again."""
    try:
        back = index.present(caches.readmit_chunks(()))
        if back:
            caches.readmit_chunks(tuple(back))
            # removed by another process since
            evict_chunks(caches, back - index.present(back))
    except (StoreError, ServerError, ConfigError) as error:
        logger.warning(
            "chunks that were removed and added again are not reused until the next addition or opening: %s",
            error,
        )


def evict_chunks(caches: Caches | None, chunk_ids: Iterable[str]) -> tuple[int, int]:
    """Delete the chunk-caches of these chunks and those captured after them; return their number and bytes on disk.

    New ones are refused until `Caches.readmit_chunks`. Nothing happens without `caches` or chunks: (0, 0).
    """
    chosen = tuple(chunk_ids)
    if caches is None or not chosen:
        return 0, 0
    freed = caches.remove_chunks(chosen)
    return freed.variants, freed.nbytes


class Evictions:
    """Deletion of the chunk-caches of chunks that left an index and did not come back.

    A framework replaces a document by deleting it and adding its new nodes. Chunks that are in both keep their
    chunk-caches: those of a deletion are deleted by `settle` after the next addition, after `grace_s`, or by `finish`.
    """

    def __init__(self, caches: Caches | None, *, grace_s: float = GRACE_S) -> None:
        self._caches = caches
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def later(self, index: FaissStore, chunk_ids: Iterable[str]) -> None:
        """Delete the chunk-caches of these chunks unless the next addition brings them back. Return at once.

        They are deleted in another thread `grace_s` seconds after the first of the waiting chunks was given, or when
        the program ends, unless they are in `index` then; errors of that are only logged, and the next deletion tries
        again.
        """
        with self._lock:
            if self._caches is None or not tuple(chunk_ids) or self._timer is not None:
                return
            self._timer = threading.Timer(self._grace_s, self.finish, (index,))
            self._timer.daemon = True  # a program that ends does not wait for it
            self._timer.start()
            atexit.register(self.finish, index)

    def settle(self, index: FaissStore) -> None:
        """Delete the chunk-caches of all chunks that left the index and are not back, and cancel `later`.

        After an error the index still notes the chunks, and the next call tries again.
        """
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
                atexit.unregister(self.finish)
        evict_removed(index, self._caches)

    def finish(self, index: FaissStore) -> None:
        """Do the same as `settle`, but only log an error: the chunk-caches then stay until the next call."""
        try:
            self.settle(index)
        except CacheCraftError as error:
            logger.warning(
                "chunk-caches of deleted documents stay until the next deletion: %s", error
            )
