"""2WikiMultihopQA (Ho et al., 2020), and HotpotQA, which has the same form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from cachecraft_rag.errors import DocumentError
from cachecraft_rag.evaluation.formats.records import Record
from cachecraft_rag.evaluation.formats.source import Source, SourceBuilder, SourceQuestion, texts_of


def recognises(record: Record) -> bool:
    """`context` beside `supporting_facts`."""
    return {"context", "supporting_facts", "question"} <= record.fields.keys()


def read(records: Sequence[Record]) -> Source:
    """Each page of the context is a document of one passage; pages named by supporting facts are needed."""
    builder = SourceBuilder()
    for number, record in enumerate(records, start=1):
        supporting = {title for title, _ in _pairs(record, "supporting_facts", "sent_id")}
        needed, near = [], []
        for title, sentences in _pairs(record, "context", "sentences", "content"):
            if not isinstance(sentences, list) or not all(isinstance(sentence, str) for sentence in sentences):
                raise DocumentError(
                    f"{record.where}: the context of {title!r} must be a list of sentences. Fix or remove that entry."
                )
            text = " ".join(sentence.strip() for sentence in sentences).strip()
            if not text:
                continue  # HotpotQA has a few empty pages
            near.append(builder.place(title, f"{title}\n\n{text}"))
            if title in supporting:
                needed.append(near[-1])
        question_id = record.label("_id", record.label("id", str(number)))
        answers = texts_of([record.label("answer", "")])
        builder.ask(SourceQuestion(question_id, record.text("question"), answers, tuple(needed), tuple(near)))
    return builder.source()


def _pairs(record: Record, name: str, *columns: str) -> list[tuple[str, Any]]:
    """`[[title, value], …]` as published, or Hugging Face's `{"title": […], "<column>": […]}`, or either as JSON text.

    Raises DocumentError for anything else.
    """
    value = record.fields.get(name)
    try:
        if isinstance(value, str):
            value = json.loads(value)
        if isinstance(value, dict):
            column = next(column for column in columns if column in value)
            value = list(zip(value["title"], value[column], strict=True))
        pairs = [(title, item) for title, item in value or ()]
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise DocumentError(
            f'{record.where}: "{name}" must be a list of [title, …] pairs. Fix or remove that entry.'
        ) from error
    if not all(isinstance(title, str) and title.strip() for title, _ in pairs):
        raise DocumentError(f'{record.where}: a title in "{name}" is not a text. Fix or remove that entry.')
    return pairs
