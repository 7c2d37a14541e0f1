"""Early termination compared fairly: against a smaller recompute ratio of the same cost (Cache-Craft Algorithm 1).

Stopping early saves work, whichever tokens it stops at, so a comparison with none shows nothing. Here the KL with early
termination is compared with the KL at the smaller ratio that computes as many token-layers, question by question.
Neither side has drift correction, which a chunk would lose with its rows.

What the question attends to in each layer is recorded once, so every window and first layer follows from it, and only
what they decide differently is run. On the first questions all are tried; the best is tried again on the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks import formats
from benchmarks.evaluate import origin_named
from benchmarks.kept import Kept
from benchmarks.methods import ABLATIONS, CRAFT
from cachecraft_rag.cli import options
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.evaluation import evaluate
from cachecraft_rag.cli.options import numbers, print_json, progress_bar, takes, waiting
from cachecraft_rag.compute import overlapped
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.intervals import Interval, mean_interval, paired_interval
from cachecraft_rag.evaluation.measuring import Method, methods_named, reference_of
from cachecraft_rag.evaluation.metrics import divergence
from cachecraft_rag.evaluation.origins import OriginCondition, Origins
from cachecraft_rag.evaluation.runner import VARIANTS_PER_CHUNK
from cachecraft_rag.planning.early_termination import FocusMonitor
from cachecraft_rag.types import Progress

if TYPE_CHECKING:
    from cachecraft_rag.engine.engine import Engine
    from cachecraft_rag.evaluation.dataset import Dataset, EvaluationQuestion
    from cachecraft_rag.evaluation.measuring import Reference
    from cachecraft_rag.planning.config import ReuseConfig

METHODS: Mapping[str, Method] = {"craft": CRAFT, "no_drift": ABLATIONS["no_drift"]}
_STEPS = 20  # the smaller ratio is the nearest of so many parts of the whole
_LEAST_SAVED = 0.05  # what saves less in the mean is not worth having


@dataclass(frozen=True, slots=True)
class Cell:
    """w of Algorithm 1, and the first layer that counts, as a share of all layers: 0 as published."""

    window: int
    first: float

    def decide(self, asked: Sequence[Sequence[float]]) -> tuple[int, frozenset[int]] | None:
        """The layer that decides and the focused chunks, from `[layers, chunks]` of attention; None where none does."""
        if not asked:  # nothing is recomputed, so nothing was looked at
            return None
        first = round(self.first * len(asked))
        monitor = FocusMonitor(len(asked[0]), window=self.window)
        for layer, mass in enumerate(asked[first:], start=first):
            if monitor.observe(layer, mass):
                assert monitor.focused is not None
                return layer, monitor.focused
        return None


@dataclass(frozen=True, slots=True)
class Compared:
    """One cell under one method, over some questions.

    kl, flat_kl   with early termination, and without it at the smaller ratio of the same cost
    difference    kl - flat_kl, paired by question: above 0 it loses
    saved         share of the recomputed token-layers that it saves
    layers        deciding layer → number of questions; -1: none
    """

    questions: int
    kl: Interval
    flat_kl: Interval
    difference: Interval
    saved: float
    layers: dict[int, int]

    @property
    def wins(self) -> bool:
        """True if the whole interval lies below 0."""
        return self.difference.high < 0.0


# -- measuring --------------------------------------------------------------------------------------------------------


class _Scripted(FocusMonitor):
    """Records what it is shown, and decides as it was told: in this layer for these chunks, or never."""

    def __init__(self, decision: tuple[int, frozenset[int]] | None) -> None:
        super().__init__(0, window=1)
        self._decision = decision
        self.asked: list[list[float]] = []

    def observe(self, layer: int, mass: Sequence[float]) -> bool:
        self.asked.append([float(value) for value in mass])
        if self._decision is None or layer != self._decision[0]:
            return False
        self.layer, self.focused = self._decision
        return True


@contextmanager
def _deciding(monitor: FocusMonitor) -> Iterator[None]:
    """Let this monitor decide for the requests of this process."""
    before = overlapped.FocusMonitor
    overlapped.FocusMonitor = lambda *_, **__: monitor  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        overlapped.FocusMonitor = before  # type: ignore[misc]


@dataclass
class Measured:
    """One question under one method; each decision and each smaller ratio is run once.

    Attributes:
        asked: `[layers, chunks]`, attention from the question.
    """

    engine: Engine
    reference: Reference
    config: ReuseConfig
    ratio: float

    def __post_init__(self) -> None:
        recording = _Scripted(None)
        with _deciding(recording):
            self._kl, self._rows, self._recomputed = self._answer(
                replace(self.config, early_termination=True)
            )
        self.asked = recording.asked
        self._found: dict[tuple[int, frozenset[int]], tuple[float, float]] = {}
        self._flat = {_STEPS: self._kl}

    def trial(self, cell: Cell) -> dict[str, Any]:
        """Plain values: `kl`, `flat` and `saved` of this cell, and the deciding `layer`."""
        decision = cell.decide(self.asked)
        if decision is None:
            return {"kl": self._kl, "flat": self._kl, "saved": 0.0, "layer": -1}
        if decision not in self._found:
            with _deciding(_Scripted(decision)):
                kl, rows, _ = self._answer(replace(self.config, early_termination=True))
            saved = (self._rows - rows) / self._recomputed if self._recomputed else 0.0
            self._found[decision] = kl, saved
        kl, saved = self._found[decision]
        parts = round(_STEPS * (1.0 - saved))
        if parts not in self._flat:
            self._flat[parts], *_ = self._answer(
                replace(self.config, recompute_ratio=self.ratio * parts / _STEPS)
            )
        return {"kl": kl, "flat": self._flat[parts], "saved": saved, "layer": decision[0]}

    def _answer(self, config: ReuseConfig) -> tuple[float, float, int]:
        """KL to full prefill; rows computed, averaged over the layers; chunk tokens recomputed."""
        question, full = self.reference.question, self.reference.answer
        found = self.engine.score_answer(
            question.text,
            question.passages,
            target=full.tokens,
            max_new_tokens=self.reference.answer_tokens,
            config=config,
        )
        kl, _ = divergence(full.logits, found.logits)
        return (
            kl,
            found.stats.recompute_share * found.stats.tokens_prompt,
            found.stats.tokens_recomputed,
        )


@dataclass(frozen=True)
class Search:
    """What is tried.

    cells  on the first `tune` questions; then the best on the others
    ratio  recompute ratio without early termination
    """

    cells: Sequence[Cell]
    tune: int
    ratio: float = 0.15
    answer_tokens: int = 16


def compare(
    engine: Engine,
    dataset: Dataset,
    origins: Origins,
    search: Search,
    *,
    kept: Kept,
    methods: Mapping[str, Method] = METHODS,
    progress: Callable[[Progress], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Results of each method, as plain values.

    Args:
        engine: opened with `best_last=False`.
        origins: keeps the engine's store under an origin condition, see `origins.Origins`.
        kept: trials of an earlier run.
        progress: called before each question.
    """
    found: list[dict[str, Any]] = []
    for name, method in methods.items():
        config = method.config(search.ratio)
        trials: dict[Cell, list[dict[str, Any]]] = {cell: [] for cell in search.cells}
        chosen: Sequence[Cell] = search.cells
        tuned: dict[Cell, Compared] = {}
        for place, question in enumerate(dataset.questions):
            progress(Progress(place, len(dataset.questions), name))
            if place == search.tune:
                tuned = {cell: compared(found) for cell, found in trials.items() if found}
                chosen = best_of(tuned) or chosen
                trials = {cell: [] for cell in chosen}

            measure = partial(
                _trials, engine, origins, question, search, config=config, cells=chosen
            )
            key = f"{name} {question.question_id} {[(c.window, c.first) for c in chosen]}"
            for cell, trial in zip(chosen, kept.get(key, measure), strict=True):
                trials[cell].append(trial)
        for cell, tried in trials.items():
            if tried:
                result = compared(tried)
                row = {"method": name, **asdict(cell), **asdict(result), "wins": result.wins}
                found.append(row | {"tuned": asdict(tuned[cell]) if cell in tuned else None})
    return found


def _trials(
    engine: Engine,
    origins: Origins,
    question: EvaluationQuestion,
    search: Search,
    *,
    config: ReuseConfig,
    cells: Sequence[Cell],
) -> list[dict[str, Any]]:
    origins.before(question)
    reference = reference_of(engine, question, answer_tokens=search.answer_tokens)
    measured = Measured(engine, reference, config, search.ratio)
    return [measured.trial(cell) for cell in cells]


def compared(trials: Sequence[Mapping[str, Any]]) -> Compared:
    """The trials of one cell, one per question, taken together."""
    kl, flat = ([trial[part] for trial in trials] for part in ("kl", "flat"))
    return Compared(
        len(trials),
        mean_interval(kl),
        mean_interval(flat),
        paired_interval(kl, flat),
        sum(trial["saved"] for trial in trials) / len(trials),
        dict(sorted(Counter(trial["layer"] for trial in trials).items())),
    )


def best_of(tuned: Mapping[Cell, Compared]) -> list[Cell]:
    """The cell with the lowest mean difference, among those that save anything worth it; none if none does."""
    saving = [cell for cell, found in tuned.items() if found.saved >= _LEAST_SAVED]
    return sorted(saving, key=lambda cell: tuned[cell].difference.mean)[:1]


# -- the command ------------------------------------------------------------------------------------------------------

_OUT = Path("cachecraft-early-termination")
Ratio = Annotated[
    float,
    typer.Option(
        "--recompute-ratio", min=0.01, max=1.0, help="Recompute ratio without early termination."
    ),
]


@takes(questions=evaluate.Questions, defaults={"limit": 40})
def main(
    model: options.Model = "demo",
    recompute_ratio: Ratio = 0.15,
    methods: Annotated[str, typer.Option("--methods", help="craft, no_drift.")] = "craft,no_drift",
    window: Annotated[
        str, typer.Option("--window", help="w of Algorithm 1, comma-separated.")
    ] = "3,5,8,12",
    first_layer: Annotated[
        str,
        typer.Option("--first-layer", help="First layer that counts, as a share of all layers."),
    ] = "0,0.33,0.5",
    tune: Annotated[
        int | None,
        typer.Option(
            "--tune", min=0, help="Questions on which all is tried.", show_default="half of them"
        ),
    ] = None,
    origin: Annotated[
        str, typer.Option("--origin", help="What chunks are captured behind.")
    ] = "unrelated",
    dtype: options.Dtype = "float32",
    folder: Annotated[
        Path, typer.Option("--out", "-o", help="What is there is not measured again.")
    ] = _OUT,
    threads: options.Threads = None,
    as_json: options.Json = False,
    *,
    questions: evaluate.Questions,
) -> None:
    """Compare early termination with a smaller recompute ratio of the same cost.

    Tunes window and first layer on the first questions, and tries the best on the others. A stopped run resumes.
    """
    options.set_threads(threads)
    options.quiet_libraries()
    evaluate.require_packages()
    condition = _lasting(origin)
    cells = [
        Cell(int(width), first) for width, first in product(numbers(window), numbers(first_layer))
    ]
    search = Search(
        cells,
        questions.limit // 2 if tune is None else tune,
        recompute_ratio,
        questions.answer_tokens,
    )
    dataset = questions.load(formats.read)
    with ExitStack() as opened:
        with waiting("Loading the model"):
            from cachecraft_rag.engine.engine import Engine
            from cachecraft_rag.model.decoder import Decoder
            from cachecraft_rag.store import ChunkCacheStore

            decoder = Decoder.load(model, dtype=dtype)
        settings = {
            "fingerprint": decoder.fingerprint,
            "data": dataset.name,
            "limit": questions.limit,
        }
        settings |= {
            "passages": questions.passages,
            "answer": questions.answer_tokens,
            "seed": questions.seed,
        }
        settings |= {"origin": origin, "ratio": recompute_ratio}
        kept = Kept(folder / "trials.jsonl", settings)
        # The chunk-caches stay in the folder, for a run that resumes.
        store = opened.enter_context(
            ChunkCacheStore.open(folder / "caches", variants_per_chunk=VARIANTS_PER_CHUNK)
        )
        engine = opened.enter_context(Engine(decoder, store, best_last=False, new_variants="off"))
        origins = Origins(condition, engine, dataset, questions.seed, questions.answer_tokens)
        chosen = {
            one.name: one
            for one in methods_named([name.strip() for name in methods.split(",")], METHODS)
        }
        with progress_bar("Measuring", remaining=True) as show:
            found = compare(
                engine, dataset, origins, search, kept=kept, methods=chosen, progress=show
            )
    if as_json:
        print_json(
            {"questions": len(dataset.questions), "passages": questions.passages, "found": found}
        )
        return
    _print(found)


def _lasting(origin: str) -> OriginCondition:
    condition = origin_named(origin)
    if condition.is_stream:
        raise ConfigError(
            f"with the origin {origin}, chunk-caches change from question to question; choose unrelated, neighbours, "
            "alone or similar"
        )
    return condition


def _print(found: Sequence[Mapping[str, Any]]) -> None:
    table = Table(box=SIMPLE_HEAD)
    for heading in (
        "method",
        "w",
        "first",
        "questions",
        "saved",
        "KL",
        "at same cost",
        "difference (95 %)",
    ):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    table.add_column("verdict")
    table.add_column("deciding layers")
    for one in found:
        low, high = one["difference"]["low"], one["difference"]["high"]
        table.add_row(
            one["method"],
            str(one["window"]),
            f"{one['first']:g}",
            str(one["questions"]),
            f"{one['saved']:.0%}",
            f"{one['kl']['mean']:.4f}",
            f"{one['flat_kl']['mean']:.4f}",
            f"{one['difference']['mean']:+.4f} [{low:+.4f}, {high:+.4f}]",
            "wins" if one["wins"] else "loses" if low > 0 else "no difference shown",
            " ".join(f"{layer}:{count}" for layer, count in one["layers"].items()),
        )
    out.print(table)
