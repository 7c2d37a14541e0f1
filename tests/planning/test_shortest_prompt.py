"""From how many tokens on reuse pays: the decision, by given times."""

from __future__ import annotations

import logging

import pytest

from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.planning.shortest_prompt import (
    LONGEST_OVER,
    Times,
    lengths_up_to,
    prompts_of,
    shortest_prompt,
    timed,
)


def times_of(seconds: dict[int, tuple[float, float] | None]) -> tuple[int, list[int]]:
    """The shortest prompt by these seconds in full and with reuse, and the lengths that were measured."""
    asked: list[int] = []

    def measure(tokens: int) -> Times | None:
        asked.append(tokens)
        pair = seconds[tokens]
        return None if pair is None else Times(*pair)

    return shortest_prompt(sorted(seconds), measure), asked


def test_the_first_length_with_sooner_answers_is_taken_and_longer_ones_are_not_measured() -> None:
    seconds = {1024: (0.05, 0.09), 2048: (0.08, 0.1), 4096: (0.12, 0.11), 8192: (0.2, 0.1)}
    assert times_of(seconds) == (4096, [1024, 2048, 4096])


def test_a_gain_that_may_be_noise_does_not_count() -> None:
    assert times_of({1024: (0.1, 0.099), 2048: (0.2, 0.1)})[0] == 2048


def test_reuse_that_pays_at_once_is_never_withheld() -> None:
    assert times_of({1024: (0.1, 0.05), 2048: (0.2, 0.1)}) == (0, [1024])


def test_the_log_names_all_times(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "cachecraft_rag"):
        times_of({1024: (0.05, 0.09), 2048: (0.2, 0.1)})
    assert "1024: 50 / 90, 2048: 200 / 100" in caplog.text
    assert "fewer than 2048 tokens" in caplog.text


def test_without_any_gain_longer_prompts_are_reused_and_a_warning_says_what_to_set(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "cachecraft_rag"):
        assert times_of({1024: (0.1, 0.2), 2048: (0.2, 0.3)})[0] == 2049
    assert "min_prompt_tokens" in caplog.text


def test_what_cannot_be_reused_ends_the_measurement() -> None:
    assert times_of({1024: None, 2048: (0.2, 0.1)}) == (0, [1024])
    assert times_of({1024: (0.1, 0.2), 2048: None, 4096: (0.2, 0.1)})[0] == 1025


def test_a_context_too_short_for_any_prompt_measures_nothing() -> None:
    assert lengths_up_to(1000) == []
    assert shortest_prompt([], lambda _tokens: None) == 0


@pytest.mark.parametrize("tokens", lengths_up_to(40000))
def test_every_chunk_of_a_measured_prompt_has_moved(tokens: int) -> None:
    prompt, other = prompts_of(tokens, vocabulary=300)
    assert abs(prompt.bounds[-1] - tokens) < LONGEST_OVER
    ids = [segment.segment_id for segment in prompt.segments]
    captured = [segment.segment_id for segment in other.segments]
    assert ids[0] == captured[0]  # the instruction
    assert sorted(captured) == sorted(ids[:-1])
    for place, name in enumerate(captured[1:], start=1):
        assert ids[:-1].index(name) != place
    assert max(max(segment.token_ids) for segment in prompt.segments) < 300


def asked(full: list[float], reused: list[float | None]) -> tuple[Times | None, list[ReuseConfig]]:
    """The times by these seconds of the requests in full and with reuse, and the settings that were asked with."""
    seconds = {False: iter(full), True: iter(reused)}
    configs: list[ReuseConfig] = []

    def ask(config: ReuseConfig) -> float | None:
        configs.append(config)
        return next(seconds[config.reuse])

    return timed(ReuseConfig(method=ReuseMethod(alpha=0.7)), ask, tokens=1024), configs


def test_the_fastest_of_ten_pairs_after_the_first_counts_on_both_sides() -> None:
    times, configs = asked([0.1, *[0.5] * 8, 0.3, 0.4], [0.2, *[0.9] * 8, 0.8, 0.7])
    assert times == Times(full_s=0.3, reused_s=0.7)
    assert [config.reuse for config in configs] == 11 * [False, True]
    assert not any(config.capture for config in configs)
    # a number, because CFO says nothing about random tokens
    assert {config.recompute_ratio for config in configs if config.reuse} == {0.2}


def test_the_log_has_the_series_of_each_side(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "cachecraft_rag"):
        asked([0.1, *[0.5] * 8, 0.3, 0.4], [0.2, *[0.9] * 8, 0.8, 0.7])
    assert "1024 tokens in full, the first warms up: 100.0 500.0" in caplog.text
    assert "1024 tokens with reuse, the first warms up: 200.0 900.0" in caplog.text


def test_a_prompt_that_cannot_be_reused_ends_the_timing() -> None:
    times, configs = asked([0.1, 0.1, 0.1], [0.2, None])
    assert (times, len(configs)) == (None, 4)
