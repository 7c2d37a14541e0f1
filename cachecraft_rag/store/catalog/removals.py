"""Chunks that were removed with their documents: nothing of them is stored until they are added again."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable

from cachecraft_rag.store.database import Database, fetched

# `namespace` is NULL for a chunk that was removed in all of them.
TABLES = (
    "CREATE TABLE removed_chunks (chunk_id TEXT NOT NULL, namespace TEXT, UNIQUE (chunk_id, namespace))",
)
_ANY = "(:namespace IS NULL OR namespace IS NULL OR namespace = :namespace)"
_GIVEN = f"chunk_id IN (SELECT value FROM json_each(:chunk_ids)) AND {_ANY}"
_NOTE = """INSERT INTO removed_chunks (chunk_id, namespace)
  SELECT DISTINCT value, :namespace FROM json_each(:chunk_ids) AS given
  WHERE NOT EXISTS (SELECT 1 FROM removed_chunks AS r WHERE r.chunk_id = given.value AND r.namespace IS :namespace)"""


class Removals:
    """A table of the catalog: ids of removed chunks, which are digests of their texts.

    Any thread may call any method. With the namespace None a method means all namespaces. Every method raises
    StoreError if the catalog cannot be read or written, or is closed.
    """

    def __init__(self, database: Database) -> None:
        self._db = database

    def note(self, chunk_ids: Iterable[str], namespace: str | None) -> None:
        """Note these chunks as removed; those noted before stay noted."""
        with self._db.writing() as connection:
            connection.execute(_NOTE, _given(chunk_ids, namespace))

    def readmit(self, chunk_ids: Iterable[str], namespace: str | None) -> None:
        """Forget that these chunks were removed; in one namespace also if they were removed in all."""
        with self._db.writing() as connection:
            connection.execute(
                f"DELETE FROM removed_chunks WHERE {_GIVEN}", _given(chunk_ids, namespace)
            )

    def noted(self, namespace: str | None) -> frozenset[str]:
        """Return the ids of all removed chunks, of one namespace including those removed in all."""
        query = f"SELECT chunk_id FROM removed_chunks WHERE {_ANY}"
        with self._db.reading() as connection:
            return frozenset(
                name for (name,) in fetched(connection, query, {"namespace": namespace})
            )

    def among(self, chunk_ids: Collection[str], namespace: str) -> frozenset[str]:
        """Return those of these chunks that were removed in this namespace or in all."""
        with self._db.reading() as connection:
            return removed_among(connection, chunk_ids, namespace)


def removed_among(
    connection: sqlite3.Connection, chunk_ids: Iterable[str], namespace: str
) -> frozenset[str]:
    """Return those of these chunks that were removed, as of the connection's transaction."""
    query = f"SELECT chunk_id FROM removed_chunks WHERE {_GIVEN}"
    rows = fetched(connection, query, _given(chunk_ids, namespace))
    return frozenset(name for (name,) in rows)


def _given(chunk_ids: Iterable[str], namespace: str | None) -> dict[str, str | None]:
    return {"chunk_ids": json.dumps(list(chunk_ids)), "namespace": namespace}
