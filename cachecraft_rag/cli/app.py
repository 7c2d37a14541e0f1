"""The command line put together, and the one place where errors become messages and exit codes.

Exit codes: 0 done; 1 a check found something wrong; 2 an error, said on stderr; 130 interrupted.
"""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer
from rich.logging import RichHandler

from cachecraft_rag import __version__
from cachecraft_rag.cli import answers, benchmarks, demonstration, store
from cachecraft_rag.cli.options import err
from cachecraft_rag.errors import CacheCraftError

app = typer.Typer(
    name="cachecraft",
    help="Answers over your documents, several times sooner: the key/value caches of retrieved chunks are reused "
    "wherever they land in the prompt.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demonstration.demo)
app.command("index")(answers.index)
app.command("ask")(answers.ask)
app.command("chat")(answers.chat)
app.add_typer(store.app, name="store")
app.add_typer(benchmarks.app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cachecraft {__version__}")
        raise typer.Exit


@app.callback()
def _settings(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the package's log messages.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=logging.ERROR, format="%(message)s", handlers=[RichHandler(console=err, show_path=False)])
    logging.getLogger("cachecraft_rag").setLevel(level)


def main() -> None:
    """Entry point of the `cachecraft` command."""
    try:
        app()
    except CacheCraftError as error:
        err.print("error:", style="bold red", end=" ")
        err.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        err.print("interrupted; what was finished is kept")
        sys.exit(130)
