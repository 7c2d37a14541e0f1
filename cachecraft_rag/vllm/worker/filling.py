"""A prompt on its way into vLLM's blocks, a few steps at a time, and for how long in each of vLLM's steps."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from cachecraft_rag.compute.balance.speed import ComputeSpeed
from cachecraft_rag.compute.job import PrefillJob, PrefillResult
from cachecraft_rag.compute.overlapped import Forward, OverlappedPrefill, Step
from cachecraft_rag.compute.resolve import executed_plan, resolve
from cachecraft_rag.compute.row_pass import RowPass
from cachecraft_rag.compute.stack import Stack
from cachecraft_rag.planning.candidates import Candidate
from cachecraft_rag.planning.planner import Plan
from cachecraft_rag.serving.request import segment_reports
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.loading.loader import Loader
from cachecraft_rag.vllm.messages import Fill, FillReport

# Times as long as a step of vLLM's own that fillings may take of each step.
_SHARE = 8.0
_SHORTEST_S = 0.05
_LONGEST_S = 1.0  # also if vLLM's own steps are prefills
_STEPS = 15  # steps of vLLM's own that are remembered


class Filling:
    """A request's prefill: the Hugging Face engine's, without the last tokens of the prompt, which vLLM computes.

    While it waits for loads, where `driver.run` would block, the worker continues with another request. With several
    ranks, all call the constructor and every step together; AnotherRankFailedError if another rank has given this
    request up, and RanksApartError if a rank missed the meeting. Nothing stays open if the constructor raises.

    Attributes:
        result: result of the prefill; None until it is done. `end` and `report` need it.
        plan: the plan; after `end`, as it was executed.
    """

    def __init__(
        self,
        fill: Fill,
        *,
        stack: Stack,
        store: ChunkCacheStore,
        loader: Loader,
        speed: ComputeSpeed,
        decides_once: bool = False,
        longest_call_s: Callable[[], float] | None = None,
        most_rows: int | None = None,
    ) -> None:
        """Make the plan, open the chunk-caches and begin to load them.

        Args:
            decides_once, longest_call_s, most_rows: see `OverlappedPrefill`.
        """
        self.fill = fill
        self._stack = stack
        self._loader = loader
        self._began = time.perf_counter()
        self._job = resolve(
            fill.ask.prompt,
            fill.found,
            fill.ask.config,
            store=store,
            ranks=stack.ranks,
            answer_tokens=0,
            scores=fill.scores,
        )
        self.plan: Plan = self._job.plan
        self.result: PrefillResult | None = None
        self._loads = loader.begin(self._job.to_load, self._job.not_needed)
        self._planned = self._idle_since = time.perf_counter()
        self._load_s = 0.0
        try:
            self._steps = OverlappedPrefill(
                stack,
                self._own_part(),
                self._loads,
                speed,
                runs_ahead=True,
                longest_call_s=longest_call_s,
                most_rows=most_rows,
                decides_once=decides_once,
            ).steps()
            self._step: Step = next(self._steps)
        except BaseException:  # whatever it is, readers stop
            self._close_loads()
            raise
        self._asked_at = time.perf_counter()

    def _own_part(self) -> PrefillJob:
        """Return the job without the last tokens, with the captures of all ranks, which must divide passes alike.

        What one rank has in memory, and does not capture, another may read from its disk, or compute.
        """
        fill = self.fill
        captures: Sequence[int] | None = fill.ask.captures
        if captures is None:
            captures = sorted(self._stack.ranks.agree(frozenset(self._job.captures)))
        rows = self._job.rows.finish(range(fill.stop, fill.ask.prompt.bounds[-1]))
        return replace(self._job, rows=rows, captures=() if fill.again else captures)

    @property
    def row_pass(self) -> RowPass | None:
        """The pass whose next layer can run now; None while it waits for loads, and at the end. Not after `give_up`."""
        return (
            self._step.row_pass if self.result is None and isinstance(self._step, Forward) else None
        )

    def go_on(self) -> None:
        """Take every step that is ready, up to the next layer or to the end of the prefill. Never waits for loads.

        Does nothing while `row_pass` is set: run its layer between `begin_layer` and `end_layer`, which goes on itself.
        Afterwards `row_pass` is the next layer's pass, or `result` is set, or both are None because loads are late.
        Tokens of a chunk-cache that cannot be loaded are computed.
        """
        while self.result is None and not isinstance(step := self._step, Forward):
            now = time.perf_counter()
            late = not self._stack.ranks.least(int(step.ready()))
            if late and (step.timeout_s is None or now - self._asked_at < step.timeout_s):
                return
            self._load_s += now - self._asked_at
            self._loads.waited_s += now - self._idle_since
            self._send(not late)

    def begin_layer(self) -> None:
        """Note that the layer runs now; the time since the last one counts only in `PendingLoads.waited_s`."""
        self._loads.waited_s += time.perf_counter() - self._idle_since

    def end_layer(self) -> None:
        """Note that the layer has run, and take every step that is ready, see `go_on`."""
        self._send(True)
        self.go_on()

    def _send(self, came: bool) -> None:
        try:
            self._step = self._steps.send(came)
        except StopIteration as end:
            self.result = end.value
        self._idle_since = self._asked_at = time.perf_counter()

    def end(self) -> PrefillResult:
        """Stop loading, note in `plan` which rows were computed instead of loaded, and return the result.

        The chunk-caches are closed; memory keeps those that were loaded whole. Captures that must not be stored, such
        as those of chunks that are stored already, are dropped from the result's recorder.
        """
        assert self.result is not None, "it is not done"
        self._loader.end(self._loads)
        self.plan = executed_plan(self._job, self._loads, self.result)
        return self.result

    def give_up(self) -> None:
        """Stop the prefill before it is done, stop loading, and close the chunk-caches; nothing is captured."""
        self._steps.close()
        self._close_loads()

    def _close_loads(self) -> None:
        self._loader.end(self._loads)
        self._job.close()

    def report(self) -> FillReport:
        """Return the report of the request for its statistics; call it after `end`.

        "fixed" is missing if the request does not capture, runs in idle time, has found segments or uses an adapter,
        and "recomputed" is missing unless the request asks for details.
        """
        assert self.result is not None, "it is not done"
        segments = [segment.as_dict() for segment in segment_reports(self.plan, self._job.tiers)]
        report: FillReport = {
            "segments": segments,
            "row_layers": self.result.row_layers,
            "focus_layer": self.result.focus_layer,
            "planned_s": self._planned - self._began,
            "waited_s": self._load_s,
            "remote": self.fill.found.remote,
        }
        ask = self.fill.ask
        has_found_segments = any(segment.found for segment in ask.prompt.segments)
        # new variants are computed with the base model
        is_candidate = not ask.idle and self.fill.adapter is None
        if ask.config.capture and is_candidate and not has_found_segments:
            candidate = Candidate.of(ask.prompt, self.plan, ask.config, session=ask.session)
            fixed = {} if candidate is None else candidate.fixed
            report["fixed"] = [[segment, tokens] for segment, tokens in fixed.items()]
        if ask.details:
            report["recomputed"] = [segment.recompute.tolist() for segment in self.plan]
        return report


class Slices:
    """The time for which prompts are filled in each step, from how long vLLM's own steps have taken.

    While vLLM has requests, fillings get eight times the median of its last 15 own steps, from 0.05 to 1 s: a prompt is
    filled nearly as fast as vLLM computes it in one step, and other users wait for a part of that at a time. A fixed
    time would be too short for a slow model, and would stop the others for too long with a fast one.
    """

    def __init__(self) -> None:
        self._own_s: deque[float] = deque(maxlen=_STEPS)
        self._ended: float | None = None

    def begin(self) -> None:
        """Note that a step begins: the time since an `end` that `is_own` is that of vLLM's part of the step before."""
        if self._ended is not None:
            self._own_s.append(time.perf_counter() - self._ended)
        self._ended = None

    def end(self, *, is_own: bool) -> None:
        """Note that our part of a step has ended; `is_own` if we computed nothing and vLLM does: it is measured."""
        # on a GPU vLLM's part also waits for ours, so it tells nothing after a filling
        self._ended = time.perf_counter() if is_own else None

    def seconds(self, *, otherwise: float) -> float:
        """Return the seconds for fillings while vLLM has requests; `otherwise` until a step of its own was measured."""
        if not self._own_s:
            return otherwise
        return min(max(_SHARE * statistics.median(self._own_s), _SHORTEST_S), _LONGEST_S)
