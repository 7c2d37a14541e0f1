"""The probe of the question: a short pass that shows which stored tokens the question attends to.

Selectors with `probes=True` use its scores. It runs just before the last pass, over the chunk-caches as they are
stored, and its time counts towards TTFT. Until then the request uses a selection made without a probe, so that
loading and computing can begin.
"""

from __future__ import annotations

from collections.abc import Set

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cachecraft_rag.compute.kv_buffer import KVBuffer
from cachecraft_rag.compute.rows import RowReason, Rows
from cachecraft_rag.compute.stack import AttentionSettings
from cachecraft_rag.kernels.attention_mass import attention_received
from cachecraft_rag.kernels.gpu.streams import sent
from cachecraft_rag.kernels.visibility import Visibility

# Most rows of a question that are probed, so that a long conversation is not computed twice.
QUESTION_ROWS = 64

# Fraction of the layers before those whose attention is observed: earlier layers choose worse tokens
# (docs/decisions/probe.md).
DEEPER = 0.4

# Fraction of the model's layers that the probe runs through.
_PROBED_DEPTH = 0.5


class AttentionReceived:
    """Attention that each position receives from some rows in the deeper layers; an `Observer`.

    Args:
        watched: positions of the rows whose attention is observed.
        layers: number of layers of the model.
    """

    def __init__(self, watched: range, layers: int) -> None:
        self.watched = watched
        self._layers = range(int(DEEPER * layers), layers)
        self._received: Tensor | None = None

    def observe(
        self, layer: int, q: Tensor, k: Tensor, visible: Visibility, settings: AttentionSettings
    ) -> None:
        """Add the attention of one of the deeper layers, from two fifths on, to the sum; ignore earlier layers."""
        if layer not in self._layers:
            return
        keys = k[: self.watched.stop]  # later keys are not computed yet
        received = attention_received(
            q,
            keys,
            visible,
            scale=settings.scale,
            softcap=settings.softcap,
            sinks=settings.sinks,
        )
        self._received = received if self._received is None else self._received + received

    def seen(self) -> Tensor:
        """Return this rank's attention to positions up to the last watched, float32, summed over rows and layers."""
        assert self._received is not None, "the range of layers is never empty"
        return self._received

    def received(self, positions: int) -> NDArray[np.float32]:
        """Return `seen` of the first `positions` positions, float32, on the CPU."""
        attention: NDArray[np.float32] = self.seen()[:positions].cpu().numpy()
        return attention


class QuestionProbe(AttentionReceived):
    """Attention from the question to each token in the middle layers; an `Observer` of the probe's pass.

    Runs only the question's last 64 rows at most, through the first half of the layers, and measures attention from two
    fifths of the layers on: earlier layers choose worse tokens and later ones cost more (docs/decisions/probe.md).
    Chunks that are still to be computed or `unread` are hidden from these rows. Other stored chunks are used as placed.

    Args:
        rows: rows that the last pass would compute.
        unread: segments of which nothing is placed (`PrefillJob.unread`).
        question: positions of the question's own text.
        buffer: keys and values of the prompt, zeroed here at `absent`; chunk-caches are placed before each layer.
        total_layers: number of layers of the model.

    Attributes:
        watched: positions of the rows whose attention is measured.
        positions: rows of the probe's pass, int64 `[rows]`, ascending.
        absent: positions without keys and values, hidden from every row; None if all are filled.
        layers: number of layers that the probe runs through.
    """

    def __init__(
        self,
        rows: Rows,
        question: range,
        buffer: KVBuffer,
        total_layers: int,
        *,
        unread: Set[int] = frozenset(),
    ) -> None:
        super().__init__(question[-QUESTION_ROWS:], total_layers)
        self.positions = np.asarray(self.watched, dtype=np.int64)
        self.layers = max(int(_PROBED_DEPTH * total_layers), int(DEEPER * total_layers) + 1)

        uncomputed = rows.open(below=int(self.positions[0]))
        is_placed = rows.reason[uncomputed] == RowReason.RECOMPUTED
        is_placed &= ~np.isin(rows.segment[uncomputed], list(unread))
        absent = uncomputed[~is_placed]
        self.absent = absent if len(absent) else None
        if len(absent):
            # Uninitialised memory may hold NaN, and 0 · NaN is NaN even for a hidden key.
            absent_index = sent(absent, buffer.kv.device)
            buffer.kv[: self.layers, :, absent_index] = 0
