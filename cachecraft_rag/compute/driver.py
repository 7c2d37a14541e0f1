"""Steps of work on the model, and the simplest driver: one step after the other, in the caller's thread.

A generator yields steps and receives their results. Steps are `Wait` and `Forward` of a prefill, `DecodeStep` of an
answer, `Until`, `Call`, and a `Future` for the work of other threads. `serving.loop.step_loop` drives many generators
at once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from cachecraft_rag.compute.balance.speed import ComputeSpeed
from cachecraft_rag.compute.decode import DecodeStep
from cachecraft_rag.compute.job import PrefillJob, PrefillResult
from cachecraft_rag.compute.overlapped import Forward, OverlappedPrefill, Wait
from cachecraft_rag.compute.row_pass import advance
from cachecraft_rag.compute.stack import Stack
from cachecraft_rag.store.loading.pending import PendingLoads

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """Call `function`, which computes on the model's device, and send back its result."""

    function: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Until:
    """Continue when `ready()` is true or after `timeout_s`; send back True if it is ready.

    ready       condition to wait for
    timeout_s   longest wait in seconds; None = no limit
    for_reader  True if it waits until the reader of an answer takes a piece
    """

    ready: Callable[[], bool]
    timeout_s: float | None = None
    for_reader: bool = False


AnyStep = Wait | Forward | DecodeStep | Until | Call | Future[Any]
Work = Generator[AnyStep, Any, T]


def run(
    stack: Stack,
    steps: Work[T],
    turn: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> T:
    """Run the steps of a prefill or of a capture in this thread, and return the result of the generator.

    Blocks in each `Wait` up to its `timeout_s`, and in each `Future` without limit. The generator receives a step's
    result, but not its error: then it is closed, and the error is raised here. `turn` makes the context of each
    `Forward` or `Call`.
    """
    outcome: object = None
    try:
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as end:
                result: T = end.value
                return result
            if isinstance(step, Wait):
                outcome = step.loads.wait(step.ready, step.timeout_s)
            elif isinstance(step, Future):
                outcome = step.result()
            elif isinstance(step, Call):
                with turn():
                    outcome = step.function()
            else:
                assert isinstance(step, Forward), "prefills and captures have no other steps"
                with turn():
                    outcome = advance(stack, [step.row_pass])
    finally:
        steps.close()


def prefill(stack: Stack, job: PrefillJob) -> PrefillResult:
    """Run a job in this thread; its result's buffer is new, to decode in. Nothing is loaded: `job.stored` is empty."""
    return run(stack, prefill_steps(stack, job))


def prefill_steps(stack: Stack, job: PrefillJob) -> Work[PrefillResult]:
    """Return the steps of a job without `stored` chunk-caches; its buffer is made at once."""
    no_loads = PendingLoads.of_nothing(stack.layout.layers)
    speed = ComputeSpeed(stack.keys_per_row)
    return OverlappedPrefill(stack, job, no_loads, speed).steps()
