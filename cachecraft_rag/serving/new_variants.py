"""New variants (Cache-Craft §3.3): what was reused and fixed is captured behind the prefix that it really had.

Computed again, by itself and exactly, while nobody is being answered. Rejected: keeping what the request computed. Most
of such a chunk was not computed, and the rest stood behind approximations; what is served to everybody would be worse
with every generation, and would depend on one user's question.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import StrEnum

from cachecraft_rag.compute.balance.speed import ComputeSpeed
from cachecraft_rag.compute.captures.write_back import CaptureContext, WriteBackQueue
from cachecraft_rag.compute.driver import Call, Work
from cachecraft_rag.compute.job import PrefillResult
from cachecraft_rag.compute.overlapped import OverlappedPrefill
from cachecraft_rag.compute.resolve import Resolved, executed_plan, resolve
from cachecraft_rag.compute.stack import Stack
from cachecraft_rag.errors import CacheCraftError
from cachecraft_rag.planning.candidates import Candidate, Candidates
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.planning.planner import make_plan
from cachecraft_rag.serving.config import NewVariants
from cachecraft_rag.serving.step_loop import Level, Run, StepLoop
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.loading.loader import Loader
from cachecraft_rag.store.loading.pending import PendingLoads
from cachecraft_rag.store.row_checks import Found
from cachecraft_rag.types import CaptureDrop, Prompt, Unavailable

logger = logging.getLogger("cachecraft_rag.new_variants")

# As much of the prefix as is stored exactly is taken from the store; everything else is computed.
EXACT = ReuseConfig(scope="prefix", loading="whole")
_MOST_SAVED_UP = 100_000  # prompt tokens whose share can be saved up for later
_MOST_DOUBLINGS = 16
# The disk, the device (torch raises RuntimeError) or memory: the next prompt may do better.
_TROUBLE = (CacheCraftError, OSError, RuntimeError, MemoryError)


class Dropped(StrEnum):
    """Why a prompt that waited was not captured."""

    FULL = "too_many_waiting"
    STORED = "stored_meanwhile"
    REFUSED = "store_refused"
    FAILED = "failed"
    CLOSED = "closed"
    REMOVED = "removed"  # one of its chunks, with its document
    TOO_LONG = "too_long"  # for the model's context


@dataclass(frozen=True, slots=True)
class NewVariantStats:
    """Results of new variants since the engine was opened.

    captured  variants that were stored
    tokens    that were computed for them
    waiting   prompts that wait to be captured
    dropped   prompts that were not captured, or not all of them, by `Dropped`
    """

    captured: int
    tokens: int
    waiting: int
    dropped: dict[str, int]


class WantedVariants:
    """Prompts that wait to be captured, the tokens that may be computed for them, and results. Not thread-safe."""

    def __init__(self, config: NewVariants) -> None:
        self.candidates = Candidates(config.waiting)
        self._share = config.share
        self._allowance = 0.0  # tokens that may be computed; below zero by less than what is under way
        self._refusals = 0  # in a row
        self._captured = self._tokens = 0
        self._dropped: Counter[str] = Counter()

    def stats(self) -> NewVariantStats:
        """Numbers so far."""
        return NewVariantStats(self._captured, self._tokens, len(self.candidates), dict(self._dropped))

    def answered(self, prompt_tokens: int, candidate: Candidate | None) -> None:
        """Count the tokens of an answered prompt towards the budget, and note what was fixed in it."""
        earned = self._share * prompt_tokens
        self._allowance = min(self._allowance + earned, self._share * max(_MOST_SAVED_UP, prompt_tokens))
        if candidate is not None and self.candidates.add(candidate) is not None:
            self._dropped[Dropped.FULL] += 1

    def best(self, among: Callable[[Candidate], bool] | None = None) -> Candidate | None:
        """The most valuable candidate among these, or all; None while the budget is spent."""
        return self.candidates.best(among) if self._allowance > 0.0 else None

    def spend(self, tokens: int) -> None:
        """Count tokens that were computed; after refusals they count several times."""
        self._tokens += tokens
        self._allowance -= math.ldexp(tokens, min(self._refusals, _MOST_DOUBLINGS))

    def stored(self, captured: int, refused: int = 0) -> None:
        """Count captures that were stored, and such that the store refused; it was a full disk, say."""
        self._captured += captured
        self._refusals = self._refusals + refused if refused else 0

    def drop(self, candidate: Candidate, reason: Dropped | None) -> None:
        """Remove a candidate; None where it was stored."""
        self.candidates.remove(candidate)
        self.count(reason)

    def count(self, reason: Dropped | None, times: int = 1) -> None:
        """Count candidates that were not captured."""
        if reason is not None and times:
            self._dropped[reason] += times


def exact_only(found: Found) -> Found:
    """Those that may stand before a capture that is to be called exact: exact to the bit."""
    exact = {
        name: [variant for variant in offers if variant.lossless and variant.exact_share >= 1.0]
        for name, offers in found.variants.items()
    }
    return replace(found, variants=exact)


def missing_of(candidate: Candidate, found: Found) -> list[int]:
    """The chunks that are not stored behind their prefix, by their places in the prompt."""
    plan = make_plan(Prompt(candidate.segments), found.variants, EXACT)
    return [index for index in candidate.fixed if plan.segments[index].variant is None]


LookUp = Callable[..., Found]  # `PrimedEngine.look_up`


@dataclass(eq=False)
class VariantMaker:
    """Captures chunks that were reused and fixed, most asked for first. For the loop's thread, but for `stats`.

    stack, store, loader, write_back   of the engine
    look_up    finds what is stored
    loop       runs the captures while it is idle
    """

    config: NewVariants
    stack: Stack
    store: ChunkCacheStore
    loader: Loader
    write_back: WriteBackQueue
    look_up: LookUp
    loop: StepLoop
    _run: Run | None = None
    _running: Candidate | None = None
    _dropped_as: Dropped = Dropped.CLOSED  # if the running one is given up
    _closed: bool = False

    def __post_init__(self) -> None:
        self._wanted = WantedVariants(self.config)

    @property
    def stats(self) -> NewVariantStats:
        """Numbers so far."""
        return self._wanted.stats()

    @property
    def busy(self) -> bool:
        """True while one is being captured; false once nothing is left that the budget allows."""
        return self._run is not None

    def answered(self, prompt_tokens: int, candidate: Candidate | None) -> None:
        """Count the tokens of an answered prompt towards the budget, and note what was fixed in it."""
        if self.config.when == "off":
            return
        if self._closed and candidate is not None:
            self._wanted.count(Dropped.CLOSED)
        else:
            self._wanted.answered(prompt_tokens, candidate)
        self._begin()

    def forget(self, chunk_ids: Collection[str]) -> None:
        """Capture none of these chunks any more; they were removed. The running one ends once `busy` is false, or goes
        on without them.
        """
        for candidate in self._wanted.candidates.having(frozenset(chunk_ids)):
            if candidate is self._running:
                self._give_up(Dropped.REMOVED)
            else:
                self._wanted.drop(candidate, Dropped.REMOVED)

    def close(self) -> None:
        """Forget what waits, and give up the running one before its next layer."""
        self._closed = True
        if self._running is not None:
            self._wanted.candidates.remove(self._running)
            self._give_up(Dropped.CLOSED)
        self._wanted.count(Dropped.CLOSED, self._wanted.candidates.clear())

    def running(self, chunk_ids: Collection[str]) -> bool:
        """Return whether one of these chunks is in what is being computed."""
        names = {segment.segment_id for segment in self._running.segments} if self._running is not None else set()
        return not names.isdisjoint(chunk_ids)

    def _give_up(self, reason: Dropped) -> None:
        if self._run is not None:
            self._run.closed, self._dropped_as = True, reason
            self.loop.wake()

    def _begin(self) -> None:
        """Begin with the best candidate, unless one is being captured or the budget is spent."""
        candidate = self._wanted.best()
        if self._run is None and not self._closed and candidate is not None:
            self._running, self._dropped_as = candidate, Dropped.CLOSED
            level = Level.JOB if self.config.when == "always" else Level.IDLE
            self._run = Run(lambda _: self._capture(candidate), self._ended, level)
            self.loop.start(self._run)

    def _ended(self, dropped: Dropped | None, error: BaseException | None) -> None:
        """Count what came of the running one; None where it was stored."""
        run, candidate, self._run, self._running = self._run, self._running, None, None
        assert run is not None
        assert candidate is not None
        if error is not None:
            logger.error("A new variant could not be computed", exc_info=error)
            dropped = Dropped.FAILED
            if not isinstance(error, _TROUBLE):  # a mistake of ours: no more variants are made
                self.close()
        elif run.closed:
            dropped = self._dropped_as
        self._wanted.drop(candidate, dropped)
        self._begin()

    def _capture(self, candidate: Candidate) -> Work[Dropped | None]:
        """Compute and store what is still missing of it; returns why not all of it is stored now."""
        yield Call(lambda: None)  # the look-up is as late as the first layer
        planned = yield self.loop.aside(self._plan, candidate)
        if planned is None:
            return Dropped.STORED
        prompt, resolved, loads = planned
        try:
            speed = ComputeSpeed(self.stack.keys_per_row)  # waits for turns would spoil the engine's own
            result: PrefillResult = yield from OverlappedPrefill(self.stack, resolved.job, loads, speed).steps()
        finally:
            self.loader.end(loads)
            resolved.close()
        executed_plan(resolved, loads, result)
        self._wanted.spend(result.row_layers // self.stack.layout.layers)
        exact_shares = [1.0] * len(prompt.segments)
        another = candidate.fixed.keys() - candidate.first
        context = CaptureContext(prompt.segments, prompt.bounds, exact_shares, candidate.session, another=another)
        refused = None
        for capture in result.recorder.captures:
            keys = result.buffer.kv[:, 0]
            stored = yield from self.write_back.steps(capture, result.recorder, keys, context=context)
            if isinstance(stored, Unavailable) and stored.code is CaptureDrop.REMOVED:
                refused = refused or Dropped.REMOVED
            elif isinstance(stored, Unavailable):  # a full disk, say: each one in a row costs twice as much
                refused = Dropped.REFUSED
                self._wanted.stored(0, refused=1)
            else:
                self._wanted.stored(1)
        return refused

    def _plan(self, candidate: Candidate) -> tuple[Prompt, Resolved, PendingLoads] | None:
        """Plan up to the last chunk that is still not stored behind its prefix, if there is one, and begin to load."""
        found = self.look_up(candidate.segments, session=candidate.session)
        missing = missing_of(candidate, found)
        if not missing:
            return None
        prompt = Prompt(candidate.segments[: max(missing) + 1])
        offered = exact_only(found)
        resolved = resolve(prompt, offered, EXACT, store=self.store, ranks=self.stack.ranks, answer_tokens=0)
        return prompt, resolved, self.loader.begin(resolved.to_load)
