"""DROP (Dua et al., 2019): questions about one passage, with numbers, spans or dates as answers."""

from __future__ import annotations

from collections.abc import Sequence

from cachecraft_rag.evaluation.formats.records import Record, as_record
from cachecraft_rag.evaluation.formats.source import Source, SourceBuilder, SourceQuestion, texts_of


def recognises(record: Record) -> bool:
    """`{passage_id: {"passage", "qa_pairs"}}`; or one row per question with `passage` and `answers_spans`."""
    if {"passage", "question", "answers_spans"} <= record.fields.keys():
        return True
    first = next(iter(record.fields.values()), None)
    return isinstance(first, dict) and {"passage", "qa_pairs"} <= first.keys()


def read(records: Sequence[Record]) -> Source:
    """Every passage is a document; the other passages of a prompt come from other documents."""
    builder = SourceBuilder()
    for number, record in enumerate(records, start=1):
        if "answers_spans" in record:
            spans = record.record("answers_spans").texts("spans")
            label = record.label("section_id", record.text("passage"))
            _ask(builder, label, record.text("passage"), record.label("query_id", str(number)), record, spans)
            continue
        for name in record.fields:
            document = record.record(name)
            passage = document.text("passage")
            builder.place(name, passage)  # a document even if no question is about it
            for place, asked in enumerate(document.records("qa_pairs"), start=1):
                _ask(builder, name, passage, asked.label("query_id", f"{name}-{place}"), asked, _answers(asked))
    return builder.source()


def _ask(
    builder: SourceBuilder, document: str, passage: str, question_id: str, asked: Record, answers: Sequence[str]
) -> None:
    place = builder.place(document, passage)
    builder.ask(SourceQuestion(question_id, asked.text("question"), texts_of(answers), needed=(place,), near=(place,)))


def _answers(asked: Record) -> list[str]:
    """The answer and those of the validators, each as one text; the test split has none."""
    given = [asked.record("answer")] if asked.fields.get("answer") else []
    if asked.fields.get("validated_answers"):
        given += asked.records("validated_answers")
    return [_answer(answer) for answer in given]


def _answer(answer: Record) -> str:
    number = answer.label("number", "")
    if number:
        return number
    spans = answer.texts("spans", optional=True)
    if spans:
        return ", ".join(spans)
    date = as_record(answer.fields.get("date") or {}, f"{answer.where}, date")
    return " ".join(filter(None, (date.label(part, "") for part in ("day", "month", "year"))))
