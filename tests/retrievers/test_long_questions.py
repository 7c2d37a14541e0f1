"""Questions longer than the embedding model reads at once: they are searched for in full."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachecraft_rag.prompt.builder import Turn
from cachecraft_rag.retrievers import langchain as langchain_classes
from cachecraft_rag.retrievers.embeddings import MOST_LETTERS, Embedder
from cachecraft_rag.retrievers.indexer import index_documents
from cachecraft_rag.retrievers.langchain import CacheCraftEmbeddings
from cachecraft_rag.retrievers.llama_index import (
    CacheCraftEmbedding,
    CacheCraftRetriever,
    ConversationQuery,
)
from cachecraft_rag.retrievers.retriever import Retriever, open_index
from cachecraft_rag.types.documents import Document

RETURNS = "An appliance may be returned within 45 days."
PAGES = {
    "returns.md": RETURNS,
    "kettle.md": "Descale the kettle every 8 weeks with white vinegar.",
    "warranty.md": "The warranty on every appliance lasts for three years.",
    "choir.md": "The choir sings in the old town hall on Thursday evenings.",
}
# some 300 tokens that are about nothing in these pages
TALK = (
    "My daughter has started at a new school, and we drive back and forth every morning. "
    "Half of our papers are still in boxes, because we moved house in the spring. "
    "On Saturday we had friends over for dinner and talked until late about university. "
    "I tried to call twice last week, but the line was busy and then my train came. "
) * 5
QUESTION = "Within how many days may I return an appliance?"
LONG = {
    "at the end": f"{TALK}{QUESTION}",
    "in the middle": f"{TALK}{QUESTION} {TALK}",
    "at the beginning": f"{QUESTION} {TALK}{TALK}",
    "without punctuation": f"{TALK}{QUESTION} {TALK}".replace(".", "").replace("?", ""),
}
AFTER: list[Turn] = [("user", "How often is the kettle descaled?"), ("assistant", "Often.")]


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return Embedder()


@pytest.fixture(scope="module")
def retriever(embedder: Embedder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Retriever]:
    with open_index(tmp_path_factory.mktemp("index"), embedder) as index:
        index_documents([Document(name, text) for name, text in PAGES.items()], index, embedder)
        yield Retriever(index, embedder)


def own(retriever: Retriever, question: str) -> str:
    return retriever.retrieve(question, top_k=1)[0].text


def follow_up(retriever: Retriever, question: str) -> str:
    return retriever.retrieve(question, top_k=1, history=AFTER)[0].text


def before_a_follow_up(retriever: Retriever, question: str) -> str:
    history: list[Turn] = [("user", question), ("assistant", "45.")]
    return retriever.retrieve("Is that so for every appliance?", top_k=1, history=history)[0].text


def langchain(retriever: Retriever, question: str) -> str:
    embeddings = CacheCraftEmbeddings(retriever.embedder)
    store = langchain_classes.CacheCraftVectorStore(retriever.index, embeddings)
    (document,) = store.as_retriever(search_kwargs={"k": 1}).invoke(question)
    return document.page_content


def llama_index(retriever: Retriever, question: str) -> str:
    return str(CacheCraftRetriever(retriever, top_k=1).retrieve(question)[0].node.get_content())


def llama_index_follow_up(retriever: Retriever, question: str) -> str:
    query = ConversationQuery.of(question, AFTER)
    return str(CacheCraftRetriever(retriever, top_k=1).retrieve(query)[0].node.get_content())


@pytest.mark.parametrize("search", [own, follow_up, langchain, llama_index, llama_index_follow_up])
@pytest.mark.parametrize("place", LONG)
def test_a_long_question_is_found_wherever_it_stands(
    retriever: Retriever, search: Callable[[Retriever, str], str], place: str
) -> None:
    assert retriever.embedder.count_tokens(LONG[place]) > 300
    assert search(retriever, LONG[place]) == RETURNS


def test_a_long_question_is_also_searched_for_with_its_follow_up(retriever: Retriever) -> None:
    assert before_a_follow_up(retriever, LONG["at the end"]) == RETURNS


def test_small_talk_that_is_like_a_page_does_not_hide_the_question(
    embedder: Embedder, tmp_path: Path
) -> None:
    weather = "It rained in the hills, and the river rose by two metres in a night."
    talk = "Yesterday we walked along the river in the hills while it rained all night. " * 18
    with open_index(tmp_path, embedder) as index:
        pages = {"weather.md": weather, **PAGES}
        index_documents([Document(name, text) for name, text in pages.items()], index, embedder)
        first, second = Retriever(index, embedder).retrieve(f"{talk}{QUESTION}", top_k=2)
    assert (first.text, second.text) == (RETURNS, weather)


def test_a_score_is_that_of_the_best_part(retriever: Retriever) -> None:
    (found,) = retriever.retrieve(LONG["at the end"], top_k=1)
    parts = retriever.embedder.question_parts(LONG["at the end"])
    scores = [retriever.retrieve(part, top_k=1)[0].score for part in parts]
    assert found.score == pytest.approx(max(scores), abs=1e-5)
    assert len(retriever.retrieve(LONG["in the middle"], top_k=9)) == len(PAGES)


def test_a_question_that_the_model_reads_whole_is_not_cut(embedder: Embedder) -> None:
    asked = f"{TALK[:600]}{QUESTION}"
    assert embedder.question_parts(asked) == [asked]
    assert embedder.question_parts("") == [""]


def test_parts_hold_the_whole_question_and_none_is_too_long(embedder: Embedder) -> None:
    words = [f"word{number}" for number in range(3000)]
    for text in (" ".join(words), ". ".join(words), "".join(words), "\n".join(words)):
        parts = embedder.question_parts(text)
        assert "".join("".join(parts).split()) == "".join(text.split())
        assert all(embedder.count_tokens(part) <= embedder.limit for part in parts)
    assert len(embedder.question_parts(" ".join(words))) < len(words) / 10


@pytest.mark.parametrize("embed", ["encode_query", "langchain", "llama_index"])
def test_one_vector_of_a_long_question_depends_on_all_of_it(embedder: Embedder, embed: str) -> None:
    def vector_of(text: str) -> Any:
        if embed == "langchain":
            return np.asarray(CacheCraftEmbeddings(embedder).embed_query(text))
        if embed == "llama_index":
            return np.asarray(CacheCraftEmbedding(embedder).get_query_embedding(text))
        return embedder.encode_query([text])[0]

    vectors = [vector_of(f"{TALK}{end}") for end in (QUESTION, "Does the choir sing?")]
    assert np.linalg.norm(vectors[0]) == pytest.approx(1, abs=1e-5)
    assert vectors[0] @ vectors[1] < 0.99
    both = embedder.encode_query([QUESTION, f"{TALK}{QUESTION}"])
    assert np.allclose(both, [embedder.encode_query([QUESTION])[0], vectors[0]], atol=1e-5) or (
        embed != "encode_query"
    )


def test_what_is_left_out_of_a_giant_question_is_said_once(
    retriever: Retriever, caplog: pytest.LogCaptureFixture
) -> None:
    filler = "x " * MOST_LETTERS
    with caplog.at_level(logging.WARNING, logger="cachecraft_rag.retrievers.embeddings"):
        for question in (f"{QUESTION}\n\n{filler}", f"{filler}\n\n{QUESTION}"):
            caplog.clear()
            assert own(retriever, question) == RETURNS
            (record,) = caplog.records
            assert f"{MOST_LETTERS // 2}" in record.getMessage()
            assert "shorten it" in record.getMessage()
