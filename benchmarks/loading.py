"""Loading: the share of the disk's speed that reads reach, and of the loading time that layer-wise loading hides.

From memory and from disk, by a request that is first in line, or by one that loads during another one's prefill
(Cache-Craft Fig. 29).
"""

from __future__ import annotations

import math
import os
import re
import statistics
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, get_args

import torch
import typer
from rich.table import Table

from benchmarks.first_token import QUESTION, chunks_of, drop_page_cache
from benchmarks.shared_options import NEAREST_SHARE, NearestShare, Pairs
from cachecraft_rag.cli import options
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.options import print_json, progress_bar
from cachecraft_rag.compute.balance.speed import ComputeSpeed
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.observability.stats import RequestStats
from cachecraft_rag.planning.config import Loading, ReuseConfig, ReuseMethod
from cachecraft_rag.serving.priming import Primer
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.files.disk import DiskTier
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.types.progress import Progress
from cachecraft_rag.types.variants import LoadedVariant, Variant

_LOAD_SHARE = 0.4
_LOADINGS: tuple[Loading, ...] = get_args(Loading)
_AHEAD_S = 0.02  # that the other request begins before
_RATIO = 0.15  # recompute ratio of the moved chunks while their layers are being loaded


@dataclass(frozen=True)
class LoadReport:
    """Medians over the pairs, in seconds. Files are always read cold (page cache dropped).

    disk_fraction_of_raw  our bytes per second / those of dd on the same files with the same block size
    disk_mb_s, raw_mb_s   the two rates; ours ends with verified tensors in memory
    block_bytes           block size of both: one layer of one chunk
    layerwise_hidden      (whole_s - layerwise_s) / the most that can be hidden: the shorter of load_s and the time to
                          compute all layers but one
    whole_s               time to the first token if everything is loaded before computing starts
    layerwise_s           the same if each layer is loaded just before it is computed
    cake_s                the same with overlapped prefill, which may also compute stored chunks instead of loading them
    host_s                the same from memory
    queue_s               how long another request's prefill holds up the next three
    queued                by way of loading: the time from its turn to the first token
    load_s                the part of whole_s that waits for loading
    read_mb_s_limit       limit of reading during these times; None = no limit
    """

    disk_fraction_of_raw: float
    layerwise_hidden: float
    disk_mb_s: float
    raw_mb_s: float
    block_bytes: int
    files_mb: float
    whole_s: float
    layerwise_s: float
    cake_s: float
    host_s: float
    queue_s: float
    queued: dict[str, float]
    load_s: float
    pairs: int
    prompt_tokens: int
    read_mb_s_limit: float | None
    codec: str
    model: str
    dtype: str
    threads: int


@dataclass(frozen=True)
class LoadSettings:
    """`chunks` chunks of `chunk_tokens` tokens, stored with `codec`.

    mb_per_s  limit of reading for the times to the first token; infinite = no limit. None = loading takes 0.4 of the
              computing time, because a much shorter load would be lost in the noise of computing
    queue_chunks  chunks of the prompt that is computed before
    nearest_share see `ReuseConfig`; 0 never recomputes the last chunk in full
    """

    chunks: int = 8
    chunk_tokens: int = 400
    codec: str = "raw"
    mb_per_s: float | None = None
    pairs: int = 7
    queue_chunks: int = 1
    nearest_share: float = ReuseConfig().nearest_share


def run(
    model: str,
    settings: LoadSettings,
    *,
    dtype: str = "auto",
    progress: Callable[[Progress], None] = lambda _: None,
) -> LoadReport:
    """Measure. Raises ConfigError if the chunks do not fit the model or the sample text."""
    decoder = Decoder.load(model, dtype=dtype)
    with tempfile.TemporaryDirectory(prefix="cachecraft-bench-") as folder:
        bench = _Bench(decoder, Path(folder), settings)
        progress(Progress(0, settings.pairs, "reads"))
        ours, raw, block = bench.reads()
        limit = bench.limit()
        sides: dict[str, Callable[[], RequestStats]] = {
            name: partial(bench.ask, name, limit) for name in _LOADINGS
        }
        sides |= {
            f"{name} queued": partial(bench.ask, name, limit, queued=True) for name in _LOADINGS
        }
        sides["host"] = partial(bench.ask, "whole", from_memory=True)
        times: dict[str, list[RequestStats]] = {name: [] for name in sides}
        for pair in range(settings.pairs):
            progress(Progress(pair, settings.pairs, ""))
            turn = pair % len(sides)  # each goes first equally often
            for name in [*sides][turn:] + [*sides][:turn]:
                times[name].append(sides[name]())
    ttft = {
        name: statistics.median(one.ttft_s - one.queue_s for one in found)
        for name, found in times.items()
    }
    load_s = statistics.median(stats.load_s for stats in times["whole"])
    layers = decoder.layout.layers
    hideable = min(load_s, (ttft["whole"] - load_s) * (layers - 1) / layers)
    return LoadReport(
        disk_fraction_of_raw=ours / raw,
        layerwise_hidden=(ttft["whole"] - ttft["layerwise"]) / hideable,
        disk_mb_s=ours / 1e6,
        raw_mb_s=raw / 1e6,
        block_bytes=block,
        files_mb=bench.nbytes / 1e6,
        whole_s=ttft["whole"],
        layerwise_s=ttft["layerwise"],
        cake_s=ttft["cake"],
        host_s=ttft["host"],
        queue_s=statistics.median(
            one.queue_s for name in _LOADINGS for one in times[f"{name} queued"]
        ),
        queued={name: ttft[f"{name} queued"] for name in _LOADINGS},
        load_s=load_s,
        pairs=settings.pairs,
        prompt_tokens=times["whole"][0].tokens_prompt,
        read_mb_s_limit=limit / 1e6 if limit < math.inf else None,
        codec=settings.codec,
        model=decoder.name,
        dtype=decoder.layout.dtype,
        threads=torch.get_num_threads(),
    )


class _Bench:
    """Chunk-caches on disk, each captured after other neighbours than in the prompt."""

    def __init__(self, decoder: Decoder, folder: Path, settings: LoadSettings) -> None:
        self._decoder, self._folder, self._settings = decoder, folder, settings
        self._speed = ComputeSpeed(decoder.keys_per_row)  # shared by all engines of this benchmark
        self._chunks = chunks_of(decoder, count=settings.chunks, tokens=settings.chunk_tokens)
        with self._open() as store:
            engine = self._engine(store)
            with engine:
                Primer(engine, window=decoder.context_length).prime(
                    [*self._chunks[1:], self._chunks[0]]
                )
            store.flush()
            rows = store.rows(limit=10_000)
        self._variants: list[Variant] = [row.variant for row in rows]
        self._tier = DiskTier(folder / "caches" / "variants")
        self._paths = [
            self._tier.path(variant.variant_id, variant.created) for variant in self._variants
        ]
        self.nbytes = sum(path.stat().st_size for path in self._paths)
        for loading in _LOADINGS:
            self.ask(loading)

    def reads(self) -> tuple[float, float, int]:
        """Bytes per second of our reads and of dd, and their block size."""
        block = max(variant.nbytes for variant in self._variants) // self._decoder.layout.layers
        ours, raw = [], []
        for _ in range(2 * self._settings.pairs):
            ours.append(self._timed(self._read_ours))
            drop_page_cache(self._folder)
            raw.append(sum(_dd_seconds(path, block) for path in self._paths))
        return self.nbytes / statistics.median(ours), self.nbytes / statistics.median(raw), block

    def limit(self) -> float:
        """Limit of reading for the times to the first token, in bytes per second."""
        if self._settings.mb_per_s is not None:
            return self._settings.mb_per_s * 1e6
        stats = [self.ask("whole") for _ in range(3)]
        return self.nbytes / (
            _LOAD_SHARE * statistics.median(one.ttft_s - one.load_s for one in stats)
        )

    def ask(
        self,
        loading: Loading,
        bytes_per_s: float = math.inf,
        *,
        queued: bool = False,
        from_memory: bool = False,
    ) -> RequestStats:
        """Answer the question with cold chunk-caches, or with those that an answer before has read."""
        drop_page_cache(self._folder)
        config = ReuseConfig(
            recompute_ratio=_RATIO,
            nearest_share=self._settings.nearest_share,
            capture=False,
            method=ReuseMethod(loading=loading),
        )
        with self._open() as store, self._engine(store) as engine:
            engine.loop.joint.speed = self._speed
            store.throttle.bytes_per_s = bytes_per_s
            if from_memory:
                self._answer(engine, config)
            if not queued:
                return self._answer(engine, config)
            before = self._chunks[: self._settings.queue_chunks]
            with ThreadPoolExecutor(1) as other:
                other.submit(self._answer, engine, ReuseConfig(reuse=False, capture=False), before)
                time.sleep(_AHEAD_S)
                return self._answer(engine, config)

    def _answer(
        self, engine: Engine, config: ReuseConfig, chunks: Sequence[Chunk] | None = None
    ) -> RequestStats:
        sampling = SamplingParams(max_new_tokens=2)
        generation = engine.stream(
            QUESTION, chunks or self._chunks, config=config, sampling=sampling
        )
        deque(generation, maxlen=0)
        return generation.stats

    def _timed(self, read: Callable[[], None]) -> float:
        drop_page_cache(self._folder)
        started = time.perf_counter()
        read()
        return time.perf_counter() - started

    def _read_ours(self) -> None:
        for variant in self._variants:
            assert isinstance(self._tier.read(variant), LoadedVariant), "a file could not be read"

    def _open(self) -> ChunkCacheStore:
        return ChunkCacheStore.open(self._folder / "caches", codec=self._settings.codec)

    def _engine(self, store: ChunkCacheStore) -> Engine:
        return Engine(self._decoder, store, best_last=False, new_variants="off")


def _dd_seconds(path: Path, block: int) -> float:
    """Seconds as dd reports them, without the time to start it."""
    command = ["dd", f"if={path}", "of=/dev/null", f"bs={block}"]
    said = subprocess.run(
        command, check=True, capture_output=True, text=True, env={"LC_ALL": "C", "PATH": os.defpath}
    )
    found = re.search(r"copied, ([0-9.e-]+) s", said.stderr)
    assert found is not None, f"dd said: {said.stderr}"
    return float(found[1])


def main(
    model: options.Model = "demo",
    dtype: options.Dtype = "auto",
    chunks: Annotated[int, typer.Option("--chunks", min=2, help="Chunks in the prompt.")] = 8,
    chunk_tokens: Annotated[
        int, typer.Option("--chunk-tokens", min=16, max=1 << 20, help="Length of each.")
    ] = 400,
    codec: Annotated[str, typer.Option("--codec", help="raw, int8 or entropy.")] = "raw",
    mb_per_s: Annotated[
        float | None,
        typer.Option(
            "--mb-per-s",
            min=0.1,
            help="Limit of reading for the times to the first token; inf = no limit.",
            show_default="loading takes 0.4 of computing",
        ),
    ] = None,
    pairs: Pairs = 7,
    queue_chunks: Annotated[
        int,
        typer.Option("--queue-chunks", min=1, help="Chunks of a prompt that is computed before."),
    ] = 1,
    nearest_share: NearestShare = NEAREST_SHARE,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Read speed of stored chunk-caches against dd, and the loading time that computing hides."""
    options.set_threads(threads)
    with progress_bar("Benchmark") as show:
        options.quiet_libraries()
        settings = LoadSettings(
            chunks, chunk_tokens, codec, mb_per_s, pairs, queue_chunks, nearest_share
        )
        report = run(model, settings, dtype=dtype, progress=show)
    if as_json:
        print_json(asdict(report))
        return
    table = Table("what", "measured")
    table.add_row("our reads, verified", f"{report.disk_mb_s:,.0f} MB/s")
    table.add_row(f"dd, blocks of {report.block_bytes:,} bytes", f"{report.raw_mb_s:,.0f} MB/s")
    table.add_row("share of the disk's speed", f"{report.disk_fraction_of_raw:.2f}")
    limit = f"{report.read_mb_s_limit:,.0f} MB/s" if report.read_mb_s_limit is not None else "none"
    table.add_row("limit of reading for the rows below", limit)
    table.add_row(
        "first token: load, then compute",
        f"{report.whole_s:.3f} s, {report.load_s:.3f} s of it loading",
    )
    table.add_row("first token: layer by layer", f"{report.layerwise_s:.3f} s")
    table.add_row("first token: overlapped (Cake)", f"{report.cake_s:.3f} s")
    table.add_row("first token: from memory", f"{report.host_s:.3f} s")
    queued = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in report.queued.items())
    table.add_row(f"the same after {report.queue_s:.2f} s after another", queued)
    # a shorter load is lost in the noise of computing
    clear = report.load_s > 0.03 * report.whole_s
    table.add_row(
        "loading time hidden, of what can be hidden",
        f"{report.layerwise_hidden:.2f}" if clear else "loading too short to measure",
    )
    out.print(table)
