"""Traffic drawn by Zipf's law: which chunks each request uses, without a file."""

from __future__ import annotations

import bisect
import itertools
import random
from dataclasses import dataclass

from benchmarks.simulation.trace import Trace
from cachecraft_rag.checks import check_number, check_whole


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
    again = tuple(
        tuple(numbers.setdefault(chunk, len(numbers)) for chunk in request) for request in requests
    )
    least, most = traffic.chunk_tokens // 2, traffic.chunk_tokens + traffic.chunk_tokens // 2
    return Trace(again, tuple(dice.randint(least, most) for _ in numbers))
