"""A FAISS index in memory, and its cache file.

`IndexIDMap2` over `IndexFlatIP`: every vector is compared. From `COARSE_FROM` vectors on that takes longer than the
rest of a request, and a `CoarseIndex` names the candidates that are compared. `IndexIDMap2` over an inverted file is
out of the question: one `remove_ids` ruins its recall, a second one ends the process (faiss issue 4656). A graph index
cannot remove at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cachecraft_rag.retrievers.coarse_index import CoarseIndex

if TYPE_CHECKING:
    from numpy.typing import NDArray

COARSE_FROM = 100_000  # vectors: fewer are all compared
_CANDIDATES = 1000  # at least; of a million random vectors these hold the ten nearest
_MAGIC = b"CCINDEX1"
_LEFTOVER_AFTER_S = 3600.0  # a temporary file this old belongs to a process that was killed
logger = logging.getLogger("cachecraft_rag.retrievers.vector_index")


class VectorIndex:
    """Vectors under int64 numbers. Not thread safe.

    `generation` is the state of the database that they mirror, and `stamp` its random name: a database restored from an
    older copy comes to the same generation again, but not to the same stamp.
    """

    def __init__(self, dim: int) -> None:
        import faiss

        self._dim = dim
        self._coarse: CoarseIndex | None = None
        self._faiss: Any = faiss  # its type stubs know neither selectors nor arrays
        self._index: Any = faiss.IndexIDMap2(faiss.IndexFlatIP(dim))
        self.generation = 0
        self.stamp = ""

    def numbers(self) -> NDArray[np.int64]:
        """The numbers of all vectors, sorted."""
        ids: NDArray[np.int64] = self._faiss.vector_to_array(self._index.id_map)
        return np.sort(ids)

    def add(self, numbers: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """Add vectors `[n, dim]`. None of the numbers may be there already: FAISS would silently keep both."""
        self._index.add_with_ids(np.ascontiguousarray(vectors), numbers)
        if self._coarse is not None:
            self._coarse.add(numbers, vectors)

    def remove(self, numbers: NDArray[np.int64]) -> None:
        """Remove vectors; numbers that are not there are ignored."""
        if len(numbers):
            selector = self._faiss.IDSelectorBatch(numbers)
            self._index.remove_ids(selector)
            if self._coarse is not None:
                self._coarse.remove(selector)

    def search(
        self, query: NDArray[np.float32], k: int, allowed: NDArray[np.int64] | None, *, exact: bool = False
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Numbers and scores of the `k` best, best first, *and of all that tie with the last*: the caller breaks ties.

        query    float32 `[dim]`
        allowed  only these numbers are looked at, and all of them (a filter before the search, so it loses nothing);
                 None for all
        exact    all vectors are compared, however many there are
        """
        if allowed is None and not exact and (coarse := self._coarse_index()) is not None:
            return self._search_candidates(query, k, coarse)
        reach = int(self._index.ntotal) if allowed is None else len(allowed)
        if reach == 0:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
        selector = None if allowed is None else self._faiss.IDSelectorBatch(allowed)
        params = None if selector is None else self._faiss.SearchParameters(sel=selector)
        k = min(k, reach)
        fetch = min(k + 8, reach)
        while True:
            scores, numbers = self._index.search(query[None], fetch, params=params)
            # FAISS returns equal scores in any order and cuts them off anywhere: go on until the tie has ended.
            if fetch == reach or scores[0, -1] < scores[0, k - 1]:
                break
            fetch = min(2 * fetch, reach)
        found = numbers[0] != -1  # FAISS fills up with -1 where it has nothing
        return numbers[0][found], scores[0][found]

    def _coarse_index(self) -> CoarseIndex | None:
        """The copies, if there are so many vectors; made anew when there are twice as many as they were learned from.

        An odd number of dimensions has no pairs, so there all vectors are compared.
        """
        total = int(self._index.ntotal)
        if total < COARSE_FROM // (1 if self._coarse is None else 2) or self._dim % 2:
            self._coarse = None
        elif self._coarse is None or total > 2 * self._coarse.trained_on:
            flat = self._faiss.downcast_index(self._index.index)
            vectors = self._faiss.rev_swig_ptr(flat.get_xb(), total * self._dim).reshape(total, self._dim)
            self._coarse = CoarseIndex.of(self._faiss.vector_to_array(self._index.id_map), vectors)
        return self._coarse

    def _search_candidates(
        self, query: NDArray[np.float32], k: int, coarse: CoarseIndex
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        numbers = coarse.candidates(query, min(max(_CANDIDATES, 20 * k), int(self._index.ntotal)))
        scores = self._index.reconstruct_batch(numbers) @ query
        order = np.argsort(-scores, kind="stable")
        numbers, scores = numbers[order], scores[order]
        kept = int(np.count_nonzero(scores >= scores[min(k, len(scores)) - 1]))
        return numbers[:kept], scores[:kept]

    def save(self, path: Path, *, store: str) -> None:
        """Write the cache file of a store: under a temporary name first, so a reader sees the old or the new."""
        payload = self._faiss.serialize_index(self._index).tobytes()
        meta = {"store": store, "dim": self._dim, "generation": self.generation, "stamp": self.stamp}
        if self._coarse is not None:
            meta |= {"exact_bytes": len(payload), "trained_on": self._coarse.trained_on}
            payload += self._coarse.serialise()
        header = json.dumps(meta).encode()
        _sweep(path)
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            with temporary.open("wb") as file:
                file.write(_MAGIC + len(header).to_bytes(4, "little") + header + _checksum(header, payload) + payload)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path, *, dim: int, store: str) -> VectorIndex | None:
        """The index in a cache file; None, with a note in the log, where it is damaged or not this store's."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("%s cannot be read (%s); rebuilding the index", path, error)
            return None
        start = len(_MAGIC) + 4
        size = int.from_bytes(data[len(_MAGIC) : start], "little")
        header, checksum, payload = data[start : start + size], data[start + size :][:16], data[start + size + 16 :]
        # FAISS ends the process on some damaged files, so nothing reaches it that has not been checked.
        if not data.startswith(_MAGIC) or checksum != _checksum(header, payload):
            logger.warning("%s is damaged; rebuilding the index", path)
            return None
        meta = json.loads(header)
        if (meta["store"], meta["dim"]) != (store, dim):
            logger.warning("%s belongs to another index; rebuilding it", path)
            return None
        loaded = cls(dim)
        exact = meta.get("exact_bytes", len(payload))
        loaded._index = loaded._faiss.deserialize_index(np.frombuffer(payload[:exact], dtype=np.uint8))
        if exact < len(payload):
            loaded._coarse = CoarseIndex.restore(payload[exact:], int(meta["trained_on"]))
        loaded.generation, loaded.stamp = int(meta["generation"]), str(meta["stamp"])
        return loaded


def _checksum(header: bytes, payload: bytes) -> bytes:
    state = hashlib.blake2b(header, digest_size=16)
    state.update(payload)
    return state.digest()


def _sweep(path: Path) -> None:
    """Remove what killed writers left behind."""
    for leftover in path.parent.glob(f"{path.name}.*.tmp"):
        with contextlib.suppress(OSError):  # another process was quicker
            if time.time() - leftover.stat().st_mtime > _LEFTOVER_AFTER_S:
                leftover.unlink()
