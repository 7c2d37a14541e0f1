"""The benchmark of prompts that are left to vLLM."""

from __future__ import annotations

from benchmarks.bypass import in_turn


def test_both_sides_take_turns_to_be_first_and_the_first_pair_warms_up() -> None:
    asked: list[str] = []
    sides = {name: lambda name=name: asked.append(name) for name in ("ours", "plain")}
    milliseconds = in_turn(sides, pairs=2, between=lambda: asked.append("between"))
    assert asked[1::2] == ["between"] * 6
    assert asked[::2] == ["ours", "plain", "plain", "ours", "ours", "plain"]
    assert {name: len(times) for name, times in milliseconds.items()} == {"ours": 2, "plain": 2}
