"""From what is stored to a job: plan, open what the plan reuses, plan again without what turned out to be missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from cachecraft_rag.compute.job import EarlyTermination, PrefillJob, PrefillResult, ProbeRequest
from cachecraft_rag.compute.kv_buffer import ResidentKV
from cachecraft_rag.compute.rows import RowReason, Rows
from cachecraft_rag.compute.stack import Ranks
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.planning.planner import Plan, make_plan, with_not_loaded, with_selection
from cachecraft_rag.planning.reasons import Reason
from cachecraft_rag.planning.selectors import selector_named
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.layout import StoredVariant
from cachecraft_rag.store.loading.pending import PendingLoads
from cachecraft_rag.store.row_checks import Found
from cachecraft_rag.types import LoadedVariant, Prompt, TierName, TokenScores, Unavailable


@dataclass(frozen=True)
class Resolved:
    """Chunk-caches that one prompt takes from the store, and the job that follows.

    stored  what is still to be loaded, by segment
    tiers   where each chosen variant comes from, by its id
    """

    plan: Plan
    job: PrefillJob
    stored: Mapping[int, StoredVariant]
    tiers: Mapping[str, TierName]

    @property
    def to_load(self) -> list[tuple[StoredVariant, int]]:
        """Chunk-caches still to be loaded and their positions, in prompt order."""
        return [(one, self.job.rows.bounds[index]) for index, one in self.stored.items()]

    def close(self) -> None:
        """Close the stored variants."""
        for one in self.stored.values():
            one.close()


def resolve(
    prompt: Prompt,
    found: Found,
    config: ReuseConfig,
    *,
    store: ChunkCacheStore,
    ranks: Ranks,
    answer_tokens: int,
    scores: Mapping[str, TokenScores] | None = None,
) -> Resolved:
    """Decide what is reused, open it, and make the job.

    Args:
        found: result of the look-up: the variants on offer, by segment id.
        answer_tokens: positions to make room for behind the prompt.
        scores: of the variants on offer, where another process has read them; None: the store is asked.
    """
    opened: dict[str, LoadedVariant | StoredVariant] = {}
    lost: dict[str, str] = {}
    with ExitStack() as unused:
        while True:
            plan = make_plan(prompt, found.variants, config, lost=lost, refused=found.refused)
            wanted = {s.variant.variant_id: s.variant for s in plan.segments if s.variant is not None}
            missing = [variant for name, variant in wanted.items() if name not in opened]
            if not missing:
                break
            for variant, one in zip(missing, store.open_variants(missing), strict=True):
                if isinstance(one, Unavailable):
                    lost[variant.variant_id] = one.reason
                    continue
                opened[variant.variant_id] = one
                if isinstance(one, StoredVariant):
                    unused.callback(one.close)
            for name in ranks.agree(frozenset(lost)) - lost.keys():
                lost[name] = "another rank could not open it"
        reused = [s.variant.variant_id for s in plan.segments if s.to_fix and s.variant is not None]
        scores = store.token_scores(reused) if scores is None else scores
        plan = with_selection(plan, scores, config)
        resolved = _resolved(prompt, plan, {name: opened[name] for name in wanted}, config, scores, answer_tokens)
        unused.pop_all()
    for name in opened.keys() - wanted.keys():  # chosen by a plan that was given up
        if isinstance(one := opened[name], StoredVariant):
            one.close()
    return resolved


def _resolved(
    prompt: Prompt,
    plan: Plan,
    opened: Mapping[str, LoadedVariant | StoredVariant],
    config: ReuseConfig,
    scores: Mapping[str, TokenScores],
    answer_tokens: int,
) -> Resolved:
    bounds = prompt.bounds
    resident, captures = [], []
    stored: dict[int, StoredVariant] = {}
    for index, planned in enumerate(plan.segments):
        held = None if planned.variant is None else opened[planned.variant.variant_id]
        if isinstance(held, LoadedVariant):
            resident.append(ResidentKV(bounds[index], held.kv))
            continue
        if held is not None:
            stored[index] = held
        segment = prompt.segments[index]
        if config.capture and segment.kind != "question" and not segment.found:
            captures.append(index)  # a stored one may have to be computed after all
    job = PrefillJob(
        token_ids=prompt.token_ids,
        rows=rows_of(plan, bounds),
        resident=resident,
        captures=captures,
        capacity=bounds[-1] + answer_tokens,
        shared_until=_shared_until(prompt, plan, config),
        reused=[index for index, planned in enumerate(plan.segments) if planned.to_fix],
        drift=config.drift,
        refresh_rows=config.refresh_rows,
        loading=config.loading,
        early_termination=_early_termination(prompt, plan, config),
        probe=_probe(prompt, plan, config, scores),
    )
    return Resolved(plan, job, stored, {name: held.tier for name, held in opened.items()})


def rows_of(plan: Plan, bounds: Sequence[int]) -> Rows:
    """Rows computed regardless of loading: segments without a chunk-cache, and the chosen tokens of the others."""
    new = [p for i, s in enumerate(plan.segments) if s.variant is None for p in range(bounds[i], bounds[i + 1])]
    chosen = [bounds[i] + offset for i, s in enumerate(plan.segments) for offset in s.recompute]
    return Rows.of(bounds, new=new, recomputed=chosen)


def _shared_until(prompt: Prompt, plan: Plan, config: ReuseConfig) -> int:
    """The position behind the last chunk that will be computed and stored for everybody; 0 where there is none."""
    edge = 0
    if not config.capture:
        return edge
    for index, (segment, planned) in enumerate(zip(prompt.segments, plan.segments, strict=True)):
        if segment.private:  # it, and whatever is computed behind it, stays with its session
            break
        if planned.variant is None:
            edge = prompt.bounds[index + 1]
    return edge


def _early_termination(prompt: Prompt, plan: Plan, config: ReuseConfig) -> EarlyTermination | None:
    """Early termination, where it is on and there is something to end."""
    if not config.early_termination or not any(planned.recompute for planned in plan.segments):
        return None
    return EarlyTermination(config.early_termination_window, _own_text(prompt))


def _probe(prompt: Prompt, plan: Plan, config: ReuseConfig, scores: Mapping[str, TokenScores]) -> ProbeRequest | None:
    """The probe before the last pass, where the selector has one and the pass is large enough for it."""
    fixed = sum(len(planned.recompute) for planned in plan.segments)
    lengths = [len(segment.token_ids) for segment in prompt.segments]
    new = sum(n for n, planned in zip(lengths, plan.segments, strict=True) if planned.variant is None)
    if not selector_named(config.selector).probes or not fixed or fixed + new < config.probe_min_rows:
        return None
    bounds = prompt.bounds
    edge = _shared_until(prompt, plan, config)
    if all(bounds[index] < edge for index, planned in enumerate(plan.segments) if planned.to_fix):
        return None
    return ProbeRequest(_own_text(prompt), partial(_choose_anew, plan, config, scores))


def _own_text(prompt: Prompt) -> range:
    """The positions of the question without what closes it, which says nothing of what is asked."""
    first, last = prompt.bounds[-2:]
    return range(first, max(last - prompt.segments[-1].closing, first + 1))


def _choose_anew(
    plan: Plan,
    config: ReuseConfig,
    scores: Mapping[str, TokenScores],
    probed: Mapping[int, NDArray[np.floating]],
    rows: Rows,
) -> Plan:
    recomputed, excluded = {}, {}
    for i, planned in enumerate(plan.segments):
        if not planned.to_fix:
            continue
        chosen, whole = rows.offsets(i, RowReason.RECOMPUTED), rows.reason[rows.span(i)]
        if i in probed:
            recomputed[i] = frozenset(chosen[rows.done[rows.span(i)][chosen]].tolist())
            excluded[i] = frozenset(rows.offsets(i, RowReason.NEW, RowReason.NOT_LOADED).tolist())
        else:  # as if all of its choice had been computed already
            recomputed[i] = frozenset(chosen.tolist())
            excluded[i] = frozenset(range(len(whole))) - recomputed[i]
    return with_selection(plan, scores, config, probed=probed, recomputed=recomputed, excluded=excluded)


def as_it_went(resolved: Resolved, loads: PendingLoads, result: PrefillResult) -> Plan:
    """The plan with what was computed instead of loaded; captures of which the same is stored already are dropped."""
    plan = result.plan or resolved.plan
    segments = list(plan.segments)
    for index, one in resolved.stored.items():
        lost = loads.lost(one)
        reason, detail = (Reason.COMPUTED_FASTER, "") if lost is None else (Reason.NOT_LOADED, lost.reason)
        if lost is None and not segments[index].to_fix:
            result.recorder.forget(index)
        if index in result.late and segments[index].outcome == "reused":
            reason = Reason.COMPUTED_LATE
            result.recorder.forget(index)  # its own tokens are among those that attended to it
        computed = result.rows.offsets(index, RowReason.NOT_LOADED).tolist()
        segments[index] = with_not_loaded(segments[index], computed, reason, detail)
    return Plan(tuple(segments))
