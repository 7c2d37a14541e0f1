"""Priming: bear a document's chunks ahead of the first question, each behind the chunks before it in the document.

Neighbours from the same document are the most faithful birth prefix measured: reuse behind other chunks loses half as
much as after births behind unrelated ones (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cachecraft_rag.birthing import BirthContext, BirthQueue
from cachecraft_rag.errors import ConfigError, ContextLengthError
from cachecraft_rag.models import Decoder
from cachecraft_rag.prefill import PrefillInput, prefill
from cachecraft_rag.prompt import PromptBuilder, Segment
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.turns import FairLock
from cachecraft_rag.types import Chunk, VariantKey


class Primer:
    """Bears chunk-caches in bulk.

    Args:
        decoder, store, prompts, births, turn, namespace: the engine's own.
        window: most tokens computed in one pass; a longer document is cut into overlapping windows.
        sink_tokens: see `ReuseConfig`.
    """

    def __init__(
        self,
        decoder: Decoder,
        store: ChunkCacheStore,
        *,
        prompts: PromptBuilder,
        births: BirthQueue,
        turn: FairLock,
        namespace: str,
        sink_tokens: int,
        window: int = 2048,
    ) -> None:
        self._decoder, self._store, self._prompts = decoder, store, prompts
        self._births, self._turn, self._namespace = births, turn, namespace
        self._sink_tokens = sink_tokens
        self._window = min(window, decoder.context_length)

    def prime(self, chunks: Sequence[Chunk]) -> int:
        """Bear one document's chunks in order; returns how many were born. They are in the store when this returns.

        Chunks already born behind these very neighbours are skipped, so an interrupted run resumes where it stopped.

        Raises:
            ContextLengthError: a single chunk is longer than the window.
            ConfigError: the instruction is private, and what is born behind it belongs to a session.
        """
        if self._prompts.system.private:
            raise ConfigError("chunks cannot be primed behind a private instruction; prime with the shared one")
        return sum(self._prime_window(window, known) for window, known in self._windows(chunks))

    def _prime_window(self, window: Sequence[Segment], known: int) -> int:
        """Compute one window; its first `known` chunks are there as context and were born in the window before."""
        segments = (self._prompts.system, *window)
        ids = [segment.segment_id for segment in segments]
        keys = [
            VariantKey(self._namespace, self._decoder.fingerprint, name, tuple(ids[:i])) for i, name in enumerate(ids)
        ]
        variant_ids = [key.variant_id for key in keys]
        present = self._present(ids)
        births = [index for index, name in enumerate(variant_ids) if not 0 < index <= known and name not in present]
        if not births:
            return 0
        bounds = [0]
        for segment in segments:
            bounds.append(bounds[-1] + len(segment.token_ids))
        stop = bounds[births[-1] + 1]  # nothing behind the last birth need be computed
        token_ids = [token for segment in segments for token in segment.token_ids]
        work = PrefillInput(token_ids, bounds[: births[-1] + 2], range(stop), births=births)
        with self._turn:
            output = prefill(self._decoder, work)
        if output.recorder is not None:
            exact = [1.0] * len(segments)
            context = BirthContext(segments, bounds, exact, session=None, sink_tokens=self._sink_tokens)
            self._births.submit(output.recorder, output.merged.kv[:, 0], context)
            self._births.wait_for([ids[index] for index in births])
        present = self._present(ids)  # what a full disk refused was not born
        return sum(variant_ids[index] in present for index in births)

    def _present(self, segment_ids: Sequence[str]) -> set[str]:
        """Ids of all shared variants of these segments."""
        stored = self._store.lookup(self._namespace, self._decoder.fingerprint, segment_ids)
        return {variant.variant_id for variants in stored.values() for variant in variants}

    def _windows(self, chunks: Sequence[Chunk]) -> Iterator[tuple[list[Segment], int]]:
        """Runs of neighbouring chunks that fit one pass, and how many of each run's first ones are context only.

        A next run begins with up to a quarter of the pass taken from the end of the one before, so that no chunk is
        born out of context.
        """
        room = self._window - len(self._prompts.system.token_ids)
        run: list[Segment] = []
        known = 0
        for segment in dict.fromkeys(self._prompts.chunk_segment(chunk) for chunk in chunks):
            length = len(segment.token_ids)
            if length > room:
                raise ContextLengthError(
                    f"a chunk of {length} tokens does not fit a pass of {room}; split documents into smaller chunks"
                )
            if _tokens(run) + length > room:
                yield run, known
                run = list(run)
                while run and (_tokens(run) > room // 4 or _tokens(run) + length > room):
                    del run[0]
                known = len(run)
            run.append(segment)
        if len(run) > known:
            yield run, known


def _tokens(run: Sequence[Segment]) -> int:
    return sum(len(segment.token_ids) for segment in run)
