"""Captures of several ranks, put together: what is stored has all heads, whoever computed them."""

from __future__ import annotations

from torch import Tensor

from cachecraft_rag.compute.capture import CaptureRecorder
from cachecraft_rag.compute.stack import Ranks
from cachecraft_rag.vllm.ranks import TensorParallel


def gathered(ranks: Ranks, recorder: CaptureRecorder, keys: Tensor) -> tuple[CaptureRecorder, Tensor]:
    """A recorder and the rotated keys `[layers, keys, kv_heads, head_dim]` with every rank's heads.

    A collective: every rank calls it at the same moment, so it runs inside a step and not when captures are described.
    """
    if not isinstance(ranks, TensorParallel):
        return recorder, keys
    return recorder.with_heads(ranks.all_heads), ranks.all_heads(keys)
