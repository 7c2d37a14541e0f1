"""Planning: decide for each segment if it is reused, partly recomputed or computed (Cache-Craft §3.4.1).

Plans are made from metadata only, before any tensor is loaded or computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cachecraft_rag.planning.config import DEFAULT_ALPHA, ReuseConfig
from cachecraft_rag.planning.early_termination import FEWEST_CHUNKS, chunks_in_focus
from cachecraft_rag.planning.reasons import Reason
from cachecraft_rag.planning.scoring import (
    adjusted_overlap,
    fix_overhead,
    order_penalty,
    prefix_overlap,
)
from cachecraft_rag.planning.selectors import TokenFacts, select, selector_named
from cachecraft_rag.types.captures import TokenScores
from cachecraft_rag.types.prompts import Prompt, Segment
from cachecraft_rag.types.variants import Variant

# Factors by which CFO is multiplied when the variants of a chunk are compared (see `_rank`): for a variant that was
# primed after its neighbours in the document, and for one captured after the instruction only.
_PRIMED_WEIGHT = 0.8
_ALONE_WEIGHT = 1.25

# Exact share of context that a lossy codec has stored. It is below 1 so that nothing computed after it counts as exact.
# It is only a little below 1 because a codec adds far less error than a changed context (0.2 % and 6 % of its KL,
# docs/results/speed.md), so recomputing tokens for it would gain nothing.
_LOSSY_SHARE = 0.99

SegmentOutcome = Literal["exact", "reused", "computed"]
Offsets = NDArray[np.int64]  # tokens of one segment, counted from its first one; ascending


def no_offsets() -> Offsets:
    """Return the offsets of no token, a new array: int64 `[0]`."""
    return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class SegmentPlan:
    """The plan for one segment.

    outcome     "exact": reused after its origin prefix from a lossless codec, without error. "reused": reused with
                stale tokens, either in another context and partly recomputed, or after its origin prefix but from a
                lossy codec. "computed": computed in full
    reason      the reason for the outcome, see `Reason`
    detail      more about the reason in words, see `reasons.explain`
    variant     the chosen variant of a reused or exact segment
    beta        β, eq. 6, for that variant, or for one that was not worth fixing or not loaded; otherwise None, like
                the next three
    gamma       γ, eq. 7
    beta_prime  β′, eq. 8
    cfo         CFO, eq. 12
    recompute   int64 `[chosen]`, offsets in the segment of the tokens to recompute, ascending; none before
                `with_selection`
    not_loaded  number of tokens that were computed instead of loaded (`RowReason.COMPUTED_INSTEAD`); 0 if the
                outcome is "computed"
    in_full     True if all tokens of a reused segment are recomputed, because it is the last chunk
                (`ReuseConfig.nearest_share`)
    at_origin   True for a segment after its origin prefix that is inexact because of a lossy codec only; none of its
                tokens are recomputed
    focus       the chunk's focus score as a part of the highest, in [0, 1]; None if no probe has seen the chunk
    in_focus    True if the question is about this chunk, as far as the probe sees; None like `focus`
    spared      number of tokens that are not recomputed because the chunk is out of focus
    """

    outcome: SegmentOutcome
    reason: Reason = Reason.REUSED
    detail: str = ""
    variant: Variant | None = None
    beta: float | None = None
    gamma: float | None = None
    beta_prime: float | None = None
    cfo: float | None = None
    recompute: Offsets = field(default_factory=no_offsets)
    not_loaded: int = 0
    in_full: bool = False
    at_origin: bool = False
    focus: float | None = None
    in_focus: bool | None = None
    spared: int = 0

    def __eq__(self, other: object) -> bool:
        """Return True if all fields are equal."""
        if not isinstance(other, SegmentPlan):
            return NotImplemented
        names = [given.name for given in fields(self) if given.name != "recompute"]
        return np.array_equal(self.recompute, other.recompute) and all(
            getattr(self, name) == getattr(other, name) for name in names
        )

    @property
    def recomputed_share(self) -> float:
        """The share of a reused segment's tokens that are recomputed, from 0 to 1; 0 without a variant."""
        return len(self.recompute) / self.variant.tokens if self.variant else 0.0

    @property
    def to_fix(self) -> bool:
        """True if the segment is reused in a new context: the outcome "reused" without `at_origin`."""
        return self.outcome == "reused" and not self.at_origin


# The plan for a prompt: one entry per segment, in prompt order.
Plan = tuple[SegmentPlan, ...]


def make_plan(
    prompt: Prompt,
    stored: Mapping[str, Sequence[Variant]],
    config: ReuseConfig,
    *,
    lost: Mapping[str, str] = MappingProxyType({}),
    refused: Mapping[str, str] = MappingProxyType({}),
    removed: Set[str] = frozenset(),
) -> Plan:
    """Choose for each segment the stored variant with the lowest CFO (weighted, see `ReuseMethod.scoring`), or none.

    A variant that needs no fixing is preferred. A chunk whose best variant has a CFO of 1 is computed, unless
    `config.ratio_in_use` is a number. An instruction is reused from a lossless codec only. Without `config.reuse`
    all is computed. The tokens to recompute are chosen later, in `with_selection`.

    Args:
        prompt: the segments; those of kind "question" are always computed.
        stored: segment id → its stored variants, all of this model and namespace.
        config: settings of reuse.
        lost: variant id → the reason why it could not be loaded; it is not chosen again.
        refused: segment id → the reason why a stored variant is not among `stored`.
        removed: ids of segments that were removed with their documents; like `refused`, for the reason only.
    """
    segments = prompt.segments
    segment_ids = tuple(segment.segment_id for segment in segments)
    permuted_prefix = (
        _set_prefix(prompt, stored, lost, config) if config.method.scope == "set" else {}
    )
    # segment id → index, for the chunks and other text before the current segment
    places: dict[str, int] = {}
    plans: list[SegmentPlan] = []

    for index, segment in enumerate(segments):
        if segment.kind == "question":
            plans.append(SegmentPlan("computed", Reason.QUESTION))
            places[segment.segment_id] = index
            continue

        if not config.reuse:
            is_short = config.is_too_short(prompt.bounds[-1])
            plan = SegmentPlan("computed", Reason.SHORT_PROMPT if is_short else Reason.REUSE_OFF)
        else:
            prefix = segment_ids[:index]
            variants = stored.get(segment.segment_id, ())
            available = [variant for variant in variants if variant.variant_id not in lost]
            if index in permuted_prefix:
                plan = permuted_prefix[index]
            else:
                plan = _best(segment, available, prefix=prefix, places=places, config=config)

            if plan.variant is None and len(available) < len(variants):
                detail = next(
                    lost[variant.variant_id] for variant in variants if variant.variant_id in lost
                )
                plan = replace(plan, reason=Reason.NOT_LOADED, detail=detail)
            elif plan.variant is None and not variants and segment.segment_id in refused:
                plan = replace(plan, reason=Reason.REFUSED, detail=refused[segment.segment_id])
            elif plan.variant is None and segment.segment_id in removed:
                plan = replace(plan, reason=Reason.REMOVED)

        plans.append(plan)
        if segment.kind == "chunk":
            places[segment.segment_id] = index
    return tuple(_with_last_chunk_in_full(segments, plans, config))


def _with_last_chunk_in_full(
    segments: Sequence[Segment], plans: Sequence[SegmentPlan], config: ReuseConfig
) -> list[SegmentPlan]:
    """Return the plans with the prompt's last chunk marked for full recomputation, if it is small enough.

    Its CFO does not matter: it is 0 where all chunks that it was captured after are in the prompt, but others stand
    between them.
    """
    marked = list(plans)
    lengths = {
        index: len(segment.token_ids)
        for index, segment in enumerate(segments)
        if segment.kind == "chunk"
    }
    has_ratio = config.ratio_in_use is not None
    recomputes = config.ratio_in_use if has_ratio else config.method.alpha
    is_set_cache = config.method.scope == "set" and not has_ratio
    if not lengths or recomputes == 0 or is_set_cache:
        return marked

    last_chunk = max(lengths)  # the largest number of a segment
    planned = plans[last_chunk]
    is_small = lengths[last_chunk] <= config.nearest_share * sum(lengths.values())
    if planned.to_fix and is_small:
        marked[last_chunk] = replace(planned, reason=Reason.NEAREST, in_full=True)
    return marked


def _best(
    segment: Segment,
    variants: Sequence[Variant],
    *,
    prefix: tuple[str, ...],
    places: Mapping[str, int],
    config: ReuseConfig,
) -> SegmentPlan:
    """Return the plan for a segment with its best variant, or to compute it if no variant may be used."""
    if segment.kind == "system" and variants:
        variants = [variant for variant in variants if variant.lossless]
        if not variants:  # every later token would inherit the codec's error
            return SegmentPlan(
                "computed",
                Reason.LOSSY_CODEC,
                "an instruction is reused from a lossless codec only",
            )

    best: SegmentPlan | None = None
    for variant in variants:
        if not _fits(variant, segment):
            continue
        scored = _score(variant, prefix=prefix, places=places, config=config)
        if scored.outcome == "exact":
            return scored
        if best is None or _rank(scored, config) < _rank(best, config):
            best = scored

    if best is not None and config.method.scope != "anywhere" and not best.at_origin:
        return SegmentPlan("computed", Reason.OTHER_PREFIX)
    if best is None:
        return SegmentPlan("computed", Reason.OTHER_TOKENS if variants else Reason.NOT_STORED)
    if config.ratio_in_use is None and (best.cfo or 0.0) >= 1.0:
        return replace(best, outcome="computed", reason=Reason.NOT_WORTH_FIXING, variant=None)
    return best


def _fits(variant: Variant, segment: Segment) -> bool:
    """Return True if a variant holds exactly these tokens; a shorter one would leave positions uninitialised."""
    return variant.tokens_digest == segment.tokens_digest and variant.tokens == len(
        segment.token_ids
    )


def _set_prefix(
    prompt: Prompt,
    stored: Mapping[str, Sequence[Variant]],
    lost: Mapping[str, str],
    config: ReuseConfig,
) -> dict[int, SegmentPlan]:
    """Return segment index → plan of the longest prefix that was captured as a prefix in any order (SET-CACHE)."""
    segments = prompt.segments
    # (segment id, origin prefix) → variant
    variants_by_path: dict[tuple[str, tuple[str, ...]], Variant] = {}
    for segment in segments[:-1]:
        for variant in stored.get(segment.segment_id, ()):
            is_usable = _fits(variant, segment) and _at_origin(variant, config) is not None
            if variant.key.origin_prefix and is_usable and variant.variant_id not in lost:
                variants_by_path[segment.segment_id, variant.key.origin_prefix] = variant

    places = {segment.segment_id: index for index, segment in enumerate(segments[:-1])}
    current_ids = [segment.segment_id for segment in segments]
    longest: dict[int, SegmentPlan] = {}

    for last_id, (system_id, *earlier_ids) in variants_by_path:
        captured_order = (*earlier_ids, last_id)
        current_order = current_ids[1 : len(captured_order) + 1]
        is_same_order = list(captured_order) == current_order
        if system_id != current_ids[0] or set(captured_order) != set(current_order):
            continue
        # Of two orders of equal length, the current one wins.
        if len(captured_order) < len(longest) + (not is_same_order):
            continue

        plans: dict[int, SegmentPlan] = {}
        for captured_place, segment_id in enumerate(captured_order):
            captured_prefix = captured_order[:captured_place]
            captured = variants_by_path.get((segment_id, (system_id, *captured_prefix)))
            if captured is None:
                break
            index = places[segment_id]
            is_at_origin = list(captured_prefix) == current_ids[1:index]
            unmoved = _at_origin(captured, config) if is_at_origin else None
            plans[index] = unmoved or _without_fixing("reused", captured)
        else:
            longest = plans
    return longest


def _at_origin(variant: Variant, config: ReuseConfig) -> SegmentPlan | None:
    """Return the plan for a variant after its origin prefix, or None if it needs fixing."""
    if variant.lossless:
        return _without_fixing("exact", variant) if variant.exact_share >= 1.0 else None
    if variant.exact_share < _LOSSY_SHARE or config.recompute_ratio == 1.0:
        return None
    detail = f"as it was captured, but for what the codec {variant.codec} loses"
    plan = _without_fixing("reused", variant)
    return replace(plan, reason=Reason.LOSSY_CODEC, detail=detail, at_origin=True)


def _without_fixing(outcome: SegmentOutcome, variant: Variant) -> SegmentPlan:
    """Return the plan for a variant whose context has not changed: CFO is 0."""
    return SegmentPlan(outcome, variant=variant, beta=1.0, gamma=0.0, beta_prime=1.0, cfo=0.0)


def _rank(plan: SegmentPlan, config: ReuseConfig) -> tuple[bool, bool, float, float]:
    """Return the sort key of a scored variant; lower is better.

    With `scoring="corrected"` CFO is weighted, because CCI misleads in two cases. A primed variant attended more to
    earlier chunks, but these were neighbours in its document: it loses less. A variant captured after the instruction
    only attended to no chunk, yet loses most (docs/results/quality.md).
    """
    variant = plan.variant
    assert variant is not None, "only variants are ranked"
    cfo = plan.cfo or 0.0
    weight = 1.0
    if config.method.scoring == "corrected":
        if len(variant.key.origin_prefix) == 1:
            weight = _ALONE_WEIGHT
        elif variant.primed:
            weight = _PRIMED_WEIGHT
    return cfo >= 1.0, not plan.at_origin, cfo * weight, -variant.exact_share


def _score(
    variant: Variant, *, prefix: tuple[str, ...], places: Mapping[str, int], config: ReuseConfig
) -> SegmentPlan:
    """Return the plan for one variant after a prefix of segment ids, with its CFO; `places` are those of its chunks."""
    origin_prefix = variant.key.origin_prefix
    if origin_prefix == prefix:
        unmoved = _at_origin(variant, config)
        if unmoved is not None:
            return unmoved

    beta = 0.0
    gamma = 0.0
    # after another instruction, nothing of the old context is left
    if origin_prefix[:1] == prefix[:1]:
        beta = prefix_overlap(variant.inter[1:], origin_prefix[1:], places)
        gamma = order_penalty(origin_prefix[1:], places)

    adjusted = adjusted_overlap(beta, gamma)
    # An inexact capture attended to approximations of its neighbours, so only its exact share of the overlap counts.
    if config.method.scoring == "corrected":
        adjusted *= variant.exact_share
    # If the settings give the ratio, CFO only compares variants. DEFAULT_ALPHA keeps it below 1, where it is clipped.
    has_own_ratio = config.ratio_in_use is not None
    alpha = DEFAULT_ALPHA if config.method.alpha is None or has_own_ratio else config.method.alpha
    cfo = fix_overhead(alpha=alpha, cci=variant.cci, adjusted=adjusted)
    return SegmentPlan(
        "reused", variant=variant, beta=beta, gamma=gamma, beta_prime=adjusted, cfo=cfo
    )


def with_selection(
    plan: Plan,
    token_scores: Mapping[str, TokenScores],
    config: ReuseConfig,
    *,
    probed: Mapping[int, np.ndarray] = MappingProxyType({}),
    recomputed: Mapping[int, Offsets] = MappingProxyType({}),
    excluded: Mapping[int, Offsets] = MappingProxyType({}),
    focus: Mapping[int, float] = MappingProxyType({}),
) -> Plan:
    """Return a copy of the plan with the tokens to recompute of each segment to fix, and with the focus of chunks.

    The budget of a chunk is ⌈CFO · |C|⌉ tokens (§3.2.1), or ⌈r · |C|⌉ with a ratio r (`config.ratio_in_use`). Of a
    chunk that is `in_full`, all tokens but the `excluded` ones are chosen, outside of the budgets (see
    `selectors.select`).

    Args:
        plan: a plan from `make_plan` or from here; its chunk ids begin with eight hex digits, the seed of random
            selectors.
        token_scores: variant id → token scores; missing ones count as unknown.
        config: settings of reuse.
        probed: segment index → the probe's scores of its tokens, float32 `[tokens]`.
        recomputed: segment index → offsets of tokens that are already recomputed; they stay selected.
        excluded: segment index → offsets of tokens that are computed for another reason.
        focus: segment index → focus score of each chunk that the probe has seen. Where `early_termination="probe"` acts
            (see `ReuseMethod`), those out of focus that have probed scores get no further tokens.
    """
    facts: list[TokenFacts] = []
    budgets: list[int] = []
    not_to_choose: list[Offsets] = []
    spent: list[int] = []
    fixed_indices: list[int] = []
    segments = _with_focus(plan, focus)
    none = no_offsets()

    for index, planned in enumerate(segments):
        variant = planned.variant
        if not planned.to_fix or variant is None:
            continue
        ratio = planned.cfo if config.ratio_in_use is None else config.ratio_in_use
        scores = token_scores.get(variant.variant_id, TokenScores())
        seed = int(variant.key.chunk_id[:8], 16)
        already_recomputed = recomputed.get(index, none)
        already_computed = excluded.get(index, none)
        budget = math.ceil((ratio or 0.0) * variant.tokens)

        if planned.in_focus is False and index in probed and _spares_tokens(config, focus):
            wanted = variant.tokens - len(already_computed) if planned.in_full else budget
            spared = max(0, wanted - len(already_recomputed))
            segments[index] = planned = replace(planned, spared=spared, in_full=False)
            budget = 0

        if planned.in_full:
            every_offset = np.arange(variant.tokens)
            segments[index] = replace(planned, recompute=_without(every_offset, already_computed))
            continue

        facts.append(TokenFacts(variant.tokens, seed, scores.inter, probed.get(index)))
        budgets.append(budget)
        not_to_choose.append(np.concatenate((already_recomputed, already_computed)))
        spent.append(len(already_recomputed))
        fixed_indices.append(index)

    selector = selector_named(config.method.selector)
    selection = select(
        facts,
        budgets,
        selector,
        budget_scope=config.method.budget_scope,
        excluded=not_to_choose,
        spent=spent,
    )

    for index, offsets in zip(fixed_indices, selection, strict=True):
        if index in recomputed:
            offsets = np.sort(np.concatenate((offsets, recomputed[index])))
        segments[index] = _fixed(segments[index], offsets, config.method.selector)
    return tuple(segments)


def _without(offsets: Offsets, others: Offsets) -> Offsets:
    """Return the offsets that are not among the others, in the same order."""
    return offsets[np.isin(offsets, others, invert=True)] if len(others) else offsets


def _spares_tokens(config: ReuseConfig, focus: Mapping[int, float]) -> bool:
    """Return True if chunks out of focus recompute nothing."""
    is_exact = config.ratio_in_use == 1.0
    return (
        config.method.early_termination == "probe" and not is_exact and len(focus) >= FEWEST_CHUNKS
    )


def _with_focus(segments: Sequence[SegmentPlan], focus: Mapping[int, float]) -> list[SegmentPlan]:
    """Return the segments with the focus of each chunk that has a focus score."""
    marked = list(segments)
    in_focus = chunks_in_focus(focus)
    highest = max(focus.values(), default=0.0)
    for index, score in focus.items():
        share = score / highest if highest else 1.0
        marked[index] = replace(marked[index], focus=share, in_focus=index in in_focus)
    return marked


def _fixed(planned: SegmentPlan, offsets: Offsets, selector: str) -> SegmentPlan:
    """Return the plan for a reused segment with these tokens to recompute, and the reason for it."""
    if not len(offsets):
        reason = Reason.UNFOCUSED if planned.spared else Reason.REUSED
        return replace(planned, reason=reason, detail="", recompute=offsets)
    assert planned.variant is not None, "only reused segments are fixed"
    counts = f"{len(offsets)} of {planned.variant.tokens} tokens recomputed"
    detail = f"{counts}, chosen by the selector {selector!r}"
    return replace(planned, reason=Reason.FIXED, detail=detail, recompute=offsets)


def with_not_loaded(
    planned: SegmentPlan, computed: Offsets, reason: Reason, detail: str = ""
) -> SegmentPlan:
    """Return the plan for a segment after some of its tokens, at these offsets, were computed instead of loaded.

    If all of them were, the outcome is "computed", except for `Reason.COMPUTED_LATE`: then first layers used stored
    values. Without any, or without a variant, the plan itself is returned.
    """
    if not len(computed) or planned.variant is None:
        return planned
    kept = _without(planned.recompute, computed)
    stale = planned.variant.tokens - len(computed) - len(kept)
    changed = replace(planned, reason=reason, detail=detail, spared=min(planned.spared, stale))
    if len(computed) == planned.variant.tokens and reason is not Reason.COMPUTED_LATE:
        return replace(
            changed, outcome="computed", variant=None, recompute=no_offsets(), at_origin=False
        )
    return replace(changed, recompute=kept, not_loaded=len(computed))


def exact_shares(plan: Plan, lengths: Sequence[int]) -> list[float]:
    """Return for each segment the share of exact tokens in the context before it, in [0, 1] (1.0 for the first).

    A chunk computed after reused chunks inherits their error, which makes its capture inexact. Exact segments count in
    full, reused ones not at all, and computed ones in proportion to the share of their own context; those of a lossy
    codec after their origin prefix nearly in full. `lengths` are tokens of the segments.

    >>> a, b, c = SegmentPlan("exact"), SegmentPlan("reused"), SegmentPlan("computed")
    >>> exact_shares((a, b, c, c), [10, 30, 20, 5])  # 1, 10/10, 10/40, (10 + 20 · .25) / 60
    [1.0, 1.0, 0.25, 0.25]
    """
    shares = []
    exact_tokens = 0.0
    total_tokens = 0.0
    for planned, length in zip(plan, lengths, strict=True):
        context_share = exact_tokens / total_tokens if total_tokens else 1.0
        shares.append(context_share)
        if planned.outcome == "exact":
            own_share = 1.0
        elif planned.outcome == "computed":
            own_share = context_share
        elif planned.at_origin and planned.variant is not None:
            own_share = _LOSSY_SHARE * planned.variant.exact_share
        else:
            own_share = 0.0
        exact_tokens += length * own_share
        total_tokens += length
    return shares
