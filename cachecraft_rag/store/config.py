"""Settings of a store, and its statistics."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Self

from cachecraft_rag.checks import (
    MOST_SECONDS,
    check_kind,
    check_number,
    check_text,
    check_whole,
    refuses_other_names,
)
from cachecraft_rag.store.codecs import codec_named
from cachecraft_rag.store.eviction import policy_named
from cachecraft_rag.store.remote import RemoteConfig, RemoteStats

DEFAULT_LIMITS = MappingProxyType(
    {"disk_bytes": 20 << 30, "variants_per_chunk": 64, "max_variants": 100_000}
)
CACHE_FOLDER = "caches"  # in the folder that a user names as the store, next to the index
_MOST_READERS = 1024


@refuses_other_names(what="setting of the store's tuning")
@dataclass(frozen=True, slots=True)
class StoreTuning:
    """Tuned settings of reading and writing, for this process. Change them only after a measurement.

    queue_bytes       most bytes of captures and copies from the remote that wait to be written; others are dropped
    readers           number of threads that read files, from 1 to 1024, shared by all requests
    read_bytes_per_s  limit on the rate of reading files, for a disk that other programs need too
    busy_timeout_s    longest wait for another process's transaction on the catalog, in seconds
    """

    queue_bytes: int = 1 << 30
    readers: int = 4
    read_bytes_per_s: float = math.inf
    busy_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        """Check every field."""
        check_whole("queue_bytes", self.queue_bytes, least=1)
        check_whole("readers", self.readers, least=1, most=_MOST_READERS)
        check_number("read_bytes_per_s", self.read_bytes_per_s, least=1)
        check_number("busy_timeout_s", self.busy_timeout_s, most=MOST_SECONDS)


_IN_TUNING = MappingProxyType(
    {setting.name: f"tuning=StoreTuning({setting.name}=…)" for setting in fields(StoreTuning)}
)


@refuses_other_names(what="store setting", hints=_IN_TUNING)
@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Settings of a store.

    The first four are saved in the store's folder. None keeps the saved value (at first `DEFAULT_LIMITS` and "saving"),
    so a command that only reads a store changes nothing. The other settings apply to this process.

    disk_bytes          limit of all files together, kept with the store
    max_variants        most variants of all chunks together, kept with the store; N×M of Cache-Craft §3.3
    variants_per_chunk  most variants of one chunk, kept with the store. It limits the time of planning, which compares
                        all variants of a chunk (M of the paper limits no single chunk). After it was lowered, a chunk's
                        variants are reduced when it gets its next one
    eviction            eviction policy: saving, or f_r as published. A change computes all scores again, so all
                        processes on a folder should use the same policy
    host_bytes          bytes of chunk-caches in main memory; 0 switches the host tier off
    device, device_bytes  torch's name of the model's device, and bytes of chunk-caches on it; None or 0: none there
    codec               codec of new captures: raw (exact), int8 or entropy (smaller). Stored chunk-caches keep theirs,
                        and the instruction is always raw, because all chunks are computed after it. Memory keeps a
                        capture as it was computed, so a lossy codec takes effect once it has left memory
    remote              remote that is shared with other engines: a URL or a `RemoteConfig`
    tuning              how files are read and written: a `StoreTuning`
    """

    disk_bytes: int | None = None
    variants_per_chunk: int | None = None
    max_variants: int | None = None
    eviction: str | None = None
    host_bytes: int = 2 << 30
    device: str | None = None
    device_bytes: int = 2 << 30
    codec: str = "raw"
    remote: RemoteConfig | str | None = None
    tuning: StoreTuning = field(default_factory=StoreTuning)

    def __post_init__(self) -> None:
        """Check the ranges, the codec and the remote's URL; a URL becomes a `RemoteConfig`."""
        for name in DEFAULT_LIMITS:
            check_whole(name, getattr(self, name), least=1, optional=True)
        for name in ("host_bytes", "device_bytes"):
            check_whole(name, getattr(self, name))
        check_text("device", self.device, optional=True, empty=False)
        check_text("codec", self.codec)
        check_text("eviction", self.eviction, optional=True)
        if self.eviction is not None:
            policy_named(self.eviction)
        check_kind(
            "tuning",
            self.tuning,
            StoreTuning,
            advice="write StoreTuning(readers=…), or use with_tuning",
        )
        check_kind(
            "remote", self.remote, (RemoteConfig, str), optional=True, advice="write its URL"
        )
        if isinstance(self.remote, str):  # a RemoteConfig hides its password when it is printed
            object.__setattr__(self, "remote", RemoteConfig(self.remote))
        codec_named(self.codec)

    def with_tuning(self, **changes: Any) -> Self:
        """Return a copy with these fields of its tuning changed.

        >>> StoreConfig().with_tuning(readers=8).tuning.readers
        8
        """
        return replace(self, tuning=replace(self.tuning, **changes))

    @property
    def given_limits(self) -> dict[str, int]:
        """Return name → limit for those of `DEFAULT_LIMITS` that are not None here; the folder stores these."""
        given = {name: getattr(self, name) for name in DEFAULT_LIMITS}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True)
class StoreStats:
    """State of the whole store, including other processes, and counts of this process. Counts of 0 may be left out.

    variants    number of chunk-caches in the catalog
    chunks      number of different chunks among them; a chunk of two namespaces or two models counts twice
    disk_bytes  bytes of files with a row, and of files that are being written or deleted
    disk_budget, host_budget, device_budget  limits in bytes; without a device its limit is 0
    host_bytes, device_bytes  bytes of the chunk-caches that this process holds in main memory and on the device
    queued_bytes  bytes of captures, and of copies from the remote, that wait to be written
    lookups     outcome → number of chunks: "found", "not_stored", or "refused" (the row did not pass the checks)
    loads       tier → number of chunk-caches loaded: "device", "host", "disk", "remote"
    load_failures  tier → `LoadFailure` → number of chunk-caches
    captures    outcome → number of captures: "stored", or a `CaptureDrop`; for the remote see `remote`
    evictions   tier → `EvictionReason` → number of chunk-caches; leaving memory removes nothing from disk
    remote      sizes on the remote, and counts of this process there; None without a remote
    """

    variants: int
    chunks: int
    disk_bytes: int
    disk_budget: int
    host_bytes: int
    host_budget: int
    device_bytes: int
    device_budget: int
    queued_bytes: int
    lookups: dict[str, int]
    loads: dict[str, int]
    captures: dict[str, int]
    load_failures: dict[str, dict[str, int]] = field(default_factory=dict)
    evictions: dict[str, dict[str, int]] = field(default_factory=dict)
    remote: RemoteStats | None = None
