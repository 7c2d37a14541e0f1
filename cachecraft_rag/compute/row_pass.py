"""One pass of some rows through the layers, a layer at a time: rotate, correct, write, attend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cachecraft_rag.compute.captures.capture import CaptureRecorder, RecordedChunk
from cachecraft_rag.compute.kv_buffer import KVBuffer
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.compute.stack import AttentionSettings, LayerPass, Stack
from cachecraft_rag.compute.stale_tokens.drift_correction import DriftCorrection
from cachecraft_rag.compute.timing import Timer, untimed
from cachecraft_rag.kernels.attention import attention
from cachecraft_rag.kernels.cpu.calls import LayerRow
from cachecraft_rag.kernels.gather import scatter_rows
from cachecraft_rag.kernels.rope import rotate
from cachecraft_rag.kernels.visibility import Visibility


class Observer(Protocol):
    """Observer of the attention of some rows of a pass, layer by layer.

    Attributes:
        watched: positions whose rows it is shown, as far as they are rows of the pass.
    """

    watched: range

    def observe(self, layer: int, q: Tensor, k: Tensor, visible: Visibility, settings: AttentionSettings) -> None:
        """Look at one layer.

        Args:
            q: `[rows shown, heads, head_dim]`, rotated.
            k: `[keys, kv_heads, head_dim]`, rotated; of positions that no row sees, uninitialised.
            visible: positions of the rows shown, and the keys that they see.
        """


class RowPass:
    """Rows on their way through the layers. A row sees every position before its own, computed or placed by then.

    Attributes:
        layer: the next one to run.
        positions, where: of the rows, ascending; int64 `[rows]` on the host and on the device.
        hidden: `[streams, rows, hidden]`, what goes into `layer`.
        recorder, absent, timer: the arguments.
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
        timer: Timer = untimed,
    ) -> None:
        """Begin a pass.

        Args:
            ids: int64 `[rows]`, their tokens.
            positions: int64 `[rows]`, ascending.
            rows: the reasons why they run; `drift` needs them.
            recorder: copies the keys and values of new chunks.
            drift: correction of the tokens that are not computed.
            absent: int64, positions that hold nothing yet: no row sees them.
            timer: called with each part.
        """
        self._device, self._buffer, self._paths = stack.device, buffer, stack.attention_paths
        self._rows, self._observer, self._drift = rows, observer, drift
        self.recorder, self.absent, self.timer = recorder, absent, timer
        self._hidden_keys = None if absent is None else self._on_device(absent)
        self.layer = 0
        self._begun = self._done = -1  # the last layer in which `attend` began and ended its changes
        self._go_on_with(positions)
        self.hidden = stack.embed(ids)

    def _on_device(self, positions: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(positions)).to(self._device)

    def _go_on_with(self, positions: NDArray[np.int64]) -> None:
        self.positions, self.where = positions, self._on_device(positions)
        self._cos, self._sin = self._buffer.cos[self.where], self._buffer.sin[self.where]
        self._shown = slice(0)  # the rows that the observer watches
        if self._observer is not None:
            watched = self._observer.watched
            self._shown = slice(*np.searchsorted(positions, [watched.start, watched.stop]).tolist())
        self._visible: dict[int | None, tuple[Visibility, Visibility]] = {}
        self._captures: list[tuple[RecordedChunk, slice]] = []
        if self.recorder is not None:
            self._captures = self.recorder.locate(positions)
        self._locate_drift()

    def _locate_drift(self) -> None:
        if self._drift is not None and self._rows is not None:
            self._drift.locate(self.positions, self._rows)

    def update(self, rows: Rows) -> None:
        """Change the rows' reasons: stored keys and values of a running row failed to load."""
        self._rows = rows
        self._locate_drift()

    def join(self, other: RowPass) -> None:
        """Merge the rows of another pass that stands before the same layer."""
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
        merged, (visible, shown) = self._buffer.kv[layer], self._visibility(settings.window)
        again = layer == self._done  # a joint forward failed behind this, and is repeated
        if layer == self._begun and not again and (self._drift is not None or self._observer is not None):
            raise RuntimeError(f"layer {layer} failed while stored rows were corrected; it cannot be repeated")
        self._begun = layer
        with self.timer("placing"):
            queries, keys = rotate(q, self._cos, self._sin), rotate(k, self._cos, self._sin)
        if self._drift is not None and not again:
            with self.timer("drift"):
                self._drift.correct(merged, keys, v)
        with self.timer("placing"):
            scatter_rows(merged, keys, v, self.where)
        if self.recorder is not None:
            self.recorder.record(layer, self._captures, (queries, k, v), settings)
        if self._observer is not None and not again:
            self._observer.observe(layer, queries[self._shown], merged[0], shown, settings)
        self._done = layer
        with self.timer("attention"):
            scale, softcap = settings.scale, settings.softcap
            return attention(queries, merged[0], merged[1], visible, scale=scale, softcap=softcap, paths=self._paths)

    @property
    def plain(self) -> bool:
        """True if its rows do nothing but write their keys and values and attend to what stands before them."""
        watched = (self._drift, self._observer, self.recorder, self.absent)
        return self.timer is untimed and all(one is None for one in watched)

    def addresses(self, layer: int) -> list[LayerRow]:
        """Where the rows' keys, values and angles lie."""
        kv, size = self._buffer.kv, self._buffer.kv.element_size()
        keys = kv.data_ptr() + layer * kv.stride(0) * size
        values, turn = keys + kv.stride(1) * size, self._cos.stride(0) * size
        cos, sin = self._cos.data_ptr(), self._sin.data_ptr()
        places = enumerate(self.positions.tolist())
        return [LayerRow(keys, values, cos + n * turn, sin + n * turn, position) for n, position in places]

    def _visibility(self, window: int | None) -> tuple[Visibility, Visibility]:
        """Keys that all rows see, and those that the observer's rows see; shared by the layers with this window."""
        if window not in self._visible:
            wheres = self.where, self.where[self._shown]
            first, second = (Visibility(where, window=window, absent=self._hidden_keys) for where in wheres)
            self._visible[window] = first, second
        return self._visible[window]


class _Together:
    """Several passes as one: linear layers run on all rows at once, attention pass by pass."""

    def __init__(self, passes: Sequence[RowPass]) -> None:
        edges = np.cumsum([0, *(len(one.positions) for one in passes)]).tolist()
        self.passes = passes
        self._parts = [(one, slice(a, b)) for one, a, b in zip(passes, edges, edges[1:], strict=False)]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, settings: AttentionSettings) -> Tensor:
        return torch.cat([one.attend(layer, q[rows], k[rows], v[rows], settings) for one, rows in self._parts])


def plain_rows(layer_pass: LayerPass, layer: int) -> list[LayerRow]:
    """The rows of a pass, or of several together, that are all `plain`; else none."""
    passes = [layer_pass] if isinstance(layer_pass, RowPass) else getattr(layer_pass, "passes", [])
    if not all(one.plain for one in passes):
        return []
    return [row for one in passes for row in one.addresses(layer)]


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
