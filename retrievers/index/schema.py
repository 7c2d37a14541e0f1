"""The index's database: its tables and their migrations, and the check that it fits the embedding model."""

from __future__ import annotations

import json
import sqlite3
import uuid
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from cachecraft_rag.errors import IndexStoreError
from cachecraft_rag.store.database import Database, Failure, Kind, failure_of, locked_by
from cachecraft_rag.types.documents import Chunk, Scalar, chunk_id_of

DATABASE = "index.sqlite"
# made by LlamaIndex, which does not name its embedding model to a vector store
UNKNOWN_EMBEDDING = "llama-index"

# Append only: migration n brings a database from user_version n to n + 1.
_MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE settings (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
        """CREATE TABLE documents (
            doc_id TEXT PRIMARY KEY,
            content_digest TEXT NOT NULL,
            root TEXT NOT NULL
        ) WITHOUT ROWID""",
        # `number` is the chunk's id in FAISS. It is random, so a database restored from a copy never reuses a number.
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
        # `key` is a caller's own name of the place: a LlamaIndex node has an id and belongs to a document.
        "ALTER TABLE owners ADD COLUMN key TEXT",
        "CREATE UNIQUE INDEX owners_by_key ON owners (key) WHERE key IS NOT NULL",
    ),
    # Random numbers made the generation of a row superfluous.
    ("DROP INDEX chunks_by_generation", "ALTER TABLE chunks DROP COLUMN generation"),
    # Chunks that left the index and whose chunk-caches are still to be deleted. A chunk that leaves once more gets
    # another place.
    (
        "CREATE TABLE removed_chunks (place INTEGER PRIMARY KEY AUTOINCREMENT, chunk_id TEXT NOT NULL UNIQUE)",
    ),
    # Checksum of id and vector; NULL in rows of an older version, which are not checked.
    ("ALTER TABLE chunks ADD COLUMN vector_sum INTEGER",),
    # Checksum of all columns of a place; NULL as above.
    ("ALTER TABLE owners ADD COLUMN place_sum INTEGER",),
    # Checksum of a document's name, digest and root; NULL as above.
    ("ALTER TABLE documents ADD COLUMN document_sum INTEGER",),
)


def open_database(
    folder: Path, *, dim: int | None, fingerprint: str | None, wait_s: float
) -> tuple[Database, dict[str, str]]:
    """Open the index's database, update its schema or set it up; return it with its settings by name.

    The settings are texts: `store`, `dim`, `embedder`, `generation` and `stamp`. A `dim` or `fingerprint` of None is as
    the index says; of the fingerprint only the digest is compared. A database that this user cannot write is opened for
    reading. Nothing stays open after an error.

    Raises IndexStoreError for a database that is damaged, of a newer version, or made with another embedding model or
    another `dim`, for a new one unless both are given, and if another process keeps it locked for longer than `wait_s`.
    """
    try:
        db = Database(folder / DATABASE, kind=_KIND, busy_timeout_s=wait_s)
    except OSError as error:
        raise IndexStoreError(
            f"{folder}: the index cannot be opened ({error}); check the folder and its permissions"
        ) from error
    try:
        settings = _settings(db, folder, dim=dim, fingerprint=fingerprint)
        other_model = fingerprint is not None and not same_model(fingerprint, settings["embedder"])
        if other_model and settings["embedder"] == UNKNOWN_EMBEDDING:
            raise IndexStoreError(
                f"{folder}: the index does not say which embedding model made it, because LlamaIndex did not; delete "
                "the folder and make it with CacheCraftVectorStore(…, embedding=CacheCraftEmbedding())"
            )
        if other_model or (dim is not None and dim != int(settings["dim"])):
            raise IndexStoreError(
                f"{folder}: the index was made with the embedding model {model_name(settings['embedder'])} "
                f"({settings['dim']} dimensions), not with {model_name(fingerprint or 'this one')} ({dim} dimensions); "
                "use the first, or delete the folder and index again"
            )
    except IndexStoreError:
        db.close()
        raise
    return db, settings


def _settings(
    db: Database, folder: Path, *, dim: int | None, fingerprint: str | None
) -> dict[str, str]:
    """Return the settings that the index was made with; a new index stores them first."""
    with db.reading() as connection:
        stored = dict(connection.execute("SELECT key, value FROM settings").fetchall())
    if stored:
        return stored
    if dim is None or fingerprint is None:
        # The process that created the index was killed before it stored the settings.
        raise IndexStoreError(f"{folder}: there is no index here; make one with `cachecraft index`")
    values = {
        "store": uuid.uuid4().hex,
        "dim": str(dim),
        "embedder": fingerprint,
        "generation": "0",  # changes with the vectors, as the stamp does
        "stamp": uuid.uuid4().hex,
    }
    # another process may have been quicker: all of its values stay
    with db.writing() as connection:
        if connection.execute("SELECT COUNT(*) FROM settings").fetchone()[0] == 0:
            connection.executemany("INSERT INTO settings VALUES (?, ?)", values.items())
        return dict(connection.execute("SELECT key, value FROM settings").fetchall())


def _message(path: Path, error: sqlite3.Error) -> str:
    """Return an error of the database in words. Only a damaged database should be deleted."""
    advice = {
        Failure.LOCKED: f"{locked_by(path)}. Wait until its `index` or `documents remove` ends, or stop it",
        Failure.DAMAGED: "is damaged: delete the folder and index again",
        Failure.NOT_WRITABLE: "cannot be written. Make the folder writable for this user",
        Failure.FULL: "cannot grow: the disk is full or broken. Free some space",
        Failure.OTHER: "cannot be used. Check that the folder can be written and the disk has room",
    }
    return f"{path.parent}: the index {advice[failure_of(error)]} ({error})."


# FULL: a commit that a power cut takes back would leave the index file ahead.
_KIND = Kind(
    migrations=_MIGRATIONS,
    newest=len(_MIGRATIONS),
    pragmas=("synchronous = FULL", "foreign_keys = ON"),
    error=IndexStoreError,
    what=lambda path: f"{path.parent}: the index",
    message=_message,
)


def same_model(fingerprint: str, other: str) -> bool:
    """Return True if two fingerprints `name@digest` have the same digest; the names may differ."""
    return fingerprint.rpartition("@")[2] == other.rpartition("@")[2]


def model_name(fingerprint: str) -> str:
    """Return the model's name in a fingerprint `name@digest`; the whole text if it has no name."""
    return fingerprint.rpartition("@")[0] or fingerprint


def row_sum(columns: tuple[object, ...]) -> int:
    """Return the checksum (CRC-32) of columns of a row."""
    return zlib.crc32(ascii(columns).encode())


# Columns of `Place`
PLACE = "owners.doc_id, ordinal, owners.number, metadata, key, place_sum"


class Place(NamedTuple):
    """A row of `owners`: a place of a chunk in a document. Any column may be damaged until `metadata_of` is called."""

    doc_id: str
    ordinal: int
    number: int
    metadata: str
    key: str | None
    place_sum: int | None = None

    def sealed(self) -> Place:
        """Return the place with its checksum."""
        return self._replace(place_sum=self._sum())

    def _sum(self) -> int:
        return row_sum(self[:-1])

    def metadata_of(self) -> dict[str, Scalar]:
        """Return the metadata. Raises IndexStoreError unless the row is as it was written, if it has a `place_sum`."""
        try:
            if self.place_sum in (None, self._sum()):
                metadata: dict[str, Scalar] = json.loads(self.metadata)
                return metadata
        except (ValueError, TypeError, RecursionError):
            pass
        raise IndexStoreError(
            f"{self.doc_id}: the index is damaged (the metadata of a chunk); delete the index folder and index again"
        )


def chunk_of(chunk_id: str, text: str, *place: Any) -> Chunk:
    """Return the chunk of a row; `place` is the columns of a `Place`. Raises IndexStoreError if they were changed."""
    chunk = Chunk(text, Place(*place).metadata_of(), chunk_id)
    if chunk.stale_id:
        raise IndexStoreError(_changed_row(chunk_id))
    return chunk


def verify(chunk_id: str, text: str) -> None:
    """Raise IndexStoreError if a row's text does not match its id."""
    if chunk_id_of(text) != chunk_id:
        raise IndexStoreError(_changed_row(chunk_id))


def vector_sum(chunk_id: str, vector: bytes) -> int:
    """Return the checksum (CRC-32) of a chunk's id and the bytes of its vector.

    >>> vector_sum("a", b"1234") == vector_sum("b", b"1234")
    False
    """
    return zlib.crc32(vector, zlib.crc32(chunk_id.encode("utf-8", "surrogatepass")))


def _changed_row(chunk_id: str) -> str:
    return (
        f"chunk {chunk_id}: the index holds another text under this id than was indexed; its rows were changed, or "
        "written by another version. Delete the index folder and index again."
    )
