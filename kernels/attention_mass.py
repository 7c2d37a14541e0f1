"""Attention mass from rows to segments, and the mass that each key receives."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cachecraft_rag.kernels.cpu import calls
from cachecraft_rag.kernels.cpu.library import kernels_for
from cachecraft_rag.kernels.gpu.choice import attends_by_triton
from cachecraft_rag.kernels.row_blocks import (
    RowBlock,
    grouped,
    masked_scores,
    row_blocks,
    softmax_with_sinks,
)
from cachecraft_rag.kernels.visibility import Visibility


def attention_mass(
    q: Tensor,
    k: Tensor,
    visible: Visibility,
    bounds: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the attention of the rows: to each segment, row by row, and to each key, from all rows together.

    Both are averaged over heads and leave out a row's own position. The sum of the first over a chunk's rows is
    Cache-Craft's eq. 3 (other segments) and eq. 4 (its own segment). The second is H2O's accumulated attention (its
    §4), from these rows only; on a CPU it costs 1 % of the whole.

    Args:
        q: `[rows, heads, head_dim]`, rotated.
        k: `[keys, kv_heads, head_dim]`, rotated.
        bounds: int64 `[segments + 1]`, ascending; segment i covers the keys `bounds[i]:bounds[i + 1]`.
        visible, scale, softcap, sinks: as in `attention`.

    Returns:
        float32 `[rows, segments]` and float32 `[keys]`; 0 for an empty segment and for a key that no row sees. A row
            that sees no key gets zeros or NaN, and with NaN keys up to it may receive NaN too.

    >>> q, k, rows = torch.zeros(3, 1, 8), torch.zeros(3, 1, 8), torch.arange(3)  # every key in sight weighs the same
    >>> mass, received = attention_mass(q, k, Visibility(rows), torch.tensor([0, 3]), scale=1.0)
    >>> [round(float(row), 3) for row in mass[:, 0]], [round(float(key), 3) for key in received]  # 1/2 + 1/3, 1/3, 0
    ([0.0, 0.5, 0.667], [0.833, 0.333, 0.0])
    """
    if attends_by_triton(q):
        from cachecraft_rag.kernels.gpu.attention import attend as attend_on_gpu
        from cachecraft_rag.kernels.gpu.received import received as received_on_gpu

        attended = attend_on_gpu(
            q, k, None, visible, scale=scale, softcap=softcap, sinks=sinks, bounds=bounds
        )
        assert attended.mass is not None, "bounds were given"
        return attended.mass, received_on_gpu(
            q, k, attended.lse, visible, scale=scale, softcap=softcap
        )

    run = kernels_for(q, k)
    if run is not None and calls.attends(q, k):
        return calls.mass(run, q, k, visible, bounds, scale=scale, softcap=softcap, sinks=sinks)

    mass = torch.empty(q.shape[0], len(bounds) - 1, dtype=torch.float32, device=q.device)
    received = torch.zeros(k.shape[0], dtype=torch.float32, device=q.device)
    for block, weights in _mean_weights(q, k, visible, scale=scale, softcap=softcap, sinks=sinks):
        mass[block.start : block.stop] = _by_segment(weights, block, bounds)
        received[block.first_key : block.last_key] += weights.sum(0)
    return mass, received


def attention_received(
    q: Tensor,
    k: Tensor,
    visible: Visibility,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention to each key: the second result of `attention_mass`, arguments as there but `bounds`.

    With Triton this is cheaper, because nothing is summed by segment.
    """
    if attends_by_triton(q):
        from cachecraft_rag.kernels.gpu.attention import attend as attend_on_gpu
        from cachecraft_rag.kernels.gpu.received import received as received_on_gpu

        lse = attend_on_gpu(q, k, None, visible, scale=scale, softcap=softcap, sinks=sinks).lse
        return received_on_gpu(q, k, lse, visible, scale=scale, softcap=softcap)
    bounds = torch.tensor([0, len(k)], device=q.device)
    return attention_mass(q, k, visible, bounds, scale=scale, softcap=softcap, sinks=sinks)[1]


def segment_mass(
    q: Tensor,
    k: Tensor,
    visible: Visibility,
    bounds: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention of each row to each segment, a mean over heads: the first result of `attention_mass`.

    Arguments are as there; a row's own position does not count, so a row's sum is at most 1. With Triton this is
    cheaper, because the second result needs another sweep over the keys.
    """
    if attends_by_triton(q):
        from cachecraft_rag.kernels.gpu.attention import attend as attend_on_gpu

        mass = attend_on_gpu(
            q, k, None, visible, scale=scale, softcap=softcap, sinks=sinks, bounds=bounds
        ).mass
        assert mass is not None, "bounds were given"
        return mass
    return attention_mass(q, k, visible, bounds, scale=scale, softcap=softcap, sinks=sinks)[0]


def _mean_weights(
    q: Tensor,
    k: Tensor,
    visible: Visibility,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Iterator[tuple[RowBlock, Tensor]]:
    """Yield each block with its weights, averaged over heads and 0 at a row's own position.

    The weights are float32 `[rows of the block, keys in span]`.
    """
    heads = q.shape[1]
    queries = grouped(q, k.shape[1])
    for block in visible.prepared(row_blocks):
        rows = slice(block.start, block.stop)
        scores = masked_scores(
            queries[:, :, rows],
            k[block.first_key : block.last_key],
            block,
            scale=scale,
            softcap=softcap,
        )
        weights = (
            softmax_with_sinks(scores, queries.shape[1], sinks)
            .view(heads, block.stop - block.start, -1)
            .mean(0)
        )
        weights.scatter_(1, (visible.positions[rows] - block.first_key)[:, None], 0.0)
        yield block, weights


def _by_segment(weights: Tensor, block: RowBlock, bounds: Tensor) -> Tensor:
    """Add up a block's weights over the keys of each segment; returns `[rows of the block, segments]`."""
    keys = torch.arange(block.first_key, block.last_key, device=weights.device)[:, None]
    member = (keys >= bounds[None, :-1]) & (keys < bounds[None, 1:])  # [keys in span, segments]
    return weights @ member.to(weights.dtype)
