"""New variants (Cache-Craft §3.3): what was reused and fixed is captured behind the prefix that it really had.

Computed again, by itself and exactly, while nobody is being answered. Rejected: keeping what the request computed. Most
of such a chunk was not computed, and the rest stood behind approximations; what is served to everybody would be worse
with every generation, and would depend on one user's question.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal, Protocol, get_args

from cachecraft_rag.checks import check_choice, check_number, check_whole
from cachecraft_rag.compute.driver import run_by_layer
from cachecraft_rag.compute.overlapped import OverlappedPrefill
from cachecraft_rag.compute.resolve import as_it_went, resolve
from cachecraft_rag.compute.speed import ComputeSpeed
from cachecraft_rag.compute.stack import Stack
from cachecraft_rag.compute.write_back import CaptureContext, WriteBackQueue
from cachecraft_rag.engine.activity import Activity
from cachecraft_rag.errors import CacheCraftError
from cachecraft_rag.planning.candidates import Candidate, Candidates
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.planning.planner import make_plan
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.expected import Found
from cachecraft_rag.store.loading.loader import Loader
from cachecraft_rag.types import CaptureDrop, Prompt, Segment, Unavailable

logger = logging.getLogger("cachecraft_rag.new_variants")

When = Literal["off", "idle", "always"]

# As much of the prefix as is stored exactly is taken from the store; everything else is computed.
_EXACT = ReuseConfig(scope="prefix", loading="whole")
_LOOK_S = 0.2  # how often it looks whether it is to end, while it waits for its turn
_MOST_SAVED_UP = 100_000  # prompt tokens whose share can be saved up for later
_MOST_DOUBLINGS = 16
# The disk, the device (torch raises RuntimeError) or memory: the next prompt may do better.
_TROUBLE = (CacheCraftError, OSError, RuntimeError, MemoryError)


@dataclass(frozen=True, slots=True)
class NewVariants:
    """When new variants are computed, and how much may be spent on them.

    when     "idle": while nobody is being answered; "always": also beside answers, layer by layer in turn with them;
             "off": never
    share    tokens that may be computed for it, for each token of a prompt that was served
    waiting  prompts that wait at most; of more, those go that would have saved least
    """

    when: When = "idle"
    share: float = 1.0
    waiting: int = 256

    def __post_init__(self) -> None:
        """Check every field; raises ConfigError."""
        check_choice("new_variants", self.when, get_args(When))
        check_number("share", self.share)
        check_whole("waiting", self.waiting, least=1)


class Dropped(StrEnum):
    """Why a prompt that waited was not captured."""

    FULL = "too_many_waiting"
    STORED = "stored_meanwhile"
    REFUSED = "store_refused"
    FAILED = "failed"
    CLOSED = "closed"
    REMOVED = "removed"  # one of its chunks, with its document


@dataclass(frozen=True, slots=True)
class NewVariantStats:
    """What came of new variants since the engine was opened.

    captured  variants that were stored
    tokens    that were computed for them
    waiting   prompts that wait to be captured
    dropped   prompts that were not captured, or not all of them, by `Dropped`
    """

    captured: int
    tokens: int
    waiting: int
    dropped: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


class _Ended(Exception):
    """The engine was closed, or the program ends."""


class _Removed(Exception):
    """A chunk of the prompt that is being computed was removed."""


class LookUp(Protocol):
    """`AnswerEngine.look_up`."""

    def __call__(self, segments: Sequence[Segment], *, session: str | None = None) -> Found:
        """The stored variants of these segments."""
        ...


class VariantMaker:
    """Captures what was reused and fixed, most asked for first, in a thread that lives while there is something to do.

    Args:
        stack, store, loader, write_back: the engine's.
        look_up: finds what is stored.
        take_lock: the lock of the engine's passes.
        activity: the answers that are under way.
    """

    def __init__(
        self,
        config: NewVariants,
        *,
        stack: Stack,
        store: ChunkCacheStore,
        loader: Loader,
        write_back: WriteBackQueue,
        look_up: LookUp,
        take_lock: Callable[[], AbstractContextManager[object]],
        activity: Activity,
    ) -> None:
        self.config = config
        self._stack, self._store, self._loader, self._write_back = stack, store, loader, write_back
        self._look_up, self._take_lock, self._activity = look_up, take_lock, activity
        self._changed = threading.Condition()  # guards what follows
        self._candidates = Candidates(config.waiting)
        self._allowance = 0.0  # tokens that may be computed; below zero by less than one prompt
        self._refusals = 0  # in a row
        self._captured = self._tokens = 0
        self._dropped: Counter[str] = Counter()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._running: Candidate | None = None
        self._removed = False  # a chunk of the running one

    @property
    def stats(self) -> NewVariantStats:
        """Numbers so far."""
        with self._changed:
            return NewVariantStats(self._captured, self._tokens, len(self._candidates), dict(self._dropped))

    def served(self, prompt_tokens: int, candidate: Candidate | None) -> None:
        """A prompt was answered: its tokens count towards the budget, and what was fixed in it now waits."""
        if self.config.when == "off":
            return
        with self._changed:
            earned = self.config.share * prompt_tokens
            self._allowance = min(self._allowance + earned, self.config.share * max(_MOST_SAVED_UP, prompt_tokens))
            if candidate is not None:
                if self._closed:
                    self._dropped[Dropped.CLOSED] += 1
                elif self._candidates.add(candidate) is not None:
                    self._dropped[Dropped.FULL] += 1
            self._start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left that the budget allows; False when that takes longer than `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout)

    def forget(self, chunk_ids: Collection[str]) -> None:
        """Chunks were removed: none of them is captured any more, whatever waits or is being computed."""
        gone = frozenset(chunk_ids)
        with self._changed:
            for candidate in self._candidates.having(gone):
                if candidate is self._running:
                    self._removed = True
                else:
                    self._candidates.remove(candidate)
                    self._dropped[Dropped.REMOVED] += 1
            self._changed.wait_for(lambda: not self._removed)

    def close(self) -> None:
        """Forget what waits, and end the thread before its next layer."""
        with self._changed:
            self._closed = True
            self._forget()
            thread = self._thread
        if thread is not None:
            thread.join()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        if count := self._candidates.clear():
            self._dropped[Dropped.CLOSED] += count

    def _start(self) -> None:
        """Have a thread while there is something to do; the caller holds the lock.

        It is no daemon: one that still computes while the interpreter is taken down may crash it. Instead it ends when
        the main thread does.
        """
        if self._thread is not None or self._closed or self._next() is None:
            return
        self._thread = threading.Thread(target=self._work, name="cachecraft-new-variants")
        try:
            self._thread.start()
        except RuntimeError:  # how Python says that the program ends
            self._thread = None

    def _next(self) -> Candidate | None:
        return self._candidates.best() if self._allowance > 0.0 else None

    def _work(self) -> None:
        while True:
            with self._changed:
                candidate = None if self._ending() else self._next()
                if candidate is None:
                    self._thread = None
                    self._changed.notify_all()
                    return
                self._running = candidate
            try:
                dropped = self._capture(candidate)
            except _Removed:
                dropped = Dropped.REMOVED
            except _Ended:
                with self._changed:
                    self._forget()
                    self._rest()
                continue
            except _TROUBLE:
                logger.exception("A new variant could not be computed")
                dropped = Dropped.FAILED
            except BaseException:  # a mistake of ours: it is raised, and no more variants are made
                with self._changed:
                    self._closed, self._thread = True, None
                    self._forget()
                    self._rest()
                raise
            with self._changed:
                self._candidates.remove(candidate)
                if dropped is not None:
                    self._dropped[dropped] += 1
                self._rest()

    def _rest(self) -> None:
        """Nothing is being computed; the caller holds the lock."""
        self._running, self._removed = None, False
        self._changed.notify_all()

    def _ending(self) -> bool:
        return self._closed or not threading.main_thread().is_alive()

    def _go_on(self) -> None:
        if self._ending():
            raise _Ended
        if self._removed:
            raise _Removed

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One layer's turn: the engine's lock, at a moment when nobody is being answered (but see "always")."""
        while True:
            self._await_idle()
            with self._take_lock():
                if self._ending() or self._removed or not self._free():  # meanwhile somebody has asked
                    continue
                yield
                return

    def _free(self) -> bool:
        return self.config.when == "always" or (self._activity.idle and not self._write_back.pending())

    def _await_idle(self) -> None:
        self._go_on()
        while not self._free():
            if self._activity.wait_idle(_LOOK_S, unless=self._ending):
                self._write_back.wait_for(self._write_back.pending())  # those of answers go first
            self._go_on()

    def _capture(self, candidate: Candidate) -> Dropped | None:
        """Compute and store what is still missing of it; returns why not all of it is stored now."""
        self._await_idle()
        prompt, found = self._still_missing(candidate)
        if prompt is None:
            return Dropped.STORED
        # Only what is exact to the bit may stand before a capture that is to be called exact.
        exact = {
            name: [variant for variant in offers if variant.lossless and variant.exact_share >= 1.0]
            for name, offers in found.variants.items()
        }
        resolved = resolve(
            prompt,
            replace(found, variants=exact),
            _EXACT,
            store=self._store,
            ranks=self._stack.ranks,
            answer_tokens=0,
        )
        with closing(resolved), self._loader.loading(resolved.to_load) as loads:
            speed = ComputeSpeed(self._stack.keys_per_row)  # waits for turns would spoil what the engine has measured
            steps = OverlappedPrefill(self._stack, resolved.job, loads, speed).steps()
            result = run_by_layer(self._stack, steps, self._turn, go_on=self._go_on)
        as_it_went(resolved, loads, result)
        spent = result.row_layers // self._stack.layout.layers
        with self._changed:
            self._tokens += spent
            self._allowance -= math.ldexp(spent, min(self._refusals, _MOST_DOUBLINGS))
        exact_shares = [1.0] * len(prompt.segments)
        context = CaptureContext(prompt.segments, prompt.bounds, exact_shares, candidate.session, another=True)
        refused = None
        for capture in result.recorder.captures:
            stored = self._write_back.store_now(
                capture, result.recorder, result.buffer.kv[:, 0], context=context, take_turn=self._turn
            )
            with self._changed:
                if isinstance(stored, Unavailable) and stored.code is CaptureDrop.REMOVED:
                    refused = refused or Dropped.REMOVED
                elif isinstance(stored, Unavailable):  # a full disk, say: each one in a row costs twice as much
                    refused = Dropped.REFUSED
                    self._refusals += 1
                else:
                    self._captured += 1
                    self._refusals = 0
        return refused

    def _still_missing(self, candidate: Candidate) -> tuple[Prompt | None, Found]:
        """The prompt up to the last chunk that is still not stored behind its prefix, and what is stored of it."""
        found = self._look_up(candidate.segments, session=candidate.session)
        plan = make_plan(Prompt(candidate.segments), found.variants, _EXACT)
        missing = [index for index in candidate.fixed if plan.segments[index].variant is None]
        return (Prompt(candidate.segments[: max(missing) + 1]), found) if missing else (None, found)
