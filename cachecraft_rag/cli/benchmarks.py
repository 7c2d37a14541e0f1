"""`cachecraft bench …`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from cachecraft_rag.checks import MOST
from cachecraft_rag.cli import options
from cachecraft_rag.cli.options import numbers, out, print_json, progress_bar

if TYPE_CHECKING:
    from cachecraft_rag.compute.timing import Part
    from cachecraft_rag.evaluation.ttft import TtftReport

_LEAST_S = 1e-3  # a part that takes less has no ratio worth reading

app = typer.Typer(help="Benchmarks on this machine.", no_args_is_help=True)


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
    peers: Annotated[
        str | None,
        typer.Option("--peers", help="Other engines, prefilling in turn: openvino (pip install openvino-genai)."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Time to the first token: reuse against the model's own prefill, side by side.

    With --dtype auto both sides use the dtype in which the model's own prefill is fastest on this machine.
    """
    options.set_threads(threads)
    with progress_bar("Benchmark") as show:
        import torch

        from cachecraft_rag.evaluation.ttft import Shape, run

        shapes = [Shape(chunks, chunk_tokens)]
        if tokens is not None:
            shapes = [Shape.of_prompt(int(length), longest=chunk_tokens) for length in numbers(tokens)]
        if seed is not None:
            torch.manual_seed(seed)
        options.quiet_libraries()
        reports = run(
            model,
            shapes,
            dtype=dtype,
            ratio=recompute_ratio,
            pairs=pairs,
            profile=profile,
            peers=peers.split(",") if peers else (),
            progress=show,
        )
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
    rows += [
        (f"whole prefill by {name}", seconds, seconds / report.own_prefill_s) for name, seconds in report.peers.items()
    ]
    for name, seconds, ratio in rows:
        table.add_row(name, f"{seconds:.3f} s", f"{ratio:.3f}")
    out.print(table)
    out.print(
        f"{report.prompt_tokens} tokens, {report.chunks} chunks, r = {report.recompute_ratio}, rows computed "
        f"{report.token_ratio:.3f} of all; {report.model}, {report.dtype}, {report.threads} threads, "
        f"kernels: {report.kernels}, {report.pairs} pairs"
    )
    if report.decode_ms is not None:
        out.print(f"{report.decode_ms:.1f} ms for each further token, 64 tokens after {report.to_64_tokens_s:.2f} s")
    for name, step in report.peers_decode_ms.items():
        out.print(f"{name}: {step:.1f} ms and {report.peers_to_64_tokens_s[name]:.2f} s")
    if report.parts is not None and report.parts_all_recomputed is not None:
        print_parts(report.parts, report.parts_all_recomputed)


def print_parts(reused: Mapping[Part, float], full: Mapping[Part, float]) -> None:
    """Seconds of each part, with reuse from memory and with everything computed."""
    table = Table("part", "reuse", "everything", "ratio")
    rows: list[tuple[str, float, float]] = [(part, seconds, full[part]) for part, seconds in reused.items()]
    for part, seconds, whole in [*rows, ("together", sum(reused.values()), sum(full.values()))]:
        ratio = f"{seconds / whole:.3f}" if whole > _LEAST_S else "–"
        table.add_row(part, f"{1000 * seconds:.1f} ms", f"{1000 * whole:.1f} ms", ratio)
    out.print(table)
