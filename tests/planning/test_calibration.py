"""The file beside the store that says which α was found for a model."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import StoreError
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.calibration import (
    CALIBRATION_FILE,
    Calibration,
    all_calibrations,
    load_calibration,
    save_calibration,
)
from cachecraft_rag.planning.config import DEFAULT_ALPHA, ReuseConfig, ReuseMethod
from cachecraft_rag.types.documents import Chunk

MakeDecoder = Callable[..., Decoder]
DEFAULT = ReuseConfig()
FOUND = Calibration(
    alpha=1.2,
    metric="rouge_l",
    quality=0.95,
    reached=0.97,
    low=0.955,
    recomputed=0.6,
    dataset="own.jsonl",
    questions=50,
    origin="unrelated",
    selector=DEFAULT.method.selector,
    budget_scope=DEFAULT.method.budget_scope,
    drift=DEFAULT.method.drift,
    nearest_share=DEFAULT.nearest_share,
    early_termination=DEFAULT.method.early_termination,
)


def test_each_model_has_its_own(tmp_path: Path) -> None:
    assert load_calibration(tmp_path, "a") is None
    save_calibration(tmp_path / "new folder", "a", FOUND)
    save_calibration(tmp_path / "new folder", "b", replace(FOUND, alpha=0.4))
    save_calibration(tmp_path / "new folder", "a", replace(FOUND, alpha=0.9))
    assert load_calibration(tmp_path / "new folder", "a") == replace(FOUND, alpha=0.9)
    assert load_calibration(tmp_path / "new folder", "b") == replace(FOUND, alpha=0.4)
    assert load_calibration(tmp_path / "new folder", "c") is None
    assert [path.name for path in (tmp_path / "new folder").iterdir()] == [CALIBRATION_FILE]


def test_all_are_listed_but_for_the_damaged(tmp_path: Path) -> None:
    assert all_calibrations(tmp_path) == {}
    save_calibration(tmp_path, "a", FOUND)
    save_calibration(tmp_path, "b", replace(FOUND, alpha=-1.0))
    save_calibration(tmp_path, "c", replace(FOUND, alpha=0.4))
    assert all_calibrations(tmp_path) == {"a": FOUND, "c": replace(FOUND, alpha=0.4)}


@pytest.mark.parametrize(
    "text", ["{", "[" * 100_000, "[]", '{"a": {"alpha": 1}}', '{"a": 3}', '{"a": null}']
)
def test_what_is_damaged_is_logged_and_as_if_it_were_not_there(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / CALIBRATION_FILE).write_text(text)
    assert load_calibration(tmp_path, "a") is None
    assert "run cachecraft calibrate again" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reached", 1.2),
        ("recomputed", -0.1),
        ("recomputed", "much"),
        ("low", "much"),
        ("quality", None),
        ("questions", math.nan),
        ("questions", math.inf),
        ("questions", -9),
        ("created", math.inf),
        ("metric", ["top1"]),
    ],
)
def test_an_impossible_value_is_not_used(tmp_path: Path, name: str, value: object) -> None:
    save_calibration(tmp_path, "a", FOUND)
    path = tmp_path / CALIBRATION_FILE
    path.write_text(json.dumps({"a": json.loads(path.read_text())["a"] | {name: value}}))
    assert load_calibration(tmp_path, "a") is None


@pytest.mark.parametrize("alpha", [-1, "much", "0.5", None])
def test_an_impossible_alpha_is_not_used(
    tmp_path: Path, alpha: object, caplog: pytest.LogCaptureFixture
) -> None:
    save_calibration(tmp_path, "a", FOUND)
    path = tmp_path / CALIBRATION_FILE
    path.write_text(json.dumps({"a": json.loads(path.read_text())["a"] | {"alpha": alpha}}))
    assert load_calibration(tmp_path, "a") is None
    assert "run cachecraft calibrate again" in caplog.text


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        save_calibration(tmp_path / "file", "a", FOUND)


def test_an_engine_takes_it_up_and_says_so(
    tiny_decoder: MakeDecoder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = tiny_decoder("Llama")
    model, store = str(tmp_path / "model"), tmp_path / "store"
    decoder.model.save_pretrained(model)
    decoder.tokenizer.save_pretrained(model)
    chunks = [Chunk("One thing is written here."), Chunk("Another thing is written there.")]

    def recomputed(config: ReuseConfig) -> int:
        with Engine.from_pretrained(model, store=store, reuse=config) as engine:
            return engine.score_answer(
                "What?", chunks[::-1], max_new_tokens=2
            ).stats.tokens_recomputed

    with Engine.from_pretrained(model, store=store) as engine:
        fingerprint = engine.decoder.fingerprint
        engine.score_answer("What?", chunks, max_new_tokens=2)
    # what is stored is taken, however fast it is
    as_always = ReuseConfig(capture=False, method=ReuseMethod(loading="layerwise"))
    plain = recomputed(as_always)
    given = as_always.with_method(alpha=DEFAULT_ALPHA)
    with_given = recomputed(given)
    assert plain > 0
    save_calibration(store, fingerprint, FOUND)
    with caplog.at_level(logging.INFO, "cachecraft_rag"):
        assert recomputed(as_always) == recomputed(as_always.with_method(alpha=FOUND.alpha)) > plain
    assert "calibrated for rouge_l ≥ 0.95 on 50 questions of own.jsonl" in caplog.text
    assert recomputed(given) == with_given  # what is given goes before
    # it was found with another way of choosing
    assert recomputed(as_always.with_method(drift=0.0)) == plain
    assert recomputed(replace(as_always, recompute_ratio=0.15)) == recomputed(
        replace(as_always, recompute_ratio=0.15).with_method(alpha=DEFAULT_ALPHA)
    )
    # which would recompute less than was promised
    assert not FOUND.fits(as_always.with_method(early_termination="published"))


def test_a_calibration_fits_only_the_way_of_choosing_that_it_was_made_with() -> None:
    published = ReuseConfig.paper(method=ReuseMethod.paper(alpha=None))
    assert not FOUND.fits(published)
    made_with_it = replace(
        FOUND,
        selector=published.method.selector,
        budget_scope=published.method.budget_scope,
        drift=published.method.drift,
        nearest_share=published.nearest_share,
        scoring=published.method.scoring,
        early_termination="published",
        early_termination_window=published.method.early_termination_window,
    )
    assert made_with_it.fits(published)
    assert not made_with_it.fits(published.with_method(early_termination="off"))
    assert not made_with_it.fits(published.with_method(early_termination_window=8))
    assert not made_with_it.fits(published.with_method(scoring="corrected"))
    assert FOUND.fits(DEFAULT.with_method(early_termination_window=8))  # unused without termination


def test_a_quality_target_begins_with_a_calibration_of_agreement(
    tiny_decoder: MakeDecoder, tmp_path: Path
) -> None:
    decoder = tiny_decoder("Llama")
    model, store = str(tmp_path / "model"), tmp_path / "store"
    decoder.model.save_pretrained(model)
    decoder.tokenizer.save_pretrained(model)

    with Engine.from_pretrained(model, store=store) as plain:
        fingerprint = plain.decoder.fingerprint

    def first_ratio(calibration: Calibration) -> str:
        save_calibration(store, fingerprint, calibration)
        with Engine.from_pretrained(
            model, store=store, audit="idle", quality_target=0.98
        ) as engine:
            answer = engine.stream("What?", [Chunk("One thing is written here.")])
            return answer.stats.quality

    agreement = replace(FOUND, metric="top1", reached=0.94, recomputed=0.3)
    assert first_ratio(FOUND).startswith("r = 0.15:")  # ROUGE-L is not what audits measure
    # If 0.06 differ at r = 0.3, 0.02 are left where (1 - r)^1.5 is a third of 0.7^1.5: 0.66, and the next level is 0.7.
    assert first_ratio(agreement).startswith("r = 0.7:")
    # It was measured with another way of choosing tokens.
    assert first_ratio(replace(agreement, drift=0.9)).startswith("r = 0.15:")
