"""Drift correction in two launches: each chunk's mean change, and one pass over the merged buffer.

The second one moves the stale tokens and writes the rows of the pass, so that rows need no further launch.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from cachecraft_rag.kernels.gpu.launch import ceil_div, device_of
from cachecraft_rag.kernels.gpu.rope import halves, turned, turned_back

_ROWS = 32  # token-head pairs of one program
# Rows that a program of the mean change reads at a time; with more, registers are spilled.
_CHANGED_ROWS = 32


def owners(
    keys: int, positions: NDArray[np.int64], moved: Iterable[tuple[int, range]]
) -> NDArray[np.int32]:
    """Return the table int32 `[keys]` of `write_rows`: for each position the number of its chunk if it is moved.

    A position that row i writes has -2 - i, all others have -1.

    Args:
        keys: number of positions.
        positions: positions of the rows.
        moved: number of the chunk, and positions that move unless they are written.

    >>> owners(6, np.array([1, 5]), [(0, range(0, 3))]).tolist()
    [0, -2, 0, -1, -1, -3]
    """
    table = np.full(keys, -1, np.int32)
    for chunk, span in moved:
        table[span.start : span.stop] = chunk
    table[positions] = -2 - np.arange(len(positions), dtype=np.int32)
    return table


@triton.jit
def _of_part(keys, values, at_key, at_value, part, dims, inside):
    """Load keys for part 0 and values for part 1, float32 `[rows, dims]`, of heads that begin at `[rows, 1]`."""
    key = tl.load(keys + (at_key + dims), mask=inside & (part == 0), other=0.0)
    value = tl.load(values + (at_value + dims), mask=inside & (part == 1), other=0.0)
    return key.to(tl.float32) + value.to(tl.float32)


@triton.jit
def _change(keys, values, at_key, at_value, stored, part, dims, inside):
    """Return computed less stored numbers, float32 `[rows, dims]`; arguments as in `_of_part`."""
    before = tl.load(stored + dims, mask=inside, other=0.0).to(tl.float32)
    return _of_part(keys, values, at_key, at_value, part, dims, inside) - before


@triton.jit(do_not_specialize_on_alignment=["rows", "positions", "edges"])
def _mean_change(
    merged,
    keys,
    values,
    rows,
    positions,
    edges,
    cos,
    sin,
    shifts,
    strength,
    kv_heads,
    rotary,
    merged_part,
    key_row,
    key_head,
    value_row,
    value_head,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    ROWS: tl.constexpr,
):
    chunk = tl.program_id(0) // kv_heads
    head = tl.program_id(0) % kv_heads
    part = tl.program_id(1)
    first = tl.load(edges + chunk)
    last = tl.load(edges + chunk + 1)
    lower = tl.arange(0, BLOCK_HALF)
    half = lower[None, :]
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
    sum_1 = tl.zeros([BLOCK_HALF], tl.float32)
    sum_2 = tl.zeros([BLOCK_HALF], tl.float32)
    sum_rest = tl.zeros([BLOCK_REST], tl.float32)
    for start in range(first, last, ROWS):
        at = start + tl.arange(0, ROWS)
        live = at < last
        row = tl.load(rows + at, mask=live, other=0).to(tl.int64)
        position = tl.load(positions + at, mask=live, other=0).to(tl.int64)
        stored = merged + part.to(tl.int64) * merged_part
        stored += ((position * kv_heads + head) * HEAD_DIM)[:, None]
        at_key = (row * key_row + head * key_head)[:, None]
        at_value = (row * value_row + head * value_head)[:, None]
        inside = live[:, None] & (half < HALF)
        change_1 = _change(keys, values, at_key, at_value, stored, part, half, inside)
        change_2 = _change(keys, values, at_key, at_value, stored, part, half + HALF, inside)
        if part == 0:  # of raw keys: those of different positions can be compared
            change_1, change_2 = turned_back(
                change_1, change_2, cos, sin, position, inside, rotary, HALF, BLOCK_HALF
            )
        sum_1 += tl.sum(change_1, 0)
        sum_2 += tl.sum(change_2, 0)
        if REST > 0:
            inside = live[:, None] & (rest < HEAD_DIM)[None, :]
            change = _change(keys, values, at_key, at_value, stored, part, rest[None, :], inside)
            sum_rest += tl.sum(change, 0)
    scale = strength / (last - first).to(tl.float32)
    target = shifts + ((chunk * 2 + part) * kv_heads + head) * HEAD_DIM
    tl.store(target + lower, sum_1 * scale, lower < HALF)
    tl.store(target + lower + HALF, sum_2 * scale, lower < HALF)
    if REST > 0:
        tl.store(target + rest, sum_rest * scale, rest < HEAD_DIM)


def mean_change(
    merged: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    rows: Tensor,
    positions: Tensor,
    edges: Tensor,
    strength: float,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """Return the mean change of each chunk's rows times `strength`, raw, float32 `[chunks, 2, kv_heads, head_dim]`.

    Args:
        merged: `[2, keys, kv_heads, head_dim]`, rotated keys and values as stored; ValueError if others do not fit.
        keys, values: `[rows of the pass, kv_heads, head_dim]`, keys rotated.
        rows: int32 `[changed rows]`, chunk by chunk: indices into `keys`.
        positions: int32 `[changed rows]`, their positions.
        edges: int32 `[chunks + 1]`; chunk i has the changed rows `edges[i]:edges[i + 1]`, at least one.
        strength: factor on the means.
        cos, sin: `[keys, rotary_dim]`, for all positions.
    """
    _check(merged, keys, values, cos, sin)
    _, _, kv_heads, head_dim = merged.shape
    chunks = len(edges) - 1
    shifts = torch.empty(chunks, 2, kv_heads, head_dim, dtype=torch.float32, device=merged.device)
    if shifts.numel():
        with device_of(merged):
            _mean_change[(chunks * kv_heads, 2)](
                merged,
                keys,
                values,
                rows,
                positions,
                edges,
                cos.contiguous(),
                sin.contiguous(),
                shifts,
                strength,
                kv_heads,
                cos.shape[-1],
                merged.stride(0),
                *keys.stride()[:2],
                *values.stride()[:2],
                HEAD_DIM=head_dim,
                ROWS=_CHANGED_ROWS,
                **halves(head_dim, cos.shape[-1]),
            )
    return shifts


@triton.jit(do_not_specialize=["total_keys"])
def _write_rows(
    merged,
    keys,
    values,
    owner,
    shifts,
    cos,
    sin,
    total_keys,
    kv_heads,
    rotary,
    merged_part,
    key_row,
    key_head,
    value_row,
    value_head,
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
    owned = tl.load(owner + key, mask=key < total_keys, other=-1)
    stale = owned >= 0
    written = owned < -1
    row = tl.where(written, -2 - owned, 0).to(tl.int64)
    at_key = (row * key_row + head * key_head)[:, None]
    at_value = (row * value_row + head * value_head)[:, None]
    source = shifts + (((tl.maximum(owned, 0) * 2 + part) * kv_heads + head) * HEAD_DIM)[:, None]
    target = merged + part.to(tl.int64) * merged_part + (pair.to(tl.int64) * HEAD_DIM)[:, None]
    kind = merged.dtype.element_ty
    half = tl.arange(0, BLOCK_HALF)[None, :]
    within = half < HALF
    inside = stale[:, None] & within
    first = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half + HALF, mask=inside, other=0.0).to(tl.float32)
    if part == 0:
        first, second = turned(first, second, cos, sin, key, inside, rotary, HALF, BLOCK_HALF)
    first += tl.load(target + half, mask=inside, other=0.0).to(tl.float32)
    second += tl.load(target + half + HALF, mask=inside, other=0.0).to(tl.float32)
    # zeros where the row is not written, and the other way round
    inside = written[:, None] & within
    first += _of_part(keys, values, at_key, at_value, part, half, inside)
    second += _of_part(keys, values, at_key, at_value, part, half + HALF, inside)
    inside = (stale | written)[:, None] & within
    tl.store(target + half, first.to(kind), inside)
    tl.store(target + half + HALF, second.to(kind), inside)
    if REST > 0:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        within = rest < HEAD_DIM
        inside = stale[:, None] & within
        moved = tl.load(source + rest, mask=inside, other=0.0).to(tl.float32)
        moved += tl.load(target + rest, mask=inside, other=0.0).to(tl.float32)
        inside = written[:, None] & within
        moved += _of_part(keys, values, at_key, at_value, part, rest, inside)
        tl.store(target + rest, moved.to(kind), (stale | written)[:, None] & within)


def write_rows(
    merged: Tensor,
    keys: Tensor,
    values: Tensor,
    shifts: Tensor,
    owner: Tensor,
    *,
    cos: Tensor,
    sin: Tensor,
) -> None:
    """Write rows to their positions, and add each chunk's raw change to its stale tokens.

    The change of a key is first rotated to the token's position. ValueError if shapes do not fit.

    Args:
        merged: `[2, keys, kv_heads, head_dim]`, rotated keys and values; changed in place.
        keys, values: `[rows, kv_heads, head_dim]`, keys rotated.
        shifts: float32 `[chunks, 2, kv_heads, head_dim]`, raw.
        owner: int32 `[keys]`, as returned by `owners`.
        cos, sin: `[keys, rotary_dim]`, for all positions.
    """
    _check(merged, keys, values, cos, sin)
    _, all_keys, kv_heads, head_dim = merged.shape
    if shifts.shape[1:] != (2, kv_heads, head_dim):
        raise ValueError(f"changes of {tuple(shifts.shape)} for {tuple(merged.shape)}")
    if owner.shape != (all_keys,):
        raise ValueError(f"{all_keys} keys need as many owners, not {tuple(owner.shape)}")
    if merged.numel():
        with device_of(merged):
            _write_rows[(ceil_div(all_keys * kv_heads, _ROWS), 2)](
                merged,
                keys,
                values,
                owner,
                shifts.contiguous(),
                cos.contiguous(),
                sin.contiguous(),
                all_keys,
                kv_heads,
                cos.shape[-1],
                merged.stride(0),
                *keys.stride()[:2],
                *values.stride()[:2],
                HEAD_DIM=head_dim,
                ROWS=_ROWS,
                **halves(head_dim, cos.shape[-1]),
            )


def _check(merged: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise ValueError unless rows of keys and values, and the tables of all positions, fit `merged`."""
    two, all_keys, kv_heads, head_dim = merged.shape
    if two != 2 or keys.shape != values.shape or keys.shape[1:] != (kv_heads, head_dim):
        raise ValueError(
            f"rows of {tuple(keys.shape)} and {tuple(values.shape)} for {tuple(merged.shape)}"
        )
    if cos.shape != sin.shape or cos.shape[0] != all_keys:
        raise ValueError(f"{all_keys} keys need as many cosines and sines")
    if not merged[0].is_contiguous():
        raise ValueError("the tokens of a layer must lie side by side")
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        raise ValueError("a head's dimensions must lie side by side")
