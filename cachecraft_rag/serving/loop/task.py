"""Work for the step loop: a generator of steps (`compute.driver`), its priority, and the claim on its result."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from enum import IntEnum

from cachecraft_rag.compute.captures.write_back import Ended
from cachecraft_rag.compute.driver import AnyStep, Until, Work
from cachecraft_rag.compute.row_pass import RowPass
from cachecraft_rag.store.loading.pending import PendingLoads


class Priority(IntEnum):
    """Priority of work in the loop.

    ANSWER  in every turn: decode steps as one forward, prefills in the order of asking
    JOB     one step in each turn: captures and priming
    IDLE    while there is no job, and no answer but those whose reader has paused for more than a second
    """

    ANSWER = 0
    JOB = 1
    IDLE = 2


class Handle:
    """A claim on the result of some work; the work ends early once this is closed (wake the loop then) or gone."""

    __slots__ = ("__weakref__", "closed")

    def __init__(self) -> None:
        self.closed = False


@dataclass(eq=False)
class LoopTask:
    """Work in the loop.

    make      makes the generator of its steps, in the loop; if it raises, the work ends with that error
    ended     called in the loop with the result and the error; both are None if the task was given up. What it raises
              is logged
    handle    a claim on the result; None: only `closed` gives the task up
    context   context variables of the caller
    step      the step that it is at
    since     time of `time.perf_counter`, in seconds, at which it arrived at that step
    loads     chunk-caches that its prefill loads
    load_s    seconds that it waited for them
    joined    its pass that runs together with the pass of the first prefill
    closed    whether it is to end early
    """

    make: Callable[[LoopTask], Work[object]]
    ended: Ended
    priority: Priority
    handle: weakref.ref[Handle] | None = None
    context: Context = field(default_factory=copy_context)
    steps: Work[object] = field(init=False)
    step: AnyStep | None = None
    since: float = 0.0
    loads: PendingLoads | None = None
    load_s: float = 0.0
    joined: RowPass | None = None
    closed: bool = False

    @property
    def given_up(self) -> bool:
        """True once the result is not wanted any more: the task was closed, or its handle is closed or gone."""
        if self.closed:
            return True
        if self.handle is None:
            return False
        handle = self.handle()
        return handle is None or handle.closed

    @property
    def paused_at(self) -> float:
        """Time of `time.perf_counter`, in seconds, since when it waits for its reader; infinite if it does not."""
        is_paused = isinstance(self.step, Until) and self.step.for_reader
        return self.since if is_paused else math.inf
