"""The measurement of the length from which an engine reuses prompts, with made-up prompts over its own store.

`planning.shortest_prompt` makes the prompts and decides by their times. Here they are captured, answered with and
without reuse, and removed again, by an engine in this process or one over vLLM.
"""

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

        One more than the longest measured length if reuse is sooner at none; 0 if it is sooner at the shortest, or if
        nothing was measured: the settings switch reuse off, have a `min_prompt_tokens`, or reuse after the same prefix
        only (moved chunks are timed here); the context is too short; the store is read-only, has a remote, or has no
        room; or the first prompt could not be captured or reused, or was too long for a GPU's memory.

        A fifth of the tokens is recomputed if the settings have no `recompute_ratio`. With a larger α or a quality
        target that recomputes more, reuse pays from longer prompts on than this says.
        """
        config = self.config
        if (
            not config.reuse
            or config.min_prompt_tokens is not None
            or config.method.scope == "prefix"
        ):
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
        """Time a prompt of so many tokens with and without reuse, for `least_s` seconds at least.

        None if it cannot be captured or reused, or the store takes nothing. What it captured is removed.
        """
        prompt, other = prompts_of(tokens, vocabulary=self.vocabulary)
        if not self._has_room(prompt):
            logger.info(
                "From how many tokens on reuse pays is not measured: the store is read-only, has a remote, or has no "
                "room. Set min_prompt_tokens if short prompts are slower with reuse."
            )
            return None

        chunk_ids = [segment.segment_id for segment in prompt.segments[:-1]]
        try:
            self.capture(other)
            if len(self._stored(chunk_ids)) < len(chunk_ids):
                return None
            ask = partial(self.ask, prompt)
            return timed(self.config, ask, tokens=tokens, least_s=least_s)
        finally:
            if self._stored(chunk_ids):
                self.store.evict(RowFilter(chunk_ids=tuple(chunk_ids)))

    def _has_room(self, prompt: Prompt) -> bool:
        stored = self.store.stats(ask_remote=False)
        if self.store.read_only or stored.remote is not None:
            return False
        nbytes = self.layout.nbytes(prompt.bounds[-1])
        variants = len(prompt.segments) - 1
        return (
            stored.disk_bytes + nbytes <= stored.disk_budget
            and stored.variants + variants <= self.store.limits.max_variants
        )

    def _stored(self, chunk_ids: Sequence[str]) -> Sequence[object]:
        return self.store.rows(RowFilter(chunk_ids=tuple(chunk_ids)))
