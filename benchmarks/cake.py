"""Cake's own comparison: computing only, loading only, and overlapped prefill, at several bandwidths.

All chunks of the prompt were captured after the same prefix, so that none has to be recomputed: Cake as published.
Files are real and cold (page cache dropped). A token bucket at the reader limits the bandwidth to a multiple of the
rate at which this machine computes KV bytes. Processes that spin leave a share of the compute, and the share that
computing really had stands beside it.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from benchmarks.first_token import QUESTION, chunks_of, drop_page_cache
from benchmarks.plotting import BLACK, BLUE, GREY, RED, YELLOW, pyplot, save
from benchmarks.shared_options import Pairs
from cachecraft_rag.cli import options
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.options import numbers, print_json, progress_bar
from cachecraft_rag.compute.balance.speed import ComputeSpeed
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.intervals import Interval, mean_interval
from cachecraft_rag.model.attention_choice import cpu_instructions
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.observability.stats import RequestStats
from cachecraft_rag.planning.config import Loading, ReuseConfig, ReuseMethod
from cachecraft_rag.prompt.builder import PromptBuilder
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.config import StoreTuning
from cachecraft_rag.types.progress import Progress

_SERIES = (  # field, label, colour, line
    ("compute_only_s", "computing only", GREY, "--"),
    ("load_only_s", "loading only", BLUE, "--"),
    ("best_split_s", "best split", BLACK, ":"),
    ("cake_s", "overlapped (Cake)", RED, "-"),
)
CHUNK_TOKENS = 256
_COMPUTE = ReuseConfig(reuse=False, capture=False)
# the tokens after the first show whether the loaded cache is right
_SAMPLING = SamplingParams(max_new_tokens=8)
_SPLITS = 200
_NICE_STEP = 1.25  # Linux: a process gets so much more of a core than one that is nicer by 1


@dataclass(frozen=True)
class CakeCell:
    """Seconds to the first token, medians.

    tokens           of all chunks together
    bandwidth_ratio  bandwidth / KV bytes per second that full prefill computes with this cell's share
    compute_share    of each thread's core that spinning processes should leave
    share_had        CPU time of full prefill / its time on all threads; below 1 at a share of 1 too
    compute_only_s   full prefill, in one pass
    load_only_s      load everything, then compute the question
    cake_s           overlapped prefill
    best_split_s     prediction for the best split, from this cell's rates: compute the front and load the rest at the
                     same time, then compute the question
    computed         share of the prompt that overlapped prefill computed, of the last pair
    exact            whether the first tokens of the answer equal those of full prefill
    of_better        mean of the pairs: both at once / the faster of the two alone
    cpu_ratio        of the whole process, both at once / full prefill: what is beside computing, where nothing arrives
    dtype, threads, cpu  of the model, of a pass, and the CPU's vector instructions
    """

    tokens: int
    bandwidth_ratio: float
    compute_share: float
    share_had: float
    codec: str
    compute_only_s: float
    load_only_s: float
    cake_s: float
    best_split_s: float
    computed: float
    exact: bool
    of_better: Interval
    cpu_ratio: Interval
    dtype: str
    threads: int
    cpu: str


@dataclass(frozen=True)
class Grid:
    """The cells to measure: every combination of these values."""

    tokens: Sequence[int] = (1024, 2048, 4096)
    bandwidths: Sequence[float] = (0.25, 0.5, 1.0, 2.0, 4.0)
    shares: Sequence[float] = (1.0, 0.5)
    codecs: Sequence[str] = ("raw", "int8")
    pairs: int = 1

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        if min(self.tokens) < CHUNK_TOKENS:
            raise ConfigError(f"a context needs at least {CHUNK_TOKENS} tokens, one chunk")
        if (
            min(self.bandwidths) <= 0
            or self.pairs < 1
            or not all(0 < share <= 1 for share in self.shares)
        ):
            raise ConfigError(
                "bandwidths must be above 0, compute shares above 0 and at most 1, pairs at least 1"
            )


def run(
    model: str,
    grid: Grid,
    *,
    dtype: str = "auto",
    progress: Callable[[Progress], None] = lambda _: None,
) -> Iterator[CakeCell]:
    """Measure cell by cell. Raises ConfigError if a context does not fit the model or the sample text."""
    decoder = Decoder.load(model, dtype=dtype)
    done, total = 0, len(grid.tokens) * len(grid.shares) * len(grid.bandwidths) * len(grid.codecs)
    for tokens in grid.tokens:
        for share in grid.shares:
            with (
                tempfile.TemporaryDirectory(prefix="cachecraft-bench-") as folder,
                competing(share),
            ):
                context = Context(decoder, Path(folder), tokens)
                what = f"{tokens} tokens, {share:g} of the compute"
                progress(Progress(done, total, what))
                for cell in context.cells(grid, share):
                    done += 1
                    progress(Progress(done, total, what))
                    yield cell


@contextmanager
def competing(share: float) -> Iterator[None]:
    """Leave about this share of the cores that our threads use, by processes that spin on them."""
    each = round((1 - share) / share) or 1  # for one thread; where one is too much, it is nicer
    nice = max(0, round(math.log(each * share / (1 - share), _NICE_STEP))) if share < 1 else 0
    many = each * torch.get_num_threads() if share < 1 else 0
    spin = [sys.executable, "-c", f"import os\nos.nice({nice})\nwhile True: pass"]
    processes = [subprocess.Popen(spin) for _ in range(many)]
    try:
        yield
    finally:
        for one in processes:
            one.kill()
            one.wait()


class Context:
    """One prompt, its chunk-caches on disk in every codec, and the ways to prefill it."""

    def __init__(
        self, decoder: Decoder, folder: Path, tokens: int, *, speed: ComputeSpeed | None = None
    ) -> None:
        self._decoder, self._folder = decoder, folder
        self._chunks = chunks_of(decoder, count=tokens // CHUNK_TOKENS, tokens=CHUNK_TOKENS)
        self._tokens = tokens
        # of this share of the compute, shared by all engines
        self._speed = ComputeSpeed(decoder.keys_per_row) if speed is None else speed

    def cells(self, grid: Grid, share: float) -> Iterator[CakeCell]:
        """One cell per bandwidth and codec."""
        for codec in grid.codecs:
            self._capture(codec)
        text, rate = self._compute(grid.codecs[0])
        for bandwidth in grid.bandwidths:
            for codec in grid.codecs:
                yield self._cell(
                    bandwidth, codec, share=share, rate=rate, pairs=grid.pairs, right=text
                )

    def _cell(
        self, bandwidth: float, codec: str, *, share: float, rate: float, pairs: int, right: str
    ) -> CakeCell:
        compute, load, cake, question, exact = [], [], [], [], True
        walls, only_cpu, both_cpu = [], [], []
        for _ in range(pairs):
            (_, stats), wall, cpu = _spent(lambda: self._ask(_COMPUTE, codec))
            compute.append(stats.ttft_s)
            walls.append(wall)
            only_cpu.append(cpu)
            stats = self.load(codec, bandwidth * rate, "whole")[1]
            load.append(stats.ttft_s)
            question.append(stats.ttft_s - stats.load_s)
            (text, stats), _, cpu = _spent(lambda: self.load(codec, bandwidth * rate, "cake"))
            cake.append(stats.ttft_s)
            both_cpu.append(cpu)
            exact &= text == right
        only, loaded, alone = map(statistics.median, (compute, load, question))
        return CakeCell(
            tokens=self._tokens,
            bandwidth_ratio=bandwidth,
            compute_share=share,
            share_had=sum(only_cpu) / sum(walls) / torch.get_num_threads(),
            codec=codec,
            compute_only_s=only,
            load_only_s=loaded,
            cake_s=statistics.median(cake),
            best_split_s=self._best_split(only - alone, loaded - alone) + alone,
            computed=stats.tokens_computed / stats.tokens_prompt,
            exact=exact,
            of_better=mean_interval(
                [both / min(pair) for both, *pair in zip(cake, compute, load, strict=True)]
            ),
            cpu_ratio=mean_interval(
                [both / one for both, one in zip(both_cpu, only_cpu, strict=True)]
            ),
            dtype=self._decoder.layout.dtype,
            threads=torch.get_num_threads(),
            cpu=cpu_instructions(),
        )

    def capture(self, codec: str) -> float:
        """Capture all chunks, and return the KV bytes per second that full prefill computes."""
        self._capture(codec)
        return self._compute(codec)[1]

    def token_ids(self) -> Sequence[int]:
        """Return the tokens of the whole prompt."""
        builder = PromptBuilder(
            self._decoder.tokenizer, context_length=self._decoder.context_length, best_last=False
        )
        return builder.build(QUESTION, self._chunks).token_ids

    def _compute(self, codec: str) -> tuple[str, float]:
        text, full = self._ask(_COMPUTE, codec)
        return text, self._decoder.layout.nbytes(full.tokens_prompt) / full.ttft_s

    def _best_split(self, compute_s: float, load_s: float) -> float:
        """Seconds of the best split, if computing and loading keep their measured rates while they overlap."""
        rows, n = self._speed.rows, self._tokens
        whole = rows(range(n))
        splits = [part * n // _SPLITS for part in range(_SPLITS + 1)]
        return min(max(compute_s * rows(range(m)) / whole, load_s * (n - m) / n) for m in splits)

    def _capture(self, codec: str) -> None:
        with self._open(codec) as store:
            engine = self._engine(store)
            self._answer(engine, ReuseConfig(reuse=False))
            engine.close()

    def load(self, codec: str, bytes_per_s: float, loading: Loading) -> tuple[str, RequestStats]:
        """An answer from cold files, by an engine that knows its compute speed but not this disk."""
        drop_page_cache(self._folder)
        return self._ask(
            ReuseConfig(capture=False, method=ReuseMethod(loading=loading)),
            codec,
            bytes_per_s=bytes_per_s,
        )

    def _ask(
        self, config: ReuseConfig, codec: str, *, bytes_per_s: float = float("inf")
    ) -> tuple[str, RequestStats]:
        with self._open(codec, bytes_per_s) as store, self._engine(store) as engine:
            return self._answer(engine, config)

    def _open(self, codec: str, bytes_per_s: float = float("inf")) -> ChunkCacheStore:
        return ChunkCacheStore.open(
            self._folder / codec, codec=codec, tuning=StoreTuning(read_bytes_per_s=bytes_per_s)
        )

    def _engine(self, store: ChunkCacheStore) -> Engine:
        engine = Engine(self._decoder, store, best_last=False, new_variants="off")
        engine.loop.joint.speed = self._speed
        return engine

    def _answer(self, engine: Engine, config: ReuseConfig) -> tuple[str, RequestStats]:
        generation = engine.stream(QUESTION, self._chunks, config=config, sampling=_SAMPLING)
        text = "".join(generation)
        if any(chunk.outcome == "trimmed" for chunk in generation.stats.chunks):
            raise ConfigError(
                f"{self._tokens} tokens do not fit the model's context of {self._decoder.context_length}"
            )
        return text, generation.stats


def _spent(
    ask: Callable[[], tuple[str, RequestStats]],
) -> tuple[tuple[str, RequestStats], float, float]:
    """What it returns, and the seconds and CPU seconds of this process that it took."""
    wall, cpu = time.perf_counter(), time.process_time()
    return ask(), time.perf_counter() - wall, time.process_time() - cpu


def draw_cake(cells: Sequence[CakeCell], path: Path) -> None:
    """Time to the first token over bandwidth, one panel per context and share of the compute (Cake, Fig. 5 and 6).

    The suffix of `path` decides the format. Raises ConfigError if matplotlib is missing or cannot write there.
    """
    contexts = sorted({cell.tokens for cell in cells})
    shares = sorted({cell.compute_share for cell in cells}, reverse=True)
    figure, axes = pyplot().subplots(
        len(shares),
        len(contexts),
        figsize=(3.4 * len(contexts), 2.8 * len(shares)),
        squeeze=False,
        sharex=True,
    )
    for row, share in enumerate(shares):
        for column, tokens in enumerate(contexts):
            chosen = [
                cell for cell in cells if (cell.tokens, cell.compute_share) == (tokens, share)
            ]
            _panel(axes[row][column], chosen)
            axes[row][column].set_title(f"{tokens} tokens, {share:.0%} of the compute", fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("bandwidth / rate of computing KV")
    for line in axes:
        line[0].set_ylabel("seconds to the first token")
    axes[0][0].legend(loc="upper right", fontsize=7, frameon=False)
    save(figure, path)


def _panel(axis: Any, cells: Sequence[CakeCell]) -> None:
    for codec in dict.fromkeys(cell.codec for cell in cells):
        chosen = sorted(
            (cell for cell in cells if cell.codec == codec), key=lambda cell: cell.bandwidth_ratio
        )
        where = [cell.bandwidth_ratio for cell in chosen]
        raw = codec == cells[0].codec
        for name, label, colour, line in _SERIES if raw else _SERIES[-1:]:
            values = [getattr(cell, name) for cell in chosen]
            shown = label if raw else f"{label}, {codec}"
            axis.plot(
                where,
                values,
                line,
                color=colour if raw else YELLOW,
                marker=".",
                label=shown,
                linewidth=1.3,
            )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    bandwidths = sorted({cell.bandwidth_ratio for cell in cells})
    axis.set_xticks(bandwidths, [f"{bandwidth:g}" for bandwidth in bandwidths])
    for ticks in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
        ticks(lambda seconds, _: f"{seconds:g}" if f"{seconds:e}"[0] in "125" else "")
    axis.grid(alpha=0.2, which="both")


def main(
    model: options.Model = "demo",
    dtype: options.Dtype = "auto",
    tokens: Annotated[
        str, typer.Option("--tokens", help="Contexts, comma-separated.")
    ] = "1024,2048,4096",
    bandwidths: Annotated[
        str,
        typer.Option(
            "--bandwidths", help="Multiples of the rate at which this machine computes KV bytes."
        ),
    ] = "0.25,0.5,1,2,4",
    shares: Annotated[
        str, typer.Option("--shares", help="Shares of the compute; the rest spins.")
    ] = "1,0.5",
    codecs: Annotated[str, typer.Option("--codecs", help="raw, int8, entropy.")] = "raw,int8",
    pairs: Pairs = 1,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the figure to this file.")
    ] = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Time to the first token by computing, by loading, and by both at once (Cake), at limited disk speeds.

    Takes about a quarter of an hour with the demo model and the default grid.
    """
    options.set_threads(threads)
    with progress_bar("Benchmark") as show:
        options.quiet_libraries()
        grid = Grid(
            tokens=[int(value) for value in numbers(tokens)],
            bandwidths=numbers(bandwidths),
            shares=numbers(shares),
            codecs=codecs.split(","),
            pairs=pairs,
        )
        cells = list(run(model, grid, dtype=dtype, progress=show))
    if plot is not None:
        draw_cake(cells, plot)
    if as_json:
        print_json({"cells": [asdict(cell) for cell in cells]})
        return
    table = Table(
        "tokens",
        "compute",
        "bandwidth",
        "codec",
        "computing",
        "loading",
        "overlapped",
        "/ better",
        "/ best split",
        "computed",
        "CPU / computing",
    )
    for cell in cells:
        table.add_row(
            str(cell.tokens),
            f"{cell.compute_share:g} (had {cell.share_had:.2f})",
            f"{cell.bandwidth_ratio:g}",
            cell.codec,
            f"{cell.compute_only_s:.2f} s",
            f"{cell.load_only_s:.2f} s",
            f"{cell.cake_s:.2f} s",
            _shown(cell.of_better),
            f"{cell.cake_s / cell.best_split_s:.2f}" + ("" if cell.exact else ", answer differs"),
            f"{cell.computed:.0%}",
            _shown(cell.cpu_ratio),
        )
    out.print(table)


def _shown(found: Interval) -> str:
    return f"{found.mean:.2f} [{found.low:.2f}, {found.high:.2f}]"
