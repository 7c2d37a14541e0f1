"""Computing speed of this machine: the cost of a pass, and of each of its rows."""

from __future__ import annotations

import pytest

from cachecraft_rag.compute.balance.speed import ComputeSpeed


def test_compute_speed_separates_the_pass_from_its_rows() -> None:
    speed = ComputeSpeed(keys_per_row=1000.0)
    assert not speed.known
    assert speed.rows([0, 1000, 3000]) == 1 + 2 + 4
    for _ in range(50):
        speed.stepped(0.02)
    speed.measured(100.0, 0.02 + 0.5)
    assert speed.seconds(10.0) == pytest.approx(0.02 + 0.05)


def test_a_pass_of_few_rows_tells_the_fixed_part_and_nothing_of_a_row() -> None:
    speed = ComputeSpeed(keys_per_row=1000.0)
    speed.measured(100.0, 0.5)
    speed.stepped(0.02)
    speed.measured(10.0, 0.3)
    assert speed.seconds(10.0) == pytest.approx(0.3)
    assert speed.seconds(10.0, passes=0) == pytest.approx(0.05)
    speed.stepped(0.01)  # a step packs no weights and places nothing
    assert speed.seconds(10.0) == pytest.approx(0.3)
    speed.measured(100.0, 0.75)  # of many rows, what is left belongs to them
    assert speed.seconds(100.0, passes=0) == pytest.approx(0.5)
    speed.measured(10.0, 0.01)  # faster than its rows alone would be
    assert speed.seconds(0.0) == pytest.approx(0.125)


def test_a_whole_prompts_rows_are_told_apart_from_those_of_pieces() -> None:
    speed = ComputeSpeed(keys_per_row=1000.0)
    speed.measured(100.0, 0.2, kind="whole")
    # nothing else is known yet
    assert speed.seconds(100.0) == speed.whole_s(100.0) == pytest.approx(0.2)
    for _ in range(20):
        speed.measured(100.0, 0.3, kind="piece")
    assert speed.whole_s(100.0) == pytest.approx(0.2)
    assert speed.seconds(100.0) == pytest.approx(0.3)
    for _ in range(20):
        speed.measured(100.0, 0.4, kind="whole")  # half as fast now, and so are pieces
    assert speed.whole_s(100.0) == pytest.approx(0.4)
    assert speed.seconds(100.0) == pytest.approx(0.6)
