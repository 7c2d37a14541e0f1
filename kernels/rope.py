"""Rotary position embedding as its own step, so that a stored raw key can be placed at any position.

RoFormer, eq. 34, in the half-split form of the Llama family: dimension i is paired with dimension i + rotary_dim / 2.
Dimensions past `rotary_dim` (partial rotary) pass through; a `rotary_dim` of 0 rotates nothing. `cos` and `sin` are
those of the model's own rotary module, so every rope scaling that it knows is honoured here too. Models that pair other
dimensions have their heads put into this order first (`model/layer_survey.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cachecraft_rag.kernels.cpu import calls
from cachecraft_rag.kernels.cpu.library import kernels_for
from cachecraft_rag.kernels.gpu.choice import uses_triton


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Rotate raw queries or keys to their positions.

    Args:
        x: `[tokens, heads, head_dim]`, raw (before rotary embedding).
        cos, sin: `[tokens, rotary_dim]`, the rows of the positions wanted, in the dtype of `x`. The rotary_dim is even
            and at most head_dim, which is not checked on a CPU.
        out: where to write, same shape and dtype as `x`, not overlapping it; None = a new tensor. It is returned.

    >>> x = torch.tensor([[[1.0, 0.0]]])  # a token, a head, two dimensions
    >>> turn = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 1.0]])  # cos and sin of 90 degrees
    >>> rotate(x, *turn).tolist()
    [[[0.0, 1.0]]]
    """
    if uses_triton(x):
        from cachecraft_rag.kernels.gpu.rope import rotate as rotate_on_gpu

        return rotate_on_gpu(x, cos, sin, out=out)
    if out is None:
        out = torch.empty_like(x)
    if (run := kernels_for(x, cos, sin, out)) is not None:
        calls.rotate(run, x, cos, sin, out)
        return out
    width = cos.shape[-1]
    half = width // 2
    cos = cos.unsqueeze(1)  # [tokens, 1, rotary_dim]
    sin = sin.unsqueeze(1)
    # in one piece: halves of a head are slow to walk
    torch.mul(x[..., :width], cos, out=out[..., :width])
    out[..., :half].addcmul_(x[..., half:width], sin[..., :half], value=-1)
    out[..., half:width].addcmul_(x[..., :half], sin[..., half:])
    if width < x.shape[-1]:
        out[..., width:] = x[..., width:]
    return out


def add_rotated(out: Tensor, vector: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Add one raw vector `[heads, head_dim]`, rotated to each position, to `out` `[tokens, heads, head_dim]` in place.

    `cos` and `sin` are as in `rotate`; all have one dtype.

    >>> out, turn = torch.zeros(1, 1, 2), torch.tensor([[1.0, 1.0]])  # 90 degrees
    >>> add_rotated(out, torch.tensor([[1.0, 0.0]]), 0.0 * turn, turn)
    >>> out.tolist()
    [[[0.0, 1.0]]]
    """
    width = cos.shape[-1]
    half = width // 2
    turned = torch.cat((-vector[:, half:width], vector[:, :half]), dim=-1)
    rotary = out if width == out.shape[-1] else out[..., :width]
    rotary.addcmul_(vector[:, :width], cos[:, None]).addcmul_(turned, sin[:, None])
    if width < out.shape[-1]:
        out[..., width:] += vector[:, width:]
