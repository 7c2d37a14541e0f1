"""Combination of the parts of an attention whose keys were split among programs (flash decoding)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cachecraft_rag.kernels.gpu.launch import device_of, power_of_two

_BLOCK_SPLITS = 16  # parts that one step of a program joins


@triton.jit(do_not_specialize=["pairs", "segments", "splits"])
def _combine(
    parts,
    lses,
    masses,
    out,
    lse,
    mass,
    pairs,
    segments,
    splits,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    VALUES: tl.constexpr,
    MASS: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    inside = dims < HEAD_DIM
    column = tl.arange(0, BLOCK_S)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    summed_out = tl.zeros([BLOCK_D], tl.float32)
    summed_mass = tl.zeros([BLOCK_S], tl.float32)
    for first in range(0, splits, BLOCK):
        split = first + tl.arange(0, BLOCK)
        there = split < splits
        each = tl.load(lses + split * pairs + pair, mask=there, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(each, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp(each - base)
        shrink = tl.exp(top - base)
        total = total * shrink + tl.sum(weight, 0)
        if VALUES:
            at = parts + (split[:, None] * pairs + pair) * HEAD_DIM + dims[None, :]
            outputs = tl.load(at, mask=there[:, None] & inside[None, :], other=0.0)
            summed_out = summed_out * shrink + tl.sum(outputs * weight[:, None], 0)
        if MASS:
            at = masses + (split[:, None] * pairs + pair) * segments + column[None, :]
            part_masses = tl.load(at, mask=there[:, None] & (column < segments)[None, :], other=0.0)
            summed_mass = summed_mass * shrink + tl.sum(part_masses * weight[:, None], 0)
        top = new_top
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    only = tl.arange(0, 1)
    tl.store(lse + pair + only, tl.where(nothing, float("-inf"), top + tl.log(total)))
    if VALUES:
        tl.store(
            out + pair * HEAD_DIM + dims, (summed_out / total).to(out.dtype.element_ty), inside
        )
    if MASS:
        tl.store(mass + pair * segments + column, summed_mass / total, column < segments)


def combine(
    parts: Tensor | None,
    lses: Tensor,
    masses: Tensor | None,
    *,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Join the parts of an attention: weigh each part by its share of the exponentials.

    Args:
        parts: float32 `[splits, rows, heads, head_dim]`, or None.
        lses: float32 `[splits, rows, heads]`; -inf if a part has no visible key.
        masses: float32 `[splits, rows, heads, segments]`, or None.
        dtype: dtype of the first result.
        out: where to write the first result of several splits, contiguous; None = a new tensor.

    Returns:
        Output `[rows, heads, head_dim]`, lse float32 `[rows, heads]` and mass float32 `[rows, heads, segments]`, or
            None as the arguments; with one split, views of these. A row without a visible key has an lse of -inf, and
            an output and a mass of zeros.
    """
    splits, rows, heads = lses.shape
    if splits == 1:
        return (
            parts if parts is None else parts[0],
            lses[0],
            masses if masses is None else masses[0],
        )
    head_dim = 1 if parts is None else parts.shape[-1]
    segments = 0 if masses is None else masses.shape[-1]
    if parts is not None and out is None:
        out = parts.new_empty(parts.shape[1:], dtype=dtype)
    mass = None if masses is None else torch.empty_like(masses[0])
    lse = torch.empty_like(lses[0])
    with device_of(lses):
        _combine[(rows * heads,)](
            lses if parts is None else parts,
            lses,
            lses if masses is None else masses,
            lse if out is None else out,
            lse,
            lse if mass is None else mass,
            rows * heads,
            segments,
            splits,
            BLOCK=_BLOCK_SPLITS,
            HEAD_DIM=head_dim,
            BLOCK_D=power_of_two(head_dim),
            BLOCK_S=power_of_two(max(16, segments)),
            VALUES=parts is not None,
            MASS=masses is not None,
        )
    return out, lse, mass
