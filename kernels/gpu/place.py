"""Placing of stored chunk-caches in a request's keys and values: rotate and write in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from cachecraft_rag.kernels.gpu.launch import ceil_div, device_of
from cachecraft_rag.kernels.gpu.rope import halves, turned

_ROWS = 32  # token-head pairs of one program


@triton.jit(do_not_specialize=["start", "tokens"])
def _place(
    merged,
    chunk,
    cos,
    sin,
    layers,
    start,
    tokens,
    kv_heads,
    rotary,
    merged_layer,
    merged_part,
    merged_key,
    chunk_layer,
    chunk_part,
    chunk_token,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    ROWS: tl.constexpr,
):
    layer = tl.load(layers + tl.program_id(1) // 2).to(tl.int64)
    part = tl.program_id(1) % 2
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = pair < tokens * kv_heads
    token = (pair // kv_heads).to(tl.int64)
    head = pair % kv_heads
    source = (
        chunk
        + layer * chunk_layer
        + part * chunk_part
        + (token * chunk_token + head * HEAD_DIM)[:, None]
    )
    target = (
        merged
        + layer * merged_layer
        + part * merged_part
        + ((start + token) * merged_key + head * HEAD_DIM)[:, None]
    )
    kind = merged.dtype.element_ty
    half = tl.arange(0, BLOCK_HALF)[None, :]
    inside = live[:, None] & (half < HALF)
    first = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half + HALF, mask=inside, other=0.0).to(tl.float32)
    if part == 0:
        first, second = turned(
            first, second, cos, sin, start + token, inside, rotary, HALF, BLOCK_HALF
        )
    tl.store(target + half, first.to(kind), inside)
    tl.store(target + half + HALF, second.to(kind), inside)
    if REST > 0:
        rest = tl.arange(0, BLOCK_REST)[None, :]
        inside = live[:, None] & (rest < REST)
        kept = tl.load(source + 2 * HALF + rest, mask=inside, other=0.0)
        tl.store(target + 2 * HALF + rest, kept.to(kind), inside)


@cache
def layer_numbers(layers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return layer numbers on the device, int32 `[layers]`; equal arguments give the same tensor."""
    return torch.tensor(layers, dtype=torch.int32, device=device)


def place(
    merged: Tensor,
    chunk: Tensor,
    start: int,
    *,
    cos: Tensor,
    sin: Tensor,
    layers: Sequence[int] | None = None,
) -> None:
    """Write a stored chunk-cache to its new positions: all layers that rotate alike in one launch.

    Args:
        merged: `[layers, 2, keys, kv_heads, head_dim]`, rotated keys and values; the heads of a key are adjacent.
        chunk: `[layers, 2, tokens, kv_heads, head_dim]`, raw keys and values; the heads of a key are adjacent. It may
            be a view of a tensor with more tokens or more heads.
        start: the chunk's new first position.
        cos, sin: `[positions, rotary_dim]`, for all positions.
        layers: numbers of the layers to write, which are not checked; None = all.
    """
    all_layers, two, tokens, kv_heads, head_dim = chunk.shape
    if two != 2 or merged.shape[:2] != (all_layers, 2) or merged.shape[3:] != (kv_heads, head_dim):
        raise ValueError(f"a chunk of {tuple(chunk.shape)} has no place in {tuple(merged.shape)}")
    if cos.shape != sin.shape or not 0 <= start <= min(cos.shape[0], merged.shape[2]) - tokens:
        raise ValueError(
            f"{tokens} tokens from {start} on do not fit {merged.shape[2]} keys, or cos and sin of {tuple(cos.shape)} "
            f"and {tuple(sin.shape)}"
        )
    if any(x.stride()[3:] != (head_dim, 1) for x in (merged, chunk)):
        raise ValueError("a token's heads must lie side by side")
    numbers = layer_numbers(tuple(range(all_layers) if layers is None else layers), merged.device)
    if chunk.numel() and len(numbers):
        with device_of(merged):
            _place[(ceil_div(tokens * kv_heads, _ROWS), 2 * len(numbers))](
                merged,
                chunk,
                cos.contiguous(),
                sin.contiguous(),
                numbers,
                start,
                tokens,
                kv_heads,
                cos.shape[-1],
                *merged.stride()[:3],
                *chunk.stride()[:3],
                HEAD_DIM=head_dim,
                ROWS=_ROWS,
                **halves(head_dim, cos.shape[-1]),
            )
