"""Files of questions: SQuAD's format and our own, and what every reader gives: documents of passages, and questions.

A format is two functions and a line in `FORMATS`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cachecraft_rag.errors import ConfigError, DocumentError

Place = tuple[int, int]  # (document, passage), both counted from 0

_NOT_JSON = (ValueError, RecursionError)  # the second for brackets nested too deeply
PASSAGE_TOKENS = 512  # most passages of the question sets are shorter and stay as published


@dataclass(frozen=True, slots=True)
class SourceDocument:
    """A document's passages in order, as published, of any length."""

    name: str
    passages: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SourceQuestion:
    """A question and the passages to choose from.

    needed   the passages that hold the answer
    near     passages that a retriever might find, including the needed ones
    fill     add passages of other documents if `near` has too few
    ordered  `near` is a retriever's own list: its order is kept, and it is only shortened
    """

    question_id: str
    text: str
    answers: tuple[str, ...]
    needed: tuple[Place, ...]
    near: tuple[Place, ...]
    fill: bool = True
    ordered: bool = False


@dataclass(frozen=True, slots=True)
class QuestionFile:
    """A whole file, before questions are drawn and passages of more than `passage_tokens` are split."""

    documents: tuple[SourceDocument, ...]
    questions: tuple[SourceQuestion, ...]
    passage_tokens: int = PASSAGE_TOKENS


class SourceBuilder:
    """Collects the documents and questions of a file; each document has a text only once."""

    def __init__(self) -> None:
        # name → its number, and each text's place
        self._documents: dict[str, tuple[int, dict[str, int]]] = {}
        self._questions: list[SourceQuestion] = []

    def place(self, document: str, text: str) -> Place:
        """Return (document, passage) numbers from 0 of this text in this document; it is appended if new."""
        number, passages = self._documents.setdefault(document, (len(self._documents), {}))
        return number, passages.setdefault(text, len(passages))

    def ask(self, question: SourceQuestion) -> None:
        """Add a question after the others; its places are not checked."""
        self._questions.append(question)

    def source(self, *, passage_tokens: int = PASSAGE_TOKENS) -> QuestionFile:
        """Return all documents and questions so far; passages of more than `passage_tokens` are split later."""
        documents = tuple(
            SourceDocument(name, tuple(texts)) for name, (_, texts) in self._documents.items()
        )
        return QuestionFile(documents, tuple(self._questions), passage_tokens)


def texts_of(values: Sequence[str]) -> tuple[str, ...]:
    """Return the texts, stripped, in order, without blanks and repetitions; () if none is left."""
    return tuple(dict.fromkeys(text.strip() for text in values if text.strip()))


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class JsonRecord:
    """A JSON object, line or row; `where` locates it, in words, for error messages.

    Every method but `label` raises DocumentError with the place and the field if the field is missing or of another
    type.
    """

    where: str
    fields: Mapping[str, object]

    def __contains__(self, name: str) -> bool:
        return name in self.fields

    def _field(self, name: str, kind: type[T], wanted: str) -> T:
        value = self.fields.get(name)
        if not isinstance(value, kind):
            shown = json.dumps(value, default=str)[:40]
            problem = f"is {shown}" if value is not None else "is missing"
            raise DocumentError(
                f'{self.where}: "{name}" {problem}; it must be {wanted}. Fix or remove that entry.'
            )
        return value

    def text(self, name: str) -> str:
        """Return the text in the field `name`, stripped; a blank one is an error too."""
        text = self._field(name, str, "a text").strip()
        if not text:
            raise DocumentError(f'{self.where}: "{name}" is blank. Fix or remove that entry.')
        return text

    def label(self, name: str, default: str) -> str:
        """Return an identifier, a text or whole number, as text; the default if missing, blank or of another type."""
        value = self.fields.get(name)
        return str(value) if isinstance(value, str | int) and str(value).strip() else default

    def texts(self, name: str, *, optional: bool = False) -> list[str]:
        """Return a list of texts as they are, blank ones too; empty if it is optional and missing or null."""
        if optional and self.fields.get(name) is None:
            return []
        values: list[object] = self._field(name, list, "a list of texts")
        items = JsonRecord(
            self.where, {f"{name} {place}": value for place, value in enumerate(values, start=1)}
        )
        return [items._field(item, str, "a text") for item in items.fields]

    def records(self, name: str) -> list[JsonRecord]:
        """Return the list of objects in the field `name`, as records."""
        values: list[object] = self._field(name, list, "a list of objects")
        return [
            as_record(value, f"{self.where}, {name} {place}")
            for place, value in enumerate(values, start=1)
        ]

    def record(self, name: str) -> JsonRecord:
        """Return the object in the field `name`, as another record."""
        return JsonRecord(f"{self.where}, {name}", self._field(name, dict, "an object"))


def as_record(value: object, where: str) -> JsonRecord:
    """Return the value as a record, located at `where`. Raises DocumentError if it is not an object."""
    if not isinstance(value, dict):
        raise DocumentError(
            f"{where}: expected an object with named fields, not {json.dumps(value, default=str)[:40]}. Fix or "
            "remove that entry."
        )
    return JsonRecord(where, value)


def read_records(path: Path) -> list[JsonRecord]:
    """Return the file's records: lines of JSON lines, a JSON list's entries, or one whole JSON object.

    A file whose name ends in .jsonl or .ndjson is read line by line; any other file as one JSON text, and as JSON lines
    if only its first line alone is JSON. Blank lines are skipped. DocumentError, which names the line or entry, for
    anything but JSON objects in UTF-8, for an empty file, and for one that cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DocumentError(
            f"cannot read {path}: {error.strerror or error}. Name a file of questions."
        ) from error
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}). Save it as UTF-8."
        ) from error
    if not text.strip():
        raise DocumentError(f"{path} is empty. Name a file of questions.")
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        return list(_lines(path, text))
    return _json(path, text)


def _json(path: Path, text: str) -> list[JsonRecord]:
    try:
        whole = json.loads(text)
    except _NOT_JSON as error:
        first = next(line for line in text.split("\n") if line.strip())
        try:
            json.loads(first)
        except _NOT_JSON:
            raise DocumentError(
                f"{path} is not JSON: {error}. Fix that place, or name another file."
            ) from error
        # the first line alone is valid: JSON lines with another suffix
        return list(_lines(path, text))
    if isinstance(whole, list):
        return [
            as_record(value, f"{path}, entry {place}") for place, value in enumerate(whole, start=1)
        ]
    return [as_record(whole, str(path))]


def _lines(path: Path, text: str) -> Iterator[JsonRecord]:
    # Not splitlines(): JSON strings may contain U+2028 and similar characters unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except _NOT_JSON as error:
            raise DocumentError(
                f"{path}, line {number} is not JSON: {error}. Fix or remove that line."
            ) from error
        yield as_record(value, f"{path}, line {number}")


# --- SQuAD 1.1 and 2.0, and sets of the same form (XQuAD, MLQA, NewsQA conversions); also Hugging Face's columns ---


def is_squad(record: JsonRecord) -> bool:
    """Return True for SQuAD's format, judged by a file's first record.

    It is `data`, a list whose first article has `paragraphs`; or a row with a text `context`, `question` and `answers`.
    """
    data = record.fields.get("data")
    if isinstance(data, list):
        return bool(data) and isinstance(data[0], dict) and "paragraphs" in data[0]
    return (
        isinstance(record.fields.get("context"), str)
        and {"question", "answers"} <= record.fields.keys()
    )


def read_squad(records: Sequence[JsonRecord]) -> QuestionFile:
    """Read questions in SQuAD's format: a record is a whole file, `{"data": [articles]}`, or a row as on the hub.

    The passages of a question are the paragraphs of its article; unanswerable questions have no answers. Articles with
    the same title are one document; without a title each article of a file, and each context of the rows, is one. A
    question without an id gets its number, from 1.
    """
    builder = SourceBuilder()
    # article, paragraph, question, answers
    questions: list[tuple[str, Place, JsonRecord, list[str]]] = []
    paragraphs: dict[str, dict[Place, None]] = {}
    untitled = itertools.count(1)
    for record in records:
        for article, context, asked, answers in (
            _asked(record, untitled) if "data" in record else _row(record)
        ):
            place = builder.place(article, context)
            paragraphs.setdefault(article, {})[place] = None
            if asked is not None:
                questions.append((article, place, asked, answers))
    for number, (article, place, asked, answers) in enumerate(questions, start=1):
        near = tuple(paragraphs[article])
        builder.ask(
            SourceQuestion(
                asked.label("id", str(number)),
                asked.text("question"),
                texts_of(answers),
                needed=(place,),
                near=near,
            )
        )
    return builder.source()


def _asked(
    record: JsonRecord, untitled: Iterator[int]
) -> list[tuple[str, str, JsonRecord | None, list[str]]]:
    """(Article, paragraph, question, answers) of the nested form, and each paragraph once with None as its question."""
    rows: list[tuple[str, str, JsonRecord | None, list[str]]] = []
    for article in record.records("data"):
        title = article.label("title", f"article {next(untitled)}")
        for paragraph in article.records("paragraphs"):
            context = paragraph.text("context")
            rows.append((title, context, None, []))
            for asked in paragraph.records("qas"):
                golds = (
                    [answer.text("text") for answer in asked.records("answers")]
                    if "answers" in asked
                    else []
                )
                rows.append((title, context, asked, golds))
    return rows


def _row(record: JsonRecord) -> list[tuple[str, str, JsonRecord | None, list[str]]]:
    """The same for one row of Hugging Face's form, whose answers are `{"text": [...], "answer_start": [...]}`."""
    context = record.text("context")
    return [
        (record.label("title", context), context, record, record.record("answers").texts("text"))
    ]


# --- your own questions with the passages that your retriever found, one JSON object per line ---

EXAMPLE = '{"question": "…?", "passages": ["…", "…"], "answers": ["…"], "document": "…"}'


def is_own(record: JsonRecord) -> bool:
    """Return True for this package's own format: a record with `question` and `passages`, of any type."""
    return {"question", "passages"} <= record.fields.keys()


def read_own(records: Sequence[JsonRecord]) -> QuestionFile:
    """Read questions in this package's own format. The passages keep their order.

    Optional are `answers`, `id` (by default the number of the record, from 1) and `document`. Blank and repeated
    passages are left out; DocumentError if none is left.

    `document` names the document of all passages of the line, in the document's order. Without it each passage counts
    as a separate document, because passages next to each other in a retriever's list are rarely so in a document.
    """
    builder = SourceBuilder()
    for number, record in enumerate(records, start=1):
        passages = texts_of(record.texts("passages"))
        if not passages:
            raise DocumentError(
                f'{record.where}: "passages" is empty. Give at least one, as in {EXAMPLE}'
            )
        document = record.label("document", "")
        near = tuple(builder.place(document or text, text) for text in passages)
        answers = texts_of(record.texts("answers", optional=True))
        question_id = record.label("id", str(number))
        builder.ask(
            SourceQuestion(
                question_id,
                record.text("question"),
                answers,
                needed=(),
                near=near,
                fill=False,
                ordered=True,
            )
        )
    return builder.source()


# --- the formats ---


@dataclass(frozen=True, slots=True)
class Format:
    """A file format of question sets.

    recognises  True if a file's first record has this format; true for at most one format
    read        reads all records of a file; raises DocumentError that names a malformed record
    """

    name: str
    description: str
    recognises: Callable[[JsonRecord], bool]
    read: Callable[[Sequence[JsonRecord]], QuestionFile]


FORMATS: tuple[Format, ...] = (
    Format("squad", "SQuAD 1.1 and 2.0, XQuAD", is_squad, read_squad),
    Format("jsonl", "questions of your own, one per line", is_own, read_own),
)


def read_source(
    path: Path,
    format: str | None = None,
    *,
    formats: Sequence[Format] = FORMATS,
    read: Callable[[Path], list[JsonRecord]] = read_records,
) -> QuestionFile:
    """Read a file of questions in the named format, by default the first of `formats` that recognises it.

    `read` gives the file's records. DocumentError if it is in no known format or holds no questions.
    """
    known = "; ".join(f"{entry.name} ({entry.description})" for entry in formats)
    if format is not None and format not in {entry.name for entry in formats}:
        raise ConfigError(f"no format of questions is called {format!r}; choose one of: {known}")
    records = read(path)
    if not records:
        raise DocumentError(f"{path} holds no records. Name a file of questions.")
    for entry in formats:
        if entry.name == format or (format is None and entry.recognises(records[0])):
            source = entry.read(records)
            if not source.questions:
                raise DocumentError(
                    f"{path} is in the format {entry.name} but holds no questions. Name another file."
                )
            return source
    raise DocumentError(
        f"{path} is in no known format: {known}. Rewrite it as JSON lines: a file "
        f"questions.jsonl with one question per line, like {EXAMPLE}"
    )
