"""The meeting point of both ends, decided from given measurements. No clock runs here."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachecraft_rag.compute.balance.load_split import (
    STRATEGIES,
    FrontInLastPass,
    LoadSplit,
    WaitCondition,
)
from cachecraft_rag.compute.balance.speed import ComputeSpeed

TOKENS, QUESTION = 2048, 40


def speed_of(*, row_s: float, fixed_s: float) -> ComputeSpeed:
    """A machine on which a row takes so long, wherever it stands, and a pass so much besides."""
    speed = ComputeSpeed(keys_per_row=1e12)
    speed.stepped(fixed_s)
    speed.measured(1000.0, fixed_s + 1000.0 * row_s, kind="piece")
    return speed


def ends_of(
    times_as_fast: float, *, is_settled: bool = True, fixed_s: float = 0.03, busy_cores: float = 0.0
) -> LoadSplit:
    """A token is loaded so many times as fast as it is computed, and takes a byte."""
    return LoadSplit(
        waiting=range(TOKENS),
        bytes_left=TOKENS,
        bytes_per_s=1000.0 * times_as_fast,
        is_settled=is_settled,
        rows=QUESTION,
        speed=speed_of(row_s=1e-3, fixed_s=fixed_s),
        busy_cores=busy_cores,
    )


def test_a_front_is_computed_in_pieces_of_half_its_share_and_the_rest_goes_with_the_last_pass() -> (
    None
):
    ends = ends_of(1.0)
    assert ends.share() == pytest.approx((TOKENS - QUESTION - 30) / 2)  # both ends take as long
    assert ends.next_piece() == (ends.share() / 2, False)
    few = replace(ends, waiting=range(500), bytes_left=500)
    assert few.next_piece() == (pytest.approx((500 - QUESTION - 30) / 2), True)


def test_several_ranks_compute_the_whole_front_in_the_last_pass() -> None:
    ranks = FrontInLastPass()
    ends = ends_of(1.0)
    assert ranks.next_piece(ends) == (ends.share(), True)
    assert ranks.before_pass(ends, 32) == WaitCondition("nothing")
    slow = ends_of(0.1, fixed_s=0.3)
    assert ranks.next_piece(slow) == (TOKENS, True), "on a slow disk everything"


def test_several_ranks_load_layer_by_layer_where_no_front_pays_or_nothing_is_known() -> None:
    ranks = FrontInLastPass()
    fast = ends_of(100.0)
    unknown = replace(ends_of(0.1), speed=ComputeSpeed(1e12))
    for ends in (fast, unknown, ends_of(0.1, is_settled=False), replace(fast, waiting=())):
        assert ranks.next_piece(ends) == (0.0, True)
        layer_wise = STRATEGIES["layerwise"].before_pass(ends, 32)
        assert ranks.before_pass(ends, 32) == layer_wise


def test_until_the_rate_is_settled_a_front_goes_ahead_that_pays_with_loading_twice_as_fast() -> (
    None
):
    first_reads = ends_of(1.0, is_settled=False)
    assert first_reads.next_piece() == (replace(first_reads, bytes_per_s=2000.0).share(), False)
    assert replace(first_reads, is_settled=True).next_piece() == (first_reads.share() / 2, False)


def test_the_first_tokens_of_a_long_prompt_attend_to_less_and_so_more_of_them_are_computed() -> (
    None
):
    speed = ComputeSpeed(keys_per_row=3000.0)
    speed.measured(1000.0, 1.0, kind="piece")
    ends = replace(ends_of(1.0), speed=speed, rows=0.0, bytes_left=3 * TOKENS, bytes_per_s=3000.0)
    front = range(round(ends.share()))
    assert speed.seconds(speed.rows(front)) == pytest.approx((TOKENS - len(front)) * 1e-3, rel=0.02)


def test_where_a_front_would_take_as_long_as_one_pass_over_everything_there_is_that_pass() -> None:
    assert ends_of(0.1, fixed_s=0.3).next_piece() == (TOKENS, True)


def test_where_a_whole_pass_attends_faster_than_others_do_there_is_that_pass() -> None:
    ends = ends_of(0.3, fixed_s=0.0)
    assert ends.next_piece() == (ends.share() / 2, False)
    ends.speed.measured(1000.0, 0.6, kind="whole")  # 0.6 ms for a row, and 1 ms in pieces
    ends.speed.measured(1000.0, 1.0, kind="piece")
    assert replace(ends, tokens=TOKENS).next_piece() == (TOKENS, True)
    assert ends.next_piece() == (ends.share() / 2, False)  # what is left is no whole prompt


def test_one_pass_is_not_begun_while_everything_may_come_sooner() -> None:
    """There is no way back from it. Pieces look expensive here, and loading may be twice as fast as it seems."""
    first_reads = replace(ends_of(1.0, is_settled=False, fixed_s=0.0), tokens=TOKENS)
    first_reads.speed.measured(1000.0, 0.6, kind="whole")
    for _ in range(9):
        first_reads.speed.measured(1000.0, 1.2, kind="piece")
    tokens, last = first_reads.next_piece()
    assert TOKENS / 4 < tokens < TOKENS / 3
    assert not last
    slow = replace(first_reads, bytes_per_s=100.0)
    assert slow.next_piece() == (TOKENS, True)


def test_what_is_computed_in_any_case_costs_a_front_nothing_more() -> None:
    """Every second token of the chunks is recomputed."""
    ends = replace(ends_of(1.0, fixed_s=0.0), own_positions=range(0, TOKENS, 2), rows=TOKENS / 2)
    share = ends.share()
    # both ends take as long, in milliseconds
    assert TOKENS / 2 + share / 2 == pytest.approx(TOKENS - share)
    # one pass over TOKENS rows, and no more
    assert replace(ends, bytes_per_s=50.0).next_piece() == (TOKENS, True)


def test_where_loading_is_quick_no_front_is_computed() -> None:
    assert ends_of(4.0).next_piece() == (0.0, True)
    assert ends_of(400.0, is_settled=False).next_piece() == (0.0, True)


def test_a_rate_of_the_first_reads_is_not_trusted_where_that_would_cost_much() -> None:
    """Loading is three times as fast as computing, and its first reads gave half of that.

    The last pass begins, and looks again while little would have to catch up.
    """
    first_reads = ends_of(3.0 / 2.0, is_settled=False)
    assert first_reads.share() > TOKENS / 4
    assert first_reads.next_piece() == (0.0, True)
    assert first_reads.optimistic().share(layers_left=0.97) > 0.0
    assert replace(first_reads, is_settled=True).next_piece() == (first_reads.share() / 2, False)


def test_before_anything_has_come_the_rate_is_at_most_what_was_asked_for() -> None:
    slow = replace(ends_of(0.4, is_settled=False), has_loaded=False)
    assert slow.next_piece() == (slow.share(), False)
    slower = replace(slow, bytes_per_s=100.0, tokens=TOKENS)
    # at half of it a front would hardly be sooner than one pass
    assert slower.next_piece() == (TOKENS, True)
    assert replace(slower, has_loaded=True).next_piece()[1] is False
    assert ends_of(0.0, is_settled=False).next_piece() == (64, False)


def test_a_front_ends_with_an_extent_because_what_is_left_of_one_is_loaded_as_a_whole() -> None:
    ends = ends_of(0.25)
    share = ends.share()
    assert share == pytest.approx((4 * TOKENS - QUESTION - 30) / 5)
    near = [round(share) - 40, round(share) + 60]
    # loading 40 tokens takes longer
    assert replace(ends, extent_ends=[*near, TOKENS]).share() == near[1]
    assert replace(ends, extent_ends=[near[0], round(share) + 200, TOKENS]).share() == near[0]


def test_half_a_front_ends_with_an_extent_too_and_one_large_extent_is_computed_whole_or_not_at_all() -> (
    None
):
    ends = ends_of(1.0)
    half = round(ends.share() / 2)
    borders = [half + 20, round(ends.share()) + 5, TOKENS]
    assert replace(ends, extent_ends=borders).next_piece() == (half + 20, False)
    assert replace(ends, bytes_per_s=800.0, extent_ends=[TOKENS]).next_piece() == (TOKENS, True)
    assert replace(ends, extent_ends=[TOKENS]).next_piece() == (0.0, True)


def test_while_readers_have_not_begun_half_of_what_is_left_is_computed_at_a_time() -> None:
    assert ends_of(0.0).next_piece() == (TOKENS / 2, False)


def test_what_came_just_now_asks_for_nothing_more() -> None:
    ends = replace(
        ends_of(1.0), waiting=range(2), bytes_left=0.0, own_positions=range(4), extent_ends=[2]
    )
    assert ends.share() == 0.0
    assert ends.next_piece()[1]


def test_the_first_look_is_a_small_part_of_computing_everything() -> None:
    look = STRATEGIES["cake"].first_look
    assert look(ends_of(1.0)) == WaitCondition("nothing")
    unsettled = ends_of(1.0, is_settled=False)
    assert look(unsettled) == WaitCondition("all", 0.02)
    short = replace(unsettled, waiting=range(160), bytes_left=160, tokens=200)
    assert look(short).timeout_s == pytest.approx(0.02 * (0.03 + 0.2))
    assert look(replace(short, speed=ComputeSpeed(keys_per_row=1e12))).timeout_s == 0.02


def test_the_last_pass_waits_for_readers_that_would_take_its_cores() -> None:
    assert ends_of(6.0, busy_cores=1.0).load_first()
    assert not ends_of(6.0, busy_cores=0.3).load_first()  # they wait for the disk most of the time
    assert not ends_of(1.0, busy_cores=1.0).load_first()  # computing a front pays
    assert not replace(ends_of(6.0, busy_cores=1.0), waiting=(), bytes_left=0.0).load_first()


def test_on_a_machine_of_which_nothing_is_known_a_little_is_computed_unless_all_comes_soon() -> (
    None
):
    ends = replace(ends_of(1.0), speed=ComputeSpeed(keys_per_row=1e12))
    assert ends.next_piece() == (64, False)
    assert replace(ends, bytes_per_s=1e6).next_piece() == (0.0, True)
    assert not ends.load_first()


def overlapped_s(tokens: int, *, row_s: float, fixed_s: float, load_token_s: float) -> float:
    """Seconds that both ends take at constant rates, decision by decision."""
    speed, layers = speed_of(row_s=row_s, fixed_s=fixed_s), 30
    now, front = 0.0, 0
    while True:
        back = max(front, tokens - int(now / load_token_s))
        waiting = range(front, back)
        left = len(waiting) * 1.0
        count, last = LoadSplit(
            waiting, left, 1.0 / load_token_s, True, QUESTION, speed
        ).next_piece()
        front += round(count)
        passed = fixed_s + (round(count) + QUESTION * last) * row_s
        if last:
            loaded = now + max(0, back - front) * load_token_s
            return max(now + passed, loaded + passed / layers)
        now += passed


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.integers(1024, 16384),
    row_s=st.floats(1e-5, 0.05),
    fixed_rows=st.floats(0.0, 200.0),
    times_as_fast=st.floats(0.1, 20.0),
)
def test_on_no_machine_both_ends_take_longer_than_the_better_of_computing_and_loading(
    tokens: int, row_s: float, fixed_rows: float, times_as_fast: float
) -> None:
    fixed_s, load_token_s = fixed_rows * row_s, row_s / times_as_fast
    computing = fixed_s + (tokens + QUESTION) * row_s
    loading = tokens * load_token_s + fixed_s + QUESTION * row_s
    both = overlapped_s(tokens, row_s=row_s, fixed_s=fixed_s, load_token_s=load_token_s)
    assert both <= 1.01 * min(computing, loading)


def test_each_pass_of_a_front_has_its_fixed_cost() -> None:
    """A slow disk: a front of most of the prompt takes four passes, and everything in one is sooner."""
    slow = ends_of(0.2, fixed_s=0.15)
    assert slow.next_piece() == (TOKENS, True)
    assert replace(slow, speed=speed_of(row_s=1e-3, fixed_s=0.01)).next_piece()[1] is False
