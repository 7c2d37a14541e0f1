"""`python -m benchmarks queue-preloading`: what waiting requests gain by loading before their turn.

Bursts of requests arrive at once. Each burst is answered twice, with the same passages in the same order: once with
preloading for the whole queue, once with loading for the next request only. Nothing stays in memory between requests,
so all chunk-caches are read from the disk, at a limited rate. A long request that reuses nothing may arrive before the
burst, or the first requests of a burst may reuse nothing: while they are computed, the disk has time for those that
follow.
"""

from __future__ import annotations

import math
import random
import statistics
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from cachecraft_rag.cli import options
from cachecraft_rag.cli.options import print_json, print_table, progress_bar
from cachecraft_rag.engine.config import EngineTuning
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.evaluation.dataset import Dataset, handbook_dataset
from cachecraft_rag.evaluation.intervals import ratio_interval
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.model.self_check import load_checked
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.serving.generation import Generation
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.config import StoreTuning
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.types.progress import Progress

_PRELOAD_BYTES = 256 << 20
_SAMPLE_S = 0.005  # time between two looks at the bytes that are preloaded


@dataclass
class BurstTimes:
    """Times of the bursts of one kind, and the memory that they took ahead.

    median_ttft_s  for each burst the median time to the first token, in seconds
    most_bytes     most bytes that waiting requests had loaded or were loading
    """

    median_ttft_s: list[float] = field(default_factory=list)
    most_bytes: int = 0


@dataclass(frozen=True)
class PreloadingGain:
    """Result at one rate of the disk.

    mb_per_s       limit on the disk's rate in megabytes per second; None: no limit
    bursts         number of pairs of bursts
    median_ttft_s  mean over the bursts: (for the next request only, for the whole queue), in seconds
    ttft_ratio     the second divided by the first, and its 95 % interval over bursts
    most_bytes     most bytes that were loaded ahead, of the budget `EngineTuning.preload_bytes`
    """

    mb_per_s: float | None
    bursts: int
    median_ttft_s: tuple[float, float]
    ttft_ratio: tuple[float, float, float]
    most_bytes: int
    preload_bytes: int


def measure(
    decoder: Decoder,
    dataset: Dataset,
    folder: Path,
    *,
    mb_per_s: float | None,
    bursts: int,
    requests: int,
    passages: int,
    computed: int,
    ahead: int,
    progress: Callable[[Progress], None],
) -> PreloadingGain:
    """Answer bursts of requests with both kinds of loading, over the same primed chunk-caches.

    Args:
        computed: first requests of each burst that reuse nothing.
        ahead: passages of a request that arrives just before each burst, reuses nothing and is not counted; 0: no
            such request.
    """
    with (
        ChunkCacheStore.open(folder) as store,
        Engine(decoder, store, new_variants="off") as engine,
    ):
        primer = engine.primer()
        for chunks in dataset.documents:
            primer.prime(chunks)

    everything = [chunk for chunks in dataset.documents for chunk in chunks]
    times = {0: BurstTimes(), _PRELOAD_BYTES: BurstTimes()}
    rate = math.inf if mb_per_s is None else mb_per_s * 1e6
    dice = random.Random(0)
    with ChunkCacheStore.open(
        folder, host_bytes=0, tuning=StoreTuning(read_bytes_per_s=rate)
    ) as store:
        for number in range(bursts):
            burst = [dice.sample(everything, passages) for _ in range(requests)]
            before = dice.sample(everything, ahead)
            kinds = list(times) if number % 2 == 0 else list(times)[::-1]
            for preload_bytes in kinds:
                with Engine(
                    decoder,
                    store,
                    new_variants="off",
                    tuning=EngineTuning(preload_bytes=preload_bytes),
                    config=ReuseConfig.deterministic(),
                ) as engine:
                    _answer(engine, burst, times[preload_bytes], computed=computed, before=before)
            progress(Progress(number + 1, bursts, "Asking"))

    alone = times[0].median_ttft_s
    queue = times[_PRELOAD_BYTES].median_ttft_s
    ratio = ratio_interval(queue, alone)
    return PreloadingGain(
        mb_per_s=mb_per_s,
        bursts=bursts,
        median_ttft_s=(statistics.fmean(alone), statistics.fmean(queue)),
        ttft_ratio=(ratio.mean, ratio.low, ratio.high),
        most_bytes=times[_PRELOAD_BYTES].most_bytes,
        preload_bytes=_PRELOAD_BYTES,
    )


def _answer(
    engine: Engine,
    burst: Sequence[Sequence[Chunk]],
    times: BurstTimes,
    *,
    computed: int,
    before: Sequence[Chunk],
) -> None:
    """Answer all requests of a burst at once, and note the median time to the first token.

    Args:
        computed: first requests of the burst that reuse nothing.
        before: passages of a request that arrives first, reuses nothing and is not counted; empty: no such request.
    """
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_SAMPLE_S):
            times.most_bytes = max(times.most_bytes, engine.preloading_bytes)

    def ask(number: int, chunks: Sequence[Chunk], *, reuse: bool) -> Generation:
        return engine.stream(
            f"What do these pages say? ({number})",
            chunks,
            sampling=SamplingParams(max_new_tokens=1),
            config=None if reuse else ReuseConfig.full_prefill(),
        )

    watcher = threading.Thread(target=watch)
    watcher.start()
    # Asked in this thread, so that they wait in this order.
    first = [ask(-1, before, reuse=False)] if before else []
    answers = [ask(number, chunks, reuse=number >= computed) for number, chunks in enumerate(burst)]
    try:
        with ThreadPoolExecutor(len(first) + len(answers)) as threads:
            list(threads.map("".join, [*first, *answers]))
    finally:
        done.set()
        watcher.join()
    times.median_ttft_s.append(statistics.median(answer.stats.ttft_s for answer in answers))


def main(
    model: options.Model = "demo",
    dtype: Annotated[
        str, typer.Option(help="Number format of the model; auto is that of the checkpoint.")
    ] = "auto",
    mb_per_s: Annotated[
        list[float] | None, typer.Option(min=0.1, help="Limit on the disk's rate; repeat for more.")
    ] = None,
    bursts: Annotated[int, typer.Option(min=2, help="Pairs of bursts.")] = 20,
    requests: Annotated[int, typer.Option(min=2, help="Requests that arrive at once.")] = 8,
    passages: Annotated[int, typer.Option(min=1, help="Passages of each request.")] = 5,
    computed: Annotated[
        int, typer.Option(min=0, help="First requests of each burst that reuse nothing.")
    ] = 0,
    ahead: Annotated[
        int,
        typer.Option(
            min=0,
            help="Passages of a request that arrives before each burst, reuses nothing and is not counted.",
        ),
    ] = 0,
    as_json: options.Json = False,
) -> None:
    """Measure the time to the first token with and without preloading for the whole queue."""
    options.quiet_libraries()
    decoder = load_checked(model, dtype=dtype)
    dataset = handbook_dataset(passages=passages, limit=None, seed=0)
    gains = []
    for rate in (*(mb_per_s or (20.0, 50.0)), None):
        with (
            tempfile.TemporaryDirectory() as folder,
            progress_bar("Asking", remaining=True) as show,
        ):
            gain = measure(
                decoder,
                dataset,
                Path(folder),
                mb_per_s=rate,
                bursts=bursts,
                requests=requests,
                passages=passages,
                computed=computed,
                ahead=ahead,
                progress=show,
            )
        gains.append(gain)
    if as_json:
        print_json([asdict(gain) for gain in gains])
        return
    rows = []
    for gain in gains:
        ratio = gain.ttft_ratio
        rows.append(
            (
                "no limit" if gain.mb_per_s is None else f"{gain.mb_per_s:g} MB/s",
                f"{gain.median_ttft_s[0]:.2f} s",
                f"{gain.median_ttft_s[1]:.2f} s",
                f"{ratio[0]:.3f} [{ratio[1]:.3f}, {ratio[2]:.3f}]",
                f"{gain.most_bytes / 2**20:.0f} of {gain.preload_bytes >> 20} MiB",
            )
        )
    print_table(
        (
            f"disk, {bursts} pairs of {requests} requests",
            "next only",
            "whole queue",
            "ratio of means",
            "loaded ahead",
        ),
        rows,
        numbers=True,
    )
