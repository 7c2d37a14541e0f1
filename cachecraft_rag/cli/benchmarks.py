"""`cachecraft bench …`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from cachecraft_rag.cli import options
from cachecraft_rag.cli.options import out, print_json, waiting

app = typer.Typer(help="Measure on this machine.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keep `bench ttft` a subcommand while it is the only one."""


@app.command()
def ttft(
    model: options.Model = "demo",
    dtype: options.Dtype = "auto",
    chunks: Annotated[int, typer.Option("--chunks", min=2, help="Chunks in the prompt.")] = 5,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", min=16, help="Length of each.")] = 400,
    recompute_ratio: Annotated[float, typer.Option("--recompute-ratio", min=0.0, max=1.0, help="r.")] = 0.15,
    pairs: Annotated[int, typer.Option("--pairs", min=1, help="Runs of each side, in turn.")] = 7,
    threads: options.Threads = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of torch; the prompt is always the same.")] = None,
    as_json: options.Json = False,
) -> None:
    """Time to first token: reuse against the model's own prefill, side by side.

    With --dtype auto both sides run in the dtype in which the model's own prefill is fastest here.
    """
    options.set_threads(threads)
    with waiting("Benchmark") as say:
        import torch

        from cachecraft_rag.bench.ttft import run

        if seed is not None:
            torch.manual_seed(seed)
        options.quiet_libraries()
        report = run(
            model,
            dtype=dtype,
            chunks=chunks,
            chunk_tokens=chunk_tokens,
            ratio=recompute_ratio,
            pairs=pairs,
            progress=say,
        )
    if as_json:
        print_json(asdict(report))
        return
    table = Table("side", "TTFT (median)", "ratio")
    rows = [
        ("model's own prefill", report.own_prefill_s, 1.0),
        ("reuse, from memory", report.host_s, report.ratio_host),
        ("reuse, from disk", report.disk_s, report.ratio_disk),
        ("reuse, early termination", report.focus_s, report.ratio_focus),
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
