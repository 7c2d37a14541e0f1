"""Requests that arrive at random at a server: other users' tokens, times to the first token, break-even hit rate.

Two kinds of requests are mixed: those with documents, a share of which is stored (the hit rate), and other users' plain
ones, whose tokens are timed while the prompts of the former are filled. For each hit rate the same requests are sent at
the same times (Poisson) with reuse, and with reuse off at the same server; once also to vLLM without this package.

    python -m benchmarks load --minutes 9 --json > load.json

starts `cachecraft serve demo` over vLLM (`--enforce-eager`, nothing made in idle time), and vLLM alone. A server that
runs is measured with `--server`. On a CPU the servers and this client share the cores.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from benchmarks import reserved_memory
from benchmarks.load_client import Load, Servers
from benchmarks.load_figures import Figures, Spread, break_even, ratio
from benchmarks.load_requests import REUSE, REUSE_OFF, VLLM_ALONE, Mix
from benchmarks.own_instruction import Server, running
from cachecraft_rag.checks import check_number, check_whole
from cachecraft_rag.cli import options
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.options import numbers, print_json, progress_bar, takes
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.intervals import Interval
from cachecraft_rag.types.progress import Progress

_SENDING = 0.8  # part of a run in which requests are sent; the rest is for the last answers
_LEAST = 8  # requests of a run


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast requests arrive, and how many.

    rates     hit rates, comma-separated
    load      requests a second, as a share of what the server answers one at a time with reuse off
    qps       requests a second of both kinds, in place of --load
    requests  requests of each run; as many as fit into --minutes without it
    minutes   time for everything; hit rates that would end later are left out
    """

    rates: str = "0,1,0.5,0.25,0.75"
    load: float = 0.8
    qps: float | None = None
    requests: int | None = None
    minutes: float = 6.0

    def __post_init__(self) -> None:
        """Check the ranges; raises ConfigError."""
        check_number("load", self.load)
        check_number("minutes", self.minutes)
        if self.requests is not None:
            check_whole("requests", self.requests, least=2)
        if not all(0.0 <= rate <= 1.0 for rate in self.hit_rates) or self.load == 0.0:
            raise ConfigError("hit rates must be from 0 to 1, and the load above 0")

    @property
    def hit_rates(self) -> tuple[float, ...]:
        """The hit rates, each once."""
        return tuple(dict.fromkeys(numbers(self.rates)))


@dataclass(frozen=True, slots=True)
class Run:
    """Figures of the sides at one hit rate; `ratio` is the mean TTFT with reuse as a share of that with reuse off."""

    hit_rate: float
    sides: Mapping[str, Figures]
    ratio: Interval


@dataclass(frozen=True, slots=True)
class Report:
    """All runs.

    qps         requests a second
    requests    requests of each run
    break_even  hit rate from which on reuse is not slower; infinite if it always is
    left_out    hit rates for which there was no time
    """

    model: str
    qps: float
    requests: int
    runs: tuple[Run, ...]
    break_even: Interval
    left_out: tuple[float, ...]


@dataclass
class Measurement:
    """One measurement of a server, until a deadline on `time.monotonic`."""

    servers: Servers
    mix: Mix
    rate: Rate
    deadline: float
    progress: Callable[[Progress], None]

    def report(self) -> Report:
        """Store the documents, find the rate of arrivals, and send the requests of all runs."""
        load = Load(self.servers, self.mix)
        self.progress(Progress(0, 1, "documents are stored"))
        load.store()
        self.progress(Progress(0, 1, "single requests"))
        qps = self.rate.qps or self.rate.load / load.lone_s()
        seconds = (self.deadline - time.monotonic()) / self._run_count
        count = self.rate.requests or max(_LEAST, int(_SENDING * qps * seconds))
        runs = self._runs(load, count, qps, seconds)
        runs.sort(key=lambda run: run.hit_rate)
        sides = {run.hit_rate: (run.sides[REUSE], run.sides[REUSE_OFF]) for run in runs}
        left_out = tuple(sorted(set(self.rate.hit_rates) - sides.keys()))
        model = self.servers.ours.model
        return Report(model, qps, count, tuple(runs), break_even(sides), left_out)

    @property
    def _run_count(self) -> int:
        return 2 * len(self.rate.hit_rates) + (self.servers.alone is not None)

    def _runs(self, load: Load, count: int, qps: float, seconds: float) -> list[Run]:
        """Send the requests of all hit rates; without `rate.requests` no pair begins that would end too late.

        Ctrl-C and SIGTERM end it: what was measured until then is returned.
        """
        runs: list[Run] = []
        done = itertools.count(1)

        def tick(what: str) -> None:
            self.progress(Progress(next(done), count * self._run_count, what))

        try:
            for hit_rate in self.rate.hit_rates:
                is_late = time.monotonic() > self.deadline - 2 * seconds
                if runs and self.rate.requests is None and is_late:
                    break
                sides = {
                    side: load.measured(
                        side, count, qps, hit_rate, partial(tick, f"{side}, hit rate {hit_rate:g}")
                    )
                    for side in self._order(len(runs))
                }
                runs.append(Run(hit_rate, sides, ratio(sides[REUSE], sides[REUSE_OFF])))
        except (KeyboardInterrupt, SystemExit):
            if not runs:
                raise
        return runs

    def _order(self, place: int) -> list[str]:
        """Return the sides of a hit rate; each goes first equally often, and vLLM alone is asked once."""
        order = [REUSE, REUSE_OFF] if place % 2 else [REUSE_OFF, REUSE]
        with_alone = self.servers.alone is not None and place == 0
        return [VLLM_ALONE, *order] if with_alone else order


@contextmanager
def started(model: str, length: int, dtype: str, *, alone: bool) -> Iterator[Servers]:
    """Start a server of `cachecraft serve` over vLLM with an empty store, and vLLM alone."""
    from cachecraft_rag.model.demo_model import demo_model_folder

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers end, too
    folder = str(demo_model_folder()) if model == "demo" else model
    shared = ["--max-model-len", str(length), "--dtype", dtype, "--port", "PORT"]
    logs = Path(tempfile.mkdtemp(prefix="benchmarks-load-"))
    print(f"logs of the servers: {logs}", file=sys.stderr)
    program = str(Path(sys.executable).with_name("cachecraft"))
    # what is made in idle time would run into the next side's
    idle = {"CACHECRAFT_NEW_VARIANTS": os.environ.get("CACHECRAFT_NEW_VARIANTS", "off")}
    with ExitStack() as opened:
        store = opened.enter_context(tempfile.TemporaryDirectory(prefix="cachecraft-bench-"))
        serve = [program, "serve", folder, "--backend", "vllm", "--store", store, *shared]
        ours = running([*serve, "--", "--enforce-eager"], logs / "ours.log", **idle)
        servers = Servers(opened.enter_context(ours))
        if alone:
            # the command `vllm` of its CPU build does not find its own package
            module = "vllm.entrypoints.openai.api_server"
            stock = [sys.executable, "-m", module, "--model", folder, *shared, "--enforce-eager"]
            plain = running(stock, logs / "alone.log", VLLM_PLUGINS="")
            servers = replace(servers, alone=opened.enter_context(plain))
        yield servers


@takes(mix=Mix, rate=Rate)
def main(
    server: Annotated[
        str | None,
        typer.Option("--server", help="Address of a running server; without it two are started."),
    ] = None,
    vllm_server: Annotated[
        str | None,
        typer.Option(
            "--vllm-server", help="With --server: address of a vLLM without this package."
        ),
    ] = None,
    alone: Annotated[
        bool, typer.Option("--alone/--no-alone", help="Also start vLLM without this package.")
    ] = True,
    model: options.Model = "demo",
    dtype: Annotated[str, typer.Option("--dtype", help="vLLM's dtype.")] = "auto",
    length: Annotated[
        int, typer.Option("--max-model-len", min=256, help="vLLM's longest prompt and answer.")
    ] = 4096,
    as_json: options.Json = False,
    *,
    mix: Mix,
    rate: Rate,
) -> None:
    """Other users' tokens, times to the first token, and the hit rate at which reuse breaks even, under load.

    Needs vLLM, unless --server names a server. Counts the memory that is reserved on a GPU, too.
    """
    if vllm_server is not None and server is None:
        raise ConfigError("--vllm-server is for a server that runs; name yours with --server")
    deadline = time.monotonic() + 60.0 * rate.minutes
    options.quiet_libraries()
    mix.stored()  # a mistake is reported before servers start
    with ExitStack() as opened:
        if server is None:
            servers = opened.enter_context(started(model, length, dtype, alone=alone))
        else:
            urls = [server, *([vllm_server] if vllm_server else [])]
            ours, *others = [opened.enter_context(closing(Server(url))) for url in urls]
            servers = Servers(ours, *others)
        show = opened.enter_context(progress_bar("Load", remaining=True))
        report = Measurement(servers, mix, rate, deadline, show).report()
    if as_json:
        settings = {"mix": asdict(mix), "settings": asdict(rate)}
        print_json(asdict(report) | settings | {"memory": reserved_memory.as_plain()})
        return
    print_report(report)
    reserved_memory.print_table()


def print_report(report: Report) -> None:
    """Print a line for each side of each run, then the break-even hit rate."""
    table = Table(
        "hit rate",
        "side",
        "found",
        "TTFT p50, p99",
        "mean ×",
        "others' TTFT p50, p99",
        "between their tokens p50, p99",
        "while filled p50, p99",
        "longest",
        "requests/s",
        "tokens/s",
    )
    for run in report.runs:
        for side, found in run.sides.items():
            with_reuse = side == REUSE
            interval = run.ratio
            table.add_row(
                f"{run.hit_rate:g}",
                side,
                f"{found.found_share:.2f}" if with_reuse else "",
                _seconds(found.ttft),
                f"{interval.mean:.2f} [{interval.low:.2f}, {interval.high:.2f}]"
                if with_reuse
                else "",
                _seconds(found.others_ttft),
                _milliseconds(found.between_tokens),
                _milliseconds(found.while_filled),
                f"{1e3 * found.longest_s:.0f} ms",
                f"{found.requests_per_s:.2f}",
                f"{found.tokens_per_s:.1f}",
            )
    out.print(table)
    even = report.break_even
    out.print(
        f"{report.model}, {report.requests} requests a run, {report.qps:.2f} a second. Reuse is not slower from a hit "
        f"rate of {_rate(even.mean)} on (95 %: {_rate(even.low)} to {_rate(even.high)})."
    )
    left = sum(run.sides[REUSE].left_to_vllm for run in report.runs)
    if left:
        out.print(f"{left} requests with documents were left to vLLM: their notes say why.")
    if report.left_out:
        left_out = ", ".join(f"{rate:g}" for rate in report.left_out)
        out.print(f"Hit rates {left_out} were not measured: raise --minutes, or let it end.")


def _seconds(spread: Spread) -> str:
    return f"{spread.p50:.2f}, {spread.p99:.2f} s"


def _milliseconds(spread: Spread) -> str:
    return f"{1e3 * spread.p50:.0f}, {1e3 * spread.p99:.0f} ms"


def _rate(rate: float) -> str:
    return "none" if math.isinf(rate) else f"{rate:.2f}"
