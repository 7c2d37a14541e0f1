"""Attention of scattered rows over a merged K/V buffer."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cachecraft_rag.kernels.gpu.choice import uses_triton
from cachecraft_rag.kernels.row_blocks import RowBlock, grouped, masked_scores, row_blocks
from cachecraft_rag.kernels.visibility import Visibility


def attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Visibility, *, scale: float, softcap: float | None = None
) -> Tensor:
    """Softmax attention of scattered rows, masked by position.

    Args:
        q: `[rows, heads, head_dim]`, rotated.
        k, v: `[keys, kv_heads, head_dim]`, keys rotated; heads is a multiple of kv_heads.
        visible: which keys each row sees.
        scale: multiplies the scores.
        softcap: scores become softcap · tanh(scores / softcap) (Gemma-2); None = as they are.

    Returns:
        `[rows, heads, head_dim]`.
    """
    if uses_triton(q):
        from cachecraft_rag.kernels.gpu.attention import attend as attend_on_gpu

        found = attend_on_gpu(q, k, v, visible, scale=scale, softcap=softcap).out
        assert found is not None, "values were given"
        return found
    blocks = visible.prepared(row_blocks)
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
    queries, grouped_out = grouped(q, kv_heads), grouped(out, kv_heads)
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
    weights = masked_scores(q, k, block, scale=scale, softcap=softcap).softmax(-1)
    return torch.bmm(weights, v.transpose(0, 1).float()).view(kv_heads, group, rows, head_dim)


def _expanded(x: Tensor, heads: int) -> Tensor:
    """`[keys, kv_heads, head_dim]` seen as `[kv_heads, group, keys, head_dim]` with stride 0 along the group.

    Grouped-query attention without the copy that repeating keys and values for every query head would cost.
    """
    keys, kv_heads, head_dim = x.shape
    return x.transpose(0, 1)[:, None].expand(kv_heads, heads // kv_heads, keys, head_dim)
