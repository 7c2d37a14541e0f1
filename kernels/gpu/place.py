"""Stored chunk-caches into a request's keys and values: decoded, corrected, rotated and written in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cachecraft_rag.kernels.gpu.rope import halves, rotate_reference, turned

_ROWS = 32  # token-head pairs of one program


@triton.jit
def _read(source, scale, shift, columns, inside, shifted, SCALED: tl.constexpr, SHIFTED: tl.constexpr):
    """Columns of stored rows in float32, decoded and corrected."""
    x = tl.load(source + columns, mask=inside, other=0).to(tl.float32)
    if SCALED:
        x *= tl.load(scale + columns * 0, mask=inside, other=0).to(tl.float32)
    if SHIFTED:
        x += tl.load(shift + shifted + columns, mask=inside, other=0).to(tl.float32)
    return x


@triton.jit(do_not_specialize=["start", "tokens"])
def _place(
    merged, chunk, cos, sin, scale, shift, slots, start, tokens, kv_heads, rotary,
    merged_layer, merged_part, merged_key, chunk_layer, chunk_part, chunk_token, scale_layer, scale_part,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, REST: tl.constexpr,
    BLOCK_REST: tl.constexpr, ROWS: tl.constexpr, SCALED: tl.constexpr, SHIFTED: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    layer, part = (tl.program_id(1) // 2).to(tl.int64), tl.program_id(1) % 2
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = pair < tokens * kv_heads
    token, head = pair // kv_heads, pair % kv_heads
    slot = start + token
    if SLOTS:
        slot = tl.load(slots + token, mask=live, other=0)
    slot = slot.to(tl.int64)
    source = (
        chunk + layer * chunk_layer + part * chunk_part + (token.to(tl.int64) * chunk_token + head * HEAD_DIM)[:, None]
    )
    scaled = scale + layer * scale_layer + part * scale_part + pair.to(tl.int64)[:, None]
    shifted = (((layer * 2 + part) * kv_heads + head) * HEAD_DIM)[:, None]
    target = merged + layer * merged_layer + part * merged_part + (slot * merged_key + head * HEAD_DIM)[:, None]
    kind = merged.dtype.element_ty
    half = tl.arange(0, BLOCK_HALF)[None, :]
    inside = live[:, None] & (half < HALF)
    first = _read(source, scaled, shift, half, inside, shifted, SCALED, SHIFTED)
    second = _read(source, scaled, shift, half + HALF, inside, shifted, SCALED, SHIFTED)
    if part == 0:
        first, second = turned(first, second, cos, sin, start + token, inside, rotary, HALF, BLOCK_HALF)
    tl.store(target + half, first.to(kind), inside)
    tl.store(target + half + HALF, second.to(kind), inside)
    if REST > 0:
        rest = tl.arange(0, BLOCK_REST)[None, :]
        inside = live[:, None] & (rest < REST)
        kept = _read(source, scaled, shift, 2 * HALF + rest, inside, shifted, SCALED, SHIFTED)
        tl.store(target + 2 * HALF + rest, kept.to(kind), inside)


def place(
    merged: Tensor,
    chunk: Tensor,
    start: int,
    *,
    cos: Tensor,
    sin: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    slots: Tensor | None = None,
) -> None:
    """Write a stored chunk-cache to its new positions: all layers in one launch.

    Args:
        merged: `[layers, 2, keys, kv_heads, head_dim]`, rotated keys and values; a key's heads lie side by side.
        chunk: `[layers, 2, tokens, kv_heads, head_dim]`, raw keys and values, float or int8; likewise. It may be a cut
            of more tokens or more heads.
        start: the chunk's new first position.
        cos, sin: `[positions, rotary_dim]`, of all positions.
        scale: `[layers, 2, tokens, kv_heads, 1]`, what int8 values are multiplied by; None = they are as they are.
        shift: `[layers, 2, kv_heads, head_dim]`, the chunk's drift: added to each token's raw key and value.
        slots: int64 `[tokens]`, where each token lies along `keys` (the blocks of a paged cache, one after the other);
            None = at its position.

    Raises:
        ValueError: shapes do not fit together.
    """
    layers, _, tokens, kv_heads, head_dim = chunk.shape
    _check(merged, chunk, start, cos, sin=sin, scale=scale, shift=shift, slots=slots)
    if not chunk.numel():
        return
    _place[(triton.cdiv(tokens * kv_heads, _ROWS), 2 * layers)](
        merged, chunk, cos.contiguous(), sin.contiguous(), chunk if scale is None else scale,
        chunk if shift is None else shift.contiguous(), chunk if slots is None else slots.contiguous(),
        start, tokens, kv_heads, cos.shape[-1], *merged.stride()[:3], *chunk.stride()[:3],
        0 if scale is None else scale.stride(0), 0 if scale is None else scale.stride(1),
        HEAD_DIM=head_dim, ROWS=_ROWS, SCALED=scale is not None, SHIFTED=shift is not None, SLOTS=slots is not None,
        **halves(head_dim, cos.shape[-1]),
    )  # fmt: skip


def _check(
    merged: Tensor,
    chunk: Tensor,
    start: int,
    cos: Tensor,
    *,
    sin: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    slots: Tensor | None,
) -> None:
    layers, two, tokens, kv_heads, head_dim = chunk.shape
    if two != 2 or merged.shape[:2] != (layers, 2) or merged.shape[3:] != (kv_heads, head_dim):
        raise ValueError(f"a chunk of {tuple(chunk.shape)} has no place in {tuple(merged.shape)}")
    if cos.shape != sin.shape or not 0 <= start <= cos.shape[0] - tokens:
        raise ValueError(f"{tokens} tokens from {start} on, but cos and sin of {tuple(cos.shape)}, {tuple(sin.shape)}")
    if slots is None and start + tokens > merged.shape[2]:
        raise ValueError(f"{tokens} tokens from {start} on do not fit {merged.shape[2]} keys")
    if slots is not None and slots.shape != (tokens,):
        raise ValueError(f"{tokens} tokens need as many slots, not {tuple(slots.shape)}")
    if (scale is None) == (chunk.dtype == torch.int8) or (scale is not None and scale.shape != (*chunk.shape[:4], 1)):
        raise ValueError(f"chunk of {chunk.dtype} {tuple(chunk.shape)}: int8 needs a scale per token and head")
    if shift is not None and shift.shape != (layers, 2, kv_heads, head_dim):
        raise ValueError(f"the drift must be {(layers, 2, kv_heads, head_dim)}, not {tuple(shift.shape)}")
    if any(x.stride()[3:] != (head_dim, 1) for x in (merged, chunk)):
        raise ValueError("a token's heads must lie side by side")
    if scale is not None and not scale[0, 0].is_contiguous():
        raise ValueError("the scales of a layer's tokens must lie side by side")


def place_reference(
    merged: Tensor,
    chunk: Tensor,
    start: int,
    *,
    cos: Tensor,
    sin: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    slots: Tensor | None = None,
) -> None:
    """`place` in torch and float64, a layer at a time."""
    tokens = chunk.shape[2]
    places = torch.arange(start, start + tokens, device=merged.device)
    for layer in range(chunk.shape[0]):
        x = chunk[layer].double()
        if scale is not None:
            x = x * scale[layer].double()
        if shift is not None:
            x = x + shift[layer, :, None].double()
        where = places if slots is None else slots.long()
        merged[layer, 0, where] = rotate_reference(x[0], cos[places], sin[places]).to(merged.dtype)
        merged[layer, 1, where] = x[1].to(merged.dtype)
