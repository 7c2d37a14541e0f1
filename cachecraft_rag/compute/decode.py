"""Decode steps in the buffers that prefills have filled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cachecraft_rag.compute.kv_buffer import KVBuffer
from cachecraft_rag.compute.row_pass import RowPass, advance
from cachecraft_rag.compute.stack import Stack


class DecodeStep:
    """The next token of an answer. Its keys and values are written to the buffer. Computing it again is harmless.

    Attributes:
        buffer: keys and values of the request.
        token: id of the token.
        position: position of the token.
    """

    __slots__ = ("buffer", "position", "token")

    def __init__(self, buffer: KVBuffer, token: int, position: int) -> None:
        self.buffer = buffer
        self.token = token
        self.position = position


@torch.inference_mode()
def extend(stack: Stack, buffer: KVBuffer, tokens: Sequence[int], position: int) -> Tensor:
    """Compute one or more tokens from `position` on into the buffer; return `[streams, tokens, hidden]`, not normed."""
    positions = np.arange(position, position + len(tokens))
    return _compute(stack, [_row_pass(stack, buffer, tokens, positions)])


@torch.inference_mode()
def extend_all(stack: Stack, steps: Sequence[DecodeStep]) -> Tensor:
    """Compute one step of each of one or more answers in one pass, and write its keys and values to its buffer.

    Returns hidden states `[streams, steps, hidden]` after the last layer, in the order of `steps` and not normed.
    """
    passes = [
        _row_pass(stack, step.buffer, [step.token], np.array([step.position])) for step in steps
    ]
    return _compute(stack, passes)


def _row_pass(
    stack: Stack, buffer: KVBuffer, tokens: Sequence[int], positions: NDArray[np.int64]
) -> RowPass:
    return RowPass(stack, buffer, torch.tensor(tokens, device=stack.device), positions)


def _compute(stack: Stack, passes: Sequence[RowPass]) -> Tensor:
    """Run all layers; return the hidden states `[streams, rows, hidden]` of all passes together."""
    for _layer in range(stack.layout.layers):
        advance(stack, passes)
    if len(passes) == 1:
        return passes[0].hidden
    return torch.cat([row_pass.hidden for row_pass in passes], dim=1)
