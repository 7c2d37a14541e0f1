"""`CacheCraft`: documents in, answers out. One class over the retriever and the engine, without a framework."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, Self, Unpack, cast

from cachecraft_rag.checks import (
    check_callable,
    check_choice,
    check_flag,
    check_kind,
    check_names,
    check_path,
    check_text,
    listed,
)
from cachecraft_rag.engine.base import AnswerEngine, AnswerOptions, PathLike
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.engine.loading import engine_loader
from cachecraft_rag.engine.settings import load_settings
from cachecraft_rag.errors import CacheCraftError, ConfigError
from cachecraft_rag.observability.stats import Answer, RequestStats, Source
from cachecraft_rag.observability.tracing import Retrieval, following
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.retrievers.conversation import search_texts
from cachecraft_rag.retrievers.embeddings import (
    BUNDLED_EMBEDDER,
    Embedder,
    EmbeddingModel,
    shortened,
)
from cachecraft_rag.retrievers.index.faiss_store import FaissStore
from cachecraft_rag.retrievers.index.filters import Where
from cachecraft_rag.retrievers.index.removal import evict_chunks, evict_removed
from cachecraft_rag.retrievers.indexer import IndexReport, index_documents, index_folder
from cachecraft_rag.retrievers.retriever import DEFAULT_TOP_K, Retriever, open_index
from cachecraft_rag.serving.generation import Generation
from cachecraft_rag.serving.sampling import SamplingOptions, sampling_from
from cachecraft_rag.store.closeable import Closeable
from cachecraft_rag.types.documents import Chunk, Document, SearchHit
from cachecraft_rag.types.progress import Progress

if TYPE_CHECKING:
    from cachecraft_rag.serving.priming import DocumentPrimer, PrimingEstimate

logger = logging.getLogger("cachecraft_rag.rag")


class AnswerStream(Iterator[str]):
    """An answer as an iterator of text pieces; `text` and `stats` are complete at the end.

    The model runs while pieces are read, so its errors are raised by pieces. `sources`, the retrieved chunks, best
    first, are complete from the start, also those that did not fit the prompt.
    """

    def __init__(
        self, generation: Generation, sources: tuple[Source, ...], *, searched: tuple[str, ...] = ()
    ) -> None:
        self._generation = generation
        self.sources = sources
        self._searched = searched

    def __next__(self) -> str:
        return next(self._generation)

    async def anext(self) -> str:
        """Return the next piece without blocking; StopAsyncIteration after the last. Cancelling ends the answer."""
        return await anext(self._generation)

    @property
    def text(self) -> str:
        """The text of the pieces that were read so far."""
        return self._generation.text

    @property
    def stats(self) -> RequestStats:
        """Statistics so far, computed at each access; `ttft_s` is 0.0 before the first token."""
        return replace(self._generation.stats, searched=self._searched)

    def close(self) -> None:
        """Stop generating; the text so far stays. A second call does nothing."""
        self._generation.close()

    def answer(self) -> Answer:
        """Read the rest and return the whole answer; after `close`, or a piece that raised, the answer so far."""
        for _ in self:
            pass
        return Answer(self.text, self.sources, self.stats)


@dataclass(frozen=True, slots=True)
class _Retrieved:
    """Retrieved chunks, best first, how they were retrieved, and the queries."""

    hits: list[SearchHit]
    retrieval: Retrieval
    searched: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A question, answered with reuse and with full prefill over the same chunks.

    reused  the answer with reuse
    full    the answer with full prefill
    """

    reused: Answer
    full: Answer

    @property
    def is_same(self) -> bool:
        """True if the texts of both answers are equal, white space included."""
        return self.reused.text == self.full.text

    @property
    def agreement(self) -> float:
        """The share of words, 0 to 1, that both texts have in order; `Audit.agreement` compares tokens."""
        return word_agreement(self.reused.text, self.full.text)

    @property
    def speedup(self) -> float:
        """Full prefill's time to the first token, divided by that with reuse; NaN if an answer had no first token."""
        reused_s = self.reused.stats.ttft_s
        full_s = self.full.stats.ttft_s
        return full_s / reused_s if reused_s and full_s else math.nan

    def as_dict(self) -> dict[str, object]:
        """Return plain values by name: `reused`, `full`, `is_same`, `agreement` and `speedup`, which may be NaN."""
        return {
            "reused": self.reused.as_dict(),
            "full": self.full.as_dict(),
            "is_same": self.is_same,
            "agreement": self.agreement,
            "speedup": self.speedup,
        }


def word_agreement(text: str, other_text: str) -> float:
    """Return the share of words that two texts have in the same order, 0 to 1; 1.0 if neither has a word.

    It is twice the length of the longest common subsequence of their words, divided by the number of words of both
    texts. Words are split at white space, and case counts.

    >>> word_agreement("every eight weeks", "every eight weeks")
    1.0
    >>> word_agreement("it costs 3 euros", "it costs 10 euros")
    0.75
    """
    words = text.split()
    other_words = other_text.split()
    if not words and not other_words:
        return 1.0
    # lengths[i]: the longest common subsequence of the words so far and the first i of the other words.
    lengths = [0] * (len(other_words) + 1)
    for word in words:
        diagonal = 0
        for place, other_word in enumerate(other_words, start=1):
            above = lengths[place]
            if word == other_word:
                lengths[place] = diagonal + 1
            else:
                lengths[place] = max(above, lengths[place - 1])
            diagonal = above
    return 2 * lengths[-1] / (len(words) + len(other_words))


class AnsweringOptions(AnswerOptions, SamplingOptions, total=False):
    """Options that `CacheCraft.stream` passes to the engine."""


class AskOptions(AnsweringOptions, total=False):
    """Options of a question, see `CacheCraft.stream`."""

    top_k: int
    where: Where | None
    search_history: bool


class AsyncAnswerStream(AsyncIterator[str]):
    """An answer as an asynchronous iterator of text pieces; retrieval runs in a thread.

    `sources` is complete once the first piece is there, `text` and `stats` at the end. After a `break` out of `async
    for`, `await stream.aclose()` stops the model. All errors are raised by pieces; none follows one that raised an
    error.
    """

    def __init__(self, begin: Callable[[], AnswerStream]) -> None:
        self._begin = begin
        self._begun: AnswerStream | None = None
        self._has_failed = False  # while it begins, too: nothing follows unless it has begun
        self._closed = False

    async def __anext__(self) -> str:
        if self._has_ended():
            raise StopAsyncIteration
        if self._begun is None:
            self._has_failed = True
            self._begun = await asyncio.to_thread(self._begin)
            self._has_failed = False
            if self._closed:  # meanwhile, by another task
                self._begun.close()
                raise StopAsyncIteration
        return await self._begun.anext()

    def _has_ended(self) -> bool:
        return self._closed or self._has_failed

    @property
    def sources(self) -> tuple[Source, ...]:
        """The retrieved chunks, best first; () before the first piece, or if none was retrieved."""
        return self._begun.sources if self._begun is not None else ()

    @property
    def text(self) -> str:
        """The text of the pieces that were read so far; "" before the first one."""
        return self._begun.text if self._begun is not None else ""

    @property
    def stats(self) -> RequestStats | None:
        """Statistics so far, complete once the stream has ended; None before the first piece."""
        return self._begun.stats if self._begun is not None else None

    async def aclose(self) -> None:
        """Stop generating; no further piece follows. It does not wait for the model."""
        self._closed = True
        if self._begun is not None:
            self._begun.close()


class CacheCraft(Retriever, Closeable):
    """Answers questions over your documents and reuses the chunk-caches of the chunks it retrieves.

    >>> rag = CacheCraft.from_pretrained("demo", store="chunk-caches/")  # doctest: +SKIP
    >>> rag.add_documents("docs/", prime=True)  # doctest: +SKIP
    >>> rag.ask("How many days do I have to return an appliance?").text  # doctest: +SKIP

    Make one with `from_pretrained`. Or pass an engine, an index and an embedder of your own; `close` then closes only
    the engine.
    """

    def __init__(self, engine: AnswerEngine, index: FaissStore, embedder: EmbeddingModel) -> None:
        super().__init__(index, embedder, caches=engine.store)
        self.engine = engine
        self._opened = ExitStack()  # what `close` closes besides the engine
        try:
            evict_removed(index, self.caches)
        except CacheCraftError as error:
            logger.warning("Chunk-caches of removed documents could not be deleted: %s", error)

    @classmethod
    def from_pretrained(
        cls,
        model: str = "demo",
        *,
        store: PathLike = "chunk-caches",
        embeddings: PathLike | EmbeddingModel = BUNDLED_EMBEDDER,
        config: EngineConfig | None = None,
        backend: str = "transformers",
        **options: object,
    ) -> Self:
        """Load a model and open (or make) a store folder. If an error is raised, all that was opened is closed.

        Args:
            model: Hugging Face name or folder, or "demo" for the bundled SmolLM2-135M-Instruct.
            store: folder for the retrieval index and the chunk-caches; several processes may share it.
            embeddings: sentence-transformers model for retrieval, or an object such as `EmbeddingModel`.
            config: how to open the engine: device, dtype, namespace, instruction, byte budgets, codec, remote.
            backend: what runs the model: "transformers", in this process, or "vllm" (see `vllm.engine.VLLMEngine`).
            options: as of `EngineConfig.with_options`; they override `config`. With vLLM also `server`, for its engine.
        """
        _check_embeddings(embeddings)
        check_choice("backend", backend, ("transformers", "vllm"))
        return cls._over(
            _engine_loader(backend)(model, store=store, config=config, **options), store, embeddings
        )

    @classmethod
    def _over(
        cls, engine: AnswerEngine, store: PathLike, embeddings: PathLike | EmbeddingModel
    ) -> Self:
        """Answer with an engine that was opened here, over the retrieval index in a store folder."""
        with ExitStack() as opened:
            opened.enter_context(engine)
            if isinstance(embeddings, str | os.PathLike):
                embedder: EmbeddingModel = Embedder(embeddings)
            else:
                embedder = embeddings
            rag = cls(engine, opened.enter_context(open_index(store, embedder)), embedder)
            rag._opened = opened.pop_all()
        return rag

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        store: PathLike = "chunk-caches",
        embeddings: PathLike | EmbeddingModel = BUNDLED_EMBEDDER,
        **options: Any,
    ) -> Self:
        """Use the model of a server that `cachecraft serve` started; retrieval stays here.

        Args:
            url: such as "http://127.0.0.1:8000".
            store: folder for the retrieval index; chunk-caches are the server's.
            embeddings: as in `from_pretrained`.
            options: as in `client.http.HTTPEngine.connect`, such as `api_key`.
        """
        from cachecraft_rag.client.http import HTTPEngine

        _check_embeddings(embeddings)
        check_names(options, signature(HTTPEngine.connect).parameters.keys() - {"url"})
        return cls._over(HTTPEngine.connect(url, **options), store, embeddings)

    @classmethod
    def from_settings(
        cls, path: PathLike | None = None, *, backend: str = "transformers", **options: Any
    ) -> Self:
        """Open what a settings' file and the environment say, see `engine.settings.load_settings`.

        `top_k`, `threads`, `metrics_port` and sampling have no effect here. `options`, as in `from_pretrained` and with
        `model`, `store` and `embeddings`, override the settings. ConfigError names file or variable, and key.
        """
        settings = load_settings(path)
        arguments: dict[str, Any] = {
            "model": settings["model"],
            "store": settings["store"],
            "embeddings": settings["embeddings"] or BUNDLED_EMBEDDER,
            "config": settings.engine_config(),
            "backend": backend,
        }
        return cls.from_pretrained(**(arguments | options))

    def add_documents(
        self,
        documents: PathLike | Iterable[Document],
        *,
        prime: bool = False,
        progress: Callable[[Progress], None] | None = None,
        follow_links: bool = False,
        opener: Callable[[str, int], int] | None = None,
        reader: Mapping[str, object] | object | None = None,
        splitter: object | None = None,
    ) -> IndexReport:
        """Index a folder, a file or documents in memory; documents that have not changed are skipped.

        Documents whose files were deleted from the folder leave the index, and their chunk-caches the store, unless
        another document has the same chunk. A file or documents in memory replace only those of the same id.

        Args:
            documents: path of a folder or a file; or `Document` objects, which forbid `follow_links`, `opener` and
                `reader`.
            prime: also compute the chunk-caches of the whole index, so that the first question is fast too (`prime`).
            progress: called after each file and each batch of embeddings, where it counts files or documents, and then
                by `prime`, where it counts chunk-caches.
            follow_links: also read targets of links outside the folder; otherwise such links are reported as problems.
            opener: opens each folder and file, as with Python's `open`; a DocumentError of it is a problem in the
                report.
            reader: reads files in place of the built-in readers: a function of a path that returns a text, or a list of
                texts or of LangChain's or LlamaIndex's documents, or None for the built-in reader; or a reader of
                either framework. As a mapping, readers by suffix in any case, such as `{".odt": read_odt}`. It runs in
                this process, on this thread, and no limit of time or memory holds for it.
            splitter: splits texts in place of the built-in splitter: a function of a text that returns a list, or a
                text splitter or node parser of either framework. It runs as the reader does. A chunk that is longer
                than the embedding model reads is split further, and that is a problem in the report.

        Returns:
            The doc_ids that were added, updated, unchanged and removed, and the problems. It does not count the
            chunk-caches that `prime` computes.

        Raises:
            DocumentError: there is nothing at the path, or a file of a kind that cannot be indexed, or a document in
                memory has the id of an indexed file. A single unreadable file is a problem in the report instead.

        Documents that were written, and chunk-caches that were captured before an error, stay.
        """
        check_flag("prime", prime)
        check_flag("follow_links", follow_links)
        check_callable("progress", progress)
        check_callable("opener", opener)
        bound = self.engine.decoder.chunk_bound
        if isinstance(documents, str | os.PathLike):
            check_path("documents", documents)
            report = index_folder(
                documents,
                self.index,
                self.embedder,
                progress=progress,
                model=bound,
                follow_links=follow_links,
                opener=opener,
                reader=reader,
                splitter=splitter,
            )
        else:
            _refuse_file_options(reader=reader, follow_links=follow_links, opener=opener)
            check_kind(
                "documents",
                documents,
                Iterable,
                advice="name a folder, or write a list of Document objects",
            )
            report = index_documents(
                documents,
                self.index,
                self.embedder,
                progress=progress,
                model=bound,
                splitter=splitter,
            )
        evict_removed(self.index, self.caches)
        if prime:
            self.prime(progress=progress)
        return report

    def prime(
        self,
        *,
        alone: bool = False,
        progress: Callable[[Progress], None] | None = None,
        skipped: Callable[[str], None] = logger.warning,
    ) -> int:
        """Compute and store the index's missing chunk-caches, each chunk after its neighbours; return their number.

        A document's only chunk is captured after similar chunks of others. The instruction is captured and counted too;
        ConfigError if it is private. Captures before an error stay.

        Args:
            alone: each chunk after a fixed passage instead; not with the model in a server (UnsupportedCallError).
            progress: called before the first pass and after each one that captures; it counts chunk-caches.
            skipped: called with a sentence about each document that has chunks too long for the model.
        """
        check_callable("progress", progress)
        check_callable("skipped", skipped, optional=False)
        check_flag("alone", alone)
        from cachecraft_rag.serving.priming import prime_documents

        texts = self._texts()
        try:
            return prime_documents(self._primer(alone), texts, progress=progress, skipped=skipped)
        finally:
            self._evict_removed_meanwhile(texts)

    def _evict_removed_meanwhile(self, texts: Sequence[tuple[str, Sequence[Chunk]]]) -> None:
        """Delete the chunk-caches of chunks that were removed while they were primed, by any process."""
        primed = {chunk.chunk_id for _, chunks in texts for chunk in chunks}
        evict_chunks(self.caches, primed - self.index.present(primed))

    def estimate_priming(self, *, alone: bool = False) -> PrimingEstimate:
        """Return number, tokens and size of what `prime` (with this `alone`) would store now; nothing is computed."""
        from cachecraft_rag.serving.priming import estimate_priming

        check_flag("alone", alone)
        return estimate_priming(self._primer(alone), self._texts())

    def _primer(self, alone: bool) -> DocumentPrimer:
        from cachecraft_rag.serving.priming import Primer

        if alone:
            return Primer(self.engine, alone=True)
        return self.engine.primer(related=self._similar_chunks)

    def _similar_chunks(self, chunk: Chunk) -> list[Chunk]:
        """Return the most similar other chunks of the index, best first; [] if this one was removed meanwhile."""
        from cachecraft_rag.serving.priming import CHUNKS_BEFORE

        if not self.index.present([chunk.chunk_id]):
            return []
        return self.index.similar(chunk.chunk_id, CHUNKS_BEFORE)

    def _texts(self) -> list[tuple[str, list[Chunk]]]:
        return [
            (document.doc_id, self.index.chunks_of(document.doc_id))
            for document in self.index.documents()
        ]

    def stream(
        self,
        question: str,
        *,
        top_k: int = DEFAULT_TOP_K,
        where: Where | None = None,
        search_history: bool = True,
        **answering: Unpack[AnsweringOptions],
    ) -> AnswerStream:
        """Retrieve, then stream the answer.

        The chunks are retrieved and the prompt is checked now. The model runs when the first piece is requested.
        Nothing is retrieved for an empty question, which may only follow the result of a tool.

        Args:
            question: the question, see `Engine.stream`.
            top_k: how many chunks to retrieve.
            where: filter of chunks by their metadata (see `FaissStore.search`).
            search_history: retrieve with the questions in `history` too (see `Retriever.retrieve`), so that a follow-up
                finds what it refers to. `stats.searched` says what was searched for.
            answering: history, session, sampling, config, tools: see `Engine.stream`. And fields of `SamplingParams` by
                name, such as `max_tokens=60` or `temperature=0.7`, which override those of `sampling`.
        """
        retrieved, answering = self._retrieved(
            question, answering, top_k=top_k, where=where, search_history=search_history
        )
        return self._answer_over(retrieved, question, answering)

    def _retrieved(
        self,
        question: str,
        answering: AnsweringOptions,
        *,
        top_k: int,
        where: Where | None,
        search_history: bool,
    ) -> tuple[_Retrieved, AnsweringOptions]:
        """Check the options and retrieve; return what was found, and the options with their history as a list."""
        check_names(answering, AnsweringOptions.__annotations__)
        check_flag("search_history", search_history)
        check_text("question", question, damaged=True)
        # a generator gives its turns once
        history = listed("history", answering.get("history", ()))
        answering["history"] = history
        context = history if search_history else []
        began = time.perf_counter()
        hits: list[SearchHit] = []
        searched: tuple[str, ...] = ()
        if question.strip():
            hits = self.retrieve(question, top_k=top_k, where=where, history=context)
            searched = search_texts(shortened(question), context)
        retrieval = Retrieval(began, time.perf_counter(), top_k=top_k, passages=len(hits))
        return _Retrieved(hits, retrieval, searched), answering

    def _answer_over(
        self, retrieved: _Retrieved, question: str, answering: AnsweringOptions
    ) -> AnswerStream:
        """Answer over chunks that were found."""
        chunks = [Chunk(hit.text, hit.metadata, hit.chunk_id) for hit in retrieved.hits]
        with following(retrieved.retrieval):
            generation = self.engine.stream(question, chunks, **sampling_from(dict(answering)))
        sources = tuple(Source(h.chunk_id, h.text, h.score, h.metadata) for h in retrieved.hits)
        return AnswerStream(generation, sources, searched=retrieved.searched)

    def ask(self, question: str, **options: Unpack[AskOptions]) -> Answer:
        """Retrieve and answer; options as in `stream`."""
        return self.stream(question, **options).answer()

    def compare(self, question: str, **options: Unpack[AskOptions]) -> Comparison:
        """Answer with reuse and then with full prefill, over the same chunks; options as in `ask`.

        Neither answer captures anything, so comparing one question changes no later comparison. The first request of a
        process is slower than the others; here it is the one with reuse. With a temperature both answers are drawn, so
        give a `seed`. ConfigError if the settings switch reuse off.
        """
        given = options.get("config")
        check_kind("config", given, ReuseConfig, optional=True, advice="write ReuseConfig(…)")
        config = given or self.engine.config
        if not config.reuse:
            raise ConfigError(
                "reuse is switched off, so both answers would be full prefill's; give config=ReuseConfig()"
            )
        top_k = options.pop("top_k", DEFAULT_TOP_K)
        where = options.pop("where", None)
        search_history = options.pop("search_history", True)
        # Retrieved once: between two searches documents may change.
        retrieved, answering = self._retrieved(
            question,
            cast(AnsweringOptions, options),
            top_k=top_k,
            where=where,
            search_history=search_history,
        )
        answers = []
        for side in (replace(config, capture=False), ReuseConfig.full_prefill()):
            chosen = answering.copy()
            chosen["config"] = side
            answers.append(self._answer_over(retrieved, question, chosen).answer())
        return Comparison(*answers)

    def astream(self, question: str, **options: Unpack[AskOptions]) -> AsyncAnswerStream:
        """Return the answer for `async for`, with the options of `stream`. Even retrieval waits for the first piece."""
        return AsyncAnswerStream(partial(self.stream, question, **options))

    async def aask(self, question: str, **options: Unpack[AskOptions]) -> Answer:
        """Retrieve and answer without blocking the event loop; options as in `stream`.

        A cancelled task stops the model after the current token; a retrieval under way ends in its thread.
        """
        stream = self.astream(question, **options)
        async for _ in stream:
            pass
        assert stream.stats is not None  # no piece or many: the stream has begun
        return Answer(stream.text, stream.sources, stream.stats)

    def close(self) -> None:
        """Write pending captures, close the engine, and the index if this class opened it, even after an error."""
        with self._opened:
            self.engine.close()


def _check_embeddings(embeddings: object) -> None:
    """Raise ConfigError for what is neither a path or a name nor an embedding model."""
    if not hasattr(embeddings, "encode_query"):
        check_path("embeddings", embeddings)


def _refuse_file_options(**given: object) -> None:
    """Raise ConfigError for options of files, given with documents in memory."""
    if names := ", ".join(name for name, value in given.items() if value not in (None, False)):
        raise ConfigError(f"{names}: for files, and these documents are in memory; leave it out")


def _engine_loader(backend: str) -> Callable[..., AnswerEngine]:
    if backend == "vllm":
        from cachecraft_rag.vllm.engine import VLLMEngine

        return VLLMEngine.from_pretrained
    return engine_loader()
