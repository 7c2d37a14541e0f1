"""The hundred short questions: each has one passage that answers it, also in today's handbook."""

from __future__ import annotations

import json
from pathlib import Path

from cachecraft_rag.evaluation.dataset import load_dataset
from cachecraft_rag.evaluation.metrics import is_right
from cachecraft_rag.model.demo_model import handbook_folder

FILE = Path(__file__).parents[2] / "benchmarks" / "hundred.json"


def test_each_question_is_answered_by_a_passage_of_its_prompt() -> None:
    dataset = load_dataset(FILE, passages=5, limit=None, seed=0)
    assert len(dataset.questions) == 100
    assert len({question.text for question in dataset.questions}) == 100
    for question in dataset.questions:
        assert len(question.passages) == 5
        assert any(is_right(passage.text, question.answers) for passage in question.passages), (
            question.text
        )


def test_what_is_quoted_of_the_handbook_stands_there() -> None:
    pages = {
        path.read_text(encoding="utf-8").split("\n", 1)[0][2:]: path
        for path in handbook_folder().glob("*.md")
    }
    articles = json.loads(FILE.read_text(encoding="utf-8"))["data"]
    quoted = [one for one in articles if one["title"] in pages]
    assert len(quoted) == 13
    for article in quoted:
        text = pages[article["title"]].read_text(encoding="utf-8").replace("\n\n", "\n")
        assert all(paragraph["context"] in text for paragraph in article["paragraphs"]), article[
            "title"
        ]
