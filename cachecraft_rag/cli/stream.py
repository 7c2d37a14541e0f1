"""`cachecraft bench stream`."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from cachecraft_rag.checks import MOST
from cachecraft_rag.cli import options
from cachecraft_rag.cli.options import out, print_json, progress_bar

if TYPE_CHECKING:
    from cachecraft_rag.evaluation.quality.stream import StreamReport


def stream(
    data: Annotated[
        Path | None,
        typer.Option("--data", help="More questions with passages: a SQuAD or XQuAD file, or another known form."),
    ] = None,
    model: options.Model = "demo",
    dtype: options.Dtype = "float32",
    requests: Annotated[int, typer.Option("--requests", min=1, help="Requests that are counted.")] = 200,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Requests before them.")] = 20,
    window: Annotated[int, typer.Option("--window", min=1, help="Requests in one line of the table.")] = 50,
    questions: Annotated[int, typer.Option("--questions", min=1, help="Questions drawn from --data.")] = 60,
    passages: Annotated[int, typer.Option("--passages", min=2, help="Chunks in each prompt.")] = 5,
    zipf: Annotated[float, typer.Option("--zipf", min=0.0, help="Exponent of the questions' popularity.")] = 1.0,
    answer_tokens: Annotated[int, typer.Option("--answer-tokens", min=1, help="Longest answer.")] = 8,
    new_variants: options.NewVariantsOption = "idle",
    share: options.NewVariantsShare = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=-MOST - 1, max=MOST, help="Seed of the stream.")] = 0,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """A stream of repeated questions: tokens recomputed, divergence from full prefill, and variants per chunk.

    Asks the sample handbook's questions, and those of --data. With the demo model it takes about half an hour on one
    thread, most of it for full prefill.
    """
    options.set_threads(threads)
    with progress_bar("Stream") as show, ExitStack() as opened:
        from cachecraft_rag.engine.new_variants import NewVariants
        from cachecraft_rag.evaluation.quality import stream as measured
        from cachecraft_rag.evaluation.quality.runner import open_engine

        options.quiet_libraries()
        settings = measured.StreamSettings(
            requests=requests, warmup=warmup, window=window, exponent=zipf, answer_tokens=answer_tokens, seed=seed
        )
        making = NewVariants(new_variants, share)  # type: ignore[arg-type]  # it checks the word
        asked = measured.questions_of(data, passages=passages, limit=questions, seed=seed)
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="cachecraft-bench-")))
        engine = opened.enter_context(open_engine(model, folder, dtype=dtype, new_variants=making))
        report = measured.run(engine, asked, settings, progress=show)
    if as_json:
        print_json(asdict(report) | {"ratio": report.ratio, "kl_ratio": report.kl_ratio})
        return
    print_stream(report)


def print_stream(report: StreamReport) -> None:
    """The windows, and the last compared with the first."""
    table = Table(
        "requests", "recomputed", "computed", "reused", "β′", "KL", "new variants", "idle tokens", "per chunk"
    )
    first = 1
    for window in report.windows:
        most = max(window.variants, default=0)
        table.add_row(
            f"{first}–{first + window.requests - 1}",
            f"{window.recomputed:,}",
            f"{window.computed:,}",
            f"{window.reused:,}",
            f"{window.overlap:.2f}",
            f"{window.kl:.4f}",
            f"{window.new_variants:,}",
            f"{window.idle_tokens:,}",
            f"{window.variants_per_chunk:.1f}, at most {most}",
        )
        first += window.requests
    out.print(table)
    ratio = "–" if report.ratio is None else f"{report.ratio:.2f}"
    kl = "–" if report.kl_ratio is None else f"{report.kl_ratio:.2f}"
    spread = ", ".join(f"{n}: {chunks}" for n, chunks in report.windows[-1].variants.items())
    out.print(f"Last / first: {ratio} of the tokens recomputed, {kl} of the KL. Chunks by number of variants: {spread}")
    out.print(f"{report.questions} questions; {report.model}, {report.dtype}")
