"""The interface of prompt compressors, and their token budget.

Cache-Craft §5.1.4 compares compression with reuse at equal cost: 80 % compression corresponds to 20 % recomputation. So
`ratio` here is the share of the chunks' tokens to keep, comparable with a recompute ratio of the same value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.types import Chunk

MIN_TOKENS = 4  # the smallest budget of a chunk: fewer tokens say nothing


class Compressor(Protocol):
    """Shortens the chunks of one question.

    Effects: none outside the compressor; no chunk-cache is read or captured. The caller adds its time to the time to
    the first token, and answers over the result with full prefill.
    Lifetime: serves any number of questions, one at a time; keeps its model until it is deleted.
    """

    def compress(self, question: str, chunks: Sequence[Chunk], ratio: float) -> tuple[Chunk, ...]:
        """The same chunks in the same order, each with a shorter text and its own metadata.

        Args:
            question: the question that follows; a compressor may ignore it.
            ratio: share of each chunk's tokens to keep, above 0 and at most 1 (1 = unchanged), in tokens of the
                answering model. Each implementation says how closely it keeps to the ratio.

        Raises:
            ConfigError: the ratio is out of range.
        """
        ...


def check_ratio(ratio: float) -> None:
    """Raise ConfigError unless `ratio` lies above 0 and at most at 1."""
    if not 0 < ratio <= 1:
        raise ConfigError(f"a compression ratio is the share to keep, above 0 and at most 1, not {ratio}")


def token_budget(tokens: int, ratio: float) -> int:
    """⌈ratio · tokens⌉, the most tokens a compressed chunk may have; never below `MIN_TOKENS`.

    >>> token_budget(200, 0.15), token_budget(201, 0.15), token_budget(10, 0.15)
    (30, 31, 4)
    """
    return max(MIN_TOKENS, math.ceil(ratio * tokens - 1e-9))  # 0.15 · 20 is a little above 3 in binary
