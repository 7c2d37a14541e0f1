"""GPU memory that fillings need beside vLLM's own: reserved before vLLM sizes its KV cache, and divided among requests.

vLLM measures how much memory is left once its model is loaded, and takes nearly all of it for its KV cache. So the
model holds an allocation of the size that fillings may need until the first filling begins. From then on torch has this
memory for the buffers of requests, and the scheduler begins a filling only if the keys and values of all of them fit.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.types.kv_layout import KVLayout
from cachecraft_rag.vllm.options import VLLMConfig
from cachecraft_rag.vllm.settings import ConnectorSettings

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger("cachecraft_rag.vllm")

# Share of a GPU's memory that is reserved at most, if several of the longest prompts fit into it.
_SHARE = 0.1
# Share that is reserved at most, if a single prompt of the longest kind needs it.
_LARGEST_SHARE = 0.25
# Segments whose attention is summed up for captures: columns of float32 per row and head.
_SEGMENTS = 64


@dataclass(frozen=True, slots=True)
class FillMemory:
    """Sizes of fillings on one GPU, in bytes.

    Attributes:
        buffer_token: keys and values of a token in a request's buffer.
        captured_token: keys and values of a captured token until they are stored, on the rank that joins all heads.
        pass_row: hidden states of a computed row inside one layer.
        total: memory for fillings; None = no limit.
        context: tokens of the longest prompt that vLLM takes; None = no limit.
    """

    buffer_token: int = 0
    captured_token: int = 0
    pass_row: int = 0
    total: int | None = None
    context: int | None = None

    @classmethod
    def of(cls, config: VLLMConfig, settings: ConnectorSettings, *, gpu_bytes: int) -> Self:
        """Return the sizes for a model; `total` is what its longest prompts need, limited to a share of the GPU.

        The limit is a tenth of the GPU's memory (`gpu_bytes`), or up to a quarter if a single prompt of the longest
        kind needs it. `context` is vLLM's `max_model_len`. Nothing is allocated here, see `reserve`.
        """
        ranks = config.parallel_config.tensor_parallel_size
        layout = settings.identity.layout
        token = layout.nbytes(1)
        buffer_token = token // ranks
        # own heads, and those of all ranks where they are joined
        captured_token = buffer_token + token if ranks > 1 else token
        pass_row = _pass_row(config.model_config.hf_text_config, layout, ranks)
        longest = config.model_config.max_model_len
        single = longest * (buffer_token + captured_token + pass_row)
        several = settings.fill_at_once * longest * (buffer_token + captured_token)
        most = max(_SHARE * gpu_bytes, min(single, _LARGEST_SHARE * gpu_bytes))
        total = min(several + longest * pass_row, int(most))
        return cls(buffer_token, captured_token, pass_row, total, longest)

    def longest(self) -> int | None:
        """Return the most tokens of a prompt that can be filled even if all of it is computed; None without a limit.

        >>> FillMemory(10, 10, 5, total=1000).longest()
        40
        """
        if self.total is None:
            return None
        fitting = self.total // (self.buffer_token + self.captured_token + self.pass_row)
        return fitting if self.context is None else min(fitting, self.context)

    def room(self) -> int | None:
        """Return the memory for keys and values of all fillings, in bytes: `total` without that for the rows of a pass.

        The rows are those of a prompt of `longest` tokens. None without a limit.
        """
        longest = self.longest()
        if self.total is None or longest is None:
            return None
        return self.total - longest * self.pass_row


UNLIMITED = FillMemory()


@dataclass(frozen=True, slots=True)
class FillSize:
    """Size of one filling: tokens of the prompt, and segment id → tokens of each segment that it captures."""

    tokens: int
    captured: Mapping[str, int]


class FillBudget:
    """Division of the memory among the requests that are filled, and the captures that are not stored yet."""

    def __init__(self, memory: FillMemory) -> None:
        self._memory = memory
        self._filling: dict[str, FillSize] = {}  # by request
        # tokens of segments whose captures may not be stored yet
        self._captured: dict[str, int] = {}

    def refusal(self, size: FillSize) -> str | None:
        """Return why a prompt cannot be filled even alone, as a sentence, or None if it can and without a limit."""
        longest = self._memory.longest()
        if longest is None or size.tokens <= longest:
            return None
        return (
            f"it has {size.tokens} tokens, and the GPU memory reserved for filling takes {longest}: lower "
            "--max-model-len, or spread the model with --tensor-parallel-size"
        )

    def fits(self, size: FillSize, capturing: Collection[str]) -> bool:
        """Return True if this filling can begin beside the others.

        True too without a limit, and while nothing is filled or captured: `refusal` tells whether it fits alone.
        `capturing` are the segments whose captures are under way; those that no filling has announced take no room.
        """
        room = self._memory.room()
        if room is None or not (self._filling or capturing):
            return True
        captured = sum(self._captured.get(segment, 0) for segment in capturing)
        used = sum(self._bytes(other) for other in self._filling.values())
        used += captured * self._memory.captured_token
        return used + self._bytes(size) <= room

    def take(self, request: str, size: FillSize) -> None:
        """Count a filling that begins, in place of an earlier one of the request, and the captures it will make."""
        self._filling[request] = size
        self._captured |= size.captured

    def give_back(self, request: str) -> None:
        """Count a filling no longer; its captures count until they are stored. Does nothing for an unknown request."""
        self._filling.pop(request, None)

    def stored(self, capturing: Collection[str]) -> None:
        """Count a capture no longer if it is not under way, and no filling that is counted will make it."""
        expected = {segment for size in self._filling.values() for segment in size.captured}
        kept = expected.union(capturing)
        self._captured = {
            segment: tokens for segment, tokens in self._captured.items() if segment in kept
        }

    def _bytes(self, size: FillSize) -> int:
        memory = self._memory
        captured = sum(size.captured.values())
        return size.tokens * memory.buffer_token + captured * memory.captured_token


def _pass_row(config: PretrainedConfig, layout: KVLayout, ranks: int) -> int:
    """Return the bytes of a row inside one layer, of a model laid out like Llama."""
    width = 4 if layout.dtype == "float32" else 2
    hidden: int = config.hidden_size
    heads: int = config.num_attention_heads
    inner: int = config.intermediate_size
    # queries, keys and values as projected, rotated, and the output
    attention = 3 * width * (heads + 2 * layout.kv_heads) * layout.head_dim
    attention += 4 * heads * _SEGMENTS
    # gate and up projections, and their product
    feed_forward = 3 * width * inner
    # hidden states and residual: input, output, and the layer's own
    return 6 * width * hidden + max(attention, feed_forward) // ranks


def fill_memory(config: VLLMConfig, settings: ConnectorSettings) -> FillMemory:
    """Return the sizes on this machine's GPUs, the same in every process; `UNLIMITED` without a GPU.

    Imports vLLM, and asks the driver for the memory of the first GPU.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda_alike():
        return UNLIMITED
    gpu_bytes = int(current_platform.get_device_total_memory())
    return FillMemory.of(config, settings, gpu_bytes=gpu_bytes)


def reserve(config: VLLMConfig, device: torch.device) -> list[Tensor]:
    """Return the memory of fillings in a list with one tensor; it is reserved as long as the list holds it.

    The tensor is uint8 `[bytes]`, as many as `FillMemory.total`, and not written. The list is empty on another device
    than a CUDA GPU, and in a server that this package did not start. Raises ConfigError if the GPU has no room.
    """
    if device.type != "cuda":
        return []
    try:
        settings = ConnectorSettings.of(config)
    except ConfigError:
        return []
    memory = fill_memory(config, settings)
    if memory.total is None:
        return []
    gigabytes = memory.total / 1e9
    try:
        reserved = torch.empty(memory.total, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"beside the model the GPU has no room for the {gigabytes:.1f} GB in which prompts are filled: lower "
            "--max-model-len, or spread the model with --tensor-parallel-size"
        ) from error
    logger.info(
        "%.1f GB are reserved for filling prompts of up to %d tokens", gigabytes, memory.longest()
    )
    return [reserved]
