"""The retrieval side as LangChain classes: embeddings, a vector store over `FaissStore`, a retriever over that."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any, Self

from cachecraft_rag.checks import (
    check_kind,
    check_names,
    check_number,
    check_path,
    check_whole,
    listed,
)
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.prompt.builder import Turn
from cachecraft_rag.retrievers.conversation import search
from cachecraft_rag.retrievers.embeddings import Embedder, EmbeddingModel, unit_vectors
from cachecraft_rag.retrievers.index.faiss_store import FaissStore
from cachecraft_rag.retrievers.index.filters import Where
from cachecraft_rag.retrievers.index.removal import Evictions
from cachecraft_rag.retrievers.retriever import Retriever
from cachecraft_rag.store.closeable import Closeable
from cachecraft_rag.store.durable import Caches
from cachecraft_rag.types.digests import digest
from cachecraft_rag.types.documents import (
    CHUNK_ID_KEY,
    NOTE_KEYS,
    Chunk,
    Metadata,
    SearchHit,
    noted_chunk_id,
)

try:
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.vectorstores import VectorStore
    from langchain_core.vectorstores.utils import maximal_marginal_relevance
except ImportError as error:
    raise ImportError(f"{error}; type: pip install 'cachecraft-rag[langchain]'") from error

# options of `add_documents` in other stores that change no result; `index()` sends the first
_HINTS = ("batch_size", "show_progress")
DEFAULT_FOLDER = "chunk-caches/index"  # the default of `CacheCraft` and of the command line
# metadata key: a document's id, and the values that the index has no column type for
_OURS = "_langchain"

Filter = Mapping[str, Any] | Callable[[dict[str, Any]], bool]


class CacheCraftEmbeddings(Embeddings):
    """An `Embedder` as LangChain's embeddings, for any vector store; without one, the default `Embedder` is loaded.

    Vectors are those of its `encode_document` or `encode_query`: of unit length, with 384 numbers by default.
    """

    def __init__(self, embedder: EmbeddingModel | None = None) -> None:
        if not hasattr(embedder, "encode_query"):
            check_kind("embedder", embedder, Embedder, optional=True)
        self.embedder: EmbeddingModel = embedder or Embedder()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return a unit vector of each text to be indexed."""
        vectors: list[list[float]] = self.embedder.encode_document(texts).tolist()
        return vectors

    def embed_query(self, text: str) -> list[float]:
        """Return the unit vector of a question."""
        vector: list[float] = self.embedder.encode_query([text])[0].tolist()
        return vector


class DocumentVectorStore(VectorStore):
    """A vector store that adds texts as documents, with an id for each or for none."""

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Add texts as documents; `metadatas` and `ids` have one item for each text, or are None or empty.

        `kwargs` and the ids that it returns are as in `add_documents`.
        """
        texts = list(texts)
        check_ids(ids, len(texts), "texts")  # LangChain would leave out the texts after the last id
        if metadatas and len(metadatas) != len(texts):
            raise ConfigError(
                f"{len(metadatas)} metadatas for {len(texts)} texts; give one for each"
            )
        return super().add_texts(texts, metadatas, ids=ids, **kwargs)


def check_ids(ids: Sequence[str | None] | None, count: int, what: str) -> None:
    """Raise ConfigError unless there are `count` ids, or none (None or empty); `what` names the things with ids."""
    if ids and len(ids) != count:
        raise ConfigError(f"{len(ids)} ids for {count} {what}; give one for each")


class CacheCraftVectorStore(Closeable, DocumentVectorStore):
    """A LangChain vector store over a `FaissStore`: on disk, with upserts, deletion and filters; scores are cosines.

    A LangChain document is a document of the index under the same id. Two documents with the same text are one chunk
    with two owners: a search returns it once, as one of them, and it stays until both are deleted. Errors of the
    embeddings pass unchanged.

    index      the caller closes it, unless it came from `open`, `from_texts` or `from_documents`
    embedding  any embeddings; their vectors are normalised to unit length
    caches     chunk-caches to delete with their documents; None: they stay until the store needs the space
    """

    def __init__(
        self, index: FaissStore, embedding: Embeddings, *, caches: Caches | None = None
    ) -> None:
        check_kind("index", index, FaissStore, advice="FaissStore.open makes one")
        check_kind("embedding", embedding, Embeddings, advice="CacheCraftEmbeddings() is one")
        check_kind("caches", caches, Caches, optional=True, advice="engine.store is one")
        self.index = index
        self._embedding = embedding
        self._evictions = Evictions(caches)
        self._owns_index = False

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        embedding: Embeddings,
        *,
        caches: Caches | None = None,
    ) -> Self:
        """Return a vector store over the index in a folder, which is opened or made. The result closes it with `close`.

        Of `CacheCraftEmbeddings` the fingerprints are compared. Other embeddings have none, so their class, model name
        and width are compared; they embed a text to tell the width. Raises IndexStoreError for other embeddings than
        those the index was made with.
        """
        check_path("folder", folder)
        check_kind("embedding", embedding, Embeddings, advice="CacheCraftEmbeddings() is one")
        if isinstance(embedding, CacheCraftEmbeddings):
            dim = embedding.embedder.dim
            fingerprint = embedding.embedder.fingerprint
        else:
            dim = len(embedding.embed_query("width"))
            model = next(
                (
                    value
                    for key in ("model", "model_name")
                    if (value := getattr(embedding, key, None))
                ),
                "",
            )
            name = f"{type(embedding).__name__} {model}".strip()
            fingerprint = f"{name}@{digest(name)}"
        check_kind("caches", caches, Caches, optional=True, advice="engine.store is one")
        store = cls(
            FaissStore.open(folder, dim=dim, embedder_fingerprint=fingerprint),
            embedding,
            caches=caches,
        )
        store._owns_index = True
        return store

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        folder: str | os.PathLike[str] = DEFAULT_FOLDER,
        caches: Caches | None = None,
        **kwargs: object,
    ) -> Self:
        """Open or make the index in `folder` (default `chunk-caches/index`), add texts to it, and return the store.

        `close` of the result closes the index. After an error it is closed at once, and texts that were added before
        the error stay. `from_documents` takes the same options. Texts, `metadatas`, `ids` and `kwargs` are as in
        `add_texts`.
        """
        check_names(kwargs, ("caches", "folder", "ids", "metadatas", *_HINTS))
        with ExitStack() as opened:
            store = opened.enter_context(closing(cls.open(folder, embedding, caches=caches)))
            store.add_texts(texts, metadatas, ids=ids)
            opened.pop_all()
        return store

    @classmethod
    def from_rag(cls, rag: Retriever) -> Self:
        """Return a vector store over the index of a `CacheCraft` or another `Retriever`; each chunk is a document."""
        check_kind("rag", rag, Retriever, advice="CacheCraft.from_pretrained makes one")
        return cls(rag.index, CacheCraftEmbeddings(rag.embedder), caches=rag.caches)

    def close(self) -> None:
        """Delete the chunk-caches of deleted documents that were not added again; close the index if opened here.

        If the store of chunk-caches fails, they stay until the next deletion, with a warning.
        """
        self._evictions.finish(self.index)
        if self._owns_index:
            self.index.close()
            self._evictions = Evictions(None)  # a second call finds nothing to delete

    @property
    def embeddings(self) -> Embeddings:
        """The embeddings that make the vectors, as they were given."""
        return self._embedding

    def add_documents(
        self, documents: list[Document], ids: list[str] | None = None, **kwargs: object
    ) -> list[str]:
        """Add documents, or replace those with the same ids; returns the ids, new ones where none were given.

        Each document is one transaction; those before an error stay. Of several with the same id the last stays. A text
        that the index holds already keeps its vector and is not embedded. Chunk-caches of replaced documents, and those
        that wait after `delete`, are deleted if no document has their text any more; if that fails (StoreError,
        ServerError), the documents were added.

        Args:
            documents: LangChain's documents. They are not changed.
            ids: one for each document; None or an empty list: the documents' own.
            kwargs: `batch_size`, which LangChain's `index()` sends, and `show_progress`; both are ignored.
        """
        check_names(kwargs, _HINTS)
        documents = list(documents)
        check_ids(ids, len(documents), "documents")
        given: Sequence[str | None] = ids or [document.id for document in documents]
        names = [name or uuid.uuid4().hex for name in given]
        chunks = [_chunk(document, name) for document, name in zip(documents, names, strict=True)]
        known = self.index.known_vectors(chunk.chunk_id for chunk in chunks)
        new = list(dict.fromkeys(chunk.text for chunk in chunks if chunk.chunk_id not in known))
        vectors = dict(zip(new, self._embedding.embed_documents(new), strict=True)) if new else {}
        for name, chunk in zip(names, chunks, strict=True):
            vector = (
                known[chunk.chunk_id]
                if chunk.chunk_id in known
                else unit_vectors(vectors[chunk.text])
            )
            self.index.upsert(name, [chunk], vector[None])
        self._evictions.settle(self.index)
        return names

    def delete(self, ids: list[str] | None = None, **kwargs: object) -> bool:
        """Delete documents, or all if `ids` is None (not if it is empty); returns True. Unknown ids are ignored.

        With None, documents that LangChain did not add are deleted too. An id that is no document's but a chunk's
        removes the chunk from every document. Chunk-caches follow with the next addition, after a minute, or at
        `close`: an upsert deletes first. Each document is one transaction.
        """
        check_names(kwargs, ())
        index = self.index
        if ids is None:
            ids = [document.doc_id for document in index.documents()]
        for name in listed("ids", ids):
            # Chunks that were not added through LangChain have their chunk id as their document id.
            is_document = index.holds(name)
            change = index.delete_document(name) if is_document else index.delete_chunks([name])
            self._evictions.later(index, change.removed)
        return True

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return the documents with these ids, in their order; unknown ids are skipped.

        A document of several chunks that LangChain did not add gives each of them, and an id that is no document's but
        a chunk's gives the chunk. The metadata also has the chunk id, under `cachecraft_chunk_id`.
        """
        ids = listed("ids", ids)
        chunks_by_id = {name: self.index.chunks_of(name) for name in ids}
        # A chunk that was not added through LangChain has its chunk id as its id.
        unknown = [name for name, chunks in chunks_by_id.items() if not chunks]
        for chunk in self.index.get(self.index.known_vectors(unknown)):
            chunks_by_id[chunk.chunk_id] = [chunk]
        return [_document(chunk) for name in ids for chunk in chunks_by_id[name]]

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        """Do the same as `similarity_search_with_score`, without the scores."""
        return [document for document, _ in self.similarity_search_with_score(query, k, **kwargs)]

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, **kwargs: Any
    ) -> list[Document]:
        """Do the same as `similarity_search` for a vector."""
        return [document for document, _ in self._search(embedding, k, **kwargs)]

    def conversation_search(
        self, query: str, history: Sequence[Turn], k: int = 4, *, filter: Filter | None = None
    ) -> list[tuple[Document, float]]:
        """Return the `k` documents most similar to a question in its conversation, with their cosines, best first.

        A follow-up's cosines are to the mean of two vectors: `query`, and the user's last two questions with it.
        Documents that the turn before would retrieve are ranked as if their cosines were 0.02 higher. `history` has the
        turns before the question, (role, text) each; those of "user" count. A long question and `filter` are as in
        `similarity_search_with_score`.
        """
        check_whole("k", k, least=1)

        def encode(texts: list[str]) -> list[list[float]]:
            return [self._embedding.embed_query(text) for text in texts]

        def parts_of(question: str) -> list[str]:
            if isinstance(self._embedding, CacheCraftEmbeddings):
                return self._embedding.embedder.question_parts(question)
            return [question]  # how much of it another model reads is not known

        hits = search(
            self.index, encode, query, history, top_k=k, where=_where(filter), parts_of=parts_of
        )
        return [(_document(hit), hit.score) for hit in hits]

    def similarity_search_with_score(
        self, query: str, k: int = 4, *, filter: Filter | None = None, **kwargs: object
    ) -> list[tuple[Document, float]]:
        """Return the `k` most similar documents with their cosines, -1 to 1, best first.

        Of documents with the same text one is returned. The metadata also has the chunk id, under
        `cachecraft_chunk_id`. With `CacheCraftEmbeddings` a question that is too long for the model is searched for
        part by part, and a document's cosine is that of its best part.

        Args:
            k: most documents, at least 1.
            filter: values that the metadata must have, or comparisons of its scalar values (`{"page": {"$in": [1,
                2]}}`: `$eq`, `$ne`, `$in`, `$nin`, `$gt`, `$gte`, `$lt`, `$lte`, and `$and`, `$or` over filters), or a
                predicate on the metadata as it was added. It is applied before the search, so there are always `k` hits
                if `k` documents with different texts pass.
        """
        check_names(kwargs, ("filter", "k"))
        return self.conversation_search(query, (), k, filter=filter)

    def max_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """Return `k` of the `fetch_k` most similar documents, chosen to be like the query and unlike each other.

        They are in the order of the choice. With a `lambda_mult` of 1 only similarity to the query counts, with 0 only
        difference from each other. `filter` is as in `similarity_search_with_score`.
        """
        vector = self._embedding.embed_query(query)
        return self.max_marginal_relevance_search_by_vector(
            vector, k, fetch_k, lambda_mult, **kwargs
        )

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        *,
        filter: Filter | None = None,
        **kwargs: object,
    ) -> list[Document]:
        """Do the same as `max_marginal_relevance_search` for a vector; return at most `fetch_k` documents."""
        check_names(kwargs, ("fetch_k", "filter", "k", "lambda_mult"))
        check_whole("k", k, least=1)
        check_whole("fetch_k", fetch_k, least=1)
        check_number("lambda_mult", lambda_mult, most=1)
        documents = [document for document, _ in self._search(embedding, fetch_k, filter=filter)]
        known = self.index.known_vectors(
            [noted_chunk_id(document.metadata) for document in documents]
        )
        # a document that was deleted meanwhile has no vector
        similar = [document for document in documents if noted_chunk_id(document.metadata) in known]
        vectors = [known[noted_chunk_id(document.metadata)].tolist() for document in similar]
        chosen = maximal_marginal_relevance(unit_vectors(embedding), vectors, lambda_mult, k)
        return [similar[row] for row in chosen]

    def _search(
        self, embedding: list[float], k: int, *, filter: Filter | None = None, **unknown: object
    ) -> list[tuple[Document, float]]:
        check_names(unknown, ("filter", "k"))
        hits = self.index.search(unit_vectors(embedding), k, where=_where(filter))
        return [(_document(hit), hit.score) for hit in hits]

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return lambda cosine: min(1.0, max(0.0, cosine))  # LangChain requires 0 to 1


def _chunk(document: Document, name: str) -> Chunk:
    """Return a document as a chunk: scalar metadata as it is, for filters, and the rest as JSON."""
    plain = {
        key: value
        for key, value in document.metadata.items()
        if key not in NOTE_KEYS and isinstance(value, str | int | float | bool | None)
    }
    rest = {
        key: value
        for key, value in document.metadata.items()
        if key not in plain and key not in NOTE_KEYS
    }
    try:
        ours = json.dumps({"id": name, "rest": rest})
    except (TypeError, ValueError, RecursionError) as error:  # ValueError: it contains itself
        raise ConfigError(
            f"document {name}: {error}; its metadata must be JSON-serializable"
        ) from error
    return Chunk(document.page_content, {**plain, _OURS: ours})


def _where(filter: Filter | None) -> Where | None:
    """Return LangChain's filter for the index; a predicate sees the metadata that the document was added with."""
    return (lambda metadata: filter(_values(metadata))) if callable(filter) else filter


def _values(metadata: Metadata) -> dict[str, object]:
    """Return the metadata that the document was added with."""
    rest: dict[str, object] = json.loads(str(metadata.get(_OURS, "{}"))).get("rest", {})
    return {key: value for key, value in metadata.items() if key != _OURS} | rest


class NotedMetadata(dict[str, object]):
    """Metadata of a document with notes of this package, which a comparison ignores.

    LangChain expects a store to return documents equal to those that were added. The chunk id and the outcome are about
    this package's caches, not about the document.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, dict) and _without_notes(self) == _without_notes(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # as of any dict


def _without_notes(metadata: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in metadata.items() if key not in NOTE_KEYS}


def note(document: Document, notes: Mapping[str, object]) -> None:
    """Replace a document's metadata by a `NotedMetadata`: a copy with `notes` added, whose keys are in `NOTE_KEYS`."""
    document.metadata = NotedMetadata({**document.metadata, **notes})


def _document(chunk: Chunk | SearchHit) -> Document:
    """Return a document as it was added, with its chunk id; one that LangChain did not add has that as its id too."""
    if _OURS in chunk.metadata:
        name = json.loads(str(chunk.metadata[_OURS]))["id"]
        document = Document(chunk.text, id=name, metadata=_values(chunk.metadata))
    else:
        document = Document(chunk.text, id=chunk.chunk_id, metadata=dict(chunk.metadata))
    note(document, {CHUNK_ID_KEY: chunk.chunk_id})
    return document
