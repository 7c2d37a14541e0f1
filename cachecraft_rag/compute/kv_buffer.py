"""The keys and values of one request, in prompt order: stored chunk-caches are placed in it, computed rows written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from cachecraft_rag.compute.correction import Correction, unseen_share
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
        correction: of chunk-caches that were captured alone; None = all are placed as they are stored.
        corrected: the positions where such chunk-caches are placed, and how many tokens of other chunks stand before.

    Attributes:
        kv: `[layers, 2, capacity, kv_heads, head_dim]`: rotated keys, then values, of this rank's heads.
        cos, sin: `[capacity, rotary_dim]`, of all positions.
    """

    def __init__(
        self,
        stack: Stack,
        capacity: int,
        *,
        correction: Correction | None = None,
        corrected: Mapping[range, int] = MappingProxyType({}),
    ) -> None:
        self.kv = stack.memory.empty(stack.layout.shape(capacity), stack.dtype, stack.device)
        self._device, self._ranks = stack.device, stack.ranks
        self.cos, self.sin = stack.rope(torch.arange(capacity, device=stack.device))
        self._correction = correction
        self._unseen: Tensor | None = None  # `[capacity]`; 0 where nothing is corrected
        if correction is not None and corrected:
            self._unseen = torch.zeros(capacity, device=stack.device)
            for span, behind in corrected.items():
                positions = torch.arange(span.start, span.stop, device=stack.device)
                self._unseen[span.start : span.stop] = unseen_share(positions, behind)
        self._corrected = corrected
        self._copies: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._copies = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def place(self, layer: int, chunk: Tensor, start: int) -> None:
        """Put one layer of a chunk-cache, `[2, tokens, all kv_heads, head_dim]`, at its new position."""
        if self._corrects(start):  # it reads all heads of a token
            own = self._ranks.own_heads(self._as_behind_others(self._here(chunk)[None], start, layer)[0])
        else:
            own = self._here(self._ranks.own_heads(chunk))
        place(self.kv[layer], own, start, cos=self.cos, sin=self.sin)

    def place_resident(self, layer: int, one: ResidentKV) -> None:
        """Put one layer of a chunk-cache in memory at its place; layers are asked for from the first one on.

        What lies on a GPU is placed in all layers with the first: a launch for each would take longer than the work.
        """
        if not self._holds_all_layers(one.kv):
            self.place(layer, one.kv[layer], one.start)
        elif layer == 0:
            kv = self._as_behind_others(one.kv, one.start, 0) if self._corrects(one.start) else one.kv
            place_all(self.kv, kv, one.start, cos=self.cos, sin=self.sin)

    def _corrects(self, start: int) -> bool:
        return self._unseen is not None and any(start in span for span in self._corrected)

    def _as_behind_others(self, kv: Tensor, start: int, first_layer: int) -> Tensor:
        """Some layers of a chunk-cache, corrected; see `Correction.apply`."""
        assert self._correction is not None
        assert self._unseen is not None
        return self._correction.apply(kv, self._unseen[start : start + kv.shape[2]], first_layer)

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
