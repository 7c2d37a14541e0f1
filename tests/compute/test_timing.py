"""Time of a prefill, part by part."""

from __future__ import annotations

import itertools

import pytest

from cachecraft_rag.compute.timing import PARTS, PartTimer, untimed, within


def ticking() -> PartTimer:
    """A timer whose clock moves on by a second whenever it is read."""
    ticks = itertools.count()
    return PartTimer(lambda: float(next(ticks)))


def test_each_moment_counts_for_the_innermost_part() -> None:
    timer = ticking()
    with timer("other"):
        with timer("layers"):
            with timer("attention"):
                pass
            with timer("drift"):
                pass
        with timer("logits"):
            pass
    spent = {part: seconds for part, seconds in timer.seconds.items() if seconds}
    assert spent == {"other": 3.0, "layers": 3.0, "attention": 1.0, "drift": 1.0, "logits": 1.0}
    assert timer.total == 9.0


def test_what_lies_between_two_blocks_counts_for_neither() -> None:
    timer = ticking()
    for _ in range(2):
        with timer("layers"):
            pass
    assert timer.total == 2.0


def test_within_a_part_every_part_is_that_one() -> None:
    timer = ticking()
    with (
        timer("probe"),
        within(timer, "probe")("attention"),
        within(within(timer, "probe"), "drift")("layers"),
    ):
        pass
    assert {part for part, seconds in timer.seconds.items() if seconds} == {"probe"}


def test_an_error_ends_its_part() -> None:
    timer = ticking()
    with timer("other"):
        with pytest.raises(ValueError, match="broken"), timer("layers"):
            raise ValueError("broken")
        with timer("logits"):
            pass
    assert timer.seconds["layers"] == 1.0
    assert timer.seconds["other"] == 3.0


def test_untimed_is_one_block_for_all() -> None:
    assert untimed("layers") is untimed("attention")
    assert within(untimed, "probe") is untimed
    with untimed("layers"), untimed("layers"):
        pass
    assert set(PARTS) >= {
        "planning",
        "placing",
        "probe",
        "drift",
        "attention",
        "layers",
        "logits",
        "other",
    }
