"""Steps of work on the model, and the simplest driver of them: one after the other, in the caller's thread.

A generator yields its steps and is sent their results: `Wait` and `Forward` of a prefill, `DecodeStep` of an answer,
`Until`, `Call`, and a `Future` for what other threads do. `serving.step_loop` drives many such generators at once.
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
    """Call `function`, which computes on the model's device; send back what it returns."""

    function: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Until:
    """Go on once `ready()`, or after `timeout_s` (None = never); send back whether it is.

    for_reader  it waits until the reader of an answer takes a piece
    """

    ready: Callable[[], bool]
    timeout_s: float | None = None
    for_reader: bool = False


AnyStep = Wait | Forward | DecodeStep | Until | Call | Future[Any]
Work = Generator[Any, Any, T]  # of `AnyStep`


def run(
    stack: Stack, steps: Generator[Any, Any, T], turn: Callable[[], AbstractContextManager[object]] = nullcontext
) -> T:
    """Take the steps of a prefill, or of a capture, one after the other; `turn` surrounds each that computes."""
    came: Any = None
    try:
        while True:
            try:
                step = steps.send(came)
            except StopIteration as end:
                result: T = end.value
                return result
            if isinstance(step, Wait):
                came = step.loads.wait(step.ready, step.timeout_s)
            elif isinstance(step, Future):
                came = step.result()
            else:
                with turn():
                    came = step.function() if isinstance(step, Call) else advance(stack, [step.row_pass])
    finally:
        steps.close()


def prefill(stack: Stack, job: PrefillJob) -> PrefillResult:
    """Run a job that has everything at hand."""
    return run(stack, prefill_steps(stack, job))


def prefill_steps(stack: Stack, job: PrefillJob) -> Generator[Any, Any, PrefillResult]:
    """The steps of a job that has everything at hand."""
    nothing = PendingLoads.of_nothing(stack.layout.layers)
    return OverlappedPrefill(stack, job, nothing, ComputeSpeed(stack.keys_per_row)).steps()
