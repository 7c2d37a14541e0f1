"""Drift: what recomputed tokens tell about those that are not recomputed.

A chunk-cache that stands behind other chunks than at its birth is wrong in many small ways and in one that all its
tokens share: keys and values moved, in each layer, in about the same direction. The tokens that are recomputed show
that direction. So each of the others is moved by a part of their mean change, which costs two additions a token.

Cache-Craft leaves those tokens as they are. What it brings, and how the strength was found, is in docs/fidelity.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cachecraft_rag.kernels.rope import rotate

_EVIDENCE = 2  # fewer recomputed tokens say nothing


@dataclass(frozen=True, slots=True)
class Stale:
    """A reused chunk: its segment, and the positions that stay as stored."""

    segment: int
    positions: Sequence[int]


class Drift:
    """Corrects the stale tokens of one pass, layer by layer.

    Args:
        chunks: what may be corrected.
        owners: position → the segment it is recomputed for, or -1; read anew whenever the rows change, because a row
            whose stored values did not come is computed for want of them and shows no change.
        strength: the part of the mean change that the others follow, in [0, 1].
        cos, sin: `[positions, rotary_dim]`, of all positions.
    """

    def __init__(
        self, chunks: Sequence[Stale], owners: Mapping[int, int], *, strength: float, cos: Tensor, sin: Tensor
    ) -> None:
        self._chunks, self._owners, self._strength = chunks, owners, strength
        self._cos, self._sin = cos, sin
        self._rows = torch.empty(0, dtype=torch.int64)

    def locate(self, positions: Tensor) -> None:
        """Go on with rows at these ascending positions `[rows]`."""
        found: dict[int, list[int]] = {chunk.segment: [] for chunk in self._chunks}
        for row, position in enumerate(positions.tolist()):
            segment = self._owners.get(position, -1)
            if segment in found:
                found[segment].append(row)
        used = [chunk for chunk in self._chunks if len(found[chunk.segment]) >= _EVIDENCE and chunk.positions]
        rows = [row for chunk in used for row in found[chunk.segment]]
        stale = [position for chunk in used for position in chunk.positions]
        whole = positions.new_tensor
        self._rows, self._stale = whole(rows), whole(stale)
        self._counts = whole([len(found[chunk.segment]) for chunk in used])
        chunk_numbers = torch.arange(len(used), device=positions.device)
        self._chunk_of_row = chunk_numbers.repeat_interleave(self._counts)
        self._chunk_of_stale = chunk_numbers.repeat_interleave(whole([len(chunk.positions) for chunk in used]))
        self._at = positions[self._rows]
        cos, sin = self._cos[self._at], self._sin[self._at]
        length = cos.square() + sin.square()  # 1, but for rope scalings that stretch what they rotate
        self._back = (cos / length, -sin / length)
        self._forth = (self._cos[self._stale], self._sin[self._stale])

    def correct(self, merged: Tensor, keys: Tensor, values: Tensor) -> None:
        """Correct one layer, before its rows are written.

        Args:
            merged: `[2, positions, kv_heads, head_dim]`, rotated keys and values as placed; changed in place.
            keys, values: `[rows, kv_heads, head_dim]`, of the rows, keys rotated.
        """
        if not len(self._rows):
            return
        change_k = rotate(keys[self._rows] - merged[0, self._at], *self._back)  # raw: the same at every position
        change = torch.stack((change_k, values[self._rows] - merged[1, self._at])).float()
        total = change.new_zeros(2, len(self._counts), *change.shape[2:]).index_add_(1, self._chunk_of_row, change)
        mean = (self._strength / self._counts)[:, None, None] * total  # [2, chunks, kv_heads, head_dim]
        shift = mean.to(merged.dtype)[:, self._chunk_of_stale]
        merged[0].index_add_(0, self._stale, rotate(shift[0], *self._forth))
        merged[1].index_add_(0, self._stale, shift[1])
