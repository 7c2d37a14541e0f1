"""Consistency of the test set `examples/lookalikes`: its pages, questions, answers and halves."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TypedDict

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "lookalikes"


class Entry(TypedDict):
    """A question as written in the file."""

    question: str
    page: str
    answers: list[str]
    confusable: list[str]
    half: str


ENTRIES: list[Entry] = json.loads((FOLDER / ".questions.json").read_text(encoding="utf-8"))
PAGES: dict[str, str] = {
    path.relative_to(FOLDER).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted(FOLDER.glob("*/*.md"))
}


def domain_of(page: str) -> str:
    """The folder of a page."""
    return page.partition("/")[0]


def siblings_of(page: str) -> list[str]:
    """The texts of the other pages of the same domain, in lower case."""
    texts = []
    for name, text in PAGES.items():
        if name != page and domain_of(name) == domain_of(page):
            texts.append(text.lower())
    return texts


def test_every_entry_has_the_same_fields() -> None:
    for entry in ENTRIES:
        assert set(entry) == set(Entry.__annotations__)
        assert entry["question"].endswith("?")
        assert entry["answers"]
        assert entry["confusable"]


def test_there_are_enough_pages_and_questions() -> None:
    pages_by_domain = Counter(domain_of(page) for page in PAGES)
    assert len(pages_by_domain) == 4
    assert min(pages_by_domain.values()) >= 12
    assert len(ENTRIES) >= 200


def test_every_page_is_asked_about() -> None:
    questions_by_page = Counter(entry["page"] for entry in ENTRIES)
    assert set(questions_by_page) == set(PAGES)
    assert min(questions_by_page.values()) >= 4


def test_pages_are_a_title_and_a_text_of_similar_length() -> None:
    titles = set()
    for page, text in PAGES.items():
        title, blank, body = text.split("\n", 2)
        assert title.startswith("# "), page
        assert blank == "", page
        assert 70 <= len(body.split()) <= 150, page
        titles.add(title)
    assert len(titles) == len(PAGES)


def test_no_question_is_asked_twice() -> None:
    questions = Counter(entry["question"] for entry in ENTRIES)
    assert questions.most_common(1)[0][1] == 1


def test_the_first_answer_is_written_in_the_page() -> None:
    for entry in ENTRIES:
        assert entry["answers"][0].lower() in PAGES[entry["page"]].lower(), entry["question"]


def test_no_accepted_answer_is_written_in_a_sibling_page() -> None:
    for entry in ENTRIES:
        for text in siblings_of(entry["page"]):
            for answer in entry["answers"]:
                assert answer.lower() not in text, entry["question"]


def test_confusable_values_are_written_in_sibling_pages() -> None:
    for entry in ENTRIES:
        siblings = siblings_of(entry["page"])
        for value in entry["confusable"]:
            assert any(value.lower() in text for text in siblings), (entry["question"], value)


def test_confusable_values_do_not_contain_an_accepted_answer() -> None:
    for entry in ENTRIES:
        for value in entry["confusable"]:
            for answer in entry["answers"]:
                assert answer.lower() not in value.lower(), entry["question"]


def test_both_halves_cover_every_domain_evenly() -> None:
    for domain in {domain_of(page) for page in PAGES}:
        halves = Counter(entry["half"] for entry in ENTRIES if domain_of(entry["page"]) == domain)
        assert set(halves) == {"tune", "confirm"}
        assert 0.4 <= halves["tune"] / halves.total() <= 0.6


def test_no_page_is_in_both_halves() -> None:
    halves: dict[str, set[str]] = {}
    for entry in ENTRIES:
        halves.setdefault(entry["page"], set()).add(entry["half"])
    assert {len(halves_of_page) for halves_of_page in halves.values()} == {1}
