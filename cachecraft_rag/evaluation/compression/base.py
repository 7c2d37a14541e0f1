"""What a prompt compressor is, and the budget it keeps.

Cache-Craft §5.1.4 sets compression against reuse at equal cost: 80 % compression corresponds to 20 % recomputation.
So the `ratio` here is the share of the chunks' tokens that stays, to be compared with a recompute ratio of that value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.types import Chunk

MIN_TOKENS = 4  # a chunk is never asked to be shorter: nothing can be said in less


class Compressor(Protocol):
    """Shortens the chunks of one question.

    Effects: computes, and changes nothing that anyone else sees; no chunk-cache is read, used or captured. Whoever calls
    charges its time to the time to the first token, and answers over the result by ordinary full prefill.
    Lifetime: a compressor serves any number of questions, one at a time; it keeps its model until it is dropped.
    """

    def compress(self, question: str, chunks: Sequence[Chunk], ratio: float) -> tuple[Chunk, ...]:
        """The same chunks in the same order, each with a shorter text and its own metadata.

        Args:
            question: what will be asked; a compressor may leave it aside.
            ratio: share of each chunk's tokens to keep, above 0 and at most 1 (1 = the chunks as they are). Tokens are
                the answering model's. Each implementation says how exactly it keeps to it.

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
