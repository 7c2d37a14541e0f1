"""The cost model of a request over vLLM."""

from __future__ import annotations

from typing import Any

from benchmarks.request_model import GPU, LENGTHS, Host, model, phases


def counts(launches_per_layer: int) -> dict[str, Any]:
    """Counts of 32 layers and a probe of 16."""
    kernels = {"place": 8, "attend": 48 * launches_per_layer}
    return {"launches": sum(kernels.values()) + 10, "copies": 8, "kernels": kernels}


def test_each_length_takes_less_than_vllms_own_prefill() -> None:
    figures = model(counts(3))["recompute_ratio"]["0.15"]
    ratios = [figures[tokens]["ratio"] for tokens in ("4232", "8328", "16536")]
    assert 0.2 < ratios[2] < ratios[1] < ratios[0] < 0.7


def test_launches_cost_time_only_where_the_gpu_waits_for_them() -> None:
    few, many, very_many = (
        phases(LENGTHS[0], 0.15, counts(launches), Host(), GPU()) for launches in (3, 10, 100)
    )
    assert few["probe"] < many["probe"], "it computes little"
    assert few["pass"] == many["pass"], "Python launches it faster than the GPU computes"
    assert few["pass"] < very_many["pass"]
