"""The tiling of the torch kernels: blocks of rows, the keys within their reach, and masked scores of one block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cachecraft_rag.kernels.visibility import Visibility

BLOCK_ROWS = 96  # a block skips the keys behind its last row: smaller wastes less of them, larger costs fewer calls


@dataclass(frozen=True)
class RowBlock:
    """Rows `start:stop` and the keys `first_key:last_key` within their reach.

    hidden      bool `[rows of the block, last_key - masked_from]`, True = not visible; all see the keys before
                `masked_from`; None where every row sees every key
    """

    start: int
    stop: int
    first_key: int
    last_key: int
    masked_from: int = 0
    hidden: Tensor | None = None


def row_blocks(visible: Visibility, block_rows: int = BLOCK_ROWS) -> tuple[RowBlock, ...]:
    """Cut sorted rows into blocks and prepare their masks, once per pass and shared by all its layers.

    >>> [(b.start, b.stop, b.last_key, b.hidden) for b in row_blocks(Visibility(torch.tensor([4])))]
    [(0, 1, 5, None)]
    >>> block = row_blocks(Visibility(torch.tensor([0, 2])))[0]
    >>> block.masked_from, block.hidden.tolist()  # both see key 0
    (1, [[True, True], [False, False]])
    """
    positions, window, absent = visible.positions, visible.window, visible.absent
    blocks = []
    edges = positions.cpu()
    for start in range(0, len(positions), block_rows):
        stop = min(start + block_rows, len(positions))
        lowest, highest = int(edges[start]), int(edges[stop - 1])
        first = 0 if window is None else max(0, lowest - window + 1)
        if stop - start == 1 and absent is None:  # a decode step: everything in reach is visible
            blocks.append(RowBlock(start, stop, first, highest + 1))
            continue
        masked_from = lowest + 1 if window is None and absent is None else first
        keys = torch.arange(masked_from, highest + 1, device=positions.device)[None, :]
        own = positions[start:stop, None]
        hidden = keys > own
        if window is not None:
            hidden |= keys <= own - window
        if absent is not None:
            hidden |= torch.isin(keys, absent)
        blocks.append(RowBlock(start, stop, first, highest + 1, masked_from, hidden))
    return tuple(blocks)


def additive(block: RowBlock, dtype: torch.dtype, *, repeats: int = 1) -> Tensor | None:
    """Mask to add to a block's scores, 0 or -inf: `[repeats · rows, keys]`; None where every row sees every key."""
    if block.hidden is None:
        return None
    mask = block.hidden.new_zeros((len(block.hidden), block.last_key - block.first_key), dtype=dtype)
    mask[:, block.masked_from - block.first_key :].masked_fill_(block.hidden, float("-inf"))
    return mask.repeat(repeats, 1) if repeats > 1 else mask


def masked_scores(q: Tensor, k: Tensor, block: RowBlock, *, scale: float, softcap: float | None) -> Tensor:
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


def softmax_with_sinks(scores: Tensor, group: int, sinks: Tensor | None) -> Tensor:
    """Return the weights of one block's keys; what a head gives to its sink is missing from their sum.

    Args:
        scores: float32 `[kv_heads, group · rows, keys]`, masked.
        group: query heads of a key/value head.
        sinks: float32 `[heads]`, the score of each head's sink; None = there is none.

    >>> softmax_with_sinks(torch.zeros(1, 1, 1), 1, torch.zeros(1)).tolist()
    [[[0.5]]]
    """
    if sinks is None:
        return scores.softmax(-1)
    kv_heads, folded_rows, _ = scores.shape
    sink_scores = sinks.float().view(kv_heads, group, 1).expand(-1, -1, folded_rows // group)
    sink_scores = sink_scores.reshape(kv_heads, folded_rows, 1)
    return torch.cat((scores, sink_scores), dim=-1).softmax(-1)[..., :-1]


def grouped(q: Tensor, kv_heads: int) -> Tensor:
    """`[rows, heads, head_dim]` seen as `[kv_heads, group, rows, head_dim]`, without a copy."""
    rows, heads, head_dim = q.shape
    return q.view(rows, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
