"""The workers' side: fills blocks in slices between vLLM's own forward passes, and captures chunk-caches.

Nothing here blocks. A filling that waits for a disk or a remote is skipped in this step. Fillings whose next layer is
the same run it as one forward pass.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from cachecraft_rag.compute.balance.speed import ComputeSpeed
from cachecraft_rag.compute.captures.write_back import CaptureContext, CaptureDescriber, Ended
from cachecraft_rag.compute.driver import Work, run
from cachecraft_rag.compute.job import PrefillResult
from cachecraft_rag.compute.overlapped import LONGEST_CALL_S
from cachecraft_rag.compute.row_pass import RowPass, advance
from cachecraft_rag.compute.stack import WholeModel
from cachecraft_rag.kernels.gpu.streams import sent
from cachecraft_rag.planning.planner import exact_shares
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.loading.loader import Loader
from cachecraft_rag.vllm.messages import Adapter, Fill, FillReport, StepResult
from cachecraft_rag.vllm.settings import ConnectorSettings
from cachecraft_rag.vllm.worker.fill_memory import UNLIMITED, FillMemory
from cachecraft_rag.vllm.worker.filling import Filling, Slices
from cachecraft_rag.vllm.worker.ranks import AnotherRankFailedError, RanksApartError, TensorParallel
from cachecraft_rag.vllm.worker.stack import WorkerStack
from cachecraft_rag.vllm.worker.whole_model import check_raw_keys, check_whole_model

if TYPE_CHECKING:
    from cachecraft_rag.vllm.worker.adapters.active import Adapters

logger = logging.getLogger("cachecraft_rag.vllm")

# Time per step after which filling stops, unless vLLM has requests to compute: see `Slices`. At least one layer of a
# group of passes is computed, or all layers in one call. That is expected to take at most `LONGEST_CALL_S` or such a
# slice, unless vLLM has nothing to compute: as many rows of vLLM's prefill take as long in one step.
_IDLE_SLICE_S = 0.05  # while no request waits; one that arrives waits for the end of the slice
_LONG_SLICE_S = 0.25  # while vLLM has nothing to compute
# While requests run, the thread that describes captures pauses this many times as long as it worked.
_RESTS = 4
_SHORTEST_REST_S = 0.02


@dataclass(frozen=True)
class WorkerStream:
    """A device, and the stream that a vLLM worker computes on; None on a CPU.

    For a thread that continues with the worker's results. With several ranks, and for some quantised kernels, vLLM
    computes on another stream than the default one, on which a thread begins: it might read what is not written yet.
    """

    device: torch.device
    stream: torch.cuda.Stream | None

    @classmethod
    def current(cls, device: torch.device) -> WorkerStream:
        """Return the device and the stream that the calling thread computes on; without a stream if it is no GPU."""
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        return cls(device, stream)

    @contextmanager
    def taken_over(self) -> Iterator[None]:
        """Return a context in which the calling thread, too, computes on this device and stream.

        Work of both threads runs in the order of submission: no events are needed, and memory that one thread frees is
        reused in the same order.
        """
        if self.stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield


class Workers:
    """The side of one rank: fills the blocks of requests, and describes and stores their captures in one thread.

    All methods are for vLLM's worker thread, and all ranks call `step` with the same arguments.

    Args:
        block_size: tokens per vLLM block.
        memory: memory of fillings on a GPU.
        whole_model: the model's own forward; before the first filling it is checked, and used if it is right.
        adapters: LoRA adapters that passes use; None: no request uses one.
    """

    def __init__(
        self,
        stack: WorkerStack,
        store: ChunkCacheStore,
        settings: ConnectorSettings,
        *,
        block_size: int,
        memory: FillMemory = UNLIMITED,
        whole_model: WholeModel | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self._adapters = adapters
        self._stack = stack
        self._store = store
        self._memory = memory
        self._block_size = block_size
        self._unchecked = whole_model
        self._layer_by_layer = ""  # reason why passes do not run at once
        self._captures_layer_by_layer = ""  # reason why those with captures do not
        self._last_position = settings.identity.context_length - 1
        self._slices = Slices()
        self._longest_call_s = LONGEST_CALL_S  # of this step
        self._has_run = False  # layers in this step
        self._is_awaited = False  # a client waits for one of the prompts that are being filled
        self._ranks = stack.ranks
        self.first_rank = stack.ranks.rank == 0
        self._speed = ComputeSpeed(stack.keys_per_row)
        self._loader = Loader(store, stack.layout.layers)
        self._lock = threading.Lock()
        self._turnstile = threading.Lock()
        self._describing = ThreadPoolExecutor(1, thread_name_prefix="cachecraft-captures")
        self._describe_at_once = threading.Event()  # set: captures are described without pauses
        self._describe_at_once.set()
        self._write_back = CaptureDescriber(
            store,
            namespace=settings.namespace,
            fingerprint=settings.identity.fingerprint,
            layout=settings.identity.layout,
            start=self._describe,
        )
        self._fillings: dict[str, Filling] = {}  # by request, in order of arrival
        # filled requests → segments that must be stored before they end
        self._storing: dict[str, frozenset[str]] = {}
        self._done: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._broken = ""  # reason why no blocks can be filled any more
        self._reports: dict[str, FillReport] = {}
        self._last_capturing: frozenset[str] = frozenset()  # as last sent to the scheduler

    def step(
        self,
        fills: Iterable[Fill],
        ended: Iterable[str],
        *,
        rows: int,
        vllm_is_free: bool = False,
        idle: bool = True,
        captures_awaited: bool = False,
    ) -> None:
        """Begin new fillings, drop those in `ended`, and compute up to `rows` rows through all layers.

        It stops earlier after the time of `Slices.seconds`, after 0.25 seconds if `vllm_is_free`, but after 0.05
        seconds if `idle`; several ranks stop together, once one is over that time. At least one layer is computed if
        there are rows and a filling is ready, or all layers in one call. Finished fillings are written into vLLM's
        blocks, and their captures are described in the background.

        An exception is logged, and vLLM computes the prompts that it concerns, see `failed_blocks`. A step that fails
        as a whole leaves all prompts that are being filled to vLLM. Later prompts too if several ranks do not meet
        again after it.

        Args:
            fills: fillings to begin.
            ended: ids of requests that have ended or are given up; unknown ones are ignored.
            rows: most rows to compute, counted through all layers; the last layer may exceed it.
            vllm_is_free: True if vLLM computes nothing in this step.
            idle: True if no requests are running, so that new variants may be computed.
            captures_awaited: True if a request waits for captures, which are then described without pauses.
        """
        self._slices.begin()
        new = {fill.request_id: fill for fill in fills}
        slice_s = self._slice_s(vllm_is_free=vllm_is_free, idle=idle)
        has_time = vllm_is_free and not idle
        self._longest_call_s = math.inf if has_time else max(LONGEST_CALL_S, slice_s)
        self._has_run = False
        ended = list(ended)
        has_work = bool(new or ended or self._fillings)  # the same on all ranks
        if not self._broken:
            try:
                self._step(new, ended, rows, slice_s, idle)
                if has_work:
                    self._ranks.end_step()
            # Whatever it is: inside vLLM it would end the server. No single request caused it, so all are left to vLLM.
            except Exception as error:
                logger.exception("A step has failed")
                self._leave_all(new, f"a step has failed: {error!r}")
                if has_work:
                    self._meet_again()
        else:
            self._leave_all(new, self._broken)
        # a filled request waits for its first token
        free = idle or (vllm_is_free and not self._fillings and not self._done)
        if free or captures_awaited or self._storing or self._write_back.crowded:
            self._describe_at_once.set()
        else:
            self._describe_at_once.clear()
        self._is_awaited = any(not filling.fill.ask.waits for filling in self._fillings.values())
        self._slices.end(is_own=not (vllm_is_free or self._has_run))

    def _slice_s(self, *, vllm_is_free: bool, idle: bool) -> float:
        """Return the time after which this step's filling stops, in seconds."""
        if idle:
            return _IDLE_SLICE_S
        return _LONG_SLICE_S if vllm_is_free else self._slices.seconds(otherwise=LONGEST_CALL_S)

    def _meet_again(self) -> None:
        """Meet the other ranks after a failed step: they may have stopped at different places."""
        try:
            self._ranks.meet_again()
        except RanksApartError as error:
            self._broken = f"the ranks are apart, until the server is started again: {error}"
            logger.exception("Prompts are computed without chunk-caches from now on")

    def _step(
        self, new: Mapping[str, Fill], ended: Iterable[str], rows: int, slice_s: float, idle: bool
    ) -> None:
        for name in ended:
            self._drop(name)
        if new:
            self._check_whole_model()
        begun = [fill for fill in new.values() if not self._leaves_adapter(fill)]
        self._round([([fill], partial(self._begin, fill)) for fill in begun])
        for name in [
            name for name, ids in self._storing.items() if not self._write_back.pending(ids)
        ]:
            del self._storing[name]
            self._done.add(name)
        self._round(
            [
                ([filling.fill], partial(self._take, filling, filling.go_on))
                for filling in self._fillings.values()
            ]
        )
        budget = rows * self._stack.layout.layers
        deadline = time.perf_counter() + slice_s
        while budget > 0 and (group := self._group(idle)):
            budget -= self._run_layer(group)
            if self._any_rank(time.perf_counter() > deadline):
                return

    def _any_rank(self, is_over: bool) -> bool:
        """Return True if a limit of time is passed on any rank: all of them must run the same layers."""
        return self._ranks.least(int(not is_over)) == 0

    @property
    def is_filling(self) -> bool:
        """True while blocks of a request are being filled."""
        return bool(self._fillings)

    def _check_whole_model(self) -> None:
        """Check the model's own forward before the first filling; again if that step fails, as on other ranks."""
        if self._unchecked is not None:
            self._use_if_right(self._unchecked)
            self._unchecked = None

    def _use_if_right(self, model: WholeModel) -> None:
        """Use the model's own forward if its first passes are right on all ranks; otherwise log why it is not used."""
        reason = self._checked(0, lambda: check_whole_model(self._stack, model))
        if reason:
            self._layer_by_layer = (
                "prompts are filled layer by layer, which takes longer on a GPU, because vLLM's own forward cannot "
                f"compute passes: {reason}; please report it"
            )
            logger.warning("%s", self._layer_by_layer)
            return
        reason = self._checked(
            2, lambda: check_raw_keys(self._stack, model, last=self._last_position)
        )
        self._stack.whole_model = model
        model.gives_raw = not reason
        if reason:
            self._captures_layer_by_layer = (
                "prompts with new chunks are filled layer by layer, which takes longer, because vLLM's own forward "
                f"cannot compute raw keys: {reason}"
            )
            logger.warning("%s", self._captures_layer_by_layer)

    def _checked(self, act: int, check: Callable[[], str]) -> str:
        """Return a reason against the model's own forward that a check finds on any rank, or "", in two acts."""
        self._ranks.act(act)
        try:
            with self._turn():
                reason = check()
        except RanksApartError:
            raise
        except AnotherRankFailedError:
            reason = ""
        # whatever vLLM raises, requests are served without it
        except Exception as error:
            logger.exception("vLLM's own forward failed over the rows of a pass")
            reason = f"it raised {error!r}"
        self._ranks.act(act + 1)
        return min(self._ranks.agree(frozenset((reason,) if reason else ())), default="")

    def finished(self) -> set[str]:
        """Return the ids of requests that wait for nothing here any more; each is returned once.

        Their blocks are filled or left to vLLM, or the requests are gone. A request with `Ask.when_stored` is not among
        them before its captures are stored, unless a step has failed.
        """
        done = self._done
        self._done = set()
        return done

    def failed_blocks(self) -> set[int]:
        """Return the ids of blocks of requests that are left to vLLM, which computes them; each is returned once."""
        failed = self._failed_blocks
        self._failed_blocks = set()
        return failed

    def take_result(self) -> StepResult | None:
        """Return the reports since the last call, and all segments that are being captured now; None without change."""
        capturing = self._write_back.pending()
        reports = self._reports
        self._reports = {}
        if not reports and capturing == self._last_capturing:
            return None
        self._last_capturing = capturing
        return StepResult(reports, capturing)

    def close(self) -> None:
        """Give up unfinished fillings, and finish the captures, waiting without limit. The store stays open."""
        for name in list(self._fillings):
            self._drop(name)
        self._describe_at_once.set()
        self._write_back.close()
        self._describing.shutdown()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the lock on computing. A waiting thread holds the turnstile, so the other one cannot overtake it."""
        with self._turnstile:
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def _turn_and_rest(self) -> Iterator[None]:
        """Hold the lock for one part of a description, then pause so that requests can use the device.

        It pauses as long as requests wait for their first token because their prompts are being filled.
        """
        with self._turn():
            began = time.perf_counter()
            yield
            spent = time.perf_counter() - began
        rest_s = max(
            _RESTS * spent, _SHORTEST_REST_S
        )  # a short rest is repeated while clients wait
        while not self._describe_at_once.wait(rest_s) and self._is_awaited:
            pass

    def _describe(self, steps: Work[object], ended: Ended) -> None:
        """Describe a capture in a thread that alternates with the steps."""
        stream = WorkerStream.current(self._stack.device)

        def work() -> None:
            try:
                with stream.taken_over():
                    stored = run(self._stack, steps, self._turn_and_rest)
            except Exception as error:  # noqa: BLE001  # any: `ended` logs and counts it
                ended(None, error)
            else:
                ended(stored, None)

        self._describing.submit(work)

    # -- fillings -----------------------------------------------------------------------------------------------------

    def _round(self, acts: Sequence[tuple[Sequence[Fill], Callable[[], object]]]) -> None:
        """Call each act for its requests. If an act raises, vLLM computes its requests.

        Every exception is caught here, including bugs: inside vLLM it would end the server for all users, and if it
        were caught by a caller, these requests would wait for their blocks forever. An act that fails on one rank
        fails on all ranks, see `ranks`.
        """
        if not acts:
            return
        failed: dict[str, str] = {}
        for number, (fills, act) in enumerate(acts):
            if any(fill.request_id in failed for fill in fills):
                continue
            self._ranks.act(number)
            try:
                act()
            except RanksApartError:
                raise
            except AnotherRankFailedError:
                failed |= {fill.request_id: "" for fill in fills}
            except Exception as error:  # any: vLLM computes these requests
                logger.exception(
                    "Requests %s failed on this rank", [fill.request_id for fill in fills]
                )
                failed |= {
                    fill.request_id: f"a mistake while it was filled: {error!r}" for fill in fills
                }
        everywhere = self._ranks.settle(failed)
        for fill in {fill.request_id: fill for fills, _ in acts for fill in fills}.values():
            if fill.request_id in everywhere:
                self._leave(fill, everywhere[fill.request_id])

    def _leave(self, fill: Fill, reason: str) -> None:
        """Leave a request to vLLM, which computes the blocks that are reported as failed."""
        name = fill.request_id
        logger.warning("Request %s is computed as any other: %s", name, reason)
        if (filling := self._fillings.pop(name, None)) is not None:
            self._give_up(filling)
        self._storing.pop(name, None)  # this rank may have finished it
        first_block = fill.start // self._block_size
        self._failed_blocks.update(fill.blocks[first_block : fill.stop // self._block_size + 1])
        self._reports[name] = {"refused": reason}
        self._done.add(name)

    def _leave_all(self, new: Mapping[str, Fill], reason: str) -> None:
        self._done |= self._storing.keys()  # they are filled
        self._storing.clear()
        running = [
            filling.fill
            for filling in self._fillings.values()
            if filling.fill.request_id not in new
        ]
        for fill in [*new.values(), *running]:
            if fill.request_id not in self._done:
                self._leave(fill, reason)

    def _give_up(self, filling: Filling) -> None:
        try:
            filling.give_up()
        # whatever it is: no request waits for it, and if one rank raised, it would lose step with the others
        except Exception:
            logger.exception("Giving up request %s failed", filling.fill.request_id)

    def _leaves_adapter(self, fill: Fill) -> bool:
        """Leave a request to vLLM if its adapter cannot be used, on all ranks alike; return True if it was left."""
        if fill.adapter is None:
            return False
        assert self._adapters is not None, "vLLM has refused it without LoRA"
        reason = self._adapters.refusal(fill.adapter, _largest_part(fill))
        if reason:
            self._leave(fill, reason)
        return bool(reason)

    def _begin(self, fill: Fill) -> None:
        self._fillings[fill.request_id] = Filling(
            fill,
            stack=self._stack,
            store=self._store,
            loader=self._loader,
            speed=self._speed,
            decides_once=self._ranks.size > 1,
            longest_call_s=lambda: self._longest_call_s,
            most_rows=self._rows_of_a_pass(fill.adapter),
        )

    def _take(self, filling: Filling, act: Callable[[], object]) -> None:
        """Call `act`, and finish the filling if it is done."""
        act()
        if filling.result is not None:
            self._finish(filling)

    def _drop(self, name: str) -> None:
        if (filling := self._fillings.pop(name, None)) is not None:
            self._give_up(filling)
        elif self._storing.pop(name, None) is None:
            return
        self._done.add(name)  # vLLM keeps the blocks until it is reported

    def _group(self, idle: bool) -> list[Filling]:
        """Return the first filling that can compute, and all others that run the same layers next.

        New variants are included only if `idle`. Others join while their rows fit the reserved memory of a GPU and, in
        one call for all layers, the rows of such a call; and while all together are expected to pass the layers in
        `LONGEST_CALL_S`. Longer passes run one after the other: the first ends sooner than together, the last no later.
        """
        group: list[Filling] = []
        first: RowPass | None = None
        rows = 0
        expected_s = 0.0
        for filling in self._fillings.values():
            row_pass = filling.row_pass
            if row_pass is None or (filling.fill.ask.waits and not idle):
                continue
            joint_rows = rows + len(row_pass.positions)
            joint_s = expected_s + self._expected_s(row_pass)
            adapter = filling.fill.adapter
            if first is None:
                first = row_pass
                self._divide_if_long(row_pass)
            elif (
                not row_pass.runs_with(first)
                or adapter != group[0].fill.adapter
                or joint_rows > self._most_rows(first, adapter)
                or self._any_rank(joint_s > LONGEST_CALL_S)
            ):
                continue
            group.append(filling)
            rows = joint_rows
            expected_s = joint_s
        return group

    def _divide_if_long(self, row_pass: RowPass) -> None:
        """Run layers one by one if their call was decided on while vLLM had nothing to compute, as it has now."""
        at_once = row_pass.at_once
        if at_once is not None and self._any_rank(at_once.expected_s > self._longest_call_s):
            row_pass.divide()

    def _expected_s(self, row_pass: RowPass) -> float:
        """Return how long these rows are expected to take through all layers; 0 if no pass was measured yet."""
        if not self._speed.known:
            return 0.0
        return self._speed.seconds(self._speed.rows(row_pass.positions))

    def _most_rows(self, row_pass: RowPass, adapter: Adapter | None) -> float:
        """Return the most rows that may run together in a forward like that of this pass."""
        pass_rows = self._rows_of_a_pass(adapter)
        limits = [math.inf if pass_rows is None else pass_rows]
        if row_pass.at_once is not None and self._stack.whole_model is not None:
            limits.append(self._stack.whole_model.most_rows)
        return min(limits)

    def _rows_of_a_pass(self, adapter: Adapter | None) -> int | None:
        """Return the most rows of a pass with an adapter, or of the base model; None without a limit."""
        limits = [] if self._memory.pass_rows is None else [self._memory.pass_rows]
        if adapter is not None and self._adapters is not None:
            limits.append(self._adapters.most_rows)
        return min(limits, default=None)

    def _run_layer(self, group: list[Filling]) -> int:
        """Run the next layers of these fillings as one forward pass; return the number of rows, summed over layers."""
        self._has_run = True
        passes = [filling.row_pass for filling in group if filling.row_pass is not None]
        for filling in group:
            filling.begin_layer()
        rows = sum(len(row_pass.positions) * len(row_pass.next_layers) for row_pass in passes)

        def run() -> None:
            with self._turn():
                if self._adapters is not None:
                    self._adapters.use(
                        group[0].fill.adapter, sum(len(row_pass.positions) for row_pass in passes)
                    )
                advance(self._stack, passes)

        # if the forward pass fails, any of them may be the cause
        fills = [filling.fill for filling in group]
        ends = [
            ([filling.fill], partial(self._take, filling, filling.end_layer)) for filling in group
        ]
        self._round([(fills, run), *ends])
        return rows

    def _finish(self, filling: Filling) -> None:
        fill = filling.fill
        result = filling.end()
        positions = np.arange(fill.start, fill.stop)
        blocks = np.array(fill.blocks, np.int64)
        slots = blocks[positions // self._block_size] * self._block_size
        slots += positions % self._block_size
        self._stack.write_blocks(result.buffer.kv, sent(slots, self._stack.device), fill.start)
        captured = self._capture(filling, result)
        if self.first_rank and not fill.again and not fill.ask.idle:
            for planned in filling.plan:
                if planned.variant is not None:
                    self._store.used(
                        planned.variant.variant_id,
                        planned.recomputed_share,
                        tokens=planned.variant.tokens,
                    )
        report = filling.report()
        reason = self._layer_by_layer or (captured and self._captures_layer_by_layer)
        if reason:
            report["layer_by_layer"] = reason
        self._reports[fill.request_id] = report
        del self._fillings[fill.request_id]
        if fill.ask.when_stored:
            self._storing[fill.request_id] = captured
        else:
            self._done.add(fill.request_id)

    def _capture(self, filling: Filling, result: PrefillResult) -> frozenset[str]:
        """Submit the captures for write-back; return the segments that this rank stores.

        Chunk-caches hold all heads, so that any number of ranks can use them. The heads are gathered here, during the
        step: a collective in the thread that describes captures would mix with those of the next forward pass.
        """
        recorder = result.recorder
        keys = result.buffer.kv[:, 0]
        if isinstance(ranks := self._ranks, TensorParallel):
            captured = frozenset(capture.segment for capture in recorder.captures)
            anywhere = ranks.agree(captured)
            for segment in ranks.agree(anywhere - captured):
                recorder.forget(segment)
            if recorder.captures:
                if recorder.needs_keys:
                    keys = ranks.gather_heads(keys[:, : recorder.captures[-1].stop])
                recorder = recorder.with_all_heads(ranks.gather_heads, ranks.mean)
        if not recorder.captures:
            return frozenset()
        ask = filling.fill.ask
        adapter = filling.fill.adapter
        segments = ask.prompt.segments
        shares = exact_shares(filling.plan, [len(segment.token_ids) for segment in segments])
        extra_variants = {
            capture.segment
            for capture in recorder.captures
            if ask.idle and capture.segment not in ask.never_stored
        }
        context = CaptureContext(
            segments,
            ask.prompt.bounds,
            shares,
            ask.session,
            primed=ask.primed,
            extra_variants=extra_variants,
            reused=[planned.variant for planned in filling.plan],
            namespace=ask.namespace,
            fingerprint=None if adapter is None else adapter.fingerprint,
        )
        self._write_back.submit(recorder, keys, context)
        return frozenset(segments[capture.segment].segment_id for capture in recorder.captures)


def _largest_part(fill: Fill) -> int:
    """Return the tokens of the longest segment that no pass may divide, because it is captured; 0 without one."""
    ask = fill.ask
    if fill.again:
        return 0
    segments = ask.prompt.segments
    if ask.captures is not None:
        captured = [segments[index] for index in ask.captures]
    elif ask.config.capture:
        captured = [segment for segment in segments if segment.is_captured]
    else:
        captured = []
    return max((len(segment.token_ids) for segment in captured), default=0)
