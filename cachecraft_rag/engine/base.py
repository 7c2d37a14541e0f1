"""What every engine is, wherever its model runs: chunks and a question in, an answer out, piece by piece."""

from __future__ import annotations

import os
import shutil
import time
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from cachecraft_rag.checks import check_kind, listed
from cachecraft_rag.engine.background import BackgroundJobs
from cachecraft_rag.engine.chunk_bound import ModelTokens
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.engine.prompt import PromptBuilder, Turn
from cachecraft_rag.engine.request import Request, check_asked, stats_of
from cachecraft_rag.engine.request_log import log_request
from cachecraft_rag.engine.request_queue import Place, QueueCounts
from cachecraft_rag.engine.sampling import SamplingParams
from cachecraft_rag.engine.stats import RequestStats
from cachecraft_rag.engine.tally import Tally
from cachecraft_rag.errors import CacheCraftError, ConfigError
from cachecraft_rag.planning.calibration import Calibration
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.closeable import Closeable
from cachecraft_rag.store.expected import Expected, Found
from cachecraft_rag.store.processes import HomeProcess
from cachecraft_rag.types import Chunk, KVLayout, Prompt, Segment

if TYPE_CHECKING:
    from cachecraft_rag.compute.correction import Correction
    from cachecraft_rag.engine.decode_steps import DecodeCounts
    from cachecraft_rag.engine.priming import Primer

CACHE_FOLDER = "caches"  # below the folder a user names as the store

PathLike = str | os.PathLike[str]


class AnswerOptions(TypedDict, total=False):
    """What a question may bring with it, see `Engine.stream`."""

    history: Iterable[Turn]
    session: str | None
    sampling: SamplingParams | None
    config: ReuseConfig | None


class ModelFacts(Protocol):
    """What is known of a model without running it; see `decoder.Decoder`."""

    @property
    def name(self) -> str:
        """What the user asked for."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The model's own."""
        ...

    @property
    def fingerprint(self) -> str:
        """Identity of checkpoint, tokenizer and dtype."""
        ...

    @property
    def layout(self) -> KVLayout:
        """Shape and dtype of its chunk-caches, with all heads."""
        ...

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together."""
        ...

    @property
    def chunk_bound(self) -> ModelTokens:
        """What bounds the chunks of a document for this model."""
        ...


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """Of a store's files, in bytes: what they take, their limit, and what the disk has left; and their codec."""

    used: int
    budget: int
    free: int
    codec: str


class Generation(Iterator[str]):
    """The answer as an iterator of text pieces. `text` and `stats` are complete once it is exhausted or closed.

    The first piece raises BusyError if too many requests are waiting, and WaitTimeoutError after too long a wait.
    """

    def __init__(
        self,
        request: Request,
        pieces: Generator[str],
        stats: Callable[[], RequestStats],
        *,
        background: BackgroundJobs,
        enter: Callable[[], Place | None],
    ) -> None:
        self._request, self._pieces, self._stats, self._background = request, pieces, stats, background
        self.enter = enter  # see `AnswerEngine.enter`
        self.text = ""

    def __next__(self) -> str:
        try:
            piece = next(self._pieces)
        except StopIteration:
            self._background.wait()
            raise
        if self._request.closing:  # by another thread, while this one was in its step
            self._pieces.close()
            self._background.wait()
            raise StopIteration
        self.text += piece
        return piece

    @property
    def stats(self) -> RequestStats:
        """Numbers of the request so far; `finish` is None until it has ended."""
        return self._stats()

    def close(self) -> None:
        """End the answer here; what was captured is kept, in the background. Finalisers may call this.

        Another thread that reads it gets no further piece; if it waits in the queue, it leaves at once.
        """
        self._request.close()
        with suppress(ValueError):  # how Python says that a generator runs, in another thread
            self._pieces.close()


class AnswerEngine(Closeable):
    """Answers questions over chunks with one model and one store; `Engine` here, or a server's.

    Attributes:
        decoder: the model, or what is known of it where it runs elsewhere.
        store: where its chunk-caches live.
        namespace: the tenant; chunk-caches never cross it.
        config: how caches are reused; a call may bring its own.
        calibration: α as `cachecraft calibrate` found it, or None.
        correction: of chunk-caches captured alone, as `cachecraft calibrate` fitted it, or None.
        prompts: lays out prompts.
        tally: counts the requests of `stream`.
    """

    def __init__(self, decoder: ModelFacts, store: ChunkCacheStore, config: EngineConfig) -> None:
        self.decoder, self.store = decoder, store
        self.namespace, self.config = config.namespace, config.reuse
        self.calibration: Calibration | None = None
        self.correction: Correction | None = None
        self.prompts = PromptBuilder(
            decoder.tokenizer,
            context_length=decoder.context_length,
            system=config.system,
            private_system=config.private_system,
            best_last=config.best_last,
        )
        self.tally = Tally()
        self._home = HomeProcess("engine")
        self._background = BackgroundJobs("cachecraft-endings")  # what is left to do once an answer has ended

    def stream(
        self,
        question: str,
        chunks: Iterable[Chunk],
        *,
        history: Iterable[Turn] = (),
        session: str | None = None,
        sampling: SamplingParams | None = None,
        config: ReuseConfig | None = None,
    ) -> Generation:
        """Answer a question over ordered chunks (best first). The prompt is checked now, the model runs on the first
        piece.

        Args:
            history: earlier turns of the conversation, user first; they stand behind the chunks.
            session: whose private chunk-caches may be used besides the shared ones.

        Raises:
            ContextLengthError: question, history and answer do not fit the model's context.
            ConfigError: the question is empty or the history does not alternate.
        """
        check_kind("sampling", sampling, SamplingParams, optional=True, advice="write SamplingParams(temperature=…)")
        try:
            request = self._request(
                question, chunks, history=history, session=session, sampling=sampling or SamplingParams(), config=config
            )
        except CacheCraftError:
            self.tally.refuse()
            raise
        stats = partial(stats_of, request, self.decoder.layout.layers)
        pieces = self._counted(request, stats)
        return Generation(request, pieces, stats, background=self._background, enter=self.enter)

    def enter(self) -> Place | None:
        """Take a place in the queue for a request that another thread will run; None where the engine has no queue.

        Raises:
            BusyError: too many requests are waiting.
        """
        return None

    def queue_counts(self) -> QueueCounts | None:
        """Who waits for a turn, and who was turned away; None where the engine has no queue."""
        return None

    def decode_counts(self) -> DecodeCounts | None:
        """How many answers each decode step computed together; None where another process decodes."""
        return None

    def _counted(self, request: Request, stats: Callable[[], RequestStats]) -> Generator[str]:
        """The pieces of a request, which is counted and logged when it has ended."""
        error: BaseException | None = None
        try:
            yield from self._pieces(request)
        except GeneratorExit:  # closed by its reader
            raise
        except BaseException as raised:  # whatever it is: it is raised again
            error, request.finish = raised, "failed"
            raise
        finally:  # perhaps while garbage is collected, in a thread that holds a lock: see `BackgroundJobs`
            request.ended_s = request.ended_s or request.clock()
            name = None if error is None else type(error).__name__
            error = None  # or its traceback would keep this frame alive
            self._background.add(partial(self._ended, stats, name))

    def _ended(self, stats: Callable[[], RequestStats], error: str | None) -> None:
        told = stats()
        self.tally.add(told)
        log_request(told, error=error)

    @abstractmethod
    def capture(self, prompt: Prompt, captures: Sequence[int], *, primed: bool) -> None:
        """Compute a prompt, capture these of its segments, and return when they are stored.

        Args:
            prompt: system segment and chunks, without a question.
            primed: see `types.Variant`.
        """

    def look_up(self, segments: Sequence[Segment], *, session: str | None = None) -> Found:
        """The stored variants of these segments for this model; what does not fit model or segment is left out."""
        tokens = {segment.segment_id: (len(segment.token_ids), segment.tokens_digest) for segment in segments}
        expected = Expected(self.decoder.layout, self.decoder.context_length, tokens)
        return self.store.find(
            self.namespace, self.decoder.fingerprint, list(tokens), session=session, expected=expected
        )

    def primer(self) -> Primer:
        """What captures chunks for this engine ahead of questions."""
        from cachecraft_rag.engine.priming import Primer  # it imports this module

        return Primer(self)

    def disk_space(self) -> DiskSpace:
        """Of the folder where captures are stored."""
        stats = self.store.stats()
        free = shutil.disk_usage(self.store.root).free
        return DiskSpace(stats.disk_bytes, stats.disk_budget, free, self.store.config.codec)

    @abstractmethod
    def _pieces(self, request: Request) -> Generator[str]:
        """Run the model: the answer's pieces."""

    def _request(
        self,
        question: str,
        chunks: Iterable[Chunk],
        *,
        history: Iterable[Turn],
        session: str | None,
        sampling: SamplingParams,
        config: ReuseConfig | None,
    ) -> Request:
        started = time.perf_counter()
        self._home.require()
        chunks, history = listed("chunks", chunks), listed("history", history)  # a generator gives them only once
        check_asked(question, history, session=session, config=config)
        if not all(isinstance(chunk, Chunk) and isinstance(chunk.text, str) for chunk in chunks):
            raise ConfigError("chunks must be Chunk objects: write Chunk(text)")
        prompt = self.prompts.build(question, chunks, history=history, reserve=sampling.max_new_tokens)
        request = Request(prompt, self._calibrated(config or self.config), sampling, session, started)
        return self._addressed(request, question, chunks, history, config)

    def _addressed(
        self,
        request: Request,
        question: str,
        chunks: Sequence[Chunk],
        history: Sequence[Turn],
        config: ReuseConfig | None,
    ) -> Request:
        """The request as `_pieces` takes it; an engine that sends texts instead of tokens adds them here."""
        return request

    def calibration_for(self, config: ReuseConfig) -> Calibration | None:
        """The calibration that decides how much is recomputed with these settings, or None."""
        found, decides = self.calibration, config.recompute_ratio is None and config.alpha is None
        return found if decides and found and found.fits(config, corrects=self.correction is not None) else None

    def _calibrated(self, config: ReuseConfig) -> ReuseConfig:
        found = self.calibration_for(config)
        return config if found is None else replace(config, alpha=found.alpha)
