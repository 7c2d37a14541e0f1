"""Datasets: which questions are drawn, which passages they get, and what stands around a passage."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.formats import read as read_published
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation import dataset as module
from cachecraft_rag.evaluation.dataset import (
    Dataset,
    EvaluationQuestion,
    handbook_dataset,
    load_dataset,
)
from cachecraft_rag.evaluation.formats import JsonRecord, read_squad
from cachecraft_rag.model.demo_model import handbook_questions
from cachecraft_rag.types.documents import Chunk

YEARS = range(1700, 1704)


@pytest.fixture
def squad(tmp_path: Path) -> Path:
    """Six articles of four paragraphs, one question each; all articles begin with the same paragraph."""
    articles: list[dict[str, Any]] = []
    for name in ("mill", "bridge", "tower", "harbour", "school", "market"):
        paragraphs: list[dict[str, Any]] = [{"context": "An old building of the town.", "qas": []}]
        for year in YEARS:
            asked = f"Which {name} is of {year}?"
            answer = f"{name} {year}"
            qas = [
                {
                    "id": f"{name}-{year}",
                    "question": asked,
                    "answers": [{"text": answer, "answer_start": 4}],
                }
            ]
            paragraphs.append({"context": f"The {answer} stands by the river.", "qas": qas})
        articles.append({"title": name, "paragraphs": paragraphs})
    path = tmp_path / "town.json"
    path.write_text(json.dumps({"version": "1.1", "data": articles}), encoding="utf-8")
    return path


def lines(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


def texts(question: EvaluationQuestion) -> list[str]:
    return [chunk.text for chunk in question.passages]


def unrelated(data: Dataset, question: EvaluationQuestion) -> tuple[Chunk, ...]:
    """The passages of all documents other than those of the question's passages."""
    own = [data.document_of(chunk.chunk_id) for chunk in question.passages]
    return tuple(chunk for document in data.documents if document not in own for chunk in document)


def test_questions_are_a_seeded_draw_and_the_limit_only_shortens_it(squad: Path) -> None:
    whole = load_dataset(squad, passages=3, limit=None, seed=3)
    assert whole.name == "town"
    assert len(whole.questions) == 24
    assert load_dataset(squad, passages=3, limit=None, seed=3) == whole
    assert load_dataset(squad, passages=3, limit=7, seed=3).questions == whole.questions[:7]
    other = load_dataset(squad, passages=3, limit=None, seed=4)
    assert [q.question_id for q in other.questions] != [q.question_id for q in whole.questions]
    assert {q.question_id for q in other.questions} == {q.question_id for q in whole.questions}


def test_passages_hold_the_answer_and_come_from_the_article(squad: Path) -> None:
    data = load_dataset(squad, passages=3, limit=None, seed=3)
    places = []
    for question in data.questions:
        name = question.question_id.split("-")[0]
        assert len(question.passages) == len(set(texts(question))) == 3
        assert all(name in text or text.startswith("An old") for text in texts(question))
        (place,) = [i for i, text in enumerate(texts(question)) if question.answers[0] in text]
        places.append(place)
    assert set(places) == {0, 1, 2}  # the one with the answer may stand anywhere


def test_articles_without_a_title_in_two_records_are_two_documents() -> None:
    def record(word: str) -> dict[str, object]:
        asked = [{"question": "Who?", "answers": [{"text": word}]}]
        return {"data": [{"paragraphs": [{"context": f"{word} did.", "qas": asked}]}]}

    records = [JsonRecord("here", record(word)) for word in ("Ada", "Bob")]
    assert len(read_squad(records).documents) == 2


def test_other_documents_fill_up_where_the_article_is_too_short(squad: Path) -> None:
    data = load_dataset(squad, passages=10, limit=None, seed=3)
    for question in data.questions:
        own = [text for text in texts(question) if question.question_id.split("-")[0] in text]
        assert len(own) == 4
        assert len(set(texts(question))) == 10
    (most,) = {
        len(question.passages)
        for question in load_dataset(squad, passages=99, limit=9, seed=3).questions
    }
    assert most == 25  # all there are


def test_neighbours_and_document_of_a_passage(squad: Path) -> None:
    data = load_dataset(squad, passages=2, limit=None, seed=3)
    # The paragraph that all articles begin with belongs to the first of them.
    assert [len(document) for document in data.documents] == [5, 4, 4, 4, 4, 4]
    everything = [chunk.chunk_id for document in data.documents for chunk in document]
    assert len(everything) == len(set(everything))
    bridge = data.documents[1]
    assert data.neighbours(bridge[0].chunk_id) == ()
    assert data.neighbours(bridge[3].chunk_id) == bridge[:3]
    assert data.document_of(bridge[3].chunk_id) == bridge
    assert bridge[2].metadata == {"source": "bridge", "ordinal": 2}
    with pytest.raises(KeyError):
        data.neighbours("nothing")
    question = EvaluationQuestion("q", "?", (bridge[1], data.documents[3][0]), ())
    assert unrelated(data, question) == tuple(
        c for place in (0, 2, 4, 5) for c in data.documents[place]
    )


def test_a_large_file_keeps_the_documents_it_needs_and_some_others(
    squad: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "OTHER_DOCUMENTS", 2)
    data = load_dataset(squad, passages=2, limit=1, seed=3)
    assert len(data.documents) == 3
    (question,) = data.questions
    assert question.answers[0] in " ".join(texts(question))
    assert {str(chunk.metadata["source"]) for chunk in question.passages} == {
        question.question_id.split("-")[0]
    }
    assert len(unrelated(data, question)) >= 8


def test_long_passages_are_split_and_the_piece_with_the_answer_comes_along(tmp_path: Path) -> None:
    sentences = [
        f"In the year {year} the council of the town met for the fortieth time in its hall."
        for year in range(900)
    ]
    context = " ".join(sentences)
    qas = [
        {
            "id": str(year),
            "question": "Which?",
            "answers": [{"text": f"year {year}", "answer_start": 0}],
        }
        for year in (1, 450, 899)
    ]
    path = tmp_path / "long.json"
    path.write_text(
        json.dumps({"data": [{"title": "x", "paragraphs": [{"context": context, "qas": qas}]}]})
    )
    data = load_dataset(path, passages=2, limit=None, seed=0)
    (document,) = data.documents
    assert all(
        len(chunk.text) <= 4 * module.QuestionFile((), ()).passage_tokens for chunk in document
    )
    assert " ".join(" ".join(chunk.text for chunk in document).split()) == context
    for question in data.questions:
        assert len(question.passages) == 2
        holds = [
            bool(re.search(rf"year {question.question_id}\b", text)) for text in texts(question)
        ]
        assert sorted(holds) == [False, True]


def test_passages_with_the_answer_are_all_included_even_beyond_the_limit(tmp_path: Path) -> None:
    paragraphs = [
        {"title": f"Page {i}", "paragraph_text": f"Fact {i}.", "is_supporting": i < 3}
        for i in range(9)
    ]
    entry = {"id": "m", "question": "?", "answer": "Fact 2", "paragraphs": paragraphs}
    path = lines(tmp_path / "m.jsonl", entry)
    (question,) = load_dataset(path, passages=2, limit=None, seed=0, read=read_published).questions
    assert sorted(texts(question)) == [f"Page {i}\n\nFact {i}." for i in range(3)]
    (question,) = load_dataset(path, passages=5, limit=None, seed=0, read=read_published).questions
    assert len(question.passages) == 5


def test_a_retrievers_own_list_keeps_its_order_and_gets_nothing_added(tmp_path: Path) -> None:
    found = [f"Passage {i} of the list." for i in range(5)]
    path = lines(
        tmp_path / "own.jsonl",
        {"id": "late", "question": "Which?", "passages": found, "answers": ["passage 4"]},
        {"id": "open", "question": "What?", "passages": found[:3]},
    )
    for seed in range(3):
        asked = {
            q.question_id: texts(q)
            for q in load_dataset(path, passages=2, limit=None, seed=seed).questions
        }
        assert asked == {"late": [found[0], found[4]], "open": found[:2]}
    whole = {
        q.question_id: texts(q)
        for q in load_dataset(path, passages=9, limit=None, seed=0).questions
    }
    assert whole == {"late": found, "open": found[:3]}


def test_a_summary_gets_segments_of_its_own_article_alone(tmp_path: Path) -> None:
    def article(name: str) -> str:
        return " ".join(
            f"Sentence {i} of the {name} article speaks of the weather and the harvest."
            for i in range(60)
        )

    entries = [
        {"id": name, "document": article(name), "summary": f"A {name}."}
        for name in ("first", "second", "third")
    ]
    data = load_dataset(
        lines(tmp_path / "x.jsonl", *entries), passages=5, limit=None, seed=1, read=read_published
    )
    for question in data.questions:
        assert len(question.passages) == 5
        assert all(question.question_id in text for text in texts(question))
    assert {len(document) for document in data.documents} <= set(range(6, 20))
    many = load_dataset(tmp_path / "x.jsonl", passages=50, limit=1, seed=1, read=read_published)
    assert len(many.questions[0].passages) == len(
        many.document_of(many.questions[0].passages[0].chunk_id)
    )


def test_questions_of_one_name_are_told_apart(tmp_path: Path) -> None:
    entry = {"id": "same", "question": "?", "passages": ["a", "b"]}
    data = load_dataset(lines(tmp_path / "own.jsonl", entry, entry), passages=1, limit=None, seed=0)
    assert [question.question_id for question in data.questions] == ["same", "same#2"]


def test_numbers_below_one_are_refused(squad: Path) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        load_dataset(squad, passages=0, limit=3, seed=0)
    with pytest.raises(ConfigError, match="at least 1"):
        handbook_dataset(passages=3, limit=0, seed=0)


def test_the_handbook_answers_its_questions() -> None:
    data: Dataset = handbook_dataset(passages=3, limit=None, seed=1)
    expect = {asked.question: asked.expect for asked in handbook_questions()}
    assert {question.text for question in data.questions} == set(expect)
    for question in data.questions:
        assert len(question.passages) == 3
        pages = {str(chunk.metadata["source"]) for chunk in question.passages}
        assert {
            asked.page for asked in handbook_questions() if asked.question == question.text
        } <= pages
        assert any(
            all(re.search(e, t, re.IGNORECASE) for e in expect[question.text])
            for t in texts(question)
        )
        assert question.answers == ()
        assert unrelated(data, question)
    assert len(handbook_dataset(passages=3, limit=2, seed=1).questions) == 2
