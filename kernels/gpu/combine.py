"""Combination of the parts of an attention whose keys were split among programs (flash decoding)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cachecraft_rag.kernels.gpu.launch import device_of


@triton.jit(do_not_specialize=["pairs", "segments"])
def _combine(
    parts,
    lses,
    masses,
    out,
    lse,
    mass,
    pairs,
    segments,
    SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    VALUES: tl.constexpr,
    MASS: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    each = tl.load(lses + split * pairs + pair)
    top = tl.max(each, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(each - base)
    total = tl.sum(weight, 0)
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    tl.store(lse + pair, tl.where(nothing, float("-inf"), base + tl.log(total)))
    weight = weight / total
    if VALUES:
        dims = tl.arange(0, BLOCK_D)
        inside = dims < HEAD_DIM
        at = parts + (split[:, None] * pairs + pair) * HEAD_DIM + dims[None, :]
        outputs = tl.load(at, mask=inside[None, :], other=0.0)
        tl.store(
            out + pair * HEAD_DIM + dims,
            tl.sum(outputs * weight[:, None], 0).to(out.dtype.element_ty),
            inside,
        )
    if MASS:
        column = tl.arange(0, BLOCK_S)
        at = masses + (split[:, None] * pairs + pair) * segments + column[None, :]
        part_masses = tl.load(at, mask=(column < segments)[None, :], other=0.0)
        tl.store(
            mass + pair * segments + column,
            tl.sum(part_masses * weight[:, None], 0),
            column < segments,
        )


def combine(
    parts: Tensor | None, lses: Tensor, masses: Tensor | None, *, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Weigh each part by its share of the exponentials.

    Args:
        parts: float32 `[splits, rows, heads, head_dim]`, or None.
        lses: float32 `[splits, rows, heads]`; -inf if a part has no visible key. splits is a power of 2.
        masses: float32 `[splits, rows, heads, segments]`, or None.
        dtype: dtype of the first result.

    Returns:
        The output `[rows, heads, head_dim]`, lse float32 `[rows, heads]` and mass float32 `[rows, heads, segments]`.

    Raises:
        ValueError: the number of splits is not a power of 2.
    """
    splits, rows, heads = lses.shape
    if splits == 1:
        return (
            parts if parts is None else parts[0],
            lses[0],
            masses if masses is None else masses[0],
        )
    if splits & (splits - 1):
        raise ValueError(f"splits must be a power of 2, not {splits}")
    head_dim = 1 if parts is None else parts.shape[-1]
    segments = 0 if masses is None else masses.shape[-1]
    out = None if parts is None else torch.empty(parts.shape[1:], dtype=dtype, device=lses.device)
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
            SPLITS=splits,
            HEAD_DIM=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            BLOCK_S=triton.next_power_of_2(max(segments, 1)),
            VALUES=parts is not None,
            MASS=masses is not None,
        )
    return out, lse, mass
