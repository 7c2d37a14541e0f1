"""The ways to attend on a CPU: same results; the fastest depends on the machine, the dtype and the shape.

A path is chosen by measuring (`model/attention_choice.py`), never by what a CPU is called. Masks are made once per
pass and shared by its layers, as what is added to the scores: torch would make that of a bool mask in every layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
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
    """One way.

    kind        fused     torch's kernel, keys and values seen once for each query head
                folded    the same with a group's queries as rows of their common key/value head
                explicit  two matrix products around a softmax, in float32
                causal    torch's kernel with its own mask: for a prompt's first tokens only
    compiled  the kernel in C (`kernels/cpu`); where it cannot serve, as "fused"
    block_rows  rows at once, folded ones counted once for each query head of a group; a block skips the keys behind its
                last row, and torch's kernel takes larger tiles from 192 rows on
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
    """Names of the paths that can serve a class of shapes; the first is taken where nothing is measured."""
    own = ["compiled"] if kernels() is not None else []
    if shape == "front":
        return ["causal", "blocks", "large blocks", "folded blocks of 288", *own]
    return [name for name in PATHS if name not in ("causal", "compiled")] + own


@dataclass(frozen=True)
class AttentionPaths:
    """Paths of the classes of shapes, by names of `PATHS`.

    few, some  scattered rows: up to 64, and more
    front      the first rows of a prompt, all of them
    """

    names: Mapping[ShapeClass, str] = field(default_factory=dict)

    def of(self, visible: Visibility) -> AttentionPath:
        """The path for these rows.

        >>> AttentionPaths().of(Visibility(torch.tensor([0, 1, 2]))).kind
        'causal'
        >>> AttentionPaths({"few": "folded blocks of 288"}).of(Visibility(torch.tensor([1, 4])))
        AttentionPath(kind='folded', block_rows=288)
        """
        shape = visible.prepared(shape_class)
        return PATHS[self.names.get(shape, paths_for(shape)[0])]


UNMEASURED = AttentionPaths()


def shape_class(visible: Visibility) -> ShapeClass:
    """The class that rows belong to."""
    rows = len(visible.positions)
    if visible.window is None and visible.absent is None and rows and int(visible.positions[-1]) == rows - 1:
        return "front"  # ascending and without repeats, so they are all of them
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
    """Compute `attention` of several rows by this path.

    torch's own kernel knows neither soft caps nor sinks: with them, it is replaced by explicit products.
    """
    if path.kind == "compiled" and (run := kernels_for(q, k, v)) is not None and calls.attends(q, k, v):
        return calls.attend(run, q, k, v, visible, scale=scale, softcap=softcap, sinks=sinks)
    out = torch.empty_like(q)
    queries, grouped_out = grouped(q, k.shape[1]), grouped(out, k.shape[1])
    needs_products = softcap is not None or sinks is not None
    if path.kind == "causal" and not needs_products:
        rows = len(q)
        grouped_out.copy_(causal(queries, k[:rows], v[:rows], scale=scale))
        return out
    explicit = needs_products or path.kind == "explicit"
    group = queries.shape[1]
    size = BLOCK_ROWS if needs_products else path.block_rows
    if path.kind == "folded":
        size = max(1, size // group)
    # From the last one on, which sees most keys: the memory that torch takes for it serves all the others.
    repeats, dtype = group if path.kind == "folded" else 1, None if explicit else q.dtype
    for block, mask in reversed(visible.prepared(_masked_blocks, size, repeats, dtype)):
        part, span = queries[:, :, block.start : block.stop], slice(block.first_key, block.last_key)
        if explicit:
            found = products(part, k[span], v[span], block, scale=scale, softcap=softcap, sinks=sinks)
        else:
            found = (folded if path.kind == "folded" else fused)(part, k[span], v[span], mask, scale=scale)
        grouped_out[:, :, block.start : block.stop] = found
    return out


def _masked_blocks(
    visible: Visibility, block_rows: int, repeats: int, dtype: torch.dtype | None
) -> list[tuple[RowBlock, Tensor | None]]:
    """The blocks of a pass and what is added to their scores; nothing without a `dtype`."""
    blocks = visible.prepared(row_blocks) if block_rows == BLOCK_ROWS else row_blocks(visible, block_rows)
    return [(one, None if dtype is None else additive(one, dtype, repeats=repeats)) for one in blocks]


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float) -> Tensor:
    """torch's kernel for one block; `q` `[kv_heads, group, rows, head_dim]`, returns alike."""
    seen = partial(_expanded, group=q.shape[1])
    return scaled_dot_product_attention(q, seen(k), seen(v), attn_mask=mask, scale=scale)


def folded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float) -> Tensor:
    """The result of `fused`, with the group's heads as rows; the mask is repeated for each."""
    kv_heads, group, rows, head_dim = q.shape
    together = q.reshape(1, kv_heads, group * rows, head_dim)
    keys, values = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    return scaled_dot_product_attention(together, keys, values, attn_mask=mask, scale=scale).reshape(q.shape)


def causal(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """Attention of a prompt's first rows, each to the keys up to its own; `q` `[kv_heads, group, rows, head_dim]`."""
    seen = partial(_expanded, group=q.shape[1])
    return scaled_dot_product_attention(q, seen(k), seen(v), is_causal=True, scale=scale)


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
    """Two matrix products around a softmax for one block; `q` `[kv_heads, group, rows, head_dim]`, returns float32.

    Rejected: products in half precision, which round every score.
    """
    scores = masked_scores(q, k, block, scale=scale, softcap=softcap)
    weights = softmax_with_sinks(scores, q.shape[1], sinks)
    return torch.bmm(weights, v.transpose(0, 1).float()).view(q.shape)


def _expanded(x: Tensor, group: int) -> Tensor:
    """`[keys, kv_heads, head_dim]` seen as `[kv_heads, group, keys, head_dim]` with stride 0 along the group.

    Grouped-query attention without the copy that repeating keys and values for every query head would cost.
    """
    keys, kv_heads, head_dim = x.shape
    return x.transpose(0, 1)[:, None].expand(kv_heads, group, keys, head_dim)
