"""Metrics of this package at /metrics of a vLLM server.

Requests are counted in the API server, loads and captures in vLLM's processes. The stores of the scheduler and of the
first worker send their counts with vLLM's own statistics, after each step that changed them. Counts are running totals,
so a lost message does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.loggers import StatLoggerBase

from cachecraft_rag.engine.base import AnswerEngine
from cachecraft_rag.observability.metrics import EngineCollector
from cachecraft_rag.store import ChunkCacheStore, StoreStats
from cachecraft_rag.store.remote.breaker import State
from cachecraft_rag.vllm.messages import CORRECTIONS, REPORTS, Corrections, FillReport
from cachecraft_rag.vllm.plugin import CONNECTOR

# engine and sender → counts, see `counts_of`
Reported = Mapping[tuple[int, str], Mapping[str, object]]
TakeReport = Callable[[str, FillReport], object]
_BREAKERS: tuple[State, ...] = ("open", "probing", "closed")  # the worst one first
_NO_CORRECTIONS = Corrections(requests=0, queries=0, hits=0, idle_waiting=0)
_OWN_NAMES = {"scheduler", "worker", REPORTS, CORRECTIONS}  # of `StoreCounts.data`
_OF_REMOTE = ("opened", "queued_bytes", "lookups", "reads", "captures")


class PrefixCacheStats(Protocol):
    """`vllm.v1.metrics.stats.PrefixCacheStats`: number of look-ups in a step, their tokens, and the tokens found."""

    requests: int
    queries: int
    hits: int
    hits_by_source: dict[Any, int]


class SchedulerStats(Protocol):
    """`vllm.v1.metrics.stats.SchedulerStats`, vLLM's statistics of a step."""

    num_waiting_reqs: int
    num_skipped_waiting_reqs: int
    connector_prefix_cache_stats: PrefixCacheStats | None
    kv_connector_stats: dict[str, Any] | None


def counts_of(store: ChunkCacheStore) -> dict[str, object]:
    """Return counts of this process's store as plain numbers: `ChunkCacheStore.counts`, and "remote" if it has one.

    The former are the fields of `StoreStats` that need no I/O. "remote" has the fields opened, queued_bytes, lookups,
    reads and captures of `RemoteStats`, and under "breakers" the state of the circuit breaker with the number 1:
    `summed` then counts the stores in each state.
    """
    counts = store.counts()
    remote = store.remote_stats(ask=False)
    if remote is not None:
        counts["remote"] = {name: getattr(remote, name) for name in _OF_REMOTE} | {
            "breakers": {remote.breaker: 1}
        }
    return counts


@dataclass
class StoreCounts(KVConnectorStats):
    """Counts of the stores of one vLLM engine, and reports of filled requests.

    `data` has the keys "scheduler" and "worker" with `counts_of` the store of that process, `REPORTS` with the reports
    by name, and `CORRECTIONS`. Any of them may be missing.
    """

    def reset(self) -> None:
        """Replace `data` by an empty dict; the stores themselves continue to count."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Return the counts of both. Those of `other` win, which are newer totals; older reports are lost."""
        return StoreCounts(self.data | other.data)

    def reduce(self) -> dict[str, int | float]:
        """Return name → total over all stores for vLLM's log: chunk-caches loaded, and captures, with dropped ones."""
        senders = self.data.keys() - {REPORTS, CORRECTIONS}
        total = summed(self.data[sender] for sender in senders)
        return {
            "chunk-caches loaded so far": sum(total.get("loads", {}).values()),
            "captures so far": sum(total.get("captures", {}).values()),
        }

    def is_empty(self) -> bool:
        """Return True if `data` is empty: no counts, no reports, no corrections."""
        return not self.data


class NoFurtherMetrics(KVConnectorPromMetrics):
    """Metrics of the connector for `MultiConnector`, which demands some: `ServerCollector` has them all."""

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Do nothing."""


class ServerStatistics(StatLoggerBase):
    """First logger of vLLM's statistics in the API server: keeps our counts, and corrects vLLM's numbers.

    The loggers after it, those of /metrics and of the log, get the corrected numbers: only reused tokens are external
    hits, and work in idle time does not count as waiting.

    Attributes:
        latest: (number of vLLM's engine, "scheduler" or "worker") → counts of the store there.
        on_report: takes the name and the report of each filled request.
    """

    def __init__(
        self, vllm_config: object = None, engine_index: int = 0, *, on_report: TakeReport
    ) -> None:
        self.latest: dict[tuple[int, str], Mapping[str, object]] = {}
        self.on_report = on_report
        self._corrections: dict[int, Corrections] = {}
        self._source: object = None  # vLLM's name for external hits

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: object,
        mm_cache_stats: object = None,
        engine_idx: int = 0,
    ) -> None:
        """Take our counts out of the statistics of a step, correct vLLM's, and call `on_report` for each report.

        The counts replace earlier ones of the same store in `latest`; vLLM's log gets those of this engine's stores.

        Args:
            scheduler_stats: statistics of the step; they are changed. Without them nothing happens.
            iteration_stats, mm_cache_stats: not used.
            engine_idx: number of vLLM's engine.
        """
        if scheduler_stats is None:
            return
        stats = scheduler_stats.kv_connector_stats or {}
        is_beside = not stats.keys() <= _OWN_NAMES  # `MultiConnector` has them by connector
        data = stats.get(CONNECTOR, {}) if is_beside else stats
        for sender in data.keys() - {REPORTS, CORRECTIONS}:
            self.latest[engine_idx, sender] = data[sender]
        self._correct(scheduler_stats, data.get(CORRECTIONS), engine_idx)
        if data:
            totals = {
                who: counts for (idx, who), counts in self.latest.items() if idx == engine_idx
            }
            ours = data | totals
            scheduler_stats.kv_connector_stats = stats | {CONNECTOR: ours} if is_beside else ours
        for name, report in data.get(REPORTS, {}).items():
            self.on_report(name, report)

    def _correct(self, stats: SchedulerStats, new: Corrections | None, engine_idx: int) -> None:
        before = self._corrections.get(engine_idx, _NO_CORRECTIONS)
        now = before if new is None else new
        self._corrections[engine_idx] = now
        self._correct_hits(stats.connector_prefix_cache_stats, before, now)
        # vLLM has asked about most of them, and put them off; the others wait for their turn
        deferred = min(now["idle_waiting"], stats.num_skipped_waiting_reqs)
        queued = min(now["idle_waiting"] - deferred, stats.num_waiting_reqs)
        stats.num_skipped_waiting_reqs -= deferred
        stats.num_waiting_reqs -= queued

    def _correct_hits(
        self, look_ups: PrefixCacheStats | None, before: Corrections, now: Corrections
    ) -> None:
        """Take back the look-ups of fillings that have begun, and add those of fillings that have ended."""
        if look_ups is None:
            return
        look_ups.requests = max(0, look_ups.requests + now["requests"] - before["requests"])
        look_ups.queries = max(0, look_ups.queries + now["queries"] - before["queries"])
        look_ups.hits = max(0, now["hits"] - before["hits"])
        self._source = next(iter(look_ups.hits_by_source), self._source)
        has_hits = look_ups.hits > 0 and self._source is not None
        look_ups.hits_by_source = {self._source: look_ups.hits} if has_hits else {}

    def log_engine_initialized(self) -> None:
        """Do nothing."""

    def record_admission_rejection(self, reason: str) -> None:
        """Do nothing."""


def reported_counts(engine_client: Any, on_report: TakeReport) -> Reported:
    """Return the counts that the processes of an `AsyncLLM` send, and correct vLLM's own statistics from now on.

    The mapping is `ServerStatistics.latest`, filled as counts arrive. If vLLM keeps no statistics, it stays empty, and
    `on_report`, which takes the name and the report of each filled request, is never called.
    """
    statistics = ServerStatistics(on_report=on_report)
    manager = engine_client.logger_manager
    if manager is not None:
        manager.stat_loggers.insert(0, statistics)
    return statistics.latest


class ServerCollector(EngineCollector):
    """`EngineCollector` of an API server, with the counts of its vLLM's stores."""

    def __init__(self, engine: AnswerEngine, reported: Reported) -> None:
        super().__init__(engine)
        self._reported = reported

    def _stats(self, store: ChunkCacheStore) -> StoreStats:
        own = super()._stats(store)
        total = summed([counts_of(store), *self._reported.values()])
        remote = total.pop("remote", None)
        if own.remote is not None and remote is not None:
            breakers = remote.pop("breakers")
            breaker = next(state for state in _BREAKERS if breakers.get(state))
            own = replace(own, remote=replace(own.remote, breaker=breaker, **remote))
        return replace(own, **total)


def summed(counts: Iterable[Mapping[str, object]]) -> dict[str, Any]:
    """Return the sums of the counts of several stores by name, nested ones too, as a new dict; {} without a store.

    A name that only some stores have counts as 0, or as an empty mapping, for the others.
    """
    total: dict[str, Any] = {}
    for store_counts in counts:
        for name, value in store_counts.items():
            if isinstance(value, Mapping):
                total[name] = summed([total.get(name, {}), value])
            else:
                total[name] = total.get(name, 0) + value
    return total
