"""Prometheus metrics of an engine and its store, read from their own counters whenever they are scraped.

    with serve_metrics(rag.engine, 9464):          # http://127.0.0.1:9464/metrics
        ...
    registry.register(EngineCollector(rag.engine))  # or in the registry of your application

Names and labels are listed in docs/guides/production.md. A new metric's name begins with `cachecraft_` and uses the
words of the statistics, with `seconds` and `bytes` as units and `share` for 0 to 1. Metrics of requests are counted in
`RequestCounts`, which vLLM's servers use too; metrics of the store are made by `_of_store` here and by `counts_of` in
`vllm.metrics`; a part of an engine counts in `request_counts.registry`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from threading import Thread
from typing import Protocol, get_args
from wsgiref.simple_server import WSGIServer

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cachecraft_rag.checks import check_text, check_whole
from cachecraft_rag.errors import ConfigError, StoreError
from cachecraft_rag.observability.request_counts import RequestCounts
from cachecraft_rag.store import ChunkCacheStore, StoreStats
from cachecraft_rag.store.closeable import Closeable
from cachecraft_rag.store.processes import HomeProcess
from cachecraft_rag.store.remote import RemoteStats
from cachecraft_rag.store.remote.breaker import State
from cachecraft_rag.types.store_reasons import CaptureDrop, EvictionReason

MOST_PORT = 65535
_READABLE = "1 while the store's catalog can be read"


class Measured(Protocol):
    """An engine, as far as its metrics need it; every `AnswerEngine` fits."""

    @property
    def request_counts(self) -> RequestCounts:
        """Totals over all requests since the engine was opened."""

    @property
    def store(self) -> object:
        """The store of chunk-caches; measured here if it is a `ChunkCacheStore`."""


class EngineCollector(Collector):
    """Counts of an engine and its store as Prometheus metrics.

    A scrape reads counters and one row of the catalog; a remote is not asked. Two engines of one process need separate
    registries.
    """

    def __init__(self, engine: Measured) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics of the requests, and those of the store if it is a `ChunkCacheStore`.

        If the store is closed or cannot be read, `cachecraft_store_readable` is 0, and its other metrics are left out.
        """
        yield from self._engine.request_counts.collect()
        store = self._engine.store
        if not isinstance(store, ChunkCacheStore):  # a server's, which serves its metrics itself
            return

        try:
            stats = self._stats(store)
        except StoreError:  # closed, or its catalog cannot be read: requests are counted anyway
            stats = None
        yield _gauge("store_readable", _READABLE, float(stats is not None))
        if stats is not None:
            yield from _of_store(stats)

    def describe(self) -> Iterable[Metric]:
        """Return a list with one metric that has no samples, so that registering the collector reads no numbers."""
        return [GaugeMetricFamily("cachecraft_store_readable", _READABLE)]

    def _stats(self, store: ChunkCacheStore) -> StoreStats:
        """Return statistics of the store."""
        return store.stats(ask_remote=False)


def _of_store(stats: StoreStats) -> Iterator[Metric]:
    yield _gauge("variants", "Stored chunk-caches, of all processes", stats.variants)
    yield _gauge("stored_chunks", "Chunks that have at least one chunk-cache", stats.chunks)
    sizes = (("bytes", "Bytes held", "bytes"), ("budget_bytes", "Byte budgets", "budget"))
    for name, text, ending in sizes:
        family = GaugeMetricFamily(f"cachecraft_{name}", f"{text}, by tier", labels=["tier"])
        for tier in ("disk", "host", "device"):
            family.add_metric([tier], getattr(stats, f"{tier}_{ending}"))
        yield family
    yield _gauge("queued_bytes", "Captures waiting to be written", stats.queued_bytes)
    yield _counter("lookups", "Chunks looked up, by outcome", ["outcome"], stats.lookups)
    yield _counter("loads", "Chunk-caches loaded, by tier", ["tier"], stats.loads)

    by_tier = ["tier", "reason"]
    yield _counter(
        "load_failures",
        "Chunk-caches that could not be loaded",
        by_tier,
        _pairs(stats.load_failures),
    )

    captures = {("stored", ""): stats.captures.get("stored", 0)}
    captures |= {("dropped", str(reason)): stats.captures.get(reason, 0) for reason in CaptureDrop}
    yield _counter("captures", "Captures, by outcome", ["outcome", "reason"], captures)

    evictions = {("disk", str(reason)): 0 for reason in EvictionReason} | _pairs(stats.evictions)
    yield _counter("evictions", "Chunk-caches that left, by tier and reason", by_tier, evictions)
    if stats.remote is not None:
        yield from _of_remote(stats.remote)


def _of_remote(remote: RemoteStats) -> Iterator[Metric]:
    text = "1 at its state. closed: in use; open: left alone after failures; probing: tried again"
    breaker = GaugeMetricFamily("cachecraft_remote_breaker", text, labels=["state"])
    for state in get_args(State):
        breaker.add_metric([state], float(state == remote.breaker))
    yield breaker
    yield CounterMetricFamily(
        "cachecraft_remote_breaker_opened", "Times that it opened", value=remote.opened
    )

    yield _gauge("remote_queued_bytes", "Captures waiting to be sent", remote.queued_bytes)
    outcomes = (
        ("lookups", "Look-ups, by outcome", remote.lookups),
        ("reads", "Payloads read, by outcome", remote.reads),
        ("captures", "Captures sent, by outcome", remote.captures),
    )
    for name, text, counts in outcomes:
        codes = {outcome.replace(" ", "_"): count for outcome, count in counts.items()}
        yield _counter(f"remote_{name}", text, ["outcome"], codes)


def _pairs(counts: Mapping[str, Mapping[str, int]]) -> dict[tuple[str, str], int]:
    return {
        (tier, reason): count
        for tier, reasons in counts.items()
        for reason, count in reasons.items()
    }


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"cachecraft_{name}", text, value=value)


def _counter(
    name: str,
    text: str,
    labels: Sequence[str],
    values: Mapping[str, int] | Mapping[tuple[str, str], int],
) -> CounterMetricFamily:
    family = CounterMetricFamily(f"cachecraft_{name}", text, labels=labels)
    for key, count in values.items():
        family.add_metric([key] if isinstance(key, str) else key, count)
    return family


class MetricsServer(Closeable):
    """A running HTTP server of metrics; `close` ends it, and so does `with`.

    Attributes:
        port: port of the server.
    """

    def __init__(self, server: WSGIServer, thread: Thread) -> None:
        self._server = server
        self._thread = thread
        self._home = HomeProcess("metrics server")
        self.port = server.server_port

    def close(self) -> None:
        """Stop listening, and wait until the server's thread has ended, which takes up to half a second.

        In a fork it only closes the fork's copy of the socket.
        """
        if not self._home.here:  # the thread does not run here
            self._server.socket.close()
            return
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_metrics(engine: Measured, port: int, *, address: str = "127.0.0.1") -> MetricsServer:
    """Serve the metrics of an engine over HTTP, at `/metrics`, in a separate daemon thread.

    Port 0 chooses a free one, see `MetricsServer.port`; only this machine reaches the default `address`. The engine may
    be closed meanwhile. ConfigError if this machine refuses port or address.
    """
    check_whole("port", port, most=MOST_PORT)
    check_text("address", address, empty=False)
    registry = prometheus_client.CollectorRegistry()
    registry.register(EngineCollector(engine))
    try:
        server, thread = prometheus_client.start_http_server(port, addr=address, registry=registry)
    except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host
        raise ConfigError(
            f"metrics cannot be served at {address}:{port} ({error}); choose another port"
        ) from error
    return MetricsServer(server, thread)
