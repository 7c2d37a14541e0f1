"""Eviction rules: chunk-caches that leave the store whatever their score, for example because of their age.

A rule is a function of a row and the present time, both times in seconds since 1970::

    def unused_for_a_week(row: Listed, now: float) -> bool:
        return now - row.last_used > 7 * 86_400.0

    ChunkCacheStore.open("chunk-caches/", rules=[unused_for_a_week])

The store applies its rules to every row when it is opened, and then at most every `SECONDS_BETWEEN_RUNS`, in the
background, when it writes captures or uses; other writes wait for the end of the run. An error that a rule raises then
is logged, and the run evicts nothing; at the opening it is raised. A chunk-cache that a rule evicts leaves the disk and
this process's memory, and counts as `EvictionReason.RULE`; copies on a remote stay. A read-only store applies no rules.
A chunk-cache that was never used has `last_used == created`; a remote's copy has the time of its capture.

To make a rule a setting, add a field and its check to `StoreConfig`, after those that are saved with the store, the
rule to those of `ChunkCacheStore.__init__`, the name to `ENGINE_KEYS` and `_PANELS` in `cli/options.py`, and a row to
docs/guides/tuning.md.
"""

from __future__ import annotations

from typing import Protocol

from cachecraft_rag.store.catalog_records import Listed

SECONDS_BETWEEN_RUNS = 60.0  # a run reads every row of the catalog


class EvictionRule(Protocol):
    """Decision about one chunk-cache, by its age, its last use or anything else that its row says."""

    def __call__(self, row: Listed, now: float, /) -> bool:
        """Return True if this chunk-cache has to leave now."""
