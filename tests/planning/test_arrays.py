"""Plans made in arrays, compared with plain lists and sets over random prompts: the same tokens, bit for bit."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cachecraft_rag.compute.job import PrefillJob
from cachecraft_rag.compute.resolve import rows_of
from cachecraft_rag.compute.rows import RowReason, Rows
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.planning.early_termination import chunks_in_focus, focus_score
from cachecraft_rag.planning.planner import Plan, SegmentPlan, with_selection
from cachecraft_rag.planning.reasons import Reason
from cachecraft_rag.planning.scoring import order_penalty
from cachecraft_rag.planning.selectors import SELECTORS, TokenFacts, leading
from cachecraft_rag.types.captures import TokenScores
from cachecraft_rag.types.digests import digest
from cachecraft_rag.types.prompts import Prompt, Segment
from cachecraft_rag.types.variants import Variant, VariantKey


@dataclass(frozen=True)
class Case:
    """A plan with everything that decides which of its tokens are recomputed."""

    plan: Plan
    scores: Mapping[str, TokenScores]
    config: ReuseConfig
    probed: Mapping[int, NDArray[np.float32]]
    recomputed: Mapping[int, NDArray[np.int64]]
    excluded: Mapping[int, NDArray[np.int64]]
    focus: Mapping[int, float]


def variant(number: int, tokens: int) -> Variant:
    name = digest("chunk", str(number))
    key = VariantKey("default", "model", name, ("system",))
    return Variant(key, key.variant_id, tokens, "", (1.0,), 1.0, 0.6, 1.0, None, "raw", 0, 0.0, 0.0)


def offsets(dice: np.random.Generator, tokens: int, share: float) -> NDArray[np.int64]:
    return np.flatnonzero(dice.random(tokens) < share)


def scores_of(dice: np.random.Generator, tokens: int) -> NDArray[np.float32]:
    """Scores with ties; some are 0, and rarely one is no number."""
    steps = int(dice.integers(2, 50))
    scores = (dice.integers(0, steps, tokens) / steps).astype(np.float32)
    if dice.random() < 0.05:
        scores[dice.integers(tokens)] = np.nan
    return scores


def case_of(dice: np.random.Generator) -> Case:
    segments = [SegmentPlan("exact", variant=variant(0, 3))]
    scores = {}
    probed = {}
    recomputed = {}
    excluded = {}
    focus = {}
    count = int(dice.integers(1, 9))
    for index in range(1, count + 1):
        tokens = int(dice.integers(1, 60))
        kind = dice.choice(["exact", "computed", "in full", "reused"], p=[0.1, 0.1, 0.1, 0.7])
        own = variant(index, tokens)
        if kind == "computed":
            segments.append(SegmentPlan("computed"))
            continue
        if kind == "exact":
            segments.append(SegmentPlan("exact", variant=own))
            continue
        cfo = float(dice.choice([0.0, 0.1, 0.35, 1.0]))
        segments.append(SegmentPlan("reused", variant=own, cfo=cfo, in_full=kind == "in full"))
        if dice.random() < 0.7:
            scores[own.variant_id] = TokenScores(scores_of(dice, tokens))
        if dice.random() < 0.7:
            probed[index] = scores_of(dice, tokens)
            focus[index] = float(dice.choice([0.0, 0.5, 0.9, 1.0]))
        if dice.random() < 0.5:
            done = offsets(dice, tokens, 0.2)
            recomputed[index] = done
            excluded[index] = np.setdiff1d(offsets(dice, tokens, 0.3), done)
    segments.append(SegmentPlan("computed"))
    config = ReuseConfig(
        recompute_ratio=dice.choice([None, 0.0, 0.15, 0.5, 1.0]),
        method=ReuseMethod(
            alpha=dice.choice([None, 0.5]),
            selector=str(dice.choice(sorted(SELECTORS))),
            budget_scope=dice.choice(["chunk", "prompt"]),
            early_termination=dice.choice(["off", "probe"]),
        ),
    )
    return Case(tuple(segments), scores, config, probed, recomputed, excluded, focus)


# -- the plain reference ----------------------------------------------------------------------------------------------


def plain_highest(scores: Sequence[float], budget: int) -> list[int]:
    allowed = [place for place, score in enumerate(scores) if score > -math.inf]
    return sorted(sorted(allowed, key=lambda place: (-scores[place], place))[:budget])


def plain_scores(case: Case, facts: TokenFacts) -> tuple[list[float], bool]:
    scores = SELECTORS[case.config.method.selector].score(facts)
    if scores is None:
        return leading(facts).tolist(), False
    return scores.astype(np.float64).tolist(), True


def plain_recompute(case: Case) -> list[tuple[list[int], int]]:
    """The tokens to recompute of each segment, and how many were spared."""
    ratio = case.config.ratio_in_use
    in_focus = chunks_in_focus(case.focus)
    may_spare = (
        case.config.method.early_termination == "probe" and ratio != 1.0 and len(case.focus) >= 5
    )
    chosen: dict[int, tuple[set[int], int]] = {}
    pool: list[tuple[float, int, int]] = []
    pooled_budget = 0
    for index, planned in enumerate(case.plan):
        if planned.outcome != "reused":
            continue
        assert planned.variant is not None
        tokens = planned.variant.tokens
        done = set(case.recomputed.get(index, np.empty(0)).tolist())
        elsewhere = set(case.excluded.get(index, np.empty(0)).tolist())
        budget = math.ceil(((planned.cfo if ratio is None else ratio) or 0.0) * tokens)
        in_full = planned.in_full
        spared = 0
        if may_spare and index in case.focus and index not in in_focus and index in case.probed:
            wanted = tokens - len(elsewhere) if in_full else budget
            spared = max(0, wanted - len(done))
            in_full = False
            budget = 0
        if in_full:
            chosen[index] = set(range(tokens)) - elsewhere, spared
            continue
        chosen[index] = set(done), spared
        remaining = budget - len(done)
        if budget <= 0 or (case.config.method.budget_scope == "chunk" and remaining <= 0):
            continue
        scores = case.scores.get(planned.variant.variant_id, TokenScores())
        seed = int(planned.variant.key.chunk_id[:8], 16)
        facts = TokenFacts(tokens, seed, scores.inter, case.probed.get(index))
        values, is_scored = plain_scores(case, facts)
        for offset in done | elsewhere:
            values[offset] = -math.inf
        if case.config.method.budget_scope == "prompt" and is_scored:
            pool += [(value * (budget / tokens), index, at) for at, value in enumerate(values)]
            pooled_budget += remaining
        else:
            chosen[index][0].update(plain_highest(values, max(0, remaining)))
    for place in plain_highest([value for value, *_ in pool], max(0, pooled_budget)):
        _, index, offset = pool[place]
        chosen[index][0].add(offset)
    return [
        (sorted(chosen[index][0]), chosen[index][1]) if index in chosen else ([], 0)
        for index in range(len(case.plan))
    ]


# -- tests ------------------------------------------------------------------------------------------------------------


def selected(case: Case) -> Plan:
    return with_selection(
        case.plan,
        case.scores,
        case.config,
        probed=case.probed,
        recomputed=case.recomputed,
        excluded=case.excluded,
        focus=case.focus,
    )


@given(st.integers(0, 2**32))
def test_arrays_choose_the_tokens_that_lists_and_sets_choose(seed: int) -> None:
    case = case_of(np.random.default_rng(seed))
    plan = selected(case)
    assert [(planned.recompute.tolist(), planned.spared) for planned in plan] == plain_recompute(
        case
    )
    assert all(planned.recompute.dtype == np.int64 for planned in plan)


@given(st.integers(0, 2**32))
def test_rows_in_arrays_are_the_rows_of_the_plan(seed: int) -> None:
    case = case_of(np.random.default_rng(seed))
    plan = selected(case)
    lengths = [planned.variant.tokens if planned.variant else 4 for planned in plan]
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    expected = []
    for planned, length in zip(plan, lengths, strict=True):
        chosen = set(planned.recompute.tolist())
        for offset in range(length):
            if planned.variant is None:
                expected.append(RowReason.NEW)
            else:
                expected.append(RowReason.RECOMPUTED if offset in chosen else RowReason.STORED)
    rows = rows_of(plan, bounds)
    assert rows.reason.tolist() == expected
    assert rows.segment.tolist() == [
        index for index, length in enumerate(lengths) for _ in range(length)
    ]

    job = PrefillJob([], rows, drift=0.4)
    stale = {
        segment
        for segment, reason in zip(rows.segment.tolist(), expected, strict=True)
        if reason == RowReason.STORED
    }
    assert job.unused(rows).tolist() == [
        position
        for position, reason in enumerate(expected)
        if reason == RowReason.RECOMPUTED and rows.segment[position] not in stale
    ]


@given(st.lists(st.floats(0.0, 1.0, width=32), max_size=30))
def test_the_median_of_a_focus_score_is_numpys(attention: list[float]) -> None:
    values = np.array(attention, np.float32)
    seen = values[values > 0.0]
    expected = 0.0
    if len(seen):
        strongest = np.sort(seen)[::-1][:8]
        expected = float(strongest.sum() / np.sqrt(np.median(seen)))
    assert focus_score(values) == expected


@given(st.permutations(range(9)), st.integers(0, 9))
def test_the_order_penalty_counts_pairs_in_another_order(order: list[int], shared: int) -> None:
    old = [str(number) for number in range(9)]
    new = {str(number): order[number] for number in range(shared)}
    pairs = [(one, other) for one in range(shared) for other in range(one + 1, shared)]
    discordant = sum(order[one] > order[other] for one, other in pairs)
    assert order_penalty(old, new) == (discordant / len(pairs) if pairs else 0.0)


def test_equal_plans_compare_their_tokens() -> None:
    one = SegmentPlan("reused", recompute=np.array([1, 2]))
    assert one == SegmentPlan("reused", recompute=np.array([1, 2]))
    assert one != SegmentPlan("reused", recompute=np.array([1, 3]))
    assert one != SegmentPlan("reused", reason=Reason.FIXED, recompute=np.array([1, 2]))
    assert one != "reused"


@pytest.mark.parametrize("given_as", [tuple, list, np.array])
def test_token_ids_are_arrays_however_they_are_given(given_as: Callable[..., Any]) -> None:
    segment = Segment("chunk", "a", given_as([7, 2**31 - 1]))
    assert segment.token_ids.dtype == np.int32
    assert segment.token_ids.tolist() == [7, 2**31 - 1]
    assert segment == Segment("chunk", "a", (7, 2**31 - 1))
    assert segment != Segment("chunk", "a", (8, 2**31 - 1))


def test_segments_of_one_prompt_reach_another_process_each_with_its_own_tokens() -> None:
    ids = np.arange(5000, dtype=np.int32)
    segment = Segment("chunk", "a", ids[10:20], private=True)
    sent = pickle.dumps(segment)
    assert len(sent) < 2000
    assert pickle.loads(sent) == segment  # noqa: S301
    assert pickle.loads(sent).token_ids.tolist() == list(range(10, 20))  # noqa: S301


@pytest.mark.parametrize("given_as", [tuple, list, np.array])
def test_a_token_id_of_more_than_32_bits_is_refused(given_as: Callable[..., Any]) -> None:
    with pytest.raises(OverflowError):
        Segment("chunk", "a", given_as([2**31]))


def test_a_prompts_tokens_are_those_of_its_segments_in_order() -> None:
    prompt = Prompt((Segment("system", "s", (1, 2)), Segment("question", "q", (3,))))
    assert prompt.token_array.tolist() == prompt.token_ids == [1, 2, 3]
    assert all(type(token) is int for token in prompt.token_ids)
    assert Prompt(()).token_ids == []


@given(st.integers(0, 2**32))
def test_offsets_of_several_reasons_are_those_of_each(seed: int) -> None:
    dice = np.random.default_rng(seed)
    reason = dice.integers(0, 4, 40).astype(np.uint8)
    rows = Rows((0, 15, 40), np.repeat([0, 1], [15, 25]), reason, np.zeros(40, bool))
    wanted = [kind for kind in RowReason if dice.random() < 0.5]
    assert rows.offsets(1, *wanted).tolist() == [
        offset for offset, kind in enumerate(reason[15:].tolist()) if kind in wanted
    ]
