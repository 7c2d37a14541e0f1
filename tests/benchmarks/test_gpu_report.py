"""The report of the GPU benchmark: kept part by part, whatever fails."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.gpu import Report


def test_a_part_that_fails_leaves_the_others_and_its_error(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    report = Report(path, {"device": "none"})
    assert report.part("gates", lambda: [{"passed": True}]) == [{"passed": True}]
    assert json.loads(path.read_text())["gates"] == [{"passed": True}]
    assert report.is_exact

    def fails() -> None:
        raise MemoryError("CUDA out of memory")

    assert report.part("bus", fails) is None
    assert report.part("kernels", lambda: [{"passed": True}])
    written = json.loads(path.read_text())
    assert written["errors"] == {"bus": "MemoryError: CUDA out of memory"}
    assert written["kernels"] == [{"passed": True}]
    assert not report.is_exact


def test_an_inexact_result_is_a_failure(tmp_path: Path) -> None:
    report = Report(None, {})
    report.part("side_stream", lambda: [{"passed": False}])
    assert not report.is_exact
