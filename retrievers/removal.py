"""Removing documents from the index together with their chunk-caches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

from cachecraft_rag.checks import check_text, listed
from cachecraft_rag.errors import DocumentError
from cachecraft_rag.retrievers.faiss_store import FaissStore

if TYPE_CHECKING:
    from cachecraft_rag.store import ChunkCacheStore


@dataclass(frozen=True, slots=True)
class Removed:
    """What a removal took away: doc_ids, the chunks that no document has any more, and the chunk-caches of those.

    `nbytes` is what the chunk-caches took on disk.
    """

    documents: tuple[str, ...]
    chunk_ids: tuple[str, ...]
    chunk_caches: int
    nbytes: int


def remove_documents(index: FaissStore, names: Iterable[str], *, caches: ChunkCacheStore | None = None) -> Removed:
    """Remove documents by `doc_id`, or all below a folder by its label and a slash (`docs/`).

    A chunk that another document has too stays, with its chunk-caches.

    Raises:
        DocumentError: a name that no document has; nothing was removed then.
    """
    from cachecraft_rag.store import RowFilter

    known = [document.doc_id for document in index.documents()]
    chosen: dict[str, None] = {}
    for name in listed("names", names):
        check_text("a document's name", name, empty=False)
        found = [doc_id for doc_id in known if doc_id == name or (name.endswith("/") and doc_id.startswith(name))]
        if not found:
            near = get_close_matches(name, known, n=1, cutoff=0.5)
            meant = f"did you mean {near[0]}?" if near else "`cachecraft documents ls` lists them"
            raise DocumentError(f"{name}: there is no such document in the index; {meant}")
        chosen |= dict.fromkeys(found)
    gone = [chunk_id for doc_id in chosen for chunk_id in index.delete_document(doc_id).removed]
    freed = None if caches is None or not gone else caches.evict(RowFilter(chunk_ids=tuple(gone)))
    return Removed(
        tuple(chosen), tuple(gone), 0 if freed is None else freed.variants, 0 if freed is None else freed.nbytes
    )
