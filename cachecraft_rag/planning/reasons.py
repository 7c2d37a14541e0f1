"""Why a chunk was not simply reused: one enum for plans, statistics and metrics."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The value is the code that statistics count by; `explain` gives the sentence.

    >>> str(Reason.NOT_STORED), explain(Reason.NOT_STORED)
    ('not_stored', 'no chunk-cache stored')
    """

    REUSED = ""
    QUESTION = "question"
    REUSE_OFF = "reuse_off"
    NOT_STORED = "not_stored"
    REFUSED = "refused"
    OTHER_TOKENS = "other_tokens"
    OTHER_PREFIX = "other_prefix"
    NOT_WORTH_FIXING = "not_worth_fixing"
    LOSSY_CODEC = "lossy_codec"
    NOT_LOADED = "not_loaded"
    COMPUTED_FASTER = "computed_faster"
    COMPUTED_LATE = "computed_late"
    PREFIX_CACHED = "prefix_cached"
    PROMPT_FULL = "prompt_full"
    TOO_LONG = "too_long"
    FAILED = "failed"
    NOT_REPORTED = "not_reported"


_SENTENCES = {
    Reason.REUSED: "",
    Reason.QUESTION: "the question is always computed",
    Reason.REUSE_OFF: "reuse is off",
    Reason.NOT_STORED: "no chunk-cache stored",
    Reason.REFUSED: "what is stored cannot be used",
    Reason.OTHER_TOKENS: "stored chunk-caches were tokenised differently",
    Reason.OTHER_PREFIX: "stored behind other chunks only",
    Reason.NOT_WORTH_FIXING: "CFO is 1: fixing it costs as much as computing it",
    Reason.LOSSY_CODEC: "behind its origin prefix, but stored by a lossy codec",
    Reason.NOT_LOADED: "it could not be loaded",
    Reason.COMPUTED_FASTER: "computing it was faster than loading it",
    Reason.COMPUTED_LATE: "computed in the end, but its first layers had been in use as they were stored",
    Reason.PREFIX_CACHED: "the server still had it from a request with the same chunks in the same order",
    Reason.PROMPT_FULL: "the prompt was full; the lowest-ranked chunks are left out",
    Reason.TOO_LONG: "it does not fit the model's context",
    Reason.FAILED: "the request failed before its first token",
    Reason.NOT_REPORTED: "the server did not say what it did",
}
_DETAIL_ALONE = frozenset(
    {Reason.REFUSED, Reason.LOSSY_CODEC, Reason.NOT_LOADED, Reason.COMPUTED_LATE, Reason.TOO_LONG}
)


def explain(reason: Reason, detail: str = "") -> str:
    """The reason as a sentence; where a detail says more than the general words, the detail.

    >>> explain(Reason.NOT_LOADED, "file is missing")
    'file is missing'
    """
    return detail if detail and reason in _DETAIL_ALONE else _SENTENCES[reason]
