"""Placing of stored chunk-caches in a request's keys and values: rotate and write in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from cachecraft_rag.kernels.gpu.launch import ceil_div, device_of
from cachecraft_rag.kernels.gpu.rope import halves, turned

_ROWS = 32  # token-head pairs of one program
_COLUMNS = 5  # of the table of chunks: offset, start, tokens, stride of a layer, stride of a part


@triton.jit
def _place(
    merged,
    base,
    chunks,
    cos,
    sin,
    layers,
    kv_heads,
    rotary,
    merged_layer,
    merged_part,
    merged_key,
    chunk_token,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    layer = tl.load(layers + tl.program_id(1) // 2).to(tl.int64)
    part = tl.program_id(1) % 2
    entry = chunks + tl.program_id(2) * COLUMNS
    offset = tl.multiple_of(tl.load(entry), ALIGNED)
    start = tl.load(entry + 1)
    tokens = tl.load(entry + 2)
    chunk_layer = tl.multiple_of(tl.load(entry + 3), ALIGNED)
    chunk_part = tl.multiple_of(tl.load(entry + 4), ALIGNED)
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = pair < tokens * kv_heads
    token = (pair // kv_heads).to(tl.int64)
    head = pair % kv_heads
    source = (
        base
        + offset
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
    """Return layer numbers on the device, int32 `[layers]`; equal arguments give the same tensor: do not change it."""
    return torch.tensor(layers, dtype=torch.int32, device=device)


def place(
    merged: Tensor,
    chunks: Sequence[Tensor],
    starts: Sequence[int],
    *,
    cos: Tensor,
    sin: Tensor,
    layers: Sequence[int] | None = None,
) -> None:
    """Write stored chunk-caches to their new positions: all layers that rotate alike in one launch.

    Args:
        merged: `[layers, 2, keys, kv_heads, head_dim]`, rotated keys and values; the heads of a key are adjacent.
        chunks: each `[layers, 2, tokens, kv_heads, head_dim]`, raw keys and values, of one dtype and on the device of
            `merged`; the heads of a key are adjacent. Each may be a view of a tensor with more tokens or more heads.
        starts: new first position of each chunk; ValueError if it has no place in `merged`, or its shape does not fit.
        cos, sin: `[positions, rotary_dim]`, for all positions.
        layers: numbers of the layers to write, which are not checked; None = all.
    """
    for chunk, start in zip(chunks, starts, strict=True):
        _check_place(merged, chunk, start, cos, sin)
    all_layers = len(merged)
    numbers = layer_numbers(tuple(range(all_layers) if layers is None else layers), merged.device)
    by_stride: dict[int, list[tuple[Tensor, int]]] = {}
    for chunk, start in zip(chunks, starts, strict=True):
        if chunk.numel() and len(numbers):
            by_stride.setdefault(chunk.stride(2), []).append((chunk, start))
    for token_stride, placed in by_stride.items():
        _launch(merged, placed, token_stride, numbers, cos, sin)


def _check_place(merged: Tensor, chunk: Tensor, start: int, cos: Tensor, sin: Tensor) -> None:
    """Raise ValueError unless a chunk has its place in `merged`."""
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


def _launch(
    merged: Tensor,
    placed: Sequence[tuple[Tensor, int]],
    token_stride: int,
    numbers: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> None:
    """Write chunks whose tokens have equal strides; each is found by its distance from the first one."""
    base = placed[0][0]
    kv_heads, head_dim = merged.shape[3:]
    table = np.array(
        [
            (
                (chunk.data_ptr() - base.data_ptr()) // chunk.element_size(),
                start,
                chunk.shape[2],
                chunk.stride(0),
                chunk.stride(1),
            )
            for chunk, start in placed
        ],
        np.int64,
    )
    most_tokens = int(table[:, 2].max())
    with device_of(merged):
        _place[(ceil_div(most_tokens * kv_heads, _ROWS), 2 * len(numbers), len(placed))](
            merged,
            base,
            # does not wait for the device: so few bytes are copied at once
            torch.from_numpy(table).to(merged.device, non_blocking=True),
            cos.contiguous(),
            sin.contiguous(),
            numbers,
            kv_heads,
            cos.shape[-1],
            *merged.stride()[:3],
            token_stride,
            HEAD_DIM=head_dim,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            # every address in a chunk is a multiple of its heads' dimensions, and memory begins at larger ones
            ALIGNED=min(head_dim & -head_dim, 16),
            **halves(head_dim, cos.shape[-1]),
        )
