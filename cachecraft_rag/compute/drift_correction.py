"""Drift: what recomputed tokens tell about those that are not recomputed.

A chunk-cache that stands behind other chunks than at its capture is wrong in many small ways and in one that all its
tokens share: keys and values moved, in each layer, in about the same direction. The tokens that are recomputed show
that direction. So each of the others is moved by a part of their mean change: a rotation and an addition a token.

Cache-Craft leaves those tokens as they are. What it brings is in docs/fidelity.md, how the strength was found in
docs/log.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cachecraft_rag.kernels.rope import add_rotated, rotate

_EVIDENCE = 2  # fewer recomputed tokens say nothing


@dataclass(frozen=True, slots=True)
class Stale:
    """A reused chunk: its segment, and runs of positions that hold what was stored, or that the pass itself writes."""

    segment: int
    runs: Sequence[range]


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
        self._runs: list[tuple[int, range]] = []
        self._evidence: list[int] = []

    def locate(self, positions: Tensor) -> None:
        """Go on with rows at these ascending positions `[rows]`."""
        self._positions = positions
        found: dict[int, list[int]] = {chunk.segment: [] for chunk in self._chunks}
        for row, position in enumerate(positions.tolist()):
            segment = self._owners.get(position, -1)
            if segment in found:
                found[segment].append(row)
        used = [chunk for chunk in self._chunks if len(found[chunk.segment]) >= _EVIDENCE]
        self._runs = [(number, run) for number, chunk in enumerate(used) for run in chunk.runs]
        evidence = [found[chunk.segment] for chunk in used]
        self._rows = positions.new_tensor([row for rows in evidence for row in rows])
        counts = positions.new_tensor([len(rows) for rows in evidence])
        numbers = torch.arange(len(used), device=positions.device)
        # [chunks, rows of evidence]: takes the mean of each chunk's rows, times the strength
        member = numbers[:, None] == numbers.repeat_interleave(counts)[None, :]
        self._mean = member.float() * (self._strength / counts.float())[:, None]
        self._at = positions[self._rows]
        self._evidence = self._at.tolist()
        cos, sin = self._cos[self._at], self._sin[self._at]
        length = cos.square() + sin.square()  # 1, but for rope scalings that stretch what they rotate
        self._back = (cos / length, -sin / length)

    def correct(self, merged: Tensor, keys: Tensor, values: Tensor) -> None:
        """Correct one layer, before its rows are written.

        Args:
            merged: `[2, positions, kv_heads, head_dim]`, rotated keys and values as placed; changed in place.
            keys, values: `[rows, kv_heads, head_dim]`, of the rows, keys rotated.
        """
        if any(self._owners.get(position, -1) < 0 for position in self._evidence):
            self.locate(self._positions)  # what was stored of a row that runs already did not come in this layer
        if not self._runs:
            return
        change_k = rotate(keys[self._rows] - merged[0, self._at], *self._back)  # raw: the same at every position
        change_v = values[self._rows] - merged[1, self._at]
        for part, change in enumerate((change_k, change_v)):
            shifts = (self._mean @ change.flatten(1).float()).to(merged.dtype).view(-1, *change.shape[1:])
            for number, run in self._runs:
                span = slice(run.start, run.stop)
                if part == 0:
                    add_rotated(merged[0, span], shifts[number], self._cos[span], self._sin[span])
                else:
                    merged[1, span] += shifts[number]
