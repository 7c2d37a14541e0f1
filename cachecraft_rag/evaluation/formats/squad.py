"""SQuAD 1.1 and 2.0, and sets of the same form (XQuAD, MLQA, NewsQA conversions); also Hugging Face's columns."""

from __future__ import annotations

from collections.abc import Sequence

from cachecraft_rag.evaluation.formats.records import Record
from cachecraft_rag.evaluation.formats.source import Place, Source, SourceBuilder, SourceQuestion, texts_of


def recognises(record: Record) -> bool:
    """`data` → `paragraphs` → `context`, `qas`; or one row per question with `context`, `question` and `answers`."""
    data = record.fields.get("data")
    if isinstance(data, list):
        return bool(data) and isinstance(data[0], dict) and "paragraphs" in data[0]
    return isinstance(record.fields.get("context"), str) and {"question", "answers"} <= record.fields.keys()


def read(records: Sequence[Record]) -> Source:
    """The passages of a question are the paragraphs of its own article; unanswerable questions have no answers."""
    builder = SourceBuilder()
    found: list[tuple[str, Place, Record, list[str]]] = []  # article, paragraph, question, answers
    paragraphs: dict[str, dict[Place, None]] = {}
    for record in records:
        for article, context, asked, answers in _asked(record) if "data" in record else _row(record):
            place = builder.place(article, context)
            paragraphs.setdefault(article, {})[place] = None
            if asked is not None:
                found.append((article, place, asked, answers))
    for number, (article, place, asked, answers) in enumerate(found, start=1):
        near = tuple(paragraphs[article])
        builder.ask(
            SourceQuestion(
                asked.label("id", str(number)), asked.text("question"), texts_of(answers), needed=(place,), near=near
            )
        )
    return builder.source()


def _asked(record: Record) -> list[tuple[str, str, Record | None, list[str]]]:
    """(Article, paragraph, question, answers) of the nested form, and each paragraph once with None as its question."""
    found: list[tuple[str, str, Record | None, list[str]]] = []
    for number, article in enumerate(record.records("data"), start=1):
        title = article.label("title", f"article {number}")
        for paragraph in article.records("paragraphs"):
            context = paragraph.text("context")
            found.append((title, context, None, []))
            for asked in paragraph.records("qas"):
                golds = [answer.text("text") for answer in asked.records("answers")] if "answers" in asked else []
                found.append((title, context, asked, golds))
    return found


def _row(record: Record) -> list[tuple[str, str, Record | None, list[str]]]:
    """The same for one row of Hugging Face's form, whose answers are `{"text": [...], "answer_start": [...]}`."""
    context = record.text("context")
    return [(record.label("title", context), context, record, record.record("answers").texts("text"))]
