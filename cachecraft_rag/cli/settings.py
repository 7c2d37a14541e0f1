"""`cachecraft settings`, and how settings reach the other commands."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from cachecraft_rag.cli import options
from cachecraft_rag.cli.options import out, print_json

if TYPE_CHECKING:
    from cachecraft_rag.engine.settings import Settings

# Parameters of commands whose names are not those of their settings.
_NAMED = {
    "recompute_ratio": "reuse.recompute_ratio",
    "reuse": "reuse.reuse",
    "early_termination": "reuse.early_termination",
    "remote": "remote.url",
    "remote_key_file": "remote.key_file",
}
_SAME = (
    "model", "store", "embeddings", "top_k", "threads", "metrics_port", "dtype", "device", "namespace", "system",
    "codec", "max_variants", "variants_per_chunk", "max_new_tokens", "temperature", "top_p", "seed", "stop",
)  # fmt: skip
ENGINE_COMMANDS = ("index", "ask", "chat", "doctor")
# Commands that look after a folder take from settings which one it is, and no more: `--namespace` of `store evict` says
# what to remove, and the limits of `store limits` change the store.
_FOLDER = ("store", "remote", "remote_key_file")


def settings_given(path: Path | None) -> Settings | None:
    """The settings of --settings, the working directory and the environment; None, at once, where there are none."""
    found = path is not None or os.path.isfile("cachecraft.toml")
    if not found and not any(name.startswith("CACHECRAFT_") for name in os.environ):
        return None
    from cachecraft_rag.engine.settings import load_settings

    return load_settings(path)


def defaults_of(settings: Settings) -> dict[str, Any]:
    """What takes the place of the defaults of each command's parameters: a flag still goes first."""
    given = settings.given()
    known = {name: given[key] for name, key in (_NAMED | {name: name for name in _SAME}).items() if key in given}
    folder = {name: value for name, value in known.items() if name in _FOLDER}
    below: Mapping[str, list[str]] = {
        "store": ["ls", "stats", "check", "limits", "evict"],
        "documents": ["ls", "remove"],
    }
    groups = {group: dict.fromkeys(commands, folder) for group, commands in below.items()}
    return {**dict.fromkeys(ENGINE_COMMANDS, known), **groups}


def settings(context: typer.Context, as_json: options.Json = False) -> None:
    """Print what holds for index, ask, chat and doctor, and where each value comes from: a file, a variable, a default.

    A flag of a command goes before the environment, that before the file, that before the default.
    """
    from cachecraft_rag.engine.settings import load_settings

    found: Settings = context.obj or load_settings()
    found.engine_config()  # says what does not go together
    if as_json:
        print_json({one.key: {"value": one.shown, "origin": one.origin} for one in found.entries.values()})
        return
    table = Table(box=None, pad_edge=False)
    for name in ("setting", "value", "from"):
        table.add_column(name, overflow="fold")
    for one in found.entries.values():
        value = one.shown if isinstance(one.shown, str) else repr(one.shown)
        table.add_row(one.key, value, one.origin)
    out.print(table)


def keep(context: typer.Context, path: Path | None) -> None:
    """Read the settings, and give them to the command that follows. Raises ConfigError."""
    found = settings_given(path)
    if found is not None:
        context.obj = found
        context.default_map = defaults_of(found)
