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

        There are fewer if no more chunks pass the filter, and the list is empty if none does. The index in memory is
        first brought up to date with the database, which takes longer at the first search of a process. A question that
        is too long for the embedding model is searched for part by part: a chunk's score is that of the best part.

        Args:
            question: the question.
            top_k: most chunks, at least 1.
            where: filters them, see `FaissStore.search`.
            history: the conversation before the question, user first. The question is then searched for together with
                the questions before it (`search_texts`), and chunks that the turn before would retrieve are ranked as
                if their scores were 0.02 higher, because their chunk-caches exist. The scores themselves do not change.

        Raises:
            ConfigError: a question that is not a text, a `top_k` below 1, an invalid filter, or a history that is no
                list of pairs of texts.
            IndexStoreError: the index holds no chunks yet, is closed or damaged, or was made with vectors of another
                width; or the embedding model gives a vector that is not finite.
            ForkError: called in a fork of the process that opened the index or loaded the model.
            RuntimeError: torch has no memory for the embedding model.

        What the filter raises passes if it is a function.
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
        """Return all documents of the index, sorted by `doc_id`, with the number of their chunks; [] without any.

        A document without chunks is among them. A chunk counts once for each place that it has in the document.

        Raises:
            IndexStoreError: the index is closed or cannot be read.
            ForkError: called in a fork of the process that opened the index.
        """
        return self.index.documents()

    def remove_documents(self, names: Iterable[str]) -> RemovalReport:
        """Remove documents by `doc_id` (or all of a folder: `docs/`), with the chunk-caches of their chunks.

        Files stay where they are, so indexing their folder again brings them back. A chunk that another document has
        too stays. Each document is one transaction: if the index fails, those before it stay removed. Chunk-caches
        that cannot be deleted now are deleted by the next call.

        Returns:
            The doc_ids and chunk ids that were removed, and the number and bytes of their chunk-caches. All are empty
            and 0 without names; the last two are also 0 without `caches`.

        Raises:
            DocumentError: a name that no document has; nothing was removed then.
            ConfigError: `names` is a single text or no list, or a name is empty or no text; nothing was removed then.
                Or a server refuses to remove chunk-caches, once the documents were removed.
            IndexStoreError: the index is closed, or cannot be read or written.
            StoreError, ServerError: the documents were removed, but their chunk-caches could not be.
            ForkError: this process is a fork of the one that opened the index, or the store of chunk-caches. In the
                second case the documents were removed.
        """
        return remove_documents(self.index, names, caches=self.caches)


def open_index(root: str | os.PathLike[str], embedder: EmbeddingModel) -> FaissStore:
    """Open the retrieval index in the folder `index` inside the store folder `root`, or make it; the caller closes it.

    Raises:
        IndexStoreError: it was made with another embedding model, is damaged, of a newer version or locked by another
            process for 30 seconds, or its folder cannot be used.
        RuntimeError: torch has no memory to compute the embedding model's fingerprint.
        TypeError: `root` is no path.
        ConfigError: `root` holds a NUL, or letters that no path can hold.
    """
    return FaissStore.open(
        Path(root) / INDEX_FOLDER, dim=embedder.dim, embedder_fingerprint=embedder.fingerprint
    )
