"""The retrieval side as LlamaIndex classes: embeddings, a vector store over `FaissStore`, a retriever.

A node keeps its own id. Its chunk is the text that the model sees of it (`MetadataMode.LLM`): two nodes with equal
text share one chunk, with one vector and one chunk-cache.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    from llama_index.core.base.base_retriever import BaseRetriever
    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.core.bridge.pydantic import PrivateAttr
    from llama_index.core.callbacks import CallbackManager
    from llama_index.core.indices.query.embedding_utils import get_top_k_mmr_embeddings
    from llama_index.core.schema import (
        BaseNode,
        MetadataMode,
        NodeRelationship,
        NodeWithScore,
        QueryBundle,
        RelatedNodeInfo,
        TextNode,
    )
    from llama_index.core.vector_stores.types import (
        BasePydanticVectorStore,
        MetadataFilters,
        VectorStoreQuery,
        VectorStoreQueryMode,
        VectorStoreQueryResult,
    )
    from llama_index.core.vector_stores.utils import metadata_dict_to_node, node_to_metadata_dict
except ImportError as error:
    raise ImportError(
        f"the LlamaIndex integration needs llama-index-core ({error}); type: pip install 'cachecraft-rag[llama-index]'"
    ) from error

from cachecraft_rag.checks import (
    check_kind,
    check_names,
    check_number,
    check_path,
    check_text,
    check_whole,
    listed,
)
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.prompt.builder import Turn
from cachecraft_rag.retrievers.conversation import search_texts
from cachecraft_rag.retrievers.embeddings import BUNDLED_EMBEDDER, Embedder, unit_vectors
from cachecraft_rag.retrievers.index.faiss_store import DATABASE, FaissStore
from cachecraft_rag.retrievers.index.filters import accepts
from cachecraft_rag.retrievers.index.removal import Evictions
from cachecraft_rag.retrievers.index.schema import UNKNOWN_EMBEDDING
from cachecraft_rag.retrievers.llama_index_filters import NODE, has_empty_group, where_of
from cachecraft_rag.retrievers.retriever import DEFAULT_TOP_K, Retriever
from cachecraft_rag.store.closeable import Closeable
from cachecraft_rag.store.durable import Caches
from cachecraft_rag.types.documents import CHUNK_ID_KEY, NOTE_KEYS, PATH_KEYS, Chunk, SearchHit

# options of `add` in other stores that change no result
_HINTS = ("batch_size", "show_progress")


def _in_thread(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the asynchronous version of a method; LlamaIndex's own would block the event loop."""

    @functools.wraps(method)
    async def call(*args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(method, *args, **kwargs)

    return call


class CacheCraftEmbedding(BaseEmbedding):
    """An `Embedder` as a LlamaIndex embedding model; the default one is in a wheel, so nothing is downloaded.

    `from_dict(to_dict())` and a pickled copy, as an `IngestionPipeline` sends to its workers, load the model again.
    Vectors have unit length and `embedder.dim` numbers.

    Args:
        model: an `Embedder`, or its `model` argument.
        settings: LlamaIndex's own, such as `embed_batch_size`.

    A setting with an invalid value raises pydantic's ValidationError, a ValueError.
    """

    _embedder: Embedder = PrivateAttr()

    def __init__(
        self, model: str | os.PathLike[str] | Embedder = BUNDLED_EMBEDDER, **settings: Any
    ) -> None:
        check_names(settings, type(self).model_fields.keys() - {"model_name"}, what="setting")
        embedder = model if isinstance(model, Embedder) else Embedder(model)
        super().__init__(model_name=embedder.name, **settings)
        self._embedder = embedder

    @classmethod
    def class_name(cls) -> str:
        """Return the class name in LlamaIndex's events."""
        return "CacheCraftEmbedding"

    def to_dict(self, **kwargs: object) -> dict[str, object]:
        """Return LlamaIndex's settings, none of the `Embedder`'s; `model` is what to load, if not `model_name`."""
        data: dict[str, object] = super().to_dict(**kwargs)
        source = self._embedder.source
        return data if source == self.model_name else {**data, "model": source}

    @classmethod
    def from_dict(cls, data: dict[str, Any], **kwargs: Any) -> CacheCraftEmbedding:
        """Return a new object for a `to_dict`, whose embedding model is loaded again; `kwargs` override settings."""
        settings = {**data, **kwargs}
        settings.pop("class_name", None)
        name = settings.pop("model_name", BUNDLED_EMBEDDER)
        return cls(settings.pop("model", name), **settings)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self).from_dict, (self.to_dict(),)

    @property
    def embedder(self) -> Embedder:
        """The `Embedder` that makes the vectors; a new `CacheCraftVectorStore` takes its `fingerprint`."""
        return self._embedder

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._embedder.encode_query([query])[0].tolist()  # type: ignore[no-any-return]

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._embedder.encode_document(texts).tolist()  # type: ignore[no-any-return]

    _aget_query_embedding = _in_thread(_get_query_embedding)
    _aget_text_embedding = _in_thread(_get_text_embedding)
    _aget_text_embeddings = _in_thread(_get_text_embeddings)


class CacheCraftVectorStore(BasePydanticVectorStore, Closeable):
    """A LlamaIndex vector store in a folder: adding is idempotent by node id, filters are applied before the search.

    Every change is on disk when the call returns; `persist` only makes the next start faster. Of nodes with equal text
    a search returns one. A node without `ref_doc_id` is a document under its node id. Before the first `add` to a new
    folder there is no index: nothing is found, and deleting does nothing.

    Args:
        folder: of the index, made at the first `add`; the command line finds it too if it is `index` inside a store
            folder. Or a `FaissStore` of your own (`rag.index`), which you close yourself.
        caches: a chunk-cache store (`engine.store`); deleting from the index then also deletes there.
        embedding: the model that makes the vectors: a `CacheCraftEmbedding`, or the fingerprint of its `embedder`.
            A folder whose index has another one is then refused, and `CacheCraft` and the command line can open the
            index. Without it only the width of the vectors is checked, and they cannot, because LlamaIndex does not say
            which model it uses. Not compared with a `FaissStore` of your own.
    """

    stores_text: bool = True
    is_embedding_query: bool = True
    folder: str
    embedding: str | None = None

    _store: FaissStore | None = PrivateAttr(default=None)
    _evictions: Evictions = PrivateAttr()
    _owned: bool = PrivateAttr(default=True)
    _opening: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    def __init__(
        self,
        folder: str | os.PathLike[str] | FaissStore = "chunk-caches/index",
        *,
        caches: Caches | None = None,
        embedding: str | CacheCraftEmbedding | None = None,
    ) -> None:
        if isinstance(embedding, CacheCraftEmbedding):
            embedding = embedding.embedder.fingerprint
        if not isinstance(folder, FaissStore):
            check_path("folder", folder)
        check_kind("caches", caches, Caches, optional=True, advice="engine.store is one")
        check_text("embedding", embedding, optional=True, empty=False)
        given = folder if isinstance(folder, FaissStore) else None
        path = given.folder if given is not None else Path(str(folder))
        super().__init__(stores_text=True, folder=str(path), embedding=embedding)  # type: ignore[call-arg]
        self._store = given
        self._evictions = Evictions(caches)
        self._owned = given is None
        if given is None and os.path.isfile(path / DATABASE):
            self._store = FaissStore.open(path, embedder_fingerprint=embedding)

    @classmethod
    def class_name(cls) -> str:
        """Return the class name in LlamaIndex's events."""
        return "CacheCraftVectorStore"

    @classmethod
    def from_dict(cls, data: dict[str, Any], **kwargs: Any) -> CacheCraftVectorStore:
        """Return a store over the folder of a `to_dict` or a pickle, which is opened if it holds an index.

        Its `close` closes the index. `kwargs` are arguments of the class; `caches` is not kept and may be given.
        """
        constants = ("class_name", "stores_text", "is_embedding_query")
        return cls(
            **{name: value for name, value in {**data, **kwargs}.items() if name not in constants}
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self).from_dict, (self.to_dict(),)

    @property
    def client(self) -> FaissStore | None:
        """The `FaissStore` that holds the nodes; None before the first `add` to a new folder."""
        return self._store

    # --- changes ---

    def add(self, nodes: Sequence[BaseNode], **kwargs: object) -> list[str]:
        """Add nodes with their embeddings, or replace those with the same ids; returns the node ids, in their order.

        The nodes of each document are one transaction; documents before an error (such as LlamaIndex's ValueError for a
        node without an embedding) stay. Chunk-caches of replaced nodes, and those of an earlier `delete`, are deleted
        if no node in the index has their text any more; if that fails (StoreError, ServerError), the nodes were added.
        The options `batch_size` and `show_progress` are accepted and ignored.
        """
        check_names(kwargs, _HINTS)
        nodes = list(nodes)
        documents: dict[str, dict[str, BaseNode]] = {}
        for node in nodes:
            documents.setdefault(node.ref_doc_id or node.node_id, {})[node.node_id] = node
        for doc_id, by_id in documents.items():
            vectors = unit_vectors([node.get_embedding() for node in by_id.values()])
            store = self._opened(vectors.shape[1])
            store.add(
                doc_id, [_chunk_of(node) for node in by_id.values()], vectors, keys=list(by_id)
            )
        if self._store is not None:
            self._evictions.settle(self._store)
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id: str, **delete_kwargs: object) -> None:
        """Remove a document's nodes; an unknown document is ignored.

        Chunk-caches follow with the next `add`, after a minute, or at `close`: an upsert deletes first.
        """
        check_names(delete_kwargs, ())
        if self._store is not None:
            self._evictions.later(self._store, self._store.delete_document(ref_doc_id).removed)

    def delete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **delete_kwargs: object,
    ) -> None:
        """Remove the nodes that have one of the ids (None: any) and pass the filters.

        Documents without a node left are removed too. A chunk that LlamaIndex did not add has its chunk id as its node
        id, and is removed from every document. Chunk-caches follow as after `delete`. Raises ConfigError without ids
        unless there are filters, and each group of them has a condition: an empty group passes every node.
        """
        check_names(delete_kwargs, ())
        if node_ids is None and (filters is None or has_empty_group(filters)):
            raise ConfigError(
                "delete_nodes needs node_ids, or filters whose groups all have a condition; clear() removes everything"
            )
        if self._store is None:
            return
        chosen = [node.node_id for node in self.get_nodes(node_ids, filters)]
        self._evictions.later(self._store, self._store.delete_keys(chosen).removed)
        unnamed = [node.node_id for node in self.get_nodes(chosen)]
        if unnamed:
            self._evictions.later(self._store, self._store.delete_chunks(unnamed).removed)

    def clear(self) -> None:
        """Remove all nodes, and at once their chunk-caches; the index stays open.

        Documents that LlamaIndex did not add are removed too. Each document is one transaction.
        """
        if self._store is not None:
            for document in self._store.documents():
                self.delete(document.doc_id)
            self._evictions.settle(self._store)

    async_add = _in_thread(add)
    adelete = _in_thread(delete)
    adelete_nodes = _in_thread(delete_nodes)
    aclear = _in_thread(clear)

    # --- questions ---

    def get_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """Return the nodes that have one of the ids (None: any) and pass the filters, without embeddings.

        They are sorted by document, and not in the order of the ids; chunks that LlamaIndex did not add, whose node id
        is their chunk id, are last if ids are given. The metadata of each node also has its chunk id, under
        `cachecraft_chunk_id`.
        """
        if self._store is None:
            return []
        where = where_of(filters)
        ids = None if node_ids is None else listed("node_ids", node_ids)
        nodes = [_node_of(chunk) for chunk in self._store.places(ids, where=where)]
        if ids is None:
            return nodes
        # Chunks that LlamaIndex did not add have no key.
        unknown = set(ids) - {node.node_id for node in nodes}
        unnamed = self._store.get(self._store.known_vectors(unknown))
        more = [_node_of(chunk) for chunk in unnamed if accepts(where, chunk.metadata)]
        return [*nodes, *(node for node in more if node.node_id in unknown)]

    def query(self, query: VectorStoreQuery, **kwargs: object) -> VectorStoreQueryResult:
        """Return the best `similarity_top_k` nodes or fewer, best first, with their scores and ids.

        Query modes: the default, by embedding, whose scores are cosines; and `mmr`, near the query and unlike each
        other, whose scores are those of LlamaIndex's choice and no cosines. Of nodes with equal text one is returned.
        Their metadata also has the chunk id, under `cachecraft_chunk_id`.

        Args:
            query: LlamaIndex's query; its filters may be nested.
            kwargs: for `mmr`: `mmr_threshold`, unless the query has one (1: only near the query, 0: only unlike each
                other; default 0.5), and `mmr_prefetch_k`, the number of nodes to choose from (default: four times as
                many as asked for).
        """
        check_names(kwargs, ("mmr_prefetch_k", "mmr_threshold"))
        if query.mode not in (VectorStoreQueryMode.DEFAULT, VectorStoreQueryMode.MMR):
            raise ConfigError(
                f"CacheCraftVectorStore has no mode {query.mode.value!r}; there are default and mmr. For a search by "
                "words or by both use LlamaIndex's BM25Retriever and QueryFusionRetriever over get_nodes()"
            )
        if query.query_embedding is None:
            raise ConfigError(
                "the query has no embedding; give the index or the retriever an embed_model"
            )
        hits = self._ranked(self._store, query, kwargs) if self._store is not None else []
        nodes = [_node_of(hit) for hit, _ in hits]
        return VectorStoreQueryResult(
            nodes=nodes,
            similarities=[score for _, score in hits],
            ids=[node.node_id for node in nodes],
        )

    def _ranked(
        self, store: FaissStore, query: VectorStoreQuery, options: Mapping[str, Any]
    ) -> list[tuple[SearchHit, float]]:
        where = where_of(query.filters, node_ids=query.node_ids, doc_ids=query.doc_ids)
        vector = unit_vectors(query.query_embedding or [])
        if query.mode == VectorStoreQueryMode.DEFAULT:
            return [
                (hit, hit.score)
                for hit in store.search(vector, query.similarity_top_k, where=where)
            ]
        weight = (
            query.mmr_threshold
            if query.mmr_threshold is not None
            else options.get("mmr_threshold", 0.5)
        )
        check_number("mmr_threshold", weight, most=1)
        reach = options.get("mmr_prefetch_k", 4 * query.similarity_top_k)
        check_whole("mmr_prefetch_k", reach, least=1)
        hits = store.search(vector, reach, where=where)
        known = store.known_vectors(hit.chunk_id for hit in hits)
        hits = [hit for hit in hits if hit.chunk_id in known]  # others were deleted meanwhile
        scores, chosen = get_top_k_mmr_embeddings(
            vector.tolist(),
            [known[hit.chunk_id].tolist() for hit in hits],
            similarity_top_k=query.similarity_top_k,
            mmr_threshold=weight,
        )
        return [(hits[row], score) for row, score in zip(chosen, scores, strict=True)]

    aget_nodes = _in_thread(get_nodes)
    aquery = _in_thread(query)

    # --- life ---

    def persist(self, persist_path: str = "", fs: object = None) -> None:
        """Write the index file, if there is an index (`FaissStore.save`); LlamaIndex's arguments are ignored."""
        if self._store is not None:
            self._store.save()

    def close(self) -> None:
        """Delete the chunk-caches of deleted nodes that were not added again; close the index if it was opened here.

        If that fails, they stay until the next deletion, with a warning in the log.
        """
        if self._store is not None:
            self._evictions.finish(self._store)
        if self._owned and self._store is not None:
            self._store.close()
            self._evictions = Evictions(None)  # a second call finds nothing to delete

    def _opened(self, dim: int) -> FaissStore:
        with self._opening:
            if self._store is None:
                self._store = FaissStore.open(
                    self.folder, dim=dim, embedder_fingerprint=self.embedding or UNKNOWN_EMBEDDING
                )
            return self._store


@dataclass
class ConversationQuery(QueryBundle):
    """A follow-up, for any retriever: one that embeds takes the mean of `search_texts`, others take the last of them.

    `CacheCraftRetriever` also prefers chunks of the turn before where scores tie (see `Retriever.retrieve`).
    """

    question: str = ""
    history: tuple[Turn, ...] = ()

    @classmethod
    def of(cls, question: str, history: Sequence[Turn]) -> QueryBundle:
        """Return the query of a question after these turns; a plain `QueryBundle` for a first question."""
        texts = search_texts(question, history)
        if len(texts) == 1:
            return QueryBundle(question)
        return cls(
            texts[-1], custom_embedding_strs=list(texts), question=question, history=tuple(history)
        )


class CacheCraftRetriever(BaseRetriever):
    """The index of a `CacheCraft` as a LlamaIndex retriever, for any query engine.

    Args:
        rag: a `CacheCraft`, or a plain `Retriever`; you close it yourself.
        top_k: how many chunks to retrieve.
        filters: which chunks may be retrieved, by their metadata.
    """

    def __init__(
        self,
        rag: Retriever,
        *,
        top_k: int = DEFAULT_TOP_K,
        filters: MetadataFilters | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        check_kind("rag", rag, Retriever, advice="CacheCraft.from_pretrained makes one")
        check_whole("top_k", top_k, least=1)
        check_kind("filters", filters, MetadataFilters, optional=True)
        super().__init__(callback_manager=callback_manager)
        self._rag = rag
        self._top_k = top_k
        self._filters = filters

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        where = where_of(self._filters)
        if isinstance(query_bundle, ConversationQuery):
            hits = self._rag.retrieve(
                query_bundle.question,
                top_k=self._top_k,
                where=where,
                history=query_bundle.history,
            )
        elif query_bundle.embedding is None and not query_bundle.custom_embedding_strs:
            hits = self._rag.retrieve(query_bundle.query_str, top_k=self._top_k, where=where)
        else:  # a transform (HyDE) replaced the question by other texts or a vector
            vector = query_bundle.embedding or self._rag.embedder.encode_query(
                query_bundle.embedding_strs
            ).mean(axis=0)
            hits = self._rag.index.search(unit_vectors(vector), self._top_k, where=where)
        return [NodeWithScore(node=_node_of(hit), score=hit.score) for hit in hits]

    _aretrieve = _in_thread(_retrieve)


def _chunk_of(node: BaseNode) -> Chunk:
    """Return a node as a chunk: the text the model will see of it, and the node itself in the metadata.

    The text is that of the node as it is read back (`as_read_back`).
    """
    metadata = node_to_metadata_dict(without_notes(node))
    text = without_paths(metadata_dict_to_node(metadata)).get_content(
        metadata_mode=MetadataMode.LLM
    )
    return Chunk(
        text,
        {
            key: value
            for key, value in metadata.items()
            if isinstance(value, str | int | float | None)
        },
    )


def as_read_back(node: BaseNode) -> BaseNode:
    """Return a copy of a node as vector stores return it: JSON turns a date in its metadata into another text."""
    return metadata_dict_to_node(node_to_metadata_dict(node))


def without_paths(node: BaseNode) -> BaseNode:
    """Return a copy of the node whose text for the model leaves out the metadata keys of `PATH_KEYS`.

    A node that has no such key, or leaves it out already, is returned itself.
    """
    seen = (PATH_KEYS & node.metadata.keys()) - set(node.excluded_llm_metadata_keys)
    if not seen:
        return node
    return node.model_copy(
        update={"excluded_llm_metadata_keys": [*node.excluded_llm_metadata_keys, *sorted(seen)]}
    )


def with_notes(node: BaseNode, notes: Mapping[str, object]) -> BaseNode:
    """Return a copy of a node with `notes` added to its metadata; neither the model nor the embedding model sees them.

    A note replaces metadata of the same name.
    """
    hidden_from_llm = dict.fromkeys((*node.excluded_llm_metadata_keys, *notes))
    hidden_from_embedder = dict.fromkeys((*node.excluded_embed_metadata_keys, *notes))
    return node.model_copy(
        update={
            "metadata": {**node.metadata, **notes},
            "excluded_llm_metadata_keys": list(hidden_from_llm),
            "excluded_embed_metadata_keys": list(hidden_from_embedder),
        }
    )


def without_notes(node: BaseNode) -> BaseNode:
    """Return a copy of the node without this package's notes, which are outdated in an index; without any, itself."""
    if not NOTE_KEYS & node.metadata.keys():
        return node
    return node.model_copy(
        update={
            "metadata": {
                key: value for key, value in node.metadata.items() if key not in NOTE_KEYS
            },
            "excluded_llm_metadata_keys": [
                key for key in node.excluded_llm_metadata_keys if key not in NOTE_KEYS
            ],
            "excluded_embed_metadata_keys": [
                key for key in node.excluded_embed_metadata_keys if key not in NOTE_KEYS
            ],
        }
    )


def _node_of(chunk: Chunk | SearchHit) -> BaseNode:
    """Return the node that was added, with its chunk id.

    A chunk that `CacheCraft` indexed becomes a node whose metadata the model does not see.
    """
    note = {CHUNK_ID_KEY: chunk.chunk_id}
    if NODE in chunk.metadata:
        return with_notes(metadata_dict_to_node(dict(chunk.metadata)), note)
    node = TextNode(id_=chunk.chunk_id, text=chunk.text)
    if source := chunk.metadata.get("source"):
        node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=str(source))
    return with_notes(node, {**chunk.metadata, **note})
