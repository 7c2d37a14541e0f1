"""Audits in idle time: full prefill of a prompt that was answered, and one pass over the answer's tokens.

The prompt is computed exactly. What is stored after the very same prefix is taken from the store, because it is equal
to the bit; everything else is computed. New variants are captured first: they are those chunk-caches. The prediction
with reuse is noted while the answer is decoded, so reuse is not computed a second time. Answers to the same prompt that
wait one after another share its full prefill.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from cachecraft_rag.compute.balance.speed import ComputeSpeed
from cachecraft_rag.compute.decode import extend
from cachecraft_rag.compute.driver import Call, Until, Work
from cachecraft_rag.compute.job import PrefillResult
from cachecraft_rag.compute.kv_buffer import KVBuffer
from cachecraft_rag.compute.overlapped import OverlappedPrefill
from cachecraft_rag.compute.resolve import Resolved, resolve
from cachecraft_rag.errors import CacheCraftError
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.serving.answer_text import AnswerText
from cachecraft_rag.serving.audits.audit import Audit, AuditText, ReuseFacts, reuse_facts
from cachecraft_rag.serving.audits.predictions import ComparedPlace, Predictions, compare
from cachecraft_rag.serving.audits.results import AuditDrop, AuditResults, audit_of
from cachecraft_rag.serving.config import Audits
from cachecraft_rag.serving.loop.step_loop import StepLoop
from cachecraft_rag.serving.loop.task import LoopTask, Priority
from cachecraft_rag.serving.new_variants import EXACT, LookUp, exact_only
from cachecraft_rag.serving.request import Request, RequestProgress, stats_of
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.loading.loader import Loader
from cachecraft_rag.store.loading.pending import PendingLoads
from cachecraft_rag.types.prompts import Prompt

logger = logging.getLogger("cachecraft_rag.audits")

_AT_ONCE = 8  # answer tokens in one step: less work than one layer of a prompt
_EXACT_WITHOUT_CAPTURE = replace(EXACT, capture=False)
# Errors of the disk, the device (torch raises RuntimeError) or memory: the next audit may succeed.
_EXPECTED_ERRORS = (CacheCraftError, OSError, RuntimeError, MemoryError)


@dataclass(frozen=True, eq=False)
class WaitingAudit:
    """An answer that waits for its audit.

    predictions  what reuse predicted at each place of the answer
    tokens       the tokens of the answer that are audited, with the token that ended it
    facts        facts about the reuse
    """

    request: Request
    predictions: Predictions
    tokens: tuple[int, ...]
    facts: ReuseFacts


@dataclass(eq=False)
class FullPrefill:
    """The prompt of an audit, computed exactly.

    prompt    the prompt
    logits    `[vocabulary]` of its last token
    buffer    its keys and values, with room for the answer
    room      most tokens of an answer that fit
    computed  tokens that were computed
    """

    prompt: Prompt
    logits: Tensor
    buffer: KVBuffer
    room: int
    computed: int


@dataclass(eq=False)
class Auditor:
    """Audits answers, the latest last. For the loop's thread; `results` is for any thread.

    decoder, store, loader  of the engine
    look_up           looks up what is stored
    loop              runs the audits while it is idle
    captures_pending  whether captures or new variants are still to be stored
    results           takes the results
    """

    decoder: Decoder
    store: ChunkCacheStore
    loader: Loader
    look_up: LookUp
    loop: StepLoop
    captures_pending: Callable[[], bool]
    results: AuditResults
    _waiting: deque[WaitingAudit] = field(default_factory=deque)
    _task: LoopTask | None = None  # of the audit under way
    _running: WaitingAudit | None = None
    _shared: FullPrefill | None = None  # of the audit before, if the next one has the same prompt
    # reason that is counted if the audit under way is given up
    _dropped_as: AuditDrop = AuditDrop.CLOSED
    _closed: bool = False
    _storing: int = 0  # results that are being written

    @property
    def config(self) -> Audits:
        """Limits of the audits, as the engine was opened with them."""
        return self.results.config

    @property
    def busy(self) -> bool:
        """True while an answer is being audited or waits for it, or a result is still to be written to disk."""
        return self._task is not None or bool(self._waiting) or self.is_storing

    @property
    def is_storing(self) -> bool:
        """True while a result is still to be written to disk."""
        return self._storing > 0

    def recorder(self, request: Request) -> Predictions | None:
        """Return an empty object that takes up the predictions of an answer; None if the answer is not to be audited.

        The request's random id decides which share of the answers is audited. Answers with a grammar are not: the
        predictions compared are those without it.
        """
        if (
            not self.config.share
            or self._closed
            or not request.config.reuse
            or request.constraint is not None
        ):
            return None
        drawn = int(request.request_id[:8], 16) / 2**32  # request ids are random
        return Predictions() if drawn < self.config.share else None

    def answered(
        self,
        request: Request,
        progress: RequestProgress,
        predictions: Predictions | None,
        *,
        tokens: int,
    ) -> None:
        """Have the first `tokens` tokens of an answer, those that its reader has got, audited while the loop is idle.

        The result is kept in memory, counted and reported (`AuditResults.keep`), and written to disk in the background,
        without its text if the request has a session. An answer whose chunks were all exact gets its result at once,
        without being computed again. If too many answers wait (`Audits.waiting`), the one that has waited longest is
        dropped and counted, as is an answer with a removed chunk. Without `predictions` (see `recorder`) nothing is
        audited.
        """
        if predictions is None or not tokens or self._closed:
            return
        if any(segment.segment_id in progress.removed for segment in request.prompt.segments):
            self.results.drop(AuditDrop.REMOVED)
            return
        layers = self.decoder.layout.layers
        facts = reuse_facts(request, progress, exact=stats_of(request, progress, layers).exact)
        waiting = WaitingAudit(request, predictions, tuple(progress.tokens[:tokens]), facts)
        if facts.exact:  # full prefill would compute the same keys and values again
            text = self._same_text(waiting) if self.config.keep_text else None
            exact = audit_of(
                request.request_id, facts, [], tokens=len(waiting.tokens), computed=0, text=text
            )
            self._keep(exact, waiting)
            return
        self._waiting.append(waiting)
        if len(self._waiting) > self.config.waiting:
            self._waiting.popleft()
            self.results.drop(AuditDrop.FULL)
        self._begin()

    def forget(self, chunk_ids: Collection[str]) -> None:
        """Drop and count the audits of prompts with these chunks, because the chunks were removed. Results stay.

        The audit under way is asked to stop before its next step, and is not waited for.
        """
        removed = set(chunk_ids)
        for waiting in list(self._waiting):
            if _holds(waiting, removed):
                self._waiting.remove(waiting)
                self.results.drop(AuditDrop.REMOVED)
        self._shared = None
        if self.running(removed):
            self._give_up(AuditDrop.REMOVED)

    def running(self, chunk_ids: Collection[str]) -> bool:
        """Return True if an audit is under way and its prompt has at least one of these chunks."""
        return self._running is not None and _holds(self._running, set(chunk_ids))

    def close(self) -> None:
        """Drop and count all waiting audits, and ask the one under way to stop before its next step.

        `busy` is False once it has ended and results are written.
        """
        self._closed = True
        self._shared = None
        for _ in range(len(self._waiting)):
            self._waiting.pop()
            self.results.drop(AuditDrop.CLOSED)
        self._give_up(AuditDrop.CLOSED)

    def _give_up(self, reason: AuditDrop) -> None:
        if self._task is not None:
            self._task.closed = True
            self._dropped_as = reason
            self.loop.wake()

    def _begin(self) -> None:
        """Begin with the answer that has waited longest, unless an audit is under way."""
        if self._task is not None or self._closed or not self._waiting:
            return
        waiting = self._waiting.popleft()
        self._running = waiting
        self._dropped_as = AuditDrop.CLOSED
        self._task = LoopTask(lambda _: self._audit(waiting), self._ended, Priority.IDLE)
        self.loop.start(self._task)

    def _ended(self, result: Audit | None, error: BaseException | None) -> None:
        task = self._task
        waiting = self._running
        assert task is not None
        assert waiting is not None
        self._task = None
        self._running = None
        if error is not None or task.closed:
            self._shared = None
        if error is not None:
            logger.error("An answer could not be audited", exc_info=error)
            self.results.drop(AuditDrop.FAILED)
            # a mistake of ours: no more answers are audited
            if not isinstance(error, _EXPECTED_ERRORS):
                self.close()
        elif task.closed or result is None:
            self.results.drop(self._dropped_as)
        else:
            self._keep(result, waiting)
        self._begin()

    def _keep(self, audit: Audit, waiting: WaitingAudit) -> None:
        """Keep a result in memory and on disk, count it, and report it."""
        self.results.keep(audit)
        is_private = waiting.request.session is not None
        stored = replace(audit, text=None) if is_private else audit

        def steps() -> Work[None]:
            yield self.loop.aside(self.results.write, stored)

        def ended(_result: None, error: BaseException | None) -> None:
            self._storing -= 1
            if error is not None:
                logger.error("The result of an audit was not stored", exc_info=error)

        self._storing += 1
        self.loop.start(LoopTask(lambda _: steps(), ended, Priority.JOB))

    # -- one audit ----------------------------------------------------------------------------------------------------

    def _audit(self, waiting: WaitingAudit) -> Work[Audit]:
        """Compare an answer with full prefill."""
        # their chunk-caches make the audit cheaper
        yield Until(lambda: not self.captures_pending())
        full = self._shared
        self._shared = None
        if full is None or not _fits(waiting, full):
            full = yield from self._full_prefill(waiting)

        places = yield from self._compare(waiting, full)
        full.computed += len(waiting.tokens) - 1
        text = None
        if self.config.keep_text:
            text = yield from self._text(waiting, full, places)
        if self._waiting and _fits(self._waiting[0], full):
            # The answer's keys and values in the buffer are written over.
            self._shared = replace(full, computed=0)
        return audit_of(
            waiting.request.request_id,
            waiting.facts,
            places,
            tokens=len(waiting.tokens),
            computed=full.computed,
            text=text,
        )

    def _full_prefill(self, waiting: WaitingAudit) -> Work[FullPrefill]:
        yield Call(lambda: None)  # puts the look-up off until the loop is idle
        request = waiting.request
        most_tokens = _most_tokens(waiting)
        resolved, loads = yield self.loop.aside(self._plan, request, most_tokens)
        try:
            # waits for turns would distort the engine's speed
            speed = ComputeSpeed(self.decoder.keys_per_row)
            result: PrefillResult = yield from OverlappedPrefill(
                self.decoder, resolved.job, loads, speed
            ).steps()
        finally:
            self.loader.end(loads)
            resolved.close()
        logits = self.decoder.next_logits(result.hidden)
        computed = result.row_layers // self.decoder.layout.layers
        return FullPrefill(request.prompt, logits, result.buffer, most_tokens, computed)

    def _plan(self, request: Request, answer_tokens: int) -> tuple[Resolved, PendingLoads]:
        """Plan an exact prefill, and begin to load what is stored after the same prefix."""
        segments = [segment for segment in request.prompt.segments if segment.kind != "question"]
        found = self.look_up(segments, session=request.session, namespace=request.namespace)
        offered = exact_only(found)
        resolved = resolve(
            Prompt(request.prompt.segments),
            offered,
            _EXACT_WITHOUT_CAPTURE,
            store=self.store,
            ranks=self.decoder.ranks,
            answer_tokens=answer_tokens,
        )
        return resolved, self.loader.begin(resolved.to_load)

    def _compare(self, waiting: WaitingAudit, full: FullPrefill) -> Work[list[ComparedPlace]]:
        """Compute the answer's tokens after the prompt, and compare the predictions at each place."""
        places = compare(waiting.predictions, full.logits[None], begin=0)
        position = waiting.request.prompt.bounds[-1]
        inputs = waiting.tokens[:-1]
        for begin in range(0, len(inputs), _AT_ONCE):
            piece = inputs[begin : begin + _AT_ONCE]

            def computed(piece: Sequence[int] = piece, begin: int = begin) -> list[ComparedPlace]:
                hidden = extend(self.decoder, full.buffer, piece, position + begin)
                return compare(waiting.predictions, self.decoder.logits(hidden), begin=begin + 1)

            places += yield Call(computed)
        return places

    def _text(
        self, waiting: WaitingAudit, full: FullPrefill, places: Sequence[ComparedPlace]
    ) -> Work[AuditText]:
        """Return the text of an answer, and full prefill's text from the first difference on."""
        first = next((number for number, place in enumerate(places) if place.differs), None)
        if first is None:
            return self._same_text(waiting)

        position = waiting.request.prompt.bounds[-1]
        answer = self._answer_text(waiting)
        text = "".join(answer.take(token) for token in waiting.tokens[:first])
        token = places[first].likeliest
        count = first
        while True:
            text += answer.take(token)
            count += 1
            if answer.finish is not None:
                break
            token = yield Call(partial(self._next_token, full.buffer, token, position + count - 1))
            full.computed += 1
        given = self._given_text(waiting)
        same = _common_beginning(given, text)
        return AuditText(
            self._question(waiting), same, given.removeprefix(same), text.removeprefix(same)
        )

    def _same_text(self, waiting: WaitingAudit) -> AuditText:
        """Return the text of an answer without a difference."""
        return AuditText(self._question(waiting), same=self._given_text(waiting), reuse="", full="")

    def _given_text(self, waiting: WaitingAudit) -> str:
        """Return the text of the audited tokens, as the reader got it."""
        answer = self._answer_text(waiting)
        text = "".join(answer.take(token) for token in waiting.tokens)
        return text if answer.finish is not None else text + answer.rest()

    def _answer_text(self, waiting: WaitingAudit) -> AnswerText:
        return AnswerText(waiting.request.sampling, self.decoder.tokenizer, self.decoder.end_tokens)

    def _question(self, waiting: WaitingAudit) -> str:
        """Return the text of the prompt after its chunks, without the template's last tokens."""
        segment = waiting.request.prompt.segments[-1]
        tokens = segment.token_ids[: len(segment.token_ids) - segment.closing]
        decode = self.decoder.tokenizer.decode
        return str(
            decode(tokens.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def _next_token(self, buffer: KVBuffer, token: int, position: int) -> int:
        """Compute one token, and return the likeliest next one."""
        hidden = extend(self.decoder, buffer, [token], position)
        return int(self.decoder.logits(hidden)[0].argmax())


def _common_beginning(text: str, other_text: str) -> str:
    """Return the longest beginning that two texts share.

    >>> _common_beginning("It lasts 3 years.", "It lasts 30 days.")
    'It lasts 3'
    """
    places = (
        place
        for place, letters in enumerate(zip(text, other_text, strict=False))
        if letters[0] != letters[1]
    )
    return text[: next(places, min(len(text), len(other_text)))]


def _fits(waiting: WaitingAudit, full: FullPrefill) -> bool:
    """Return True if this is the full prefill of an answer's prompt, with enough room for the answer."""
    is_same = _digests(waiting.request.prompt) == _digests(full.prompt)
    return is_same and _most_tokens(waiting) <= full.room


def _most_tokens(waiting: WaitingAudit) -> int:
    return max(len(waiting.tokens), waiting.request.sampling.max_new_tokens)


def _digests(prompt: Prompt) -> list[str]:
    return [segment.tokens_digest for segment in prompt.segments]


def _holds(waiting: WaitingAudit, chunk_ids: Collection[str]) -> bool:
    return any(segment.segment_id in chunk_ids for segment in waiting.request.prompt.segments)
