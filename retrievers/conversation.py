"""Retrieval within a conversation: "And how long does that take?" says nothing without the question before it.

A follow-up is searched for by the mean of two vectors: that of the follow-up alone, and that of the questions before it
joined with it. The first finds what the follow-up names, the second what it refers to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cachecraft_rag.prompt.builder import Turn
from cachecraft_rag.retrievers.embeddings import unit_vectors
from cachecraft_rag.retrievers.index.filters import Where
from cachecraft_rag.types.documents import SearchHit

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from cachecraft_rag.retrievers.index.faiss_store import FaissStore

TIE = 0.02  # cosines this close are a tie; of 40 follow-ups it loses none, and 0.1 loses one
# how many of the user's earlier turns are searched with the new one; three find no more
_QUESTIONS = 2
# of them, from their end: an embedding model reads 256 tokens, and a pasted page would be all of these
_LETTERS = 600
_LONGEST_PART = 40  # letters of a word that may be left out because its beginning is cut off


def search_texts(question: str, history: Sequence[Turn] = ()) -> tuple[str, ...]:
    """Return the texts to search for: the question, and for a follow-up also the questions before it and the question.

    Of the user's earlier turns (blank ones do not count) the last two are used, and of these the last 600 characters,
    from a whole word on if one begins within 40 characters.

    >>> search_texts("How often is it descaled?")
    ('How often is it descaled?',)
    >>> search_texts("How long does that take?", [("user", "How often is it descaled?"), ("assistant", "Weekly.")])
    ('How long does that take?', 'How often is it descaled? How long does that take?')
    """
    questions = [text.strip() for role, text in history if role == "user" and text.strip()]
    earlier = " ".join(questions[-_QUESTIONS:])
    if len(earlier) > _LETTERS:
        earlier = earlier[-_LETTERS:]
        # from the next whole word on; Chinese and Japanese have no spaces between words
        part, _, rest = earlier.partition(" ")
        if rest and len(part) < _LONGEST_PART:
            earlier = rest
    return (question, f"{earlier} {question}") if earlier else (question,)


def turn_before(history: Sequence[Turn]) -> tuple[str, Sequence[Turn]] | None:
    """Return the user's last question in `history` that is not blank, and the turns before it; None without one."""
    place = max(
        (at for at, (role, text) in enumerate(history) if role == "user" and text.strip()),
        default=None,
    )
    return None if place is None else (history[place][1], history[:place])


def prefer(hits: Iterable[SearchHit], chunk_ids: Collection[str], top_k: int) -> list[SearchHit]:
    """Return the best `top_k` hits, best first; those of `chunk_ids` only rank as if they scored `TIE` (0.02) higher.

    >>> hits = [SearchHit("a", 0.50, "", {}), SearchHit("b", 0.49, "", {}), SearchHit("c", 0.40, "", {})]
    >>> [hit.chunk_id for hit in prefer(hits, {"b", "c"}, 2)]
    ['b', 'a']
    """
    return sorted(hits, key=lambda hit: -hit.score - (TIE if hit.chunk_id in chunk_ids else 0.0))[
        :top_k
    ]


def search(
    index: FaissStore,
    encode: Callable[[list[str]], ArrayLike],
    question: str,
    history: Sequence[Turn],
    *,
    top_k: int,
    where: Where | None = None,
    parts_of: Callable[[str], list[str]] = lambda text: [text],
) -> list[SearchHit]:
    """Return the `top_k` chunks most similar to a question in its conversation, best first.

    A follow-up also repeats the search of the turn before, whose `top_k` chunks are preferred (see `prefer`). Of a
    question in several parts (`parts_of`) each one is searched for, and a chunk's score is that of the part it is most
    similar to. `encode` returns vectors `[texts, dim]` of texts, and is called once; `where` is as in
    `FaissStore.search`.
    """
    asked: list[tuple[str, Sequence[Turn]]] = [(question, history)]
    before = turn_before(history)
    if before is not None:
        asked.append(before)
    questions = [[search_texts(part, turns) for part in parts_of(text)] for text, turns in asked]
    texts = list(dict.fromkeys(text for parts in questions for group in parts for text in group))
    vectors = dict(zip(texts, unit_vectors(encode(texts)), strict=True))
    now, *earlier = (
        unit_vectors([np.mean([vectors[text] for text in group], axis=0) for group in parts])
        for parts in questions
    )
    known = {hit.chunk_id for rows in earlier for hit in index.search(rows, top_k, where=where)}
    return prefer(index.search(now, top_k + len(known), where=where), known, top_k)
