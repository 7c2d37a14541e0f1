"""The question's probe: a first look with a few rows, for selectors that choose by what the prompt at hand shows.

It runs just before the last pass, over the chunk-caches as they are stored. Its time is part of TTFT. Until then
the request goes by a choice made without it, so that loading and computing can begin.
"""

from __future__ import annotations

import numpy as np
import torch

from cachecraft_rag.compute.kv_buffer import KVBuffer
from cachecraft_rag.compute.refresh import DEEPER, AttentionReceived
from cachecraft_rag.compute.rows import RowReason, Rows

QUESTION_ROWS = 64  # most rows of a question's probe: a long conversation is not read twice


class QuestionProbe(AttentionReceived):
    """Attention from the question to each token in the middle layers; the observer of the pass that looks.

    Only the question's last rows run, through the first half of the layers, and they are looked at from two fifths on:
    earlier layers choose worse, later ones cost more (docs/log.md). Chunks still to be computed are hidden from them,
    and stored ones stay as they were placed.

    Args:
        rows: the rows that the last pass would compute.
        question: the positions of the question's own text.
        buffer: holds the stored chunk-caches in their places.
        total_layers: of the model.

    Attributes:
        watched: the positions whose rows are observed.
        positions: the rows of the pass that looks, int64, ascending.
        absent: positions that hold nothing yet, which no row sees; None = there are none.
        layers: the number of layers that it runs through.
    """

    def __init__(self, rows: Rows, question: range, buffer: KVBuffer, total_layers: int) -> None:
        super().__init__(question[-QUESTION_ROWS:], total_layers)
        self.positions = np.asarray(self.watched, dtype=np.int64)
        missing = rows.open(below=int(self.positions[0]))
        missing = missing[rows.reason[missing] != RowReason.RECOMPUTED]
        self.layers = max(int(0.5 * total_layers), int(DEEPER * total_layers) + 1)
        device = buffer.kv.device
        self.absent = missing if len(missing) else None
        if len(missing):
            buffer.kv[: self.layers, :, torch.from_numpy(missing).to(device)] = 0  # uninitialised memory may hold NaN
