"""Requests as steps for the loop: wait for the turn, plan, prefill while the rest is loaded, decode."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cachecraft_rag.compute.captures.write_back import CaptureContext, WriteBackQueue
from cachecraft_rag.compute.decode import DecodeStep, extend
from cachecraft_rag.compute.driver import Call, Until, Work
from cachecraft_rag.compute.job import PrefillResult
from cachecraft_rag.compute.kv_buffer import KVBuffer
from cachecraft_rag.compute.overlapped import OverlappedPrefill
from cachecraft_rag.compute.resolve import Resolved, executed_plan, resolve
from cachecraft_rag.compute.stale_tokens.refresh import Refresh
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.candidates import Candidate
from cachecraft_rag.planning.planner import Plan, exact_shares
from cachecraft_rag.prompt.unmarked import candidates_of
from cachecraft_rag.serving.admission import FutureCaptures, Line
from cachecraft_rag.serving.new_variants import LookUp, VariantMaker
from cachecraft_rag.serving.request import AnswerText, Request, RequestProgress
from cachecraft_rag.serving.sampling import Sampler
from cachecraft_rag.serving.step_loop import Level, Run, StepLoop
from cachecraft_rag.serving.token_queue import Outlet, Piece
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.loading.loader import Loader
from cachecraft_rag.store.loading.pending import PendingLoads
from cachecraft_rag.store.row_checks import Found
from cachecraft_rag.types import Segment

logger = logging.getLogger("cachecraft_rag")


@dataclass
class LoadingPlan:
    """A resolved plan whose loading has begun; `close` it."""

    resolved: Resolved
    loads: PendingLoads
    loader: Loader
    closed: bool = False

    def close(self) -> None:
        """End loading; chunk-caches that came whole stay in memory. Idempotent."""
        if not self.closed:
            self.closed = True
            self.loader.end(self.loads)
            self.resolved.close()


@dataclass(frozen=True)
class Prefilled:
    """A prompt ready to be answered: `logits` `[vocabulary]` of its last token, its keys and values, and `refresh`,
    which chooses stale tokens to recompute while decoding.
    """

    logits: Tensor
    buffer: KVBuffer
    refresh: Refresh | None


class _Start:
    """A prefilled prompt that is answered several times: refreshing changes its keys and values."""

    def __init__(self, output: Prefilled) -> None:
        self._output, self._refresh = output, copy.deepcopy(output.refresh)
        self._kv = None if output.refresh is None else output.buffer.kv.clone()

    @torch.inference_mode()
    def again(self) -> Prefilled:
        """The prompt as it was."""
        if self._kv is not None:
            self._output.buffer.kv.copy_(self._kv)
        return replace(self._output, refresh=copy.deepcopy(self._refresh))


@dataclass(eq=False)
class Answering:
    """The steps of one engine's requests. Generators run in the loop's thread, and plans in threads of their own.

    look_up     finds what is stored
    namespace   of the engine
    stand_in    the passage that text which nobody marked is captured behind
    noting      prompts whose text is being noted as seen
    """

    decoder: Decoder
    store: ChunkCacheStore
    loop: StepLoop
    line: Line
    write_back: WriteBackQueue
    new_variants: VariantMaker
    look_up: LookUp
    loader: Loader
    namespace: str
    stand_in: Segment
    noting: int = 0
    _captures: list[FutureCaptures] = field(default_factory=list)  # of the requests under way, by their plans' order
    _changes: int = 0  # of what is stored, as far as this engine knows

    def stored_changed(self) -> None:
        """Note that captures came or went: a plan made before is out of date."""
        self._changes += 1

    # -- up to the first token ----------------------------------------------------------------------------------------

    def prefill(
        self, run: Run, request: Request, progress: RequestProgress, captures: FutureCaptures
    ) -> Work[Prefilled]:
        """Wait for the turn, plan, and prefill while what is not in memory is being loaded. Raises BusyError,
        WaitTimeoutError.
        """
        plan: LoadingPlan | None = None
        self.line.enter(run)
        try:
            began = time.perf_counter()
            if not self.line.is_first(run):
                yield from self.line.wait(lambda: self.line.is_first(run), began)
            changes = self._changes
            if not self.line.free():
                plan = yield self.loop.aside(self._plan, request, progress, None)
                rows = plan.resolved.job.rows.open()
                yield from self.line.wait(lambda: self.line.free() or self._joins(rows, request), began)
            self.line.begin(run)
            progress.queued_s = time.perf_counter() - began
            if request.config.reuse:
                yield from self._captures_of_others(request)
            if plan is None or (request.config.reuse and changes != self._changes):
                plan = yield self.loop.aside(self._plan, request, progress, plan)
            progress.plan, progress.tiers, progress.planned_s = (
                plan.resolved.plan, plan.resolved.tiers, request.clock()
            )  # fmt: skip
            if request.config.capture:
                captures.expect(request.prompt, progress.plan, session=request.session)
                self._captures.append(captures)
            return (yield from self._compute(run, request, progress, plan, captures))
        except BaseException:
            self._forget(captures)  # nothing comes of them
            raise
        finally:
            self.line.leave(run)
            if plan is not None:
                plan.close()

    def _joins(self, rows: Sequence[int] | NDArray[np.int64], request: Request) -> bool:
        """Return whether a request may prefill beside those that do: it joins their forwards, and needs none of their
        captures.
        """
        return self.loop.would_join(rows) and not self._coming_for(request)

    def _coming_for(self, request: Request) -> list[FutureCaptures]:
        if not request.config.reuse:
            return []
        return [one for one in self._captures if one.serve(request.prompt, request.config, session=request.session)]

    def _captures_of_others(self, request: Request) -> Generator[Until, bool, None]:
        """Wait for chunks that other requests compute, instead of computing them again. A failed prefill gives none."""

        def computed() -> bool:
            return all(one.computed for one in self._coming_for(request))

        yield Until(computed)
        for one in self._coming_for(request):
            one.hand_over()
            self._forget(one)
        ids = [segment.segment_id for segment in request.prompt.segments[:-1]]
        yield Until(lambda: not self.write_back.pending(ids))

    def _plan(self, request: Request, progress: RequestProgress, early: LoadingPlan | None) -> LoadingPlan:
        """Plan, and begin to load; an `early` plan goes on if it chose the same, because it loads already."""
        resolved = self._resolve(request, progress)
        if early is not None:
            if _chosen(early.resolved) == _chosen(resolved):
                resolved.close()
                return early
            early.close()  # chunk-caches that came whole are in memory now, and found there
            resolved.close()
            resolved = self._resolve(request, progress)
        return LoadingPlan(resolved, self.loader.begin(resolved.to_load), self.loader)

    def _resolve(self, request: Request, progress: RequestProgress) -> Resolved:
        """Look up and plan."""
        prompt, config, found = request.prompt, request.config, Found({})
        with self.loop.timer("planning"):
            if config.reuse:
                found = self.look_up(
                    [one for one in prompt.segments if one.kind != "question"], session=request.session
                )
                progress.remote = found.remote
            return resolve(
                prompt,
                found,
                config,
                store=self.store,
                ranks=self.decoder.ranks,
                answer_tokens=request.sampling.max_new_tokens,
            )

    def _compute(
        self, run: Run, request: Request, progress: RequestProgress, plan: LoadingPlan, captures: FutureCaptures
    ) -> Work[Prefilled]:
        resolved, loads = plan.resolved, plan.loads
        run.loads = loads
        speed, timer = self.loop.joint.speed, self.loop.timer
        with closing(plan):
            steps = OverlappedPrefill(self.decoder, resolved.job, loads, speed, timer=timer).steps()
            result: PrefillResult = yield from steps
        progress.plan = executed_plan(resolved, loads, result)
        captures.submit, captures.computed = partial(self._submit, request, progress, result), True
        progress.waited_s, progress.row_layers, progress.focus_layer = run.load_s, result.row_layers, result.focus_layer
        with self.loop.timer("logits"):
            logits = self.decoder.next_logits(result.hidden)
        return Prefilled(logits, result.buffer, result.refresh)

    def _submit(self, request: Request, progress: RequestProgress, result: PrefillResult) -> None:
        """Hand the captures of a request to write-back."""
        prompt = request.prompt
        shares = exact_shares(progress.plan, [len(segment.token_ids) for segment in prompt.segments])
        context = CaptureContext(prompt.segments, prompt.bounds, shares, request.session, removed=progress.removed)
        self.write_back.submit(result.recorder, result.buffer.kv[:, 0], context)
        self.stored_changed()

    # -- the answer ---------------------------------------------------------------------------------------------------

    def answer(self, run: Run, request: Request, progress: RequestProgress, outlet: Outlet) -> Work[None]:
        """Answer a request into its outlet."""
        captures = FutureCaptures()
        output = yield from self.prefill(run, request, progress, captures)
        try:
            last = yield from self._decode(request, progress, output, outlet)
        finally:
            self._finish(request, progress, captures)
        outlet.put(last)

    def score(
        self, run: Run, request: Request, progress: RequestProgress, target: Sequence[int] | None
    ) -> Work[tuple[str, Tensor]]:
        """Answer greedily, and predict along the target tokens; returns the text and logits `[target, vocabulary]`."""
        captures, outlet = FutureCaptures(), Outlet(bounded=False)
        output = yield from self.prefill(run, request, progress, captures)
        try:
            int(output.logits.argmax())  # as drawing the first token would wait for a GPU
            progress.first_token_s = request.clock()
            begun: list[int] = []
            start = _Start(output)
            if target is not None:
                logits = yield from self._along(request, output, target)
                if output.refresh is None:
                    own = logits.argmax(-1).tolist()  # up to the first difference, its own answer is the other one
                    same = next((place for place, token in enumerate(target) if own[place] != token), len(target) - 1)
                    begun = own[: same + 1]
                output = start.again()
            last = yield from self._decode(request, progress, output, outlet, begun=begun)
            if target is None:
                logits = yield from self._along(request, start.again(), progress.tokens)
        finally:
            self._finish(request, progress, captures)
        progress.generated, progress.finish = last.generated, last.finish
        return outlet.text() + last.text, logits

    def _decode(
        self,
        request: Request,
        progress: RequestProgress,
        output: Prefilled,
        outlet: Outlet,
        *,
        begun: Sequence[int] = (),
    ) -> Work[Piece]:
        """Put all pieces but the last one, which is returned, into the outlet, no faster than its reader takes them.

        Args:
            begun: first tokens that are known and, but for the last, have their K/V.
        """
        text = AnswerText(request.sampling, self.decoder.tokenizer, self.decoder.end_tokens)
        sampler, position = Sampler(request.sampling, request.constraint), request.prompt.bounds[-1]
        token = begun[0] if begun else sampler.draw(output.logits)
        progress.first_token_s = progress.first_token_s or request.clock()
        while True:
            progress.tokens.append(token)
            piece = text.take(token)
            if text.finish is not None:
                return Piece(piece, text.generated, text.finish)
            outlet.put(Piece(piece, text.generated))
            if (count := len(progress.tokens)) < len(begun):
                token = begun[count]
                continue
            if not outlet.has_room():
                yield Until(outlet.has_room, for_reader=True)
            token = sampler.draw((yield DecodeStep(output.buffer, token, position + count - 1, output.refresh)))
            progress.refreshed = 0 if output.refresh is None else output.refresh.refreshed

    def _along(self, request: Request, output: Prefilled, answer: Sequence[int]) -> Work[Tensor]:
        """`[answer, vocabulary]`: the predictions for each token of an answer that is given."""
        logits, end = [output.logits], request.prompt.bounds[-1]
        if len(answer) > 1 and output.refresh is None:
            rest = yield Call(partial(extend, self.decoder, output.buffer, answer[:-1], end))
            return torch.cat((output.logits[None], self.decoder.logits(rest)))
        for place, token in enumerate(answer[:-1]):
            logits.append((yield DecodeStep(output.buffer, token, end + place, output.refresh)))
        return torch.stack(logits)

    def _finish(self, request: Request, progress: RequestProgress, captures: FutureCaptures) -> None:
        """Count the uses and hand over the captures."""
        try:
            for planned in progress.plan.segments:
                if planned.variant is not None:
                    used = planned.variant
                    self.store.used(used.variant_id, cfo=planned.cfo or 0.0, tokens=used.tokens)
            captures.hand_over()
            self._forget(captures)
            candidate = None
            if any(segment.found for segment in request.prompt.segments):
                if request.config.capture and self.new_variants.config.when != "off":
                    self._note(request, progress.plan)
            elif request.config.capture:
                candidate = Candidate.of(request.prompt, progress.plan, request.config, session=request.session)
            self.new_variants.answered(request.prompt.bounds[-1], candidate)
        except Exception:  # of the store: the answer itself is complete
            logger.exception("What followed from an answer has failed")

    def _note(self, request: Request, plan: Plan) -> None:
        """Note the text of a prompt that nobody marked, and have captured what was seen before."""
        scope = (self.namespace, self.decoder.fingerprint)
        candidates = candidates_of(request.prompt, plan, request.session, scope, stand_in=self.stand_in)

        def noted() -> Work[set[str]]:
            seen: set[str] = yield self.loop.aside(self.store.seen_texts, list(candidates))
            return seen

        def ended(seen: set[str] | None, error: BaseException | None) -> None:
            self.noting -= 1
            if error is not None:
                logger.error("Text of a prompt could not be noted", exc_info=error)
            for name in seen or ():
                self.new_variants.answered(0, candidates[name])

        self.noting += 1
        self.loop.start(Run(lambda _: noted(), ended, Level.JOB))

    def _forget(self, captures: FutureCaptures) -> None:
        if captures in self._captures:
            self._captures.remove(captures)
            self.stored_changed()


def _chosen(resolved: Resolved) -> list[str | None]:
    """The variant of each segment."""
    return [None if one.variant is None else one.variant.variant_id for one in resolved.plan.segments]
