"""A LangChain vector store that also removes the chunk-caches of the documents that it deletes or updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore

from cachecraft_rag.checks import check_kind
from cachecraft_rag.engine.base import AnswerEngine
from cachecraft_rag.engine.documents import HeldTexts, chunks_of
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.retrievers.langchain import DocumentVectorStore, check_ids
from cachecraft_rag.types.documents import Chunk


class SyncedVectorStore(DocumentVectorStore):
    """Writes to any vector store, and removes the chunk-caches of the documents that a write deletes or replaces.

        index(documents, record_manager, SyncedVectorStore(vector_store, engine), cleanup="full", …)

    Chunk-caches are removed before the documents are, so after an error repeat the write. A text stays that another
    document has which was added through this object; other documents with the same text are not known. Added texts may
    be stored again. Retrievers may go on to read `vector_store`.

    Args:
        vector_store: any that returns documents by their ids (`get_by_ids`).
        engine: the engine whose chunk-caches are removed.
        chunks: reads documents as the model does; the `chunks` of a generator that has a `document_prompt`.

    Raises ConfigError for a vector store without `get_by_ids`, and in `delete` without ids. A write raises what
    `engine.remove` raises, and what the vector store does.
    """

    def __init__(
        self,
        vector_store: VectorStore,
        engine: AnswerEngine,
        *,
        chunks: Callable[[Iterable[Any]], list[Chunk]] = chunks_of,
    ) -> None:
        check_kind("vector_store", vector_store, VectorStore)
        check_kind("engine", engine, AnswerEngine, advice="pass generator.engine or chat.engine")
        if type(vector_store).get_by_ids is VectorStore.get_by_ids:
            raise ConfigError(
                f"{type(vector_store).__name__} does not return documents by their ids, so the texts that it deletes "
                "are not known; call engine.remove(documents) yourself, or engine.sync(all_documents) now and then"
            )
        self._inner = vector_store
        self._held = HeldTexts(engine, chunks)

    @classmethod
    def from_texts(cls, *_arguments: object, **_settings: object) -> Self:
        """Raise ConfigError: make the vector store first."""
        raise ConfigError(
            "make the vector store first, then SyncedVectorStore(vector_store, engine)"
        )

    @property
    def embeddings(self) -> Embeddings | None:
        """The embeddings of the vector store."""
        return self._inner.embeddings

    def add_documents(
        self, documents: list[Document], ids: list[str] | None = None, **kwargs: object
    ) -> list[str]:
        """Add or replace documents, and return their ids; the chunk-caches of replaced texts are removed.

        `ids` has one for each document, or none: then those of the documents count, if all have one. `kwargs` are
        passed on.
        """
        documents = list(documents)
        check_ids(ids, len(documents), "documents")
        names: Sequence[str | None] = ids or [document.id for document in documents]
        known = [name for name in names if name]
        self._held.remove(known, self._stored(known), replaced_by=documents)
        if ids or len(known) == len(documents):
            kwargs["ids"] = names
        added = self._inner.add_documents(documents, **kwargs)
        self._held.add(added, documents)
        return added

    def delete(self, ids: list[str] | None = None, **kwargs: object) -> bool | None:
        """Remove the chunk-caches of documents, delete these by their ids, and return what the vector store returns."""
        if ids is None:
            raise ConfigError(
                "delete needs the ids of documents; to delete all, empty the vector store itself and call "
                "engine.store.evict(down_to_bytes=0)"
            )
        self._held.remove(ids, self._stored(ids))
        return self._inner.delete(ids, **kwargs)

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return the documents with these ids, in the order of the vector store; unknown ids are skipped."""
        return self._inner.get_by_ids(ids)

    def similarity_search(self, query: str, k: int = 4, **kwargs: object) -> list[Document]:
        """Return up to `k` documents that the vector store finds; its other kinds of search are not passed on."""
        return self._inner.similarity_search(query, k, **kwargs)

    def _stored(self, ids: Sequence[str]) -> list[Document]:
        # without ids some vector stores return all documents
        return self._inner.get_by_ids(ids) if ids else []
