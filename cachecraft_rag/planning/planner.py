"""The plan: which segments are reused, recomputed or computed, before any tensor moves (Cache-Craft §3.4.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import numpy as np

from cachecraft_rag.planning.config import DEFAULT_ALPHA, ReuseConfig
from cachecraft_rag.planning.reasons import Reason
from cachecraft_rag.planning.scoring import adjusted_overlap, fix_overhead, order_penalty, prefix_overlap
from cachecraft_rag.planning.selectors import TokenFacts, select, selector_named
from cachecraft_rag.types import Prompt, Segment, TokenScores, Variant

# What CFO counts when variants are compared: one that was primed behind neighbours, and one captured alone.
_PRIMED, _ALONE = 0.8, 1.25
# The exact share of context that a lossy codec has kept: below 1, so that nothing computed behind it is called exact;
# little below, because what a codec loses is far less than what other neighbours change (0.2 % and 6 % of its KL,
# docs/benchmarks.md), and nothing would be won by fixing it.
_LOSSY_SHARE = 0.99

Outcome = Literal["exact", "reused", "computed"]


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """The plan for one segment.

    outcome      exact: behind its origin prefix and stored by a lossless codec, nothing to fix; reused: moved and
                 partly recomputed, or behind its origin prefix but stored by a lossy codec; computed: afresh
    reason, detail   why it was not simply reused, see `reasons.explain`
    variant      the chosen variant of a reused or exact segment
    beta, gamma, adjusted, cfo   eq. 6, 7, 8, 12 for that variant; None where there is none
    recompute    tokens to recompute, as offsets in the segment, ascending
    not_loaded   how many tokens were computed because they did not come, or computing them was faster
    at_origin    behind its origin prefix, and only a lossy codec keeps it from being exact: nothing is fixed
    """

    outcome: Outcome
    reason: Reason = Reason.REUSED
    detail: str = ""
    variant: Variant | None = None
    beta: float | None = None
    gamma: float | None = None
    adjusted: float | None = None
    cfo: float | None = None
    recompute: tuple[int, ...] = ()
    not_loaded: int = 0
    at_origin: bool = False

    @property
    def to_fix(self) -> bool:
        """True if the segment was moved, so that some of its tokens may have to be recomputed."""
        return self.outcome == "reused" and not self.at_origin


@dataclass(frozen=True, slots=True)
class Plan:
    """One entry for each segment of the prompt, in order."""

    segments: tuple[SegmentPlan, ...]


def make_plan(
    prompt: Prompt,
    stored: Mapping[str, Sequence[Variant]],
    config: ReuseConfig,
    *,
    lost: Mapping[str, str] = MappingProxyType({}),
    refused: Mapping[str, str] = MappingProxyType({}),
) -> Plan:
    """Choose for each segment the stored variant with the lowest CFO, or to compute it afresh.

    Args:
        prompt: the segments; the last one, the question, is always computed.
        stored: segment id → the variants on offer, of this model and namespace only.
        lost: variant id → the reason why it could not be loaded when an earlier plan chose it.
        refused: segment id → the reason why a stored variant was not on offer.

    The tokens to recompute are not chosen here but in `with_selection`, which needs the winners' token scores only.
    """
    segments = prompt.segments
    permuted = _set_prefix(prompt, stored, lost, config) if config.scope == "set" else {}
    places: dict[str, int] = {}  # the chunks, and other text, before the current one → their place
    plans = []
    for index, segment in enumerate(segments):
        if segment.kind == "question":
            plans.append(SegmentPlan("computed", Reason.QUESTION))
            places[segment.segment_id] = index
            continue
        if not config.reuse:
            plans.append(SegmentPlan("computed", Reason.REUSE_OFF))
        else:
            prefix = tuple(s.segment_id for s in segments[:index])
            offers = stored.get(segment.segment_id, ())
            there = [variant for variant in offers if variant.variant_id not in lost]
            if index in permuted:
                best = permuted[index]
            else:
                best = _best(segment, there, prefix=prefix, places=places, config=config)
            if best.variant is None and len(there) < len(offers):
                why = next(lost[v.variant_id] for v in offers if v.variant_id in lost)
                best = replace(best, reason=Reason.NOT_LOADED, detail=why)
            elif best.variant is None and not offers and segment.segment_id in refused:
                best = replace(best, reason=Reason.REFUSED, detail=refused[segment.segment_id])
            plans.append(best)
        if segment.kind == "chunk":
            places[segment.segment_id] = index
    return Plan(tuple(plans))


def _best(
    segment: Segment,
    variants: Sequence[Variant],
    *,
    prefix: tuple[str, ...],
    places: Mapping[str, int],
    config: ReuseConfig,
) -> SegmentPlan:
    best: SegmentPlan | None = None
    if segment.kind == "system" and variants:
        variants = [variant for variant in variants if variant.lossless]
        if not variants:  # every token behind it would inherit what the codec lost
            return SegmentPlan("computed", Reason.LOSSY_CODEC, "an instruction is reused from a lossless codec only")
    for variant in variants:
        if not _fits(variant, segment):
            continue
        scored = _score(variant, prefix=prefix, places=places, config=config)
        if scored.outcome == "exact":
            return scored
        if best is None or _rank(scored) < _rank(best):
            best = scored
    if best is not None and config.scope != "anywhere" and not best.at_origin:
        return SegmentPlan("computed", Reason.OTHER_PREFIX)
    if best is None:
        return SegmentPlan("computed", Reason.OTHER_TOKENS if variants else Reason.NOT_STORED)
    if config.recompute_ratio is None and (best.cfo or 0.0) >= 1.0:
        return replace(best, outcome="computed", reason=Reason.NOT_WORTH_FIXING, variant=None)
    return best


def _fits(variant: Variant, segment: Segment) -> bool:
    """True if a variant was captured of exactly these tokens; a shorter one would leave positions uninitialised."""
    return variant.tokens_digest == segment.tokens_digest and variant.tokens == len(segment.token_ids)


def _set_prefix(
    prompt: Prompt, stored: Mapping[str, Sequence[Variant]], lost: Mapping[str, str], config: ReuseConfig
) -> dict[int, SegmentPlan]:
    """The longest run of first chunks that was computed once before as a prefix, in any order (SET-CACHE).

    Each of them is reused as it was captured then, at the position it has now.
    """
    segments = prompt.segments
    found: dict[int, SegmentPlan] = {}
    offers = {
        (segment.segment_id, variant.key.origin_prefix): variant
        for segment in segments[:-1]
        for variant in stored.get(segment.segment_id, ())
        if variant.key.origin_prefix
        and _fits(variant, segment)
        and _at_origin(variant, config) is not None
        and variant.variant_id not in lost
    }
    places = {segment.segment_id: index for index, segment in enumerate(segments[:-1])}
    here = [segment.segment_id for segment in segments]
    for last, (system, *chunks) in offers:
        order = (*chunks, last)
        same = list(order) == here[1 : len(order) + 1]
        if len(order) < len(found) + (not same) or system != here[0] or set(order) != set(here[1 : len(order) + 1]):
            continue
        chain = [offers.get((name, (system, *order[:place]))) for place, name in enumerate(order)]
        if any(variant is None for variant in chain):
            continue
        found = {}
        for place, (name, variant) in enumerate(zip(order, chain, strict=True)):
            assert variant is not None, "incomplete chains are skipped above"
            unmoved = _at_origin(variant, config) if list(order[:place]) == here[1 : places[name]] else None
            found[places[name]] = unmoved or _scored("reused", variant)
    return found


def _at_origin(variant: Variant, config: ReuseConfig) -> SegmentPlan | None:
    """Plan for a variant behind its origin prefix; None if it needs fixing: its capture was inexact, or it was stored
    by a lossy codec and every inexact token is to be recomputed.
    """
    if variant.lossless:
        return _scored("exact", variant) if variant.exact_share >= 1.0 else None
    if variant.exact_share < _LOSSY_SHARE or config.recompute_ratio == 1.0:
        return None
    detail = f"as it was captured, but for what the codec {variant.codec} loses"
    return replace(_scored("reused", variant), reason=Reason.LOSSY_CODEC, detail=detail, at_origin=True)


def _scored(outcome: Outcome, variant: Variant) -> SegmentPlan:
    """A variant whose whole context returns."""
    return SegmentPlan(outcome, variant=variant, beta=1.0, gamma=0.0, adjusted=1.0, cfo=0.0)


def _rank(plan: SegmentPlan) -> tuple[bool, bool, float, float]:
    """Sort key, lower is better: variants worth fixing, those that need no fixing, then CFO, less for a primed variant
    and more for one captured alone, then the more exact capture.

    A primed variant looked more at what stood before it, so its CCI is higher and CFO alone would leave it aside. But
    what it looked at was its own document: reused at another place it loses less on most questions. One captured alone
    looked at nothing, so its CCI is the lowest there is, and yet it loses most (docs/fidelity.md).
    """
    variant, cfo = plan.variant, plan.cfo or 0.0
    assert variant is not None, "only variants are ranked"
    weight = _ALONE if len(variant.key.origin_prefix) == 1 else _PRIMED if variant.primed else 1.0
    return cfo >= 1.0, not plan.at_origin, cfo * weight, -variant.exact_share


def _score(variant: Variant, *, prefix: tuple[str, ...], places: Mapping[str, int], config: ReuseConfig) -> SegmentPlan:
    """CFO of one variant behind this prefix, which starts with the system segment; `places` holds the chunks in it."""
    origin = variant.key.origin_prefix
    if origin == prefix and (unmoved := _at_origin(variant, config)) is not None:
        return unmoved
    beta, gamma = 0.0, 0.0
    if origin[:1] == prefix[:1]:  # behind another instruction, nothing of the old context returns
        beta = prefix_overlap(variant.inter[1:], origin[1:], places)
        gamma = order_penalty(origin[1:], places)
    # An inexact capture attended to neighbours that were approximations: its overlap counts for the exact share only.
    adjusted = adjusted_overlap(beta, gamma) * variant.exact_share
    fixed = config.recompute_ratio is not None  # then CFO only compares variants, and clipped they would be all alike
    alpha = DEFAULT_ALPHA if config.alpha is None or fixed else config.alpha
    cfo = fix_overhead(alpha=alpha, cci=variant.cci, adjusted=adjusted)
    return SegmentPlan("reused", variant=variant, beta=beta, gamma=gamma, adjusted=adjusted, cfo=cfo)


def with_selection(
    plan: Plan,
    token_scores: Mapping[str, TokenScores],
    config: ReuseConfig,
    *,
    probed: Mapping[int, np.ndarray] = MappingProxyType({}),
    recomputed: Mapping[int, frozenset[int]] = MappingProxyType({}),
    excluded: Mapping[int, frozenset[int]] = MappingProxyType({}),
) -> Plan:
    """Add the tokens to recompute: N = ⌈CFO · |C|⌉ of each chunk (§3.2.1), or ⌈r · |C|⌉ where a fixed ratio is set.

    Args:
        token_scores: by variant id, as in `ChunkCacheStore.token_scores`; one that is missing counts as unknown.
        probed: segment → the probe's scores of its tokens, float32 `[tokens]`; without them, the choice rests on the
            stored scores alone.
        recomputed: segment → tokens that are recomputed already; they stay chosen.
        excluded: segment → tokens that are computed for another reason, so there is nothing to fix.
    """
    facts, budgets, reused = [], [], []
    for index, segment in enumerate(plan.segments):
        variant = segment.variant
        if not segment.to_fix or variant is None:
            continue
        share = segment.cfo if config.recompute_ratio is None else config.recompute_ratio
        scores, seen = token_scores.get(variant.variant_id, TokenScores()), probed.get(index)
        seed = int(variant.key.chunk_id[:8], 16)
        facts.append(TokenFacts(variant.tokens, seed, scores.inter, seen))
        budgets.append(math.ceil((share or 0.0) * variant.tokens))
        reused.append(index)
    nothing: frozenset[int] = frozenset()
    done = [recomputed.get(index, nothing) | excluded.get(index, nothing) for index in reused]
    spent = [len(recomputed.get(index, nothing)) for index in reused]
    selector = selector_named(config.selector)
    found = select(facts, budgets, selector, budget_scope=config.budget_scope, done=done, spent=spent)
    segments = list(plan.segments)
    for index, chosen in zip(reused, found, strict=True):
        tokens = sorted({*chosen.tolist(), *recomputed.get(index, nothing)})
        segments[index] = replace(segments[index], recompute=tuple(tokens))
    return Plan(tuple(segments))


def with_not_loaded(planned: SegmentPlan, computed: Sequence[int], reason: Reason, detail: str = "") -> SegmentPlan:
    """The plan for a segment whose tokens `computed` (offsets) were computed after all, for this reason."""
    if not computed or planned.variant is None:
        return planned
    changed = replace(planned, reason=reason, detail=detail)
    if len(computed) == planned.variant.tokens and reason is not Reason.COMPUTED_LATE:
        return replace(changed, outcome="computed", variant=None, recompute=(), at_origin=False)
    kept = tuple(offset for offset in planned.recompute if offset not in set(computed))
    return replace(changed, recompute=kept, not_loaded=len(computed))


def exact_shares(plan: Plan, lengths: Sequence[int]) -> list[float]:
    """For each segment, the share of exact tokens in the context it is computed behind (1.0 for the first).

    A chunk computed behind reused ones inherits their error (an inexact capture): reused segments count nothing, exact
    ones all, and computed ones as much as their own context was exact. What a lossy codec stored counts nearly all
    behind its origin prefix: too little for anything behind it to be exact.

    >>> a, b, c = SegmentPlan("exact"), SegmentPlan("reused"), SegmentPlan("computed")
    >>> exact_shares(Plan((a, b, c, c)), [10, 30, 20, 5])  # 1, 10/10, 10/40, (10 + 20 · .25) / 60
    [1.0, 1.0, 0.25, 0.25]
    """
    shares = []
    exact = total = 0.0
    for segment, length in zip(plan.segments, lengths, strict=True):
        share = exact / total if total else 1.0
        shares.append(share)
        lossy = segment.variant if segment.at_origin else None
        kept = _LOSSY_SHARE * lossy.exact_share if lossy is not None else 0.0
        exact += length * {"exact": 1.0, "reused": kept, "computed": share}[segment.outcome]
        total += length
    return shares
