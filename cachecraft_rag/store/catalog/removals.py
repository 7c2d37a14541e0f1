"""Chunks that were removed with their documents: nothing that they have shaped is stored until they are added again.

A chunk shapes the variants that were captured after it. Their origin prefix names it. If such a variant is reused in
another prompt, it shapes what is captured there, too, and no origin prefix says so: the table `shaping` does.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Collection, Iterable

from cachecraft_rag.store.catalog.rows import pack_ids, unpack_ids
from cachecraft_rag.store.database import Database, fetched
from cachecraft_rag.types.variants import Variant, VariantKey

# `namespace` is NULL for a chunk that was removed in all of them.
TABLES = (
    """CREATE TABLE removed_chunks (
         chunk_id TEXT NOT NULL, namespace TEXT, removed REAL NOT NULL, UNIQUE (chunk_id, namespace))""",
)
ANY = "*"  # in place of chunk ids: any chunk may have shaped it
_MOST_SHAPING = 256  # chunk ids of one variant; more become ANY
_ANY = "(:namespace IS NULL OR namespace IS NULL OR namespace = :namespace)"
_GIVEN = f"chunk_id IN (SELECT value FROM json_each(:chunk_ids)) AND {_ANY}"
_NOTE = """INSERT INTO removed_chunks (chunk_id, namespace, removed)
  SELECT DISTINCT value, :namespace, :now FROM json_each(:chunk_ids) AS given
  WHERE NOT EXISTS (SELECT 1 FROM removed_chunks AS r WHERE r.chunk_id = given.value AND r.namespace IS :namespace)"""


class Removals:
    """A table of the catalog: ids of removed chunks, which are digests of their texts.

    With the namespace None a method means all namespaces.
    """

    def __init__(self, database: Database) -> None:
        self._db = database

    def note(self, chunk_ids: Iterable[str], namespace: str | None) -> None:
        """Note these chunks as removed now; those noted before keep their time."""
        with self._db.writing() as connection:
            connection.execute(_NOTE, _given(chunk_ids, namespace) | {"now": time.time()})

    def readmit(self, chunk_ids: Iterable[str], namespace: str | None) -> None:
        """Forget that these chunks were removed: in this namespace, and in all, if they were removed in all."""
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

    def latest(self, namespace: str) -> float:
        """Return the latest time that `note` has kept for this namespace or all, in seconds since 1970; 0.0 without."""
        query = f"SELECT coalesce(max(removed), 0.0) FROM removed_chunks WHERE {_ANY}"
        with self._db.reading() as connection:
            latest: float = fetched(connection, query, {"namespace": namespace})[0][0]
        return latest

    def among(self, chunk_ids: Collection[str], namespace: str) -> frozenset[str]:
        """Return those of these chunks that were removed in this namespace or in all."""
        with self._db.reading() as connection:
            return removed_among(connection, chunk_ids, namespace)


def removed_among(
    connection: sqlite3.Connection, chunk_ids: Iterable[str], namespace: str
) -> frozenset[str]:
    """Return those of these chunks that were removed in this namespace or in all, as the connection sees them."""
    query = f"SELECT chunk_id FROM removed_chunks WHERE {_GIVEN}"
    rows = fetched(connection, query, _given(chunk_ids, namespace))
    return frozenset(name for (name,) in rows)


def shaping_of(
    connection: sqlite3.Connection, key: VariantKey, sources: Iterable[Variant]
) -> frozenset[str] | None:
    """Return the ids of chunks that have shaped a capture and are not in its origin prefix, or `ANY` alone.

    `ANY` means too many, or unknown, as of a remote's inexact variant. Returns None if another inexact variant of the
    `sources`, which were reused before it, has left the catalog since.
    """
    shaping: set[str] = set()
    query = """SELECT s.chunk_ids FROM variants AS v LEFT JOIN shaping AS s USING (variant_id)
        WHERE v.variant_id = ? AND v.created = ?"""
    for source in sources:
        shaping.update(source.key.origin_prefix)
        if source.exact_share >= 1.0:
            continue
        rows = fetched(connection, query, (source.variant_id, source.created))
        if rows:
            shaping.update(readable_ids(rows[0][0]))
        elif source.home == "remote":
            shaping.add(ANY)
        else:
            return None
    shaping.difference_update(key.origin_prefix, (key.chunk_id,))
    is_many = ANY in shaping or len(shaping) > _MOST_SHAPING
    return frozenset((ANY,)) if is_many else frozenset(shaping)


def accepted_shaping(
    connection: sqlite3.Connection, key: VariantKey, sources: Iterable[Variant]
) -> frozenset[str] | None:
    """Return what `shaping_of` does, or None too if the chunk, one before it or one of these was removed."""
    shaping = shaping_of(connection, key, sources)
    if shaping is None:
        return None
    held = (key.chunk_id, *key.origin_prefix, *shaping)
    return None if removed_among(connection, held, key.namespace) else shaping


def note_shaping(connection: sqlite3.Connection, variant_id: str, shaping: Collection[str]) -> None:
    """Note the chunks that have shaped a variant, in place of earlier ones; does nothing without any."""
    if shaping:
        packed = pack_ids(sorted(shaping))
        connection.execute("INSERT OR REPLACE INTO shaping VALUES (?,?)", (variant_id, packed))


def readable_ids(packed: object) -> tuple[str, ...]:
    """Return packed ids; () for None, and `ANY` for damaged ones."""
    if packed is None:
        return ()
    try:
        return unpack_ids(packed) if isinstance(packed, bytes | str) else (ANY,)
    except (ValueError, TypeError, RecursionError):
        return (ANY,)


def _given(chunk_ids: Iterable[str], namespace: str | None) -> dict[str, object]:
    return {"chunk_ids": json.dumps(list(chunk_ids)), "namespace": namespace}
