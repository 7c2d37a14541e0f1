"""Attention that each key receives from all rows together, without a matrix of rows and keys.

One program takes a tile of keys and walks over the rows after it, as the backward pass of flash attention does. It
needs the rows' `lse`, so it runs after `attend`. A sum over rows within `attend` would need atomic additions from many
programs, and its result would change from run to run.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from cachecraft_rag.kernels.gpu.launch import ceil_div, device_of
from cachecraft_rag.kernels.gpu.tiles import (
    Tiling,
    absent_mask,
    check_attention,
    load_keys,
    load_pairs,
    scores,
)
from cachecraft_rag.kernels.visibility import Visibility

_LOG2_E = math.log2(math.e)


@triton.jit(
    do_not_specialize=["rows", "total_keys", "window"],
    do_not_specialize_on_alignment=["positions"],
)
def _received(
    q,
    k,
    lse,
    out,
    positions,
    absent,
    q_row,
    q_head,
    k_key,
    k_head,
    rows,
    heads,
    total_keys,
    scale,
    softcap,
    window,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COUNTED: tl.constexpr,
    ABSENT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(1)
    lowest = tl.program_id(0) * BLOCK_N
    keys = lowest + tl.arange(0, BLOCK_N)
    # The rows after the tile's first key, and in a window those that still see its last key.
    before = tl.zeros([COUNTED], tl.int32)
    within = tl.zeros([COUNTED], tl.int32)
    for start in range(0, rows, COUNTED):
        row = start + tl.arange(0, COUNTED)
        pos = tl.load(positions + row, mask=row < rows, other=2147483647).to(tl.int32)
        before += (pos < lowest).to(tl.int32)
        if WINDOW:
            within += (pos < lowest + BLOCK_N + window).to(tl.int32)
    begin = tl.sum(before, 0)
    end = rows
    if WINDOW:
        end = tl.sum(within, 0)
    highest = -1
    if rows > 0:
        highest = tl.load(positions + rows - 1).to(tl.int32)
    there = keys <= highest  # beyond the last row there may be no keys
    kk = load_keys(k, keys, k_key, head * k_head, there, HEAD_DIM, BLOCK_D, True)
    if ABSENT:
        there = there & (tl.load(absent + keys, mask=there, other=0) == 0)
    total = tl.zeros([BLOCK_N], tl.float32)
    for start in range(begin * GROUP, end * GROUP, BLOCK_M):
        pair = start + tl.arange(0, BLOCK_M)
        live = pair < end * GROUP
        row, query_head, pos, qq = load_pairs(
            q, positions, pair, live, head, q_row, q_head, GROUP, HEAD_DIM, BLOCK_D
        )
        whole = tl.load(lse + row.to(tl.int64) * heads + query_head, mask=live, other=0.0)
        s = (
            scores(qq, kk, scale, softcap, SOFTCAP, UPCAST, PRECISION)
            - whole[:, None] * 1.4426950408889634
        )
        seen = there[None, :] & (keys[None, :] < pos[:, None])  # a row's own position is left out
        if WINDOW:
            seen = seen & (keys[None, :] > pos[:, None] - window)
        total += tl.sum(tl.exp2(tl.where(seen, s, float("-inf"))), 0)
    tl.store(out + head.to(tl.int64) * total_keys + keys, total, keys < total_keys)


def received(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    visible: Visibility,
    *,
    scale: float,
    softcap: float | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """Return the attention to each key from all rows together, averaged over heads, without own positions.

    `lse`, float32 `[rows, heads]`, is that of `attend`, with its sinks; the other arguments and errors as there. The
    result is float32 `[keys]`, 0 for a key that no row sees.
    """
    rows, heads, _ = q.shape
    kv_heads = check_attention(q, k, None, visible)
    if lse.shape != (rows, heads) or lse.dtype != torch.float32:
        raise ValueError(
            f"lse must be float32 [{rows}, {heads}], not {lse.dtype} {list(lse.shape)}"
        )
    keys = k.shape[0]
    group = heads // kv_heads
    tiling = tiling or Tiling.of(q)
    out = torch.empty(kv_heads, keys, dtype=torch.float32, device=q.device)
    absent = absent_mask(visible, keys)
    with device_of(q):
        _received[(ceil_div(keys, tiling.keys), kv_heads)](
            q,
            k,
            lse.contiguous(),
            out,
            visible.positions,
            q if absent is None else absent,
            *q.stride()[:2],
            *k.stride()[:2],
            rows,
            heads,
            keys,
            scale if softcap else scale * _LOG2_E,
            softcap or 0.0,
            visible.window or 0,
            GROUP=group,
            COUNTED=256,
            **tiling.constants(q, visible, absent=absent, softcap=softcap),
        )
    return out.sum(0) / heads
