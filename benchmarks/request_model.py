"""Cost model of a request over vLLM on a GPU, relative to vLLM's own prefill: a model, not a measurement.

Llama-3-8B's shape in bf16 on an H100, r = 0.15, chunks of 512 tokens in page-locked host memory. vLLM compiles its
model, and its step for the last token is a CUDA graph. Python's times are those of one core of a busy `epyc-zen4`; the
GPU's rates were measured on an H100 (docs/results/gpu.md) or follow from a simulation of the attention kernel's grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

_LAYERS = 32
_PROBED_LAYERS = 16
_TOKEN_BYTES = 131072  # keys and values of a token in all layers, bf16
_PRODUCTS = 2 * 6.98e9  # operations of a row in the products of all layers
_WIDTH = 4096  # query heads times dimensions of a head


@dataclass(frozen=True, slots=True)
class Length:
    """A prompt of one length.

    tokens           tokens of the prompt
    own_ms           vLLM's own prefill, measured
    rows             rows of the last pass
    mean_keys        keys that a row attends to, on average
    product_rate     operations a second of the products at so many rows
    attention_rate   the same of attention: measured, times what the new order of tiles gains in a simulation
    elementwise_ms   norms, rotation, gates and residuals of a compiled model
    planning_ms      Python: seal, plan in the scheduler, plan, buffers and rows in the worker
    second_plan_ms   Python: the plan after the probe
    """

    tokens: int
    own_ms: float
    rows: int
    mean_keys: int
    product_rate: float
    attention_rate: float
    elementwise_ms: float
    planning_ms: float
    second_plan_ms: float


LENGTHS = (
    Length(4232, 117, 1119, 2956, 495e12, 310e12 * 0.81 / 0.74, 2.8, 4.0, 1.0),
    Length(8328, 236, 1734, 5313, 540e12, 336e12 * 0.92 / 0.80, 3.9, 5.0, 1.3),
    Length(16536, 517, 2965, 9754, 570e12, 373e12 * 0.96 / 0.89, 5.6, 7.0, 2.0),
)


@dataclass(frozen=True, slots=True)
class Host:
    """Times of the host in milliseconds; all but the first two are multiplied with `factor`.

    torch_launch   CUDA's part of launching an operation of torch
    triton_launch  CUDA's part of launching a Triton kernel
    triton_call    Python's part of launching a Triton kernel
    layer          Python's part of a layer of vLLM's compiled model, with this package's operations of torch
    copy_call      a call that copies a group of layers to the GPU
    end            written blocks and report
    factor         speed of this host relative to the one measured: an H100's took 0.75 to 1.5
    """

    torch_launch: float = 0.004
    triton_launch: float = 0.008
    triton_call: float = 0.045
    layer: float = 0.22
    copy_call: float = 0.1
    end: float = 1.0
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class GPU:
    """Speeds of the GPU.

    bytes_per_s     PCIe from page-locked memory
    probe_ms        the probe's layers: they read half of the weights
    drain_ms        the GPU is idle while the host reads the probe's scores
    first_layer_ms  from the first launch of the pass to a GPU that is busy
    token_ms        vLLM's step for the last token, from its CUDA graph
    """

    bytes_per_s: float = 54e9
    probe_ms: float = 2.6
    drain_ms: float = 0.8
    first_layer_ms: float = 1.0
    token_ms: float = 6.5


def phases(length: Length, counts: Mapping[str, Any], host: Host, gpu: GPU) -> dict[str, float]:
    """Return the milliseconds of each phase on the critical path.

    `counts` are those of `device_costs.count` for 32 layers.
    """
    kernels = counts["kernels"]
    in_layers = sum(kernels.values()) - kernels["place"]
    of_torch = counts["launches"] - sum(kernels.values())
    each = host.factor * host.triton_call + host.triton_launch
    layers = _LAYERS + _PROBED_LAYERS
    per_layer = host.factor * host.layer
    per_layer += (in_layers * each + of_torch * host.torch_launch) / layers
    copying = counts["copies"] * host.factor * host.copy_call + kernels["place"] * each
    bus = 1e3 * _TOKEN_BYTES * length.tokens / gpu.bytes_per_s
    planned = host.factor * length.planning_ms
    # copies begin with the request, before the plan's rows are made
    probe = max(_PROBED_LAYERS * per_layer, gpu.probe_ms, bus / 2 - planned / 2)
    products = 1e3 * _PRODUCTS * length.rows / length.product_rate
    attention = 1e3 * 4 * _WIDTH * _LAYERS * length.rows * length.mean_keys / length.attention_rate
    computed = products + attention + length.elementwise_ms
    return {
        "planning": planned + copying,
        "probe": probe + gpu.drain_ms,
        "second plan": host.factor * length.second_plan_ms,
        "pass": max(_LAYERS * per_layer, computed, bus - probe) + gpu.first_layer_ms,
        "end": host.factor * host.end,
        "last token": gpu.token_ms,
    }


def model(counts: Mapping[str, Any]) -> dict[str, Any]:
    """Return phases in milliseconds and the ratio to vLLM's own prefill, by tokens and for two hosts."""
    host = Host()
    gpu = GPU()
    figures: dict[str, Any] = {"host": asdict(host), "gpu": asdict(gpu), "tokens": {}}
    for length in LENGTHS:
        parts = phases(length, counts, host, gpu)
        faster = phases(length, counts, replace(host, factor=0.75), gpu)
        figures["tokens"][str(length.tokens)] = {
            "ms": {name: round(ms, 1) for name, ms in parts.items()},
            "ratio": round(sum(parts.values()) / length.own_ms, 3),
            "ratio_on_a_faster_host": round(sum(faster.values()) / length.own_ms, 3),
        }
    return figures
