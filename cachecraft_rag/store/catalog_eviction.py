"""Eviction inside the catalog's transactions: scores of rows, the clock, what is remembered of chunks that left."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cachecraft_rag.store.catalog_records import FileRef, Limits
from cachecraft_rag.store.eviction import POLICIES, Policy, Saving, Standing, Use, ticked, ticked_by_return
from cachecraft_rag.types import Variant

MOST_USES = 1e15
FILES = "SELECT variant_id, created, file_bytes FROM variants"
_LEAVING = "SELECT variant_id, created, file_bytes, score, scope, chunk_id, reuse_frequency, saved FROM variants"
# A damaged row may name another chunk than its own.
_BESIDE = f"{_LEAVING} WHERE (scope = ?1 AND chunk_id = ?2) OR variant_id = ?3 ORDER BY score, created"
_STANDING = """SELECT scope, chunk_id, variant_id, tokens, file_bytes, exact_share, reuse_frequency, saved
    FROM variants WHERE variant_id IN (SELECT value FROM json_each(?))"""
_USED = """UPDATE variants SET reuse_frequency = ?, saved = ?, score = ?
    WHERE scope = ? AND chunk_id = ? AND variant_id = ?"""
_STATE = """SELECT clock, variants, file_bytes, (SELECT coalesce(sum(reserved_bytes), 0) FROM files_at_risk)
    FROM eviction, totals"""
_REMEMBER = "INSERT OR REPLACE INTO departed (scope, chunk_id, reuse_frequency, saved) VALUES (?,?,?,?)"
_LEAST_REMEMBERED = 1000
_FORGET_EVERY = 64  # what is too long ago is deleted when so many more have left


@dataclass(slots=True)
class State:
    """What every decision starts from. Whoever changes a table in the same transaction changes this too.

    clock           what scores are counted from, see `eviction.ticked`
    variants        rows
    file_bytes      of the files of all rows
    reserved_bytes  of files that are being written or deleted; they count against the budget too
    moved           the clock is not written down yet, see `write_clock`
    """

    clock: float
    variants: int
    file_bytes: int
    reserved_bytes: int
    moved: bool = False

    def excess(self, incoming: int, limits: Limits) -> int:
        """By how much the byte budget would be exceeded."""
        return self.file_bytes + self.reserved_bytes + incoming - limits.disk_bytes

    def move(self, clock: float) -> None:
        """Let the clock go on to this; it never goes back."""
        if clock > self.clock:
            self.clock, self.moved = clock, True


class Leaving(NamedTuple):
    """A row that may have to leave, its columns as they lie there."""

    variant_id: Any
    created: Any
    file_bytes: Any
    score: Any
    scope: Any
    chunk_id: Any
    reuse_frequency: Any
    saved: Any

    @property
    def file(self) -> FileRef:
        """Its file."""
        return file_of(self[:3])

    @property
    def used(self) -> Use | None:
        """All its uses; None for what no uses can be."""
        return sound_use(self.reuse_frequency, self.saved)


def file_of(row: Sequence[Any]) -> FileRef:
    """The file of a row, id and time as they lie there, so that the row can be named again."""
    variant_id, created, file_bytes = row
    sound = type(file_bytes) is int and file_bytes > 0
    return FileRef(variant_id, created, file_bytes if sound else 0)


def sound_use(frequency: object, saved: object) -> Use | None:
    """Uses as they lie in a row; None for what no uses can be."""
    if not isinstance(frequency, float) or not isinstance(saved, float):
        return None
    return Use(frequency, saved) if 0.0 <= frequency <= MOST_USES and 0.0 <= saved <= MOST_USES else None


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
    record_uses(connection, {variant_id: Use(0.0, 0.0) for variant_id in ids}, policy, clock=0.0)


def state_of(connection: sqlite3.Connection) -> State:
    """The state at this moment of the transaction."""
    clock, *sizes = connection.execute(_STATE).fetchone()
    return State(clock if isinstance(clock, float) else 0.0, *sizes)


def write_clock(connection: sqlite3.Connection, state: State) -> None:
    """Write down where the clock stands, if that is new."""
    if state.moved:
        connection.execute("UPDATE eviction SET clock = ?", (state.clock,))
        state.moved = False


def record_uses(connection: sqlite3.Connection, uses: Mapping[str, Use], policy: Policy, *, clock: float) -> None:
    """Add uses, by variant id, and raise the scores; ids that are gone, and damaged rows, are passed over."""
    changed = []
    rows = {row[2]: row for row in connection.execute(_STANDING, (json.dumps(list(uses)),))}
    for variant_id, use in uses.items():
        if (row := rows.get(variant_id)) is None:
            continue
        scope, chunk_id, _, tokens, nbytes, share, frequency, saved = row
        before = sound_use(frequency, saved)
        if before is None or not isinstance(share, float) or type(tokens) is not int or type(nbytes) is not int:
            continue
        used = before + use
        score = policy.score(Standing(chunk_id, variant_id, tokens, nbytes, share, used), clock)
        changed.append((*used, score, scope, chunk_id, variant_id))
    connection.executemany(_USED, changed)


def score_of_new(variant: Variant, *, file_bytes: int, used: Use, policy: Policy, clock: float) -> float:
    """The score of a row that is about to be added."""
    facts = (variant.key.chunk_id, variant.variant_id, variant.tokens, file_bytes, variant.exact_share)
    return policy.score(Standing(*facts, used), clock)


def make_leave(connection: sqlite3.Connection, rows: Sequence[Leaving], state: State) -> list[FileRef]:
    """Move the clock to the scores of rows that are about to leave for others, and remember their uses by chunk.

    Returns their files; the caller removes the rows.
    """
    many = False
    for row in rows:
        used = row.used
        if isinstance(row.score, float) and row.score < MOST_USES:
            state.move(ticked(state.clock, row.score, used=used is not None and used.saved > 0.0))
        if used is not None and isinstance(row.chunk_id, str):
            departing = (row.scope, row.chunk_id, used.frequency, used.saved + 1.0)
            many |= not (connection.execute(_REMEMBER, departing).lastrowid or 0) % _FORGET_EVERY
    if many:
        query = "DELETE FROM departed WHERE place <= (SELECT max(place) FROM departed) - ?"
        connection.execute(query, (_most_remembered(state),))
    return [row.file for row in rows]


def _most_remembered(state: State) -> int:
    return max(_LEAST_REMEMBERED, state.variants)


def remembered(connection: sqlite3.Connection, scope: int, chunk_id: str, *, first: bool, state: State) -> Use | None:
    """The uses of a chunk that had to leave, and is stored again: once, and for its `first` variant. The clock moves.

    None where it did not have to leave, as far as is known.
    """
    query = "DELETE FROM departed WHERE scope = ? AND chunk_id = ? RETURNING reuse_frequency, saved, place"
    found = connection.execute(query, (scope, chunk_id)).fetchall()
    if not found or not first:
        return None
    *uses, place = found[0]
    last = connection.execute("SELECT max(place) FROM departed").fetchone()[0]
    if last is not None and place <= last - _most_remembered(state):
        return None
    lowest = connection.execute("SELECT score FROM variants ORDER BY score, created LIMIT 1").fetchone()
    if lowest is not None and isinstance(lowest[0], float) and lowest[0] < MOST_USES:
        state.move(ticked_by_return(state.clock, lowest[0]))
    return sound_use(*uses) or Use(0.0, 0.0)


def forget(connection: sqlite3.Connection, chunk_ids: Sequence[str]) -> None:
    """These chunks were removed: that some had to leave before is no reason to have them back."""
    query = "DELETE FROM departed WHERE chunk_id IN (SELECT value FROM json_each(?))"
    connection.execute(query, (json.dumps(list(chunk_ids)),))


def lowest_scored(connection: sqlite3.Connection, *, excess: float) -> tuple[list[Leaving], float]:
    """The rows to remove, lowest score first, so that at least `excess` bytes are freed, and how much is missing."""
    if excess <= 0:
        return [], 0.0
    rows, missing = until(connection.execute(f"{_LEAVING} ORDER BY score, created"), excess)
    return [Leaving(*row) for row in rows], missing


def until(rows: sqlite3.Cursor, excess: float) -> tuple[list[Sequence[Any]], float]:
    """The first rows whose files, their first columns, together free at least `excess` bytes; and what is missing."""
    taken: list[Sequence[Any]] = []
    while excess > 0 and (row := rows.fetchone()) is not None:
        taken.append(row)
        excess -= file_of(row[:3]).file_bytes
    rows.close()  # an open cursor would see the deletions that follow
    return taken, max(excess, 0.0)


def lowest_scored_over(connection: sqlite3.Connection, over: int, *, spared: str) -> list[Leaving]:
    """The rows to remove where there are so many too many, lowest score first."""
    if over <= 0:
        return []
    query = f"{_LEAVING} WHERE variant_id != ? ORDER BY score, created LIMIT ?"
    return [Leaving(*row) for row in connection.execute(query, (spared, over))]


def variants_beside(
    connection: sqlite3.Connection, scope: int, variant: Variant
) -> tuple[Leaving | None, list[FileRef]]:
    """The row of this variant, if there is one, and the files of its chunk's others, lowest eviction score first."""
    rows = [Leaving(*row) for row in connection.execute(_BESIDE, (scope, variant.key.chunk_id, variant.variant_id))]
    same = next((row for row in rows if row.variant_id == variant.variant_id), None)
    return same, [row.file for row in rows if row is not same]


def crowd(others: Sequence[FileRef], limits: Limits) -> list[FileRef]:
    """Which of the `others` are too many beside a new variant of their chunk.

    The newest is spared although it is unused and so scores lowest: otherwise a full store would never learn anything
    new.
    """
    return list(others[: max(0, len(others) + 1 - limits.variants_per_chunk)])
