"""The admission queue of requests that want to prefill, first in, first out. Used in the step loop's thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator

from prometheus_client import CollectorRegistry, Counter, Gauge

from cachecraft_rag.compute.driver import Until
from cachecraft_rag.compute.overlapped import Wait
from cachecraft_rag.errors import BusyError, WaitTimeoutError
from cachecraft_rag.serving.loop.task import LoopTask


class AdmissionQueue:
    """Requests from `enter` to `leave`. They wait, and then have the turn, to prefill; several may have it at once.

    Args:
        max_waiting: most requests that wait for a turn while another request has it.
        timeout_s: longest wait; None = no limit.
        preload_bytes: most bytes that requests load before their turn, except the next one, which always loads.
        registry: takes the metrics of the queue.
    """

    def __init__(
        self,
        max_waiting: int,
        timeout_s: float | None,
        *,
        preload_bytes: int = 0,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._preload_bytes = preload_bytes
        self._waiting: list[LoopTask] = []
        self._prefilling: list[LoopTask] = []
        # waiting requests that have asked for room to preload → bytes that they got; None: they got none
        self._preloads: dict[LoopTask, int | None] = {}

        waiting = Gauge(
            "cachecraft_waiting_requests", "Requests that wait for a turn", registry=registry
        )
        waiting.set_function(self.__len__)
        turned_away = Counter(
            "cachecraft_turned_away",
            "Requests that got no turn, by reason",
            ["reason"],
            registry=registry,
        )
        self._rejected = turned_away.labels("full")
        self._timed_out = turned_away.labels("timeout")

    def __len__(self) -> int:
        """Number of requests that wait for a turn; any thread may ask."""
        return len(self._waiting)

    def enter(self, task: LoopTask) -> None:
        """Take the last place; BusyError if `max_waiting` requests wait already (one more while none has the turn)."""
        has_turn_taken = bool(self._prefilling)
        if len(self._waiting) + has_turn_taken > self._max_waiting:
            self._rejected.inc()
            raise BusyError(
                f"{self._max_waiting} requests are waiting already; ask again later, or raise max_waiting "
                "(EngineConfig().with_tuning)"
            )
        self._waiting.append(task)

    def wait(self, ready: Callable[[], bool], since: float) -> Generator[Until, bool, None]:
        """Wait until `ready()`, which the loop calls between two steps and which must not raise, is true.

        Raises WaitTimeoutError once the whole wait, from `since` (`time.perf_counter`) on, is longer than `timeout_s`.
        The request keeps its place until `leave`.
        """
        left = None
        if self._timeout_s is not None:
            left = max(0.0, since + self._timeout_s - time.perf_counter())
        is_ready = yield Until(ready, left)
        if not is_ready:
            self._timed_out.inc()
            raise WaitTimeoutError(
                f"the request waited longer than {self._timeout_s:g} s for its turn; ask again later, or raise "
                "wait_timeout_s (EngineConfig().with_tuning)"
            )

    @property
    def preloading_bytes(self) -> int:
        """Bytes that waiting requests have reserved, to load them before their turn; 0 or more. Any thread may ask."""
        return sum(nbytes or 0 for nbytes in list(self._preloads.values()))

    def may_preload(self, task: LoopTask) -> bool:
        """Return True if a waiting request, other than the first, may plan and load now, before its turn.

        Less than `preload_bytes` must be reserved, and those before it, but for the first, must have called `reserve`.
        """
        if not self.preloading_bytes < self._preload_bytes:
            return False
        between = self._waiting[1 : self._waiting.index(task)]
        return all(other in self._preloads for other in between)

    def reserve(self, task: LoopTask, nbytes: int) -> bool:
        """Reserve room for bytes that a waiting request loads; False, and nothing reserved, if too little is left.

        To be called once for each request, also for 0 bytes: after either result `may_preload` lets the next one load.
        """
        fits = self.preloading_bytes + nbytes <= self._preload_bytes
        self._preloads[task] = nbytes if fits else None
        return fits

    def is_first(self, task: LoopTask) -> bool:
        """Return True if no request waits before this one, which waits."""
        return self._waiting[0] is task

    def is_free(self) -> bool:
        """Return True if no request has the turn, or if all that have it wait for loads, between two passes."""
        return all(_waits_for_loading(task) for task in self._prefilling)

    def begin(self, task: LoopTask) -> None:
        """Give the turn to a waiting request; what it had reserved is free again."""
        self._waiting.remove(task)
        self._preloads.pop(task, None)
        self._prefilling.append(task)

    def leave(self, task: LoopTask) -> None:
        """End a request's turn or its wait, if it has one; what it had reserved is free again."""
        for tasks in (self._waiting, self._prefilling):
            if task in tasks:
                tasks.remove(task)
        self._preloads.pop(task, None)


def _waits_for_loading(task: LoopTask) -> bool:
    step = task.step
    return isinstance(step, Wait) and not step.in_pass and not step.ready()
