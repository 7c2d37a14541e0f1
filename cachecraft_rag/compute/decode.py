"""Decoding in the buffers that prefills have filled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cachecraft_rag.compute.kv_buffer import KVBuffer
from cachecraft_rag.compute.row_pass import RowPass, advance
from cachecraft_rag.compute.stack import Stack


class DecodeStep:
    """The next token of an answer, at `position`, where its K/V join the buffer. Computing it is idempotent."""

    __slots__ = ("buffer", "position", "token")

    def __init__(self, buffer: KVBuffer, token: int, position: int) -> None:
        self.buffer, self.token, self.position = buffer, token, position


@torch.inference_mode()
def extend(stack: Stack, buffer: KVBuffer, tokens: Sequence[int], position: int) -> Tensor:
    """Hidden states `[streams, tokens, hidden]` of these tokens, the first at `position`; their K/V join the buffer."""
    return _computed(stack, [_pass(stack, buffer, tokens, position)])


@torch.inference_mode()
def extend_all(stack: Stack, steps: Sequence[DecodeStep]) -> Tensor:
    """Hidden states `[streams, steps, hidden]` of one step of each of several answers, computed in one pass."""
    return _computed(stack, [_pass(stack, step.buffer, [step.token], step.position) for step in steps])


def _pass(stack: Stack, buffer: KVBuffer, tokens: Sequence[int], position: int) -> RowPass:
    ids = torch.tensor(tokens, device=stack.device)
    return RowPass(stack, buffer, ids, np.arange(position, position + len(tokens)))


def _computed(stack: Stack, passes: Sequence[RowPass]) -> Tensor:
    for _ in range(stack.layout.layers):
        advance(stack, passes)
    return torch.cat([one.hidden for one in passes], dim=1) if len(passes) > 1 else passes[0].hidden
