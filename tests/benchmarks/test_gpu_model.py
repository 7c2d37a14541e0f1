"""The cost model of reuse on a GPU."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.gpu_model import Counts, Machine, Model, Prompt, full_s, reuse_s

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.version.cuda is not None, reason="it simulates a device in place of a real one"
    ),
]


def test_it_prints_ratios_from_counted_copies() -> None:
    pytest.importorskip("triton")
    result = CliRunner().invoke(app, ["gpu-model", "--json"])
    assert result.exit_code == 0, result.output
    ratios = json.loads(result.stdout)
    assert {"vllm", "hf"} <= ratios.keys()
    assert ratios["vllm"].keys() == {"2048", "8192", "16384", "32768"}
    assert ratios["vllm"]["8192"] <= 0.30
    assert ratios["vllm"]["16384"] <= 0.27
    assert ratios["vllm_pageable"]["16384"] > ratios["vllm"]["16384"]


def test_more_copies_cost_time_where_python_is_the_bottleneck() -> None:
    few = Counts(launches=10, place_launches=9, copies=9, bytes_per_token=1.0, first_fraction=0.1)
    many = Counts(
        launches=10, place_launches=9, copies=1000, bytes_per_token=1.0, first_fraction=0.1
    )
    seconds = [
        reuse_s(Model(), Machine(), Prompt(), counts, 16384, source="pinned")
        for counts in (few, many)
    ]
    assert seconds[0] < seconds[1]
    assert seconds[0] < full_s(Model(), Machine(), 16384)
