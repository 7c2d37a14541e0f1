"""The shape and the dtype of a model's chunk-caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DTypeName = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of a model's chunk-caches, apart from the number of tokens.

    layers    decoder layers
    kv_heads  key/value heads of a layer
    head_dim  width of a head
    dtype     of keys and values
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: DTypeName

    def shape(self, tokens: int) -> tuple[int, int, int, int, int]:
        """Return the shape of a chunk-cache of so many tokens: (layers, 2, tokens, kv_heads, head_dim)."""
        return (self.layers, 2, tokens, self.kv_heads, self.head_dim)

    def nbytes(self, tokens: int) -> int:
        """Return the bytes of one uncompressed chunk-cache of so many tokens: keys and values of all layers."""
        width = 4 if self.dtype == "float32" else 2
        return self.layers * 2 * tokens * self.kv_heads * self.head_dim * width


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The share of the key and value heads that one of several tensor-parallel ranks computes with.

    rank   index of the rank
    ranks  number of ranks, a divisor of the number of heads
    """

    rank: int
    ranks: int

    def of(self, kv_heads: int) -> slice:
        """Return the rank's heads among all heads of a model.

        >>> HeadShare(1, 2).of(8)
        slice(4, 8, None)
        """
        own = kv_heads // self.ranks
        return slice(self.rank * own, (self.rank + 1) * own)
