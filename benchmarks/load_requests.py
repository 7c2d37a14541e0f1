"""Requests of `benchmarks load`: who asks what, and when; the same for all sides that are compared."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.serve import arrivals
from benchmarks.server import pool
from cachecraft_rag.checks import check_number, check_whole
from cachecraft_rag.errors import ConfigError

REUSE = "reuse"
REUSE_OFF = "reuse off"
VLLM_ALONE = "vLLM alone"
_STORED = "5c3a91e7"  # series of the documents that are stored before


@dataclass(frozen=True, slots=True)
class Mix:
    """Requests with documents, and those of other users, who send a question only and read a longer answer.

    documents_share  share of the requests that have documents
    chunks           documents of such a request
    words            words of a document
    pool             documents that are stored before, and drawn from
    answer_tokens    tokens of an answer about documents
    others_tokens    tokens of an answer to another user
    seed             seed of arrivals and draws
    """

    documents_share: float = 0.5
    chunks: int = 5
    words: int = 150
    pool: int = 20
    answer_tokens: int = 8
    others_tokens: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the ranges; raises ConfigError."""
        check_number("documents_share", self.documents_share, most=1)
        for name in ("chunks", "words", "pool", "answer_tokens"):
            check_whole(name, getattr(self, name), least=1)
        check_whole("others_tokens", self.others_tokens, least=2)
        if self.chunks > self.pool:
            raise ConfigError(
                f"{self.pool} documents are too few for {self.chunks} in each request; raise --pool"
            )

    def texts(self) -> list[str]:
        """Return the texts that documents are made of. Raises ConfigError if the sample text is too short."""
        texts = pool(self.words)
        if len(texts) < self.pool:
            raise ConfigError(
                f"the sample text has {len(texts)} documents of {self.words} words; lower --pool or --words"
            )
        return random.Random(self.seed).sample(texts, self.pool)

    def stored(self) -> list[str]:
        """Return the documents that are stored before."""
        return [document(_STORED, number, text) for number, text in enumerate(self.texts())]


def document(series: str, number: int, text: str) -> str:
    """Return a document that differs from all others; documents of all series have about as many tokens."""
    return f"Note {series}-{number:03}. {text}"


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and the time at which it is sent, in seconds from the start of a run.

    documents  texts, the best first; empty for another user's request
    """

    at_s: float
    question: str
    documents: tuple[str, ...] = ()


def drawn(mix: Mix, count: int, qps: float, hit_rate: float, *, new: str) -> list[Arrival]:
    """Return `count` requests at Poisson times, `qps` a second.

    The number of requests with documents, and of documents that are stored, is the nearest to their shares; dice choose
    which. With a higher hit rate the same documents are stored and further ones; times and questions stay. Documents
    that are not stored are the series `new`, and each occurs once. Raises ConfigError if no request has
    documents.
    """
    count_documents = round(mix.documents_share * count)
    if not count_documents:
        raise ConfigError(
            f"none of {count} requests has documents; raise --documents-share or --requests"
        )
    dice = random.Random(mix.seed)
    times = arrivals(count, qps, seed=mix.seed)
    with_documents = sorted(dice.sample(range(count), count_documents))
    texts = mix.texts()
    chosen = [dice.sample(range(mix.pool), mix.chunks) for _ in with_documents]
    places = [(request, place) for request in range(len(chosen)) for place in range(mix.chunks)]
    dice.shuffle(places)
    new_number = {where: n for n, where in enumerate(places[round(hit_rate * len(places)) :])}
    stored = mix.stored()

    def document_at(request: int, place: int) -> str:
        index = chosen[request][place]
        number = new_number.get((request, place))
        return stored[index] if number is None else document(new, number, texts[index])

    documents = {
        number: tuple(document_at(request, place) for place in range(mix.chunks))
        for request, number in enumerate(with_documents)
    }
    return [_arrival(number, at_s, documents.get(number, ())) for number, at_s in enumerate(times)]


def _arrival(number: int, at_s: float, documents: tuple[str, ...]) -> Arrival:
    if documents:
        return Arrival(at_s, f"What do the notes say about point {number}?", documents)
    return Arrival(at_s, f"Write a long letter to a friend about day {number} of your journey.")


def body(arrival: Arrival, side: str, mix: Mix, *, salt: str) -> dict[str, Any]:
    """Return the streamed chat completion of a side: `REUSE`, `REUSE_OFF` or `VLLM_ALONE`.

    vLLM alone gets the documents in the user's message, the best one last as in this package's prompt. `salt` keeps
    vLLM's prefix cache from answering for another run.
    """
    asked: dict[str, Any] = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "temperature": 0,
        "max_tokens": mix.answer_tokens if arrival.documents else mix.others_tokens,
        "cache_salt": salt,
    }
    if side == VLLM_ALONE or not arrival.documents:
        text = "\n\n".join([*reversed(arrival.documents), arrival.question])
        return asked | {"messages": [_user(text)]}
    asked["messages"] = [_user(arrival.question)]
    asked["documents"] = [{"text": text} for text in arrival.documents]
    if side == REUSE_OFF:
        asked["cachecraft"] = {"reuse": False, "capture": False}
    return asked


def _user(text: str) -> Mapping[str, str]:
    return {"role": "user", "content": text}


def batches(texts: Sequence[str], size: int) -> list[tuple[str, ...]]:
    """Return the texts in groups of `size`, the last one filled up with the first texts.

    >>> batches(["a", "b", "c"], 2)
    [('a', 'b'), ('c', 'a')]
    """
    return [
        tuple(texts[(first + place) % len(texts)] for place in range(size))
        for first in range(0, len(texts), size)
    ]
