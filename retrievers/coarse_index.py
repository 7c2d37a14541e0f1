"""Candidates of a search among very many vectors, from 4-bit copies of them.

Product quantisation with 16 centroids for each pair of dimensions (Jégou et al. 2011), scanned with tables in registers
(André et al. 2015; FAISS calls it fast scan): a quarter of a byte for each dimension, and some 100 million vectors of
384 dimensions per second and core. The caller scores the candidates exactly; the copies
only choose them. Vectors can be removed, which most of FAISS's faster indexes cannot do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TRAINING = 4096  # vectors: FAISS uses no more for 16 centroids
_ITERATIONS = 8  # of k-means; 25 take six times as long and find no more


class CoarseIndex:
    """4-bit copies of vectors under int64 numbers. Not thread safe."""

    def __init__(self, index: Any, trained_on: int) -> None:
        """Use `of` or `restore`."""
        self._index, self.trained_on = index, trained_on

    @classmethod
    def of(cls, numbers: NDArray[np.int64], vectors: NDArray[np.float32]) -> Self:
        """Learn the centroids from a sample of the vectors `[n, dim]`, and take all of them. `dim` must be even."""
        import faiss

        dim = vectors.shape[1]
        quantiser: Any = faiss.IndexPQFastScan(dim, dim // 2, 4, faiss.METRIC_INNER_PRODUCT)
        quantiser.pq.cp.niter = _ITERATIONS
        sample = np.random.default_rng(0).choice(len(vectors), min(len(vectors), _TRAINING), replace=False)
        with _one_thread(faiss):
            quantiser.train(np.ascontiguousarray(vectors[np.sort(sample)]))
        made = cls(faiss.IndexIDMap(quantiser), len(vectors))
        made.add(numbers, vectors)
        return made

    def add(self, numbers: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """Add vectors `[n, dim]`; none of the numbers may be there already."""
        self._index.add_with_ids(np.ascontiguousarray(vectors), numbers)

    def remove(self, selector: Any) -> None:
        """Remove what a selector of FAISS's names."""
        self._index.remove_ids(selector)

    def candidates(self, query: NDArray[np.float32], count: int) -> NDArray[np.int64]:
        """The numbers of about the `count` nearest vectors, in any order; `query` is float32 `[dim]`."""
        numbers = self._index.search(query[None], count)[1][0]
        found: NDArray[np.int64] = numbers[numbers != -1]
        return found

    def serialise(self) -> bytes:
        """For `restore`."""
        import faiss

        raw: bytes = faiss.serialize_index(self._index).tobytes()
        return raw

    @classmethod
    def restore(cls, raw: bytes, trained_on: int) -> Self:
        """From what `serialise` gave, unharmed: FAISS ends the process on some damaged ones."""
        import faiss

        return cls(faiss.deserialize_index(np.frombuffer(raw, dtype=np.uint8)), trained_on)


@contextmanager
def _one_thread(faiss: Any) -> Iterator[None]:
    """FAISS in this thread alone: with several, k-means of pairs of numbers spends its time on waiting."""
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
