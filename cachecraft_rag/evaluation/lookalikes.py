"""The test set `lookalikes`: short pages with facts that are easily confused with those of a neighbouring page."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import util
from pathlib import Path

from cachecraft_rag.errors import CacheCraftError, ConfigError
from cachecraft_rag.evaluation.dataset import Dataset, EvaluationQuestion, check_draw
from cachecraft_rag.evaluation.metrics import normalised_words
from cachecraft_rag.types.documents import Chunk

NAME = "lookalikes"
HALVES = ("tune", "confirm")  # settings may be chosen on the first; the second only confirms them

WordWeights = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class LookalikeQuestion:
    """A question about one page.

    question_id  the page and the question's number among those of the page
    page         path of the page that holds the fact, such as "bicycles/brenlow-20.md"
    answers      texts that a right answer holds one of
    half         "tune" or "confirm"
    """

    question_id: str
    text: str
    page: str
    answers: tuple[str, ...]
    half: str


def lookalikes_folder() -> Path:
    """Return the folder with the pages, in a checkout or an installed wheel. CacheCraftError if it is missing."""
    spec = util.find_spec(f"cachecraft_rag.{NAME}")
    if spec is None or spec.origin is None:
        raise CacheCraftError(
            f"the test set {NAME} is missing from this installation; install cachecraft-rag again"
        )
    return Path(spec.origin).parent


def lookalikes_pages() -> dict[str, str]:
    """Return the stripped text of each page by its path in the set, such as `bicycles/brenlow-20.md`, in that order."""
    folder = lookalikes_folder()
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8").strip()
        for path in sorted(folder.glob("*/*.md"))
    }


def lookalikes_questions() -> list[LookalikeQuestion]:
    """Return all questions of both halves, in the order of their file."""
    entries = json.loads((lookalikes_folder() / ".questions.json").read_text(encoding="utf-8"))
    asked: Counter[str] = Counter()
    questions = []
    for entry in entries:
        page = entry["page"]
        asked[page] += 1
        questions.append(
            LookalikeQuestion(
                question_id=f"{page.removesuffix('.md')}#{asked[page]}",
                text=entry["question"],
                page=page,
                answers=tuple(entry["answers"]),
                half=entry["half"],
            )
        )
    return questions


def lookalikes_dataset(
    *,
    half: str | None = None,
    passages: int,
    limit: int | None,
    seed: int,
) -> Dataset:
    """Draw `limit` questions (None: all) of a half, "tune" or "confirm", or of both (None), in random order.

    Each page is one document of one chunk. A question has up to `passages`: its own page and those of the same domain
    (folder) that are most similar to the question (cosine of TF-IDF vectors). They are in the order of their
    similarity, the most similar last, and depend on the question and on `passages` alone.
    """
    if half is not None and half not in HALVES:
        raise ConfigError(
            f"{NAME} has no half {half!r}; write {NAME}, {NAME}:tune or {NAME}:confirm"
        )
    check_draw(passages=passages, limit=limit)

    pages = lookalikes_pages()
    chunks = {page: Chunk(text, {"source": page, "ordinal": 0}) for page, text in pages.items()}
    drawn = [question for question in lookalikes_questions() if half in (None, question.half)]
    random.Random(seed).shuffle(drawn)

    questions = []
    for question in drawn[:limit]:
        shown = passages_of(question, pages, count=passages)
        questions.append(
            EvaluationQuestion(
                question_id=question.question_id,
                text=question.text,
                passages=tuple(chunks[page] for page in shown),
                answers=question.answers,
            )
        )
    name = f"{NAME}:{half}" if half is not None else NAME
    documents = tuple((chunk,) for chunk in chunks.values())
    return Dataset(name, documents, tuple(questions))


def passages_of(
    question: LookalikeQuestion,
    pages: Mapping[str, str],
    *,
    count: int,
) -> list[str]:
    """Return the paths of a question's passages in prompt order: the most similar last.

    They are at most `count` (1 or more) of `pages` (path → text) in its domain, always with its own page.
    """
    domain = question.page.partition("/")[0]
    candidates = {page: text for page, text in pages.items() if page.startswith(f"{domain}/")}
    similarity = similarities(question.text, candidates)
    ranked = sorted(candidates, key=lambda page: (-similarity[page], page))
    others = [page for page in ranked if page != question.page]
    chosen = {question.page, *others[: count - 1]}
    return [page for page in reversed(ranked) if page in chosen]


def similarities(query: str, texts: Mapping[str, str]) -> dict[str, float]:
    """Return name → cosine similarity (0 to 1) of the query to each text, over TF-IDF vectors of words.

    Words are those of `normalised_words`, and their rarity is that among the given texts. It needs no model, so all
    models under test get the same passages.

    >>> found = similarities("red bicycle", {"a": "a red bicycle", "b": "a red car", "c": "a boat"})
    >>> found["a"] > found["b"] > found["c"]
    True
    """
    counts = {name: Counter(normalised_words(text)) for name, text in texts.items()}
    containing = Counter(word for count in counts.values() for word in count)
    rarity = {
        word: math.log((1 + len(texts)) / (1 + number)) + 1 for word, number in containing.items()
    }
    query_vector = _unit_vector(Counter(normalised_words(query)), rarity)
    similarity = {}
    for name, count in counts.items():
        vector = _unit_vector(count, rarity)
        similarity[name] = math.fsum(
            weight * vector.get(word, 0.0) for word, weight in query_vector.items()
        )
    return similarity


def _unit_vector(count: Mapping[str, int], rarity: WordWeights) -> WordWeights:
    """Return TF-IDF weights of length 1; words outside `rarity` are left out."""
    weights = {word: number * rarity[word] for word, number in count.items() if word in rarity}
    length = math.sqrt(math.fsum(weight**2 for weight in weights.values()))
    return {word: weight / length for word, weight in weights.items()}


def parse_name(text: str) -> tuple[bool, str | None]:
    """Return whether the text names this test set, and the half after a colon, unchecked.

    >>> parse_name("lookalikes"), parse_name("lookalikes:tune"), parse_name("squad.json")
    ((True, None), (True, 'tune'), (False, None))
    """
    name, colon, half = text.partition(":")
    if name != NAME:
        return False, None
    return True, half if colon else None
