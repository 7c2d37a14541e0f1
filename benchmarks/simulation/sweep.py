"""Many replays of one trace: policies and budgets side by side, and the answer to "how much do I need?"."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from benchmarks.simulation.replay import Outcome, Setting, replay
from benchmarks.simulation.trace import Trace
from cachecraft_rag.checks import check_choice, check_number
from cachecraft_rag.types.progress import Progress

ORACLE, OURS = "oracle", "saving"
_MANY = 100_000  # requests of all replays together: below that, starting processes takes longer


@dataclass(frozen=True, slots=True)
class Cell:
    """One replay. `budget` is the share of the working set that the disk holds: of one chunk-cache of every chunk."""

    policy: str
    budget: float
    max_variants: int
    variants_per_chunk: int
    disk_budget: int
    of_oracle: float
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Grid:
    """Replays to make: every policy at every budget; ours at the first budget with each N×M and each bound per chunk.

    policies    names; none means all. The oracle always runs
    host_share  of the disk's budget: memory
    """

    policies: Sequence[str] = ()
    budgets: Sequence[float] = (0.2, 0.05, 0.1, 0.4, 1.0)
    max_variants: Sequence[int] = ()
    variants_per_chunk: Sequence[int] = ()
    host_share: float = 0.25

    def __post_init__(self) -> None:
        """Check every field; raises ConfigError."""
        for budget in self.budgets:
            check_number("budget", budget, least=1e-6)
        check_number("host_share", self.host_share, most=1)


def run(
    trace: Trace,
    grid: Grid,
    base: Setting,
    *,
    progress: Callable[[Progress], None] | None = None,
    processes: int | None = None,
) -> Iterator[Cell]:
    """Replay the trace for each cell of the grid; the oracle first, which the others are compared with.

    `base` gives all that the grid does not. `processes` replay at once; None means one, or one per core for a large
    grid. Raises ConfigError.
    """
    planned = _settings(trace, grid, base)
    if processes is None:
        processes = _cores() if len(planned) * len(trace.requests) >= _MANY else 1
    best: dict[float, float] = {}
    outcomes = _outcomes(
        trace, [setting for _, setting in planned], progress or (lambda _: None), processes
    )
    for (budget, setting), outcome in zip(planned, outcomes, strict=True):
        if setting.policy == ORACLE:
            best[budget] = outcome.saved
        share = outcome.saved / best[budget] if best.get(budget) else 0.0
        limits = (setting.max_variants, setting.variants_per_chunk)
        yield Cell(setting.policy, budget, *limits, setting.disk_bytes, share, outcome)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _outcomes(
    trace: Trace, settings: Sequence[Setting], progress: Callable[[Progress], None], processes: int
) -> Iterator[Outcome]:
    """The outcome of each setting, in order; `progress` gets the number of requests of the replays done."""
    each, total = len(trace.requests), len(settings) * len(trace.requests)
    with ExitStack() as opened:
        replays: Iterator[Outcome] = map(partial(replay, trace), settings)
        if (workers := min(processes, len(settings))) > 1:
            # spawn: what other threads of this process hold, torch's among them, does not survive a fork
            pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
            opened.callback(pool.shutdown, cancel_futures=True)
            replays = pool.map(partial(replay, trace), settings)
        for place, setting in enumerate(settings):
            progress(Progress(place * each, total, setting.policy))
            yield next(replays)
        progress(Progress(total, total, ""))


def _settings(trace: Trace, grid: Grid, base: Setting) -> list[tuple[float, Setting]]:
    whole = sum(trace.tokens) * base.bytes_per_token
    for policy in grid.policies:
        check_choice("policy", policy, list(base.makers))
    policies = list(dict.fromkeys([ORACLE, *(grid.policies or base.makers)]))
    found = []
    for budget in dict.fromkeys(grid.budgets):
        disk = max(1, int(budget * whole))
        sized = replace(base, disk_bytes=disk, host_bytes=int(grid.host_share * disk))
        found += [(budget, replace(sized, policy=policy)) for policy in policies]
        if budget == grid.budgets[0]:
            ours = replace(sized, policy=OURS)
            found += [(budget, replace(ours, max_variants=limit)) for limit in grid.max_variants]
            found += [
                (budget, replace(ours, variants_per_chunk=limit))
                for limit in grid.variants_per_chunk
            ]
    return found


def needed(cells: Sequence[Cell], *, share: float = 0.85, policy: str = OURS) -> Cell | None:
    """The smallest budget swept that saves at least this share of the best saving of this policy at any budget."""
    own = list(of_policies(cells).get(policy, {}).values())
    best = max((cell.outcome.saved for cell in own), default=0.0)
    enough = [cell for cell in own if best > 0.0 and cell.outcome.saved >= share * best]
    return min(enough, key=lambda cell: cell.budget, default=None)


def of_policies(cells: Sequence[Cell]) -> dict[str, dict[float, Cell]]:
    """Policy → budget → cell, without those that differ in N×M or the bound per chunk."""
    found: dict[str, dict[float, Cell]] = {}
    for cell in cells:
        found.setdefault(cell.policy, {}).setdefault(cell.budget, cell)
    return found


def as_fields(cells: Sequence[Cell], requests: int) -> dict[str, Any]:
    """Fields that `--json` prints: policies → budget → `saved`, `of_oracle` and counts; `limits`: the sweep of N×M."""
    first = of_policies(cells)
    kept = {id(cell) for by_budget in first.values() for cell in by_budget.values()}
    policies: Mapping[str, Any] = {
        policy: {f"{budget:g}": _fields(cell) for budget, cell in by_budget.items()}
        for policy, by_budget in first.items()
    }
    limits = [{"policy": cell.policy, **_fields(cell)} for cell in cells if id(cell) not in kept]
    enough = needed(cells)
    return {
        "policies": policies,
        "limits": limits,
        "needed_for_0.85": None
        if enough is None
        else {"budget": enough.budget, "disk_bytes": enough.disk_budget},
        "requests": requests,
    }


def _fields(cell: Cell) -> dict[str, Any]:
    limits = {"max_variants": cell.max_variants, "variants_per_chunk": cell.variants_per_chunk}
    outcome = asdict(cell.outcome)
    spread = outcome.pop("variants_per_chunk")
    counts = {"chunks_by_variants": {str(number): chunks for number, chunks in spread.items()}}
    return {
        "saved": outcome.pop("saved"),
        "of_oracle": cell.of_oracle,
        **limits,
        **counts,
        **outcome,
    }
