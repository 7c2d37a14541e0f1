"""Early termination against none, and against a flat budget of the same cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.early_termination import METHODS, Cell, Compared, Search, best_of, compare, compared
from benchmarks.kept import Kept
from cachecraft_rag.compute import overlapped
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.dataset import handbook_dataset
from cachecraft_rag.evaluation.intervals import Interval
from cachecraft_rag.evaluation.origins import Origins, condition_named
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.early_termination import FocusMonitor
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.progress import Progress

# of four layers to three chunks
ASKED = [[1.0, 5.0, 0.0], [9.0, 0.0, 0.0], [9.0, 0.0, 0.0], [9.0, 0.0, 0.0]]


def test_a_cell_decides_as_the_engine_would() -> None:
    assert Cell(1, 0.0).decide(ASKED) == (0, {1})
    assert Cell(2, 0.0).decide(ASKED) == (2, {0})  # chunk 1 led in the first layer alone
    assert Cell(1, 0.25).decide(ASKED) == (1, {0})
    assert Cell(2, 0.5).decide(ASKED) == (3, {0})
    assert Cell(3, 0.5).decide(ASKED) is None
    assert Cell(4, 0.0).decide(ASKED) is None


def test_it_is_compared_with_what_it_leaves(
    tiny_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    dataset = handbook_dataset(passages=3, limit=4, seed=1)
    seen: list[Progress] = []
    search = Search([Cell(w, 0.0) for w in (1, 2)], tune=2, ratios=(0.3, 0.6), answer_tokens=4)
    methods = {"craft": METHODS["craft"]}
    with (
        ChunkCacheStore.open(tmp_path) as store,
        Engine(tiny_decoder("Llama", num_hidden_layers=8), store, best_last=False) as engine,
    ):
        origins = Origins(condition_named("unrelated"), engine, dataset, 1, 4)
        kept = Kept(tmp_path / "trials.jsonl", {})
        found = compare(
            engine, dataset, origins, search, kept=kept, methods=methods, progress=seen.append
        )
        again = compare(
            engine,
            dataset,
            origins,
            search,
            kept=Kept(tmp_path / "trials.jsonl", {}),
            methods=methods,
        )
    assert again == found
    assert seen == [Progress(done, 4, f"craft@{r}") for r in (0.3, 0.6) for done in range(4)]
    assert {one["ratio"] for one in found} == {0.3, 0.6}
    for one in found:
        assert one["questions"] == one["tuned"]["questions"] == 2
        assert 0.0 <= one["saved"] < 1.0
        assert one["difference"]["mean"] == pytest.approx(
            one["kl"]["mean"] - one["flat_kl"]["mean"]
        )
        assert one["loss"]["mean"] == pytest.approx(one["kl"]["mean"] - one["none_kl"]["mean"])
        assert one["kl"]["mean"] > 0.0
        # the smaller ratio costs as much, to the nearest twentieth and a token of each chunk
        assert one["flat_saved"] == pytest.approx(one["saved"], abs=0.1)
        assert 0.0 <= one["saved_of_all"] <= one["saved"]
        assert 0.0 < one["rouge_l"]["none"] <= 1.0
        assert sum(one["layers"].values()) == 2
    assert overlapped.FocusMonitor is FocusMonitor


def _compared(mean: float, *, saved: float = 0.3, spread: float = 0.0) -> Compared:
    kl = Interval(0.1, 0.0, 0.2)
    return Compared(
        9,
        kl,
        none_kl=kl,
        flat_kl=kl,
        loss=kl,
        loss_ratio=kl,
        difference=Interval(mean, mean - spread, mean + spread),
        saved=saved,
        flat_saved=saved,
        saved_of_all=saved,
        rouge_l={},
        rouge_loss=kl,
        right={},
        layers={3: 9},
    )


@pytest.mark.parametrize(
    ("mean", "spread", "wins"), [(-0.2, 0.1, True), (-0.1, 0.2, False), (0.2, 0.1, False)]
)
def test_only_the_whole_interval_wins(mean: float, spread: float, wins: bool) -> None:
    assert _compared(mean, spread=spread).wins is wins


def test_the_best_cell_must_save_something() -> None:
    short, long, idle = Cell(3, 0.0), Cell(8, 0.0), Cell(12, 0.0)
    found = {short: _compared(0.2), long: _compared(0.1), idle: _compared(0.0, saved=0.01)}
    assert best_of(found) == [long]
    assert best_of({idle: found[idle]}) == []


def test_a_question_on_which_nothing_is_decided_counts_as_no_difference() -> None:
    trials = [
        _trial(0.2, none=0.2, flat=0.2, layer=-1, saved=0.0),
        _trial(0.4, none=0.1, flat=0.2, layer=3, saved=0.5),
    ]
    found = compared(trials)
    assert found.difference.mean == pytest.approx(0.1)
    assert found.loss.mean == pytest.approx(0.15)
    assert found.loss_ratio is not None
    assert found.loss_ratio.mean == pytest.approx(2.0)
    assert (found.saved, found.layers) == (0.25, {-1: 1, 3: 1})
    assert found.rouge_loss.mean == 0.0
    assert found.right == {"full": 2, "none": 2, "early": 0, "flat": 2}


def _trial(early: float, *, none: float, flat: float, layer: int, saved: float) -> dict[str, Any]:
    sides = {"none": none, "early": early, "flat": flat}
    quality = {
        side: {"kl": kl, "rouge_l": 1.0, "right": side != "early"} for side, kl in sides.items()
    }
    savings = {"saved": saved, "flat_saved": saved, "saved_of_all": saved}
    return {**quality, **savings, "layer": layer, "full_right": True}


def test_the_command_compares(
    tiny_decoder: Callable[..., Decoder],
    benchmark_json: Callable[..., Any],
    tmp_path: Path,
    as_loud_as_before: None,
) -> None:
    decoder = tiny_decoder("Llama")
    decoder.model.save_pretrained(tmp_path)
    decoder.tokenizer.save_pretrained(tmp_path)
    arguments = (
        "--model",
        tmp_path,
        "--limit",
        "1",
        "--tune",
        "0",
        "--passages",
        "3",
        "--answer-tokens",
        "4",
    )
    arguments = (
        *arguments,
        "--window",
        "2",
        "--first-layer",
        "0",
        "--methods",
        "craft",
        "--out",
        tmp_path / "out",
    )
    report = benchmark_json("early-termination", *arguments)
    assert (report["questions"], report["passages"]) == (1, 3)
    assert [one["method"] for one in report["found"]] == ["craft"]
    with pytest.raises(ConfigError, match="change from question to question"):
        benchmark_json("early-termination", *arguments, "--origin", "stream")
    with pytest.raises(ConfigError, match="sharp: no such method"):
        benchmark_json("early-termination", *arguments, "--methods", "sharp")
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        benchmark_json("early-termination", *arguments, "--recompute-ratio", "1.5")
