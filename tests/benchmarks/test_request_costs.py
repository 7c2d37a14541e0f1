"""Bounds on what one request costs over vLLM, counted on a simulated GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.request_costs import Requests, Size

pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None, reason="it simulates a device in place of a real one"
)


def counts_of(size: Size, folder: Path) -> dict[str, Any]:
    pytest.importorskip("triton")
    from benchmarks.device_costs import count

    return count(size, Requests.of(size), folder)


def test_a_request_of_many_chunks_is_copied_and_placed_in_few_calls(tmp_path: Path) -> None:
    counts = counts_of(Size(tokens=700, chunk=64, layers=32), tmp_path)
    assert counts["copies"] <= 8
    assert counts["kernels"]["place"] <= 8
    assert counts["transfers"] == 8 * 10, "eight groups of layers, an instruction and nine chunks"


def test_the_host_waits_for_the_scores_of_the_probe_alone(tmp_path: Path) -> None:
    counts = counts_of(Size(tokens=400, chunk=64, layers=8), tmp_path)
    assert counts["host_waits"] == {"a copy to the host": 1}


def test_each_layer_is_run_and_written_to_the_blocks_once(tmp_path: Path) -> None:
    counts = counts_of(Size(tokens=400, chunk=64, layers=8), tmp_path)
    assert counts["layer_calls"] == 8 + 4, "the pass, and the probe's half"
    assert counts["block_writes"] == 8
    assert counts["launches"] <= 8 * 30
