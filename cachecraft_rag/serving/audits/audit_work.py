"""Answers that wait for their audit, the same for all engines: which are audited, and what becomes of their results."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from cachecraft_rag.serving.audits.audit import Audit, AuditText, ReuseFacts, reuse_facts
from cachecraft_rag.serving.audits.results import AuditDrop, AuditResults, audit_of
from cachecraft_rag.serving.config import Audits
from cachecraft_rag.serving.idle.work import Among, GivenUp, IdleWork, Runner, held
from cachecraft_rag.serving.request import Request, RequestProgress, stats_of
from cachecraft_rag.types.prompts import Segment

logger = logging.getLogger("cachecraft_rag.audits")
Predicted = TypeVar("Predicted")  # what an engine notes of an answer while it is decoded

_MOST_TRIES = 3  # an audit gives way to requests that need its memory


@dataclass(frozen=True, eq=False)
class WaitingAudit(Generic[Predicted]):
    """An answer that waits for its audit.

    tokens     the tokens of the answer that are audited, with the token that ended it
    predicted  what reuse predicted at the place of each token
    facts      facts about the reuse
    tries      audits of it that gave way to other requests
    """

    request: Request
    tokens: tuple[int, ...]
    predicted: Predicted
    facts: ReuseFacts
    tries: int = 0

    @property
    def segments(self) -> Sequence[Segment]:
        """Segments of the prompt."""
        return self.request.prompt.segments

    @property
    def namespace(self) -> str:
        """Tenant of the request."""
        return self.request.namespace


class AuditWork(IdleWork[WaitingAudit[Predicted], Audit], Generic[Predicted]):
    """Audits answers, the latest last.

    Args:
        runner: computes the audits.
        results: takes the results.
        layers: layers of the model.
        predictions: makes an empty object that takes up the predictions of an answer.
    """

    def __init__(
        self,
        runner: Runner[WaitingAudit[Predicted], Audit],
        results: AuditResults,
        *,
        layers: int,
        predictions: Callable[[], Predicted],
    ) -> None:
        super().__init__(runner, logger=logger, failure="An answer could not be audited")
        self.results = results
        self._layers = layers
        self._predictions = predictions
        self._waiting: deque[WaitingAudit[Predicted]] = deque()
        self._unwritten = 0  # results that are being written

    @abstractmethod
    def _write(
        self, audit: Audit, namespace: str, ended: Callable[[BaseException | None], None]
    ) -> None:
        """Write a tenant's result in the background."""

    @property
    def config(self) -> Audits:
        """Limits of the audits, as the engine was opened with them."""
        return self.results.config

    @property
    def busy(self) -> bool:
        """True while an answer is being audited or waits for it, or a result is still to be written to disk."""
        return super().busy or self.is_storing

    @property
    def is_storing(self) -> bool:
        """True while a result is still to be written to disk."""
        return self._unwritten > 0

    def recorder(self, request: Request) -> Predicted | None:
        """Return an empty object that takes up the predictions of an answer; None if the answer is not to be audited.

        The request's random id decides which share of the answers is audited. Not audited are answers without reuse,
        after `close`, and with a grammar: the predictions compared are those without it.
        """
        has_grammar = request.constraint is not None or request.sampling.json_schema is not None
        if not self.config.share or self._closed or not request.config.reuse or has_grammar:
            return None
        drawn = int(request.request_id[:8], 16) / 2**32  # request ids are random
        return self._predictions() if drawn < self.config.share else None

    def answered(
        self,
        request: Request,
        progress: RequestProgress,
        predicted: Predicted | None,
        *,
        tokens: Sequence[int],
    ) -> None:
        """Have these tokens of an answer, those that its reader has got, audited in idle time; returns at once.

        The result is kept in memory, counted and reported (`AuditResults.keep`), and written to disk in the background,
        without its text if the request has a session. An answer whose chunks were all exact gets its result at once,
        without being computed again. If too many answers wait (`Audits.waiting`), the one that has waited longest is
        dropped and counted, as is an answer with a removed chunk. Nothing is audited without tokens or `predicted`
        (see `recorder`), or after `close`.
        """
        if predicted is None or not tokens:
            return
        if any(segment.segment_id in progress.removed for segment in request.prompt.segments):
            self.results.drop(AuditDrop.REMOVED)
            return
        facts = reuse_facts(
            request, progress, exact=stats_of(request, progress, self._layers).exact
        )
        waiting = WaitingAudit(request, tuple(tokens), predicted, facts)
        if facts.exact:  # full prefill would compute the same keys and values again
            self._keep(waiting, self._audit_of_exact(waiting))
            return
        with self._changed:
            if self._closed:
                return
            self._waiting.append(waiting)
            if len(self._waiting) > self.config.waiting:
                self._waiting.popleft()
                self.results.drop(AuditDrop.FULL)
            self._changed.notify_all()
            self._runner.wake(self)

    def _audit_of_exact(self, waiting: WaitingAudit[Predicted]) -> Audit:
        return audit_of(
            waiting.request.request_id,
            waiting.facts,
            [],
            tokens=len(waiting.tokens),
            computed=0,
            text=self._exact_text(waiting) if self.config.keep_text else None,
        )

    def _exact_text(self, waiting: WaitingAudit[Predicted]) -> AuditText | None:
        """Return the text of an answer without a difference; None if the engine keeps none."""
        return None

    def _keep(self, waiting: WaitingAudit[Predicted], audit: Audit) -> None:
        """Keep a result in memory and on disk, count it, and report it."""
        is_private = waiting.request.session is not None
        namespace = waiting.request.namespace
        with self._changed:
            # `close` needs the lock as well, so it is either before all of this or after it
            if self._closed:
                return
            self.results.keep(audit, namespace)
            self._unwritten += 1
            written = replace(audit, text=None) if is_private else audit
            self._write(written, namespace, self._written)

    def _written(self, error: BaseException | None) -> None:
        if error is not None:
            logger.error("The result of an audit was not stored", exc_info=error)
        with self._changed:
            self._unwritten -= 1
            self._changed.notify_all()

    # -- as `IdleWork` asks for ---------------------------------------------------------------------------------------

    def _peek(
        self, among: Among[WaitingAudit[Predicted]] | None = None
    ) -> WaitingAudit[Predicted] | None:
        return self._waiting[0] if self._waiting else None

    def _begun(self, piece: WaitingAudit[Predicted]) -> None:
        self._waiting.remove(piece)

    def _having(self, chunk_ids: Collection[str]) -> Sequence[WaitingAudit[Predicted]]:
        return [waiting for waiting in self._waiting if held(waiting, chunk_ids)]

    def _clear(self) -> None:
        for waiting in list(self._waiting):
            self._drop(waiting, "closed")

    def _drop(self, piece: WaitingAudit[Predicted], reason: GivenUp) -> None:
        if piece in self._waiting:
            self._waiting.remove(piece)
        self.results.drop(AuditDrop(reason))

    def _done(
        self, piece: WaitingAudit[Predicted], result: Audit | None, *, given_up: bool
    ) -> None:
        if given_up:
            return
        if result is not None:
            self._keep(piece, result)
        elif piece.tries + 1 >= _MOST_TRIES:
            self.results.drop(AuditDrop.GAVE_WAY)
        else:
            self._waiting.append(replace(piece, tries=piece.tries + 1))
