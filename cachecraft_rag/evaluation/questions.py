"""Questions with their passages, from SQuAD-format files or from the sample handbook."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cachecraft_rag.embedded import handbook_folder, handbook_questions
from cachecraft_rag.errors import DocumentError
from cachecraft_rag.types import Chunk


@dataclass(frozen=True)
class Item:
    """A question, its passages in prompt order (one holds the answer), and passages that have nothing to do with it."""

    question: str
    passages: tuple[Chunk, ...]
    others: tuple[Chunk, ...]


def squad_items(path: Path, *, count: int, passages: int, seed: int) -> list[Item]:
    """Draw questions from a file in SQuAD's published format; the passages of one question come from its own article.

    Raises:
        DocumentError: the file is missing or not in that format.
    """
    try:
        articles = json.loads(path.read_text(encoding="utf-8"))["data"]
        found = [
            (article, place, asked["question"])
            for article in articles
            for place, paragraph in enumerate(article["paragraphs"])
            for asked in paragraph["qas"]
        ]
    except OSError as error:
        raise DocumentError(f"cannot read {path}: {error.strerror}. Name a file in SQuAD format.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DocumentError(f"{path} is not in SQuAD format (data → paragraphs → context, qas → question)") from error
    draw = random.Random(seed)
    draw.shuffle(found)
    items = []
    for article, place, question in found[:count]:
        texts = [paragraph["context"] for paragraph in article["paragraphs"]]
        near = [text for i, text in enumerate(texts) if i != place]
        draw.shuffle(near)
        chosen = [texts[place], *near[: passages - 1]]
        draw.shuffle(chosen)
        others = [p["context"] for other in articles if other is not article for p in other["paragraphs"]]
        items.append(Item(question, _chunks(chosen), _chunks(draw.sample(others, min(len(others), 2 * passages)))))
    return items


def handbook_items(*, count: int, passages: int, seed: int) -> list[Item]:
    """The sample handbook's own questions; the passages are sections of the page that answers and of other pages."""
    draw = random.Random(seed)
    pages = {path.name: _sections(path) for path in sorted(handbook_folder().glob("*.md"))}
    items = []
    for asked in handbook_questions()[:count]:
        own = pages[asked.page]
        rest = [text for name, texts in pages.items() if name != asked.page for text in texts]
        draw.shuffle(rest)
        chosen = (own + rest)[:passages]
        draw.shuffle(chosen)
        items.append(
            Item(
                asked.question, _chunks(chosen), _chunks([text for text in rest if text not in chosen][: 2 * passages])
            )
        )
    return items


def _sections(page: Path) -> list[str]:
    """A page in pieces of two sections, a passage's usual length."""
    parts = page.read_text(encoding="utf-8").split("\n## ")
    return ["\n## ".join(parts[i : i + 2]).strip() for i in range(0, len(parts), 2)]


def _chunks(texts: Sequence[str]) -> tuple[Chunk, ...]:
    return tuple(Chunk(text) for text in texts)
