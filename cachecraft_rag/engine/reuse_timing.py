"""From how many tokens on an engine reuses prompts: timed with prompts of random tokens over its own store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.planning.shortest_prompt import (
    LONGEST_OVER,
    Times,
    lengths_up_to,
    prompts_of,
    shortest_prompt,
    timed,
)
from cachecraft_rag.store import ChunkCacheStore, RowFilter
from cachecraft_rag.types.kv_layout import KVLayout
from cachecraft_rag.types.prompts import Prompt

logger = logging.getLogger("cachecraft_rag")


@dataclass(frozen=True)
class ReuseTiming:
    """Settings of the measurement, and the ways of an engine to capture and to answer a prompt.

    store           the engine's store; what a measurement captures is removed after it
    layout          form of the model's keys and values
    vocabulary      number of token ids of the model
    context_length  longest prompt with its answer, in tokens
    config          settings of reuse
    capture         captures the segments of a prompt, all of them; returns once they are stored or dropped
    ask             answers a prompt with settings, and returns the seconds to the first token; None if the prompt was
                    to be reused, and was not
    warm_up_s       the first length is timed for at least so many seconds: first prompts may be slower than later ones
    """

    store: ChunkCacheStore
    layout: KVLayout
    vocabulary: int
    context_length: int
    config: ReuseConfig
    capture: Callable[[Prompt], None]
    ask: Callable[[Prompt, ReuseConfig], float | None]
    warm_up_s: float

    def min_prompt_tokens(self) -> int:
        """Return the length in tokens from which prompts are answered sooner with reuse, see `shortest_prompt`.

        If reuse is sooner at no measured length, the result is one more than the longest of them. 0 means all prompts:
        reuse is sooner even for the shortest prompt that is measured, or nothing was measured. That is so if the
        settings switch reuse off or have a `min_prompt_tokens`, if the context is too short, if the first prompt could
        not be captured or reused or was too long for the memory of a GPU, and if the store is read-only, has a remote,
        or would have to evict chunk-caches to make room for it.

        Raises StoreError if the store is closed, its folder is gone, or its catalog cannot be read or written. Errors
        of `capture` and `ask` pass, except for a GPU without memory.
        """
        if not self.config.reuse or self.config.min_prompt_tokens is not None:
            return 0
        lengths = lengths_up_to(self.context_length - LONGEST_OVER)

        def measure(tokens: int) -> Times | None:
            try:
                return self.times(tokens, least_s=self.warm_up_s if tokens == lengths[0] else 0.0)
            except torch.OutOfMemoryError:
                logger.info("No memory to time a prompt of %d tokens", tokens)
                return None

        return shortest_prompt(lengths, measure)

    def times(self, tokens: int, *, least_s: float = 0.0) -> Times | None:
        """Time a prompt of so many tokens with and without reuse; None if it cannot be captured or reused.

        Args:
            least_s: go on for so many seconds at least.

        Raises StoreError as `min_prompt_tokens` does; errors of `capture` and `ask` pass.
        """
        prompt, other = prompts_of(tokens, vocabulary=self.vocabulary)
        if not self._has_room(prompt):
            logger.info(
                "From how many tokens on reuse pays is not measured: the store has a remote, or no room. Set "
                "min_prompt_tokens if short prompts are slower with reuse."
            )
            return None

        chunk_ids = [segment.segment_id for segment in prompt.segments[:-1]]
        try:
            self.capture(other)
            if len(self._stored(chunk_ids)) < len(chunk_ids):
                return None
            return timed(self.config, partial(self.ask, prompt), least_s=least_s)
        finally:
            if self._stored(chunk_ids):  # empty for a read-only store, which cannot evict
                self.store.evict(RowFilter(chunk_ids=tuple(chunk_ids)))

    def _has_room(self, prompt: Prompt) -> bool:
        stored = self.store.stats()
        needed = self.layout.nbytes(prompt.bounds[-1])
        return stored.remote is None and stored.disk_bytes + needed <= stored.disk_budget

    def _stored(self, chunk_ids: Sequence[str]) -> Sequence[object]:
        return self.store.rows(RowFilter(chunk_ids=tuple(chunk_ids)))
