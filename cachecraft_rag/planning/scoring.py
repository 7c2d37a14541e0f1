"""The equations of Cache-Craft §3.1–3.2, one function each, on plain numbers.

Prefixes here hold corpus chunks only. The instruction precedes every chunk of every prompt, so counting it would give a
chunk captured right after it an overlap of 1 in every prompt. It is compared for equality instead (see `planner`).
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence


def prefix_overlap(inter: Sequence[float], old: Sequence[str], new: Mapping[str, int]) -> float:
    """Return β (eq. 6), in [0, 1]: of the attention to the origin prefix, the share on chunks of the new prefix.

    The paper leaves 0/0 open. Here it is 1.0 for a chunk that attended to no earlier chunk, and for one captured
    without earlier chunks 1.0 if `new` is empty too, otherwise 0.0.

    Args:
        inter: attention (eq. 3) to each chunk of `old`, in the same order; 0 or more.
        old: chunk ids of the origin prefix.
        new: chunk id → place, for the chunks before it in the current prompt.

    >>> prefix_overlap([3.0, 1.0], ["a", "b"], {"a": 0, "c": 1})  # 3 / 4
    0.75
    >>> prefix_overlap([], [], {}), prefix_overlap([], [], {"a": 0})
    (1.0, 0.0)
    """
    if not old:
        return 0.0 if new else 1.0
    total = math.fsum(inter)
    if total <= 0.0:  # it looked at none of its old prefix: whether they return makes no difference
        return 1.0
    return min(
        1.0, math.fsum(a for a, chunk in zip(inter, old, strict=True) if chunk in new) / total
    )


def order_penalty(old: Sequence[str], new: Mapping[str, int]) -> float:
    """Return γ (eq. 7), in [0, 1]: the normalised Kendall tau distance between the old and new order of shared chunks.

    Arguments as in `prefix_overlap`. Returns 0.0 if the two prefixes share fewer than two chunks.

    >>> order_penalty(["a", "b", "c"], {"c": 0, "b": 1, "a": 2}), order_penalty(["a", "b", "x"], {"b": 0, "a": 4})
    (1.0, 1.0)
    >>> round(order_penalty(["a", "b", "c"], {"a": 0, "c": 1, "b": 2}), 3)  # one of three pairs
    0.333
    """
    places = [new[chunk] for chunk in old if chunk in new]
    pairs = len(places) * (len(places) - 1) // 2
    if pairs == 0:
        return 0.0
    discordant = 0
    earlier: list[int] = []  # ascending
    for place in places:
        discordant += len(earlier) - bisect_right(earlier, place)
        insort(earlier, place)
    return discordant / pairs


def adjusted_overlap(beta: float, gamma: float) -> float:
    """Return β′ (eq. 8), β · (1 − γ); in [0, 1] if both are.

    >>> adjusted_overlap(0.8, 0.25)
    0.6000000000000001
    """
    return beta * (1.0 - gamma)


def context_impact(
    *, inter: Sequence[float], prefix_tokens: Sequence[int], intra: float, tokens: int
) -> float:
    """Return CCI (eq. 9–11), in [0.5, 1]: the sigmoid of a chunk's attention to earlier chunks over that to itself.

    Both are per pair of tokens. The ratio is never negative, so the sigmoid is at least 0.5. Take that into account
    when you calibrate α (eq. 13). Without earlier chunks it is 0.5; if `intra` is 0, it is 1.0 if the chunk attended to
    an earlier one, else 0.5.

    Args:
        inter: attention (eq. 3) to each earlier chunk, averaged over heads and layers (eq. 10).
        prefix_tokens: number of tokens of each of these chunks, in the same order; not 0.
        intra: attention within the chunk (eq. 4), averaged over heads and layers.
        tokens: number of tokens of the chunk, not 0.

    >>> context_impact(inter=[2.0], prefix_tokens=[10], intra=5.0, tokens=10)  # a/b = 0.02 / 0.05
    0.598687660112452
    >>> context_impact(inter=[], prefix_tokens=[], intra=5.0, tokens=10)
    0.5
    """
    a = math.fsum(
        value / (tokens * length) for value, length in zip(inter, prefix_tokens, strict=True)
    )
    b = intra / tokens**2
    if b <= 0.0:  # the token of a one-token chunk has no earlier token in the chunk to attend to
        return 1.0 if a > 0.0 else 0.5
    return 1.0 / (1.0 + math.exp(-min(a / b, 60.0)))


def fix_overhead(*, alpha: float, cci: float, adjusted: float) -> float:
    """Return CFO (eq. 12), α · CCI · (1 − β′) clipped to [0, 1]: the share of tokens to recompute; `adjusted` is β′.

    >>> fix_overhead(alpha=1.0, cci=0.6, adjusted=0.5), fix_overhead(alpha=3.0, cci=0.6, adjusted=0.0)
    (0.3, 1.0)
    """
    return min(1.0, max(0.0, alpha * cci * (1.0 - adjusted)))
