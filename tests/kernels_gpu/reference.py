"""The kernels in plain torch and float64: what the tests and `examples/gpu_bench.py` compare them with."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from cachecraft_rag.kernels.gpu.attention import Attended
from cachecraft_rag.kernels.visibility import Visibility


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    visible: Visibility,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bounds: Tensor | None = None,
) -> Attended:
    """`kernels.gpu.attention.attend` by matrices `[rows, heads, keys]`."""
    scored = _scores(q, k, visible, scale=scale, softcap=softcap)
    if sinks is not None:
        sink_scores = sinks.double()[None, :, None].expand(len(q), -1, 1)
        scored = torch.cat((scored, sink_scores), -1)
    weights = scored.softmax(-1).nan_to_num(0.0)[..., : k.shape[0]]  # a row that sees nothing
    out = mass = None
    if v is not None:
        out = torch.einsum(
            "rhk,khd->rhd", weights, v.double().repeat_interleave(q.shape[1] // k.shape[-2], dim=1)
        )
    if bounds is not None:
        others = _without_own(weights, visible.positions).mean(1)
        mass = torch.stack([others[:, a:b].sum(1) for a, b in pairwise(bounds.tolist())], dim=1)
    return Attended(out, scored.logsumexp(-1), mass)


def received(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    visible: Visibility,
    *,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """`kernels.gpu.received.received` by matrices `[rows, heads, keys]`."""
    scored = _scores(q, k, visible, scale=scale, softcap=softcap)
    weights = (scored - lse[:, :, None].double()).exp().nan_to_num(0.0)
    return _without_own(weights, visible.positions).mean(1).sum(0)


def combine(
    parts: Tensor | None, lses: Tensor, masses: Tensor | None, *, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """`kernels.gpu.combine.combine`."""
    lse = lses.logsumexp(0)
    # -inf less -inf: a row that sees nothing
    weight = (lses - lse).exp().nan_to_num(0.0)[..., None]
    out = None if parts is None else (parts * weight).sum(0).to(dtype)
    return out, lse, None if masses is None else (masses * weight).sum(0)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`kernels.gpu.rope.rotate`."""
    half = cos.shape[-1] // 2
    cos, sin, x = cos.double()[:, None], sin.double()[:, None], x.double()
    first, second = x[..., :half], x[..., half : 2 * half]
    one = first * cos[..., :half] - second * sin[..., :half]
    two = second * cos[..., half:] + first * sin[..., half:]
    return torch.cat((one, two, x[..., 2 * half :]), dim=-1)


def place(merged: Tensor, chunk: Tensor, start: int, *, cos: Tensor, sin: Tensor) -> None:
    """`kernels.gpu.place.place`, a layer at a time."""
    where = slice(start, start + chunk.shape[2])
    for own, layer in zip(merged, chunk, strict=True):
        own[0, where] = rotate(layer[0], cos[where], sin[where]).to(merged.dtype)
        own[1, where] = layer[1].to(merged.dtype)


def mean_change(
    merged: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    rows: Tensor,
    positions: Tensor,
    edges: Tensor,
    strength: float,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """`kernels.gpu.drift.mean_change`."""
    shifts = []
    for first, last in pairwise(edges.tolist()):
        row, place = rows[first:last].long(), positions[first:last].long()
        length = cos[place].double().square() + sin[place].double().square()
        key_change = keys[row].double() - merged[0, place].double()
        raw = rotate(key_change, cos[place] / length, -sin[place] / length)
        value_change = values[row].double() - merged[1, place].double()
        shifts.append(strength * torch.stack((raw.mean(0), value_change.mean(0))))
    return torch.stack(shifts)


def write_rows(
    merged: Tensor,
    keys: Tensor,
    values: Tensor,
    shifts: Tensor,
    owner: Tensor,
    *,
    cos: Tensor,
    sin: Tensor,
) -> None:
    """`kernels.gpu.drift.write_rows`."""
    stale = (owner >= 0).nonzero()[:, 0]
    change = shifts[owner[stale].long()].double()  # [stale, 2, kv_heads, head_dim]
    turned_keys = rotate(change[:, 0], cos[stale], sin[stale])
    merged[0, stale] = (merged[0, stale].double() + turned_keys).to(merged.dtype)
    merged[1, stale] = (merged[1, stale].double() + change[:, 1]).to(merged.dtype)
    written = (owner < -1).nonzero()[:, 0]
    row = -2 - owner[written].long()
    merged[0, written] = keys[row].to(merged.dtype)
    merged[1, written] = values[row].to(merged.dtype)


def _scores(
    q: Tensor, k: Tensor, visible: Visibility, *, scale: float, softcap: float | None
) -> Tensor:
    """float64 `[rows, heads, keys]`; -inf where a row does not see a key."""
    keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("rhd,khd->rhk", q.double(), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    key, own = torch.arange(len(k), device=k.device)[None, :], visible.positions[:, None]
    seen = key <= own
    if visible.window is not None:
        seen &= key > own - visible.window
    if visible.absent is not None:
        seen &= ~torch.isin(key, visible.absent)
    return scores.masked_fill(~seen[:, None], -torch.inf)


def _without_own(weights: Tensor, positions: Tensor) -> Tensor:
    """Weights `[rows, heads, keys]`, 0 at a row's own position."""
    keys = torch.arange(weights.shape[-1], device=weights.device)
    return weights.masked_fill((keys[None, :] == positions[:, None])[:, None], 0.0)
