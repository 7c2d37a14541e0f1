"""Prometheus metrics of an engine and its store, read from their own counters whenever they are scraped.

    with serve_metrics(rag.engine, 9464):          # http://127.0.0.1:9464/metrics
        ...
    registry.register(EngineCollector(rag.engine))  # or in the registry of your application

Needs the extra `metrics`. Names and labels are listed in docs/operations.md.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from threading import Thread
from typing import Any, get_args
from urllib.parse import urlsplit

from cachecraft_rag.checks import check_text, check_whole
from cachecraft_rag.engine.base import AnswerEngine
from cachecraft_rag.engine.stats import Finish
from cachecraft_rag.engine.tally import REFUSED, Histogram
from cachecraft_rag.errors import ConfigError, StoreError
from cachecraft_rag.store import StoreStats
from cachecraft_rag.store.closeable import Closeable
from cachecraft_rag.store.remote import RemoteStats
from cachecraft_rag.store.remote.breaker import State
from cachecraft_rag.types import CaptureDrop, EvictionReason

try:
    import prometheus_client
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
        StateSetMetricFamily,
    )
    from prometheus_client.parser import text_string_to_metric_families
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise ConfigError(
        f"Metrics need the package {error.name!r}; type: pip install 'cachecraft-rag[metrics]'"
    ) from error

MOST_PORT = 65535
READ_TIMEOUT_S = 10.0


class EngineCollector(Collector):
    """What an engine and its store have counted, as Prometheus metrics.

    A scrape reads counters and one row of the catalog; a remote is not asked. Two engines of one process need a
    registry each.
    """

    def __init__(self, engine: AnswerEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """The metrics now."""
        yield from self._of_requests()
        if (queue := self._engine.queue_counts()) is not None:
            yield GaugeMetricFamily("cachecraft_waiting_requests", "Requests that wait for a turn", value=queue.waiting)
            turned = {"full": queue.rejected, "timeout": queue.timed_out}
            yield _counter("turned_away", "Requests that got no turn, by reason", "reason", turned)
        if (decoding := self._engine.decode_counts()) is not None:
            yield _histogram("decode_rows", "Answers that a decode step computed together", decoding.rows)
        try:
            stats = self._stats()
        except StoreError:  # closed, or its catalog cannot be read: what was counted of requests is told all the same
            stats = None
        readable = "1 while the store's catalog can be read"
        yield GaugeMetricFamily("cachecraft_store_readable", readable, value=float(stats is not None))
        if stats is not None:
            yield from _of_store(stats)

    def describe(self) -> Iterable[Metric]:
        """The families without samples, so that registering asks for no numbers."""
        return [GaugeMetricFamily("cachecraft_store_readable", "1 while the store's catalog can be read")]

    def _stats(self) -> StoreStats:
        """Of the store. Raises StoreError."""
        return self._engine.store.stats(ask_remote=False)

    def _of_requests(self) -> Iterator[Metric]:
        counts = self._engine.tally.counts()
        ends = dict.fromkeys((*get_args(Finish), REFUSED), 0)
        yield _counter("requests", "Requests, by how they ended", "outcome", ends | dict(counts.requests))
        chunks = CounterMetricFamily(
            "cachecraft_chunks", "Chunks of prompts, by outcome and reason", labels=("outcome", "reason")
        )
        for labels, value in counts.chunks.items():
            chunks.add_metric(labels, value)
        yield chunks
        kinds = dict.fromkeys(("reused", "recomputed", "computed", "generated"), 0)
        yield _counter("tokens", "Tokens of prompts and answers", "kind", kinds | dict(counts.tokens))
        yield _histogram("ttft_seconds", "Time to the first token", counts.ttft_s)
        yield _histogram("request_seconds", "Time of whole requests", counts.total_s)


def _of_store(stats: StoreStats) -> Iterator[Metric]:
    yield GaugeMetricFamily("cachecraft_variants", "Stored chunk-caches, of all processes", value=stats.variants)
    yield GaugeMetricFamily("cachecraft_stored_chunks", "Chunks that have one or more", value=stats.chunks)
    tiers = ("disk", "host", "device")
    sizes = {tier: getattr(stats, f"{tier}_bytes") for tier in tiers}
    yield _gauge("bytes", "Bytes held, by tier", "tier", sizes)
    yield _gauge("budget_bytes", "Byte budgets, by tier", "tier", {t: getattr(stats, f"{t}_budget") for t in tiers})
    yield GaugeMetricFamily("cachecraft_queued_bytes", "Captures waiting to be written", value=stats.queued_bytes)
    yield _counter("lookups", "Chunks looked up, by outcome", "outcome", stats.lookups)
    yield _counter("loads", "Chunk-caches loaded, by tier", "tier", stats.loads)
    yield _by_tier("load_failures", "Chunk-caches that could not be loaded", stats.load_failures)
    captures = CounterMetricFamily("cachecraft_captures", "Captures, by outcome", labels=("outcome", "reason"))
    captures.add_metric(("stored", ""), stats.captures.get("stored", 0))
    for reason in CaptureDrop:
        captures.add_metric(("dropped", reason), stats.captures.get(reason, 0))
    yield captures
    disk = {str(reason): 0 for reason in EvictionReason} | stats.evictions.get("disk", {})
    yield _by_tier("evictions", "Chunk-caches that left, by tier and reason", stats.evictions | {"disk": disk})
    if stats.remote is not None:
        yield from _of_remote(stats.remote)


def _of_remote(remote: RemoteStats) -> Iterator[Metric]:
    states = {str(state): state == remote.breaker for state in get_args(State)}
    yield StateSetMetricFamily(
        "cachecraft_remote_breaker", "closed: in use; open: left alone after failures; probing: tried again", states
    )
    yield CounterMetricFamily("cachecraft_remote_breaker_opened", "How often it has opened", value=remote.opened)
    yield GaugeMetricFamily("cachecraft_remote_queued_bytes", "Captures waiting to be sent", value=remote.queued_bytes)
    yield GaugeMetricFamily("cachecraft_remote_budget_bytes", "Byte budget there", value=remote.budget)
    yield _counter("remote_lookups", "Look-ups, by outcome", "outcome", _as_codes(remote.lookups))
    yield _counter("remote_reads", "Payloads read, by outcome", "outcome", _as_codes(remote.reads))
    yield _counter("remote_captures", "Captures sent, by outcome", "outcome", _as_codes(remote.captures))


def _as_codes(counts: Mapping[str, int]) -> dict[str, int]:
    return {outcome.replace(" ", "_"): count for outcome, count in counts.items()}


def _counter(name: str, text: str, label: str, values: Mapping[str, float]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"cachecraft_{name}", text, labels=(label,))
    for value, count in values.items():
        family.add_metric((value,), count)
    return family


def _gauge(name: str, text: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"cachecraft_{name}", text, labels=(label,))
    for value, count in values.items():
        family.add_metric((value,), count)
    return family


def _by_tier(name: str, text: str, counts: Mapping[str, Mapping[str, int]]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"cachecraft_{name}", text, labels=("tier", "reason"))
    for tier, reasons in counts.items():
        for reason, count in reasons.items():
            family.add_metric((tier, reason), count)
    return family


def _histogram(name: str, text: str, told: Histogram) -> HistogramMetricFamily:
    ends = (*map(str, told.bounds), "+Inf")
    buckets = list(zip(ends, map(float, told.cumulative), strict=True))
    return HistogramMetricFamily(f"cachecraft_{name}", text, buckets=buckets, sum_value=told.total)


def read_counts(url: str) -> tuple[dict[tuple[str, str], int], dict[str, int]]:
    """Chunks by outcome and reason, and captures dropped by reason, of an engine whose metrics are served at `url`.

    Raises ConfigError when nothing of that kind comes from there.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError(f"{url} is no address of metrics; write http://127.0.0.1:PORT/metrics")
    try:
        with urllib.request.urlopen(url, timeout=READ_TIMEOUT_S) as answer:
            families = {one.name: one for one in text_string_to_metric_families(answer.read().decode())}
    except (OSError, ValueError) as error:
        raise ConfigError(f"metrics cannot be read from {url}: {error}") from error
    if "cachecraft_chunks" not in families:
        raise ConfigError(f"{url} has no metrics of cachecraft; `cachecraft chat --metrics-port PORT` serves them")
    chunks = {
        (one.labels["outcome"], one.labels["reason"]): int(one.value) for one in families["cachecraft_chunks"].samples
    }
    samples = families["cachecraft_captures"].samples if "cachecraft_captures" in families else []
    dropped = {
        one.labels["reason"]: int(one.value) for one in samples if one.labels["outcome"] == "dropped" and one.value
    }
    return chunks, dropped


class MetricsServer(Closeable):
    """A running HTTP server of metrics; `close` ends it, and so does `with`.

    Attributes:
        port: where it listens.
    """

    def __init__(self, server: Any, thread: Thread) -> None:
        self._server, self._thread = server, thread
        self.port: int = server.server_port

    def close(self) -> None:
        """Stop listening. May be called twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_metrics(engine: AnswerEngine, port: int, *, address: str = "127.0.0.1") -> MetricsServer:
    """Serve the metrics of an engine over HTTP, at `/metrics`, in a thread of its own.

    Args:
        port: 0 chooses a free one.
        address: of the network interface; the default is reached from this machine alone.

    Raises:
        ConfigError: the port is taken, or the address is none of this machine.
    """
    check_whole("port", port, most=MOST_PORT)
    check_text("address", address, empty=False)
    registry = prometheus_client.CollectorRegistry()
    registry.register(EngineCollector(engine))
    try:
        server, thread = prometheus_client.start_http_server(port, addr=address, registry=registry)
    except OSError as error:
        raise ConfigError(f"metrics cannot be served at {address}:{port} ({error}); choose another port") from error
    return MetricsServer(server, thread)
