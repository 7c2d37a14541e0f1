"""Decoding in the buffers that prefills have filled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cachecraft_rag.compute.kv_buffer import KVBuffer
from cachecraft_rag.compute.row_pass import Observer, RowPass, advance
from cachecraft_rag.compute.stack import Stack
from cachecraft_rag.compute.stale_tokens.refresh import Refresh


class DecodeStep:
    """The next token of an answer, at `position`, where its K/V join the buffer. Computing it is idempotent.

    `refresh`: chooses stale tokens of the prompt to recompute with it; None = there are none.
    """

    __slots__ = ("buffer", "position", "refresh", "token")

    def __init__(self, buffer: KVBuffer, token: int, position: int, refresh: Refresh | None = None) -> None:
        self.buffer, self.token, self.position, self.refresh = buffer, token, position, refresh


@torch.inference_mode()
def extend(stack: Stack, buffer: KVBuffer, tokens: Sequence[int], position: int) -> Tensor:
    """Hidden states `[streams, tokens, hidden]` of these tokens, the first at `position`; their K/V join the buffer."""
    return _computed(stack, [_pass(stack, buffer, tokens, np.arange(position, position + len(tokens)))])


@torch.inference_mode()
def extend_all(stack: Stack, steps: Sequence[DecodeStep]) -> Tensor:
    """Hidden states `[streams, steps, hidden]` of one step of each of several answers, computed in one pass."""
    passes = [_step_pass(stack, step) for step in steps]
    hidden = _computed(stack, passes)
    if all(len(one.positions) == 1 for one in passes):
        return hidden
    last = np.cumsum([len(one.positions) for one in passes]) - 1
    return hidden[:, torch.from_numpy(last).to(stack.device)]


def _step_pass(stack: Stack, step: DecodeStep) -> RowPass:
    if step.refresh is None:
        return _pass(stack, step.buffer, [step.token], np.array([step.position]))
    stale, seen = step.refresh.begin(step.position)
    tokens = [*step.refresh.token_ids[stale].tolist(), step.token]
    return _pass(stack, step.buffer, tokens, np.append(stale, step.position), seen)


def _pass(
    stack: Stack,
    buffer: KVBuffer,
    tokens: Sequence[int],
    positions: NDArray[np.int64],
    observer: Observer | None = None,
) -> RowPass:
    return RowPass(stack, buffer, torch.tensor(tokens, device=stack.device), positions, observer=observer)


def _computed(stack: Stack, passes: Sequence[RowPass]) -> Tensor:
    for _ in range(stack.layout.layers):
        advance(stack, passes)
    return torch.cat([one.hidden for one in passes], dim=1) if len(passes) > 1 else passes[0].hidden
