"""New variants over vLLM: requests of their own capture what was reused and fixed behind the prefix that it had, and
text that nobody marked where it was seen before.

The scheduler holds these requests back while any other is under way, and the workers compute them in slices, so a
request that comes waits for one slice. What is counted, and what may be spent, is as in `engine.new_variants`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass

from cachecraft_rag.engine.config import NewVariants
from cachecraft_rag.engine.new_variants import Dropped, NewVariantStats, WantedVariants
from cachecraft_rag.planning.candidates import Candidate

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
    """Has prompts captured one after the other, in a thread of its own. Any thread may call any method.

    Args:
        capture: computes and stores what is missing of one; raises only what ends this thread.
    """

    def __init__(self, config: NewVariants, capture: Callable[[Candidate], Captured]) -> None:
        self.config, self._capture = config, capture
        self._wanted = WantedVariants(config)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._running = self._closed = False

    @property
    def stats(self) -> NewVariantStats:
        """Numbers so far."""
        with self._changed:
            return self._wanted.stats()

    def answered(self, prompt_tokens: int, candidate: Candidate | None) -> None:
        """See `WantedVariants.answered`; the thread begins with the first candidate."""
        with self._changed:
            if self.config.when == "off" or self._closed:
                return
            self._wanted.answered(prompt_tokens, candidate)
            if self._thread is None and candidate is not None:
                self._thread = threading.Thread(target=self._run, name="cachecraft-variants", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def forget(self, chunk_ids: Collection[str]) -> None:
        """Capture none of these chunks any more; they were removed."""
        with self._changed:
            for candidate in self._wanted.candidates.having(frozenset(chunk_ids)):
                self._wanted.drop(candidate, Dropped.REMOVED)

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

    def _next(self) -> Candidate | None:
        with self._changed:
            self._running = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or self._wanted.best() is not None)
            self._running = not self._closed
            return self._wanted.best() if self._running else None

    def _run(self) -> None:
        while (candidate := self._next()) is not None:
            try:
                found = self._capture(candidate)
            except BaseException:  # vLLM has ended, or a mistake of ours: no more variants are made
                with self._changed:
                    if not self._closed:
                        logger.exception("A new variant could not be computed; no more are made")
                    self._wanted.drop(candidate, Dropped.CLOSED if self._closed else Dropped.FAILED)
                    self._closed, self._running = True, False
                    self._changed.notify_all()
                return
            with self._changed:
                self._wanted.spend(found.tokens)
                self._wanted.stored(found.stored, found.refused)
                if not found.again:
                    self._wanted.drop(candidate, found.dropped)
