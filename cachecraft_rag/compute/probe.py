"""Probes: a first look with a few rows or a few layers, for selectors that choose by what the prompt at hand shows.

A probe runs just before the last pass, over the chunk-caches as they are stored. Its time is part of TTFT. Until then
the request goes by a choice made without it, so that loading and computing can begin.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cachecraft_rag.compute.kv_buffer import KVBuffer
from cachecraft_rag.compute.rows import RowReason, Rows
from cachecraft_rag.compute.stack import AttentionSettings
from cachecraft_rag.kernels.attention_mass import attention_mass
from cachecraft_rag.kernels.visibility import Visibility

QUESTION_ROWS = 64  # most rows of a question's probe: a long conversation is not read twice
_VALUE_LAYER = 1  # the first layer whose values depend on other tokens


class Probe(ABC):
    """One look at a prompt; an `Observer` of the pass that looks.

    Args:
        rows: what the last pass would compute.
        question: the positions of the question's own text.
        buffer: where the stored chunk-caches are placed.
        total_layers: of the model.

    Attributes:
        private: whether what it sees depends on the question.
        positions: the rows of the pass that looks, int64, ascending.
        absent: positions that hold nothing yet, which no row sees; None = there are none.
        layers: how many layers it runs through.
        keeps_chunks: whether stored chunk-caches lie in those layers after it as they were placed; else its user has to
            see to that.
    """

    private: ClassVar[bool]
    positions: NDArray[np.int64]
    absent: NDArray[np.int64] | None = None
    layers: int
    keeps_chunks: bool

    @abstractmethod
    def __init__(self, rows: Rows, question: range, buffer: KVBuffer, total_layers: int) -> None: ...

    @abstractmethod
    def placed(self, layer: int) -> None:
        """Take note that a layer's stored chunk-caches are placed, before its rows are computed over them."""

    @abstractmethod
    def observe(self, layer: int, q: Tensor, k: Tensor, settings: AttentionSettings) -> None:
        """See `row_pass.Observer`."""

    @abstractmethod
    def seen(self) -> Tensor:
        """What it saw of each position, float32 `[positions]`: more = recomputed first."""


class QuestionProbe(Probe):
    """Sees how much the question attends to each token in the middle layers.

    Only the question's last rows run, through the first half of the layers, and they are looked at from two fifths on:
    earlier layers choose worse, later ones cost more (docs/log.md). Chunks still to be computed are hidden from them.
    """

    private = True

    def __init__(self, rows: Rows, question: range, buffer: KVBuffer, total_layers: int) -> None:
        self.positions = np.asarray(question[-QUESTION_ROWS:], dtype=np.int64)
        missing = rows.open(below=int(self.positions[0]))
        missing = missing[rows.reason[missing] != RowReason.RECOMPUTED]
        self._first = int(0.4 * total_layers)
        self.layers = max(int(0.5 * total_layers), self._first + 1)
        self.keeps_chunks = True
        device = buffer.kv.device
        self._where = torch.from_numpy(self.positions).to(device)
        self._hidden: Tensor | None = None
        if len(missing):
            self.absent, self._hidden = missing, torch.from_numpy(missing).to(device)
            buffer.kv[: self.layers, :, self._hidden] = 0  # uninitialised memory may hold NaN
        self._received: Tensor | None = None

    def placed(self, layer: int) -> None:
        """See `Probe.placed`: only attention matters here."""

    def observe(self, layer: int, q: Tensor, k: Tensor, settings: AttentionSettings) -> None:
        """See `row_pass.Observer`."""
        if layer < self._first:
            return
        visible = Visibility(self._where, window=settings.window, absent=self._hidden)
        own = q[-len(self.positions) :]  # behind rows that may have joined
        everything = torch.arange(0, len(k) + 1, len(k), device=q.device)  # made there: a copy would wait for it
        _, received = attention_mass(own, k, visible, everything, scale=settings.scale, softcap=settings.softcap)
        self._received = received if self._received is None else self._received + received

    def seen(self) -> Tensor:
        """See `Probe.seen`."""
        assert self._received is not None, "the range of layers is never empty"
        return self._received


class ValueProbe(Probe):
    """Sees how far each token's value moves in the first layer where it can (CacheBlend §4.3).

    Every token that is not yet computed, and not exact already, runs through two layers. A chunk's token sees nothing
    that stands behind it, so the question has no say.
    """

    private = False

    def __init__(self, rows: Rows, question: range, buffer: KVBuffer, total_layers: int) -> None:
        self.positions = np.flatnonzero(~rows.done & (~rows.exact | (rows.reason != RowReason.STORED)))
        self.layers = min(_VALUE_LAYER + 1, total_layers)
        self.keeps_chunks = False
        self._buffer = buffer
        self._stored = torch.empty(0)

    def placed(self, layer: int) -> None:
        """See `Probe.placed`."""
        if layer == self.layers - 1:
            self._stored = self._buffer.kv[layer, 1].clone()

    def observe(self, layer: int, q: Tensor, k: Tensor, settings: AttentionSettings) -> None:
        """See `row_pass.Observer`: nothing of attention matters here."""

    def seen(self) -> Tensor:
        """See `Probe.seen`."""
        moved = self._buffer.kv[self.layers - 1, 1].float() - self._stored.float()
        return moved.square().sum((1, 2))


PROBES: Mapping[str, type[Probe]] = MappingProxyType({"question": QuestionProbe, "values": ValueProbe})
