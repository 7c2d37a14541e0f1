"""Decoder layers of known classes with fewer operations than transformers' own.

Between its products a layer runs some twenty small operations, each dispatched separately. If the class of a model's
layers is known, a few operations replace them.

On a CPU they are compiled (`kernels/cpu`). For few rows, such as decode steps, one call computes the whole layer and
reads its weights at the memory's speed. On a GPU they are torch's fused norm, the gate and the sums: a launch from
Python takes ten microseconds, which is longer than most of these operations take to compute.

Products that are no plain linear layers (adapters, quantised weights) stay the modules of the model. A layer with hooks
runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from cachecraft_rag.compute.row_pass import plain_rows
from cachecraft_rag.compute.stack import AttentionSettings, LayerPass
from cachecraft_rag.kernels.cpu import calls
from cachecraft_rag.kernels.cpu.library import kernels_for

KNOWN = frozenset(
    {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
)

_CHECKED_ROWS = 3

# Most rows of the compiled products: torch's are faster for more.
_FEW_ROWS = 8

# Largest error, relative to the norm of the output of the model's own layer.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def _plain_linear(module: object) -> bool:
    """Return True for a linear layer whose weight is a plain tensor: a quantised one has no floats at its address."""
    if type(module) is not torch.nn.Linear or type(module.weight) is not torch.nn.Parameter:
        return False
    return not (module._forward_hooks or module._forward_pre_hooks)


def product(module: Any, x: Tensor) -> Tensor:
    """Apply a linear module to `[1, rows, width]`; return `[1, rows, outputs]` in the same dtype.

    A compiled kernel, which does not check the width, computes up to 8 rows of a plain layer on a CPU.
    """
    if x.shape[1] > _FEW_ROWS or not _plain_linear(module):
        return cast(Tensor, module(x))
    run = kernels_for(x, module.weight)
    if run is None or not (x.is_contiguous() and module.weight.is_contiguous()):
        return cast(Tensor, module(x))
    return calls.linear(run, x, module.weight, module.bias)


class KnownLayer:
    """A layer of a known class; its subclasses run it with fewer operations than the model's own.

    Args:
        layer: the model's own layer.
        index: its number.
        settings: the attention settings that transformers passes to our attention function.
        rotary_dim: dimensions of a head that the layer rotates.
    """

    def __init__(
        self, layer: Any, index: int, settings: AttentionSettings, *, rotary_dim: int
    ) -> None:
        self.rotary_dim = rotary_dim
        self._layer = layer
        self._index = index
        self._settings = settings

    @property
    def hooked(self) -> bool:
        """True if the layer or a part that is replaced here has forward hooks, which a fused layer would not run."""
        layer = self._layer
        parts = [
            layer,
            layer.self_attn,
            layer.mlp,
            layer.input_layernorm,
            layer.post_attention_layernorm,
            layer.mlp.act_fn,
        ]
        if hasattr(layer.self_attn, "q_norm"):
            parts += [layer.self_attn.q_norm, layer.self_attn.k_norm]
        return any(part._forward_hooks or part._forward_pre_hooks for part in parts)


class GPULayer(KnownLayer):
    """A layer of a known class on a GPU, with torch's fused operations between its products."""

    def __call__(self, hidden: Tensor, layer_pass: LayerPass) -> Tensor | None:
        """Run the layer over `[1, rows, hidden]` and return its output, of the same shape; None if it has hooks."""
        if self.hooked:
            return None
        layer = self._layer
        attention = layer.self_attn
        norm = layer.input_layernorm
        x = _normed(hidden, norm.weight, norm.variance_epsilon)
        heads = (x.shape[1], -1, attention.head_dim)
        q = attention.q_proj(x).view(heads)
        k = attention.k_proj(x).view(heads)
        v = attention.v_proj(x).view(heads)
        if hasattr(attention, "q_norm"):
            q = _normed(q, attention.q_norm.weight, attention.q_norm.variance_epsilon)
            k = _normed(k, attention.k_norm.weight, attention.k_norm.variance_epsilon)
        out = layer_pass.attend(self._index, q, k, v, self._settings)

        hidden = hidden + attention.o_proj(out.reshape(1, len(q), -1))
        norm = layer.post_attention_layernorm
        x = _normed(hidden, norm.weight, norm.variance_epsilon)
        gated = silu(layer.mlp.gate_proj(x)).mul_(layer.mlp.up_proj(x))
        return cast(Tensor, hidden + layer.mlp.down_proj(gated))


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x / rms(x) · weight` along the last dimension."""
    return rms_norm(x, (x.shape[-1],), weight, eps)


class CompiledLayer(KnownLayer):
    """A layer of a known class on a CPU, with compiled operations between its products."""

    def __init__(
        self, layer: torch.nn.Module, index: int, settings: AttentionSettings, *, rotary_dim: int
    ) -> None:
        super().__init__(layer, index, settings, rotary_dim=rotary_dim)
        self._call: calls.LayerCall | None = None
        # modules and tensors that the call points to
        self._held: list[tuple[dict[str, object], str, object]] = []
        self._hooks: list[dict[int, object]] = []  # of these modules

    def _whole(self, hidden: Tensor) -> calls.LayerCall | None:
        """Return the call that computes the whole layer; None if a product is not a plain linear layer's."""
        attention = self._layer.self_attn
        mlp = self._layer.mlp
        linear = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        linear += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        if not all(_plain_linear(module) for module in linear):
            return None

        norms = [self._layer.input_layernorm, self._layer.post_attention_layernorm]
        if hasattr(attention, "q_norm"):
            norms += [attention.q_norm, attention.k_norm]
        weights = [module.weight for module in (*linear, *norms)]
        weights += [module.bias for module in linear if module.bias is not None]
        if any(weight.dtype != hidden.dtype or not weight.is_contiguous() for weight in weights):
            return None

        call = self._call_for(hidden, linear, norms)
        heads_per_key = call.heads // call.kv_heads
        if heads_per_key > calls.FEW or call.dim > calls.MOST_DIM or call.dim % 2:
            return None

        modules = (self._layer, attention, mlp, mlp.act_fn, *linear, *norms)
        self._hooks = []
        for module in modules:
            self._hooks += [module._forward_hooks, module._forward_pre_hooks]
        tables = [module._modules for module in (self._layer, attention, mlp)]
        tables += [module._parameters for module in (*linear, *norms)]
        self._held = [(table, name, part) for table in tables for name, part in table.items()]
        self._call = call
        return call

    def _call_for(
        self, hidden: Tensor, linear: Sequence[Any], norms: Sequence[Any]
    ) -> calls.LayerCall:
        """Return the call with the layer's shapes, and with the addresses of its weights."""
        dim = self._layer.self_attn.head_dim
        call = calls.LayerCall(
            hidden_size=hidden.shape[2],
            inner_size=linear[4].out_features,
            heads=linear[0].out_features // dim,
            dim=dim,
        )
        call.kv_heads = linear[1].out_features // dim
        call.width = self.rotary_dim
        call.key_row = call.kv_heads * dim
        for number, module in enumerate(linear):
            call.weights[number] = module.weight.data_ptr()
            call.biases[number] = None if module.bias is None else module.bias.data_ptr()
        norm_fields = ("norm", "after_norm", "q_norm", "k_norm")
        for number, norm in enumerate(norms):
            setattr(call, norm_fields[number], norm.weight.data_ptr())
            call.eps[number] = norm.variance_epsilon
        call.scale = self._settings.scale
        call.softcap = self._settings.softcap or 0.0
        call.window = self._settings.window or 0
        call.bfloat = hidden.dtype == torch.bfloat16
        return call

    @property
    def _known(self) -> calls.LayerCall | None:
        """The last call, if the layer is still the same and has no hooks. The test takes a few microseconds."""
        if self._call is None or any(self._hooks):
            return None
        if any(table.get(name) is not part for table, name, part in self._held):
            return None
        return self._call

    def __call__(self, hidden: Tensor, layer_pass: LayerPass) -> Tensor | None:
        """Run the layer over `[1, rows, hidden]` and return its output, of the same shape.

        Returns None if it has hooks, or if the kernels do not support these tensors: run the model's own layer then.
        """
        is_few = hidden.shape[1] <= _FEW_ROWS
        if (
            is_few
            and (call := self._known) is not None
            and call.bfloat == (hidden.dtype == torch.bfloat16)
        ):
            run = kernels_for(hidden)
            rows = plain_rows(layer_pass, self._index)
            if run is not None and rows:
                return calls.layer(run, call, hidden, rows)

        layer = self._layer
        run = kernels_for(
            hidden, layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        )
        if run is None or self.hooked:
            return None
        if (
            is_few
            and (rows := plain_rows(layer_pass, self._index))
            and (call := self._whole(hidden)) is not None
        ):
            return calls.layer(run, call, hidden, rows)

        attention = layer.self_attn
        hidden = hidden.contiguous()
        x = calls.norm(
            run, hidden, layer.input_layernorm.weight, layer.input_layernorm.variance_epsilon
        )
        heads = (x.shape[1], -1, attention.head_dim)
        q = product(attention.q_proj, x).view(heads)
        k = product(attention.k_proj, x).view(heads)
        v = product(attention.v_proj, x).view(heads)
        query_norm = getattr(attention, "q_norm", None)
        if query_norm is not None:
            q = calls.norm(run, q, query_norm.weight, query_norm.variance_epsilon)
            k = calls.norm(run, k, attention.k_norm.weight, attention.k_norm.variance_epsilon)
        out = layer_pass.attend(self._index, q, k, v, self._settings)

        hidden = hidden.clone()  # a joint forward may be repeated
        added = product(attention.o_proj, out.reshape(1, len(q), -1)).contiguous()
        norm = layer.post_attention_layernorm
        x = calls.norm(run, hidden, norm.weight, norm.variance_epsilon, added)
        gate = product(layer.mlp.gate_proj, x).contiguous()
        up = product(layer.mlp.up_proj, x).contiguous()
        return hidden.add_(product(layer.mlp.down_proj, calls.gated(run, gate, up)))


@torch.inference_mode()
def fused_layers(
    layers: Iterable[Any],
    hidden_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    rotary_dims: Sequence[int],
    run: Callable[[int, Tensor, Tensor, LayerPass], Tensor],
    kind: type[CompiledLayer | GPULayer] | None = None,
) -> list[CompiledLayer | GPULayer] | None:
    """Return the fused layers of a model, in order, each tried on three rows of noise.

    Returns None if a layer's class or activation is not known, it uses attention sinks or has hooks, the kernels are
    missing or do not support the dtype, or a fused layer's output differs from that of the model's own by more than
    rounding. The model is not changed.

    Args:
        hidden_size: width of the hidden states.
        rotary_dims: for each layer, the dimensions of a head that it rotates.
        run: runs a stock layer, given its number, hidden states, positions and the pass that attends.
        kind: class of the result; None = `GPULayer` on a CUDA device, else `CompiledLayer`.
        layers, dtype, device: of the model.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(
        1, _CHECKED_ROWS, hidden_size, generator=generator, dtype=torch.float32
    ).to(device, dtype)
    kind = kind or (GPULayer if device.type == "cuda" else CompiledLayer)
    if dtype not in _TOLERANCE or (kind is CompiledLayer and kernels_for(hidden) is None):
        return None
    fused_layers: list[CompiledLayer | GPULayer] = []
    for index, layer in enumerate(layers):
        if type(layer).__name__ not in KNOWN or not isinstance(layer.mlp.act_fn, torch.nn.Module):
            return None
        if type(layer.mlp.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
            return None
        recorder = _Recorder()
        expected = run(index, hidden, torch.arange(_CHECKED_ROWS, device=device), recorder)
        assert recorder.settings is not None, "each layer attends"
        if recorder.settings.sinks is not None:  # the compiled layer knows none
            return None
        fused = kind(layer, index, recorder.settings, rotary_dim=rotary_dims[index])
        out = fused(hidden, _Recorder())
        if out is None or out.dtype != expected.dtype:
            return None
        if not float((out - expected).norm()) <= _TOLERANCE[dtype] * float(expected.norm()):
            return None
        fused_layers.append(fused)
    return fused_layers


class _Recorder:
    """A pass that records a layer's attention settings; its attention returns the mean of queries, keys and values."""

    def __init__(self) -> None:
        self.settings: AttentionSettings | None = None

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, settings: AttentionSettings
    ) -> Tensor:
        """See `LayerPass`."""
        self.settings = settings
        return (q + (k + v).repeat_interleave(q.shape[1] // k.shape[1], 1)) / 3
