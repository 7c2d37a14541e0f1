"""Traces: which chunks each request used, in prompt order; read from a file, or drawn."""

from __future__ import annotations

import bisect
import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path

from cachecraft_rag.checks import check_number, check_path, check_whole
from cachecraft_rag.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests for chunks.

    requests  the chunks of each request in prompt order, as numbers from 0
    tokens    `[chunks]`: the length of each chunk
    """

    requests: tuple[tuple[int, ...], ...]
    tokens: tuple[int, ...]

    @property
    def asked_tokens(self) -> int:
        """Tokens of all chunks of all requests: the cost of computing everything."""
        return sum(self.tokens[chunk] for request in self.requests for chunk in request)


def read_trace(path: Path, *, chunk_tokens: int = 256) -> Trace:
    """A file of JSON lines with a list "chunks" (numbers or names) each; other fields are passed over.

    A list "tokens" gives the chunks' lengths, else each has `chunk_tokens`. Where every line has a number "time", the
    requests are sorted by it. A chunk that stands twice in a request counts once, as in a prompt. Raises ConfigError.
    """
    check_path("trace", path)
    check_whole("chunk_tokens", chunk_tokens, least=1)
    numbers: dict[int | str, int] = {}
    lengths: dict[int, int] = {}
    found: list[tuple[float, tuple[int, ...]]] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for place, line in enumerate(lines, start=1):
                if line.strip():
                    time, names, tokens = _fields(line, f"{path}, line {place}")
                    chunks = tuple(dict.fromkeys(numbers.setdefault(name, len(numbers)) for name in names))
                    lengths.update((numbers[name], length) for name, length in zip(names, tokens, strict=False))
                    found.append((time, chunks))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not any(chunks for _, chunks in found):
        raise ConfigError(f"{path} holds no request with chunks")
    found.sort(key=lambda one: one[0])  # stable: without times, as in the file
    return Trace(tuple(chunks for _, chunks in found), tuple(lengths.get(n, chunk_tokens) for n in range(len(numbers))))


def _fields(line: str, where: str) -> tuple[float, list[int | str], list[int]]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: no JSON ({error})") from error
    names = fields.get("chunks") if isinstance(fields, dict) else None
    if not isinstance(names, list) or not all(type(name) in (int, str) for name in names):
        raise ConfigError(f'{where}: needs a list "chunks" of numbers or names')
    tokens = fields.get("tokens", [])
    sound = isinstance(tokens, list) and all(type(length) is int and length > 0 for length in tokens)
    if not sound or len(tokens) not in (0, len(names)):
        raise ConfigError(f'{where}: "tokens" must give each chunk its length')
    time = fields.get("time", 0.0)
    check_number(f'{where}: "time"', time, least=-1e300)
    return float(time), names, tokens


@dataclass(frozen=True, slots=True)
class Traffic:
    """Questions drawn by Zipf's law, whose ranks drift.

    requests      requests to draw
    questions     questions asked at any time; the one of rank n with probability ∝ n^-exponent
    exponent      exponent of Zipf's law
    drift         share of requests after which a question of any rank makes way for one about new documents
    top_k         chunks per question, always the same ones in the same order
    variation     probability with which one of them gives way to another of the same topic
    topic         chunks that the questions of one topic choose from
    topic_size    questions per topic
    chunk_tokens  mean length, drawn between half and one and a half of it; in a trace the length where it gives none
    seed          seed of the draw
    """

    requests: int = 10_000
    questions: int = 5000
    exponent: float = 1.0
    drift: float = 0.05
    top_k: int = 5
    variation: float = 0.25
    topic: int = 20
    topic_size: int = 5
    chunk_tokens: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every field; raises ConfigError."""
        for name in ("requests", "questions", "top_k", "topic", "topic_size"):
            check_whole(name, getattr(self, name), least=1)
        check_whole("chunk_tokens", self.chunk_tokens, least=2)
        check_number("exponent", self.exponent)
        check_number("drift", self.drift, most=1)
        check_number("variation", self.variation, most=1)
        check_whole("topic", self.topic, least=self.top_k + 1)


class Zipf:
    """Draws numbers from 0 on; number n - 1 has a probability ∝ n^-exponent.

    >>> Zipf(3, exponent=1.0).draw(random.Random(0))
    2
    """

    def __init__(self, count: int, *, exponent: float) -> None:
        self._sums = list(itertools.accumulate((n + 1) ** -exponent for n in range(count)))

    def draw(self, dice: random.Random) -> int:
        """One number; takes one from `dice`."""
        return bisect.bisect(self._sums, dice.random() * self._sums[-1])


def draw_trace(traffic: Traffic) -> Trace:
    """The trace of this traffic, the same for the same seed.

    >>> draw_trace(Traffic(requests=2, questions=3, top_k=2, topic=4, variation=0.0)).requests
    ((0, 1), (2, 1))
    """
    dice = random.Random(traffic.seed)
    popular = Zipf(traffic.questions, exponent=traffic.exponent)
    asked = [_new_question(number, traffic, dice) for number in range(traffic.questions)]
    dice.shuffle(asked)  # or the first topics would have all that is popular
    made = traffic.questions
    requests = []
    for _ in range(traffic.requests):
        if dice.random() < traffic.drift:
            asked[dice.randrange(traffic.questions)] = _new_question(made, traffic, dice)
            made += 1
        chunks = asked[popular.draw(dice)]
        if dice.random() < traffic.variation:
            first = chunks[0] - chunks[0] % traffic.topic
            other = first + dice.randrange(traffic.topic)
            if other not in chunks:
                place = dice.randrange(len(chunks))
                chunks = (*chunks[:place], other, *chunks[place + 1 :])
        requests.append(chunks)
    return _numbered(requests, traffic, dice)


def _new_question(number: int, traffic: Traffic, dice: random.Random) -> tuple[int, ...]:
    first = number // traffic.topic_size * traffic.topic
    return tuple(dice.sample(range(first, first + traffic.topic), traffic.top_k))


def _numbered(requests: list[tuple[int, ...]], traffic: Traffic, dice: random.Random) -> Trace:
    """The same with numbers in the order in which chunks are first asked for."""
    numbers: dict[int, int] = {}
    again = tuple(tuple(numbers.setdefault(chunk, len(numbers)) for chunk in request) for request in requests)
    least, most = traffic.chunk_tokens // 2, traffic.chunk_tokens + traffic.chunk_tokens // 2
    return Trace(again, tuple(dice.randint(least, most) for _ in numbers))
