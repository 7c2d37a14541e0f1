"""Priming: capture a document's chunks ahead of the first question, each behind its neighbours in the document.

These are the chunks before it. The first chunk has none, so it is captured behind the next ones too, in a pass of its
own. A document of one chunk is captured behind a fixed passage.

A chunk captured behind neighbours from its own document loses less, on most questions, than one captured behind
unrelated chunks (median KL 0.67 of it), and one pass captures many of them. How other origin prefixes compare:
docs/fidelity.md.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cachecraft_rag.errors import ConfigError, ContextLengthError
from cachecraft_rag.model.facts import DiskSpace, ModelFacts
from cachecraft_rag.model.sizes import cache_bytes
from cachecraft_rag.prompt.builder import PromptBuilder
from cachecraft_rag.store.closeable import Closeable
from cachecraft_rag.store.row_checks import Found
from cachecraft_rag.types import Chunk, Progress, Prompt, Segment, VariantKey

_NEXT = 2  # chunks that a document's first one is captured behind
Texts = Sequence[tuple[str, Sequence[Chunk]]]  # documents: the id and the chunks of each


class PrimedEngine(Closeable):
    """An engine that captures chunks ahead of questions.

    Attributes:
        decoder: the model, or what is known of it where it runs elsewhere.
        namespace: the tenant; chunk-caches never cross it.
        prompts: lays out prompts.
    """

    decoder: ModelFacts
    namespace: str
    prompts: PromptBuilder

    @abstractmethod
    def capture(self, prompt: Prompt, captures: Sequence[int], *, primed: bool) -> None:
        """Compute a prompt, capture these of its segments, and return when they are stored.

        Args:
            prompt: system segment and chunks, without a question.
            primed: see `types.Variant`.
        """

    @abstractmethod
    def look_up(self, segments: Sequence[Segment], *, session: str | None = None) -> Found:
        """The stored variants of these segments for this model; what does not fit model or segment is left out."""

    @abstractmethod
    def disk_space(self) -> DiskSpace:
        """Space of the folder where captures are stored."""


@dataclass(frozen=True, slots=True)
class PrimingEstimate:
    """Cost of priming, before anything is computed.

    captures     chunk-caches that are missing, the instruction's included
    tokens       their tokens
    nbytes       their size on disk with the store's codec; for `entropy` about
    disk_used    size of the store's files now
    disk_budget  limit of the store's files: beyond it the least useful chunk-caches are evicted
    disk_free    free space of the disk
    """

    captures: int
    tokens: int
    nbytes: int
    disk_used: int
    disk_budget: int
    disk_free: int

    @property
    def fits(self) -> bool:
        """True if all chunk-caches will be kept."""
        return self.nbytes <= min(self.disk_budget - self.disk_used, self.disk_free)


class Primer:
    """Captures chunk-caches in bulk, for one engine and with its model, prompt and store.

    Args:
        engine: whose questions are to find the chunk-caches.
        window: most tokens computed in one pass; a longer document is cut into overlapping windows.
        alone: capture each chunk behind a fixed passage (`prompt.STAND_IN`) instead of its document's chunks: nobody
            else's words shape such captures, and they do not change with their neighbours.
    """

    def __init__(self, engine: PrimedEngine, *, window: int = 2048, alone: bool = False) -> None:
        self.engine = engine
        self._alone = alone
        self._window = min(window, engine.decoder.context_length)

    def prime(self, chunks: Sequence[Chunk], *, captured: Callable[[int], None] = lambda _count: None) -> int:
        """Capture one document's chunks in order; returns how many. They are in the store when this returns.

        Args:
            captured: called after each pass with the number of its captures.

        Chunks stored behind these very neighbours are skipped, so an interrupted run resumes where it stopped.

        Raises:
            ContextLengthError: a single chunk is longer than the window.
            ConfigError: the instruction is private, and what is captured behind it belongs to a session.
        """
        self._require_shared()
        total = 0
        for window, known in self._windows(chunks):
            count = self._prime_window(window, known, primed=self.engine.prompts.stand_in not in window)
            captured(count)
            total += count
        return total

    def missing(self, chunks: Sequence[Chunk]) -> dict[str, int]:
        """Variant ids that `prime` would capture now, with their numbers of tokens."""
        found: dict[str, int] = {}
        for window, known in self._windows(chunks):
            variant_ids, captures = self._captures(window, known)
            lengths = [len(self.engine.prompts.system.token_ids), *(len(segment.token_ids) for segment in window)]
            found |= {variant_ids[index]: lengths[index] for index in captures}
        return found

    def fits(self, chunk: Chunk) -> bool:
        """Return whether a pass has room for the chunk; one that does not fit cannot be primed."""
        return len(self.engine.prompts.chunk_segment(chunk).token_ids) <= self._room([])

    def capture(self, chunk: Chunk, behind: Sequence[Chunk] = ()) -> int:
        """Capture one chunk behind the given ones, and the instruction if it is missing; returns how many in all.

        The chunks furthest from it are left out if they do not all fit the window. What is stored behind this very
        prefix is skipped. Errors as `prime`.
        """
        self._require_shared()
        segment = self.engine.prompts.chunk_segment(chunk)
        before = dict.fromkeys(self.engine.prompts.chunk_segment(other) for other in behind)
        run = self._behind(list(before), segment)
        return self._prime_window(run, len(run) - 1, primed=False)

    def _require_shared(self) -> None:
        if self.engine.prompts.system.private:
            raise ConfigError("chunks cannot be primed behind a private instruction; prime with the shared one")

    def _room(self, segments: Sequence[Segment]) -> int:
        """Tokens that a pass has for chunks; ContextLengthError where one of these does not fit."""
        room = self._window - len(self.engine.prompts.system.token_ids)
        longest = max((len(segment.token_ids) for segment in segments), default=0)
        if longest > room:
            raise ContextLengthError(
                f"a chunk of {longest} tokens does not fit a pass of {room}; split documents into smaller chunks"
            )
        return room

    def _prime_window(self, window: Sequence[Segment], known: int, *, primed: bool) -> int:
        """Compute one window; its first `known` chunks are there as context and were captured in the window before."""
        prompt = Prompt((self.engine.prompts.system, *window))
        variant_ids, captures = self._captures(window, known)
        if not captures:
            return 0
        self.engine.capture(prompt, captures, primed=primed)
        present = self._present(prompt.segments)  # what a full disk refused was not captured
        return sum(variant_ids[index] in present for index in captures)

    def _captures(self, window: Sequence[Segment], known: int) -> tuple[list[str], list[int]]:
        """Variant ids of the instruction and of a window's chunks, and the places of those that are to be captured."""
        engine, segments = self.engine, (self.engine.prompts.system, *window)
        ids, fingerprint = [segment.segment_id for segment in segments], engine.decoder.fingerprint
        keys = [VariantKey(engine.namespace, fingerprint, name, tuple(ids[:i])) for i, name in enumerate(ids)]
        names, present = [key.variant_id for key in keys], self._present(segments)
        return names, [index for index, name in enumerate(names) if not 0 < index <= known and name not in present]

    def _present(self, segments: Sequence[Segment]) -> set[str]:
        """Ids of all shared variants of these segments."""
        found = self.engine.look_up(segments).variants
        return {variant.variant_id for variants in found.values() for variant in variants}

    def _windows(self, chunks: Sequence[Chunk]) -> Iterator[tuple[list[Segment], int]]:
        """Runs of neighbouring chunks that fit one pass, and how many of each run's first ones are context only.

        A next run begins with up to a quarter of the pass taken from the end of the one before, so that no chunk is
        captured out of context.
        """
        segments = list(dict.fromkeys(self.engine.prompts.chunk_segment(chunk) for chunk in chunks))
        room = self._room(segments)
        if self._alone or len(segments) < 2:
            yield from ((self._behind([self.engine.prompts.stand_in], segment), 0) for segment in segments)
            return
        run: list[Segment] = []
        known = 0
        for segment in segments:
            length = len(segment.token_ids)
            if _tokens(run) + length > room:
                yield run, known
                run = list(run)
                while run and (_tokens(run) > room // 4 or _tokens(run) + length > room):
                    del run[0]
                known = len(run)
            run.append(segment)
        if len(run) > known:
            yield run, known
        # The first chunk once more: captured alone it serves well at a prompt's front only.
        run = self._behind(segments[1 : 1 + _NEXT], segments[0])
        if len(run) > 1:
            yield run, len(run) - 1

    def _behind(self, before: Sequence[Segment], segment: Segment) -> list[Segment]:
        """A segment behind as many of the others as fit a pass with it."""
        run = [*(other for other in before if other != segment), segment]
        while _tokens(run) > self._room([segment]):
            del run[0]
        return run


def _tokens(run: Sequence[Segment]) -> int:
    return sum(len(segment.token_ids) for segment in run)


def estimate_priming(primer: Primer, texts: Texts) -> PrimingEstimate:
    """Estimate the work of `prime_documents`. Nothing is computed."""
    engine = primer.engine
    missing: dict[str, int] = {}
    for _, chunks in texts:
        missing |= primer.missing([chunk for chunk in chunks if primer.fits(chunk)])
    space, layout = engine.disk_space(), engine.decoder.layout
    return PrimingEstimate(
        captures=len(missing),
        tokens=sum(missing.values()),
        nbytes=sum(cache_bytes(layout, tokens, space.codec) for tokens in missing.values()),
        disk_used=space.used,
        disk_budget=space.budget,
        disk_free=space.free,
    )


def prime_documents(
    primer: Primer, texts: Texts, *, progress: Callable[[Progress], None] | None = None, skipped: Callable[[str], None]
) -> int:
    """Prime documents one by one; arguments and result as `CacheCraft.prime`."""
    fitting = {}
    for name, chunks in texts:
        fitting[name] = [chunk for chunk in chunks if primer.fits(chunk)]
        if (left_out := len(chunks) - len(fitting[name])) > 0:
            skipped(
                f"{name}: {left_out} of {len(chunks)} chunks are too long for the model and were not computed; "
                "index the document again with this model"
            )
    missing: dict[str, int] = {}
    if progress is not None:
        for chunks in fitting.values():
            missing |= primer.missing(chunks)
        progress(Progress(0, len(missing), "priming"))
    done = 0
    for name, chunks in fitting.items():

        def captured(count: int, name: str = name) -> None:
            nonlocal done
            done += count
            if progress is not None and count:
                progress(Progress(done, max(done, len(missing)), f"priming {name}"))

        primer.prime(chunks, captured=captured)
    return done
