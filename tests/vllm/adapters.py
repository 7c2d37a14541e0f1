"""LoRA adapters with random weights on disk, in the form of PEFT."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

RANK = 4
# names of the modules with an adapter, and the sizes of their input and output
_MODULES = {
    "self_attn.q_proj": ("hidden", "queries"),
    "self_attn.k_proj": ("hidden", "keys"),
    "self_attn.v_proj": ("hidden", "keys"),
    "self_attn.o_proj": ("queries", "hidden"),
    "mlp.down_proj": ("intermediate", "hidden"),
}


def save_adapter(model: Path, folder: Path, *, seed: int) -> Path:
    """Save an adapter of a Llama whose weights change what it answers; return the folder."""
    config = AutoConfig.from_pretrained(model)
    sizes = {
        "hidden": config.hidden_size,
        "intermediate": config.intermediate_size,
        "queries": config.num_attention_heads * config.head_dim,
        "keys": config.num_key_value_heads * config.head_dim,
    }
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config.num_hidden_layers):
        for module, (source, target) in _MODULES.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            down = torch.randn(RANK, sizes[source], generator=generator)
            up = torch.randn(sizes[target], RANK, generator=generator)
            weights[f"{name}.lora_A.weight"] = down * 0.1
            weights[f"{name}.lora_B.weight"] = up * 0.1
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": [module.partition(".")[2] for module in _MODULES],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder
