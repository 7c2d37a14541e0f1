"""Drives a prefill's steps where one request computes at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from cachecraft_rag.compute.job import PrefillJob, PrefillResult
from cachecraft_rag.compute.overlapped import OverlappedPrefill, Step, Steps, Wait
from cachecraft_rag.compute.row_pass import advance
from cachecraft_rag.compute.speed import ComputeSpeed
from cachecraft_rag.compute.stack import Stack
from cachecraft_rag.store.loading.pending import PendingLoads


def run(stack: Stack, steps: Steps, take_lock: Callable[[], AbstractContextManager[object]]) -> PrefillResult:
    """Take the steps one after the other; a lock is held for each pass, and never while waiting between passes."""
    came = False
    try:
        step = next(steps)
        while True:
            came = _perform(stack, step)
            with take_lock():
                step = steps.send(came)
                while not isinstance(step, Wait) or step.in_pass:
                    step = steps.send(_perform(stack, step))
    except StopIteration as end:
        result: PrefillResult = end.value
        return result
    finally:
        steps.close()


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
