"""Metrics of this package at /metrics of a vLLM server.

Requests are counted in the API server, loads and captures in vLLM's processes. The stores of the scheduler and of the
first worker send their counts with vLLM's own statistics, after each step that changed them. Counts are running totals,
so a lost message does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from cachecraft_rag.engine.base import AnswerEngine
from cachecraft_rag.observability.metrics import EngineCollector
from cachecraft_rag.store import ChunkCacheStore, StoreStats
from cachecraft_rag.store.remote.breaker import State
from cachecraft_rag.vllm.messages import REPORTS, FillReport

# engine and sender → counts, see `counts_of`
Reported = Mapping[tuple[int, str], Mapping[str, object]]
_BREAKERS: tuple[State, ...] = ("open", "probing", "closed")  # the worst one first
_OF_REMOTE = ("opened", "queued_bytes", "lookups", "reads", "captures")


def counts_of(store: ChunkCacheStore) -> dict[str, object]:
    """Return counts of this process's store as plain numbers: `ChunkCacheStore.counts`, and "remote" if it has one.

    "remote" has the fields opened, queued_bytes, lookups, reads and captures of `RemoteStats`, and under "breakers" the
    state of the circuit breaker with the number 1: `summed` then counts the stores in each state. Neither the catalog
    nor the remote is asked. Raises nothing, also for a closed store.
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

    `data` has the keys "scheduler" and "worker" with `counts_of` the store of that process, and `REPORTS` with the
    reports by name. Any of them may be missing.
    """

    def reset(self) -> None:
        """Replace `data` by an empty dict; the stores themselves continue to count."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Return a new object with the counts of both; neither of them changes.

        For a store that both have, the counts of `other` are taken, which are newer totals. If both have reports, those
        of `other` are taken, and the others are lost.
        """
        return StoreCounts(self.data | other.data)

    def reduce(self) -> dict[str, int | float]:
        """Return two totals over all stores for vLLM's log: "chunk-caches loaded so far" and "captures so far".

        They are numbers of chunk-caches. Captures are counted with those that were dropped. Both totals are 0 without
        counts.
        """
        total = summed(counts for sender, counts in self.data.items() if sender != REPORTS)
        return {
            "chunk-caches loaded so far": sum(total.get("loads", {}).values()),
            "captures so far": sum(total.get("captures", {}).values()),
        }

    def is_empty(self) -> bool:
        """Return True if there are neither counts nor reports."""
        return not self.data


class ReportedCounts(KVConnectorPromMetrics):
    """The newest totals of each store, in the API server.

    Attributes:
        latest: (number of vLLM's engine, sender) → counts.
        on_report: called with the name and the report of each filled request.
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.latest: dict[tuple[int, str], Mapping[str, object]] = {}
        self.on_report: Callable[[str, FillReport], object] = lambda _name, _report: None

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Keep the counts in the statistics of a step, and call `on_report` for each report in them.

        The counts replace earlier ones of the same store in `latest`. Errors of `on_report` pass, after all counts are
        kept.

        Args:
            transfer_stats_data: `StoreCounts.data`.
            engine_idx: number of vLLM's engine.
        """
        for who, counts in transfer_stats_data.items():
            if who != REPORTS:
                self.latest[engine_idx, who] = counts
        for name, report in transfer_stats_data.get(REPORTS, {}).items():
            self.on_report(name, report)


def reported_counts(engine_client: Any, on_report: Callable[[str, FillReport], object]) -> Reported:
    """Return the counts that vLLM's processes send: (number of vLLM's engine, sender) → counts.

    The mapping is `ReportedCounts.latest`, not a copy: it is filled as they arrive. Without a `ReportedCounts`, such as
    if vLLM keeps no statistics, the result is a new mapping that stays empty, and `on_report` is never called.

    Args:
        engine_client: vLLM's `AsyncLLM`.
        on_report: called with the name and the report of each filled request; it replaces an earlier function.
    """
    manager = engine_client.logger_manager
    for logger in () if manager is None else manager.stat_loggers:
        metrics = getattr(getattr(logger, "kv_connector_prom", None), "prom_metrics", None)
        if isinstance(metrics, ReportedCounts):
            metrics.on_report = on_report
            return metrics.latest
    return {}


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

    A name that only some stores have counts as 0, or as an empty mapping, for the others. Raises TypeError for a value
    that is neither a number nor a mapping, and TypeError or AttributeError if a name has a number in one store and a
    mapping in another.
    """
    total: dict[str, Any] = {}
    for store_counts in counts:
        for name, value in store_counts.items():
            if isinstance(value, Mapping):
                total[name] = summed([total.get(name, {}), value])
            else:
                total[name] = total.get(name, 0) + value
    return total
