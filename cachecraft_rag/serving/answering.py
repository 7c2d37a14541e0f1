"""Requests as steps for the loop: wait for the turn, plan, prefill while the rest is loaded, decode."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cachecraft_rag.compute.captures.write_back import CaptureContext, CaptureDescriber
from cachecraft_rag.compute.decode import DecodeStep, extend
from cachecraft_rag.compute.driver import Call, Until, Work
from cachecraft_rag.compute.job import PrefillJob, PrefillResult
from cachecraft_rag.compute.kv_buffer import KVBuffer
from cachecraft_rag.compute.overlapped import OverlappedPrefill
from cachecraft_rag.compute.resolve import executed_plan, resolve
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.candidates import Candidate
from cachecraft_rag.planning.planner import Plan, exact_shares
from cachecraft_rag.prompt.unmarked import candidates_of, largest
from cachecraft_rag.serving.admission import AdmissionQueue
from cachecraft_rag.serving.answer_text import AnswerText
from cachecraft_rag.serving.audits.auditor import Auditor
from cachecraft_rag.serving.audits.predictions import Predictions
from cachecraft_rag.serving.chunks_in_progress import (
    ChunksInProgress,
    ExpectedCaptures,
    ExpectedVariant,
    Owner,
    WantedChunks,
    expected_variants,
)
from cachecraft_rag.serving.loop.step_loop import StepLoop
from cachecraft_rag.serving.loop.task import LoopTask, Priority
from cachecraft_rag.serving.new_variants import LookUp, VariantMaker
from cachecraft_rag.serving.request import Request, RequestProgress
from cachecraft_rag.serving.sampling import Sampler
from cachecraft_rag.serving.token_queue import AnswerPiece, TokenQueue
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.loading.loader import Loader
from cachecraft_rag.store.loading.pending import PendingLoads
from cachecraft_rag.store.row_checks import LookupResult
from cachecraft_rag.types.prompts import Segment

logger = logging.getLogger("cachecraft_rag")


# A job and its chunk-caches that are being loaded; `Loader.end` closes them.
LoadingJob = tuple[PrefillJob, PendingLoads]


@dataclass(eq=False)
class Answering:
    """The steps of one engine's requests. All methods are for the loop's thread; plans are made in other threads.

    look_up    looks up what is stored
    namespace  of the engine
    stand_in   passage after which passages of unmarked text are captured
    auditor    audits answers in idle time
    noting     number of prompts whose unmarked text is being noted as seen
    """

    decoder: Decoder
    store: ChunkCacheStore
    loop: StepLoop
    admission: AdmissionQueue
    write_back: CaptureDescriber
    new_variants: VariantMaker
    look_up: LookUp
    loader: Loader
    namespace: str
    stand_in: Segment
    auditor: Auditor
    noting: int = 0
    _in_progress: ChunksInProgress = field(init=False)
    _changes: int = 0  # number of changes to the store that this engine knows of

    def __post_init__(self) -> None:
        self._in_progress = ChunksInProgress(self._captured)

    def stored_changed(self) -> None:
        """Note that captures were handed over or have ended: waiting requests with reuse plan again at their turn."""
        self._changes += 1
        self._in_progress.forget_captured()

    # -- up to the first token ----------------------------------------------------------------------------------------

    def prefill(
        self,
        task: LoopTask,
        request: Request,
        progress: RequestProgress,
        captures: ExpectedCaptures,
    ) -> Work[tuple[Tensor, KVBuffer]]:
        """Wait for the turn, plan, and prefill while what is not in memory is being loaded.

        Returns the logits `[vocabulary]` of the prompt's last token, and the prompt's keys and values.

        With reuse on, it also waits for chunks that other requests compute and this one can use, and hands what they
        hold back to write-back. In the end, also after an error, the turn is given back and loading is ended. Tokens of
        a chunk-cache that cannot be read are computed. `captures`, empty at first, takes up those of this request: the
        caller hands them over; after an error there is nothing to hand over.
        """
        admission = self.admission
        loading: LoadingJob | None = None
        admission.enter(task)
        try:
            began = time.perf_counter()
            changes = self._changes
            if not admission.is_first(task):
                yield from admission.wait(
                    lambda: admission.is_first(task) or admission.may_preload(task), began
                )
                changes = self._changes
                if not admission.is_first(task):
                    loading = yield from self._preload(task, request, progress)
                yield from admission.wait(lambda: admission.is_first(task), began)

            # The next in line plans and loads while it waits.
            if not admission.is_free():
                if loading is None:
                    changes = self._changes
                    loading = yield self.loop.aside(self._plan, request, progress, None)
                rows = loading[0].rows.open()
                yield from admission.wait(
                    lambda: admission.is_free() or self._joins(rows, request), began
                )

            admission.begin(task)
            progress.queued_s = time.perf_counter() - began
            if request.config.reuse:
                yield from self._chunks_of_others(request)
            is_out_of_date = request.config.reuse and changes != self._changes
            if loading is None or is_out_of_date:
                loading = yield self.loop.aside(self._plan, request, progress, loading)
            job, _ = loading
            progress.plan = job.plan
            progress.tiers = job.tiers
            progress.planned_s = request.clock()

            if request.config.capture:
                captures.owner = _owner(request)
                captures.variants = expected_variants(
                    request.prompt, progress.plan, request.session
                )
                self._in_progress.announce(captures)
            return (yield from self._compute(task, request, progress, loading, captures))
        except BaseException:  # an answer that is closed too: its captures will not be made
            if self._in_progress.withdraw(captures):
                self.stored_changed()
            raise
        finally:
            admission.leave(task)
            if loading is not None:
                _, loads = loading
                self.loader.end(loads)

    def _preload(
        self, task: LoopTask, request: Request, progress: RequestProgress
    ) -> Work[LoadingJob | None]:
        """Plan, and begin to load, for a request that others wait before; None if the budget has no room for it.

        Cache-Craft, section 3.5: chunk-caches of all waiting requests are loaded ahead.
        """
        job: PrefillJob = yield self.loop.aside(self._resolve, request, progress)
        layout = self.decoder.layout
        nbytes = sum(layout.nbytes(stored.variant.tokens) for stored, _ in job.to_load)
        if not self.admission.reserve(task, nbytes):
            job.close()
            return None
        return job, self.loader.begin(job.to_load, job.not_needed)

    def _joins(self, rows: Sequence[int] | NDArray[np.int64], request: Request) -> bool:
        """Return whether a request may prefill beside the running ones, and waits for none of their captures."""
        if not self.loop.would_join(rows):
            return False
        wanted = _wanted(request)
        return not (self._in_progress.computing(wanted) or self._in_progress.held_back(wanted))

    def _chunks_of_others(self, request: Request) -> Generator[Until, bool, None]:
        """Wait for chunks that other requests compute, instead of computing them a second time."""
        wanted = _wanted(request)
        yield Until(lambda: not self._in_progress.computing(wanted))
        for captures in self._in_progress.held_back(wanted):
            captures.hand_over()
        yield Until(lambda: not self._in_progress.capturing(wanted))

    def _captured(self, owner: Owner) -> frozenset[str]:
        """Return the ids of a tenant's segments that are being captured."""
        tenant, _ = owner
        return self.write_back.pending(namespace=tenant or self.namespace)

    def _plan(
        self, request: Request, progress: RequestProgress, early: LoadingJob | None
    ) -> LoadingJob:
        """Plan, and begin to load; an `early` job is kept if it chose the same variants, because it loads already."""
        job = self._resolve(request, progress)
        if early is not None:
            early_job, early_loads = early
            if _chosen(early_job.plan) == _chosen(job.plan):
                job.close()
                return early
            # what it has loaded completely is in memory now, and the new plan finds it there
            self.loader.end(early_loads)
            job.close()
            job = self._resolve(request, progress)
        return job, self.loader.begin(job.to_load, job.not_needed)

    def _resolve(self, request: Request, progress: RequestProgress) -> PrefillJob:
        """Look up and plan."""
        prompt = request.prompt
        lookup = LookupResult({})
        with self.loop.timer("planning"):
            if request.config.reuse:
                segments = [segment for segment in prompt.segments if segment.kind != "question"]
                lookup = self.look_up(
                    segments, session=request.session, namespace=request.namespace
                )
                progress.remote = lookup.remote
                progress.removed.update(lookup.removed)
            return resolve(
                prompt,
                lookup,
                request.config,
                store=self.store,
                ranks=self.decoder.ranks,
                answer_tokens=request.sampling.max_new_tokens,
            )

    def _compute(
        self,
        task: LoopTask,
        request: Request,
        progress: RequestProgress,
        loading: LoadingJob,
        captures: ExpectedCaptures,
    ) -> Work[tuple[Tensor, KVBuffer]]:
        job, loads = loading
        task.loads = loads
        prefill = OverlappedPrefill(
            self.decoder,
            job,
            loads,
            self.loop.joint.speed,
            timer=self.loop.timer,
        )
        result: PrefillResult = yield from prefill.steps()
        self.loader.end(loads)

        progress.plan = executed_plan(job, loads, result)
        progress.waited_s = task.load_s
        progress.row_layers = result.row_layers
        progress.focus_layer = result.focus_layer
        captures.submit = partial(self._submit, request, progress, result)
        captures.computed = True
        with self.loop.timer("logits"):
            logits = self.decoder.next_logits(result.hidden)
        return logits, result.buffer

    def _submit(self, request: Request, progress: RequestProgress, result: PrefillResult) -> None:
        """Hand the captures of a request to write-back."""
        prompt = request.prompt
        lengths = [len(segment.token_ids) for segment in prompt.segments]
        shares = exact_shares(progress.plan, lengths)
        context = CaptureContext(
            prompt.segments,
            prompt.bounds,
            shares,
            request.session,
            removed=progress.removed,
            reused=[planned.variant for planned in progress.plan],
            namespace=request.namespace,
        )
        self.write_back.submit(result.recorder, result.buffer.kv[:, 0], context)
        self.stored_changed()

    # -- the answer ---------------------------------------------------------------------------------------------------

    def answer(
        self, task: LoopTask, request: Request, progress: RequestProgress, queue: TokenQueue
    ) -> Work[None]:
        """Answer a request into a queue, whose last piece says how the answer ended.

        If it raises, or is closed early, it puts no last piece. Once decoding ends in any way, uses of variants are
        counted in the store, the captures handed to write-back, and the prompt noted for new variants. An audit follows
        for an answer that ended or was closed by its reader. Failures of these are logged. While the queue is full, the
        answer waits for its reader.
        """
        captures = ExpectedCaptures()
        predictions = self.auditor.recorder(request)
        logits, buffer = yield from self.prefill(task, request, progress, captures)
        try:
            last = yield from self._decode(
                request, progress, logits, buffer, queue, predictions=predictions
            )
        except GeneratorExit:  # closed by its reader, who has read a part of it
            read = progress.tokens[: progress.generated]
            self.auditor.answered(request, progress, predictions, tokens=read)
            raise
        finally:
            self._finish(request, progress, captures)
        queue.put(last)
        self.auditor.answered(request, progress, predictions, tokens=progress.tokens)

    def score(
        self,
        task: LoopTask,
        request: Request,
        progress: RequestProgress,
        target: Sequence[int] | None,
    ) -> Work[tuple[str, Tensor]]:
        """Answer a request of temperature 0, and predict along the target tokens; None: along the answer's own.

        Uses of variants, captures and new variants follow as from `answer`; the answer is not audited.

        Returns the answer's text, and logits float32 `[target, vocabulary]`: the prediction before each target token.
        `target` has 1 to `request.sampling.max_new_tokens` tokens of the model, which are not checked.
        """
        captures = ExpectedCaptures()
        queue = TokenQueue(bounded=False)
        prompt_logits, buffer = yield from self.prefill(task, request, progress, captures)
        try:
            int(prompt_logits.argmax())  # waits for a GPU, as drawing the first token would
            progress.first_token_s = request.clock()
            known: list[int] = []
            if target is not None:
                logits = yield from self._predict(request, prompt_logits, buffer, target)
                known = _known_tokens(logits, target)
            last = yield from self._decode(
                request, progress, prompt_logits, buffer, queue, known=known
            )
            if target is None:
                logits = yield from self._predict(request, prompt_logits, buffer, progress.tokens)
        finally:
            self._finish(request, progress, captures)
        progress.generated = last.generated
        progress.finish = last.finish
        return queue.text() + last.text, logits

    def _decode(
        self,
        request: Request,
        progress: RequestProgress,
        logits: Tensor,
        buffer: KVBuffer,
        queue: TokenQueue,
        *,
        known: Sequence[int] = (),
        predictions: Predictions | None = None,
    ) -> Work[AnswerPiece]:
        """Put all pieces but the last one, which is returned, into the queue, no faster than its reader takes them.

        Args:
            known: first tokens, if they are known; all but the last have their keys and values.
            predictions: takes up the prediction at each place of the answer; not with `known` tokens.
        """
        text = AnswerText(request.sampling, self.decoder.tokenizer, self.decoder.end_tokens)
        sampler = Sampler(request.sampling, request.constraint)
        prompt_tokens = request.prompt.bounds[-1]
        if predictions is not None:
            predictions.note(logits)
        token = known[0] if known else sampler.draw(logits)
        while True:
            progress.first_token_s = progress.first_token_s or request.clock()
            progress.tokens.append(token)
            piece = text.take(token)
            if text.finish is not None:
                return AnswerPiece(piece, text.generated, text.finish)
            queue.put(AnswerPiece(piece, text.generated))

            count = len(progress.tokens)
            if count < len(known):
                token = known[count]
                continue
            if not queue.has_room():
                yield Until(queue.has_room, for_reader=True)
            logits = yield DecodeStep(buffer, token, prompt_tokens + count - 1)
            if predictions is not None:
                predictions.note(logits)
            token = sampler.draw(logits)

    def _predict(
        self, request: Request, prompt_logits: Tensor, buffer: KVBuffer, answer: Sequence[int]
    ) -> Work[Tensor]:
        """Return `[answer, vocabulary]`: the predictions for each token of a given answer."""
        prompt_tokens = request.prompt.bounds[-1]
        if len(answer) < 2:
            return prompt_logits[None]
        hidden = yield Call(partial(extend, self.decoder, buffer, answer[:-1], prompt_tokens))
        return torch.cat((prompt_logits[None], self.decoder.logits(hidden)))

    def _finish(
        self, request: Request, progress: RequestProgress, captures: ExpectedCaptures
    ) -> None:
        """Hand over the captures, and count the uses of variants."""
        config = request.config
        try:
            captures.hand_over()
            for planned in progress.plan:
                variant = planned.variant
                if variant is not None:
                    self.store.used(
                        variant.variant_id, planned.recomputed_share, tokens=variant.tokens
                    )

            candidate = None
            is_unmarked = any(segment.found for segment in request.prompt.segments)
            if is_unmarked:
                if config.capture and self.new_variants.config.when != "off":
                    self._note(request, progress.plan)
            elif config.capture:
                candidate = Candidate.of(
                    request.prompt,
                    progress.plan,
                    config,
                    session=request.session,
                    namespace=request.namespace,
                )
            self.new_variants.answered(request.prompt.bounds[-1], candidate)
        except Exception:  # an error of the store or of ours: the answer itself is complete
            logger.exception("What followed from an answer has failed")

    def _note(self, request: Request, plan: Plan) -> None:
        """Note the unmarked text of a prompt, and have captured what was seen before."""
        scope = (request.namespace or self.namespace, self.decoder.fingerprint)
        candidates = candidates_of(
            request.prompt,
            plan,
            request.session,
            scope,
            stand_in=self.stand_in,
            each_prefix=True,
        )

        def noted() -> Work[set[str]]:
            seen: set[str] = yield self.loop.aside(self.store.seen_texts, list(candidates))
            return seen

        def ended(seen: set[str] | None, error: BaseException | None) -> None:
            self.noting -= 1
            if error is not None:
                logger.error("Text of a prompt could not be noted", exc_info=error)
            for candidate in largest(candidates[name] for name in seen or ()):
                self.new_variants.answered(0, candidate)

        self.noting += 1
        self.loop.start(LoopTask(lambda _: noted(), ended, Priority.JOB))


def _owner(request: Request) -> Owner:
    return request.namespace, None


def _wanted(request: Request) -> WantedChunks:
    """Return the chunk-caches that a request would use: none without reuse."""
    segments = request.prompt.segments[:-1] if request.config.reuse else ()
    ids = tuple(segment.segment_id for segment in segments)
    variants = [
        ExpectedVariant(name, ids[:index], request.session) for index, name in enumerate(ids)
    ]
    return WantedChunks(_owner(request), variants, request.config.method.scope)


def _chosen(plan: Plan) -> list[str | None]:
    """Return the chosen variant of each segment."""
    return [None if planned.variant is None else planned.variant.variant_id for planned in plan]


def _known_tokens(logits: Tensor, target: Sequence[int]) -> list[int]:
    """Return the first tokens of the greedy answer, up to where it leaves the target that `logits` predict along."""
    greedy: list[int] = logits.argmax(-1).tolist()
    places = (place for place, token in enumerate(target) if greedy[place] != token)
    first_difference = next(places, len(target) - 1)
    return greedy[: first_difference + 1]
