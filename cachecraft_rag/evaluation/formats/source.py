"""What every reader makes of its file: documents of passages, and questions that point into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Place = tuple[int, int]  # (document, passage), both counted from 0

PASSAGE_TOKENS = 512  # most passages of the question sets are shorter, so they stay as published
SEGMENT_TOKENS = 128  # of a text to summarise: "we split long chunks into smaller segments", Cache-Craft §5.1.2


@dataclass(frozen=True, slots=True)
class SourceDocument:
    """A document's passages in their order, as published: of any length."""

    name: str
    passages: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SourceQuestion:
    """A question and where its passages may come from.

    needed   the passages that the answer rests on
    near     what a retriever might find as well, the needed ones included
    fill     whether passages of other documents may stand in where `near` has too few
    ordered  `near` is a retriever's own list: it is kept as it is, and only shortened where it is too long
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
    """Collects the documents of a file; a passage that many questions bring along is kept once."""

    def __init__(self) -> None:
        self._documents: dict[str, tuple[int, dict[str, int]]] = {}  # name → its number, and each text's place
        self._questions: list[SourceQuestion] = []

    def place(self, document: str, text: str) -> Place:
        """Where the document's passage with this text is; it becomes the document's last where it is new."""
        number, passages = self._documents.setdefault(document, (len(self._documents), {}))
        return number, passages.setdefault(text, len(passages))

    def ask(self, question: SourceQuestion) -> None:
        """Add a question."""
        self._questions.append(question)

    def source(self, *, passage_tokens: int = PASSAGE_TOKENS) -> Source:
        """Everything so far."""
        documents = tuple(SourceDocument(name, tuple(texts)) for name, (_, texts) in self._documents.items())
        return Source(documents, tuple(self._questions), passage_tokens)


def texts_of(values: Sequence[str]) -> tuple[str, ...]:
    """Answers without blank ones and repetitions, in their order."""
    return tuple(dict.fromkeys(text.strip() for text in values if text.strip()))
