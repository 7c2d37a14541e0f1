"""Tables of the catalog, their version, and the errors of its file in words."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from cachecraft_rag.errors import StoreError
from cachecraft_rag.store.catalog import found_texts, removals
from cachecraft_rag.store.database import Failure, Kind, failure_of, locked_by
from cachecraft_rag.types.versions import IDENTITY_VERSION, LAYOUT_VERSION

# A store of another version is set aside and built again. The last digits go up whenever a table changes.
_VERSION = IDENTITY_VERSION * 10_000 + LAYOUT_VERSION * 100 + 5
_TABLES = (
    """CREATE TABLE scopes (
         scope INTEGER PRIMARY KEY, namespace TEXT NOT NULL, fingerprint TEXT NOT NULL,
         UNIQUE (namespace, fingerprint))""",
    # The score is not NOT NULL: of a damaged row it may be no number.
    """CREATE TABLE variants (
         scope INTEGER NOT NULL, chunk_id TEXT NOT NULL, variant_id TEXT NOT NULL,
         origin_prefix BLOB NOT NULL, tokens INTEGER NOT NULL, tokens_digest TEXT NOT NULL,
         inter BLOB NOT NULL, intra REAL NOT NULL, cci REAL NOT NULL, exact_share REAL NOT NULL,
         session TEXT, codec TEXT NOT NULL, nbytes INTEGER NOT NULL, file_bytes INTEGER NOT NULL,
         reuse_frequency REAL NOT NULL, created REAL NOT NULL, primed INTEGER NOT NULL DEFAULT 0,
         row_sum INTEGER, scores_sum INTEGER, score REAL, saved REAL NOT NULL DEFAULT 0.0, last_used REAL,
         PRIMARY KEY (scope, chunk_id, variant_id)) WITHOUT ROWID""",
    "CREATE UNIQUE INDEX variants_by_id ON variants (variant_id)",
    "CREATE INDEX variants_by_score ON variants (score, created)",
    "CREATE TABLE token_scores (variant_id TEXT PRIMARY KEY, scores BLOB NOT NULL)",
    # Chunks that have shaped a variant and are not in its origin prefix, see `removals.shaping_of`.
    "CREATE TABLE shaping (variant_id TEXT PRIMARY KEY, chunk_ids BLOB NOT NULL)",
    """CREATE TABLE files_at_risk (
         variant_id TEXT NOT NULL, created REAL NOT NULL, writer TEXT NOT NULL, reserved_bytes INTEGER NOT NULL,
         PRIMARY KEY (variant_id, created)) WITHOUT ROWID""",
    # Kept by triggers, so the sums are exact in every transaction of every process and cost nothing to read.
    "CREATE TABLE totals (variants INTEGER NOT NULL, file_bytes INTEGER NOT NULL)",
    "INSERT INTO totals VALUES (0, 0)",
    "CREATE TABLE limits (name TEXT PRIMARY KEY, value INTEGER NOT NULL)",
    """CREATE TRIGGER variant_added AFTER INSERT ON variants BEGIN
         UPDATE totals SET variants = variants + 1, file_bytes = file_bytes + new.file_bytes; END""",
    """CREATE TRIGGER variant_removed AFTER DELETE ON variants BEGIN
         UPDATE totals SET variants = variants - 1, file_bytes = file_bytes - old.file_bytes;
         DELETE FROM token_scores WHERE variant_id = old.variant_id;
         DELETE FROM shaping WHERE variant_id = old.variant_id; END""",
    # The clock that scores are counted from, and the uses of chunks that had to leave.
    "CREATE TABLE eviction (policy TEXT NOT NULL, clock REAL NOT NULL)",
    "INSERT INTO eviction VALUES ('', 0.0)",
    """CREATE TABLE departed (
         place INTEGER PRIMARY KEY, scope INTEGER NOT NULL, chunk_id TEXT NOT NULL,
         reuse_frequency REAL NOT NULL, saved REAL NOT NULL, UNIQUE (scope, chunk_id))""",
    *found_texts.TABLES,
    *removals.TABLES,
)


class OtherVersionError(StoreError):
    """The catalog was made by another version of the package."""


class DiskFullError(StoreError):
    """The catalog cannot be changed because the disk has no room."""


def _message(path: Path, error: sqlite3.Error) -> str:
    advice = {
        Failure.LOCKED: f"{locked_by(path)}. Wait until its `store check` or `store evict` ends, or stop it",
        Failure.DAMAGED: "is damaged. It only indexes a cache: "
        f"delete the folder {path.parent} to start again; no document is lost",
        Failure.NOT_WRITABLE: "cannot be written. Make the folder writable for this user or choose another one for the "
        "store",
        Failure.FULL: "cannot grow: the disk is full or broken. Free some space, or run `cachecraft store evict`",
        Failure.OTHER: "cannot be used. Check the disk, then try `store check`",
    }
    return f"{path} {advice[failure_of(error)]} ({type(error).__name__}: {error})."


# `synchronous=NORMAL` with WAL never corrupts; after a power cut the last commits may be gone, which costs a cache an
# entry and never gives it a wrong one. 8 KiB pages: a row has some 600 bytes, and a page should hold more than a
# handful of them. The connection that writes keeps up to 32 MiB of pages: SQLite's own 2 MiB hold three thousand rows.
# The effect of that alone was not measured.
CATALOG_KIND = Kind(
    migrations=(_TABLES,),
    newest=_VERSION,
    pragmas=(
        "page_size = 8192",
        "synchronous = NORMAL",
        "journal_size_limit = 16777216",
        "cache_size = -32768",
    ),
    error=StoreError,
    other_version=OtherVersionError,
    disk_full=DiskFullError,
    what=str,
    message=_message,
)
