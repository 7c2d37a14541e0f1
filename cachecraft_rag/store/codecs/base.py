"""Base class of codecs, and functions that lossy ones share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cachecraft_rag.types.kv_layout import KVLayout

if TYPE_CHECKING:
    from torch import Tensor

ONE_THREAD = 32_768  # number of elements from which torch divides an operation among threads
_WIDTHS = {"F32": 4, "BF16": 2, "F16": 2, "I8": 1, "U8": 1}


@dataclass(frozen=True, slots=True)
class BlockPart:
    """A tensor inside a block. Its name in the safetensors file is `layer.000` + `suffix`, such as ".scale" or "".

    `dtype` is safetensors' name, such as "BF16". The parts of a block are contiguous.
    """

    suffix: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Number of its bytes. Raises KeyError for a `dtype` that no codec uses."""
        return _WIDTHS[self.dtype] * math.prod(self.shape)


class Codec(ABC):
    """Turns each layer of a chunk-cache into a block of bytes and back; a block needs no other block to be decoded.

    Codecs hold no state, so any thread may call any method. The interpreter's lock is released during the work.
    `encode` and `decode` raise ValueError, with the reason, for values or blocks that they cannot convert.

    Attributes:
        name: name in `CODECS`, in the catalog's rows and in files. The format of a name never changes.
        in_place: True if a block is the memory of the tensor itself, so that it can be read straight into the tensor.
    """

    name: str
    in_place = False

    @abstractmethod
    def block_bytes(self, layout: KVLayout, tokens: int) -> int | None:
        """Return the number of bytes of each layer's block, for `tokens` tokens; None if it depends on the values."""

    @classmethod
    def typical_bytes(cls, layout: KVLayout, tokens: int) -> int:
        """Return a block's approximate bytes, without the codec's package; override it if `block_bytes` is None."""
        return cls().block_bytes(layout, tokens) or 0

    def most_bytes(self, layout: KVLayout, tokens: int) -> int:
        """Return the bytes of the largest block that `encode` may return; override it if `block_bytes` is None."""
        return self.block_bytes(layout, tokens) or 0

    def parts(self, layout: KVLayout, tokens: int, nbytes: int) -> tuple[BlockPart, ...]:
        """Return the tensors in a block of `nbytes` bytes, in order; by default one of the codec's own bytes."""
        return (BlockPart("", "U8", (nbytes,)),)

    def run(self, layout: KVLayout, tokens: int, start: int, stop: int) -> tuple[slice, ...]:
        """Return slices of a block that form one of tokens `start` to `stop`; () if it is only decoded whole."""
        return ()

    @abstractmethod
    def encode(self, kv: Tensor, *, layer: int, layers: int) -> Tensor:
        """Return the block, uint8 `[bytes]`, of layer `layer` (from 0) of `layers`; it may share the memory of `kv`.

        `kv` is `[2, tokens, kv_heads, head_dim]`, contiguous, on a CPU.
        """

    @abstractmethod
    def decode(self, block: Tensor, *, out: Tensor) -> None:
        """Fill `out` `[2, tokens, kv_heads, head_dim]`, of the dtype that was encoded, from a block uint8 `[bytes]`.

        `out` is contiguous if `run` returns nothing, and may be partly filled after an error. Checksums detect changed
        bytes, not this method.
        """


def stretches(out: Tensor) -> Iterator[slice]:
    """Yield runs of tokens of `out` `[2, tokens, kv_heads, head_dim]` that torch processes in a single thread.

    Longer runs would be divided among all of torch's threads, again for each reader. These threads and those of a
    running pass would wait for each other: on two cores both take several times as long.

    >>> import torch
    >>> [(run.start, run.stop) for run in stretches(torch.empty(2, 100, 3, 64))]
    [(0, 85), (85, 100)]
    """
    tokens = max(1, (ONE_THREAD - 1) // (2 * out.shape[2] * out.shape[3]))
    return (
        slice(first, first + min(tokens, out.shape[1] - first))
        for first in range(0, out.shape[1], tokens)
    )


def finish(work: Tensor, out: Tensor) -> None:
    """Copy decoded float32 values to `out`, of equal shape and of any float dtype; it may be the same tensor.

    Values beyond the range of that dtype become its largest value, in `work` too: rounding may have led beyond it, and
    no value must become infinite.
    """
    import torch

    end = torch.finfo(out.dtype).max
    work.clamp_(-end, end)
    if work is not out:
        out.copy_(work)
