"""Commands with `--server` over a real server with keys, which they read from the environment."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.server.conftest import TEXTS, Served, make_engine, serve

__all__ = ["make_engine", "serve"]

Run = tuple[str, ...]
ASKS: dict[str, Run] = {
    "ask": ("ask", "How many days?", "--json"),
    "chat": ("chat",),
}


@pytest.fixture
def url(serve: Callable[..., Served]) -> str:
    """Address of a server that asks for a key, and for another one to prime."""
    return serve(settings={"admin_keys": ("admin",)}, server={"api_keys": ("secret",)}).url


@pytest.mark.parametrize("arguments", ASKS.values(), ids=ASKS)
def test_questions_are_answered_with_the_key_of_the_environment(
    arguments: Run, url: str, home: Path, cachecraft: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = (*arguments, "--max-tokens", "4", "--server", url)
    refused = cachecraft(*asked, cwd=home, typed="How many days?\n", code=2)
    assert "set CACHECRAFT_API_KEY" in refused.stderr
    monkeypatch.setenv("CACHECRAFT_API_KEY", "secret")
    answered = cachecraft(*asked, cwd=home, typed="How many days?\n")
    assert "tokens" in answered.stdout
    assert "secret" not in answered.stdout + answered.stderr


def test_priming_takes_both_keys_from_the_environment(
    url: str, tmp_path: Path, cachecraft: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "\n".join(json.dumps({"text": text, "source": "kitchen.md"}) for text in TEXTS)
    asked = ("prime", "--from", "-", "--json", "--server", url)
    monkeypatch.setenv("CACHECRAFT_API_KEY", "secret")
    for key in ("", "another"):  # an empty variable counts as unset
        monkeypatch.setenv("CACHECRAFT_ADMIN_KEY", key)
        refused = cachecraft(*asked, cwd=tmp_path, typed=lines, code=2)
        assert "set CACHECRAFT_ADMIN_KEY" in refused.stderr
    monkeypatch.setenv("CACHECRAFT_ADMIN_KEY", "admin")
    assert cachecraft(*asked, cwd=tmp_path, typed=lines).result["captured"] > len(TEXTS)


@pytest.mark.parametrize("command", ["ask", "chat", "mcp", "prime"])
def test_the_help_names_the_variables(command: str, tmp_path: Path, cachecraft: Command) -> None:
    shown = " ".join(cachecraft(command, "--help", cwd=tmp_path).stdout.split())
    for name in ("CACHECRAFT_API_KEY", "CACHECRAFT_ADMIN_KEY"):
        assert name in shown
