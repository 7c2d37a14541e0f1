"""The smallest α that holds a quality on a validation set (Cache-Craft eq. 13: α* = argmin E[CFO] with Q ≥ Q_desired).

What is promised is a mean over questions that nobody has asked yet. So the lower end of an interval must reach the
desired quality, not the mean of the validation set: with that alone every other calibration would promise too much.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.quality.conditions import CONDITIONS, condition_named, origins_of
from cachecraft_rag.evaluation.quality.intervals import Interval, mean_interval, ratio_interval
from cachecraft_rag.evaluation.quality.measuring import Record, Trial, measure, reference_of
from cachecraft_rag.evaluation.quality.methods import Method
from cachecraft_rag.planning.calibration import Calibration

if TYPE_CHECKING:
    from cachecraft_rag.engine.engine import Engine
    from cachecraft_rag.evaluation.formats.dataset import Dataset
    from cachecraft_rag.evaluation.quality.runner import Progress

# Ascending. CCI is never below 0.5: from α = 2 on, a chunk whose old neighbours are all gone is computed afresh.
ALPHAS = (0.1, 0.15, 0.25, 0.35, 0.5, 0.7, 1.0, 1.3, 1.6, 2.0)
HARDLY_PAYS = 0.9  # more of the chunk tokens than that recomputed spares too little; a judgement, not a measurement
LEVEL = 0.90  # two-sided, so that the lower end alone is a one-sided 95 % bound


def _relative_f1(records: Sequence[Record]) -> Interval:
    """F1 as a share of full prefill's: against gold answers alone, a weak model would hold no quality at all."""
    ours = [record.f1 or 0.0 for record in records]
    return ratio_interval(ours, [record.reference_f1 or 0.0 for record in records], level=LEVEL)


METRICS: Mapping[str, Callable[[Sequence[Record]], Interval]] = MappingProxyType(
    {
        "rouge_l": lambda records: mean_interval([record.rouge_l for record in records], level=LEVEL),
        "top1": lambda records: mean_interval([record.top1 for record in records], level=LEVEL),
        "f1": _relative_f1,
    }
)


@dataclass(frozen=True, slots=True)
class CalibrationSettings:
    """What is to be held, and how it is measured. In all metrics, full prefill has quality 1.

    quality        the desired mean over questions, 0 to 1
    metric         a name of `METRICS`: "rouge_l", of the answer against full prefill's; "top1", the share of tokens on
                   the way to that answer that would be chosen too; "f1" against the gold answers, relative to full
                   prefill's
    captures         a name of `conditions.CONDITIONS`, but for "stream": each α must find the same chunk-caches
    answer_tokens  longest answer
    seed           of the captures and of `halves`
    """

    quality: float = 0.95
    metric: str = "rouge_l"
    captures: str = "unrelated"
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
        if condition_named(self.captures).behind is None:
            fixed = [condition.name for condition in CONDITIONS.values() if condition.behind is not None]
            raise ConfigError(
                f"captures {self.captures!r} change from question to question, and each α must find the same chunk-caches; "
                f"choose one of {', '.join(fixed)}"
            )
        if self.answer_tokens < 1:
            raise ConfigError(f"answers need 1 token or more, not {self.answer_tokens}")

    def require(self, dataset: Dataset) -> None:
        """ConfigError where these questions cannot be measured so: there are none, or f1 lacks gold answers."""
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
    """What one α does: the share of chunk tokens recomputed or computed, and the quality with its interval."""

    alpha: float
    recomputed: float
    quality: Interval


@dataclass(frozen=True)
class Calibrated:
    """What was chosen, and every α that was tried, ascending.

    held  False where no α reached the quality, not even the largest, which was chosen then
    pays  False where more than `HARDLY_PAYS` of the chunk tokens are recomputed then
    """

    calibration: Calibration
    curve: tuple[Point, ...]

    @property
    def held(self) -> bool:
        """See above."""
        return self.calibration.low >= self.calibration.quality

    @property
    def pays(self) -> bool:
        """See above."""
        return self.calibration.recomputed <= HARDLY_PAYS


def smallest_that_holds(alphas: Sequence[float], holds: Callable[[float], bool]) -> float:
    """The smallest of ascending α that holds, found by halving; the last one, untried, where no other does.

    What holds at one α is taken to hold at larger ones. Where noise breaks that, the answer is still one above which
    every α that was tried holds.

    >>> smallest_that_holds((0.1, 0.2, 0.5, 1.0), lambda alpha: alpha >= 0.3)
    0.5
    """
    fails, found = -1, len(alphas) - 1
    while found - fails > 1:
        middle = (fails + found) // 2
        if holds(alphas[middle]):
            found = middle
        else:
            fails = middle
    return alphas[found]


def halves(dataset: Dataset, *, seed: int) -> tuple[Dataset, Dataset]:
    """The questions in two parts, drawn by the seed; both keep all documents, for captures to come from.

    Raises:
        ConfigError: there are fewer than two questions.
    """
    questions = list(dataset.questions)
    if len(questions) < 2:
        raise ConfigError("one half is to check what the other has found: give 2 questions or more with --limit")
    random.Random(seed).shuffle(questions)
    middle = (len(questions) + 1) // 2
    first, second = (tuple(part) for part in (questions[:middle], questions[middle:]))
    return replace(dataset, questions=first), replace(dataset, questions=second)


def calibrate(
    engine: Engine, dataset: Dataset, settings: CalibrationSettings, *, progress: Progress | None = None
) -> Calibrated:
    """The smallest of `ALPHAS` for which the mean quality is at least the desired one, with 95 % confidence.

    The bound is the lower end of a bootstrap interval over questions. It speaks of questions like those of the
    validation set, and of their mean: single answers differ more. That a few α are tried costs some of the confidence.
    About four of ten are, for quality grows with α; each question is answered by full prefill once.

    Args:
        engine: of `runner.open_engine`, its store empty; tokens are chosen as its config says.

    Raises:
        ConfigError: `CalibrationSettings.require`, or captures that are impossible with this data, or full prefill's F1
            is 0.
    """
    tries = math.ceil(math.log2(len(ALPHAS))) + 1
    validation = Validation(engine, dataset, settings, passes=tries, progress=progress)
    chosen = smallest_that_holds(ALPHAS, lambda alpha: validation.at(alpha).quality.low >= settings.quality)
    found = validation.at(chosen)
    config = engine.config
    calibration = Calibration(
        alpha=chosen,
        metric=settings.metric,
        quality=settings.quality,
        reached=found.quality.mean,
        low=found.quality.low,
        recomputed=found.recomputed,
        dataset=dataset.name,
        questions=len(dataset.questions),
        captures=settings.captures,
        selector=config.selector,
        budget_scope=config.budget_scope,
        drift=config.drift,
    )
    validation.finish()
    return Calibrated(calibration, validation.curve)


def check(
    engine: Engine, dataset: Dataset, settings: CalibrationSettings, alpha: float, *, progress: Progress | None = None
) -> Point:
    """What an α does on other questions than it was calibrated on; arguments and errors as `calibrate`."""
    validation = Validation(engine, dataset, settings, passes=1, progress=progress)
    found = validation.at(alpha)
    validation.finish()
    return found


class Validation:
    """Questions measured at one α after another, over the same captures and against the same answers of full prefill.

    Keeps the logits of those answers, `[answer, vocabulary]` in float32: 3 MB a question for the demo model.

    Args:
        passes: as many α will be tried at most, which the progress goes by.
    """

    def __init__(
        self,
        engine: Engine,
        dataset: Dataset,
        settings: CalibrationSettings,
        *,
        passes: int,
        progress: Progress | None = None,
    ) -> None:
        settings.require(dataset)
        self._engine, self._settings, self._progress = engine, settings, progress
        self._done, self._total = 0, len(dataset.questions) * (1 + passes)
        self._points: dict[float, Point] = {}
        captures = origins_of(
            condition_named(settings.captures),
            engine,
            dataset,
            seed=settings.seed,
            answer_tokens=settings.answer_tokens,
        )
        self._references = []
        for question in dataset.questions:
            self._tell("full prefill")
            captures.before(question)
            self._references.append(reference_of(engine, question, answer_tokens=settings.answer_tokens))
            self._done += 1

    @property
    def curve(self) -> tuple[Point, ...]:
        """All that was measured, by α."""
        return tuple(self._points[alpha] for alpha in sorted(self._points))

    def at(self, alpha: float) -> Point:
        """Measure at this α, once."""
        if alpha not in self._points:
            self._points[alpha] = self._measured(alpha)
        return self._points[alpha]

    def finish(self) -> None:
        """Tell the progress that no further α is needed."""
        self._total = self._done
        self._tell("")

    def _measured(self, alpha: float) -> Point:
        # Not "cake": what is computed because a disk is slow would count as quality that only this disk has.
        config = replace(
            self._engine.config, reuse=True, capture=False, alpha=alpha, recompute_ratio=None, loading="layerwise"
        )
        trial = Trial(Method(f"alpha_{alpha:g}", "Cache-Craft eq. 13", lambda _: config))
        records = []
        for reference in self._references:
            self._tell(f"α = {alpha:g}")
            records.append(measure(self._engine, reference, trial))
            self._done += 1
        if self._settings.metric == "f1" and not any(record.reference_f1 for record in records):
            raise ConfigError(
                "full prefill answers none of these questions, so there is no F1 to hold; choose the metric rouge_l, "
                "a longer answer, or another model"
            )
        recomputed = sum(record.recomputed for record in records) / len(records)
        return Point(alpha, recomputed, METRICS[self._settings.metric](records))

    def _tell(self, note: str) -> None:
        if self._progress is not None:
            self._progress(self._done, self._total, note)
