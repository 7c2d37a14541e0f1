"""Prompts that wait to be captured again, and their order."""

from __future__ import annotations

from dataclasses import replace

from cachecraft_rag.planning.candidates import Candidate, Candidates
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.planning.planner import SegmentPlan
from cachecraft_rag.types.prompts import Prompt, Segment
from cachecraft_rag.types.variants import Variant, VariantKey

SYSTEM = Segment("system", "system", (1, 2))
QUESTION = Segment("question", "question", (9,))
CONFIG = ReuseConfig(method=ReuseMethod(alpha=0.25))  # CFO decides


def variant(name: str, tokens: int = 10) -> Variant:
    key = VariantKey("default", "model", name, ("system", "elsewhere"))
    return Variant(key, key.variant_id, tokens, "", (), 0.0, 0.5, 1.0, None, "raw", 1, 0.0, 0.0)


def chunk(name: str, *, private: bool = False) -> Segment:
    return Segment("chunk", name, tuple(range(10)), private=private)


def candidate(*names: str, fixed: dict[int, int], session: str | None = None) -> Candidate:
    return Candidate((SYSTEM, *map(chunk, names)), fixed, session)


def fixed(name: str, cfo: float) -> SegmentPlan:
    return SegmentPlan("reused", variant=variant(name), cfo=cfo)


EXACT = SegmentPlan("exact", variant=variant("exact"), cfo=0.0)
COMPUTED = SegmentPlan("computed")
A, B, C = map(chunk, "abc")


def test_a_prompt_counts_up_to_the_last_chunk_that_was_fixed() -> None:
    plan = (EXACT, fixed("a", 0.21), EXACT, COMPUTED, COMPUTED)
    found = Candidate.of(Prompt((SYSTEM, A, B, C, QUESTION)), plan, CONFIG, session="ada")
    assert found == Candidate((SYSTEM, A), {1: 3})  # ⌈0.21 · 10⌉, and it has no owner


def test_a_fixed_ratio_is_what_its_variant_would_save() -> None:
    plan = (EXACT, fixed("a", 0.2), COMPUTED)
    ratio = ReuseConfig(recompute_ratio=0.5)
    found = Candidate.of(Prompt((SYSTEM, A, QUESTION)), plan, ratio, session=None)
    assert found is not None
    assert found.fixed == {1: 5}


def test_what_needs_no_fixing_is_no_candidate() -> None:
    at_origin = replace(fixed("a", 0.0), at_origin=True)
    for planned in (EXACT, COMPUTED, at_origin):
        plan = (EXACT, planned, COMPUTED)
        assert Candidate.of(Prompt((SYSTEM, A, QUESTION)), plan, CONFIG, session=None) is None


def test_what_was_moved_without_fixing_is_one_but_not_as_published() -> None:
    """With a CFO of 0 nothing is recomputed, and only a variant makes it exact."""
    plan = (EXACT, fixed("a", 0.0), COMPUTED)
    prompt = Prompt((SYSTEM, A, QUESTION))
    found = Candidate.of(prompt, plan, CONFIG, session=None)
    assert found is not None
    assert found.fixed == {1: 1}
    published = CONFIG.with_method(scoring="published")
    assert Candidate.of(prompt, plan, published, session=None) is None


def test_chunks_after_private_text_belong_to_the_session_or_have_no_owner() -> None:
    mine = replace(SYSTEM, private=True)
    plan = (EXACT, fixed("a", 0.2), COMPUTED)
    prompt = Prompt((mine, A, QUESTION))
    assert Candidate.of(prompt, plan, CONFIG, session=None) is None
    found = Candidate.of(prompt, plan, CONFIG, session="ada")
    assert found is not None
    assert found.session == "ada"


def test_what_stands_before_private_text_is_everybodys() -> None:
    plan = (EXACT, fixed("a", 0.2), fixed("b", 0.2), COMPUTED)
    prompt = Prompt((SYSTEM, A, chunk("b", private=True), QUESTION))
    assert Candidate.of(prompt, plan, CONFIG, session=None) == Candidate((SYSTEM, A), {1: 2})


def test_the_one_that_would_have_saved_most_comes_first() -> None:
    waiting = Candidates(10)
    once, often = candidate("a", "b", fixed={1: 3, 2: 3}), candidate("c", "b", fixed={2: 4})
    assert waiting.best() is None
    waiting.add(once)
    waiting.add(often)
    assert (waiting.best(), waiting.value(once), waiting.value(often)) == (once, 6, 4)
    waiting.add(often)
    assert (waiting.best(), waiting.value(often), len(waiting)) == (often, 8, 2)
    waiting.remove(often)
    assert (waiting.best(), waiting.value(often)) == (once, 0)


def test_of_equals_the_latest_comes_first() -> None:
    waiting = Candidates(10)
    for name in "abc":
        waiting.add(candidate(name, fixed={1: 3}))
    waiting.add(candidate("b", fixed={1: 0}))
    assert waiting.best() == candidate("b", fixed={1: 0})


def test_a_beginning_that_prompts_share_counts_for_all_of_them() -> None:
    waiting = Candidates(10)
    one, other = (
        candidate("a", "b", "c", fixed={2: 5}),
        candidate("a", "b", "d", fixed={2: 5, 3: 1}),
    )
    waiting.add(one)
    waiting.add(other)
    assert (waiting.value(one), waiting.value(other)) == (10, 11)
    waiting.remove(other)
    assert waiting.value(one) == 10


def test_a_removed_candidate_takes_the_counts_of_later_requests_with_it() -> None:
    waiting = Candidates(10)
    first = candidate("a", "b", fixed={1: 3})
    waiting.add(first)
    waiting.add(candidate("a", "b", fixed={2: 4}))
    merged = waiting.best()
    assert merged is not None
    assert merged == candidate("a", "b", fixed={1: 3, 2: 4})
    waiting.remove(first)
    assert (len(waiting), waiting.value(merged)) == (0, 0)


def test_sessions_do_not_share() -> None:
    waiting = Candidates(10)
    for session in ("ada", "bob", None):
        waiting.add(candidate("a", fixed={1: 3}, session=session))
    assert [len(waiting), waiting.value(candidate("a", fixed={1: 3}, session="bob"))] == [3, 3]


def test_of_more_than_may_wait_the_least_valuable_goes() -> None:
    waiting = Candidates(2)
    small, large, middle = (
        candidate(name, fixed={1: n}) for name, n in (("a", 1), ("b", 9), ("c", 5))
    )
    assert waiting.add(small) is None
    assert waiting.add(large) is None
    assert waiting.add(middle) == small
    assert waiting.add(small) == small
    assert len(waiting) == 2
    assert waiting.clear() == 2
    assert (len(waiting), waiting.value(large)) == (0, 0)


def test_the_same_prompt_gathers_what_was_fixed_at_different_times() -> None:
    waiting = Candidates(2)
    waiting.add(candidate("a", "b", fixed={1: 2, 2: 2}))
    waiting.add(candidate("a", "b", fixed={2: 1}))
    best = waiting.best()
    assert best is not None
    assert (dict(best.fixed), waiting.value(best)) == ({1: 2, 2: 1}, 5)
