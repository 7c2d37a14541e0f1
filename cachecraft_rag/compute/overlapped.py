"""Overlapped prefill: compute the front of a prompt while its chunk-caches are loaded from the end.

Cake (Jin et al., 2024, Algorithm 1) computes pieces from the front and loads pieces from the end until they meet. Here
the last piece of the front is computed in the last pass, which the question needs anyway. Whatever is still missing
then is loaded layer by layer, just before it is used (Cache-Craft, Algorithm 2). With a fast disk there is no front,
which leaves layer-wise preloading. With a very slow disk everything is computed, which leaves full prefill.

Nothing has to be configured: before each piece, and whenever the last pass has to wait, the size of the front is
decided again from the latest measurements. Tokens that fail to load are computed like those of the front.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Generator, Iterable, Sequence, Set
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cachecraft_rag.compute.balance.load_split import LOADING_CONSTANTS, STRATEGIES, LoadSplit, WaitCondition
from cachecraft_rag.compute.balance.speed import ComputeSpeed, PassKind
from cachecraft_rag.compute.captures.capture import CaptureRecorder
from cachecraft_rag.compute.job import PrefillJob, PrefillResult, ProbeRequest
from cachecraft_rag.compute.kv_buffer import KVBuffer, ResidentKV
from cachecraft_rag.compute.row_pass import Observer, RowPass
from cachecraft_rag.compute.rows import RowReason
from cachecraft_rag.compute.stack import Stack
from cachecraft_rag.compute.stale_tokens.drift_correction import DriftCorrection, StaleChunk
from cachecraft_rag.compute.stale_tokens.focus import FocusObserver
from cachecraft_rag.compute.stale_tokens.probe import QuestionProbe
from cachecraft_rag.compute.stale_tokens.refresh import AttentionReceived, Refresh
from cachecraft_rag.compute.timing import Timer, untimed, within
from cachecraft_rag.planning.early_termination import FocusMonitor
from cachecraft_rag.planning.planner import Plan
from cachecraft_rag.store.loading.pending import PendingLoads


@dataclass(frozen=True, slots=True)
class Wait:
    """Go on once `ready()`, or after `timeout_s` (None = never); send back whether it is.

    in_pass  a pass is under way, and its lock stays held; otherwise other requests may compute meanwhile
    """

    loads: PendingLoads
    ready: Callable[[], bool]
    timeout_s: float | None
    in_pass: bool = False


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the next layer of this pass (`row_pass.advance`), alone or together with those of other requests."""

    row_pass: RowPass


Step = Wait | Forward
Steps = Generator[Step, bool, PrefillResult]


class OverlappedPrefill:
    """One request's prefill while its chunk-caches are being loaded.

    Args:
        stack: the model's layers.
        job: rows to compute and chunk-caches to reuse.
        loads: chunk-caches to come; the readers are running.
        speed: of computing; learns from what is measured here.
        timer: called with each part.
    """

    def __init__(
        self, stack: Stack, job: PrefillJob, loads: PendingLoads, speed: ComputeSpeed, *, timer: Timer = untimed
    ) -> None:
        self._stack, self._job, self._loads, self._speed, self._timer = stack, job, loads, speed, timer
        self._layers = stack.layout.layers
        self._ids = torch.tensor(list(job.token_ids), device=stack.device)
        bounds = job.rows.bounds
        self._buffer = KVBuffer(stack, max(job.capacity, len(job.token_ids)))
        spans = [(segment, bounds[segment], bounds[segment + 1]) for segment in job.captures]
        self._recorder = CaptureRecorder(stack.layout, self._buffer.kv, spans)
        self._rows = job.rows
        self._resident: list[ResidentKV] = list(job.resident)
        self._uncorrected = list(job.reused)
        self._late: set[int] = set()
        self._row_layers = 0
        self._constants = LOADING_CONSTANTS
        self._strategy = STRATEGIES[job.loading]
        # With a front, whole extents in single layers are too small to be placed one by one.
        if not self._strategy.computes_front:
            self._send()

    @torch.inference_mode()
    def steps(self) -> Steps:
        """Prefill to the last token's hidden state, as steps for a driver (see `driver.run`).

        It yields wherever it would wait and wherever a layer is to run. Before each pass it yields a `Wait` that is not
        `in_pass`: what follows, up to the next one of these, needs the driver's lock.
        """
        loads = self._loads
        strategy = self._strategy
        look = strategy.first_look(self._split())
        if look.enough != "nothing":
            with self._timer("loading"):
                yield self._wait(look)
        while True:
            with self._timer("loading"):
                yield self._wait(strategy.before_pass(self._split(), self._layers))
            tokens, last = self._stack.ranks.lead(strategy.next_piece(self._split()))  # only now: more has come
            loads.layer_first = last  # while a front is computed, whole extents from the back
            taken = loads.take(tokens)
            self._compute_instead(self._stack.ranks.agree(frozenset(loads.failed())))
            self._compute_instead(taken)
            if last:
                if strategy.computes_front:
                    self._send()
                return (yield from self._last_pass())
            if taken:
                yield from self._front_piece(taken[-1] + 1)

    def _send(self) -> None:
        """Let readers place chunk-caches that memory does not keep."""
        if self._stack.device.type == "cpu":  # elsewhere copies belong to the stream of the thread that computes
            self._loads.send_to(self._buffer)

    # -- decisions ----------------------------------------------------------------------------------------------------

    def _wait(self, condition: WaitCondition) -> Wait:
        """Wait for what is to be there before the next pass."""
        loads = self._loads
        enough = condition.enough
        if condition.layer_first:
            loads.layer_first = True
        if isinstance(enough, int):
            layers = enough
            return Wait(loads, lambda: loads.depth() >= layers, condition.timeout_s)
        ready: dict[str, Callable[[], bool]] = {
            "nothing": lambda: True,
            "all": lambda: not loads.incomplete(),
            "all soon": lambda: self._split().loads_soon,
        }
        return Wait(loads, ready[enough], condition.timeout_s)

    def _split(self, rows: float | None = None) -> LoadSplit:
        """Return the state of computing and loading.

        Args:
            rows: cost of the rows that are computed in any case; None = of all open rows.
        """
        loads, speed = self._loads, self._speed
        own_positions = self._rows.open()
        waiting, extent_ends, bytes_left = loads.left()
        return LoadSplit(
            waiting=waiting,
            extent_ends=extent_ends,
            has_loaded=loads.meter.came,
            bytes_left=bytes_left,
            bytes_per_s=loads.meter.bytes_per_s,
            is_settled=loads.meter.warm,
            rows=speed.rows(own_positions) if rows is None else rows,
            speed=speed,
            own_positions=own_positions,
            busy_cores=max(0.0, loads.meter.cores - _spare_cores()) if self._stack.device.type == "cpu" else 0.0,
            tokens=len(self._ids),
            constants=self._constants,
        )

    def _take_over(self, layer: int, late: Sequence[int]) -> list[int]:
        """Take late positions that are computed from the first layer on faster than they are loaded.

        Args:
            layer: the layer that the pass has reached.
            late: positions that are to be computed already.
        """
        if not self._speed.known:
            return []
        layers_left = 1.0 - layer / self._layers
        rest_of_pass = layers_left * self._speed.rows(self._rows.open())
        catching_up = self._speed.rows(late)
        split = self._split(rest_of_pass + catching_up)
        share = split.optimistic().share(layers_left=layers_left)
        return self._loads.take(share) if share else []

    # -- passes -------------------------------------------------------------------------------------------------------

    def _front_piece(self, edge: int) -> Generator[Step, bool, None]:
        """Compute every open row before the position `edge`."""
        positions = self._rows.open(below=edge)
        here = [one for one in self._resident if one.start < edge]
        self._resident = self._resident[len(here) :]
        waited, started = self._loads.waited_s, time.perf_counter()
        run = self._pass(positions, recorder=self._recorder, drift=self._drift(edge))
        for layer in range(self._layers):
            self._place(layer, here, below=edge)
            yield from self._run_layer(run)
        spent = time.perf_counter() - started - (self._loads.waited_s - waited)  # a server's driver may set it aside
        self._measured(positions, spent, "piece")
        self._rows = self._rows.finish(positions)

    def _last_pass(self) -> Generator[Step, bool, PrefillResult]:
        """Compute what is left, the question among it, while the rest comes in layer by layer."""
        plan, placed_layers = None, 0
        if self._job.probe is not None:
            with self._timer("probe"):
                plan, placed_layers = yield from self._look(self._job.probe)
        focus, received, end = self._focus(), None, len(self._ids)
        if focus is None and self._job.refresh_rows:
            received = AttentionReceived(range(end - 1, end), self._layers)
        positions, joined = self._rows.open(), 0
        captured = {one.segment for one in self._recorder.captures}
        waited, started = self._loads.waited_s, time.perf_counter()
        run = self._pass(positions, recorder=self._recorder, observer=focus or received, drift=self._drift(None))
        for layer in range(self._layers):
            late = yield from self._arrive(layer, run, take_over=True)
            if layer >= placed_layers:
                self._place(layer, self._resident)
            joined += len(late)
            if layer:
                self._late |= set(self._rows.segment[late].tolist())
            yield from self._join(run, late)
            yield from self._run_layer(run)
            if focus is not None and focus.decide(layer):
                run.keep(self._focused(run.positions, focus.monitor))
        spent = time.perf_counter() - started - (self._loads.waited_s - waited)
        if not joined and (focus is None or focus.monitor.focused is None):
            self._measured(positions, spent, "last" if self._resident or self._loads.extents else "piece")
        if focus is not None or self._job.probe is not None or received is not None:
            self._drop_private_captures(captured)
        return PrefillResult(
            hidden=run.hidden,
            buffer=self._buffer,
            recorder=self._recorder,
            rows=self._rows,
            late=frozenset(self._late),
            plan=plan,
            refresh=None if received is None else self._refresh(received),
            focus_layer=None if focus is None else focus.monitor.layer,
            row_layers=self._row_layers,
            waited_s=self._loads.waited_s,
        )

    def _refresh(self, received: AttentionReceived) -> Refresh | None:
        """Refreshing of what is stale in the chunks that the question may shape."""
        rows, job = self._rows, self._job
        stale = np.isin(rows.segment, list(job.reused)) & (rows.reason == RowReason.STORED)
        stale[: job.shared_until] = False
        if not stale.any():
            return None
        received_by = received.received(len(self._ids))
        return Refresh(job.token_ids, stale, received_by, rows=job.refresh_rows, layers=self._layers)

    def _look(self, request: ProbeRequest) -> Generator[Step, bool, tuple[Plan, int]]:
        """Probe, and choose the recomputed tokens anew.

        Returns:
            The new plan, and in how many first layers all chunk-caches are placed.
        """
        probe = QuestionProbe(self._rows, request.question, self._buffer, self._layers)
        run = self._pass(probe.positions, observer=probe, absent=probe.absent, timer=within(self._timer, "probe"))
        for layer in range(probe.layers):
            late = yield from self._arrive(layer, run, take_over=False)
            self._place(layer, self._resident)
            yield from self._join(run, late)
            yield from self._run_layer(run)
        return self._choose(request, probe), probe.layers

    def _choose(self, request: ProbeRequest, probe: QuestionProbe) -> Plan:
        rows, edge = self._rows, self._job.shared_until
        seen = self._stack.ranks.mean(probe.seen()).cpu().numpy()
        open_to_choice = [segment for segment in self._job.reused if rows.bounds[segment] >= edge]
        by_chunk = {segment: seen[rows.span(segment)] for segment in open_to_choice}
        for segment, scores in by_chunk.items():  # nothing is stored there, or it did not come
            scores[rows.offsets(segment, RowReason.NEW, RowReason.NOT_LOADED)] = 0.0
        mean = max(float(np.concatenate(list(by_chunk.values())).mean()), 1e-30)
        plan = request.choose({segment: scores / mean for segment, scores in by_chunk.items()}, rows)
        undone = np.flatnonzero((rows.reason == RowReason.RECOMPUTED) & ~rows.done)
        chosen = [
            rows.bounds[segment] + offset for segment in self._job.reused for offset in plan.segments[segment].recompute
        ]
        self._rows = rows.mark(undone, RowReason.STORED).mark(chosen, RowReason.RECOMPUTED)
        return plan

    def _drop_private_captures(self, captured: Set[int]) -> None:
        """Drop captures of chunks that were to be loaded, if their context depends on the question.

        Which ones the last pass takes over is not known when it is probed, and most are stored already. `captured` are
        those of earlier passes.
        """
        bounds, edge = self._rows.bounds, self._job.shared_until
        first = min((bounds[one] for one in self._job.reused if bounds[one] >= edge), default=math.inf)
        for one in self._recorder.captures:
            if one.segment not in captured and one.start > first:
                self._recorder.forget(one.segment)

    # -- parts of a pass ----------------------------------------------------------------------------------------------

    def _pass(
        self,
        positions: NDArray[np.int64],
        *,
        recorder: CaptureRecorder | None = None,
        observer: Observer | None = None,
        drift: DriftCorrection | None = None,
        absent: NDArray[np.int64] | None = None,
        timer: Timer | None = None,
    ) -> RowPass:
        ids = self._ids[torch.from_numpy(positions).to(self._ids.device)]
        return RowPass(
            self._stack,
            self._buffer,
            ids,
            positions,
            rows=self._rows,
            recorder=recorder,
            observer=observer,
            drift=drift,
            absent=absent,
            timer=timer or self._timer,
        )

    def _measured(self, positions: NDArray[np.int64], seconds: float, kind: PassKind) -> None:
        whole = len(positions) == len(self._ids)
        self._speed.measured(self._speed.rows(positions), seconds, kind="whole" if whole else kind)

    def _run_layer(self, run: RowPass) -> Generator[Step, bool, None]:
        self._row_layers += len(run.positions)
        yield Forward(run)

    def _arrive(self, layer: int, run: RowPass, *, take_over: bool) -> Generator[Step, bool, NDArray[np.int64]]:
        """Wait until `layer` is there.

        Args:
            take_over: compute late positions where that is faster; a probe's rows would be computed twice.

        Returns:
            Ascending positions to compute in this pass, because they did not come or computing them is faster.
        """
        loads, late = self._loads, self._loads.failed()
        reads, moved = loads.reads, time.perf_counter()
        while loads.depth() <= layer:
            with self._timer("loading"):
                came = yield Wait(loads, lambda: loads.depth() > layer, self._constants.patience_s, in_pass=True)
            if came:
                break
            late += loads.failed()
            if not self._strategy.computes_front:
                continue
            if reads != loads.reads:
                reads, moved = loads.reads, time.perf_counter()
            if time.perf_counter() - moved > self._constants.stall_s:
                late += loads.take(math.inf)
            elif take_over:
                late += self._take_over(layer, late)
        late += loads.failed()
        if not late:
            return np.empty(0, np.int64)
        self._compute_instead(late)
        run.update(self._rows)  # of some rows that run already, what was stored did not come
        return np.setdiff1d(np.asarray(late, np.int64), run.positions)

    def _join(self, run: RowPass, late: NDArray[np.int64]) -> Generator[Step, bool, None]:
        """Bring late positions up to the layer that `run` stands before, and in among its rows."""
        if not len(late):
            return
        more = self._pass(late, recorder=run.recorder, absent=run.absent, timer=run.timer)
        while more.layer < run.layer:
            yield from self._run_layer(more)
        run.join(more)

    def _place(self, layer: int, resident: Sequence[ResidentKV], *, below: int | None = None) -> None:
        with self._timer("placing"):
            for one in resident:
                self._buffer.place_resident(layer, one)
            self._loads.place(layer, self._buffer, below=below)

    def _compute_instead(self, positions: Iterable[int]) -> None:
        self._rows = self._rows.mark(positions, RowReason.NOT_LOADED)

    def _drift(self, edge: int | None) -> DriftCorrection | None:
        """Correction of the chunks that end before `edge`, each once: in the pass that ends it."""
        rows = self._rows
        ended = [one for one in self._uncorrected if edge is None or rows.bounds[one + 1] <= edge]
        self._uncorrected = [one for one in self._uncorrected if one not in ended]
        if not ended or not self._job.drift:
            return None
        stale = [
            StaleChunk(one, _ranges(rows.bounds[one] + np.flatnonzero(~rows.done[rows.span(one)]))) for one in ended
        ]
        return DriftCorrection(stale, strength=self._job.drift, cos=self._buffer.cos, sin=self._buffer.sin)

    def _focus(self) -> FocusObserver | None:
        settings, bounds, stack = self._job.early_termination, self._rows.bounds, self._stack
        if settings is None:
            return None
        monitor = FocusMonitor(len(bounds) - 3, window=settings.window)
        asked = settings.question or range(bounds[-2], bounds[-1])
        return FocusObserver(monitor, bounds, asked, device=stack.device, ranks=stack.ranks)

    def _focused(self, positions: NDArray[np.int64], monitor: FocusMonitor) -> NDArray[np.bool_]:
        """bool `[rows]`: all but the recomputed tokens of unfocused chunks, of those that the question may shape."""
        focused = [chunk + 1 for chunk in monitor.focused or ()]  # it counts chunks, `segment` segments
        unfocused = ~np.isin(self._rows.segment[positions], focused) & (positions >= self._job.shared_until)
        keep: NDArray[np.bool_] = ~(unfocused & (self._rows.reason[positions] == RowReason.RECOMPUTED))
        return keep


def _spare_cores() -> int:
    """Cores of this process that a pass on the CPU does not use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0, cores - torch.get_num_threads())


def _ranges(positions: NDArray[np.int64]) -> list[range]:
    """Ascending positions as ranges of adjoining ones.

    >>> _ranges(np.array([3, 4, 7]))
    [range(3, 5), range(7, 8)]
    """
    if not len(positions):
        return []
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    return [range(int(part[0]), int(part[-1]) + 1) for part in np.split(positions, breaks)]
