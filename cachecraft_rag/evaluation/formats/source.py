"""The result of every reader: documents made of passages, and questions that point to passages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Place = tuple[int, int]  # (document, passage), both counted from 0

PASSAGE_TOKENS = 512  # most passages of the question sets are shorter and stay as published
SEGMENT_TOKENS = 128  # for texts to summarise: "we split long chunks into smaller segments", Cache-Craft §5.1.2


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
    fill     whether passages of other documents are added if `near` has too few
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
class Source:
    """A whole file, before questions are drawn and passages of more than `passage_tokens` are split."""

    documents: tuple[SourceDocument, ...]
    questions: tuple[SourceQuestion, ...]
    passage_tokens: int = PASSAGE_TOKENS


class SourceBuilder:
    """Collects the documents of a file; a passage that several questions share is kept once."""

    def __init__(self) -> None:
        self._documents: dict[str, tuple[int, dict[str, int]]] = {}  # name → its number, and each text's place
        self._questions: list[SourceQuestion] = []

    def place(self, document: str, text: str) -> Place:
        """The place of the passage with this text; a new passage is appended to the document."""
        number, passages = self._documents.setdefault(document, (len(self._documents), {}))
        return number, passages.setdefault(text, len(passages))

    def ask(self, question: SourceQuestion) -> None:
        """Add a question."""
        self._questions.append(question)

    def source(self, *, passage_tokens: int = PASSAGE_TOKENS) -> Source:
        """All documents and questions so far."""
        documents = tuple(SourceDocument(name, tuple(texts)) for name, (_, texts) in self._documents.items())
        return Source(documents, tuple(self._questions), passage_tokens)


def texts_of(values: Sequence[str]) -> tuple[str, ...]:
    """The texts, stripped, in order, without blanks and repetitions."""
    return tuple(dict.fromkeys(text.strip() for text in values if text.strip()))
