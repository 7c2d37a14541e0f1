"""Requests asked at once: seconds of prefill, in full and with reuse, and decoding (Cache-Craft Fig. 2, 23d and 28)."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from benchmarks.first_token import QUESTION, Shape, chunks_of
from benchmarks.shared_options import NEAREST_SHARE, NearestShare, Pairs
from cachecraft_rag.cli import options
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.options import numbers, print_json, progress_bar
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.evaluation.runner import open_engine
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.serving.priming import Primer
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.types.progress import Progress

_FULL = ReuseConfig(reuse=False, capture=False)
_RATIO = 0.15


@dataclass(frozen=True)
class Batch:
    """Seconds until the last of `size` requests has its first token, of each pair.

    decoded_per_s  tokens of all answers together, while all are being written; None where one ended too early
    """

    tokens: int
    size: int
    full_s: Sequence[float]
    reuse_s: Sequence[float]
    decoded_per_s: float | None


def ask(
    engine: Engine,
    chunks: Sequence[Chunk],
    size: int,
    *,
    config: ReuseConfig,
    answer_tokens: int = 1,
) -> tuple[float, float | None]:
    """Ask the same at once; returns the seconds to the last first token, and tokens per second while all decode."""
    sampling = SamplingParams(max_new_tokens=answer_tokens)

    def answer(_: int) -> list[float]:
        stream = engine.stream(QUESTION, chunks, sampling=sampling, config=config)
        # a token may be half a character, which is no text
        return [time.perf_counter() for _ in stream] or [time.perf_counter()]

    with ThreadPoolExecutor(size) as clients:
        started = time.perf_counter()
        pieces = list(clients.map(answer, range(size)))
    first, last = max(one[0] for one in pieces), min(one[-1] for one in pieces)
    between = sum(first < at <= last for one in pieces for at in one)
    return first - started, between / (last - first) if last > first else None


def measure(
    engine: Engine,
    lengths: Sequence[int],
    sizes: Sequence[int],
    *,
    pairs: int,
    answer_tokens: int,
    reuse: ReuseConfig,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Iterator[Batch]:
    """Measure each length and size. Raises ConfigError if a prompt does not fit the model or the sample text.

    Args:
        reuse: settings of the side with reuse.
    """
    for done, tokens in enumerate(lengths):
        shape = Shape.of_prompt(tokens)
        chunks = chunks_of(engine.decoder, count=shape.chunks, tokens=shape.chunk_tokens)
        Primer(engine, window=engine.decoder.context_length).prime(chunks)
        moved = [chunks[-1], *chunks[:-1]]
        ask(engine, moved, 1, config=reuse)
        for place, size in enumerate(sizes):
            progress(
                Progress(
                    done * len(sizes) + place,
                    len(lengths) * len(sizes),
                    f"{size} × {tokens} tokens",
                )
            )
            times = [
                [ask(engine, moved, size, config=side)[0] for side in (_FULL, reuse)]
                for _ in range(pairs)
            ]
            # After their own prefixes nothing is left to prefill, so all answers begin at about the same time.
            _, rate = ask(engine, chunks, size, config=reuse, answer_tokens=answer_tokens)
            yield Batch(tokens, size, *zip(*times, strict=True), rate)


def main(
    model: options.Model = "demo",
    dtype: options.Dtype = "auto",
    tokens: Annotated[str, typer.Option("--tokens", help="Lengths of prompts.")] = "500,1000,2000",
    sizes: Annotated[str, typer.Option("--sizes", help="Requests at once.")] = "1,2,4,8",
    pairs: Pairs = 3,
    answer_tokens: Annotated[
        int, typer.Option("--answer-tokens", min=2, help="To time decoding with.")
    ] = 48,
    nearest_share: NearestShare = NEAREST_SHARE,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Prefill of several requests asked at once, in full and with reuse (r = 0.15), and the speed of decoding them."""
    options.set_threads(threads)
    reuse = ReuseConfig(recompute_ratio=_RATIO, nearest_share=nearest_share, capture=False)
    lengths, many = ([int(value) for value in numbers(one)] for one in (tokens, sizes))
    with (
        progress_bar("Benchmark") as show,
        tempfile.TemporaryDirectory(prefix="cachecraft-bench-") as folder,
    ):
        options.quiet_libraries()
        with open_engine(model, Path(folder), dtype=dtype) as engine:
            found = list(
                measure(
                    engine,
                    lengths,
                    many,
                    pairs=pairs,
                    answer_tokens=answer_tokens,
                    reuse=reuse,
                    progress=show,
                )
            )
    if as_json:
        print_json([asdict(one) for one in found])
        return
    table = Table("tokens", "requests", "full prefill", "with reuse", "decoded tokens/s")
    for one in found:
        sides = [f"{statistics.median(times):.2f} s" for times in (one.full_s, one.reuse_s)]
        table.add_row(str(one.tokens), str(one.size), *sides, f"{one.decoded_per_s or 0:.0f}")
    out.print(table)
