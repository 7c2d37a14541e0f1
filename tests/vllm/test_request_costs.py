"""Bounds on what one request costs over vLLM's CPU build."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from benchmarks.served_prompt import Requests, Size
from benchmarks.vllm_costs import measure

LAYERS = 4


def test_a_reused_prompt_costs_few_calls_statements_and_steps(tmp_path: Path) -> None:
    size = Size(tokens=500, chunk=64, layers=LAYERS)
    counts = measure(size, Requests.of(size), tmp_path)
    assert counts["layer_calls"] <= LAYERS + LAYERS // 2, "the pass, and the probe's half"
    assert counts["attend_calls"] <= LAYERS + LAYERS // 2
    assert counts["block_writes"] == LAYERS
    assert counts["sql"]["on the path"] <= 3
    steps = counts["engine_steps"]
    assert steps["all"] - steps["empty"] == 1, "vLLM computes the last token"
    assert counts["operations"]["this package"] <= 60 * LAYERS
    assert counts["own"]["operations"] == {
        "this package": 0,
        "vLLM": counts["operations"]["vLLM"],
    }, "the last token takes as many operations as a whole prompt"
