"""One request on its way through an engine: the question as it was asked, its progress, and its statistics."""

from __future__ import annotations

import time
import uuid
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any, Self

from cachecraft_rag.checks import check_kind, check_text
from cachecraft_rag.observability.stats import ChunkStats, Finish, RequestStats
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.planning.planner import Plan, SegmentOutcome
from cachecraft_rag.planning.reasons import Reason, explain
from cachecraft_rag.prompt.builder import check_history
from cachecraft_rag.prompt.output_schema import Constraint
from cachecraft_rag.serving.sampling import SamplingParams, TextStream
from cachecraft_rag.types import Prompt, RemovedChunks, TierName


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """Outcome of one segment, as plain values; see `planner.SegmentPlan` and `stats.ChunkStats`."""

    outcome: SegmentOutcome
    reason: Reason = Reason.REUSED
    detail: str = ""
    recomputed: int = 0
    not_loaded: int = 0
    cfo: float | None = None
    beta_prime: float | None = None
    variant_id: str | None = None
    tier: TierName | None = None

    @property
    def stored(self) -> bool:
        """True if it came from a chunk-cache, or from a server's prefix cache, but for what was not loaded."""
        return self.variant_id is not None or self.reason is Reason.PREFIX_CACHED

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"reason": str(self.reason)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """From what `as_dict` gave."""
        return cls(**{**values, "reason": Reason(values["reason"])})


def segment_reports(plan: Plan, tiers: Mapping[str, TierName]) -> tuple[SegmentReport, ...]:
    """Report each segment; `tiers` maps a variant's id to where it came from."""
    return tuple(
        SegmentReport(
            outcome=planned.outcome,
            reason=planned.reason,
            detail=planned.detail,
            recomputed=len(planned.recompute),
            not_loaded=planned.not_loaded,
            cfo=planned.cfo,
            beta_prime=planned.adjusted,
            variant_id=None if planned.variant is None else planned.variant.variant_id,
            tier=None if planned.variant is None else tiers.get(planned.variant.variant_id),
        )
        for planned in plan.segments
    )


@dataclass(frozen=True)
class Request:
    """One question as it was asked; `constraint`, of its answer, is for one drawing only."""

    prompt: Prompt
    config: ReuseConfig
    sampling: SamplingParams
    session: str | None
    started: float
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    constraint: Constraint | None = None

    def clock(self) -> float:
        """Seconds since the call."""
        return time.perf_counter() - self.started


@dataclass
class RequestProgress:
    """State of a request so far, written by whoever carries it out; times in seconds since the call.

    queued_s, planned_s   its turn and its plan began and were made
    waited_s              spent waiting for what was being loaded
    tiers                 variant id → where it came from
    row_layers            rows computed, summed over layers
    refreshed             stale tokens recomputed while decoding
    tokens                of the answer, with the one that ended it
    generated, finish     as far as the reader has read
    remote                outcome of the remote look-up
    reports               of the segments, where another process carried the plan out
    removed               chunks removed since the question was asked
    """

    queued_s: float = 0.0
    planned_s: float = 0.0
    waited_s: float = 0.0
    first_token_s: float = 0.0
    ended_s: float = 0.0
    plan: Plan = field(default_factory=lambda: Plan(()))
    tiers: Mapping[str, TierName] = field(default_factory=dict)
    row_layers: int = 0
    focus_layer: int | None = None
    refreshed: int = 0
    tokens: list[int] = field(default_factory=list)
    generated: int = 0
    finish: Finish | None = None
    remote: str | None = None
    reports: tuple[SegmentReport, ...] | None = None
    removed: RemovedChunks = field(default_factory=RemovedChunks)

    def end(self, request: Request, finish: Finish) -> None:
        """Note how and when it has ended, unless that is known."""
        self.finish = self.finish or finish
        self.ended_s = self.ended_s or request.clock()


class AnswerText:
    """The text of an answer, from its tokens.

    Args:
        end_tokens: ids that end an answer and are no part of it.

    Attributes:
        generated: tokens so far, without the one that ended it.
        finish: how it has ended, once it has.
    """

    def __init__(self, sampling: SamplingParams, tokenizer: Any, end_tokens: Container[int]) -> None:
        self._text = TextStream(tokenizer, sampling.stop)
        self._most, self._end_tokens = sampling.max_new_tokens, end_tokens
        self.generated = 0
        self.finish: Finish | None = None

    def take(self, token: int) -> str:
        """Take one more token; returns the text that is now certain."""
        piece = ""
        if token in self._end_tokens:
            self.finish = "end"
        else:
            self.generated += 1
            piece = self._text.push(token)
            if self.generated == self._most:
                self.finish = "length"
        if self.finish is not None:
            piece += self.rest()
        elif self._text.stopped:
            self.finish = "stop"
        return piece

    def rest(self) -> str:
        """End the answer, if it has not ended; returns the text that was held back."""
        rest = self._text.finish()
        self.finish = "stop" if self._text.stopped else self.finish or "length"
        return rest


def answer_text(
    request: Request, progress: RequestProgress, tokens: Iterable[int], tokenizer: Any, end_tokens: Container[int]
) -> Iterator[str]:
    """Yield the answer's text piece by piece until it ends; `progress` has its tokens and how it ended.

    Args:
        tokens: of the answer; the next one is asked for when the answer goes on behind those before it.
        end_tokens: ids that end an answer and are no part of it.
    """
    text = AnswerText(request.sampling, tokenizer, end_tokens)
    for token in tokens:
        progress.first_token_s = progress.first_token_s or request.clock()
        progress.tokens.append(token)
        piece = text.take(token)
        progress.generated, progress.finish = text.generated, text.finish
        if piece:
            yield piece
        if text.finish is not None:
            return
    rest = text.rest()
    progress.finish = text.finish
    if rest:
        yield rest


def stats_of(request: Request, progress: RequestProgress, layers: int) -> RequestStats:
    """Return the numbers of a request so far; `layers` of the model."""
    reports = segment_reports(progress.plan, progress.tiers) if progress.reports is None else progress.reports
    lengths = [len(segment.token_ids) for segment in request.prompt.segments]
    recomputed = sum(one.recomputed for one in reports)
    stored = sum(n for n, one in zip(lengths, reports, strict=False) if one.stored)
    kept = stored - sum(one.not_loaded for one in reports)
    total = sum(lengths)
    return RequestStats(
        ttft_s=progress.first_token_s,
        queue_s=progress.queued_s,
        plan_s=max(0.0, progress.planned_s - progress.queued_s),
        load_s=progress.waited_s,
        prefill_s=max(0.0, progress.first_token_s - max(progress.planned_s, progress.queued_s) - progress.waited_s),
        total_s=progress.ended_s or request.clock(),
        tokens_prompt=total,
        tokens_reused=kept - recomputed,
        tokens_recomputed=recomputed,
        tokens_refreshed=progress.refreshed,
        tokens_computed=total - kept,
        tokens_generated=progress.generated,
        recompute_share=progress.row_layers / (total * layers),
        focus_layer=progress.focus_layer,
        finish=progress.finish,
        chunks=tuple(_chunk_stats(request, progress, reports)),
        remote=progress.remote,
        request_id=request.request_id,
    )


def _chunk_stats(request: Request, progress: RequestProgress, reports: Sequence[SegmentReport]) -> Iterator[ChunkStats]:
    # Or closed while it waited; but where another process has filled it, that is known.
    failed = progress.finish in ("failed", "closed") and not progress.first_token_s and not progress.reports
    for segment, one in zip_longest(request.prompt.segments, reports):
        if segment.kind != "chunk" or (one is None and progress.finish is None):
            continue
        tokens = len(segment.token_ids)
        if failed:
            yield ChunkStats(segment.segment_id, "failed", explain(Reason.FAILED), Reason.FAILED, tokens)
            continue
        if one is None:
            reason = Reason.NOT_REPORTED
            yield ChunkStats(segment.segment_id, "computed", explain(reason), reason, tokens, computed=tokens)
            continue
        yield ChunkStats(
            chunk_id=segment.segment_id,
            outcome=one.outcome,
            reason=explain(one.reason, one.detail),
            reason_code=one.reason,
            tokens=tokens,
            recomputed=one.recomputed,
            computed=one.not_loaded if one.stored else tokens,
            cfo=one.cfo,
            beta_prime=one.beta_prime,
            variant_id=one.variant_id,
            tier=one.tier,
        )
    too_long = dict(request.prompt.too_long)
    for chunk_id in request.prompt.trimmed:
        reason, detail = Reason.PROMPT_FULL, ""
        if chunk_id in too_long:
            reason, room = Reason.TOO_LONG, request.prompt.room
            detail = (
                f"it has {too_long[chunk_id]} tokens and the model's context has room for {room}; split its document "
                "into smaller chunks"
            )
        yield ChunkStats(chunk_id, "trimmed", explain(reason, detail), reason)


def check_asked(question: object, history: object, *, session: object, config: object) -> None:
    """Check a question and what comes with it, but for chunks; raises ConfigError."""
    check_text("question", question, damaged=True)  # from a terminal, say
    check_history(history)
    check_text("session", session, optional=True)
    check_kind("config", config, ReuseConfig, optional=True, advice="write ReuseConfig(…)")
