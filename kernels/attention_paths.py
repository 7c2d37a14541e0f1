"""Ways to attend on a CPU, with the same results. The fastest depends on the machine, the dtype and the shape.

A path is chosen by measuring (`model/attention_choice.py`), never by the name of a CPU. Masks are made once per pass
and shared by its layers. They are additive, because torch would convert a bool mask in every layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cachecraft_rag.kernels.cpu import calls
from cachecraft_rag.kernels.cpu.library import kernels, kernels_for
from cachecraft_rag.kernels.row_blocks import (
    BLOCK_ROWS,
    RowBlock,
    additive,
    grouped,
    masked_scores,
    row_blocks,
    softmax_with_sinks,
)
from cachecraft_rag.kernels.visibility import Visibility

Kind = Literal["fused", "folded", "explicit", "causal", "compiled"]
ShapeClass = Literal["few", "some", "front"]
MANY_ROWS = 1 << 30
_FEW = 64


@dataclass(frozen=True, slots=True)
class AttentionPath:
    """A way to attend.

    kind        fused     torch's kernel, with keys and values expanded to every query head
                folded    torch's kernel, with the queries of a group as rows of their common key/value head
                explicit  two matrix products around a softmax, in float32
                causal    torch's kernel with its own mask; for a prompt's first tokens only
                compiled  the kernel in C (`kernels/cpu`); falls back to "fused"
    block_rows  number of rows at a time; folded rows count once for each query head of a group. A block skips the keys
                after its last row, and torch's kernel takes larger tiles from 192 rows on
    """

    kind: Kind
    block_rows: int = BLOCK_ROWS


PATHS: Mapping[str, AttentionPath] = MappingProxyType(
    {
        "blocks": AttentionPath("fused"),
        "large blocks": AttentionPath("fused", 256),
        "one call": AttentionPath("fused", MANY_ROWS),
        "folded blocks of 192": AttentionPath("folded", 192),
        "folded blocks of 288": AttentionPath("folded", 288),
        "products": AttentionPath("explicit", 48),
        "causal": AttentionPath("causal", MANY_ROWS),
        "compiled": AttentionPath("compiled"),
    }
)


def paths_for(shape: ShapeClass) -> list[str]:
    """Return the names of the paths for a class of shapes; the first is the default if none is measured.

    "compiled" is among them, as the last one, only where this process uses compiled kernels.
    """
    compiled = ["compiled"] if kernels() is not None else []
    if shape == "front":
        return ["causal", "blocks", "large blocks", "folded blocks of 288", *compiled]
    return [name for name in PATHS if name not in ("causal", "compiled")] + compiled


@dataclass(frozen=True)
class AttentionPaths:
    """The path for each class of shapes, by names of `PATHS`.

    few    up to 64 scattered rows
    some   more scattered rows
    front  the first rows of a prompt, without gaps
    """

    names: Mapping[ShapeClass, str] = field(default_factory=dict)

    def of(self, visible: Visibility) -> AttentionPath:
        """Return the path for these rows; the first of `paths_for` if `names` has none for their class.

        >>> AttentionPaths().of(Visibility(torch.tensor([0, 1, 2]))).kind
        'causal'
        >>> AttentionPaths({"few": "folded blocks of 288"}).of(Visibility(torch.tensor([1, 4])))
        AttentionPath(kind='folded', block_rows=288)
        """
        shape = visible.prepared(shape_class)
        return PATHS[self.names.get(shape, paths_for(shape)[0])]


UNMEASURED = AttentionPaths()


def shape_class(visible: Visibility) -> ShapeClass:
    """Return the class of these rows: "front", "few" or "some", see `AttentionPaths`.

    Rows with a window or with absent keys are never "front". Without rows the class is "few".
    """
    rows = len(visible.positions)
    sees_all_before = visible.window is None and visible.absent is None
    if sees_all_before and rows and int(visible.positions[-1]) == rows - 1:
        return "front"  # ascending and without repeats, so there is no gap
    return "few" if rows <= _FEW else "some"


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Visibility,
    path: AttentionPath,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute `attention.attention` by this path, without Triton; other arguments are as there but `paths` and `out`.

    torch's own kernel knows neither soft caps nor sinks: with them, it is replaced by explicit products. Returns a new
    tensor `[rows, heads, head_dim]` in the dtype of `q`; a row that sees no key gets zeros or NaN. A "causal" path is
    right only for the first rows of a prompt, which is not checked. The compiled kernels check no shapes but that of
    the sinks, and raise MemoryError without memory.
    """
    run = kernels_for(q, k, v) if path.kind == "compiled" else None
    if run is not None and calls.attends(q, k, v):
        return calls.attend(run, q, k, v, visible, scale=scale, softcap=softcap, sinks=sinks)

    out = torch.empty_like(q)
    queries = grouped(q, k.shape[1])
    grouped_out = grouped(out, k.shape[1])
    needs_products = softcap is not None or sinks is not None
    if path.kind == "causal" and not needs_products:
        rows = len(q)
        grouped_out.copy_(causal(queries, k[:rows], v[:rows], scale=scale))
        return out

    is_explicit = needs_products or path.kind == "explicit"
    is_folded = path.kind == "folded"
    group = queries.shape[1]
    block_rows = BLOCK_ROWS if needs_products else path.block_rows
    if is_folded:
        block_rows = max(1, block_rows // group)
    repeats = group if is_folded else 1
    mask_dtype = None if is_explicit else q.dtype

    # From the last block on, which sees most keys: the memory that torch takes for it serves all the others.
    for block, mask in reversed(visible.prepared(_masked_blocks, block_rows, repeats, mask_dtype)):
        rows_in_block = slice(block.start, block.stop)
        span = slice(block.first_key, block.last_key)
        block_q = queries[:, :, rows_in_block]
        if is_explicit:
            block_out = products(
                block_q, k[span], v[span], block, scale=scale, softcap=softcap, sinks=sinks
            )
        elif is_folded:
            block_out = folded(block_q, k[span], v[span], mask, scale=scale)
        else:
            block_out = fused(block_q, k[span], v[span], mask, scale=scale)
        grouped_out[:, :, rows_in_block] = block_out
    return out


def _masked_blocks(
    visible: Visibility, block_rows: int, repeats: int, dtype: torch.dtype | None
) -> list[tuple[RowBlock, Tensor | None]]:
    """Return the blocks of a pass with their additive masks; without a `dtype`, the masks are None."""
    blocks = (
        visible.prepared(row_blocks)
        if block_rows == BLOCK_ROWS
        else row_blocks(visible, block_rows)
    )
    if dtype is None:
        return [(block, None) for block in blocks]
    return [(block, additive(block, dtype, repeats=repeats)) for block in blocks]


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float) -> Tensor:
    """Attend in one block with torch's kernel: `q` and result `[kv_heads, group, rows, head_dim]`.

    Keys and values are `[keys, kv_heads, head_dim]`. The mask `[rows, keys]` in the dtype of `q`, if any, is added.
    """
    group = q.shape[1]
    return scaled_dot_product_attention(
        q, _expanded(k, group), _expanded(v, group), attn_mask=mask, scale=scale
    )


def folded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float) -> Tensor:
    """Compute the result of `fused` with the group's heads as rows.

    The mask is `[group · rows, keys]`: the caller repeats it for each head of the group, see `row_blocks.additive`.
    Other shapes are as in `fused`.
    """
    kv_heads, group, rows, head_dim = q.shape
    folded_q = q.reshape(1, kv_heads, group * rows, head_dim)
    keys = k.transpose(0, 1)[None]
    values = v.transpose(0, 1)[None]
    return scaled_dot_product_attention(
        folded_q, keys, values, attn_mask=mask, scale=scale
    ).reshape(q.shape)


def causal(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """Attend from a prompt's first rows to the keys up to each, as many keys as rows; shapes as in `fused`."""
    group = q.shape[1]
    return scaled_dot_product_attention(
        q, _expanded(k, group), _expanded(v, group), is_causal=True, scale=scale
    )


def products(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: RowBlock,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend in one block by products around a softmax, with shapes as in `fused`; returns float32.

    Keys and values are those of the block's span. NaN for a row that sees no key. Rejected: half precision.
    """
    scores = masked_scores(q, k, block, scale=scale, softcap=softcap)
    weights = softmax_with_sinks(scores, q.shape[1], sinks)
    return torch.bmm(weights, v.transpose(0, 1).float()).view(q.shape)


def _expanded(x: Tensor, group: int) -> Tensor:
    """View `[keys, kv_heads, head_dim]` as `[kv_heads, group, keys, head_dim]` without copying for each query head."""
    keys, kv_heads, head_dim = x.shape
    return x.transpose(0, 1)[:, None].expand(kv_heads, group, keys, head_dim)
