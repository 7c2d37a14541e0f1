"""Attention of scattered rows over a merged K/V buffer; the attention mass each row gives to each segment, and what
each key receives.

The rows of a partial prefill are a sorted subset of the prompt's positions. A row sees the keys at or before its own
position (and, in a sliding-window layer, none further back than the window). FlashAttention's `causal=True` is
aligned to the bottom right and is wrong for such rows, so the mask is by position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

BLOCK_ROWS = 96  # a block skips the keys behind its last row: smaller wastes less of them, larger costs fewer calls


@dataclass(frozen=True)
class RowBlock:
    """Rows `start:stop` and the keys `first_key:last_key` within their reach.

    mask        bool `[rows of the block, last_key - first_key]`, True = visible; None where every row sees every key
    hidden      the reverse, bool `[rows of the block, last_key - masked_from]`; all see the keys before `masked_from`
    """

    start: int
    stop: int
    first_key: int
    last_key: int
    mask: Tensor | None = None
    masked_from: int = 0
    hidden: Tensor | None = None


def row_blocks(positions: Tensor, *, window: int | None = None, absent: Tensor | None = None) -> tuple[RowBlock, ...]:
    """Cut sorted rows into blocks and prepare their masks, once per pass and shared by all its layers.

    Args:
        positions: int64 `[rows]`, ascending, without repeats.
        window: a row sees at most this many keys, its own included; None = all before it.
        absent: int64, keys that no row sees; None = all are there.

    >>> [(b.start, b.stop, b.last_key, b.mask is None) for b in row_blocks(torch.tensor([4]))]
    [(0, 1, 5, True)]
    >>> row_blocks(torch.tensor([0, 2]))[0].mask.tolist()
    [[True, False, False], [True, True, True]]
    """
    blocks = []
    edges = positions.cpu()
    for start in range(0, len(positions), BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, len(positions))
        lowest, highest = int(edges[start]), int(edges[stop - 1])
        first = 0 if window is None else max(0, lowest - window + 1)
        if stop - start == 1 and absent is None:  # a decode step: everything in reach is visible
            blocks.append(RowBlock(start, stop, first, highest + 1))
            continue
        keys = torch.arange(first, highest + 1, device=positions.device)[None, :]
        own = positions[start:stop, None]
        mask = keys <= own
        if window is not None:
            mask &= keys > own - window
        if absent is not None:
            mask &= ~torch.isin(keys, absent)
        masked_from = lowest + 1 if window is None and absent is None else first
        hidden = ~mask[:, masked_from - first :]
        blocks.append(RowBlock(start, stop, first, highest + 1, mask, masked_from, hidden))
    return tuple(blocks)


def attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: tuple[RowBlock, ...], *, scale: float, softcap: float | None = None
) -> Tensor:
    """Softmax attention of scattered rows, masked by position.

    Args:
        q: `[rows, heads, head_dim]`, rotated.
        k, v: `[keys, kv_heads, head_dim]`, keys rotated; heads is a multiple of kv_heads.
        blocks: the rows' visibility, from `row_blocks`.
        scale: multiplies the scores.
        softcap: scores become softcap · tanh(scores / softcap) (Gemma-2); None = as they are.

    Returns:
        `[rows, heads, head_dim]`.
    """
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    out = torch.empty_like(q)
    # A decode step: a group's queries are rows of their common key/value head.
    if rows == 1 and softcap is None and blocks[0].mask is None:
        block = blocks[0]
        span = slice(block.first_key, block.last_key)
        folded = q.view(kv_heads, heads // kv_heads, head_dim)
        found = scaled_dot_product_attention(
            folded[None], k[span].transpose(0, 1)[None], v[span].transpose(0, 1)[None], scale=scale
        )
        return found.reshape(1, heads, head_dim)
    queries, grouped_out = _grouped(q, kv_heads), _grouped(out, kv_heads)
    attend = _fused if softcap is None else partial(_explicit, softcap=softcap)
    # Half precision goes through sdpa too, the kernel of the model's own attention. Rejected: plain products, faster on
    # one CPU and slower on all others; they round every score to the model's dtype, and therefore take float32 below.
    for block in blocks:
        part = queries[:, :, block.start : block.stop]
        span = slice(block.first_key, block.last_key)
        grouped_out[:, :, block.start : block.stop] = attend(part, k[span], v[span], block, scale=scale)
    return out


def _fused(q: Tensor, k: Tensor, v: Tensor, block: RowBlock, *, scale: float) -> Tensor:
    """torch's own kernel for one block; `q` `[kv_heads, group, rows, head_dim]`, returns alike."""
    heads = q.shape[0] * q.shape[1]
    return scaled_dot_product_attention(q, _expanded(k, heads), _expanded(v, heads), attn_mask=block.mask, scale=scale)


def _explicit(q: Tensor, k: Tensor, v: Tensor, block: RowBlock, *, scale: float, softcap: float | None) -> Tensor:
    """Two matrix products around a softmax for one block; `q` `[kv_heads, group, rows, head_dim]`, returns float32."""
    kv_heads, group, rows, head_dim = q.shape
    weights = _scores(q, k, block, scale=scale, softcap=softcap).softmax(-1)
    return torch.bmm(weights, v.transpose(0, 1).float()).view(kv_heads, group, rows, head_dim)


def attention_mass(
    q: Tensor,
    k: Tensor,
    blocks: tuple[RowBlock, ...],
    positions: Tensor,
    bounds: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Where the rows' attention falls: on which segment, row by row, and on which key, from all rows together.

    Averaged over heads; a row's own position is left out, which makes the sum of the first over a chunk's rows exactly
    eq. 3 (other segments) and eq. 4 (its own) of Cache-Craft. The second is H2O's accumulated attention (its §4), from
    these rows only; it costs 1 % of the whole.

    Args:
        q: `[rows, heads, head_dim]`, rotated.
        k: `[keys, kv_heads, head_dim]`, rotated.
        blocks: the rows' visibility, from `row_blocks`.
        positions: int64 `[rows]`, the rows' own positions.
        bounds: int64 `[segments + 1]`, ascending; segment i covers the keys `bounds[i]:bounds[i + 1]`.
        scale, softcap: as in `attention`.

    Returns:
        float32 `[rows, segments]` and float32 `[keys]`.

    >>> q, k, rows = torch.zeros(3, 1, 8), torch.zeros(3, 1, 8), torch.arange(3)  # every key in sight weighs the same
    >>> mass, received = attention_mass(q, k, row_blocks(rows), rows, torch.tensor([0, 3]), scale=1.0)
    >>> [round(float(row), 3) for row in mass[:, 0]], [round(float(key), 3) for key in received]  # 1/2 + 1/3, 1/3, 0
    ([0.0, 0.5, 0.667], [0.833, 0.333, 0.0])
    """
    mass = torch.empty(q.shape[0], len(bounds) - 1, dtype=torch.float32, device=q.device)
    received = torch.zeros(k.shape[0], dtype=torch.float32, device=q.device)
    for block, weights in _mean_weights(q, k, blocks, positions, scale=scale, softcap=softcap):
        mass[block.start : block.stop] = _by_segment(weights, block, bounds)
        received[block.first_key : block.last_key] += weights.sum(0)
    return mass, received


def _mean_weights(
    q: Tensor, k: Tensor, blocks: tuple[RowBlock, ...], positions: Tensor, *, scale: float, softcap: float | None
) -> Iterator[tuple[RowBlock, Tensor]]:
    """Each block's weights, averaged over heads and 0 at a row's own position: float32 `[rows of the block, keys in
    span]`.
    """
    queries, heads = _grouped(q, k.shape[1]), q.shape[1]
    for block in blocks:
        rows = slice(block.start, block.stop)
        scores = _scores(queries[:, :, rows], k[block.first_key : block.last_key], block, scale=scale, softcap=softcap)
        weights = scores.softmax(-1).view(heads, block.stop - block.start, -1).mean(0)
        weights.scatter_(1, (positions[rows] - block.first_key)[:, None], 0.0)
        yield block, weights


def _by_segment(weights: Tensor, block: RowBlock, bounds: Tensor) -> Tensor:
    """A block's weights added up over the keys of each segment: `[rows of the block, segments]`."""
    keys = torch.arange(block.first_key, block.last_key, device=weights.device)[:, None]
    member = (keys >= bounds[None, :-1]) & (keys < bounds[None, 1:])  # [keys in span, segments]
    return weights @ member.to(weights.dtype)


def _scores(q: Tensor, k: Tensor, block: RowBlock, *, scale: float, softcap: float | None) -> Tensor:
    """Masked scores `[kv_heads, group · rows, keys]` of one block, in float32; `q` `[kv_heads, group, rows, head_dim]`.

    A matrix product in bf16 would round them to 8 bits, and a weight grows with the exponential of its score.
    """
    kv_heads, group, rows, head_dim = q.shape
    scores = torch.bmm(q.float().reshape(kv_heads, group * rows, head_dim) * scale, k.float().permute(1, 2, 0))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if block.hidden is not None:
        late = scores.view(kv_heads, group, rows, -1)[..., block.masked_from - block.first_key :]
        late.masked_fill_(block.hidden, float("-inf"))
    return scores


def _grouped(q: Tensor, kv_heads: int) -> Tensor:
    """`[rows, heads, head_dim]` seen as `[kv_heads, group, rows, head_dim]`, without a copy."""
    rows, heads, head_dim = q.shape
    return q.view(rows, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)


def _expanded(x: Tensor, heads: int) -> Tensor:
    """`[keys, kv_heads, head_dim]` seen as `[kv_heads, group, keys, head_dim]` with stride 0 along the group.

    Grouped-query attention without the copy that repeating keys and values for every query head would cost.
    """
    keys, kv_heads, head_dim = x.shape
    return x.transpose(0, 1)[:, None].expand(kv_heads, heads // kv_heads, keys, head_dim)
