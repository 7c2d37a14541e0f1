"""New variants over vLLM: separate requests capture chunks that were fixed, and unmarked text that was seen before.

A chunk is captured after the prefix that it had in the earlier prompt. The scheduler holds these requests back while
others run, and the workers compute them in slices, so a request that arrives waits for one slice. Captures of unmarked
text are held back for at most ten seconds, several at once, and are not paused once they have begun. Statistics and the
budget are those of `serving.new_variants`.
"""

from __future__ import annotations

import logging
import threading
from asyncio import CancelledError
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from cachecraft_rag.planning.candidates import Candidate, Owner
from cachecraft_rag.serving.config import NewVariants
from cachecraft_rag.serving.new_variants import Dropped, NewVariantStats, WantedVariants

logger = logging.getLogger("cachecraft_rag.new_variants")

# Captures of unmarked text at once: on a busy server each waits ten seconds, so this is a rate of 24 in a minute.
_UNMARKED_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Captured:
    """Outcome of the captures of one prompt.

    stored   number of variants stored
    refused  number of variants that the store refused
    tokens   number of tokens computed
    dropped  reason why not all of them are stored
    again    True if other requests needed the blocks; the prompt is computed again later
    """

    stored: int = 0
    refused: int = 0
    tokens: int = 0
    dropped: Dropped | None = None
    again: bool = False


class IdleVariants:
    """Threads that capture prompts. Any thread may call any method.

    Four threads are for unmarked text, which is captured on a busy server too, and one is for captures that need an
    idle server.

    Args:
        capture: computes and stores the missing variants of a candidate.
    """

    def __init__(self, config: NewVariants, capture: Callable[[Candidate], Captured]) -> None:
        self.config = config
        self._capture = capture
        self._wanted = WantedVariants(config)
        self._changed = threading.Condition()
        # Identity of each running candidate → its chunks that were removed since it began.
        self._running: dict[tuple[Owner, tuple[str, ...]], set[str]] = {}
        self._started = self._closed = False

    @property
    def stats(self) -> NewVariantStats:
        """A copy of the statistics since this object was made; also possible after `close`."""
        with self._changed:
            return self._wanted.stats()

    def answered(self, prompt_tokens: int, candidate: Candidate | None) -> None:
        """Add the tokens of an answered prompt to the budget, and note the chunks that were fixed in it.

        If more than `NewVariants.waiting` candidates wait, the least valuable one is dropped and counted.

        Args:
            prompt_tokens: tokens of the prompt; the share `NewVariants.share` of them may be computed.
            candidate: the prompt's chunks that were fixed; None: none.
        """
        with self._changed:
            if self.config.when == "off" or self._closed:
                return
            self._wanted.answered(prompt_tokens, candidate)
            if not self._started and candidate is not None:
                self._started = True
                for unmarked in (*[True] * _UNMARKED_AT_ONCE, False):
                    run = partial(self._run, unmarked=unmarked)
                    threading.Thread(target=run, name="cachecraft-variants", daemon=True).start()
            self._changed.notify_all()

    def forget(self, chunk_ids: Collection[str]) -> None:
        """Drop the candidates with these chunks, because the chunks are being removed, and count them as removed.

        A candidate that is being captured is dropped too, but its capture goes on; `removed` then names its chunks that
        were removed.
        """
        with self._changed:
            for candidate in self._wanted.candidates.having(frozenset(chunk_ids)):
                self._wanted.drop(candidate, Dropped.REMOVED)
            for (_, names), removed in self._running.items():
                removed.update(set(names).intersection(chunk_ids))

    def removed(self, candidate: Candidate) -> frozenset[str]:
        """Return the ids of the chunks of a candidate that were removed since its capture began; maybe empty."""
        with self._changed:
            return frozenset(self._running[candidate.identity])

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until no candidate within the budget waits or is being captured; see `VLLMBackend.settle`."""
        with self._changed:
            return self._changed.wait_for(self._settled, timeout)

    def _settled(self) -> bool:
        return self._closed or not (self._running or self._wanted.best())

    def close(self) -> None:
        """Drop all candidates, and count them as closed; a capture under way goes on, and is not waited for."""
        with self._changed:
            self._closed = True
            self._wanted.count(Dropped.CLOSED, self._wanted.candidates.clear())
            self._changed.notify_all()

    def _next(self, *, unmarked: bool) -> Candidate | None:
        def waits(candidate: Candidate) -> bool:
            return (
                bool(candidate.never_stored) == unmarked and candidate.identity not in self._running
            )

        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._wanted.best(waits) is not None)
            candidate = None if self._closed else self._wanted.best(waits)
            if candidate is not None:
                self._running[candidate.identity] = set()
            return candidate

    def _run(self, *, unmarked: bool) -> None:
        has_failed = False
        while (candidate := self._next(unmarked=unmarked)) is not None:
            try:
                captured = self._capture(candidate)
                has_failed = False
            except CancelledError:
                logger.info("No more new variants are captured: the server is ending")
                self.close()
                captured = Captured(dropped=Dropped.CLOSED)
            # vLLM may raise anything; the next candidate may succeed
            except Exception:
                # of several failures in a row, such as after the end of vLLM, log the first only
                if not self._closed:
                    level = logging.DEBUG if has_failed else logging.ERROR
                    logger.log(level, "A new variant could not be computed", exc_info=True)
                captured = Captured(dropped=Dropped.FAILED)
                has_failed = True
            with self._changed:
                removed = self._running.pop(candidate.identity)
                self._wanted.spend(captured.tokens)
                self._wanted.stored(captured.stored, captured.refused)
                # `forget` and `close` have dropped it already
                if not (captured.again or removed or self._closed):
                    self._wanted.drop(candidate, captured.dropped)
                self._changed.notify_all()
