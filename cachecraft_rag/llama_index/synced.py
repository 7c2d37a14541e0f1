"""A LlamaIndex vector store that also removes the chunk-caches of the nodes that it deletes."""

from __future__ import annotations

from collections.abc import Sequence

from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryResult,
)
from pydantic import PrivateAttr

from cachecraft_rag.checks import check_kind
from cachecraft_rag.engine.base import AnswerEngine
from cachecraft_rag.engine.documents import HeldTexts, chunks_of
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.retrievers.llama_index import as_read_back

# the id of a node's document, as LlamaIndex writes it into the metadata of a database
_DOCUMENT = "ref_doc_id"


class SyncedVectorStore(BasePydanticVectorStore):
    """Writes to any vector store, and removes the chunk-caches of the nodes that a write deletes.

        IngestionPipeline(…, vector_store=SyncedVectorStore(vector_store, engine), docstore=…)

    Chunk-caches are removed before the nodes are, so after an error repeat the write. A text stays that another node
    has which was added through this object; other nodes with the same text are not known. Added texts may be stored
    again.

    A pipeline deletes an updated document and adds it again, so all its chunks are computed again, unchanged ones too.
    `add` looks for no nodes with the same ids, because some databases replace these and others keep them: delete them
    first. Its asynchronous methods block the event loop, as LlamaIndex's defaults do.

    Args:
        vector_store: any that returns nodes by the id of their document (`get_nodes`), such as those of Qdrant, Chroma
            and PostgreSQL.
        engine: the engine whose chunk-caches are removed.

    Before anything is deleted, a deletion raises ConfigError for a vector store without `get_nodes`. A write raises
    what `engine.remove` raises, and what the vector store does.
    """

    stores_text: bool = True
    _inner: BasePydanticVectorStore = PrivateAttr()
    _held: HeldTexts = PrivateAttr()

    def __init__(self, vector_store: BasePydanticVectorStore, engine: AnswerEngine) -> None:
        check_kind("vector_store", vector_store, BasePydanticVectorStore)
        check_kind("engine", engine, AnswerEngine, advice="pass query_engine.engine")
        super().__init__(
            stores_text=vector_store.stores_text, is_embedding_query=vector_store.is_embedding_query
        )
        self._inner = vector_store
        self._held = HeldTexts(engine, lambda nodes: chunks_of(map(as_read_back, nodes)))

    @property
    def client(self) -> object:
        """The client of the vector store."""
        return self._inner.client

    def get_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """Return the nodes that the vector store finds by ids or filters; NotImplementedError if it cannot."""
        return self._inner.get_nodes(node_ids=node_ids, filters=filters)

    def add(self, nodes: Sequence[BaseNode], **kwargs: object) -> list[str]:
        """Add nodes, and return their ids."""
        added = self._inner.add(list(nodes), **kwargs)
        self._held.add([node.node_id for node in nodes], nodes)
        return added

    def delete(self, ref_doc_id: str, **delete_kwargs: object) -> None:
        """Remove the chunk-caches of a document's nodes, then delete the nodes."""
        of_document = MetadataFilters(filters=[MetadataFilter(key=_DOCUMENT, value=ref_doc_id)])
        self._remove(None, of_document)
        self._inner.delete(ref_doc_id, **delete_kwargs)

    def delete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **delete_kwargs: object,
    ) -> None:
        """Remove the chunk-caches of nodes, then the nodes; without filters ConfigError for None, nothing for []."""
        if filters is None and node_ids is None:
            raise ConfigError(
                "delete_nodes needs node_ids or filters; to delete all nodes see the message of clear()"
            )
        if filters is None and not node_ids:
            return  # without ids some vector stores return all nodes
        self._remove(node_ids, filters)
        self._inner.delete_nodes(node_ids, filters, **delete_kwargs)

    def clear(self) -> None:
        """Raise ConfigError, because not every database can list all its nodes."""
        raise ConfigError(
            "clear the vector store itself, and call engine.store.evict(down_to_bytes=0): that removes all chunk-caches"
        )

    def _remove(self, node_ids: list[str] | None, filters: MetadataFilters | None) -> None:
        try:
            nodes = self._inner.get_nodes(node_ids=node_ids, filters=filters)
        except NotImplementedError as error:
            raise ConfigError(
                f"{type(self._inner).__name__} does not return its nodes, so the texts that it deletes are not known; "
                "call engine.remove(nodes) yourself, or engine.sync(all_nodes) now and then"
            ) from error
        self._held.remove([node.node_id for node in nodes], nodes)

    def query(self, query: VectorStoreQuery, **kwargs: object) -> VectorStoreQueryResult:
        """Return what the vector store finds."""
        return self._inner.query(query, **kwargs)
