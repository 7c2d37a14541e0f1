"""How long prompts are filled in a step."""

from __future__ import annotations

import pytest

from cachecraft_rag.vllm.worker import filling
from cachecraft_rag.vllm.worker.filling import Slices


class Clock:
    """Stands for the module `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(filling, "time", made)
    return made


def steps(clock: Clock, made: Slices, seconds: list[float], *, is_own: bool = True) -> None:
    for one in seconds:
        made.begin()
        made.end(is_own=is_own)
        clock.now += one
    made.begin()


@pytest.mark.parametrize(
    ("own_s", "slice_s"),
    [
        ([], 0.25),
        ([0.001], 0.05),
        ([0.04], 0.32),
        ([0.5], 1.0),
        ([0.04, 0.04, 9.0], 0.32),  # a prefill of vLLM's own, or a pause without requests
        ([9.0] * 20 + [0.04] * 8, 0.32),  # old steps are forgotten
    ],
)
def test_fillings_take_eight_times_vllms_own_step_within_bounds(
    clock: Clock, own_s: list[float], slice_s: float
) -> None:
    made = Slices()
    steps(clock, made, own_s)
    assert made.seconds(otherwise=0.25) == pytest.approx(slice_s)


def test_steps_with_fillings_or_without_requests_tell_nothing(clock: Clock) -> None:
    made = Slices()
    steps(clock, made, [0.04])
    steps(clock, made, [5.0] * 30, is_own=False)
    assert made.seconds(otherwise=0.25) == pytest.approx(0.32)
