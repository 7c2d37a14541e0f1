"""Quantised copies of a checkpoint, in the forms that published models have.

A new kind is an entry in `KINDS` and in "Over vLLM" of docs/models.md; usually it needs no code.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32  # input channels with one scale, in 4-bit weights


def int8_weights(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Return a weight in int8 with one scale for each output channel, as compressed-tensors stores it."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return {
        f"{name}.weight": (weight / scale).round().to(torch.int8),
        f"{name}.weight_scale": scale,
    }


def fp8_weights(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Return a weight in FP8 with one scale for each output channel, as compressed-tensors stores it."""
    scale = weight.abs().amax(dim=1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return {
        f"{name}.weight": (weight / scale).to(torch.float8_e4m3fn),
        f"{name}.weight_scale": scale,
    }


def _in_4_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return integers from 0 to 15 `[out, in]`, 8 of which are zero, and scales `[out, groups]`."""
    groups = weight.reshape(weight.shape[0], -1, GROUP)
    scales = groups.abs().amax(dim=2) / 7
    integers = (groups / scales[..., None]).round().clamp(-8, 7) + 8
    return integers.reshape(weight.shape).to(torch.int64), scales


def _packed(integers: Tensor) -> Tensor:
    """Return 4-bit integers `[rows, columns]` packed by eight along the columns into int32."""
    eights = integers.reshape(integers.shape[0], -1, 8)
    words = (eights << (4 * torch.arange(8))).sum(dim=2)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def int4_weights(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Return a weight in 4 bits as compressed-tensors packs it."""
    integers, scales = _in_4_bits(weight)
    return {
        f"{name}.weight_packed": _packed(integers),
        f"{name}.weight_scale": scales,
        f"{name}.weight_shape": torch.tensor(weight.shape),
    }


def gptq_weights(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Return a weight in 4 bits as GPTQ packs it."""
    integers, scales = _in_4_bits(weight)
    groups = scales.shape[1]
    zeros = torch.full((groups, weight.shape[0]), 7)  # GPTQ stores the zero point minus one
    return {
        f"{name}.qweight": _packed(integers).t().contiguous(),
        f"{name}.scales": scales.t().contiguous(),
        f"{name}.qzeros": _packed(zeros),
        f"{name}.g_idx": (torch.arange(weight.shape[1]) // GROUP).to(torch.int32),
    }


def awq_weights(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Return a weight in 4 bits as AWQ packs it: along the output channels, in an order of their own."""
    integers, scales = _in_4_bits(weight)
    zeros = torch.full((scales.shape[1], weight.shape[0]), 8)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(values: Tensor) -> Tensor:
        eights = values.reshape(values.shape[0], -1, 8)[..., order]
        return _packed(eights.reshape(values.shape))

    return {
        f"{name}.qweight": packed(integers.t()),
        f"{name}.scales": scales.t().contiguous(),
        f"{name}.qzeros": packed(zeros),
    }


def _compressed_tensors(form: str, weights: Mapping[str, Any], inputs: object) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


_INT = {"type": "int", "symmetric": True}
_FP8 = {"type": "float", "symmetric": True, "num_bits": 8}
# By name: how a weight is stored, and what the config says about it.
KINDS: dict[str, tuple[Callable[[str, Tensor], dict[str, Tensor]], dict[str, Any]]] = {
    "compressed-tensors int8": (
        int8_weights,
        _compressed_tensors(
            "int-quantized",
            _INT | {"num_bits": 8, "strategy": "channel", "dynamic": False},
            _INT | {"num_bits": 8, "strategy": "token", "dynamic": True},
        ),
    ),
    "compressed-tensors FP8": (
        fp8_weights,
        _compressed_tensors(
            "float-quantized",
            _FP8 | {"strategy": "channel", "dynamic": False},
            _FP8 | {"strategy": "token", "dynamic": True},
        ),
    ),
    "compressed-tensors int4": (
        int4_weights,
        _compressed_tensors(
            "pack-quantized",
            _INT | {"num_bits": 4, "strategy": "group", "group_size": GROUP, "dynamic": False},
            None,
        ),
    ),
    "GPTQ int4": (
        gptq_weights,
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "sym": True,
            "desc_act": False,
            "checkpoint_format": "gptq",
        },
    ),
    "AWQ int4": (
        awq_weights,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
        },
    ),
}


def save_quantised(plain: Path, kind: str, folder: Path) -> Path:
    """Copy a checkpoint with the linear weights of its layers quantised."""
    shutil.copytree(plain, folder)
    quantise, config = KINDS[kind]
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            tensors |= quantise(name.removesuffix(".weight"), tensor)
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config_file = folder / "config.json"
    settings = json.loads(config_file.read_text()) | {"quantization_config": config}
    config_file.write_text(json.dumps(settings))
    return folder
