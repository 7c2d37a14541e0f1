"""The catalog: one SQLite row per chunk-cache, so that planning never touches a tensor.

What makes it fit for its two hard duties:

* *Fast lookup.* All variants of a chunk lie next to each other in one B-tree (`WITHOUT ROWID`, keyed by scope, chunk
  and variant), so 20 chunks cost 20 descents however many variants there are. A rowid table with an index was rejected:
  every variant then costs a second descent, most of them to a page that is not in SQLite's cache. Ids of an origin
  prefix are packed to 16 bytes each and scores to float32. Token scores, needed for winners only, live in tables of
  their own.
* *A truth that survives a kill.* A row is the only proof that a file counts. The table `files_at_risk` names every file
  that may exist without a row: it is filled before a file is created and, in the same transaction as the row's removal,
  before one is deleted. Whoever opens the store next removes what a dead process left, without listing any folder. The
  same entries reserve space, so two processes that write at once cannot exceed the byte budget together.

How several threads and processes share the file is the concern of `database`.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from cachecraft_rag.errors import StoreError
from cachecraft_rag.store.catalog_changes import Changes
from cachecraft_rag.store.catalog_eviction import (
    FILES,
    adopt,
    crowd,
    file_of,
    forget,
    lowest_scored,
    lowest_scored_over,
    make_leave,
    policy_in_use,
    record_uses,
    remembered,
    until,
    variants_beside,
)
from cachecraft_rag.store.catalog_records import DamagedRow, FileRef, Limits, Listed, OlderRow, RowFilter, Totals
from cachecraft_rag.store.catalog_rows import (
    COLUMNS,
    NOTHING,
    CatalogRow,
    scores_of_row,
    sum_of,
    variant_of_row,
)
from cachecraft_rag.store.catalog_schema import MIGRATIONS
from cachecraft_rag.store.database import Database, fetched, kind_of_cache
from cachecraft_rag.store.eviction import Policy, Use
from cachecraft_rag.store.expected import unsound, unsound_scores
from cachecraft_rag.types import IDENTITY_VERSION, EvictionReason, Payload, TokenScores, Variant, identity_version

logger = logging.getLogger("cachecraft_rag.store")
_MOST_TOKENS = 1 << 24  # of a chunk; no context is so long

_LISTED = f"""SELECT s.namespace, s.fingerprint, {COLUMNS}
    FROM variants AS v JOIN scopes AS s USING (scope)"""
_LOOKUP = f"""SELECT {COLUMNS} FROM variants AS v
  WHERE v.scope = (SELECT scope FROM scopes WHERE namespace = ?1 AND fingerprint = ?2)
    AND v.chunk_id IN (SELECT value FROM json_each(?3)) AND (v.session IS NULL OR v.session = ?4)"""
_OLDER = """SELECT chunk_id, session, variant_id, created, file_bytes FROM variants
  WHERE scope IN (SELECT value FROM json_each(?1)) AND chunk_id IN (SELECT value FROM json_each(?2))"""
_SCORES = """SELECT asked.value, v.tokens, v.scores_sum, i.scores, r.scores FROM json_each(?) AS asked
    LEFT JOIN variants AS v ON v.variant_id = asked.value
    LEFT JOIN token_scores AS i ON i.variant_id = asked.value
    LEFT JOIN token_received AS r ON r.variant_id = asked.value"""


class Catalog(Changes):
    """The rows of a chunk-cache store. Any thread may call any method; failures of SQLite are `StoreError`."""

    def __init__(
        self,
        path: Path,
        *,
        busy_timeout_s: float = 5.0,
        read_only: bool = False,
        policy: Policy | None = None,
        scratch: bool = False,
    ) -> None:
        """Open or create the catalog at `path`. Raises StoreError, saying what to do, when that is not possible.

        `policy` makes the eviction scores; None is that of the last opening that named one. All processes on a folder
        should have the same. `scratch`: there are no files and nobody keeps it, so it need not survive anything; all
        calls are made in one block of `one_transaction`.
        """
        self.path = path
        self._scopes: dict[tuple[str, str], int] = {}  # those that are in the file; none ever leaves it
        super().__init__(files=not scratch)
        kind = kind_of_cache(MIGRATIONS, scratch=scratch)
        self._db = Database(path, kind=kind, busy_timeout_s=busy_timeout_s, read_only=read_only)
        try:
            with self._db.reading() as connection:
                self.policy = policy or policy_in_use(connection)
            if read_only:
                return
            self._add_sums()
            with self._db.writing() as connection:
                adopt(connection, self.policy)
        except StoreError:
            self._db.close()
            raise

    def close(self) -> None:
        """Let go of the file; any later call raises StoreError."""
        self._db.close()

    # -- reading ------------------------------------------------------------------------------------------------------

    def lookup(
        self, namespace: str, fingerprint: str, chunk_ids: Sequence[str], *, session: str | None = None
    ) -> dict[str, list[Variant]]:
        """All variants of the chunks that `session` may see: the shared ones and those private to exactly that session.

        Every asked chunk id is a key of the answer, with an empty list where nothing is stored.
        """
        return self.find(namespace, fingerprint, chunk_ids, session=session)[0]

    def find(
        self,
        namespace: str,
        fingerprint: str,
        chunk_ids: Sequence[str],
        *,
        session: str | None = None,
        payload: Payload = NOTHING,
    ) -> tuple[dict[str, list[Variant]], list[DamagedRow]]:
        """As `lookup`, all variants with this `payload`; and the rows of these chunks that are not as they were."""
        found: dict[str, list[Variant]] = {chunk_id: [] for chunk_id in chunk_ids}
        damaged: list[DamagedRow] = []
        parameters = (namespace, fingerprint, json.dumps(list(found)), session)
        with self._db.reading() as connection:
            rows = fetched(connection, _LOOKUP, parameters)
        for row in rows:
            variant = _read(namespace, fingerprint, CatalogRow(*row), payload)
            if isinstance(variant, DamagedRow):
                damaged.append(variant)
            else:
                found[variant.key.chunk_id].append(variant)
        return found, damaged

    def of_older_versions(
        self, namespace: str, fingerprint: str, chunk_ids: Sequence[str], *, session: str | None = None
    ) -> list[OlderRow]:
        """The rows of these chunks that an older version of the package stored, for any model; none can be served."""
        newest = identity_version(fingerprint) or 0
        with self._db.reading() as connection:
            query = "SELECT scope, fingerprint FROM scopes WHERE namespace = ?"
            scopes = [
                scope
                for scope, found in fetched(connection, query, (namespace,))
                if (version := identity_version(str(found))) is not None and version < newest
            ]
            if not scopes:
                return []
            rows = fetched(connection, _OLDER, (json.dumps(scopes), json.dumps(list(chunk_ids))))
        return [OlderRow(file_of(file), chunk_id, owner in (None, session)) for chunk_id, owner, *file in rows]

    def token_scores(self, variant_ids: Sequence[str]) -> dict[str, TokenScores]:
        """The token scores of each variant; without any where none were stored, they are damaged or the row is gone."""
        with self._db.reading() as connection:
            rows = fetched(connection, _SCORES, (json.dumps(list(variant_ids)),))
        return {
            variant_id: _read_scores(tokens, told=told, inter=inter, received=received)
            for variant_id, tokens, told, inter, received in rows
        }

    def rows(self, chosen: RowFilter, *, offset: int = 0, limit: int = 100) -> list[Listed]:
        """A page of rows, the highest eviction score first; without those that are damaged."""
        condition, parameters = chosen.as_sql()
        query = f"{_LISTED} WHERE {condition} ORDER BY v.score DESC, v.created DESC, v.variant_id LIMIT ? OFFSET ?"
        return [row for row in self._listed(query, (*parameters, limit, offset)) if isinstance(row, Listed)]

    def scan(self, page: int = 500) -> Iterator[Listed | DamagedRow]:
        """Every row once, in the order of variant ids. Rows that come or go meanwhile may or may not be seen."""
        query = f"{_LISTED} WHERE v.variant_id > ?1 ORDER BY v.variant_id LIMIT ?2"
        after = ""
        while batch := self._listed(query, (after, page)):
            yield from batch
            last = batch[-1]
            after = last.variant.variant_id if isinstance(last, Listed) else last.file.variant_id

    def _listed(self, query: str, parameters: tuple[object, ...]) -> list[Listed | DamagedRow]:
        with self._db.reading() as connection:
            rows = fetched(connection, query, parameters)
        found: list[Listed | DamagedRow] = []
        for namespace, fingerprint, *columns in rows:
            row = CatalogRow(*columns)
            read = _read(namespace, fingerprint, row)
            found.append(read if isinstance(read, DamagedRow) else Listed(read, row.file_bytes))
        return found

    def totals(self) -> Totals:
        """Sums over all rows, of all processes."""
        with self._db.reading() as connection:
            query = """SELECT variants, (SELECT count(*) FROM (SELECT DISTINCT scope, chunk_id FROM variants)),
                file_bytes, (SELECT coalesce(sum(reserved_bytes), 0) FROM files_at_risk) FROM totals"""
            return Totals(*connection.execute(query).fetchone())

    def holds(self, file: FileRef, *, or_at_risk: bool = False) -> bool:
        """Whether a row stands behind exactly this file (or, if asked, a writer announced to create or delete it)."""
        query = """SELECT 1 FROM variants WHERE variant_id = ?1 AND created = ?2
            UNION ALL SELECT 1 FROM files_at_risk WHERE variant_id = ?1 AND created = ?2 AND ?3"""
        with self._db.reading() as connection:
            return connection.execute(query, (file.variant_id, file.created, or_at_risk)).fetchone() is not None

    def at_risk(self) -> dict[str, list[FileRef]]:
        """Files that may exist without a row, by the writer that is (or was) about to create or delete them."""
        found: dict[str, list[FileRef]] = {}
        with self._db.reading() as connection:
            query = "SELECT writer, variant_id, created, reserved_bytes FROM files_at_risk"
            for writer, *file in connection.execute(query):
                found.setdefault(writer, []).append(FileRef(*file))
        return found

    def problems(self) -> list[str]:
        """What SQLite's own integrity check finds wrong; empty when all is well. Reads the whole catalog."""
        return self._db.problems()

    # -- writing ------------------------------------------------------------------------------------------------------

    def reserve(self, variant: Variant, *, file_bytes: int, writer: str, limits: Limits) -> list[FileRef] | None:
        """Announce a file before it is created, if there is room for it; returns [] then.

        Else it returns files whose rows went to make room. The caller deletes those, tells `settle` and asks again:
        what is not deleted yet still counts, or a second writer would fill the room before it is free. None, with
        nothing changed, when even an empty catalog would leave no room because of other writers.
        """
        with self._db.writing() as connection:
            state = self._begun(connection)
            lowest, missing = lowest_scored(connection, excess=state.excess(file_bytes, limits))
            if missing:
                return None
            victims = make_leave(connection, lowest, state)
            if not victims:
                self._announce(connection, [FileRef(variant.variant_id, variant.created, file_bytes)], writer)
            gone = self._remove(connection, victims, writer, EvictionReason.BUDGET)
            self._end(connection)
            return gone

    def commit(
        self,
        variant: Variant,
        token_scores: TokenScores,
        *,
        file_bytes: int,
        writer: str,
        limits: Limits,
        another: bool = False,
    ) -> list[FileRef] | None:
        """Make a written file count: its row, in place of an older one of the same identity, whose f_r it inherits.

        Returns the files whose rows gave way (the older one, and what exceeds the number of variants); the caller
        deletes them and tells `settle`. None, with nothing changed, for `another` variant of a chunk that was removed:
        of which there is none, nor did the last one have to leave for others.
        """
        with self._db.writing() as connection:
            state = self._begun(connection)
            scope = self._scope_of(connection, variant)
            same, others = variants_beside(connection, scope, variant)
            used = (same and same.used) or Use(variant.reuse_frequency, min(variant.reuse_frequency, 1.0))
            if same is None:
                known = remembered(connection, scope, variant.key.chunk_id, first=not others, state=state)
                if another and not others and known is None:
                    return None
                used += known or Use(0.0, 0.0)
            older = [] if same is None else [same.file]
            gone = self._remove(connection, older, writer, EvictionReason.REPLACED)
            gone += self._remove(connection, crowd(others, limits), writer, EvictionReason.CHUNK_CAP)
            state = self._now(connection)
            over = lowest_scored_over(connection, state.variants + 1 - limits.max_variants, spared=variant.variant_id)
            self._add(connection, variant, token_scores, scope=scope, file_bytes=file_bytes, used=used)
            leaving = make_leave(connection, over, state)
            gone += self._remove(connection, leaving, writer, EvictionReason.COUNT_CAP)
            self._settle(connection, [FileRef(variant.variant_id, variant.created)])
            self._end(connection)
        # Two captures of one identity in the same clock tick share a file name; the file now belongs to the new row.
        return [file for file in gone if (file.variant_id, file.created) != (variant.variant_id, variant.created)]

    def settle(self, files: Iterable[FileRef]) -> None:
        """These files exist no more, or never did: they need not be looked for."""
        with self._db.writing() as connection:
            self._begin()
            self._settle(connection, files)

    def remove(
        self, files: Iterable[FileRef], *, writer: str, why: EvictionReason = EvictionReason.DAMAGED
    ) -> list[FileRef]:
        """Remove the rows that stand behind exactly these files; returns those that were there."""
        query = f"{FILES} WHERE variant_id = ? AND created = ?"
        with self._db.writing() as connection:
            self._begin()
            found = [connection.execute(query, (file.variant_id, file.created)).fetchone() for file in files]
            return self._remove(connection, [file_of(row) for row in found if row is not None], writer, why)

    def evict(self, chosen: RowFilter, *, writer: str, down_to_bytes: int | None = None) -> list[FileRef]:
        """Remove the chosen rows, lowest eviction score first: all, or until all files have `down_to_bytes` at most."""
        condition, parameters = chosen.as_sql()
        query = f"""SELECT v.variant_id, v.created, v.file_bytes FROM variants AS v JOIN scopes AS s USING (scope)
            WHERE {condition} ORDER BY v.score, v.created"""
        with self._db.writing() as connection:
            self._begin()
            excess = float("inf")
            if down_to_bytes is not None:
                excess = connection.execute("SELECT file_bytes FROM totals").fetchone()[0] - down_to_bytes
            leaving, _ = until(connection.execute(query, parameters), excess)
            if chosen.chunk_ids is not None:
                forget(connection, chosen.chunk_ids)
            return self._remove(connection, [file_of(row) for row in leaving], writer, EvictionReason.ADMINISTRATOR)

    def remember(self, limits: Mapping[str, int]) -> dict[str, int]:
        """Write down these limits by name and return all that were ever written down, the latest of each."""
        with self._db.writing() if limits else self._db.reading() as connection:
            connection.executemany("INSERT OR REPLACE INTO limits VALUES (?,?)", limits.items())
            found = connection.execute("SELECT name, value FROM limits").fetchall()
        known = {limit.name for limit in fields(Limits)}
        return {name: value for name, value in found if name in known and type(value) is int and value > 0}

    def enforce(self, limits: Limits, *, writer: str) -> list[FileRef]:
        """Remove what exceeds the byte budget or the number of variants, say after the settings were lowered."""
        with self._db.writing() as connection:
            lowest, _ = lowest_scored(connection, excess=self._begun(connection).excess(0, limits))
            gone = self._remove(connection, [row.file for row in lowest], writer, EvictionReason.BUDGET)
            over = lowest_scored_over(connection, self._now(connection).variants - limits.max_variants, spared="")
            gone += self._remove(connection, [row.file for row in over], writer, EvictionReason.COUNT_CAP)
        return gone

    def record_uses(self, uses: Mapping[str, Use]) -> None:
        """Add to the uses of each variant id, which raises its score; ids that are gone are passed over."""
        with self._db.writing() as connection:
            record_uses(connection, uses, self.policy, clock=self._begun(connection).clock)

    def _scope_of(self, connection: sqlite3.Connection, variant: Variant) -> int:
        """As the function; asked of the file only until it is there."""
        names = (variant.key.namespace, variant.key.fingerprint)
        if (known := self._scopes.get(names)) is not None:
            return known
        new = connection.total_changes
        scope = _scope_of(connection, variant)
        if connection.total_changes == new:  # else the transaction may still be rolled back
            self._scopes[names] = scope
        return scope

    def _add_sums(self, page: int = 1000) -> None:
        """Add the checksums that rows of before lack, where their fields are sound; what is not is a miss anyhow."""
        query = f"{_LISTED} WHERE v.row_sum IS NULL AND v.variant_id > ? ORDER BY v.variant_id LIMIT ?"
        after = ""
        while True:
            with self._db.reading() as connection:
                rows = fetched(connection, query, (after, page))
            if not rows:
                return
            sums = []
            for namespace, fingerprint, *columns in rows:
                row = CatalogRow(*columns)
                after = row.variant_id
                if isinstance(_read(namespace, fingerprint, row), Variant):
                    sums.append((sum_of(namespace, fingerprint, row), row.variant_id, row.created))
            with self._db.writing() as connection:
                update = "UPDATE variants SET row_sum = ? WHERE variant_id = ? AND created = ? AND row_sum IS NULL"
                connection.executemany(update, sums)

    @contextmanager
    def one_transaction(self) -> Iterator[None]:
        """All calls of this thread in the block are one transaction, for those who make many and share with nobody.

        An error of any of them must end the block.
        """
        try:
            with self._db.one_transaction():
                self._state, self._one_transaction = None, True
                try:
                    yield
                    with self._db.writing() as connection:
                        self._forget_state(connection)
                finally:
                    self._state, self._one_transaction = None, False
        except BaseException:
            self._scopes.clear()  # what was added to the file in the block is not in it
            raise

    @contextmanager
    def standstill(self) -> Iterator[None]:
        """Keep every other writer, in any process, from adding or removing rows while the block runs. Keep it short."""
        with self._db.writing():
            yield


def _scope_of(connection: sqlite3.Connection, variant: Variant) -> int:
    names = (variant.key.namespace, variant.key.fingerprint)
    query = "SELECT scope FROM scopes WHERE namespace = ? AND fingerprint = ?"
    if (found := connection.execute(query, names).fetchone()) is None:
        connection.execute("INSERT INTO scopes (namespace, fingerprint) VALUES (?,?)", names)
        found = connection.execute(query, names).fetchone()
    scope: int = found[0]
    return scope


def _read(namespace: str, fingerprint: str, row: CatalogRow, payload: Payload = NOTHING) -> Variant | DamagedRow:
    """The variant of a row, or what is wrong with it."""
    try:
        variant = variant_of_row(namespace, fingerprint, row, payload)
        if not (flaw := unsound(variant)):
            return variant
        reason = f"its row in the catalog is damaged: {flaw}"
    except ValueError as error:
        reason = str(error)
    newer = (identity_version(str(fingerprint)) or 0) > IDENTITY_VERSION
    return DamagedRow(file_of((row.variant_id, row.created, row.file_bytes)), row.chunk_id, reason, newer)


def _read_scores(tokens: Any, *, told: Any, inter: Any, received: Any) -> TokenScores:
    """Token scores; none where they are damaged: then the choice of tokens is what it is without."""
    try:
        scores = scores_of_row(told=told, inter=inter, received=received, most=_MOST_TOKENS)
        if tokens is None or not unsound_scores(scores, tokens):
            return scores
        problem = "they do not fit its tokens"
    except (ValueError, TypeError) as error:
        problem = str(error)
    logger.info("Token scores in the catalog are damaged: %s", problem)
    return TokenScores()
