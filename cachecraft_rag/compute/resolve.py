"""Turn a store look-up into a prefill job: make a plan and open the variants it reads."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np
from numpy.typing import NDArray

from cachecraft_rag.compute.job import EarlyTermination, PrefillJob, PrefillResult, ProbeRequest
from cachecraft_rag.compute.kv_buffer import ResidentKV
from cachecraft_rag.compute.rows import RowReason, Rows
from cachecraft_rag.compute.stack import Ranks
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.planning.planner import (
    Offsets,
    Plan,
    make_plan,
    no_offsets,
    with_not_loaded,
    with_selection,
)
from cachecraft_rag.planning.reasons import Reason
from cachecraft_rag.planning.selectors import selector_named
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.layout import StoredVariant
from cachecraft_rag.store.loading.pending import PendingLoads
from cachecraft_rag.store.row_checks import LookupResult
from cachecraft_rag.types.captures import TokenScores
from cachecraft_rag.types.prompts import Prompt
from cachecraft_rag.types.store_reasons import Unavailable
from cachecraft_rag.types.variants import LoadedVariant


def resolve(
    prompt: Prompt,
    found: LookupResult,
    config: ReuseConfig,
    *,
    store: ChunkCacheStore,
    ranks: Ranks,
    answer_tokens: int,
    scores: Mapping[str, TokenScores] | None = None,
) -> PrefillJob:
    """Decide what is reused, open what is read, and make the prefill job, which the caller closes.

    If a variant cannot be opened, the plan is made again without it. Variants of segments that are recomputed in full
    are not opened. Every rank must call this with the same prompt and look-up, and all of them leave out what one could
    not open. Nothing is loaded or computed here. `answer_tokens` positions are reserved after the prompt. `scores` are
    token scores by variant id, if another process has read them; None: they are read here.
    """
    opened: dict[str, LoadedVariant | StoredVariant] = {}
    lost: dict[str, str] = {}
    known_scores = dict(scores or {})
    with ExitStack() as close_on_error:
        while True:
            plan = make_plan(
                prompt,
                found.variants,
                config,
                lost=lost,
                refused=found.refused,
                removed=found.removed,
            )
            if scores is None:
                known_scores |= store.token_scores(_without_scores(plan, known_scores))
            plan = with_selection(plan, known_scores, config)
            probe = _probe(prompt, plan, config, known_scores)
            unread = _unread(prompt, plan, config, has_probe=probe is not None)
            chosen = {
                planned.variant.variant_id: planned.variant
                for index, planned in enumerate(plan)
                if planned.variant and index not in unread
            }
            missing = [
                variant for variant_id, variant in chosen.items() if variant_id not in opened
            ]
            if not missing:
                break

            lost_before = len(lost)
            for variant, result in zip(missing, store.open_variants(missing), strict=True):
                if isinstance(result, Unavailable):
                    lost[variant.variant_id] = result.reason
                    continue
                opened[variant.variant_id] = result
                if isinstance(result, StoredVariant):
                    close_on_error.callback(result.close)

            for variant_id in ranks.agree(frozenset(lost)) - lost.keys():
                lost[variant_id] = "another rank could not open it"
            if len(lost) == lost_before:  # the plan stays as it is
                break

        chosen_variants = {variant_id: opened[variant_id] for variant_id in chosen}
        job = _job(
            prompt, plan, chosen_variants, config, probe, unread, answer_tokens=answer_tokens
        )
        close_on_error.pop_all()

    for variant_id in opened.keys() - chosen.keys():  # read by an earlier plan only
        unused = opened[variant_id]
        if isinstance(unused, StoredVariant):
            unused.close()
    return job


def _without_scores(plan: Plan, known: Container[str]) -> list[str]:
    """Return the ids of the variants to fix whose token scores are not known yet."""
    return [
        planned.variant.variant_id
        for planned in plan
        if planned.to_fix and planned.variant and planned.variant.variant_id not in known
    ]


def _job(
    prompt: Prompt,
    plan: Plan,
    opened: Mapping[str, LoadedVariant | StoredVariant],
    config: ReuseConfig,
    probe: ProbeRequest | None,
    unread: frozenset[int],
    *,
    answer_tokens: int,
) -> PrefillJob:
    """Return the job that carries the plan out; `opened` holds the variants that are read, by id."""
    bounds = prompt.bounds
    resident: list[ResidentKV] = []
    captures: list[int] = []
    stored: dict[int, StoredVariant] = {}
    for index, planned in enumerate(plan):
        if index in unread:
            continue
        variant = None if planned.variant is None else opened[planned.variant.variant_id]
        if isinstance(variant, LoadedVariant):
            resident.append(ResidentKV(bounds[index], variant.kv))
            continue
        if variant is not None:
            stored[index] = variant
        if config.capture and prompt.segments[index].is_captured:
            captures.append(index)  # also of stored segments: they are computed if loading fails

    return PrefillJob(
        token_ids=prompt.token_array,
        rows=rows_of(plan, bounds),
        plan=plan,
        resident=resident,
        stored=stored,
        tiers={variant_id: variant.tier for variant_id, variant in opened.items()},
        captures=captures,
        capacity=bounds[-1] + answer_tokens,
        shared_until=_shared_until(prompt, plan, config),
        reused=[index for index, planned in enumerate(plan) if planned.to_fix],
        unread=unread,
        drift=config.method.drift,
        loading=config.method.loading,
        early_termination=_early_termination(prompt, plan, config),
        probe=probe,
    )


def rows_of(plan: Plan, bounds: Sequence[int]) -> Rows:
    """Return the rows of a prompt; the open ones are the positions that are computed regardless of loading.

    All tokens of segments without a variant are NEW, the tokens to recompute of the others RECOMPUTED, the rest STORED.
    """
    new = [no_offsets()]
    recomputed = [no_offsets()]
    for index, planned in enumerate(plan):
        if planned.variant is None:
            new.append(np.arange(bounds[index], bounds[index + 1]))
        recomputed.append(bounds[index] + planned.recompute)
    return Rows.of(bounds, new=np.concatenate(new), recomputed=np.concatenate(recomputed))


def _shared_until(prompt: Prompt, plan: Plan, config: ReuseConfig) -> int:
    """Return the end of the last segment that will be computed and stored for all users, or 0."""
    shared_until = 0
    if not config.capture:
        return shared_until
    bounds = prompt.bounds
    for index, (segment, planned) in enumerate(zip(prompt.segments, plan, strict=True)):
        if segment.private:  # the captures of this segment and all later ones belong to its session
            break
        if planned.variant is None:
            shared_until = bounds[index + 1]
    return shared_until


def _unread(prompt: Prompt, plan: Plan, config: ReuseConfig, *, has_probe: bool) -> frozenset[int]:
    """Return the segments that are recomputed in full for certain, so that nothing stored of them is used.

    A chunk before `_shared_until` stays as it is planned. A later one may still change: a probe chooses its tokens
    again unless it is marked `in_full`, and early termination may leave its deeper layers as they are stored.
    """
    bounds = prompt.bounds
    shared_until = _shared_until(prompt, plan, config)
    unread: list[int] = []
    for index, planned in enumerate(plan):
        if not planned.to_fix or planned.recomputed_share < 1.0:
            continue
        may_be_chosen_again = has_probe and not planned.in_full
        may_change = may_be_chosen_again or config.method.early_termination != "off"
        if bounds[index] < shared_until or not may_change:
            unread.append(index)
    return frozenset(unread)


def _early_termination(prompt: Prompt, plan: Plan, config: ReuseConfig) -> EarlyTermination | None:
    """Return the settings of Algorithm 1 for the last pass; None if it is off or no token is recomputed."""
    if config.method.early_termination != "published" or not any(
        len(planned.recompute) for planned in plan
    ):
        return None
    return EarlyTermination(config.method.early_termination_window, _question_text(prompt))


def _probe(
    prompt: Prompt, plan: Plan, config: ReuseConfig, scores: Mapping[str, TokenScores]
) -> ProbeRequest | None:
    """Return the request for a probe; None if the selector does not probe or a probe would not pay off.

    The question must not shape the chunks before `_shared_until`, which all users are served; and of the others, none,
    or every token may be recomputed in any case.
    """
    if not selector_named(config.method.selector).probes:
        return None
    bounds = prompt.bounds
    shared_until = _shared_until(prompt, plan, config)
    rows = 0
    chosen = 0
    to_choose_from = 0
    for index, (segment, planned) in enumerate(zip(prompt.segments, plan, strict=True)):
        tokens = len(segment.token_ids)
        rows += tokens if planned.variant is None else len(planned.recompute)
        if planned.to_fix and not planned.in_full and bounds[index] >= shared_until:
            chosen += len(planned.recompute)
            to_choose_from += tokens
    if rows < config.method.probe_min_rows or chosen in (0, to_choose_from):
        return None
    return ProbeRequest(_question_text(prompt), partial(_plan_with_probe, plan, config, scores))


def _question_text(prompt: Prompt) -> range:
    """Return the positions of the question's text, without the end of the chat template, which is always the same."""
    start, stop = prompt.bounds[-2:]
    closing = prompt.segments[-1].closing
    return range(start, max(stop - closing, start + 1))


def _plan_with_probe(
    plan: Plan,
    config: ReuseConfig,
    scores: Mapping[str, TokenScores],
    probed: Mapping[int, NDArray[np.floating]],
    rows: Rows,
    focus: Mapping[int, float],
) -> Plan:
    """Return the plan with tokens selected by the probe's scores, keeping those that are recomputed already."""
    recomputed: dict[int, Offsets] = {}
    excluded: dict[int, Offsets] = {}
    is_selected = rows.having(RowReason.RECOMPUTED)  # [tokens], like the next two
    is_settled = is_selected & rows.done
    is_computed = rows.having(RowReason.NEW, RowReason.COMPUTED_INSTEAD)
    for index, planned in enumerate(plan):
        if not planned.to_fix:
            continue
        span = rows.span(index)
        if index in probed:
            recomputed[index] = np.flatnonzero(is_settled[span])
            excluded[index] = np.flatnonzero(is_computed[span])
        else:  # without new scores, the segment keeps its selection
            recomputed[index] = np.flatnonzero(is_selected[span])
            excluded[index] = np.flatnonzero(~is_selected[span])
    return with_selection(
        plan,
        scores,
        config,
        probed=probed,
        recomputed=recomputed,
        excluded=excluded,
        focus=focus,
    )


def executed_plan(job: PrefillJob, loads: PendingLoads, result: PrefillResult) -> Plan:
    """Return the plan as it was executed, with the tokens that were computed instead of loaded, and why.

    If a part of a segment failed to load, that is the reason of all its tokens. COMPUTED_LATE replaces it for reused
    segments that are in `result.late`.

    Also drops captures from the recorder of `result`: those of segments that did not fail to load and need no fixing,
    because they are stored already, and those of reused segments that were computed late, because their tokens attended
    to stored ones.
    """
    plan = result.plan or job.plan
    segments = list(plan)
    for index, variant in job.stored.items():
        # decided while loading, in `LoadSplit.next_piece` or `OverlappedPrefill._wait_for_layer`
        reason = Reason.COMPUTED_FASTER
        detail = ""
        lost = loads.lost(variant)
        if lost is not None:
            reason = Reason.NOT_LOADED
            detail = lost.reason
        elif not segments[index].to_fix:
            result.recorder.forget(index)
        if index in result.late and segments[index].outcome == "reused":
            reason = Reason.COMPUTED_LATE
            detail = f"{reason.sentence}: {detail}" if detail else ""
            # its tokens attended to stored tokens of the same segment
            result.recorder.forget(index)
        computed = result.rows.offsets(index, RowReason.COMPUTED_INSTEAD)
        segments[index] = with_not_loaded(segments[index], computed, reason, detail)
    return tuple(segments)
