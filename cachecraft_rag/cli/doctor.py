"""`cachecraft doctor`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cachecraft_rag.cli import options
from cachecraft_rag.cli.option_groups import CacheOptions, ComputeOptions, takes
from cachecraft_rag.cli.options import DEFAULT_STORE, out, print_json, waiting
from cachecraft_rag.errors import ModelNotFoundError, UnsupportedModelError

if TYPE_CHECKING:
    from cachecraft_rag.engine.doctor import Facts, Finding

_STYLES = {"ok": "green", "advice": "yellow", "error": "bold red"}


@takes(compute=ComputeOptions, caches=CacheOptions)
def doctor(
    context: typer.Context,
    store: options.Store = DEFAULT_STORE,
    model: options.Model = "demo",
    metrics: Annotated[
        str | None, typer.Option("--metrics", help="Address of a running engine's metrics: why its chunks are missed.")
    ] = None,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Verify every stored checksum.")] = True,
    as_json: options.Json = False,
    *,
    compute: ComputeOptions,
    caches: CacheOptions,
) -> None:
    """Say how the model, the store and a remote do here, whether loading is worth it, and what to change.

    Measures for a few seconds: a prefill, the disk, the remote. Exit code 1 if something is broken; advice is no error.
    """
    from cachecraft_rag.engine.doctor import Finding, findings

    options.set_threads(compute.threads)
    config = caches.engine_config(context.obj, compute=compute)
    facts: Facts | None = None
    told: list[Finding] = []
    try:
        facts = _facts(model, store, config, metrics=metrics, check=check)
        told = findings(facts)
    except (ModelNotFoundError, UnsupportedModelError) as error:
        told = [Finding("model", "error", str(error), "choose another --model")]
    if not store.is_dir():
        told.append(Finding("index", "advice", f"{store} is not there yet", f"cachecraft index DIR --store {store}"))
    if as_json:
        print_json({"facts": None if facts is None else _plain(facts), "findings": [asdict(one) for one in told]})
    else:
        for one in told:
            out.print(one.level, style=_STYLES[one.level], end=" ")
            change = f" → {one.change}" if one.change else ""
            out.print(f"{one.about}: {one.what}{change}", highlight=False, soft_wrap=True)
    if any(one.level == "error" for one in told):
        raise typer.Exit(1)


def _facts(model: str, store: Path, config: Any, *, metrics: str | None, check: bool) -> Facts:
    from cachecraft_rag.engine.doctor import examine
    from cachecraft_rag.engine.engine import Engine

    seen = None
    if metrics is not None:
        from cachecraft_rag.engine.metrics import read_counts

        seen = read_counts(metrics)
    alone = replace(config, store=replace(config.store, remote=None))
    with waiting(f"Loading {model}"), _folder(store) as folder:
        options.quiet_libraries()
        with Engine.from_pretrained(model, store=folder, config=alone) as engine:
            facts = examine(engine, remote=config.store.remote, check=check)
    return facts if seen is None else replace(facts, chunks=seen[0], captures=seen[1])


@contextmanager
def _folder(store: Path) -> Iterator[Path]:
    """The store, or, where there is none, a folder beside its place that is removed again."""
    if store.is_dir():
        yield store
        return
    beside = next(parent for parent in store.absolute().parents if parent.is_dir())
    with tempfile.TemporaryDirectory(dir=beside, prefix=".cachecraft-doctor-") as folder:
        yield Path(folder)


def _plain(facts: Facts) -> dict[str, Any]:
    """For JSON, which has no pairs as keys."""
    chunks = [{"outcome": outcome, "reason": reason, "count": n} for (outcome, reason), n in facts.chunks.items()]
    return asdict(replace(facts, chunks={})) | {"chunks": chunks}
