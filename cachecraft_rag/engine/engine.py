"""The engine: chunks and a question in, an answer out, token by token.

One request: prompt → look-up → resolve → prefill while the rest is loaded → decode; captures go to the store in the
background once the answer is out. Concurrent requests compute one pass at a time, in the order of asking, and what they
decode at the same time in one; each owns its buffer, so none sees another's state.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
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
from cachecraft_rag.compute.correction import load_correction
from cachecraft_rag.compute.decode import extend
from cachecraft_rag.compute.driver import prefill, run
from cachecraft_rag.compute.job import PrefillJob, PrefillResult
from cachecraft_rag.compute.overlapped import OverlappedPrefill
from cachecraft_rag.compute.removed import Removed
from cachecraft_rag.compute.resolve import Resolved, as_it_went, resolve
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.compute.speed import ComputeSpeed
from cachecraft_rag.compute.timing import UNTIMED, Timer
from cachecraft_rag.compute.write_back import CaptureContext, WriteBackQueue
from cachecraft_rag.engine.activity import Activity
from cachecraft_rag.engine.announced import Announcement, Announcements
from cachecraft_rag.engine.base import CACHE_FOLDER, AnswerEngine, PathLike
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.engine.decode_steps import DecodeCounts, DecodeSteps
from cachecraft_rag.engine.decoder import Decoder
from cachecraft_rag.engine.new_variants import NewVariants, VariantMaker, When
from cachecraft_rag.engine.prepared import Prefilled, Prepared
from cachecraft_rag.engine.prompt import DEFAULT_SYSTEM
from cachecraft_rag.engine.request import Request, answer_text, stats_of
from cachecraft_rag.engine.request_queue import LeftQueue, Place, QueueCounts, RequestQueue
from cachecraft_rag.engine.sampling import Sampler, SamplingParams
from cachecraft_rag.engine.scheduling import FairLock
from cachecraft_rag.engine.self_check import self_check
from cachecraft_rag.engine.stats import RequestStats
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.planning.calibration import load_calibration
from cachecraft_rag.planning.candidates import Candidate
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.planning.planner import exact_shares
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.expected import Found
from cachecraft_rag.store.loading.loader import Loader
from cachecraft_rag.types import Chunk, Prompt

logger = logging.getLogger("cachecraft_rag")


# Of `EngineConfig`; parameters of `Engine` have the same names.
_OWN_FIELDS = (
    "namespace", "system", "private_system", "best_last", "new_variants", "decode_rows", "max_waiting",
    "wait_timeout_s",
)  # fmt: skip


@dataclass(frozen=True)
class ScoredAnswer:
    """A greedy answer, and the model's predictions along the target tokens.

    tokens   of the greedy answer, with the token that ended it, if one did
    logits   float32 `[target, vocabulary]`: what was predicted for each token of the target
    """

    text: str
    tokens: tuple[int, ...]
    logits: Tensor
    stats: RequestStats


class Engine(AnswerEngine):
    """Answers questions over chunks with one model and one store.

    Args:
        decoder: the model; an untried one should pass `self_check` first.
        store: where its chunk-caches live; may be shared with other engines and processes.
        namespace: the tenant; chunk-caches never cross it.
        config: how caches are reused; a call may bring its own.
        system: the instruction in front of every prompt; `private_system` where it holds one user's text.
        best_last: see `PromptBuilder`.
        new_variants: when new variants are computed, and how many, see `EngineConfig`.
        decode_rows: how many answers a decode step computes together at most.
        max_waiting, wait_timeout_s: of the queue, see `EngineConfig`.
    """

    decoder: Decoder

    def __init__(
        self,
        decoder: Decoder,
        store: ChunkCacheStore,
        *,
        namespace: str = "default",
        config: ReuseConfig | None = None,
        system: str = DEFAULT_SYSTEM,
        private_system: bool = False,
        best_last: bool = True,
        new_variants: NewVariants | When = "idle",
        decode_rows: int = 8,
        max_waiting: int = 256,
        wait_timeout_s: float | None = None,
    ) -> None:
        check_kind("decoder", decoder, Decoder, advice="Decoder.load makes one")
        check_kind("store", store, ChunkCacheStore, advice="ChunkCacheStore.open makes one")
        check_kind(
            "config", config, ReuseConfig, optional=True, advice="write ReuseConfig(reuse=False) to switch it off"
        )
        own = EngineConfig(
            namespace=namespace,
            system=system,
            private_system=private_system,
            best_last=best_last,
            new_variants=new_variants,
            decode_rows=decode_rows,
            max_waiting=max_waiting,
            wait_timeout_s=wait_timeout_s,
        )
        super().__init__(decoder, store, own if config is None else replace(own, reuse=config))
        self.speed = ComputeSpeed(decoder.keys_per_row)
        self.timer: Timer = UNTIMED  # of prefills
        self.loader = Loader(store, decoder.layout.layers)
        self.lock = FairLock()  # one pass at a time: two at once would only halve each other's cores
        self.queue = RequestQueue(max_waiting, wait_timeout_s)
        self.decode_steps = DecodeSteps(decoder, self.lock.take, self.speed, most=decode_rows)
        self._announcements = Announcements()
        self._opened = ExitStack()  # what `close` closes besides the captures
        self.write_back = WriteBackQueue(
            store, namespace=namespace, fingerprint=decoder.fingerprint, layout=decoder.layout, take_lock=self.lock.take
        )
        self.activity = Activity()
        self.new_variants = self._variant_maker(own)
        store.told_of_removals.append(self._before_removal)

    def _variant_maker(self, config: EngineConfig) -> VariantMaker:
        assert isinstance(config.new_variants, NewVariants), "EngineConfig makes one of a word"
        return VariantMaker(
            config.new_variants,
            stack=self.decoder,
            store=self.store,
            loader=self.loader,
            write_back=self.write_back,
            look_up=self.look_up,
            take_lock=self.lock.take,
            activity=self.activity,
        )

    @classmethod
    def from_pretrained(
        cls,
        model: str = "demo",
        *,
        store: PathLike = "chunk-caches",
        config: EngineConfig | None = None,
        **options: Any,
    ) -> Self:
        """Load a model, check it (`self_check`) and open (or make) the chunk-caches in a store folder.

        Args:
            model: Hugging Face name or folder, or "demo" for SmolLM2-135M-Instruct.
            store: the folder; several processes may share it. `close` closes the chunk-caches too.
            config: everything else; `options` are fields of it by name, and go first: see `EngineConfig.with_options`.

        Raises:
            ModelNotFoundError, UnsupportedModelError, StoreError, ConfigError: each says what to do.
        """
        check_text("model", model, empty=False)
        check_path("store", store)
        check_kind("config", config, EngineConfig, optional=True, advice="write EngineConfig(namespace=…)")
        chosen = (config or EngineConfig()).with_options(**options)  # what is wrong is said before a model is loaded
        decoder = Decoder.load(model, dtype=chosen.dtype, device=chosen.device)
        self_check(decoder)
        device = None if decoder.device.type == "cpu" else str(decoder.device)
        with ExitStack() as opened:
            folder = Path(store) / CACHE_FOLDER
            caches = opened.enter_context(ChunkCacheStore.open(folder, replace(chosen.store, device=device)))
            own: dict[str, Any] = {name: getattr(chosen, name) for name in _OWN_FIELDS}
            engine = cls(decoder, caches, config=chosen.reuse, **own)
            engine._opened = opened.pop_all()
        engine.calibration = load_calibration(Path(store), decoder.fingerprint)
        if engine.calibration is not None:
            logger.info("%s", engine.calibration)
        engine.use_correction(Path(store))
        return engine

    def use_correction(self, store: Path) -> None:
        """Correct chunk-caches captured alone as it was fitted for this model and a store, if it was."""
        found = load_correction(store, self.decoder.fingerprint, self.decoder.layout)
        self.correction = None if found is None else found.to(self.decoder.device)

    def score_answer(
        self,
        question: str,
        chunks: Iterable[Chunk],
        *,
        target: Iterable[int] | None = None,
        max_new_tokens: int = 32,
        config: ReuseConfig | None = None,
    ) -> ScoredAnswer:
        """Answer greedily, and score the model against target tokens (teacher-forced).

        It runs what `stream` runs up to the first token, so its TTFT is that of `stream`.

        Args:
            target: token ids of another answer, at most `max_new_tokens`; None = the greedy answer itself.

        Raises:
            ContextLengthError, ConfigError: as in `stream`.
        """
        target = None if target is None else listed("target", target)
        sampling = SamplingParams(max_new_tokens=max_new_tokens)
        for token in target or ():
            check_whole("each token of target", token, most=self.decoder.model.config.vocab_size - 1)
        if target is not None and not 0 < len(target) <= max_new_tokens:
            raise ConfigError(f"target has {len(target)} tokens; it needs 1 to {max_new_tokens}")
        request = self._request(question, chunks, history=(), session=None, sampling=sampling, config=config)
        with self.activity.during():
            output = self._prefill(request)
            if target is None:
                text = "".join(self._decode(request, output))
                logits = self._target_logits(request, output, request.tokens)
            else:
                logits = self._target_logits(request, output, target)
                own = logits.argmax(-1).tolist()  # up to the first difference, its own answer is the other one
                same = next((place for place, token in enumerate(target) if own[place] != token), len(target) - 1)
                text = "".join(self._decode(request, output, begun=own[: same + 1]))
            self._finish(request, output)
        return ScoredAnswer(text, tuple(request.tokens), logits, stats_of(request, self.decoder.layout.layers))

    def capture(self, prompt: Prompt, captures: Sequence[int], *, primed: bool) -> None:
        """See `AnswerEngine.capture`."""
        bounds = prompt.bounds[: captures[-1] + 2]  # nothing behind the last capture need be computed
        rows, exact = Rows.of(bounds, new=range(bounds[-1])), [1.0] * len(prompt.segments)
        removed = self.write_back.follow(Removed())
        with self.activity.during(), self.lock.take():
            result = prefill(self.decoder, PrefillJob(prompt.token_ids[: bounds[-1]], rows, captures=captures))
        context = CaptureContext(prompt.segments, prompt.bounds, exact, None, primed, removed=removed)
        self.write_back.submit(result.recorder, result.buffer.kv[:, 0], context)
        self.write_back.wait_for([prompt.segments[index].segment_id for index in captures])

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until everything that follows from answers is done: captures, new variants as far as their budget goes,
        and writing. For programs that work in batches; after it, the same questions get the best that there is.

        False when that takes longer than `timeout` seconds, or an answer is still under way.
        """
        self._home.require()
        check_number("timeout", timeout, most=MOST_SECONDS, optional=True)
        until = None if timeout is None else time.monotonic() + timeout

        def left() -> float | None:
            return None if until is None else max(0.0, until - time.monotonic())

        self._background.wait()
        done = self.write_back.wait_for(self.write_back.pending(), left()) and self.new_variants.wait(left())
        return done and self.store.flush(left())

    def close(self) -> None:
        """Store the captures that are still waiting; new variants are given up. A store that `from_pretrained` did not
        open stays open.
        """
        if not self._home.here:  # a fork of its process has nothing to finish, and nothing of it to let go of
            return
        with self._opened:
            self._background.close()
            self.new_variants.close()
            if self._before_removal in self.store.told_of_removals:
                self.store.told_of_removals.remove(self._before_removal)
            self.write_back.close()

    def _before_removal(self, chunk_ids: Sequence[str]) -> None:
        """What was computed of these chunks is stored first, or it would come after they were removed. What is still
        being computed is not stored.
        """
        if self._home.here:
            self._background.wait()
            self.write_back.remove(chunk_ids)
            self.new_variants.forget(chunk_ids)

    def _request(self, question: str, chunks: Iterable[Chunk], **how: Any) -> Request:
        self.write_back.follow((request := super()._request(question, chunks, **how)).removed)
        return request

    def enter(self) -> Place | None:
        """See `AnswerEngine.enter`."""
        self._home.require()
        return self.queue.enter()

    def queue_counts(self) -> QueueCounts | None:
        """See `AnswerEngine.queue_counts`."""
        return self.queue.counts()

    def decode_counts(self) -> DecodeCounts | None:
        """See `AnswerEngine.decode_counts`."""
        return self.decode_steps.counts()

    def _pieces(self, request: Request) -> Generator[str]:
        answer = self.activity.begin()
        try:
            output = self._prefill(request)
        except LeftQueue:
            request.finish = "closed"
            self.activity.end(answer)
            return
        except BaseException:
            self.activity.end(answer)
            raise
        try:
            for piece in self._decode(request, output):
                answer.hand_over()
                yield piece
                answer.go_on()
        finally:  # perhaps while garbage is collected, in a thread that holds a lock: see `BackgroundJobs`
            request.finish = request.finish or "closed"
            request.ended_s = request.clock()
            self._background.add(partial(self._finish, request, output))
            self._background.add(partial(self.activity.end, answer))

    def _prefill(self, request: Request) -> Prefilled:
        """Wait for the turn, plan, and prefill while what is not in memory is being loaded."""
        self._home.require()
        place, early = self.queue.place(), list[Prepared]()
        request.take_place(place)
        if request.config.reuse:
            place.when_next = lambda: early.append(Prepared.of(self._resolve(request), self.loader))
        try:
            with place:
                request.queued_s = place.waited_s
                return self._run(request, self._planned(request, early), place)
        finally:
            place.when_next = None  # it refers to the request, and the request to it
            self.queue.hand_on()
            for prepared in early:
                prepared.close()

    def _planned(self, request: Request, early: list[Prepared]) -> Prepared:
        """The plan of this moment; one that was made `early` serves if it chose the same, because it loads already."""
        if request.config.reuse:
            self._announcements.wait_for(request.prompt, request.config, session=request.session)
            self._background.wait()
            self.write_back.wait_for([segment.segment_id for segment in request.prompt.segments[:-1]])
        resolved = self._resolve(request)
        for prepared in early:
            if prepared.serves(resolved):
                resolved.close()
                return prepared
            prepared.close()  # what came whole is in memory now, and found there
            resolved.close()
            resolved = self._resolve(request)
        return Prepared.of(resolved, self.loader)

    def _resolve(self, request: Request) -> Resolved:
        """Look up and plan."""
        prompt, config, found = request.prompt, request.config, Found({})
        with self.timer("planning"):
            if config.reuse:
                found = self.look_up(prompt.segments[:-1], session=request.session)
                request.remote = found.remote
            return resolve(
                prompt,
                found,
                config,
                store=self.store,
                ranks=self.decoder.ranks,
                answer_tokens=request.sampling.max_new_tokens,
                correction=self.correction,
            )

    def _run(self, request: Request, prepared: Prepared, place: Place) -> Prefilled:
        """Prefill as planned, with the captures announced."""
        resolved, loads, announcement = prepared.resolved, prepared.loads, Announcement()
        request.plan, request.tiers, request.planned_s = resolved.plan, resolved.tiers, request.clock()
        with announcement:
            if request.config.capture:
                self._announcements.announce(announcement, request.prompt, resolved.plan, session=request.session)
            with closing(prepared):
                steps = OverlappedPrefill(self.decoder, resolved.job, loads, self.speed, timer=self.timer).steps()
                result = run(self.decoder, steps, self.lock.take, give_way=place.end_turn)
            request.plan = as_it_went(resolved, loads, result)
            announcement.computed(partial(self._submit, request, result))
        request.waited_s, request.row_layers, request.focus_layer = (
            result.waited_s,
            result.row_layers,
            result.focus_layer,
        )
        with self.timer("logits"):
            logits = self.decoder.next_logits(result.hidden)
        return Prefilled(logits, result.buffer, announcement)

    def _submit(self, request: Request, result: PrefillResult) -> None:
        """Hand the captures of a request to write-back."""
        prompt, removed = request.prompt, request.removed
        shares = exact_shares(request.plan, [len(segment.token_ids) for segment in prompt.segments])
        context = CaptureContext(prompt.segments, prompt.bounds, shares, request.session, removed=removed)
        self.write_back.submit(result.recorder, result.buffer.kv[:, 0], context)

    def _target_logits(self, request: Request, output: Prefilled, answer: Sequence[int]) -> Tensor:
        """`[answer, vocabulary]`: what is predicted for each token of an answer that is given."""
        if not request.first_token_s:
            int(output.logits.argmax())  # as drawing the first token would wait for a GPU
            request.first_token_s = request.clock()
        if len(answer) == 1:
            return output.logits[None]
        with self.lock.take():
            rest = self.decoder.logits(extend(self.decoder, output.buffer, answer[:-1], request.prompt.bounds[-1]))
        return torch.cat((output.logits[None], rest))

    def _decode(self, request: Request, output: Prefilled, *, begun: Sequence[int] = ()) -> Iterator[str]:
        """The answer; its first tokens are `begun` where they are known and, but for the last, have their K/V."""
        tokens = self._tokens(request, output, begun)
        return answer_text(request, tokens, self.decoder.tokenizer, self.decoder.end_tokens)

    def _tokens(self, request: Request, output: Prefilled, begun: Sequence[int]) -> Iterator[int]:
        yield from begun[:-1]
        position = request.prompt.bounds[-1] + max(len(begun) - 1, 0)
        sampler = Sampler(request.sampling)
        token = begun[-1] if begun else sampler.draw(output.logits)
        while True:
            yield token
            self._home.require()
            token = sampler.draw(self.decode_steps.next_logits(output.buffer, token, position))
            position += 1

    def _finish(self, request: Request, output: Prefilled) -> None:
        """After the answer: count the uses and hand over the captures; returns at once."""
        request.ended_s = request.ended_s or request.clock()
        for planned in request.plan.segments:
            if planned.variant is not None:
                self.store.used(planned.variant.variant_id, cfo=planned.cfo or 0.0, tokens=planned.variant.tokens)
        prompt, candidate = request.prompt, None
        if request.config.capture:
            candidate = Candidate.of(prompt, request.plan, request.config, session=request.session)
        output.announcement.hand_over()
        self._announcements.remove(output.announcement)
        self.new_variants.served(prompt.bounds[-1], candidate)
