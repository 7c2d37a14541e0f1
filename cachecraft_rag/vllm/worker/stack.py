"""A vLLM worker's model as a `Stack`: stock layers, run one by one with raw keys and our own attention.

While a layer runs, two attributes of it are set and removed again: its rotary embedding is the identity, so that
queries and keys arrive raw (biases and norms applied), and its attention is the running pass. vLLM's layers carry
(hidden, residual); both travel in one tensor `[2, rows, hidden]`.

A pass fills its own buffer, and `write_blocks` copies that into vLLM's blocks when the pass is done. Rejected:
attention over the blocks themselves. Each backend has another block layout, and a pass that was given up would have
written into blocks that may belong to another request by then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from cachecraft_rag.compute.stack import AttentionSettings, LayerPass, keys_per_row_of
from cachecraft_rag.errors import UnsupportedModelError
from cachecraft_rag.kernels.attention_paths import UNMEASURED
from cachecraft_rag.kernels.memory import Recycler
from cachecraft_rag.model.attention_choice import measured_paths
from cachecraft_rag.types import DTypeName, KVLayout
from cachecraft_rag.vllm.worker.interfaces import Attention, CausalLM
from cachecraft_rag.vllm.worker.ranks import OneRank, TensorParallel


class WorkerStack:
    """One rank's decoder layers inside a vLLM worker; see `compute.stack.Stack`.

    Raises UnsupportedModelError with the reason if the passes cannot run these layers.
    """

    def __init__(self, model: CausalLM, ranks: OneRank | TensorParallel) -> None:
        self.ranks = ranks
        self._model = model
        self._layers = list(model.model.layers)
        reason = _unsupported_reason(self._layers)
        if reason is not None:
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot be served from chunk-caches: {reason}."
            )
        attention = self._layers[0].self_attn
        self._rotary = attention.rotary_emb
        parameter = next(model.parameters())
        self.device = parameter.device
        self.dtype = parameter.dtype
        self.layout = KVLayout(
            layers=len(self._layers),
            kv_heads=attention.attn.num_kv_heads,
            head_dim=attention.attn.head_size,
            dtype=cast(DTypeName, str(self.dtype).removeprefix("torch.")),
        )
        # From the config: the CPU build packs the weights and leaves empty tensors in their place.
        self.keys_per_row = keys_per_row_of(model.config)
        self.attention_paths = UNMEASURED
        self.memory = Recycler()
        if self.device.type == "cpu":
            self.attention_paths = measured_paths(
                self.dtype,
                heads=attention.attn.num_heads,
                kv_heads=self.layout.kv_heads,
                head_dim=self.layout.head_dim,
            )

    def embed(self, ids: Tensor) -> Tensor:
        """Embed token ids `[rows]` as `[2, rows, hidden]`, with a residual of zeros."""
        hidden = self._model.embed_input_ids(ids)
        return torch.stack((hidden, torch.zeros_like(hidden)))

    @property
    def rotary_kinds(self) -> Sequence[int]:
        """See `Stack.rotary_kinds`: all layers share one table."""
        return [0] * len(self._layers)

    def rope(self, positions: Tensor, kind: int = 0) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the model's own rotary module, each `[tokens, rotary_dim]`."""
        cos, sin = self._rotary.cos_sin_cache[positions].to(self.dtype).chunk(2, dim=-1)
        return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)

    def layer(
        self, index: int, hidden: Tensor, *, positions: Tensor, layer_pass: LayerPass
    ) -> Tensor:
        """See `Stack.layer`."""
        layer = self._layers[index]
        with self._taken_apart(layer.self_attn.attn, index, layer_pass):
            return torch.stack(layer(positions, hidden[0], hidden[1]))

    @contextmanager
    def _taken_apart(
        self, attention: Attention, index: int, layer_pass: LayerPass
    ) -> Iterator[None]:
        width = attention.head_size
        settings = _settings(attention)
        raised: list[Exception] = []

        def attend(
            query: Tensor, key: Tensor, value: Tensor, *_unused: object, **_named: object
        ) -> Tensor:
            q, k, v = (states.reshape(states.shape[0], -1, width) for states in (query, key, value))
            try:
                return layer_pass.attend(index, q, k, v, settings).reshape(query.shape[0], -1)
            except Exception as error:  # noqa: BLE001  # raised again below
                # Not raised here: the layer continues with sums over all ranks, where the others wait.
                raised.append(error)
                return torch.zeros_like(query)

        self._rotary.forward = lambda _positions, query, key=None, *_unused, **_named: (query, key)
        attention.forward = attend
        try:
            yield
        finally:
            del self._rotary.forward, attention.forward
        if raised:
            raise raised[0]

    def write_blocks(self, kv: Tensor, slots: Tensor, first: int) -> None:
        """Copy a finished buffer into vLLM's blocks.

        Args:
            kv: `[layers, 2, capacity, kv_heads, head_dim]`, rotated keys and values.
            slots: int64 `[tokens]`, slots in the blocks of the positions from `first` on.
        """
        last = first + len(slots)
        for layer, (keys, values) in zip(self._layers, kv, strict=True):
            attention = layer.self_attn.attn
            attention.impl.do_kv_cache_update(
                attention, keys[first:last], values[first:last], attention.kv_cache, slots
            )


def _settings(attention: Attention) -> AttentionSettings:
    impl = attention.impl
    softcap = getattr(impl, "logits_soft_cap", None) or getattr(impl, "softcap", None) or None
    return AttentionSettings(impl.scale, getattr(attention, "sliding_window", None), softcap)


def _unsupported_reason(layers: Sequence[object]) -> str | None:
    attentions: list[Any] = [getattr(layer, "self_attn", None) for layer in layers]
    if any(
        not hasattr(attention, name) for attention in attentions for name in ("rotary_emb", "attn")
    ):
        return "its layers are not laid out like Llama's, or another rank holds some of them"
    rotary = attentions[0].rotary_emb
    if any(attention.rotary_emb is not rotary for attention in attentions):
        return "its layers have rotary embeddings of their own"
    if not getattr(rotary, "is_neox_style", False) or not hasattr(rotary, "cos_sin_cache"):
        return (
            "its rotary embedding pairs other dimensions than Llama's, or has no table of positions"
        )
    for kernel in (attention.attn for attention in attentions):
        impl = kernel.impl
        if not hasattr(impl, "do_kv_cache_update"):
            return f"the attention backend {type(impl).__name__} writes keys and values together with its forward"
        if (
            getattr(impl, "alibi_slopes", None) is not None
            or getattr(impl, "sinks", None) is not None
        ):
            return "its attention has ALiBi or sinks"
        if getattr(kernel, "kv_sharing_target_layer_name", None) is not None:
            return "some layers use the keys and values of others"
    return None
