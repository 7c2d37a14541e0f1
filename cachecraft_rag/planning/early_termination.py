"""Focused chunks and early termination of recomputation (Cache-Craft §3.2.2, eq. 15, Algorithm 1).

As published: layer by layer the attention of the question's tokens to each chunk is added up. Once the same chunks lead
for `window` layers, they are the focused ones, and the other chunks' tokens are not recomputed any further.

With the probe: it has measured the question's attention in the middle layers before the last pass begins, so
`chunks_in_focus` decides once, and tokens of other chunks are not recomputed in any layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

EarlyTerminationRule = Literal["off", "probe", "published"]

# Number of a chunk's tokens whose attention counts (docs/decisions/focus.md).
_STRONGEST_TOKENS = 8

# Smallest score of a chunk in focus, as a part of the highest (docs/decisions/focus.md).
_FOCUS_SHARE = 0.6

# Fewest chunks with a focus score for which tokens are spared: fewer were not measured.
FEWEST_CHUNKS = 5


def focus_score(attention: NDArray[np.floating]) -> float:
    """Return a chunk's focus score: attention to its eight strongest tokens over the root of that to its median token.

    The median token shows how much any token gets at the chunk's place: chunks near the question get more. `attention`
    is float `[tokens]`, 0 for a token that the probe did not see, which does not count; 0.0 if it saw none.

    >>> focus_score(np.array([0.5, 0.0, 0.25, 0.25]))  # (.5 + .25 + .25) / √.25
    2.0
    """
    seen = attention[attention > 0.0]
    if not len(seen):
        return 0.0
    ascending = np.sort(seen)
    strongest = ascending[::-1][:_STRONGEST_TOKENS]
    # np.median would sort again
    median = (ascending[(len(seen) - 1) // 2] + ascending[len(seen) // 2]) / 2
    return float(strongest.sum() / np.sqrt(median))


def chunks_in_focus(scores: Mapping[int, float]) -> frozenset[int]:
    """Return the chunks whose focus score is at least 0.6 of the highest one; all of them if no score is above 0.

    >>> sorted(chunks_in_focus({1: 4.0, 2: 0.1, 3: 3.0}))
    [1, 3]
    """
    least = _FOCUS_SHARE * max(scores.values(), default=0.0)
    return frozenset(chunk for chunk, score in scores.items() if score >= least)


def focused_count(scores: Sequence[float]) -> int:
    """Return the number of focused chunks, at least 1, from the scores of the chunks in descending order `[chunks]`.

    Lines 5–9 of Algorithm 1 to the letter: i* is the i in 1 … k-2 with the largest h(i+1) - h(i), which is -p·log p of
    gap i+1. Two flaws: -p·log p is not monotonic, so a gap with nearly all of the drop loses to a small one; and the
    cut falls one chunk above the gap it chose. Without three chunks, or with equal scores, all are focused.

    >>> focused_count([9.0, 1.0, 0.9, 0.1])  # p = .90, .01, .09; -p·log p of gaps 2 and 3: .05, .22: i* = 2
    2
    """
    gaps = [high - low for high, low in pairwise(scores)]
    total = math.fsum(gaps)
    if total <= 0.0:  # fewer than two chunks, or all alike: nothing sets one apart
        return max(1, len(scores))
    if len(gaps) < 2:  # two chunks: line 8 takes the largest of nothing
        return len(scores)
    shares = [gap / total for gap in gaps[1:]]  # 0.0 for a gap that is tiny beside the others
    steps = [-share * math.log(share) if share > 0.0 else 0.0 for share in shares]
    return steps.index(max(steps)) + 1


class FocusMonitor:
    """Finds a request's focused chunks. `focused`, their places in `mass`, and the deciding `layer` are None before.

    Args:
        chunks: number of chunks in the prompt.
        window: w of Algorithm 1, the number of consecutive layers that must agree; at least 1.
    """

    def __init__(self, chunks: int, *, window: int) -> None:
        self._cumulative = [0.0] * chunks
        self._window = window
        self._history: list[frozenset[int]] = []
        self.focused: frozenset[int] | None = None
        self.layer: int | None = None

    def observe(self, layer: int, mass: Sequence[float]) -> bool:
        """Add one layer's attention of the question to each chunk, `[chunks]` (eq. 15); True if this layer decides.

        Layers are given in their order; after the decision they are ignored, and the result is False.
        """
        if self.focused is not None:
            return False
        self._cumulative = [old + new for old, new in zip(self._cumulative, mass, strict=True)]
        order = sorted(range(len(mass)), key=lambda chunk: (-self._cumulative[chunk], chunk))
        count = focused_count([self._cumulative[chunk] for chunk in order])
        self._history.append(frozenset(order[:count]))
        recent = self._history[-self._window :]
        if len(recent) < self._window or any(focused != recent[0] for focused in recent):
            return False
        self.focused = recent[0]
        self.layer = layer
        return True
