"""The index in memory where there are so many vectors that only candidates are compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cachecraft_rag.retrievers.index import vector_index
from cachecraft_rag.retrievers.index.vector_index import VectorIndex

DIM = 384  # the bundled embedding model's
MANY = 6000


def unit_vectors(count: int, seed: int, dim: int = DIM) -> NDArray[np.float32]:
    """Random directions: nothing is harder to quantise than vectors that form no groups."""
    vectors = np.random.default_rng(seed).standard_normal((count, dim), dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def numbers_of(count: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).choice(2**62, count, replace=False).astype(np.int64)


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_index, "COARSE_FROM", 2000)


@pytest.fixture
def index() -> VectorIndex:
    made = VectorIndex(DIM)
    made.add(numbers_of(MANY, 1), unit_vectors(MANY, 2))
    return made


def recall(index: VectorIndex, k: int = 10, queries: int = 40) -> float:
    """The share of the `k` nearest that a search finds; whatever it finds must be there and have its exact score."""
    found = 0
    held = set(index.numbers().tolist())
    for query in unit_vectors(queries, 3):
        numbers, scores = index.search(query, k, None)
        right, exact = (part[:k] for part in index.search(query, k, None, exact=True))
        assert len(numbers) == len(right) == k
        assert set(numbers.tolist()) <= held
        score_of = dict(zip(right.tolist(), exact.tolist(), strict=True))
        for number, score in zip(numbers.tolist(), scores.tolist(), strict=True):
            assert score == pytest.approx(score_of.get(number, score), abs=1e-5)
        assert (np.diff(scores) <= 0).all()
        found += len(set(numbers.tolist()) & set(right.tolist()))
    return found / (queries * k)


def test_candidates_hold_the_nearest(index: VectorIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_index, "_CANDIDATES", 100)  # a sixtieth of them
    assert recall(index) >= 0.98
    assert index._coarse is not None


def test_removal_keeps_recall(index: VectorIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_index, "_CANDIDATES", 100)
    recall(index)
    for step in range(4):
        index.remove(index.numbers()[step::5])
        index.add(numbers_of(300, 10 + step), unit_vectors(300, 20 + step))
        assert recall(index) >= 0.98


def test_vectors_of_another_kind_are_learned_when_they_outnumber_the_old(
    index: VectorIndex,
) -> None:
    recall(index)
    before = index._coarse
    one_corner = unit_vectors(MANY + 1, 5) * 0.02
    one_corner[:, 0] += 1.0
    index.add(
        numbers_of(MANY + 1, 6), one_corner / np.linalg.norm(one_corner, axis=1, keepdims=True)
    )
    assert recall(index) >= 0.98
    assert index._coarse is not before


def test_what_was_learned_is_kept_in_the_file(index: VectorIndex, tmp_path: Path) -> None:
    before = [index.search(query, 5, None)[0].tolist() for query in unit_vectors(5, 7)]
    index.save(tmp_path / "index.faiss", store="here")
    loaded = VectorIndex.load(tmp_path / "index.faiss", dim=DIM, store="here")
    assert loaded is not None
    assert loaded._coarse is not None
    assert [loaded.search(query, 5, None)[0].tolist() for query in unit_vectors(5, 7)] == before
    loaded.remove(loaded.numbers()[:10])
    assert recall(loaded) >= 0.98


def test_a_filter_and_few_vectors_are_compared_whole(index: VectorIndex) -> None:
    query = unit_vectors(1, 8)[0]
    allowed = index.numbers()[::100]
    numbers, _ = index.search(query, 3, allowed)
    assert set(numbers.tolist()) <= set(allowed.tolist())
    assert index._coarse is None  # it was not needed
    index.search(query, 3, None)
    assert index._coarse is not None
    index.remove(index.numbers()[999:])
    index.search(query, 3, None)
    assert index._coarse is None


def test_ties_are_returned_whole(index: VectorIndex) -> None:
    query = unit_vectors(1, 9)[0]
    twins = numbers_of(20, 30)
    index.add(twins, np.repeat(query[None], 20, axis=0))
    numbers, scores = index.search(query, 3, None)
    assert set(numbers.tolist()) == set(twins.tolist())
    assert len(set(scores.tolist())) == 1


def test_an_odd_number_of_dimensions_is_compared_whole() -> None:
    index = VectorIndex(7)
    index.add(numbers_of(3000, 1), unit_vectors(3000, 2, dim=7))
    query = unit_vectors(1, 3, dim=7)[0]
    assert (
        index.search(query, 5, None)[0].tolist()
        == index.search(query, 5, None, exact=True)[0].tolist()
    )
    assert index._coarse is None
