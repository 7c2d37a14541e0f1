"""The vector store's database: its tables, their migrations, and the check that it fits the embedding model."""

from __future__ import annotations

import json
import sqlite3
import uuid
from pathlib import Path

from cachecraft_rag.errors import IndexStoreError
from cachecraft_rag.types import Chunk, chunk_id_of

# Append only: migration n brings a database from user_version n to n + 1.
_MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE settings (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
        """CREATE TABLE documents (
            doc_id TEXT PRIMARY KEY,
            content_digest TEXT NOT NULL,
            root TEXT NOT NULL
        ) WITHOUT ROWID""",
        # `number` is the chunk's id in FAISS; `generation` is the one in which the row was written
        """CREATE TABLE chunks (
            number INTEGER PRIMARY KEY,
            chunk_id TEXT NOT NULL UNIQUE,
            generation INTEGER NOT NULL,
            text TEXT NOT NULL,
            vector BLOB NOT NULL
        )""",
        "CREATE INDEX chunks_by_generation ON chunks (generation)",
        """CREATE TABLE owners (
            doc_id TEXT NOT NULL REFERENCES documents (doc_id),
            ordinal INTEGER NOT NULL,
            number INTEGER NOT NULL REFERENCES chunks (number),
            metadata TEXT NOT NULL,
            PRIMARY KEY (doc_id, ordinal)
        ) WITHOUT ROWID""",
        "CREATE INDEX owners_by_number ON owners (number, doc_id, ordinal)",
    ),
    (
        # a caller's own name of the place: a LlamaIndex node has an id and belongs to a document
        "ALTER TABLE owners ADD COLUMN key TEXT",
        "CREATE UNIQUE INDEX owners_by_key ON owners (key) WHERE key IS NOT NULL",
    ),
)


def prepare(
    db: sqlite3.Connection, folder: Path, *, dim: int | None, fingerprint: str | None, read_only: bool = False
) -> None:
    """Bring a database to the newest schema, set up a new one, and check that it fits the embedding model.

    Raises `IndexStoreError` for one of a newer version or made with another model, `sqlite3.Error` for a damaged one.
    """
    stored = _as_it_is(db, folder) if read_only else _up_to_date(db, folder, dim=dim, fingerprint=fingerprint)
    other_model = fingerprint is not None and not same_model(fingerprint, stored["embedder"])
    if other_model or (dim is not None and dim != int(stored["dim"])):
        raise IndexStoreError(
            f"{folder}: the index was made with the embedding model {model_name(stored['embedder'])} ({stored['dim']} "
            f"dimensions), not with {model_name(fingerprint or 'this one')} ({dim} dimensions); "
            "use the first, or delete the folder and index again"
        )


def _as_it_is(db: sqlite3.Connection, folder: Path) -> dict[str, str]:
    """The settings of a read-only database; its schema must already be the newest one."""
    if db.execute("PRAGMA user_version").fetchone()[0] != len(_MIGRATIONS):
        raise IndexStoreError(
            f"{folder}: the index was made by another version of cachecraft-rag and cannot be written; open it once "
            "where it can be, or use that version"
        )
    return dict(db.execute("SELECT key, value FROM settings").fetchall())


def _up_to_date(db: sqlite3.Connection, folder: Path, *, dim: int | None, fingerprint: str | None) -> dict[str, str]:
    """The settings of a database, migrated or created first if necessary."""
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")  # a lost commit would leave the index file ahead of the database
    db.execute("PRAGMA foreign_keys = ON")
    db.execute("BEGIN IMMEDIATE")  # two processes may open a new folder at once
    try:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version > len(_MIGRATIONS):
            raise IndexStoreError(
                f"{folder}: the index was made by a newer version of cachecraft-rag; upgrade, or index again"
            )
        for statement in (statement for migration in _MIGRATIONS[version:] for statement in migration):
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {len(_MIGRATIONS)}")
        if db.execute("SELECT COUNT(*) FROM settings").fetchone()[0] == 0:
            values = {"store": uuid.uuid4().hex, "dim": str(dim), "embedder": str(fingerprint)}
            values |= {"generation": "0", "stamp": uuid.uuid4().hex}  # of the vectors; both change with them
            db.executemany("INSERT INTO settings VALUES (?, ?)", values.items())
        stored = dict(db.execute("SELECT key, value FROM settings").fetchall())
        db.execute("COMMIT")
        return stored
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")


def same_model(fingerprint: str, other: str) -> bool:
    """Whether two fingerprints `name@digest` are of one model; the name may differ, as of a copy in another folder."""
    return fingerprint.rpartition("@")[2] == other.rpartition("@")[2]


def model_name(fingerprint: str) -> str:
    """The model in a fingerprint `name@digest`."""
    return fingerprint.rpartition("@")[0] or fingerprint


def chunk_of(chunk_id: str, text: str, metadata: str) -> Chunk:
    """A row as a chunk; raises as `verify`."""
    verify(chunk_id, text)
    return Chunk(text, json.loads(metadata), chunk_id)


def verify(chunk_id: str, text: str) -> None:
    """Raise IndexStoreError if a row's text does not match its id."""
    if chunk_id_of(text) != chunk_id:
        raise IndexStoreError(
            f"chunk {chunk_id}: the index holds another text under this id than was indexed; its rows were changed, or "
            "written by another version. Delete the index folder and index again."
        )
