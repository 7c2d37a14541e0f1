"""How fast this machine computes: what a pass costs, and what each of its rows."""

from __future__ import annotations

import pytest

from cachecraft_rag.compute.speed import ComputeSpeed


def test_compute_speed_separates_the_pass_from_its_rows() -> None:
    speed = ComputeSpeed(keys_per_row=1000.0)
    assert not speed.known
    assert speed.rows([0, 1000, 3000]) == 1 + 2 + 4
    for _ in range(50):
        speed.stepped(0.02)
    speed.measured(100.0, 0.02 + 0.5)
    assert speed.seconds(10.0) == pytest.approx(0.02 + 0.05)
    speed.measured(10.0, 5.0)  # few rows tell nothing of a row
    assert speed.seconds(10.0) == pytest.approx(0.07)
