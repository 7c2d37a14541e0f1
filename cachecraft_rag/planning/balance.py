"""Where computing and loading meet: pure sums over measured times."""

from __future__ import annotations

import math


def preload_depth(layers: int, *, prefill_s: float, load_s: float) -> int:
    """How many layers to have before the first is computed, so that none is waited for (Cache-Craft eq. 16).

    Args:
        prefill_s, load_s: of all layers, each by itself.

    >>> preload_depth(5, prefill_s=1.0, load_s=2.0)  # Fig. 19: 4 · (1 - 1/2) + 1
    3
    >>> preload_depth(5, prefill_s=2.0, load_s=1.0)  # computing takes longer: one is enough
    1
    """
    if load_s <= prefill_s:
        return 1
    return min(layers, math.ceil((layers - 1) * (1.0 - prefill_s / load_s) + 1.0))


def tokens_to_compute(*, load_s: float, compute_s: float, load_token_s: float, compute_token_s: float) -> float:
    """How many tokens to take from loading to computing so that both end at the same moment; negative: none.

    Args:
        load_s, compute_s: what both still have to do as it stands.
        load_token_s, compute_token_s: what a token takes on either side.

    >>> tokens_to_compute(load_s=3.0, compute_s=1.0, load_token_s=0.03, compute_token_s=0.01)  # 3 - .03 n = 1 + .01 n
    50.0
    """
    return (load_s - compute_s) / (load_token_s + compute_token_s)
