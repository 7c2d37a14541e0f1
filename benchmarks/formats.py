"""The papers' question sets beside SQuAD's: a recogniser and a reader for each, and CSV and Parquet files.

MuSiQue (Trivedi et al., 2022): questions over two to four of twenty paragraphs. 2WikiMultihopQA (Ho et al., 2020) and
HotpotQA, of the same form. DROP (Dua et al., 2019): one passage, with numbers, spans or dates as answers. CNN/DailyMail
(Hermann et al., 2015) and XSum (Narayan et al., 2018): a text and its summary; as in Cache-Craft §5.1.2 a text is split
into small segments, and a prompt gets a random selection of them. Retrieved contexts, as DPR and FiD write them and as
the authors of CacheBlend (Yao et al., 2025) publish their samples of MuSiQue and others. By name only: SQuAD's
questions as statements that are true or false (Fig. 21), and over whole articles, for chunks of any size (Fig. 27).
"""

from __future__ import annotations

import csv
import importlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cachecraft_rag.errors import DocumentError
from cachecraft_rag.evaluation import formats as own
from cachecraft_rag.evaluation.formats import (
    Format,
    JsonRecord,
    QuestionFile,
    SourceBuilder,
    SourceQuestion,
    as_record,
    read_records,
    read_source,
    texts_of,
)

# for texts to summarise: "we split long chunks into smaller segments", Cache-Craft §5.1.2
SEGMENT_TOKENS = 128

SUMMARISE = "Summarise the text in a few sentences."
# XSum's summaries are the first sentence of an article
SUMMARISE_BRIEFLY = "Summarise the text in one sentence."


def is_musique(record: JsonRecord) -> bool:
    """`paragraphs` beside `question`."""
    return isinstance(record.fields.get("paragraphs"), list) and "question" in record


def read_musique(records: Sequence[JsonRecord]) -> QuestionFile:
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
        builder.ask(
            SourceQuestion(
                question_id, record.text("question"), texts_of(answers), tuple(needed), tuple(near)
            )
        )
    return builder.source()


def is_multihop(record: JsonRecord) -> bool:
    """`context` beside `supporting_facts`."""
    return {"context", "supporting_facts", "question"} <= record.fields.keys()


def read_multihop(records: Sequence[JsonRecord]) -> QuestionFile:
    """Each page of the context is a document of one passage; pages named by supporting facts are needed."""
    builder = SourceBuilder()
    for number, record in enumerate(records, start=1):
        supporting = {title for title, _ in _pairs(record, "supporting_facts", "sent_id")}
        needed, near = [], []
        for title, sentences in _pairs(record, "context", "sentences", "content"):
            if not isinstance(sentences, list) or not all(
                isinstance(sentence, str) for sentence in sentences
            ):
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
        builder.ask(
            SourceQuestion(
                question_id, record.text("question"), answers, tuple(needed), tuple(near)
            )
        )
    return builder.source()


def _pairs(record: JsonRecord, name: str, *columns: str) -> list[tuple[str, Any]]:
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
        raise DocumentError(
            f'{record.where}: a title in "{name}" is not a text. Fix or remove that entry.'
        )
    return pairs


def is_contexts(record: JsonRecord) -> bool:
    """`ctxs` beside `question`."""
    return {"ctxs", "question"} <= record.fields.keys()


def read_contexts(records: Sequence[JsonRecord]) -> QuestionFile:
    """Contexts keep the retriever's order; those with one title are one document. Titles and answers may be missing."""
    builder = SourceBuilder()
    for number, record in enumerate(records, start=1):
        near = []
        for context in record.records("ctxs"):
            title, text = context.label("title", "").strip(), context.text("text")
            near.append(builder.place(title or text, f"{title}\n\n{text}" if title else text))
        if not near:
            raise DocumentError(f'{record.where}: "ctxs" is empty. Fix or remove that entry.')
        builder.ask(
            SourceQuestion(
                record.label("id", str(number)),
                record.text("question"),
                texts_of(record.texts("answers", optional=True)),
                needed=(),
                near=tuple(near),
                fill=False,
                ordered=True,
            )
        )
    return builder.source()


def is_drop(record: JsonRecord) -> bool:
    """`{passage_id: {"passage", "qa_pairs"}}`; or one row per question with `passage` and `answers_spans`."""
    if {"passage", "question", "answers_spans"} <= record.fields.keys():
        return True
    first = next(iter(record.fields.values()), None)
    return isinstance(first, dict) and {"passage", "qa_pairs"} <= first.keys()


def read_drop(records: Sequence[JsonRecord]) -> QuestionFile:
    """Every passage is a document; the other passages of a prompt come from other documents."""
    builder = SourceBuilder()
    for number, record in enumerate(records, start=1):
        if "answers_spans" in record:
            spans = record.record("answers_spans").texts("spans")
            label = record.label("section_id", record.text("passage"))
            _ask_drop(
                builder,
                label,
                record.text("passage"),
                record.label("query_id", str(number)),
                record,
                spans,
            )
            continue
        for name in record.fields:
            document = record.record(name)
            passage = document.text("passage")
            builder.place(name, passage)  # a document even if no question is about it
            for place, asked in enumerate(document.records("qa_pairs"), start=1):
                _ask_drop(
                    builder,
                    name,
                    passage,
                    asked.label("query_id", f"{name}-{place}"),
                    asked,
                    _drop_answers(asked),
                )
    return builder.source()


def _ask_drop(
    builder: SourceBuilder,
    document: str,
    passage: str,
    question_id: str,
    asked: JsonRecord,
    answers: Sequence[str],
) -> None:
    place = builder.place(document, passage)
    builder.ask(
        SourceQuestion(
            question_id, asked.text("question"), texts_of(answers), needed=(place,), near=(place,)
        )
    )


def _drop_answers(asked: JsonRecord) -> list[str]:
    """The answer and those of the validators, each as one text; the test split has none."""
    given = [asked.record("answer")] if asked.fields.get("answer") else []
    if asked.fields.get("validated_answers"):
        given += asked.records("validated_answers")
    return [_drop_answer(answer) for answer in given]


def _drop_answer(answer: JsonRecord) -> str:
    number = answer.label("number", "")
    if number:
        return number
    spans = answer.texts("spans", optional=True)
    if spans:
        return ", ".join(spans)
    date = as_record(answer.fields.get("date") or {}, f"{answer.where}, date")
    return " ".join(filter(None, (date.label(part, "") for part in ("day", "month", "year"))))


def is_cnn(record: JsonRecord) -> bool:
    """`article` beside `highlights`."""
    return {"article", "highlights"} <= record.fields.keys()


def is_xsum(record: JsonRecord) -> bool:
    """`document` beside `summary`."""
    return {"document", "summary"} <= record.fields.keys()


def read_cnn(records: Sequence[JsonRecord]) -> QuestionFile:
    """Summaries of a few sentences."""
    return _read_summaries(records, text="article", summary="highlights", question=SUMMARISE)


def read_xsum(records: Sequence[JsonRecord]) -> QuestionFile:
    """Summaries of one sentence."""
    return _read_summaries(records, text="document", summary="summary", question=SUMMARISE_BRIEFLY)


def _read_summaries(
    records: Sequence[JsonRecord], *, text: str, summary: str, question: str
) -> QuestionFile:
    builder = SourceBuilder()
    for number, record in enumerate(records, start=1):
        if record.fields.get(text) == "":
            continue  # both published sets hold a few articles without a text
        name = record.label("id", str(number))
        place = builder.place(name, record.text(text))
        # No passages of other articles: leaving them out of the summary would be another task than the published one.
        builder.ask(
            SourceQuestion(
                name,
                question,
                texts_of([record.text(summary)]),
                needed=(),
                near=(place,),
                fill=False,
            )
        )
    return builder.source(passage_tokens=SEGMENT_TOKENS)


def read_statements(records: Sequence[JsonRecord]) -> QuestionFile:
    """Every second question of a SQuAD file states another question's answer."""
    source = own.read_squad(records)
    answered = [one for one in source.questions if one.answers]
    asked = []
    for number, one in enumerate(answered):
        others = [
            other.answers[0]
            for other in answered[number:] + answered[:number]
            if other.answers[0] not in one.answers
        ]
        true = number % 2 == 0 or not others
        text = (
            f"True or false? Question: {one.text} Answer: {one.answers[0] if true else others[0]}"
        )
        asked.append(replace(one, text=text, answers=("True",) if true else ("False",)))
    return replace(source, questions=tuple(asked))


def read_articles(records: Sequence[JsonRecord]) -> QuestionFile:
    """The articles of a SQuAD file as one passage each, to be split into chunks of the wanted length."""
    source = own.read_squad(records)
    documents = tuple(
        replace(one, passages=("\n\n".join(one.passages),)) for one in source.documents
    )
    asked = []
    for one in source.questions:
        whole = ((one.needed[0][0], 0),)
        asked.append(replace(one, needed=whole, near=whole))
    return replace(source, documents=documents, questions=tuple(asked))


def _by_name(_: JsonRecord) -> bool:
    return False


_SQUAD, _OWN = own.FORMATS
FORMATS: tuple[Format, ...] = (
    _SQUAD,
    Format("musique", "MuSiQue", is_musique, read_musique),
    Format("2wikimultihopqa", "2WikiMultihopQA, HotpotQA", is_multihop, read_multihop),
    Format("ctxs", "retrieved contexts of DPR, FiD or CacheBlend", is_contexts, read_contexts),
    Format("drop", "DROP", is_drop, read_drop),
    Format("cnn_dailymail", "CNN/DailyMail", is_cnn, read_cnn),
    Format("xsum", "XSum", is_xsum, read_xsum),
    Format("true_false", "SQuAD as statements", _by_name, read_statements),
    Format("articles", "SQuAD's whole articles", _by_name, read_articles),
    _OWN,
)


def read(path: Path, format: str | None = None) -> QuestionFile:
    """Read a file in any of `FORMATS`, as JSON, JSON lines, CSV or Parquet. Errors as `read_source`."""
    return read_source(path, format, formats=FORMATS, read=read_rows)


def read_rows(path: Path) -> list[JsonRecord]:
    """Records of JSON files as in `read_records`, and rows of CSV and Parquet files."""
    if path.suffix.lower() == ".parquet":
        return list(_parquet(path))
    if path.suffix.lower() != ".csv":
        return read_records(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return list(_rows(path, csv.DictReader(file, strict=True)))
    except (OSError, UnicodeDecodeError) as error:
        raise DocumentError(f"cannot read {path}: {error}. Name a file of questions.") from error


def _rows(path: Path, reader: csv.DictReader[str]) -> Iterator[JsonRecord]:
    try:
        for row in reader:
            yield JsonRecord(
                f"{path}, line {reader.line_num}",
                {name: row[name] for name in reader.fieldnames or ()},
            )
    except csv.Error as error:
        raise DocumentError(
            f"{path}, line {reader.line_num} is not CSV: {error}. Fix or remove that line."
        ) from error


def _parquet(path: Path) -> Iterator[JsonRecord]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DocumentError(
            f"reading {path} needs pyarrow: pip install pyarrow, or save the file as JSON lines or CSV."
        ) from error
    try:
        rows = parquet.read_table(path).to_pylist()
    except ValueError as error:  # pyarrow's own errors are ValueErrors
        raise DocumentError(f"{path} is not a Parquet file: {error}. Name another file.") from error
    for number, row in enumerate(rows, start=1):
        yield JsonRecord(f"{path}, row {number}", row)
