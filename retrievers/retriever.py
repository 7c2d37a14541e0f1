"""Retrieval without a framework: a question and its conversation in, the most similar chunks out."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from cachecraft_rag.checks import check_text, check_whole, listed
from cachecraft_rag.errors import IndexStoreError
from cachecraft_rag.prompt.builder import Turn, check_history
from cachecraft_rag.retrievers.conversation import search
from cachecraft_rag.retrievers.embeddings import EmbeddingModel
from cachecraft_rag.retrievers.index.faiss_store import FaissStore, StoredDocument
from cachecraft_rag.retrievers.index.filters import Where
from cachecraft_rag.retrievers.index.removal import RemovalReport, remove_documents
from cachecraft_rag.store.durable import Caches
from cachecraft_rag.types.documents import SearchHit

DEFAULT_TOP_K = 5
INDEX_FOLDER = "index"  # inside the store folder


class Retriever:
    """An index and the embedding model that made its vectors; the caller closes the index.

    `CacheCraft` is one, so the framework classes take either: with a plain `Retriever` no answering model is loaded.

    index     the chunks and their vectors
    embedder  must be the model that the index was made with
    caches    the chunk-caches of these chunks, to evict what is deleted from the index; None: they are left alone
    """

    def __init__(
        self, index: FaissStore, embedder: EmbeddingModel, *, caches: Caches | None = None
    ) -> None:
        self.index = index
        self.embedder = embedder
        self.caches = caches

    def retrieve(
        self,
        question: str,
        *,
        top_k: int = DEFAULT_TOP_K,
        where: Where | None = None,
        history: Iterable[Turn] = (),
    ) -> list[SearchHit]:
        """Return the `top_k` chunks most similar to the question, best first.

        A question that is too long for the embedding model is searched for part by part: a chunk's score is that of the
        best part. Raises IndexStoreError if the index holds no chunks yet.

        Args:
            question: the question; a blank one is searched for too, and finds what happens to be near.
            top_k: most chunks, at least 1.
            where: filters them, see `FaissStore.search`.
            history: the turns before the question, (role, text) each; those of "user" count. Scores are then cosines to
                the mean of two vectors, the question and it with the questions before (`search_texts`), and chunks that
                the turn before would retrieve are ranked as if their scores were 0.02 higher: their chunk-caches exist.
        """
        check_text("question", question, damaged=True)
        check_whole("top_k", top_k, least=1)
        history = listed("history", history)
        check_history(history)
        hits = search(
            self.index,
            self.embedder.encode_query,
            question,
            history,
            top_k=top_k,
            where=where,
            parts_of=self.embedder.question_parts,
        )
        if not hits and self.index.stats().chunks == 0:
            raise IndexStoreError(
                f"{self.index.folder} holds no documents yet; add some with `cachecraft index DIR`"
            )
        return hits

    def documents(self) -> list[StoredDocument]:
        """Return all documents of the index, sorted by `doc_id`, with the number of their chunks."""
        return self.index.documents()

    def remove_documents(self, names: Iterable[str]) -> RemovalReport:
        """Remove documents by `doc_id`, or all below `docs/`, and their chunk-caches, no files; see `index.removal`."""
        return remove_documents(self.index, names, caches=self.caches)


def open_index(root: str | os.PathLike[str], embedder: EmbeddingModel) -> FaissStore:
    """Open or make the index in `root/index`; the caller closes it. IndexStoreError if another model made it."""
    return FaissStore.open(
        Path(root) / INDEX_FOLDER, dim=embedder.dim, embedder_fingerprint=embedder.fingerprint
    )
