"""Time of a step while chunk-caches load beside it, against the same step alone (Cake Fig. 7).

A step computes one piece of the prompt's front. The request loads its other end from cold files at a limited rate, as
in `python -m benchmarks cake`; then the same pieces are computed again in a buffer of their own, with nothing to load.
Both times are compared piece by piece, and averaged over the pieces of a request.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from benchmarks.cake import Context
from cachecraft_rag.cli import options
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.options import print_json, progress_bar
from cachecraft_rag.compute.balance.speed import ComputeSpeed, PassKind
from cachecraft_rag.compute.kv_buffer import KVBuffer
from cachecraft_rag.compute.row_pass import RowPass, advance
from cachecraft_rag.evaluation.intervals import Interval, mean_interval
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.types.progress import Progress


class RecordingSpeed(ComputeSpeed):
    """The computing speed that requests measure; keeps the pieces that were measured.

    Attributes:
        pieces: positions and seconds of each piece.
    """

    def __init__(self, keys_per_row: float) -> None:
        super().__init__(keys_per_row)
        self._last: NDArray[np.int64] = np.empty(0, np.int64)
        self.pieces: list[tuple[NDArray[np.int64], float]] = []

    def rows(self, positions: Sequence[int] | NDArray[np.int64]) -> float:
        """See `ComputeSpeed.rows`."""
        self._last = np.asarray(positions, np.int64)
        return super().rows(positions)

    def measured(self, rows: float, seconds: float, *, kind: PassKind = "last") -> None:
        """See `ComputeSpeed.measured`, which is given what `rows` returned just before."""
        if kind == "piece":
            self.pieces.append((self._last, seconds))
        super().measured(rows, seconds, kind=kind)


@dataclass(frozen=True)
class StepTimes:
    """Times of steps while loading, divided by their times alone.

    tokens, bandwidth_ratio  of the requests, as in `cake.CakeCell`
    requests                 requests that computed a piece while loading
    steps                    steps that were compared
    ratio                    mean over the requests, and its 95 % interval; None without requests
    loaded                   share of the prompts that was loaded
    computed_mb_per_s        megabytes of KV cache that full prefill computes in a second (Cake Fig. 2)
    """

    tokens: int
    bandwidth_ratio: float
    requests: int
    steps: int
    ratio: Interval | None
    loaded: float | None
    computed_mb_per_s: float


@dataclass(frozen=True)
class ComparedRequest:
    """Seconds of the pieces of one request.

    beside  each piece while the request's other end loaded
    alone   the same pieces with nothing to load
    loaded  share of the prompt that was loaded
    """

    beside: Sequence[float]
    alone: Sequence[float]
    loaded: float


def step_times(
    compared: Sequence[ComparedRequest], *, tokens: int, bandwidth: float, rate: float
) -> StepTimes:
    """Return the times of all requests: a mean over the pieces of each, then over the requests.

    Args:
        compared: the requests that computed a piece while they loaded.
        rate: KV bytes per second that full prefill computes.
    """
    ratios = [
        statistics.mean(
            beside / alone for beside, alone in zip(request.beside, request.alone, strict=True)
        )
        for request in compared
    ]
    return StepTimes(
        tokens,
        bandwidth,
        len(compared),
        sum(len(request.beside) for request in compared),
        ratio=mean_interval(ratios) if ratios else None,
        loaded=statistics.mean(request.loaded for request in compared) if compared else None,
        computed_mb_per_s=rate / 1e6,
    )


@torch.inference_mode()
def alone_s(
    decoder: Decoder, ids: Sequence[int], pieces: Sequence[NDArray[np.int64]]
) -> list[float]:
    """Return the seconds of each piece, computed one after the other with nothing to load."""
    buffer = KVBuffer(decoder, len(ids))
    found = []
    for positions in pieces:
        started = time.perf_counter()
        run = RowPass(decoder, buffer, torch.tensor([ids[at] for at in positions]), positions)
        while run.layer < decoder.layout.layers:
            advance(decoder, [run])
        run.wait()
        found.append(time.perf_counter() - started)
    return found


def run(
    model: str,
    *,
    tokens: int,
    bandwidth: float,
    requests: int,
    dtype: str = "auto",
    progress: Callable[[Progress], None] = lambda _: None,
) -> StepTimes:
    """Measure the steps of some requests; those that compute no piece while they load are left out.

    Args:
        tokens: of all chunks of a request.
        bandwidth: of the disk, as a multiple of the rate at which this machine computes KV bytes.
    """
    decoder = Decoder.load(model, dtype=dtype)
    speed = RecordingSpeed(decoder.keys_per_row)
    compared: list[ComparedRequest] = []
    with tempfile.TemporaryDirectory(prefix="cachecraft-bench-") as folder:
        context = Context(decoder, Path(folder), tokens, speed=speed)
        rate = context.capture("raw")
        ids = context.token_ids()
        for done in range(requests):
            progress(Progress(done, requests, "requests"))
            speed.pieces.clear()
            _, stats = context.load("raw", bandwidth * rate, "cake")
            pieces = list(speed.pieces)
            if not pieces:
                continue
            compared.append(
                ComparedRequest(
                    beside=[seconds for _, seconds in pieces],
                    alone=alone_s(decoder, ids, [positions for positions, _ in pieces]),
                    loaded=1.0 - stats.tokens_computed / stats.tokens_prompt,
                )
            )
    return step_times(compared, tokens=tokens, bandwidth=bandwidth, rate=rate)


def main(
    model: options.Model = "demo",
    dtype: options.Dtype = "auto",
    tokens: Annotated[int, typer.Option("--tokens", min=512, help="Tokens of all chunks.")] = 2048,
    bandwidth: Annotated[
        float,
        typer.Option(
            "--bandwidth", help="Multiple of the rate at which this machine computes KV bytes."
        ),
    ] = 1.0,
    requests: Annotated[int, typer.Option("--requests", min=1, help="Requests to compare.")] = 20,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Times of the steps of a prefill while chunk-caches load, divided by those of the same steps alone."""
    options.set_threads(threads)
    options.quiet_libraries()
    with progress_bar("Steps") as show:
        found = run(
            model,
            tokens=tokens,
            bandwidth=bandwidth,
            requests=requests,
            dtype=dtype,
            progress=show,
        )
    report: dict[str, Any] = asdict(found)
    if as_json:
        print_json(report)
    else:
        out.print_json(json.dumps(report))
