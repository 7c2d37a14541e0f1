"""The keys and values of one request, in prompt order: stored chunk-caches are placed in it, computed rows written."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cachecraft_rag.compute.stack import Stack
from cachecraft_rag.kernels.gather import place, place_all
from cachecraft_rag.kernels.gpu.choice import uses_triton


@dataclass(frozen=True)
class ResidentKV:
    """A chunk-cache in memory and its place in this prompt.

    start  position of its first token
    kv     `[layers, 2, tokens, kv_heads, head_dim]`: raw keys, values
    """

    start: int
    kv: Tensor


class KVBuffer:
    """Keys and values of one request; decode goes on in it.

    Args:
        capacity: positions to make room for.

    Attributes:
        kv: `[layers, 2, capacity, kv_heads, head_dim]`: rotated keys, then values, of this rank's heads.
        cos, sin: `[capacity, rotary_dim]`, of all positions.
    """

    def __init__(self, stack: Stack, capacity: int) -> None:
        self.kv = stack.memory.empty(stack.layout.shape(capacity), stack.dtype, stack.device)
        self._device, self._ranks = stack.device, stack.ranks
        self.cos, self.sin = stack.rope(torch.arange(capacity, device=stack.device))
        self._copies: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._copies = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def place(self, layer: int, chunk: Tensor, start: int) -> None:
        """Put one layer of a chunk-cache, `[2, tokens, all kv_heads, head_dim]`, at its new position."""
        place(self.kv[layer], self._here(self._ranks.own_heads(chunk)), start, cos=self.cos, sin=self.sin)

    def place_resident(self, layer: int, one: ResidentKV) -> None:
        """Put one layer of a chunk-cache in memory at its place; layers are asked for from the first one on.

        What lies on a GPU is placed in all layers with the first: a launch for each would take longer than the work.
        """
        if not self._holds_all_layers(one.kv):
            self.place(layer, one.kv[layer], one.start)
        elif layer == 0:
            place_all(self.kv, one.kv, one.start, cos=self.cos, sin=self.sin)

    def _holds_all_layers(self, kv: Tensor) -> bool:
        """True if a chunk-cache lies on this GPU, with the heads of this rank alone."""
        return uses_triton(kv) and kv.device == self.kv.device and kv.shape[3] == self.kv.shape[3]

    def _here(self, chunk: Tensor) -> Tensor:
        """A chunk on this device. A GPU copies on a stream of its own, beside the layers that are computed."""
        if self._copies is None or chunk.device == self._device:
            return chunk.to(self._device, non_blocking=True)
        with torch.cuda.stream(self._copies):
            moved = chunk.to(self._device, non_blocking=True)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._copies)
        moved.record_stream(computing)  # its memory is not used again before it has been read there
        return moved
