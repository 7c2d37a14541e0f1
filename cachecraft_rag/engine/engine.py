"""The engine in this process: chunks and a question in, an answer out, token by token.

One request: prompt → look-up → resolve → prefill while the rest is loaded → decode; captures are stored in the
background after the answer. Concurrent requests prefill in the order of asking, and their decode steps run together;
each has its own buffer, so no request sees the state of others.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from cachecraft_rag.checks import (
    MOST_SECONDS,
    check_kind,
    check_number,
    check_path,
    check_text,
    check_whole,
    listed,
)
from cachecraft_rag.compute.balance.speed import ComputeSpeed
from cachecraft_rag.compute.captures.write_back import CaptureDescriber, Ended
from cachecraft_rag.compute.driver import Work
from cachecraft_rag.engine.base import AnswerEngine, PathLike
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.engine.reuse_timing import ReuseTiming
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.model.self_check import load_checked
from cachecraft_rag.observability.stats import RequestStats
from cachecraft_rag.planning.calibration import load_calibration
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.prompt.builder import Turn
from cachecraft_rag.prompt.output_schema import Constraints
from cachecraft_rag.prompt.tools import Tool
from cachecraft_rag.prompt.unmarked import Recognise, recognise_captured, session_of
from cachecraft_rag.serving.admission import AdmissionQueue
from cachecraft_rag.serving.answering import Answering
from cachecraft_rag.serving.audits.audit import Audit
from cachecraft_rag.serving.audits.auditor import Auditor
from cachecraft_rag.serving.audits.results import AuditResults
from cachecraft_rag.serving.capturing import LocalCapturer
from cachecraft_rag.serving.config import Audits, NewVariants
from cachecraft_rag.serving.generation import Generation
from cachecraft_rag.serving.loop.joint_rows import JointRows
from cachecraft_rag.serving.loop.step_loop import StepLoop
from cachecraft_rag.serving.loop.task import LoopTask, Priority
from cachecraft_rag.serving.new_variants import VariantMaker
from cachecraft_rag.serving.request import Request, RequestProgress, stats_of
from cachecraft_rag.serving.sampling import SamplingParams, check_sampling
from cachecraft_rag.serving.token_queue import AnswerPiece, Reader, TokenQueue
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.config import CACHE_FOLDER
from cachecraft_rag.store.loading.loader import Loader
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.types.prompts import Prompt

logger = logging.getLogger("cachecraft_rag")

_ONE_TOKEN = SamplingParams(max_new_tokens=1)
# Seconds at least for timing the first length of `measure_min_prompt_tokens`: a GPU's first prompts may be slower.
_WARM_UP_S = 2.0


@dataclass(frozen=True)
class ScoredAnswer:
    """A greedy answer, and the model's predictions along the target tokens.

    text     the greedy answer; "" if the model ended it at once
    tokens   its tokens, with the token that ended it, if there is one
    logits   float32 `[target, vocabulary]` on the model's device: row i predicts token i of the target, or of `tokens`
    stats    statistics of the answer
    """

    text: str
    tokens: tuple[int, ...]
    logits: Tensor
    stats: RequestStats


class Engine(AnswerEngine):
    """Answers questions over chunks with one model and one store.

    Args:
        decoder: the model; an untried one should pass `self_check` first.
        store: its chunk-caches; may be shared with other engines and processes.
        settings: settings of the engine; those of model and store in it are not used.
        config: settings of reuse; a call may bring other settings.
        options: further fields of `EngineConfig` by name; they take precedence over `settings`.

    Attributes:
        loop: runs all work on the model.
        write_back: describes and stores captures.
        new_variants: makes new variants in idle time.
        auditor: compares answers with full prefill in idle time.
    """

    decoder: Decoder
    store: ChunkCacheStore

    def __init__(
        self,
        decoder: Decoder,
        store: ChunkCacheStore,
        settings: EngineConfig | None = None,
        *,
        config: ReuseConfig | None = None,
        **options: object,
    ) -> None:
        check_kind("decoder", decoder, Decoder, advice="Decoder.load makes one")
        check_kind("store", store, ChunkCacheStore, advice="ChunkCacheStore.open makes one")
        chosen = _chosen(settings or EngineConfig(), config, options)
        super().__init__(decoder, store, chosen)

        self.loop = self._new_loop(chosen)
        weakref.finalize(self, self.loop.end).atexit = False

        self._opened = ExitStack()  # closed by `close`, after the captures
        self._constraints = Constraints(
            decoder.tokenizer, decoder.model.config.vocab_size, decoder.end_tokens
        )
        self._admission = AdmissionQueue(
            chosen.tuning.max_waiting,
            chosen.tuning.wait_timeout_s,
            preload_bytes=chosen.tuning.preload_bytes,
            registry=self.request_counts.registry,
        )
        self.write_back = CaptureDescriber(
            store,
            namespace=chosen.namespace,
            fingerprint=decoder.fingerprint,
            layout=decoder.layout,
            start=self._start_job,
        )
        self._capturer = LocalCapturer(decoder, self.loop, self.write_back)
        loader = Loader(store, decoder.layout.layers)
        self.new_variants = self._new_variant_maker(chosen, loader)
        self.auditor = self._new_auditor(chosen, loader)
        self._answering = self._new_answering(loader)
        # kept, because the same method of a tenant's copy of this engine is unequal to it
        self._removal_hook = self._before_removal
        store.before_removal.append(self._removal_hook)

    def _new_loop(self, config: EngineConfig) -> StepLoop:
        speed = ComputeSpeed(self.decoder.keys_per_row)
        joint = JointRows(
            self.decoder,
            speed,
            most=config.tuning.decode_rows,
            registry=self.request_counts.registry,
        )
        return StepLoop(self.decoder, joint)

    def _new_variant_maker(self, config: EngineConfig, loader: Loader) -> VariantMaker:
        assert isinstance(config.new_variants, NewVariants), (
            "EngineConfig turns a word into NewVariants"
        )
        return VariantMaker(
            config=config.new_variants,
            stack=self.decoder,
            store=self.store,
            loader=loader,
            write_back=self.write_back,
            look_up=self.look_up,
            loop=self.loop,
        )

    def _new_auditor(self, config: EngineConfig, loader: Loader) -> Auditor:
        assert isinstance(config.audit, Audits), "EngineConfig turns a word or a number into Audits"
        results = AuditResults(
            config.audit,
            self.store,
            namespace=config.namespace,
            fingerprint=self.decoder.fingerprint,
            registry=self.request_counts.registry,
            target=config.target(),
        )
        return Auditor(
            decoder=self.decoder,
            store=self.store,
            loader=loader,
            look_up=self.look_up,
            loop=self.loop,
            captures_pending=self._captures_pending,
            results=results,
        )

    def _new_answering(self, loader: Loader) -> Answering:
        return Answering(
            decoder=self.decoder,
            store=self.store,
            loop=self.loop,
            admission=self._admission,
            write_back=self.write_back,
            new_variants=self.new_variants,
            look_up=self.look_up,
            loader=loader,
            namespace=self.namespace,
            stand_in=self.prompts.stand_in,
            auditor=self.auditor,
        )

    @classmethod
    def from_pretrained(
        cls,
        model: str = "demo",
        *,
        store: PathLike = "chunk-caches",
        config: EngineConfig | None = None,
        **options: object,
    ) -> Self:
        """Load a model, check it (`self_check`) and open (or make) the chunk-caches in a store folder.

        On a GPU `measure_min_prompt_tokens` follows, unless the settings have a `min_prompt_tokens`; it takes some
        seconds. The `calibration` in the store folder is used if it is of this model; a damaged one is logged and
        ignored. Options are checked before the model is loaded.

        Args:
            model: Hugging Face name or folder, or "demo" for SmolLM2-135M-Instruct.
            store: the folder; several processes may share it. `close` closes the chunk-caches too.
            config: all other settings.
            options: fields of `config` by name, which take precedence: see `EngineConfig.with_options`.
        """
        check_text("model", model, empty=False)
        check_path("store", store)
        check_kind(
            "config", config, EngineConfig, optional=True, advice="write EngineConfig(namespace=…)"
        )
        # before a model is loaded, which takes long
        chosen = (config or EngineConfig()).with_options(**options)
        chosen.require_usable_target()

        decoder = load_checked(model, dtype=chosen.dtype, device=chosen.device)
        device = None if decoder.device.type == "cpu" else str(decoder.device)
        with ExitStack() as opened:
            folder = Path(store) / CACHE_FOLDER
            caches = opened.enter_context(
                ChunkCacheStore.open(folder, replace(chosen.store, device=device))
            )
            engine = cls(decoder, caches, chosen)
            engine._opened = opened.pop_all()
            opened.callback(engine.close)  # if the measurement fails
            if device is not None:
                engine.measure_min_prompt_tokens()
            opened.pop_all()

        engine.calibration = load_calibration(Path(store), decoder.fingerprint)
        if engine.calibration is not None:
            logger.info("%s", engine.calibration)
        engine.auditor.results.seed(engine.calibration, engine.config)
        return engine

    def score_answer(
        self,
        question: str,
        chunks: Iterable[Chunk],
        *,
        target: Iterable[int] | None = None,
        max_new_tokens: int = 32,
        config: ReuseConfig | None = None,
        history: Iterable[Turn] = (),
        tools: Sequence[Tool] = (),
    ) -> ScoredAnswer:
        """Answer greedily, and score the model against target tokens (teacher-forced).

        Up to the first token it runs the same steps as `stream`, so its TTFT is that of `stream`. It captures chunks
        and counts uses of chunk-caches as `stream` without a session does, but the answer is not counted in
        `request_counts`, logged, traced or audited.

        Args:
            target: token ids of a given answer, 1 to `max_new_tokens`; None = the greedy answer itself.
            question, chunks, config, history, tools: as for `stream`.
            max_new_tokens: longest answer, in tokens.
        """
        if target is not None:
            target = listed("target", target)
        sampling = SamplingParams(max_new_tokens=max_new_tokens)
        for token in target or ():
            check_whole(
                "each token of target", token, most=self.decoder.model.config.vocab_size - 1
            )
        if target is not None and not 0 < len(target) <= max_new_tokens:
            raise ConfigError(f"target has {len(target)} tokens; it needs 1 to {max_new_tokens}")

        request = self._request(
            question,
            chunks,
            history=history,
            session=None,
            sampling=sampling,
            config=config,
            tools=tools,
        )
        return self._scored(request, target)

    def _scored(self, request: Request, target: Sequence[int] | None = None) -> ScoredAnswer:
        progress = RequestProgress()
        self.write_back.follow(progress.removed, request.namespace)
        scoring = partial(self._answering.score, request=request, progress=progress, target=target)
        text, logits = self.loop.run(scoring, Priority.ANSWER)
        progress.end(request, "length")
        stats = stats_of(request, progress, self.decoder.layout.layers)
        return ScoredAnswer(text, tuple(progress.tokens), logits, stats)

    def measure_min_prompt_tokens(self) -> int:
        """Measure from how many tokens on prompts are answered sooner with reuse; set and return that number.

        Prompts of random tokens are timed over the engine's store, from 1,024 tokens on and each twice as long as the
        one before, until one is answered sooner with reuse, at most up to 32,768; the first takes at least two seconds.
        No answer should be under way: it would spoil the times. What is captured is removed in the end; a killed
        process leaves it in the store. See `ReuseTiming.min_prompt_tokens` for when nothing is measured, and the result
        is 0.
        """
        self._home.require()
        self.min_prompt_tokens = self._timing().min_prompt_tokens()
        return self.min_prompt_tokens

    def _timing(self) -> ReuseTiming:
        def ask(prompt: Prompt, config: ReuseConfig) -> float:
            # Some chunks may be computed because loading them takes longer: that is part of the time with reuse.
            request = Request(
                prompt,
                config,
                _ONE_TOKEN,
                session=None,
                started=time.perf_counter(),
                namespace=self.namespace,
            )
            return self._scored(request).stats.ttft_s

        return ReuseTiming(
            store=self.store,
            layout=self.decoder.layout,
            vocabulary=int(self.decoder.model.config.vocab_size),
            context_length=self.decoder.context_length,
            config=self.config,
            capture=lambda prompt: self.capture(prompt, range(len(prompt.segments)), primed=True),
            ask=ask,
            warm_up_s=_WARM_UP_S,
        )

    def audit_of(self, request_id: str) -> Audit | None:
        """Return the audit of this tenant's answer; None: not audited, not yet, or not of the engine's last 1,024."""
        return self.auditor.results.get(request_id, self.namespace)

    @property
    def preloading_bytes(self) -> int:
        """Bytes of chunk-caches that waiting requests load or have loaded before their turn, at this moment."""
        return self._admission.preloading_bytes

    def settle(self, timeout: float | None = None) -> bool:
        """Wait for the work that follows from answers: captures, new variants, audits, and writing.

        For programs that work in batches; after it, the same questions reuse as much as they can. Work in idle time
        waits for answers that are under way, so read or close them first. Returns True once all of it is done or
        dropped, also on a remote; False after `timeout` seconds (None: never). With 0 it may be False although nothing
        is left to do, because the thread that runs the model has to say so.
        """
        self._home.require()
        check_number("timeout", timeout, most=MOST_SECONDS, optional=True)
        deadline = None if timeout is None else time.monotonic() + timeout

        def is_done() -> bool:
            return not (self._captures_pending() or self.auditor.busy)

        if not self.loop.wait_until(is_done, timeout):
            return False
        return self.store.flush(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Store the captures that are still waiting, and give up new variants and audits; waits without limit.

        Closes the store too if `from_pretrained` opened it; any other stays open, and then questions are still
        answered, but nothing is captured. Answers under way are not waited for; their captures are dropped. Captures of
        answers that ended, or that their readers closed, are stored. Does nothing in a fork of the process.
        """
        if not self._home.here:  # in a fork of its process there is nothing to finish or to release
            return
        with self._opened:
            if self._removal_hook in self.store.before_removal:
                self.store.before_removal.remove(self._removal_hook)
                self.loop.call(self._close_idle_work)
            # An answer that its reader has just closed still hands over its captures.
            self.loop.wait_for_given_up()
            self.write_back.close()
            self.loop.close()
            self.auditor.results.close()

    def _finish_captures(self) -> None:
        self._home.require()
        self.loop.wait_until(lambda: not (self.write_back.pending() or self._answering.noting))

    def _captures_pending(self) -> bool:
        """Return whether captures or new variants are still to be stored."""
        return bool(self.write_back.pending() or self._answering.noting or self.new_variants.busy)

    def _close_idle_work(self) -> None:
        self.new_variants.close()
        self.auditor.close()

    def _forget(self, chunk_ids: Sequence[str], namespace: str | None) -> None:
        """Stop work in idle time on a tenant's prompts with these chunks; None: of all tenants."""
        self.new_variants.forget(chunk_ids, namespace)
        self.auditor.forget(chunk_ids, namespace)

    def _before_removal(self, chunk_ids: Sequence[str], namespace: str | None) -> None:
        """Store captures of these chunks that are computed, and audits, before they are removed from the store.

        Otherwise they would be stored after the removal. Captures that are still being computed are not stored.
        """
        if self._home.here:
            self.loop.call(partial(self._forget, chunk_ids, namespace))
            self.loop.wait_until(
                lambda: (
                    not self.new_variants.running(chunk_ids, namespace)
                    and not self.auditor.running(chunk_ids, namespace)
                    and not self.auditor.is_storing
                )
            )
            self.write_back.remove(chunk_ids, namespace)
            self.loop.call(self._answering.stored_changed)

    def generate(
        self,
        prompt: Prompt,
        *,
        session: str | None = None,
        sampling: SamplingParams | None = None,
        config: ReuseConfig | None = None,
        started: float | None = None,
    ) -> Generation:
        """Answer a prompt that is in segments already, such as one of `PromptBuilder.build`.

        Args:
            prompt: the prompt, of this model's tokens; that it fits the context with its answer is not checked.
            started: time of `time.perf_counter` at which it was asked for; None: now.

        Other arguments and the result are as in `stream`; a prompt that this call refuses is not counted.
        """
        self._home.require()
        check_kind("prompt", prompt, Prompt, advice="prompts.build makes one")
        check_sampling(sampling)
        check_kind("config", config, ReuseConfig, optional=True, advice="write ReuseConfig(…)")
        sampling = sampling or SamplingParams()
        config = config or self.config
        settings = self.for_prompt(self.calibrated(config), prompt)
        request = Request(
            prompt,
            settings,
            sampling,
            session_of(prompt, session),
            time.perf_counter() if started is None else started,
            namespace=self.namespace,
        )
        return self._generation(self._prepared(request, config))

    def recogniser(self, session: str | None) -> Recognise | None:
        """Return a function that finds captured texts in token ids, those of the session too."""
        look_up = partial(
            self.store.marked_texts, self.namespace, self.decoder.fingerprint, session=session
        )
        return partial(recognise_captured, look_up=look_up)

    def _prepared(self, request: Request, reuse: ReuseConfig) -> Request:
        """Add the ratio that a quality target chooses for these settings, and the grammar of the answer."""
        request = self.auditor.results.with_ratio(request, reuse)
        schema = request.sampling.json_schema
        if schema is None:
            return request
        return replace(request, constraint=self._constraints.json(str(schema)))

    def _pieces(self, request: Request, progress: RequestProgress) -> Reader:
        self.write_back.follow(progress.removed, request.namespace)
        begin = partial(self._begin, request, progress)
        return Reader(progress, begin, self.loop.wake, self._home)

    def _begin(
        self, request: Request, progress: RequestProgress, reader: Reader, queue: TokenQueue
    ) -> None:
        def ended(_result: None, error: BaseException | None) -> None:
            if error is not None:
                queue.put(AnswerPiece("", error=error))

        answer = partial(self._answering.answer, request=request, progress=progress, queue=queue)
        self.loop.start(LoopTask(answer, ended, Priority.ANSWER, self.loop.watched(reader)))

    def _start_job(self, steps: Work[object], ended: Ended) -> None:
        """Run a job in the background."""

        def stored(result: object, error: BaseException | None) -> None:
            ended(result, error)
            self._answering.stored_changed()

        self.loop.start(LoopTask(lambda _: steps, stored, Priority.JOB))

    def _later(self, function: Callable[..., object], *arguments: object) -> None:
        if self.loop.alive:
            self.loop.call_soon(partial(function, *arguments))
        else:
            super()._later(function, *arguments)


def _chosen(
    settings: EngineConfig, reuse: ReuseConfig | None, options: Mapping[str, Any]
) -> EngineConfig:
    """Return the settings of an engine, checked; `options` and `reuse` take precedence over `settings`."""
    check_kind(
        "config",
        reuse,
        ReuseConfig,
        optional=True,
        advice="ReuseConfig(reuse=False) switches it off",
    )
    given = {} if reuse is None else {"reuse": reuse}
    chosen = replace(settings, **{**options, **given})
    chosen.require_usable_target()
    return chosen
