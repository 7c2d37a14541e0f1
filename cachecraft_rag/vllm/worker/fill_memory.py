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

from cachecraft_rag.compute.kv_buffer import LAYERS_PER_COPY
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
# Rows of a pass at most; vLLM's own passes have no more, see `max_num_batched_tokens`.
_PASS_ROWS = 8192
# The longest prompts for which memory is reserved if it is within the shares: one is loaded while another is computed.
_PROMPTS = 2
# Segments whose attention is summed up for captures: columns of float32 per row and head.
_SEGMENTS = 64


@dataclass(frozen=True, slots=True)
class FillMemory:
    """Sizes of fillings on one GPU, in bytes.

    A prompt with more rows than one pass may have is computed in several. Only the captures of its last pass stay on
    the GPU until they are stored (`OverlappedPrefill`).

    Attributes:
        buffer_token: keys and values of a token in a request's buffer, and in copies on their way there.
        captured_token: keys and values of a captured token until they are stored, on the rank that joins all heads.
        pass_row: hidden states of a computed row inside one layer.
        total: memory for fillings; None = no limit.
        context: tokens of the longest prompt that vLLM takes; None = no limit.
        pass_rows: most rows of a pass, except if a longer chunk is captured; None = no limit.
    """

    buffer_token: int = 0
    captured_token: int = 0
    pass_row: int = 0
    total: int | None = None
    context: int | None = None
    pass_rows: int | None = None

    @classmethod
    def of(cls, config: VLLMConfig, settings: ConnectorSettings, *, gpu_bytes: int) -> Self:
        """Return the sizes for a model; `total` is what one or two (`fill_at_once`) of its longest prompts need.

        It is limited to a tenth of the GPU's memory (`gpu_bytes`), or up to a quarter if a single prompt of the longest
        kind needs it. `context` is vLLM's `max_model_len`. Nothing is allocated here, see `reserve`.
        """
        ranks = config.parallel_config.tensor_parallel_size
        layout = settings.identity.layout
        token = layout.nbytes(1)
        own_token = token // ranks
        buffer_token = own_token + own_token * LAYERS_PER_COPY // layout.layers
        # own heads, and those of all ranks where they are joined
        captured_token = own_token + token if ranks > 1 else token
        pass_row = _pass_row(config.model_config.hf_text_config, layout, ranks)
        longest = config.model_config.max_model_len
        rows = min(longest, _PASS_ROWS, config.scheduler_config.max_num_batched_tokens)
        passes = rows * (captured_token + pass_row)
        single = longest * buffer_token + passes
        several = min(_PROMPTS, settings.fill_at_once) * longest * buffer_token + passes
        most = max(_SHARE * gpu_bytes, min(single, _LARGEST_SHARE * gpu_bytes))
        total = min(several, int(most))
        return cls(buffer_token, captured_token, pass_row, total, longest, rows)

    def needed(self, tokens: int, *, chunk: int = 0) -> int:
        """Return the bytes for a prompt of which all is computed and captured; its longest chunk has `chunk` tokens.

        >>> FillMemory(10, 10, 5, pass_rows=20).needed(40)  # 40 · 10 + 20 · (10 + 5)
        700
        """
        rows = tokens if self.pass_rows is None else min(tokens, max(self.pass_rows, chunk))
        return tokens * self.buffer_token + rows * (self.captured_token + self.pass_row)

    def longest(self) -> int | None:
        """Return the most tokens of a prompt that can be filled even if all of it is computed; None without a limit.

        It is at most `context`, and no chunk of it may be longer than a pass.

        >>> FillMemory(10, 10, 5, total=1000).longest()
        40
        >>> FillMemory(10, 10, 5, total=1000, pass_rows=20).longest()
        70
        """
        if self.total is None:
            return None
        fitting = self.total // (self.buffer_token + self.captured_token + self.pass_row)
        if self.pass_rows is not None and fitting > self.pass_rows:
            passes = self.pass_rows * (self.captured_token + self.pass_row)
            fitting = (self.total - passes) // self.buffer_token
        return fitting if self.context is None else min(fitting, self.context)

    def room(self) -> int | None:
        """Return the memory for keys and values of all fillings, in bytes: `total` without that for the rows of a pass.

        None without a limit.
        """
        longest = self.longest()
        if self.total is None or longest is None:
            return None
        rows = longest if self.pass_rows is None else min(longest, self.pass_rows)
        return self.total - rows * self.pass_row


UNLIMITED = FillMemory()


@dataclass(frozen=True, slots=True)
class FillSize:
    """Size of one filling: tokens of the prompt, and segment id → tokens of the segments that it captures, in order."""

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
        """Return why a prompt cannot be filled even alone, as a sentence; None if it can, or if there is no limit."""
        memory = self._memory
        longest = memory.longest()
        if memory.total is None or longest is None:
            return None
        chunk = max(size.captured.values(), default=0)
        if size.tokens > longest:
            return (
                f"it has {size.tokens} tokens, and the GPU memory reserved for filling takes {longest}: lower "
                "--max-model-len, or spread the model with --tensor-parallel-size"
            )
        if memory.needed(size.tokens, chunk=chunk) > memory.total:
            return (
                f"one of its new chunks has {chunk} tokens, more than the GPU memory reserved for filling takes beside "
                "the other ones: divide documents into shorter chunks"
            )
        return None

    def fits(self, size: FillSize, capturing: Collection[str]) -> bool:
        """Return True if this filling can begin beside the others.

        True too without a limit, and while nothing is filled or captured: `refusal` tells whether it fits alone.
        `capturing` are the segments whose captures are under way; those that `take` has not counted take no room.
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
        self._captured |= self._of_last_pass(size)

    def give_back(self, request: str) -> None:
        """Count a filling no longer; its captures count until they are stored. Does nothing for an unknown request."""
        self._filling.pop(request, None)

    def stored(self, capturing: Collection[str]) -> None:
        """Count a capture no longer if it is not under way (`capturing`), and no counted filling will make it."""
        expected = {segment for size in self._filling.values() for segment in size.captured}
        kept = expected.union(capturing)
        self._captured = {
            segment: tokens for segment, tokens in self._captured.items() if segment in kept
        }

    def _bytes(self, size: FillSize) -> int:
        memory = self._memory
        captured = sum(self._of_last_pass(size).values())
        longer = 0  # rows of a pass with a long chunk, beyond those of other passes
        if memory.pass_rows is not None:
            longer = max(0, max(size.captured.values(), default=0) - memory.pass_rows)
        return (
            size.tokens * memory.buffer_token
            + captured * memory.captured_token
            + longer * memory.pass_row
        )

    def _of_last_pass(self, size: FillSize) -> Mapping[str, int]:
        """Return the captures of the last pass, the only ones that stay on the GPU: segment id → tokens."""
        rows = self._memory.pass_rows
        if rows is None or size.tokens <= rows:
            return size.captured
        kept: dict[str, int] = {}
        for segment, tokens in reversed(list(size.captured.items())):
            if kept and sum(kept.values()) + tokens > rows:
                break
            kept[segment] = tokens
        return kept


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
    than a CUDA GPU, and in a server without this package's connector. Raises ConfigError if the GPU has no room.
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
