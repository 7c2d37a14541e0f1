"""The known formats of question sets, and how the format of a file is recognised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cachecraft_rag.errors import ConfigError, DocumentError
from cachecraft_rag.evaluation.formats import drop, musique, own, squad, summaries, wikimultihop
from cachecraft_rag.evaluation.formats.records import Record, read_records
from cachecraft_rag.evaluation.formats.source import Source


@dataclass(frozen=True, slots=True)
class Format:
    """A file format of question sets.

    recognises  whether a file's first record has this format; true for at most one format
    read        reads all records of a file; raises DocumentError that names a malformed record
    """

    name: str
    description: str
    recognises: Callable[[Record], bool]
    read: Callable[[Sequence[Record]], Source]


FORMATS: tuple[Format, ...] = (
    Format("squad", "SQuAD 1.1 and 2.0, XQuAD", squad.recognises, squad.read),
    Format("musique", "MuSiQue", musique.recognises, musique.read),
    Format("2wikimultihopqa", "2WikiMultihopQA, HotpotQA", wikimultihop.recognises, wikimultihop.read),
    Format("drop", "DROP", drop.recognises, drop.read),
    Format("cnn_dailymail", "CNN/DailyMail", summaries.recognises_cnn, summaries.read_cnn),
    Format("xsum", "XSum", summaries.recognises_xsum, summaries.read_xsum),
    Format("jsonl", "questions of your own, one per line", own.recognises, own.read),
)


def read_source(path: Path, format: str | None = None) -> Source:
    """Read a file of questions. If no format is named, it is recognised from the first record.

    Raises:
        ConfigError: no format has that name.
        DocumentError: the file cannot be read, is in no known format, is malformed, or holds no questions.
    """
    known = "; ".join(f"{entry.name} ({entry.description})" for entry in FORMATS)
    if format is not None and format not in {entry.name for entry in FORMATS}:
        raise ConfigError(f"no format of questions is called {format!r}; choose one of: {known}")
    records = read_records(path)
    if not records:
        raise DocumentError(f"{path} holds no records. Name a file of questions.")
    for entry in FORMATS:
        if entry.name == format or (format is None and entry.recognises(records[0])):
            source = entry.read(records)
            if not source.questions:
                raise DocumentError(f"{path} is in the format {entry.name} but holds no questions. Name another file.")
            return source
    raise DocumentError(
        f"{path} is in no known format: {known}. Rewrite it as JSON lines: a file "
        f"questions.jsonl with one question per line, like {own.EXAMPLE}"
    )
