"""The keys and values of one request, in prompt order: placed chunk-caches and computed rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cachecraft_rag.compute.stack import RotaryTables, Stack
from cachecraft_rag.kernels.gpu.choice import uses_triton
from cachecraft_rag.kernels.gpu.streams import copy_stream, launched, wait_on_stream
from cachecraft_rag.kernels.placing import place_all

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
        kv: `[layers, 2, capacity, kv_heads, head_dim]`, rotated keys, then values, of this rank's heads; uninitialised
            where nothing was placed or computed.
        rotary: cos and sin of all positions, for each kind of layer.
    """

    def __init__(self, stack: Stack, capacity: int) -> None:
        self.kv = stack.memory.empty(stack.layout.shape(capacity), stack.dtype, stack.device)
        self._device = stack.device
        self._ranks = stack.ranks
        # each item starts the copies of another group of layers
        self._copies: Iterator[None] = iter(())
        # first layer of each group on its way to the GPU → event after it is placed
        self._placed: dict[int, torch.cuda.Event | None] = {}
        self.rotary = RotaryTables.of(stack, torch.arange(capacity, device=stack.device))

    def place(self, layer: int, chunk: Tensor, start: int) -> None:
        """Place a raw layer `[2, tokens, own or all heads, head_dim]` at `start`, rotated; ValueError past the end."""
        self.place_all(layer, [(chunk, start)])

    def place_all(self, layer: int, chunks: Sequence[tuple[Tensor, int]]) -> None:
        """Do the work of `place` for several (chunk, start): on a GPU in one call that copies, and one launch."""
        own_heads = self._on_device([self._own_heads(chunk) for chunk, _ in chunks])
        merged = self.kv[layer : layer + 1]
        starts = [start for _, start in chunks]
        cos, sin = self.rotary.of_layer(layer)
        place_all(
            merged, [chunk[None] for chunk in own_heads], starts, cos=cos, sin=sin, layers=[0]
        )

    @torch.inference_mode()
    def take(self, chunks: Sequence[ResidentKV], *, at_once: bool = True) -> None:
        """Take the chunk-caches in memory; call it once, before `place_resident`.

        With Triton, those on the buffer's own device that hold this rank's heads only are placed in all layers at once.
        On a GPU, all others are copied in groups of four layers (`LAYERS_PER_COPY`) on a stream of their own, and each
        group is placed there in one launch. With `at_once`, all copies from page-locked memory begin here. Otherwise a
        group begins while the one before it is computed, and so do copies that block this thread: from other memory, or
        of a rank's part of the heads. On a CPU without Triton, `place_resident` does everything.
        """
        on_device = [chunk for chunk in chunks if self._is_on_this_gpu(chunk.kv)]
        if on_device:
            tensors = [chunk.kv for chunk in on_device]
            self._place_layers(tensors, [chunk.start for chunk in on_device], 0)
        others = [chunk for chunk in chunks if not self._is_on_this_gpu(chunk.kv)]
        if self._device.type != "cuda" or not others:
            return
        self._copies = self._copied_groups(others)
        own_heads = self.kv.shape[3]
        may_block = any(
            chunk.kv.shape[3] != own_heads or not chunk.kv.is_pinned() for chunk in others
        )
        for _ in range(len(self.kv) if at_once and not may_block else 1):
            next(self._copies, None)

    def place_resident(self, layer: int, chunks: Sequence[ResidentKV]) -> None:
        """Write one layer of chunk-caches in memory at their places. Call it for each layer, beginning with the first.

        On a CPU each call places one layer. On a GPU it lets later work of this thread wait until the layer of all
        chunk-caches of `take` is placed.
        """
        if self._device.type == "cuda":
            if layer in self._placed:
                wait_on_stream(self._placed.pop(layer), self.kv)
                next(self._copies, None)
            return
        for chunk in chunks:
            if not self._is_on_this_gpu(chunk.kv):
                self.place(layer, chunk.kv[layer], chunk.start)

    def _copied_groups(self, chunks: Sequence[ResidentKV]) -> Iterator[None]:
        """Copy and place one group of layers of all these chunk-caches for each item, in order, on the copy stream.

        All groups pass through the same memory, which only the copy stream uses.
        """
        copies = copy_stream(self._device)
        # earlier work may still use the memory that the buffer has now
        copies.wait_stream(torch.cuda.current_stream(self._device))
        used = [self.kv, *(table for tables in self.rotary.tables for table in tables)]
        for tensor in used:
            # its memory is reused only after the copies, even if the request ends early
            tensor.record_stream(copies)
        starts = [chunk.start for chunk in chunks]
        room: list[Tensor] = []
        for first in range(0, len(self.kv), LAYERS_PER_COPY):
            with torch.cuda.stream(copies):
                sources = [self._own_group(chunk.kv, first) for chunk in chunks]
                if not room:
                    room = _room_for(sources, self._device)
                group = [space[: len(source)] for space, source in zip(room, sources, strict=True)]
                torch._foreach_copy_(group, sources, non_blocking=True)
                self._place_layers(group, starts, first)
                self._placed[first] = launched(self._device)
            yield

    def _own_group(self, kv: Tensor, first: int) -> Tensor:
        """Return this rank's heads of the layers from `first` on, `[layers, 2, tokens, kv_heads, head_dim]`."""
        group = kv[first : first + LAYERS_PER_COPY]
        # keys and values of each layer along dimension 0
        own_heads = self._own_heads(group.flatten(0, 1))
        return own_heads.view(len(group), 2, *own_heads.shape[1:])

    def _own_heads(self, kv: Tensor) -> Tensor:
        """Return this rank's heads of `[…, tokens, kv_heads, head_dim]`, which may have only these already."""
        return kv if kv.shape[-2] == self.kv.shape[3] else self._ranks.own_heads(kv)

    def _place_layers(self, chunks: Sequence[Tensor], starts: Sequence[int], first: int) -> None:
        """Write several layers of chunk-caches on this device, the first of which is layer `first`."""
        count = len(chunks[0])
        merged = self.kv[first : first + count]
        for kind, (cos, sin) in enumerate(self.rotary.tables):
            layers = [
                layer - first for layer in self.rotary.layers(kind) if 0 <= layer - first < count
            ]
            if layers:
                place_all(merged, chunks, starts, cos=cos, sin=sin, layers=layers)

    def _is_on_this_gpu(self, kv: Tensor) -> bool:
        """Return True for a chunk-cache on this GPU with the heads of this rank only."""
        return uses_triton(kv) and kv.device == self.kv.device and kv.shape[3] == self.kv.shape[3]

    def _on_device(self, chunks: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the chunks on this device. On a GPU the copies run beside the layers that are computed."""
        if self._device.type != "cuda" or all(chunk.device == self._device for chunk in chunks):
            return [chunk.to(self._device) for chunk in chunks]
        copies = copy_stream(self._device)
        with torch.cuda.stream(copies):
            moved = _room_for(chunks, self._device)
            torch._foreach_copy_(moved, list(chunks), non_blocking=True)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(copies)
        moved[0].record_stream(computing)  # the memory is reused only after this stream has read it
        return moved


def _room_for(sources: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return uninitialised tensors of the shapes of `sources`, in one block of memory on the device."""
    block = torch.empty(
        sum(source.numel() for source in sources), dtype=sources[0].dtype, device=device
    )
    parts = torch.split(block, [source.numel() for source in sources])
    return [part.view(source.shape) for part, source in zip(parts, sources, strict=True)]
