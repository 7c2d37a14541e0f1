"""Planning: which stored variant serves each chunk, what is recomputed, and how little of the catalog that reads."""

from __future__ import annotations

import dataclasses
import math
import random
import sqlite3
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from typing import Any

import numpy as np
import pytest

from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.planning.planner import (
    Plan,
    SegmentPlan,
    exact_shares,
    make_plan,
    with_not_loaded,
    with_selection,
)
from cachecraft_rag.planning.reasons import Reason, explain
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.catalog.catalog import _INSERT, Catalog, _scope_of
from cachecraft_rag.store.catalog.rows import row_of, sum_of_scores
from cachecraft_rag.types.captures import TokenScores
from cachecraft_rag.types.digests import digest
from cachecraft_rag.types.prompts import Prompt, Segment
from cachecraft_rag.types.variants import Variant, VariantKey

CONFIG = ReuseConfig(method=ReuseMethod(alpha=0.5))
SYSTEM, OTHER_SYSTEM = "system", "another system"


def segment(name: str, tokens: int = 10) -> Segment:
    """A chunk whose token ids follow from its name."""
    return Segment("chunk", name, tuple(hash_of(name) + place for place in range(tokens)))


def hash_of(name: str) -> int:
    return int(digest(name)[:6], 16)


def prompt_of(*names: str, system: str = SYSTEM) -> Prompt:
    """system, the named chunks, and a question."""
    return Prompt(
        (
            Segment("system", system, (1, 2)),
            *(segment(n) for n in names),
            Segment("question", "q", (3,), True),
        )
    )


def variant(
    name: str, *before: str, inter: tuple[float, ...] | None = None, **changes: Any
) -> Variant:
    """A stored chunk-cache, captured after the system and the named chunks, to which it attended alike."""
    prefix = (changes.pop("system", SYSTEM), *before)
    key = VariantKey("default", "model", name, prefix)
    made = Variant(
        key=key,
        variant_id=key.variant_id,
        tokens=10,
        tokens_digest=segment(name).tokens_digest,
        inter=(0.5, *(inter or (1.0,) * len(before))),
        intra=4.0,
        cci=0.6,
        exact_share=1.0,
        session=None,
        codec="raw",
        nbytes=100,
        reuse_frequency=0.0,
        created=1.0,
    )
    return dataclasses.replace(made, **changes)


def plan_last(
    prompt: Prompt, *variants: Variant, config: ReuseConfig = CONFIG, **lost: str
) -> SegmentPlan:
    """The plan of the last chunk."""
    name = prompt.segments[-2].segment_id
    return make_plan(prompt, {name: variants}, config, lost=lost)[-2]


def test_without_a_variant_everything_is_computed() -> None:
    plan = make_plan(prompt_of("a", "b"), {}, CONFIG)
    assert [s.outcome for s in plan] == ["computed"] * 4
    assert [s.reason for s in plan[:3]] == [Reason.NOT_STORED] * 3
    assert plan[3].reason == Reason.QUESTION


def test_switched_off_nothing_is_reused() -> None:
    plan = make_plan(prompt_of("a"), {"a": [variant("a")]}, ReuseConfig(reuse=False))
    assert [(s.outcome, s.variant) for s in plan] == [("computed", None)] * 3


def test_the_very_same_prefix_is_exact() -> None:
    own = variant("c", "a", "b")
    found = plan_last(prompt_of("a", "b", "c"), variant("c", "a"), own, variant("c", "b", "a"))
    assert (found.outcome, found.variant, found.cfo) == ("exact", own, 0.0)


def test_the_system_segment_is_exact_after_nothing() -> None:
    key = VariantKey("default", "model", SYSTEM, ())
    digest_of_it = Segment("system", SYSTEM, (1, 2)).tokens_digest
    own = dataclasses.replace(
        variant("x"),
        key=key,
        variant_id=key.variant_id,
        inter=(),
        tokens=2,
        tokens_digest=digest_of_it,
    )
    assert make_plan(prompt_of("a"), {SYSTEM: [own]}, CONFIG)[0].outcome == "exact"


def test_the_lowest_overhead_wins() -> None:
    half = variant("c", "a", "x")  # β = 1/2
    most = variant("c", "a", "b", "x")  # β = 2/3
    none = variant("c", "x", "y")
    found = plan_last(prompt_of("b", "a", "d", "c"), none, half, variant("c", "b", "a", "x"), most)
    assert found.outcome == "reused"
    assert found.variant == variant("c", "b", "a", "x")  # β = 2/3 like `most`, and in order
    assert found.cfo == pytest.approx(0.5 * 0.6 * (1 - 2 / 3))
    assert (found.beta, found.gamma) == (pytest.approx(2 / 3), 0.0)
    reordered = plan_last(prompt_of("b", "a", "d", "c"), none, half, most)
    assert reordered.variant == half  # γ = 1 takes all of the other's overlap away
    assert plan_last(prompt_of("b", "a", "d", "c"), most).beta_prime == 0.0


def test_of_equals_the_purer_birth_wins() -> None:
    inexact = variant("c", "x", exact_share=0.3)
    pure = variant("c", "y", exact_share=0.9)
    for offers in ((inexact, pure), (pure, inexact)):
        assert plan_last(prompt_of("a", "c"), *offers).variant == pure


def test_a_primed_variant_wins_unless_another_really_overlaps() -> None:
    primed = variant("c", "x", cci=0.7, primed=True)
    other, third = variant("c", "y"), variant("c", "y", "a", "z")
    assert plan_last(prompt_of("a", "b", "d", "c"), other, primed).variant == primed
    assert plan_last(prompt_of("a", "b", "d", "c"), other, primed, third).variant == third
    # it is recomputed like any other
    assert plan_last(prompt_of("a", "c"), primed).cfo == pytest.approx(0.5 * 0.7)


def test_a_variant_captured_alone_wins_at_the_front_only() -> None:
    alone, behind = variant("c", cci=0.5, primed=True), variant("c", "x", "y", cci=0.6)
    assert plan_last(prompt_of("a", "c"), alone, behind).variant == behind
    assert plan_last(prompt_of("c"), alone, behind).outcome == "exact"
    assert plan_last(prompt_of("a", "c"), alone).variant == alone


def test_a_primed_variant_that_cannot_be_fixed_does_not_win() -> None:
    primed, other = variant("c", "x", cci=0.7, primed=True), variant("c", "y")
    # CFO 1 and 0.9
    found = plan_last(
        prompt_of("a", "c"), primed, other, config=ReuseConfig(method=ReuseMethod(alpha=1.5))
    )
    assert (found.outcome, found.variant) == ("reused", other)


def test_with_published_scoring_the_lowest_overhead_wins_whatever_the_origin() -> None:
    published = CONFIG.with_method(scoring="published")
    primed, other = variant("c", "x", cci=0.7, primed=True), variant("c", "y", cci=0.65)
    alone = variant("c", cci=0.5)
    prompt = prompt_of("a", "b", "d", "c")
    assert plan_last(prompt, primed, other).variant == primed
    assert plan_last(prompt, primed, other, config=published).variant == other
    behind = variant("c", "x", "y", cci=0.6)
    assert plan_last(prompt, alone, behind).variant == behind
    assert plan_last(prompt, alone, behind, config=published).variant == alone


def test_with_published_scoring_the_overlap_of_an_inexact_capture_counts_in_full() -> None:
    published = CONFIG.with_method(scoring="published")
    inexact = variant("c", "a", exact_share=0.75)
    found = plan_last(prompt_of("a", "c"), inexact, config=published)
    assert (found.outcome, found.beta, found.beta_prime, found.cfo) == ("reused", 1.0, 1.0, 0.0)


def test_an_inexact_capture_is_not_exact_even_after_the_same_prefix() -> None:
    found = plan_last(prompt_of("a", "c"), variant("c", "a", exact_share=0.75))
    assert (found.outcome, found.beta, found.beta_prime) == ("reused", 1.0, 0.75)
    assert found.cfo == pytest.approx(0.5 * 0.6 * 0.25)  # α · CCI · (1 - β′)


def test_an_overhead_of_one_means_computing() -> None:
    found = plan_last(
        prompt_of("a", "c"), variant("c", "x"), config=ReuseConfig(method=ReuseMethod(alpha=2.0))
    )
    assert (found.outcome, found.variant, found.cfo) == ("computed", None, 1.0)
    assert found.reason == Reason.NOT_WORTH_FIXING
    assert (
        plan_last(
            prompt_of("a", "c"),
            variant("c", "x"),
            config=ReuseConfig(method=ReuseMethod(alpha=1.6)),
        ).outcome
        == "reused"
    )


@pytest.mark.parametrize("ratio", [0.0, 0.15, 1.0])
def test_with_a_fixed_ratio_alpha_decides_nothing(ratio: float) -> None:
    offers = [variant("c", "x", cci=0.7), variant("c", "y", "a"), variant("c", "y", cci=0.9)]
    stored = {"c": offers}
    plans = [
        with_selection(make_plan(prompt_of("a", "c"), stored, config), {}, config)
        for config in (
            ReuseConfig(recompute_ratio=ratio, method=ReuseMethod(alpha=alpha))
            for alpha in (None, 0.0, 0.5, 1.6, 50.0)
        )
    ]
    assert all(plan == plans[0] for plan in plans)
    found = plans[0][-2]
    assert (found.outcome, found.variant, len(found.recompute)) == (
        "reused",
        offers[1],
        math.ceil(ratio * 10),
    )


# -- what a codec loses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["int8", "entropy", "of a later version"])
def test_what_a_lossy_codec_kept_is_never_exact_and_needs_no_fixing(codec: str) -> None:
    own, moved = variant("c", "a", codec=codec), variant("c", "b")
    for config in (
        CONFIG,
        ReuseConfig(method=ReuseMethod(alpha=0.0)),
        ReuseConfig(recompute_ratio=0.5),
        ReuseConfig(method=ReuseMethod(scope="prefix")),
    ):
        found = plan_last(prompt_of("a", "c"), moved, own, config=config)
        assert (found.outcome, found.variant, found.beta_prime, found.cfo) == (
            "reused",
            own,
            1.0,
            0.0,
        )
        assert found.reason == Reason.LOSSY_CODEC
        assert codec in explain(found.reason, found.detail)
        assert with_selection((found,), {}, config)[0].recompute.tolist() == []
    chain = [dataclasses.replace(one, codec=codec) for one in stored_chain("a", "b")]
    assert plan_of(prompt_of("a", "b"), chain, SET) == [("reused", one) for one in chain]


def test_with_everything_recomputed_what_a_lossy_codec_kept_is_too() -> None:
    exactly = ReuseConfig(recompute_ratio=1.0)
    found = plan_last(prompt_of("a", "c"), variant("c", "a", codec="int8"), config=exactly)
    assert found.to_fix
    (chosen,) = with_selection((found,), {}, exactly)
    assert chosen.recompute.tolist() == list(range(10))
    assert plan_last(prompt_of("a", "c"), variant("c", "a"), config=exactly).outcome == "exact"


@pytest.mark.parametrize(("codec", "outcome"), [("raw", "exact"), ("int8", "computed")])
def test_an_instruction_is_reused_from_a_lossless_codec_only(codec: str, outcome: str) -> None:
    prompt = prompt_of("a")
    key = VariantKey("default", "model", SYSTEM, ())
    digest_of_it = prompt.segments[0].tokens_digest
    kept = variant(SYSTEM, key=key, codec=codec, tokens=2, tokens_digest=digest_of_it, inter=None)
    planned = make_plan(prompt, {SYSTEM: [kept]}, CONFIG)[0]
    assert planned.outcome == outcome
    assert (planned.reason == Reason.LOSSY_CODEC) == (outcome == "computed")


def test_what_was_computed_after_a_lossy_codec_is_not_exact() -> None:
    kept = plan_last(prompt_of("a"), variant("a", codec="int8"))
    computed, exact = SegmentPlan("computed"), SegmentPlan("exact")
    shares = exact_shares((exact, kept, computed, computed), [5, 10, 20, 5])
    assert shares[:2] == [1.0, 1.0]
    assert 0.9 < shares[2] < 1.0
    assert shares[3] == pytest.approx(shares[2])
    found = plan_last(prompt_of("a", "c"), variant("c", "a", exact_share=shares[2]))
    assert found.outcome == "reused"
    # as good as exact, for all that matters to planning
    assert found.cfo == pytest.approx(0.0, abs=0.01)
    assert plan_last(prompt_of("a", "c"), variant("c", "a", exact_share=0.5, codec="int8")).to_fix


def test_after_another_instruction_no_overlap_counts() -> None:
    found = plan_last(prompt_of("a", "c", system=OTHER_SYSTEM), variant("c", "a"))
    assert (found.beta, found.cfo) == (0.0, pytest.approx(0.3))
    back = plan_last(
        prompt_of("a", "c", system=OTHER_SYSTEM), variant("c", "a", system=OTHER_SYSTEM)
    )
    assert back.outcome == "exact"


def test_a_chunk_born_first_overlaps_only_with_nothing() -> None:
    assert plan_last(prompt_of("c"), variant("c")).outcome == "exact"
    assert plan_last(prompt_of("a", "c"), variant("c")).beta == 0.0


def test_only_chunks_before_it_count_as_prefix() -> None:
    plan = make_plan(prompt_of("c", "a"), {"c": [variant("c", "a")]}, CONFIG)
    assert plan[1].beta == 0.0


def test_other_token_ids_are_never_served() -> None:
    wrong = variant("c", "a", tokens_digest=segment("d").tokens_digest)
    found = plan_last(prompt_of("a", "c"), wrong)
    assert (found.outcome, found.reason) == ("computed", Reason.OTHER_TOKENS)
    right = variant("c", "x")
    assert plan_last(prompt_of("a", "c"), wrong, right).variant == right


def test_a_lost_variant_gives_way_to_the_next_and_then_to_its_reason() -> None:
    first, second = variant("c", "a"), variant("c", "x")
    assert (
        plan_last(prompt_of("a", "c"), first, second, **{first.variant_id: "checksum"}).variant
        == second
    )
    lost = {first.variant_id: "checksum", second.variant_id: "file missing"}
    found = plan_last(prompt_of("a", "c"), first, second, **lost)
    assert (found.outcome, found.reason, found.detail) == (
        "computed",
        Reason.NOT_LOADED,
        "checksum",
    )


# -- tokens to recompute ----------------------------------------------------------------------------------------------


def selected(found: SegmentPlan, scores: Any = None, **config: Any) -> list[int]:
    assert found.variant is not None
    known = {
        found.variant.variant_id: scores if isinstance(scores, TokenScores) else TokenScores(scores)
    }
    settings = ReuseConfig(method=ReuseMethod(alpha=0.25)).changed_by(config)
    return with_selection((found,), known, settings)[0].recompute.tolist()


def test_the_budget_is_rounded_up() -> None:
    scores = np.arange(10, dtype=np.float32)
    reused = SegmentPlan("reused", variant=variant("c", "a"), cfo=0.21)
    assert selected(reused, scores) == [7, 8, 9]
    assert selected(dataclasses.replace(reused, cfo=0.2), scores) == [8, 9]
    assert selected(dataclasses.replace(reused, cfo=0.0), scores) == []
    assert selected(dataclasses.replace(reused, cfo=1e-9), scores) == [9]


def test_a_fixed_ratio_replaces_the_overhead_but_leaves_exact_chunks_alone() -> None:
    reused = SegmentPlan("reused", variant=variant("c", "a"), cfo=0.9)
    assert len(selected(reused, recompute_ratio=0.15)) == 2
    assert selected(reused, recompute_ratio=0.0) == []
    assert len(selected(reused, recompute_ratio=1.0)) == 10
    assert (
        selected(SegmentPlan("exact", variant=variant("c", "a"), cfo=0.0), recompute_ratio=0.5)
        == []
    )


def test_a_partly_recomputed_chunk_says_how_much_of_it_was_chosen_and_by_what() -> None:
    reused = SegmentPlan("reused", variant=variant("c", "a"), cfo=0.21)
    config = ReuseConfig(method=ReuseMethod(alpha=0.25, selector="leading"))
    plan = with_selection((reused,), {}, config)
    (fixed,) = plan
    assert fixed.reason is Reason.FIXED
    assert explain(fixed.reason, fixed.detail) == (
        "3 of 10 tokens recomputed, chosen by the selector 'leading'"
    )
    (kept,) = with_selection(plan, {}, dataclasses.replace(config, recompute_ratio=0.0))
    assert (kept.reason, kept.detail, len(kept.recompute)) == (Reason.REUSED, "", 0)


def test_without_token_scores_the_leading_tokens_are_recomputed() -> None:
    reused = SegmentPlan("reused", variant=variant("c"), cfo=0.3)
    assert selected(reused, None) == [0, 1, 2]
    (chosen,) = with_selection((reused,), {}, ReuseConfig())
    assert chosen.recompute.tolist() == [0, 1]


def test_without_an_alpha_every_chunk_recomputes_the_same_share() -> None:
    for cfo in (0.0, 0.3, 1.0):
        reused = SegmentPlan("reused", variant=variant("c", "a"), cfo=cfo)
        assert len(selected(reused, method={"alpha": None})) == 2  # a fifth of ten
    published = ReuseConfig.paper(method=ReuseMethod.paper(alpha=None))
    reused = SegmentPlan("reused", variant=variant("c", "a"), cfo=0.3)
    assert len(with_selection((reused,), {}, published)[0].recompute) == 3


def test_the_share_of_exact_context() -> None:
    exact, reused, computed = SegmentPlan("exact"), SegmentPlan("reused"), SegmentPlan("computed")
    assert exact_shares((computed, computed, exact, computed), [7, 11, 13, 3]) == [1.0] * 4
    assert exact_shares((exact, reused, reused, computed), [10, 10, 20, 5]) == [
        1.0,
        1.0,
        0.5,
        0.25,
    ]
    # the third is computed after 1/2 exact context and hands that half on
    assert exact_shares((exact, reused, computed, computed), [10, 10, 20, 5])[3] == 0.5


# -- speed ------------------------------------------------------------------------------------------------------------

CHUNKS, VARIANTS = 1_250, 8


@pytest.fixture(scope="module")
def full_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChunkCacheStore]:
    """A store on disk whose catalog holds 10,000 variants; their files are not needed to plan."""
    names = [digest("chunk", str(n)) for n in range(CHUNKS)]
    rng = random.Random(0)
    scores = struct.pack("<400f", *(rng.random() for _ in range(400)))
    with ChunkCacheStore.open(tmp_path_factory.mktemp("full") / "store") as store:
        with closing(sqlite3.connect(store.root / "catalog.sqlite")) as connection, connection:
            for name in names:
                for count in range(1, VARIANTS + 1):
                    before = rng.sample(names[:100], count)
                    row = variant(
                        name,
                        *before,
                        inter=tuple(rng.random() * 40 for _ in before),
                        tokens=400,
                        tokens_digest=digest(name),
                        cci=rng.uniform(0.5, 0.7),
                        system=digest(SYSTEM),
                    )
                    given = scores if count == 1 or name in names[:100] else None
                    columns = row_of(row, file_bytes=1000, frequency=0.0)
                    unused = (*columns, sum_of_scores(given), 0.0, 0.0)
                    connection.execute(_INSERT, (_scope_of(connection, row), *unused))
                    if given is not None:
                        connection.execute(
                            "INSERT INTO token_scores VALUES (?,?)", (row.variant_id, scores)
                        )
        yield store


def test_planning_20_chunks_of_8_variants_scans_nothing_of_10_000_in_the_catalog(
    full_store: ChunkCacheStore,
    sqlite_steps: Callable[[Catalog], AbstractContextManager[list[int]]],
) -> None:
    assert full_store.stats().variants == CHUNKS * VARIANTS
    rng = random.Random(1)
    config, catalog = ReuseConfig(), full_store._durable.catalog
    for _ in range(10):
        names = [digest("chunk", str(n)) for n in rng.sample(range(100), 20)]
        chunks = [Segment("chunk", name, tuple(range(400))) for name in names]
        for chunk in chunks:
            # what the rows above say
            object.__setattr__(chunk, "tokens_digest", digest(chunk.segment_id))
        prompt = Prompt(
            (
                Segment("system", digest(SYSTEM), (1,)),
                *chunks,
                Segment("question", digest("q"), (2,), True),
            )
        )
        with sqlite_steps(catalog) as planning:
            stored = full_store.find("default", "model", [digest(SYSTEM), *names]).variants
            plan = make_plan(prompt, stored, config)
        winners = [s.variant.variant_id for s in plan if s.variant is not None]
        with sqlite_steps(catalog) as selecting:
            chosen = with_selection(plan, full_store.token_scores(winners), config)
        assert planning[0] < 100 * 20 * VARIANTS
        assert selecting[0] < 100 * 20
        assert [len(stored[name]) for name in names] == [VARIANTS] * 20
        assert len(winners) == 20
        assert sum(len(s.recompute) for s in chosen) > 20


# -- other scopes -----------------------------------------------------------------------------------------------------

PREFIX, SET = (
    ReuseConfig(method=ReuseMethod(scope="prefix")),
    ReuseConfig(method=ReuseMethod(scope="set")),
)


def stored_chain(*names: str) -> list[Variant]:
    """Variants that one full prefill of these chunks captures."""
    return [variant(name, *names[:place]) for place, name in enumerate(names)]


def plan_of(
    prompt: Prompt, variants: list[Variant], config: ReuseConfig, **lost: str
) -> list[tuple[str, Variant | None]]:
    """Outcome and variant of each chunk."""
    stored: dict[str, list[Variant]] = {}
    for one in variants:
        stored.setdefault(one.key.chunk_id, []).append(one)
    plan = make_plan(prompt, stored, config, lost=lost)
    return [(planned.outcome, planned.variant) for planned in plan[1:-1]]


def test_prefix_cache_reuses_a_prefix_and_nothing_else() -> None:
    a, b, c = stored_chain("a", "b", "c")
    found = plan_of(prompt_of("a", "b", "d", "c"), [a, b, c], PREFIX)
    assert found == [("exact", a), ("exact", b), ("computed", None), ("computed", None)]
    plan = make_plan(prompt_of("c"), {"c": [c]}, PREFIX)
    assert plan[1].reason == Reason.OTHER_PREFIX


def test_set_cache_takes_the_longest_first_chunks_in_any_order() -> None:
    a, b, c = stored_chain("a", "b", "c")
    found = plan_of(prompt_of("b", "a", "d", "c"), [a, b, c], SET)
    assert found == [("reused", b), ("reused", a), ("computed", None), ("computed", None)]
    everything = plan_of(prompt_of("c", "a", "b"), [a, b, c], SET)
    assert everything == [("reused", c), ("reused", a), ("reused", b)]


def test_set_cache_prefers_the_same_order_and_needs_the_whole_chain() -> None:
    chain, other = stored_chain("a", "b"), stored_chain("b", "a")
    assert [outcome for outcome, _ in plan_of(prompt_of("a", "b"), [*other, *chain], SET)] == [
        "exact",
        "exact",
    ]
    assert plan_of(prompt_of("a", "b"), other[1:], SET) == [("computed", None)] * 2
    lost = {other[0].variant_id: "gone"}
    assert plan_of(prompt_of("a", "b"), other, SET, **lost) == [("computed", None)] * 2


def test_set_cache_recomputes_nothing() -> None:
    variants = stored_chain("a", "b")
    plan = make_plan(prompt_of("b", "a"), {v.key.chunk_id: [v] for v in variants}, SET)
    assert all(not len(planned.recompute) for planned in with_selection(plan, {}, SET))


def in_full_of(prompt: Prompt, stored: dict[str, list[Variant]], config: ReuseConfig) -> list[bool]:
    return [planned.in_full for planned in make_plan(prompt, stored, config)]


def moved(*names: str) -> dict[str, list[Variant]]:
    return {name: [variant(name, "elsewhere")] for name in names}


@pytest.mark.parametrize(
    ("share", "is_in_full"), [(0.25, True), (0.24, False), (0.0, False), (1.0, True)]
)
def test_the_last_chunk_is_recomputed_in_full_if_it_is_a_small_part(
    share: float, is_in_full: bool
) -> None:
    prompt = prompt_of("a", "b", "c", "d")  # four chunks of equal length
    config = ReuseConfig(recompute_ratio=0.1, nearest_share=share)
    assert in_full_of(prompt, moved("a", "b", "c", "d"), config) == [
        False,
        False,
        False,
        False,
        is_in_full,
        False,
    ]

    plan = with_selection(make_plan(prompt, moved("a", "b", "c", "d"), config), {}, config)
    counts = [len(planned.recompute) for planned in plan]
    assert counts == [0, 1, 1, 1, 10 if is_in_full else 1, 0]
    assert (plan[4].reason is Reason.NEAREST) == is_in_full


def test_a_last_chunk_that_needs_no_fixing_is_not_recomputed() -> None:
    config = ReuseConfig(nearest_share=1.0)
    exact = {"b": [variant("b", "a")], "a": [variant("a")]}
    assert in_full_of(prompt_of("a", "b"), exact, config) == [False] * 4
    nothing_stored = moved("a")
    assert in_full_of(prompt_of("a", "b"), nothing_stored, config) == [False] * 4


def test_a_last_chunk_with_all_its_old_neighbours_is_recomputed_too() -> None:
    """Its CFO is 0, and yet another chunk stands between them."""
    prompt = prompt_of("a", "b", "c")
    stored = moved("b") | {"a": [variant("a")], "c": [variant("c", "a")]}
    plan = make_plan(prompt, stored, ReuseConfig(nearest_share=1.0))
    assert plan[3].cfo == 0.0
    assert [planned.in_full for planned in plan] == [False, False, False, True, False]


@pytest.mark.parametrize("nothing", [{"recompute_ratio": 0.0}, {"method": ReuseMethod(alpha=0.0)}])
def test_with_a_ratio_or_alpha_of_zero_nothing_is_recomputed(nothing: dict[str, float]) -> None:
    config = ReuseConfig(nearest_share=1.0, **nothing)  # type: ignore[arg-type]
    assert in_full_of(prompt_of("a", "b"), moved("a", "b"), config) == [False] * 4


def test_the_papers_settings_have_no_rule_for_the_last_chunk_and_score_as_published() -> None:
    assert ReuseConfig.paper().nearest_share == 0.0
    assert ReuseConfig.paper().method.scoring == "published"
    assert ReuseConfig.paper(method=ReuseMethod.paper(alpha=None)).method.alpha is None


def test_presets_for_comparisons_reuse_in_prompts_of_any_length() -> None:
    assert ReuseConfig.paper().min_prompt_tokens == 0
    assert ReuseConfig.deterministic().min_prompt_tokens == 0


def test_tokens_that_are_computed_anyway_are_not_recomputed_in_full() -> None:
    config = ReuseConfig(recompute_ratio=0.1, nearest_share=1.0)
    plan = make_plan(prompt_of("a", "b"), moved("a", "b"), config)
    chosen = with_selection(plan, {}, config, excluded={2: np.array([0, 3])})
    assert chosen[2].recompute.tolist() == [1, 2, 4, 5, 6, 7, 8, 9]


# -- focus ------------------------------------------------------------------------------------------------------------

FOCUSED = ReuseConfig(
    recompute_ratio=0.2, nearest_share=0.0, method=ReuseMethod(early_termination="probe")
)
FIVE = ("a", "b", "c", "d", "e")
SEEN = {index: np.ones(10, np.float32) for index in range(1, 6)}
FOCUS = {1: 0.01, 2: 4.0, 3: 3.0, 4: 1.0, 5: 0.02}


def after_probe(config: ReuseConfig, *names: str, **probed: Any) -> Plan:
    """The plan for moved chunks of ten tokens after a probe; five chunks unless they are named."""
    names = names or FIVE
    plan = make_plan(prompt_of(*names), moved(*names), config)
    return with_selection(plan, {}, config, **({"probed": SEEN, "focus": FOCUS} | probed))


def test_chunks_out_of_focus_recompute_nothing_and_save_their_budgets() -> None:
    plan = after_probe(FOCUSED)
    chunks = plan[1:-1]
    assert [len(planned.recompute) for planned in chunks] == [0, 2, 2, 0, 0]
    assert [planned.spared for planned in chunks] == [2, 0, 0, 2, 2]
    assert [planned.in_focus for planned in chunks] == [False, True, True, False, False]
    assert [planned.focus for planned in chunks] == [0.0025, 1.0, 0.75, 0.25, 0.005]
    assert [planned.reason is Reason.UNFOCUSED for planned in chunks] == [
        True,
        False,
        False,
        True,
        True,
    ]
    assert {planned.focus for planned in (plan[0], plan[-1])} == {None}


def test_with_the_probes_rule_the_last_chunk_recomputes_nothing_out_of_focus() -> None:
    config = dataclasses.replace(FOCUSED, nearest_share=1.0)
    away = after_probe(config)[5]
    assert (len(away.recompute), away.spared, away.reason) == (0, 10, Reason.UNFOCUSED)
    near = after_probe(config, focus=FOCUS | {5: 4.0})[5]
    assert near.recompute.tolist() == list(range(10))
    assert (near.spared, near.reason) == (0, Reason.NEAREST)


@pytest.mark.parametrize(
    "settings",
    [
        {"method": {"early_termination": "off"}},
        {"method": {"early_termination": "published"}},
        {"recompute_ratio": 1.0},
    ],
)
def test_without_the_rule_and_where_all_must_be_exact_the_probe_only_says_what_is_in_focus(
    settings: dict[str, Any],
) -> None:
    config = FOCUSED.changed_by(settings)
    plan = after_probe(config)
    tokens = 10 if config.recompute_ratio == 1.0 else 2
    assert [len(planned.recompute) for planned in plan] == [0, *[tokens] * 5, 0]
    assert [planned.in_focus for planned in plan[1:4]] == [False, True, True]
    assert sum(planned.spared for planned in plan) == 0


def test_with_few_chunks_nothing_is_spared() -> None:
    focus = {1: 0.01, 2: 4.0, 3: 0.02, 4: 0.02}
    plan = after_probe(FOCUSED, "a", "b", "c", "d", focus=focus)
    assert [len(planned.recompute) for planned in plan] == [0, 2, 2, 2, 2, 0]
    assert [planned.in_focus for planned in plan[1:5]] == [False, True, False, False]


def test_what_the_question_must_not_shape_is_recomputed_out_of_focus_too() -> None:
    plan = after_probe(FOCUSED, probed={index: SEEN[index] for index in (2, 3, 4, 5)})
    assert len(plan[1].recompute)
    assert [planned.spared for planned in plan] == [0, 0, 0, 0, 2, 2, 0]


def test_tokens_recomputed_before_the_probe_stay_and_are_not_counted_as_spared() -> None:
    plan = after_probe(FOCUSED, recomputed={1: np.array([4])})
    assert (plan[1].recompute.tolist(), plan[1].spared) == ([4], 1)
    assert plan[1].reason is Reason.FIXED


@pytest.mark.parametrize(("computed", "spared"), [(3, 2), (9, 1), (10, 0)])
def test_tokens_computed_instead_of_loaded_are_not_counted_as_spared(
    computed: int, spared: int
) -> None:
    away = after_probe(FOCUSED)[1]
    assert away.spared == 2
    executed = with_not_loaded(away, np.arange(computed), Reason.NOT_LOADED)
    assert executed.spared == spared
