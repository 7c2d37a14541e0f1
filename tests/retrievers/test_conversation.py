"""Follow-up questions: what is searched for, what a first question costs, and ties."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.model.demo_model import handbook_folder
from cachecraft_rag.prompt.builder import Turn
from cachecraft_rag.retrievers.conversation import TIE, search_texts
from cachecraft_rag.retrievers.embeddings import Embedder
from cachecraft_rag.retrievers.index.faiss_store import FaissStore
from cachecraft_rag.retrievers.indexer import index_documents, index_folder
from cachecraft_rag.retrievers.retriever import Retriever, open_index
from cachecraft_rag.types.documents import Chunk, Document

FIRST = "How often should I descale the kettle?"
HISTORY: list[Turn] = [("user", FIRST), ("assistant", "Every eight weeks.")]
FOLLOW_UP = "And how long does that take?"


class Counting:
    """An embedder that notes what it was asked to embed."""

    def __init__(self, embedder: Any) -> None:
        self._embedder = embedder
        self.asked: list[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._embedder, name)

    def encode_query(self, texts: Sequence[str]) -> Any:
        self.asked.append(list(texts))
        return self._embedder.encode_query(texts)


class CountingIndex:
    """An index that counts its searches."""

    def __init__(self, index: FaissStore) -> None:
        self._index = index
        self.searches = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)

    def search(self, *given: Any, **options: Any) -> Any:
        self.searches += 1
        return self._index.search(*given, **options)


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return Embedder()


@pytest.fixture(scope="module")
def handbook_index(
    embedder: Embedder, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Retriever]:
    with open_index(tmp_path_factory.mktemp("handbook"), embedder) as index:
        index_folder(handbook_folder(), index, embedder)
        yield Retriever(index, embedder)


def test_search_texts_leave_answers_out_and_bound_what_was_pasted() -> None:
    assert search_texts(FIRST) == (FIRST,)
    assert search_texts(FOLLOW_UP, HISTORY) == (FOLLOW_UP, f"{FIRST} {FOLLOW_UP}")
    assert search_texts(FOLLOW_UP, [("user", " "), ("assistant", "What?")]) == (FOLLOW_UP,)
    long = [
        *HISTORY,
        ("user", "Second?"),
        ("assistant", "Yes."),
        ("user", "Third?"),
        ("assistant", "No."),
    ]
    assert search_texts(FOLLOW_UP, long)[1] == f"Second? Third? {FOLLOW_UP}"  # type: ignore[arg-type]
    pasted: list[Turn] = [
        ("user", "word " * 5000 + "Which kettle is this?"),
        ("assistant", "The Wren."),
    ]
    text = search_texts(FOLLOW_UP, pasted)[1]
    assert text.endswith(f"word Which kettle is this? {FOLLOW_UP}")
    assert text.startswith("word ")
    assert len(text) <= 600 + 1 + len(FOLLOW_UP)


def test_a_long_question_without_spaces_stays_in_the_search() -> None:
    pasted: list[Turn] = [("user", "水壶" * 400), ("assistant", "每周。")]
    assert search_texts("多久?", pasted) == ("多久?", f"{'水壶' * 300} 多久?")
    pasted += [("user", "多大?"), ("assistant", "两升。")]
    assert search_texts("多久?", pasted) == ("多久?", f"{'水壶' * 298} 多大? 多久?")


def test_a_first_question_costs_nothing(embedder: Embedder, handbook_index: Retriever) -> None:
    counting, index = Counting(embedder), CountingIndex(handbook_index.index)
    retriever = Retriever(index, counting)  # type: ignore[arg-type]
    first = retriever.retrieve(FIRST, history=[])
    assert counting.asked == [[FIRST]]
    assert index.searches == 1
    alone = handbook_index.index.search(embedder.encode_query([FIRST])[0], 5)
    assert [hit.chunk_id for hit in first] == [hit.chunk_id for hit in alone]
    # on some CPUs a model's first call rounds otherwise than the next ones
    assert [hit.score for hit in first] == pytest.approx([hit.score for hit in alone], abs=1e-6)
    retriever.retrieve(FOLLOW_UP, history=HISTORY)
    # one call of the embedding model
    assert counting.asked[1:] == [[FOLLOW_UP, f"{FIRST} {FOLLOW_UP}", FIRST]]


def test_filters_hold_for_follow_ups_too(handbook_index: Retriever) -> None:
    where = {"source": "handbook/warranty.md"}
    hits = handbook_index.retrieve(FOLLOW_UP, history=HISTORY, where=where, top_k=4)
    assert {hit.metadata["source"] for hit in hits} == {"handbook/warranty.md"}


@pytest.mark.parametrize("history", ["text", [("user", 1)], [("user",)], None])
def test_a_history_of_another_form_is_refused(handbook_index: Retriever, history: Any) -> None:
    with pytest.raises(ConfigError, match="history"):
        handbook_index.retrieve(FOLLOW_UP, history=history)


# --- ties ---


class Planar:
    """Embeds each text as the direction given for it."""

    dim, fingerprint, name = 2, "planar@1", "planar"

    def __init__(self, degrees: dict[str, float]) -> None:
        self._degrees = degrees

    def encode_query(self, texts: Sequence[str]) -> Any:
        angles = np.radians([self._degrees[text] for text in texts])
        return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)

    def question_parts(self, question: str) -> list[str]:
        return [question]


@pytest.mark.parametrize(("gap", "kept"), [(TIE / 2, True), (TIE * 3, False)])
def test_chunks_of_the_turn_before_are_preferred_where_they_tie(
    tmp_path: Path, gap: float, kept: bool
) -> None:
    """Two chunks on either side of a follow-up; the turn before found the one that is `gap` farther from it."""
    near, far = 30.0, float(np.degrees(np.arccos(np.cos(np.radians(30.0)) - gap)))
    embedder = Planar({"first": -far, "then": 0.0, "first then": 0.0})
    with FaissStore.open(tmp_path, dim=2, embedder_fingerprint="planar@1") as index:
        for name, degrees in (("near", near), ("far", -far)):
            vector = [np.cos(np.radians(degrees)), np.sin(np.radians(degrees))]
            index.upsert(name, [Chunk(name)], np.array([vector], dtype=np.float32))
        retriever = Retriever(index, embedder)  # type: ignore[arg-type]
        assert [hit.text for hit in retriever.retrieve("first", top_k=1)] == ["far"]
        assert [hit.text for hit in retriever.retrieve("then", top_k=1)] == ["near"]
        found = retriever.retrieve(
            "then", top_k=1, history=[("user", "first"), ("assistant", "yes")]
        )
        assert [hit.text for hit in found] == (["far"] if kept else ["near"])


def test_a_preference_never_costs_hits(embedder: Embedder, tmp_path: Path) -> None:
    with open_index(tmp_path, embedder) as index:
        index_documents(
            [Document("a", "Descale the kettle."), Document("b", "The train leaves.")],
            index,
            embedder,
        )
        assert len(Retriever(index, embedder).retrieve(FOLLOW_UP, history=HISTORY, top_k=5)) == 2
