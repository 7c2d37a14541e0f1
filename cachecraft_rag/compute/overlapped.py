"""Overlapped prefill: compute the front of a prompt while its chunk-caches are loaded from the end.

Cake (Jin et al., 2024, Algorithm 1) computes pieces from the front and loads pieces from the end until they meet. Here
the last pass, which the question needs anyway, also computes the last piece of the front. Tokens that are still missing
then are loaded layer by layer, just before they are used (Cache-Craft, Algorithm 2). With a fast disk there is no
front: this is layer-wise preloading. With a very slow disk everything is computed: this is full prefill.

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

from cachecraft_rag.compute.balance.load_split import (
    LOADING_CONSTANTS,
    STRATEGIES,
    FrontInLastPass,
    LoadSplit,
    WaitCondition,
)
from cachecraft_rag.compute.balance.speed import ComputeSpeed, PassKind
from cachecraft_rag.compute.captures.capture import CaptureRecorder
from cachecraft_rag.compute.job import PrefillJob, PrefillResult, ProbeRequest
from cachecraft_rag.compute.kv_buffer import KVBuffer, ResidentKV
from cachecraft_rag.compute.row_pass import AtOnce, Observer, RowPass
from cachecraft_rag.compute.rows import RowReason, Rows
from cachecraft_rag.compute.stack import Stack
from cachecraft_rag.compute.stale_tokens.drift_correction import DriftCorrection, StaleChunk
from cachecraft_rag.compute.stale_tokens.focus import FocusObserver
from cachecraft_rag.compute.stale_tokens.probe import QuestionProbe
from cachecraft_rag.compute.timing import Timer, untimed, within
from cachecraft_rag.kernels.gpu.streams import LAYERS_IN_FLIGHT, sent
from cachecraft_rag.planning.early_termination import FocusMonitor, focus_score
from cachecraft_rag.planning.planner import Plan
from cachecraft_rag.store.loading.pending import PendingLoads

# Longest expected time of a call that runs all layers of a pass, in seconds, while other requests wait for its end. A
# longer pass runs layer by layer, where a driver can stop; launching its layers is a small part of its time.
LONGEST_CALL_S = 0.25


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until `ready()` is true, or for `timeout_s`, while chunk-caches are loaded; send back True if it is ready.

    loads      chunk-caches that are being loaded
    ready      condition to wait for
    timeout_s  longest wait in seconds; None = no limit
    in_pass    True while a pass is under way, whose lock stays held; otherwise other requests may compute meanwhile
    """

    loads: PendingLoads
    ready: Callable[[], bool]
    timeout_s: float | None
    in_pass: bool = False


@dataclass(frozen=True, slots=True)
class Forward:
    """Advance this pass (`row_pass.advance`), alone or together with passes of other requests.

    That is its next layer, or all layers of `RowPass.at_once`.
    """

    row_pass: RowPass


Step = Wait | Forward
Steps = Generator[Step, bool, PrefillResult]


def passes_measure(device: torch.device) -> bool:
    """Return True if passes measure the attention of captures: on CUDA. Elsewhere captures keep their queries."""
    return device.type == "cuda"


class OverlappedPrefill:
    """Prefill of a request while its chunk-caches are being loaded.

    Create it in the thread that computes: its buffer is made at once, and copies to a GPU begin.

    Args:
        stack: the model's layers.
        job: rows to compute and chunk-caches to reuse.
        loads: chunk-caches that are being loaded; the readers are running.
        speed: computing speed; updated with the passes measured here.
        timer: called with each part.
        runs_ahead: launch the last pass without waiting for a GPU, if nothing is loaded or captured. Its errors and its
            time are seen later.
        longest_call_s: returns the longest expected time of a call that runs all layers; None: `LONGEST_CALL_S`.
        most_rows: rows that one pass may have, such as those for which a GPU has memory. If there are more, passes from
            the front compute them, and captures of all but the last pass are kept in main memory. A chunk to be
            captured is not divided. MemoryError in a pass if loads fail so late that it would have more rows. None: no
            limit.
        decides_once: with "cake", decide once before the last pass what is computed instead of loaded. Several ranks
            must run the same passes, and the first one decides.
    """

    def __init__(
        self,
        stack: Stack,
        job: PrefillJob,
        loads: PendingLoads,
        speed: ComputeSpeed,
        *,
        timer: Timer = untimed,
        runs_ahead: bool = False,
        longest_call_s: Callable[[], float] | None = None,
        most_rows: int | None = None,
        decides_once: bool = False,
    ) -> None:
        self._most_rows = most_rows
        self._longest_call_s = longest_call_s or (lambda: LONGEST_CALL_S)
        self._stack = stack
        self._job = job
        self._runs_ahead = (
            runs_ahead and stack.device.type == "cuda" and not loads.extents and not job.captures
        )
        self._loads = loads
        self._speed = speed
        self._timer = timer
        self._constants = LOADING_CONSTANTS
        self._strategy = STRATEGIES[job.loading]
        if decides_once and self._strategy.computes_front:
            self._strategy = FrontInLastPass()

        self._layers = stack.layout.layers
        self._ids = np.asarray(job.token_ids, dtype=np.int64)  # [tokens]
        self._buffer = KVBuffer(stack, max(job.capacity, len(self._ids)))
        # copies of loaded layers must not wait for all of these
        self._buffer.take(job.resident, at_once=not loads.extents)
        bounds = job.rows.bounds
        spans = [(segment, bounds[segment], bounds[segment + 1]) for segment in job.captures]
        self._recorder = CaptureRecorder(
            stack.layout,
            self._buffer.kv,
            spans,
            measured=bounds if passes_measure(stack.device) else None,
        )

        self._rows = job.rows
        self._resident = list(job.resident)  # chunk-caches that are not placed yet
        self._uncorrected = list(job.reused)  # segments without drift correction so far
        self._late_segments: set[int] = set()
        self._row_layers = 0
        self._common_depth = 0  # number of first layers that all ranks have loaded, as last agreed

        # With a front, whole extents in single layers are too small to be placed one by one.
        if not self._strategy.computes_front:
            self._let_readers_place()

    @torch.inference_mode()
    def steps(self) -> Steps:
        """Prefill up to the last token's hidden state, as steps for a driver (see `driver.run`). Call it once.

        Yields a `Wait` wherever it would wait, and a `Forward` for each layer or run of layers. The first step
        is a `Wait` that is not `in_pass`, and more follow between passes: the steps up to the next such `Wait` require
        the driver's lock. Tokens of chunk-caches that fail to load are computed. A `Wait` is answered by True if it is
        ready, else False. Neither `job` nor `loads` is closed.
        """
        first_look = self._strategy.first_look(self._split())
        if first_look.enough != "nothing":
            with self._timer("loading"):
                yield self._wait(first_look)

        while True:
            with self._timer("loading"):
                yield self._wait(self._strategy.before_pass(self._split(), self._layers))

            # Decide after the wait, because more has been loaded by now.
            decision = self._strategy.next_piece(self._split())
            ranks = self._stack.ranks
            tokens, is_last = ranks.lead(decision)
            piece = ranks.lead(self._loads.incomplete()[: round(tokens)]) if tokens else []
            # while a front is computed, readers take whole extents from the end
            self._loads.layer_first = is_last
            self._loads.compute(piece)
            self._compute_instead(self._agreed(self._loads.failed()))
            self._compute_instead(piece)

            if is_last:
                if self._strategy.computes_front:
                    self._let_readers_place()
                return (yield from self._last_pass())
            if piece:
                yield from self._front(piece[-1] + 1)

    def _let_readers_place(self) -> None:
        """Let readers place chunk-caches that memory does not keep."""
        # on a GPU, copies belong to the stream of the computing thread
        if self._stack.device.type == "cpu":
            self._loads.send_to(self._buffer)

    # -- decisions ----------------------------------------------------------------------------------------------------

    def _wait(self, condition: WaitCondition) -> Wait:
        """Return the step that waits for this condition before the next pass."""
        loads = self._loads
        enough = condition.enough
        if condition.layer_first:
            loads.layer_first = True
        if isinstance(enough, int):
            layers = enough
            return Wait(loads, lambda: loads.depth() >= layers, condition.timeout_s)
        ready: dict[str, Callable[[], bool]] = {
            "nothing": lambda: True,
            "all": loads.is_complete,
            "all soon": lambda: self._split().loads_soon,
        }
        return Wait(loads, ready[enough], condition.timeout_s)

    def _split(self, rows: float | None = None) -> LoadSplit:
        """Return the state of computing and loading; `rows` is the cost of rows computed in any case."""
        loads = self._loads
        speed = self._speed
        own_positions = self._rows.open()
        waiting, extent_ends, bytes_left = loads.left()

        busy_cores = 0.0
        if self._stack.device.type == "cpu":
            busy_cores = max(0.0, loads.meter.cores - _spare_cores())

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
            busy_cores=busy_cores,
            tokens=len(self._ids),
            constants=self._constants,
        )

    def _take_over(self, layer: int, late: Sequence[int]) -> list[int]:
        """Take late positions that are computed from the first layer on faster than they are loaded.

        `layer` is the one that the pass has reached; `late` positions will be computed in any case.
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

    def _front(self, edge: int) -> Generator[Step, bool, None]:
        """Compute every open row before the position `edge`; all stored tokens before it are loaded."""
        resident_before_edge = [resident for resident in self._resident if resident.start < edge]
        self._resident = self._resident[len(resident_before_edge) :]

        def place(layer: int) -> None:
            self._place(layer, resident_before_edge, below=edge)

        first, *others = [*self._borders(edge), edge]
        yield from self._front_piece(first, place)
        for border in others:
            yield from self._front_piece(border)

    def _all_but_last_rows(self, placed_layers: int) -> Generator[Step, bool, None]:
        """Compute rows from the front until one pass can compute the others, once everything is loaded.

        All chunk-caches are placed in the first `placed_layers` layers already.
        """
        end = len(self._ids)
        if not self._borders(end):
            return
        yield self._wait(WaitCondition("all"))
        self._compute_instead(self._agreed(self._loads.failed()))
        resident = self._resident
        self._resident = []

        def place(layer: int) -> None:
            if layer >= placed_layers:
                self._place(layer, resident, below=end)

        first, *others = self._borders(end)
        yield from self._front_piece(first, place)
        for border in others:
            yield self._wait(WaitCondition("all"))
            yield from self._front_piece(border)
        yield self._wait(WaitCondition("all"))

    def _borders(self, edge: int) -> list[int]:
        """Return positions that divide the open rows before `edge` into passes of `most_rows`; [] if one is enough.

        Segments are divided only if they have more rows, those to be captured never: such a pass has more rows.
        """
        positions = self._rows.open(below=edge)
        borders: list[int] = []
        first = 0
        while self._most_rows is not None and len(positions) - first > self._most_rows:
            border = int(positions[first + self._most_rows])
            segment = int(self._rows.segment[border])
            start = self._rows.bounds[segment]
            if start > positions[first]:
                border = start
            elif segment in self._job.captures:
                border = self._rows.bounds[segment + 1]
            if border > positions[-1]:
                break
            borders.append(border)
            first = int(np.searchsorted(positions, border))
        return borders

    def _front_piece(
        self, edge: int, place: Callable[[int], object] = lambda _layer: None
    ) -> Generator[Step, bool, None]:
        """Compute every open row before the position `edge` in one pass; `place` places a layer's chunk-caches."""
        positions = self._rows.open(below=edge)
        computing_s = self._start_clock()
        row_pass = self._pass(positions, recorder=self._recorder, drift=self._drift(edge))
        if self._can_run_at_once(row_pass, self._layers):
            yield from self._run_at_once(row_pass, self._layers, place)
        while row_pass.layer < self._layers:
            place(row_pass.layer)
            yield from self._run_layer(row_pass)
        row_pass.wait()
        self._note_speed(row_pass, positions, computing_s(), "piece")
        self._rows = self._rows.finish(positions)
        if self._most_rows is not None and len(self._ids) > self._most_rows:
            self._recorder.move_to_host()

    def _last_pass(self) -> Generator[Step, bool, PrefillResult]:
        """Compute the remaining rows, including the question, while the rest is loaded layer by layer."""
        plan: Plan | None = None
        placed_layers = 0
        if self._job.probe is not None:
            with self._timer("probe"):
                plan, placed_layers = yield from self._probe(self._job.probe)
            self._loads.leave_out(self._job.unused(self._rows).tolist())

        captured_before = {capture.segment for capture in self._recorder.captures}
        yield from self._all_but_last_rows(placed_layers)
        focus = self._focus_observer()

        positions = self._rows.open()
        joined_rows = 0

        computing_s = self._start_clock()
        row_pass = self._pass(
            positions, recorder=self._recorder, observer=focus, drift=self._drift(None)
        )

        def place(layer: int) -> None:
            if layer >= placed_layers:
                self._place(layer, self._resident)

        while row_pass.layer < self._layers:
            layer = row_pass.layer
            is_loaded = self._loads.is_complete()
            late = yield from self._wait_for_layer(layer, row_pass, take_over=True)
            joined_rows += len(late)
            if layer > 0:
                self._late_segments |= set(self._rows.segment[late].tolist())
            yield from self._join(row_pass, late)
            if focus is None and self._can_run_at_once(row_pass, self._layers, is_loaded=is_loaded):
                yield from self._run_at_once(row_pass, self._layers, place)
                continue
            place(layer)
            yield from self._run_layer(row_pass)
            if focus is not None and focus.decide(layer):
                row_pass.keep(self._rows_to_keep(row_pass.positions, focus.monitor))
                unused = self._job.unused(self._rows, may_drop=False)
                self._loads.leave_out(np.intersect1d(unused, row_pass.positions).tolist())
        if not self._runs_ahead:
            row_pass.wait()
        seconds = computing_s()

        has_terminated_early = focus is not None and focus.monitor.focused is not None
        if not joined_rows and not has_terminated_early:
            reuses = bool(self._resident or self._loads.extents)
            kind: PassKind = "last" if reuses else "piece"
            self._note_speed(row_pass, positions, seconds, kind)
        if focus is not None or self._job.probe is not None:
            self._drop_private_captures(captured_before)
        return PrefillResult(
            hidden=row_pass.hidden,
            buffer=self._buffer,
            recorder=self._recorder,
            rows=self._rows,
            late=frozenset(self._late_segments),
            plan=plan,
            focus_layer=None if focus is None else focus.monitor.layer,
            row_layers=self._row_layers,
            waited_s=self._loads.waited_s,
        )

    def _probe(self, request: ProbeRequest) -> Generator[Step, bool, tuple[Plan, int]]:
        """Probe and select again; return the new plan, and in how many first layers all chunk-caches are placed."""
        probe = QuestionProbe(
            self._rows,
            request.question,
            self._buffer,
            self._layers,
            unread=self._job.unread,
        )
        timer = within(self._timer, "probe")
        row_pass = self._pass(probe.positions, observer=probe, absent=probe.absent, timer=timer)

        def place(layer: int) -> None:
            self._place(layer, self._resident)

        while row_pass.layer < probe.layers:
            is_loaded = self._loads.is_complete()
            late = yield from self._wait_for_layer(row_pass.layer, row_pass, take_over=False)
            yield from self._join(row_pass, late)
            if self._can_run_at_once(row_pass, probe.layers, is_loaded=is_loaded):
                yield from self._run_at_once(row_pass, probe.layers, place)
                continue
            place(row_pass.layer)
            yield from self._run_layer(row_pass)
        return self._replanned(request, probe), probe.layers

    def _replanned(self, request: ProbeRequest, probe: QuestionProbe) -> Plan:
        """Select the recomputed tokens by the probe's scores; return the new plan."""
        rows = self._rows
        attention = self._stack.ranks.mean(probe.seen()).cpu().numpy()  # float32 [positions]

        # of each segment that the question may shape and the probe sees
        scores: dict[int, NDArray[np.floating]] = {}
        is_computed = rows.having(RowReason.NEW, RowReason.COMPUTED_INSTEAD)
        for segment in self._job.reused:
            if rows.bounds[segment] < self._job.shared_until or segment in self._job.unread:
                continue
            span = rows.span(segment)
            scores[segment] = attention[span]
            scores[segment][is_computed[span]] = 0.0

        mean = max(float(np.concatenate(list(scores.values())).mean()), 1e-30)
        plan = request.choose(
            {segment: values / mean for segment, values in scores.items()},
            rows,
            _focus_scores(attention, rows),
        )

        not_done = np.flatnonzero((rows.reason == RowReason.RECOMPUTED) & ~rows.done)
        selected = np.concatenate(
            [rows.bounds[segment] + plan[segment].recompute for segment in self._job.reused]
        )
        without_old_selection = rows.mark(not_done, RowReason.STORED)
        self._rows = without_old_selection.mark(selected, RowReason.RECOMPUTED)
        return plan

    def _drop_private_captures(self, captured_before: Set[int]) -> None:
        """Drop captures of chunks that should have been loaded, if their context depends on the question.

        It is not known before the probe which of them the last pass will compute, and most are stored already.
        """
        bounds = self._rows.bounds
        shaped_starts = [
            bounds[segment]
            for segment in self._job.reused
            if bounds[segment] >= self._job.shared_until
        ]
        first_shaped = min(shaped_starts, default=math.inf)
        for capture in self._recorder.captures:
            if capture.segment not in captured_before and capture.start > first_shaped:
                self._recorder.forget(capture.segment)

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
        ids = sent(self._ids[positions], self._stack.device)
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
            most_in_flight=None if self._runs_ahead else LAYERS_IN_FLIGHT,
        )

    def _start_clock(self) -> Callable[[], float]:
        """Return a function that returns the seconds since now, without the time spent waiting for loads."""
        waited_before = self._loads.waited_s
        started = time.perf_counter()

        def computing_s() -> float:
            waited = self._loads.waited_s - waited_before
            # a server's driver may pause the pass meanwhile
            return time.perf_counter() - started - waited

        return computing_s

    def _note_speed(
        self, row_pass: RowPass, positions: NDArray[np.int64], seconds: float, kind: PassKind
    ) -> None:
        """Note how long a pass took: `seconds`, or what a GPU measures if the pass runs ahead."""
        if self._runs_ahead:
            rows = self._speed.rows(positions)
            self._speed.measured_later(rows, row_pass.clock, kind=kind)
        else:
            self._measured(positions, seconds, kind)

    def _measured(self, positions: NDArray[np.int64], seconds: float, kind: PassKind) -> None:
        if len(positions) == len(self._ids):
            kind = "whole"
        self._speed.measured(self._speed.rows(positions), seconds, kind=kind)

    def _run_layer(self, row_pass: RowPass) -> Generator[Step, bool, None]:
        self._row_layers += len(row_pass.positions)
        yield Forward(row_pass)

    def _can_run_at_once(self, row_pass: RowPass, layers: int, *, is_loaded: bool = True) -> bool:
        """Return True if the stack's `whole_model` can run this pass: nothing has to happen between its layers.

        Args:
            row_pass: the pass.
            layers: number of layers.
            is_loaded: True if the pass will wait for no loads; ranks may differ.
        """
        model = self._stack.whole_model
        if model is None or row_pass.layer or len(row_pass.positions) > model.most_rows:
            return False
        # a rank captures also what it could not load, which another one may have had in memory
        can_run = (
            is_loaded
            and (model.gives_raw or not row_pass.has_captures)
            and self._expected_s(row_pass, layers) <= self._longest_call_s()
        )
        return self._stack.ranks.least(int(can_run)) == 1

    def _expected_s(self, row_pass: RowPass, layers: int) -> float:
        """Return how long the host will be busy with these layers of a pass; 0 if no pass was measured yet.

        Also 0 if it launches them without waiting for a GPU.
        """
        if self._runs_ahead or not self._speed.known:
            return 0.0
        rows = self._speed.rows(row_pass.positions)
        return self._speed.seconds(rows) * layers / self._layers

    def _run_at_once(
        self, row_pass: RowPass, layers: int, place: Callable[[int], object]
    ) -> Generator[Step, bool, None]:
        """Run these layers in one call; only the first one, if the driver has divided the pass."""
        row_pass.at_once = AtOnce(layers, place, self._expected_s(row_pass, layers))
        yield Forward(row_pass)
        self._row_layers += row_pass.layer * len(row_pass.positions)

    def _wait_for_layer(
        self, layer: int, row_pass: RowPass, *, take_over: bool
    ) -> Generator[Step, bool, NDArray[np.int64]]:
        """Wait until `layer` is loaded; return ascending positions to compute in this pass instead.

        Their loading failed, or, with `take_over`, computing is faster; a probe's rows would be computed twice.
        """
        if self._strategy.computes_front:
            late = yield from self._loaded_or_taken_over(layer, take_over=take_over)
        else:
            late = yield from self._loaded_on_all_ranks(layer)
        if not late:
            return np.empty(0, np.int64)
        self._compute_instead(late)
        row_pass.update(self._rows)  # stored keys and values of some running rows are missing now
        return np.setdiff1d(np.asarray(late, np.int64), row_pass.positions)

    def _loaded_on_all_ranks(self, layer: int) -> Generator[Step, bool, list[int]]:
        """Wait until every rank has loaded `layer`; return the positions whose loading failed on any of them.

        The ranks meet only before a layer that one of them lacked when they last met.
        """
        loads = self._loads
        late: list[int] = []
        while self._common_depth <= layer:
            depth = loads.depth()
            # after the depth, which does not count an extent that has failed
            failed = loads.failed()
            common = self._stack.ranks.least(-1 if failed else depth)
            if common < 0:
                late += self._agreed(failed)
                continue
            self._common_depth = common
            if common <= layer:
                with self._timer("loading"):
                    yield Wait(loads, lambda: loads.depth() > layer, None, in_pass=True)
        return late

    def _loaded_or_taken_over(
        self, layer: int, *, take_over: bool
    ) -> Generator[Step, bool, list[int]]:
        """Wait until `layer` is loaded, of one rank; return positions that failed, or are computed faster."""
        loads = self._loads
        late = loads.failed()
        reads = loads.reads
        last_progress = time.perf_counter()
        while loads.depth() <= layer:
            with self._timer("loading"):
                patience_s = self._constants.patience_s
                is_loaded = yield Wait(
                    loads, lambda: loads.depth() > layer, patience_s, in_pass=True
                )
            if is_loaded:
                break

            late += loads.failed()
            if reads != loads.reads:
                reads = loads.reads
                last_progress = time.perf_counter()
            if time.perf_counter() - last_progress > self._constants.stall_s:
                late += loads.take(math.inf)
            elif take_over:
                late += self._take_over(layer, late)

        return late + loads.failed()

    def _agreed(self, failed: Iterable[int]) -> list[int]:
        """Return, ascending, the positions that failed to load on any rank; none of them loads these any more."""
        everywhere = sorted(self._stack.ranks.agree(frozenset(failed)))
        self._loads.give_up(everywhere)
        return everywhere

    def _join(self, row_pass: RowPass, late: NDArray[np.int64]) -> Generator[Step, bool, None]:
        """Compute late positions up to the layer that `row_pass` has reached, and add them to its rows."""
        if not len(late):
            return
        rows = len(row_pass.positions) + len(late)
        if self._most_rows is not None and rows > self._most_rows:
            raise MemoryError(
                f"{len(late)} stored tokens were not loaded in time, and {rows} rows do not fit into one pass, which "
                f"takes {self._most_rows}"
            )
        late_pass = self._pass(
            late, recorder=row_pass.recorder, absent=row_pass.absent, timer=row_pass.timer
        )
        while late_pass.layer < row_pass.layer:
            yield from self._run_layer(late_pass)
        row_pass.join(late_pass)

    def _place(
        self, layer: int, resident: Sequence[ResidentKV], *, below: int | None = None
    ) -> None:
        """Write one layer of chunk-caches into the buffer: of these resident ones, and of all loaded ones."""
        with self._timer("placing"):
            self._buffer.place_resident(layer, resident)
            self._loads.place(layer, self._buffer, below=below)

    def _compute_instead(self, positions: Iterable[int]) -> None:
        self._rows = self._rows.mark(positions, RowReason.COMPUTED_INSTEAD)

    def _drift(self, edge: int | None) -> DriftCorrection | None:
        """Return the correction of chunks that end before `edge`; each chunk is corrected in the pass that ends it."""
        rows = self._rows
        ended = [
            segment
            for segment in self._uncorrected
            if edge is None or rows.bounds[segment + 1] <= edge
        ]
        self._uncorrected = [segment for segment in self._uncorrected if segment not in ended]
        if not ended or not self._job.drift:
            return None

        stale_chunks = []
        for segment in ended:
            if segment in self._job.unread:
                continue
            not_done = rows.bounds[segment] + np.flatnonzero(~rows.done[rows.span(segment)])
            stale_chunks.append(StaleChunk(segment, _ranges(not_done)))
        return DriftCorrection(stale_chunks, strength=self._job.drift, rotary=self._buffer.rotary)

    def _focus_observer(self) -> FocusObserver | None:
        """Return the observer for early termination; None if it is off."""
        settings = self._job.early_termination
        if settings is None:
            return None
        bounds = self._rows.bounds
        chunks = len(bounds) - 3  # without the system's segment and the question
        monitor = FocusMonitor(chunks, window=settings.window)
        question = settings.question or range(bounds[-2], bounds[-1])
        return FocusObserver(
            monitor, bounds, question, device=self._stack.device, ranks=self._stack.ranks
        )

    def _rows_to_keep(
        self, positions: NDArray[np.int64], monitor: FocusMonitor
    ) -> NDArray[np.bool_]:
        """Return bool `[rows]`, False for recomputed tokens of unfocused chunks that the question may shape."""
        # segment 0 is the system's
        focused_segments = [chunk + 1 for chunk in monitor.focused or ()]
        is_unfocused = ~np.isin(self._rows.segment[positions], focused_segments)
        may_be_shaped = positions >= self._job.shared_until
        is_recomputed = self._rows.reason[positions] == RowReason.RECOMPUTED
        keep: NDArray[np.bool_] = ~(is_unfocused & may_be_shaped & is_recomputed)
        return keep


def _focus_scores(attention: NDArray[np.float32], rows: Rows) -> dict[int, float]:
    """Return segment → focus score of each chunk that the probe saw; `attention` is `[positions]`."""
    # the first segment is the system's, the last the question's
    chunks = range(1, len(rows.bounds) - 2)
    scores = {chunk: focus_score(attention[rows.span(chunk)]) for chunk in chunks}
    return {chunk: score for chunk, score in scores.items() if score > 0.0}


def _spare_cores() -> int:
    """Return the number of this process's cores that a pass on the CPU does not use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(0, cores - torch.get_num_threads())


def _ranges(positions: NDArray[np.int64]) -> list[range]:
    """Return ascending positions as ranges of adjoining positions.

    >>> _ranges(np.array([3, 4, 7]))
    [range(3, 5), range(7, 8)]
    """
    if not len(positions):
        return []
    breaks = np.flatnonzero(positions[1:] - positions[:-1] != 1)
    firsts = [int(positions[0]), *positions[breaks + 1].tolist()]
    lasts = [*positions[breaks].tolist(), int(positions[-1])]
    return [range(first, last + 1) for first, last in zip(firsts, lasts, strict=True)]
