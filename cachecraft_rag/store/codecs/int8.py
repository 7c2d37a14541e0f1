"""`int8`: eight bits per value and a scale per token and head, for keys and for values.

A token's scale is its own, so one token with huge values (the first of a prompt often is) costs no other its precision,
and any run of tokens decodes alone. Scales are bfloat16: in float32 they would take a sixteenth more for heads of 64,
which is less than 1.9 × smaller than bf16; float16 would take the same but overflows and underflows where bf16 and
fp32 models do not. Values are rounded against the scale as it is stored, so its own rounding adds no error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cachecraft_rag.store.codecs.base import BlockPart, Codec, finish, stretches
from cachecraft_rag.types.kv_layout import KVLayout

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST = 127
_SCALE_BYTES = 2


class Int8(Codec):
    """A value's error is at most half its scale, which is 1/127 of the largest of its token and head; see `Codec`."""

    name = "int8"

    def block_bytes(self, layout: KVLayout, tokens: int) -> int:
        """Return the number of bytes of a layer's scales, two bytes each, and 8-bit values."""
        return 2 * tokens * layout.kv_heads * (_SCALE_BYTES + layout.head_dim)

    def parts(self, layout: KVLayout, tokens: int, nbytes: int) -> tuple[BlockPart, ...]:
        """Return scales `[2, tokens, kv_heads, 1]` in bfloat16, then values as int8: in this order both are aligned."""
        _, *shape = layout.shape(tokens)
        return BlockPart(".scale", "BF16", (*shape[:3], 1)), BlockPart(".int8", "I8", tuple(shape))

    def run(self, layout: KVLayout, tokens: int, start: int, stop: int) -> tuple[slice, ...]:
        """Return four slices: scales of keys, scales of values, 8-bit keys, 8-bit values."""
        scale = layout.kv_heads * _SCALE_BYTES
        payload = layout.kv_heads * layout.head_dim
        scales = [slice(scale * (half + start), scale * (half + stop)) for half in (0, tokens)]
        first = 2 * tokens * scale
        values = [
            slice(first + payload * (half + start), first + payload * (half + stop))
            for half in (0, tokens)
        ]
        return (*scales, *values)

    def encode(self, kv: Tensor, *, layer: int, layers: int) -> Tensor:
        """Return a new block, uint8 `[bytes]`, of `kv` `[2, tokens, kv_heads, head_dim]`; no infinities, no NaN."""
        import torch

        values = kv.float()
        largest = values.abs().amax(-1, keepdim=True)
        if not torch.isfinite(largest).all():
            raise ValueError("it holds infinities or NaN, which int8 cannot")
        # The smallest normal number instead of 0, so that nothing is ever divided by 0.
        scale = (largest / _LARGEST).clamp_min_(torch.finfo(torch.float32).tiny).bfloat16()
        levels = (values / scale.float()).round_().clamp_(-_LARGEST, _LARGEST)
        block = torch.empty(scale.nbytes + levels.numel(), dtype=torch.uint8)
        block[: scale.nbytes].view(torch.bfloat16).copy_(scale.view(-1))
        block[scale.nbytes :].view(torch.int8).copy_(levels.view(-1))
        return block

    def decode(self, block: Tensor, *, out: Tensor) -> None:
        """Fill `out` `[2, tokens, kv_heads, head_dim]`, maybe not contiguous, from a block; see `Codec.decode`."""
        import torch

        scales = out.numel() // out.shape[-1] * _SCALE_BYTES
        if len(block) != scales + out.numel():
            raise ValueError(f"block has {len(block)} bytes instead of {scales + out.numel()}")
        scale = block[:scales].view(torch.bfloat16).view(*out.shape[:3], 1)
        levels = block[scales:].view(torch.int8).view(out.shape)
        # Half precision by way of float32: two passes in the CPU's cache, and twice as fast as mixed dtypes in one.
        for run in stretches(out):
            part = out[:, run]
            work = part if out.dtype == torch.float32 else torch.empty(part.shape)
            work.copy_(levels[:, run]).mul_(scale[:, run].float())
            finish(work, part)
