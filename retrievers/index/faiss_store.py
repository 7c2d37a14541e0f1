"""The vector store: chunks of documents in SQLite, found by FAISS, returned by chunk id.

SQLite is the truth, the vectors included. The FAISS index is derived from it: each search compares the index's stamp
with the database's and brings in what has changed, whichever process changed it. A process killed at any moment, a lost
or damaged index file and a write by another process are all mended by the next search.

A chunk has one row and one vector, and an owner for each place in a document where it stands. It goes with its last
owner.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from cachecraft_rag.checks import check_path, check_text, check_whole, listed
from cachecraft_rag.errors import ConfigError, IndexStoreError
from cachecraft_rag.retrievers.index.filters import Where, accepts, check_where, encoded, fragments
from cachecraft_rag.retrievers.index.schema import DATABASE as DATABASE
from cachecraft_rag.retrievers.index.schema import (
    PLACE,
    Place,
    chunk_of,
    model_name,
    open_database,
    row_sum,
    vector_sum,
    verify,
)
from cachecraft_rag.retrievers.index.vector_index import VectorIndex
from cachecraft_rag.store.closeable import Closeable
from cachecraft_rag.store.database import Database, note_removal
from cachecraft_rag.store.files.disk import sync_folder
from cachecraft_rag.store.processes import HomeProcess
from cachecraft_rag.types.documents import Chunk, Scalar, SearchHit

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

INDEX_FILE = "index.faiss"

_WAIT_S = 30.0  # for another process's transaction
_PLACES = f"SELECT chunk_id, text, {PLACE} FROM owners JOIN chunks USING (number) WHERE {{}} ORDER BY doc_id, ordinal"
# the inner product of two such vectors of 10 million numbers is a finite float32
_LARGEST_NUMBER = 1e15
_BATCH = 4096  # rows per query; bounds memory
logger = logging.getLogger("cachecraft_rag.retrievers.index.faiss_store")


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A document in the store.

    content_digest  digest that was given with its content; "" if none was, or chunks were appended since
    root            absolute path of the folder it was read from; "" if none
    chunks          how many places it has; a chunk that is in it twice counts twice
    """

    doc_id: str
    content_digest: str
    root: str
    chunks: int


@dataclass(frozen=True, slots=True)
class Change:
    """The chunk ids that a call brought into the store and those it removed for good (no owner was left)."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class IndexStats:
    """Sizes of an index, and the number of its changes.

    chunks      different chunks, each with one vector
    owners      places of chunks in documents
    generation  number of transactions since the index was made that brought a new chunk or removed one for good
    """

    documents: int
    chunks: int
    owners: int
    generation: int


class FaissStore(Closeable):
    """Chunks with their vectors and owners in a folder; threads and processes may share it.

    Open it with `FaissStore.open`, close it with `close` or a `with` block. Every change is one transaction: it happens
    as a whole or not at all. `dim` is the width of the vectors, `embedder` the fingerprint of the model that made them.
    A chunk's first owner is that by `doc_id` and position. A place may have a key, the caller's name for it (`add`).

    Every method except `close` raises `IndexStoreError` if the database cannot be read or, for a change, written.
    """

    def __init__(self, folder: Path, db: Database, settings: Mapping[str, str]) -> None:
        """Use `open`."""
        self.folder = folder
        self._home = HomeProcess("retrieval index")
        self._db = db
        self._closed = False
        self._store = settings["store"]
        try:
            self.dim = int(settings["dim"])
        except ValueError:
            db.close()
            raise IndexStoreError(
                f"{folder}: the index is damaged; delete the folder and index again"
            ) from None
        self.embedder = settings["embedder"]
        # changed only within a snapshot: one thread at a time
        self._index: VectorIndex | None = None
        self._saved_stamp = ""

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        *,
        dim: int | None = None,
        embedder_fingerprint: str | None = None,
    ) -> Self:
        """Open the store in a folder; it is made if it is missing and both `dim` and the fingerprint are given.

        Without them an existing store is opened as it is, which is enough to read and to delete. One that this user
        cannot write is opened for reading. The index file is not read yet.

        Args:
            folder: holds the database and the index file.
            dim: length of the vectors.
            embedder_fingerprint: `name@digest` of the embedding model; only the digest counts.

        Raises IndexStoreError if there is no store, if it was made with another embedding model or another `dim`, if
        its database is damaged, of a newer version or locked by another process for 30 seconds.
        """
        check_path("folder", folder)
        path = Path(folder).absolute()  # for as long as it is open, wherever the process goes
        if not os.path.isfile(path / DATABASE) and (dim is None or embedder_fingerprint is None):
            raise IndexStoreError(
                f"{path}: there is no index here; make one with `cachecraft index`"
            )
        store = cls(
            path, *open_database(path, dim=dim, fingerprint=embedder_fingerprint, wait_s=_WAIT_S)
        )
        try:
            store.compact()  # its last process was killed after a removal
        except BaseException:  # Ctrl-C too: the file is closed
            store.close()
            raise
        return store

    # --- changes ---

    def upsert(
        self,
        doc_id: str,
        chunks: Sequence[Chunk],
        vectors: ArrayLike,
        *,
        content_digest: str = "",
        root: str = "",
    ) -> Change:
        """Replace the chunks of a document by these, in this order; other documents keep theirs.

        Returns the ids of the chunks that are new to the store, each once, and of those that left it. Raises
        IndexStoreError for vectors that do not fit, are not finite or hold a number above 1e15, and if the document in
        the store has another `root` (unless either is "").

        Args:
            doc_id: the document; it is made if it is missing.
            chunks: its chunks; without any, the document stays with none.
            vectors: `[chunks, dim]`; a chunk that is in the store already keeps the vector it has.
            content_digest: noted, so that an unchanged document is not indexed again.
            root: path of the folder that the document is from; "": none.
        """
        check_text("doc_id", doc_id)
        matrix = self._checked(vectors, len(chunks))
        with self._opened().writing() as db:
            if root:
                self._require_root(db, doc_id, root)
            before = [
                row[0]
                for row in db.execute("SELECT number FROM owners WHERE doc_id = ?", (doc_id,))
            ]
            db.execute("DELETE FROM owners WHERE doc_id = ?", (doc_id,))
            self._write_document(db, doc_id, content_digest, root)
            added = self._append(db, doc_id, chunks, matrix)
            change = self._changed(db, added, self._drop_orphans(db, before))
        return self._erased(change)

    def add(
        self,
        doc_id: str,
        chunks: Sequence[Chunk],
        vectors: ArrayLike,
        *,
        keys: Sequence[str] | None = None,
    ) -> Change:
        """Append chunks to a document, which is made if it is missing.

        Returns the ids of the chunks that are new to the store, and of those that left it; a chunk that left and was
        added again is in neither. The document's content digest is cleared, because it no longer tells what the
        document holds.

        Args:
            vectors: as in `upsert`, but a chunk that `keys` replace in its last place gets the new vector.
            keys: the caller's names for these places, one each, no two alike; a place that has one of them already, in
                whatever document, is removed first, and so is another document that has no place left then.
        """
        check_text("doc_id", doc_id)
        matrix = self._checked(vectors, len(chunks))
        if keys is not None:
            for key in keys:
                check_text("each of keys", key)
                if "\0" in key:  # SQLite's JSON would cut it there
                    raise ConfigError(f"each of keys must be without NUL, not {key!r}")
            if len(set(keys)) != len(keys) or len(keys) != len(chunks):
                raise ConfigError(
                    f"keys must be {len(chunks)} different names, one for each chunk, not {len(keys)}"
                )
        with self._opened().writing() as db:
            # First out, then in: a chunk without another owner gets the new vector, as after a change of its metadata.
            removed = self._drop_places(db, keys or ())
            stored = self._stored(db, doc_id)
            self._write_document(db, doc_id, "", stored[0].root if stored else "")
            added = self._append(db, doc_id, chunks, matrix, keys=keys)
            change = self._changed(db, added, removed)
        self._erased(change)
        back = set(removed).intersection(added)
        return Change(
            *(tuple(name for name in names if name not in back) for names in (added, removed))
        )

    def set_digest(self, doc_id: str, content_digest: str) -> None:
        """Change a document's content digest; its chunks stay. An unknown document is ignored."""
        check_text("doc_id", doc_id)
        with self._opened().writing() as db:
            for stored in self._stored(db, doc_id):
                self._write_document(db, doc_id, content_digest, stored.root)

    def delete_document(self, doc_id: str) -> Change:
        """Remove a document, if it exists, and those chunks that no other document has: they are `Change.removed`."""
        check_text("doc_id", doc_id)
        with self._opened().writing() as db:
            before = [
                row[0]
                for row in db.execute(
                    "DELETE FROM owners WHERE doc_id = ? RETURNING number", (doc_id,)
                )
            ]
            db.execute("DELETE FROM documents WHERE doc_id = ?", (doc_id,))
            change = self._changed(db, (), self._drop_orphans(db, before))
        return self._erased(change)

    def delete_chunks(self, chunk_ids: Iterable[str]) -> Change:
        """Remove chunks from every document that has them; unknown ids are ignored.

        The documents stay, with their content digests, so an unchanged file does not bring the chunks back.
        """
        with self._opened().writing() as db:
            chosen = "SELECT number FROM chunks WHERE chunk_id IN ({})"
            gone = _by_list(
                db, f"DELETE FROM owners WHERE number IN ({chosen}) RETURNING number", chunk_ids
            )
            change = self._changed(db, (), self._drop_orphans(db, (row[0] for row in gone)))
        return self._erased(change)

    def delete_keys(self, keys: Iterable[str]) -> Change:
        """Remove the places with these keys, and the documents that have none left; unknown keys are ignored."""
        with self._opened().writing() as db:
            change = self._changed(db, (), self._drop_places(db, keys))
        return self._erased(change)

    def removed_chunks(self) -> dict[str, int]:
        """Return id → number, ascending, of chunks that left the index and may still have stored chunk-caches.

        The transaction that removes a chunk notes it, until `forget_removed` or until the chunk is added again.
        """
        with self._opened().snapshot() as db:
            return dict(db.execute("SELECT chunk_id, place FROM removed_chunks ORDER BY place"))

    @property
    def has_removed(self) -> bool:
        """True if a chunk has ever left this index."""
        with self._opened().reading() as db:
            return bool(
                db.execute("SELECT 1 FROM sqlite_sequence WHERE name = 'removed_chunks'").fetchall()
            )

    def forget_removed(self, places: Iterable[int]) -> None:
        """Forget removed chunks, by their numbers in `removed_chunks`, when the caller has deleted their chunk-caches.

        A chunk that was added and left again meanwhile has another number, and stays noted.
        """
        with self._opened().writing() as db:
            _by_list(db, "DELETE FROM removed_chunks WHERE place IN ({})", places)

    # --- questions ---

    def search(
        self, vector: ArrayLike, k: int, *, where: Where | None = None, exact: bool = False
    ) -> list[SearchHit]:
        """Return the `k` most similar chunks, or as many as there are; by falling score, equal scores by chunk id.

        A hit carries the metadata of the chunk's first owner. Each search brings the index in memory up to date with
        the database; the first one after `open` reads the index file, or makes the index again.

        Args:
            vector: `[dim]`, of unit length for cosine scores; IndexStoreError as for `upsert`. Or a NumPy array of
                several, `[vectors, dim]`: a chunk's score is that of the vector it is most similar to.
            k: most hits, at least 1.
            where: only chunks with an owner whose metadata has these values (1 is not True) or passes these comparisons
                (`{"page": {"$in": [1, 2]}}`, see `OPERATORS`), or for whose metadata the function returns true; the hit
                then carries the metadata of the first such owner. The filter is applied before the search, so it never
                costs hits. A function sees every owner's metadata and must not call the store; its errors are passed
                on.
            exact: compare all vectors also where `vector_index.COARSE_FROM` (100,000) or more make the search
                approximate; with `where` all are compared.
        """
        check_whole("k", k, least=1)
        check_where(where)
        if isinstance(vector, np.ndarray) and vector.ndim == 2:
            queries = self._checked(vector, vector.shape[0])
        else:
            queries = self._checked([vector], 1)
        # one snapshot: what the index finds, the rows still hold
        with self._opened().snapshot() as db:
            index = self._synchronised(db)
            allowed = None if where is None else _matching(db, where)
            best: dict[int, float] = {}
            for query in queries:
                numbers, scores = index.search(query, k, allowed, exact=exact)
                for number, score in zip(numbers.tolist(), scores.tolist(), strict=True):
                    best[number] = max(score, best.get(number, score))
            rows = _chunk_rows(db, list(best), where)
        if not rows.keys() >= best.keys():
            raise self._damaged("a chunk has lost its row or its document")
        hits = [
            SearchHit(rows[number][0], score, *rows[number][1:]) for number, score in best.items()
        ]
        return sorted(hits, key=lambda hit: (-hit.score, hit.chunk_id))[:k]

    def get(self, chunk_ids: Iterable[str]) -> list[Chunk]:
        """Return the chunks of these ids, in this order, with the metadata of their first owner.

        Raises IndexStoreError if one of them is not in the store.
        """
        chunk_ids = listed("chunk_ids", chunk_ids)
        with self._opened().snapshot() as db:
            numbers = _by_list(db, "SELECT number FROM chunks WHERE chunk_id IN ({})", chunk_ids)
            rows = _chunk_rows(db, [row[0] for row in numbers], None)
        by_id = {
            chunk_id: Chunk(text, metadata, chunk_id) for chunk_id, text, metadata in rows.values()
        }
        missing = [chunk_id for chunk_id in chunk_ids if chunk_id not in by_id]
        if missing:
            raise IndexStoreError(
                f"chunk {missing[0]} is not in the index ({len(missing)} missing); search again for its document"
            )
        return [by_id[chunk_id] for chunk_id in chunk_ids]

    def places(
        self, keys: Iterable[str] | None = None, *, where: Where | None = None
    ) -> list[Chunk]:
        """Return the chunks of all places that have one of the keys, each with its own metadata, sorted by document.

        Unknown keys are ignored; None means all places, also those without a key. `where`, as for `search`, tests each.
        """
        check_where(where)
        with self._opened().snapshot() as db:
            if keys is None:
                rows = db.execute(_PLACES.format("TRUE")).fetchall()
            else:
                rows = _by_list(db, _PLACES.format("key IN ({})"), keys)
            chunks = [chunk_of(*row) for row in rows]
        return [chunk for chunk in chunks if accepts(where, chunk.metadata)]

    def known_vectors(self, chunk_ids: Iterable[str]) -> dict[str, NDArray[np.float32]]:
        """Return chunk id → vector, float32 `[dim]` and read-only, for those of these chunks that are in the store."""
        with self._opened().snapshot() as db:
            rows = _by_list(
                db,
                "SELECT chunk_id, vector, vector_sum FROM chunks WHERE chunk_id IN ({})",
                chunk_ids,
            )
            for row in rows:
                self._verify_vector(*row)
            return {chunk_id: np.frombuffer(vector, dtype="<f4") for chunk_id, vector, _ in rows}

    def present(self, chunk_ids: Iterable[str]) -> set[str]:
        """Return the ids of those of these chunks that are in the store."""
        with self._opened().snapshot() as db:
            rows = _by_list(db, "SELECT chunk_id FROM chunks WHERE chunk_id IN ({})", chunk_ids)
            return {row[0] for row in rows}

    def similar(self, chunk_id: str, k: int) -> list[Chunk]:
        """Return the `k` other chunks whose vectors are most similar to this chunk's, best first.

        Each has the metadata of its first owner. Raises IndexStoreError if the chunk is not in the store.
        """
        vector = self.known_vectors([chunk_id]).get(chunk_id)
        if vector is None:
            raise IndexStoreError(
                f"chunk {chunk_id} is not in the index; search again for its document"
            )
        hits = self.search(vector, k + 1)
        others = [hit for hit in hits if hit.chunk_id != chunk_id]
        return [Chunk(hit.text, hit.metadata, hit.chunk_id) for hit in others[:k]]

    def chunks_of(self, doc_id: str) -> list[Chunk]:
        """Return a document's chunks (unknown: []) in the order they were given, each place with its own metadata."""
        check_text("doc_id", doc_id)
        with self._opened().snapshot() as db:
            return [chunk_of(*row) for row in db.execute(_PLACES.format("doc_id = ?"), (doc_id,))]

    def documents(self) -> list[StoredDocument]:
        """Return all documents with the numbers of their chunks, sorted by `doc_id`."""
        with self._opened().snapshot() as db:
            return self._stored(db)

    def holds(self, doc_id: str) -> bool:
        """Return True if there is a document of this name, also one without chunks."""
        check_text("doc_id", doc_id)
        with self._opened().snapshot() as db:
            rows = db.execute("SELECT 1 FROM documents WHERE doc_id = ?", (doc_id,)).fetchall()
            return bool(rows)

    def stats(self) -> IndexStats:
        """Return the numbers of documents, chunks and places (owners), and the number of changes."""
        counts = ", ".join(
            f"(SELECT COUNT(*) FROM {table})" for table in ("documents", "chunks", "owners")
        )
        with self._opened().snapshot() as db:
            documents, chunks, owners = db.execute(f"SELECT {counts}").fetchone()
            return IndexStats(documents, chunks, owners, int(_setting(db, "generation")))

    # --- life ---

    def compact(self) -> None:
        """Write the database again if it has bytes of removed chunks, without them, as `open`, `save` and `close` do.

        If it cannot be written now, a warning is logged, and the next call tries again, in any process. Raises
        IndexStoreError if the index file, which holds their vectors, cannot be deleted.
        """
        database = self._opened()
        if database.must_be_compacted and self.folder.is_dir():
            self._drop_index_file()
            database.compact()

    def save(self) -> None:
        """Write the index file, so that the next process starts faster; nothing is lost without it.

        A file that cannot be written is a warning in the log. A store that may only be read, or whose folder was
        deleted, is left alone.
        """
        # deleted meanwhile: nothing of it comes back
        if self._db.read_only or not self.folder.is_dir():
            return
        self.compact()
        with self._opened().snapshot() as db:
            if self._synchronised(db).stamp == self._saved_stamp:
                return
        # while the file is written no chunk leaves: its vector would stay in it
        with self._db.writing(), self._db.snapshot() as db:
            self._write_index_file(self._synchronised(db))

    def _write_index_file(self, index: VectorIndex) -> None:
        try:
            index.save(self.folder / INDEX_FILE, store=self._store)
        except OSError as error:
            logger.warning(
                "%s cannot be written (%s); it will be rebuilt", self.folder / INDEX_FILE, error
            )
        else:
            self._saved_stamp = index.stamp

    def close(self) -> None:
        """Close the database; first write the index file, as in `save`, if a search or `save` has loaded the index.

        Raises nothing: a database that cannot be read leaves the file as it was, with a warning in the log.
        """
        if not self._home.here:  # a fork of its process: the files are that one's
            return
        if self._closed:
            return
        try:
            self.compact()
            if self._index is not None:
                self.save()
        except IndexStoreError as error:
            logger.warning("The index file was not brought up to date: %s", error)
        finally:
            self._closed = True
            self._db.close()

    # --- inside ---

    def _opened(self) -> Database:
        """The database. Raises IndexStoreError after `close`, ForkError in a fork."""
        self._home.require()
        if self._closed:
            raise IndexStoreError(f"{self.folder}: the index has been closed; open it again")
        return self._db

    def _checked(self, vectors: ArrayLike | Sequence[ArrayLike], count: int) -> NDArray[np.float32]:
        """Return the vectors as float32 `[count, dim]`. Raises IndexStoreError unless they fit and are finite."""
        try:
            with np.errstate(over="ignore"):  # a number too large for float32 is not finite then
                matrix = np.asarray(vectors, dtype="<f4")
        except (TypeError, ValueError) as error:
            raise IndexStoreError(
                f"{self.folder}: vectors must be rows of {self.dim} numbers ({error})"
            ) from error
        if count == 0 and matrix.size == 0:
            return matrix.reshape(0, self.dim)
        if matrix.shape != (count, self.dim):
            raise IndexStoreError(
                f"{self.folder}: vectors of shape {matrix.shape} where ({count}, {self.dim}) is needed; "
                f"embed with the model the index was made with, {model_name(self.embedder)}"
            )
        if not np.isfinite(matrix).all():
            raise IndexStoreError(
                f"{self.folder}: a vector is not finite; run the embedding model in float32"
            )
        if matrix.size and np.abs(matrix).max() > _LARGEST_NUMBER:
            raise IndexStoreError(
                f"{self.folder}: a vector holds a number above {_LARGEST_NUMBER:g}, too large to compare; scale "
                "vectors to unit length (retrievers.embeddings.unit_vectors does)"
            )
        return matrix

    def _verify_vector(self, chunk_id: str, vector: bytes, checksum: int | None) -> None:
        """Raise IndexStoreError unless a stored vector has `dim` numbers and its checksum."""
        whole = isinstance(vector, bytes) and len(vector) == 4 * self.dim
        if not whole or checksum not in (None, vector_sum(chunk_id, vector)):
            raise self._damaged(f"the vector of chunk {chunk_id}")

    def _require_whole(self) -> None:
        """Raise IndexStoreError if SQLite finds its file damaged: rows may be missing, without an error."""
        if problems := self._db.problems():
            raise self._damaged(problems[0])

    def _damaged(self, what: str) -> IndexStoreError:
        return IndexStoreError(
            f"{self.folder}: the index is damaged ({what}); delete the folder and index again"
        )

    def _require_root(self, db: sqlite3.Connection, doc_id: str, root: str) -> None:
        """Raise IndexStoreError if the document is of another folder, which another process has indexed just now."""
        for stored in self._stored(db, doc_id):
            if stored.root not in ("", root):
                raise IndexStoreError(
                    f"{doc_id}: another process has indexed a document of this name from {stored.root} meanwhile; "
                    f"index {root} again, and it gets another name"
                )

    def _stored(self, db: sqlite3.Connection, doc_id: str | None = None) -> list[StoredDocument]:
        """Return one document, or all. Raises IndexStoreError if a row is not as it was written."""
        chosen = "TRUE" if doc_id is None else "doc_id = ?"
        rows = db.execute(
            "SELECT doc_id, content_digest, root, document_sum, "
            "(SELECT COUNT(*) FROM owners o WHERE o.doc_id = d.doc_id) "
            f"FROM documents d WHERE {chosen} ORDER BY doc_id",
            () if doc_id is None else (doc_id,),
        ).fetchall()
        for *columns, checksum, _ in rows:
            if checksum not in (None, row_sum(tuple(columns))):
                raise self._damaged(f"the entry of the document {columns[0]}")
        return [
            StoredDocument(name, content_digest, root, chunks)
            for name, content_digest, root, _, chunks in rows
        ]

    def _write_document(
        self, db: sqlite3.Connection, doc_id: str, content_digest: str, root: str
    ) -> None:
        columns = (doc_id, content_digest, root)
        db.execute(
            "INSERT INTO documents VALUES (?, ?, ?, ?) ON CONFLICT (doc_id) DO UPDATE SET "
            "content_digest = excluded.content_digest, root = excluded.root, document_sum = excluded.document_sum",
            (*columns, row_sum(columns)),
        )

    def _append(
        self,
        db: sqlite3.Connection,
        doc_id: str,
        chunks: Sequence[Chunk],
        matrix: NDArray[np.float32],
        *,
        keys: Sequence[str] | None = None,
    ) -> list[str]:
        """Append chunks to those the document has; return the ids of those that are new to the store."""
        next_ordinal = "SELECT COALESCE(MAX(ordinal), -1) + 1 FROM owners WHERE doc_id = ?"
        first = db.execute(next_ordinal, (doc_id,)).fetchone()[0]
        added = []
        names: Sequence[str | None] = keys if keys is not None else [None] * len(chunks)
        for ordinal, (chunk, vector, key) in enumerate(
            zip(chunks, matrix, names, strict=True), first
        ):
            chunk_id = chunk.chunk_id
            check_text("the text of each chunk", chunk.text)
            row = db.execute("SELECT number FROM chunks WHERE chunk_id = ?", (chunk_id,)).fetchone()
            if row is None:
                insert = "INSERT INTO chunks VALUES (random() & 9223372036854775807, ?, ?, ?, ?) RETURNING number"
                data = vector.tobytes()
                new = (chunk_id, chunk.text, data, vector_sum(chunk_id, data))
                row = db.execute(insert, new).fetchone()
                added.append(chunk_id)
            place = Place(doc_id, ordinal, row[0], encoded(chunk.metadata), key)
            db.execute("INSERT INTO owners VALUES (?, ?, ?, ?, ?, ?)", place.sealed())
        return added

    def _drop_places(self, db: sqlite3.Connection, keys: Iterable[str]) -> list[str]:
        """Remove the places with these keys, and documents and chunks that have none left; return the chunks' ids."""
        gone = _by_list(db, "DELETE FROM owners WHERE key IN ({}) RETURNING doc_id, number", keys)
        empty = "doc_id = ? AND NOT EXISTS (SELECT 1 FROM owners AS o WHERE o.doc_id = documents.doc_id)"
        db.executemany(f"DELETE FROM documents WHERE {empty}", {row[:1] for row in gone})
        return self._drop_orphans(db, (row[1] for row in gone))

    def _drop_orphans(self, db: sqlite3.Connection, numbers: Iterable[int]) -> list[str]:
        """Remove the chunks that have no owner; return their ids."""
        orphans = "number IN ({}) AND NOT EXISTS (SELECT 1 FROM owners AS o WHERE o.number = chunks.number)"
        return [
            row[0]
            for row in _by_list(
                db, f"DELETE FROM chunks WHERE {orphans} RETURNING chunk_id", set(numbers)
            )
        ]

    def _changed(
        self, db: sqlite3.Connection, added: Sequence[str], removed: Sequence[str]
    ) -> Change:
        """Begin a new generation if the index is affected, and note what left it; return the change."""
        if removed:
            note_removal(db)
            self._drop_index_file()  # a kill after the commit would leave the vectors in it
        if added or removed:
            db.executemany(
                "INSERT OR REPLACE INTO removed_chunks (chunk_id) VALUES (?)",
                [(chunk_id,) for chunk_id in removed],
            )
            db.executemany(
                "DELETE FROM removed_chunks WHERE chunk_id = ?",
                [(chunk_id,) for chunk_id in added],
            )
            db.execute("UPDATE settings SET value = value + 1 WHERE key = 'generation'")
            db.execute("UPDATE settings SET value = ? WHERE key = 'stamp'", (uuid.uuid4().hex,))
        return Change(tuple(added), tuple(removed))

    def _erased(self, change: Change) -> Change:
        """Empty the journal of removed chunks, once the transaction is committed; return the change."""
        if change.removed:
            self._db.erase()
        return change

    def _drop_index_file(self) -> None:
        """Delete the index file, which holds all vectors, and unfinished ones of killed processes."""
        try:
            for path in self.folder.glob(f"{INDEX_FILE}*"):
                path.unlink(missing_ok=True)
            sync_folder(self.folder)
        except OSError as error:
            raise IndexStoreError(
                f"{self.folder / INDEX_FILE} holds vectors of removed chunks and cannot be deleted ({error}); delete "
                "it, it is made again"
            ) from error

    def _synchronised(self, db: sqlite3.Connection) -> VectorIndex:
        """Return the index in the state of the transaction's snapshot."""
        if self._index is None:
            self._index = VectorIndex.load(
                self.folder / INDEX_FILE, dim=self.dim, store=self._store
            )
            if self._index is None:
                self._require_whole()  # all of the file is read in any case
                self._index = VectorIndex(self.dim)
            self._saved_stamp = self._index.stamp
        index = self._index
        stamp = _setting(db, "stamp")
        if index.stamp == stamp:
            return index
        present = _numbers(db.execute("SELECT number FROM chunks"))
        held = index.numbers()
        index.remove(np.setdiff1d(held, present))
        wanted = np.setdiff1d(present, held)
        for start in range(0, len(wanted), _BATCH):
            batch = wanted[start : start + _BATCH].tolist()
            query = "SELECT number, vector, chunk_id, vector_sum FROM chunks WHERE number IN ({})"
            rows = _by_list(db, query, batch)
            for _, vector, chunk_id, checksum in rows:
                self._verify_vector(chunk_id, vector, checksum)
            if len(rows) != len(batch):
                raise self._damaged("rows are missing")
            vectors = np.frombuffer(b"".join(row[1] for row in rows), dtype="<f4").reshape(
                len(rows), self.dim
            )
            index.add(np.array([row[0] for row in rows], dtype=np.int64), vectors)
        index.stamp = stamp
        return index


def _matching(db: sqlite3.Connection, where: Where) -> NDArray[np.int64]:
    """Return the numbers of all chunks with an owner that the filter accepts, sorted."""
    parts = fragments(where)
    condition = " AND ".join("instr(metadata, ?)" for _ in parts) or "TRUE"
    rows = map(Place._make, db.execute(f"SELECT {PLACE} FROM owners WHERE {condition}", parts))
    return np.unique(
        _numbers((place.number,) for place in rows if accepts(where, place.metadata_of()))
    )


def _chunk_rows(
    db: sqlite3.Connection, numbers: Sequence[int], where: Where | None
) -> dict[int, tuple[str, str, dict[str, Scalar]]]:
    """Return number → (chunk id, text, metadata of the first owner that the filter accepts)."""
    query = (
        f"SELECT number, chunk_id, text, {PLACE} FROM chunks JOIN owners USING (number) WHERE number IN ({{}}) "
        "ORDER BY number, doc_id, ordinal"
    )
    rows: dict[int, tuple[str, str, dict[str, Scalar]]] = {}
    for number, chunk_id, text, *place in _by_list(db, query, numbers):
        if number not in rows and accepts(where, metadata := Place(*place).metadata_of()):
            verify(chunk_id, text)
            rows[number] = (chunk_id, text, metadata)
    return rows


def _by_list(
    db: sqlite3.Connection, query: str, values: Iterable[str] | Iterable[int]
) -> list[tuple[Any, ...]]:
    """Return the rows of a query whose `{}` is a list of values of any length, which the database takes as JSON.

    Texts with a NUL are left out: SQLite would cut them there, and no key or chunk id has one.
    """
    given: list[object] = [*listed("ids or keys", values)]
    kept = [value for value in given if not (isinstance(value, str) and "\0" in value)]
    return db.execute(
        query.format("SELECT value FROM json_each(?)"), (json.dumps(kept),)
    ).fetchall()


def _setting(db: sqlite3.Connection, key: str) -> str:
    value: str = db.execute("SELECT value FROM settings WHERE key = ?", (key,)).fetchone()[0]
    return value


def _numbers(rows: Iterable[Sequence[int]]) -> NDArray[np.int64]:
    return np.fromiter((row[0] for row in rows), dtype=np.int64)
