"""Rows that come and go inside a transaction, and the state that every decision starts from, kept up with them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from cachecraft_rag.store.catalog_eviction import State, score_of_new, state_of, write_clock
from cachecraft_rag.store.catalog_records import FileRef
from cachecraft_rag.store.catalog_rows import CatalogRow, packed, row_of, sum_of_scores
from cachecraft_rag.store.eviction import Policy, Use
from cachecraft_rag.types import EvictionReason, TokenScores, Variant

_INSERTED = ("scope", *CatalogRow._fields, "scores_sum", "saved", "score")
_INSERT = f"INSERT INTO variants ({', '.join(_INSERTED)}) VALUES ({', '.join('?' * len(_INSERTED))})"
_ANNOUNCE = "INSERT OR IGNORE INTO files_at_risk VALUES (?,?,?,?)"
_ANNOUNCE_AGAIN = "INSERT OR REPLACE INTO files_at_risk VALUES (?,?,?,?)"
_SETTLE = "DELETE FROM files_at_risk WHERE variant_id = ? AND created = ? RETURNING reserved_bytes"


class Changes:
    """What the catalog's calls have in common. Every method is called by who holds the write lock, in a transaction."""

    policy: Policy

    def __init__(self, *, files: bool) -> None:
        """`files`: whether there are any. Where there are none, none is at risk; what is reserved counts all the
        same.
        """
        self._state: State | None = None  # of the transaction under way, where it has been read; see `_now`
        self._one_transaction = False
        self._reserved: dict[tuple[str, float], int] | None = None if files else {}

    def _begun(self, connection: sqlite3.Connection) -> State:
        """The state when a call begins."""
        self._begin()
        return self._now(connection)

    def _begin(self) -> None:
        """A call begins, and other processes may have changed the state since the last one, unless both are one
        transaction. To be called within it.
        """
        if not self._one_transaction:
            self._state = None

    def _now(self, connection: sqlite3.Connection) -> State:
        """The state, read once in a transaction; what follows in it keeps it up."""
        if self._state is None:
            self._state = state_of(connection)
            self._state.reserved_bytes += sum((self._reserved or {}).values())
        return self._state

    def _end(self, connection: sqlite3.Connection) -> None:
        """A call that may have moved the clock is through."""
        if self._state is not None and not self._one_transaction:
            write_clock(connection, self._state)

    def _forget_state(self, connection: sqlite3.Connection) -> None:
        """Something was not as expected: have the state read again."""
        if self._state is not None:
            write_clock(connection, self._state)
            self._state = None

    def _add(
        self,
        connection: sqlite3.Connection,
        variant: Variant,
        token_scores: TokenScores,
        *,
        scope: int,
        file_bytes: int,
        used: Use,
    ) -> None:
        state = self._now(connection)
        scores = (packed(token_scores.inter), packed(token_scores.received))
        score = score_of_new(variant, file_bytes=file_bytes, used=used, policy=self.policy, clock=state.clock)
        row = row_of(variant, file_bytes=file_bytes, frequency=used.frequency)
        connection.execute(_INSERT, (scope, *row, sum_of_scores(*scores), used.saved, score))
        state.variants += 1
        state.file_bytes += file_bytes
        for table, given in zip(("token_scores", "token_received"), scores, strict=True):
            if given is not None:
                connection.execute(f"INSERT OR REPLACE INTO {table} VALUES (?,?)", (variant.variant_id, given))

    def _remove(
        self, connection: sqlite3.Connection, files: list[FileRef], writer: str, why: EvictionReason
    ) -> list[FileRef]:
        """Delete rows; their files are at risk, and count against the budget, until the caller has unlinked them."""
        if not files:
            return files
        rows = [(file.variant_id, file.created) for file in files]
        deleted = connection.executemany("DELETE FROM variants WHERE variant_id = ? AND created = ?", rows).rowcount
        if deleted < len(files) or not all(file.file_bytes for file in files):  # a damaged row, say
            self._forget_state(connection)
        elif (state := self._state) is not None:
            state.variants -= deleted
            state.file_bytes -= sum(file.file_bytes for file in files)
        self._announce(connection, files, writer)
        return [FileRef(file.variant_id, file.created, file.file_bytes, why) for file in files]

    def _announce(self, connection: sqlite3.Connection, files: list[FileRef], writer: str) -> None:
        """These files may exist without a row from now on."""
        if self._reserved is not None:
            state = self._now(connection)
            for file in files:
                self._reserved[file.variant_id, file.created] = file.file_bytes
                state.reserved_bytes += file.file_bytes
            return
        rows = [(file.variant_id, file.created, writer, file.file_bytes) for file in files]
        if connection.executemany(_ANNOUNCE, rows).rowcount < len(rows):
            self._forget_state(connection)
            connection.executemany(_ANNOUNCE_AGAIN, rows)
        elif self._state is not None:
            self._state.reserved_bytes += sum(file.file_bytes for file in files)

    def _settle(self, connection: sqlite3.Connection, files: Iterable[FileRef]) -> None:
        if self._reserved is not None:
            state = self._now(connection)
            for file in files:
                state.reserved_bytes -= self._reserved.pop((file.variant_id, file.created), 0)
            return
        for file in files:
            found = connection.execute(_SETTLE, (file.variant_id, file.created)).fetchall()
            if found and self._state is not None:
                self._state.reserved_bytes -= found[0][0]
