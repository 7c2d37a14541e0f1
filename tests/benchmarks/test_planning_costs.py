"""The benchmark of planning times one request in all of its phases."""

from __future__ import annotations

from dataclasses import asdict

from benchmarks.planning_costs import planning_times


def test_every_phase_of_planning_is_timed() -> None:
    times = planning_times(1536, repeats=1)
    assert abs(times.tokens - 1536) < 256
    phases = {name: value for name, value in asdict(times).items() if name != "tokens"}
    assert times.total == sum(phases.values())
    assert {"prompt", "message", "schedule", "fill", "begin", "again"} == phases.keys()
