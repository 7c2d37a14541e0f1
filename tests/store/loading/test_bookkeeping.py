"""The loader's own lists: the work grows with the prompt, not with its square."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from benchmarks import loader_bookkeeping
from benchmarks.loader_bookkeeping import load_all, pending


def lines_run(action: Callable[[], object]) -> int:
    """Number of lines of the loader that are executed."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.endswith("store/loading/pending.py"):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("layer_first", [True, False], ids=["layer by layer", "extent by extent"])
def test_twice_the_tokens_cost_twice_the_bookkeeping(layer_first: bool) -> None:
    def work(tokens: int) -> int:
        loads = pending(tokens, 8)
        return lines_run(lambda: load_all(loads, layer_first=layer_first))

    assert work(4096) < 2.2 * work(2048)


def test_every_layer_of_every_extent_is_read_once_in_any_order_of_modes() -> None:
    loads = pending(4096, 6)
    reads: list[tuple[int, int, int]] = []
    while (job := loads._next()) is not None:
        loads.layer_first = len(reads) % 7 < 3
        for extent in job.extents:
            assert extent.layers == job.layer
            reads.append((extent.start, extent.first, job.layer))
        loads.reads += 1
        loads._note(job, None, job.own)
    assert len(reads) == len(set(reads)) == 64 * 6
    assert loads.is_complete()
    assert loads.depth() == 6


def test_the_command_reports_milliseconds_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    loader_bookkeeping.main("1024", layers=2, as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["milliseconds"]["1024"].keys() == {"layer by layer", "extent by extent"}
