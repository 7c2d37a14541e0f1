"""Linters that `make lint-deploy` installs: a test without its linter is skipped, or fails where they are required."""

from __future__ import annotations

import importlib
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from cachecraft_rag.cli.app import app

ROOT = Path(__file__).resolve().parents[2]


def missing(linter: str) -> None:
    """Skip, or fail where the linters are required."""
    message = f"{linter} is not installed: `make lint-deploy` brings it"
    if os.environ.get("TESTS_REQUIRE_LINTERS") == "1":
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="session")
def module() -> Callable[[str], Any]:
    """`module(name)` imports a linter."""

    def load(name: str) -> Any:
        try:
            return importlib.import_module(name)
        except ImportError:
            return missing(name)

    return load


@pytest.fixture(scope="session")
def program() -> Callable[[str], str]:
    """`program(name)` is the path of a linter, of this environment or of the system."""

    def find(name: str) -> str:
        beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        found = shutil.which(name, path=beside)
        if found is None:
            missing(name)
        return str(found)

    return find


def serve_options(arguments: str | list[str]) -> dict[str, Any]:
    """The options that `cachecraft serve` reads from its arguments; typer's errors are raised."""
    words = shlex.split(arguments) if isinstance(arguments, str) else arguments
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    with group.commands["serve"].make_context("serve", list(words)) as context:
        return dict(context.params)
