"""The retrieval side as LangChain classes: embeddings, a vector store over `FaissStore`, a retriever over that."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any, Self

from cachecraft_rag.checks import check_kind, check_names, check_number, check_path, check_whole
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

    Vectors have unit length and `embedder.dim` numbers, 384 with the default model. Raises ConfigError for an
    `embedder` of another kind. If the default one is loaded, it raises ModelNotFoundError if its wheel or
    sentence-transformers is not installed or it cannot be loaded, and IndexStoreError if it gives a vector that is not
    finite.
    """

    def __init__(self, embedder: EmbeddingModel | None = None) -> None:
        if not hasattr(embedder, "encode_query"):
            check_kind("embedder", embedder, Embedder, optional=True)
        self.embedder: EmbeddingModel = embedder or Embedder()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return a unit vector of each text to be indexed, in their order, as lists of `embedder.dim` numbers.

        The list is empty without texts. Raises IndexStoreError if the model gives a vector that is not finite,
        TypeError for one text instead of a list, AttributeError for an item that is no text, ForkError in a fork of the
        process that loaded the model, and torch's RuntimeError without memory.
        """
        vectors: list[list[float]] = self.embedder.encode_document(texts).tolist()
        return vectors

    def embed_query(self, text: str) -> list[float]:
        """Return the unit vector of a question, a list of `embedder.dim` numbers.

        Raises IndexStoreError if the model gives a vector that is not finite, AttributeError for anything but a text,
        ForkError in a fork of the process that loaded the model, and torch's RuntimeError without memory.
        """
        vector: list[float] = self.embedder.encode_query([text])[0].tolist()
        return vector


class CacheCraftVectorStore(Closeable, VectorStore):
    """A LangChain vector store over a `FaissStore`: on disk, with upserts, deletion and filters; scores are cosines.

    A LangChain document is a document of the index under the same id. Two documents with the same text are one chunk
    with two owners: a search returns it once, as one of them, and it stays until both are deleted.

    index      the caller closes it, unless it came from `open`, `from_texts` or `from_documents`
    embedding  any embeddings; their vectors are normalised to unit length
    caches     chunk-caches to delete with their documents; None: they stay until the store needs the space

    Raises `ConfigError` for an argument of another kind. Every method that reads or changes the index raises
    `IndexStoreError` once the index is closed, or if its database cannot be read or, for a change, written; and
    `ForkError` in a fork of the process that opened it. Errors of `embedding` pass unchanged.
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
        and width are compared; they embed a text to tell the width.

        Args:
            folder: of the index.
            embedding: makes the vectors.
            caches: as in this class.

        Raises IndexStoreError if the index was made with other embeddings, is damaged or of a newer version, or its
        folder cannot be used; ConfigError for an argument of another kind; and what embeddings of another class raise.
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
        """Open the index in `folder`, or make it, and add texts to what it holds; return the vector store.

        `close` of the result closes the index. After an error in adding it is closed at once, and texts that were added
        before the error stay. `from_documents` takes the same options.

        Args:
            texts: one for each document.
            embedding: makes the vectors.
            metadatas: one for each text; None or an empty list: no metadata.
            ids: one for each text; None or an empty list: new ones.
            folder: of the index.
            caches: as in this class.

        Raises:
            IndexStoreError: the index cannot be opened, or vectors do not fit it.
            ConfigError: an option, an argument, an id, a text or metadata cannot be used; there is another number of
                ids than of texts; or a server refuses to delete chunk-caches of replaced documents.
            StoreError, ServerError: chunk-caches of replaced documents cannot be deleted.
            ForkError: in a fork of the process that opened the store of chunk-caches.
            ValueError: LangChain's, for another number of metadatas and for a text of another type; or the embeddings
                return another number of vectors.

        Errors of the embeddings pass.
        """
        check_names(kwargs, ("caches", "folder", "ids", "metadatas", *_HINTS))
        with ExitStack() as opened:
            store = opened.enter_context(closing(cls.open(folder, embedding, caches=caches)))
            store.add_texts(texts, metadatas, ids=ids)
            opened.pop_all()
        return store

    @classmethod
    def from_rag(cls, rag: Retriever) -> Self:
        """Return a vector store over the index of a `CacheCraft` (or another `Retriever`), which you close yourself.

        Each chunk is a document under its chunk id. Raises ConfigError for anything but a `Retriever`.
        """
        check_kind("rag", rag, Retriever, advice="CacheCraft.from_pretrained makes one")
        return cls(rag.index, CacheCraftEmbeddings(rag.embedder), caches=rag.caches)

    def close(self) -> None:
        """Delete the chunk-caches of deleted documents that were not added again; close the index if opened here.

        If the store of chunk-caches fails or is closed, they stay until their space is needed, with a warning in the
        log. Raises nothing. A second call does nothing more.
        """
        self._evictions.finish(self.index)
        if self._owns_index:
            self.index.close()

    @property
    def embeddings(self) -> Embeddings:
        """The embeddings that make the vectors, as they were given. Raises nothing."""
        return self._embedding

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: object,
    ) -> list[str]:
        """Add texts as documents, or replace those with the same ids; returns the ids, new ones where none were given.

        Each document is one transaction; those before an error stay. The list is empty without texts. For embedding and
        chunk-caches see `add_documents`.

        Args:
            texts: one for each document.
            metadatas: one for each text; None or an empty list: no metadata.
            ids: one for each text; None or an empty list: new ones.

        Raises ConfigError for another number of ids, LangChain's ValueError for another number of metadatas and for a
        text of another type, TypeError for `texts` that cannot be iterated, and what `add_documents` raises.
        """
        texts = list(texts)
        if ids and len(ids) != len(texts):  # LangChain would leave out the texts after the last id
            raise ConfigError(f"{len(ids)} ids for {len(texts)} texts; give one for each")
        return super().add_texts(texts, metadatas, ids=ids, **kwargs)

    def add_documents(
        self, documents: list[Document], ids: list[str] | None = None, **kwargs: object
    ) -> list[str]:
        """Add documents, or replace those with the same ids; returns the ids, new ones where none were given.

        Each document is one transaction; those before an error stay. Of several with the same id the last stays. A text
        that the index holds already keeps its vector and is not embedded. Chunk-caches of replaced documents, and those
        that wait after `delete`, are deleted if no document has their text any more. The list is empty without
        documents.

        Args:
            documents: LangChain's documents. They are not changed.
            ids: one for each document; None or an empty list: the documents' own.
            kwargs: `batch_size`, which LangChain's `index()` sends, and `show_progress`; both are ignored.

        Raises ConfigError for metadata that JSON cannot hold, another number of ids, an unknown option, and an id or a
        text that is not valid Unicode; IndexStoreError for vectors that do not fit the index, and if it is closed or
        cannot be written; ForkError in a fork of the process that opened the index or the store of chunk-caches;
        TypeError or ValueError for embeddings that return no numbers or another number of vectors; and what the
        embeddings raise. StoreError or ServerError if chunk-caches of replaced documents cannot be deleted, and
        ConfigError if a server refuses to delete them: the documents were added then.
        """
        check_names(kwargs, _HINTS)
        documents = list(documents)
        given: Sequence[str | None] = ids or [document.id for document in documents]
        if len(given) != len(documents):
            raise ConfigError(f"{len(given)} ids for {len(documents)} documents; give one for each")
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
        """Delete documents, or all of them without `ids`; returns True. Unknown ids are ignored.

        Without ids, documents that LangChain did not add are deleted too. An id that is no document's but a chunk's
        removes the chunk from every document. Chunk-caches follow with the next addition, after a minute, or at
        `close`: an upsert deletes first. An empty list of ids deletes nothing. Each document is one transaction.

        Raises ConfigError for an unknown option and for an id that is no valid text, IndexStoreError if the index is
        closed or damaged or cannot be written, ForkError in a fork of the process that opened it, TypeError for `ids`
        that cannot be iterated, and RuntimeError if the system has no room for the thread that deletes chunk-caches
        later.
        """
        check_names(kwargs, ())
        index = self.index
        for name in [document.doc_id for document in index.documents()] if ids is None else ids:
            # Chunks that were not added through LangChain have their chunk id as their document id.
            is_document = index.holds(name)
            change = index.delete_document(name) if is_document else index.delete_chunks([name])
            self._evictions.later(index, change.removed)
        return True

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return the documents with these ids, in their order; unknown ids are skipped, so the list may be empty.

        A document of several chunks that LangChain did not add gives each of them, and an id that is no document's but
        a chunk's gives the chunk. An id that is given twice is returned twice. The metadata also has the chunk id,
        under `cachecraft_chunk_id`. Raises ConfigError for an id that is no valid text, IndexStoreError if the index is
        closed or damaged, and ForkError in a fork of the process that opened the index.
        """
        chunks_by_id = {name: self.index.chunks_of(name) for name in ids}
        # A chunk that was not added through LangChain has its chunk id as its id.
        unknown = [name for name, chunks in chunks_by_id.items() if not chunks]
        for chunk in self.index.get(self.index.known_vectors(unknown)):
            chunks_by_id[chunk.chunk_id] = [chunk]
        return [_document(chunk) for name in ids for chunk in chunks_by_id[name]]

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        """Return the `k` most similar documents, best first; options as in `similarity_search_with_score`.

        There are fewer if no more documents pass the filter. Raises ConfigError for an unknown option, a `k` below 1 or
        an invalid filter; IndexStoreError if the index is closed or damaged, or the embeddings are of another width;
        ForkError in a fork of the process that opened the index; and what the embeddings and a filter that is a
        function raise.
        """
        return [document for document, _ in self.similarity_search_with_score(query, k, **kwargs)]

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, **kwargs: Any
    ) -> list[Document]:
        """Return the `k` documents most similar to a vector, best first.

        Options as in `similarity_search_with_score`. There are fewer if no more documents pass the filter. Raises
        ConfigError for an unknown option, a `k` below 1 or an invalid filter; IndexStoreError for a vector that does
        not fit and if the index is closed or damaged; TypeError or ValueError for a vector that holds no numbers;
        ForkError in a fork of the process that opened the index; and what a filter that is a function raises.
        """
        return [document for document, _ in self._search(embedding, k, **kwargs)]

    def conversation_search(
        self, query: str, history: Sequence[Turn], k: int = 4, *, filter: Filter | None = None
    ) -> list[tuple[Document, float]]:
        """Return the `k` documents most similar to a question in its conversation, with their cosines, best first.

        Documents that the turn before would retrieve are ranked as if their cosines were 0.02 higher; the cosines do
        not change. There are fewer if no more documents pass the filter.

        Args:
            query: the question.
            history: the turns before it, (role, text) each.
            k: most documents, at least 1.
            filter: as in `similarity_search_with_score`.

        Raises ConfigError for a `k` below 1 or an invalid filter; TypeError, ValueError or AttributeError for a history
        that is no list of pairs of texts; IndexStoreError if the index is closed or damaged, or the embeddings are of
        another width; ForkError in a fork of the process that opened the index; and what the embeddings and a filter
        that is a function raise.
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

        There are fewer if no more documents pass the filter, and the list may be empty. Of documents with the same text
        one is returned. The metadata also has the chunk id, under `cachecraft_chunk_id`.

        Args:
            query: the question.
            k: most documents, at least 1.
            filter: values that the metadata must have, or comparisons of its scalar values (`{"page": {"$in": [1,
                2]}}`: `$eq`, `$ne`, `$in`, `$nin`, `$gt`, `$gte`, `$lt`, `$lte`, and `$and`, `$or` over filters), or a
                predicate on the metadata. It is applied before the search, so there are always `k` hits if `k`
                documents with different texts pass.

        Raises ConfigError for an unknown option, a `k` below 1 or an invalid filter; IndexStoreError if the index is
        closed or damaged, or the embeddings are of another width; ForkError in a fork of the process that opened the
        index; and what the embeddings and a predicate raise.
        """
        check_names(kwargs, ("filter", "k"))
        return self.conversation_search(query, (), k, filter=filter)

    def max_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """Return `k` of the `fetch_k` most similar documents, chosen to be like the query and unlike each other.

        They are in the order of the choice. There are fewer if `fetch_k` is below `k`, or no more documents pass the
        filter.

        Args:
            query: the question.
            k: most documents, at least 1.
            fetch_k: number of documents to choose from, at least 1.
            lambda_mult: 1 chooses by similarity to the query alone, 0 by difference from each other alone.
            kwargs: `filter`, as in `similarity_search_with_score`.

        Raises ConfigError for an unknown option, a `k` or `fetch_k` below 1, a `lambda_mult` outside of 0 to 1, or an
        invalid filter; IndexStoreError if the index is closed or damaged, or the embeddings are of another width;
        ForkError in a fork of the process that opened the index; and what the embeddings and a predicate raise.
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
        """Return `k` of the `fetch_k` documents most similar to a vector, chosen to be like it and unlike each other.

        They are in the order of the choice. There are fewer if `fetch_k` is below `k`, or no more documents pass the
        filter.

        Args:
            embedding: the vector.
            k: most documents, at least 1.
            fetch_k: number of documents to choose from, at least 1.
            lambda_mult: 1 chooses by similarity to the vector alone, 0 by difference from each other alone.
            filter: as in `similarity_search_with_score`.

        Raises ConfigError for an unknown option, a `k` or `fetch_k` below 1, a `lambda_mult` outside 0 to 1 or an
        invalid filter; IndexStoreError for a vector that does not fit and if the index is closed or damaged; TypeError
        or ValueError for a vector that holds no numbers; ForkError in a fork of the process that opened the index; and
        what a predicate raises.
        """
        check_names(kwargs, ("fetch_k", "filter", "k", "lambda_mult"))
        check_whole("k", k, least=1)
        check_whole("fetch_k", fetch_k, least=1)
        check_number("lambda_mult", lambda_mult, most=1)
        found = [document for document, _ in self._search(embedding, fetch_k, filter=filter)]
        known = self.index.known_vectors([noted_chunk_id(one.metadata) for one in found])
        # a document that was deleted meanwhile has no vector
        similar = [document for document in found if noted_chunk_id(document.metadata) in known]
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
    """Replace a document's metadata by a `NotedMetadata`: a copy with `notes` added. Returns None and raises nothing.

    Comparisons ignore only notes under the keys of `NOTE_KEYS`. The former dictionary does not change.
    """
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
