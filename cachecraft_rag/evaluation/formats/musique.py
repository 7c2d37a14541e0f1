"""MuSiQue (Trivedi et al., 2022): questions over two to four of twenty paragraphs, one JSON object per line."""

from __future__ import annotations

from collections.abc import Sequence

from cachecraft_rag.evaluation.formats.records import Record
from cachecraft_rag.evaluation.formats.source import Source, SourceBuilder, SourceQuestion, texts_of


def recognises(record: Record) -> bool:
    """`paragraphs` beside `question`."""
    return isinstance(record.fields.get("paragraphs"), list) and "question" in record


def read(records: Sequence[Record]) -> Source:
    """A document is all paragraphs with one title. Supporting paragraphs are needed; the others are near.

    The published test split has no answers and marks no supporting paragraphs; its questions are kept.
    """
    builder = SourceBuilder()
    for number, record in enumerate(records, start=1):
        needed, near = [], []
        for paragraph in record.records("paragraphs"):
            title = paragraph.text("title")
            # The chunk includes the title: many paragraphs call their subject only "he" or "the band".
            place = builder.place(title, f"{title}\n\n{paragraph.text('paragraph_text')}")
            near.append(place)
            if paragraph.fields.get("is_supporting"):
                needed.append(place)
        answers = [record.label("answer", ""), *record.texts("answer_aliases", optional=True)]
        if record.fields.get("answerable") is False:
            answers = []
        question_id = record.label("id", str(number))
        builder.ask(SourceQuestion(question_id, record.text("question"), texts_of(answers), tuple(needed), tuple(near)))
    return builder.source()
