"""`raw`: a block is the layer's own memory, bit by bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cachecraft_rag.store.codecs.base import BlockPart, Codec
from cachecraft_rag.types.kv_layout import KVLayout

if TYPE_CHECKING:
    from torch import Tensor

_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class Raw(Codec):
    """Nothing is lost; see `Codec`."""

    name = "raw"
    in_place = True

    def block_bytes(self, layout: KVLayout, tokens: int) -> int:
        """Return the number of bytes of a layer of the tensor."""
        return layout.nbytes(tokens) // layout.layers

    def parts(self, layout: KVLayout, tokens: int, nbytes: int) -> tuple[BlockPart, ...]:
        """Return the layer's tensor `[2, tokens, kv_heads, head_dim]` as the only part; `nbytes` is ignored."""
        return (BlockPart("", _NAMES[layout.dtype], layout.shape(tokens)[1:]),)

    def run(self, layout: KVLayout, tokens: int, start: int, stop: int) -> tuple[slice, ...]:
        """Return two slices: one of the keys and one of the values."""
        token = layout.nbytes(1) // (2 * layout.layers)
        return tuple(slice(token * (half + start), token * (half + stop)) for half in (0, tokens))

    def encode(self, kv: Tensor, *, layer: int, layers: int) -> Tensor:
        """Return the memory of `kv` `[2, tokens, kv_heads, head_dim]` as uint8 `[bytes]`: a view, no copy."""
        import torch

        return kv.view(-1).view(torch.uint8)

    def decode(self, block: Tensor, *, out: Tensor) -> None:
        """Copy a block, uint8 `[bytes]`, to `out` `[2, tokens, kv_heads, head_dim]`, contiguous; see `in_place`."""
        import torch

        if len(block) != out.nbytes:
            raise ValueError(f"block has {len(block)} bytes instead of {out.nbytes}")
        out.view(-1).view(torch.uint8).copy_(block)
