"""`cachecraft trust`: let all settings in a folder's `cachecraft.toml` count."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cachecraft_rag.cli import options
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.options import print_json, print_table
from cachecraft_rag.engine import trust as trusting
from cachecraft_rag.engine.settings import load_settings
from cachecraft_rag.errors import ConfigError


def trust(
    folder: Annotated[
        Path, typer.Argument(help="Folder of the cachecraft.toml, or the file itself.")
    ] = Path(),
    is_list: Annotated[bool, typer.Option("--list", help="List the trusted files.")] = False,
    is_removed: Annotated[bool, typer.Option("--remove", help="Trust it no longer.")] = False,
    as_json: options.Json = False,
) -> None:
    """Trust the settings file of a folder, as it is now: all its keys count when you work there.

    Without trust, keys that load a model, send data, open a port or decide who shares chunk-caches are ignored in a
    file that was found in the working directory. After a change of the file, trust it again. Files named with
    --settings or CACHECRAFT_SETTINGS, and the one in your own config folder, need no trust. Exit code 2 if the file is
    missing or not valid; with --remove it may be missing.
    """
    # Raises ConfigError; see `app.main` for exit codes.
    if is_list and is_removed:
        raise ConfigError("give --list or --remove, not both")
    if is_list:
        _list(as_json=as_json)
        return
    is_file = folder.name == trusting.FILE_NAME and not folder.is_dir()
    is_folder = folder.is_dir() or (is_removed and not folder.exists() and not is_file)
    file = (folder / trusting.FILE_NAME if is_folder else folder).absolute()
    if file.name != trusting.FILE_NAME:
        raise ConfigError(f"{folder}: name a folder that has a {trusting.FILE_NAME}, or that file")
    if is_removed:
        was_trusted = trusting.distrust(file)
        if as_json:
            print_json({"file": str(file), "removed": was_trusted})
        else:
            text = (
                "is not trusted any more" if was_trusted else "was not trusted; nothing to remove"
            )
            out.print(f"{file} {text}", soft_wrap=True)
        return
    keys = _add(file)
    if as_json:
        print_json({"file": str(file), "keys": keys})
    else:
        named = ", ".join(keys) or "none; it needed no trust"
        out.print(f"trusted {file}; keys that count now: {named}", soft_wrap=True)


def _add(file: Path) -> list[str]:
    """Trust a file, and return its keys that needed it. Raises ConfigError for an invalid file."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({error.strerror or error}); correct the path"
        ) from error
    settings = load_settings(file, environment={})
    trusting.trust(file, content)
    return [
        entry.key
        for entry in settings.entries.values()
        if entry.origin == str(file) and trusting.needs_trust(entry.key, entry.value, file.parent)
    ]


def _list(*, as_json: bool) -> None:
    records = list(trusting.trusted_files())
    if as_json:
        print_json([{"file": str(record.file), "state": record.state} for record in records])
        return
    print_table(("file", "state"), [(record.file, record.state) for record in records])
