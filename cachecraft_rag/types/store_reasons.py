"""Reasons of the store: why it did not load or keep a chunk-cache, or why it removed one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class LoadFailure(StrEnum):
    """Reasons for not loading a stored chunk-cache. The value is the code that statistics count by."""

    MISSING = "missing"  # its file or its payload on the remote
    DAMAGED = "damaged"
    UNKNOWN_FORMAT = "unknown_format"  # of a codec that is not installed
    UNREADABLE = "unreadable"  # the system refused; this may pass
    NO_MEMORY = "no_memory"
    NO_REMOTE = "no_remote"  # it is on a remote, and this store has none
    NOT_OFFERED = "not_offered"  # no look-up on the remote has returned it
    CIRCUIT_OPEN = "circuit_open"  # the remote is not asked after repeated failures
    CLOSED = "closed"


class CaptureDrop(StrEnum):
    """Reasons for not storing a capture. The value is the code that statistics count by."""

    CLOSED = "closed"
    TOO_LARGE = "too_large"  # larger than the whole byte budget
    QUEUE_FULL = "queue_full"  # see `StoreTuning.queue_bytes`
    FLAWED = "flawed"  # its scores cannot be stored
    NOT_ENCODABLE = "not_encodable"  # the codec cannot encode its values
    DISK_FULL = "disk_full"
    FILE_ERROR = "file_error"
    CATALOG_ERROR = "catalog_error"
    NO_ROOM = "no_room"  # other writers have taken the byte budget
    READ_ONLY = "read_only"
    FOLDER_GONE = "folder_gone"
    CANCELLED = "cancelled"
    PRIVATE = "private"  # captured after private text, without a session that could reuse it
    WRITE_BACK_FULL = "write_back_full"  # too many captures wait to be described
    FAILED = "failed"  # an exception while it was described, or no memory to encode it
    REMOVED = "removed"  # its chunk was removed


class EvictionReason(StrEnum):
    """Reasons for a chunk-cache to leave the store. The value is the code that statistics count by."""

    BUDGET = "budget"  # the byte budget
    COUNT_CAP = "count_cap"  # max_variants
    CHUNK_CAP = "chunk_cap"  # variants_per_chunk
    RULE = "rule"  # a rule of `store.catalog.eviction_rules`
    ADMINISTRATOR = "administrator"
    REPLACED = "replaced"  # by a newer capture of the same identity
    DAMAGED = "damaged"  # or its file is missing


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A variant that the catalog lists but that could not be served (a miss), or a capture that is not stored.

    code    code that statistics count by
    reason  reason in words, specific to this variant
    """

    variant_id: str
    code: LoadFailure | CaptureDrop
    reason: str


@dataclass(frozen=True, slots=True)
class Damaged(Unavailable):
    """Bytes that are missing or damaged permanently, so row and file should be removed."""
