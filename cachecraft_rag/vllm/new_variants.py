"""New variants over vLLM: requests of their own capture what was reused and fixed behind the prefix that it had, and
text that nobody marked where it was seen before.

The scheduler holds these requests back while any other is under way, and the workers compute them in slices, so a
request that comes waits for one slice. Text that nobody marked is held back for ten seconds at most, and not once it
has begun. What is counted, and what may be spent, is as in `serving.new_variants`.
"""

from __future__ import annotations

import logging
import threading
from asyncio import CancelledError
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from cachecraft_rag.planning.candidates import Candidate
from cachecraft_rag.serving.config import NewVariants
from cachecraft_rag.serving.new_variants import Dropped, NewVariantStats, WantedVariants

logger = logging.getLogger("cachecraft_rag.new_variants")


@dataclass(frozen=True, slots=True)
class Captured:
    """Outcome of one prompt: variants stored and refused, tokens computed, and why not all of it is stored.

    again  requests needed its blocks: it is computed later
    """

    stored: int = 0
    refused: int = 0
    tokens: int = 0
    dropped: Dropped | None = None
    again: bool = False


class IdleVariants:
    """Has prompts captured by two threads. Any thread may call any method.

    One is for text that nobody marked: it would wait for ever behind what waits for an idle server.

    Args:
        capture: computes and stores what is missing of one.
    """

    def __init__(self, config: NewVariants, capture: Callable[[Candidate], Captured]) -> None:
        self.config, self._capture = config, capture
        self._wanted = WantedVariants(config)
        self._changed = threading.Condition()
        # By identity: the chunks of each that were removed since it began.
        self._running: dict[tuple[str | None, tuple[str, ...]], set[str]] = {}
        self._started = self._closed = False

    @property
    def stats(self) -> NewVariantStats:
        """Numbers so far."""
        with self._changed:
            return self._wanted.stats()

    def answered(self, prompt_tokens: int, candidate: Candidate | None) -> None:
        """See `WantedVariants.answered`; the threads begin with the first candidate."""
        with self._changed:
            if self.config.when == "off" or self._closed:
                return
            self._wanted.answered(prompt_tokens, candidate)
            if not self._started and candidate is not None:
                self._started = True
                for unmarked in (True, False):
                    run = partial(self._run, unmarked=unmarked)
                    threading.Thread(target=run, name="cachecraft-variants", daemon=True).start()
            self._changed.notify_all()

    def forget(self, chunk_ids: Collection[str]) -> None:
        """Capture none of these chunks any more; they are being removed. For those under way see `removed`."""
        with self._changed:
            for candidate in self._wanted.candidates.having(frozenset(chunk_ids)):
                self._wanted.drop(candidate, Dropped.REMOVED)
            for (_, names), removed in self._running.items():
                removed.update(set(names).intersection(chunk_ids))

    def removed(self, candidate: Candidate) -> frozenset[str]:
        """Its chunks that were removed since it began; for one under way."""
        with self._changed:
            return frozenset(self._running[candidate.identity])

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left that the budget allows; returns whether nothing is."""
        with self._changed:
            return self._changed.wait_for(self._settled, timeout)

    def _settled(self) -> bool:
        return self._closed or not (self._running or self._wanted.best())

    def close(self) -> None:
        """Begin with nothing more."""
        with self._changed:
            self._closed = True
            self._wanted.count(Dropped.CLOSED, self._wanted.candidates.clear())
            self._changed.notify_all()

    def _next(self, *, unmarked: bool) -> Candidate | None:
        def waits(candidate: Candidate) -> bool:
            return bool(candidate.first) == unmarked and candidate.identity not in self._running

        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._wanted.best(waits) is not None)
            candidate = None if self._closed else self._wanted.best(waits)
            if candidate is not None:
                self._running[candidate.identity] = set()
            return candidate

    def _run(self, *, unmarked: bool) -> None:
        failed = False
        while (candidate := self._next(unmarked=unmarked)) is not None:
            try:
                found, failed = self._capture(candidate), False
            except (Exception, CancelledError):  # such as vLLM's, of any kind; it may have room for the next one
                if not self._closed:  # of several in a row, as where vLLM has ended, the first is enough
                    level = logging.DEBUG if failed else logging.ERROR
                    logger.log(level, "A new variant could not be computed", exc_info=True)
                found, failed = Captured(dropped=Dropped.FAILED), True
            with self._changed:
                removed = self._running.pop(candidate.identity)
                self._wanted.spend(found.tokens)
                self._wanted.stored(found.stored, found.refused)
                if not (found.again or removed or self._closed):  # the latter two are dropped already
                    self._wanted.drop(candidate, found.dropped)
                self._changed.notify_all()
