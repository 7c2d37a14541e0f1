"""`cachecraft simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from cachecraft_rag.checks import MOST
from cachecraft_rag.cli import options
from cachecraft_rag.cli.options import megabytes, numbers, out, print_json, progress_bar
from cachecraft_rag.errors import ConfigError

if TYPE_CHECKING:
    from cachecraft_rag.evaluation.simulation.sweep import Cell, Grid

_Drift = Annotated[
    float, typer.Option("--drift", min=0.0, max=1.0, help="Share of requests that bring a new question.")
]
_Processes = Annotated[
    int | None, typer.Option("--processes", min=1, help="To replay in, at the same time.", show_default="one per core")
]


def simulate(
    trace: Annotated[
        Path | None,
        typer.Argument(help='JSON lines with a list "chunks" each; without it, questions drawn by Zipf\'s law.'),
    ] = None,
    policies: Annotated[
        str | None, typer.Option("--policies", help="Comma-separated; the oracle always runs.", show_default="all")
    ] = None,
    budgets: Annotated[
        str, typer.Option("--budgets", help="Of the disk, in shares of the working set.")
    ] = "0.2,0.05,0.1,0.4,1",
    max_variants: Annotated[
        str | None, typer.Option("--max-variants", help="N×M to try, comma-separated, at the first budget.")
    ] = None,
    variants_per_chunk: Annotated[
        str | None, typer.Option("--variants-per-chunk", help="Most variants of one chunk, likewise.")
    ] = None,
    new_variants: Annotated[
        Literal["computed", "always"],
        typer.Option("--new-variants", help="Capture what is computed, or also what would have to be fixed."),
    ] = "computed",
    bytes_per_token: Annotated[
        int, typer.Option("--bytes-per-token", min=1, help="Of a chunk-cache.", show_default="46080, the demo model")
    ] = 46_080,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", min=2, help="Where the trace tells none.")] = 256,
    requests: Annotated[int, typer.Option("--requests", min=1, help="To draw, without a trace.")] = 10_000,
    questions: Annotated[int, typer.Option("--questions", min=1, help="In the drawn traffic at any time.")] = 5000,
    exponent: Annotated[float, typer.Option("--zipf", min=0.0, help="Exponent of Zipf's law.")] = 1.0,
    drift: _Drift = 0.05,
    seed: Annotated[int, typer.Option("--seed", min=0, max=MOST, help="Of the drawn traffic.")] = 0,
    processes: _Processes = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the figure to this file.")] = None,
    as_json: options.Json = False,
) -> None:
    """Replay traffic without a model: what each eviction policy and each budget would save.

    Look-ups, plans and evictions are the store's own. Attention is made up, so differences between policies and
    budgets mean more than the saving itself.
    """
    from cachecraft_rag.evaluation.simulation import sweep
    from cachecraft_rag.evaluation.simulation.replay import Setting
    from cachecraft_rag.evaluation.simulation.trace import Traffic, draw_trace, read_trace

    grid = _grid(policies, budgets, max_variants, variants_per_chunk)
    drawn = Traffic(requests, questions, exponent, drift, chunk_tokens=chunk_tokens, seed=seed)
    asked = draw_trace(drawn) if trace is None else read_trace(trace, chunk_tokens=chunk_tokens)
    base = Setting(sweep.OURS, disk_bytes=1, bytes_per_token=bytes_per_token, new_variants=new_variants)
    with progress_bar("Simulation", remaining=True) as show:
        cells = list(sweep.run(asked, grid, base, progress=show, processes=processes))
    if plot is not None:
        sweep.draw(cells, plot)
    if as_json:
        print_json(sweep.as_fields(cells, len(asked.requests)))
    else:
        _print(cells)


def _grid(policies: str | None, budgets: str, max_variants: str | None, variants_per_chunk: str | None) -> Grid:
    from cachecraft_rag.evaluation.simulation.sweep import Grid

    return Grid(
        policies=Grid().policies if policies is None else policies.split(","),
        budgets=numbers(budgets),
        max_variants=_whole("--max-variants", max_variants),
        variants_per_chunk=_whole("--variants-per-chunk", variants_per_chunk),
    )


def _print(cells: list[Cell]) -> None:
    from cachecraft_rag.evaluation.simulation.sweep import needed

    titles = ("budget", "disk", "N×M", "per chunk", "policy", "saved", "of the oracle")
    table = Table(*titles, "computed", "fixed", "variants", "evicted")
    for cell in cells:
        outcome = cell.outcome
        sizes = outcome.variants_per_chunk
        table.add_row(
            f"{cell.budget:g}",
            megabytes(cell.disk_budget),
            f"{cell.max_variants:,}",
            str(cell.variants_per_chunk),
            cell.policy,
            f"{outcome.saved:.1%}",
            f"{cell.of_oracle:.1%}",
            f"{outcome.computed:,}",
            f"{outcome.recomputed:,}",
            f"{sum(n * chunks for n, chunks in sizes.items()):,}, at most {max(sizes, default=0)} of a chunk",
            f"{outcome.evicted:,}",
        )
    out.print(table)
    if (enough := needed(cells)) is not None:
        out.print(
            f"For 85 % of the best saving on this traffic you need {megabytes(enough.disk_budget)}: {enough.budget:g} "
            "of the working set."
        )


def _whole(name: str, text: str | None) -> list[int]:
    found = [] if text is None else numbers(text)
    if any(value < 1 or value != int(value) for value in found):
        raise ConfigError(f"{name} needs whole numbers from 1 on, not {text!r}")
    return [int(value) for value in found]
