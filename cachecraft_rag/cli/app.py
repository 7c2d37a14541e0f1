"""The command line, and the one place where errors become messages and exit codes.

Exit codes: 0 done; 1 a check found something wrong; 2 an error, printed to stderr; 130 interrupted.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from cachecraft_rag import __version__
from cachecraft_rag.checks import missing_package
from cachecraft_rag.cli.console import err, print_error
from cachecraft_rag.errors import CacheCraftError

INTERRUPTED = (129, 130, 143)  # 128 + SIGHUP, SIGINT and SIGTERM, as in shells
# Of a write to stdout, which names no file. Errors of the package's own files are CacheCraftErrors.
OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

_ASKING = "Documents and questions"
_MEASURING = "Measuring"
_OPERATING = "Operating"


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """A command that is imported when it runs.

    summary    the first sentence of the command's help
    panel      the group of commands that it is listed in
    attribute  its function, or a typer application with commands; by default the function with the module's name
    """

    module: str
    summary: str
    panel: str
    attribute: str = ""


COMMANDS: dict[str, CommandEntry] = {
    "demo": CommandEntry(
        "demo",
        "Index a sample handbook, answer questions about it, and compare with full prefill.",
        _ASKING,
    ),
    "index": CommandEntry("ask", "Index documents.", _ASKING, "index"),
    "prime": CommandEntry(
        "prime",
        "Compute the chunk-caches of texts that a database of yours holds, before the first question.",
        _ASKING,
    ),
    "ask": CommandEntry("ask", "Answer one question over the indexed documents.", _ASKING),
    "chat": CommandEntry("chat", "Chat about the indexed documents.", _ASKING),
    "documents": CommandEntry(
        "documents",
        "List indexed documents, and remove them with their chunk-caches.",
        _ASKING,
        "app",
    ),
    "eval": CommandEntry(
        "evaluation.evaluate",
        "Compare the answers with reuse to full prefill's, question by question.",
        _MEASURING,
        "evaluate",
    ),
    "calibrate": CommandEntry(
        "evaluation.calibrate",
        "Find the least recomputation that keeps a quality (with 95 % confidence), and save it for this store.",
        _MEASURING,
        "calibrate",
    ),
    "sizes": CommandEntry(
        "sizes", "Show how many MB chunk-caches take, for each codec.", _MEASURING
    ),
    "serve": CommandEntry(
        "serve",
        "Serve a model to OpenAI's clients: requests whose field `documents` holds chunks reuse their chunk-caches.",
        _OPERATING,
    ),
    "quality": CommandEntry(
        "evaluation.quality",
        "Show how often answers with reuse equal full prefill's, from the audits of a store.",
        _OPERATING,
        "quality",
    ),
    "mcp": CommandEntry(
        "mcp.command",
        "Let an agent search and ask your documents: a Model Context Protocol server over stdio.",
        _OPERATING,
        "mcp",
    ),
    "store": CommandEntry(
        "store", "Inspect, check and evict stored chunk-caches.", _OPERATING, "app"
    ),
    "doctor": CommandEntry(
        "doctor",
        "Verify the store, measure how fast the model computes and the disk delivers, and say what to change.",
        _OPERATING,
    ),
    "settings": CommandEntry(
        "doctor",
        "Print the settings of index, ask, chat, serve and doctor, and the origin of each: a file, a variable, a "
        "default.",
        _OPERATING,
        "settings",
    ),
    "trust": CommandEntry(
        "trust",
        "Trust the settings file of a folder, as it is now: all its keys count when you work there.",
        _OPERATING,
    ),
}


def _without_types(parameters: Any) -> Any:
    """Return the parameters; flags lose the "<bool>" that typer writes after them."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


class Command(TyperCommand):
    """A command."""

    def get_params(self, ctx: Any) -> Any:
        """Return the arguments and options, --help too; flags have no "<bool>", which typer writes after them."""
        return _without_types(super().get_params(ctx))


class Group(TyperGroup):
    """A group of commands."""

    def get_params(self, ctx: Any) -> Any:
        """Return the arguments and options as `Command` does."""
        return _without_types(super().get_params(ctx))


class LazyCommands(MutableMapping[str, Any]):
    """The commands by name; each is imported when it is looked up, because all of them take half a second."""

    def __getitem__(self, name: str) -> Any:
        entry = COMMANDS[name]
        module = import_module(f"cachecraft_rag.cli.{entry.module}")
        target = getattr(module, entry.attribute or entry.module)
        if isinstance(target, typer.Typer):
            target.info.cls = Group
            for registered in target.registered_commands:
                registered.cls = Command
            command = typer.main.get_command(target)
        else:
            single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            single.command(name, cls=Command)(target)
            command = typer.main.get_command(single)
        command.name = name
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)

    def __setitem__(self, name: str, command: object) -> None:
        raise TypeError("commands are added to COMMANDS")

    def __delitem__(self, name: str) -> None:
        raise TypeError("commands are removed from COMMANDS")


class LazyGroup(Group):
    """A group that lists its commands without importing them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = LazyCommands()
        self._is_listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of this name, or None; it is imported now, unless `format_help` only needs its summary."""
        if not self._is_listing:
            return super().get_command(ctx, cmd_name)
        entry = COMMANDS[cmd_name]
        return TyperCommand(cmd_name, help=entry.summary, rich_help_panel=entry.panel)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help of the group to `formatter`, without importing a command."""
        self._is_listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._is_listing = False


app = typer.Typer(
    name="cachecraft",
    cls=LazyGroup,
    help="RAG that is several times faster to the first token: it reuses the key/value caches of retrieved chunks, "
    "wherever they stand in the prompt.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cachecraft {__version__}")
        raise typer.Exit


@app.callback()
def _settings(
    context: typer.Context,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show the package's log messages.")
    ] = False,
    log_json: Annotated[
        bool,
        typer.Option(
            "--log-json",
            help="Write log messages to stderr as lines of JSON, one for each request.",
        ),
    ] = False,
    settings_file: Annotated[
        Path | None,
        typer.Option(
            "--settings", help="Settings file.", show_default="cachecraft.toml, if it is there"
        ),
    ] = None,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version and exit.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    # On the package's logger, not on the root: libraries print their own warnings, which would then appear twice.
    logger = logging.getLogger("cachecraft_rag")
    # one, however often an app in Python calls this
    logger.handlers[:] = [_log_handler(as_json=log_json)]
    logger.setLevel(logging.INFO if verbose or log_json else logging.WARNING)
    logger.propagate = False
    context.obj = settings_file


def _log_handler(*, as_json: bool) -> logging.Handler:
    if as_json:
        from cachecraft_rag.observability.request_log import JsonFormatter

        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter())
        return handler
    from rich.logging import RichHandler

    return RichHandler(console=err, show_path=False)


def main() -> None:
    """Run the `cachecraft` command with the arguments of this process, and leave with an exit code.

    The package's log messages, from WARNING on or with --verbose or --log-json from INFO on, then go to stderr only:
    the handlers of its logger are replaced.
    """
    try:
        app()
    except CacheCraftError as error:
        print_error(error)
        sys.exit(2)
    except ModuleNotFoundError as error:
        if error.name != "torch":  # which cachecraft-rag-client leaves out
            raise
        print_error(missing_package("", "This command", str(error)))
        sys.exit(2)
    except OSError as error:
        if error.errno not in OUTPUT_ERRORS or error.filename is not None:
            raise
        # nothing is left to write at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print_error(CacheCraftError(f"the output cannot be written: {os.strerror(error.errno)}"))
        sys.exit(2)
    except SystemExit as leaving:
        if leaving.code in INTERRUPTED:  # typer's exit code for Ctrl-C is 130
            err.print("interrupted; finished work is kept")
        raise
