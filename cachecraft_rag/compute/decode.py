"""Decoding in the buffer that a prefill has filled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cachecraft_rag.compute.kv_buffer import KVBuffer
from cachecraft_rag.compute.row_pass import RowPass, advance
from cachecraft_rag.compute.stack import Stack


@torch.inference_mode()
def extend(stack: Stack, buffer: KVBuffer, tokens: Sequence[int], position: int) -> Tensor:
    """Hidden states `[streams, tokens, hidden]` of these tokens, the first at `position`; their K/V join the buffer."""
    ids = torch.tensor(tokens, device=stack.device)
    positions = np.arange(position, position + len(tokens))
    step = RowPass(stack, buffer, ids, positions)
    for _ in range(stack.layout.layers):
        advance(stack, [step])
    return step.hidden
