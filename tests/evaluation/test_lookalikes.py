"""The test set `lookalikes` as `cachecraft eval` uses it: its halves, its passages and their order."""

from __future__ import annotations

import pytest

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.lookalikes import lookalikes_dataset, lookalikes_questions
from cachecraft_rag.evaluation.metrics import is_right


def page_of(question_id: str) -> str:
    return question_id.partition("#")[0] + ".md"


def test_each_page_is_a_document_of_one_chunk() -> None:
    dataset = lookalikes_dataset(passages=5, limit=None, seed=0)
    assert len(dataset.documents) == 48
    assert {len(document) for document in dataset.documents} == {1}
    assert len(dataset.questions) == 240
    assert len({question.question_id for question in dataset.questions}) == 240


def test_the_halves_are_named_and_share_no_question() -> None:
    tune = lookalikes_dataset(half="tune", passages=5, limit=None, seed=0)
    confirm = lookalikes_dataset(half="confirm", passages=5, limit=None, seed=0)
    assert (tune.name, confirm.name) == ("lookalikes:tune", "lookalikes:confirm")
    ids = [{question.question_id for question in half.questions} for half in (tune, confirm)]
    assert not ids[0] & ids[1]
    assert len(ids[0] | ids[1]) == 240
    halves = {question.question_id: question.half for question in lookalikes_questions()}
    assert {halves[question_id] for question_id in ids[1]} == {"confirm"}


@pytest.mark.parametrize("passages", [1, 5])
def test_only_a_question_s_own_page_answers_it(passages: int) -> None:
    dataset = lookalikes_dataset(passages=passages, limit=None, seed=0)
    for question in dataset.questions:
        pages = [str(chunk.metadata["source"]) for chunk in question.passages]
        assert len(set(pages)) == passages
        assert {page.partition("/")[0] for page in pages} == {
            question.question_id.partition("/")[0]
        }
        answering = [
            page
            for page, chunk in zip(pages, question.passages, strict=True)
            if is_right(chunk.text, question.answers)
        ]
        assert answering == [page_of(question.question_id)]


def test_most_questions_have_their_own_page_last() -> None:
    dataset = lookalikes_dataset(passages=5, limit=None, seed=0)
    last = [str(question.passages[-1].metadata["source"]) for question in dataset.questions]
    own = [page_of(question.question_id) for question in dataset.questions]
    assert sum(map(str.__eq__, last, own)) > 216


def test_passages_depend_on_the_question_alone() -> None:
    every = {
        question.question_id: question
        for question in lookalikes_dataset(passages=5, limit=None, seed=0).questions
    }
    drawn = lookalikes_dataset(half="tune", passages=5, limit=7, seed=3).questions
    assert len(drawn) == 7
    assert all(every[question.question_id] == question for question in drawn)


def test_more_passages_than_pages_of_the_domain_are_all_of_them() -> None:
    (question,) = lookalikes_dataset(passages=99, limit=1, seed=0).questions
    assert len(question.passages) == 12


def test_an_unknown_half_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="lookalikes:tune or lookalikes:confirm"):
        lookalikes_dataset(half="train", passages=5, limit=None, seed=0)
    with pytest.raises(ConfigError, match="at least 1"):
        lookalikes_dataset(passages=0, limit=None, seed=0)
