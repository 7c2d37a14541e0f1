"""`cachecraft bench …`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from cachecraft_rag.checks import MOST, check_number
from cachecraft_rag.cli import options
from cachecraft_rag.cli.bench_serve import serve
from cachecraft_rag.cli.options import numbers, out, print_json, progress_bar, waiting
from cachecraft_rag.cli.stream import stream

if TYPE_CHECKING:
    from cachecraft_rag.compute.timing import Part
    from cachecraft_rag.evaluation.latency.ttft import TtftReport

_LEAST_S = 1e-3  # a part that takes less has no ratio worth reading

app = typer.Typer(help="Benchmarks on this machine.", no_args_is_help=True)
app.command()(stream)
app.command()(serve)


@app.command()
def ttft(
    model: options.Model = "demo",
    dtype: options.Dtype = "auto",
    chunks: Annotated[int, typer.Option("--chunks", min=2, help="Chunks in the prompt.")] = 5,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", min=16, max=1 << 20, help="Length of each.")] = 400,
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", help="Instead of --chunks: lengths of whole prompts, comma-separated."),
    ] = None,
    recompute_ratio: Annotated[
        float, typer.Option("--recompute-ratio", min=0.0, max=1.0, help="Recompute ratio.")
    ] = 0.15,
    pairs: Annotated[int, typer.Option("--pairs", min=1, help="Runs of each side, alternating.")] = 7,
    threads: options.Threads = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", min=-MOST - 1, max=MOST, help="Seed of torch; the prompt is always the same."),
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Show where the time goes, part by part.")] = False,
    as_json: options.Json = False,
) -> None:
    """Time to the first token: reuse against the model's own prefill, side by side.

    With --dtype auto both sides use the dtype in which the model's own prefill is fastest on this machine.
    """
    options.set_threads(threads)
    with progress_bar("Benchmark") as show:
        import torch

        from cachecraft_rag.evaluation.latency.ttft import Shape, run

        shapes = [Shape(chunks, chunk_tokens)]
        if tokens is not None:
            shapes = [Shape.of_prompt(int(length), longest=chunk_tokens) for length in numbers(tokens)]
        if seed is not None:
            torch.manual_seed(seed)
        options.quiet_libraries()
        reports = run(model, shapes, dtype=dtype, ratio=recompute_ratio, pairs=pairs, profile=profile, progress=show)
    if as_json:
        alone = asdict(reports[0]) if len(reports) == 1 else {}
        print_json(alone | {"lengths": [asdict(report) for report in reports]})
    else:
        for report in reports:
            print_ttft(report)


def print_ttft(report: TtftReport) -> None:
    """The times of all sides, and what was measured."""
    table = Table("side", "TTFT (median)", "ratio")
    rows = [
        ("model's own prefill", report.own_prefill_s, 1.0),
        ("reuse, from memory", report.host_s, report.ratio_host),
        ("reuse, from disk", report.disk_s, report.ratio_disk),
        ("reuse, early termination", report.early_termination_s, report.ratio_early_termination),
        ("everything recomputed", report.all_recomputed_s, report.ratio_all_recomputed),
    ]
    for name, seconds, ratio in rows:
        table.add_row(name, f"{seconds:.3f} s", f"{ratio:.3f}")
    out.print(table)
    out.print(
        f"{report.prompt_tokens} tokens, {report.chunks} chunks, r = {report.recompute_ratio}, rows computed "
        f"{report.token_ratio:.3f} of all; {report.model}, {report.dtype}, {report.threads} threads, "
        f"{report.pairs} pairs"
    )
    if report.parts is not None and report.parts_all_recomputed is not None:
        print_parts(report.parts, report.parts_all_recomputed)


def print_parts(reused: Mapping[Part, float], full: Mapping[Part, float]) -> None:
    """Where the time goes with reuse from memory, and when everything is computed."""
    table = Table("part", "reuse", "everything", "ratio")
    rows: list[tuple[str, float, float]] = [(part, seconds, full[part]) for part, seconds in reused.items()]
    for part, seconds, whole in [*rows, ("together", sum(reused.values()), sum(full.values()))]:
        ratio = f"{seconds / whole:.3f}" if whole > _LEAST_S else "–"
        table.add_row(part, f"{1000 * seconds:.1f} ms", f"{1000 * whole:.1f} ms", ratio)
    out.print(table)


@app.command()
def cake(
    model: options.Model = "demo",
    dtype: options.Dtype = "auto",
    tokens: Annotated[str, typer.Option("--tokens", help="Contexts, comma-separated.")] = "1024,2048,4096",
    bandwidths: Annotated[
        str, typer.Option("--bandwidths", help="Multiples of the rate at which this machine computes KV bytes.")
    ] = "0.25,0.5,1,2,4",
    shares: Annotated[str, typer.Option("--shares", help="Shares of the threads.")] = "1,0.5",
    codecs: Annotated[str, typer.Option("--codecs", help="raw, int8, entropy.")] = "raw,int8",
    pairs: Annotated[int, typer.Option("--pairs", min=1, help="Runs of each side, alternating.")] = 1,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the figure to this file.")] = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Time to the first token by computing, by loading, and by both at once (Cake), at limited disk speeds.

    Takes about a quarter of an hour with the demo model and the default grid.
    """
    options.set_threads(threads)
    with progress_bar("Benchmark") as show:
        from cachecraft_rag.evaluation.latency.overlap import Grid, run

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
        from cachecraft_rag.evaluation.latency.plots import draw_cake

        draw_cake(cells, plot)
    if as_json:
        print_json({"cells": [asdict(cell) for cell in cells]})
        return
    table = Table(
        "tokens", "compute", "bandwidth", "codec", "computing", "loading", "overlapped", "/ better", "/ best split"
    )
    for cell in cells:
        table.add_row(
            str(cell.tokens),
            f"{cell.compute_share:g}",
            f"{cell.bandwidth_ratio:g}",
            cell.codec,
            f"{cell.compute_only_s:.2f} s",
            f"{cell.load_only_s:.2f} s",
            f"{cell.cake_s:.2f} s",
            f"{cell.of_better:.2f} ({cell.of_better_lowest:.2f}–{cell.of_better_highest:.2f})",
            f"{cell.cake_s / cell.best_split_s:.2f}" + ("" if cell.exact else ", answer differs"),
        )
    out.print(table)


@app.command()
def load(
    model: options.Model = "demo",
    dtype: options.Dtype = "auto",
    chunks: Annotated[int, typer.Option("--chunks", min=2, help="Chunks in the prompt.")] = 8,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", min=16, max=1 << 20, help="Length of each.")] = 400,
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
    pairs: Annotated[int, typer.Option("--pairs", min=1, help="Runs of each side, alternating.")] = 7,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """How fast stored chunk-caches are read, compared with dd, and how much loading hides behind computing."""
    options.set_threads(threads)
    check_number("--mb-per-s", mb_per_s, optional=True)
    with progress_bar("Benchmark") as show:
        from cachecraft_rag.evaluation.latency.load import LoadSettings, run

        options.quiet_libraries()
        settings = LoadSettings(chunks=chunks, chunk_tokens=chunk_tokens, codec=codec, mb_per_s=mb_per_s, pairs=pairs)
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
    table.add_row("first token: load, then compute", f"{report.whole_s:.3f} s, {report.load_s:.3f} s of it loading")
    table.add_row("first token: layer by layer", f"{report.layerwise_s:.3f} s")
    table.add_row("first token: overlapped (Cake)", f"{report.cake_s:.3f} s")
    told = report.load_s > 0.03 * report.whole_s  # a shorter load is lost in the noise of computing
    table.add_row(
        "loading time hidden, of what can be hidden",
        f"{report.layerwise_hidden:.2f}" if told else "loading too short to tell",
    )
    out.print(table)


@app.command()
def scale(
    sizes: Annotated[
        str,
        typer.Option("--sizes", help="Numbers of chunks, comma-separated. A million take 8 GB of disk."),
    ] = "1000,10000,100000",
    queries: Annotated[int, typer.Option("--queries", min=1, help="At each size.")] = 50,
    top_k: options.TopK = 10,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Retrieval, look-up and planning as the number of chunks grows."""
    options.set_threads(threads)
    with progress_bar("Benchmark", remaining=True) as show:
        from cachecraft_rag.evaluation.latency.scale import run

        cells = list(run([int(size) for size in numbers(sizes)], queries=queries, k=top_k, progress=show))
    if as_json:
        print_json({"sizes": [asdict(cell) for cell in cells]})
        return
    table = Table("chunks", "retrieve", "all compared", "recall", "look up", "plan", "first search")
    for cell in cells:
        times = (cell.retrieve_ms, cell.exact_ms, cell.lookup_ms, cell.plan_ms)
        retrieve, exact, lookup, plan = (f"{value:.2f} ms" for value in times)
        table.add_row(
            f"{cell.chunks:,}", retrieve, exact, f"{cell.recall:.3f}", lookup, plan, f"{cell.first_search_s:.1f} s"
        )
    out.print(table)


@app.command()
def memory(
    model: options.Model = "demo",
    dtype: options.Dtype = "float32",
    tokens: Annotated[int, typer.Option("--tokens", min=64, help="Length of the prompt.")] = 2000,
    recompute_ratio: Annotated[
        float, typer.Option("--recompute-ratio", min=0.0, max=1.0, help="Recompute ratio.")
    ] = 0.15,
    loading: Annotated[
        Literal["layerwise", "cake", "whole"], typer.Option("--loading", help="Way of loading from the disk.")
    ] = "layerwise",
    as_json: options.Json = False,
) -> None:
    """Peak memory of a request, against the weights and the keys and values of its prompt. Linux only."""
    with waiting("Three processes load the model, one after the other"):
        from cachecraft_rag.evaluation.latency.memory import run
        from cachecraft_rag.evaluation.latency.ttft import Shape

        report = run(model, Shape.of_prompt(tokens), dtype=dtype, ratio=recompute_ratio, loading=loading)
    if as_json:
        print_json(asdict(report))
        return
    table = Table("what", "memory")
    rows = {
        "weights": report.weights_bytes,
        "keys and values of the prompt": report.merged_kv_bytes,
        "a request with reuse, from disk": report.request_bytes,
        "a request without reuse": report.full_bytes,
        "the whole process before": report.process_bytes,
    }
    for name, nbytes in rows.items():
        table.add_row(name, options.megabytes(nbytes))
    out.print(table)
    out.print(
        f"{report.peak_over_floor:.2f} × (weights + keys and values) with reuse, {report.full_over_floor:.2f} × "
        f"without; {report.prompt_tokens} tokens, {report.chunks} chunks; {report.model}, {report.dtype}"
    )
