"""Figures of benchmarks, drawn with matplotlib (the extra `bench`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cachecraft_rag.evaluation.latency.overlap import CakeCell
from cachecraft_rag.evaluation.latency.serve import PREFIX_CACHE, ServeReport
from cachecraft_rag.evaluation.plotting import BLACK, BLUE, GREEN, GREY, RED, VIOLET, YELLOW, pyplot, save

_SERIES = (  # field, label, colour, line
    ("compute_only_s", "computing only", GREY, "--"),
    ("load_only_s", "loading only", BLUE, "--"),
    ("best_split_s", "best split", BLACK, ":"),
    ("cake_s", "overlapped (Cake)", RED, "-"),
)


def draw_cake(cells: Sequence[CakeCell], path: Path) -> None:
    """Time to the first token over bandwidth, one panel per context and share of the compute (Cake, Fig. 5 and 6).

    The suffix of `path` decides the format. Raises ConfigError if matplotlib is missing or cannot write there.
    """
    contexts = sorted({cell.tokens for cell in cells})
    shares = sorted({cell.compute_share for cell in cells}, reverse=True)
    figure, axes = pyplot("bench").subplots(
        len(shares), len(contexts), figsize=(3.4 * len(contexts), 2.8 * len(shares)), squeeze=False, sharex=True
    )
    for row, share in enumerate(shares):
        for column, tokens in enumerate(contexts):
            chosen = [cell for cell in cells if (cell.tokens, cell.compute_share) == (tokens, share)]
            _panel(axes[row][column], chosen)
            axes[row][column].set_title(f"{tokens} tokens, {share:.0%} of the compute", fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("bandwidth / rate of computing KV")
    for line in axes:
        line[0].set_ylabel("seconds to the first token")
    axes[0][0].legend(fontsize=7, frameon=False)
    save(figure, path)


def _panel(axis: Any, cells: Sequence[CakeCell]) -> None:
    for codec in dict.fromkeys(cell.codec for cell in cells):
        chosen = sorted((cell for cell in cells if cell.codec == codec), key=lambda cell: cell.bandwidth_ratio)
        where = [cell.bandwidth_ratio for cell in chosen]
        raw = codec == cells[0].codec
        for name, label, colour, line in _SERIES if raw else _SERIES[-1:]:
            values = [getattr(cell, name) for cell in chosen]
            shown = label if raw else f"{label}, {codec}"
            axis.plot(where, values, line, color=colour if raw else YELLOW, marker=".", label=shown, linewidth=1.3)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    bandwidths = sorted({cell.bandwidth_ratio for cell in cells})
    axis.set_xticks(bandwidths, [f"{bandwidth:g}" for bandwidth in bandwidths])
    for ticks in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
        ticks(lambda seconds, _: f"{seconds:g}" if f"{seconds:e}"[0] in "125" else "")
    axis.grid(alpha=0.2, which="both")


def draw_serve(report: ServeReport, path: Path) -> None:
    """Throughput and time to the first token over the load, and hits over time at the highest one (Cache-Craft, Fig. 22
    to 25). Errors as `draw_cake`.
    """
    figure, axes = pyplot("bench").subplots(1, 4, figsize=(13.6, 2.8))
    rates = [load.qps for load in report.loads]
    reuse = [name for name in report.loads[0].sides if name != PREFIX_CACHE]
    colours = {PREFIX_CACHE: GREY} | dict(zip(reuse, (BLUE, RED, YELLOW, GREEN, VIOLET, BLACK), strict=False))
    for name in report.loads[0].sides:
        told, style = [load.sides[name] for load in report.loads], {"color": colours.get(name, BLACK), "marker": "."}
        axes[0].plot(rates, [side.throughput for side in told], label=name, **style)
        axes[1].plot(rates, [side.p50_ttft_s for side in told], **style)
        axes[2].plot(rates, [side.p99_ttft_s for side in told], **style)
        axes[3].plot(range(1, len(told[-1].hits) + 1), told[-1].hits, **style)
    titles = ("requests answered / s", "TTFT p50, s", "TTFT p99, s", "hits per request")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("requests arriving / s")
        axis.grid(alpha=0.2)
    axes[3].set_xlabel("quarter of the highest load")
    for axis in axes[1:3]:
        axis.set_yscale("log")
    axes[0].legend(fontsize=7, frameon=False)
    save(figure, path)
