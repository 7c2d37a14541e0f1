"""Decode steps of one answer as a CUDA graph.

A decode step launches some thousand small kernels, and Python launches them more slowly than a GPU computes them. The
operations of each step of an answer are the same: only the token and its position change, and they are read from the
GPU's memory. So a step is recorded once for each answer, and replayed for every further token with a single launch.
"""

from __future__ import annotations

import logging
from functools import cache

import numpy as np
import torch
from torch import Tensor

from cachecraft_rag.compute.kv_buffer import KVBuffer
from cachecraft_rag.compute.row_pass import RowPass, advance
from cachecraft_rag.compute.stack import Stack
from cachecraft_rag.kernels.gpu.streams import new_stream

logger = logging.getLogger("cachecraft_rag")

# Steps of an answer that are launched one by one before one is recorded. Recording takes as long as two steps, so a
# short answer would not gain; and by then every kernel has been compiled.
_STEPS_BEFORE = 4


class DecodeGraph:
    """A recorded decode step of one answer, to be used in the thread and on the stream that computes the answer.

    Args:
        stack: the model's layers.
        buffer: keys and values of the request; they must stay where they are.

    Raises:
        RuntimeError: an operation of the step cannot be recorded.
    """

    def __init__(self, stack: Stack, buffer: KVBuffer) -> None:
        # The token and its position. Any position would do: recording computes nothing.
        self._inputs = torch.zeros(2, dtype=torch.int64, device=stack.device)
        self._graph = torch.cuda.CUDAGraph()
        stream = new_stream(stack.device)
        stream.wait_stream(torch.cuda.current_stream(stack.device))
        with torch.cuda.stream(stream):
            # Other threads go on copying and allocating meanwhile.
            self._graph.capture_begin(
                pool=_shared_memory(stack.device).pool(), capture_error_mode="thread_local"
            )
            try:
                token, position = self._inputs[:1], self._inputs[1:]
                row_pass = RowPass(stack, buffer, token, np.zeros(1, np.int64), where=position)
                for _layer in range(stack.layout.layers):
                    advance(stack, [row_pass])
                self._hidden = row_pass.hidden
            finally:
                self._graph.capture_end()
        torch.cuda.current_stream(stack.device).wait_stream(stream)

    def step(self, token: int, position: int) -> Tensor:
        """Compute the next token of the answer; its keys and values are written to the buffer.

        Returns:
            Its hidden states `[streams, 1, hidden]`, which the next step overwrites.
        """
        self._inputs.copy_(torch.tensor([token, position]))
        self._graph.replay()
        return self._hidden


@cache
def _shared_memory(device: torch.device) -> torch.cuda.CUDAGraph:
    """Return a graph whose memory all graphs on a device share: they are replayed one after the other, on one stream.

    It is never replayed. It lives as long as the process, because memory that no graph uses cannot be shared again.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(new_stream(device)):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            torch.zeros(1, device=device)
        finally:
            graph.capture_end()
    return graph


class GraphedSteps:
    """Decode steps of single answers, recorded where that is possible. For one thread.

    Args:
        stack: the model's layers.
        records: False to launch every step operation by operation, as on a CPU.
    """

    def __init__(self, stack: Stack, *, records: bool) -> None:
        self._stack = stack
        self._records = records

    @torch.inference_mode()
    def step(self, buffer: KVBuffer, token: int, position: int) -> Tensor | None:
        """Return the hidden states of the next token as `DecodeGraph.step` does; None if it must be launched."""
        if not self._records:
            return None
        buffer.decode_steps += 1
        if buffer.decode_steps <= _STEPS_BEFORE:
            return None
        if buffer.decode_graph is None:
            try:
                buffer.decode_graph = DecodeGraph(self._stack, buffer)
            except RuntimeError as error:
                self._records = False
                logger.warning(
                    "Decode steps cannot be recorded as CUDA graphs, so they take longer: %s",
                    str(error),  # the error itself would keep the request's tensors alive
                )
                return None
        return buffer.decode_graph.step(token, position)
