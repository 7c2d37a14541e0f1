"""`python -m benchmarks simulate`: replays of drawn or given traffic, the policies compared with ours, and a figure.

A policy that ranks variants by one number runs in the place of ours. S3-FIFO moves variants between queues instead, so
it frees the room itself.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.plotting import BLACK, BLUE, BROWN, RED, VIOLET, YELLOW, pyplot, save
from benchmarks.simulation import policies as package
from benchmarks.simulation.options import ReplayOptions, show_cells
from benchmarks.simulation.policies import Maker, Rival
from benchmarks.simulation.sweep import ORACLE, OURS, Cell, of_policies
from benchmarks.simulation.trace import Trace, read_trace
from benchmarks.traffic import Traffic, draw_trace
from cachecraft_rag.cli import options
from cachecraft_rag.cli.options import takes
from cachecraft_rag.store.eviction import VariantFacts

_COLOURS = {OURS: RED, ORACLE: BLACK, "f_r": YELLOW, "lru": BLUE, "s3-fifo": VIOLET}


class LRU(Rival):
    """The least recently used variant leaves."""

    name = "lru"

    def __init__(self) -> None:
        self._ticks = itertools.count(1)

    def score(self, standing: VariantFacts, clock: float) -> float:
        """See `Rival`."""
        return float(next(self._ticks))


class S3FIFO(Rival):
    """Two queues and a list of ghosts (Yang et al., SOSP 2023), by bytes; the small queue has a tenth of the budget."""

    name = "s3-fifo"

    def __init__(self, budget: int) -> None:
        self._small_budget = budget // 10
        self._small: deque[str] = deque()
        self._main: deque[str] = deque()
        self._small_bytes = 0
        self._held: dict[str, tuple[int, int, bool]] = {}  # chunk, bytes, True in the small queue
        self._uses: dict[str, int] = {}
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    def score(self, standing: VariantFacts, clock: float) -> float:
        """Count the use; the number decides nothing."""
        if standing.variant_id in self._uses:
            self._uses[standing.variant_id] = min(3, self._uses[standing.variant_id] + 1)
        return 0.0

    def victims(self, excess: int) -> list[str]:
        """See `Rival`."""
        gone: list[str] = []
        while excess > 0 and (self._small or self._main):
            small = bool(self._small) and (
                self._small_bytes >= self._small_budget or not self._main
            )
            variant_id = (self._small if small else self._main).popleft()
            chunk, nbytes, _ = self._held[variant_id]
            uses = self._uses[variant_id]
            if uses > (1 if small else 0):
                self._main.append(variant_id)
                self._uses[variant_id] = 0 if small else uses - 1
                self._held[variant_id] = (chunk, nbytes, False)
            else:
                gone.append(variant_id)
                excess -= nbytes
                del self._held[variant_id], self._uses[variant_id]
                if small:
                    self._ghosts[chunk] = None
            self._small_bytes -= nbytes if small else 0
        while len(self._ghosts) > len(self._held):
            self._ghosts.popitem(last=False)
        return gone

    def added(self, variant_id: str, chunk: int, nbytes: int) -> None:
        """See `Rival`."""
        known = chunk in self._ghosts
        self._ghosts.pop(chunk, None)
        (self._main if known else self._small).append(variant_id)
        self._small_bytes += 0 if known else nbytes
        self._held[variant_id] = (chunk, nbytes, not known)
        self._uses[variant_id] = 0

    def evicted(self, variant_id: str) -> None:
        """Take a variant out of its queue when it left for another reason, such as too many variants of its chunk."""
        if variant_id in self._held:
            _, nbytes, small = self._held.pop(variant_id)
            self._uses.pop(variant_id)
            (self._small if small else self._main).remove(variant_id)
            self._small_bytes -= nbytes if small else 0


def _lru(trace: Trace, disk_bytes: int) -> LRU:
    return LRU()


def _s3_fifo(trace: Trace, disk_bytes: int) -> S3FIFO:
    return S3FIFO(disk_bytes)


MAKERS: Mapping[str, Maker] = {**package.MAKERS, "lru": _lru, "s3-fifo": _s3_fifo}


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Saved tokens over the budget, a line per policy. Raises ConfigError if matplotlib is missing or cannot write."""
    figure, axis = pyplot().subplots(figsize=(5.6, 3.8))
    for policy, by_budget in of_policies(cells).items():
        points = sorted(by_budget.items())
        axis.plot(
            [budget for budget, _ in points],
            [100.0 * cell.outcome.saved for _, cell in points],
            marker="o",
            markersize=3,
            color=_COLOURS.get(policy, BROWN),
            linestyle="--" if policy == ORACLE else "-",
            label=policy,
        )
    axis.set_xscale("log")
    axis.set_xlabel("budget / working set")
    axis.set_ylabel("tokens saved, %")
    axis.legend(loc="upper right", fontsize=7, frameon=False)
    save(figure, path)


@takes(traffic=Traffic, replay=ReplayOptions)
def main(
    trace: Annotated[
        Path | None,
        typer.Argument(
            help='JSON lines with a list "chunks" each; without it, questions drawn by Zipf\'s law.'
        ),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option("--policies", help="Comma-separated, besides the oracle.", show_default="all"),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the figure to this file.")
    ] = None,
    as_json: options.Json = False,
    *,
    traffic: Traffic,
    replay: ReplayOptions,
) -> None:
    """Replay traffic without a model: what each eviction policy and each budget would save.

    A file of traffic has one request per line: {"chunks": ["id", …]}, with "tokens" (the length of each chunk) and
    "time" (a number to sort by) if you have them. To record your own traffic, give `cachecraft` the flag --log-json, as
    in `cachecraft --log-json serve`: the requests among the lines that it writes to stderr are read; leave out
    lines that are not JSON (`grep '"event": "request"'`). Plans and eviction rules
    are the store's own. Attention is made up, so differences between rules and budgets mean more than the saving
    itself.
    """
    asked = (
        draw_trace(traffic)
        if trace is None
        else read_trace(trace, chunk_tokens=traffic.chunk_tokens)
    )
    cells = replay.run(asked, policies.split(",") if policies else (), makers=MAKERS)
    if plot is not None:
        draw(cells, plot)
    show_cells(cells, len(asked.requests), as_json=as_json)
