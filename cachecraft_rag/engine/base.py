"""The interface of all engines: a question and its chunks in, an answer out piece by piece, wherever the model runs."""

from __future__ import annotations

import _thread
import copy
import json
import logging
import os
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import ClassVar, Protocol, Self, TypedDict, Unpack

from cachecraft_rag.checks import check_callable, check_flag, check_kind, check_text, listed
from cachecraft_rag.engine.capabilities import ALL, Capabilities, Capability
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.engine.documents import by_source, chunks_of
from cachecraft_rag.errors import CacheCraftError, ConfigError, StoreError
from cachecraft_rag.model.facts import DiskSpace, ModelFacts
from cachecraft_rag.observability.request_counts import RequestCounts
from cachecraft_rag.observability.request_log import log_request
from cachecraft_rag.observability.stats import RequestStats
from cachecraft_rag.observability.tracing import TracedRequest, traced
from cachecraft_rag.planning.calibration import Calibration
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.prompt.builder import PromptBuilder, Turn, checked_chunks
from cachecraft_rag.prompt.tools import Tool, checked_tools
from cachecraft_rag.prompt.unmarked import Recognise, session_of
from cachecraft_rag.serving.generation import Generation, Pieces
from cachecraft_rag.serving.priming import (
    DocumentPrimer,
    Primer,
    PrimingEstimate,
    Related,
    estimate_priming,
    prime_documents,
)
from cachecraft_rag.serving.request import Request, RequestProgress, check_asked
from cachecraft_rag.serving.sampling import SamplingParams, check_sampling
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.durable import Caches, Evicted
from cachecraft_rag.store.processes import HomeProcess
from cachecraft_rag.store.row_checks import LookupResult, RowBounds
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.types.progress import Progress
from cachecraft_rag.types.prompts import Prompt, Segment
from cachecraft_rag.types.variants import HeldChunk

logger = logging.getLogger("cachecraft_rag.engine")

PathLike = str | os.PathLike[str]
# prompt builders for sets of tools that are kept, besides the builder without tools
_KEPT_BUILDERS = 16


class AnswerOptions(TypedDict, total=False):
    """Options of a question, see `Engine.stream`."""

    history: Iterable[Turn]
    session: str | None
    sampling: SamplingParams | None
    config: ReuseConfig | None
    tools: Sequence[Tool]


class Capturer(Protocol):
    """Captures segments of prompts by their tokens, in this process or in vLLM."""

    def capture(
        self, prompt: Prompt, captures: Sequence[int], *, primed: bool, namespace: str
    ) -> None:
        """Capture these segments (indices) of a prompt for a tenant, see `AnswerEngine.capture`."""


class AnswerEngine(ABC):
    """Answers questions over chunks with one model; `Engine` in this process, or an engine in a server.

    Attributes:
        capabilities: calls that this kind of engine does not support.
        decoder: the model, or facts about it if it runs elsewhere.
        namespace: the tenant; chunk-caches never cross it.
        store: its chunk-caches; those of a server can only be primed, evicted, removed and readmitted, by admin key.
        config: settings of reuse; a call may bring other settings.
        calibration: result of `cachecraft calibrate`, or None.
        min_prompt_tokens: value in place of a `ReuseConfig.min_prompt_tokens` of None.
        prompts: builds prompts.
        request_counts: counts the requests of `stream`.
    """

    capabilities: ClassVar[Capabilities] = ALL

    def __init__(self, decoder: ModelFacts, store: Caches, config: EngineConfig) -> None:
        self.decoder = decoder
        self.store = store
        self.namespace = config.namespace
        self.config = config.reuse
        self.calibration: Calibration | None = None
        self.min_prompt_tokens = 0
        new_builder = partial(
            PromptBuilder,
            decoder.tokenizer,
            context_length=decoder.context_length,
            system=config.system,
            private_system=config.private_system,
            best_last=config.best_last,
        )
        self.prompts = new_builder()
        self._builder_with_tools = lru_cache(_KEPT_BUILDERS)(
            lambda tools: new_builder(tools=json.loads(tools))
        )
        self._building = threading.Lock()
        self.request_counts = RequestCounts()
        self._capturer: Capturer | None = None  # set by engines with `Capability.CAPTURE`
        self._home = HomeProcess("engine")

    def for_tenant(self, namespace: str) -> Self:
        """Return this engine for another tenant: the same model, queue, counts and store, but other chunk-caches.

        Closing it closes this engine. Attributes are copied. UnsupportedCallError if the model is in a server.
        """
        check_text("namespace", namespace, empty=False)  # "" would be the engine's own in a request
        engine = copy.copy(self)
        engine.namespace = namespace
        return engine

    @abstractmethod
    def close(self) -> None:
        """Store the captures of answers that have ended, and release what this engine opened.

        A second call does nothing. Answers under way go on without captures if the model is in this process, and fail
        otherwise. Captures that cannot be stored are logged and dropped.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- answers ------------------------------------------------------------------------------------------------------

    def stream(
        self,
        question: str,
        chunks: Iterable[Chunk],
        *,
        history: Iterable[Turn] = (),
        session: str | None = None,
        sampling: SamplingParams | None = None,
        config: ReuseConfig | None = None,
        tools: Sequence[Tool] = (),
    ) -> Generation:
        """Answer a question over ordered chunks (best first).

        The prompt is checked now; the model runs when the first piece is requested. Some errors are therefore raised by
        `next` of the result, not by this call. An answer is counted in `request_counts` and logged (`log_request`) once
        it has ended, and traced if `is_tracing`; one of which no piece was requested is not. A question that this call
        refuses counts as refused.

        Args:
            question: the question; not empty, unless the history ends with the result of a tool.
            chunks: passages that retrieval returned; of equal texts the first counts. If the context is too small,
                those of lowest rank are left out. Without any, the question is unmarked text, see `stream_text`.
            history: earlier turns of the conversation, user first; they follow the chunks. The last turn is the
                assistant's, or the result of a tool if the chat template lets the user speak after it.
            session: session whose private chunk-caches may be used besides the shared ones. What is captured of
                `chunks` is shared all the same, unless the instruction is private (`private_system`): then it is the
                session's, and without a session nothing is captured.
            sampling: length and randomness of the answer; None = `SamplingParams()`: greedy, at most 128 tokens.
            config: settings of reuse for this question; None = the engine's.
            tools: tools that the model may call, see `prompt.tools`; `prompts_with` gives the form of its calls.

        Returns:
            The answer as an iterator of pieces of text. Closing it early keeps its captures.
        """
        try:
            check_sampling(sampling)
            request = self._request(
                question,
                chunks,
                history=history,
                session=session,
                sampling=sampling or SamplingParams(),
                config=config,
                tools=tools,
            )
        except CacheCraftError:
            self.request_counts.refuse()
            raise

        return self._generation(request)

    def _generation(self, request: Request) -> Generation:
        progress = RequestProgress()
        return Generation(
            request,
            progress,
            self._pieces(request, progress),
            layers=self.decoder.layout.layers,
            ended=traced(self._ended, self._traced_request(request)),
            later=self._later,
        )

    def stream_text(self, prompt: str, **options: Unpack[AnswerOptions]) -> Generation:
        """Answer unmarked text, one user's message with its documents inside: `stream` without chunks.

        Captured passages are found and reused if `ReuseConfig.plain_prompts` is "reuse"; over vLLM only by a server
        that was started with `--reuse-plain-prompts`. What is captured of passages found in the text belongs to the
        `session`, if there is one, and else is shared.
        """
        return self.stream(prompt, (), **options)

    def prompts_with(self, tools: Sequence[Tool]) -> PromptBuilder:
        """Return the prompt builder for these tools; without tools it is `prompts`.

        The builders of the 16 sets of tools that were used last are kept.
        """
        if not tools:
            return self.prompts
        with self._building:  # the tokenizer is not thread-safe while a builder copies it
            return self._builder_with_tools(json.dumps(checked_tools(tools)))

    @abstractmethod
    def _pieces(self, request: Request, progress: RequestProgress) -> Pieces:
        """Return the answer's pieces as an iterator with `close`; the model runs once the first is requested."""

    def _ended(self, stats: Callable[[], RequestStats], error: str | None) -> None:
        """Count and log an answer that has ended; `error` names the kind of exception."""
        final = stats()
        self.request_counts.add(final)
        log_request(final, error=error)

    def _traced_request(self, request: Request) -> TracedRequest:
        sampling = request.sampling
        return TracedRequest(
            started=request.started,
            model=self.decoder.name,
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
        )

    def _later(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function in another thread. Takes no lock: finalisers call this, in threads that may hold any lock."""
        _thread.start_new_thread(function, arguments)

    # -- requests -----------------------------------------------------------------------------------------------------

    def _request(
        self,
        question: str,
        chunks: Iterable[Chunk],
        *,
        history: Iterable[Turn],
        session: str | None,
        sampling: SamplingParams,
        config: ReuseConfig | None,
        tools: Sequence[Tool],
    ) -> Request:
        """Check a question and build its prompt."""
        started = time.perf_counter()
        self._home.require()
        history = listed("history", history)
        check_asked(question, history, session=session, config=config)
        chunks = checked_chunks(chunks)
        if tools or any(role in ("calls", "result") for role, _ in history):
            self.capabilities.require(Capability.TOOLS)

        reuse = config or self.config
        is_searched = reuse.reuse and reuse.plain_prompts == "reuse"
        prompt = self.prompts_with(tools).build(
            question,
            chunks,
            history=history,
            reserve=sampling.max_new_tokens,
            recognise=self.recogniser(session) if is_searched else None,
            private=session is not None,
        )
        settings = self.for_prompt(self.calibrated(reuse), prompt)
        owner = session_of(prompt, session)
        request = Request(prompt, settings, sampling, owner, started, namespace=self.namespace)
        return self._prepared(request, reuse)

    def for_prompt(self, config: ReuseConfig, prompt: Prompt) -> ReuseConfig:
        """Return these settings, or a copy without reuse and captures for a prompt below their `min_prompt_tokens`."""
        return config.for_prompt(prompt.bounds[-1], measured=self.min_prompt_tokens)

    def _prepared(self, request: Request, reuse: ReuseConfig) -> Request:
        """Return the request with whatever this engine adds to it; `reuse` are its settings before any calibration."""
        return request

    def recogniser(self, session: str | None) -> Recognise | None:
        """Return a function that finds captured texts in token ids, also those of `session`; None: no search."""
        return None

    def calibration_for(self, config: ReuseConfig) -> Calibration | None:
        """Return the engine's `calibration` if it decides how much is recomputed with these settings, else None.

        It does if they leave ratio and α open, and `Calibration.fits` them.
        """
        calibration = self.calibration
        is_open = config.recompute_ratio is None and config.method.alpha is None
        if calibration is None or not is_open or not calibration.fits(config):
            return None
        return calibration

    def calibrated(self, config: ReuseConfig) -> ReuseConfig:
        """Return these settings with the α of `calibration_for`; unchanged if that is None."""
        calibration = self.calibration_for(config)
        return config if calibration is None else config.with_method(alpha=calibration.alpha)

    # -- chunk-caches -------------------------------------------------------------------------------------------------

    def primer(self, *, related: Related | None = None) -> DocumentPrimer:
        """Return a primer of at most 2,048 tokens a pass; `related` finds chunks similar to a document's only chunk."""
        return Primer(self, related=related)

    def prime(
        self,
        documents: Iterable[object],
        *,
        alone: bool = False,
        progress: Callable[[Progress], None] | None = None,
        skipped: Callable[[str], None] = logger.warning,
    ) -> int:
        """Capture documents of a database of yours before the first question; return how many chunk-caches were stored.

        Each is one chunk. Those with the same source (in the metadata `source`, else `source_id` or `file_path`; the
        `ref_doc_id` of a node) are captured after one another, in the order given, a single one after a fixed passage;
        the first of several is captured a second time after the next ones. The instruction is captured, and counted,
        too. What is stored already is skipped, so after Ctrl-C call it again. Documents that `remove` or `sync` had
        removed are stored again. ConfigError for an engine whose instruction is private.

        Args:
            documents: texts, chunks, LangChain's or Haystack's documents, or LlamaIndex's nodes, as a retriever returns
                them. The text is what the model will read of each: that of a node has its templates and metadata.
            alone: capture each chunk after a fixed passage, so that no other chunk shapes it; not with the model in a
                server (UnsupportedCallError).
            progress: called with the number of captures, before the first pass and after each one that captures.
            skipped: called with a sentence about each document that has chunks too long to capture.
        """
        check_flag("alone", alone)
        check_callable("progress", progress)
        check_callable("skipped", skipped, optional=False)
        texts = by_source(documents)
        self.readmit(chunk for _, chunks in texts for chunk in chunks)
        return prime_documents(self._primer(alone), texts, progress=progress, skipped=skipped)

    def estimate_priming(
        self, documents: Iterable[object], *, alone: bool = False
    ) -> PrimingEstimate:
        """Return number, tokens and size of what `prime` with the same arguments would capture; nothing is computed."""
        check_flag("alone", alone)
        return estimate_priming(self._primer(alone), by_source(documents))

    def _primer(self, alone: bool) -> DocumentPrimer:
        return Primer(self, alone=True) if alone else self.primer()

    def remove(self, documents: Iterable[object]) -> Evicted:
        """Remove the chunk-caches of documents that leave a database of yours, and of all chunks captured after them.

        Call it before the database deletes or replaces them; `documents` as in `prime`, maybe none. Those of every
        model and session of this tenant leave, on a remote in the background, and no process stores any of them again
        until `prime`, `readmit` or `sync` is given the document. Returns their number, and their bytes on disk.
        """
        chunk_ids = tuple(dict.fromkeys(chunk.chunk_id for chunk in chunks_of(documents)))
        if isinstance(self.store, ChunkCacheStore):
            return self.store.remove_chunks(chunk_ids, namespace=self.namespace)
        return self.store.remove_chunks(chunk_ids)

    def readmit(self, documents: Iterable[object]) -> None:
        """Let documents be stored again that `remove` or `sync` removed: for documents that are in the database again.

        `documents` as in `prime`; those that were not removed are ignored.
        """
        chunks = chunks_of(documents)
        readmit = self.store.readmit_chunks
        if isinstance(self.store, ChunkCacheStore):
            readmit = partial(self.store.readmit_chunks, namespace=self.namespace)
        back = readmit(()).intersection(chunk.chunk_id for chunk in chunks)
        if back:
            readmit(tuple(back))

    def sync(self, documents: Iterable[object]) -> Evicted:
        """Keep only the chunk-caches of these documents and of instructions; remove all others of this namespace.

        For a database that other programs change: give it all documents that the database holds, as for `prime`.
        Chunk-caches that another document has shaped leave too, and so do passages of unmarked prompts, whose documents
        are not known, and documents that were added while the list was made: `prime` takes them back. A remote keeps
        what this store never saw. Returns as `remove`. Raises ConfigError without documents, because a database that
        cannot be read looks empty; UnsupportedCallError if the chunk-caches are a server's.
        """
        self.capabilities.require(Capability.SYNC)  # before a whole database is read
        held = {chunk.chunk_id for chunk in chunks_of(documents)}
        if not held:
            raise ConfigError(
                "sync was given no documents, which would remove every chunk-cache; if that is meant, "
                "call engine.store.evict(down_to_bytes=0)"
            )
        assert isinstance(self.store, ChunkCacheStore), (
            "engines with this capability have a store on this machine"
        )
        self._finish_captures()
        self.store.flush()
        held.add(self.prompts.stand_in.segment_id)
        return self.store.sync_chunks(held, namespace=self.namespace)

    def _finish_captures(self) -> None:
        """Wait until captures of answers that have ended were given to the store."""
        return

    def capture(self, prompt: Prompt, captures: Sequence[int], *, primed: bool) -> None:
        """Compute a prompt without a question, capture segments (one index or more, ascending), wait for the store.

        Stored ones are captured again; what the store refuses is logged. `primed`: mark as captured after neighbours.
        """
        self._home.require()
        self.capabilities.require(Capability.CAPTURE)
        assert self._capturer is not None, "engines with this capability have one"
        self._capturer.capture(prompt, captures, primed=primed, namespace=self.namespace)

    def look_up(
        self, segments: Sequence[Segment], *, session: str | None = None, namespace: str = ""
    ) -> LookupResult:
        """Return the stored variants of segments for this model, shared ones and those private to `session`.

        `namespace` "" is the engine's own. Nothing is loaded; the store counts the look-up. Every segment's id is a key
        of `variants`. A remote is asked for segments with too few variants here, within its time limit. Rows that
        cannot belong to the model or a segment are left out and removed in the background. If the catalog of the store
        cannot be read, a warning is logged and nothing is found. UnsupportedCallError: the chunk-caches are a server's.
        """
        self.capabilities.require(Capability.LOOK_UP)
        segments = listed("segments", segments)
        for segment in segments:
            check_kind(
                "each of segments", segment, Segment, advice="PromptBuilder.chunk_segment makes one"
            )
        assert isinstance(self.store, ChunkCacheStore), (
            "engines with this capability have a store on this machine"
        )
        model = self.decoder
        tokens = {
            segment.segment_id: (len(segment.token_ids), segment.tokens_digest)
            for segment in segments
        }
        bounds = RowBounds(model.layout, model.context_length, tokens)
        return self.store.find(
            namespace or self.namespace,
            model.fingerprint,
            list(tokens),
            session=session,
            bounds=bounds,
        )

    def held(self, documents: Iterable[object], *, session: str | None = None) -> list[HeldChunk]:
        """Return what is stored of each document, in order, also of those private to `session`.

        Documents are as in `prime`. No model runs, no remote is asked, and captures still to be written do not count: a
        router sends a question where most of its documents are held.
        """
        assert isinstance(self.store, ChunkCacheStore), "engines over HTTP ask the server"
        ids = [chunk.chunk_id for chunk in chunks_of(documents)]
        return self.store.held(self.namespace, self.decoder.fingerprint, ids, session=session)

    def disk_space(self) -> DiskSpace:
        """Return the bytes that the store's files use, their limit, the free bytes of the disk, and the codec."""
        assert isinstance(self.store, ChunkCacheStore), "engines over HTTP ask the server"
        stats = self.store.stats(ask_remote=False)
        try:
            free = shutil.disk_usage(self.store.root).free
        except OSError as error:
            raise StoreError(
                f"The folder {self.store.root} is out of reach ({error}). Open the store again."
            ) from error
        return DiskSpace(stats.disk_bytes, stats.disk_budget, free, self.store.config.codec)
