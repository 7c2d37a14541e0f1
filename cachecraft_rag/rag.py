"""`CacheCraft`: documents in, answers out. The retriever and the engine behind one framework-free facade."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, Unpack

from cachecraft_rag.checks import (
    check_callable,
    check_flag,
    check_kind,
    check_names,
    check_path,
    check_text,
    check_whole,
)
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.engine.engine import AnswerOptions, Engine, Generation, PathLike
from cachecraft_rag.engine.priming import Primer
from cachecraft_rag.engine.stats import Answer, RequestStats, Source
from cachecraft_rag.errors import IndexStoreError
from cachecraft_rag.retrievers.embeddings import BUNDLED_EMBEDDER, Embedder
from cachecraft_rag.retrievers.faiss_store import FaissStore
from cachecraft_rag.retrievers.filters import Where
from cachecraft_rag.retrievers.indexer import IndexProgress, IndexReport, index_documents, index_folder
from cachecraft_rag.store import RowFilter
from cachecraft_rag.store.closeable import Closeable
from cachecraft_rag.types import Chunk, Document, SearchHit

logger = logging.getLogger("cachecraft_rag.rag")

INDEX_FOLDER = "index"  # below the folder a user names as the store
DEFAULT_TOP_K = 5


class AnswerStream(Iterator[str]):
    """An answer on its way: an iterator of text pieces; `sources` is there at once, `text` and `stats` as they come."""

    def __init__(self, generation: Generation, sources: tuple[Source, ...]) -> None:
        self._generation = generation
        self.sources = sources

    def __next__(self) -> str:
        return next(self._generation)

    @property
    def text(self) -> str:
        """What has come so far."""
        return self._generation.text

    @property
    def stats(self) -> RequestStats:
        """Numbers so far; complete once the stream has ended."""
        return self._generation.stats

    def close(self) -> None:
        """Stop here."""
        self._generation.close()

    def answer(self) -> Answer:
        """Wait for the end and return everything."""
        for _ in self:
            pass
        return Answer(self.text, self.sources, self.stats)


class CacheCraft(Closeable):
    """Answers questions over your documents, reusing the chunk-caches of what it retrieves.

    >>> rag = CacheCraft.from_pretrained("demo", store="chunk-caches/")  # doctest: +SKIP
    >>> rag.add_documents("docs/", prime=True)  # doctest: +SKIP
    >>> rag.ask("How do I descale the kettle?").text  # doctest: +SKIP

    Make it with `from_pretrained`, or from parts of your own: an engine, an index and an embedder, which stay yours
    to close.
    """

    def __init__(self, engine: Engine, index: FaissStore, embedder: Embedder) -> None:
        self.engine, self.index, self.embedder = engine, index, embedder
        self._opened = ExitStack()  # what `close` closes besides the engine

    @classmethod
    def from_pretrained(
        cls,
        model: str = "demo",
        *,
        store: PathLike = "chunk-caches",
        embeddings: PathLike = BUNDLED_EMBEDDER,
        config: EngineConfig | None = None,
        **options: Any,
    ) -> Self:
        """Load a model and open (or make) a store folder.

        Args:
            model: Hugging Face name or folder, or "demo" for the embedded SmolLM2-135M-Instruct.
            store: folder for the retrieval index and the chunk-caches; several processes may share it.
            embeddings: sentence-transformers model for retrieval.
            config, options: device, dtype, namespace, instruction, byte budgets, codec, remote: see `EngineConfig`.

        Raises:
            ModelNotFoundError, UnsupportedModelError, IndexStoreError, StoreError, ConfigError: each says what to do.
        """
        check_path("embeddings", embeddings)
        with ExitStack() as opened:
            engine = opened.enter_context(Engine.from_pretrained(model, store=store, config=config, **options))
            embedder = Embedder(embeddings)
            rag = cls(engine, opened.enter_context(open_index(store, embedder)), embedder)
            rag._opened = opened.pop_all()
        return rag

    def add_documents(
        self,
        documents: PathLike | Iterable[Document],
        *,
        prime: bool = False,
        progress: Callable[[IndexProgress], None] | None = None,
        follow_links: bool = False,
    ) -> IndexReport:
        """Index a folder, a file or documents in memory; what is unchanged since the last time is left alone.

        A folder is made to match: files that vanished are removed, with the chunk-caches nobody else needs.

        Args:
            prime: also bear the chunk-caches of all documents, so that the first question is fast too (see `prime`).
            follow_links: also read what links in the folder lead to outside of it; otherwise they are problems.
        """
        check_flag("prime", prime)
        check_flag("follow_links", follow_links)
        check_callable("progress", progress)
        bound = self.engine.decoder.chunk_bound
        if isinstance(documents, str | os.PathLike):
            check_path("documents", documents)
            report = index_folder(
                documents, self.index, self.embedder, progress=progress, model=bound, follow_links=follow_links
            )
        else:
            check_kind("documents", documents, Iterable, advice="name a folder, or write a list of Document objects")
            report = index_documents(documents, self.index, self.embedder, progress=progress, model=bound)
        self.engine.store.evict(RowFilter(chunk_ids=report.removed_chunk_ids))
        if prime:
            self.prime()
        return report

    def prime(
        self,
        *,
        progress: Callable[[int, int], None] | None = None,
        skipped: Callable[[str], None] = logger.warning,
    ) -> int:
        """Bear every chunk behind its document's preceding chunks; returns how many were captured, skipping what is there.

        Args:
            progress: called with (documents done, documents in all).
            skipped: called with a sentence about each document that has chunks too long for the model; by default
                it is logged.
        """
        check_callable("progress", progress)
        primer = Primer(self.engine)
        documents = self.index.documents()
        captured = 0
        for done, document in enumerate(documents, start=1):
            chunks = self.index.chunks_of(document.doc_id)
            fitting = [chunk for chunk in chunks if primer.fits(chunk)]
            if len(fitting) < len(chunks):
                skipped(
                    f"{document.doc_id}: {len(chunks) - len(fitting)} of {len(chunks)} chunks are too long for the "
                    "model and were not computed; index the document again with this model"
                )
            captured += primer.prime(fitting)
            if progress is not None:
                progress(done, len(documents))
        return captured

    def retrieve(self, question: str, *, top_k: int = DEFAULT_TOP_K, where: Where | None = None) -> list[SearchHit]:
        """The chunks nearest to the question, best first; their ids are the keys of their chunk-caches."""
        check_text("question", question, damaged=True)
        check_whole("top_k", top_k, least=1)
        hits = self.index.search(self.embedder.encode_query([question])[0], top_k, where=where)
        if not hits and self.index.stats().chunks == 0:
            raise IndexStoreError(f"{self.index.folder} holds no documents yet; add some with `cachecraft index DIR`")
        return hits

    def stream(
        self,
        question: str,
        *,
        top_k: int = DEFAULT_TOP_K,
        where: Where | None = None,
        **answering: Unpack[AnswerOptions],
    ) -> AnswerStream:
        """Retrieve, then answer piece by piece.

        Args:
            top_k, where: how many chunks to retrieve, and which may be (see `FaissStore.search`).
            answering: history, session, sampling, config: see `Engine.stream`.
        """
        check_names(answering, AnswerOptions.__annotations__)
        check_text("question", question, damaged=True)
        check_whole("top_k", top_k, least=1)
        hits = self.retrieve(question, top_k=top_k, where=where) if question.strip() else []
        chunks = [Chunk(hit.text, hit.metadata, hit.chunk_id) for hit in hits]
        generation = self.engine.stream(question, chunks, **answering)
        return AnswerStream(generation, tuple(Source(h.chunk_id, h.text, h.score, h.metadata) for h in hits))

    def ask(
        self,
        question: str,
        *,
        top_k: int = DEFAULT_TOP_K,
        where: Where | None = None,
        **answering: Unpack[AnswerOptions],
    ) -> Answer:
        """Retrieve and answer; arguments as in `stream`."""
        return self.stream(question, top_k=top_k, where=where, **answering).answer()

    def close(self) -> None:
        """Finish and write the captures under way; close what `from_pretrained` opened."""
        with self._opened:
            self.engine.close()


def open_index(root: PathLike, embedder: Embedder) -> FaissStore:
    """The retrieval index below a store folder, made if it is not there."""
    return FaissStore.open(Path(root) / INDEX_FOLDER, dim=embedder.dim, embedder_fingerprint=embedder.fingerprint)
