"""The smallest α that keeps a desired quality (Cache-Craft eq. 13: α* = argmin E[CFO] with Q ≥ Q_desired).

The CFO, the fraction of a reused chunk that is recomputed, is proportional to α (`planning/scoring.py`). The promise is
about the mean over future questions. So the lower end of a confidence interval must reach the desired quality: if the
mean over the validation set sufficed, every other calibration would promise too much.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.intervals import Interval, mean_interval, ratio_interval
from cachecraft_rag.evaluation.measuring import Method, Record, Trial
from cachecraft_rag.evaluation.origins import CONDITIONS, DEFAULT_ORIGIN, condition_named
from cachecraft_rag.evaluation.records import RecordLog
from cachecraft_rag.evaluation.runner import EvaluationSettings, Run
from cachecraft_rag.planning.calibration import Calibration
from cachecraft_rag.store.closeable import Closeable
from cachecraft_rag.types.progress import Progress

if TYPE_CHECKING:
    from cachecraft_rag.engine.engine import Engine
    from cachecraft_rag.evaluation.dataset import Dataset

# Ascending. CCI is at least 0.5, so from α = 2 on a chunk without any of its old neighbours is computed in full.
ALPHAS = (0.1, 0.15, 0.25, 0.35, 0.5, 0.7, 1.0, 1.3, 1.6, 2.0)
# above this share of recomputed chunk tokens, reuse saves too little: a judgement, not measured
HARDLY_PAYS = 0.9
LEVEL = 0.90  # two-sided, so the lower end is a one-sided 95 % bound


def _relative_f1(records: Sequence[Record]) -> Interval:
    """F1 relative to full prefill's: by gold answers alone, a weak model could never reach the quality."""
    ours = [record.f1 or 0.0 for record in records]
    return ratio_interval(ours, [record.reference_f1 or 0.0 for record in records], level=LEVEL)


METRICS: Mapping[str, Callable[[Sequence[Record]], Interval]] = MappingProxyType(
    {
        "rouge_l": lambda records: mean_interval(
            [record.rouge_l for record in records], level=LEVEL
        ),
        "top1": lambda records: mean_interval([record.top1 for record in records], level=LEVEL),
        "f1": _relative_f1,
    }
)


@dataclass(frozen=True, slots=True)
class CalibrationSettings:
    """The quality to keep, and how it is measured. Full prefill has quality 1 in every metric.

    quality        the desired mean over questions, 0 to 1
    metric         a name of `METRICS`: "rouge_l" of the answer against full prefill's; "top1", the share of positions
                   in full prefill's answer with the same most likely token; "f1" against the gold answers, relative
                   to full prefill's
    origin         a name of `origins.CONDITIONS` except "stream": every α must find the same chunk-caches
    answer_tokens  longest answer, in tokens
    seed           of the origin prefixes and of `halves`
    """

    quality: float = 0.95
    metric: str = "rouge_l"
    origin: str = DEFAULT_ORIGIN
    answer_tokens: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ConfigError(f"unknown metric {self.metric!r}; choose one of {', '.join(METRICS)}")
        if not 0 <= self.quality <= 1:
            raise ConfigError(
                f"quality must lie between 0 and 1, where 1 is that of full prefill, not {self.quality:g}; "
                "write for example 0.95"
            )
        if condition_named(self.origin).is_stream:
            fixed = [condition.name for condition in CONDITIONS.values() if not condition.is_stream]
            raise ConfigError(
                f"with the origin {self.origin!r} chunk-caches change from question to question, but every α must find "
                f"the same ones; choose one of {', '.join(fixed)}"
            )
        if self.answer_tokens < 1:
            raise ConfigError(f"answers need 1 token or more, not {self.answer_tokens}")

    def require(self, dataset: Dataset) -> None:
        """Raise ConfigError if there are no questions, or if the metric is f1 and a question has no gold answer."""
        if not dataset.questions:
            raise ConfigError("there are no questions to calibrate on; raise --limit")
        without = sum(not question.answers for question in dataset.questions)
        if self.metric == "f1" and without:
            raise ConfigError(
                f"f1 needs gold answers, and {without} of {len(dataset.questions)} questions have none; choose the "
                "metric rouge_l or top1, which compare with full prefill's own answers"
            )


@dataclass(frozen=True, slots=True)
class Point:
    """The result of one α: the mean share of chunk tokens recomputed or computed, and the quality (90 % interval)."""

    alpha: float
    recomputed: float
    quality: Interval


@dataclass(frozen=True)
class Calibrated:
    """The chosen calibration, and every α that was tried, ascending."""

    calibration: Calibration
    curve: tuple[Point, ...]

    @property
    def held(self) -> bool:
        """True if the lower end of the chosen α's interval reaches the quality; else the largest was chosen."""
        return self.calibration.low >= self.calibration.quality

    @property
    def pays(self) -> bool:
        """True if reuse saves work: at most `HARDLY_PAYS` (0.9) of the chunk tokens are recomputed or computed."""
        return self.calibration.recomputed <= HARDLY_PAYS


def smallest_that_holds(alphas: Sequence[float], holds: Callable[[float], bool]) -> float:
    """Return the smallest of the ascending α (at least one) that holds, by bisection; if no other, the last, untried.

    Assumes that α holds wherever a smaller one does. If noise breaks the assumption, every α that was tried above the
    answer still holds.

    >>> smallest_that_holds((0.1, 0.2, 0.5, 1.0), lambda alpha: alpha >= 0.3)
    0.5
    """
    last_failing = -1
    first_holding = len(alphas) - 1
    while first_holding - last_failing > 1:
        middle = (last_failing + first_holding) // 2
        if holds(alphas[middle]):
            first_holding = middle
        else:
            last_failing = middle
    return alphas[first_holding]


def halves(dataset: Dataset, *, seed: int) -> tuple[Dataset, Dataset]:
    """Return the questions in two parts, drawn and ordered by the seed; the first has one more if the number is odd.

    Both keep all documents, so that origin prefixes stay the same. ConfigError for fewer than two questions.
    """
    questions = list(dataset.questions)
    if len(questions) < 2:
        raise ConfigError("checking on a second half needs 2 questions or more: raise --limit")
    random.Random(seed).shuffle(questions)
    middle = (len(questions) + 1) // 2
    first, second = (tuple(part) for part in (questions[:middle], questions[middle:]))
    return replace(dataset, questions=first), replace(dataset, questions=second)


def calibrate(
    engine: Engine,
    dataset: Dataset,
    settings: CalibrationSettings,
    *,
    folder: Path | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Calibrated:
    """Find the smallest of `ALPHAS` whose mean quality reaches the desired one with 95 % confidence.

    The bound is the lower end of a bootstrap interval over questions. It holds for the mean over questions like those
    of the validation set; single answers vary more. Trying several α costs some of the confidence. Quality grows with
    α, so a bisection tries about four of the ten. The calibration itself is not saved (`save_calibration`). If no α
    holds, the largest is returned.

    Args:
        engine: from `runner.open_engine`, with an empty store; its config says how tokens are selected.
        settings: the quality to keep. With the metric f1 full prefill must answer a question, or a ConfigError follows.
        folder: of the measurements, from which a stopped calibration resumes; None keeps them in memory only.
            Measurements in it with other settings or questions, or damaged ones, are discarded.
        progress: called with the number of measurements so far and in all (until the end an estimate).
    """
    tries = math.ceil(math.log2(len(ALPHAS))) + 1
    with Validation(
        engine, dataset, settings, passes=tries, folder=folder, progress=progress
    ) as validation:
        chosen = smallest_that_holds(
            ALPHAS, lambda alpha: validation.at(alpha).quality.low >= settings.quality
        )
        point = validation.at(chosen)
        validation.finish()
    config = engine.config
    calibration = Calibration(
        alpha=chosen,
        metric=settings.metric,
        quality=settings.quality,
        reached=point.quality.mean,
        low=point.quality.low,
        recomputed=point.recomputed,
        dataset=dataset.name,
        questions=len(dataset.questions),
        origin=settings.origin,
        selector=config.method.selector,
        budget_scope=config.method.budget_scope,
        drift=config.method.drift,
        nearest_share=config.nearest_share,
        scoring=config.method.scoring,
        early_termination=config.method.early_termination,
        early_termination_window=config.method.early_termination_window,
    )
    return Calibrated(calibration, validation.curve)


def check(
    engine: Engine,
    dataset: Dataset,
    settings: CalibrationSettings,
    alpha: float,
    *,
    folder: Path | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Point:
    """Measure an α on other questions, with the engine and arguments of `calibrate`, but with another `folder`."""
    with Validation(engine, dataset, settings, folder=folder, progress=progress) as validation:
        point = validation.at(alpha)
        validation.finish()
    return point


class Validation(Closeable):
    """Measures one α after another over the same chunk-caches and against the same answers of full prefill.

    `passes` is the number of α expected, for the total of the progress; for `folder` see `calibrate`.
    """

    def __init__(
        self,
        engine: Engine,
        dataset: Dataset,
        settings: CalibrationSettings,
        *,
        passes: int = 1,
        folder: Path | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        settings.require(dataset)
        self._engine = engine
        self._questions = dataset.questions
        self._metric = settings.metric
        self._points: dict[float, Point] = {}
        run = EvaluationSettings(
            tuple(self._trial(alpha) for alpha in ALPHAS),
            condition_named(settings.origin),
            answer_tokens=settings.answer_tokens,
            seed=settings.seed,
        )
        self._log = (
            None
            if folder is None
            else RecordLog(folder, run.describe(engine, dataset), discard_others=True)
        )
        self._run = Run(
            engine, dataset, run, log=self._log, progress=progress, keep_references=True
        )
        self._run.total = len(dataset.questions) * passes

    def close(self) -> None:
        """Close the file of measurements, as `RecordLog.close`; without a folder do nothing."""
        if self._log is not None:
            self._log.close()

    @property
    def curve(self) -> tuple[Point, ...]:
        """The result of every α that `at` was called with, ascending; empty before the first."""
        return tuple(self._points[alpha] for alpha in sorted(self._points))

    def at(self, alpha: float) -> Point:
        """Return the result of this α, measured on the first call.

        That answers each question once with this α, and the first α also with full prefill. Measurements that the
        folder has already are not repeated. ConfigError if the metric is f1 and full prefill answers no question.
        """
        if alpha not in self._points:
            self._run.total = max(self._run.total, len(self._questions) * (len(self._points) + 1))
            trial = self._trial(alpha)
            records = [
                record
                for question in self._questions
                for record in self._run.ask(question, [trial])
            ]
            if self._metric == "f1" and not any(record.reference_f1 for record in records):
                raise ConfigError(
                    "full prefill answers none of these questions, so there is no F1 to keep; choose the metric "
                    "rouge_l, a longer answer, or another model"
                )
            recomputed = sum(record.recomputed for record in records) / len(records)
            self._points[alpha] = Point(alpha, recomputed, METRICS[self._metric](records))
        return self._points[alpha]

    def finish(self) -> None:
        """Report to `progress` that no further α will be tried: its total becomes the number measured."""
        self._run.total = len(self._questions) * len(self._points)
        self._run.show("")

    def _trial(self, alpha: float) -> Trial:
        # Not "cake": it computes more where the disk is slow, and the quality would hold for this disk only.
        config = replace(
            self._engine.config.with_method(alpha=alpha, loading="layerwise"),
            reuse=True,
            capture=False,
            recompute_ratio=None,
        )
        return Trial(Method(f"alpha_{alpha:g}", "Cache-Craft eq. 13", lambda _: config))
