"""Settings of a store, and its statistics."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import MappingProxyType

from cachecraft_rag.checks import MOST_SECONDS, check_kind, check_number, check_text, check_whole
from cachecraft_rag.store.codecs import codec_named
from cachecraft_rag.store.eviction import policy_named
from cachecraft_rag.store.remote import RemoteConfig, RemoteStats

DEFAULT_LIMITS = MappingProxyType({"disk_bytes": 20 << 30, "variants_per_chunk": 64, "max_variants": 100_000})
CACHE_FOLDER = "caches"  # below the folder that a user names as the store, beside the index
_MOST_READERS = 1024


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Settings of a store.

    The first four are the folder's. None keeps what was set last, or else `DEFAULT_LIMITS` and "saving", so a command
    that only looks at a store does not change it. The others belong to the process.

    disk_bytes          limit of all files together, kept with the store
    max_variants        most variants in all, kept with the store; N×M of Cache-Craft §3.3, of one popular chunk or many
    variants_per_chunk  most variants of one chunk, kept with the store. It bounds planning, which compares all variants
                        of a chunk (M bounds no single chunk, as in the paper); after it was lowered, a chunk follows
                        when it gets its next variant
    eviction            what leaves first: saving, or f_r as published; scores are
                        computed again when it changes, so all processes on a folder should have the same
    host_bytes          memory for chunk-caches; 0 switches the host tier off
    device, device_bytes  where the model runs, as torch calls it, and tensors kept there; None: it runs on the host
    queue_bytes         captures waiting to be written; a capture that does not fit is dropped
    readers             threads that read files, shared by all requests
    read_bytes_per_s    limit on reading files, for a disk that others need too
    codec               how captures are written: raw (exact), int8 or entropy (smaller); what is stored already keeps
                        its own, and the instruction is always raw, because every chunk is computed after it. Memory
                        keeps a capture as it was computed: a lossy codec shows once it has left memory
    busy_timeout_s      how long a background write waits for another process's transaction
    remote              what is shared with other engines, and where: a URL or a whole `RemoteConfig`
    """

    disk_bytes: int | None = None
    variants_per_chunk: int | None = None
    max_variants: int | None = None
    eviction: str | None = None
    host_bytes: int = 2 << 30
    device: str | None = None
    device_bytes: int = 2 << 30
    queue_bytes: int = 1 << 30
    readers: int = 4
    read_bytes_per_s: float = math.inf
    codec: str = "raw"
    busy_timeout_s: float = 5.0
    remote: RemoteConfig | str | None = None

    def __post_init__(self) -> None:
        """Check the ranges, the codec and the remote's URL; raises ConfigError."""
        for name in DEFAULT_LIMITS:
            check_whole(name, getattr(self, name), least=1, optional=True)
        check_whole("queue_bytes", self.queue_bytes, least=1)
        for name in ("host_bytes", "device_bytes"):
            check_whole(name, getattr(self, name))
        check_text("device", self.device, optional=True, empty=False)
        check_whole("readers", self.readers, least=1, most=_MOST_READERS)
        check_number("read_bytes_per_s", self.read_bytes_per_s, least=1)
        check_text("codec", self.codec)
        check_text("eviction", self.eviction, optional=True)
        if self.eviction is not None:
            policy_named(self.eviction)
        check_number("busy_timeout_s", self.busy_timeout_s, most=MOST_SECONDS)
        check_kind("remote", self.remote, (RemoteConfig, str), optional=True, advice="write its URL")
        if isinstance(self.remote, str):  # as a RemoteConfig it does not show its password when it is printed
            object.__setattr__(self, "remote", RemoteConfig(self.remote))
        codec_named(self.codec)

    @property
    def given_limits(self) -> dict[str, int]:
        """Limits set by the caller, which the folder keeps from now on."""
        given = {name: getattr(self, name) for name in DEFAULT_LIMITS}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The state of the whole store (all processes) and what this process did with it.

    disk_bytes  files with a row, and files being written or deleted
    lookups     chunks that were looked up, by outcome: "found", "not_stored", or "refused" (it did not pass the checks)
    loads       chunk-caches that were loaded, by tier: "device", "host", "disk", "remote"
    load_failures  those that were not, by tier, then by `types.LoadFailure`
    captures    captures by outcome: "stored", or the `types.CaptureDrop` that kept one out; for the remote see `remote`
    evictions   chunk-caches that left, by tier, then by `types.EvictionReason`; those that left memory are on disk
    remote      sizes on the remote, and what this process did there; None without a remote
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
