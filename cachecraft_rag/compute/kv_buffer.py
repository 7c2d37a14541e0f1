"""The keys and values of one request, in prompt order: placed chunk-caches and computed rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cachecraft_rag.compute.stack import RotaryTables, Stack
from cachecraft_rag.kernels.gather import place, place_all
from cachecraft_rag.kernels.gpu.choice import uses_triton
from cachecraft_rag.kernels.gpu.streams import copy_stream, launched, wait_on_stream

# Layers of a chunk-cache that one copy moves to a GPU. With one copy per layer, launching takes longer than the bus.
# With one copy of all layers, the GPU would wait for whole chunk-caches before the first layer.
LAYERS_PER_COPY = 4


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
        # Groups of layers on their way to the GPU, by the chunk's position and the first layer, with events.
        self._copied: dict[tuple[int, int], tuple[Tensor, torch.cuda.Event | None]] = {}
        self.rotary = RotaryTables.of(stack, torch.arange(capacity, device=stack.device))

    def place(self, layer: int, chunk: Tensor, start: int) -> None:
        """Rotate keys and copy values of a layer `[2, tokens, all kv_heads, head_dim]` to `start` on."""
        own_heads = self._on_device(self._ranks.own_heads(chunk))
        cos, sin = self.rotary.of_layer(layer)
        place(self.kv[layer], own_heads, start, cos=cos, sin=sin)

    def place_resident(self, layer: int, resident: ResidentKV) -> None:
        """Write one layer of a chunk-cache in memory at its place. Call it for each layer, beginning with the first.

        With Triton, a chunk-cache on the buffer's own device is placed in all layers at the call for layer 0: launching
        a kernel for each layer would take longer. Any other is copied to a GPU in groups of `LAYERS_PER_COPY` layers,
        one group ahead.
        """
        if self._is_on_this_gpu(resident.kv):
            if layer == 0:
                self._place_layers(resident.kv, resident.start, 0)
        elif self._device.type != "cuda":
            self.place(layer, resident.kv[layer], resident.start)
        elif layer % LAYERS_PER_COPY == 0:
            self._place_copied(layer, resident)

    def _place_copied(self, first: int, resident: ResidentKV) -> None:
        """Place the group of layers that begins with `first`, and start to copy the next group."""
        key = (resident.start, first)
        if key not in self._copied:
            self._copied[key] = self._start_copy(first, resident)
        layers, arrived = self._copied.pop(key)
        following = first + LAYERS_PER_COPY
        if following < len(self.kv):
            self._copied[(resident.start, following)] = self._start_copy(following, resident)
        wait_on_stream(arrived, layers)
        self._place_layers(layers, resident.start, first)

    def _start_copy(
        self, first: int, resident: ResidentKV
    ) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start to copy a group of layers; return it, `[layers, 2, tokens, own kv_heads, head_dim]`, with an event."""
        chunk = resident.kv[first : first + LAYERS_PER_COPY]
        layers = len(chunk)
        # keys and values of each layer along dimension 0
        own_heads = self._ranks.own_heads(chunk.flatten(0, 1))
        with torch.cuda.stream(copy_stream(self._device)):
            moved = own_heads.to(self._device, non_blocking=True)
            return moved.view(layers, 2, *moved.shape[1:]), launched(self._device)

    def _place_layers(self, chunk: Tensor, start: int, first: int) -> None:
        """Write several layers of a chunk-cache on this device, the first of which is layer `first`."""
        merged = self.kv[first : first + len(chunk)]
        for kind, (cos, sin) in enumerate(self.rotary.tables):
            layers = [
                layer - first
                for layer in self.rotary.layers(kind)
                if 0 <= layer - first < len(chunk)
            ]
            if layers:
                place_all(merged, chunk, start, cos=cos, sin=sin, layers=layers)

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
