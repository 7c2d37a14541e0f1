"""Requests, chunks and tokens of an engine by outcome, and the times of its requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric

from cachecraft_rag.observability.stats import Finish, RequestStats

REFUSED = "refused"
TOKENS = ("reused", "recomputed", "computed", "generated")
TTFT_BOUNDS = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOTAL_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class RequestCounts:
    """Requests, chunks, tokens and times of one engine, as Prometheus metrics in a separate registry.

    All tenants count together. Other parts of the engine add their metrics to the registry. Any thread may call any
    method, but no finaliser may: they take locks.
    """

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.registry = registry
        self._requests = Counter(
            "cachecraft_requests",
            "Requests, by how they ended",
            ["outcome"],
            registry=registry,
        )
        self._chunks = Counter(
            "cachecraft_chunks",
            "Chunks of prompts, by outcome and reason",
            ["outcome", "reason"],
            registry=registry,
        )
        self._tokens = Counter(
            "cachecraft_tokens",
            "Tokens of prompts and answers",
            ["kind"],
            registry=registry,
        )
        self._ttft = Histogram(
            "cachecraft_ttft_seconds",
            "Time to the first token",
            buckets=TTFT_BOUNDS,
            registry=registry,
        )
        self._total = Histogram(
            "cachecraft_request_seconds",
            "Time of whole requests",
            buckets=TOTAL_BOUNDS,
            registry=registry,
        )
        for outcome in (*get_args(Finish), REFUSED):  # a scraper sees the zeros too
            self._requests.labels(outcome)
        for kind in TOKENS:
            self._tokens.labels(kind)

    def add(self, stats: RequestStats) -> None:
        """Count a request that has ended: its outcome (`stats.finish`), its chunks, its tokens and its times.

        No tokens are counted of a request that failed before its first token, and no time to a first token without one.
        """
        self._requests.labels(str(stats.finish)).inc()
        for chunk in stats.chunks:
            self._chunks.labels(chunk.outcome, str(chunk.reason_code)).inc()
        self._total.observe(stats.total_s)
        if stats.ttft_s:
            self._ttft.observe(stats.ttft_s)
        elif stats.finish == "failed":  # it is unknown what was computed
            return
        for kind in TOKENS:
            self._tokens.labels(kind).inc(getattr(stats, f"tokens_{kind}"))

    def refuse(self) -> None:
        """Count a request that could not be made: no model ran."""
        self._requests.labels(REFUSED).inc()

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics, without the times at which they were created."""
        for family in self.registry.collect():
            family.samples = [
                sample for sample in family.samples if not sample.name.endswith("_created")
            ]
            yield family
