"""The report of the GPU benchmark: kept row by row, whatever fails."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import PARTS, TINY, Report, Setting, by_length, chosen_parts, table

SETTING = Setting(
    device="cpu",
    dtype="float32",
    shape=TINY,
    lengths=(16, 32),
    chunk=16,
    question=6,
    share=0.15,
    repeats=1,
    deadline=math.inf,
)


def test_a_part_that_fails_leaves_its_rows_its_error_and_the_others(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    report = Report(path, {"device": "none"})
    report.part("gates", "Gates", lambda: iter([{"passed": True}]))
    assert json.loads(path.read_text())["gates"] == [{"passed": True}]
    assert report.is_exact

    def runs_out_of_memory() -> Iterator[dict[str, Any]]:
        yield {"tokens": 16}
        raise MemoryError("CUDA out of memory")

    def fails_at_once() -> Iterator[dict[str, Any]]:
        raise RuntimeError("no such device")

    report.part("lengths", "Lengths", runs_out_of_memory)
    report.part("bus", "Copies", fails_at_once)
    report.part("kernels", "Kernels", lambda: iter([{"passed": True}]))
    written = json.loads(path.read_text())
    assert written["errors"] == {
        "lengths": "MemoryError: CUDA out of memory",
        "bus": "RuntimeError: no such device",
    }
    assert written["lengths"] == [{"tokens": 16}]
    assert written["kernels"] == [{"passed": True}]
    assert not report.is_exact


def test_a_row_is_in_the_file_before_the_next_one_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"

    def rows() -> Iterator[dict[str, Any]]:
        yield {"tokens": 16}
        assert json.loads(path.read_text())["lengths"] == [{"tokens": 16}]
        yield {"tokens": 32}

    report = Report(path, {})
    report.part("lengths", "Lengths", rows)
    assert report.figures["errors"] == {}


def test_what_the_time_is_too_short_for_is_named(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    times = iter([False, False, True, True])

    report = Report(path, {}, lambda: next(times))
    report.part("copies", "Copies", lambda: iter([{"tokens": 16}, {"tokens": 32}, {"tokens": 64}]))
    report.part("passes", "Passes", lambda: iter([{"tokens": 16}]))
    written = json.loads(path.read_text())
    assert written["copies"] == [{"tokens": 16}, {"tokens": 32}]
    assert written["passes"] == []
    assert written["left_out"] == ["copies: what follows", "passes: what follows"]
    assert written["errors"] == {}


def test_a_length_that_would_end_too_late_is_not_begun(tmp_path: Path) -> None:
    setting = replace(SETTING, deadline=time.monotonic() - 1)
    report = Report(tmp_path / "gpu.json", {})
    report.part(
        "passes",
        "Passes",
        lambda: by_length(setting, lambda: None, lambda *_given: {"tokens": 16}),
    )
    assert report.figures["left_out"] == ["passes: 16 tokens and all after them"]


def test_an_inexact_result_is_a_failure() -> None:
    report = Report(None, {})
    report.part("side_stream", "Captures", lambda: iter([{"passed": False}]))
    assert report.figures["errors"] == {}
    assert not report.is_exact


def test_series_are_kept_in_the_file_and_left_out_of_the_table(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    row = {"tokens": 16, "ratio_host": 0.5, "series_ms": {"host": [3.0, 1.0, 2.0]}}
    Report(path, {}).part("lengths", "Lengths", lambda: iter([row]))
    assert json.loads(path.read_text())["lengths"] == [row]
    assert table([row]).split() == ["tokens", "ratio_host", "16", "0.5"]


def test_parts_are_chosen_by_name() -> None:
    assert chosen_parts(None) == PARTS
    assert chosen_parts("gates,kernels") == ["gates", "kernels"]
    with pytest.raises(SystemExit, match="no part speed; choose among"):
        chosen_parts("gates,speed")
