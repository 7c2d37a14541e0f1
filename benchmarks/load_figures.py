"""Figures of `benchmarks load`: times between tokens, times to the first token, and where reuse breaks even."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.premises import bootstrap
from cachecraft_rag.evaluation.intervals import Interval, ratio_interval

_NEVER = 2.0  # above every hit rate


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer. Times are in seconds from the start of the run, from the client's clock.

    arrival_s       time at which it was due to be sent
    tokens_s        time of each token
    prompt_tokens   tokens of its prompt
    with_documents  False for another user's request
    request_id      id of the answer
    """

    arrival_s: float
    tokens_s: tuple[float, ...]
    prompt_tokens: int
    with_documents: bool
    request_id: str = ""

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.tokens_s[0] - self.arrival_s


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of times in seconds; NaN if there are none.

    >>> Spread.of([0.1, 0.3, 0.2])
    Spread(p50=0.2, p99=0.298, count=3)
    """

    p50: float
    p99: float
    count: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """Return the spread of times, between the nearest two where none is exact."""
        if not seconds:
            return cls(math.nan, math.nan, 0)
        return cls(
            float(np.percentile(seconds, 50)), float(np.percentile(seconds, 99)), len(seconds)
        )


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one run of one side.

    between_tokens  times between tokens of other users' answers
    while_filled    those of them during which a request with documents had no token yet
    longest_s       the longest of the former
    ttft            times to the first token of requests with documents
    others_ttft     those of other users' requests
    prompt_tokens   mean length of the prompts with documents
    found_share     share of the documents that the server took from chunk-caches
    left_to_vllm    requests with documents that the server left to vLLM
    ttft_s          times to the first token of each request with documents
    """

    requests_per_s: float
    tokens_per_s: float
    between_tokens: Spread
    while_filled: Spread
    longest_s: float
    ttft: Spread
    others_ttft: Spread
    prompt_tokens: float
    found_share: float
    left_to_vllm: int
    ttft_s: tuple[float, ...]


def figures(answered: Sequence[Answered], *, found_share: float, left_to_vllm: int) -> Figures:
    """Return the figures of a run, its requests in the order of their arrival."""
    documents = [answer for answer in answered if answer.with_documents]
    others = [answer for answer in answered if not answer.with_documents]
    gaps = [gap for answer in others for gap in itertools.pairwise(answer.tokens_s)]
    fills = [(answer.arrival_s, answer.tokens_s[0]) for answer in documents]
    seconds = max(answer.tokens_s[-1] for answer in answered) - answered[0].arrival_s
    between = [after - before for before, after in gaps]
    prompts = [answer.prompt_tokens for answer in documents]
    return Figures(
        requests_per_s=len(answered) / seconds,
        tokens_per_s=sum(len(answer.tokens_s) for answer in answered) / seconds,
        between_tokens=Spread.of(between),
        while_filled=Spread.of([after - before for before, after in during(gaps, fills)]),
        longest_s=max(between, default=math.nan),
        ttft=Spread.of([answer.ttft_s for answer in documents]),
        others_ttft=Spread.of([answer.ttft_s for answer in others]),
        prompt_tokens=float(np.mean(prompts)) if prompts else math.nan,
        found_share=found_share,
        left_to_vllm=left_to_vllm,
        ttft_s=tuple(answer.ttft_s for answer in documents),
    )


def during(
    gaps: Sequence[tuple[float, float]], fills: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, float]]:
    """Yield the gaps, (begin, end), that overlap with at least one of the fills.

    >>> list(during([(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)], [(1.5, 2.0)]))
    [(1.0, 2.0)]
    """
    for begin, end in gaps:
        if any(first < end and begin < last for first, last in fills):
            yield begin, end


def ratio(figures: Figures, baseline: Figures) -> Interval:
    """Return the mean TTFT of requests with documents as a share of the baseline's, paired request by request."""
    return ratio_interval(figures.ttft_s, baseline.ttft_s)


def crossing(ratio_at: Mapping[float, float]) -> float:
    """Return the hit rate from which on no ratio is above 1, on straight lines between the hit rates measured.

    The lowest hit rate if none is above; infinite if that of the highest one is above.

    >>> crossing({0.0: 1.25, 0.5: 0.75, 1.0: 0.25}), crossing({0.0: 0.9, 1.0: 0.2}), crossing({0.0: 2.0, 1.0: 1.1})
    (0.25, 0.0, inf)
    """
    rates = sorted(ratio_at)
    above = [rate for rate in rates if ratio_at[rate] > 1.0]
    if not above:
        return rates[0]
    if above[-1] == rates[-1]:
        return math.inf
    last, next_rate = above[-1], rates[rates.index(above[-1]) + 1]
    fall = ratio_at[last] - ratio_at[next_rate]
    return last + (ratio_at[last] - 1.0) / fall * (next_rate - last)


def break_even(runs: Mapping[float, tuple[Figures, Figures]]) -> Interval:
    """Return the crossing of the ratios of mean TTFTs, with its 95 % bootstrap interval over requests.

    Args:
        runs: hit rate → figures with reuse, and those of the baseline, of the same requests.
    """
    pairs = {
        rate: (np.array(reuse.ttft_s), np.array(baseline.ttft_s))
        for rate, (reuse, baseline) in runs.items()
    }

    def crossed(chosen: Sequence[int]) -> float:
        means = {
            rate: (reuse[chosen].mean(), baseline[chosen].mean())
            for rate, (reuse, baseline) in pairs.items()
        }
        return crossing({rate: float(reuse / base) for rate, (reuse, base) in means.items()})

    count = len(next(iter(pairs.values()))[0])
    # quantiles between a finite crossing and an infinite one would be NaN
    interval = bootstrap(lambda chosen: min(crossed(chosen), _NEVER), count)
    low, mean, high = (
        rate if rate <= 1.0 else math.inf
        for rate in (interval["low"], interval["mean"], interval["high"])
    )
    return Interval(mean, low, high)
