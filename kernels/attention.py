"""Attention of scattered rows over a merged K/V buffer, and the attention mass each row gives to each segment.

The rows of a partial prefill are a sorted subset of the prompt's positions. A row sees the keys at or before its own
position (and, in a sliding-window layer, none further back than the window). FlashAttention's `causal=True` is
aligned to the bottom right and is wrong for such rows, so the mask is by position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

BLOCK_ROWS = 256  # a block skips the keys behind its last row: smaller wastes less, larger keeps the cores busier


@dataclass(frozen=True)
class RowBlock:
    """Rows `start:stop` that attend to the keys `first_key:last_key`, through `mask` where not all are visible."""

    start: int
    stop: int
    first_key: int
    last_key: int
    mask: Tensor | None  # bool [rows of the block, last_key - first_key], True = visible


def row_blocks(positions: Tensor, *, window: int | None = None) -> tuple[RowBlock, ...]:
    """Cut sorted rows into blocks and prepare their masks, once per pass and shared by all its layers.

    Args:
        positions: int64 `[rows]`, ascending, without repeats.
        window: a row sees at most this many keys, its own included; None = all before it.

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
        if stop - start == 1:  # a decode step: everything in reach is visible
            blocks.append(RowBlock(start, stop, first, highest + 1, None))
            continue
        keys = torch.arange(first, highest + 1, device=positions.device)[None, :]
        own = positions[start:stop, None]
        mask = keys <= own
        if window is not None:
            mask &= keys > own - window
        blocks.append(RowBlock(start, stop, first, highest + 1, mask))
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
    queries, keys = _grouped(q, k.shape[1]), _expanded(k, q.shape[1])
    values = _expanded(v, q.shape[1])
    out = torch.empty_like(q)
    grouped_out = _grouped(out, k.shape[1])
    for block in blocks:
        rows, span = slice(block.start, block.stop), slice(block.first_key, block.last_key)
        part, part_k, part_v = queries[:, :, rows], keys[:, :, span], values[:, :, span]
        if softcap is None:
            result = scaled_dot_product_attention(part, part_k, part_v, attn_mask=block.mask, scale=scale)
        else:
            result = _probabilities(part, part_k, block.mask, scale=scale, softcap=softcap).to(v.dtype) @ part_v
        grouped_out[:, :, rows] = result
    return out


def attention_mass(
    q: Tensor,
    k: Tensor,
    blocks: tuple[RowBlock, ...],
    positions: Tensor,
    bounds: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """The share of each row's attention that falls on each segment, averaged over heads; a row's own position is left
    out.

    Leaving out the own position makes the sum over a chunk's rows exactly eq. 3 (other segments) and eq. 4 (its own)
    of Cache-Craft.

    Args:
        q: `[rows, heads, head_dim]`, rotated.
        k: `[keys, kv_heads, head_dim]`, rotated.
        blocks: the rows' visibility, from `row_blocks`.
        positions: int64 `[rows]`, the rows' own positions.
        bounds: int64 `[segments + 1]`, ascending; segment i covers the keys `bounds[i]:bounds[i + 1]`.
        scale, softcap: as in `attention`.

    Returns:
        float32 `[rows, segments]`.
    """
    queries, keys = _grouped(q, k.shape[1]), _expanded(k, q.shape[1])
    mass = torch.empty(q.shape[0], len(bounds) - 1, dtype=torch.float32, device=q.device)
    for block in blocks:
        rows, span = slice(block.start, block.stop), slice(block.first_key, block.last_key)
        shares = _probabilities(queries[:, :, rows], keys[:, :, span], block.mask, scale=scale, softcap=softcap)
        shares = shares.mean(dim=(0, 1))  # [rows of the block, keys in span]
        shares.scatter_(1, (positions[rows] - block.first_key)[:, None], 0.0)
        inside = torch.arange(block.first_key, block.last_key, device=q.device)[:, None]
        member = (inside >= bounds[None, :-1]) & (inside < bounds[None, 1:])  # [keys in span, segments]
        mass[rows] = shares @ member.to(shares.dtype)
    return mass


def _probabilities(q: Tensor, k: Tensor, mask: Tensor | None, *, scale: float, softcap: float | None) -> Tensor:
    """float32 softmax of the scores, `[kv_heads, group, rows, keys]`."""
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1)


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
