"""The engine as its users see it, wherever its model runs: chunks and a question in, an answer out, piece by piece."""

from __future__ import annotations

import _thread
import json
import os
import shutil
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, TypedDict, Unpack

from cachecraft_rag.checks import check_kind, listed
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.errors import CacheCraftError, ConfigError
from cachecraft_rag.model.facts import DiskSpace, ModelFacts
from cachecraft_rag.observability.request_counts import RequestCounts
from cachecraft_rag.observability.request_log import log_request
from cachecraft_rag.observability.stats import RequestStats
from cachecraft_rag.planning.calibration import Calibration
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.prompt.builder import PromptBuilder, Turn
from cachecraft_rag.prompt.tools import Tool, checked_tools
from cachecraft_rag.prompt.unmarked import Recognise, session_of
from cachecraft_rag.serving.generation import Generation
from cachecraft_rag.serving.priming import PrimedEngine, Primer
from cachecraft_rag.serving.request import Request, RequestProgress, check_asked
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.durable import Caches
from cachecraft_rag.store.processes import HomeProcess
from cachecraft_rag.store.row_checks import Found, RowBounds
from cachecraft_rag.types import Chunk, Segment

PathLike = str | os.PathLike[str]
_TOOL_SETS = 16  # prompt builders that are kept, besides that without tools


class AnswerOptions(TypedDict, total=False):
    """Options of a question, see `Engine.stream`."""

    history: Iterable[Turn]
    session: str | None
    sampling: SamplingParams | None
    config: ReuseConfig | None
    tools: Sequence[Tool]


class AnswerEngine(PrimedEngine):
    """Answers questions over chunks with one model; `Engine` here, or a server's.

    Attributes:
        store: its chunk-caches; those of a server can only be evicted from here, see `StoreEngine`.
        config: how caches are reused; a call may bring its own.
        calibration: α as `cachecraft calibrate` found it, or None.
        request_counts: counts the requests of `stream`.
    """

    def __init__(self, decoder: ModelFacts, store: Caches, config: EngineConfig) -> None:
        self.decoder, self.store = decoder, store
        self.namespace, self.config = config.namespace, config.reuse
        self.calibration: Calibration | None = None
        make = partial(
            PromptBuilder,
            decoder.tokenizer,
            context_length=decoder.context_length,
            system=config.system,
            private_system=config.private_system,
            best_last=config.best_last,
        )
        self.prompts = make()
        self._with_tools = lru_cache(_TOOL_SETS)(lambda tools: make(tools=json.loads(tools)))
        self._making = threading.Lock()
        self.request_counts = RequestCounts()
        self._home = HomeProcess("engine")

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
        """Answer a question over ordered chunks (best first). The prompt is checked now, the model runs on the first
        piece.

        Args:
            history: earlier turns of the conversation, user first; they stand behind the chunks.
            session: whose private chunk-caches may be used besides the shared ones.
            tools: that the model may call, see `prompt.tools`; `prompts_with` says in what form it does.

        Raises:
            ContextLengthError: question, history and answer do not fit the model's context.
            ConfigError: the question is empty or the history does not alternate.
        """
        check_kind("sampling", sampling, SamplingParams, optional=True, advice="write SamplingParams(temperature=…)")
        try:
            options: dict[str, Any] = {"history": history, "session": session, "config": config, "tools": tools}
            request = self._request(question, chunks, sampling=sampling or SamplingParams(), **options)
        except CacheCraftError:
            self.request_counts.refuse()
            raise
        progress = RequestProgress()
        return Generation(
            request,
            progress,
            self._pieces(request, progress),
            layers=self.decoder.layout.layers,
            ended=self._ended,
            later=self._later,
        )

    def prompts_with(self, tools: Sequence[Tool]) -> PromptBuilder:
        """What lays out prompts with these tools. Raises ConfigError for what is none."""
        if not tools:
            return self.prompts
        with self._making:  # the tokenizer is not thread-safe while a builder copies it
            return self._with_tools(json.dumps(checked_tools(tools)))

    def stream_text(self, prompt: str, **options: Unpack[AnswerOptions]) -> Generation:
        """Answer a prompt that some application has written as one text, documents and all: see
        `ReuseConfig.plain_prompts`. Options and errors as in `stream`.
        """
        return self.stream(prompt, (), **options)

    def _ended(self, stats: Callable[[], RequestStats], error: str | None) -> None:
        found = stats()
        self.request_counts.add(found)
        log_request(found, error=error)

    def _later(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function in another thread. Takes no lock: finalisers call this, in threads that may hold any."""
        _thread.start_new_thread(function, arguments)

    def primer(self) -> Primer:
        """Make what captures chunks for this engine ahead of questions."""
        return Primer(self)

    @abstractmethod
    def _pieces(self, request: Request, progress: RequestProgress) -> Iterator[str]:
        """Run the model once the first piece is asked for: the answer's pieces, as an iterator with `close`."""

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
        started = time.perf_counter()
        self._home.require()
        chunks, history = listed("chunks", chunks), listed("history", history)  # a generator gives them only once
        check_asked(question, history, session=session, config=config)
        if not all(isinstance(chunk, Chunk) and isinstance(chunk.text, str) for chunk in chunks):
            raise ConfigError("chunks must be Chunk objects: write Chunk(text)")
        config = config or self.config
        plain = config.reuse and config.plain_prompts == "reuse"
        prompt = self.prompts_with(tools).build(
            question,
            chunks,
            history=history,
            reserve=sampling.max_new_tokens,
            recognise=self._recogniser(session) if plain else None,
            private=session is not None,
        )
        return Request(prompt, self.calibrated(config), sampling, session_of(prompt, session), started)

    def _recogniser(self, session: str | None) -> Recognise | None:
        """What looks for captured texts in prompts that nobody marked; None where there is no reuse for those."""
        return None

    def calibration_for(self, config: ReuseConfig) -> Calibration | None:
        """The calibration that decides how much is recomputed with these settings, or None."""
        found, decides = self.calibration, config.recompute_ratio is None and config.alpha is None
        return found if decides and found and found.fits(config) else None

    def calibrated(self, config: ReuseConfig) -> ReuseConfig:
        """These settings with α as it was calibrated for them."""
        found = self.calibration_for(config)
        return config if found is None else replace(config, alpha=found.alpha)


class StoreEngine(AnswerEngine):
    """An engine with a store on this machine."""

    store: ChunkCacheStore

    def look_up(self, segments: Sequence[Segment], *, session: str | None = None) -> Found:
        """See `PrimedEngine.look_up`."""
        tokens = {segment.segment_id: (len(segment.token_ids), segment.tokens_digest) for segment in segments}
        bounds = RowBounds(self.decoder.layout, self.decoder.context_length, tokens)
        return self.store.find(self.namespace, self.decoder.fingerprint, list(tokens), session=session, bounds=bounds)

    def disk_space(self) -> DiskSpace:
        """See `PrimedEngine.disk_space`."""
        stats = self.store.stats()
        free = shutil.disk_usage(self.store.root).free
        return DiskSpace(stats.disk_bytes, stats.disk_budget, free, self.store.config.codec)
