"""Figures of `python -m benchmarks eval`, drawn with matplotlib (the extra `bench`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.plotting import (
    BLACK,
    BLUE,
    BROWN,
    GREEN,
    GREY,
    PINK,
    RED,
    TEAL,
    VIOLET,
    YELLOW,
    pyplot,
    save,
)

if TYPE_CHECKING:
    from cachecraft_rag.evaluation.intervals import Interval
    from cachecraft_rag.evaluation.report import Report

_OURS = {"default": RED, "craft": BLUE, "random": GREY, "full_cache": BLACK}
_OTHERS = (YELLOW, GREEN, VIOLET, BROWN, TEAL, PINK)
_EXACT_KL = 1e-4  # below it a method counts as exact and is not drawn on a logarithmic axis
_METRICS = (("kl", "KL to full prefill (nats)"), ("rouge_l", "ROUGE-L to full prefill"))


@dataclass(frozen=True)
class Point:
    """One method at one ratio: its measures by name."""

    ratio: float | None
    values: Mapping[str, Any]


def draw_quality(report: Report, folder: Path) -> list[str]:
    """Write `quality.png` and `ttft.png` to the folder; returns their names. Raises ConfigError as `plotting` does."""
    lines: dict[str, list[Point]] = {}
    for label, (method, ratio) in report.ratios.items():
        values = {name: report.value(label, name) for name in ("kl", "rouge_l", "ttft_ratio")}
        lines.setdefault(method, []).append(Point(ratio, values))
    colours = _colours(lines)
    _draw_ratios(lines, colours, folder / "quality.png")
    _draw_ttft(lines, colours, folder / "ttft.png")
    return ["quality.png", "ttft.png"]


def _colours(lines: Mapping[str, Sequence[Point]]) -> dict[str, str]:
    """Methods with a ratio come first and get the most distinct colours: they are drawn as lines."""
    others = sorted(
        (name for name in lines if name not in _OURS), key=lambda name: lines[name][0].ratio is None
    )
    return _OURS | {name: _OTHERS[place % len(_OTHERS)] for place, name in enumerate(others)}


def _draw_ratios(
    lines: Mapping[str, Sequence[Point]], colours: Mapping[str, str], path: Path
) -> None:
    """One line per method over the recompute ratio, with its interval shaded; a method without a ratio is a level line.

    Exact methods are left out.
    """
    figure, axes = pyplot().subplots(1, 2, figsize=(9.6, 3.8), sharex=True)
    ratios = sorted({one.ratio for line in lines.values() for one in line if one.ratio is not None})
    for axis, (field, name) in zip(axes, _METRICS, strict=True):
        for method, line in lines.items():
            if line[0].ratio is not None:
                _line(axis, method, line, field, colours[method])
            elif line[0].values["kl"].mean > _EXACT_KL:
                level: Interval = line[0].values[field]
                axis.axhline(
                    level.mean, color=colours[method], linestyle=":", linewidth=1.2, label=method
                )
        _finish(axis, field, name, list(lines.values()))
        axis.set_xlabel("recompute ratio")
        axis.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios])
    _legend(axes[1])
    save(figure, path)


def _line(axis: Any, method: str, line: Sequence[Point], field: str, colour: str) -> None:
    shown = [one for one in line if field != "kl" or one.values["kl"].mean > _EXACT_KL]
    found: list[Interval] = [one.values[field] for one in shown]
    where = [one.ratio for one in shown]
    main = method == "default"
    axis.plot(
        where,
        [v.mean for v in found],
        color=colour,
        marker=".",
        label=method,
        linewidth=2.0 if main else 1.3,
        zorder=3 if main else 2,
    )
    axis.fill_between(
        where,
        [v.low for v in found],
        [v.high for v in found],
        color=colour,
        alpha=0.12,
        linewidth=0,
    )


def _draw_ttft(
    lines: Mapping[str, Sequence[Point]], colours: Mapping[str, str], path: Path
) -> None:
    """Quality over the time to the first token: one line per method, through its ratios."""
    figure, axes = pyplot().subplots(1, 2, figsize=(9.6, 3.8), sharex=True)
    for axis, (field, name) in zip(axes, _METRICS, strict=True):
        for method, line in lines.items():
            shown = [one for one in line if field != "kl" or one.values["kl"].mean > _EXACT_KL]
            found: list[Interval] = [one.values[field] for one in shown]
            axis.errorbar(
                [one.values["ttft_ratio"].mean for one in shown],
                [v.mean for v in found],
                yerr=[[v.mean - v.low for v in found], [v.high - v.mean for v in found]],
                fmt="-",
                color=colours[method],
                marker="." if line[0].ratio is not None else "D",
                markersize=6 if line[0].ratio is not None else 4,
                label=method,
                linewidth=1.3,
                elinewidth=0.6,
            )
        _finish(axis, field, name, list(lines.values()))
        axis.set_xlabel("time to the first token / full prefill's")
    _legend(axes[1])
    save(figure, path)


def _finish(axis: Any, field: str, name: str, lines: Sequence[Sequence[Point]]) -> None:
    axis.set_ylabel(name)
    axis.grid(alpha=0.2, which="both")
    if field == "kl" and any(one.values["kl"].mean > _EXACT_KL for line in lines for one in line):
        axis.set_yscale("log")


def _legend(axis: Any) -> None:
    if axis.get_legend_handles_labels()[0]:  # matplotlib warns about an empty legend
        axis.legend(loc="upper right", fontsize=7, frameon=False)
