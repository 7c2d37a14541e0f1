"""Questions with their passages and the documents around them, from a file or from the sample handbook."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.formats import (
    Place,
    QuestionFile,
    SourceBuilder,
    SourceQuestion,
    read_source,
)
from cachecraft_rag.model.demo_model import handbook_folder, handbook_questions
from cachecraft_rag.retrievers.reading.chunking import split
from cachecraft_rag.types.documents import Chunk, Document

# In addition to those of the drawn questions: enough for unrelated passages, without splitting 300,000 articles.
OTHER_DOCUMENTS = 200
BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class EvaluationQuestion:
    """A question, its passages in prompt order as from a retriever, and its gold answers (possibly none)."""

    question_id: str
    text: str
    passages: tuple[Chunk, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Dataset:
    """Questions in the order they are asked, and each document's passages in the document's order.

    No two passages have the same text: a passage of several documents belongs to the first. Look-ups by the chunk id of
    a passage raise KeyError for any other id.
    """

    name: str
    documents: tuple[tuple[Chunk, ...], ...]
    questions: tuple[EvaluationQuestion, ...]

    @cached_property
    def _places(self) -> dict[str, Place]:
        return {
            chunk.chunk_id: (number, place)
            for number, document in enumerate(self.documents)
            for place, chunk in enumerate(document)
        }

    def document_of(self, chunk_id: str) -> tuple[Chunk, ...]:
        """Return all passages of this passage's document, in its order, this one included."""
        return self.documents[self._places[chunk_id][0]]

    def neighbours(self, chunk_id: str) -> tuple[Chunk, ...]:
        """Return the passages before this one in its document, in order; empty for the first one."""
        number, place = self._places[chunk_id]
        return self.documents[number][:place]


def load_dataset(
    path: Path,
    *,
    format: str | None = None,
    passages: int,
    limit: int | None,
    seed: int,
    chunk_tokens: int | None = None,
    read: Callable[[Path, str | None], QuestionFile] = read_source,
) -> Dataset:
    """Draw `limit` questions (None: all) with up to `passages` chunks each from a file in any format that `read` knows.

    The questions are in a random order, drawn by the seed; an id that occurs again gets "#2", "#3" …. Documents are
    those of the drawn questions, and up to `OTHER_DOCUMENTS` others. The passages that hold the answer are always
    included, even if they are more than `passages`; of a retriever's own list only as many as `passages`. The others
    are drawn from the same document or question, and from other documents only if there are too few (not where
    `SourceQuestion.fill` is False, as for a retriever's own lists). Passages longer than about `chunk_tokens` tokens of
    4 bytes (None: `QuestionFile.passage_tokens`) are split. A question's passages and their order depend on the seed
    and the question, not on the limit, unless the file has more than `OTHER_DOCUMENTS` others. `format` is a name of
    `FORMATS` (None: recognised).
    """
    source = read(path, format)
    if chunk_tokens is not None:
        source = replace(source, passage_tokens=chunk_tokens)
    return _assemble(source, path.stem, passages=passages, limit=limit, seed=seed)


def handbook_dataset(*, passages: int, limit: int | None, seed: int) -> Dataset:
    """Draw `limit` of the sample handbook's questions (None: all), over its pages in pieces of two sections.

    They have no gold answers. The order is random, drawn by the seed. A question has `passages` pieces in random order:
    the one that holds the answer, others of its page, and of other pages if there are too few.
    """
    builder = SourceBuilder()
    pages = {}
    for page in sorted(handbook_folder().glob("*.md")):
        parts = page.read_text(encoding="utf-8").split("\n## ")
        texts = ["\n## ".join(parts[i : i + 2]).strip() for i in range(0, len(parts), 2)]
        pages[page.name] = {builder.place(page.name, text): text for text in texts}
    for asked in handbook_questions():
        near = pages[asked.page]
        # Usually one piece holds everything a correct answer must say. No piece holds a "no": take the first.
        needed = [
            place
            for place, text in near.items()
            if all(re.search(e, text, re.IGNORECASE) for e in asked.expect)
        ]
        builder.ask(
            SourceQuestion(
                asked.question, asked.question, (), tuple(needed or list(near))[:1], tuple(near)
            )
        )
    return _assemble(builder.source(), "sample handbook", passages=passages, limit=limit, seed=seed)


def check_draw(*, passages: int, limit: int | None) -> None:
    """Raise ConfigError if `passages` is below 1, or the number of questions (`limit`), unless that is None."""
    if passages < 1 or (limit is not None and limit < 1):
        raise ConfigError(
            f"asked for {limit} questions with {passages} passages each; both must be at least 1"
        )


def _assemble(
    source: QuestionFile, name: str, *, passages: int, limit: int | None, seed: int
) -> Dataset:
    check_draw(passages=passages, limit=limit)
    draw = random.Random(seed)
    asked = list(source.questions)
    draw.shuffle(asked)
    asked = asked[:limit]
    drawn_from = {number for question in asked for number, _ in (*question.needed, *question.near)}
    rest = [number for number in range(len(source.documents)) if number not in drawn_from]
    kept = sorted([*drawn_from, *draw.sample(rest, min(len(rest), OTHER_DOCUMENTS))])
    documents, pieces = _split(source, kept)
    everything = [chunk for document in documents for chunk in document]
    questions: list[EvaluationQuestion] = []
    times: dict[str, int] = {}
    for question in asked:
        # Results are kept by question id, so each question needs its own.
        times[question.question_id] = times.get(question.question_id, 0) + 1
        again = times[question.question_id]
        question_id = question.question_id if again == 1 else f"{question.question_id}#{again}"
        own_draw = random.Random(f"{seed}/{question_id}")
        chosen = _choose(question, pieces, everything, passages=passages, draw=own_draw)
        questions.append(EvaluationQuestion(question_id, question.text, chosen, question.answers))
    return Dataset(name, documents, tuple(questions))


def _split(
    source: QuestionFile, kept: Sequence[int]
) -> tuple[tuple[tuple[Chunk, ...], ...], dict[Place, list[Chunk]]]:
    """The kept documents in chunks, each chunk once, and the chunks of every passage."""
    first: dict[str, Chunk] = {}
    pieces: dict[Place, list[Chunk]] = {}
    documents = []
    for number in kept:
        document = source.documents[number]
        chunks: list[Chunk] = []
        for place, text in enumerate(document.passages):
            pieces_of_passage: list[Chunk] = []
            pieces[number, place] = pieces_of_passage
            for piece in _pieces(text, source.passage_tokens):
                chunk = Chunk(piece, {"source": document.name, "ordinal": len(chunks)})
                if chunk.chunk_id not in first:
                    first[chunk.chunk_id] = chunk
                    chunks.append(chunk)
                pieces_of_passage.append(first[chunk.chunk_id])
        if chunks:
            documents.append(tuple(chunks))
    return tuple(documents), pieces


def _pieces(text: str, limit: int) -> list[str]:
    if _tokens(text) <= limit:
        return [text]
    plain = Document("", text, {"format": "plain"})
    return [chunk.text for chunk in split(plain, count_tokens=_tokens, limit=limit)]


def _tokens(text: str) -> int:
    """Approximate number of tokens, independent of the model: all models must get the same passages."""
    return -(-len(text.encode("utf-8", "replace")) // BYTES_PER_TOKEN)


def _choose(
    question: SourceQuestion,
    pieces: dict[Place, list[Chunk]],
    everything: Sequence[Chunk],
    *,
    passages: int,
    draw: random.Random,
) -> tuple[Chunk, ...]:
    """The chunks of one question in prompt order."""
    near = _unique(piece for place in question.near for piece in pieces[place])
    if question.ordered:
        # Choose those that hold the answer, then the retriever's best; keep the retriever's order.
        needed = _holding(near, question.answers)
        chosen = {id(chunk) for chunk in _unique([*needed, *near])[:passages]}
        return tuple(chunk for chunk in near if id(chunk) in chosen)
    needed = _unique(
        piece
        for place in question.needed
        for piece in (_holding(pieces[place], question.answers) or pieces[place])
    )
    draw.shuffle(near)
    candidates = _unique([*needed, *near])
    if question.fill and len(candidates) < passages:
        fillers = draw.sample(everything, min(len(everything), passages + len(candidates)))
        candidates = _unique([*candidates, *fillers])
    chosen_chunks = candidates[: max(passages, len(needed))]
    draw.shuffle(chosen_chunks)
    return tuple(chosen_chunks)


def _holding(chunks: Sequence[Chunk], answers: Sequence[str]) -> list[Chunk]:
    """The chunks that contain an answer as whole words."""
    if not answers:
        return []
    wanted = re.compile(
        "|".join(rf"(?<!\w){re.escape(answer)}(?!\w)" for answer in answers), re.IGNORECASE
    )
    return [chunk for chunk in chunks if wanted.search(chunk.text)]


def _unique(chunks: Iterable[Chunk]) -> list[Chunk]:
    # By identity: `_split` makes one object per text, which saves hashing the texts for every question.
    return list({id(chunk): chunk for chunk in chunks}.values())
