"""Drift correction in one pass over the merged buffer: each stale token moves by its chunk's mean change."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cachecraft_rag.kernels.gpu.launch import ceil_div, device_of
from cachecraft_rag.kernels.gpu.rope import halves, turned

_ROWS = 32  # token-head pairs of one program


@triton.jit(do_not_specialize=["keys"])
def _shift_stale(
    merged,
    shifts,
    owner,
    cos,
    sin,
    keys,
    kv_heads,
    rotary,
    merged_part,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    ROWS: tl.constexpr,
):
    part = tl.program_id(1)
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    key = pair // kv_heads
    head = pair % kv_heads
    chunk = tl.load(owner + key, mask=key < keys, other=-1)
    stale = chunk >= 0
    source = shifts + (((tl.maximum(chunk, 0) * 2 + part) * kv_heads + head) * HEAD_DIM)[:, None]
    target = merged + part.to(tl.int64) * merged_part + (pair.to(tl.int64) * HEAD_DIM)[:, None]
    kind = merged.dtype.element_ty
    half = tl.arange(0, BLOCK_HALF)[None, :]
    inside = stale[:, None] & (half < HALF)
    first = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half + HALF, mask=inside, other=0.0).to(tl.float32)
    if part == 0:
        first, second = turned(first, second, cos, sin, key, inside, rotary, HALF, BLOCK_HALF)
    first += tl.load(target + half, mask=inside, other=0.0).to(tl.float32)
    second += tl.load(target + half + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + half, first.to(kind), inside)
    tl.store(target + half + HALF, second.to(kind), inside)
    if REST > 0:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        inside = stale[:, None] & (rest < HEAD_DIM)
        shifted = tl.load(source + rest, mask=inside, other=0.0).to(tl.float32)
        shifted += tl.load(target + rest, mask=inside, other=0.0).to(tl.float32)
        tl.store(target + rest, shifted.to(kind), inside)


def shift_stale(merged: Tensor, shifts: Tensor, owner: Tensor, *, cos: Tensor, sin: Tensor) -> None:
    """Add each chunk's raw change to its stale tokens; the change of a key is first rotated to the token's position.

    Args:
        merged: `[2, keys, kv_heads, head_dim]`, rotated keys and values; changed in place.
        shifts: `[chunks, 2, kv_heads, head_dim]`, raw.
        owner: int32 `[keys]`, chunk of each stale token; -1 = the token is not stale and neither read nor written.
        cos, sin: `[keys, rotary_dim]`, for all positions.
    """
    two, keys, kv_heads, head_dim = merged.shape
    if two != 2 or shifts.shape[1:] != (2, kv_heads, head_dim):
        raise ValueError(f"changes of {tuple(shifts.shape)} for {tuple(merged.shape)}")
    if owner.shape != (keys,) or cos.shape != sin.shape or cos.shape[0] != keys:
        raise ValueError(f"{keys} keys need as many owners, cosines and sines")
    if not merged[0].is_contiguous():
        raise ValueError("the tokens of a layer must lie side by side")
    if shifts.numel():
        with device_of(merged):
            _shift_stale[(ceil_div(keys * kv_heads, _ROWS), 2)](
                merged,
                shifts.contiguous(),
                owner,
                cos.contiguous(),
                sin.contiguous(),
                keys,
                kv_heads,
                cos.shape[-1],
                merged.stride(0),
                HEAD_DIM=head_dim,
                ROWS=_ROWS,
                **halves(head_dim, cos.shape[-1]),
            )
