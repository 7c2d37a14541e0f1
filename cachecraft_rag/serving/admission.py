"""The line of requests that want to prefill, first come, first served. Used in the step loop's thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge

from cachecraft_rag.compute.driver import Until
from cachecraft_rag.compute.overlapped import Wait
from cachecraft_rag.errors import BusyError, WaitTimeoutError
from cachecraft_rag.planning.config import ReuseConfig, Scope
from cachecraft_rag.planning.planner import Plan
from cachecraft_rag.serving.step_loop import Run
from cachecraft_rag.types import Prompt


@dataclass(frozen=True, slots=True)
class FutureVariant:
    """A chunk-cache that will be captured: behind which prefix, and whose it will be; None: everybody's."""

    segment_id: str
    origin_prefix: tuple[str, ...]
    session: str | None

    def serves(self, other: FutureVariant, scope: Scope) -> bool:
        """Return whether it may serve where `other` stands.

        >>> one, moved = FutureVariant("c", ("system", "a"), None), FutureVariant("c", ("system", "b"), "ann")
        >>> one.serves(moved, "anywhere"), one.serves(moved, "prefix"), moved.serves(one, "anywhere")
        (True, False, False)
        """
        if self.segment_id != other.segment_id or self.session not in (None, other.session):
            return False
        if scope == "prefix":
            return self.origin_prefix == other.origin_prefix
        return scope == "anywhere" or set(self.origin_prefix) == set(other.origin_prefix)


@dataclass(eq=False)
class FutureCaptures:
    """The captures of one request: `variants` that will come, whether they are `computed`, and how to `submit` them."""

    variants: list[FutureVariant] = field(default_factory=list)
    computed: bool = False
    submit: Callable[[], object] | None = None

    def expect(self, prompt: Prompt, plan: Plan, *, session: str | None) -> None:
        """Note what a plan computes afresh and will be stored."""
        ids = tuple(segment.segment_id for segment in prompt.segments)
        private = False
        for i, (segment, planned) in enumerate(zip(prompt.segments[:-1], plan.segments, strict=False)):
            private = private or segment.private
            captured = planned.variant is None and segment.kind != "question" and not segment.found
            if captured and (session is not None or not private):  # the rest is not stored
                self.variants.append(FutureVariant(ids[i], ids[:i], session if private else None))

    def serve(self, prompt: Prompt, config: ReuseConfig, *, session: str | None) -> bool:
        """Return whether a prompt can use one of them."""
        ids = tuple(segment.segment_id for segment in prompt.segments[:-1])
        wanted = [FutureVariant(name, ids[:i], session) for i, name in enumerate(ids)]
        return any(coming.serves(want, config.scope) for coming in self.variants for want in wanted)

    def hand_over(self) -> None:
        """Submit them to write-back, once."""
        submit, self.submit = self.submit, None
        if submit is not None:
            submit()


class Line:
    """Requests from asking up to their first token.

    Args:
        max_waiting: most requests that wait for a turn while another one has it.
        timeout_s: longest wait; None = no limit.
        registry: takes the metrics of the line.
    """

    def __init__(self, max_waiting: int, timeout_s: float | None, registry: CollectorRegistry | None = None) -> None:
        self._max_waiting, self._timeout_s = max_waiting, timeout_s
        self._waiting: list[Run] = []
        self._prefilling: list[Run] = []
        waiting = Gauge("cachecraft_waiting_requests", "Requests that wait for a turn", registry=registry)
        waiting.set_function(self.__len__)
        turned_away = Counter(
            "cachecraft_turned_away", "Requests that got no turn, by reason", ["reason"], registry=registry
        )
        self._rejected, self._timed_out = turned_away.labels("full"), turned_away.labels("timeout")

    def __len__(self) -> int:
        """Requests that wait for a turn; any thread may ask."""
        return len(self._waiting)

    def enter(self, run: Run) -> None:
        """Take a place at the end. Raises BusyError where as many wait as may."""
        if len(self._waiting) + bool(self._prefilling) > self._max_waiting:
            self._rejected.inc()
            raise BusyError(
                f"{self._max_waiting} requests are waiting already; ask again later, or raise max_waiting "
                "(EngineConfig)"
            )
        self._waiting.append(run)

    def wait(self, ready: Callable[[], bool], since: float) -> Generator[Until, bool, None]:
        """Wait until `ready()`. Raises WaitTimeoutError after too long a wait, which began at `since`."""
        left = None if self._timeout_s is None else max(0.0, since + self._timeout_s - time.perf_counter())
        if not (yield Until(ready, left)):
            self._timed_out.inc()
            raise WaitTimeoutError(
                f"the request waited longer than {self._timeout_s:g} s for its turn; ask again later, or raise "
                "wait_timeout_s (EngineConfig)"
            )

    def is_first(self, run: Run) -> bool:
        """Return whether nobody waits before it."""
        return self._waiting[0] is run

    def free(self) -> bool:
        """Return whether nobody prefills, or all who do wait for what is being loaded."""
        return all(
            isinstance(one.step, Wait) and not one.step.in_pass and not one.step.ready() for one in self._prefilling
        )

    def begin(self, run: Run) -> None:
        """Give it the turn."""
        self._waiting.remove(run)
        self._prefilling.append(run)

    def leave(self, run: Run) -> None:
        """End its turn, or its wait; idempotent."""
        for runs in (self._waiting, self._prefilling):
            if run in runs:
                runs.remove(run)
