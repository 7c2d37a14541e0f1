"""Arguments and results of the catalog, apart from variants."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field

from cachecraft_rag.checks import check_kind, check_number, check_text, shown
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.types.store_reasons import EvictionReason
from cachecraft_rag.types.variants import Variant


@dataclass(frozen=True, slots=True)
class FileRef:
    """Name of a variant's file: `created` distinguishes the file of a replaced variant from its successor's.

    file_bytes  bytes of the file; 0 also where they are not known
    evicted     reason why its row has gone; None if it has not
    """

    variant_id: str
    created: float
    file_bytes: int = 0
    evicted: EvictionReason | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Listed:
    """A row of `ChunkCacheStore.rows`.

    file_bytes  bytes of its file, header included
    last_used   time of its last use, or of its capture before the first use, in seconds since 1970
    """

    variant: Variant
    file_bytes: int
    last_used: float


@dataclass(frozen=True, slots=True)
class DamagedRow:
    """A row that is not as it was written: its file, as far as known, and the reason."""

    file: FileRef
    chunk_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the whole catalog.

    variants        number of rows
    chunks          number of different chunks with a row; a chunk of two namespaces or two models counts twice
    file_bytes      bytes of the files with a row
    reserved_bytes  bytes of files being written or deleted right now, by any process
    """

    variants: int
    chunks: int
    file_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class OtherTexts:
    """Ids of texts in a catalog that are none of the given chunks.

    chunks    documents, by their chunk ids
    passages  passages of unmarked text, and texts known only as what private variants were captured after, or as what
              has shaped a variant
    """

    chunks: frozenset[str]
    passages: frozenset[str]


@dataclass(frozen=True, slots=True)
class Limits:
    """Budget of a catalog: bytes of files, variants in all, and variants of one chunk."""

    disk_bytes: int
    max_variants: int
    variants_per_chunk: int


@dataclass(frozen=True, slots=True)
class RowFilter:
    """Rows that an administrator chooses: those that satisfy all fields. None leaves a field open.

    An empty list of chunk ids chooses no rows. `created_before` is in seconds since the epoch, exclusive.
    `chunk_prefix` is how a chunk id begins: tables show no more of it.
    """

    namespace: str | None = None
    fingerprint: str | None = None
    chunk_ids: tuple[str, ...] | None = None
    chunk_prefix: str | None = None
    created_before: float | None = None

    def __post_init__(self) -> None:
        """Check every field; raises ConfigError."""
        for name in ("namespace", "fingerprint", "chunk_prefix"):
            check_text(name, getattr(self, name), optional=True)
        check_kind("chunk_ids", self.chunk_ids, (tuple, list), optional=True)
        for chunk_id in self.chunk_ids or ():
            check_text("each of chunk_ids", chunk_id)
            if (
                "\0" in chunk_id
            ):  # SQLite would read the id up to there, and that may be another chunk's
                raise ConfigError(
                    f"each of chunk_ids must be an id without NUL, not {shown(chunk_id)}"
                )
        check_number("created_before", self.created_before, least=-math.inf, optional=True)

    def as_sql(self) -> tuple[str, list[str | float]]:
        """Return a condition on variants `v` and scopes `s`, and a parameter for each `?`; "TRUE" without a choice.

        It consists of the given parts only: with `? IS NULL OR …` for the others SQLite would use no key and read every
        row.
        """
        chunks = None if self.chunk_ids is None else json.dumps(self.chunk_ids)
        parts = (
            ("s.namespace = ?", self.namespace),
            ("s.fingerprint = ?", self.fingerprint),
            ("v.chunk_id IN (SELECT value FROM json_each(?))", chunks),
            # not GLOB or LIKE: a prefix has no wildcards
            ("instr(v.chunk_id, ?) = 1", self.chunk_prefix),
            ("v.created < ?", self.created_before),
        )
        given = [(condition, value) for condition, value in parts if value is not None]
        return " AND ".join(["TRUE", *(condition for condition, _ in given)]), [
            value for _, value in given
        ]
