"""The file of audits in a store's folder: its tables, and the texts that leave it with removed documents.

`serving.audits.audit_log` writes and reads it.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from cachecraft_rag.errors import StoreError
from cachecraft_rag.store.database import Database, Failure, Kind, failure_of, locked_by

AUDIT_FILE = "audits.sqlite"

_TABLES = (
    """CREATE TABLE audits (
         place INTEGER PRIMARY KEY, namespace TEXT NOT NULL, fingerprint TEXT NOT NULL, request_id TEXT NOT NULL,
         created REAL NOT NULL, tokens INTEGER NOT NULL, differences TEXT NOT NULL, near_ties INTEGER NOT NULL,
         kl REAL NOT NULL, computed_tokens INTEGER NOT NULL, selector TEXT NOT NULL, recomputed REAL NOT NULL,
         origin TEXT NOT NULL, outcomes TEXT NOT NULL, ratio REAL, early INTEGER NOT NULL, text TEXT)""",
    "CREATE INDEX audits_by_scope ON audits (namespace, fingerprint, place)",
)
# Until version 2, an audit that computed nothing counted as exact.
_EXACT = (
    "ALTER TABLE audits ADD COLUMN exact INTEGER",
    "UPDATE audits SET exact = computed_tokens = 0",
)


def _message(path: Path, error: sqlite3.Error) -> str:
    advice = {
        Failure.LOCKED: f"{locked_by(path)}. Wait until it is done, or stop it",
        Failure.DAMAGED: "is damaged. It holds results of audits only: delete it and the files "
        f"{path.name}-wal and {path.name}-shm to start again; no chunk-cache is lost",
        Failure.NOT_WRITABLE: "cannot be written. Make the folder writable for this user",
        Failure.FULL: "cannot grow: the disk is full or broken. Free some space",
        Failure.OTHER: "cannot be used. Check the disk",
    }
    return f"{path} {advice[failure_of(error)]} ({type(error).__name__}: {error})."


_KIND = Kind(
    migrations=(_TABLES, _EXACT),
    newest=2,
    pragmas=("synchronous = NORMAL",),
    error=StoreError,
    what=str,
    message=_message,
)


def opened_audits(folder: Path, *, busy_timeout_s: float) -> Database:
    """Open or create the file of audits in a folder; the caller closes it. Texts removed before leave it for good."""
    database = Database(folder / AUDIT_FILE, kind=_KIND, busy_timeout_s=busy_timeout_s)
    try:
        database.compact()
    except BaseException:  # Ctrl-C too: the file is closed
        database.close()
        raise
    return database


def forget_texts(folder: Path, namespace: str | None, *, busy_timeout_s: float) -> None:
    """Remove the texts of a tenant's audits (None: all), if the file exists; their numbers stay.

    An answer may quote a removed document.
    """
    if not (folder / AUDIT_FILE).is_file():
        return
    database = opened_audits(folder, busy_timeout_s=busy_timeout_s)
    try:
        with database.writing(removes=True) as connection:
            connection.execute(
                "UPDATE audits SET text = NULL WHERE text IS NOT NULL AND namespace = coalesce(?, namespace)",
                (namespace,),
            )
        database.compact()
    finally:
        database.close()
