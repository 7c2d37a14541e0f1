"""The catalog: one SQLite row per chunk-cache, so that planning never touches a tensor.

It serves two hard duties:

* *Fast look-ups.* All variants of a chunk lie next to each other in one B-tree (`WITHOUT ROWID`, keyed by scope, chunk
  and variant), so 20 chunks cost 20 descents however many variants there are. A rowid table with an index was rejected:
  every variant then costs a second descent, most of them to a page that is not in SQLite's cache. Ids of an origin
  prefix are packed to 16 bytes each and scores to float32. Token scores, needed for winners only, live in tables of
  their own.
* *Consistency after a kill.* A file counts only if it has a row. The table `files_at_risk` names every file
  that may exist without a row: it is filled before a file is created and, in the same transaction as the row's removal,
  before one is deleted. The next opening removes what a dead process left, without listing any folder. The
  same entries reserve space, so two processes that write at once cannot exceed the byte budget together.

`database` lets several threads and processes share the file. `eviction_order` says which rows leave first, and `sums`
how many there are.
"""

from __future__ import annotations

import json
import logging
import math
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from cachecraft_rag.store.catalog import found_texts, removals, sums
from cachecraft_rag.store.catalog.eviction_order import EvictionOrder
from cachecraft_rag.store.catalog.eviction_rules import EvictionRule
from cachecraft_rag.store.catalog.rows import (
    COLUMNS,
    NOTHING,
    CatalogRow,
    packed,
    row_of,
    sum_of_scores,
    unpacked,
    variant_of_row,
)
from cachecraft_rag.store.catalog.schema import CATALOG_KIND
from cachecraft_rag.store.catalog_records import (
    DamagedRow,
    FileRef,
    Limits,
    Listed,
    OtherTexts,
    RowFilter,
    Totals,
)
from cachecraft_rag.store.database import Database, Parameters, fetched
from cachecraft_rag.store.eviction import Policy, Use
from cachecraft_rag.store.row_checks import row_error, scores_are_wrong
from cachecraft_rag.types.captures import TokenScores
from cachecraft_rag.types.digests import passage_id
from cachecraft_rag.types.store_reasons import EvictionReason
from cachecraft_rag.types.variants import PayloadFacts, Variant

logger = logging.getLogger("cachecraft_rag.store")

_SCOPED = "variants AS v JOIN scopes AS s USING (scope)"
# `last_used` is not covered by the row's checksum: a damaged one counts as never used.
_ROW_LISTED = (
    f"s.namespace, s.fingerprint, iif(typeof(v.last_used) = 'real', v.last_used, 0.0), {COLUMNS}"
)
_LISTED = f"SELECT {_ROW_LISTED} FROM {_SCOPED}"
_LISTED_WITH_SCORES = f"""SELECT v.scores_sum, i.scores, {_ROW_LISTED} FROM {_SCOPED}
    LEFT JOIN token_scores AS i ON i.variant_id = v.variant_id"""
_IN_NAMESPACE = "(? IS NULL OR s.namespace = ?)"
_LOOKUP = f"""SELECT {COLUMNS} FROM variants AS v
  WHERE v.scope = (SELECT scope FROM scopes WHERE namespace = :namespace AND fingerprint = :fingerprint)
    AND v.chunk_id IN (SELECT value FROM json_each(:chunk_ids)) AND (v.session IS NULL OR v.session = :session)"""
_SCORES = """SELECT asked.value, v.tokens, v.scores_sum, i.scores FROM json_each(?) AS asked
    LEFT JOIN variants AS v ON v.variant_id = asked.value
    LEFT JOIN token_scores AS i ON i.variant_id = asked.value"""
_INSERTED = ("scope", *CatalogRow._fields, "scores_sum", "saved", "score")
_INSERT = (
    f"INSERT INTO variants ({', '.join(_INSERTED)}) VALUES ({', '.join('?' * len(_INSERTED))})"
)


class Catalog:
    """The rows of a chunk-cache store. Any thread may call any method. `writer` is a `Writers.token`.

    Failures of SQLite are `StoreError`. On a full disk a method that changes the catalog raises its subclass
    `DiskFullError`. A catalog that cannot be written (`read_only`) can be read, and every change raises StoreError.
    """

    def __init__(
        self, path: Path, *, busy_timeout_s: float = 5.0, policy: Policy | None = None
    ) -> None:
        """Open or create the catalog; OtherVersionError for one of another version that can be written.

        `policy` makes the eviction scores; None is that of the last opening that named one, at first `Saving`. All
        processes on a folder should have the same.
        """
        self.path = path
        self._db = Database(path, kind=CATALOG_KIND, busy_timeout_s=busy_timeout_s)
        self.read_only = self._db.read_only
        self.texts = found_texts.FoundTexts(self._db)
        self.removals = removals.Removals(self._db)
        try:
            self._db.compact()
            self._count_damaged_sums()
            self._order = EvictionOrder(self._db, policy)
            self.policy = self._order.policy
        except BaseException:  # Ctrl-C too: the file is closed
            self._db.close()
            raise

    def close(self) -> None:
        """Close the file; a second call does nothing. Every other call but `problems` then raises StoreError."""
        self._db.close()

    # -- reading ------------------------------------------------------------------------------------------------------

    def find(
        self,
        namespace: str,
        fingerprint: str,
        chunk_ids: Sequence[str],
        *,
        session: str | None = None,
        payload_facts: PayloadFacts = NOTHING,
    ) -> tuple[dict[str, list[Variant]], list[DamagedRow]]:
        """Return chunk id → variants, each with this `payload_facts`; and the damaged rows of these chunks.

        Shared variants and those private to exactly that session, in no order. Every given chunk id is a key of the
        first part. Any field of a damaged row may be wrong.
        """
        variants: dict[str, list[Variant]] = {chunk_id: [] for chunk_id in chunk_ids}
        damaged: list[DamagedRow] = []
        asked = {
            "namespace": namespace,
            "fingerprint": fingerprint,
            "chunk_ids": json.dumps(list(variants)),
            "session": session,
        }
        for row in self._fetched(_LOOKUP, asked):
            variant = _read(namespace, fingerprint, CatalogRow(*row), payload_facts)
            if isinstance(variant, DamagedRow):
                damaged.append(variant)
            else:
                variants[variant.key.chunk_id].append(variant)
        return variants, damaged

    def token_scores(self, variant_ids: Sequence[str]) -> dict[str, TokenScores]:
        """Return every given id → its token scores; `inter` is None if none are stored, or damaged, which is logged."""
        known = {}
        for variant_id, *columns in self._fetched(_SCORES, (json.dumps(list(variant_ids)),)):
            scores = _read_scores(*columns)
            if isinstance(scores, str):
                logger.info("Token scores of %s are damaged: %s", variant_id, scores)
            known[variant_id] = TokenScores() if isinstance(scores, str) else scores
        return known

    def rows(self, chosen: RowFilter, *, offset: int = 0, limit: int = 100) -> list[Listed]:
        """Return a page of the chosen rows, the highest eviction score first; [] after the last row.

        Damaged rows count for both numbers but are left out: any page may be shorter than `limit`.
        """
        condition, parameters = chosen.as_sql()
        query = f"{_LISTED} WHERE {condition} ORDER BY v.score DESC, v.created DESC, v.variant_id LIMIT ? OFFSET ?"
        rows = [_listed(*columns) for columns in self._fetched(query, (*parameters, limit, offset))]
        return [row for row in rows if isinstance(row, Listed)]

    def scan(self, page: int = 500) -> Iterator[Listed | DamagedRow]:
        """Yield every row once, in the order of variant ids, its token scores verified; `page` rows per query.

        Nothing is locked between two rows. A row that is damaged, or has damaged token scores, is a `DamagedRow`.
        """
        for checksum, scores, *columns in self._pages(_LISTED_WITH_SCORES, page):
            row = _listed(*columns)
            if isinstance(row, Listed) and isinstance(
                flaw := _read_scores(row.variant.tokens, checksum, scores), str
            ):
                file = FileRef(row.variant.variant_id, row.variant.created, row.file_bytes)
                row = DamagedRow(
                    file, row.variant.key.chunk_id, f"its token scores are damaged: {flaw}"
                )
            yield row

    def ruled_out(
        self, rules: Sequence[EvictionRule], now: float, page: int = 500
    ) -> Iterator[Listed]:
        """Yield the rows that one of these rules evicts at `now`, in seconds since 1970; damaged rows are left out."""
        for columns in self._pages(_LISTED, page):
            row = _listed(*columns)
            if isinstance(row, Listed) and any(rule(row, now) for rule in rules):
                yield row

    def _pages(self, query: str, page: int) -> Iterator[Any]:
        """Yield the rows of a query of `_ROW_LISTED` by variant id; nothing is locked between two pages."""
        ordered = f"{query} WHERE v.variant_id > ? ORDER BY v.variant_id LIMIT ?"
        place = CatalogRow._fields.index("variant_id") - len(CatalogRow._fields)
        after = ""
        while batch := self._fetched(ordered, (after, page)):
            yield from batch
            after = batch[-1][place]

    def _fetched(self, query: str, parameters: Parameters) -> list[Any]:
        with self._db.reading() as connection:
            return fetched(connection, query, parameters)

    def totals(self) -> Totals:
        """Return sums over all rows, of all namespaces and models, as of one moment; 0 in an empty catalog."""
        # Both queries see one moment: in between, a file's bytes could move from "reserved" to its row and count twice.
        with self._db.snapshot() as connection:
            variants, file_bytes = sums.of_rows(connection)
            query = "SELECT count(*) FROM (SELECT DISTINCT scope, chunk_id FROM variants)"
            (chunks,) = connection.execute(query).fetchone()
            return Totals(variants, chunks, file_bytes, sums.reserved_bytes(connection))

    def holds(self, file: FileRef, *, or_at_risk: bool = False) -> bool:
        """Return True if exactly this file has a row, or with `or_at_risk` is about to be created or deleted."""
        query = """SELECT 1 FROM variants WHERE variant_id = :variant_id AND created = :created
            UNION ALL SELECT 1 FROM files_at_risk
            WHERE variant_id = :variant_id AND created = :created AND :or_at_risk"""
        asked = {
            "variant_id": file.variant_id,
            "created": file.created,
            "or_at_risk": or_at_risk,
        }
        with self._db.reading() as connection:
            return connection.execute(query, asked).fetchone() is not None

    def at_risk(self) -> dict[str, list[FileRef]]:
        """Return writer, running or dead → files that may exist without a row; `file_bytes` are those reserved."""
        files: dict[str, list[FileRef]] = {}
        with self._db.reading() as connection:
            query = "SELECT writer, variant_id, created, reserved_bytes FROM files_at_risk"
            for writer, *file in connection.execute(query):
                files.setdefault(writer, []).append(FileRef(*file))
        return files

    def chosen(self, chosen: RowFilter, *, down_to_bytes: int | None = None) -> list[FileRef]:
        """Return files of the chosen rows, lowest score first: all, or those that must leave to reach `down_to_bytes`.

        That is a limit on the bytes of all files with a row, chosen or not.
        """
        with self._db.reading() as connection:
            excess = math.inf
            if down_to_bytes is not None:
                excess = sums.of_rows(connection)[1] - down_to_bytes
            rows, _ = self._order.freeing(connection, excess, chosen)
            return [row.file for row in rows]

    def shaped_by(
        self, chunk_ids: Collection[str], *, namespace: str | None
    ) -> list[Listed | DamagedRow]:
        """Return the rows of these chunks and of variants that one has, or may have, shaped; `namespace` None: all.

        These were captured after it, or after a reused variant that it has shaped, or it is not known what has shaped
        them (so they are returned for any `chunk_ids`, also for none). It reads every row.
        """
        removed = frozenset((*chunk_ids, removals.ANY))
        query = f"""SELECT v.variant_id, v.chunk_id, v.origin_prefix, sh.chunk_ids
            FROM {_SCOPED} LEFT JOIN shaping AS sh USING (variant_id) WHERE {_IN_NAMESPACE}"""
        with self._db.reading() as connection:
            names = [
                variant_id
                for variant_id, chunk_id, *packed in connection.execute(query, (namespace,) * 2)
                if chunk_id in removed
                or any(not removed.isdisjoint(removals.readable_ids(ids)) for ids in packed)
            ]
        asked = f"{_LISTED} WHERE v.variant_id IN (SELECT value FROM json_each(?))"
        return [_listed(*columns) for columns in self._fetched(asked, (json.dumps(names),))]

    def others(self, chunk_ids: Collection[str], *, namespace: str | None) -> OtherTexts:
        """Return the ids of all texts that variants hold or were shaped by, but for these chunks and instructions.

        An instruction is the first segment of an origin prefix, or a text that was captured without one. `namespace`
        None means all. It reads every row.
        """
        query = f"""SELECT v.chunk_id, v.origin_prefix, v.tokens_digest, v.session, sh.chunk_ids
            FROM {_SCOPED} LEFT JOIN shaping AS sh USING (variant_id) WHERE {_IN_NAMESPACE}"""
        instructions = {removals.ANY}
        chunks: set[str] = set()
        passages: set[str] = set()
        with self._db.reading() as connection:
            for chunk_id, prefix, tokens_digest, session, shaping in connection.execute(
                query, (namespace,) * 2
            ):
                before = removals.readable_ids(prefix)
                instructions.update(before[:1] or (chunk_id,))
                is_passage = chunk_id == passage_id(str(tokens_digest))
                (passages if is_passage else chunks).add(chunk_id)
                (chunks if session is None else passages).update(before[1:])
                # among them may be another instruction
                passages.update(removals.readable_ids(shaping))
        known = instructions.union(chunk_ids)
        return OtherTexts(frozenset(chunks - known), frozenset(passages - chunks - known))

    def scopes(self, namespace: str | None) -> list[tuple[str, str]]:
        """Return the pairs of namespace and fingerprint that were ever stored; None: of all namespaces."""
        query = f"SELECT s.namespace, s.fingerprint FROM scopes AS s WHERE {_IN_NAMESPACE}"
        return [(name, model) for name, model in self._fetched(query, (namespace, namespace))]

    def problems(self) -> list[str]:
        """Return at most 100 findings of SQLite's quick check, [] when all is well; see `Database.problems`."""
        return self._db.problems()

    def check_sums(self, *, repair: bool) -> str:
        """Compare the stored sums with the rows, with `repair` correct them; return what is (or was) wrong, or ""."""
        with self._db.snapshot() as connection:
            stored = sums.stored(connection)
            counted = sums.counted(connection)
        if stored == [counted]:
            return ""
        if repair:
            with self._db.writing() as connection:
                sums.count_again(connection)
        variants, file_bytes = counted
        return f"its sums are {stored}, and it has {variants} rows with {file_bytes} bytes"

    def _count_damaged_sums(self) -> None:
        """Count the rows again if the stored sums are no numbers: the triggers would go on from them."""
        with self._db.reading() as connection:
            is_sound = sums.sound(connection) is not None
        if is_sound or self.read_only:
            return
        logger.warning("The sums over all rows of %s are damaged and are counted again", self.path)
        with self._db.writing() as connection:
            sums.count_again(connection)

    # -- writing ------------------------------------------------------------------------------------------------------

    def refuses(self, variant: Variant, sources: Sequence[Variant] = ()) -> bool:
        """Return True if `commit` would refuse this variant: a chunk was removed on purpose, or a source has left."""
        with self._db.reading() as connection:
            return removals.accepted_shaping(connection, variant.key, sources) is None

    def reserve(
        self, variant: Variant, *, file_bytes: int, writer: str, limits: Limits
    ) -> list[FileRef] | None:
        """Reserve room for a file of `file_bytes` bytes before it is created; return [] if there is room.

        Otherwise nothing is reserved, and the result lists files whose rows were removed to make room, lowest scores
        first. The caller deletes those, calls `settle` and asks again: a file that is not deleted yet still counts, or
        a second writer would fill the room before it is free. Returns None, and removes nothing, if even an empty
        catalog would leave no room, because of other writers or because the file alone is too large.
        """
        with self._db.writing() as connection:
            excess = sums.used_bytes(connection) + file_bytes - limits.disk_bytes
            rows, missing = self._order.freeing(connection, excess)
            if missing:
                return None
            if not rows:
                _put_at_risk(
                    connection, [FileRef(variant.variant_id, variant.created, file_bytes)], writer
                )
                return []
            files = self._order.evicted(connection, rows)
            return _remove(connection, files, writer, EvictionReason.BUDGET)

    def commit(
        self,
        variant: Variant,
        token_scores: TokenScores,
        *,
        file_bytes: int,
        writer: str,
        limits: Limits,
        extra_variant: bool = False,
        sources: Sequence[Variant] = (),
    ) -> list[FileRef] | None:
        """Insert the row of a written file, in place of an older one of the same identity, whose f_r it inherits.

        If a chunk has no variant left because they were evicted, its next variant gets the f_r (reuse frequency, see
        `eviction.Use`) that the catalog remembers of the chunk, added to its own.

        Returns the files whose rows were removed for it: the older one, unless it has the same name, and those beyond
        the limits on the number of variants. They are at risk on behalf of `writer` until the caller has deleted them
        and calls `settle`. Returns None, with nothing changed, if the chunk or one that has shaped it was removed on
        purpose, or if one of the inexact `sources` has left (see `types.captures.Capture`); the caller deletes the file
        that it has written. For an `extra_variant`, a chunk that has no variant left and is not remembered as evicted
        counts as removed too.

        The caller has checked the variant with `row_error`, and has called `reserve` for its file.
        """
        key = variant.key
        with self._db.writing() as connection:
            shaping = removals.accepted_shaping(connection, key, sources)
            if shaping is None:
                return None
            scope = _scope_of(connection, variant)
            beside = self._order.beside(connection, scope, key.chunk_id, variant.variant_id)
            same = next((row for row in beside if row.variant_id == variant.variant_id), None)
            others = [row.file for row in beside if row is not same]
            if same is not None:
                used = same.used
            else:
                known = self._order.returned(connection, scope, key.chunk_id, first=not others)
                if extra_variant and not others and known is None:
                    return None
                frequency = variant.reuse_frequency
                used = Use(frequency, min(frequency, 1.0)) + (known or Use(0.0, 0.0))
            gone = _remove(
                connection, [] if same is None else [same.file], writer, EvictionReason.REPLACED
            )
            # The newest is spared although it is unused and so scores lowest: otherwise a full store would never learn
            # anything new.
            crowd = others[: max(0, len(others) + 1 - limits.variants_per_chunk)]
            gone += _remove(connection, crowd, writer, EvictionReason.CHUNK_CAP)
            variants, _ = sums.of_rows(connection)
            over = self._order.lowest(connection, variants + 1 - limits.max_variants)
            scores = packed(token_scores.inter)
            row = row_of(variant, file_bytes=file_bytes, frequency=used.frequency)
            score = self._order.score(connection, variant, file_bytes, used)
            connection.execute(_INSERT, (scope, *row, sum_of_scores(scores), used.saved, score))
            if scores is not None:
                connection.execute(
                    "INSERT OR REPLACE INTO token_scores VALUES (?,?)", (variant.variant_id, scores)
                )
            removals.note_shaping(connection, variant.variant_id, shaping)
            evicted = self._order.evicted(connection, over)
            gone += _remove(connection, evicted, writer, EvictionReason.COUNT_CAP)
            _settle(connection, [FileRef(variant.variant_id, variant.created)])
        # Two captures of one identity in the same clock tick share a file name; the file now belongs to the new row.
        return [
            file
            for file in gone
            if (file.variant_id, file.created) != (variant.variant_id, variant.created)
        ]

    def settle(self, files: Iterable[FileRef]) -> None:
        """Remove the entries of these files at risk, which no longer exist or never did; their room is free then."""
        with self._db.writing() as connection:
            _settle(connection, files)

    def remove(
        self,
        files: Iterable[FileRef],
        *,
        writer: str,
        why: EvictionReason = EvictionReason.DAMAGED,
        forget: Sequence[str] = (),
    ) -> list[FileRef]:
        """Remove the rows of exactly these files; return those that had a row, with `why` as their `evicted`.

        The files are then at risk on behalf of `writer`; the caller deletes them and calls `settle`. Chunk ids to
        `forget`, which were removed on purpose, are no longer remembered as evicted. What an administrator removes
        stays removed after a power cut.
        """
        query = f"SELECT {sums.FILE} FROM variants WHERE variant_id = ? AND created = ?"
        with self._db.writing(removes=why is EvictionReason.ADMINISTRATOR) as connection:
            self._order.forget(connection, forget)
            rows = [
                connection.execute(query, (file.variant_id, file.created)).fetchone()
                for file in files
            ]
            return _remove(
                connection, [FileRef(*row) for row in rows if row is not None], writer, why
            )

    def compact(self) -> None:
        """Write the file again without what an administrator removed, if anything; see `Database.compact`."""
        self._db.compact()

    def limits(self) -> dict[str, int]:
        """Return name (a field of `Limits`) → stored limit; unknown names and invalid values are left out."""
        with self._db.reading() as connection:
            stored = connection.execute("SELECT name, value FROM limits").fetchall()
        known = {limit.name for limit in fields(Limits)}
        return {
            name: value
            for name, value in stored
            if name in known and type(value) is int and value > 0
        }

    def set_limits(self, limits: Mapping[str, int]) -> None:
        """Store these limits, by name, if any differs from the one stored; other limits stay. No row is removed."""
        if limits.items() - self.limits().items():
            with self._db.writing() as connection:
                connection.executemany("INSERT OR REPLACE INTO limits VALUES (?,?)", limits.items())

    def over(self, limits: Limits) -> tuple[list[FileRef], EvictionReason]:
        """Return the files to evict so that both limits hold, lowest score first, and the limit that asks for more.

        No files if both hold. Files being written or deleted count towards the byte budget;
        `limits.variants_per_chunk` does not count.
        """
        with self._db.reading() as connection:
            variants, _ = sums.of_rows(connection)
            lowest = self._order.lowest(connection, variants - limits.max_variants)
            many = [row.file for row in lowest]
            excess = sums.used_bytes(connection) - limits.disk_bytes
            rows, _ = self._order.freeing(connection, excess)
        if len(rows) >= len(many):
            return [row.file for row in rows], EvictionReason.BUDGET
        return many, EvictionReason.COUNT_CAP

    def record_uses(self, uses: Mapping[str, Use]) -> None:
        """Add to the uses of each variant id, last used now, and score it again; ids without a row are passed over."""
        with self._db.writing() as connection:
            self._order.record_uses(connection, uses, at=time.time())

    @contextmanager
    def standstill(self) -> Iterator[None]:
        """Keep every other writer, in any process, from changing rows in the block: keep it short, write nothing."""
        with self._db.writing():
            yield


# -- inside a transaction ---------------------------------------------------------------------------------------------


def _scope_of(connection: sqlite3.Connection, variant: Variant) -> int:
    names = (variant.key.namespace, variant.key.fingerprint)
    query = "SELECT scope FROM scopes WHERE namespace = ? AND fingerprint = ?"
    if (row := connection.execute(query, names).fetchone()) is None:
        connection.execute("INSERT INTO scopes (namespace, fingerprint) VALUES (?,?)", names)
        row = connection.execute(query, names).fetchone()
    scope: int = row[0]
    return scope


def _remove(
    connection: sqlite3.Connection, files: list[FileRef], writer: str, why: EvictionReason
) -> list[FileRef]:
    """Delete rows; their files are at risk, and count against the budget, until the caller has unlinked them."""
    rows = [(file.variant_id, file.created) for file in files]
    connection.executemany("DELETE FROM variants WHERE variant_id = ? AND created = ?", rows)
    _put_at_risk(connection, files, writer)
    return [FileRef(file.variant_id, file.created, file.file_bytes, why) for file in files]


def _put_at_risk(connection: sqlite3.Connection, files: Iterable[FileRef], writer: str) -> None:
    """Record files that may exist without a row from now on."""
    rows = [(file.variant_id, file.created, writer, file.file_bytes) for file in files]
    connection.executemany("INSERT OR REPLACE INTO files_at_risk VALUES (?,?,?,?)", rows)


def _settle(connection: sqlite3.Connection, files: Iterable[FileRef]) -> None:
    rows = [(file.variant_id, file.created) for file in files]
    connection.executemany("DELETE FROM files_at_risk WHERE variant_id = ? AND created = ?", rows)


# -- rows as they lie there -------------------------------------------------------------------------------------------


def _read(
    namespace: str, fingerprint: str, row: CatalogRow, payload_facts: PayloadFacts = NOTHING
) -> Variant | DamagedRow:
    """The variant of a row, or the damaged row."""
    try:
        variant = variant_of_row(namespace, fingerprint, row, payload_facts)
        if not (flaw := row_error(variant)):
            return variant
        reason = f"its row in the catalog is damaged: {flaw}"
    except ValueError as error:
        reason = str(error)
    nbytes = row.file_bytes if type(row.file_bytes) is int and row.file_bytes > 0 else 0
    return DamagedRow(FileRef(row.variant_id, row.created, nbytes), row.chunk_id, reason)


def _listed(
    namespace: str, fingerprint: str, last_used: float, *columns: Any
) -> Listed | DamagedRow:
    """The row of `_ROW_LISTED`, or the damaged row."""
    row = CatalogRow(*columns)
    read = _read(namespace, fingerprint, row)
    if isinstance(read, DamagedRow):
        return read
    return Listed(read, row.file_bytes, max(read.created, last_used))


def _read_scores(tokens: int | None, checksum: int, inter: bytes | None) -> TokenScores | str:
    """Return a variant's token scores, or what is wrong with them. `tokens`: None if the variant has no row."""
    if tokens is None:
        return TokenScores()
    try:
        if checksum != sum_of_scores(inter):
            return "their checksum is wrong"
        scores = TokenScores(unpacked(inter))
        return "they do not fit its tokens" if scores_are_wrong(scores, tokens) else scores
    except (ValueError, TypeError) as error:
        return str(error)
