"""A pass of some rows through the layers, one layer at a time.

In each layer the rows' queries and keys are rotated, drift is corrected, the rows' keys and values are written to the
buffer, and the rows attend to everything before them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cachecraft_rag.compute.captures.capture import CaptureRecorder, RecordedChunk
from cachecraft_rag.compute.kv_buffer import KVBuffer
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.compute.stack import (
    AttentionSettings,
    LayerPass,
    RotaryTables,
    Stack,
)
from cachecraft_rag.compute.stale_tokens.drift_correction import DriftCorrection
from cachecraft_rag.compute.timing import Timer, untimed
from cachecraft_rag.kernels.attention import attention, attention_with_mass
from cachecraft_rag.kernels.cpu.calls import LayerRow
from cachecraft_rag.kernels.gpu.streams import LAYERS_IN_FLIGHT, LayersInFlight, sent
from cachecraft_rag.kernels.placing import scatter_rows
from cachecraft_rag.kernels.rope import rotate
from cachecraft_rag.kernels.visibility import Visibility


class Observer(Protocol):
    """Observer of the attention of some rows of a pass, layer by layer.

    Attributes:
        watched: positions of the observed rows; positions that are not rows of the pass are skipped.
    """

    watched: range

    def observe(
        self, layer: int, q: Tensor, k: Tensor, visible: Visibility, settings: AttentionSettings
    ) -> None:
        """Observe one layer, once, after the rows' keys were written and before the rows attend.

        `q` are the watched rows' rotated queries `[watched rows, heads, head_dim]`, `k` the rotated keys `[keys,
        kv_heads, head_dim]`, uninitialised at positions that no row sees, and `visible` those that these rows see. An
        exception ends the pass.
        """


@dataclass(frozen=True, slots=True)
class AtOnce:
    """A run of a pass through its first layers in one call of the stack's `whole_model`.

    layers      number of layers; the last one only writes keys and values
    place       places the chunk-caches of a layer, just before the layer's rows are written
    expected_s  expected time of the call in seconds, for this pass alone; 0 if it is unknown
    """

    layers: int
    place: Callable[[int], object]
    expected_s: float = 0.0


class RowPass:
    """Rows on their way through the layers.

    A row attends to all earlier positions but `absent` ones. The caller has placed or computed these by then.

    Attributes:
        layer: index of the next layer to run.
        where: `positions` on the device.
        ids: int64 `[rows]`, token ids of the rows.
        at_once: set it before the first layer to run several layers in one call; None = one layer after the other.
        positions, recorder, absent, timer: see `__init__`.
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
        most_in_flight: int | None = LAYERS_IN_FLIGHT,
    ) -> None:
        """Begin a pass.

        Args:
            stack: the model's layers.
            buffer: keys and values of the request.
            ids: int64 `[rows]`, token ids of the rows.
            positions: int64 `[rows]`, positions of the rows, ascending.
            rows: the rows of the prompt with their reasons; required by `drift`.
            recorder: copies the keys and values of new chunks.
            observer: observes the attention of some rows.
            drift: drift correction of the tokens that are not computed.
            absent: int64, positions without keys and values, hidden from every row.
            timer: called with each part.
            most_in_flight: layers that may be launched and not yet computed on a GPU; None = no limit.
        """
        self._stack = stack
        self._device = stack.device
        self._paths = stack.attention_paths
        self._buffer = buffer
        self._rows = rows
        self._observer = observer
        self._drift = drift
        self.recorder = recorder
        self.absent = absent
        self.timer = timer
        self._hidden_keys = None if absent is None else self._on_device(absent)

        self.layer = 0
        self.ids = ids
        self.at_once: AtOnce | None = None
        self._hidden: Tensor | None = None
        self._in_flight = LayersInFlight(stack.device, most_in_flight)
        self._started_layer = -1  # the last layer in which `attend` began its changes
        self._finished_layer = -1  # the last layer in which `attend` finished its changes
        self._set_rows(positions)

    @property
    def hidden(self) -> Tensor:
        """Input of the next layer, or output of the last, `[streams, rows, hidden]`; `[0]` after layers run at once."""
        if self._hidden is None:
            self._hidden = self._stack.embed(self.ids)
        return self._hidden

    @property
    def next_layers(self) -> range:
        """Layers that the next call of `advance` runs."""
        return range(self.layer, self.layer + (1 if self.at_once is None else self.at_once.layers))

    def runs_with(self, other: RowPass) -> bool:
        """Return True if `advance` can run both together: the same layers, and at once only if both or none capture."""
        is_at_once = self.at_once is not None
        if self.next_layers != other.next_layers or is_at_once != (other.at_once is not None):
            return False
        return not is_at_once or self.has_captures == other.has_captures  # raw keys or rotated ones

    @property
    def has_captures(self) -> bool:
        """True if the recorder records rows of this pass."""
        return bool(self._captures)

    def _on_device(self, positions: NDArray[np.int64]) -> Tensor:
        return sent(positions, self._device)

    def _set_rows(self, positions: NDArray[np.int64]) -> None:
        """Set the rows for the layers that follow."""
        self.positions = positions
        self.where = self._on_device(positions)
        self._rotary_rows: RotaryTables | None = None

        self._watched_rows = slice(0)
        if self._observer is not None:
            watched = self._observer.watched
            edges = np.searchsorted(positions, [watched.start, watched.stop])
            self._watched_rows = slice(*edges.tolist())

        self._visible: dict[int | None, tuple[Visibility, Visibility]] = {}  # by window
        self._captures: list[tuple[RecordedChunk, slice]] = []
        self._edges: Tensor | None = None
        if self.recorder is not None:
            self._captures = self.recorder.locate(positions)
            self._edges = self.recorder.edges(self._captures)
        self._locate_drift()

    def _locate_drift(self) -> None:
        if self._drift is not None and self._rows is not None:
            self._drift.locate(self.positions, self._rows)

    @property
    def _rotary(self) -> RotaryTables:
        """Tables of these rows; a pass that runs at once needs none."""
        if self._rotary_rows is None:
            self._rotary_rows = self._buffer.rotary.rows(self.where)
        return self._rotary_rows

    def update(self, rows: Rows) -> None:
        """Replace `rows` if stored values are missing: drift is learnt from RECOMPUTED rows only; `positions` stay."""
        self._rows = rows
        self._locate_drift()

    def layer_launched(self, hidden: Tensor) -> None:
        """Take a layer's output as the next one's input; on a GPU, block while too many layers are not computed."""
        self._hidden = hidden
        self.layer += 1
        self._in_flight.add()

    def launched_at_once(self) -> None:
        """Continue after the layers of `at_once`, which were just launched; `hidden` is empty from then on.

        Blocks as `layer_launched`.
        """
        assert self.at_once is not None, "set before the pass began"
        self._hidden = torch.empty(0)
        self.layer += self.at_once.layers
        self._in_flight.add()

    def divide(self) -> None:
        """Divide `at_once` into single layers, before any has run, and place the first one's chunk-caches."""
        assert self.at_once is not None, "set before the pass began"
        self.at_once.place(self.layer)
        self.at_once = None

    def wait(self) -> None:
        """Block until every launched layer is computed; returns at once on a CPU, or if `most_in_flight` is None."""
        self._in_flight.wait()

    @property
    def clock(self) -> Callable[[], float | None]:
        """Function that returns the pass's seconds on a GPU; None until computed, and always with `most_in_flight`."""
        return self._in_flight.seconds

    def join(self, other: RowPass) -> None:
        """Add the rows of another pass of the same prompt, at the same layer, in the order of positions.

        Do not run the other pass any more. This pass's recorder, observer, drift correction and absent positions stay
        in use. Chunks that are whole only now are captured from the next layer on, which leaves them incomplete unless
        earlier layers were recorded.
        """
        assert other.layer == self.layer, "only passes at the same layer can join"
        positions = np.concatenate((self.positions, other.positions))
        order = np.argsort(positions, kind="stable")
        order_on_device = self._on_device(order)
        if self.layer:
            self._hidden = torch.cat((self.hidden, other.hidden), dim=1)[:, order_on_device]
        else:
            self._hidden = None
        self.ids = torch.cat((self.ids, other.ids))[order_on_device]
        self._set_rows(positions[order])

    def keep(self, chosen: NDArray[np.bool_]) -> None:
        """Keep only rows for which `chosen`, bool `[rows]`, is True. Chunks that lose a row are no longer recorded."""
        kept = np.flatnonzero(chosen)
        kept_on_device = self._on_device(kept)
        self._hidden = self.hidden[:, kept_on_device]
        self.ids = self.ids[kept_on_device]
        self._set_rows(self.positions[kept])

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, settings: AttentionSettings
    ) -> Tensor:
        """Attend in one layer: `q` `[rows, heads, head_dim]`, `k` and `v` `[rows, kv_heads, head_dim]`, not rotated.

        First corrects drift in the buffer, writes the rows' rotated keys and their values to it, records captures and
        calls the observer. If the layer ran before, correction and observer are left out, and the rest is done again.
        RuntimeError if an earlier call for this layer failed before these were done: neither can be done twice. A pass
        that runs at once also places the layer's chunk-caches. Returns as `LayerPass.attend`.
        """
        if self.at_once is not None:
            self._place_at_once(layer, self.at_once)
        with self.timer("placing"):
            cos, sin = self._rotary.of_layer(layer)
            queries = rotate(q, cos, sin)
            keys = rotate(k, cos, sin)

        self._write(layer, queries, keys, v, settings)
        if self.recorder is not None:
            self.recorder.record(layer, self._captures, (queries, k, v), settings)

        if self.recorder is not None and self._edges is not None:
            merged = self._buffer.kv[layer]
            with self.timer("attention"):
                out, mass = attention_with_mass(
                    queries,
                    merged[0],
                    merged[1],
                    self._visibility(settings.window)[0],
                    self._edges,
                    scale=settings.scale,
                    softcap=settings.softcap,
                    sinks=settings.sinks,
                    paths=self._paths,
                )
                self.recorder.add_mass(layer, self._captures, mass)
                return out
        return self.attend_rotated(layer, queries, settings)

    def write_rotated(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, settings: AttentionSettings
    ) -> None:
        """Place chunk-caches, correct drift, write rows and call the observer; only with `at_once` and no captures."""
        assert self.at_once is not None, "set before the pass began"
        assert not self._captures, "captures are of raw keys"
        self._place_at_once(layer, self.at_once)
        self._write(layer, q, k, v, settings)

    def _place_at_once(self, layer: int, at_once: AtOnce) -> None:
        # also here, because layers that are launched hold the memory of their chunk-caches' copies
        self._in_flight.add()
        at_once.place(layer)

    def _write(
        self, layer: int, queries: Tensor, keys: Tensor, v: Tensor, settings: AttentionSettings
    ) -> None:
        """Correct drift, write the rows' rotated keys and their values, and call the observer."""
        merged = self._buffer.kv[layer]  # [2, positions, kv_heads, head_dim]
        # a joint forward failed after this, and runs again
        is_repeated = layer == self._finished_layer
        self._check_repeatable(layer, is_repeated)
        self._started_layer = layer

        is_written = False
        if self._drift is not None and not is_repeated:
            with self.timer("drift"):
                is_written = self._drift.correct(layer, merged, keys, v)

        if not is_written:
            with self.timer("placing"):
                scatter_rows(merged, keys, v, self.where)

        if self._observer is not None and not is_repeated:
            watched_queries = queries[self._watched_rows]
            visible_to_watched = self._visibility(settings.window)[1]
            self._observer.observe(layer, watched_queries, merged[0], visible_to_watched, settings)
        self._finished_layer = layer

    def attend_rotated(
        self, layer: int, q: Tensor, settings: AttentionSettings, out: Tensor | None = None
    ) -> Tensor:
        """Attend with rotated queries, once the layer's keys and values are written; see `WholePass`."""
        merged = self._buffer.kv[layer]
        with self.timer("attention"):
            return attention(
                q,
                merged[0],
                merged[1],
                self._visibility(settings.window)[0],
                scale=settings.scale,
                softcap=settings.softcap,
                sinks=settings.sinks,
                paths=self._paths,
                out=out,
            )

    def _check_repeatable(self, layer: int, is_repeated: bool) -> None:
        """Raise RuntimeError if the layer failed half-way through changes that cannot be made twice."""
        has_failed = layer == self._started_layer and not is_repeated
        if has_failed and (self._drift is not None or self._observer is not None):
            raise RuntimeError(
                f"layer {layer} failed while stored rows were corrected; it cannot be repeated"
            )

    @property
    def plain(self) -> bool:
        """True if its rows only write their keys and values and attend to earlier positions, without a timer."""
        extras = (self._drift, self._observer, self.recorder, self.absent)
        return self.timer is untimed and all(extra is None for extra in extras)

    def addresses(self, layer: int) -> list[LayerRow]:
        """Return each row's position and memory addresses in one layer, in the order of `positions`.

        Those of keys and values are of position 0 in the buffer. They are valid until the rows of this pass change.
        """
        kv = self._buffer.kv
        item_bytes = kv.element_size()
        keys = kv.data_ptr() + layer * kv.stride(0) * item_bytes
        values = keys + kv.stride(1) * item_bytes
        layer_cos, layer_sin = self._rotary.of_layer(layer)
        cos = layer_cos.data_ptr()
        sin = layer_sin.data_ptr()
        row_bytes = layer_cos.stride(0) * item_bytes
        return [
            LayerRow(keys, values, cos + row * row_bytes, sin + row * row_bytes, position)
            for row, position in enumerate(self.positions.tolist())
        ]

    def _visibility(self, window: int | None) -> tuple[Visibility, Visibility]:
        """Return the keys that all rows see, and those that the watched rows see; shared by layers with this window."""
        if window not in self._visible:
            for_all = Visibility(self.where, window=window, absent=self._hidden_keys)
            watched = self.where[self._watched_rows]
            for_watched = Visibility(watched, window=window, absent=self._hidden_keys)
            self._visible[window] = (for_all, for_watched)
        return self._visible[window]


class _JointPass:
    """Several passes as one: linear layers run on all rows at once, attention runs pass by pass."""

    def __init__(self, passes: Sequence[RowPass]) -> None:
        self.passes = passes
        self._slices: list[slice] = []
        start = 0
        for row_pass in passes:
            stop = start + len(row_pass.positions)
            self._slices.append(slice(start, stop))
            start = stop

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, settings: AttentionSettings
    ) -> Tensor:
        """Attend pass by pass; return their outputs joined, `[rows, heads, head_dim]`."""
        outputs = []
        for row_pass, rows in zip(self.passes, self._slices, strict=True):
            outputs.append(row_pass.attend(layer, q[rows], k[rows], v[rows], settings))
        return torch.cat(outputs)

    def write_rotated(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, settings: AttentionSettings
    ) -> None:
        """Write pass by pass, see `WholePass`."""
        for row_pass, rows in zip(self.passes, self._slices, strict=True):
            row_pass.write_rotated(layer, q[rows], k[rows], v[rows], settings)

    def attend_rotated(
        self, layer: int, q: Tensor, settings: AttentionSettings, out: Tensor | None = None
    ) -> Tensor:
        """Attend pass by pass, see `WholePass`."""
        joint = torch.empty_like(q) if out is None else out
        for row_pass, rows in zip(self.passes, self._slices, strict=True):
            row_pass.attend_rotated(layer, q[rows], settings, joint[rows])
        return joint


def plain_rows(layer_pass: LayerPass, layer: int) -> list[LayerRow]:
    """Return `RowPass.addresses` of a pass, or of joint passes in order, if all are `plain`; else []."""
    passes = [layer_pass] if isinstance(layer_pass, RowPass) else getattr(layer_pass, "passes", [])
    if not all(row_pass.plain for row_pass in passes):
        return []
    return [row for row_pass in passes for row in row_pass.addresses(layer)]


@torch.inference_mode()
def advance(stack: Stack, passes: Sequence[RowPass]) -> None:
    """Run the next layer as one forward of all passes, which must have reached the same layer.

    Passes with `RowPass.at_once` run all of its layers, see `RowPass.runs_with`. The passes may belong to different
    requests. If the layer raises, all passes stay at this layer; RuntimeError if it failed before and cannot be
    repeated (`RowPass.attend`). On a GPU, blocks while too many layers of a pass are not computed yet.
    """
    if passes[0].at_once is not None:
        _run_at_once(stack, passes, passes[0].at_once.layers)
        return
    layer = passes[0].layer
    if len(passes) == 1:
        only = passes[0]
        with only.timer("layers"):
            output = stack.layer(layer, only.hidden, positions=only.where, layer_pass=only)
        outputs: Sequence[Tensor] = [output]
    else:
        hidden = torch.cat([row_pass.hidden for row_pass in passes], dim=1)
        positions = torch.cat([row_pass.where for row_pass in passes])
        joint_pass = _JointPass(passes)
        output = stack.layer(layer, hidden, positions=positions, layer_pass=joint_pass)
        outputs = torch.split(output, [len(row_pass.positions) for row_pass in passes], dim=1)

    for row_pass, rows_output in zip(passes, outputs, strict=True):
        row_pass.layer_launched(rows_output)


def _run_at_once(stack: Stack, passes: Sequence[RowPass], layers: int) -> None:
    assert stack.whole_model is not None, "`at_once` is set for these stacks only"
    ids = passes[0].ids
    positions = passes[0].where
    whole_pass: RowPass | _JointPass = passes[0]
    if len(passes) > 1:
        ids = torch.cat([row_pass.ids for row_pass in passes])
        positions = torch.cat([row_pass.where for row_pass in passes])
        whole_pass = _JointPass(passes)
    if passes[0].has_captures:
        stack.whole_model.run_raw(ids, whole_pass, layers)
    else:
        stack.whole_model.run(ids, positions, whole_pass, layers)
    for row_pass in passes:
        row_pass.launched_at_once()
