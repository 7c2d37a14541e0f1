"""Commands of `python -m benchmarks`, run in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner


@pytest.fixture(scope="session")
def benchmark_output() -> Callable[..., str]:
    """Runs a command and returns what it prints on stdout; errors of the package are raised."""
    from benchmarks.__main__ import app

    def invoke(*arguments: str | Path) -> str:
        given = [str(argument) for argument in arguments]
        done = CliRunner().invoke(app, given, catch_exceptions=False, env={"COLUMNS": "200"})
        assert done.exit_code == 0, done.output
        return done.stdout

    return invoke


@pytest.fixture(scope="session")
def benchmark_json(benchmark_output: Callable[..., str]) -> Callable[..., Any]:
    """Runs a command with --json and returns the object on its last line."""

    def invoke(*arguments: str | Path) -> Any:
        return json.loads(benchmark_output(*arguments, "--json").strip().splitlines()[-1])

    return invoke
