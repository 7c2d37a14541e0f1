"""Calibration of α: the search, the bound, and that what is found is what the engine does with that α."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.calibrate import (
    ALPHAS,
    HARDLY_PAYS,
    METRICS,
    Calibrated,
    CalibrationSettings,
    Validation,
    calibrate,
    check,
    halves,
    smallest_that_holds,
)
from cachecraft_rag.evaluation.dataset import Dataset
from cachecraft_rag.evaluation.intervals import mean_interval
from cachecraft_rag.evaluation.origins import Origins, condition_named
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.types.progress import Progress

SETTINGS = CalibrationSettings(quality=0.9, metric="top1", answer_tokens=5, origin="unrelated")
# A way of choosing under which the tiny model's quality falls below 1 wherever anything is reused.
CRUDE = ReuseConfig(nearest_share=0.0, method=ReuseMethod(budget_scope="chunk", drift=0.0))


def searched(holds: Callable[[float], bool]) -> tuple[float, dict[float, bool]]:
    """The α found, and every one tried."""
    tried: dict[float, bool] = {}

    def trial(alpha: float) -> bool:
        assert alpha not in tried
        tried[alpha] = holds(alpha)
        return tried[alpha]

    return smallest_that_holds(ALPHAS, trial), tried


@pytest.mark.parametrize("least", [0.0, *ALPHAS, 5.0])
def test_the_search_finds_the_smallest_of_the_grid_in_few_tries(least: float) -> None:
    found, tried = searched(lambda alpha: alpha >= least)
    assert found == min((alpha for alpha in ALPHAS if alpha >= least), default=ALPHAS[-1])
    assert len(tried) <= 4


def test_above_what_a_noisy_search_finds_everything_tried_holds() -> None:
    draw = np.random.default_rng(3)
    for _ in range(200):
        noisy = dict(zip(ALPHAS, draw.random(len(ALPHAS)) < 0.5, strict=True))
        found, tried = searched(lambda alpha, noisy=noisy: bool(noisy[alpha]))  # type: ignore[misc]
        assert all(holds for alpha, holds in tried.items() if alpha >= found)
        assert not any(holds for alpha, holds in tried.items() if alpha < found)


def test_no_quality_asked_for_is_the_smallest_alpha(
    evaluation_engine: Engine, town_dataset: Dataset
) -> None:
    found = calibrate(evaluation_engine, town_dataset, replace(SETTINGS, quality=0.0))
    assert found.calibration.alpha == ALPHAS[0]
    assert found.held
    assert found.pays
    assert len(found.curve) <= 4


def test_a_quality_that_needs_full_recomputation_does_not_pay(
    evaluation_engine: Engine, town_dataset: Dataset
) -> None:
    evaluation_engine.config = CRUDE
    found = calibrate(
        evaluation_engine, town_dataset, replace(SETTINGS, quality=1.0, answer_tokens=24)
    )
    chosen = found.calibration
    assert (chosen.low, chosen.reached, chosen.recomputed) == (1.0, 1.0, 1.0)
    assert found.held
    assert not found.pays
    below = [point for point in found.curve if point.alpha < chosen.alpha]
    assert below
    assert all(point.quality.low < 1.0 and point.recomputed < 1.0 for point in below)
    shares = [point.recomputed for point in found.curve]
    assert shares == sorted(shares)


def test_recomputing_nearly_everything_does_not_pay(
    evaluation_engine: Engine, town_dataset: Dataset
) -> None:
    found = calibrate(evaluation_engine, town_dataset, replace(SETTINGS, quality=0.0))
    for recomputed, pays in ((HARDLY_PAYS, True), (HARDLY_PAYS + 0.01, False)):
        assert (
            Calibrated(replace(found.calibration, recomputed=recomputed), found.curve).pays == pays
        )


def test_a_quality_that_no_alpha_reaches_is_reported(
    evaluation_engine: Engine, town_dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cachecraft_rag.evaluation.calibrate.ALPHAS", (0.0, 0.1))
    evaluation_engine.config = CRUDE
    found = calibrate(
        evaluation_engine, town_dataset, replace(SETTINGS, quality=1.0, answer_tokens=24)
    )
    assert found.calibration.alpha == 0.1
    assert not found.held


def test_the_lower_bound_decides_and_not_the_mean(
    evaluation_engine: Engine, town_dataset: Dataset
) -> None:
    evaluation_engine.config = CRUDE
    longer = replace(SETTINGS, answer_tokens=24)
    point = Validation(evaluation_engine, town_dataset, longer, passes=1).at(0.5)
    assert point.quality.low < point.quality.mean < 1.0
    between = (point.quality.low + point.quality.mean) / 2
    found = calibrate(evaluation_engine, town_dataset, replace(longer, quality=between))
    assert point in found.curve
    assert found.calibration.alpha > 0.5
    assert found.calibration.low >= between


def test_a_point_is_what_the_engine_does_with_that_alpha(
    evaluation_engine: Engine, town_dataset: Dataset
) -> None:
    """Asked one by one as a user would, with α in the engine's settings."""
    point = Validation(evaluation_engine, town_dataset, SETTINGS, passes=1).at(0.5)
    tops, shares = [], []
    for question in town_dataset.questions:
        how = {"max_new_tokens": SETTINGS.answer_tokens}
        full = evaluation_engine.score_answer(
            question.text, question.passages, **how, config=ReuseConfig(reuse=False, capture=False)
        )
        config = ReuseConfig(capture=False, method=ReuseMethod(alpha=0.5))
        ours = evaluation_engine.score_answer(
            question.text, question.passages, **how, target=full.tokens, config=config
        )
        tops.append(float((ours.logits.argmax(-1) == full.logits.argmax(-1)).double().mean()))
        chunks = ours.stats.chunks
        shares.append(
            sum(one.recomputed + one.computed for one in chunks) / sum(one.tokens for one in chunks)
        )
    assert point.recomputed == pytest.approx(np.mean(shares))
    assert point.quality == mean_interval(tops, level=0.9)


def test_the_engine_s_own_way_of_choosing_is_calibrated(
    evaluation_engine: Engine, town_dataset: Dataset
) -> None:
    settings = replace(SETTINGS, quality=0.0)
    evaluation_engine.config = ReuseConfig(
        nearest_share=0.0,
        recompute_ratio=0.9,
        method=ReuseMethod(selector="leading", budget_scope="chunk", drift=0.0),
    )
    found = calibrate(evaluation_engine, town_dataset, settings)
    assert found.calibration.fits(evaluation_engine.config)
    assert not found.calibration.fits(ReuseConfig())
    assert found.calibration.recomputed < 0.2  # α decides, not the fixed ratio
    evaluation_engine.config = ReuseConfig()
    other = calibrate(evaluation_engine, town_dataset, settings)
    assert [point.quality for point in other.curve] != [point.quality for point in found.curve]


def test_the_published_settings_can_be_calibrated(
    evaluation_engine: Engine, town_dataset: Dataset
) -> None:
    published = ReuseConfig.paper(method=ReuseMethod.paper(alpha=None))
    evaluation_engine.config = published
    found = calibrate(evaluation_engine, town_dataset, replace(SETTINGS, quality=0.0)).calibration
    assert found.fits(published)
    evaluation_engine.calibration = found
    assert evaluation_engine.calibrated(published) == published.with_method(alpha=found.alpha)


def test_origins_decide_how_much_is_recomputed(
    evaluation_engine: Engine, town_dataset: Dataset
) -> None:
    strangers = calibrate(
        evaluation_engine, town_dataset, replace(SETTINGS, quality=0.0)
    ).calibration
    origins = Origins(condition_named("neighbours"), evaluation_engine, town_dataset, 0, 1)
    for question in town_dataset.questions:
        origins.before(question)
    variants = evaluation_engine.store.stats().variants
    found = calibrate(
        evaluation_engine, town_dataset, replace(SETTINGS, origin="neighbours", quality=0.0)
    )
    # captured once, and nothing else while measuring
    assert evaluation_engine.store.stats().variants == variants
    # Some chunks come back after the chunks they were captured after, others after strangers.
    assert found.calibration.recomputed < 0.7 * strangers.recomputed


def test_f1_is_relative_to_full_prefill(evaluation_engine: Engine, town_dataset: Dataset) -> None:
    prefill = ReuseConfig(reuse=False, capture=False)
    evaluation_engine.config = CRUDE
    full = [
        evaluation_engine.score_answer(
            one.text, one.passages, max_new_tokens=24, config=prefill
        ).text
        for one in town_dataset.questions
    ]
    assert any(text.split() for text in full)
    golds = tuple(
        replace(one, answers=(text,))
        for one, text in zip(town_dataset.questions, full, strict=True)
    )
    found = calibrate(
        evaluation_engine,
        replace(town_dataset, questions=golds),
        replace(SETTINGS, metric="f1", quality=1.0, answer_tokens=24),
    )
    assert found.calibration.reached == 1.0
    assert found.curve[0].quality.mean < 1.0


def test_f1_is_refused_where_it_means_nothing(
    evaluation_engine: Engine, town_dataset: Dataset
) -> None:
    settings = replace(SETTINGS, metric="f1")
    bare = tuple(replace(one, answers=()) for one in town_dataset.questions[:2])
    with pytest.raises(ConfigError, match=r"2 of 6 questions have none; choose the metric rouge_l"):
        calibrate(
            evaluation_engine,
            replace(town_dataset, questions=bare + town_dataset.questions[2:]),
            settings,
        )
    unknown = tuple(replace(one, answers=("unsaid words",)) for one in town_dataset.questions[:2])
    with pytest.raises(ConfigError, match="full prefill answers none of these questions"):
        calibrate(evaluation_engine, replace(town_dataset, questions=unknown), settings)


def test_a_check_asks_other_questions(evaluation_engine: Engine, town_dataset: Dataset) -> None:
    first, second = halves(town_dataset, seed=1)
    assert (len(first.questions), len(second.questions)) == (3, 3)
    assert {one.question_id for part in (first, second) for one in part.questions} == {
        f"q{i}" for i in range(6)
    }
    assert first.documents == second.documents == town_dataset.documents
    assert halves(town_dataset, seed=1) == (first, second) != halves(town_dataset, seed=2)
    steps: list[Progress] = []
    point = check(evaluation_engine, second, SETTINGS, 2.0, progress=steps.append)
    assert (point.alpha, point.quality.mean, point.recomputed) == (2.0, 1.0, 1.0)
    assert steps[0] == Progress(0, 3, "warming up")
    assert steps[-1] == Progress(3, 3, "")
    with pytest.raises(ConfigError, match="2 questions or more: raise --limit"):
        halves(replace(town_dataset, questions=town_dataset.questions[:1]), seed=1)


def test_progress_begins_with_the_time_expected_and_ends_at_its_total(
    evaluation_engine: Engine, town_dataset: Dataset
) -> None:
    steps: list[Progress] = []
    found = calibrate(evaluation_engine, town_dataset, SETTINGS, progress=steps.append)
    done = 6 * len(found.curve)
    assert steps[1].done == 0
    assert steps[1].what.startswith("expected to take 0:0")
    assert steps[-1] == Progress(done, done, "")
    assert all(one.done <= one.total for one in steps)
    assert asdict(found.calibration)["questions"] == 6


def test_a_stopped_calibration_resumes_and_finds_the_same(
    evaluation_engine: Engine, town_dataset: Dataset, tmp_path: Path
) -> None:
    evaluation_engine.config = CRUDE
    settings = replace(SETTINGS, quality=1.0)
    whole = calibrate(evaluation_engine, town_dataset, settings)
    measured = 6 * len(whole.curve)

    stopped: list[Progress] = []

    def stop(step: Progress) -> None:
        assert not stopped or stopped[-1].done < measured - 2
        stopped.append(step)
        if step.done == measured - 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(evaluation_engine, town_dataset, settings, folder=tmp_path, progress=stop)
    # nothing is reported after the interruption, as if all were done
    assert stopped[-1].done == measured - 2
    steps: list[Progress] = []
    assert (
        calibrate(evaluation_engine, town_dataset, settings, folder=tmp_path, progress=steps.append)
        == whole
    )
    assert steps[0].done == measured - 2
    other = replace(settings, answer_tokens=4)  # measurements with other settings do not count
    steps.clear()
    calibrate(evaluation_engine, town_dataset, other, folder=tmp_path, progress=steps.append)
    assert steps[0].done == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"metric": "bleu"}, "unknown metric 'bleu'; choose one of rouge_l, top1, f1"),
        ({"quality": 1.2}, r"between 0 and 1, .*not 1\.2; write for example 0\.95"),
        ({"quality": -0.1}, "between 0 and 1"),
        ({"quality": float("nan")}, "between 0 and 1"),
        ({"origin": "somehow"}, "unknown origin condition"),
        ({"origin": "stream"}, "choose one of documents, neighbours, alone, unrelated"),
        ({"answer_tokens": 0}, "1 token or more"),
    ],
)
def test_settings_are_checked(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SETTINGS, **wrong)  # type: ignore[arg-type]


def test_no_questions_are_refused(evaluation_engine: Engine, town_dataset: Dataset) -> None:
    with pytest.raises(ConfigError, match="no questions to calibrate on"):
        calibrate(evaluation_engine, replace(town_dataset, questions=()), SETTINGS)


def test_the_documented_metrics_exist() -> None:
    assert list(METRICS) == ["rouge_l", "top1", "f1"]
