"""`CacheCraft`: documents in, answers out. One class over the retriever and the engine, without a framework."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, Self, Unpack

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
from cachecraft_rag.engine.settings import load_settings
from cachecraft_rag.observability.stats import Answer, RequestStats, Source
from cachecraft_rag.observability.tracing import Retrieval, following
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.retrievers.conversation import search_texts
from cachecraft_rag.retrievers.embeddings import BUNDLED_EMBEDDER, Embedder
from cachecraft_rag.retrievers.index.faiss_store import FaissStore
from cachecraft_rag.retrievers.index.filters import Where
from cachecraft_rag.retrievers.index.removal import evict_chunks
from cachecraft_rag.retrievers.indexer import IndexReport, index_documents, index_folder
from cachecraft_rag.retrievers.retriever import DEFAULT_TOP_K, Retriever, open_index
from cachecraft_rag.serving.generation import Generation
from cachecraft_rag.serving.sampling import SamplingOptions, sampling_from
from cachecraft_rag.store.closeable import Closeable
from cachecraft_rag.types.documents import Chunk, Document
from cachecraft_rag.types.progress import Progress

if TYPE_CHECKING:
    from cachecraft_rag.serving.priming import DocumentPrimer, PrimingEstimate

logger = logging.getLogger("cachecraft_rag.rag")


class AnswerStream(Iterator[str]):
    """An answer as an iterator of text pieces. `sources` is complete from the start, `text` and `stats` at the end.

    The model runs while pieces are read. The first piece raises BusyError or WaitTimeoutError if the engine is too busy
    (`EngineConfig.max_waiting`, `wait_timeout_s`), StoreError if its store is closed, and any piece ServerError if a
    server makes the answer and fails.
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
        """Return the next piece without blocking the event loop.

        Raises StopAsyncIteration at the end; else as for pieces.
        """
        return await anext(self._generation)

    @property
    def text(self) -> str:
        """The text so far."""
        return self._generation.text

    @property
    def stats(self) -> RequestStats:
        """Statistics so far; complete once the stream has ended."""
        return replace(self._generation.stats, searched=self._searched)

    def close(self) -> None:
        """Stop generating; the text so far stays. A second call does nothing."""
        self._generation.close()

    def answer(self) -> Answer:
        """Read the rest and return the whole answer, with the pieces that were read before.

        After the end or `close` it returns the answer so far. Raises the errors of the pieces that are left: BusyError,
        WaitTimeoutError, ConfigError, StoreError or ServerError, see `AnswerEngine.stream`.
        """
        for _ in self:
            pass
        return Answer(self.text, self.sources, self.stats)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One question, answered with reuse and with full prefill over the same chunks.

    reused  the answer with reuse
    full    the answer with full prefill
    """

    reused: Answer
    full: Answer

    @property
    def is_same(self) -> bool:
        """True if both answers are equal word for word."""
        return self.reused.text == self.full.text

    @property
    def agreement(self) -> float:
        """The share of words that both answers have in the same order, 0 to 1: 1.0 for equal answers.

        This compares texts; `Audit.agreement` compares the likeliest token at each place.

        Twice the longest common subsequence, divided by the words of both answers.
        """
        return word_agreement(self.reused.text, self.full.text)

    @property
    def speedup(self) -> float:
        """Full prefill's time to the first token, divided by that with reuse; NaN if an answer had no first token."""
        reused_s = self.reused.stats.ttft_s
        full_s = self.full.stats.ttft_s
        return full_s / reused_s if reused_s and full_s else math.nan

    def as_dict(self) -> dict[str, object]:
        """Return plain values, for JSON: both answers, `is_same`, `agreement` and `speedup`, by these names.

        The answers are "reused" and "full", see `Answer.as_dict`. A speedup that is NaN stays NaN. Raises nothing.
        """
        return {
            "reused": self.reused.as_dict(),
            "full": self.full.as_dict(),
            "is_same": self.is_same,
            "agreement": self.agreement,
            "speedup": self.speedup,
        }


def word_agreement(text: str, other_text: str) -> float:
    """Return the share of words that two texts have in the same order, 0 to 1.

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

    `sources` is complete once the first piece is there, `text` and `stats` at the end. Errors of `CacheCraft.stream`
    (ConfigError, ContextLengthError, IndexStoreError …) are raised by the first piece, those of the answer (StoreError,
    ServerError …) by the piece that fails. After a `break` out of `async for`,
    `await stream.aclose()` stops the model.
    """

    def __init__(self, begin: Callable[[], AnswerStream]) -> None:
        self._begin = begin
        self._begun: AnswerStream | None = None
        self._closed = False

    async def __anext__(self) -> str:
        if self._closed:
            raise StopAsyncIteration
        if self._begun is None:
            self._closed = True  # unless it begins
            self._begun = await asyncio.to_thread(self._begin)
            self._closed = False
        return await self._begun.anext()

    @property
    def sources(self) -> tuple[Source, ...]:
        """The retrieved chunks; empty before the first piece."""
        return self._begun.sources if self._begun is not None else ()

    @property
    def text(self) -> str:
        """The text so far."""
        return self._begun.text if self._begun is not None else ""

    @property
    def stats(self) -> RequestStats | None:
        """Statistics so far; None before the first piece."""
        return self._begun.stats if self._begun is not None else None

    async def aclose(self) -> None:
        """Stop generating; no piece follows, and a second call does nothing."""
        self._closed = True
        if self._begun is not None:
            self._begun.close()


class CacheCraft(Retriever, Closeable):
    """Answers questions over your documents and reuses the chunk-caches of the chunks it retrieves.

    >>> rag = CacheCraft.from_pretrained("demo", store="chunk-caches/")  # doctest: +SKIP
    >>> rag.add_documents("docs/", prime=True)  # doctest: +SKIP
    >>> rag.ask("How do I descale the kettle?").text  # doctest: +SKIP

    Make one with `from_pretrained`. Or pass an engine, an index and an embedder of your own; `close` then closes only
    the engine.
    """

    def __init__(self, engine: AnswerEngine, index: FaissStore, embedder: Embedder) -> None:
        super().__init__(index, embedder, caches=engine.store)
        self.engine = engine
        self._opened = ExitStack()  # what `close` closes besides the engine

    @classmethod
    def from_pretrained(
        cls,
        model: str = "demo",
        *,
        store: PathLike = "chunk-caches",
        embeddings: PathLike = BUNDLED_EMBEDDER,
        config: EngineConfig | None = None,
        backend: str = "transformers",
        **options: object,
    ) -> Self:
        """Load a model and open (or make) a store folder.

        Args:
            model: Hugging Face name or folder, or "demo" for the bundled SmolLM2-135M-Instruct.
            store: folder for the retrieval index and the chunk-caches; several processes may share it.
            embeddings: sentence-transformers model for retrieval.
            config: how to open the engine: device, dtype, namespace, instruction, byte budgets, codec, remote.
            backend: what runs the model: "transformers", in this process, or "vllm" (see `vllm.engine.VLLMEngine`).
            options: single options of `EngineConfig` by name; they override `config`. With vLLM also `server`:
                arguments of its engine.

        Raises:
            ModelNotFoundError, UnsupportedModelError, IndexStoreError, StoreError, ConfigError: each says what to do.
        """
        check_path("embeddings", embeddings)
        check_choice("backend", backend, ("transformers", "vllm"))
        return cls._over(
            _engine_loader(backend)(model, store=store, config=config, **options), store, embeddings
        )

    @classmethod
    def _over(cls, engine: AnswerEngine, store: PathLike, embeddings: PathLike) -> Self:
        """Answer with an engine that was opened here, over the retrieval index in a store folder."""
        with ExitStack() as opened:
            opened.enter_context(engine)
            embedder = Embedder(embeddings)
            rag = cls(engine, opened.enter_context(open_index(store, embedder)), embedder)
            rag._opened = opened.pop_all()
        return rag

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        store: PathLike = "chunk-caches",
        embeddings: PathLike = BUNDLED_EMBEDDER,
        **options: Any,
    ) -> Self:
        """Use the model of a server that `cachecraft serve` started; retrieval stays here.

        Args:
            url: such as "http://127.0.0.1:8000".
            store: folder for the retrieval index; chunk-caches are the server's.
            embeddings: as in `from_pretrained`.
            options: model, system, api_key, admin_key, timeout_s, total_timeout_s: see
                `client.http.HTTPEngine.connect`.

        Raises:
            ServerError: nothing answers there, or something else does, or a server of another version.
            ModelNotFoundError: the embedding model cannot be loaded.
            IndexStoreError: the index in `store` is of another embedding model, or damaged.
            ConfigError: an option is unknown, or an argument is out of range.
        """
        from cachecraft_rag.client.http import HTTPEngine

        check_path("embeddings", embeddings)
        check_names(options, signature(HTTPEngine.connect).parameters.keys() - {"url"})
        return cls._over(HTTPEngine.connect(url, **options), store, embeddings)

    @classmethod
    def from_settings(
        cls, path: PathLike | None = None, *, backend: str = "transformers", **options: Any
    ) -> Self:
        """Open what a settings' file and the environment say, see `engine.settings.load_settings`.

        Args:
            path: the file; None: `cachecraft.toml` in the working directory, if it is there.
            backend: as in `from_pretrained`.
            options: as in `from_pretrained`, with `model`, `store` and `embeddings`; they override the settings.

        Raises:
            ConfigError: names file or variable, key, and what to do; else as `from_pretrained`.
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
    ) -> IndexReport:
        """Index a folder, a file or documents in memory; documents that have not changed are skipped.

        Documents whose files were deleted from the folder leave the index, and their chunk-caches the store, unless
        another document has the same chunk.

        Args:
            prime: also compute the chunk-caches of all documents, so that the first question is fast too (see `prime`).
            progress: called after each file and each batch of embeddings, where it counts files, and then by `prime`,
                where it counts chunk-caches.
            follow_links: also read targets of links outside the folder; otherwise such links are reported as problems.

        Raises:
            DocumentError: there is nothing at the path, or a file of a kind that cannot be indexed, or a document in
                memory has the id of an indexed file. A single unreadable file is a problem in the report instead.
            ConfigError: `documents` in memory are not `Document` objects of valid texts, or their metadata holds
                something other than texts, numbers, True, False and None; with `prime` also as there.
            IndexStoreError: the index is closed, or cannot be read or written.
            StoreError, ServerError: chunk-caches of removed documents could not be deleted, or others not be primed.
        """
        check_flag("prime", prime)
        check_flag("follow_links", follow_links)
        check_callable("progress", progress)
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
            )
        else:
            check_kind(
                "documents",
                documents,
                Iterable,
                advice="name a folder, or write a list of Document objects",
            )
            report = index_documents(
                documents, self.index, self.embedder, progress=progress, model=bound
            )
        evict_chunks(self.caches, report.removed_chunk_ids)
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
        """Compute and store the missing chunk-caches, each chunk after its neighbours in its document.

        Args:
            alone: each chunk after a fixed passage instead, see `Primer`.
            progress: called before the first pass and after each one; `done` and `total` count chunk-caches.
            skipped: called with a sentence about each document that has chunks too long for the model; by default
                it is logged.

        Returns:
            Number of captured chunk-caches. Those that are stored already are not captured again.

        Raises:
            StoreError, ServerError: the store is closed, or the server fails. What was captured before stays.
            IndexStoreError: the index is closed or damaged.
            ConfigError: the engine's instruction is private (`private_system`), or a server refuses a text;
                ContextLengthError if it finds one too long.
            UnsupportedCallError: `alone` with the model in a server.
        """
        check_callable("progress", progress)
        check_callable("skipped", skipped, optional=False)
        check_flag("alone", alone)
        from cachecraft_rag.serving.priming import prime_documents

        return prime_documents(
            self._primer(alone), self._texts(), progress=progress, skipped=skipped
        )

    def estimate_priming(self, *, alone: bool = False) -> PrimingEstimate:
        """Return the number, tokens and size of what `prime` would compute and store now; nothing is computed.

        Raises StoreError if the store is closed or its folder cannot be read, ServerError if the server fails,
        IndexStoreError if the index is closed or damaged, ConfigError if a server refuses a text, UnsupportedCallError
        for `alone` with the model in a server.
        """
        from cachecraft_rag.serving.priming import estimate_priming

        check_flag("alone", alone)
        return estimate_priming(self._primer(alone), self._texts())

    def _primer(self, alone: bool) -> DocumentPrimer:
        from cachecraft_rag.serving.priming import Primer

        if alone:
            return Primer(self.engine, alone=True)
        return self.engine.primer(related=self._similar_chunks)

    def _similar_chunks(self, chunk: Chunk) -> list[Chunk]:
        """Return the other chunks of the index that are most similar to this one, best first."""
        from cachecraft_rag.serving.priming import SIMILAR_CHUNKS

        return self.index.similar(chunk.chunk_id, SIMILAR_CHUNKS)

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

        Args:
            top_k: how many chunks to retrieve.
            where: filter of chunks by their metadata (see `FaissStore.search`).
            search_history: retrieve with the questions in `history` too (see `Retriever.retrieve`), so that a follow-up
                finds what it refers to; False: the question alone. `stats.searched` says what was searched for.
            answering: history, session, sampling, config: see `Engine.stream`. And fields of `SamplingParams` by
                name, such as `max_tokens=60` or `temperature=0.7`.

        Raises:
            ConfigError: an option or the filter is unknown or invalid; the question is empty, the history does not
                alternate, or a tool or a `json_schema` cannot be used. By a piece, if a server refuses the request.
            ContextLengthError: question, history and answer do not fit the model's context.
            UnsupportedCallError: this engine does not support tools.
            IndexStoreError: the index holds no documents yet, is closed or damaged.
            StoreError: the store is closed; by this call or by the first piece.
            ServerError: the model is in a server that fails; by a piece, or by this call for a chat template of the
                server that takes too much time or memory.
            BusyError, WaitTimeoutError: by the first piece, if too many requests wait, or this one waited too long.
            ForkError: this process is a fork of the one that made the engine or the index.
            RuntimeError, MemoryError: by a piece, if the model fails, such as torch without memory. Over vLLM also
                CancelledError if the engine was closed meanwhile, and vLLM's own exceptions.
        """
        check_names(answering, AnsweringOptions.__annotations__)
        check_flag("search_history", search_history)
        check_text("question", question, damaged=True)
        # a generator gives its turns once
        history = listed("history", answering.get("history", ()))
        answering["history"] = history
        context = history if search_history else []
        began = time.perf_counter()
        hits = (
            self.retrieve(question, top_k=top_k, where=where, history=context)
            if question.strip()
            else []
        )
        retrieval = Retrieval(began, time.perf_counter(), top_k=top_k, passages=len(hits))
        chunks = [Chunk(hit.text, hit.metadata, hit.chunk_id) for hit in hits]
        with following(retrieval):
            generation = self.engine.stream(question, chunks, **sampling_from(dict(answering)))
        sources = tuple(Source(h.chunk_id, h.text, h.score, h.metadata) for h in hits)
        return AnswerStream(generation, sources, searched=search_texts(question, context))

    def ask(self, question: str, **options: Unpack[AskOptions]) -> Answer:
        """Retrieve and answer; options as in `stream`.

        Raises:
            ConfigError: an option, the filter, the question, the history, a tool or a schema cannot be used.
            ContextLengthError: question, history and answer do not fit the model's context.
            UnsupportedCallError: this engine does not support tools.
            IndexStoreError: the index holds no documents yet, is closed or damaged.
            BusyError, WaitTimeoutError: too many requests wait, or this one waited too long.
            StoreError, ServerError: the store is closed, or the server that makes the answer fails.
            ForkError: this process is a fork of the one that made the engine or the index.
            RuntimeError, MemoryError: the model fails, such as torch without memory. Over vLLM also CancelledError if
                the engine was closed meanwhile, and vLLM's own exceptions.
        """
        return self.stream(question, **options).answer()

    def compare(self, question: str, **options: Unpack[AskOptions]) -> Comparison:
        """Answer with reuse and then with full prefill, over the same chunks; options as in `ask`.

        Neither answer captures anything, so comparing one question changes no later comparison. The first request of
        a process is slower than the others; here it is the one with reuse.

        Args:
            options: `config` holds the settings of reuse; its `capture` is taken as False.

        Returns:
            Both answers, and how they compare.

        Raises:
            ConfigError: an option, the filter, the question, the history, a tool or a schema cannot be used.
            ContextLengthError: question, history and answer do not fit the model's context.
            UnsupportedCallError: this engine does not support tools.
            IndexStoreError: the index holds no documents yet, is closed or damaged.
            BusyError, WaitTimeoutError: too many requests wait, or one of these waited too long.
            StoreError, ServerError: the store is closed, or the server that makes the answers fails.
            ForkError: this process is a fork of the one that made the engine or the index.
            RuntimeError, MemoryError: the model fails, such as torch without memory. Over vLLM also CancelledError if
                the engine was closed meanwhile, and vLLM's own exceptions.
        """
        given = options.get("config")
        check_kind("config", given, ReuseConfig, optional=True, advice="write ReuseConfig(…)")
        config = given or self.engine.config
        reused_options = options.copy()
        reused_options["config"] = replace(config, capture=False)
        full_options = options.copy()
        full_options["config"] = ReuseConfig.full_prefill()
        history = listed("history", options.get("history", ()))  # a generator gives its turns once
        reused_options["history"] = history
        full_options["history"] = history
        reused = self.ask(question, **reused_options)
        return Comparison(reused, self.ask(question, **full_options))

    def astream(self, question: str, **options: Unpack[AskOptions]) -> AsyncAnswerStream:
        """`stream` for `async for`; nothing happens, and nothing is raised, before the first piece is asked for."""
        return AsyncAnswerStream(partial(self.stream, question, **options))

    async def aask(self, question: str, **options: Unpack[AskOptions]) -> Answer:
        """Retrieve and answer without blocking the event loop; options and result as in `ask`.

        A cancelled task stops the model after the current token.

        Raises:
            ConfigError: an option, the filter, the question, the history, a tool or a schema cannot be used.
            ContextLengthError: question, history and answer do not fit the model's context.
            UnsupportedCallError: this engine does not support tools.
            IndexStoreError: the index holds no documents yet, is closed or damaged.
            BusyError, WaitTimeoutError: too many requests wait, or this one waited too long.
            StoreError, ServerError: the store is closed, or the server that makes the answer fails.
            ForkError: this process is a fork of the one that made the engine or the index.
            RuntimeError, MemoryError: the model fails, such as torch without memory. Over vLLM also CancelledError if
                the engine was closed meanwhile, and vLLM's own exceptions.
        """
        stream = self.astream(question, **options)
        async for _ in stream:
            pass
        assert stream.stats is not None  # no piece or many: the stream has begun
        return Answer(stream.text, stream.sources, stream.stats)

    def close(self) -> None:
        """Write pending captures and close the engine, and the index if this class opened it.

        The engine is closed also if it was passed to the constructor; the index is closed if `from_pretrained`,
        `from_settings` or `connect` opened it. A second call does nothing.

        Raises TimeoutError if the engine started vLLM and vLLM has not ended after 30 seconds, and vLLM's own
        exceptions; the index is closed even then. Raises nothing for other engines.
        """
        with self._opened:
            self.engine.close()


def _engine_loader(backend: str) -> Callable[..., AnswerEngine]:
    if backend == "vllm":
        from cachecraft_rag.vllm.engine import VLLMEngine

        return VLLMEngine.from_pretrained
    from cachecraft_rag.engine.engine import Engine

    return Engine.from_pretrained
