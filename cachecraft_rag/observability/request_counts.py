"""Requests, chunks and tokens of an engine by outcome, and the times of its requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import prometheus_client
from prometheus_client import CollectorRegistry, Metric

from cachecraft_rag.observability.stats import Finish, RequestStats

REFUSED = "refused"
TOKENS = ("reused", "recomputed", "computed", "generated")
TTFT_BOUNDS = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOTAL_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class RequestCounts:
    """Requests, chunks, tokens and times of one engine, as Prometheus metrics in a registry of its own.

    Other parts of the engine add theirs to the registry.

    Any thread may call any method, but no finaliser: they take locks.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"namespace": "cachecraft", "registry": self.registry}
        self._requests = prometheus_client.Counter("requests", "Requests, by how they ended", ["outcome"], **own)
        self._chunks = prometheus_client.Counter(
            "chunks", "Chunks of prompts, by outcome and reason", ["outcome", "reason"], **own
        )
        self._tokens = prometheus_client.Counter("tokens", "Tokens of prompts and answers", ["kind"], **own)
        self._ttft = prometheus_client.Histogram("ttft_seconds", "Time to the first token", buckets=TTFT_BOUNDS, **own)
        self._total = prometheus_client.Histogram(
            "request_seconds", "Time of whole requests", buckets=TOTAL_BOUNDS, **own
        )
        for outcome in (*get_args(Finish), REFUSED):  # a scraper sees the zeros too
            self._requests.labels(outcome)
        for kind in TOKENS:
            self._tokens.labels(kind)

    def add(self, stats: RequestStats) -> None:
        """Count a request that has ended."""
        self._requests.labels(str(stats.finish)).inc()
        for chunk in stats.chunks:
            self._chunks.labels(chunk.outcome, str(chunk.reason_code)).inc()
        self._total.observe(stats.total_s)
        if stats.ttft_s:
            self._ttft.observe(stats.ttft_s)
        elif stats.finish == "failed":  # nothing is known of what was computed
            return
        for kind in TOKENS:
            self._tokens.labels(kind).inc(getattr(stats, f"tokens_{kind}"))

    def refuse(self) -> None:
        """Count a request that could not be made: no model ran."""
        self._requests.labels(REFUSED).inc()

    def collect(self) -> Iterator[Metric]:
        """The metrics now, without the time at which each was made."""
        for family in self.registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
