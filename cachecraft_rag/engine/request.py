"""One request on its way through the engine: what was asked, what has been gathered, and what it tells in the end."""

from __future__ import annotations

import time
import uuid
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any, Self

from cachecraft_rag.checks import check_kind, check_text
from cachecraft_rag.compute.removed import Removed
from cachecraft_rag.engine.prompt import check_history
from cachecraft_rag.engine.request_queue import Place
from cachecraft_rag.engine.sampling import SamplingParams, TextStream
from cachecraft_rag.engine.stats import ChunkStats, Finish, RequestStats
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.planning.planner import Outcome, Plan
from cachecraft_rag.planning.reasons import Reason, explain
from cachecraft_rag.types import Prompt, TierName


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """What became of one segment, as plain values; see `planner.SegmentPlan` and `stats.ChunkStats`."""

    outcome: Outcome
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
        """Whether it came from a chunk-cache, or from a server's prefix cache, but for what was not loaded."""
        return self.variant_id is not None or self.reason is Reason.PREFIX_CACHED

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"reason": str(self.reason)}

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Self:
        """From what `as_dict` gave."""
        return cls(**{**told, "reason": Reason(told["reason"])})


def segment_reports(plan: Plan, tiers: Mapping[str, TierName]) -> tuple[SegmentReport, ...]:
    """A report of each segment; `tiers` says where each variant came from, by its id."""
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


@dataclass
class Request:
    """What one request was asked and what it has gathered so far."""

    prompt: Prompt
    config: ReuseConfig
    sampling: SamplingParams
    session: str | None
    started: float
    place: Place | None = None  # in the engine's queue, where it has one
    closing: bool = False  # its reader wants no more
    removed: Removed = field(default_factory=Removed)  # chunks, since it was made
    queued_s: float = 0.0
    planned_s: float = 0.0
    waited_s: float = 0.0
    first_token_s: float = 0.0
    ended_s: float = 0.0
    plan: Plan = field(default_factory=lambda: Plan(()))
    tiers: Mapping[str, TierName] = field(default_factory=dict)  # variant id → where it came from
    row_layers: int = 0
    focus_layer: int | None = None
    tokens: list[int] = field(default_factory=list)  # of the answer, with the one that ended it
    generated: int = 0
    finish: Finish | None = None
    remote: str | None = None  # how it took the look-up
    reports: tuple[SegmentReport, ...] | None = None  # where another process carried the plan out
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def clock(self) -> float:
        """Seconds since the call."""
        return time.perf_counter() - self.started

    def take_place(self, place: Place) -> None:
        """It waits there now."""
        self.place = place
        if self.closing:  # meanwhile, so that nobody has told this place
            place.leave()

    def close(self) -> None:
        """Its reader wants no more: it leaves the queue. Takes no lock; any thread may call this."""
        self.closing = True
        if self.place is not None:
            self.place.leave()


def answer_text(request: Request, tokens: Iterable[int], tokenizer: Any, end_tokens: Container[int]) -> Iterator[str]:
    """The answer's text, piece by piece, until it ends; what it took and how it ended is noted in the request.

    Args:
        tokens: of the answer; the next one is asked for when the answer goes on behind those before it.
        end_tokens: ids that end an answer and are no part of it.
    """
    text = TextStream(tokenizer, request.sampling.stop)
    for token in tokens:
        request.first_token_s = request.first_token_s or request.clock()
        request.tokens.append(token)
        if token in end_tokens:
            request.finish = "end"
            break
        request.generated += 1
        if piece := text.push(token):
            yield piece
        if text.stopped or request.generated == request.sampling.max_new_tokens:
            break
    rest = text.finish()
    if text.stopped:  # by a stop string in what was held back, too
        request.finish = "stop"
    request.finish = request.finish or "length"
    if rest:
        yield rest


def stats_of(request: Request, layers: int) -> RequestStats:
    """The numbers of a request so far; `layers` of the model."""
    reports = segment_reports(request.plan, request.tiers) if request.reports is None else request.reports
    lengths = [len(segment.token_ids) for segment in request.prompt.segments]
    recomputed = sum(one.recomputed for one in reports)
    stored = sum(n for n, one in zip(lengths, reports, strict=False) if one.stored)
    kept = stored - sum(one.not_loaded for one in reports)
    total = sum(lengths)
    return RequestStats(
        ttft_s=request.first_token_s,
        queue_s=request.queued_s,
        plan_s=max(0.0, request.planned_s - request.queued_s),
        load_s=request.waited_s,
        prefill_s=max(0.0, request.first_token_s - max(request.planned_s, request.queued_s) - request.waited_s),
        total_s=request.ended_s or request.clock(),
        tokens_prompt=total,
        tokens_reused=kept - recomputed,
        tokens_recomputed=recomputed,
        tokens_computed=total - kept,
        tokens_generated=request.generated,
        recompute_share=request.row_layers / (total * layers),
        focus_layer=request.focus_layer,
        finish=request.finish,
        chunks=tuple(_chunk_stats(request, reports)),
        remote=request.remote,
        request_id=request.request_id,
    )


def _chunk_stats(request: Request, reports: Sequence[SegmentReport]) -> Iterator[ChunkStats]:
    failed = request.finish in ("failed", "closed") and not request.first_token_s  # or closed while it waited
    for segment, one in zip_longest(request.prompt.segments, reports):
        if segment.kind != "chunk" or (one is None and request.finish is None):
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
    """What every question brings with it but chunks; raises ConfigError."""
    check_text("question", question, damaged=True)  # from a terminal, say
    check_history(history)
    check_text("session", session, optional=True)
    check_kind("config", config, ReuseConfig, optional=True, advice="write ReuseConfig(…)")
