"""Parts of the attention kernels: where rows and keys lie, and what a tile of queries scores on a tile of keys."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def request_rows(row_edges, key_starts, request, rows, PAGE: tl.constexpr, MANY: tl.constexpr):
    """A request's first row, how many it has, and where its first key lies (0 where keys are paged)."""
    first, count, key_start = 0, rows, 0
    if MANY:
        first = tl.load(row_edges + request)
        count = tl.load(row_edges + request + 1) - first
        if PAGE == 0:
            key_start = tl.load(key_starts + request)
    return first, count, key_start


@triton.jit
def load_pairs(
    q, positions, pair, live, first, head, q_row, q_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A tile of pairs of a row and one of the query heads that share a key/value head.

    Returns the row, the query head and the position of each pair, all `[BLOCK_M]`, and its query `[BLOCK_M, BLOCK_D]`.
    """
    row, query_head = first + pair // GROUP, head * GROUP + pair % GROUP
    pos = tl.load(positions + row, mask=live, other=-1).to(tl.int32)
    dims = tl.arange(0, BLOCK_D)
    at = row.to(tl.int64)[:, None] * q_row + query_head[:, None] * q_head + dims[None, :]
    qq = tl.load(q + at, mask=live[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    return row, query_head, pos, qq


@triton.jit
def key_offsets(keys, there, request, key_start, blocks, key_stride, block_stride, most_blocks, PAGE: tl.constexpr):
    """Offsets of a request's positions `[BLOCK_N]`; PAGE is the block size of a paged cache, 0 of a contiguous one."""
    if PAGE == 0:
        return (key_start + keys).to(tl.int64) * key_stride
    block = tl.load(blocks + request * most_blocks + keys // PAGE, mask=there, other=0)
    return block.to(tl.int64) * block_stride + (keys % PAGE) * key_stride


@triton.jit
def load_keys(x, offsets, head_offset, there, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """`[BLOCK_N, BLOCK_D]` of keys or values; without MASKED all keys are there."""
    dims = tl.arange(0, BLOCK_D)
    at = x + head_offset + offsets[:, None] + dims[None, :]
    if MASKED or HEAD_DIM != BLOCK_D:
        return tl.load(at, mask=there[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def scores(
    q, k, scale, softcap, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Scores times log2(e), float32 `[BLOCK_M, BLOCK_N]`, of `q` `[BLOCK_M, BLOCK_D]` and `k` `[BLOCK_N, BLOCK_D]`.

    Without a soft cap `scale` holds the factor log2(e) already. UPCAST is for Triton's interpreter, which multiplies
    the bits of bfloat16 as if they were whole numbers.
    """
    if UPCAST:
        q, k = q.to(tl.float32), k.to(tl.float32)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if SOFTCAP:  # tanh x = 1 - 2 / (1 + e^2x); where e^2x overflows, that is 1
        s = (softcap - 2.0 * softcap / (1.0 + tl.exp2(s / softcap * 2.8853900817779268))) * 1.4426950408889634
    return s
