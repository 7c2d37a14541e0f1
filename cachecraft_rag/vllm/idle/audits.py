"""Audits over vLLM: each answer is computed again without reuse, by a request that runs while the server is idle.

While an answer is decoded, vLLM reports the likeliest tokens at each place. The audit's request has the same prompt,
followed by the answer. The workers compute the prompt exactly, in slices between other requests; vLLM computes
the tokens of the answer, and so says what full prefill predicts in the place of each. Results are those of
`serving.audits`.
"""

from __future__ import annotations

import logging
import random
import threading
from asyncio import CancelledError
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.serving.audits.audit import Audit, ReuseFacts, reuse_facts
from cachecraft_rag.serving.audits.predictions import LikeliestTokens, compare_likeliest
from cachecraft_rag.serving.audits.results import AuditDrop, AuditResults, audit_of
from cachecraft_rag.serving.request import Request, RequestProgress, stats_of
from cachecraft_rag.store.serial_worker import SerialWorker
from cachecraft_rag.vllm.calls import TokenLogprob
from cachecraft_rag.vllm.options import VLLMConfig

logger = logging.getLogger("cachecraft_rag.audits")

KEPT = (
    16  # likeliest tokens whose probabilities are compared at each place; vLLM allows 20 by default
)
# Tokens of an answer that are audited. vLLM computes them in one step and holds `[tokens, vocabulary]` numbers. Its own
# reserve of memory is for that many requests.
MOST_TOKENS = 256
_MOST_TRIES = 3  # an audit gives way to requests that need its memory
# Longest wait for new variants before an audit. They make it cheaper.
_WAIT_FOR_VARIANTS_S = 30.0


def check_server(config: VLLMConfig) -> None:
    """Raise ConfigError if this server does not report what audits need: the model's own 16 likeliest tokens.

    That takes `logprobs_mode` "raw_logprobs", and a `max_logprobs` of at least 16, or negative for no limit.
    """
    model = config.model_config
    if model.logprobs_mode != "raw_logprobs":
        raise ConfigError(
            f"audit needs the model's own log-probabilities, and --logprobs-mode is {model.logprobs_mode}: leave that "
            "option out, or leave audit out"
        )
    if 0 <= model.max_logprobs < KEPT:
        raise ConfigError(
            f"audit needs the {KEPT} likeliest tokens, and --max-logprobs is {model.max_logprobs}: set it to {KEPT} or "
            "more, or leave audit out"
        )


def likeliest_of(logprobs: Mapping[int, TokenLogprob]) -> LikeliestTokens:
    """Return the likeliest token, of equals the smallest id as in greedy sampling, and all log-probabilities."""
    log_shares = {token: entry.logprob for token, entry in logprobs.items()}
    likeliest = min(log_shares, key=lambda token: (-log_shares[token], token))
    return LikeliestTokens(likeliest, log_shares)


@dataclass(eq=False)
class PredictedAnswer:
    """Tokens of an answer and what reuse predicted at the place of each, noted while it is decoded.

    tokens  the tokens, with the one that ended the answer; at most `MOST_TOKENS`
    places  the prediction at the place of each token
    """

    tokens: list[int] = field(default_factory=list)
    places: list[LikeliestTokens] = field(default_factory=list)

    def note(self, tokens: Sequence[int], logprobs: Sequence[Mapping[int, TokenLogprob]]) -> None:
        """Note new tokens, and the log-probabilities in the place of each, of which none may be empty.

        Tokens beyond the first 256 of an answer are left out, and so are the last tokens if `logprobs` has fewer
        entries.
        """
        for token, entries in zip(tokens, logprobs, strict=False):
            if len(self.tokens) == MOST_TOKENS:
                return
            self.tokens.append(token)
            self.places.append(likeliest_of(entries))


@dataclass(frozen=True, eq=False)
class WaitingAnswer:
    """An answer that waits for its audit.

    tokens  the tokens that are audited
    places  what reuse predicted at the place of each token
    facts   facts about the reuse
    tries   audits of it that gave way to other requests
    """

    request: Request
    tokens: tuple[int, ...]
    places: tuple[LikeliestTokens, ...]
    facts: ReuseFacts
    tries: int = 0

    def holds(self, chunk_ids: Collection[str]) -> bool:
        """Return True if the prompt of the answer has at least one segment with one of these ids; False for no ids."""
        return any(segment.segment_id in chunk_ids for segment in self.request.prompt.segments)


@dataclass(frozen=True)
class FullPrediction:
    """Predictions of full prefill along an answer.

    places    one for each token of the answer
    computed  tokens that were computed
    """

    places: Sequence[LikeliestTokens]
    computed: int


class IdleAudits:
    """A thread that audits answers, the latest last. Any thread may call any method.

    Args:
        results: takes the results.
        predict: computes an answer again without reuse; returns None if it gave way to other requests.
        wait_for_variants: waits until new variants are captured, for so many seconds at most.
        layers: layers of the model.
    """

    def __init__(
        self,
        results: AuditResults,
        predict: Callable[[Request, Sequence[int]], FullPrediction | None],
        *,
        wait_for_variants: Callable[[float], object],
        layers: int,
    ) -> None:
        self.results = results
        self._predict = predict
        self._wait_for_variants = wait_for_variants
        self._layers = layers
        self._waiting: deque[WaitingAnswer] = deque()
        self._running: WaitingAnswer | None = None
        self._is_running_removed = False  # one of its chunks was removed since it began
        self._changed = threading.Condition()
        self._started = False
        self._closed = False
        self._writer = SerialWorker("cachecraft-audit-log")
        self._unwritten = 0  # results that are being written

    def recorder(self, request: Request) -> PredictedAnswer | None:
        """Return an object that notes the predictions of an answer; None if the answer is not to be audited.

        Answers are drawn by chance, with the share of audits. Answers without reuse are not audited, and neither are
        answers with a grammar, because the predictions compared are those without it.
        """
        config = self.results.config
        is_open = config.share > 0 and not self._closed
        if not is_open or not request.config.reuse or request.sampling.json_schema is not None:
            return None
        return PredictedAnswer() if random.random() < config.share else None

    def answered(
        self,
        request: Request,
        progress: RequestProgress,
        predicted: PredictedAnswer | None,
        *,
        tokens: int | None = None,
    ) -> None:
        """Have the first tokens of an answer audited, if its predictions were noted.

        Returns at once: the audit waits for idle time. If more than `Audits.waiting` answers wait, the oldest one is
        dropped and counted. An answer whose chunks are all exact needs no audit: its result is kept at once. Does
        nothing for an answer that vLLM computed without chunk-caches.

        Args:
            request: the request.
            progress: progress of the request, with the report of the connector.
            predicted: result of `recorder`; with None nothing is audited.
            tokens: number of tokens that its reader has read; None: all.
        """
        # Without a report of its segments vLLM has computed the prompt itself: there is no reuse to audit.
        if predicted is None or not progress.reports or self._closed:
            return
        audited = tuple(predicted.tokens[:tokens])
        if not audited:
            return
        exact = stats_of(request, progress, self._layers).exact
        facts = reuse_facts(request, progress, exact=exact)
        if exact:
            audit = audit_of(request.request_id, facts, [], tokens=len(audited), computed=0)
            self._keep(audit)
            return
        waiting = WaitingAnswer(request, audited, tuple(predicted.places[: len(audited)]), facts)
        with self._changed:
            self._waiting.append(waiting)
            if len(self._waiting) > self.results.config.waiting:
                self._waiting.popleft()
                self.results.drop(AuditDrop.FULL)
            if not self._started:
                self._started = True
                threading.Thread(target=self._run, name="cachecraft-audits", daemon=True).start()
            self._changed.notify_all()

    def forget(self, chunk_ids: Collection[str]) -> None:
        """Drop the audits of prompts with these chunks, because the chunks are removed, and count them as removed.

        The audit under way goes on, but its result is not kept.
        """
        removed = set(chunk_ids)
        with self._changed:
            for waiting in list(self._waiting):
                if waiting.holds(removed):
                    self._waiting.remove(waiting)
                    self.results.drop(AuditDrop.REMOVED)
            if self._running is not None and self._running.holds(removed):
                self._is_running_removed = True
            self._changed.notify_all()

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until no audit waits or is under way, and all results are written; see `VLLMBackend.settle`."""
        with self._changed:
            return self._changed.wait_for(self._settled, timeout)

    def _settled(self) -> bool:
        is_done = not (self._waiting or self._running or self._unwritten)
        return self._closed or is_done

    def close(self) -> None:
        """Drop all waiting audits, and the result of the one under way, and count them as closed.

        The audit under way is not waited for; results that are being written are.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for _ in range(len(self._waiting) + (self._running is not None)):
                self.results.drop(AuditDrop.CLOSED)
            self._waiting.clear()
            self._changed.notify_all()
        self._writer.shut_down()
        self.results.close()

    def _next(self) -> WaitingAnswer | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting)
            if self._closed:
                return None
            self._running = self._waiting.popleft()
            self._is_running_removed = False
            return self._running

    def _run(self) -> None:
        has_failed = False
        while (waiting := self._next()) is not None:
            audit: Audit | None = None
            failed = False
            try:
                self._wait_for_variants(_WAIT_FOR_VARIANTS_S)
                full = self._predict(waiting.request, waiting.tokens)
                audit = None if full is None else _compared(waiting, full)
            except CancelledError:
                failed = True
                logger.info("An answer is not audited: the server is ending")
            # vLLM may raise anything; the next audit may succeed
            except Exception:
                failed = True
                # of several failures in a row, such as after the end of vLLM, log the first only
                if not self._closed:
                    level = logging.DEBUG if has_failed else logging.ERROR
                    logger.log(level, "An answer could not be audited", exc_info=True)
            has_failed = failed
            self._ended(waiting, audit, failed=failed)

    def _ended(self, waiting: WaitingAnswer, audit: Audit | None, *, failed: bool) -> None:
        with self._changed:
            is_dropped = self._closed or self._is_running_removed
            if self._is_running_removed and not self._closed:  # `close` has counted it already
                self.results.drop(AuditDrop.REMOVED)
        if not is_dropped:
            if audit is not None:
                self._keep(audit)
            elif failed:
                self.results.drop(AuditDrop.FAILED)
            elif waiting.tries + 1 >= _MOST_TRIES:
                self.results.drop(AuditDrop.GAVE_WAY)
            else:
                with self._changed:
                    self._waiting.append(replace(waiting, tries=waiting.tries + 1))
        with self._changed:
            self._running = None
            self._changed.notify_all()

    def _keep(self, audit: Audit) -> None:
        """Keep a result; another thread writes it, since the caller may be the event loop of a server."""
        with self._changed:
            # `close` needs the lock as well: it comes before all of this or after it.
            if self._closed:  # and has counted the audit as dropped
                return
            self.results.keep(audit)
            self._unwritten += 1
            self._writer.submit(partial(self.results.write, audit), ended=self._written)

    def _written(self, future: Future[None]) -> None:
        if (error := future.exception()) is not None:
            logger.error("The result of an audit was not stored", exc_info=error)
        with self._changed:
            self._unwritten -= 1
            self._changed.notify_all()


def _compared(waiting: WaitingAnswer, full: FullPrediction) -> Audit:
    places = [
        compare_likeliest(reuse, other)
        for reuse, other in zip(waiting.places, full.places, strict=True)
    ]
    return audit_of(
        waiting.request.request_id,
        waiting.facts,
        places,
        tokens=len(waiting.tokens),
        computed=full.computed,
    )
