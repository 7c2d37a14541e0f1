"""Results of audits: kept in memory and on disk, counted as metrics, and reported to the quality target."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial

import prometheus_client

from cachecraft_rag.errors import CacheCraftError
from cachecraft_rag.planning.calibration import Calibration
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.serving.audits.audit import NEAR_TIE, Audit, AuditText, ReuseFacts
from cachecraft_rag.serving.audits.audit_log import AuditLog, audits_in
from cachecraft_rag.serving.audits.controller import QualityTarget, RatioController
from cachecraft_rag.serving.audits.predictions import ComparedPlace
from cachecraft_rag.serving.config import Audits
from cachecraft_rag.serving.request import Request
from cachecraft_rag.store import ChunkCacheStore

logger = logging.getLogger("cachecraft_rag.audits")

_REMEMBERED = 1024  # results that are kept in memory
_TOKENS_PER_ANSWER = 10  # assumed of a calibration, which keeps the number of its questions only
_PASSAGES = 5  # assumed of a calibration that recomputes the nearest passage in full
_RESUMED = 2000  # results on disk that a controller starts from; older ones hardly count any more


class AuditDrop(StrEnum):
    """Reason for not auditing an answer that waited for it."""

    FULL = "too_many_waiting"
    FAILED = "failed"
    CLOSED = "closed"
    REMOVED = "removed"  # one of its chunks, with its document
    GAVE_WAY = "gave_way"  # over vLLM: other requests needed its memory, several times


class AuditResults:
    """The results of the audits of one engine. Any thread may call any method.

    Without audits (`Audits.share` is 0) there are neither metrics nor a file: do not call `keep`, `write` or `drop`.

    Args:
        config: limits of the audits.
        store: the engine's store; results are kept in a file in its folder.
        namespace: tenant of results whose request names none.
        fingerprint: identity of the model.
        registry: of the metrics.
        target: the quality target that the results steer the recompute ratio to; None without one.

    Attributes:
        controller: chooses the recompute ratio; None without a target.
    """

    def __init__(
        self,
        config: Audits,
        store: ChunkCacheStore,
        *,
        namespace: str,
        fingerprint: str,
        registry: prometheus_client.CollectorRegistry,
        target: QualityTarget | None = None,
    ) -> None:
        self.config = config
        self.controller = None if target is None else RatioController(target)
        self._store = store
        self._namespace = namespace
        self._fingerprint = fingerprint
        self._lock = threading.Lock()  # guards the results and the controller
        # (tenant, request) → result: over vLLM a client may choose the name of its request
        self._results: OrderedDict[tuple[str, str], Audit] = OrderedDict()
        self._resumed: list[float] = []  # times of the audits that the controller has started from
        self._log_lock = threading.Lock()  # guards the three below
        self._log: AuditLog | None = None
        self._log_closed = False
        self._has_warned = False
        if not config.share:
            return
        self._metrics = AuditMetrics(registry)
        if self.controller is not None:
            self._metrics.show_ratio(self.controller)
            self._take_up_earlier(self.controller)

    def seed(self, calibration: Calibration | None, config: ReuseConfig) -> None:
        """Let the quality target begin with what a calibration measured, instead of with the usual assumption.

        Ignored are None, another metric than "top1", and other settings (`Calibration.fits`). Audits that are newer
        count beside it, and make it fade. To be called before the first request.
        """
        if self.controller is None or calibration is None or not calibration.fits(config):
            return
        agreement = calibration.agreement
        if agreement is None:
            return
        in_full = 1 / _PASSAGES if calibration.nearest_share else 0.0
        with self._lock:
            self.controller.seed(
                ratio=max(0.0, (calibration.recomputed - in_full) / (1.0 - in_full)),
                tokens=calibration.questions * _TOKENS_PER_ANSWER,
                agreement=agreement,
                newer=sum(created > calibration.created for created in self._resumed),
            )

    def get(self, request_id: str, namespace: str = "") -> Audit | None:
        """Return the audit of a tenant's request, of any session; None: not audited (yet), or not of the last 1,024."""
        with self._lock:
            return self._results.get((namespace or self._namespace, request_id))

    def chosen_ratio(self, asked: ReuseConfig) -> tuple[float, str] | None:
        """Return the quality target's ratio, and why; None without a target or reuse, or if `asked` sets r or α."""
        is_open = asked.reuse and asked.recompute_ratio is None and asked.method.alpha is None
        return self.controller.choice() if self.controller is not None and is_open else None

    def with_ratio(self, request: Request, asked: ReuseConfig) -> Request:
        """Return the request with `chosen_ratio` of `asked`, its settings before calibration, and why; else itself."""
        chosen = self.chosen_ratio(asked)
        if chosen is None:
            return request
        ratio, reason = chosen
        config = replace(request.config, recompute_ratio=ratio)
        return replace(request, config=config, quality=reason)

    def keep(self, audit: Audit, namespace: str = "") -> None:
        """Keep a tenant's result among the last 1,024 in memory, count it, and report it to the controller.

        That takes up only results with a ratio that it chose, and of exact answers only those with ratio 1.
        """
        with self._lock:
            self._results[namespace or self._namespace, audit.request_id] = audit
            if len(self._results) > _REMEMBERED:
                self._results.popitem(last=False)
            if self.controller is not None and audit.ratio is not None and _concerns_ratio(audit):
                self.controller.add(audit.ratio, tokens=audit.tokens, agreeing=audit.agreeing_net)
        self._metrics.add(audit)

    def write(self, audit: Audit, namespace: str = "") -> None:
        """Write a tenant's result to disk; its oldest of this model beyond `Audits.kept` are removed.

        A result that cannot be written is lost, with a warning, later ones at level INFO. The file is made again once
        it was deleted. After `close`, and once the store's folder is gone, nothing is written.
        """
        with self._log_lock:
            try:
                if self._log_closed or not self._store.root.is_dir():
                    return
                if self._log is not None and not self._log.is_there:
                    self._log.close()  # deleted by the user: no reader would see what is written
                    self._log = None
                if self._log is None:
                    self._log = AuditLog(self._store.root, kept=self.config.kept)
                self._log.add(namespace or self._namespace, self._fingerprint, audit)
            except (CacheCraftError, OSError) as error:
                level = logging.INFO if self._has_warned else logging.WARNING
                self._has_warned = True
                logger.log(level, "The result of an audit was not stored: %s", error)

    def drop(self, reason: AuditDrop) -> None:
        """Count in the metrics an answer that is not audited, by reason."""
        self._metrics.drop(reason)

    def close(self) -> None:
        """Close the file of results, after another thread's write; later results stay in memory only."""
        with self._log_lock:
            self._log_closed = True
            if self._log is not None:
                self._log.close()

    def _take_up_earlier(self, controller: RatioController) -> None:
        """Let the controller start from the audits of this tenant and model on disk, of all processes."""
        try:
            earlier = audits_in(
                self._store.root,
                namespace=self._namespace,
                fingerprint=self._fingerprint,
                limit=_RESUMED,
            )
        except (CacheCraftError, OSError) as error:
            logger.warning(
                "Earlier audits could not be read, so the quality target starts from the default: %s",
                error,
            )
            return
        concerned = [audit for audit in reversed(earlier) if _concerns_ratio(audit)]
        controller.resume(
            (audit.ratio, audit.tokens, audit.agreeing_net)
            for audit in concerned
            if audit.ratio is not None
        )
        self._resumed = [audit.created for audit in concerned]


def _concerns_ratio(audit: Audit) -> bool:
    """Return True unless it is exact: exact at any ratio. At ratio 1 all are, and without them it would never fall."""
    return audit.ratio is not None and (not audit.exact or audit.ratio >= 1.0)


def audit_of(
    request_id: str,
    facts: ReuseFacts,
    places: Sequence[ComparedPlace],
    *,
    tokens: int,
    computed: int,
    text: AuditText | None = None,
) -> Audit:
    """Return the result of an audit, with the present time.

    `places` has one for each token of the answer, in order, and is empty for an answer that is exact; `kl` is their
    mean, or RuntimeError is raised if that is not finite. `computed` are the tokens that were computed for the audit.
    """
    kl = sum(place.kl for place in places) / max(1, len(places))
    if not math.isfinite(kl):
        raise RuntimeError("the model's predictions are not numbers, so they cannot be compared")
    differing = [number for number, place in enumerate(places) if place.differs]
    return Audit(
        request_id=request_id,
        created=time.time(),
        tokens=tokens,
        differences=tuple(differing),
        near_ties=sum(places[number].margin < NEAR_TIE for number in differing),
        kl=kl,
        computed_tokens=computed,
        selector=facts.selector,
        recomputed=facts.recomputed,
        origin=facts.origin,
        outcomes=facts.outcomes,
        ratio=facts.ratio,
        early=facts.early,
        exact=facts.exact,
        text=text,
    )


class AuditMetrics:
    """Prometheus metrics of the audits."""

    def __init__(self, registry: prometheus_client.CollectorRegistry) -> None:
        self._registry = registry
        counter = partial(prometheus_client.Counter, registry=registry)
        self._answers = counter(
            "cachecraft_audited_answers",
            "Audited answers, by whether reuse and full prefill find the same tokens likeliest; exact: not compared",
            ["result"],
        )
        self._tokens = counter(
            "cachecraft_audited_tokens",
            "Places of audited answers, by whether reuse and full prefill find the same token the likeliest",
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
        """Add a gauge of the recompute ratio that a quality target sets; it asks the controller whenever it is read."""
        gauge = prometheus_client.Gauge(
            "cachecraft_controlled_recompute_ratio",
            "Recompute ratio that the quality target sets",
            registry=self._registry,
        )
        gauge.set_function(lambda: controller.ratio)

    def add(self, audit: Audit) -> None:
        """Count an audit: its answer, places, near-ties, divergence and computed tokens.

        An exact one counts as an exact answer and in no other metric.
        """
        if audit.exact:
            self._answers.labels("exact").inc()
            return
        self._answers.labels("same" if audit.is_same else "changed").inc()
        self._tokens.labels("same").inc(audit.agreeing)
        self._tokens.labels("near_tie").inc(audit.near_ties)
        self._tokens.labels("changed").inc(audit.tokens - audit.agreeing_net)
        self._kl.observe(audit.kl)
        self._computed.inc(audit.computed_tokens)

    def drop(self, reason: AuditDrop) -> None:
        """Count an answer that is not audited, by reason."""
        self._dropped.labels(str(reason)).inc()
