"""`cachecraft bench serve`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from cachecraft_rag.checks import MOST
from cachecraft_rag.cli import options
from cachecraft_rag.cli.options import numbers, out, print_json, progress_bar

if TYPE_CHECKING:
    from cachecraft_rag.evaluation.latency.serve import ServeReport

_DecodeRows = Annotated[
    int, typer.Option("--decode-rows", min=1, help="Answers that a decode step computes together at most.")
]


def serve(
    model: options.Model = "demo",
    dtype: options.Dtype = "auto",
    requests: Annotated[int, typer.Option("--requests", min=4, help="Requests of each load.")] = 40,
    warmup: Annotated[int, typer.Option("--warmup", min=2, help="Requests before, one at a time.")] = 20,
    loads: Annotated[
        str, typer.Option("--loads", help="Requests per second, as shares of what prefix caching can answer.")
    ] = "0.5,1,2",
    qps: Annotated[str | None, typer.Option("--qps", help="Instead of --loads: requests per second.")] = None,
    ratios: Annotated[str, typer.Option("--ratios", help="Recompute ratios.")] = "0,0.15,0.3",
    chunks: Annotated[int, typer.Option("--chunks", min=2, help="Chunks in all.")] = 40,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", min=16, max=1 << 20, help="Length of each.")] = 200,
    top_k: options.TopK = 5,
    questions: Annotated[int, typer.Option("--questions", min=1, help="Questions, each with its chunks.")] = 100,
    zipf: Annotated[float, typer.Option("--zipf", min=0.0, help="Exponent of the questions' popularity.")] = 1.0,
    variation: Annotated[
        float, typer.Option("--variation", min=0.0, max=1.0, help="How often one of a question's chunks is another.")
    ] = 0.25,
    answer_tokens: Annotated[int, typer.Option("--answer-tokens", min=1, help="Longest answer.")] = 8,
    decode_rows: _DecodeRows = 8,
    new_variants: options.NewVariantsOption = "off",
    seed: Annotated[int, typer.Option("--seed", min=-MOST - 1, max=MOST, help="Seed of requests and arrivals.")] = 0,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the figure to this file.")] = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Throughput and time to the first token under load: prefix caching against reuse, on the same requests.

    Requests arrive at random times. With the demo model it takes about a quarter of an hour.
    """
    options.set_threads(threads)
    with progress_bar("Benchmark", remaining=True) as show:
        from cachecraft_rag.engine.new_variants import NewVariants
        from cachecraft_rag.evaluation.latency.serve import ServeSettings, run

        options.quiet_libraries()
        settings = ServeSettings(
            requests=requests,
            warmup=warmup,
            loads=tuple(numbers(loads)),
            qps=() if qps is None else tuple(numbers(qps)),
            ratios=tuple(numbers(ratios)),
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
    show_serve(report, plot, as_json=as_json)


def show_serve(report: ServeReport, plot: Path | None, *, as_json: bool) -> None:
    """Draw it where that is asked for, and print it."""
    if plot is not None:
        from cachecraft_rag.evaluation.latency.plots import draw_serve

        draw_serve(report, plot)
    if as_json:
        print_json(as_plain(report))
    else:
        print_serve(report)


def as_plain(report: ServeReport) -> dict[str, Any]:
    """For JSON: each load with its sides by name."""
    plain = asdict(report)
    loads = [{"qps": load["qps"], **load["sides"]} for load in plain.pop("loads")]
    return {"loads": loads, **plain}


def print_serve(report: ServeReport) -> None:
    """A line for each load and side, with ratios to prefix caching."""
    from cachecraft_rag.evaluation.latency.serve import PREFIX_CACHE

    table = Table(
        "requests/s", "side", "answered/s", "×", "TTFT p50", "p99", "×", "hits/request", "computed", "variants"
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
                f"{side.p99_ttft_s / base.p99_ttft_s:.2f}",
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
