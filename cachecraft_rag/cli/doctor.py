"""`cachecraft doctor`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cachecraft_rag.cli import options
from cachecraft_rag.cli.options import ENGINE_KEYS, out, print_json, takes, waiting
from cachecraft_rag.engine.settings import Settings
from cachecraft_rag.errors import ModelNotFoundError, UnsupportedModelError

if TYPE_CHECKING:
    from cachecraft_rag.engine.doctor import Facts

_STYLES = {"ok": "green", "advice": "yellow", "error": "bold red"}


@takes(*(key for key in ENGINE_KEYS if not key.startswith("remote.")))
def doctor(
    check: Annotated[bool, typer.Option("--check/--no-check", help="Verify every stored checksum.")] = True,
    as_json: options.Json = False,
    *,
    settings: Settings,
) -> None:
    """Verify the store, measure how fast the model computes and the disk delivers, and say what to change.

    Measures for a few seconds. Exit code 1 if something is broken; advice is no error.
    """
    from cachecraft_rag.engine.doctor import Advice, findings

    store, facts = Path(settings["store"]), None
    try:
        facts = _facts(settings, store, check=check)
        found = list(findings(facts))
    except (ModelNotFoundError, UnsupportedModelError) as error:
        found = [Advice("model", "error", str(error), "choose another --model")]
    if not store.is_dir():
        found.append(Advice("index", "advice", f"{store} is not there yet", f"cachecraft index DIR --store {store}"))
    if as_json:
        print_json({"facts": facts and asdict(facts), "findings": [asdict(one) for one in found]})
    else:
        for one in found:
            out.print(one.level, style=_STYLES[one.level], end=" ")
            change = f" → {one.change}" if one.change else ""
            out.print(f"{one.about}: {one.what}{change}", soft_wrap=True)
    if any(one.level == "error" for one in found):
        raise typer.Exit(1)


def _facts(settings: Settings, store: Path, *, check: bool) -> Facts:
    from cachecraft_rag.engine.doctor import examine
    from cachecraft_rag.engine.engine import Engine

    config = settings.engine_config()
    alone = replace(config, store=replace(config.store, remote=None))
    with waiting(f"Loading {settings['model']}"), _folder(store) as folder:
        options.quiet_libraries()
        with Engine.from_pretrained(settings["model"], store=folder, config=alone) as engine:
            return examine(engine, check=check)


@contextmanager
def _folder(store: Path) -> Iterator[Path]:
    """The store, or, where there is none, a folder beside its place that is removed again."""
    if store.is_dir():
        yield store
        return
    beside = next(parent for parent in store.absolute().parents if parent.is_dir())
    with tempfile.TemporaryDirectory(dir=beside, prefix=".cachecraft-doctor-") as folder:
        yield Path(folder)
