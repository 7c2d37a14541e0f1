"""Cost model of a request over vLLM on a GPU, relative to vLLM's own prefill: a model, not a measurement.

Llama-3-8B's shape in bf16 on an H100, an instruction of 32 tokens, chunks of 512 tokens in page-locked host memory and
a question of 64. vLLM compiles its model, and its step for the last token is a CUDA graph. Python's times are those of
one core of a busy `epyc-zen4`; the GPU's rates were measured on an H100 (docs/results/gpu.md) or follow from a
simulation of the attention kernel's grid.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from cachecraft_rag.planning.config import DEFAULT_RATIO

RATIOS = (0.15, DEFAULT_RATIO)

_LAYERS = 32
_PROBED_LAYERS = 16
_TOKEN_BYTES = 131072  # keys and values of a token in all layers, bf16
_PRODUCTS = 2 * 6.98e9  # operations of a row in the products of all layers
_HEADS, _KV_HEADS, _HEAD = 32, 8, 128
_MULTIPROCESSORS = 132
_QUERIES, _KEYS = 128, 64  # of a tile of the attention kernel
_INSTRUCTION, _QUESTION = 32, 64


@dataclass(frozen=True, slots=True)
class Length:
    """A prompt of one length.

    tokens           tokens of the prompt
    own_ms           vLLM's own prefill, measured
    planning_ms      Python: seal, plan in the scheduler, plan, buffers and rows in the worker
    second_plan_ms   Python: the plan after the probe
    """

    tokens: int
    own_ms: float
    planning_ms: float
    second_plan_ms: float


LENGTHS = (Length(4232, 117, 4.0, 1.0), Length(8328, 236, 5.0, 1.3), Length(16536, 517, 7.0, 2.0))


def rows_of(tokens: int, ratio: float) -> np.ndarray:
    """Return the positions of the last pass's rows: scattered over the chunks, and the question; int64 `[rows]`."""
    chunks = np.arange(_INSTRUCTION, tokens - _QUESTION)
    drawn = np.random.default_rng(0).choice(chunks, round(ratio * len(chunks)), replace=False)
    return np.concatenate([np.sort(drawn), np.arange(tokens - _QUESTION, tokens)])


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


def products_ms(rows: int) -> float:
    """Milliseconds of the products of all layers, which are computed in tiles of 128 rows.

    Rates were measured with 1,119, 1,734 and 2,965 rows; with fewer they fall as they do between the first two.
    """
    padded = 128 * math.ceil(rows / 128)
    octaves = np.log2([1152, 1792, 3072])
    rates = np.array([510e12, 558e12, 590e12])
    slope = (rates[1] - rates[0]) / (octaves[1] - octaves[0])
    below = max(0.0, octaves[0] - math.log2(padded))
    rate = np.interp(math.log2(padded), octaves, rates) - slope * below
    return float(1e3 * _PRODUCTS * padded / rate)


def attention_ms(positions: np.ndarray) -> float:
    """Milliseconds of attention in all layers, by a simulation of the kernel's grid: the last tiles of all heads first.

    A multiprocessor that computes nothing else reaches its share of 419 TFLOP/s: what was measured at three lengths,
    divided by the efficiency that the simulation says for the order of tiles at that time.
    """
    group = _HEADS // _KV_HEADS
    tiles = math.ceil(len(positions) * group / _QUERIES)
    until = [0.0] * _MULTIPROCESSORS
    for tile in reversed(range(tiles)):
        last = min((tile * _QUERIES + _QUERIES - 1) // group, len(positions) - 1)
        steps = math.ceil((int(positions[last]) + 1) / _KEYS) + 1.5  # to begin and to end
        for _ in range(_KV_HEADS):
            heapq.heappush(until, heapq.heappop(until) + steps)
    operations = 4 * _HEAD * _QUERIES * _KEYS * max(until) * _MULTIPROCESSORS
    return 1e3 * _LAYERS * operations / 419e12


def phases(
    length: Length, ratio: float, counts: Mapping[str, Any], host: Host, gpu: GPU
) -> dict[str, float]:
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
    positions = rows_of(length.tokens, ratio)
    elementwise = 1.0 + 0.0016 * len(positions)  # of a compiled model
    computed = products_ms(len(positions)) + attention_ms(positions) + elementwise
    return {
        "planning": planned + copying,
        "probe": probe + gpu.drain_ms,
        "second plan": host.factor * length.second_plan_ms,
        "pass": max(_LAYERS * per_layer, computed, bus - probe) + gpu.first_layer_ms,
        "end": host.factor * host.end,
        "last token": gpu.token_ms,
    }


def model(counts: Mapping[str, Any]) -> dict[str, Any]:
    """Return phases in milliseconds and ratios to vLLM's own prefill, by recompute ratio and tokens, for two hosts."""
    host = Host()
    gpu = GPU()
    figures: dict[str, Any] = {"host": asdict(host), "gpu": asdict(gpu), "recompute_ratio": {}}
    for ratio in RATIOS:
        by_tokens = {}
        for length in LENGTHS:
            parts = phases(length, ratio, counts, host, gpu)
            faster = phases(length, ratio, counts, replace(host, factor=0.75), gpu)
            by_tokens[str(length.tokens)] = {
                "rows": len(rows_of(length.tokens, ratio)),
                "ms": {name: round(ms, 1) for name, ms in parts.items()},
                "ratio": round(sum(parts.values()) / length.own_ms, 3),
                "ratio_on_a_faster_host": round(sum(faster.values()) / length.own_ms, 3),
            }
        figures["recompute_ratio"][str(ratio)] = by_tokens
    return figures
