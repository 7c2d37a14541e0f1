"""One pass of some rows through the layers, a layer at a time: rotate, correct, write, attend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cachecraft_rag.compute.capture import CaptureRecorder, RecordedChunk
from cachecraft_rag.compute.drift_correction import DriftCorrection
from cachecraft_rag.compute.kv_buffer import KVBuffer
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.compute.stack import AttentionSettings, Stack
from cachecraft_rag.compute.timing import UNTIMED, Timer
from cachecraft_rag.kernels.attention import attention
from cachecraft_rag.kernels.gather import scatter_rows
from cachecraft_rag.kernels.rope import rotate
from cachecraft_rag.kernels.visibility import Visibility


class Observer(Protocol):
    """Sees what a pass attends to, layer by layer."""

    def observe(self, layer: int, q: Tensor, k: Tensor, settings: AttentionSettings) -> None:
        """Look at one layer: rotated `q` `[rows, heads, head_dim]` of the pass, and all rotated keys `k`."""
        ...


class RowPass:
    """Rows on their way through the layers. A row sees every position before its own, computed or placed by then.

    Attributes:
        layer: the next one to run.
        positions, where: of the rows, ascending; int64 `[rows]` on the host and on the device.
        hidden: `[streams, rows, hidden]`, what goes into `layer`.
        recorder, absent, timer: as they were given.
    """

    def __init__(
        self,
        stack: Stack,
        buffer: KVBuffer,
        ids: Tensor,
        positions: NDArray[np.int64],
        *,
        rows: Rows | None = None,
        recorder: CaptureRecorder | None = None,
        observer: Observer | None = None,
        drift: DriftCorrection | None = None,
        absent: NDArray[np.int64] | None = None,
        timer: Timer = UNTIMED,
    ) -> None:
        """Begin a pass.

        Args:
            ids: int64 `[rows]`, their tokens.
            positions: int64 `[rows]`, ascending.
            rows: why they run; `drift` needs it.
            recorder: keeps what is computed of new chunks.
            drift: how tokens that are not computed follow those that are.
            absent: int64, positions that hold nothing yet: no row sees them.
            timer: told of each part.
        """
        self._device, self._buffer, self._paths = stack.device, buffer, stack.attention_paths
        self._rows, self._observer, self._drift = rows, observer, drift
        self.recorder, self.absent, self.timer = recorder, absent, timer
        self._hidden_keys = None if absent is None else self._on_device(absent)
        self.layer = 0
        self._go_on_with(positions)
        self.hidden = stack.embed(ids)

    def _on_device(self, positions: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(positions)).to(self._device)

    def _go_on_with(self, positions: NDArray[np.int64]) -> None:
        self.positions, self.where = positions, self._on_device(positions)
        self._cos, self._sin = self._buffer.cos[self.where], self._buffer.sin[self.where]
        self._visible: dict[int | None, Visibility] = {}
        self._captures: list[tuple[RecordedChunk, slice]] = []
        if self.recorder is not None:
            self._captures = self.recorder.locate(positions)
        self._locate_drift()

    def _locate_drift(self) -> None:
        if self._drift is not None and self._rows is not None:
            self._drift.locate(self.positions, self._rows)

    def update(self, rows: Rows) -> None:
        """Go on for other reasons: stored keys and values of a running row did not come."""
        self._rows = rows
        self._locate_drift()

    def join(self, other: RowPass) -> None:
        """Take in the rows of a pass that has come before the same layer, to run on as one."""
        assert other.layer == self.layer, "only passes before the same layer can join"
        positions = np.concatenate((self.positions, other.positions))
        order = np.argsort(positions, kind="stable")
        self._go_on_with(positions[order])
        self.hidden = torch.cat((self.hidden, other.hidden), dim=1)[:, self._on_device(order)]

    def keep(self, chosen: NDArray[np.bool_]) -> None:
        """Go on with these rows only, bool `[rows]`."""
        kept = np.flatnonzero(chosen)
        self._go_on_with(self.positions[kept])
        self.hidden = self.hidden[:, self._on_device(kept)]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, settings: AttentionSettings) -> Tensor:
        """See `stack.LayerPass`."""
        if settings.window not in self._visible:
            self._visible[settings.window] = Visibility(self.where, window=settings.window, absent=self._hidden_keys)
        merged = self._buffer.kv[layer]
        with self.timer("placing"):
            queries, keys = rotate(q, self._cos, self._sin), rotate(k, self._cos, self._sin)
        if self._drift is not None:
            with self.timer("drift"):
                self._drift.correct(merged, keys, v)
        with self.timer("placing"):
            scatter_rows(merged, keys, v, self.where)
        if self.recorder is not None:
            self.recorder.record(layer, self._captures, (queries, k, v), settings)
        if self._observer is not None:
            self._observer.observe(layer, queries, merged[0], settings)
        visible = self._visible[settings.window]
        with self.timer("attention"):
            return attention(
                queries,
                merged[0],
                merged[1],
                visible,
                scale=settings.scale,
                softcap=settings.softcap,
                paths=self._paths,
            )


class _Together:
    """Several passes as one: linear layers run on all rows at once, attention pass by pass."""

    def __init__(self, passes: Sequence[RowPass]) -> None:
        edges = np.cumsum([0, *(len(one.positions) for one in passes)]).tolist()
        self._parts = [(one, slice(a, b)) for one, a, b in zip(passes, edges, edges[1:], strict=False)]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, settings: AttentionSettings) -> Tensor:
        return torch.cat([one.attend(layer, q[rows], k[rows], v[rows], settings) for one, rows in self._parts])


@torch.inference_mode()
def advance(stack: Stack, passes: Sequence[RowPass]) -> None:
    """Run the next layer of passes that all stand before the same one, of one or several requests, as one forward."""
    first, *others = passes
    if others:
        hidden = torch.cat([one.hidden for one in passes], dim=1)
        where = torch.cat([one.where for one in passes])
        hidden = stack.layer(first.layer, hidden, positions=where, layer_pass=_Together(passes))
        parts = torch.split(hidden, [len(one.positions) for one in passes], dim=1)
    else:
        with first.timer("layers"):
            parts = (stack.layer(first.layer, first.hidden, positions=first.where, layer_pass=first),)
    for one, part in zip(passes, parts, strict=True):
        one.hidden = part
        one.layer += 1
