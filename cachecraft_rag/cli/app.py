"""The command line, and the one place where errors become messages and exit codes.

Exit codes: 0 done; 1 a check found something wrong; 2 an error, printed to stderr; 130 interrupted.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.logging import RichHandler

from cachecraft_rag import __version__
from cachecraft_rag.cli import documents, store
from cachecraft_rag.cli.ask import ask, index
from cachecraft_rag.cli.calibrate import calibrate
from cachecraft_rag.cli.chat import chat
from cachecraft_rag.cli.demo import demo
from cachecraft_rag.cli.doctor import doctor
from cachecraft_rag.cli.evaluate import evaluate
from cachecraft_rag.cli.options import err, print_error
from cachecraft_rag.cli.serve import serve
from cachecraft_rag.cli.settings import settings
from cachecraft_rag.cli.sizes import sizes
from cachecraft_rag.errors import CacheCraftError

INTERRUPTED = (129, 130, 143)  # 128 + SIGHUP, SIGINT and SIGTERM, as in shells

app = typer.Typer(
    name="cachecraft",
    help="RAG that is several times faster to the first token: it reuses the key/value caches of retrieved chunks, "
    "wherever they stand in the prompt.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (demo, index, ask, chat, serve, sizes, doctor, settings, calibrate):
    app.command()(command)
app.command("eval")(evaluate)
app.add_typer(documents.app, name="documents")
app.add_typer(store.app, name="store")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cachecraft {__version__}")
        raise typer.Exit


@app.callback()
def _settings(
    context: typer.Context,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the package's log messages.")] = False,
    log_json: Annotated[
        bool, typer.Option("--log-json", help="Write log messages to stderr as lines of JSON, one for each request.")
    ] = False,
    settings_file: Annotated[
        Path | None, typer.Option("--settings", help="Settings file.", show_default="cachecraft.toml, if it is there")
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    # On the package's logger, not on the root: libraries print their own warnings, which would then appear twice.
    logger = logging.getLogger("cachecraft_rag")
    handler: logging.Handler = RichHandler(console=err, show_path=False)
    if log_json:
        from cachecraft_rag.observability.request_log import JsonFormatter

        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter())
    logger.handlers[:] = [handler]  # one, however often an app in Python calls this
    logger.setLevel(logging.INFO if verbose or log_json else logging.WARNING)
    logger.propagate = False
    context.obj = settings_file


def main() -> None:
    """Entry point of the `cachecraft` command."""
    try:
        app()
    except CacheCraftError as error:
        print_error(error)
        sys.exit(2)
    except SystemExit as leaving:
        if leaving.code in INTERRUPTED:  # typer's exit code for Ctrl-C is 130
            err.print("interrupted; finished work is kept")
        raise
