"""Attention weights as plain matrices: what the references of the attention kernels are made of."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from cachecraft_rag.kernels.gpu.batch import Batch
from cachecraft_rag.kernels.visibility import Visibility


def requests_of(
    k: Tensor, v: Tensor | None, visible: Visibility, batch: Batch | None
) -> Iterator[tuple[slice, Tensor, Tensor | None, Tensor]]:
    """A request's rows, keys and values `[keys, kv_heads, head_dim]`, and bool `[rows, keys]`: what is visible."""
    if batch is None:
        yield slice(0, len(visible.positions)), k, v, _seen(visible, visible.positions, len(k), visible.absent)
        return
    edges = batch.row_edges.tolist()
    for number, (start, stop) in enumerate(pairwise(edges)):
        positions = visible.positions[start:stop]
        keys = int(positions[-1]) + 1 if stop > start else 0
        absent = None if batch.absent is None else batch.absent[number, :keys].nonzero()[:, 0]
        own = [None if x is None else _keys_of(x, batch, number, keys) for x in (k, v)]
        assert own[0] is not None
        yield slice(start, stop), own[0], own[1], _seen(visible, positions, keys, absent)


def _keys_of(x: Tensor, batch: Batch, number: int, keys: int) -> Tensor:
    if batch.blocks is not None:
        place = torch.arange(keys, device=x.device)
        return x[batch.blocks[number].long()[place // x.shape[1]], place % x.shape[1]]
    assert batch.key_starts is not None
    start = int(batch.key_starts[number])
    return x[start : start + keys]


def _seen(visible: Visibility, positions: Tensor, keys: int, absent: Tensor | None) -> Tensor:
    key, own = torch.arange(keys, device=positions.device)[None, :], positions[:, None]
    seen = key <= own
    if visible.window is not None:
        seen &= key > own - visible.window
    if absent is not None:
        seen &= ~torch.isin(key, absent)
    return seen


def dense_scores(q: Tensor, k: Tensor, seen: Tensor, *, scale: float, softcap: float | None) -> Tensor:
    """float64 `[rows, heads, keys]` of one request; -inf where a row does not see a key."""
    keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("rhd,khd->rhk", q.double(), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(~seen[:, None], -torch.inf)


def without_own(weights: Tensor, positions: Tensor) -> Tensor:
    """Weights `[rows, heads, keys]`, 0 at a row's own position."""
    keys = torch.arange(weights.shape[-1], device=weights.device)
    return weights.masked_fill((keys[None, :] == positions[:, None])[:, None], 0.0)
