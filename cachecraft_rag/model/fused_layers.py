"""Decoder layers with compiled norms, gates and residual sums, in place of transformers' own on a CPU.

Between its products a layer runs some twenty small operations, each dispatched and woken alone. Where the class of a
model's layers is known, three compiled ones take their place (`kernels/cpu`), and for few rows, such as decode steps,
one call computes the whole layer and reads its weights at the memory's speed. Products stay the modules of the model
where they are no plain linear layers: adapters, quantised ones. A layer with hooks runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from cachecraft_rag.compute.row_pass import plain_rows
from cachecraft_rag.compute.stack import AttentionSettings, LayerPass
from cachecraft_rag.kernels.cpu import calls
from cachecraft_rag.kernels.cpu.library import kernels_for

KNOWN = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})
_CHECKED_ROWS = 3
_FEW_ROWS = 8  # of more rows torch's products are faster
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}  # of the norm of what the model's own layer gives


def _plain_linear(module: Any) -> bool:
    return type(module) is torch.nn.Linear and not (module._forward_hooks or module._forward_pre_hooks)


def product(module: Any, x: Tensor) -> Tensor:
    """What a linear module makes of `[1, rows, width]`."""
    if x.shape[1] > _FEW_ROWS or not _plain_linear(module):
        return cast(Tensor, module(x))
    run = kernels_for(x, module.weight)
    if run is None or not (x.is_contiguous() and module.weight.is_contiguous()):
        return cast(Tensor, module(x))
    return calls.linear(run, x, module.weight, module.bias)


class FusedLayer:
    """One layer of a known class; its settings of attention are those that transformers calls ours with."""

    def __init__(self, layer: Any, index: int, settings: AttentionSettings, *, rotary_dim: int) -> None:
        self.rotary_dim = rotary_dim
        self._layer, self._index, self._settings = layer, index, settings
        self._call: calls.LayerCall | None = None
        self._held: list[tuple[dict[str, Any], str, Any]] = []  # modules and tensors whose addresses the call has
        self._hooks: list[dict[int, Any]] = []  # of these modules

    def _whole(self, hidden: Tensor) -> calls.LayerCall | None:
        """The call that computes the whole layer at once; None where a product is not a plain linear layer's."""
        own = self._layer
        attention, mlp = own.self_attn, own.mlp
        linear = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        linear += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        if not all(_plain_linear(one) for one in linear):
            return None
        norms = [own.input_layernorm, own.post_attention_layernorm]
        norms += [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
        weights = [one.weight for one in (*linear, *norms)] + [one.bias for one in linear if one.bias is not None]
        if any(one.dtype != hidden.dtype or not one.is_contiguous() for one in weights):
            return None
        dim, queries = attention.head_dim, linear[0].out_features
        call = calls.LayerCall(
            hidden_size=hidden.shape[2], inner_size=linear[4].out_features, heads=queries // dim, dim=dim
        )
        call.kv_heads = linear[1].out_features // dim
        call.width, call.key_row = self.rotary_dim, call.kv_heads * dim
        if call.heads // call.kv_heads > calls.FEW or dim > calls.MOST_DIM or dim % 2:
            return None
        for number, one in enumerate(linear):
            call.weights[number] = one.weight.data_ptr()
            call.biases[number] = None if one.bias is None else one.bias.data_ptr()
        for name, number, one in zip(("norm", "after_norm", "q_norm", "k_norm"), range(4), norms, strict=False):
            setattr(call, name, one.weight.data_ptr())
            call.eps[number] = one.variance_epsilon
        call.scale, call.softcap = self._settings.scale, self._settings.softcap or 0.0
        call.window, call.bfloat = self._settings.window or 0, hidden.dtype == torch.bfloat16
        modules = (own, attention, mlp, mlp.act_fn, *linear, *norms)
        self._hooks = [table for one in modules for table in (one._forward_hooks, one._forward_pre_hooks)]
        tables = [one._modules for one in (own, attention, mlp)] + [one._parameters for one in (*linear, *norms)]
        self._held = [(table, name, part) for table in tables for name, part in table.items()]
        self._call = call
        return call

    @property
    def _known(self) -> calls.LayerCall | None:
        """The call of the last time, if the layer is still the same and nobody watches it; takes a few microseconds."""
        if (
            self._call is None
            or any(self._hooks)
            or any(table.get(name) is not part for table, name, part in self._held)
        ):
            return None
        return self._call

    @property
    def hooked(self) -> bool:
        """True if somebody watches the layer or a part that is replaced here."""
        own = self._layer
        parts = (own, own.self_attn, own.mlp, own.input_layernorm, own.post_attention_layernorm, own.mlp.act_fn)
        return any(part._forward_hooks or part._forward_pre_hooks for part in parts)

    def __call__(self, hidden: Tensor, layer_pass: LayerPass) -> Tensor | None:
        """What the layer makes of `[1, rows, hidden]`; None where the kernels do not take it."""
        few = hidden.shape[1] <= _FEW_ROWS
        if few and (call := self._known) is not None and call.bfloat == (hidden.dtype == torch.bfloat16):
            run, rows = kernels_for(hidden), plain_rows(layer_pass, self._index)
            if run is not None and rows:
                return calls.layer(run, call, hidden, rows)
        own, attention = self._layer, self._layer.self_attn
        norm = own.input_layernorm
        run = kernels_for(hidden, norm.weight, own.post_attention_layernorm.weight)
        if run is None or self.hooked:
            return None
        if few and (rows := plain_rows(layer_pass, self._index)) and (call := self._whole(hidden)) is not None:
            return calls.layer(run, call, hidden, rows)
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
def fused_layers(
    layers: Sequence[Any],
    hidden_size: int,
    dtype: torch.dtype,
    *,
    rotary_dims: Sequence[int],
    run: Callable[[int, Tensor, Tensor, LayerPass], Tensor],
) -> list[FusedLayer] | None:
    """Return the fused layers of a model; None if its class is not known or one of them differs from the model's own.

    Args:
        layers: the model's decoder layers.
        rotary_dims: for each layer, the dimensions of a head that it rotates.
        run: runs a stock layer: its number, hidden states, positions and the pass that attends.
    """
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
        own = run(index, hidden, torch.arange(_CHECKED_ROWS), seen)
        assert seen.settings is not None, "each layer attends"
        fused = FusedLayer(layer, index, seen.settings, rotary_dim=rotary_dims[index])
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
