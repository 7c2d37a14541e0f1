"""Eviction inside the catalog's transactions: scores of rows, the clock, what is remembered of chunks that left."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from cachecraft_rag.store.catalog_records import FileRef, Limits
from cachecraft_rag.store.eviction import POLICIES, Policy, Saving, Standing, Use, ticked, ticked_by_return
from cachecraft_rag.types import Variant

MOST_USES = 1e15
FILES = "SELECT variant_id, created, file_bytes FROM variants"
_STANDING = """SELECT chunk_id, variant_id, tokens, file_bytes, exact_share, reuse_frequency, saved, scope
    FROM variants WHERE variant_id = ?"""
_LEAST_REMEMBERED = 1000


def file_of(row: Sequence[Any]) -> FileRef:
    """The file of a row, id and time as they lie there, so that the row can be named again."""
    variant_id, created, file_bytes = row
    sound = type(file_bytes) is int and file_bytes > 0
    return FileRef(variant_id, created, file_bytes if sound else 0)


def sound_use(frequency: object, saved: object) -> Use | None:
    """Uses as they lie in a row; None for what no uses can be."""
    values = (frequency, saved)
    if all(isinstance(value, float) and 0.0 <= value <= MOST_USES for value in values):
        return Use(*values)  # type: ignore[arg-type]
    return None


def policy_in_use(connection: sqlite3.Connection) -> Policy:
    """The policy that the scores are of; the default where it is none of ours, or none has been named yet."""
    (name,) = connection.execute("SELECT policy FROM eviction").fetchone()
    return POLICIES.get(name, Saving())


def adopt(connection: sqlite3.Connection, policy: Policy) -> None:
    """Give every row its score by this policy, if the scores are another's. Costs a pass over all rows, once."""
    if connection.execute("SELECT policy FROM eviction").fetchone() == (policy.name,):
        return
    ids = [row[0] for row in connection.execute("SELECT variant_id FROM variants ORDER BY created")]
    connection.execute("UPDATE eviction SET policy = ?, clock = 0.0", (policy.name,))
    record_uses(connection, {variant_id: Use(0.0, 0.0) for variant_id in ids}, policy)


def record_uses(connection: sqlite3.Connection, uses: Mapping[str, Use], policy: Policy) -> None:
    """Add uses, by variant id, and raise the scores; ids that are gone, and damaged rows, are passed over."""
    now = clock(connection)
    changed = []
    for variant_id, use in uses.items():
        chunk_id, _, tokens, nbytes, share, *known, _ = connection.execute(_STANDING, (variant_id,)).fetchone() or (
            [None] * 8
        )
        before = sound_use(*known)
        if before is None or not isinstance(share, float) or type(tokens) is not int or type(nbytes) is not int:
            continue
        used = before + use
        score = policy.score(Standing(chunk_id, variant_id, tokens, nbytes, share, used), now)
        changed.append((used.frequency, used.saved, score, variant_id))
    connection.executemany(
        "UPDATE variants SET reuse_frequency = ?, saved = ?, score = ? WHERE variant_id = ?", changed
    )


def clock(connection: sqlite3.Connection) -> float:
    """What scores are counted from, see `eviction.ticked`."""
    (found,) = connection.execute("SELECT clock FROM eviction").fetchone()
    return found if isinstance(found, float) else 0.0


def score_of_new(
    connection: sqlite3.Connection, variant: Variant, *, scope: int, file_bytes: int, used: Use, policy: Policy
) -> float:
    """The score of a row that is about to be added."""
    facts = (variant.key.chunk_id, variant.variant_id, variant.tokens, file_bytes, variant.exact_share)
    return policy.score(Standing(*facts, used), clock(connection))


def make_leave(connection: sqlite3.Connection, files: Sequence[FileRef]) -> None:
    """Move the clock to the scores of rows that are about to leave for others, and remember their uses by chunk."""
    if not files:
        return
    before = now = clock(connection)
    for file in files:
        query = "SELECT score, scope, chunk_id, reuse_frequency, saved FROM variants WHERE variant_id = ?"
        score, scope, chunk_id, *uses = connection.execute(query, (file.variant_id,)).fetchone()
        used = sound_use(*uses)
        if isinstance(score, float) and score < MOST_USES:
            now = ticked(now, score, used=used is not None and used.saved > 0.0)
        if used is not None and isinstance(chunk_id, str):
            query = "INSERT OR REPLACE INTO departed (scope, chunk_id, reuse_frequency, saved) VALUES (?,?,?,?)"
            connection.execute(query, (scope, chunk_id, used.frequency, used.saved + 1.0))
    _set_clock(connection, before, now)
    query = """DELETE FROM departed WHERE place <= (SELECT max(place) FROM departed)
        - (SELECT max(?, variants) FROM totals)"""
    connection.execute(query, (_LEAST_REMEMBERED,))


def _set_clock(connection: sqlite3.Connection, before: float, now: float) -> None:
    if now > before:
        connection.execute("UPDATE eviction SET clock = ?", (now,))


def remembered(connection: sqlite3.Connection, scope: int, chunk_id: str) -> Use:
    """The uses of a chunk that had to leave, and is stored again: once, and for its first variant. The clock moves."""
    identity = (scope, chunk_id)
    query = "DELETE FROM departed WHERE scope = ? AND chunk_id = ? RETURNING reuse_frequency, saved"
    found = connection.execute(query, identity).fetchall()
    if (
        not found
        or connection.execute("SELECT 1 FROM variants WHERE scope = ? AND chunk_id = ? LIMIT 1", identity).fetchone()
    ):
        return Use(0.0, 0.0)
    before = clock(connection)
    lowest = connection.execute("SELECT score FROM variants ORDER BY score, created LIMIT 1").fetchone()
    if lowest is not None and isinstance(lowest[0], float) and lowest[0] < MOST_USES:
        _set_clock(connection, before, ticked_by_return(before, lowest[0]))
    return sound_use(*found[0]) or Use(0.0, 0.0)


def excess_bytes(connection: sqlite3.Connection, incoming: int, limits: Limits) -> int:
    """By how much the byte budget would be exceeded; files at risk count."""
    query = "SELECT file_bytes + (SELECT coalesce(sum(reserved_bytes), 0) FROM files_at_risk) FROM totals"
    return int(connection.execute(query).fetchone()[0]) + incoming - limits.disk_bytes


def lowest_scored(connection: sqlite3.Connection, *, excess: float) -> list[FileRef]:
    """The rows to remove, lowest score first, so that at least `excess` bytes are freed."""
    if excess <= 0:
        return []
    return until(connection.execute(f"{FILES} ORDER BY score, created"), excess)


def until(rows: sqlite3.Cursor, excess: float) -> list[FileRef]:
    """The first rows whose files together free at least `excess` bytes (all of them if they do not)."""
    taken: list[FileRef] = []
    while excess > 0 and (row := rows.fetchone()) is not None:
        taken.append(file_of(row))
        excess -= taken[-1].file_bytes
    rows.close()  # an open cursor would see the deletions that follow
    return taken


def lowest_scored_over(connection: sqlite3.Connection, limits: Limits, *, spared: str) -> list[FileRef]:
    """The rows that exceed the number of variants in all, lowest score first."""
    over = int(connection.execute("SELECT variants FROM totals").fetchone()[0]) - limits.max_variants
    query = f"{FILES} WHERE variant_id != ? ORDER BY score, created LIMIT ?"
    return [file_of(row) for row in connection.execute(query, (spared, max(0, over)))]


def crowd(connection: sqlite3.Connection, newest: Variant, scope: int, limits: Limits) -> list[FileRef]:
    """The variants of the newest one's chunk that are too many, lowest eviction score first.

    The newest is spared although it is unused and so scores lowest: otherwise a full store would never learn anything
    new.
    """
    query = f"{FILES} WHERE scope = ? AND chunk_id = ? AND variant_id != ? ORDER BY score, created"
    rows = connection.execute(query, (scope, newest.key.chunk_id, newest.variant_id)).fetchall()
    return [file_of(row) for row in rows[: max(0, len(rows) + 1 - limits.variants_per_chunk)]]
