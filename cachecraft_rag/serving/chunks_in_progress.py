"""Chunk-caches in progress: a request waits for those that another request makes, instead of computing them again.

A chunk-cache in progress is

computed   by a request that has announced it
held back  by that request until its answer ends or another request wants it; only in this process
captured   described and stored; `CaptureDescriber` says which segments are

A request with reuse waits while a chunk-cache that it wants is in progress, if it may use it: same tenant, same LoRA
adapter, a session and an origin prefix that fit (`ExpectedVariant.serves`). For others it does not wait: its time to
the first token would reveal what they have sent. The wait ends once the chunk-cache is stored or dropped, or the other
request fails, is aborted or gives up. Then the request looks up again, and computes what it still lacks.

Work in idle time may be given up at any moment, so its chunk-caches are waited for only while they are captured.

Engines differ in how they wait. The step loop of this process sees each end at once, and waits without a limit. vLLM's
scheduler is asked again in each step, hears of captures from other processes, and waits for a limited time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field

from cachecraft_rag.planning.config import Scope
from cachecraft_rag.planning.planner import Plan
from cachecraft_rag.types.prompts import Prompt

Owner = tuple[str, Hashable | None]
"""Tenant ("": the engine's own) and LoRA adapter (None: the base model)."""


@dataclass(frozen=True, slots=True)
class ExpectedVariant:
    """A chunk-cache that will be captured: its chunk, its origin prefix, and its session (None: shared)."""

    segment_id: str
    origin_prefix: tuple[str, ...]
    session: str | None

    def serves(self, wanted: ExpectedVariant, scope: Scope) -> bool:
        """Return True if it may be used in place of `wanted`.

        It must be of the same chunk, be shared or of the same session, and have an origin prefix that `scope` allows:
        any for "anywhere", one of the same segments in any order for "set", the same for "prefix".

        >>> shared = ExpectedVariant("c", ("system", "a"), None)
        >>> private = ExpectedVariant("c", ("system", "b"), "ann")
        >>> shared.serves(private, "anywhere"), shared.serves(private, "prefix"), private.serves(shared, "anywhere")
        (True, False, False)
        """
        if self.segment_id != wanted.segment_id or self.session not in (None, wanted.session):
            return False
        if scope == "prefix":
            return self.origin_prefix == wanted.origin_prefix
        return scope == "anywhere" or set(self.origin_prefix) == set(wanted.origin_prefix)


@dataclass(frozen=True)
class WantedChunks:
    """The chunk-caches that a request would use, each with the request's own session.

    prefix_key  equal for requests with the same chunks in the same order, if a prefix cache serves both; else ""
    """

    owner: Owner
    variants: Sequence[ExpectedVariant]
    scope: Scope
    prefix_key: str = ""


@dataclass(eq=False)
class ExpectedCaptures:
    """The chunk-caches that one request captures.

    prefix_key  see `WantedChunks`
    idle        True for work in idle time
    computed    True once the request computes them no longer, for whatever reason
    submit      hands them to `CaptureDescriber`; None unless they are held back
    """

    owner: Owner = ("", None)
    variants: list[ExpectedVariant] = field(default_factory=list)
    prefix_key: str = ""
    idle: bool = False
    computed: bool = False
    submit: Callable[[], object] | None = None

    def serve(self, want: ExpectedVariant, wanted: WantedChunks) -> bool:
        """Return True if one of them serves `want`, one of the variants of `wanted`, and the owner is the same."""
        return self.owner == wanted.owner and any(
            variant.serves(want, wanted.scope) for variant in self.variants
        )

    def fill_prefix_cache_for(self, wanted: WantedChunks) -> bool:
        """Return True if a prefix cache has all of `wanted` after this request: same owner and `prefix_key`, not ""."""
        return self.owner == wanted.owner and self.prefix_key == wanted.prefix_key != ""

    def hand_over(self) -> None:
        """Submit what is held back; a second call does nothing."""
        submit = self.submit
        self.submit = None
        if submit is not None:
            submit()


class ChunksInProgress:
    """The chunk-caches in progress of one engine. Used in one thread.

    Args:
        captured: returns the ids of the segments that are being captured: those of an owner, perhaps others too.
    """

    def __init__(self, captured: Callable[[Owner], Collection[str]]) -> None:
        self._captured = captured
        self._announced: list[ExpectedCaptures] = []  # in order

    def announce(self, captures: ExpectedCaptures) -> None:
        """Note that a request begins to compute these chunk-caches."""
        self._announced.append(captures)

    def withdraw(self, captures: ExpectedCaptures) -> bool:
        """Forget captures that will not be made; return False if they were not announced."""
        is_announced = captures in self._announced
        if is_announced:
            self._announced.remove(captures)
        return is_announced

    def computing(self, wanted: WantedChunks) -> list[ExpectedVariant]:
        """Return the wanted chunk-caches that announced answers compute; all if a prefix cache will have them."""
        others = [
            captures for captures in self._announced if not captures.computed and not captures.idle
        ]
        if any(captures.fill_prefix_cache_for(wanted) for captures in others):
            return list(wanted.variants)
        return _served(wanted, others)

    def announced(self, owner: Owner) -> frozenset[str]:
        """Return the ids of the segments in progress that requests of this owner have announced, idle work included."""
        return frozenset(
            variant.segment_id
            for captures in self._announced
            if captures.owner == owner
            for variant in captures.variants
        )

    def held_back(self, wanted: WantedChunks) -> list[ExpectedCaptures]:
        """Return the captures with wanted chunk-caches that are held back, in the order of announcement."""
        held = [captures for captures in self._announced if captures.submit is not None]
        return [captures for captures in held if _served(wanted, [captures])]

    def capturing(self, wanted: WantedChunks) -> list[ExpectedVariant]:
        """Return which of the wanted chunk-caches are being captured.

        `CaptureDescriber` knows only segments. The announcements of a segment decide who may use its captures; a
        capture that no request has announced counts as usable.
        """
        captured = self._captured(wanted.owner)
        announced = {
            variant.segment_id
            for captures in self._announced
            for variant in captures.variants
            if captures.submit is None
        }
        served = _served(wanted, self._announced)
        return [
            want
            for want in wanted.variants
            if want.segment_id in captured and (want in served or want.segment_id not in announced)
        ]

    def forget_captured(self) -> None:
        """Forget what is computed and no longer being captured; call it when the captures under way have changed."""
        for captures in self._announced:
            if captures.computed and captures.submit is None:
                under_way = self._captured(captures.owner)
                captures.variants = [
                    variant for variant in captures.variants if variant.segment_id in under_way
                ]
        self._announced = [
            captures
            for captures in self._announced
            if not captures.computed or captures.submit is not None or captures.variants
        ]


def expected_variants(prompt: Prompt, plan: Plan, session: str | None) -> list[ExpectedVariant]:
    """Return the chunk-caches of the segments that a plan computes and that will be stored.

    Leaves out the last segment, questions, and passages found in unmarked text. A private segment and all segments
    after it belong to the session; without a session they are left out too.
    """
    ids = tuple(segment.segment_id for segment in prompt.segments)
    variants = []
    is_private = False
    for index, (segment, planned) in enumerate(zip(prompt.segments[:-1], plan, strict=False)):
        is_private = is_private or segment.private
        is_captured = planned.variant is None and segment.is_captured
        is_stored = session is not None or not is_private
        if is_captured and is_stored:
            owner = session if is_private else None
            variants.append(ExpectedVariant(ids[index], ids[:index], owner))
    return variants


def _served(wanted: WantedChunks, announced: Collection[ExpectedCaptures]) -> list[ExpectedVariant]:
    """Return which of the wanted chunk-caches these captures serve."""
    return [
        want
        for want in wanted.variants
        if any(captures.serve(want, wanted) for captures in announced)
    ]
