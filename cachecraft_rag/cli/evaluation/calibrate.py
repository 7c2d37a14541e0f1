"""`cachecraft calibrate`: find how much to recompute."""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cachecraft_rag.cli import options
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.evaluation.evaluate import Questions, require_packages
from cachecraft_rag.cli.options import print_json, print_table, progress_bar, takes, waiting

if TYPE_CHECKING:
    from cachecraft_rag.evaluation.calibrate import Calibrated, CalibrationSettings, Point
    from cachecraft_rag.evaluation.dataset import Dataset

# in the store: the work of a stopped calibration, from which the next one resumes
UNFINISHED = ".calibrating"
Preset = Literal["default", "paper"]
FEW_QUESTIONS = 20  # with fewer, bootstrap intervals are clearly too narrow


@dataclass(frozen=True)
class ValidationQuestions(Questions):
    """Options: the questions to calibrate on.

    data   file of questions like those you expect
    limit  questions; with --check, of both halves together
    seed   seed of questions, passages, origin prefixes and halves
    """

    data: Path = field()
    limit: int = 50
    passages: int = 3


@dataclass(frozen=True)
class CalibrationOptions:
    """Options: the quality to keep, and the engine to measure with.

    quality  mean quality to keep, for which α is found; full prefill has 1
    metric   measure of quality: rouge_l of the answer against full prefill's; top1, the share of equal most likely
             tokens; f1 against gold answers, relative to full prefill's
    origin   how chunks are captured. documents: primed, as index --prime does it; neighbours: after the chunks before
             them in their document; alone: after a fixed passage; unrelated: after chunks of other documents, for
             stores that are not primed
    check    calibrate on one half of the questions, and test the result on the other
    preset   settings of reuse that α is for: default; paper: those of ReuseConfig.paper()
    """

    model: str = "demo"
    store: Path = Path("chunk-caches")
    quality: float = 0.95
    metric: str = "rouge_l"
    origin: str = "documents"
    check: bool = False
    preset: Preset = "default"
    dtype: str = "auto"
    device: str = "auto"
    threads: options.Threads = None


@takes(questions=ValidationQuestions, chosen=CalibrationOptions)
def calibrate(
    as_json: options.Json = False, *, questions: ValidationQuestions, chosen: CalibrationOptions
) -> None:
    """Find the least recomputation that keeps a quality (with 95 % confidence), and save it for this store.

    Engines opened on that store with that model then use what was found, unless their settings give a ratio or α, or
    choose tokens otherwise than --preset. Nothing else in the store changes. After Ctrl-C, the same command resumes. If
    no α keeps the quality, the largest is saved (exit code 0). Exit code 2 if the questions, an option, the model or
    the store cannot be used, or the extra `eval` is missing.
    """
    # Raises the errors of `Questions.load`, `open_engine` and `calibrate` in `evaluation.calibrate`;
    # see `app.main` for exit codes.
    options.set_threads(chosen.threads)
    from cachecraft_rag.evaluation.calibrate import CalibrationSettings, halves
    from cachecraft_rag.planning.calibration import CALIBRATION_FILE

    require_packages()
    dataset = questions.load()
    settings = CalibrationSettings(
        chosen.quality, chosen.metric, chosen.origin, questions.answer_tokens, questions.seed
    )
    settings.require(dataset)
    parts = halves(dataset, seed=questions.seed) if chosen.check else (dataset,)
    calibrated, checked = _measure(parts, settings, chosen)
    path = chosen.store / CALIBRATION_FILE
    if as_json:
        print_json(_plain(calibrated, checked, path))
    else:
        _print(calibrated, checked, path)


def _measure(
    parts: tuple[Dataset, ...], settings: CalibrationSettings, chosen: CalibrationOptions
) -> tuple[Calibrated, Point | None]:
    """Calibrate on the first part, save the result, and check it on the second part, if there is one."""
    from cachecraft_rag.evaluation import calibrate as calibrating
    from cachecraft_rag.evaluation.runner import open_engine
    from cachecraft_rag.planning.calibration import save_calibration
    from cachecraft_rag.planning.config import ReuseConfig

    options.quiet_libraries()
    checked = None
    store = chosen.store
    work = store / UNFINISHED
    reuse = ReuseConfig.paper() if chosen.preset == "paper" else ReuseConfig()
    with ExitStack() as opened:
        with waiting("Loading the model"):
            engine = opened.enter_context(
                open_engine(
                    chosen.model, store, dtype=chosen.dtype, device=chosen.device, reuse=reuse
                )
            )
        with progress_bar("Calibrating", remaining=True) as show:
            calibrated = calibrating.calibrate(
                engine, parts[0], settings, folder=work / "first", progress=show
            )
        calibration = replace(calibrated.calibration, created=time.time())
        calibrated = replace(calibrated, calibration=calibration)
        save_calibration(store, engine.decoder.fingerprint, calibration)
        if len(parts) > 1:
            alpha = calibrated.calibration.alpha
            with progress_bar("Checking", remaining=True) as show:
                checked = calibrating.check(
                    engine, parts[1], settings, alpha, folder=work / "second", progress=show
                )
    shutil.rmtree(work, ignore_errors=True)
    return calibrated, checked


def _plain(calibrated: Calibrated, checked: Point | None, path: Path) -> dict[str, object]:
    check = None
    if checked is not None:
        check = asdict(checked) | {"held": checked.quality.mean >= calibrated.calibration.quality}
    return {
        **asdict(calibrated.calibration),
        "held": calibrated.held,
        "pays": calibrated.pays,
        "curve": [asdict(point) for point in calibrated.curve],
        "check": check,
        "file": str(path),
    }


def _print(calibrated: Calibrated, checked: Point | None, path: Path) -> None:
    chosen = calibrated.calibration
    rows = []
    for point in calibrated.curve:
        mark = "← chosen" if point.alpha == chosen.alpha else ""
        rows.append((f"{point.alpha:g}", f"{point.recomputed:.0%}", *_shown(point), mark))
    print_table(("α", "recomputed", chosen.metric, "90 % interval", ""), rows)

    said = [str(chosen)]
    if not calibrated.held:
        said.append(
            f"No α reaches {chosen.metric} ≥ {chosen.quality:g} on these questions; the largest was chosen."
        )
    if not calibrated.pays:
        said.append(
            f"Reuse does not pay at this quality: {chosen.recomputed:.0%} of chunk tokens are recomputed. Ask for less "
            "with --quality; or prime the documents (cachecraft index --prime), and calibrate for that with "
            "--origin documents."
        )
    if checked is not None:
        mean, interval = _shown(checked)
        verdict = "held" if checked.quality.mean >= chosen.quality else "not held"
        said.append(
            f"on the other half: {chosen.metric} {mean} ({interval}), {checked.recomputed:.0%} recomputed: {verdict}"
        )
    said.append(f"written to {path}: every engine opened on this store with this model uses it;")
    said.append("ReuseConfig().with_method(alpha=…) overrides it; delete the file to undo it")
    out.print("\n".join(said), soft_wrap=True)
    if chosen.questions < FEW_QUESTIONS:
        options.warn(f"{chosen.questions} questions are few for a reliable result; raise --limit")


def _shown(point: Point) -> tuple[str, str]:
    return f"{point.quality.mean:.3f}", f"{point.quality.low:.3f} to {point.quality.high:.3f}"
