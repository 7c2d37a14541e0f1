"""Decoder layers with compiled norms, gates and residual sums, in place of transformers' own on a CPU.

Between its products a layer runs some twenty small operations, each dispatched and woken alone. Where the class of a
model's layers is known, three compiled ones take their place (`kernels/cpu`). Products stay the modules of the model,
adapters and quantised ones too; only those of few rows by plain linear layers are compiled. A layer with hooks runs as
it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from cachecraft_rag.compute.stack import AttentionSettings, LayerPass
from cachecraft_rag.kernels.cpu import calls
from cachecraft_rag.kernels.cpu.library import kernels_for

KNOWN = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})
_CHECKED_ROWS = 3
_FEW_ROWS = 8  # of more rows torch's products are faster
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}  # of the norm of what the model's own layer gives


def product(module: Any, x: Tensor) -> Tensor:
    """What a linear module makes of `[1, rows, width]`."""
    few = x.shape[1] <= _FEW_ROWS and type(module) is torch.nn.Linear
    if not few or module._forward_hooks or module._forward_pre_hooks:
        return cast(Tensor, module(x))
    run = kernels_for(x, module.weight)
    if run is None or not (x.is_contiguous() and module.weight.is_contiguous()):
        return cast(Tensor, module(x))
    return calls.linear(run, x, module.weight, module.bias)


class FusedLayer:
    """One layer of a known class; its settings of attention are those that transformers calls ours with."""

    def __init__(self, layer: Any, index: int, settings: AttentionSettings) -> None:
        self._layer, self._index, self._settings = layer, index, settings

    @property
    def hooked(self) -> bool:
        """True if somebody watches the layer or a part that is replaced here."""
        own = self._layer
        parts = (own, own.self_attn, own.mlp, own.input_layernorm, own.post_attention_layernorm, own.mlp.act_fn)
        return any(part._forward_hooks or part._forward_pre_hooks for part in parts)

    def __call__(self, hidden: Tensor, layer_pass: LayerPass) -> Tensor | None:
        """What the layer makes of `[1, rows, hidden]`; None where the kernels do not take it."""
        own, attention = self._layer, self._layer.self_attn
        norm = own.input_layernorm
        run = kernels_for(hidden, norm.weight, own.post_attention_layernorm.weight)
        if run is None or self.hooked:
            return None
        hidden = hidden.contiguous()
        x = calls.norm(run, hidden, norm.weight, norm.variance_epsilon)
        heads = (x.shape[1], -1, attention.head_dim)
        q, k, v = (
            product(project, x).view(heads) for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if (of_queries := getattr(attention, "q_norm", None)) is not None:
            q = calls.norm(run, q, of_queries.weight, of_queries.variance_epsilon)
            k = calls.norm(run, k, attention.k_norm.weight, attention.k_norm.variance_epsilon)
        out = layer_pass.attend(self._index, q, k, v, self._settings)
        hidden = hidden.clone()  # a joint forward may be repeated
        norm, mlp = own.post_attention_layernorm, own.mlp
        added = product(attention.o_proj, out.reshape(1, len(q), -1)).contiguous()
        x = calls.norm(run, hidden, norm.weight, norm.variance_epsilon, added)
        inner = calls.gated(run, product(mlp.gate_proj, x).contiguous(), product(mlp.up_proj, x).contiguous())
        return hidden.add_(product(mlp.down_proj, inner))


@torch.inference_mode()
def fused_layers(layers: Sequence[Any], hidden_size: int, dtype: torch.dtype) -> list[FusedLayer] | None:
    """The fused layers of a model; None if its class is not known or one of them differs from the model's own."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, _CHECKED_ROWS, hidden_size, generator=generator, dtype=torch.float32).to(dtype)
    if kernels_for(hidden) is None or dtype not in _TOLERANCE:
        return None
    found = []
    for index, layer in enumerate(layers):
        if type(layer).__name__ not in KNOWN or not isinstance(layer.mlp.act_fn, torch.nn.Module):
            return None
        if type(layer.mlp.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
            return None
        seen = _Recorder()
        width = layer.self_attn.head_dim
        identity = hidden.new_ones(1, 1, width), hidden.new_zeros(1, 1, width)
        positions = torch.arange(_CHECKED_ROWS)[None]
        own = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=identity, layer_pass=seen)
        own = own[0] if isinstance(own, tuple) else own
        assert seen.settings is not None, "each layer attends"
        fused = FusedLayer(layer, index, seen.settings)
        ours = fused(hidden, _Recorder())
        if ours is None or not float((ours - own).norm()) <= _TOLERANCE[dtype] * float(own.norm()):
            return None
        found.append(fused)
    return found


class _Recorder:
    """A pass that notes how a layer attends; its attention gives the mean of values and queries."""

    def __init__(self) -> None:
        self.settings: AttentionSettings | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, settings: AttentionSettings) -> Tensor:
        """See `LayerPass`."""
        self.settings = settings
        return (q + (k + v).repeat_interleave(q.shape[1] // k.shape[1], 1)) / 3
