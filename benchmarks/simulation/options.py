"""Options and output of replays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from benchmarks.simulation.policies import MAKERS, Maker
from benchmarks.simulation.trace import Trace
from cachecraft_rag.checks import check_whole
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.options import megabytes, numbers, print_json, print_table, progress_bar
from cachecraft_rag.errors import ConfigError

if TYPE_CHECKING:
    from benchmarks.simulation.sweep import Cell


@dataclass(frozen=True)
class ReplayOptions:
    """Options of a replay.

    budgets             disk budgets, comma-separated shares of the working set
    max_variants        most variants in all (N×M), comma-separated, each tried at the first budget
    variants_per_chunk  most variants of one chunk, likewise
    new_variants        capture what is computed; with "always" also what would have to be fixed
    bytes_per_token     bytes of a token in a chunk-cache; 46080 is the demo model's
    processes           processes that replay at the same time, one per core without it
    """

    budgets: str = "0.2,0.05,0.1,0.4,1"
    max_variants: str | None = None
    variants_per_chunk: str | None = None
    new_variants: Literal["computed", "always"] = "computed"
    bytes_per_token: int = 46_080
    processes: int | None = None

    def __post_init__(self) -> None:
        """Check the numbers; raises ConfigError."""
        check_whole("bytes_per_token", self.bytes_per_token, least=1)
        check_whole("processes", self.processes, least=1, optional=True)

    def run(
        self, trace: Trace, policies: Sequence[str] = (), *, makers: Mapping[str, Maker] = MAKERS
    ) -> list[Cell]:
        """Replay the trace at every budget; without names, by all policies."""
        from benchmarks.simulation import sweep
        from benchmarks.simulation.replay import Setting

        grid = sweep.Grid(
            policies=policies,
            budgets=numbers(self.budgets),
            max_variants=_whole("--max-variants", self.max_variants),
            variants_per_chunk=_whole("--variants-per-chunk", self.variants_per_chunk),
        )
        per_token = self.bytes_per_token
        base = Setting(
            sweep.OURS, 1, bytes_per_token=per_token, new_variants=self.new_variants, makers=makers
        )
        with progress_bar("Simulation", remaining=True) as show:
            return list(sweep.run(trace, grid, base, progress=show, processes=self.processes))


def show_cells(cells: list[Cell], requests: int, *, as_json: bool) -> None:
    """Print the replays of so many requests."""
    from benchmarks.simulation.sweep import as_fields, needed

    if as_json:
        print_json(as_fields(cells, requests))
        return
    rows = []
    for cell in cells:
        outcome, sizes = cell.outcome, cell.outcome.variants_per_chunk
        limits = (f"{cell.max_variants:,}", cell.variants_per_chunk, cell.policy)
        shares = (f"{outcome.saved:.1%}", f"{cell.of_oracle:.1%}")
        variants = f"{sum(n * chunks for n, chunks in sizes.items()):,}, at most {max(sizes, default=0)} of a chunk"
        counts = (
            f"{outcome.computed:,}",
            f"{outcome.recomputed:,}",
            variants,
            f"{outcome.evicted:,}",
        )
        rows.append((f"{cell.budget:g}", megabytes(cell.disk_budget), *limits, *shares, *counts))
    headings = ("budget", "disk", "N×M", "per chunk", "policy", "saved", "of the oracle")
    print_table((*headings, "computed", "fixed", "variants", "evicted"), rows)
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
