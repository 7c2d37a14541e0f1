"""The order in which rows leave the catalog: their scores, the clock, and the chunks that have left.

`store.eviction` has the formulas, which are pure; here they meet the tables `variants`, `eviction` and `departed`.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cachecraft_rag.store.catalog import sums
from cachecraft_rag.store.catalog_records import FileRef, RowFilter
from cachecraft_rag.store.database import Database
from cachecraft_rag.store.eviction import (
    POLICIES,
    Policy,
    Saving,
    Use,
    VariantFacts,
    ticked,
    ticked_by_return,
)
from cachecraft_rag.types.variants import Variant

_LEAST_REMEMBERED = 1000
_FORGET_EVERY = 64  # rows of `departed` that are too old are deleted when this many more have left

# Of a damaged row any column may be of another type or out of range: such a number counts as 0.
_SCORE, _FREQUENCY, _SAVED, _SHARE = (
    f"iif(typeof({name}) = 'real' AND {name} BETWEEN 0.0 AND 1e15, {name}, 0.0)"
    for name in ("score", "reuse_frequency", "saved", "exact_share")
)
_ROW = f"""SELECT {sums.FILE}, {_SCORE}, scope, CAST(chunk_id AS BLOB), {_FREQUENCY}, {_SAVED}
    FROM variants"""
# A damaged row may name another chunk than its own.
_BESIDE = f"{_ROW} WHERE (scope = ? AND chunk_id = ?) OR variant_id = ? ORDER BY score, created"
_STANDING = f"""SELECT variant_id, scope, chunk_id, iif(typeof(tokens) = 'integer', tokens, 0), {sums.BYTES}, {_SHARE},
    {_FREQUENCY}, {_SAVED} FROM variants WHERE variant_id IN (SELECT value FROM json_each(?))"""
_USED = """UPDATE variants SET reuse_frequency = ?, saved = ?, score = ?, last_used = coalesce(?, last_used)
    WHERE scope = ? AND chunk_id = ? AND variant_id = ?"""
_CLOCK = "SELECT clock FROM eviction WHERE typeof(clock) = 'real'"
_REMEMBER = "INSERT OR REPLACE INTO departed (scope, chunk_id, reuse_frequency, saved) VALUES (?,CAST(? AS TEXT),?,?)"


class ScoredRow(NamedTuple):
    """A row that may be evicted, in the order of `_ROW`; id, time and chunk id as they lie there, also if damaged."""

    variant_id: str
    created: float
    file_bytes: int
    score: float
    scope: int
    chunk_id: bytes
    reuse_frequency: float
    saved: float

    @property
    def file(self) -> FileRef:
        """Its file."""
        return FileRef(self.variant_id, self.created, self.file_bytes)

    @property
    def used(self) -> Use:
        """The sum of all its uses."""
        return Use(self.reuse_frequency, self.saved)


class EvictionOrder:
    """Scores of rows, from which the lowest leaves first. All methods work in the transaction of their connection.

    `scope` is the catalog's number of a namespace and fingerprint.
    """

    def __init__(self, database: Database, policy: Policy | None) -> None:
        """Use this policy from now on; None: that of the last opening that named one, at first `Saving`.

        If the policy has changed, the clock starts at 0, and the scores of all rows are computed again.
        """
        with database.reading() as connection:
            names = connection.execute("SELECT policy FROM eviction").fetchall()
        name = names[0][0] if len(names) == 1 else None
        stored_policy = Saving() if name is None else POLICIES.get(name, Saving())
        self.policy = policy or stored_policy
        if not database.read_only and name != self.policy.name:
            with database.writing() as connection:
                self._score_all(connection)

    def lowest(self, connection: sqlite3.Connection, count: int) -> list[ScoredRow]:
        """Return the `count` lowest-scored rows, lowest first, the oldest of equal ones; below 0 counts as 0."""
        query = f"{_ROW} ORDER BY score, created LIMIT ?"
        return [ScoredRow(*row) for row in connection.execute(query, (max(0, count),))]

    def freeing(
        self, connection: sqlite3.Connection, excess: float, chosen: RowFilter | None = None
    ) -> tuple[list[ScoredRow], float]:
        """Return the lowest-scored of the chosen rows (None: all) that free `excess` bytes; and the bytes missing.

        The lowest is first. Without any excess there are no rows.
        """
        parameters: Sequence[str | float] = ()
        query = f"{_ROW} ORDER BY score, created"
        if chosen is not None:
            condition, parameters = chosen.as_sql()
            query = f"{_ROW} AS v JOIN scopes AS s USING (scope) WHERE {condition} ORDER BY v.score, v.created"
        rows = connection.execute(query, parameters)
        taken: list[ScoredRow] = []
        while excess > 0 and (row := rows.fetchone()) is not None:
            taken.append(ScoredRow(*row))
            excess -= taken[-1].file_bytes
        rows.close()  # an open cursor would see the deletions that follow
        return taken, max(excess, 0.0)

    def beside(
        self, connection: sqlite3.Connection, scope: int, chunk_id: str, variant_id: str
    ) -> list[ScoredRow]:
        """Return all rows of a chunk, and any other row with this variant id, lowest score first."""
        rows = connection.execute(_BESIDE, (scope, chunk_id, variant_id))
        return [ScoredRow(*row) for row in rows]

    def score(
        self, connection: sqlite3.Connection, variant: Variant, file_bytes: int, used: Use
    ) -> float:
        """Return the score of a variant that is stored now with these uses."""
        chunk_id = variant.key.chunk_id
        facts = VariantFacts(
            chunk_id, variant.variant_id, variant.tokens, file_bytes, variant.exact_share, used
        )
        return self.policy.score(facts, _clock(connection))

    def record_uses(
        self, connection: sqlite3.Connection, uses: Mapping[str, Use], *, at: float | None
    ) -> None:
        """Add to the uses of each variant id, and compute its score again; ids without a row are passed over.

        `at` is the time of the use, in seconds since 1970; None leaves that of the last use as it is.
        """
        changed = []
        clock = _clock(connection)
        rows = {row[0]: row for row in connection.execute(_STANDING, (json.dumps(list(uses)),))}
        for variant_id, use in uses.items():
            if (row := rows.get(variant_id)) is None:
                continue
            _, scope, chunk_id, tokens, nbytes, share, frequency, saved = row
            used = Use(frequency, saved) + use
            facts = VariantFacts(chunk_id, variant_id, tokens, nbytes, share, used)
            score = self.policy.score(facts, clock)
            changed.append((*used, score, at, scope, chunk_id, variant_id))
        connection.executemany(_USED, changed)

    def evicted(self, connection: sqlite3.Connection, rows: Sequence[ScoredRow]) -> list[FileRef]:
        """Move the clock (`ticked`) for rows about to be evicted, remember their chunks' uses; return their files."""
        clock = _clock(connection)
        many = False
        for row in rows:
            clock = max(clock, ticked(clock, row.score, used=row.saved > 0.0))
            departing = (row.scope, row.chunk_id, row.reuse_frequency, row.saved + 1.0)
            many |= not (connection.execute(_REMEMBER, departing).lastrowid or 0) % _FORGET_EVERY
        _move_clock(connection, clock)
        if many:
            query = "DELETE FROM departed WHERE place <= (SELECT max(place) FROM departed) - ?"
            connection.execute(query, (_most_remembered(connection),))
        return [row.file for row in rows]

    def returned(
        self, connection: sqlite3.Connection, scope: int, chunk_id: str, *, first: bool
    ) -> Use | None:
        """Forget that a chunk was evicted; if its `first` variant returns, move the clock and return the chunk's uses.

        Returns None for another variant, and if the chunk is not remembered as evicted.
        """
        query = f"DELETE FROM departed WHERE scope = ? AND chunk_id = ? RETURNING {_FREQUENCY}, {_SAVED}, place"
        departed = connection.execute(query, (scope, chunk_id)).fetchall()
        if not departed or not first:
            return None
        *uses, place = departed[0]
        last = connection.execute("SELECT max(place) FROM departed").fetchone()[0]
        if last is not None and place <= last - _most_remembered(connection):
            return None
        if lowest := self.lowest(connection, 1):
            _move_clock(connection, ticked_by_return(_clock(connection), lowest[0].score))
        return Use(*uses)

    def forget(self, connection: sqlite3.Connection, chunk_ids: Sequence[str]) -> None:
        """Forget that these chunks, of any scope, were evicted: `returned` then returns None for them."""
        if chunk_ids:
            query = "DELETE FROM departed WHERE chunk_id IN (SELECT value FROM json_each(?))"
            connection.execute(query, (json.dumps(list(chunk_ids)),))

    def _score_all(self, connection: sqlite3.Connection) -> None:
        """Compute every row's score: one pass over all rows."""
        ids = connection.execute("SELECT variant_id FROM variants ORDER BY created").fetchall()
        connection.execute("DELETE FROM eviction")
        connection.execute("INSERT INTO eviction VALUES (?, 0.0)", (self.policy.name,))
        unused = {variant_id: Use(0.0, 0.0) for (variant_id,) in ids}
        self.record_uses(connection, unused, at=None)


def _clock(connection: sqlite3.Connection) -> float:
    clocks = connection.execute(_CLOCK).fetchall()
    clock: float = clocks[0][0] if clocks else 0.0
    return clock


def _move_clock(connection: sqlite3.Connection, clock: float) -> None:
    """Advance the clock to this; it never goes back."""
    connection.execute("UPDATE eviction SET clock = max(clock, ?)", (clock,))


def _most_remembered(connection: sqlite3.Connection) -> int:
    variants, _ = sums.of_rows(connection)
    return max(_LEAST_REMEMBERED, variants)
