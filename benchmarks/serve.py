"""Throughput and latency under load, prefix caching against reuse (Cache-Craft Fig. 22, 24 and 25).

Latency is counted from a request's arrival to its first token, and to the end of its answer.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.table import Table

from benchmarks.first_token import QUESTION, chunks_of
from benchmarks.shared_options import NearestShare
from benchmarks.traffic import Traffic, draw_trace
from benchmarks.variant_counts import variant_counts, variants_per_chunk
from cachecraft_rag.checks import FINITE, MOST, check_number, check_whole
from cachecraft_rag.cli import options
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.options import numbers, print_json, progress_bar
from cachecraft_rag.engine.config import EngineTuning
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.intervals import Interval, ratio_interval
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.model.self_check import self_check
from cachecraft_rag.observability.stats import RequestStats
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.serving.config import NewVariants, When
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.types.progress import Progress

PREFIX_CACHE = "prefix_cache"
_DEFAULT = ReuseConfig()
_PARTS = 4  # of a load, for hits over time


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """The requests, and how fast they arrive.

    requests       in each load
    warmup         requests before, one at a time; the capacity is measured on the second half of them
    loads          requests per second, as shares of the capacity of prefix caching …
    qps            … or as numbers, which then go before `loads`
    ratios         recompute ratios of the sides with reuse
    nearest_share  see `ReuseConfig`; 0 never recomputes the last chunk in full
    probe_min_rows see `ReuseMethod`
    chunks, chunk_tokens, top_k   chunks in all, the tokens of each, and chunks per request
    questions, exponent, variation  see `traffic.Traffic`
    answer_tokens  longest answer
    decode_rows    how many answers a decode step computes together at most, see `EngineTuning`
    new_variants   whether chunks that were reused are captured in the background, see `EngineConfig`
    """

    requests: int = 40
    warmup: int = 20
    loads: tuple[float, ...] = (0.5, 1.0, 2.0)
    qps: tuple[float, ...] = ()
    ratios: tuple[float, ...] = (0.0, 0.15, 0.3)
    nearest_share: float = _DEFAULT.nearest_share
    probe_min_rows: int = _DEFAULT.method.probe_min_rows
    chunks: int = 40
    chunk_tokens: int = 200
    top_k: int = 5
    questions: int = 100
    exponent: float = 1.0
    variation: float = 0.25
    answer_tokens: int = 8
    decode_rows: int = 8
    new_variants: NewVariants | When = "off"
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the ranges; raises ConfigError."""
        check_whole("requests", self.requests, least=_PARTS)
        check_whole("warmup", self.warmup, least=2)
        check_whole("answer_tokens", self.answer_tokens, least=1)
        check_whole("decode_rows", self.decode_rows, least=1)
        check_whole("chunk_tokens", self.chunk_tokens, least=2)
        check_number("nearest_share", self.nearest_share, most=1)
        check_whole("probe_min_rows", self.probe_min_rows)
        for name, most in (("loads", FINITE), ("qps", FINITE), ("ratios", 1.0)):
            for value in getattr(self, name):
                check_number(f"each of {name}", value, most=most)
        if not all(value > 0.0 for value in (*self.loads, *self.qps)) or not (
            self.loads or self.qps
        ):
            raise ConfigError("loads must be above 0, and there must be one")
        if self.top_k >= self.chunks:
            raise ConfigError(
                f"{self.chunks} chunks are too few for {self.top_k} in each request; raise --chunks"
            )

    @property
    def sides(self) -> dict[str, ReuseConfig]:
        """Settings of each side; prefix caching reuses only chunks after the same prefix."""
        sides = {PREFIX_CACHE: ReuseConfig(method=ReuseMethod(scope="prefix"))}
        for ratio in self.ratios:
            sides[f"reuse@{ratio:g}"] = ReuseConfig(
                recompute_ratio=ratio,
                nearest_share=self.nearest_share,
                method=ReuseMethod(probe_min_rows=self.probe_min_rows),
            )
        return sides


@dataclass(frozen=True, slots=True)
class SideReport:
    """One side at one load. Times in seconds, from a request's arrival.

    throughput      requests per second, from the first arrival to the last answer
    ttft_ratio      mean TTFT / prefix caching's over the same requests
    answer_ratio    mean time to the end of the answer / prefix caching's over the same requests
    p99_gap_s       between pieces of an answer, most of them one token: others fill meanwhile
    hits            mean number of chunks per request that were taken from the store, for each quarter of the requests
    computed_share  of the prompts' tokens, computed or recomputed
    series          of each request: TTFT, chunks taken from the store, tokens computed or recomputed
    variants        after it, how many chunks have how many variants
    """

    throughput: float
    p50_ttft_s: float
    p99_ttft_s: float
    mean_queue_s: float
    p50_answer_s: float
    p99_answer_s: float
    ttft_ratio: Interval
    answer_ratio: Interval
    p99_gap_s: float
    hits: tuple[float, ...]
    computed_share: float
    series: tuple[tuple[float, int, int], ...]
    variants: Mapping[int, int]

    @property
    def variants_per_chunk(self) -> float:
        """The mean."""
        return variants_per_chunk(self.variants)


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
    """One request; its chunks in prompt order."""

    question: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Answered:
    """When it arrived, had its first token, and ended, in seconds from the start; and the times between its pieces."""

    arrival_s: float
    first_s: float
    ended_s: float
    stats: RequestStats
    gaps: tuple[float, ...]


def arrivals(count: int, qps: float, *, seed: int) -> list[float]:
    """Times of a Poisson process in seconds from the start, the first at 0; another rate only stretches them.

    >>> [round(at, 3) for at in arrivals(3, 2.0, seed=0)], [round(at, 3) for at in arrivals(3, 4.0, seed=0)]
    ([0.0, 0.93, 1.64], [0.0, 0.465, 0.82])
    """
    dice = random.Random(seed)
    return list(
        itertools.accumulate((dice.expovariate(1.0) / qps for _ in range(count - 1)), initial=0.0)
    )


def run(
    model: str,
    settings: ServeSettings,
    *,
    dtype: str = "auto",
    progress: Callable[[Progress], None] = lambda _: None,
) -> ServeReport:
    """Load a model and measure, see `measure`."""
    decoder = Decoder.load(model, dtype=dtype)
    self_check(decoder)
    return measure(decoder, settings, progress=progress)


def measure(
    decoder: Decoder,
    settings: ServeSettings,
    *,
    progress: Callable[[Progress], None] = lambda _: None,
) -> ServeReport:
    """Measure all sides at all loads. Takes sides × loads × requests / qps seconds at least.

    Raises:
        ConfigError: the chunks do not fit the model or the sample text.
    """
    requests, rates = drawn(decoder, settings), settings.qps or settings.loads
    total = len(settings.sides) * len(requests)
    done = itertools.count(1)

    def tick(what: str) -> None:
        progress(Progress(next(done), total, what))

    with ExitStack() as opened:
        root = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="cachecraft-bench-")))
        sides = {
            name: opened.enter_context(_side(decoder, config, settings, root / name))
            for name, config in settings.sides.items()
        }
        warming, left = requests[: settings.warmup], requests[settings.warmup :]
        capacity = {
            name: warm_up(engine, warming, settings, partial(tick, name))
            for name, engine in sides.items()
        }
        loads = []
        for rate in rates:
            qps = rate if settings.qps else rate * capacity[PREFIX_CACHE]
            asked, left = left[: settings.requests], left[settings.requests :]
            times, answered = arrivals(len(asked), qps, seed=settings.seed), {}
            reports: dict[str, SideReport] = {}
            for name, engine in sides.items():
                answered[name] = serve(
                    engine, asked, times, settings, partial(tick, f"{name} at {qps:.2f} requests/s")
                )
                reports[name] = report_of(engine, answered[name], answered[PREFIX_CACHE])
            loads.append(LoadReport(qps, reports))
        engine = sides[PREFIX_CACHE]
        lengths = [
            len(engine.prompts.build(one.question, one.chunks, reserve=1).token_ids)
            for one in requests
        ]
    return ServeReport(
        loads=tuple(loads),
        capacity=capacity,
        requests=settings.requests,
        prompt_tokens=round(statistics.mean(lengths)),
        model=decoder.name,
        dtype=decoder.layout.dtype,
        threads=torch.get_num_threads(),
    )


def drawn(decoder: Decoder, settings: ServeSettings) -> list[Asked]:
    """The warm-up and all loads, the same for the same seed. Raises ConfigError where the sample text is too short."""
    texts = chunks_of(decoder, count=settings.chunks, tokens=settings.chunk_tokens)
    rates = settings.qps or settings.loads
    traffic = Traffic(
        requests=settings.warmup + settings.requests * len(rates),
        questions=settings.questions,
        exponent=settings.exponent,
        drift=0.0,
        top_k=settings.top_k,
        variation=settings.variation,
        topic=settings.chunks,
        topic_size=settings.questions,
        seed=settings.seed,
    )
    trace = draw_trace(traffic)
    return [
        Asked(f"{QUESTION} ({number})", tuple(texts[chunk] for chunk in chunks))
        for number, chunks in enumerate(trace.requests, start=1)
    ]


@contextmanager
def _side(
    decoder: Decoder, config: ReuseConfig, settings: ServeSettings, folder: Path
) -> Iterator[Engine]:
    """An engine over an empty store; no request is turned away, however long the queue."""
    with (
        ChunkCacheStore.open(folder) as store,
        Engine(
            decoder,
            store,
            config=config,
            best_last=False,
            new_variants=settings.new_variants,
            tuning=EngineTuning(decode_rows=settings.decode_rows, max_waiting=MOST),
        ) as engine,
    ):
        yield engine


def warm_up(
    engine: Engine, asked: Sequence[Asked], settings: ServeSettings, tick_one: Callable[[], object]
) -> float:
    """Answer one after the other; returns requests per second of the second half."""
    half = len(asked) // 2
    started = time.perf_counter()
    for number, one in enumerate(asked):
        if number == half:
            started = time.perf_counter()
        _answer(engine, one, settings)
        tick_one()
    rate = (len(asked) - half) / (time.perf_counter() - started)
    _settle(engine, settings)
    return rate


def serve(
    engine: Engine,
    asked: Sequence[Asked],
    times: Sequence[float],
    settings: ServeSettings,
    tick_one: Callable[[], object],
) -> list[Answered]:
    """Ask each at its time, in seconds from the start, in a thread each; returns when all are answered."""
    with ThreadPoolExecutor(len(asked), thread_name_prefix="cachecraft-clients") as clients:
        started, pending = time.perf_counter(), []
        for one, at in zip(asked, times, strict=True):
            time.sleep(max(0.0, started + at - time.perf_counter()))
            pending.append(clients.submit(_ask, engine, one, at, started, settings))
        answered = []
        for each in as_completed(pending):
            answered.append(each.result())
            tick_one()
    _settle(engine, settings)
    return sorted(answered, key=lambda one: one.arrival_s)


def _ask(
    engine: Engine, one: Asked, arrival_s: float, started: float, settings: ServeSettings
) -> Answered:
    called_s = time.perf_counter() - started
    stats, pieces = _answer(engine, one, settings)
    gaps = tuple(after - before for before, after in itertools.pairwise(pieces))
    return Answered(arrival_s, called_s + stats.ttft_s, called_s + stats.total_s, stats, gaps)


def _answer(
    engine: Engine, one: Asked, settings: ServeSettings
) -> tuple[RequestStats, list[float]]:
    sampling = SamplingParams(max_new_tokens=settings.answer_tokens)
    generation = engine.stream(one.question, one.chunks, sampling=sampling)
    pieces = [time.perf_counter() for _ in generation]
    return generation.stats, pieces


def _settle(engine: Engine, settings: ServeSettings) -> None:
    """Finish background work, so that it does not run into another side's time."""
    if settings.new_variants == "off":
        engine.write_back.wait_for(engine.write_back.pending())
        engine.store.flush()
    else:
        engine.settle()


def report_of(engine: Engine, answered: Sequence[Answered], base: Sequence[Answered]) -> SideReport:
    """The numbers of one load; `base` is prefix caching's."""
    waits, base_waits = ([one.first_s - one.arrival_s for one in side] for side in (answered, base))
    answers, base_answers = (
        [one.ended_s - one.arrival_s for one in side] for side in (answered, base)
    )
    gaps = [gap for one in answered for gap in one.gaps]
    found = [sum(chunk.variant_id is not None for chunk in one.stats.chunks) for one in answered]
    computed = [one.stats.tokens_computed + one.stats.tokens_recomputed for one in answered]
    return SideReport(
        throughput=len(answered) / (max(one.ended_s for one in answered) - answered[0].arrival_s),
        p50_ttft_s=float(np.percentile(waits, 50)),
        p99_ttft_s=float(np.percentile(waits, 99)),
        p50_answer_s=float(np.percentile(answers, 50)),
        p99_answer_s=float(np.percentile(answers, 99)),
        mean_queue_s=statistics.mean(one.stats.queue_s for one in answered),
        ttft_ratio=ratio_interval(waits, base_waits),
        answer_ratio=ratio_interval(answers, base_answers),
        p99_gap_s=float(np.percentile(gaps, 99)) if gaps else 0.0,
        hits=tuple(float(part.mean()) for part in np.array_split(np.array(found), _PARTS)),
        computed_share=sum(computed) / sum(one.stats.tokens_prompt for one in answered),
        series=tuple(zip(waits, found, computed, strict=True)),
        variants=variant_counts(engine),
    )


_DecodeRows = Annotated[
    int,
    typer.Option(
        "--decode-rows", min=1, help="Answers that a decode step computes together at most."
    ),
]


def main(
    model: options.Model = "demo",
    dtype: options.Dtype = "auto",
    requests: Annotated[int, typer.Option("--requests", min=4, help="Requests of each load.")] = 40,
    warmup: Annotated[
        int, typer.Option("--warmup", min=2, help="Requests before, one at a time.")
    ] = 20,
    loads: Annotated[
        str,
        typer.Option(
            "--loads",
            help="Requests per second, as shares of what prefix caching answers one at a time.",
        ),
    ] = "0.5,1,2",
    qps: Annotated[
        str | None, typer.Option("--qps", help="Instead of --loads: requests per second.")
    ] = None,
    ratios: Annotated[str, typer.Option("--ratios", help="Recompute ratios.")] = "0,0.15,0.3",
    nearest_share: NearestShare = _DEFAULT.nearest_share,
    probe_min_rows: Annotated[
        int, options.option_of("method.probe_min_rows", min=0)
    ] = _DEFAULT.method.probe_min_rows,
    chunks: Annotated[int, typer.Option("--chunks", min=2, help="Chunks in all.")] = 40,
    chunk_tokens: Annotated[
        int, typer.Option("--chunk-tokens", min=16, max=1 << 20, help="Length of each.")
    ] = 200,
    top_k: Annotated[int, options.option_of("top_k", min=1)] = 5,
    questions: Annotated[
        int, typer.Option("--questions", min=1, help="Questions, each with its chunks.")
    ] = 100,
    zipf: Annotated[
        float, typer.Option("--zipf", min=0.0, help="Exponent of the questions' popularity.")
    ] = 1.0,
    variation: Annotated[
        float,
        typer.Option(
            "--variation", min=0.0, max=1.0, help="How often one of a question's chunks is another."
        ),
    ] = 0.25,
    answer_tokens: Annotated[
        int, typer.Option("--answer-tokens", min=1, help="Longest answer.")
    ] = 8,
    decode_rows: _DecodeRows = 8,
    new_variants: Annotated[str, options.option_of("new_variants")] = "off",
    seed: Annotated[
        int, typer.Option("--seed", min=-MOST - 1, max=MOST, help="Seed of requests and arrivals.")
    ] = 0,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Throughput and times to first tokens and whole answers under load: prefix caching against reuse, same requests.

    Requests arrive at random times. With the demo model it takes about a quarter of an hour.
    """
    options.set_threads(threads)
    with progress_bar("Benchmark", remaining=True) as show:
        options.quiet_libraries()
        settings = ServeSettings(
            requests=requests,
            warmup=warmup,
            loads=tuple(numbers(loads)),
            qps=() if qps is None else tuple(numbers(qps)),
            ratios=tuple(numbers(ratios)),
            nearest_share=nearest_share,
            probe_min_rows=probe_min_rows,
            chunks=chunks,
            chunk_tokens=chunk_tokens,
            top_k=top_k,
            questions=questions,
            exponent=zipf,
            variation=variation,
            answer_tokens=answer_tokens,
            decode_rows=decode_rows,
            new_variants=NewVariants(new_variants),  # type: ignore[arg-type]  # it checks the word
            seed=seed,
        )
        report = run(model, settings, dtype=dtype, progress=show)
    if as_json:
        print_json(as_plain(report))
    else:
        print_serve(report)


def as_plain(report: ServeReport) -> dict[str, Any]:
    """For JSON: each load with its sides by name."""
    plain = asdict(report)
    loads = [{"qps": load["qps"], **load["sides"]} for load in plain.pop("loads")]
    return {"loads": loads, **plain}


def _with_interval(ratio: Interval) -> str:
    return f"{ratio.mean:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def print_serve(report: ServeReport) -> None:
    """A line for each load and side, with ratios to prefix caching."""
    table = Table(
        "requests/s",
        "side",
        "answered/s",
        "×",
        "TTFT p50",
        "p99",
        "mean ×",
        "answer p50",
        "p99",
        "mean ×",
        "between tokens p99",
        "hits/request",
        "computed",
        "variants",
    )
    for load in report.loads:
        base = load.sides[PREFIX_CACHE]
        for name, side in load.sides.items():
            table.add_row(
                f"{load.qps:.2f}" if side is base else "",
                name,
                f"{side.throughput:.2f}",
                f"{side.throughput / base.throughput:.2f}",
                f"{side.p50_ttft_s:.2f} s",
                f"{side.p99_ttft_s:.2f} s",
                _with_interval(side.ttft_ratio),
                f"{side.p50_answer_s:.2f} s",
                f"{side.p99_answer_s:.2f} s",
                _with_interval(side.answer_ratio),
                f"{1000 * side.p99_gap_s:.0f} ms",
                " ".join(f"{mean:.1f}" for mean in side.hits),
                f"{side.computed_share:.2f}",
                f"{side.variants_per_chunk:.1f}, at most {max(side.variants, default=0)}",
            )
    out.print(table)
    alone = ", ".join(f"{name} {rate:.2f}" for name, rate in report.capacity.items())
    out.print(f"One at a time, requests/s: {alone}. Hits: means of each quarter of the requests.")
    out.print(
        f"{report.requests} requests at each load, {report.prompt_tokens} tokens on average; {report.model}, "
        f"{report.dtype}, {report.threads} threads"
    )
