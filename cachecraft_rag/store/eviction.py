"""Which chunk-cache leaves first: one score for memory, disk and remotes; the lowest goes, among equals the oldest."""

from __future__ import annotations


def eviction_score(*, reuse_frequency: float, exact_share: float) -> float:
    """(1 + f_r) · (1 + exact share): the more a variant serves and the more exact its capture, the longer it stays.

    1 + f_r instead of f_r: with the plain product every unused variant scores 0, and exact captures could not be
    preferred among them; the smallest possible use adds 1, so a variant used once outranks an unused one of the same
    capture. 1 + exact share instead of exact share: a capture without any exact context would stay at 0 however often
    it serves; like this an inexact capture needs at most twice the use.

    >>> eviction_score(reuse_frequency=0.0, exact_share=1.0), eviction_score(reuse_frequency=3.0, exact_share=0.5)
    (2.0, 6.0)
    """
    return (1.0 + reuse_frequency) * (1.0 + exact_share)


def score_gain(gain: float, *, exact_share: float) -> float:
    """What `f_r += gain` adds to the score, for a remote that knows scores only and adds to them.

    >>> score_gain(4.0, exact_share=1.0)
    8.0
    """
    return eviction_score(reuse_frequency=gain, exact_share=exact_share) - eviction_score(
        reuse_frequency=0.0, exact_share=exact_share
    )


def reuse_gain(cfo: float, tokens: int) -> float:
    """What one use adds to f_r (Cache-Craft §3.3): 1 / CFO, with CFO bounded below by one token of the chunk.

    >>> reuse_gain(0.25, 100), reuse_gain(0.0, 100)
    (4.0, 100.0)
    """
    return 1.0 / max(cfo, 1.0 / tokens)
