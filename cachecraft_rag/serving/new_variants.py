"""New variants (Cache-Craft §3.3): capture chunks that were reused and fixed after the prefix that they really had.

A chunk is computed a second time, separately and exactly, while no answer is under way. Rejected: keeping the rows that
the request computed. Most of such a chunk was not computed, and the rest followed approximations; shared chunk-caches
would become worse with every generation, and would depend on one user's question.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from cachecraft_rag.compute.balance.speed import ComputeSpeed
from cachecraft_rag.compute.captures.write_back import CaptureContext, CaptureDescriber
from cachecraft_rag.compute.driver import Call, Work
from cachecraft_rag.compute.job import PrefillJob, PrefillResult
from cachecraft_rag.compute.overlapped import OverlappedPrefill
from cachecraft_rag.compute.resolve import executed_plan, resolve
from cachecraft_rag.compute.stack import Stack
from cachecraft_rag.planning.candidates import Candidate, Candidates
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.planning.planner import make_plan
from cachecraft_rag.serving.config import NewVariants
from cachecraft_rag.serving.idle.loop_runner import LoopRunner
from cachecraft_rag.serving.idle.work import Among, GivenUp, IdleWork, Runner
from cachecraft_rag.serving.loop.step_loop import StepLoop
from cachecraft_rag.serving.loop.task import Priority
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.loading.loader import Loader
from cachecraft_rag.store.loading.pending import PendingLoads
from cachecraft_rag.store.row_checks import LookupResult
from cachecraft_rag.types.prompts import Prompt
from cachecraft_rag.types.store_reasons import CaptureDrop, Unavailable

logger = logging.getLogger("cachecraft_rag.new_variants")

# As much of the prefix as is stored exactly is taken from the store; everything else is computed.
EXACT = ReuseConfig(method=ReuseMethod(scope="prefix", loading="whole"))
_MAX_SAVED_UP = 100_000  # prompt tokens whose share can be saved up for later
_MAX_DOUBLINGS = 16  # of the cost of a capture after refusals in a row


class Dropped(StrEnum):
    """Reason for not capturing a prompt that waited."""

    FULL = "too_many_waiting"
    STORED = "stored_meanwhile"
    REFUSED = "store_refused"
    FAILED = "failed"
    CLOSED = "closed"
    REMOVED = "removed"  # one of its chunks, with its document
    TOO_LONG = "too_long"  # for the model's context


@dataclass(frozen=True, slots=True)
class Captured:
    """Outcome of the captures of one prompt. `VariantMaker` counts on its way, and leaves the numbers 0.

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


@dataclass(frozen=True, slots=True)
class NewVariantStats:
    """Results of new variants since the engine was opened.

    captured  variants that were stored
    tokens    tokens that were computed for them
    waiting   prompts that wait to be captured, and those that are being captured
    dropped   prompts that were not captured, or only in part, by `Dropped`
    """

    captured: int
    tokens: int
    waiting: int
    dropped: dict[str, int]


class WantedVariants:
    """Prompts that wait to be captured, the token budget for them, and results. Not thread-safe."""

    def __init__(self, config: NewVariants) -> None:
        self.candidates = Candidates(config.waiting)
        self._share = config.share
        # tokens that may be computed; negative while captures under way exceed the budget
        self._allowance = 0.0
        self._refusals = 0  # in a row
        self._captured = 0
        self._tokens = 0
        self._dropped: Counter[str] = Counter()

    def stats(self) -> NewVariantStats:
        """Return the statistics so far, as a copy."""
        return NewVariantStats(
            self._captured, self._tokens, len(self.candidates), dict(self._dropped)
        )

    def answered(self, prompt_tokens: int, candidate: Candidate | None) -> None:
        """Add `NewVariants.share` of a prompt's tokens to the budget, and its fixed chunks, if any, to the candidates.

        If too many candidates wait, the least valuable one is dropped and counted. Unspent budget is kept up to that of
        100,000 prompt tokens, or of this prompt if it is longer.
        """
        earned = self._share * prompt_tokens
        limit = self._share * max(_MAX_SAVED_UP, prompt_tokens)
        self._allowance = min(self._allowance + earned, limit)
        if candidate is not None:
            dropped = self.candidates.add(candidate)
            if dropped is not None:
                self._dropped[Dropped.FULL] += 1

    def best(self, among: Callable[[Candidate], bool] | None = None) -> Candidate | None:
        """Return the candidate that `among` accepts and would have saved most; it stays. None without one or budget."""
        if self._allowance <= 0.0:
            return None
        return self.candidates.best(among)

    def spend(self, tokens: int) -> None:
        """Count tokens and take them from the budget; each refusal in a row doubles their cost, at most 16 times."""
        self._tokens += tokens
        doublings = min(self._refusals, _MAX_DOUBLINGS)
        self._allowance -= math.ldexp(tokens, doublings)

    def stored(self, captured: int, refused: int = 0) -> None:
        """Count stored captures; `refused` lengthens the row of refusals for `spend`, and 0 ends it."""
        self._captured += captured
        self._refusals = self._refusals + refused if refused else 0

    def drop(self, candidate: Candidate, reason: Dropped | None) -> None:
        """Remove a candidate, if it still waits, and count the reason; None means that it was stored."""
        self.candidates.remove(candidate)
        self.count(reason)

    def count(self, reason: Dropped | None, times: int = 1) -> None:
        """Count this many candidates as not captured, by reason; does nothing without a reason or with 0 `times`."""
        if reason is not None and times:
            self._dropped[reason] += times


def exact_only(found: LookupResult) -> LookupResult:
    """Return a look-up result with only those variants that may precede an exact capture: the ones exact to the bit.

    That is a variant of a lossless codec with an exact share of 1.
    """
    exact = {
        name: [variant for variant in variants if variant.lossless and variant.exact_share >= 1.0]
        for name, variants in found.variants.items()
    }
    return replace(found, variants=exact)


def missing_of(candidate: Candidate, found: LookupResult) -> list[int]:
    """Return the indices in `Candidate.fixed` that are not stored after their prefix, exactly or by a lossy codec."""
    plan = make_plan(Prompt(candidate.segments), found.variants, EXACT)
    return [index for index in candidate.fixed if plan[index].variant is None]


class VariantWork(IdleWork[Candidate, Captured]):
    """Captures chunks that were reused and fixed; first the prompt that would have saved most tokens.

    Args:
        runner: computes and stores the missing variants of a candidate.
        config: when, and how much may be spent.
    """

    def __init__(self, runner: Runner[Candidate, Captured], config: NewVariants) -> None:
        super().__init__(runner, logger=logger, failure="A new variant could not be computed")
        self.config = config
        self._wanted = WantedVariants(config)

    @property
    def stats(self) -> NewVariantStats:
        """Statistics since the engine was opened, as a copy; also possible after `close`."""
        with self._changed:
            return self._wanted.stats()

    def answered(self, prompt_tokens: int, candidate: Candidate | None) -> None:
        """Add the share of a prompt's tokens to the budget, note its fixed chunks (None: none), and begin to capture.

        Returns at once; does nothing if `NewVariants.when` is "off". If more than `NewVariants.waiting` candidates
        wait, the least valuable one is dropped and counted, as is the candidate after `close`.
        """
        if self.config.when == "off":
            return
        with self._changed:
            if self._closed and candidate is not None:
                self._wanted.count(Dropped.CLOSED)
            else:
                self._wanted.answered(prompt_tokens, candidate)
            self._changed.notify_all()
            self._runner.wake(self)

    # -- as `IdleWork` asks for ---------------------------------------------------------------------------------------

    def _peek(self, among: Among[Candidate] | None = None) -> Candidate | None:
        # A later request may have merged its captures with one under way: then it is another object.
        under_way = {candidate.identity for candidate in self.under_way()}

        def may_begin(candidate: Candidate) -> bool:
            return candidate.identity not in under_way and (among is None or among(candidate))

        return self._wanted.best(may_begin)

    def _begun(self, piece: Candidate) -> None:
        """Leave it among the candidates: later requests may merge their captures with it."""

    def _having(self, chunk_ids: Collection[str]) -> Sequence[Candidate]:
        return self._wanted.candidates.having(frozenset(chunk_ids))

    def _clear(self) -> None:
        self._wanted.count(Dropped.CLOSED, self._wanted.candidates.clear())

    def _drop(self, piece: Candidate, reason: GivenUp) -> None:
        self._wanted.drop(piece, Dropped(reason))

    def _done(self, piece: Candidate, result: Captured | None, *, given_up: bool) -> None:
        if result is None:
            return
        self._wanted.spend(result.tokens)
        if result.stored or result.refused:
            self._wanted.stored(result.stored, result.refused)
        if not (result.again or given_up):
            self._wanted.drop(piece, result.dropped)


LookUp = Callable[..., LookupResult]  # `AnswerEngine.look_up`


class VariantMaker(VariantWork):
    """Captures chunks by the engine in this process. For the loop's thread, except `stats`.

    Args:
        config: when, and how much may be spent.
        stack, store, loader, write_back: of the engine.
        look_up: looks up what is stored.
        loop: runs the captures while it is idle, or with `NewVariants.when` "always" also beside answers.
    """

    def __init__(
        self,
        config: NewVariants,
        *,
        stack: Stack,
        store: ChunkCacheStore,
        loader: Loader,
        write_back: CaptureDescriber,
        look_up: LookUp,
        loop: StepLoop,
    ) -> None:
        priority = Priority.JOB if config.when == "always" else Priority.IDLE
        super().__init__(LoopRunner(loop, self._capture, priority), config)
        self._stack = stack
        self._store = store
        self._loader = loader
        self._write_back = write_back
        self._look_up = look_up
        self._loop = loop

    def _capture(self, candidate: Candidate) -> Work[Captured]:
        """Compute and store the missing variants of a candidate.

        The budget and the numbers of variants are updated here, because the capture may be given up on its way.
        """
        yield Call(lambda: None)  # puts the look-up off until the loop is idle
        planned = yield self._loop.aside(self._plan, candidate)
        if isinstance(planned, Dropped):
            return Captured(dropped=planned)

        prompt, job, loads = planned
        try:
            # waits for turns would distort the engine's speed
            speed = ComputeSpeed(self._stack.keys_per_row)
            result: PrefillResult = yield from OverlappedPrefill(
                self._stack, job, loads, speed
            ).steps()
        finally:
            self._loader.end(loads)
        executed_plan(job, loads, result)
        self._wanted.spend(result.row_layers // self._stack.layout.layers)

        context = CaptureContext(
            prompt.segments,
            prompt.bounds,
            [1.0] * len(prompt.segments),
            candidate.session,
            extra_variants=candidate.fixed.keys() - candidate.never_stored,
            namespace=candidate.namespace,
        )
        refused = None
        for capture in result.recorder.captures:
            keys = result.buffer.kv[:, 0]  # [layers, tokens, kv_heads, head_dim]
            stored = yield from self._write_back.steps(
                capture, result.recorder, keys, context=context
            )
            if isinstance(stored, Unavailable) and stored.code is CaptureDrop.REMOVED:
                refused = refused or Dropped.REMOVED
            elif isinstance(stored, Unavailable):  # a full disk, for example
                refused = Dropped.REFUSED
                self._wanted.stored(0, refused=1)
            else:
                self._wanted.stored(1)
        return Captured(dropped=refused)

    def _plan(self, candidate: Candidate) -> tuple[Prompt, PrefillJob, PendingLoads] | Dropped:
        """Plan up to the last chunk that is not stored after its prefix, and begin to load; or say why not."""
        lookup = self._look_up(
            candidate.segments, session=candidate.session, namespace=candidate.namespace
        )
        if lookup.removed:  # by a process that could not tell this one
            return Dropped.REMOVED
        missing = missing_of(candidate, lookup)
        if not missing:
            return Dropped.STORED
        prompt = Prompt(candidate.segments[: max(missing) + 1])
        offered = exact_only(lookup)
        job = resolve(
            prompt, offered, EXACT, store=self._store, ranks=self._stack.ranks, answer_tokens=0
        )
        return prompt, job, self._loader.begin(job.to_load)
