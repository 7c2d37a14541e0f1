"""`cachecraft prime`: chunk-caches of texts that a database of the user's holds, from lines of JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cachecraft_rag.checks import check_names
from cachecraft_rag.cli import options
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.options import ENGINE_KEYS, counted, print_json, takes, waiting, warn
from cachecraft_rag.engine.settings import Settings
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.types.documents import Chunk

if TYPE_CHECKING:
    from cachecraft_rag.engine.base import AnswerEngine

From = Annotated[
    Path,
    typer.Option(
        "--from",
        help='Lines of JSON, {"text": …} with an optional "source", the document that it was cut from; - reads them '
        "from stdin.",
    ),
]


def read_chunks(path: Path) -> list[Chunk]:
    """Return the chunks of a file of JSON lines, or of stdin for "-".

    A line is `{"text": "…", "source": "…"}`, in which "source" may be missing; blank lines are skipped. Raises
    ConfigError if the file cannot be read or has no line, and, with the line's number, for a line in another form.
    """
    is_stdin = str(path) == "-"
    try:
        with nullcontext(sys.stdin) if is_stdin else path.open(encoding="utf-8") as lines:
            chunks = list(_parsed(lines, path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--from {path} cannot be read: {error}") from error
    if not chunks:
        raise ConfigError(f"--from {path} has no line; did the program that writes it fail?")
    return chunks


def _parsed(lines: Iterable[str], path: Path) -> Iterable[Chunk]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            given = json.loads(line)
            check_names(given, ("text", "source"), what="key")
            yield Chunk(given["text"], {"source": str(given.get("source") or "")})
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            RecursionError,
            ConfigError,
        ) as error:
            raise ConfigError(
                f'--from {path}, line {number}: each line must be {{"text": "…", "source": "…"}} ({error})'
            ) from error


@dataclass(frozen=True)
class PrimeOptions:
    """Options of `prime`.

    alone     each text after a fixed passage instead of its neighbours, which then do not shape it
    estimate  only say what would be computed
    server    prime in a server that `cachecraft serve` started, such as http://127.0.0.1:8000. Its keys are read from
              CACHECRAFT_API_KEY and CACHECRAFT_ADMIN_KEY
    """

    alone: bool = False
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Only print what would be computed.")
    ] = False
    server: str | None = None


@takes(*ENGINE_KEYS, chosen=PrimeOptions)
def prime(
    source: From,
    as_json: options.Json = False,
    *,
    settings: Settings,
    chosen: PrimeOptions,
) -> None:
    """Compute the chunk-caches of texts that a database of yours holds, before the first question.

    The texts are those that your application gives the model, so it writes them: a template or a file's path changes a
    text, and no database says which. Texts with the same source are captured after one another. What is stored already
    is skipped: after Ctrl-C run it again. Folders are primed by `cachecraft index DIR --prime`.

    Exit code 2 if a line is in another form, or if a setting, the model or the store cannot be used.
    """
    # Raises ConfigError, ModelNotFoundError, StoreError, ServerError, UnsupportedModelError; see `app.main`.
    from cachecraft_rag.cli.ask import print_estimate

    chunks = read_chunks(source)
    skipped: list[str] = []
    with _opened(settings, chosen.server) as engine:
        estimate = engine.estimate_priming(chunks, alone=chosen.alone)
        print_estimate(estimate, engine.disk_space().codec)
        captured = 0
        if not chosen.estimate:
            with options.progress_bar("Computing chunk-caches", remaining=True) as show:
                captured = engine.prime(
                    chunks, alone=chosen.alone, progress=show, skipped=skipped.append
                )
    for sentence in skipped:
        warn(sentence)
    if as_json:
        print_json({"captured": captured, "estimate": asdict(estimate), "not_primed": skipped})
    elif not chosen.estimate:
        out.print(f"{counted(captured, 'chunk-cache')} computed (the instruction has one too)")


def _opened(settings: Settings, server: str | None) -> AnswerEngine:
    """Open the engine that the settings name, or that of a server, with a spinner on stderr meanwhile."""
    config = settings.engine_config()
    with waiting(f"Connecting to {server}" if server else f"Loading {settings['model']}"):
        if server is not None:
            from cachecraft_rag.client.http import HTTPEngine

            system = settings["system"] if "system" in settings.given() else None
            return HTTPEngine.connect(server, system=system, **options.server_keys())
        from cachecraft_rag.engine.loading import engine_loader

        options.quiet_libraries()
        return engine_loader()(settings["model"], store=settings["store"], config=config)
