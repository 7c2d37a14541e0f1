"""Drift correction: tokens that are not recomputed follow those that are.

A chunk-cache that stands behind other chunks than when it was captured is wrong in many small ways and in one that all
its tokens share: in each layer, keys and values moved in about the same direction. The recomputed tokens show that
direction, so each of the others is moved by a part of their mean change: a rotation and an addition per token.

Cache-Craft leaves those tokens as they are. What the correction brings is in docs/fidelity.md, how its strength was
found in docs/log.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cachecraft_rag.compute.rows import RowReason, Rows
from cachecraft_rag.kernels.cpu import calls
from cachecraft_rag.kernels.cpu.library import kernels_for
from cachecraft_rag.kernels.gpu.choice import uses_triton
from cachecraft_rag.kernels.rope import add_rotated, rotate

_LEAST_EVIDENCE = 2  # recomputed tokens of a chunk; fewer are no evidence
_PIECE = 64  # tokens that a thread moves at once


@dataclass(frozen=True, slots=True)
class StaleChunk:
    """A reused chunk: its segment, and the ranges of positions that hold what was stored or that the pass writes."""

    segment: int
    ranges: Sequence[range]


class DriftCorrection:
    """Corrects the stale tokens of one pass, layer by layer.

    Args:
        chunks: the reused chunks that may be corrected.
        strength: the part of the mean change that the others follow, in [0, 1].
        cos, sin: `[positions, rotary_dim]`, of all positions.
    """

    def __init__(self, chunks: Sequence[StaleChunk], *, strength: float, cos: Tensor, sin: Tensor) -> None:
        self._chunks, self._strength = chunks, strength
        self._cos, self._sin = cos, sin
        self._ranges: list[tuple[int, range]] = []
        self._owner: Tensor | None = None
        self._compiled: calls.Drift | None = None

    def locate(self, positions: NDArray[np.int64], rows: Rows) -> None:
        """Go on with rows at these ascending positions `[rows]`.

        Only recomputed ones are evidence: a row whose stored values did not come shows no change.
        """
        recomputed = rows.reason[positions] == RowReason.RECOMPUTED
        segment = rows.segment[positions]
        found = [(chunk, np.flatnonzero(recomputed & (segment == chunk.segment))) for chunk in self._chunks]
        used = [(chunk, where) for chunk, where in found if len(where) >= _LEAST_EVIDENCE]
        self._ranges = [(number, span) for number, (chunk, _) in enumerate(used) for span in chunk.ranges]
        if not used:
            return
        if uses_triton(self._cos):
            owner = np.full(len(self._cos), -1, np.int32)
            for number, span in self._ranges:
                owner[span.start : span.stop] = number
            self._owner = torch.from_numpy(owner).to(self._cos.device)
        if (run := kernels_for(self._cos)) is not None:
            pieces = [(n, at, min(at + _PIECE, span.stop)) for n, span in self._ranges for at in span[::_PIECE]]
            self._compiled = calls.Drift(run, [where for _, where in used], positions, pieces)
            return
        device = self._cos.device
        counts = torch.tensor([len(where) for _, where in used], device=device)
        numbers = torch.arange(len(used), device=device)
        evidence = np.concatenate([where for _, where in used])
        self._rows = torch.from_numpy(evidence).to(device)
        # [chunks, rows of evidence]: takes the mean of each chunk's rows, times the strength
        member = numbers[:, None] == numbers.repeat_interleave(counts)[None, :]
        self._mean = member.float() * (self._strength / counts.float())[:, None]
        self._at = torch.from_numpy(positions[evidence]).to(device)
        cos, sin = self._cos[self._at], self._sin[self._at]
        length = cos.square() + sin.square()  # 1, but for rope scalings that stretch what they rotate
        self._back = (cos / length, -sin / length)

    def correct(self, merged: Tensor, keys: Tensor, values: Tensor) -> None:
        """Correct one layer, before its rows are written.

        Args:
            merged: `[2, positions, kv_heads, head_dim]`, rotated keys and values as placed; changed in place.
            keys, values: `[rows, kv_heads, head_dim]`, of the rows, keys rotated.
        """
        if not self._ranges:
            return
        if self._compiled is not None:
            self._compiled.correct(merged, (keys, values), (self._cos, self._sin), self._strength)
            return
        stored_k, stored_v = merged.index_select(1, self._at)  # four times as fast as indexing
        change_k = rotate(keys.index_select(0, self._rows) - stored_k, *self._back)  # raw: the same at every position
        change_v = values.index_select(0, self._rows) - stored_v
        if self._owner is not None:
            from cachecraft_rag.kernels.gpu.drift import shift_stale

            change = torch.stack((change_k, change_v), dim=1).flatten(1).float()
            shifts = (self._mean @ change).view(-1, 2, *change_k.shape[1:])
            shift_stale(merged, shifts, self._owner, cos=self._cos, sin=self._sin)
            return
        for part, change in enumerate((change_k, change_v)):
            shifts = (self._mean @ change.flatten(1).float()).to(merged.dtype).view(-1, *change.shape[1:])
            for number, span in self._ranges:
                where = slice(span.start, span.stop)
                if part == 0:
                    add_rotated(merged[0, where], shifts[number], self._cos[where], self._sin[where])
                else:
                    merged[1, where] += shifts[number]
