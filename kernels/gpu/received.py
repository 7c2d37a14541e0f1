"""What each key receives from all rows together, without a matrix of rows and keys.

One program takes a tile of keys and walks over the rows behind it, as the backward pass of flash attention does. It
needs the rows' `lse`, so it follows `attend`. A sum over rows in the first pass would have to add to one place from
many programs, and its result would change from run to run.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from cachecraft_rag.kernels.gpu.batch import Batch
from cachecraft_rag.kernels.gpu.dense import dense_scores, requests_of, without_own
from cachecraft_rag.kernels.gpu.keys import key_offsets, load_keys, load_pairs, request_rows, scores
from cachecraft_rag.kernels.gpu.tiling import Tiling, absent_mask, check_attention, place_arguments, row_stride
from cachecraft_rag.kernels.visibility import Visibility

_LOG2_E = math.log2(math.e)


@triton.jit(do_not_specialize=["rows", "most_keys", "window", "most_blocks", "absent_row"])
def _received(
    q, k, lse, out, positions, absent, row_edges, key_starts, blocks,
    q_row, q_head, k_key, k_head, k_block, v_key, v_head, v_block, most_blocks, absent_row,
    rows, heads, most_keys, scale, softcap, window,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    COUNTED: tl.constexpr, PAGE: tl.constexpr, MANY: tl.constexpr, ABSENT: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head, request = tl.program_id(1), tl.program_id(2)
    first, count, key_start = request_rows(row_edges, key_starts, request, rows, PAGE, MANY)
    lowest = tl.program_id(0) * BLOCK_N
    keys = lowest + tl.arange(0, BLOCK_N)
    # The rows behind the tile's first key, and in a window those that still see its last one.
    before, within = tl.zeros([COUNTED], tl.int32), tl.zeros([COUNTED], tl.int32)
    for start in range(0, count, COUNTED):
        row = start + tl.arange(0, COUNTED)
        pos = tl.load(positions + first + row, mask=row < count, other=2147483647).to(tl.int32)
        before += (pos < lowest).to(tl.int32)
        if WINDOW:
            within += (pos < lowest + BLOCK_N + window).to(tl.int32)
    begin, end = tl.sum(before, 0), count
    if WINDOW:
        end = tl.sum(within, 0)
    highest = -1
    if count > 0:
        highest = tl.load(positions + first + count - 1).to(tl.int32)
    there = keys <= highest  # beyond the last row there may be no keys
    offsets = key_offsets(keys, there, request, key_start, blocks, k_key, k_block, most_blocks, PAGE)
    kk = load_keys(k, offsets, head * k_head, there, HEAD_DIM, BLOCK_D, True)
    if ABSENT:
        there = there & (tl.load(absent + request * absent_row + keys, mask=there, other=0) == 0)
    total = tl.zeros([BLOCK_N], tl.float32)
    for start in range(begin * GROUP, end * GROUP, BLOCK_M):
        pair = start + tl.arange(0, BLOCK_M)
        live = pair < end * GROUP
        row, query_head, pos, qq = load_pairs(
            q, positions, pair, live, first, head, q_row, q_head, GROUP, HEAD_DIM, BLOCK_D
        )
        whole = tl.load(lse + row.to(tl.int64) * heads + query_head, mask=live, other=0.0)
        s = scores(qq, kk, scale, softcap, SOFTCAP, UPCAST, PRECISION) - whole[:, None] * 1.4426950408889634
        seen = there[None, :] & (keys[None, :] < pos[:, None])  # a row's own position is left out
        if WINDOW:
            seen = seen & (keys[None, :] > pos[:, None] - window)
        total += tl.sum(tl.exp2(tl.where(seen, s, float("-inf"))), 0)
    place = (request.to(tl.int64) * tl.num_programs(1) + head) * most_keys + keys
    tl.store(out + place, total, keys < most_keys)


def received(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    visible: Visibility,
    *,
    scale: float,
    softcap: float | None = None,
    batch: Batch | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """The attention that falls on each key, from all rows together, averaged over heads; own positions left out.

    Args:
        q, k, visible, scale, softcap, batch, tiling: as in `attend`.
        lse: float32 `[rows, heads]`, what `attend` returns.

    Returns:
        float32 `[keys]`, or `[requests, most_keys]` of a batch.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    rows, heads, _ = q.shape
    kv_heads = check_attention(q, k, None, visible, batch=batch)
    if lse.shape != (rows, heads) or lse.dtype != torch.float32:
        raise ValueError(f"lse must be float32 [{rows}, {heads}], not {lse.dtype} {list(lse.shape)}")
    many, most_keys = (1, k.shape[0]) if batch is None else (batch.requests, batch.most_keys)
    group = heads // kv_heads
    tiling = tiling or Tiling.of(q, pairs=rows * group)
    out = torch.empty(many, kv_heads, most_keys, dtype=torch.float32, device=q.device)
    absent = absent_mask(visible, batch, k.shape[0])
    _received[(triton.cdiv(most_keys, tiling.keys), kv_heads, many)](
        q, k, lse.contiguous(), out, visible.positions, q if absent is None else absent,
        *place_arguments(q, k, k, batch), row_stride(absent),
        rows, heads, most_keys, scale if softcap else scale * _LOG2_E, softcap or 0.0, visible.window or 0,
        GROUP=group, COUNTED=256, MANY=batch is not None,
        **tiling.constants(q, k, visible, absent=absent, softcap=softcap),
    )  # fmt: skip
    found = out.sum(1) / heads
    return found if batch is not None else found[0]


def received_reference(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    visible: Visibility,
    *,
    scale: float,
    softcap: float | None = None,
    batch: Batch | None = None,
) -> Tensor:
    """`received` in torch and float64, by matrices `[rows, heads, keys]`."""
    found = []
    for rows, keys, _, seen in requests_of(k, None, visible, batch):
        scored = dense_scores(q[rows], keys, seen, scale=scale, softcap=softcap)
        weights = (scored - lse[rows, :, None].double()).exp().nan_to_num(0.0)
        each = without_own(weights, visible.positions[rows]).mean(1).sum(0)
        most = k.shape[0] if batch is None else batch.most_keys
        found.append(torch.nn.functional.pad(each, (0, most - each.shape[0])))
    return found[0] if batch is None else torch.stack(found)
