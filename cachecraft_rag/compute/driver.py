"""Drives a prefill's steps where one request computes at a time, and work in the background layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from cachecraft_rag.compute.job import PrefillJob, PrefillResult
from cachecraft_rag.compute.overlapped import OverlappedPrefill, Step, Steps, Wait
from cachecraft_rag.compute.row_pass import advance
from cachecraft_rag.compute.speed import ComputeSpeed
from cachecraft_rag.compute.stack import Stack
from cachecraft_rag.store.loading.pending import PendingLoads

_LOOK_S = 0.2  # how often work in the background looks whether it is to go on while it waits


def run(
    stack: Stack,
    steps: Steps,
    take_lock: Callable[[], AbstractContextManager[object]],
    *,
    give_way: Callable[[], object] | None = None,
) -> PrefillResult:
    """Take the steps one after the other; a lock is held for each pass, and never while waiting between passes.

    Args:
        give_way: called when it has to wait between passes.
    """

    def turn(step: Step) -> Step:
        at_once = give_way is not None and isinstance(step, Wait) and step.loads.wait(step.ready, 0.0)
        if give_way is not None and not at_once:
            give_way()
        came = at_once or _perform(stack, step)
        with take_lock():
            step = steps.send(came)
            while not isinstance(step, Wait) or step.in_pass:
                step = steps.send(_perform(stack, step))
        return step

    return _result(steps, turn)


def run_by_layer(
    stack: Stack, steps: Steps, take_turn: Callable[[], AbstractContextManager[object]], *, go_on: Callable[[], object]
) -> PrefillResult:
    """As `run`, for work in the background: a turn is taken for each layer, so others wait for one layer at most.

    Args:
        take_turn: waits until this work may go on, and keeps others out meanwhile.
        go_on: called while it waits for what is being loaded; what this or `take_turn` raises ends the prefill.
    """

    def turn(step: Step) -> Step:
        if isinstance(step, Wait):
            came = _wait(step, go_on)
            with take_turn():
                return steps.send(came)
        with take_turn():
            return steps.send(_perform(stack, step))

    return _result(steps, turn)


def _result(steps: Steps, turn: Callable[[Step], Step]) -> PrefillResult:
    """What the steps come to; `turn` does one, or several, and returns the next."""
    try:
        step = next(steps)
        while True:
            step = turn(step)
    except StopIteration as end:
        result: PrefillResult = end.value
        return result
    finally:
        steps.close()


def _wait(step: Wait, go_on: Callable[[], object]) -> bool:
    """Wait in short pieces, because what is awaited may never come."""
    left = math.inf if step.timeout_s is None else step.timeout_s
    while not (came := step.loads.wait(step.ready, min(left, _LOOK_S))) and (left := left - _LOOK_S) > 0.0:
        go_on()
    return came


def _perform(stack: Stack, step: Step) -> bool:
    if isinstance(step, Wait):
        return step.loads.wait(step.ready, step.timeout_s)
    advance(stack, [step.row_pass])
    return True


def prefill(stack: Stack, job: PrefillJob) -> PrefillResult:
    """Run a job that has everything at hand."""
    nothing = PendingLoads.of_nothing(stack.layout.layers)
    speed = ComputeSpeed(stack.keys_per_row)
    return run(stack, OverlappedPrefill(stack, job, nothing, speed).steps(), nullcontext)
