"""Priming: capture a document's chunks before the first question, each after its neighbours in the document.

Its neighbours are the chunks before it. The first chunk has none, so it is also captured after the next ones, in a
separate pass. A document of one chunk is captured after the chunks of other documents that are most similar to it,
because a question retrieves them together; without any, it is captured after a fixed passage.

A chunk captured after neighbours from the same document loses less, on most questions, than a chunk captured after
unrelated chunks (median KL divergence 0.67 times as large), and one pass captures many chunks. docs/results/quality.md
compares other origin prefixes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from cachecraft_rag.checks import check_whole
from cachecraft_rag.errors import ConfigError, ContextLengthError
from cachecraft_rag.model.facts import DiskSpace, ModelFacts
from cachecraft_rag.model.sizes import cache_bytes
from cachecraft_rag.prompt.builder import PromptBuilder, checked_chunks
from cachecraft_rag.store.row_checks import LookupResult
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.types.progress import Progress
from cachecraft_rag.types.prompts import Prompt, Segment
from cachecraft_rag.types.variants import VariantKey

# Tokens that a request to vLLM adds to the captured segments: a question of two, and an answer of one.
_ADDED = 3
# Chunks after which a document's first chunk is captured, which has none before it. With more of them it differs more
# from a chunk at the front of a prompt, see docs/decisions/look-alike-pages.md.
CHUNKS_BEFORE = 2
Related = Callable[[Chunk], Sequence[Chunk]]
Texts = Sequence[tuple[str, Sequence[Chunk]]]  # documents: the id and the chunks of each


class PrimableEngine(Protocol):
    """An engine, as far as priming needs it."""

    @property
    def decoder(self) -> ModelFacts:
        """The model with its layout, fingerprint and context length; facts about it alone if it runs elsewhere."""

    @property
    def namespace(self) -> str:
        """The tenant; chunk-caches never cross it."""

    @property
    def prompts(self) -> PromptBuilder:
        """The builder of the prompts of this engine's questions, with its instruction and its tokenizer."""

    def capture(self, prompt: Prompt, captures: Sequence[int], *, primed: bool) -> None:
        """Compute a prompt without a question, capture the segments with these indices, and wait for the store.

        There is at least one index, and they ascend. What is stored already is captured again. A capture that the store
        does not take is logged and counted. `primed`: the chunks are captured after their neighbours in the document.
        Raises UnsupportedCallError if this engine captures texts only.
        """

    def look_up(self, segments: Sequence[Segment], *, session: str | None = None) -> LookupResult:
        """Return the variants of segments, shared ones and those of `session`, that fit this model.

        Every given segment id is a key of `variants` in the result; all lists are empty, with a warning, if the catalog
        cannot be read. Raises UnsupportedCallError if the chunk-caches are a server's.
        """

    def disk_space(self) -> DiskSpace:
        """Return size, limit and codec of the store's folder, and the free space of its disk, in bytes."""


class DocumentPrimer(Protocol):
    """Primes documents: a `Primer`, or a server's."""

    @property
    def engine(self) -> PrimableEngine:
        """The engine whose questions will reuse the chunk-caches."""

    def prime(self, chunks: Sequence[Chunk], *, captured: Callable[[int], None] = ...) -> int:
        """Capture one document's chunks in order; return the number of captures, which are stored by then.

        The instruction is captured too if it is not stored, and counts; without chunks nothing is. Chunks that are
        stored after the same neighbours are skipped. `captured` gets the number of captures of each pass or request to
        a server, which may be 0; what it raises passes. Raises ConfigError if the instruction is private: captures
        after it would belong to a session.
        """

    def missing(self, chunks: Sequence[Chunk]) -> dict[str, int]:
        """Return variant id → number of tokens, for the variants that `prime` would capture now."""

    def fits(self, chunk: Chunk) -> bool:
        """Return True if a pass has room for the instruction and the chunk; `prime` and `missing` raise for others.

        May raise ContextLengthError if the instruction alone fills a pass.
        """


@dataclass(frozen=True, slots=True)
class PrimingEstimate:
    """Cost of priming, before anything is computed; sizes are in bytes.

    captures     chunk-caches that are missing, including that of the instruction
    tokens       their tokens
    nbytes       their size on disk with the store's codec; approximate for `entropy`
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
        """True if the missing bytes fit the store's limit and the disk, so that none is evicted for bytes."""
        return self.nbytes <= min(self.disk_budget - self.disk_used, self.disk_free)


class Primer:
    """Captures chunk-caches in bulk, for one engine and with its model, prompt and store.

    Args:
        engine: captures the chunks; its questions will reuse them.
        window: most tokens computed in one pass; a longer document is cut into overlapping windows, and a chunk that
            does not fit one with the instruction raises ContextLengthError before anything is computed.
        alone: capture each chunk after a fixed passage (`prompt.STAND_IN`) instead of its document's chunks. No other
            text shapes such captures, and they do not change with their neighbours.
        related: returns the chunks of other documents that a chunk is likely to be retrieved with, best first. A
            document of one chunk is captured after the first `CHUNKS_BEFORE` of them. Not with `alone`.
    """

    def __init__(
        self,
        engine: PrimableEngine,
        *,
        window: int = 2048,
        alone: bool = False,
        related: Related | None = None,
    ) -> None:
        if alone and related is not None:
            raise ConfigError("alone captures a chunk after no other: leave related out")
        check_whole("window", window, least=1)
        self.engine = engine
        self._alone = alone
        self._related = related
        self._window = min(window, engine.decoder.context_length - _ADDED)

    def prime(
        self, chunks: Sequence[Chunk], *, captured: Callable[[int], None] = lambda _count: None
    ) -> int:
        """Capture a document, see `DocumentPrimer.prime`; its first chunk also after the next ones, which counts twice.

        With `alone`, each chunk is captured once. A fixed passage is captured and counted like the instruction. An
        interrupted run resumes where it stopped. A document of one chunk is skipped too if it was primed after
        chunks of other documents before and `related` still returns some. Captures that the store refuses are not
        counted. If the catalog cannot be read, chunks are computed, but captures do not count as stored.
        """
        self._require_shared()
        chunks = checked_chunks(chunks)
        total = 0
        for window, known in self._windows(chunks):
            has_neighbours = self.engine.prompts.stand_in not in window
            count = self._prime_window(window, known, primed=has_neighbours)
            captured(count)
            total += count
        return total

    def missing(self, chunks: Sequence[Chunk]) -> dict[str, int]:
        """Return variant id → tokens of what `prime` would capture now; of all if the catalog cannot be read."""
        missing: dict[str, int] = {}
        for window, known in self._windows(checked_chunks(chunks)):
            variant_ids, captures = self._captures(window, known)
            segments = [self.engine.prompts.system, *window]
            for index in captures:
                missing[variant_ids[index]] = len(segments[index].token_ids)
        return missing

    def fits(self, chunk: Chunk) -> bool:
        """Return True if a pass has room for instruction and chunk; ContextLengthError if the former fills it alone."""
        return len(self.engine.prompts.chunk_segment(chunk).token_ids) <= self._room([])

    def capture(self, chunk: Chunk, after: Sequence[Chunk] = ()) -> int:
        """Capture a chunk after others (nearest last), and the instruction; return how many were stored (0 to 2).

        What is stored after the same segments is skipped; captures do not count as primed. Of the others, repeated
        chunks, the chunk itself and the furthest that do not fit the window are left out.
        """
        self._require_shared()
        segment = self.engine.prompts.chunk_segment(chunk)
        before = dict.fromkeys(self.engine.prompts.chunk_segment(other) for other in after)
        window = self._fitting(list(before), segment)
        return self._prime_window(window, len(window) - 1, primed=False)

    def _require_shared(self) -> None:
        if self.engine.prompts.system.private:
            raise ConfigError(
                "chunks cannot be primed after a private instruction; prime with the shared one"
            )

    def _room(self, segments: Sequence[Segment]) -> int:
        """Return the tokens that a pass has for chunks."""
        instruction = len(self.engine.prompts.system.token_ids)
        room = self._window - instruction
        if room <= 0:
            raise ContextLengthError(
                f"the instruction of {instruction} tokens leaves no room for a chunk in a pass of {self._window}; "
                "shorten it"
            )
        longest = max((len(segment.token_ids) for segment in segments), default=0)
        if longest > room:
            raise ContextLengthError(
                f"a chunk of {longest} tokens does not fit a pass of {room}; split documents into smaller chunks"
            )
        return room

    def _prime_window(self, window: Sequence[Segment], known: int, *, primed: bool) -> int:
        """Compute one window; its first `known` chunks are context, and were captured in the window before."""
        prompt = Prompt((self.engine.prompts.system, *window))
        variant_ids, captures = self._captures(window, known)
        if not captures:
            return 0
        self.engine.capture(prompt, captures, primed=primed)
        present = self._present(prompt.segments)  # a full disk may have refused some
        return sum(variant_ids[index] in present for index in captures)

    def _captures(self, window: Sequence[Segment], known: int) -> tuple[list[str], list[int]]:
        """Return the variant ids of the instruction and a window's chunks, and the indices of those to capture."""
        engine = self.engine
        segments = (engine.prompts.system, *window)
        segment_ids = [segment.segment_id for segment in segments]
        variant_ids = []
        for index, segment_id in enumerate(segment_ids):
            prefix = tuple(segment_ids[:index])
            key = VariantKey(engine.namespace, engine.decoder.fingerprint, segment_id, prefix)
            variant_ids.append(key.variant_id)

        present = self._present(segments)
        captures = []
        for index, variant_id in enumerate(variant_ids):
            is_context_only = 0 < index <= known
            if not is_context_only and variant_id not in present:
                captures.append(index)
        return variant_ids, captures

    def _present(self, segments: Sequence[Segment]) -> set[str]:
        """Return the ids of all shared variants of these segments."""
        stored = self.engine.look_up(segments).variants
        return {variant.variant_id for variants in stored.values() for variant in variants}

    def _windows(self, chunks: Sequence[Chunk]) -> Iterator[tuple[list[Segment], int]]:
        """Yield runs of neighbouring chunks that fit a pass, and how many first chunks of each are context only.

        Each window begins with up to a quarter of the pass taken from the end of the window before, because no chunk
        is to be captured out of context.
        """
        segments = list(dict.fromkeys(self.engine.prompts.chunk_segment(chunk) for chunk in chunks))
        if not segments:
            return
        room = self._room(segments)
        if self._alone:
            for segment in segments:
                yield self._fitting([self.engine.prompts.stand_in], segment), 0
            return
        if len(segments) == 1:
            yield from self._single_chunk_window(chunks[0], segments[0])
            return

        window: list[Segment] = []
        known = 0
        for segment in segments:
            length = len(segment.token_ids)
            if _tokens(window) + length > room:
                yield window, known
                window = list(window)
                while window and (_tokens(window) > room // 4 or _tokens(window) + length > room):
                    del window[0]
                known = len(window)
            window.append(segment)
        if len(window) > known:
            yield window, known

        # The first chunk a second time: captured alone it serves well only at the front of a prompt.
        window = self._fitting(segments[1 : 1 + CHUNKS_BEFORE], segments[0])
        if len(window) > 1:
            yield window, len(window) - 1

    def _single_chunk_window(
        self, chunk: Chunk, segment: Segment
    ) -> Iterator[tuple[list[Segment], int]]:
        """Yield the window of a document of one chunk, in the form of `_windows`.

        Yields nothing if the chunk has been captured after other chunks already: documents that are added to the index
        change its most similar chunks, and need not make it be captured again.
        """
        prompts = self.engine.prompts
        related = [] if self._related is None else self._related(chunk)[:CHUNKS_BEFORE]
        if not related:
            yield self._fitting([prompts.stand_in], segment), 0
            return

        variants = self.engine.look_up([segment]).variants.get(segment.segment_id, ())
        if any(variant.primed and len(variant.key.origin_prefix) > 1 for variant in variants):
            return
        # The most similar chunk is placed next to this one.
        before = [prompts.chunk_segment(other) for other in reversed(related)]
        window = self._fitting(before, segment)
        yield window, len(window) - 1

    def _fitting(self, before: Sequence[Segment], segment: Segment) -> list[Segment]:
        """Return a segment after as many of the others as fit a pass with it."""
        window = [*(other for other in before if other != segment), segment]
        while _tokens(window) > self._room([segment]):
            del window[0]
        return window


def _tokens(window: Sequence[Segment]) -> int:
    return sum(len(segment.token_ids) for segment in window)


def estimate_priming(primer: DocumentPrimer, texts: Texts) -> PrimingEstimate:
    """Estimate the work of `prime_documents`; nothing is computed. Chunks that do not fit a pass are left out.

    Variants that several documents share count once.
    """
    engine = primer.engine
    missing: dict[str, int] = {}
    for _, chunks in texts:
        missing |= primer.missing([chunk for chunk in chunks if primer.fits(chunk)])

    space = engine.disk_space()
    layout = engine.decoder.layout
    return PrimingEstimate(
        captures=len(missing),
        tokens=sum(missing.values()),
        nbytes=sum(cache_bytes(layout, tokens, space.codec) for tokens in missing.values()),
        disk_used=space.used,
        disk_budget=space.budget,
        disk_free=space.free,
    )


def prime_documents(
    primer: DocumentPrimer,
    texts: Texts,
    *,
    progress: Callable[[Progress], None] | None = None,
    skipped: Callable[[str], None],
) -> int:
    """Prime documents one after the other; return the number of captures, which are stored by then.

    What was captured before an error stays. What the callbacks raise passes.

    Args:
        primer: captures them.
        texts: id and chunks of each document; several may have the same id.
        progress: called with the captures so far and in all, before the first pass and after each that captures.
        skipped: called first, with a sentence about each document that has too long chunks, which are left out.
    """
    documents: list[tuple[str, list[Chunk]]] = []
    for name, chunks in texts:
        fitting = [chunk for chunk in chunks if primer.fits(chunk)]
        documents.append((name, fitting))
        left_out = len(chunks) - len(fitting)
        if left_out > 0:
            skipped(
                f"{name}: {left_out} of {len(chunks)} chunks are too long for the model and were not computed; "
                "index the document again with this model"
            )

    missing: dict[str, int] = {}
    if progress is not None:
        for _, fitting in documents:
            missing |= primer.missing(fitting)
        progress(Progress(0, len(missing), "priming"))

    done = 0
    for name, fitting in documents:

        def captured(count: int, name: str = name) -> None:
            nonlocal done
            done += count
            if progress is not None and count:
                progress(Progress(done, max(done, len(missing)), f"priming {name}"))

        primer.prime(fitting, captured=captured)
    return done
