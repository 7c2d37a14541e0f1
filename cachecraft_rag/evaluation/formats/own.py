"""Your own questions with the passages that your retriever found, one JSON object per line."""

from __future__ import annotations

from collections.abc import Sequence

from cachecraft_rag.errors import DocumentError
from cachecraft_rag.evaluation.formats.records import Record
from cachecraft_rag.evaluation.formats.source import Source, SourceBuilder, SourceQuestion, texts_of

EXAMPLE = '{"question": "…?", "passages": ["…", "…"], "answers": ["…"], "document": "…"}'


def recognises(record: Record) -> bool:
    """`question` beside `passages`."""
    return {"question", "passages"} <= record.fields.keys()


def read(records: Sequence[Record]) -> Source:
    """The passages keep their order. `answers`, `id` and `document` are optional.

    `document` names the document of all passages of the line, in the document's order. Without it each passage counts
    as a document of its own, because passages next to each other in a retriever's list are rarely so in a document.
    """
    builder = SourceBuilder()
    for number, record in enumerate(records, start=1):
        passages = texts_of(record.texts("passages"))
        if not passages:
            raise DocumentError(f'{record.where}: "passages" is empty. Give at least one, as in {EXAMPLE}')
        document = record.label("document", "")
        near = tuple(builder.place(document or text, text) for text in passages)
        answers = texts_of(record.texts("answers", optional=True))
        question_id = record.label("id", str(number))
        builder.ask(
            SourceQuestion(
                question_id, record.text("question"), answers, needed=(), near=near, fill=False, ordered=True
            )
        )
    return builder.source()
