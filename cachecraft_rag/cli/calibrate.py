"""`cachecraft calibrate`: find how much to recompute."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from cachecraft_rag.checks import MOST
from cachecraft_rag.cli import options
from cachecraft_rag.cli.evaluate import AnswerTokens, Format, require_packages
from cachecraft_rag.cli.options import DEFAULT_STORE, err, out, print_json, progress_bar, takes, waiting

if TYPE_CHECKING:
    from cachecraft_rag.evaluation.calibrate import Calibrated, CalibrationSettings, Point
    from cachecraft_rag.evaluation.dataset import Dataset

METRIC, ORIGIN = "rouge_l", "unrelated"  # defaults
UNFINISHED = ".calibrating"  # in the store: the work of a stopped calibration, from which the next one resumes
FEW_QUESTIONS = 20  # with fewer, bootstrap intervals are clearly too narrow

Data = Annotated[Path, typer.Option("--data", "-d", help="File of questions like those you expect.")]
Quality = Annotated[
    float, typer.Option("--quality", "-q", help="Mean quality to keep, for which α is found; full prefill has 1.")
]
Metric = Annotated[
    str,
    typer.Option(
        "--metric",
        help="rouge_l: of the answer against full prefill's; top1: share of equal most likely tokens; f1: against gold "
        "answers, relative to full prefill's.",
    ),
]
Limit = Annotated[int, typer.Option("--limit", min=1, help="Questions; with --check, of both halves together.")]
Passages = Annotated[int, typer.Option("--passages", min=1, help="Chunks in each prompt.")]
Origin = Annotated[str, typer.Option("--origin", help="What chunks are captured behind: unrelated, neighbours, alone.")]
Seed = Annotated[
    int,
    typer.Option("--seed", min=-MOST - 1, max=MOST, help="Seed of questions, passages, origin prefixes and halves."),
]
Check = Annotated[
    bool, typer.Option("--check", help="Calibrate on one half of the questions, and test the result on the other.")
]


@dataclass(frozen=True)
class QuestionOptions:
    """Options: the questions, and their passages."""

    data: Data
    format: Format = None
    limit: Limit = 50
    passages: Passages = 3
    answer_tokens: AnswerTokens = 16
    seed: Seed = 0

    def load(self) -> Dataset:
        """The questions."""
        from cachecraft_rag.evaluation.dataset import load_dataset

        require_packages()
        return load_dataset(self.data, format=self.format, passages=self.passages, limit=self.limit, seed=self.seed)


@dataclass(frozen=True)
class ComputeOptions:
    """Options: dtype, device and threads of the model."""

    dtype: options.Dtype = "auto"
    device: Annotated[str, options.option_of("device")] = "auto"
    threads: options.Threads = None


@takes(questions=QuestionOptions, compute=ComputeOptions)
def calibrate(
    model: options.Model = "demo",
    store: options.Store = DEFAULT_STORE,
    quality: Quality = 0.95,
    metric: Metric = METRIC,
    origin: Origin = ORIGIN,
    check: Check = False,
    as_json: options.Json = False,
    *,
    questions: QuestionOptions,
    compute: ComputeOptions,
) -> None:
    """Find the least recomputation that keeps a quality (with 95 % confidence), and save it for this store.

    Every engine opened on that store with that model then uses what was found. Nothing else in the store changes.
    After Ctrl-C, the same command resumes.
    """
    options.set_threads(compute.threads)
    from cachecraft_rag.evaluation.calibrate import CalibrationSettings, halves
    from cachecraft_rag.planning.calibration import CALIBRATION_FILE

    dataset = questions.load()
    settings = CalibrationSettings(quality, metric, origin, questions.answer_tokens, questions.seed)
    settings.require(dataset)
    parts = halves(dataset, seed=questions.seed) if check else (dataset,)
    found, checked = _measure(parts, settings, store, model=model, compute=compute)
    path = store / CALIBRATION_FILE
    if as_json:
        print_json(_plain(found, checked, path))
    else:
        _print(found, checked, path)


def _measure(
    parts: tuple[Dataset, ...], settings: CalibrationSettings, store: Path, *, model: str, compute: ComputeOptions
) -> tuple[Calibrated, Point | None]:
    """Calibrate on the first part, save the result, and check it on the second part, if there is one."""
    from cachecraft_rag.evaluation import calibrate as calibrating
    from cachecraft_rag.evaluation.runner import open_engine
    from cachecraft_rag.planning.calibration import save_calibration

    options.quiet_libraries()
    checked, work = None, store / UNFINISHED
    with ExitStack() as opened:
        with waiting("Loading the model"):
            engine = opened.enter_context(open_engine(model, store, dtype=compute.dtype, device=compute.device))
        with progress_bar("Calibrating", remaining=True) as show:
            found = calibrating.calibrate(engine, parts[0], settings, folder=work / "first", progress=show)
        save_calibration(store, engine.decoder.fingerprint, found.calibration)
        if len(parts) > 1:
            with progress_bar("Checking", remaining=True) as show:
                checked = calibrating.check(
                    engine, parts[1], settings, found.calibration.alpha, folder=work / "second", progress=show
                )
    shutil.rmtree(work, ignore_errors=True)
    return found, checked


def _plain(found: Calibrated, checked: Point | None, path: Path) -> dict[str, Any]:
    target = found.calibration.quality
    return {
        **asdict(found.calibration),
        "held": found.held,
        "pays": found.pays,
        "curve": [asdict(point) for point in found.curve],
        "check": None if checked is None else asdict(checked) | {"held": checked.quality.mean >= target},
        "file": str(path),
    }


def _print(found: Calibrated, checked: Point | None, path: Path) -> None:
    chosen = found.calibration
    table = Table(box=SIMPLE_HEAD)
    for name in ("α", "recomputed", chosen.metric, "90 % interval", ""):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for point in found.curve:
        mark = "← chosen" if point.alpha == chosen.alpha else ""
        table.add_row(f"{point.alpha:g}", f"{point.recomputed:.0%}", *_shown(point), mark)
    out.print(table)
    _say(str(chosen))
    if not found.held:
        _say(f"No α reaches {chosen.metric} ≥ {chosen.quality:g} on these questions; the largest was chosen.")
    if not found.pays:
        _say(
            f"Reuse does not pay at this quality: {chosen.recomputed:.0%} of chunk tokens are recomputed. Ask for less "
            "with --quality; or capture chunks behind their neighbours (cachecraft index --prime), and calibrate "
            "for that with --origin neighbours."
        )
    if chosen.questions < FEW_QUESTIONS:
        err.print(f"{chosen.questions} questions are few for a reliable result; raise --limit", style="yellow")
    if checked is not None:
        mean, interval = _shown(checked)
        verdict = "held" if checked.quality.mean >= chosen.quality else "not held"
        _say(f"on the other half: {chosen.metric} {mean} ({interval}), {checked.recomputed:.0%} recomputed: {verdict}")
    _say(f"written to {path}: every engine opened on this store with this model uses it;")
    _say("ReuseConfig(alpha=…) overrides it; delete the file to undo it")


def _shown(point: Point) -> tuple[str, str]:
    return f"{point.quality.mean:.3f}", f"{point.quality.low:.3f} to {point.quality.high:.3f}"


def _say(line: str) -> None:
    out.print(line, highlight=False, soft_wrap=True)
