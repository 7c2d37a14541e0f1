"""The parts of the GPU benchmark that say where time goes run on a CPU, on a toy model, each as on a GPU."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_where
from benchmarks.gpu import TINY, Setting, by_length, decoder_of

SETTING = Setting(
    device="cpu",
    dtype="float32",
    shape=TINY,
    lengths=(64, 96),
    chunk=16,
    question=6,
    share=0.15,
    repeats=1,
    deadline=time.monotonic() + 3600,
)


@cache
def toy() -> Any:
    return decoder_of(SETTING)


def test_ceilings_are_of_the_row_counts_that_occur_and_of_whole_tiles() -> None:
    rows = list(gpu_where.ceilings(SETTING))
    counts = gpu_where.row_counts(SETTING)
    assert {1, 6, 64, 96, 128} <= set(counts)
    assert len(rows) == len(counts) + 3
    assert all(row["reached"] > 0 for row in rows)


def test_attention_is_timed_over_every_row_set_of_every_length() -> None:
    rows = list(gpu_where.attention_sets(SETTING))
    sets = {"question", "pass", "pass in whole tiles", "runs of 16", "everything"}
    assert {(row["tokens"], row["row_set"]) for row in rows} == {
        (tokens, name) for tokens in SETTING.lengths for name in sets
    }
    by_set = {row["row_set"]: row["rows"] for row in rows if row["tokens"] == 96}
    assert by_set["question"] == 6
    assert by_set["pass"] < by_set["pass in whole tiles"] <= by_set["everything"] == 96


def test_copies_and_placing_are_timed_in_every_way() -> None:
    rows = list(gpu_where.copies(SETTING))
    assert len(rows) == 2 * 6
    assert all(row["gb_per_s"] > 0 for row in rows)


def test_a_prompt_so_short_that_it_has_no_chunk_has_no_copies() -> None:
    assert list(gpu_where.copies(replace(SETTING, lengths=(22,)))) == []


@pytest.mark.parametrize("part", [gpu_where.passes, gpu_where.new_documents])
def test_passes_of_each_length_are_compared_with_the_models_own(part: Any) -> None:
    rows = list(by_length(SETTING, toy, part))
    assert [row["tokens"] for row in rows] == [64, 96, 64], "the first length again at the end"
    for row in rows:
        for name, series in row["series_ms"].items():
            assert row[f"{name}_ms"] == pytest.approx(min(series), abs=0.01)
            assert name == "own" or row[f"ratio_{name}"] > 0


def test_requests_in_a_row_go_through_the_connector() -> None:
    rows = list(by_length(SETTING, toy, gpu_where.steps))
    assert [row["tokens"] for row in rows] == [64, 96, 64]
    assert all(len(row["series_ms"]["request"]) == row["requests"] for row in rows)


def test_small_models_answer_whole_requests() -> None:
    (row,) = gpu_where.small_models(SETTING)
    assert row["model"] == "toy"
    assert row["ratio_host"] > 0


def test_traces_are_written_beside_the_figures(tmp_path: Path) -> None:
    rows = list(gpu_where.traces(SETTING, toy(), 64, tmp_path))
    assert [row["trace"] for row in rows] == ["trace-prefill.json.gz", "trace-request.json.gz"]
    assert {file.name for file in tmp_path.iterdir()} == {row["trace"] for row in rows}
