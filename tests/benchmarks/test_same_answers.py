"""Two checkouts compared: this one with itself, and answers that differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]


def test_a_checkout_answers_like_itself(benchmark_output: Callable[..., str]) -> None:
    said = benchmark_output("same-answers", "--against", ROOT, "--requests", 14)
    assert said.strip().splitlines()[-1] == "22 of 22 equal"


def test_differences_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import same_answers
    from benchmarks.__main__ import app

    outputs: Iterator[Any] = iter(
        ['{"request": "a 1", "text": "x"}\n', '{"request": "a 1", "text": "y"}\n']
    )
    monkeypatch.setattr(same_answers.subprocess, "check_output", lambda *_, **__: next(outputs))
    done = CliRunner().invoke(app, ["same-answers", "--against", str(tmp_path), "--model", "demo"])
    assert done.exit_code == 1
    assert done.stdout == "a 1: text: x here, y there\n0 of 1 equal\n"


@pytest.mark.parametrize(("setting", "older"), [("published", True), ("off", False)])
def test_an_older_checkout_gets_early_termination_as_a_flag(
    monkeypatch: pytest.MonkeyPatch, setting: str, older: bool
) -> None:
    from benchmarks import same_answers

    @dataclass(frozen=True)
    class OlderConfig:
        drift: float = 0.4
        early_termination: bool = False

    monkeypatch.setattr(same_answers, "ReuseConfig", OlderConfig)
    settings = {"drift": 0.0, "early_termination": setting, "unknown": 1}
    assert same_answers.reuse_config(settings) == OlderConfig(0.0, older)


def test_numbers_of_one_checkout_only_are_named_and_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import same_answers
    from benchmarks.__main__ import app

    outputs: Iterator[Any] = iter(
        [
            '{"request": "a 1", "text": "x", "tokens_spared": 0}\n',
            '{"request": "a 1", "text": "x"}\n',
        ]
    )
    monkeypatch.setattr(same_answers.subprocess, "check_output", lambda *_, **__: next(outputs))
    done = CliRunner().invoke(app, ["same-answers", "--against", str(tmp_path), "--model", "demo"])
    assert done.exit_code == 0
    assert done.stdout == (
        "not compared, because one checkout lacks it: tokens_spared\n1 of 1 equal\n"
    )
