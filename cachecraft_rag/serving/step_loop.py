"""The step loop: one thread that owns the model and holds everything that runs on it.

Work is a generator of steps (`compute.driver`). In each turn the loop computes the decode steps of all answers as one
forward, one step of a job, and layers of prefills. Whoever waits, for a disk, another thread or its reader, is passed
over; where all wait, the loop sleeps until something is put into its inbox. All its state belongs to its thread.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from cachecraft_rag.compute.captures.write_back import Ended
from cachecraft_rag.compute.decode import DecodeStep
from cachecraft_rag.compute.driver import AnyStep, Call, Until, Work
from cachecraft_rag.compute.overlapped import Forward, Wait
from cachecraft_rag.compute.row_pass import RowPass
from cachecraft_rag.compute.timing import Timer, untimed
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.serving.joint_rows import JointRows
from cachecraft_rag.serving.scheduling import WaitingPass, next_group, pays_to_join
from cachecraft_rag.store.loading.pending import PendingLoads

logger = logging.getLogger("cachecraft_rag")
T = TypeVar("T")

# While answers are decoded, prefills take this many times as long as the decode steps between them.
_PREFILL_SHARE = 8.0
_PAUSE_S = 1.0  # a reader who takes longer over one piece does not stop work in idle time


class Level(IntEnum):
    """When work runs.

    ANSWER  in every turn: decode steps as one forward, prefills in the order of asking
    JOB     one step in each turn: captures and priming
    IDLE    while nobody is being answered, and no job waits
    """

    ANSWER = 0
    JOB = 1
    IDLE = 2


class Handle:
    """Held by whoever wants the result of some work, which ends early once this is closed or gone."""

    __slots__ = ("__weakref__", "closed")

    def __init__(self) -> None:
        self.closed = False


@dataclass(eq=False)
class Run:
    """Work in the loop.

    make     makes the generator of its steps
    ended    called in the loop with the result and the error, unless the run was closed early
    handle   of whoever wants the result; None: nobody can give it up
    context  context variables of whoever began it
    step     what it waits for
    since    when it came to that step
    loads    of its prefill
    load_s   seconds that it waited for them
    joined   its pass that runs with that of the first prefill
    """

    make: Callable[[Run], Work[Any]]
    ended: Ended
    level: Level
    handle: weakref.ref[Handle] | None = None
    context: Context = field(default_factory=copy_context)
    steps: Work[Any] = field(init=False)
    step: AnyStep | None = None
    since: float = 0.0
    loads: PendingLoads | None = None
    load_s: float = 0.0
    joined: RowPass | None = None
    closed: bool = False

    @property
    def given_up(self) -> bool:
        """Nobody wants the result any more."""
        handle = None if self.handle is None else self.handle()
        return self.closed or (self.handle is not None and (handle is None or handle.closed))

    @property
    def paused_at(self) -> float:
        """Since when it waits for its reader; infinite if it does not."""
        return self.since if isinstance(self.step, Until) and self.step.for_reader else math.inf


class StepLoop:
    """Runs the work that is handed to it; any thread may call any method, finalisers `wake` and `call_soon` only.

    Attributes:
        joint: computes for several requests at once.
        timer: of the parts of prefills.
    """

    def __init__(self, decoder: Decoder, joint: JointRows) -> None:
        self.joint = joint
        self.timer: Timer = untimed
        self._decoder, self._layers = decoder, decoder.layout.layers
        self._inbox: SimpleQueue[Callable[[], object] | None] = SimpleQueue()  # its `put` is reentrant
        self._runs: list[Run] = []  # in the order of asking
        self._watchers: dict[threading.Event, Callable[[], bool]] = {}
        self._guard = threading.RLock()  # of what follows
        self._thread: threading.Thread | None = None
        self._closing = False
        # They look up and plan: for the request that has its turn, and for the next.
        self._planners = ThreadPoolExecutor(2, thread_name_prefix="cachecraft-plans")

    # -- for other threads --------------------------------------------------------------------------------------------

    def start(self, run: Run) -> None:
        """Begin some work."""
        self._send(partial(self._begin, run))

    def run(self, make: Callable[[Run], Work[T]], level: Level = Level.JOB) -> T:
        """Carry out some work and return its result; an interruption of the wait gives the work up."""
        results: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        handle = Handle()
        try:
            self.start(Run(make, lambda *result: results.put(result), level, self.watched(handle)))
            result, error = results.get()
        finally:
            handle.closed = True
            self.wake()
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def watched(self, handle: Handle) -> weakref.ref[Handle]:
        """A reference for `Run.handle`; the loop notices when the handle goes."""
        inbox = self._inbox
        return weakref.ref(handle, lambda _: inbox.put(None))

    def call(self, function: Callable[[], T]) -> T:
        """Call a function in the loop's thread, between two steps."""
        if threading.current_thread() is self._thread:
            return function()
        with self._guard:
            if self._thread is None:  # nor does one begin meanwhile
                return function()
        done: Future[T] = Future()
        self._send(partial(_fulfil, done, function))
        return done.result()

    def call_soon(self, function: Callable[[], object]) -> None:
        """Have a function called in the loop's thread, if there is one still. Takes no lock."""
        self._inbox.put(function)

    def aside(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call a function in another thread, with this one's context variables."""
        call = partial(copy_context().run, function, *arguments)
        try:
            return self._planners.submit(call)
        except RuntimeError:  # how an executor says that it, or the interpreter, is shutting down
            done: Future[Any] = Future()
            _fulfil(done, call)
            return done

    @property
    def alive(self) -> bool:
        """True while the thread runs."""
        return self._thread is not None

    def wake(self) -> None:
        """Have the loop look whether something that it waits for has come. Takes no lock."""
        self._inbox.put(None)

    def wait_until(self, holds: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until something holds in the loop, where it is looked at between turns."""
        event = threading.Event()
        try:
            self._send(partial(self._watchers.__setitem__, event, holds))
            return event.wait(timeout)
        finally:
            self.call_soon(lambda: self._watchers.pop(event, None))

    def under_way(self, level: Level) -> bool:
        """Return whether work of a level is under way; exact in the loop's thread."""
        return any(run.level is level for run in self._runs)

    def would_join(self, rows: Sequence[int] | NDArray[np.int64]) -> bool:
        """Return whether a new prefill of rows at these positions pays beside those that run; for the loop's thread."""
        passes = [(one.step.row_pass, one.joined) for one in self._prefilling() if isinstance(one.step, Forward)]
        running = [one.layer for one, joined in passes if one is joined]
        layers, speed = running or [one.layer for one, _ in passes[:1]], self.joint.speed
        return bool(layers) and pays_to_join(
            0, speed.rows(rows), at=max(layers), others=len(layers), layers=self._layers,
            fixed_rows=self.joint.fixed_rows,
        )  # fmt: skip

    def close(self) -> None:
        """Finish the jobs and end the thread; it lives on while answers are read."""
        if self._thread is not None and not self.call(self._close):
            self._join()
        self._planners.shutdown(wait=False)

    def end(self) -> None:
        """End the thread soon, without waiting: the engine is gone. Takes no lock."""
        self._inbox.put(self._close)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _send(self, message: Callable[[], object]) -> None:
        with self._guard:
            self._inbox.put(message)
            if self._thread is None:  # it enters itself: an interruption here may come before or after it starts
                threading.Thread(target=self._work, name="cachecraft-steps", daemon=True).start()

    def _close(self) -> bool:
        """Let the thread end with its last run; returns whether an answer is under way."""
        self._closing = True
        return self.under_way(Level.ANSWER)

    def _join(self) -> None:
        if (thread := self._thread) is not None:
            thread.join()

    def _at_exit(self, pid: int) -> None:
        """Finish the captures: a thread that computes while the interpreter is taken down may crash it."""
        if os.getpid() == pid:
            self._inbox.put(self._give_up_answers)
            self._join()

    def _give_up_answers(self) -> None:
        self._closing = True
        for run in self._runs:
            run.closed |= run.level is not Level.JOB

    def _work(self) -> None:
        with self._guard:
            if self._thread is not None:  # the start of this one was interrupted, and another one began
                return
            self._thread, self._closing = threading.current_thread(), False
            atexit.register(self._at_exit, os.getpid())
        if self._decoder.device.type == "cuda":
            torch.cuda.set_device(self._decoder.device)
        torch.get_num_threads()  # a thread takes over the number that was set when it first asks
        while True:
            try:
                self._turn()
            except BaseException as error:  # a mistake of ours: whoever waits must not wait for ever
                logger.exception("A turn of the step loop failed")
                for run in list(self._runs):
                    self._give_up(run, error)
            with self._guard:
                if self._closing and not self._runs and self._inbox.empty():
                    self._thread = None
                    atexit.unregister(self._at_exit)
                    return

    def _turn(self) -> None:
        """Compute what can be computed now, or sleep until something changes."""
        self._take_messages(wait=False)
        self._go_on_all()
        began = time.perf_counter()
        worked = self._decode()
        worked |= self._work_on_a_job()
        until = began + (1.0 + _PREFILL_SHARE) * (time.perf_counter() - began) if worked else math.inf
        worked |= self._prefill(until)
        for event, holds in self._watchers.items():
            if holds():
                event.set()
        if not worked and not (self._closing and not self._runs):
            self._take_messages(wait=True)

    def _take_messages(self, *, wait: bool) -> None:
        timeout = self._sleep_s() if wait else 0.0
        try:
            while True:
                message = self._inbox.get(wait, None if math.isinf(timeout) else timeout)
                wait, timeout = False, 0.0
                if message is not None:
                    try:
                        message()
                    except Exception:  # a mistake of ours in one message must not end the others' work
                        logger.exception("A message to the step loop has failed")
                    del message  # or an idle thread would keep its tensors alive
        except Empty:
            return

    def _sleep_s(self) -> float:
        """Seconds until something happens by itself."""
        now, wakes = time.perf_counter(), [math.inf]
        for run in self._runs:
            if isinstance(run.step, Wait | Until) and run.step.timeout_s is not None:
                wakes.append(run.since + run.step.timeout_s)
        if self.under_way(Level.IDLE) and not self._idle():
            wakes += [one.paused_at + _PAUSE_S for one in self._runs]
        return max(0.0, min(wakes) - now)

    def _begin(self, run: Run) -> None:
        self._runs.append(run)
        run.closed |= self._closing and run.level is Level.IDLE
        run.steps = run.make(run)
        self._go_on(run, None)

    def _go_on(self, run: Run, came: Any, error: BaseException | None = None) -> None:
        """Send a run what came of its step, and take its next one."""
        try:
            send = partial(run.steps.send, came) if error is None else partial(run.steps.throw, error)
            run.step = run.context.run(send)
        except StopIteration as end:
            self._end(run, end.value, None)
        except BaseException as raised:  # noqa: BLE001  # of this run alone
            self._end(run, None, raised)
        else:
            run.since = time.perf_counter()
            if isinstance(run.step, Wait):
                run.loads, run.step.loads.on_change = run.step.loads, self.wake
            elif isinstance(run.step, Future):
                run.step.add_done_callback(lambda _: self.wake())

    def _end(self, run: Run, result: Any, error: BaseException | None) -> None:
        self._runs.remove(run)
        run.step = None
        try:
            run.ended(result, error)
        except Exception:  # a mistake of ours in one run must not end the others
            logger.exception("What followed from the end of some work has failed")

    def _give_up(self, run: Run, error: BaseException | None) -> None:
        try:
            run.context.run(run.steps.close)
        except Exception:  # nobody waits for what it does
            logger.exception("Work that was given up has failed")
        self._end(run, None, error)

    def _go_on_all(self) -> None:
        """Close what nobody wants any more, and let go on whoever need not wait any longer."""
        moved = True
        while moved:
            moved = False
            for run in list(self._runs):
                moved |= self._look_at(run)

    def _look_at(self, run: Run) -> bool:
        """Return whether a run has gone on, or was closed."""
        step = run.step
        if isinstance(step, Future):  # its result may hold files: only the run itself lets go of it
            if step.done():
                found, error = _outcome(step.result)
                self._go_on(run, found, error)
            return step.done()
        if run.given_up:
            self._give_up(run, None)
            return True
        if isinstance(step, Wait | Until):
            came, passed = step.ready(), time.perf_counter() - run.since
            if came or (step.timeout_s is not None and passed >= step.timeout_s):
                if isinstance(step, Wait):
                    step.loads.waited_s += passed
                    run.load_s += passed
                self._go_on(run, came)
                return True
        return False

    # -- computing ----------------------------------------------------------------------------------------------------

    def _decode(self) -> bool:
        """Compute the decode steps that wait longest, as one forward."""
        waiting = sorted((one for one in self._runs if isinstance(one.step, DecodeStep)), key=lambda one: one.since)
        chosen = waiting[: self.joint.most]
        for run, found in zip(chosen, self.joint.decode([one.step for one in chosen]), strict=False):  # type: ignore[misc]
            if isinstance(found, Exception):
                self._go_on(run, None, found)
            else:
                self._go_on(run, found)
        return bool(chosen)

    def _work_on_a_job(self) -> bool:
        """Compute one step of the first job, or of what runs in idle time."""
        jobs = [one for one in self._runs if one.level is Level.JOB]
        if not jobs and self._idle():
            jobs = [one for one in self._runs if one.level is Level.IDLE]
        for run in jobs:
            if isinstance(run.step, Forward):
                self._advance([run])
                return True
            if isinstance(run.step, Call):
                self._call(run)
                return True
        return False

    def _idle(self) -> bool:
        """Return whether the model works for nobody, and no reader is about to ask for the next piece."""
        now = time.perf_counter()
        return all(now - one.paused_at > _PAUSE_S for one in self._runs if one.level is Level.ANSWER)

    def _prefill(self, until: float) -> bool:
        """Run layers of prefills, as those go on that wait meanwhile."""
        worked = False
        while ready := self._prefilling():
            worked = True
            if isinstance(ready[0].step, Call):
                self._call(ready[0])
            else:
                self._advance(self._group([one for one in ready if isinstance(one.step, Forward)]))
            if time.perf_counter() >= until:
                break
            self._take_messages(wait=False)
            self._go_on_all()
            if any(one.level is not Level.IDLE and isinstance(one.step, DecodeStep) for one in self._runs) and (
                math.isinf(until)
            ):
                break  # an answer was begun: it takes its turns
        return worked

    def _prefilling(self) -> list[Run]:
        """Answers whose prompt can be computed further now."""
        return [one for one in self._runs if one.level is Level.ANSWER and isinstance(one.step, Forward | Call)]

    def _group(self, runs: list[Run]) -> list[Run]:
        """Choose the prefills whose next layer is computed now; they stand before the same one."""
        passes = [one.step.row_pass for one in runs if isinstance(one.step, Forward)]
        if len(runs) == 1:
            runs[0].joined = passes[0]
            return runs
        waiting = [
            WaitingPass(one.layer, self.joint.speed.rows(one.positions), joined=run.joined is one)
            for run, one in zip(runs, passes, strict=True)
        ]
        chosen, joined = next_group(waiting, layers=self._layers, fixed_rows=self.joint.fixed_rows)
        for number, run in enumerate(runs):
            run.joined = passes[number] if number in joined else None
        return [runs[number] for number in chosen]

    def _advance(self, runs: Sequence[Run]) -> None:
        """Run the next layer of these; what passes meanwhile and before is no part of the speed of any of them."""
        passes = [one.step.row_pass for one in runs if isinstance(one.step, Forward)]
        counts = [len(one.positions) for one in passes]
        began = time.perf_counter()
        errors = self.joint.advance(passes)
        spent = time.perf_counter() - began
        for run, rows, error in zip(runs, counts, errors, strict=True):
            if run.loads is not None:
                run.loads.waited_s += began - run.since + spent * (1.0 - rows / sum(counts))
            self._go_on(run, True, error)

    def _call(self, run: Run) -> None:
        assert isinstance(run.step, Call)
        found, error = _outcome(partial(run.context.run, run.step.function))
        self._go_on(run, found, error)


def _outcome(function: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """The result of a function, or its error."""
    try:
        return function(), None
    except BaseException as error:  # noqa: BLE001  # of one run alone
        return None, error


def _fulfil(done: Future[T], function: Callable[[], T]) -> None:
    try:
        done.set_result(function())
    except BaseException as error:  # noqa: BLE001  # raised where it is waited for
        done.set_exception(error)
