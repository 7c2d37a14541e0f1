"""Captures that are announced: requests that plan later wait for them, instead of computing the same chunks again.

A request announces what it will capture when it has planned. One that needs such a chunk waits until the first has
computed it, and then has just its captures described and stored at once, also while the answer is still being written.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from cachecraft_rag.planning.config import ReuseConfig, Scope
from cachecraft_rag.planning.planner import Plan
from cachecraft_rag.types import Prompt


@dataclass(frozen=True, slots=True)
class Expected:
    """A chunk-cache that is to come: behind which prefix, and whose it will be; None: everybody's."""

    segment_id: str
    origin_prefix: tuple[str, ...]
    session: str | None

    def serves(self, other: Expected, scope: Scope) -> bool:
        """Whether it may serve where `other` stands.

        >>> one, moved = Expected("c", ("system", "a"), None), Expected("c", ("system", "b"), "ann")
        >>> one.serves(moved, "anywhere"), one.serves(moved, "prefix"), moved.serves(one, "anywhere")
        (True, False, False)
        """
        if self.segment_id != other.segment_id or self.session not in (None, other.session):
            return False
        if scope == "prefix":
            return self.origin_prefix == other.origin_prefix
        return scope == "anywhere" or set(self.origin_prefix) == set(other.origin_prefix)


class Announcement:
    """What one request will capture: `with announcement:` around its prefill.

    The block ends with one call into C, so no interruption can leave others waiting, see `scheduling.Ticket`.
    """

    __slots__ = ("__exit__", "__weakref__", "_gate", "_guard", "_hand_over", "expected")

    __exit__: Callable[..., None]

    def __init__(self) -> None:
        self.expected: list[Expected] = []
        self._guard = threading.Lock()
        self._hand_over: Callable[[], object] | None = None
        self._gate = threading.Lock()  # open once the prefill has ended, however it did
        self.__exit__ = self._gate.__exit__

    def __enter__(self) -> None:
        """The prefill begins."""
        self._gate.acquire()

    def computed(self, hand_over: Callable[[], object]) -> None:
        """The prefill has gone well; `hand_over` hands its captures to write-back, and is called once at most."""
        self._hand_over = hand_over

    def wait(self) -> None:
        """Wait for the prefill, and have its captures on their way to the store. Nothing comes of one that failed."""
        with self._gate:  # stays open: others who wait pass as well
            pass
        self.hand_over()

    def hand_over(self) -> None:
        """Hand the captures to write-back, unless they have been; they have been when this returns."""
        with self._guard:
            hand_over, self._hand_over = self._hand_over, None
            if hand_over is not None:
                hand_over()


class Announcements:
    """Those of all requests that are under way. One whose request is gone goes with it."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._all: weakref.WeakSet[Announcement] = weakref.WeakSet()

    def announce(self, announcement: Announcement, prompt: Prompt, plan: Plan, *, session: str | None) -> None:
        """Announce what a plan computes afresh; to be called within the announcement's block."""
        ids = tuple(segment.segment_id for segment in prompt.segments)
        private = False
        for i, (segment, planned) in enumerate(zip(prompt.segments[:-1], plan.segments, strict=False)):
            private = private or segment.private
            if planned.variant is None and (session is not None or not private):  # the rest is not stored
                announcement.expected.append(Expected(ids[i], ids[:i], session if private else None))
        with self._guard:
            self._all.add(announcement)

    def remove(self, announcement: Announcement) -> None:
        """Its captures have been handed over."""
        with self._guard:
            self._all.discard(announcement)

    def wait_for(self, prompt: Prompt, config: ReuseConfig, *, session: str | None) -> None:
        """Wait until what this prompt can use of what others compute is on its way to the store."""
        with self._guard:
            others = list(self._all)
        if not others:
            return
        ids = tuple(segment.segment_id for segment in prompt.segments[:-1])
        wanted = [Expected(name, ids[:i], session) for i, name in enumerate(ids)]
        for other in others:
            if any(coming.serves(want, config.scope) for coming in other.expected for want in wanted):
                other.wait()
