"""Flash attention of scattered rows, with the attention mass of each segment.

One program takes a tile of rows with all query heads of one key/value head (GQA), and walks over the keys up to its
last row's position (Dao 2023, FlashAttention-2, algorithm 1). Masks are decided by position. The mass of a segment is
summed up like the output, with the same corrections, so no `[rows, keys]` matrix is written. A few rows do not fill a
device: then each tile's keys are split among programs, and `combine` joins the parts (flash decoding).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cachecraft_rag.kernels.gpu.combine import combine
from cachecraft_rag.kernels.gpu.launch import ceil_div, device_of, power_of_two
from cachecraft_rag.kernels.gpu.tiles import (
    Tiling,
    absent_mask,
    check_attention,
    load_keys,
    load_pairs,
    scores,
)
from cachecraft_rag.kernels.row_blocks import check_sinks
from cachecraft_rag.kernels.visibility import Visibility

_LOG2_E = math.log2(math.e)

# Most segments whose mass one launch sums up: they are columns of a matrix product.
MOST_SEGMENTS = 128


@dataclass(frozen=True)
class Attended:
    """Results of `attend`.

    out   `[rows, heads, head_dim]` in the dtype of the queries; None without values
    lse   float32 `[rows, heads]`, log of the sum of the exponentials and of a sink; -inf for a row that sees neither
    mass  float32 `[rows, segments]`, averaged over heads, without a row's own position; None without bounds
    """

    out: Tensor | None
    lse: Tensor
    mass: Tensor | None


@triton.jit
def _sweep(
    acc,
    top,
    total,
    mass,
    q,
    pos,
    begin,
    end,
    head,
    k,
    v,
    absent,
    k_key,
    k_head,
    v_key,
    v_head,
    low,
    high,
    scale,
    softcap,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ABSENT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    VALUES: tl.constexpr,
    MASS: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    MASS_PRECISION: tl.constexpr,
):
    """Walk over the keys `begin:end`. Without MASKED, all rows see all of them, and they fill whole tiles."""
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        there = keys < end
        kk = load_keys(k, keys, k_key, head * k_head, there, HEAD_DIM, BLOCK_D, MASKED)
        s = scores(q, kk, scale, softcap, SOFTCAP, UPCAST, PRECISION)
        if MASKED:
            seen = there[None, :] & (keys[None, :] <= pos[:, None])
            if WINDOW:
                seen = seen & (keys[None, :] > pos[:, None] - window)
            s = tl.where(seen, s, float("-inf"))
        if ABSENT:
            gone = tl.load(absent + keys, mask=there, other=0)
            s = tl.where((gone != 0)[None, :], float("-inf"), s)
        new_top = tl.maximum(top, tl.max(s, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen no key yet
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        if VALUES:
            vv = load_keys(v, keys, v_key, head * v_head, there, HEAD_DIM, BLOCK_D, MASKED)
            rounded = p.to(vv.dtype)
            if UPCAST:
                rounded, vv = rounded.to(tl.float32), vv.to(tl.float32)
            acc = tl.dot(rounded, vv, acc * shrink[:, None], input_precision=PRECISION)
        if MASS:
            others = tl.where(keys[None, :] == pos[:, None], 0.0, p)
            member = (keys[:, None] >= low[None, :]) & (keys[:, None] < high[None, :])
            mass = tl.dot(
                others,
                member.to(tl.float32),
                mass * shrink[:, None],
                input_precision=MASS_PRECISION,
            )
        top = new_top
    return acc, top, total, mass


@triton.jit
def _keys_of(
    positions,
    rows,
    tile,
    split,
    splits,
    window,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Return the lowest position of a tile's rows, and the keys `begin:end` of one of its splits."""
    lowest = tl.load(positions + tile * BLOCK_M // GROUP).to(tl.int32)
    last = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, rows - 1)
    end = tl.load(positions + last).to(tl.int32) + 1
    begin = end * 0
    if WINDOW:
        begin = tl.maximum(lowest - window + 1, 0) // BLOCK_N * BLOCK_N
    part = tl.cdiv(tl.cdiv(end - begin, BLOCK_N), splits) * BLOCK_N
    begin += split * part
    return lowest, begin, tl.minimum(end, begin + part)


@triton.jit
def _write(
    out,
    lse,
    mass,
    acc,
    top,
    total,
    summed,
    target,
    live,
    segments,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    VALUES: tl.constexpr,
    MASS: tl.constexpr,
):
    """Divide by the sum of the exponentials, and store a tile's results at the indices `target` `[BLOCK_M]`."""
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    tl.store(
        lse + target,
        tl.where(nothing, float("-inf"), (top + tl.log2(total)) * 0.6931471805599453),
        live,
    )
    if VALUES:
        dims = tl.arange(0, BLOCK_D)
        averaged = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(
            out + target[:, None] * HEAD_DIM + dims[None, :],
            averaged,
            live[:, None] & (dims < HEAD_DIM)[None, :],
        )
    if MASS:
        column = tl.arange(0, BLOCK_S)
        kept = live[:, None] & (column < segments)[None, :]
        tl.store(mass + target[:, None] * segments + column[None, :], summed / total[:, None], kept)


@triton.jit(
    do_not_specialize=["rows", "segments", "window"],
    do_not_specialize_on_alignment=["positions", "bounds"],
)
def _attend(
    q,
    k,
    v,
    out,
    lse,
    mass,
    positions,
    absent,
    bounds,
    sinks,
    q_row,
    q_head,
    k_key,
    k_head,
    v_key,
    v_head,
    rows,
    heads,
    segments,
    scale,
    softcap,
    window,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ABSENT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    VALUES: tl.constexpr,
    MASS: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    MASS_PRECISION: tl.constexpr,
    SINKS: tl.constexpr,
):
    # The last tiles see most keys, so those of all heads begin first. In one dimension: the second takes 65,535 tiles.
    kv_heads = heads // GROUP
    tile = tl.num_programs(0) // kv_heads - 1 - tl.program_id(0) // kv_heads
    head = tl.program_id(0) % kv_heads
    split = tl.program_id(1)
    pair = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    live = pair < rows * GROUP
    row, query_head, pos, qq = load_pairs(
        q, positions, pair, live, head, q_row, q_head, GROUP, HEAD_DIM, BLOCK_D
    )
    lowest, begin, end = _keys_of(
        positions, rows, tile, split, tl.num_programs(1), window, GROUP, BLOCK_M, BLOCK_N, WINDOW
    )
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:  # noqa: SIM102  # the first is known when the kernel is compiled
        if split == 0:  # a sink counts once
            top = tl.load(sinks + query_head, mask=live, other=0.0) * 1.4426950408889634
            total += 1.0
    column = tl.arange(0, BLOCK_S)
    summed = total
    low = column
    high = column
    if MASS:
        summed = tl.zeros([BLOCK_M, BLOCK_S], tl.float32)
        low = tl.load(bounds + column, mask=column < segments, other=0).to(tl.int32)
        high = tl.load(bounds + column + 1, mask=column < segments, other=0).to(tl.int32)
    clear = begin
    if not WINDOW:  # keys that all rows of the tile see
        clear = tl.maximum(begin, tl.minimum(end, (lowest + 1) // BLOCK_N * BLOCK_N))
        acc, top, total, summed = _sweep(
            acc,
            top,
            total,
            summed,
            qq,
            pos,
            begin,
            clear,
            head,
            k,
            v,
            absent,
            k_key,
            k_head,
            v_key,
            v_head,
            low,
            high,
            scale,
            softcap,
            window,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_N,
            ABSENT,
            WINDOW,
            SOFTCAP,
            VALUES,
            MASS,
            False,
            UPCAST,
            PRECISION,
            MASS_PRECISION,
        )
    acc, top, total, summed = _sweep(
        acc,
        top,
        total,
        summed,
        qq,
        pos,
        clear,
        end,
        head,
        k,
        v,
        absent,
        k_key,
        k_head,
        v_key,
        v_head,
        low,
        high,
        scale,
        softcap,
        window,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_N,
        ABSENT,
        WINDOW,
        SOFTCAP,
        VALUES,
        MASS,
        True,
        UPCAST,
        PRECISION,
        MASS_PRECISION,
    )
    target = (split.to(tl.int64) * rows + row) * heads + query_head
    _write(
        out,
        lse,
        mass,
        acc,
        top,
        total,
        summed,
        target,
        live,
        segments,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_S,
        VALUES,
        MASS,
    )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    visible: Visibility,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bounds: Tensor | None = None,
    splits: int | None = None,
    tiling: Tiling | None = None,
    out: Tensor | None = None,
) -> Attended:
    """Compute softmax attention of scattered rows, and the attention of each row to each segment.

    Args:
        q: `[rows, heads, head_dim]`, rotated; float32, bfloat16 or float16, head_dim at most 256.
        k, v: `[keys, kv_heads, head_dim]`, keys rotated; ValueError if they do not fit `q` (`tiles.check_attention`).
            Without values only `lse` and `mass` are computed.
        visible: which keys each row sees.
        scale: multiplies the scores.
        softcap: above 0: scores become softcap · tanh(scores / softcap); None = as they are.
        sinks: float32 `[heads]`, the score of a position without a value, which each head may attend to; None = none.
        bounds: int64 `[segments + 1]`, ascending; segment i covers the positions `bounds[i]:bounds[i + 1]` and may be
            empty. None = compute no mass.
        splits: number of programs that share a tile's keys; None = as many as fill the device. Ignored if there are
            more than 128 segments, which need several launches.
        tiling: size of the tiles; None = chosen by head_dim and dtype.
        out: where to write the output, contiguous, with the shape and dtype of `q`; None = a new tensor.

    Returns:
        Output, lse and mass, see `Attended`: without `v` there is no output, and without `bounds` no mass. A row that
            sees no key has an output and a mass of zeros.
    """
    rows, heads, _ = q.shape
    kv_heads = check_attention(q, k, v, visible)
    check_sinks(sinks, heads)
    segments = 0 if bounds is None else bounds.shape[-1] - 1
    if not rows:
        none = q.new_empty(0, heads, dtype=torch.float32)
        mass = None if bounds is None else q.new_empty(0, segments, dtype=torch.float32)
        return Attended(None if v is None else q.new_empty(q.shape), none, mass)
    if bounds is not None and segments > MOST_SEGMENTS:
        return _in_parts(
            q,
            k,
            v,
            visible,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            bounds=bounds,
            tiling=tiling,
            out=out,
        )
    group = heads // kv_heads
    absent = absent_mask(visible, k.shape[0])
    may_decode = bounds is None and absent is None
    tiling = tiling or Tiling.of(
        q, pairs=rows * group if may_decode else None, has_mass=bounds is not None
    )
    tiles = ceil_div(rows * group, tiling.rows)
    splits = splits or tiling.splits(q.device, programs=tiles * kv_heads, keys=k.shape[0])
    out = None if v is None else out
    parts, lse, mass = _new_results(
        q, splits, out, has_values=v is not None, segments=None if bounds is None else segments
    )
    values = k if v is None else v
    with device_of(q):
        _attend[(tiles * kv_heads, splits)](
            q,
            k,
            values,
            lse if parts is None else parts,
            lse,
            lse if mass is None else mass,
            visible.positions,
            q if absent is None else absent,
            q if bounds is None else bounds.contiguous(),
            q if sinks is None else sinks.contiguous(),
            *q.stride()[:2],
            *k.stride()[:2],
            *values.stride()[:2],
            rows,
            heads,
            segments,
            scale if softcap else scale * _LOG2_E,
            softcap or 0.0,
            visible.window or 0,
            GROUP=group,
            BLOCK_S=power_of_two(max(16, segments)),
            VALUES=v is not None,
            MASS=bounds is not None,
            SINKS=sinks is not None,
            MASS_PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            **tiling.constants(q, visible, absent=absent, softcap=softcap),
        )
    attended, lse, mass = combine(parts, lse, mass, dtype=q.dtype, out=out)
    return Attended(attended, lse, None if mass is None else mass.mean(1))


def _new_results(
    q: Tensor, splits: int, out: Tensor | None, *, has_values: bool, segments: int | None
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Return room for output, lse and mass of each split, as `combine` takes them; a single split writes to `out`."""
    rows, heads, head_dim = q.shape
    parts = None
    if out is not None and splits == 1:
        parts = out[None]
    elif has_values:
        kind = q.dtype if splits == 1 else torch.float32
        parts = q.new_empty(splits, rows, heads, head_dim, dtype=kind)
    lse = q.new_empty(splits, rows, heads, dtype=torch.float32)
    mass = None
    if segments is not None:
        mass = q.new_empty(splits, rows, heads, segments, dtype=torch.float32)
    return parts, lse, mass


def _in_parts(
    q: Tensor, k: Tensor, v: Tensor | None, visible: Visibility, *, bounds: Tensor, **how: Any
) -> Attended:
    """Run `attend` with more segments than one launch can sum up. Only the first launch reads the values."""
    first: Attended | None = None
    masses = []
    for start in range(0, bounds.shape[-1] - 1, MOST_SEGMENTS):
        part_bounds = bounds[start : start + MOST_SEGMENTS + 1]
        values = v if first is None else None
        part = attend(q, k, values, visible, bounds=part_bounds, **how)
        assert part.mass is not None, "bounds were given"
        masses.append(part.mass)
        first = first or part
    assert first is not None, "there is at least one segment"
    return Attended(first.out, first.lse, torch.cat(masses, dim=1))
