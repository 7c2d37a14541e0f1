"""Early termination (Cache-Craft Algorithm 1) against none, and against a smaller recompute ratio of the same cost.

The paper's claim is about no termination: much of the recomputation is saved at similar quality. Stopping early saves
work, whichever tokens it stops at, so it is also compared with the smaller ratio that computes as many token-layers.
Both comparisons are made question by question. No side has drift correction, which a chunk would lose with its rows.

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
from benchmarks.methods import CRAFT
from cachecraft_rag.cli import options
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.evaluation import evaluate
from cachecraft_rag.cli.options import numbers, print_json, progress_bar, takes, waiting
from cachecraft_rag.compute import overlapped
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.intervals import (
    Interval,
    mean_interval,
    paired_interval,
    ratio_interval,
)
from cachecraft_rag.evaluation.measuring import PLAIN, Method, methods_named, reference_of
from cachecraft_rag.evaluation.metrics import divergence, is_right, rouge_l
from cachecraft_rag.evaluation.origins import OriginCondition, Origins
from cachecraft_rag.evaluation.runner import VARIANTS_PER_CHUNK
from cachecraft_rag.planning.early_termination import FocusMonitor
from cachecraft_rag.types.progress import Progress

if TYPE_CHECKING:
    from cachecraft_rag.engine.engine import Engine
    from cachecraft_rag.evaluation.dataset import Dataset, EvaluationQuestion
    from cachecraft_rag.evaluation.measuring import Reference
    from cachecraft_rag.planning.config import ReuseConfig

# The default's selector, without what early termination would cut short and without chunks in full.
PROBE = Method(
    "probe",
    "this package",
    lambda ratio: replace(PLAIN.with_method(drift=0.0), recompute_ratio=ratio, nearest_share=0.0),
    takes_ratio=True,
)
METHODS: Mapping[str, Method] = {method.name: method for method in (CRAFT, PROBE)}
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

    kl, none_kl, flat_kl  with early termination, without it, and without it at the smaller ratio of the same cost
    loss                  kl - none_kl, paired by question: above 0 termination costs quality
    loss_ratio            kl / none_kl; None where none_kl is 0
    difference            kl - flat_kl, paired by question: above 0 the smaller ratio is better
    saved                 share of the recomputed token-layers that termination saves
    flat_saved            the same of the smaller ratio
    saved_of_all          share of all computed token-layers that termination saves, the question's included
    rouge_l               of the answers against full prefill's: none, early, flat
    rouge_loss            rouge_l early - none, paired by question: below 0 termination costs quality
    right                 number of answers that hold a gold answer: full, none, early, flat
    layers                deciding layer → number of questions; -1: none
    """

    questions: int
    kl: Interval
    none_kl: Interval
    flat_kl: Interval
    loss: Interval
    loss_ratio: Interval | None
    difference: Interval
    saved: float
    flat_saved: float
    saved_of_all: float
    rouge_l: dict[str, float]
    rouge_loss: Interval
    right: dict[str, int]
    layers: dict[int, int]

    @property
    def wins(self) -> bool:
        """True if the whole interval lies below 0."""
        return self.difference.high < 0.0


# -- measuring --------------------------------------------------------------------------------------------------------


class _Scripted(FocusMonitor):
    """Records what it is shown, and decides as set: in this layer for these chunks, or never."""

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


@dataclass(frozen=True, slots=True)
class Scored:
    """One answer.

    kl     divergence from full prefill
    rows   computed rows, averaged over the layers
    """

    kl: float
    rows: float
    recomputed: int
    rouge_l: float
    right: bool

    def quality(self) -> dict[str, Any]:
        """Return the plain values that a trial keeps."""
        return {"kl": self.kl, "rouge_l": self.rouge_l, "right": self.right}


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
            self._none = self._answer(self.config.with_method(early_termination="published"))
        self.asked = recording.asked
        self._early: dict[tuple[int, frozenset[int]], Scored] = {}
        self._flat = {_STEPS: self._none}

    def trial(self, cell: Cell) -> dict[str, Any]:
        """Return plain values: quality of `none`, `early` and `flat`, what they save, and the deciding `layer`."""
        decision = cell.decide(self.asked)
        early = self._none if decision is None else self._terminated(decision)
        parts = round(_STEPS * (1.0 - self._saved(early)))
        if parts not in self._flat:
            self._flat[parts] = self._answer(
                replace(self.config, recompute_ratio=self.ratio * parts / _STEPS)
            )
        flat = self._flat[parts]
        return {
            "none": self._none.quality(),
            "early": early.quality(),
            "flat": flat.quality(),
            "saved": self._saved(early),
            "flat_saved": self._saved(flat),
            "saved_of_all": 1.0 - early.rows / self._none.rows,
            "layer": -1 if decision is None else decision[0],
            "full_right": self._is_right(self.reference.answer.text),
        }

    def _saved(self, scored: Scored) -> float:
        recomputed = self._none.recomputed
        return (self._none.rows - scored.rows) / recomputed if recomputed else 0.0

    def _terminated(self, decision: tuple[int, frozenset[int]]) -> Scored:
        if decision not in self._early:
            with _deciding(_Scripted(decision)):
                self._early[decision] = self._answer(
                    self.config.with_method(early_termination="published")
                )
        return self._early[decision]

    def _is_right(self, text: str) -> bool:
        golds = self.reference.question.answers
        return bool(golds) and is_right(text, golds)

    def _answer(self, config: ReuseConfig) -> Scored:
        question, full = self.reference.question, self.reference.answer
        found = self.engine.score_answer(
            question.text,
            question.passages,
            target=full.tokens,
            max_new_tokens=self.reference.answer_tokens,
            config=config,
        )
        kl, _ = divergence(full.logits, found.logits)
        return Scored(
            kl,
            found.stats.recompute_share * found.stats.tokens_prompt,
            found.stats.tokens_recomputed,
            rouge_l(full.text, found.text),
            self._is_right(found.text),
        )


@dataclass(frozen=True)
class Search:
    """What is tried.

    cells   on the first `tune` questions; then the best on the others
    ratios  recompute ratios without early termination
    """

    cells: Sequence[Cell]
    tune: int
    ratios: Sequence[float] = (0.15,)
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
    """Results of each method at each ratio, as plain values.

    Args:
        engine: opened with `best_last=False`.
        origins: keeps the engine's store under an origin condition, see `origins.Origins`.
        kept: trials of an earlier run.
        progress: called before each question.
    """
    found: list[dict[str, Any]] = []
    references: dict[str, Reference] = {}  # one serves all ratios and methods
    for (name, method), ratio in product(methods.items(), search.ratios):
        config = method.config(ratio)
        trials: dict[Cell, list[dict[str, Any]]] = {cell: [] for cell in search.cells}
        chosen: Sequence[Cell] = search.cells
        tuned: dict[Cell, Compared] = {}
        for place, question in enumerate(dataset.questions):
            progress(Progress(place, len(dataset.questions), f"{name}@{ratio:g}"))
            if place == search.tune:
                tuned = {cell: compared(found) for cell, found in trials.items() if found}
                chosen = best_of(tuned) or chosen
                trials = {cell: [] for cell in chosen}

            measure = partial(
                _trials,
                engine,
                origins,
                question,
                references,
                answer_tokens=search.answer_tokens,
                config=config,
                ratio=ratio,
                cells=chosen,
            )
            key = f"{name}@{ratio:g} {question.question_id} {[(c.window, c.first) for c in chosen]}"
            for cell, trial in zip(chosen, kept.get(key, measure), strict=True):
                trials[cell].append(trial)
        for cell, tried in trials.items():
            if tried:
                result = compared(tried)
                row = {"method": name, "ratio": ratio, **asdict(cell), **asdict(result)}
                row |= {
                    "wins": result.wins,
                    "tuned": asdict(tuned[cell]) if cell in tuned else None,
                }
                found.append(row)
    return found


def _trials(
    engine: Engine,
    origins: Origins,
    question: EvaluationQuestion,
    references: dict[str, Reference],
    *,
    answer_tokens: int,
    config: ReuseConfig,
    ratio: float,
    cells: Sequence[Cell],
) -> list[dict[str, Any]]:
    origins.before(question)
    reference = references.get(question.question_id)
    if reference is None:
        reference = reference_of(engine, question, answer_tokens=answer_tokens)
        references[question.question_id] = reference
    measured = Measured(engine, reference, config, ratio)
    return [measured.trial(cell) for cell in cells]


def compared(trials: Sequence[Mapping[str, Any]]) -> Compared:
    """Return the trials of one cell, one per question, taken together."""
    kl, none, flat = ([trial[side]["kl"] for trial in trials] for side in ("early", "none", "flat"))
    mean = {
        name: sum(trial[name] for trial in trials) / len(trials)
        for name in ("saved", "flat_saved", "saved_of_all")
    }
    sides = ("none", "early", "flat")
    right = {side: sum(trial[side]["right"] for trial in trials) for side in sides}
    return Compared(
        len(trials),
        mean_interval(kl),
        mean_interval(none),
        mean_interval(flat),
        paired_interval(kl, none),
        ratio_interval(kl, none) if any(none) else None,
        paired_interval(kl, flat),
        **mean,
        rouge_l={
            side: sum(trial[side]["rouge_l"] for trial in trials) / len(trials) for side in sides
        },
        rouge_loss=paired_interval(
            *([trial[side]["rouge_l"] for trial in trials] for side in ("early", "none"))
        ),
        right={"full": sum(trial["full_right"] for trial in trials)} | right,
        layers=dict(sorted(Counter(trial["layer"] for trial in trials).items())),
    )


def best_of(tuned: Mapping[Cell, Compared]) -> list[Cell]:
    """The cell with the lowest mean difference, among those that save anything worth it; none if none does."""
    saving = [cell for cell, found in tuned.items() if found.saved >= _LEAST_SAVED]
    return sorted(saving, key=lambda cell: tuned[cell].difference.mean)[:1]


# -- the command ------------------------------------------------------------------------------------------------------

_OUT = Path("cachecraft-early-termination")
Ratios = Annotated[
    str,
    typer.Option(
        "--recompute-ratio", help="Recompute ratios without early termination, comma-separated."
    ),
]


@takes(questions=evaluate.Questions, defaults={"limit": 40})
def main(
    model: options.Model = "demo",
    recompute_ratio: Ratios = "0.15",
    methods: Annotated[str, typer.Option("--methods", help="craft, probe.")] = "craft,probe",
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
        str, typer.Option("--origin", help="Context in which chunks are captured.")
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
    """Compare early termination with none, and with a smaller recompute ratio of the same cost.

    Tunes window and first layer on the first questions, and tries the best on the others; with --tune 0 it tries all
    on every question. A stopped run resumes.
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
        numbers(recompute_ratio),
        questions.answer_tokens,
    )
    if not all(0 < ratio <= 1 for ratio in search.ratios):
        raise ConfigError("--recompute-ratio takes numbers above 0 and at most 1")
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
        settings |= {"origin": origin}
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
        "r",
        "w",
        "first",
        "questions",
        "saved",
        "of all",
        "KL: none",
        "early",
        "same cost",
        "early - none (95 %)",
        "early / none",
        "early - same cost",
        "ROUGE-L",
        "early - none",
        "right",
    ):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    table.add_column("deciding layers")
    for one in found:
        sides = ("none", "early", "flat")
        table.add_row(
            one["method"],
            f"{one['ratio']:g}",
            str(one["window"]),
            f"{one['first']:g}",
            str(one["questions"]),
            f"{one['saved']:.0%} ({one['flat_saved']:.0%})",
            f"{one['saved_of_all']:.0%}",
            *(f"{one[name]['mean']:.4f}" for name in ("none_kl", "kl", "flat_kl")),
            _shown(one["loss"], "+.4f"),
            "–" if one["loss_ratio"] is None else _shown(one["loss_ratio"], ".2f"),
            _shown(one["difference"], "+.4f"),
            " ".join(f"{one['rouge_l'][side]:.2f}" for side in sides),
            _shown(one["rouge_loss"], "+.2f"),
            f"{' '.join(str(one['right'][side]) for side in sides)} of {one['right']['full']}",
            " ".join(f"{layer}:{count}" for layer, count in one["layers"].items()),
        )
    out.print(table)
    out.print(
        "saved: of the recomputed token-layers, by early termination (by the smaller ratio); of all: of all computed "
        "ones. ROUGE-L and right answers: none, early, same cost, of full prefill's right ones"
    )


def _shown(interval: Mapping[str, float], form: str) -> str:
    mean, low, high = (format(interval[name], form) for name in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"
