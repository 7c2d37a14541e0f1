"""Bounds on what one request costs over vLLM, counted on a simulated GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.served_prompt import Requests, Size

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


def test_each_pass_runs_all_layers_in_one_call_and_blocks_are_written_once(tmp_path: Path) -> None:
    counts = counts_of(Size(tokens=400, chunk=64, layers=8), tmp_path)
    assert counts["whole_passes"] == 2, "the probe and the last pass"
    assert counts["layer_calls"] == 0
    assert counts["block_writes"] == 8


def test_a_layer_takes_few_launches(tmp_path: Path) -> None:
    layers = 32
    counts = counts_of(Size(tokens=700, chunk=64, layers=layers), tmp_path)
    kernels = counts["kernels"]
    assert kernels["mean_change"] == kernels["write_rows"] == layers, "drift, and the rows with it"
    # few rows do not fill a GPU: what the parts of their keys give is combined
    assert kernels["attend"] == (layers - 1) + (layers // 2 - 1) + 4, "four layers are observed"
    assert kernels["combine"] <= kernels["attend"]
    others = counts["launches"] - kernels["combine"]
    assert others <= 5.5 * layers, "four a layer, two a layer of the probe, and the plan"
    assert counts["launches"] + counts["block_writes"] <= 8 * layers
