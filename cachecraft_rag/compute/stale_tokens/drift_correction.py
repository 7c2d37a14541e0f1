"""Drift correction: move a chunk's stale tokens by a part of the mean change of its recomputed tokens.

A chunk-cache in a new context is wrong in many small ways, and in one way that its tokens share: in each layer, the
keys and values of all tokens move in about the same direction. The recomputed tokens show this direction. Each stale
token is moved by a fraction of their mean change, which costs a rotation and an addition per token.

Cache-Craft leaves stale tokens as they are. docs/results/quality.md shows the effect of the correction and
docs/decisions/drift.md how its strength was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cachecraft_rag.compute.rows import RowReason, Rows
from cachecraft_rag.compute.stack import RotaryTables
from cachecraft_rag.kernels.cpu import calls
from cachecraft_rag.kernels.cpu.library import kernels_for
from cachecraft_rag.kernels.gpu.choice import uses_triton
from cachecraft_rag.kernels.gpu.streams import sent
from cachecraft_rag.kernels.rope import add_rotated, rotate

# Fewest recomputed tokens of a chunk whose mean change is used.
_MIN_RECOMPUTED = 2

# Tokens that a thread of the compiled kernel corrects at a time.
_TOKENS_PER_TASK = 64


@dataclass(frozen=True, slots=True)
class StaleChunk:
    """A reused chunk whose stale tokens may be corrected.

    segment  index of the chunk's segment in the prompt
    ranges   ranges of positions that hold stored keys and values or that the pass overwrites
    """

    segment: int
    ranges: Sequence[range]


class DriftCorrection:
    """Drift correction of the stale tokens in one pass, layer by layer.

    Args:
        chunks: the reused chunks that may be corrected.
        strength: fraction of the mean change by which stale tokens are moved, in [0, 1].
        rotary: cos and sin of all positions of the prompt, for each kind of layer.
    """

    def __init__(
        self, chunks: Sequence[StaleChunk], *, strength: float, rotary: RotaryTables
    ) -> None:
        self._chunks = chunks
        self._strength = strength
        self._rotary = rotary
        self._ranges: list[tuple[int, range]] = []  # (number among the corrected chunks, positions)
        # for the Triton kernels: `owners` of all positions, and the arguments of `mean_change`
        self._owner: Tensor | None = None
        self._changed: dict[str, Tensor] = {}
        self._compiled: calls.Drift | None = None

    def locate(self, positions: NDArray[np.int64], rows: Rows) -> None:
        """Set the rows of the layers that follow, at these ascending positions `[rows]`.

        Only recomputed rows show the change: rows whose stored values were not loaded have nothing to compare with. A
        chunk with fewer than two recomputed rows is not corrected.
        """
        is_recomputed = rows.reason[positions] == RowReason.RECOMPUTED
        edges = np.searchsorted(positions, rows.bounds)  # first row of each segment

        corrected_chunks: list[StaleChunk] = []
        # for each corrected chunk: indices into the rows
        recomputed_rows: list[NDArray[np.int64]] = []
        for chunk in self._chunks:
            first, last = edges[chunk.segment : chunk.segment + 2]
            chunk_rows = first + np.flatnonzero(is_recomputed[first:last])
            if len(chunk_rows) >= _MIN_RECOMPUTED:
                corrected_chunks.append(chunk)
                recomputed_rows.append(chunk_rows)

        self._ranges = [
            (number, span) for number, chunk in enumerate(corrected_chunks) for span in chunk.ranges
        ]
        if not corrected_chunks:
            return

        first_cos, _ = self._rotary.tables[0]
        if uses_triton(first_cos):
            self._locate_on_gpu(recomputed_rows, positions, len(first_cos))
        elif (library := kernels_for(first_cos)) is not None:
            tasks = [
                (number, start, min(start + _TOKENS_PER_TASK, span.stop))
                for number, span in self._ranges
                for start in span[::_TOKENS_PER_TASK]
            ]
            self._compiled = calls.Drift(library, recomputed_rows, positions, tasks)
        else:
            self._locate_in_torch(recomputed_rows, positions)

    def _locate_in_torch(
        self, recomputed_rows: Sequence[NDArray[np.int64]], positions: NDArray[np.int64]
    ) -> None:
        device = self._rotary.tables[0][0].device
        all_rows = np.concatenate(recomputed_rows)
        self._rows = sent(all_rows, device)
        self._row_positions = sent(positions[all_rows], device)

        # A product with this matrix `[chunks, recomputed rows]` is the mean of each chunk's rows, times the strength.
        counts = np.array([len(chunk_rows) for chunk_rows in recomputed_rows])
        numbers = np.arange(len(recomputed_rows))
        chunk_of_row = sent(np.repeat(numbers, counts), device)
        membership = sent(numbers, device)[:, None] == chunk_of_row[None, :]
        scales = self._strength / sent(counts, device).float()
        self._scaled_mean = membership.float() * scales[:, None]

        # The inverse rotation. The squared length is 1, except for rope scalings that stretch what they rotate.
        inverse_tables = []
        for cos, sin in self._rotary.rows(self._row_positions).tables:
            squared_length = cos.square() + sin.square()
            inverse_tables.append((cos / squared_length, -sin / squared_length))
        self._inverse_rotation = RotaryTables(self._rotary.kinds, inverse_tables)

    def _locate_on_gpu(
        self, recomputed_rows: Sequence[NDArray[np.int64]], positions: NDArray[np.int64], keys: int
    ) -> None:
        from cachecraft_rag.kernels.gpu.drift import owners

        device = self._rotary.tables[0][0].device
        rows = np.concatenate(recomputed_rows)
        counts = [len(chunk_rows) for chunk_rows in recomputed_rows]
        edges = np.cumsum([0, *counts])
        numbers = sent(np.concatenate((rows, positions[rows], edges)).astype(np.int32), device)
        sizes = [len(rows), len(rows), len(edges)]
        self._changed = dict(
            zip(("rows", "positions", "edges"), torch.split(numbers, sizes), strict=True)
        )
        self._owner = sent(owners(keys, positions, self._ranges), device)

    def correct(self, layer: int, merged: Tensor, keys: Tensor, values: Tensor) -> bool:
        """Move the stale tokens of a layer in place. After `locate`, call it once a layer, before its rows are written.

        Returns True if it also wrote the rows: with Triton both are one launch.

        Args:
            layer: number of the layer, which decides how its keys are rotated.
            merged: `[2, positions, kv_heads, head_dim]`, rotated keys and values as placed; changed in place.
            keys, values: `[rows, kv_heads, head_dim]` of the pass's rows, keys rotated.
        """
        if not self._ranges:
            return False
        cos, sin = self._rotary.of_layer(layer)
        if self._compiled is not None:
            self._compiled.correct(merged, (keys, values), (cos, sin), self._strength)
            return False
        if self._owner is not None:
            from cachecraft_rag.kernels.gpu.drift import mean_change, write_rows

            shifts = mean_change(
                merged, keys, values, **self._changed, strength=self._strength, cos=cos, sin=sin
            )
            write_rows(merged, keys, values, shifts, self._owner, cos=cos, sin=sin)
            return True

        # four times as fast as indexing
        stored_keys, stored_values = merged.index_select(1, self._row_positions)
        rotated_change = keys.index_select(0, self._rows) - stored_keys
        # Of raw keys: those of different positions can be compared.
        key_change = rotate(rotated_change, *self._inverse_rotation.of_layer(layer))
        value_change = values.index_select(0, self._rows) - stored_values

        key_shifts = self._mean_shifts(key_change, merged.dtype)
        for number, span in self._ranges:
            where = slice(span.start, span.stop)
            add_rotated(merged[0, where], key_shifts[number], cos[where], sin[where])

        value_shifts = self._mean_shifts(value_change, merged.dtype)
        for number, span in self._ranges:
            merged[1, span.start : span.stop] += value_shifts[number]
        return False

    def _mean_shifts(self, change: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the shift of each corrected chunk, `[chunks, kv_heads, head_dim]`."""
        shifts = self._scaled_mean @ change.flatten(1).float()
        return shifts.to(dtype).view(-1, *change.shape[1:])
