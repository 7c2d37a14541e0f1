"""Base class of codecs, and functions that lossy ones share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cachecraft_rag.types import KVLayout

if TYPE_CHECKING:
    from torch import Tensor

ONE_THREAD = 32_768  # numbers: from so many on, torch shares an operation among threads
_WIDTHS = {"F32": 4, "BF16": 2, "F16": 2, "I8": 1, "U8": 1}


@dataclass(frozen=True, slots=True)
class BlockPart:
    """One tensor inside a block, as a safetensors file names it: `layer.000` + `suffix`, safetensors' word for a dtype.

    The parts of a block follow each other without a gap.
    """

    suffix: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return _WIDTHS[self.dtype] * math.prod(self.shape)


class Codec(ABC):
    """Turns each layer of a chunk-cache into a block of bytes and back; a block needs no other block to be decoded.

    Codecs hold no state, so any thread may call any method; the work itself runs with the interpreter's lock released.

    Attributes:
        name: in `CODECS`, in the catalog's rows and in files. A name stands for one format for ever.
        in_place: True if a block is the memory of the tensor itself, so that it can be read straight into the tensor.
    """

    name: str
    in_place = False

    @abstractmethod
    def block_bytes(self, layout: KVLayout, tokens: int) -> int | None:
        """Bytes of every layer's block; None when that depends on the values."""

    def most_bytes(self, layout: KVLayout, tokens: int) -> int:
        """Bytes of the largest block that `encode` may return; a larger one is damaged."""
        return self.block_bytes(layout, tokens) or 0

    def parts(self, layout: KVLayout, tokens: int, nbytes: int) -> tuple[BlockPart, ...]:
        """Tensors in a block of `nbytes`, in order; by default bytes that only the codec understands."""
        return (BlockPart("", "U8", (nbytes,)),)

    def run(self, layout: KVLayout, tokens: int, start: int, stop: int) -> tuple[slice, ...]:
        """Place of the tokens from `start` up to `stop` in a block: their bytes, joined, are a block of those tokens.

        Empty when a block can only be decoded as a whole.
        """
        return ()

    @abstractmethod
    def encode(self, kv: Tensor, *, layer: int, layers: int) -> Tensor:
        """The block, uint8 `[bytes]`, of one layer of `layers`.

        `kv` is `[2, tokens, kv_heads, head_dim]`, contiguous, on a CPU. The block may share its memory. Raises
        ValueError, with the reason, when the values cannot be encoded.
        """

    @abstractmethod
    def decode(self, block: Tensor, *, out: Tensor) -> None:
        """Fill `out` `[2, tokens, kv_heads, head_dim]`, of the dtype that was encoded, from a block uint8 `[bytes]`.

        Raises ValueError, with the reason, when the block cannot be decoded to that shape; `out` may be half filled
        then. Whether its bytes are those that were written is for checksums to say.
        """


def stretches(out: Tensor) -> Iterator[slice]:
    """Runs of tokens of `out` `[2, tokens, kv_heads, head_dim]`, so short that torch works on each in one thread.

    Larger ones it would share among as many threads as it has, again for every reader. Those and the threads of a pass
    that computes meanwhile wait for each other: on two cores both take several times as long.

    >>> import torch
    >>> [(one.start, one.stop) for one in stretches(torch.empty(2, 100, 3, 64))]
    [(0, 85), (85, 100)]
    """
    tokens = max(1, (ONE_THREAD - 1) // (2 * out.shape[2] * out.shape[3]))
    return (slice(first, first + min(tokens, out.shape[1] - first)) for first in range(0, out.shape[1], tokens))


def finish(work: Tensor, out: Tensor) -> None:
    """Bring decoded float32 values into `out`, which may be the same tensor.

    What was near the end of the dtype's range may have been rounded beyond it, and must not become an infinity.
    """
    import torch

    end = torch.finfo(out.dtype).max
    work.clamp_(-end, end)
    if work is not out:
        out.copy_(work)
