"""A vLLM worker's model as a `Stack`: stock layers, run one by one with raw keys and our own attention.

Most passes run through all layers in one call instead, see `whole_model`.

While a layer runs, two attributes of it are set and removed again: its rotary embedding is the identity, so that
queries and keys arrive raw (biases and norms applied), and its attention is the running pass. Most of vLLM's layers
carry (hidden, residual); both travel in one tensor `[2, rows, hidden]`. Layers without a residual carry one stream.

vLLM runs some models with the layers of transformers. They carry one stream, and are given their rotary embedding as an
argument, so only the attention is set.

Stored keys have their dimensions in the order of all models, see `model.layer_survey`; vLLM's blocks have the model's.

A pass fills its own buffer, and `write_blocks` copies that into vLLM's blocks when the pass is done. Rejected:
attention over the blocks themselves. Each backend has another block layout, and a pass that was given up would have
written into blocks that may belong to another request by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from cachecraft_rag.compute.stack import LayerPass, WholeModel, keys_per_row_of
from cachecraft_rag.kernels.attention_paths import UNMEASURED
from cachecraft_rag.kernels.memory import Recycler
from cachecraft_rag.model.attention_choice import measured_paths
from cachecraft_rag.model.layer_survey import RotaryKind, SurveyError, in_order
from cachecraft_rag.types.kv_layout import DTypeName, KVLayout
from cachecraft_rag.vllm.refusals import Refusal
from cachecraft_rag.vllm.worker.interfaces import VLLMModule
from cachecraft_rag.vllm.worker.layers import (
    RotaryTable,
    WorkerLayer,
    survey_layers,
    survey_transformers_layers,
)
from cachecraft_rag.vllm.worker.models import text_part
from cachecraft_rag.vllm.worker.ranks import OneRank, TensorParallel
from cachecraft_rag.vllm.worker.refusals import OTHER_MODEL
from cachecraft_rag.vllm.worker.whole_model import VLLMForward


class WorkerStack:
    """Decoder layers of one rank inside a vLLM worker; see `compute.stack.Stack`.

    All ranks make theirs together. Raises UnsupportedModelError with the reason if passes cannot run these layers.
    """

    def __init__(self, model: VLLMModule, ranks: OneRank | TensorParallel) -> None:
        self.ranks = ranks
        self._model = model
        self._text = text_part(model)
        parameter = next(self._text.parameters())
        self.device = parameter.device
        self.dtype = parameter.dtype
        self._embedding_multiplier = getattr(
            self._text.config, "embedding_multiplier", 1.0
        )  # Granite
        try:
            self._layers, self._tables, self._kind_of = self._survey_layers()
        except SurveyError as error:
            refusal = Refusal(str(error), error.advice or OTHER_MODEL)
            raise refusal.error(type(model).__qualname__) from error
        attention = self._layers[0].attention
        self.layout = KVLayout(
            layers=len(self._layers),
            kv_heads=attention.num_kv_heads,
            head_dim=attention.head_size,
            dtype=cast(DTypeName, str(self.dtype).removeprefix("torch.")),
        )
        # From the config: the CPU build packs the weights and leaves empty tensors in their place.
        self.keys_per_row = keys_per_row_of(self._text.config)
        self.attention_paths = UNMEASURED
        self.memory = Recycler()
        self.whole_model: WholeModel | None = None
        if self.device.type == "cpu":
            self.attention_paths = measured_paths(
                self.dtype,
                heads=attention.num_heads,
                kv_heads=self.layout.kv_heads,
                head_dim=self.layout.head_dim,
            )

    def _survey_layers(
        self,
    ) -> tuple[Sequence[WorkerLayer], Sequence[RotaryTable | RotaryKind], Sequence[int]]:
        from transformers import PreTrainedModel

        model = self._text.model
        if isinstance(model, PreTrainedModel):
            from vllm.forward_context import set_forward_context

            return survey_transformers_layers(
                model,
                embed=self._embedded,
                forward_context=partial(set_forward_context, None, self._model.vllm_config),
            )
        return survey_layers(
            model.layers,
            hidden_size=self._text.config.hidden_size,
            dtype=self.dtype,
            device=self.device,
        )

    def _embedded(self, ids: Tensor) -> Tensor:
        # embeddings with LoRA take no more rows at once
        most = int(self._model.vllm_config.scheduler_config.max_num_batched_tokens)
        parts = [self._text.embed_input_ids(part) for part in torch.split(ids, most)]
        embedded = parts[0] if len(parts) == 1 else torch.cat(parts)
        return embedded * self._embedding_multiplier

    def embed(self, ids: Tensor) -> Tensor:
        """Return the first layer's input `[streams, rows, hidden]` for token ids, int64 `[rows]` on the stack's device.

        There are two streams, the second a residual of zeros, if layers carry one; otherwise one. With several ranks,
        all of them have to call this with the same ids.
        """
        hidden = self._embedded(ids)
        if not self._layers[0].carries_residual:
            return hidden[None]
        return torch.stack((hidden, torch.zeros_like(hidden)))

    @property
    def rotary_kinds(self) -> Sequence[int]:
        """For each layer, in order, the number of its rotary table: layers with equal numbers rotate alike."""
        return self._kind_of

    def rope(self, positions: Tensor, kind: int = 0) -> tuple[Tensor, Tensor]:
        """Return cos and sin of one of the model's own rotary modules at these positions, each `[rows, rotary_dim]`.

        They are in the stack's dtype and on its device, and fit heads whose dimensions are in the order of all models.
        The table of layers that do not rotate has a rotary_dim of 0: both results are `[rows, 0]`.

        Args:
            positions: int64 `[rows]` on the stack's device, below the length of the module's table if it has one.
            kind: number of the table, one of `rotary_kinds`.
        """
        return self._tables[kind].tables(positions, self.dtype)

    def layer(
        self, index: int, hidden: Tensor, *, positions: Tensor, layer_pass: LayerPass
    ) -> Tensor:
        """Run one layer over `hidden` `[streams, rows, hidden]`, which it may overwrite; return its output.

        The layer's attention calls `layer_pass.attend`. If that raises, the layer continues with zeros up to its end,
        because other ranks wait for its sums; then the error is raised. `positions` of the rows are int64 `[rows]`.
        """
        layer = self._layers[index]
        width = layer.attention.head_size
        raised: list[Exception] = []

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            q, k, v = (states.reshape(states.shape[0], -1, width) for states in (query, key, value))
            q = in_order(q, layer.order)
            k = in_order(k, layer.order)
            try:
                return layer_pass.attend(index, q, k, v, layer.settings).reshape(query.shape[0], -1)
            except Exception as error:  # noqa: BLE001  # any: raised below, after the sums of all ranks
                raised.append(error)
                return torch.zeros_like(query)

        out = layer.run(hidden, positions, attend)
        if raised:
            raise raised[0]
        return out

    def vllm_forward(self) -> VLLMForward:
        """Return the model's own forward, which may become `whole_model` once it is checked."""
        return VLLMForward(self._model, self._layers)

    def write_blocks(self, kv: Tensor, slots: Tensor, first: int) -> None:
        """Copy a finished buffer into vLLM's blocks, in all layers.

        Args:
            kv: `[layers, 2, capacity, kv_heads, head_dim]`, rotated keys and values, in the order of all models.
            slots: int64 `[tokens]`, slots in the blocks of the positions from `first` on: number of the block times its
                size, plus the place in it.
            first: first position that is copied.
        """
        last = first + len(slots)
        for layer, (keys, values) in zip(self._layers, kv, strict=True):
            attention = layer.attention
            attention.impl.do_kv_cache_update(
                attention,
                in_order(keys[first:last], layer.original_order),
                values[first:last],
                attention.kv_cache,
                slots,
            )
