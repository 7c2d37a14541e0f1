"""Audits in idle time: full prefill of a prompt that was answered, and one pass over the answer's tokens.

The prompt is computed exactly. What is stored after the very same prefix is taken from the store, because it is equal
to the bit; everything else is computed. New variants are captured first: they are those chunk-caches. The prediction
with reuse is noted while the answer is decoded, so reuse is not computed a second time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial

import prometheus_client
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
from cachecraft_rag.serving.audits.audit import NEAR_TIE, Audit, AuditText, ReuseFacts, reuse_facts
from cachecraft_rag.serving.audits.audit_log import AuditLog, audits_in
from cachecraft_rag.serving.audits.controller import RatioController
from cachecraft_rag.serving.audits.predictions import ComparedPlace, Predictions, compare
from cachecraft_rag.serving.config import Audits
from cachecraft_rag.serving.new_variants import EXACT, LookUp, exact_only
from cachecraft_rag.serving.request import Request, RequestProgress, stats_of
from cachecraft_rag.serving.step_loop import LoopTask, Priority, StepLoop
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.loading.loader import Loader
from cachecraft_rag.store.loading.pending import PendingLoads
from cachecraft_rag.types import Prompt

logger = logging.getLogger("cachecraft_rag.audits")

_AT_ONCE = 8  # answer tokens in one step: less work than one layer of a prompt
_REMEMBERED = 1024  # results that are kept in memory
_RESUMED = 2000  # results on disk that a controller starts from; older ones hardly count any more
_EXACT_WITHOUT_CAPTURE = replace(EXACT, capture=False)
# Errors of the disk, the device (torch raises RuntimeError) or memory: the next audit may succeed.
_EXPECTED_ERRORS = (CacheCraftError, OSError, RuntimeError, MemoryError)


class AuditDrop(StrEnum):
    """Reason for not auditing an answer that waited for it."""

    FULL = "too_many_waiting"
    FAILED = "failed"
    CLOSED = "closed"
    REMOVED = "removed"  # one of its chunks, with its document


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

    logits    `[vocabulary]` of its last token
    buffer    its keys and values
    computed  tokens that were computed
    """

    logits: Tensor
    buffer: KVBuffer
    computed: int


@dataclass(eq=False)
class Auditor:
    """Audits answers, the latest last. For the loop's thread, except `result`, which any thread may call.

    decoder, store, loader, namespace  of the engine
    look_up           looks up what is stored
    loop              runs the audits while it is idle
    captures_pending  whether captures or new variants are still to be stored
    registry          of the metrics
    controller        sets the recompute ratio from the results; None without a quality target
    """

    config: Audits
    decoder: Decoder
    store: ChunkCacheStore
    loader: Loader
    namespace: str
    look_up: LookUp
    loop: StepLoop
    captures_pending: Callable[[], bool]
    registry: prometheus_client.CollectorRegistry
    controller: RatioController | None = None
    _waiting: deque[WaitingAudit] = field(default_factory=deque)
    _results: OrderedDict[str, Audit] = field(default_factory=OrderedDict)
    _task: LoopTask | None = None  # of the audit under way
    _running: WaitingAudit | None = None
    # reason that is counted if the audit under way is given up
    _dropped_as: AuditDrop = AuditDrop.CLOSED
    _closed: bool = False
    _storing: int = 0  # results that are being written
    _log: AuditLog | None = None
    _log_lock: threading.Lock = field(default_factory=threading.Lock)  # guards the two around it
    _log_closed: bool = False
    _has_warned: bool = False

    def __post_init__(self) -> None:
        if not self.config.share:  # neither metrics nor a file
            return
        self._metrics = AuditMetrics(self.registry)
        if self.controller is not None:
            self._metrics.show_ratio(self.controller)
            self._take_up_earlier(self.controller)

    @property
    def busy(self) -> bool:
        """True while an answer is being audited or waits for it, or a result is being written."""
        return self._task is not None or bool(self._waiting) or self._storing > 0

    def result(self, request_id: str) -> Audit | None:
        """Return the result of one of the last audits, or None: not audited, not yet, or too long ago."""
        return self._results.get(request_id)

    def recorder(self, request: Request) -> Predictions | None:
        """Return where to note the predictions of an answer; None if it is not to be audited.

        Answers with a grammar are not: the predictions compared are those without it.
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
        """Have the first `tokens` tokens of an answer audited, if its predictions were noted."""
        if predictions is None or not tokens or self._closed:
            return
        if any(segment.segment_id in progress.removed for segment in request.prompt.segments):
            self._metrics.drop(AuditDrop.REMOVED)
            return
        layers = self.decoder.layout.layers
        facts = reuse_facts(request, progress, exact=stats_of(request, progress, layers).exact)
        waiting = WaitingAudit(request, predictions, tuple(progress.tokens[:tokens]), facts)
        if facts.exact:  # full prefill would compute the same keys and values again
            text = self._same_text(waiting) if self.config.keep_text else None
            self._keep(self._result(waiting, [], computed=0, text=text), waiting)
            return
        self._waiting.append(waiting)
        if len(self._waiting) > self.config.waiting:
            self._waiting.popleft()
            self._metrics.drop(AuditDrop.FULL)
        self._begin()

    def forget(self, chunk_ids: Collection[str]) -> None:
        """Drop the audits of prompts with these chunks, because the chunks were removed."""
        removed = set(chunk_ids)
        for waiting in list(self._waiting):
            if _holds(waiting, removed):
                self._waiting.remove(waiting)
                self._metrics.drop(AuditDrop.REMOVED)
        if self.running(removed):
            self._give_up(AuditDrop.REMOVED)

    def running(self, chunk_ids: Collection[str]) -> bool:
        """Return whether the audit under way is of a prompt with at least one of these chunks."""
        return self._running is not None and _holds(self._running, set(chunk_ids))

    def close(self) -> None:
        """Drop all waiting audits, and give up the one under way before its next step."""
        self._closed = True
        for _ in range(len(self._waiting)):
            self._waiting.pop()
            self._metrics.drop(AuditDrop.CLOSED)
        self._give_up(AuditDrop.CLOSED)

    def close_log(self) -> None:
        """Close the file of results."""
        with self._log_lock:
            self._log_closed = True
            if self._log is not None:
                self._log.close()

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
        if error is not None:
            logger.error("An answer could not be audited", exc_info=error)
            self._metrics.drop(AuditDrop.FAILED)
            # a mistake of ours: no more answers are audited
            if not isinstance(error, _EXPECTED_ERRORS):
                self.close()
        elif task.closed or result is None:
            self._metrics.drop(self._dropped_as)
        else:
            self._keep(result, waiting)
        self._begin()

    def _keep(self, audit: Audit, waiting: WaitingAudit) -> None:
        """Keep a result in memory and on disk, count it, and report it."""
        self._results[audit.request_id] = audit
        if len(self._results) > _REMEMBERED:
            self._results.popitem(last=False)
        self._metrics.add(audit)
        # An exact answer says nothing about the ratio.
        if self.controller is not None and audit.ratio is not None and not audit.is_exact:
            self.controller.add(audit.ratio, tokens=audit.tokens, agreeing=audit.agreeing_net)

        is_private = waiting.request.session is not None
        stored = replace(audit, text=None) if is_private else audit

        def steps() -> Work[None]:
            yield self.loop.aside(self._store, stored)

        def ended(_result: None, error: BaseException | None) -> None:
            self._storing -= 1
            if error is not None:
                logger.error("The result of an audit was not stored", exc_info=error)

        self._storing += 1
        self.loop.start(LoopTask(lambda _: steps(), ended, Priority.JOB))

    def _take_up_earlier(self, controller: RatioController) -> None:
        """Bring the controller to where it was: audits of this tenant and model on disk, of all processes."""
        try:
            earlier = audits_in(
                self.store.root,
                namespace=self.namespace,
                fingerprint=self.decoder.fingerprint,
                limit=_RESUMED,
            )
        except (CacheCraftError, OSError) as error:
            logger.warning(
                "Earlier audits could not be read, so the quality target starts from the default: %s",
                error,
            )
            return
        controller.resume(
            (audit.ratio, audit.tokens, audit.agreeing_net)
            for audit in reversed(earlier)
            if audit.ratio is not None and not audit.is_exact
        )

    def _store(self, audit: Audit) -> None:
        """Write a result; for another thread. A file that cannot be written costs the result, and no answer."""
        with self._log_lock:
            try:
                if self._log_closed or not self.store.root.is_dir():
                    return
                if self._log is None:
                    self._log = AuditLog(self.store.root, kept=self.config.kept)
                self._log.add(self.namespace, self.decoder.fingerprint, audit)
            except (CacheCraftError, OSError) as error:
                level = logging.INFO if self._has_warned else logging.WARNING
                self._has_warned = True
                logger.log(level, "The result of an audit was not stored: %s", error)

    def _result(
        self,
        waiting: WaitingAudit,
        places: Sequence[ComparedPlace],
        *,
        computed: int,
        text: AuditText | None,
    ) -> Audit:
        """Return the result; without `places`, of an answer that is exact."""
        facts = waiting.facts
        differing = [number for number, place in enumerate(places) if place.differs]
        return Audit(
            request_id=waiting.request.request_id,
            created=time.time(),
            tokens=len(waiting.tokens),
            differences=tuple(differing),
            near_ties=sum(places[number].margin < NEAR_TIE for number in differing),
            kl=sum(place.kl for place in places) / max(1, len(places)),
            computed_tokens=computed,
            selector=facts.selector,
            recomputed=facts.recomputed,
            origin=facts.origin,
            outcomes=facts.outcomes,
            ratio=facts.ratio,
            early=facts.early,
            text=text,
        )

    # -- one audit ----------------------------------------------------------------------------------------------------

    def _audit(self, waiting: WaitingAudit) -> Work[Audit]:
        """Compare an answer with full prefill."""
        # their chunk-caches make the audit cheaper
        yield Until(lambda: not self.captures_pending())
        full = yield from self._full_prefill(waiting)

        places = yield from self._compare(waiting, full)
        full.computed += len(waiting.tokens) - 1
        text = None
        if self.config.keep_text:
            text = yield from self._text(waiting, full, places)
        return self._result(waiting, places, computed=full.computed, text=text)

    def _full_prefill(self, waiting: WaitingAudit) -> Work[FullPrefill]:
        yield Call(lambda: None)  # puts the look-up off until the loop is idle
        request = waiting.request
        most_tokens = max(len(waiting.tokens), request.sampling.max_new_tokens)
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
        return FullPrefill(logits, result.buffer, result.row_layers // self.decoder.layout.layers)

    def _plan(self, request: Request, answer_tokens: int) -> tuple[Resolved, PendingLoads]:
        """Plan an exact prefill, and begin to load what is stored after the same prefix."""
        segments = [segment for segment in request.prompt.segments if segment.kind != "question"]
        offered = exact_only(self.look_up(segments, session=request.session))
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
            decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def _next_token(self, buffer: KVBuffer, token: int, position: int) -> int:
        """Compute one token, and return the likeliest next one."""
        hidden = extend(self.decoder, buffer, [token], position)
        return int(self.decoder.logits(hidden)[0].argmax())


class AuditMetrics:
    """Prometheus metrics of the audits."""

    def __init__(self, registry: prometheus_client.CollectorRegistry) -> None:
        self._registry = registry
        counter = partial(prometheus_client.Counter, registry=registry)
        self._answers = counter(
            "cachecraft_audited_answers",
            "Audited answers: same if full prefill agrees with every token; exact ones are not compared",
            ["result"],
        )
        self._tokens = counter(
            "cachecraft_audited_tokens",
            "Tokens of audited answers, by whether full prefill agrees",
            ["result"],
        )
        self._kl = prometheus_client.Summary(
            "cachecraft_audit_kl_nats",
            "KL divergence of reuse from full prefill, a mean per answer",
            registry=registry,
        )
        self._computed = counter(
            "cachecraft_audit_computed_tokens", "Tokens that were computed for audits"
        )
        self._dropped = counter(
            "cachecraft_audits_dropped", "Answers that were not audited, by reason", ["reason"]
        )
        for result in ("same", "changed", "exact"):  # a scraper sees the zeros too
            self._answers.labels(result)
        for result in ("same", "near_tie", "changed"):
            self._tokens.labels(result)
        for reason in AuditDrop:
            self._dropped.labels(str(reason))

    def show_ratio(self, controller: RatioController) -> None:
        """Show the recompute ratio that a quality target sets."""
        gauge = prometheus_client.Gauge(
            "cachecraft_controlled_recompute_ratio",
            "Recompute ratio that the quality target sets",
            registry=self._registry,
        )
        gauge.set_function(lambda: controller.ratio)

    def add(self, audit: Audit) -> None:
        """Count an audit."""
        if audit.is_exact:
            self._answers.labels("exact").inc()
            return
        self._answers.labels("same" if audit.is_same else "changed").inc()
        self._tokens.labels("same").inc(audit.agreeing)
        self._tokens.labels("near_tie").inc(audit.near_ties)
        self._tokens.labels("changed").inc(audit.tokens - audit.agreeing_net)
        self._kl.observe(audit.kl)
        self._computed.inc(audit.computed_tokens)

    def drop(self, reason: AuditDrop) -> None:
        """Count an answer that is not audited."""
        self._dropped.labels(str(reason)).inc()


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


def _holds(waiting: WaitingAudit, chunk_ids: Collection[str]) -> bool:
    return any(segment.segment_id in chunk_ids for segment in waiting.request.prompt.segments)
