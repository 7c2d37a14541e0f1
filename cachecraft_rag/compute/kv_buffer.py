"""The keys and values of one request, in prompt order: placed chunk-caches and computed rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cachecraft_rag.compute.stack import RotaryTables, Stack
from cachecraft_rag.kernels.gather import place, place_all
from cachecraft_rag.kernels.gpu.choice import uses_triton
from cachecraft_rag.kernels.gpu.streams import copy_stream


@dataclass(frozen=True)
class ResidentKV:
    """A chunk-cache in memory and its place in this prompt.

    start  position of its first token
    kv     `[layers, 2, tokens, kv_heads, head_dim]`, raw keys, then values
    """

    start: int
    kv: Tensor


class KVBuffer:
    """Keys and values of one request, for its prefill and its decode steps.

    Args:
        stack: the model's layers.
        capacity: number of positions to make room for.

    Attributes:
        kv: `[layers, 2, capacity, kv_heads, head_dim]`, rotated keys, then values, of this rank's heads.
        rotary: cos and sin of all positions, for each kind of layer.
    """

    def __init__(self, stack: Stack, capacity: int) -> None:
        self.kv = stack.memory.empty(stack.layout.shape(capacity), stack.dtype, stack.device)
        self._device = stack.device
        self._ranks = stack.ranks
        self.rotary = RotaryTables.of(stack, torch.arange(capacity, device=stack.device))

    def place(self, layer: int, chunk: Tensor, start: int) -> None:
        """Write one layer of a chunk-cache, `[2, tokens, all kv_heads, head_dim]`, at its new position."""
        own_heads = self._on_device(self._ranks.own_heads(chunk))
        cos, sin = self.rotary.of_layer(layer)
        place(self.kv[layer], own_heads, start, cos=cos, sin=sin)

    def place_resident(self, layer: int, resident: ResidentKV) -> None:
        """Write one layer of a chunk-cache in memory at its place. Call it for each layer, beginning with the first.

        A chunk-cache on this GPU is placed in all layers at the first call: one launch per layer would take longer
        than the work. There is one launch for each kind of layer.
        """
        if not self._is_on_this_gpu(resident.kv):
            self.place(layer, resident.kv[layer], resident.start)
        elif layer == 0:
            for kind, (cos, sin) in enumerate(self.rotary.tables):
                layers = self.rotary.layers(kind)
                place_all(self.kv, resident.kv, resident.start, cos=cos, sin=sin, layers=layers)

    def _is_on_this_gpu(self, kv: Tensor) -> bool:
        """Return True for a chunk-cache on this GPU with the heads of this rank only."""
        return uses_triton(kv) and kv.device == self.kv.device and kv.shape[3] == self.kv.shape[3]

    def _on_device(self, chunk: Tensor) -> Tensor:
        """Return the chunk on this device. On a GPU the copy runs beside the layers that are computed."""
        if self._device.type != "cuda" or chunk.device == self._device:
            return chunk.to(self._device, non_blocking=True)
        copies = copy_stream(self._device)
        with torch.cuda.stream(copies):
            moved = chunk.to(self._device, non_blocking=True)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(copies)
        moved.record_stream(computing)  # its memory is reused only after this stream has read it
        return moved
