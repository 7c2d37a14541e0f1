"""Rankings other than the nearest chunks: unlike each other (MMR), by words (BM25), and by both (hybrid)."""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cachecraft_rag.types import SearchHit

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from cachecraft_rag.retrievers.faiss_store import FaissStore
    from cachecraft_rag.retrievers.filters import Where


def marginal_relevance(query: ArrayLike, vectors: ArrayLike, k: int, *, weight: float) -> list[tuple[int, float]]:
    """The rows of `vectors` chosen one by one for being near the query and unlike those before, with their scores.

    Carbonell and Goldstein (1998): next is the row with the largest
    weight · sim(row, query) - (1 - weight) · max sim(row, chosen).

    query    `[dim]` of unit length; vectors `[rows, dim]` of unit length
    weight   1: the nearest; 0: the least alike

    >>> rows = [[1.0, 0.0], [1.0, 0.0], [0.8, 0.6]]
    >>> [row for row, _ in marginal_relevance([1.0, 0.0], rows, 2, weight=0.4)]
    [0, 2]
    >>> [row for row, _ in marginal_relevance([1.0, 0.0], rows, 2, weight=1.0)]
    [0, 1]
    """
    matrix = np.asarray(vectors, dtype=np.float64)
    if not len(matrix):
        return []
    near, alike = matrix @ np.asarray(query, dtype=np.float64), matrix @ matrix.T
    chosen: list[tuple[int, float]] = []
    for _ in range(min(k, len(matrix))):
        taken = [row for row, _ in chosen]
        score = weight * near - (1 - weight) * (alike[:, taken].max(axis=1) if taken else 0.0)
        score[taken] = -np.inf
        best = int(score.argmax())
        chosen.append((best, float(score[best])))
    return chosen


def fused(
    by_vector: Sequence[SearchHit], by_words: Sequence[SearchHit], k: int, *, alpha: float
) -> list[tuple[SearchHit, float]]:
    """The best `k` of two lists with their joint scores: alpha · cosine + (1 - alpha) · BM25, each divided by its best.

    >>> a, b = SearchHit("a", 0.8, "", {}), SearchHit("b", 0.4, "", {})
    >>> [(hit.chunk_id, score) for hit, score in fused([a, b], [SearchHit("b", 3.0, "", {})], 2, alpha=0.5)]
    [('b', 0.75), ('a', 0.5)]
    """
    found: dict[str, tuple[SearchHit, float]] = {}
    for hits, share in ((by_vector, alpha), (by_words, 1 - alpha)):
        best = max((hit.score for hit in hits), default=0.0)
        for hit in hits:
            first, score = found.get(hit.chunk_id, (hit, 0.0))
            found[hit.chunk_id] = first, score + (share * hit.score / best if best > 0 else 0.0)
    return sorted(found.values(), key=lambda one: (-one[1], one[0].chunk_id))[:k]


class WordIndex:
    """The chunks of a `FaissStore` by their words: SQLite's FTS5 with BM25, in memory.

    It is made at the first search and again after a change of the store, and holds every text in memory. Kept on the
    disk it would take part in every change of every store, for the few that are searched by words.
    """

    def __init__(self, store: FaissStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._generation = -1
        self._db = sqlite3.connect(":memory:", check_same_thread=False)  # used only under the lock

    def search(self, text: str, k: int, *, where: Where | None = None) -> list[SearchHit]:
        """The `k` chunks with the highest BM25 scores for any word of the text; `where` as in the store's `search`."""
        words = " OR ".join(f'"{word}"' for word in dict.fromkeys(re.findall(r"\w+", text.lower())))
        if not words:
            return []
        with self._lock:
            self._synchronise()
            rows: list[tuple[str, float]] = self._db.execute(
                "SELECT chunk_id, -bm25(words) FROM words WHERE words MATCH ? ORDER BY bm25(words), chunk_id", (words,)
            ).fetchall()
        if where is None:
            rows = rows[:k]
            found = {chunk.chunk_id: chunk for chunk in self._store.get(name for name, _ in rows)}
        else:  # each chunk with the metadata of its first place that passes
            found = {chunk.chunk_id: chunk for chunk in reversed(self._store.places(where=where))}
        passing = [(found[name], score) for name, score in rows if name in found][:k]
        return [SearchHit(chunk.chunk_id, score, chunk.text, chunk.metadata) for chunk, score in passing]

    def _synchronise(self) -> None:
        generation = self._store.stats().generation
        if generation == self._generation:
            return
        texts = {chunk.chunk_id: chunk.text for chunk in self._store.places()}
        with self._db:
            self._db.execute("DROP TABLE IF EXISTS words")
            self._db.execute("CREATE VIRTUAL TABLE words USING fts5(chunk_id UNINDEXED, text)")
            self._db.executemany("INSERT INTO words VALUES (?, ?)", texts.items())
        self._generation = generation

    def close(self) -> None:
        """Free the memory."""
        with self._lock:
            self._db.close()
