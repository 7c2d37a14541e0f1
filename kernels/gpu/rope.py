"""Rotary position embedding in one pass: each element is read once and written once."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from cachecraft_rag.kernels.gpu.launch import ceil_div, device_of, power_of_two

_ROWS = 16  # token-head pairs of one program


@triton.jit
def _angles(cos, sin, at, inside, rotary, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Load cos and sin of both halves, float32 `[rows, BLOCK_HALF]`; outside, those of position 0."""
    half = tl.arange(0, BLOCK_HALF)
    place = at.to(tl.int64)[:, None] * rotary + half[None, :]
    cos_1 = tl.load(cos + place, mask=inside, other=1.0).to(tl.float32)
    sin_1 = tl.load(sin + place, mask=inside, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos + place + HALF, mask=inside, other=1.0).to(tl.float32)
    sin_2 = tl.load(sin + place + HALF, mask=inside, other=0.0).to(tl.float32)
    return cos_1, sin_1, cos_2, sin_2


@triton.jit
def turned(
    first, second, cos, sin, at, inside, rotary, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr
):
    """Return both halves of a head, float32 `[rows, BLOCK_HALF]`, rotated to the rows `at` `[rows]` of `cos` and `sin`.

    The first half uses the first HALF numbers of such a row and the second half the others, as in `kernels.rope`.

    Args:
        first, second: the halves, float32 `[rows, BLOCK_HALF]`.
        cos, sin: pointers to `[positions, rotary]`, contiguous.
        at: `[rows]`, index into `cos` and `sin`.
        inside: `[rows, BLOCK_HALF]`, False where the results are not used.
        rotary: dimensions that are rotated.
        HALF: half of them.
        BLOCK_HALF: HALF rounded up to a power of two.
    """
    cos_1, sin_1, cos_2, sin_2 = _angles(cos, sin, at, inside, rotary, HALF, BLOCK_HALF)
    return first * cos_1 - second * sin_1, second * cos_2 + first * sin_2


@triton.jit
def turned_back(
    first, second, cos, sin, at, inside, rotary, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr
):
    """Undo `turned`; some rope scalings also stretch, which is undone too."""
    cos_1, sin_1, cos_2, sin_2 = _angles(cos, sin, at, inside, rotary, HALF, BLOCK_HALF)
    length_1 = cos_1 * cos_1 + sin_1 * sin_1
    length_2 = cos_2 * cos_2 + sin_2 * sin_2
    return (
        (first * cos_1 + second * sin_1) / length_1,
        (second * cos_2 - first * sin_2) / length_2,
    )


@triton.jit(do_not_specialize=["pairs"])
def _rotate(
    x,
    cos,
    sin,
    out,
    pairs,
    heads,
    x_token,
    x_head,
    out_token,
    out_head,
    rotary,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    ROWS: tl.constexpr,
):
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = pair < pairs
    token, head = pair // heads, pair % heads
    source = x + (token.to(tl.int64) * x_token + head * x_head)[:, None]
    target = out + (token.to(tl.int64) * out_token + head * out_head)[:, None]
    half = tl.arange(0, BLOCK_HALF)[None, :]
    inside = live[:, None] & (half < HALF)
    first = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half + HALF, mask=inside, other=0.0).to(tl.float32)
    first, second = turned(first, second, cos, sin, token, inside, rotary, HALF, BLOCK_HALF)
    tl.store(target + half, first.to(out.dtype.element_ty), inside)
    tl.store(target + half + HALF, second.to(out.dtype.element_ty), inside)
    if REST > 0:
        rest = tl.arange(0, BLOCK_REST)[None, :]
        inside = live[:, None] & (rest < REST)
        tl.store(
            target + 2 * HALF + rest,
            tl.load(source + 2 * HALF + rest, mask=inside, other=0.0),
            inside,
        )


@cache
def halves(head_dim: int, rotary_dim: int) -> dict[str, int]:
    """Return a rotating kernel's constants HALF, half of `rotary_dim`, REST, the dimensions not rotated, and blocks.

    BLOCK_HALF and BLOCK_REST are rounded up to a power of two. Equal arguments give the same mapping, so do not change
    it. ValueError unless `rotary_dim` is even and at most `head_dim`.
    """
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(f"{rotary_dim} dimensions of {head_dim} cannot be rotated in pairs")
    half = rotary_dim // 2
    rest = head_dim - rotary_dim
    blocks = {
        "BLOCK_HALF": power_of_two(max(half, 1)),
        "BLOCK_REST": power_of_two(max(rest, 1)),
    }
    return {"HALF": half, "REST": rest, **blocks}


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Rotate raw queries or keys to their positions; in float32, rounded once. ValueError if shapes do not fit.

    Args:
        x: `[tokens, heads, head_dim]`, raw; a head's dimensions side by side.
        cos, sin: `[tokens, rotary_dim]`, the rows of the positions wanted; rotary_dim ≤ head_dim.
        out: output tensor with the shape of `x`, not overlapping it; by default a new tensor.
    """
    tokens, heads, head_dim = x.shape
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if cos.shape != sin.shape or cos.shape[0] != tokens or out.shape != x.shape:
        raise ValueError(
            f"{tuple(x.shape)} to {tuple(out.shape)} by {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if x.stride(-1) != 1 or out.stride(-1) != 1:
        raise ValueError("a head's dimensions must lie side by side")
    if x.numel():
        with device_of(x):
            _rotate[(ceil_div(tokens * heads, _ROWS),)](
                x,
                cos.contiguous(),
                sin.contiguous(),
                out,
                tokens * heads,
                heads,
                x.stride(0),
                x.stride(1),
                out.stride(0),
                out.stride(1),
                cos.shape[-1],
                ROWS=_ROWS,
                **halves(head_dim, cos.shape[-1]),
            )
    return out
