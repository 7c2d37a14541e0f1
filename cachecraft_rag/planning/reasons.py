"""Reasons why segments were computed, recomputed or left out, for plans, statistics and metrics."""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class Reason(StrEnum):
    """Reason for the outcome of a segment. Its value is the code that metrics count by; `explain` gives the sentence.

    Where reasons are decided: most in the plan, by `planner.make_plan` and `planner.with_selection` before anything is
    computed; with a probe, `OverlappedPrefill` chooses the tokens again. Those about loading (not_loaded,
    computed_faster, computed_late) by `LoadSplit.next_piece` and `OverlappedPrefill`; `compute.resolve.executed_plan`
    names them afterwards. refused by the checks of `ChunkCacheStore.find` and `RemoteTier.find`, prompt_full and
    too_long by `PromptBuilder.build`, prefix_cached and left_to_server by `vllm.worker.scheduling`,
    `vllm.worker.refusals` and `vllm.server.unmarked`, failed and not_reported by `serving.request.stats_of`.

    A new reason is a member, and in `_DETAIL_ALONE` if its detail replaces the sentence: now fixed, refused,
    lossy_codec, not_loaded, computed_late, too_long and left_to_server. `docs/reference/statistics.md` has a row for
    each, which `tests/test_docs.py` checks.

    Settings named here are those of `ReuseConfig`. `Reason(code)` returns the reason with this code, and raises
    ValueError for an unknown one.

    ""                reused, and no token was recomputed
    fixed             reused in another context with some tokens recomputed. `recompute_ratio`, or else `alpha`, sets
                      the chunk's budget, and `selector` scores its tokens. With `budget_scope` "prompt" the tokens with
                      the best scores of all chunks share the sum of the budgets
    nearest           reused in another context with all tokens recomputed: the last chunk before the question, at most
                      `nearest_share` of the chunk tokens
    unfocused         reused in another context without recomputing anything of it, because the question is about other
                      chunks as far as its probe sees (`early_termination`)
    question          the question is computed by every request
    reuse_off         `reuse=False`
    short_prompt      the prompt has fewer tokens than `min_prompt_tokens`
    not_stored        no variant of it for this model and namespace in the store or its remote
    refused           a variant is stored, but is damaged or not trusted, see `LookupResult.refused`
    removed           its document was removed: nothing of it, or of chunks after it, is stored until it is added again
    other_tokens      the variants hold the same text as other tokens
    other_prefix      `scope` is not "anywhere", and no variant was captured exactly after this prefix
    not_worth_fixing  CFO, which `alpha` scales, is 1 for every variant, and no `recompute_ratio` is set
    lossy_codec       the store's codec loses something: a chunk is reused as it was captured, an instruction computed
    not_loaded        reading it failed, before the prompt was computed or meanwhile
    computed_faster   `loading="cake"`: computed, wholly or in part, because loading was expected to take longer. This
                      includes loads that stand still, and first tokens computed while a speed is still unknown
    computed_late     computed in part because loading it failed or was late, when first layers had already used stored
                      values of it: such an answer is not exact
    prefix_cached     over vLLM: found in its own prefix cache
    prompt_full       left out, because chunks that rank higher fill the context
    too_long          left out, because it does not fit the context even alone
    failed            the request failed, or was closed, before its first token
    left_to_server    over vLLM: the request was computed without chunk-caches
    not_reported      over a server: there is no report of the request

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
    FIXED = "fixed", "some of its tokens were recomputed"
    QUESTION = "question", "the question is always computed"
    REUSE_OFF = "reuse_off", "reuse is off"
    SHORT_PROMPT = (
        "short_prompt",
        "a prompt this short is computed sooner than reused (min_prompt_tokens)",
    )
    NOT_STORED = "not_stored", "no chunk-cache stored"
    REFUSED = "refused", "what is stored cannot be used"
    REMOVED = (
        "removed",
        "its document was removed; neither it nor chunks after it are stored until it is added again",
    )
    OTHER_TOKENS = "other_tokens", "stored chunk-caches were tokenised differently"
    OTHER_PREFIX = "other_prefix", "not stored exactly after the chunks before it"
    NOT_WORTH_FIXING = "not_worth_fixing", "CFO is 1: fixing it costs as much as computing it"
    NEAREST = "nearest", "the last chunk before the question, so all of it was recomputed"
    UNFOCUSED = (
        "unfocused",
        "the question attends to other chunks, so nothing of this one was recomputed",
    )
    LOSSY_CODEC = "lossy_codec", "after its origin prefix, but stored by a lossy codec"
    NOT_LOADED = "not_loaded", "it could not be loaded"
    COMPUTED_FASTER = "computed_faster", "computing it was expected to be faster than loading it"
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
        Reason.FIXED,
        Reason.REFUSED,
        Reason.LOSSY_CODEC,
        Reason.NOT_LOADED,
        Reason.COMPUTED_LATE,
        Reason.TOO_LONG,
        Reason.LEFT_TO_SERVER,
    }
)


def explain(reason: Reason, detail: str = "") -> str:
    """Return the reason's sentence, "" for REUSED, or `detail`, unless empty, where that replaces it (see `Reason`).

    >>> explain(Reason.NOT_LOADED, "file is missing")
    'file is missing'
    """
    return detail if detail and reason in _DETAIL_ALONE else reason.sentence
