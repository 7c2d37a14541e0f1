"""One request in an engine: the question, its progress, and its statistics."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from typing import Any, Self

from cachecraft_rag.checks import check_kind, check_text
from cachecraft_rag.observability.stats import ChunkStats, Finish, RequestStats
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.planning.planner import Plan, SegmentOutcome
from cachecraft_rag.planning.reasons import Reason, explain
from cachecraft_rag.prompt.builder import check_history
from cachecraft_rag.prompt.output_schema import Constraint
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.types.captures import RemovedChunks
from cachecraft_rag.types.prompts import Prompt
from cachecraft_rag.types.variants import TierName


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """Outcome of one segment, as plain values; see `planner.SegmentPlan` and `stats.ChunkStats`.

    not_loaded  number of tokens that were computed instead of loaded, for any reason
    primed      True if its chunk-cache comes from priming
    focus       see `SegmentPlan`
    in_focus    see `SegmentPlan`
    spared      see `SegmentPlan`

    Field names travel in JSON between servers and clients, also of other versions.
    """

    outcome: SegmentOutcome
    reason: Reason = Reason.REUSED
    detail: str = ""
    recomputed: int = 0
    not_loaded: int = 0
    cfo: float | None = None
    beta_prime: float | None = None
    variant_id: str | None = None
    tier: TierName | None = None
    primed: bool = False
    focus: float | None = None
    in_focus: bool | None = None
    spared: int = 0

    @property
    def stored(self) -> bool:
        """True if a chunk-cache or a prefix cache serves it, except for `not_loaded` and `recomputed` tokens."""
        return self.variant_id is not None or self.reason is Reason.PREFIX_CACHED

    def as_dict(self) -> dict[str, object]:
        """Return field name → plain value, for JSON, in a new dict; `reason` is the code, such as "fixed" or ""."""
        return asdict(self) | {"reason": str(self.reason)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make a report from `as_dict`, unchecked; KeyError, TypeError or ValueError for wrong fields or `reason`."""
        return cls(**{**values, "reason": Reason(values["reason"])})


def segment_reports(plan: Plan, tiers: Mapping[str, TierName]) -> tuple[SegmentReport, ...]:
    """Return a report of each segment of a plan, in order; `tiers`: variant id → tier that it was read from."""
    reports = []
    for planned in plan:
        variant_id = None if planned.variant is None else planned.variant.variant_id
        report = SegmentReport(
            outcome=planned.outcome,
            reason=planned.reason,
            detail=planned.detail,
            recomputed=len(planned.recompute),
            not_loaded=planned.not_loaded,
            cfo=planned.cfo,
            beta_prime=planned.beta_prime,
            variant_id=variant_id,
            tier=None if variant_id is None else tiers.get(variant_id),
            primed=planned.variant is not None and planned.variant.primed,
            focus=planned.focus,
            in_focus=planned.in_focus,
            spared=planned.spared,
        )
        reports.append(report)
    return tuple(reports)


@dataclass(frozen=True)
class Request:
    """A question with its prompt and settings.

    session     session that may use its private chunk-caches; None without one
    started     time of `time.perf_counter`, in seconds, at which the question was asked (the call)
    request_id  32 random hex digits, unless given
    constraint  the grammar of its answer, for one answer only
    quality     reason for the recompute ratio, if a quality target chose it; else empty
    namespace   tenant whose chunk-caches it may use; "": the engine's own
    """

    prompt: Prompt
    config: ReuseConfig
    sampling: SamplingParams
    session: str | None
    started: float
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    constraint: Constraint | None = None
    quality: str = ""
    namespace: str = ""

    @property
    def owner(self) -> tuple[str, str | None]:
        """Tenant and session, which may see its statistics."""
        return self.namespace, self.session

    def clock(self) -> float:
        """Return the seconds since `started`, the time at which the question was asked."""
        return time.perf_counter() - self.started


@dataclass
class RequestProgress:
    """State of a request so far, set while it is carried out; times are in seconds since the call.

    queued_s       time spent waiting for its turn
    planned_s      end of its planning
    waited_s       time spent waiting for what was being loaded
    first_token_s  time of the first token; 0 before it
    ended_s        time of the end; 0 before it
    plan           the plan; after the prefill the plan as it was carried out
    tiers          variant id → tier that it was read from
    row_layers     rows computed, summed over layers
    focus_layer    see `RequestStats`
    tokens         tokens of the answer, with the token that ended it
    generated      tokens up to the place that the reader has read
    finish         how the answer ended, as far as its reader knows
    remote         outcome of the remote look-up
    reports        reports of the segments, if another process carried the plan out
    refused        why that process computed the request without chunk-caches; "" if it did not, or did not say
    removed        chunks removed since the question was asked
    """

    queued_s: float = 0.0
    planned_s: float = 0.0
    waited_s: float = 0.0
    first_token_s: float = 0.0
    ended_s: float = 0.0
    plan: Plan = ()
    tiers: Mapping[str, TierName] = field(default_factory=dict)
    row_layers: int = 0
    focus_layer: int | None = None
    tokens: list[int] = field(default_factory=list)
    generated: int = 0
    finish: Finish | None = None
    remote: str | None = None
    reports: tuple[SegmentReport, ...] | None = None
    refused: str = ""
    removed: RemovedChunks = field(default_factory=RemovedChunks)

    def reported(self, report: Mapping[str, Any]) -> None:
        """Take over the report of another process that carried the plan out: all that `report` returned there.

        It has only `refused` if the request was computed without chunk-caches. Numbers that it lacks stay as they are,
        and so does `plan`. Raises KeyError, TypeError or ValueError for an invalid entry of `segments`, and then
        changes nothing. Nothing else is checked.
        """
        reports = tuple(SegmentReport.from_dict(values) for values in report.get("segments", ()))
        self.reports = reports
        self.refused = report.get("refused", "")
        self.row_layers = report.get("row_layers", self.row_layers)
        self.focus_layer = report.get("focus_layer", self.focus_layer)
        self.planned_s = report.get("planned_s", self.planned_s)
        self.waited_s = report.get("waited_s", self.waited_s)
        self.remote = report.get("remote", self.remote)

    def report(self) -> dict[str, object]:
        """Return plain values, for JSON, that `reported` takes over in another process."""
        return {
            "segments": [report.as_dict() for report in self.segment_reports()],
            "row_layers": self.row_layers,
            "focus_layer": self.focus_layer,
            "planned_s": self.planned_s,
            "waited_s": self.waited_s,
            "remote": self.remote,
        }

    def segment_reports(self) -> tuple[SegmentReport, ...]:
        """Return the reports of the segments, in order: those of `reported` once it was called, else of the plan."""
        return segment_reports(self.plan, self.tiers) if self.reports is None else self.reports

    def end(self, request: Request, finish: Finish) -> None:
        """Note how the request ended, and the present time as its end, each unless it was noted before."""
        self.finish = self.finish or finish
        self.ended_s = self.ended_s or request.clock()


def unchanged_tokens(
    prompt: Prompt, reports: Sequence[SegmentReport], *, counted_from: int = 0
) -> int:
    """Return how many tokens of a prompt were taken from chunk-caches or a prefix cache and not recomputed.

    `reports` are in the order of the segments. Only positions from `counted_from` on count; in the segment with that
    position, as many as possible are taken to follow it.
    """
    total = 0
    for start, end, report in zip(prompt.bounds, prompt.bounds[1:], reports, strict=False):
        if report.stored:
            unchanged = end - start - report.not_loaded - report.recomputed
            total += min(unchanged, max(0, end - max(start, counted_from)))
    return total


def stats_of(request: Request, progress: RequestProgress, layers: int) -> RequestStats:
    """Return the statistics of a request so far, for a model of `layers` layers.

    Before the plan no token counts as reused, and `chunks` has only those left out of the prompt. If the request failed
    or was closed before its first token, all others are "failed", unless another process reported what it did; after
    any other end, chunks without a report are "computed". `total_s` is the time until now while the request goes on.
    """
    reports = progress.segment_reports()
    lengths = [len(segment.token_ids) for segment in request.prompt.segments]
    total = sum(lengths)
    stored = sum(length for length, report in zip(lengths, reports, strict=False) if report.stored)
    loaded = stored - sum(report.not_loaded for report in reports)
    recomputed = sum(report.recomputed for report in reports)
    reused = unchanged_tokens(request.prompt, reports)
    prefill_began_s = max(progress.planned_s, progress.queued_s)
    stale_ids = dict(request.prompt.stale_ids)
    chunks = _chunk_stats(request, progress, reports)
    return RequestStats(
        ttft_s=progress.first_token_s,
        queue_s=progress.queued_s,
        plan_s=max(0.0, progress.planned_s - progress.queued_s),
        load_s=progress.waited_s,
        prefill_s=max(0.0, progress.first_token_s - prefill_began_s - progress.waited_s),
        total_s=progress.ended_s or request.clock(),
        tokens_prompt=total,
        tokens_reused=reused,
        tokens_recomputed=recomputed,
        tokens_spared=sum(report.spared for report in reports),
        tokens_computed=total - loaded,
        tokens_generated=progress.generated,
        recompute_share=progress.row_layers / (total * layers),
        focus_layer=progress.focus_layer,
        finish=progress.finish,
        chunks=tuple(
            replace(chunk, stale_id=stale_ids.get(chunk.chunk_id, "")) for chunk in chunks
        ),
        remote=progress.remote,
        request_id=request.request_id,
        quality=request.quality,
    )


def _chunk_stats(
    request: Request, progress: RequestProgress, reports: Sequence[SegmentReport]
) -> Iterator[ChunkStats]:
    # True also for a request that was closed while it waited, unless another process has filled its prompt.
    has_no_result = (
        progress.finish in ("failed", "closed")
        and not progress.first_token_s
        and not progress.reports
    )
    for segment, report in zip_longest(request.prompt.segments, reports):
        if segment.kind != "chunk" or (report is None and progress.finish is None):
            continue
        tokens = len(segment.token_ids)
        if has_no_result:
            yield ChunkStats(
                segment.segment_id, "failed", explain(Reason.FAILED), Reason.FAILED, tokens
            )
        elif report is None:
            reason = Reason.NOT_REPORTED
            detail = ""
            if progress.refused:
                reason = Reason.LEFT_TO_SERVER
                detail = f"{reason.sentence}: {progress.refused}"
            yield ChunkStats(
                segment.segment_id,
                "computed",
                explain(reason, detail),
                reason,
                tokens,
                computed=tokens,
            )
        else:
            yield ChunkStats(
                chunk_id=segment.segment_id,
                outcome=report.outcome,
                reason=_reason_of(report, tokens),
                reason_code=report.reason,
                tokens=tokens,
                recomputed=report.recomputed,
                computed=report.not_loaded if report.stored else tokens,
                cfo=report.cfo,
                beta_prime=report.beta_prime,
                variant_id=report.variant_id,
                tier=report.tier,
                focus=report.focus,
                in_focus=report.in_focus,
                spared=report.spared,
            )

    too_long = dict(request.prompt.too_long)
    for chunk_id in request.prompt.trimmed:
        reason = Reason.PROMPT_FULL
        detail = ""
        if chunk_id in too_long:
            reason = Reason.TOO_LONG
            detail = (
                f"it has {too_long[chunk_id]} tokens and the model's context has room for {request.prompt.room}; split "
                "its document into smaller chunks"
            )
        yield ChunkStats(chunk_id, "trimmed", explain(reason, detail), reason)


def _reason_of(report: SegmentReport, tokens: int) -> str:
    """Return the reason of a chunk of so many tokens; if it is about a part of them, it says how many."""
    sentence = explain(report.reason, report.detail)
    is_about_a_part = (
        report.reason in (Reason.COMPUTED_FASTER, Reason.NOT_LOADED)
        and 0 < report.not_loaded < tokens
    )
    return f"{report.not_loaded} of {tokens} tokens: {sentence}" if is_about_a_part else sentence


def check_asked(question: object, history: object, *, session: object, config: object) -> None:
    """Raise ConfigError for an invalid question, history, session (None: none) or config (None: the engine's)."""
    check_text("question", question, damaged=True)  # text from a terminal may be damaged
    check_history(history)
    check_text("session", session, optional=True)
    check_kind("config", config, ReuseConfig, optional=True, advice="write ReuseConfig(…)")
