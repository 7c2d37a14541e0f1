"""A FAISS index in memory, and its cache file.

`IndexIDMap2` over `IndexFlatIP`: every vector is compared. From `COARSE_FROM` vectors on that takes longer than the
rest of a request, and 4-bit copies of the vectors name the candidates that are compared: product quantisation with 16
centroids for each pair of dimensions (Jégou et al. 2011), scanned with tables in registers (André et al. 2015; FAISS
calls it fast scan). It takes a quarter of a byte for each dimension, and scans some 100 million vectors of 384
dimensions per second and core.

`IndexIDMap2` over an inverted file is out of the question: one `remove_ids` ruins its recall, a second one ends the
process (faiss issue 4656). A graph index cannot remove at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cachecraft_rag.checks import from_extra
from cachecraft_rag.store.small_file import replace_file

if TYPE_CHECKING:
    from numpy.typing import NDArray

COARSE_FROM = 100_000  # vectors: fewer are all compared
_CANDIDATES = 1000  # at least; of a million random vectors these hold the ten nearest
_TRAINING = 4096  # vectors: FAISS uses no more for 16 centroids
_ITERATIONS = 8  # of k-means; 25 take six times as long and find no more
_MAGIC = b"CCINDEX2"
_LEFTOVER_AFTER_S = 3600.0  # a temporary file this old belongs to a process that was killed
logger = logging.getLogger("cachecraft_rag.retrievers.index.vector_index")


class VectorIndex:
    """Vectors under int64 numbers. Not thread safe.

    `stamp` is the random name of the state of the database that they mirror, set by the caller; "" in a new one.
    """

    def __init__(self, dim: int) -> None:
        with from_extra("retrieval", "The index"):
            import faiss
        self._dim = dim
        self._faiss: Any = faiss  # its type stubs know neither selectors nor arrays
        self._index: Any = faiss.IndexIDMap2(faiss.IndexFlatIP(dim))
        self._coarse: Any = None
        self._trained_on = 0
        self.stamp = ""

    def numbers(self) -> NDArray[np.int64]:
        """Return the numbers of all vectors, int64 `[n]`, ascending."""
        ids: NDArray[np.int64] = self._faiss.vector_to_array(self._index.id_map)
        return np.sort(ids)

    def add(self, numbers: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """Add vectors, float32 `[n, dim]`, with their numbers, int64 `[n]`.

        None of the numbers may be there already: FAISS would silently keep both.
        """
        for index in self._both():
            index.add_with_ids(np.ascontiguousarray(vectors), numbers)

    def remove(self, numbers: NDArray[np.int64]) -> None:
        """Remove the vectors with these numbers, int64 `[n]`; unknown ones are ignored."""
        if len(numbers):
            selector = self._faiss.IDSelectorBatch(numbers)
            for index in self._both():
                index.remove_ids(selector)

    def _both(self) -> list[Any]:
        """Return the vectors and, if there are any, their copies."""
        return [self._index] if self._coarse is None else [self._index, self._coarse]

    def search(
        self,
        query: NDArray[np.float32],
        k: int,
        allowed: NDArray[np.int64] | None,
        *,
        exact: bool = False,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return numbers, int64 `[hits]`, and scores, float32 `[hits]`, of the `k` best and possibly more, best first.

        Scores are inner products. All that tie with the last of the `k` are returned too, so the caller breaks ties and
        cuts the list; where all vectors are compared, a few with lower scores may follow. Where 4-bit copies name the
        candidates (the max(1000, 20·k) that score highest in them), the result is approximate: one of the `k` best may
        be missing. The copies are made by the first search that needs them, and again once there are twice as many
        vectors.

        Args:
            query: float32 `[dim]`, without NaN.
            k: at least 1.
            allowed: only these numbers are looked at, and all of them (a filter before the search, so it loses
                nothing); None: all numbers. Numbers without a vector are ignored.
            exact: all vectors are compared, however many there are. That is so for fewer than `COARSE_FROM` vectors
                (half of that while there are copies), with `allowed`, and for an odd number of dimensions in any case.
        """
        if allowed is None and not exact and self._has_copies():
            return self._search_candidates(query, k)
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
        is_hit = numbers[0] != -1  # FAISS fills up with -1 if it has fewer
        return numbers[0][is_hit], scores[0][is_hit]

    def _has_copies(self) -> bool:
        """Return True if there are so many vectors that copies name the candidates; make them if they are due.

        They are made again when there are twice as many vectors as their centroids were learned from. An odd number of
        dimensions has no pairs, so there all vectors are compared.
        """
        total = int(self._index.ntotal)
        if total < COARSE_FROM // (1 if self._coarse is None else 2) or self._dim % 2:
            self._coarse = None
        elif self._coarse is None or total > 2 * self._trained_on:
            flat = self._faiss.downcast_index(self._index.index)
            vectors = self._faiss.rev_swig_ptr(flat.get_xb(), total * self._dim).reshape(
                total, self._dim
            )
            self._coarse = self._copies(vectors)
            self._trained_on = total
        return self._coarse is not None

    def _copies(self, vectors: NDArray[np.float32]) -> Any:
        """Return 4-bit copies of all vectors `[n, dim]`, their centroids learned from a sample."""
        faiss = self._faiss
        dim = self._dim
        quantiser = faiss.IndexPQFastScan(dim, dim // 2, 4, faiss.METRIC_INNER_PRODUCT)
        quantiser.pq.cp.niter = _ITERATIONS
        sample = np.random.default_rng(0).choice(
            len(vectors), min(len(vectors), _TRAINING), replace=False
        )
        threads = faiss.omp_get_max_threads()
        # with several, k-means of pairs of numbers spends its time on waiting
        faiss.omp_set_num_threads(1)
        try:
            quantiser.train(np.ascontiguousarray(vectors[np.sort(sample)]))
        finally:
            faiss.omp_set_num_threads(threads)
        copies = faiss.IndexIDMap(quantiser)
        copies.add_with_ids(vectors, faiss.vector_to_array(self._index.id_map))
        return copies

    def _search_candidates(
        self, query: NDArray[np.float32], k: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        count = min(max(_CANDIDATES, 20 * k), int(self._index.ntotal))
        numbers = self._coarse.search(query[None], count)[1][0]
        numbers = numbers[numbers != -1]
        scores = self._index.reconstruct_batch(numbers) @ query
        order = np.argsort(-scores, kind="stable")
        numbers = numbers[order]
        scores = scores[order]
        kept = int(np.count_nonzero(scores >= scores[min(k, len(scores)) - 1]))
        return numbers[:kept], scores[:kept]

    def save(self, path: Path, *, store: str) -> None:
        """Write vectors, copies and `stamp` to the index file, in place of an older one.

        Readers see the old file or the new one. Temporary files of killed processes beside it, older than an hour, are
        removed. `store` is the random name of the store, so that the file is not read for another one.
        """
        for leftover in path.parent.glob(f"{path.name}.*.tmp"):
            with contextlib.suppress(OSError):  # another process was quicker
                if time.time() - leftover.stat().st_mtime > _LEFTOVER_AFTER_S:
                    leftover.unlink()
        parts = [self._faiss.serialize_index(index).tobytes() for index in self._both()]
        meta = {"store": store, "dim": self._dim, "stamp": self.stamp}
        header = (
            json.dumps(
                meta | {"exact_bytes": len(parts[0]), "trained_on": self._trained_on}
            ).encode()
            + b"\n"
        )
        replace_file(path, b"".join((_MAGIC, _checksum(header, *parts), header, *parts)))

    @classmethod
    def load(cls, path: Path, *, dim: int, store: str) -> VectorIndex | None:
        """Return the index in a file; None if that is missing, unreadable, damaged, or not of this store and `dim`.

        A warning is logged unless it is missing, and the caller makes the index again.
        """
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("%s cannot be read (%s); rebuilding the index", path, error)
            return None
        start = len(_MAGIC) + 16
        # FAISS ends the process on some damaged files, so nothing reaches it that has not been checked.
        if data[:start] != _MAGIC + _checksum(memoryview(data)[start:]):
            logger.warning("%s is damaged, or of another version; rebuilding the index", path)
            return None
        end = data.index(b"\n", start)
        meta = json.loads(data[start:end])
        payload = memoryview(data)[end + 1 :]
        if (meta["store"], meta["dim"]) != (store, dim):
            logger.warning("%s belongs to another index; rebuilding it", path)
            return None
        loaded = cls(dim)
        exact = int(meta["exact_bytes"])
        read = loaded._faiss.deserialize_index
        loaded._index = read(np.frombuffer(payload[:exact], dtype=np.uint8))
        if exact < len(payload):
            loaded._coarse = read(np.frombuffer(payload[exact:], dtype=np.uint8))
        loaded._trained_on = int(meta["trained_on"])
        loaded.stamp = str(meta["stamp"])
        return loaded


def _checksum(*parts: bytes | memoryview) -> bytes:
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(part)
    return state.digest()
