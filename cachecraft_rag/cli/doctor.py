"""`cachecraft doctor` and `settings`: is this machine set up well, and with which settings?"""

from __future__ import annotations

import contextlib
import shlex
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cachecraft_rag.cli import options
from cachecraft_rag.cli.console import err, out
from cachecraft_rag.cli.options import ENGINE_KEYS, print_json, print_table, takes, waiting
from cachecraft_rag.engine.settings import Setting, Settings
from cachecraft_rag.errors import ConfigError, ModelNotFoundError, UnsupportedModelError

if TYPE_CHECKING:
    from cachecraft_rag.engine.doctor import Advice, Facts

_STYLES = {"ok": "green", "advice": "yellow", "error": "bold red"}


@takes(*(key for key in ENGINE_KEYS if not key.startswith("remote.")))
def doctor(
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Verify every stored checksum.")
    ] = True,
    as_json: options.Json = False,
    *,
    settings: Settings,
) -> None:
    """Verify the store, measure how fast the model computes and the disk delivers, and say what to change.

    Loading the model and measuring take 10 to 60 seconds, and reading every stored checksum as long as the disk needs
    for all chunk-caches (--no-check leaves that out). Exit code 1 if something is broken, also a model that cannot be
    loaded; advice is no error. Exit code 2 if a setting or the store cannot be used at all.
    """
    # Raises typer.Exit(1), ConfigError and StoreError; see `app.main` for exit codes.
    from cachecraft_rag.engine.doctor import Advice, findings

    store = Path(settings["store"])
    facts = None
    started = time.monotonic()
    _announce(store, check=check)
    try:
        facts = _facts(settings, store, check=check)
        judged = list(findings(facts))
    except (ModelNotFoundError, UnsupportedModelError) as error:
        judged = [Advice("model", "error", str(error), "choose another --model")]
    if not store.is_dir():
        judged.append(
            Advice(
                "index",
                "advice",
                f"{store} is not there yet",
                f"cachecraft index DIR --store {store}",
            )
        )
    judged += _untrusted(settings)
    if as_json:
        print_json(
            {"facts": facts and asdict(facts), "findings": [asdict(finding) for finding in judged]}
        )
    else:
        for finding in judged:
            out.print(finding.level, style=_STYLES[finding.level], end=" ")
            change = f" → {finding.change}" if finding.change else ""
            out.print(f"{finding.about}: {finding.what}{change}", soft_wrap=True)
        err.print(f"examined in {time.monotonic() - started:.0f} s", style="dim")
    if any(finding.level == "error" for finding in judged):
        raise typer.Exit(1)


def _untrusted(settings: Settings) -> Iterator[Advice]:
    """Yield advice about settings that are ignored because their file is not trusted."""
    from cachecraft_rag.engine.doctor import Advice

    if settings.ignored:
        assert settings.file is not None  # where they are
        keys = ", ".join(setting.key for setting in settings.ignored)
        yield Advice(
            "settings",
            "advice",
            f"{settings.file} is not trusted; ignored: {keys}",
            f"read it, then cachecraft trust {shlex.quote(str(settings.file.parent))}",
        )


def _announce(store: Path, *, check: bool) -> None:
    """Print to stderr what will be done, and how much is read."""
    from cachecraft_rag.store.config import CACHE_FOLDER

    steps = "loads the model and measures: 10 to 60 s"
    if check and store.is_dir():
        nbytes = 0
        for file in (store / CACHE_FOLDER).rglob("*.safetensors"):
            with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
                nbytes += file.stat().st_size
        steps += f"; reads {options.megabytes(nbytes)} of chunk-caches (--no-check leaves that out)"
    err.print(steps, style="dim", soft_wrap=True)


def _facts(settings: Settings, store: Path, *, check: bool) -> Facts:
    from cachecraft_rag.engine.doctor import examine
    from cachecraft_rag.engine.engine import Engine

    config = settings.engine_config()
    # it answers no question, so what it examines is left as it is
    reuse = replace(config.reuse, min_prompt_tokens=config.reuse.min_prompt_tokens or 0)
    alone = replace(config, reuse=reuse, store=replace(config.store, remote=None))
    with waiting(f"Loading {settings['model']}"), _folder(store) as folder:
        options.quiet_libraries()
        with Engine.from_pretrained(settings["model"], store=folder, config=alone) as engine:
            return examine(engine, check=check)


@contextlib.contextmanager
def _folder(store: Path) -> Iterator[Path]:
    """The store; if it is missing, a folder next to its place that is removed afterwards."""
    if store.is_dir():
        yield store
        return
    beside = next(parent for parent in store.absolute().parents if parent.is_dir())
    try:
        folder = tempfile.TemporaryDirectory(dir=beside, prefix=".cachecraft-doctor-")
    except OSError as error:
        raise ConfigError(
            f"{beside} cannot be written ({error.strerror or error}); name another folder with --store"
        ) from error
    with folder as name:
        yield Path(name)


@takes("store")
def settings(as_json: options.Json = False, *, settings: Settings) -> None:
    """Print the settings of index, ask, chat, serve and doctor, and the origin of each: a file, a variable, a default.

    A flag of a command goes before the environment, that before the settings file (--settings, or cachecraft.toml
    here), that before the one in your own config folder, that before the default. Keys that are ignored because the
    file is not trusted are shown as such. With --json: one object, key → value and origin, with `ignored` where a value
    is ignored. Exit code 2 if a setting is wrong, or settings contradict each other.
    """
    # Raises ConfigError; see `app.main` for exit codes.
    settings.engine_config()  # reports settings that contradict each other
    entries = settings.entries.values()
    if as_json:
        printed: dict[str, dict[str, object]] = {
            entry.key: {"value": entry.shown, "origin": entry.origin} for entry in entries
        }
        for setting in settings.ignored:
            printed[setting.key]["ignored"] = {"value": setting.shown, "origin": setting.origin}
        print_json(printed)
        return
    rows = [(entry.key, _text(entry), entry.origin) for entry in entries]
    rows += [
        (setting.key, _text(setting), f"ignored: {setting.origin} is not trusted")
        for setting in settings.ignored
    ]
    print_table(("setting", "value", "from"), rows)


def _text(setting: Setting) -> str:
    return setting.shown if isinstance(setting.shown, str) else repr(setting.shown)
