"""The step loop: one thread that owns the model and runs all work on it.

Work is a generator of steps (`compute.driver`). In each turn the loop computes the decode steps of several answers as
one forward, one step of a job, and layers of prefills. Work that waits for a disk, another thread or its reader is
passed over; if all work waits, the loop sleeps until a message arrives in its inbox. All its state belongs to its
thread.
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
from contextvars import copy_context
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, TypeVarTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cachecraft_rag.compute.decode import DecodeStep
from cachecraft_rag.compute.driver import Until, Work
from cachecraft_rag.compute.overlapped import Wait
from cachecraft_rag.compute.timing import Timer, untimed
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.serving.loop.joint_rows import JointRows
from cachecraft_rag.serving.loop.ready_steps import Computed, ReadySteps, outcome
from cachecraft_rag.serving.loop.task import Handle, LoopTask, Priority

logger = logging.getLogger("cachecraft_rag")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_PREFILL_SHARE = 8.0  # prefill-to-decode time ratio while answers stream


class StepLoop:
    """Runs the work that is handed to it, in one thread.

    Any thread may call any method, except where a method says otherwise. Finalisers may call `wake`, `call_soon` and
    `end` only.

    Attributes:
        joint: computes for several requests at once.
        timer: times the parts of prefills.
    """

    def __init__(self, decoder: Decoder, joint: JointRows) -> None:
        self.joint = joint
        self.timer: Timer = untimed
        self._decoder = decoder
        # its `put` is reentrant
        self._inbox: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._tasks: list[LoopTask] = []  # in the order of asking
        self._ready = ReadySteps(self._tasks, joint, layers=decoder.layout.layers)
        self._watchers: dict[threading.Event, Callable[[], bool]] = {}

        self._guard = threading.RLock()  # guards the two attributes that follow
        self._thread: threading.Thread | None = None
        self._closing = False

        # Two threads look up and plan: for the request that has its turn, and for the next.
        self._planners = ThreadPoolExecutor(2, thread_name_prefix="cachecraft-plans")

    # -- for other threads --------------------------------------------------------------------------------------------

    def start(self, task: LoopTask) -> None:
        """Begin some work and return at once; its outcome goes to `LoopTask.ended`."""
        self._send(partial(self._begin, task))

    def run(self, make: Callable[[LoopTask], Work[T]], priority: Priority = Priority.JOB) -> T:
        """Carry out some work, wait for it, and return its result, or raise its error.

        An interruption of the wait gives the work up. Returns None if the work was given up: by the interpreter's exit,
        unless it is a job, or by `close`, if it is work in idle time. Never returns in the loop's own thread.
        """
        results: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        handle = Handle()
        try:
            task = LoopTask(
                make, lambda *result: results.put(result), priority, self.watched(handle)
            )
            self.start(task)
            result, error = results.get()
        finally:
            handle.closed = True
            self.wake()
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def watched(self, handle: Handle) -> weakref.ref[Handle]:
        """Return a weak reference for `LoopTask.handle`; it wakes the loop when the handle is garbage-collected."""
        inbox = self._inbox
        return weakref.ref(handle, lambda _: inbox.put(None))

    def call(self, function: Callable[[], T]) -> T:
        """Call a function in the loop's thread, between two steps; wait, and return its result or raise its error.

        In the loop's own thread it is called at once, and without a running thread in the caller's.
        """
        if threading.current_thread() is self._thread:
            return function()
        with self._guard:
            # And none can begin while the guard is held.
            if self._thread is None:
                return function()
        done: Future[T] = Future()
        self._send(partial(_fulfil, done, function))
        return done.result()

    def call_soon(self, function: Callable[[], object]) -> None:
        """Have a function called in the loop's thread, once one runs; takes no lock. Its error is logged."""
        self._inbox.put(function)

    def aside(self, function: Callable[[*Ts], T], *arguments: *Ts) -> Future[T]:
        """Call a function in another thread, with the context variables of this one; return a future at once.

        Two functions run at a time, and others wait. After `close` the function is called in the caller's thread.
        """
        call = partial(copy_context().run, function, *arguments)
        try:
            return self._planners.submit(call)
        except RuntimeError:  # the executor or the interpreter is shutting down
            done: Future[T] = Future()
            _fulfil(done, call)
            return done

    @property
    def alive(self) -> bool:
        """True while the loop's thread runs: from the first work or `wait_until` to its end after `close` or `end`."""
        return self._thread is not None

    def wake(self) -> None:
        """Have the loop check its waiting tasks, without waiting for it. Takes no lock."""
        self._inbox.put(None)

    def wait_until(self, holds: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `holds()` is true; False after `timeout` seconds (None: no limit). Not for the loop's own thread.

        The loop's thread checks it after each turn, so what makes it true elsewhere must `wake` the loop. It must be
        quick, and must not raise.
        """
        event = threading.Event()
        try:
            self._send(partial(self._watchers.__setitem__, event, holds))
            return event.wait(timeout)
        finally:
            self.call_soon(lambda: self._watchers.pop(event, None))

    def wait_for_given_up(self) -> None:
        """Wait until work given up so far, such as closed answers, has ended; in the loop's own thread do nothing."""
        if self.alive and threading.current_thread() is not self._thread:
            self.wait_until(lambda: not any(task.given_up for task in self._tasks))

    def under_way(self, priority: Priority) -> bool:
        """Return True if the loop has taken up, and not ended, work of this priority; in other threads a moment old."""
        return any(task.priority is priority for task in self._tasks)

    def would_join(self, rows: Sequence[int] | NDArray[np.int64]) -> bool:
        """Return True if a new prefill with rows at these positions pays beside those that run.

        False if none of them is before a layer. For the loop's thread only.
        """
        return self._ready.would_join(rows)

    def close(self) -> None:
        """Finish the jobs and end the thread; while answers are read it lives on, and is not waited for.

        Otherwise waits, without limit, for jobs and for work in idle time under way; not for the loop's own thread.
        While the thread lives on, new work in idle time is given up; once it has ended, new work starts another thread.
        """
        answers_under_way = False
        if self._thread is not None:
            answers_under_way = self.call(self._close)
            if not answers_under_way:
                self._join()
        self._planners.shutdown(wait=not answers_under_way)

    def end(self) -> None:
        """End the thread after its last task, without waits or locks: the engine is gone. New work as after `close`."""
        self._inbox.put(self._close)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _send(self, message: Callable[[], object]) -> None:
        with self._guard:
            if self._thread is None:
                # The thread sets `_thread` itself, because an interruption here may fall before or after its start. It
                # is started first: if the system has no room for it, the message must not wait for a later thread.
                threading.Thread(target=self._work, name="cachecraft-steps", daemon=True).start()
            self._inbox.put(message)

    def _close(self) -> bool:
        """Let the thread end with its last task; returns whether an answer is under way."""
        self._closing = True
        return self.under_way(Priority.ANSWER)

    def _join(self) -> None:
        thread = self._thread
        if thread is not None:
            thread.join()

    def _at_exit(self, pid: int) -> None:
        """Finish the captures: a thread that computes while the interpreter is taken down may crash it."""
        if os.getpid() == pid:
            self._inbox.put(self._give_up_answers)
            self._join()

    def _give_up_answers(self) -> None:
        self._closing = True
        for task in self._tasks:
            task.closed |= task.priority is not Priority.JOB

    def _work(self) -> None:
        with self._guard:
            # the start of this thread was interrupted, and a second one has begun
            if self._thread is not None:
                return
            self._thread = threading.current_thread()
            self._closing = False
            atexit.register(self._at_exit, os.getpid())

        if self._decoder.device.type == "cuda":
            torch.cuda.set_device(self._decoder.device)
        torch.get_num_threads()  # a thread takes over the number that was set when it first asks
        while True:
            try:
                self._turn()
            except BaseException as error:  # a mistake of ours: callers must not wait for ever
                logger.exception("A turn of the step loop failed")
                for task in list(self._tasks):
                    self._give_up(task, error)
            with self._guard:
                if self._closing and not self._tasks and self._inbox.empty():
                    self._thread = None
                    atexit.unregister(self._at_exit)
                    return

    def _turn(self) -> None:
        """Compute what can be computed now, or sleep until something changes."""
        self._take_messages(wait=False)
        self._resume_all()

        began = time.perf_counter()
        worked = self._resume_with(self._ready.decode())
        worked |= self._resume_with(self._ready.work_on_a_job())
        prefill_until = math.inf
        if worked:
            spent = time.perf_counter() - began
            prefill_until = began + (1.0 + _PREFILL_SHARE) * spent
        worked |= self._prefill(prefill_until)

        for event, holds in self._watchers.items():
            if holds():
                event.set()
        has_ended = self._closing and not self._tasks
        if not worked and not has_ended:
            self._take_messages(wait=True)

    def _take_messages(self, *, wait: bool) -> None:
        timeout = self._sleep_s() if wait else 0.0
        try:
            while True:
                message = self._inbox.get(wait, None if math.isinf(timeout) else timeout)
                wait = False
                timeout = 0.0
                if message is not None:
                    try:
                        message()
                    # a mistake of ours in one message must not end the others' work
                    except Exception:
                        logger.exception("A message to the step loop has failed")
                    del message  # or an idle thread would keep its tensors alive
        except Empty:
            return

    def _sleep_s(self) -> float:
        """Return the seconds until the next timeout; infinite if no task has one."""
        now = time.perf_counter()
        wakes = [math.inf]
        for task in self._tasks:
            if isinstance(task.step, Wait | Until) and task.step.timeout_s is not None:
                wakes.append(task.since + task.step.timeout_s)
        if self.under_way(Priority.IDLE) and not self._ready.is_idle():
            # Pauses that are over do not wake it: it waits for those of the other answers.
            wakes.append(self._ready.next_end_of_a_pause(now))
        return max(0.0, min(wakes) - now)

    def _begin(self, task: LoopTask) -> None:
        self._tasks.append(task)
        task.closed |= self._closing and task.priority is Priority.IDLE
        try:
            task.steps = task.make(task)
        except Exception as raised:  # noqa: BLE001  # handed to this task's caller; the others go on
            self._end(task, None, raised)
        else:
            self._resume(task, None)

    def _resume(self, task: LoopTask, result: object, error: BaseException | None = None) -> None:
        """Send a task the result of its step, or the error, and take its next step."""
        try:
            if error is None:
                task.step = task.context.run(task.steps.send, result)
            else:
                task.step = task.context.run(task.steps.throw, error)
        except StopIteration as end:
            self._end(task, end.value, None)
        except BaseException as raised:  # noqa: BLE001  # handed to this task's caller; the others go on
            self._end(task, None, raised)
        else:
            task.since = time.perf_counter()
            if isinstance(task.step, Wait):
                task.loads = task.step.loads
                task.loads.on_change = self.wake
            elif isinstance(task.step, Future):
                task.step.add_done_callback(lambda _: self.wake())

    def _resume_with(self, computed: Sequence[Computed]) -> bool:
        """Resume these tasks; return False if there are none."""
        for task, result, error in computed:
            self._resume(task, result, error)
        return bool(computed)

    def _end(self, task: LoopTask, result: object, error: BaseException | None) -> None:
        self._tasks.remove(task)
        task.step = None
        try:
            task.ended(result, error)
        except Exception:  # a mistake of ours in one task must not end the others
            logger.exception("What followed from the end of some work has failed")

    def _give_up(self, task: LoopTask, error: BaseException | None) -> None:
        try:
            task.context.run(task.steps.close)
        except Exception:  # its result is not wanted any more, and the others go on
            logger.exception("Work that was given up has failed")
        self._end(task, None, error)

    def _resume_all(self) -> None:
        """Close tasks that were given up, and resume all that need not wait any longer."""
        moved = True
        while moved:
            moved = False
            for task in list(self._tasks):
                moved |= self._check(task)

    def _check(self, task: LoopTask) -> bool:
        """Resume a task if it need not wait, or close it if it was given up; returns whether either happened."""
        step = task.step
        if isinstance(step, Future):  # its result may hold files: only the task itself releases it
            if step.done():
                result, error = outcome(step.result)
                self._resume(task, result, error)
            return step.done()

        if task.given_up:
            self._give_up(task, None)
            return True

        if isinstance(step, Wait | Until):
            is_ready = step.ready()
            passed = time.perf_counter() - task.since
            is_timed_out = step.timeout_s is not None and passed >= step.timeout_s
            if is_ready or is_timed_out:
                if isinstance(step, Wait):
                    step.loads.waited_s += passed
                    task.load_s += passed
                self._resume(task, is_ready)
                return True
        return False

    def _prefill(self, until: float) -> bool:
        """Run layers of prefills up to a time, and resume others meanwhile; returns whether there were any."""
        worked = False
        while self._resume_with(self._ready.prefill()):
            worked = True
            if time.perf_counter() >= until:
                break

            self._take_messages(wait=False)
            self._resume_all()
            is_unlimited = math.isinf(until)
            if is_unlimited and any(
                task.priority is not Priority.IDLE and isinstance(task.step, DecodeStep)
                for task in self._tasks
            ):
                break  # an answer has begun: it takes its turns
        return worked


def _fulfil(done: Future[T], function: Callable[[], T]) -> None:
    try:
        done.set_result(function())
    except BaseException as error:  # noqa: BLE001  # raised in the thread that waits for the result
        done.set_exception(error)
