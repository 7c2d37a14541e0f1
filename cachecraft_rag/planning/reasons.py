"""Reasons why a chunk was not simply reused, for plans, statistics and metrics."""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class Reason(StrEnum):
    """The value is the code that statistics count by; `explain` gives the sentence.

    A reason is set before computing by `planner.make_plan`, and after it by `compute.resolve.executed_plan` for what
    was computed instead of loaded. Those of chunks that were trimmed, failed or computed by a server are set by
    `serving.request`. These settings lead to a reason: REUSE_OFF `reuse`, OTHER_PREFIX `scope`, NOT_WORTH_FIXING
    `alpha`, NEAREST `nearest_share`, COMPUTED_FASTER and COMPUTED_LATE `loading`, LOSSY_CODEC `codec`.

    REUSED, the empty code, is also that of a chunk of which some tokens were recomputed: that is the usual case.

    >>> str(Reason.NOT_STORED), explain(Reason.NOT_STORED)
    ('not_stored', 'no chunk-cache stored')
    """

    sentence: str

    def __new__(cls, code: str, sentence: str = "") -> Self:
        """Return a member whose value is the code."""
        member = str.__new__(cls, code)
        member._value_ = code
        member.sentence = sentence
        return member

    REUSED = "", ""
    QUESTION = "question", "the question is always computed"
    REUSE_OFF = "reuse_off", "reuse is off"
    NOT_STORED = "not_stored", "no chunk-cache stored"
    REFUSED = "refused", "what is stored cannot be used"
    OTHER_TOKENS = "other_tokens", "stored chunk-caches were tokenised differently"
    OTHER_PREFIX = "other_prefix", "stored after other chunks only"
    NOT_WORTH_FIXING = "not_worth_fixing", "CFO is 1: fixing it costs as much as computing it"
    NEAREST = "nearest", "nearest to the question, so all of it was recomputed"
    LOSSY_CODEC = "lossy_codec", "after its origin prefix, but stored by a lossy codec"
    NOT_LOADED = "not_loaded", "it could not be loaded"
    COMPUTED_FASTER = (
        "computed_faster",
        "computing it was faster than loading it, or loading stood still",
    )
    COMPUTED_LATE = (
        "computed_late",
        "computed in the end, but its first layers had been in use as they were stored",
    )
    PREFIX_CACHED = (
        "prefix_cached",
        "the server still had it from a request with the same chunks in the same order",
    )
    PROMPT_FULL = "prompt_full", "the prompt was full; the lowest-ranked chunks are left out"
    TOO_LONG = "too_long", "it does not fit the model's context"
    FAILED = "failed", "the request failed before its first token"
    LEFT_TO_SERVER = "left_to_server", "the server computed the request without chunk-caches"
    NOT_REPORTED = "not_reported", "the server did not say what it did"


_DETAIL_ALONE = frozenset(
    {
        Reason.REFUSED,
        Reason.LOSSY_CODEC,
        Reason.NOT_LOADED,
        Reason.COMPUTED_LATE,
        Reason.TOO_LONG,
        Reason.LEFT_TO_SERVER,
    }
)


def explain(reason: Reason, detail: str = "") -> str:
    """Return the reason as a sentence, or the detail if that is more specific.

    >>> explain(Reason.NOT_LOADED, "file is missing")
    'file is missing'
    """
    return detail if detail and reason in _DETAIL_ALONE else reason.sentence
