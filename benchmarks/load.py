"""Requests that arrive at random at a server: other users' tokens, times to the first token, and where reuse breaks even.

Two kinds of requests are mixed: those with documents, a share of which is stored (the hit rate), and other users' plain
ones, whose tokens are timed while the prompts of the former are filled. For each hit rate the same requests are sent at
the same times (Poisson) with reuse, and with reuse off at the same server; once also to vLLM without this package.

    python -m benchmarks load --minutes 9 --json > load.json

starts `cachecraft serve demo` over vLLM (`--enforce-eager`, nothing made in idle time), and vLLM alone. A server that
runs is measured with `--server`. On a CPU the servers and this client share the cores.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.table import Table

from benchmarks import reserved_memory
from benchmarks.load_figures import Answered, Figures, Spread, break_even, figures, ratio
from benchmarks.load_requests import (
    REUSE,
    REUSE_OFF,
    VLLM_ALONE,
    Arrival,
    Mix,
    batches,
    body,
    drawn,
)
from benchmarks.own_instruction import Server, running
from cachecraft_rag.checks import check_number, check_whole
from cachecraft_rag.cli import options
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.options import numbers, print_json, progress_bar, takes
from cachecraft_rag.errors import ConfigError, ServerError
from cachecraft_rag.evaluation.intervals import Interval
from cachecraft_rag.types.progress import Progress

_STORED_S = 60.0  # longest wait for the documents that are stored before
_LONE = 3  # requests of each kind that are timed alone
_SENDING = 0.8  # part of a run in which requests are sent; the rest is for the last answers
_LEAST = 8  # requests of a run
_FOUND = ("exact", "reused")


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast requests arrive, and how many.

    rates     hit rates, comma-separated
    load      requests a second, as a share of what the server answers one at a time with reuse off
    qps       requests a second of both kinds, in place of --load
    requests  requests of each run; as many as fit into --minutes without it
    minutes   time for everything; hit rates that would begin later are left out
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


@dataclass(frozen=True, slots=True)
class Servers:
    """The server that is measured, and vLLM alone, if there is one."""

    ours: Server
    alone: Server | None

    def of(self, side: str) -> Server:
        """Return the server of a side."""
        return self.alone if side == VLLM_ALONE and self.alone else self.ours


async def _events(client: httpx.AsyncClient, asked: Mapping[str, Any]) -> AsyncIterator[Any]:
    """Yield the events of a streamed chat completion. Raises ServerError if the server refuses it or fails."""
    async with client.stream("POST", "/v1/chat/completions", json=asked) as reply:
        if reply.status_code != 200:
            text = (await reply.aread()).decode(errors="replace")
            raise ServerError(f"the server refused a request: {text[:500]}")
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise ServerError(f"a request failed, see the server's log: {event['error']}")
            yield event


async def _answer(
    client: httpx.AsyncClient, asked: Mapping[str, Any], arrival: Arrival, began: float
) -> Answered:
    """Send a request at its time, and read all of its answer."""
    await asyncio.sleep(max(0.0, began + arrival.at_s - time.perf_counter()))
    tokens_s: list[float] = []
    prompt_tokens, name = 0, ""
    async for event in _events(client, asked):
        now = time.perf_counter() - began
        for choice in event["choices"]:
            tokens_s += [now] * len(choice.get("token_ids") or ())
        prompt_tokens = (event.get("usage") or {}).get("prompt_tokens", prompt_tokens)
        name = event["id"]
    if not tokens_s:
        raise ServerError("an answer had no token; set --max-model-len higher, or send fewer words")
    return Answered(arrival.at_s, tuple(tokens_s), prompt_tokens, bool(arrival.documents), name)


async def _answers(
    url: str, asked: Sequence[tuple[Arrival, Mapping[str, Any]]], done: Callable[[], None]
) -> list[Answered]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        began = time.perf_counter()

        async def answer(arrival: Arrival, body_of_it: Mapping[str, Any]) -> Answered:
            answered = await _answer(client, body_of_it, arrival, began)
            done()
            return answered

        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(answer(*one)) for one in asked]
    return [task.result() for task in started]


class Load:
    """Sends requests to the servers."""

    def __init__(self, servers: Servers, mix: Mix) -> None:
        self._servers = servers
        self._mix = mix
        self._runs = 0
        # documents that are new to a server that other runs have asked, too
        self._new = secrets.token_hex(4)

    def send(
        self, side: str, arrivals: Sequence[Arrival], done: Callable[[], None] = lambda: None
    ) -> list[Answered]:
        """Send each request at its time; return all answers once the server is idle again."""
        server = self._servers.of(side)
        self._runs += 1
        salt = f"{self._new}-{self._runs}"
        asked = [(arrival, self._body(server, arrival, side, salt)) for arrival in arrivals]
        try:
            answered = asyncio.run(_answers(server.url, asked, done))
        except* (httpx.HTTPError, ServerError) as errors:
            first = errors.exceptions[0]
            raise ServerError(f"{server.url}: {first or type(first).__name__}") from first
        server.become_idle()
        return answered

    def _body(self, server: Server, arrival: Arrival, side: str, salt: str) -> dict[str, Any]:
        own: dict[str, Any] = {"model": server.model}
        if server.is_vllm:
            own["ignore_eos"] = True
        return own | body(arrival, side, self._mix, salt=salt)

    def store(self) -> None:
        """Ask about the documents that are to be stored. Raises ServerError if the server does not store them."""
        texts = self._mix.stored()
        for number, documents in enumerate(batches(texts, self._mix.chunks)):
            self.send(REUSE, [Arrival(0.0, f"What are the notes about? ({number})", documents)])
        deadline = time.monotonic() + _STORED_S
        while held := [text for text in texts if text not in self._held(texts)]:
            if time.monotonic() > deadline:
                raise ServerError(
                    f"the server has stored {len(texts) - len(held)} of {len(texts)} documents: its log and "
                    "cachecraft_captures_total in /metrics say why"
                )
            time.sleep(0.5)

    def _held(self, texts: Sequence[str]) -> set[str]:
        asked = {"documents": [{"text": text} for text in texts]}
        reply = httpx.post(f"{self._servers.ours.url}/v1/cachecraft/holds", json=asked, timeout=60)
        reply.raise_for_status()
        chunks = reply.json()["chunks"]
        return {text for text, chunk in zip(texts, chunks, strict=True) if chunk["tokens"]}

    def lone_s(self) -> float:
        """Return the mean seconds of a request that is alone, with reuse off."""
        share = self._mix.documents_share
        documents = tuple(self._mix.stored()[: self._mix.chunks])
        seconds = {}
        for kind in (documents, ()):
            times = []
            for number in range(_LONE + 1):
                arrival = Arrival(0.0, f"What is number {number} about?", kind)
                times.append(self.send(REUSE_OFF, [arrival])[0].tokens_s[-1])
            seconds[bool(kind)] = statistics.mean(times[1:])  # the first one warms up
        return share * seconds[True] + (1 - share) * seconds[False]

    def measured(
        self, side: str, count: int, qps: float, hit_rate: float, done: Callable[[], None]
    ) -> Figures:
        """Return the figures of one run."""
        new = f"{self._new}-{hit_rate:g}"
        arrivals = drawn(self._mix, count, qps, hit_rate, new=new)
        answered = self.send(side, arrivals, done)
        found, left = self._found(answered) if side == REUSE else (0.0, 0)
        return figures(answered, found_share=found, left_to_vllm=left)

    def _found(self, answered: Sequence[Answered]) -> tuple[float, int]:
        """Return the share of documents from chunk-caches, and the number of requests left to vLLM."""
        outcomes = []
        left = 0
        for answer in answered:
            if not answer.with_documents:
                continue
            url = f"{self._servers.ours.url}/v1/cachecraft/requests/{answer.request_id}"
            reply = httpx.get(url, timeout=60)
            reply.raise_for_status()
            chunks = reply.json()["stats"]["chunks"]
            outcomes += [chunk["outcome"] in _FOUND for chunk in chunks]
            left += any(chunk["reason_code"] == "left_to_server" for chunk in chunks)
        return sum(outcomes) / max(len(outcomes), 1), left


def measure(servers: Servers, mix: Mix, rate: Rate, progress: Callable[[Progress], None]) -> Report:
    """Store the documents, find the rate of arrivals, and send the requests of all runs."""
    deadline = time.monotonic() + 60.0 * rate.minutes
    load = Load(servers, mix)
    progress(Progress(0, 1, "documents are stored"))
    load.store()
    progress(Progress(0, 1, "single requests"))
    qps = rate.qps or rate.load / load.lone_s()
    sides = [REUSE, REUSE_OFF]
    count_runs = len(rate.hit_rates) * len(sides) + (servers.alone is not None)
    seconds = (deadline - time.monotonic()) / count_runs
    count = rate.requests or max(_LEAST, int(_SENDING * qps * seconds))
    total = count * count_runs
    done = 0

    def tick(what: str) -> None:
        nonlocal done
        done += 1
        progress(Progress(done, total, what))

    runs: list[Run] = []
    for place, hit_rate in enumerate(rate.hit_rates):
        if runs and rate.requests is None and time.monotonic() > deadline - len(sides) * seconds:
            break
        order = sides if place % 2 else sides[::-1]  # each goes first equally often
        if servers.alone is not None and not runs:
            order = [VLLM_ALONE, *order]
        found = {
            side: load.measured(
                side, count, qps, hit_rate, lambda s=side: tick(f"{s}, hit rate {hit_rate:g}")
            )
            for side in order
        }
        runs.append(Run(hit_rate, found, ratio(found[REUSE], found[REUSE_OFF])))
    runs.sort(key=lambda run: run.hit_rate)
    crossed = break_even({run.hit_rate: (run.sides[REUSE], run.sides[REUSE_OFF]) for run in runs})
    left_out = tuple(set(rate.hit_rates) - {run.hit_rate for run in runs})
    return Report(servers.ours.model, qps, count, tuple(runs), crossed, left_out)


@contextmanager
def started(model: str, length: int, dtype: str, *, alone: bool) -> Iterator[Servers]:
    """Start a server of `cachecraft serve` over vLLM with an empty store, and vLLM alone."""
    from cachecraft_rag.model.demo_model import demo_model_folder

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
        servers = Servers(opened.enter_context(ours), None)
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
    options.quiet_libraries()
    mix.stored()  # a mistake is reported before servers start
    with ExitStack() as opened:
        if server is None:
            servers = opened.enter_context(started(model, length, dtype, alone=alone))
        else:
            servers = Servers(Server(server), Server(vllm_server) if vllm_server else None)
        show = opened.enter_context(progress_bar("Load", remaining=True))
        report = measure(servers, mix, rate, show)
    if as_json:
        memory = [
            asdict(row) | {"lost_share": row.lost_share, "at_once": row.at_once}
            for row in reserved_memory.rows()
        ]
        print_json(
            asdict(report) | {"mix": asdict(mix), "settings": asdict(rate), "memory": memory}
        )
        return
    print_report(report)
    print_memory()


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
        out.print(
            f"No time for hit rates {', '.join(map(str, sorted(report.left_out)))}: raise --minutes."
        )


def print_memory() -> None:
    """Print what fillings reserve on GPUs."""
    table = Table(
        f"server, GPUs of {reserved_memory.GPU_BYTES // reserved_memory.GB} GB",
        "context",
        "reserved",
        "of vLLM's KV cache",
        "longest prompts at once, without and with it",
        "longest prompt that is filled",
    )
    for row in reserved_memory.rows():
        without, with_it = row.at_once
        table.add_row(
            row.server,
            f"{row.context:,}",
            f"{row.reserved / reserved_memory.GB:.1f} GB",
            f"{row.lost_share:.0%}",
            f"{without:.1f}, {with_it:.1f}",
            "any" if row.longest is None else f"{row.longest:,}",
        )
    out.print(table)


def _seconds(spread: Spread) -> str:
    return f"{spread.p50:.2f}, {spread.p99:.2f} s"


def _milliseconds(spread: Spread) -> str:
    return f"{1e3 * spread.p50:.0f}, {1e3 * spread.p99:.0f} ms"


def _rate(rate: float) -> str:
    return "none" if math.isinf(rate) else f"{rate:.2f}"
