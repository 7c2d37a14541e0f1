"""The keys and values of one request, in prompt order: stored chunk-caches are placed in it, computed rows written."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cachecraft_rag.compute.stack import Stack
from cachecraft_rag.kernels.gather import place
from cachecraft_rag.kernels.memory import empty


@dataclass(frozen=True)
class ResidentKV:
    """A chunk-cache that is in memory, and the place it takes in this prompt.

    start           position of its first token
    kv              `[layers, 2, tokens, kv_heads, head_dim]`: raw keys, values
    original_start  position that its keys are rotated for, where that is another one (ablation only)
    """

    start: int
    kv: Tensor
    original_start: int | None = None


class KVBuffer:
    """Keys and values of one request; decode goes on in it.

    Attributes:
        kv: `[layers, 2, capacity, kv_heads, head_dim]`: rotated keys, then values, of this rank's heads.
        cos, sin: `[capacity, rotary_dim]`, of all positions.
    """

    def __init__(self, stack: Stack, capacity: int) -> None:
        self.kv = empty(stack.layout.shape(capacity), stack.dtype, stack.device)
        self._device, self._ranks = stack.device, stack.ranks
        self.cos, self.sin = stack.rope(torch.arange(capacity, device=stack.device))

    def place(self, layer: int, chunk: Tensor, start: int, *, original_start: int | None = None) -> None:
        """Put one layer of a chunk-cache, `[2, tokens, all kv_heads, head_dim]`, at its new position.

        `original_start`: see `ResidentKV`.
        """
        shift = 0 if original_start is None else start - original_start
        cos, sin = (self.cos.roll(shift, 0), self.sin.roll(shift, 0)) if shift else (self.cos, self.sin)
        own = self._ranks.own_heads(chunk).to(self._device, non_blocking=True)
        place(self.kv[layer], own, start, cos=cos, sin=sin)
