"""Throughput and time to the first token under load (Cache-Craft Fig. 22–25 and 28): prefix caching against reuse.

Requests arrive at random times (Poisson), whether or not those before have been answered. All sides answer the same
requests at the same times, one side after the other for each load, with an engine and a store of their own and one
model. A side keeps what it has stored from one load to the next.
"""

from __future__ import annotations

import itertools
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from cachecraft_rag.checks import FINITE, check_number, check_whole
from cachecraft_rag.engine.decoder import Decoder
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.engine.new_variants import NewVariants, When
from cachecraft_rag.engine.sampling import SamplingParams
from cachecraft_rag.engine.self_check import self_check
from cachecraft_rag.engine.stats import RequestStats
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.latency.common import QUESTION, chunks_of
from cachecraft_rag.evaluation.simulation.trace import Traffic, draw_trace
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types import Chunk, Progress

PREFIX_CACHE = "prefix_cache"
_PARTS = 4  # of a load, for hits over time


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What is asked, and how fast.

    requests       in each load
    warmup         requests before, one at a time; the capacity is measured on the second half of them
    loads          requests per second, as shares of the capacity of prefix caching …
    qps            … or as numbers, which then go before `loads`
    ratios         recompute ratios of the sides with reuse
    chunks, chunk_tokens, top_k   chunks in all, the tokens of each, and chunks per request
    questions, exponent, variation  see `simulation.Traffic`
    answer_tokens  longest answer
    new_variants   whether chunks that were reused are captured in the background, see `EngineConfig`
    """

    requests: int = 40
    warmup: int = 20
    loads: tuple[float, ...] = (0.5, 1.0, 2.0)
    qps: tuple[float, ...] = ()
    ratios: tuple[float, ...] = (0.0, 0.15, 0.3)
    chunks: int = 40
    chunk_tokens: int = 200
    top_k: int = 5
    questions: int = 100
    exponent: float = 1.0
    variation: float = 0.25
    answer_tokens: int = 8
    new_variants: NewVariants | When = "off"
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the ranges; raises ConfigError."""
        check_whole("requests", self.requests, least=_PARTS)
        check_whole("warmup", self.warmup, least=2)
        check_whole("answer_tokens", self.answer_tokens, least=1)
        check_whole("chunk_tokens", self.chunk_tokens, least=2)
        for name, most in (("loads", FINITE), ("qps", FINITE), ("ratios", 1.0)):
            for value in getattr(self, name):
                check_number(f"each of {name}", value, most=most)
        if not all(value > 0.0 for value in (*self.loads, *self.qps)) or not (self.loads or self.qps):
            raise ConfigError("loads must be above 0, and there must be one")
        if self.top_k >= self.chunks:
            raise ConfigError(f"{self.chunks} chunks are too few for {self.top_k} in each request; raise --chunks")

    @property
    def sides(self) -> dict[str, ReuseConfig]:
        """How each side reuses chunk-caches; prefix caching reuses only what stands behind the same prefix."""
        reuse = {f"reuse@{ratio:g}": ReuseConfig(recompute_ratio=ratio) for ratio in self.ratios}
        return {PREFIX_CACHE: ReuseConfig(scope="prefix"), **reuse}


@dataclass(frozen=True, slots=True)
class SideReport:
    """One side at one load. Times in seconds, from a request's arrival.

    throughput      requests per second, from the first arrival to the last answer
    hits            mean number of chunks per request that were taken from the store, for each quarter of the requests
    computed_share  of the prompts' tokens, computed or recomputed
    variants        after it, how many chunks have how many variants
    """

    throughput: float
    p50_ttft_s: float
    p99_ttft_s: float
    mean_queue_s: float
    hits: tuple[float, ...]
    computed_share: float
    variants: Mapping[int, int]

    @property
    def variants_per_chunk(self) -> float:
        """The mean."""
        return sum(n * chunks for n, chunks in self.variants.items()) / max(sum(self.variants.values()), 1)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """All sides at one load of `qps` requests per second."""

    qps: float
    sides: Mapping[str, SideReport]


@dataclass(frozen=True, slots=True)
class ServeReport:
    """`capacity` is in requests per second, by side, one request at a time after the warm-up."""

    loads: tuple[LoadReport, ...]
    capacity: Mapping[str, float]
    requests: int
    prompt_tokens: int
    model: str
    dtype: str
    threads: int


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: when it arrives, in seconds from the start, and its chunks, best first."""

    arrival_s: float
    question: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Answered:
    """`first_s` and `ended_s` are in seconds from the start."""

    arrival_s: float
    first_s: float
    ended_s: float
    stats: RequestStats


def arrivals(count: int, qps: float, *, seed: int) -> list[float]:
    """Times of a Poisson process in seconds from the start, the first at 0; another rate only stretches them.

    >>> [round(at, 2) for at in arrivals(3, 2.0, seed=0)], [round(at, 2) for at in arrivals(3, 4.0, seed=0)]
    ([0.0, 0.93, 1.64], [0.0, 0.46, 0.82])
    """
    dice = random.Random(seed)
    return list(itertools.accumulate((dice.expovariate(1.0) / qps for _ in range(count - 1)), initial=0.0))


def run(
    model: str,
    settings: ServeSettings,
    *,
    dtype: str = "auto",
    folder: Path | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
) -> ServeReport:
    """Measure. Takes sides × loads × requests / qps seconds at least.

    Args:
        folder: for the stores, removed afterwards; None: the system's for temporary files.

    Raises:
        ConfigError: the chunks do not fit the model or the sample text.
    """
    decoder = Decoder.load(model, dtype=dtype)
    self_check(decoder)
    requests = drawn(decoder, settings)
    rates = settings.qps or settings.loads
    steps = Steps(len(settings.sides) * (1 + len(rates)), progress)
    with ExitStack() as opened:
        sides = {
            name: opened.enter_context(open_side(decoder, config, settings, folder))
            for name, config in settings.sides.items()
        }
        capacity = {}
        for name, engine in sides.items():
            steps.next(f"warm-up of {name}")
            capacity[name] = warm_up(engine, requests[: settings.warmup], settings)
        loads, first = [], settings.warmup
        for rate in rates:
            qps = rate if settings.qps else rate * capacity[PREFIX_CACHE]
            times = arrivals(settings.requests, qps, seed=settings.seed)
            own = requests[first : first + settings.requests]
            asked = [Asked(at, one.question, one.chunks) for at, one in zip(times, own, strict=True)]
            first += settings.requests
            reports = {}
            for name, engine in sides.items():
                steps.next(f"{name} at {qps:.2f} requests/s")
                reports[name] = report_of(engine, serve(engine, asked, settings))
            loads.append(LoadReport(qps, reports))
    return ServeReport(
        loads=tuple(loads),
        capacity=capacity,
        requests=settings.requests,
        prompt_tokens=round(statistics.mean(_prompt_tokens(decoder, one, settings) for one in requests)),
        model=decoder.name,
        dtype=decoder.layout.dtype,
        threads=torch.get_num_threads(),
    )
