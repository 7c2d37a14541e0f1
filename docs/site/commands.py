"""Generate the reference of the `cachecraft` command from its own help."""

from __future__ import annotations

import re
from typing import Any

import typer.main

from cachecraft_rag.cli.app import app

_INTRODUCTION = """# Command line

The commands with their arguments and options, as in `cachecraft COMMAND --help`. Exit codes: 0 done; 1 a check found
something wrong; 2 an error; 130 interrupted.
"""


def page() -> str:
    """Return the page as Markdown: a section for each command, a table of its parameters."""
    parts = [_INTRODUCTION]
    for name, command in _commands(typer.main.get_command(app), "cachecraft"):
        parts.append(f"## {name}\n\n{_prose(command.help)}\n")
        rows = [
            _row(parameter)
            for parameter in command.params
            if not getattr(parameter, "hidden", False)
        ]
        if rows:
            parts.append(
                "\n".join(["| option | meaning | default |", "| --- | --- | --- |", *rows]) + "\n"
            )
    return "\n".join(parts)


def _commands(command: Any, name: str) -> list[tuple[str, Any]]:
    """Return the commands that can be run, each with its full name."""
    children = getattr(command, "commands", None)
    if children is None:
        return [(name, command)]
    below = []
    for word, child in children.items():
        below += _commands(child, f"{name} {word}")
    return below


def _row(parameter: Any) -> str:
    is_argument = parameter.param_type_name == "argument"
    names = (
        parameter.name.upper()
        if is_argument
        else ", ".join([*parameter.opts, *parameter.secondary_opts])
    )
    shown = getattr(parameter, "show_default", None)
    default = shown if isinstance(shown, str) else parameter.default
    is_shown = (
        default is not None and default is not False and not callable(default) and default != ()
    )
    return f"| `{names}` | {_cell(getattr(parameter, 'help', None))} | {_cell(str(default)) if is_shown else ''} |"


def _cell(text: str | None) -> str:
    return _prose(text).replace("\n", " ").replace("|", "\\|")


def _prose(text: str | None) -> str:
    """Remove what only a terminal shows, and keep angle brackets from becoming HTML."""
    return re.sub(r"\[/?\w+\]", "", (text or "").replace("\b", "")).replace("<", "&lt;").strip()
