"""The steps that the loop can compute now: which is next, and together with which others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from cachecraft_rag.compute.decode import DecodeStep
from cachecraft_rag.compute.driver import Call
from cachecraft_rag.compute.overlapped import Forward
from cachecraft_rag.serving.loop.joint_rows import JointRows
from cachecraft_rag.serving.loop.scheduling import WaitingPass, next_group, pays_to_join
from cachecraft_rag.serving.loop.task import LoopTask, Priority

T = TypeVar("T")

_PAUSE_S = 1.0  # a reader who takes longer over one piece does not stop work in idle time


class Computed(NamedTuple):
    """A task whose step was computed, with the step's result or its error."""

    task: LoopTask
    result: object
    error: BaseException | None = None


class ReadySteps:
    """Chooses and computes steps of tasks, in the loop's thread. The loop resumes the tasks.

    Args:
        tasks: all tasks of the loop, in the order of asking; the loop changes the list.
        layers: number of layers of the model.
    """

    def __init__(
        self,
        tasks: Sequence[LoopTask],
        joint: JointRows,
        *,
        layers: int,
    ) -> None:
        self._tasks = tasks
        self._joint = joint
        self._layers = layers

    def decode(self) -> list[Computed]:
        """Compute the `JointRows.most` decode steps that have waited longest, as one forward; [] without any."""
        waiting = [task for task in self._tasks if isinstance(task.step, DecodeStep)]
        waiting.sort(key=lambda task: task.since)
        chosen = waiting[: self._joint.most]
        steps = [task.step for task in chosen]
        results = self._joint.decode(steps)  # type: ignore[arg-type]
        return [
            Computed(task, None, result)
            if isinstance(result, Exception)
            else Computed(task, result)
            for task, result in zip(chosen, results, strict=False)
        ]

    def work_on_a_job(self) -> list[Computed]:
        """Compute one step of the first job that can go on; without jobs, if `is_idle`, of idle work; else []."""
        jobs = [task for task in self._tasks if task.priority is Priority.JOB]
        if not jobs and self.is_idle():
            jobs = [task for task in self._tasks if task.priority is Priority.IDLE]
        for task in jobs:
            if isinstance(task.step, Forward):
                return self._advance([task])
            if isinstance(task.step, Call):
                return [_called(task, task.step)]
        return []

    def is_idle(self) -> bool:
        """Return True if each answer, if any, has waited for its reader for more than a second."""
        now = time.perf_counter()
        return all(
            now > task.paused_at + _PAUSE_S
            for task in self._tasks
            if task.priority is Priority.ANSWER
        )

    def next_end_of_a_pause(self, now: float) -> float:
        """Return the `time.perf_counter` at which the next reader's pause stops holding up idle work, or infinity."""
        ends = [task.paused_at + _PAUSE_S for task in self._tasks]
        return min((end for end in ends if end >= now), default=math.inf)

    def prefill(self) -> list[Computed]:
        """Compute the next layer of the first answer's prefill, or the step between two of its layers.

        Where that pays, other prefills take part, or the first one waits while those at an earlier layer catch up: then
        the result has only these. [] if no answer's prefill can go on; those of jobs and idle work do not count.
        """
        ready = self._prefilling()
        if not ready:
            return []
        first = ready[0]
        if isinstance(first.step, Call):
            return [_called(first, first.step)]
        return self._advance(
            self._group([task for task in ready if isinstance(task.step, Forward)])
        )

    def would_join(self, rows: Sequence[int] | NDArray[np.int64]) -> bool:
        """Return True if a new prefill with rows at these positions pays beside those that run; False without any."""
        passes = [
            (task.step.row_pass, task.joined)
            for task in self._prefilling()
            if isinstance(task.step, Forward)
        ]
        joined_layers = [row_pass.layer for row_pass, joined in passes if row_pass is joined]
        first_layer = [row_pass.layer for row_pass, _ in passes[:1]]
        layers = joined_layers or first_layer
        if not layers:
            return False
        return pays_to_join(
            0,
            self._joint.speed.rows(rows),
            at=max(layers),
            others=len(layers),
            layers=self._layers,
            fixed_rows=self._joint.fixed_rows,
        )

    def _prefilling(self) -> list[LoopTask]:
        """Return the answers whose prompt can be computed further now."""
        return [
            task
            for task in self._tasks
            if task.priority is Priority.ANSWER and isinstance(task.step, Forward | Call)
        ]

    def _group(self, tasks: list[LoopTask]) -> list[LoopTask]:
        """Choose the prefills whose next layer is computed now; they are all before the same layer."""
        passes = [task.step.row_pass for task in tasks if isinstance(task.step, Forward)]
        if len(tasks) == 1:
            tasks[0].joined = passes[0]
            return tasks

        waiting = [
            WaitingPass(
                row_pass.layer,
                self._joint.speed.rows(row_pass.positions),
                joined=task.joined is row_pass,
            )
            for task, row_pass in zip(tasks, passes, strict=True)
        ]
        chosen, joined = next_group(waiting, layers=self._layers, fixed_rows=self._joint.fixed_rows)
        for number, task in enumerate(tasks):
            task.joined = passes[number] if number in joined else None
        return [tasks[number] for number in chosen]

    def _advance(self, tasks: Sequence[LoopTask]) -> list[Computed]:
        """Run the next layer of these; time that passes before and for others counts towards no task's speed."""
        passes = [task.step.row_pass for task in tasks if isinstance(task.step, Forward)]
        counts = [len(row_pass.positions) for row_pass in passes]
        began = time.perf_counter()
        errors = self._joint.advance(passes)
        spent = time.perf_counter() - began
        for task, rows in zip(tasks, counts, strict=True):
            if task.loads is not None:
                waited_s = began - task.since
                share_of_others = 1.0 - rows / sum(counts)
                task.loads.waited_s += waited_s + spent * share_of_others
        return [Computed(task, True, error) for task, error in zip(tasks, errors, strict=True)]


def _called(task: LoopTask, step: Call) -> Computed:
    return Computed(task, *outcome(partial(task.context.run, step.function)))


def outcome(function: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Return a function's result and None, or None and its error."""
    try:
        return function(), None
    except BaseException as error:  # noqa: BLE001  # raised in the steps of this task alone
        return None, error
