"""The tiling of the torch kernels: blocks of rows, the keys within their reach, and masked scores of one block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cachecraft_rag.kernels.visibility import Visibility

# Rows of a block. A block skips the keys after its last row: small blocks skip more keys, large ones need fewer calls.
BLOCK_ROWS = 96


@dataclass(frozen=True)
class RowBlock:
    """Rows `start:stop` and the keys `first_key:last_key` within their reach, the span of the block.

    start        first row
    stop         row after the last
    first_key    first key that a row may see
    last_key     key after the last that a row may see
    masked_from  first key of `hidden`; every row sees the keys of the span before it
    hidden       bool `[rows of the block, last_key - masked_from]`, True = not visible; None if every row sees every
                 key
    """

    start: int
    stop: int
    first_key: int
    last_key: int
    masked_from: int = 0
    hidden: Tensor | None = None


def row_blocks(visible: Visibility, block_rows: int = BLOCK_ROWS) -> tuple[RowBlock, ...]:
    """Return the rows, in their order, in blocks of at most `block_rows`, with their masks; () without rows.

    Call it as `visible.prepared(row_blocks)`: then the layers of a pass share one result.

    >>> [(b.start, b.stop, b.last_key, b.hidden) for b in row_blocks(Visibility(torch.tensor([4])))]
    [(0, 1, 5, None)]
    >>> block = row_blocks(Visibility(torch.tensor([0, 2])))[0]
    >>> block.masked_from, block.hidden.tolist()  # both see key 0
    (1, [[True, True], [False, False]])
    """
    positions = visible.positions
    window = visible.window
    absent = visible.absent
    host_positions = positions.cpu()
    blocks = []
    for start in range(0, len(positions), block_rows):
        stop = min(start + block_rows, len(positions))
        lowest = int(host_positions[start])
        highest = int(host_positions[stop - 1])
        first_key = 0 if window is None else max(0, lowest - window + 1)
        # A decode step attends to every key within the window.
        if stop - start == 1 and absent is None:
            blocks.append(RowBlock(start, stop, first_key, highest + 1))
            continue

        masked_from = lowest + 1 if window is None and absent is None else first_key
        keys = torch.arange(masked_from, highest + 1, device=positions.device)[None, :]
        row_positions = positions[start:stop, None]
        hidden = keys > row_positions
        if window is not None:
            hidden |= keys <= row_positions - window
        if absent is not None:
            hidden |= torch.isin(keys, absent)
        blocks.append(RowBlock(start, stop, first_key, highest + 1, masked_from, hidden))
    return tuple(blocks)


def additive(block: RowBlock, dtype: torch.dtype, *, repeats: int = 1) -> Tensor | None:
    """Return the mask to add to a block's scores, 0 or -inf: `[repeats · rows, keys]`; None if all keys are visible.

    The keys are those of the block's span; the rows of the block are repeated as a whole.
    """
    if block.hidden is None:
        return None
    mask = block.hidden.new_zeros(
        (len(block.hidden), block.last_key - block.first_key), dtype=dtype
    )
    mask[:, block.masked_from - block.first_key :].masked_fill_(block.hidden, float("-inf"))
    return mask.repeat(repeats, 1) if repeats > 1 else mask


def masked_scores(
    q: Tensor, k: Tensor, block: RowBlock, *, scale: float, softcap: float | None
) -> Tensor:
    """Return a block's scores `[kv_heads, group · rows, keys]` in float32, -inf for hidden keys.

    `q` is `[kv_heads, group, rows, head_dim]`, `k` `[keys, kv_heads, head_dim]` of the block's span. A matrix product
    in bf16 would round them to 8 bits, and a weight grows with the exponential of its score.
    """
    kv_heads, group, rows, head_dim = q.shape
    scaled_q = q.float().reshape(kv_heads, group * rows, head_dim) * scale
    scores = torch.bmm(scaled_q, k.float().permute(1, 2, 0))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if block.hidden is not None:
        maskable = scores.view(kv_heads, group, rows, -1)[
            ..., block.masked_from - block.first_key :
        ]
        maskable.masked_fill_(block.hidden, float("-inf"))
    return scores


def check_sinks(sinks: Tensor | None, heads: int) -> None:
    """Raise ValueError unless there are no sinks, or one for each query head: kernels would read past their end."""
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"{heads} query heads need {heads} sinks, got {tuple(sinks.shape)}")


def softmax_with_sinks(scores: Tensor, group: int, sinks: Tensor | None) -> Tensor:
    """Return the weights of one block's keys; what a head gives to its sink is missing from their sum.

    `scores`, masked, and result are float32 `[kv_heads, group · rows, keys]`, `sinks` float32 `[heads]` or None.

    >>> softmax_with_sinks(torch.zeros(1, 1, 1), 1, torch.zeros(1)).tolist()
    [[[0.5]]]
    """
    if sinks is None:
        return scores.softmax(-1)
    kv_heads, folded_rows, _ = scores.shape
    check_sinks(sinks, kv_heads * group)
    sink_scores = sinks.float().view(kv_heads, group, 1).expand(-1, -1, folded_rows // group)
    sink_scores = sink_scores.reshape(kv_heads, folded_rows, 1)
    return torch.cat((scores, sink_scores), dim=-1).softmax(-1)[..., :-1]


def grouped(q: Tensor, kv_heads: int) -> Tensor:
    """View `[rows, heads, head_dim]` as `[kv_heads, group, rows, head_dim]`; heads is a multiple of kv_heads."""
    rows, heads, head_dim = q.shape
    return q.view(rows, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
