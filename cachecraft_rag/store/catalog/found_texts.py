"""Facts about unmarked text: which texts were seen before, and how to recognise captured ones."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import NamedTuple

from cachecraft_rag.store.database import Database, fetched

MOST_SEEN = 65_536  # texts that are remembered; the first ones seen go first

TABLES = (
    "CREATE TABLE seen_texts (place INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE)",
    """CREATE TABLE text_marks (
         scope INTEGER NOT NULL, mark INTEGER NOT NULL, chunk_id TEXT NOT NULL, place INTEGER NOT NULL,
         PRIMARY KEY (scope, mark, chunk_id)) WITHOUT ROWID""",
    "CREATE INDEX text_marks_by_chunk ON text_marks (scope, chunk_id)",
    """CREATE TRIGGER chunk_removed AFTER DELETE ON variants
         WHEN NOT EXISTS (SELECT 1 FROM variants WHERE scope = old.scope AND chunk_id = old.chunk_id) BEGIN
         DELETE FROM text_marks WHERE scope = old.scope AND chunk_id = old.chunk_id; END""",
)
_SCOPE = "SELECT scope FROM scopes WHERE namespace = :namespace AND fingerprint = :fingerprint"
_MARK = f"""INSERT OR REPLACE INTO text_marks (scope, mark, chunk_id, place)
  SELECT scope, :mark, :chunk_id, :place FROM ({_SCOPE})"""
_MARKED = f"""SELECT DISTINCT m.mark, m.chunk_id, m.place, v.tokens, v.tokens_digest
  FROM json_each(:marks) AS asked CROSS JOIN text_marks AS m CROSS JOIN variants AS v
  WHERE m.scope = ({_SCOPE}) AND m.mark = asked.value AND v.scope = m.scope AND v.chunk_id = m.chunk_id
    AND (v.session IS NULL OR v.session = :session)"""


class MarkedText(NamedTuple):
    """A captured text with a mark (see `planning.found_text.marks`); any field may be damaged.

    `place` is the position of the mark's last token in the text; `tokens` and `tokens_digest` are those of `Variant`.
    """

    mark: int
    chunk_id: str
    place: object
    tokens: object
    tokens_digest: object


class FoundTexts:
    """Two tables of the catalog: seen texts, and marks of captured texts. Any thread may call any method.

    The marks of a chunk are removed with its last variant.
    """

    def __init__(self, database: Database) -> None:
        self._db = database

    def seen(self, names: Sequence[str]) -> set[str]:
        """Note that texts of these names were seen, in any process; return the names seen before.

        A name is a digest of text, namespace, model and session (`prompt.unmarked.candidates_of`). The `MOST_SEEN` that
        were first seen most recently are remembered; a repeated name counts as seen before.
        """
        with self._db.writing() as connection:
            insert = "INSERT OR IGNORE INTO seen_texts (name) VALUES (?)"
            known = {name for name in names if not connection.execute(insert, (name,)).rowcount}
            limit = "DELETE FROM seen_texts WHERE place <= (SELECT max(place) FROM seen_texts) - ?"
            connection.execute(limit, (MOST_SEEN,))
        return known

    def mark(self, namespace: str, fingerprint: str, chunk_id: str, mark: tuple[int, int]) -> None:
        """Store a mark, (hash, position of its last token in the text), by which a captured text is found in prompts.

        A text can have several marks; a new position of the same mark replaces the earlier one. The chunk need not be
        stored. Does nothing if nothing of this namespace and fingerprint was ever stored.
        """
        with self._db.writing() as connection:
            number, place = mark
            given = {
                "namespace": namespace,
                "fingerprint": fingerprint,
                "mark": number,
                "chunk_id": chunk_id,
                "place": place,
            }
            connection.execute(_MARK, given)

    def marked(
        self, namespace: str, fingerprint: str, marks: Collection[int], *, session: str | None
    ) -> list[MarkedText]:
        """Return the texts, shared or of `session`, with a variant and one of these marks, once per mark, unordered."""
        with self._db.reading() as connection:
            given = {
                "namespace": namespace,
                "fingerprint": fingerprint,
                "marks": json.dumps(list(marks)),
                "session": session,
            }
            rows = fetched(connection, _MARKED, given)
        return [MarkedText(*row) for row in rows]
