"""`cachecraft mcp`: its options, and the order in which server and model start and end."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cachecraft_rag.checks import from_extra
from cachecraft_rag.cli import ask, options
from cachecraft_rag.cli.console import err, print_error
from cachecraft_rag.cli.mcp.allowed_folders import AllowedFolders
from cachecraft_rag.cli.options import ANSWER_KEYS, ENGINE_KEYS, takes, warn
from cachecraft_rag.engine.settings import Settings
from cachecraft_rag.errors import CacheCraftError

if TYPE_CHECKING:
    from cachecraft_rag.cli.mcp.server import ServerThread
    from cachecraft_rag.rag import AskOptions, CacheCraft

ALLOW = typer.Option(
    "--allow",
    metavar="DIR",
    help="Folder that the agent may index with all below it; may be repeated.",
)
HTTP = typer.Option(
    "--http",
    metavar="HOST:PORT",
    help="Serve streamable HTTP at /mcp instead of stdio. A port alone listens on 127.0.0.1.",
)


@dataclass(frozen=True)
class McpOptions(ask.AskingOptions):
    """Options of the MCP server."""

    allow: Annotated[list[Path], ALLOW] = field(default_factory=list)
    http: Annotated[str | None, HTTP] = None


@takes(*ENGINE_KEYS, *ANSWER_KEYS, chosen=McpOptions)
def mcp(*, settings: Settings, chosen: McpOptions) -> None:
    """Let an agent search and ask your documents: a Model Context Protocol server over stdio.

    Tools: search, ask, and with --allow also index. Everything but the protocol is written to stderr. It ends when the
    client closes stdin, or at Ctrl-C. Exit code 2 if the extra `mcp` is not installed, a setting, an allowed folder or
    the address cannot be used, or there is no index and --allow is missing. A model that cannot be loaded does not end
    the server: each tool answers with the error.
    """
    # Raises ConfigError, IndexStoreError, and the errors of `load_while_serving`; see `app.main` for exit codes.
    with from_extra("mcp", "An MCP server"):
        from cachecraft_rag.cli.mcp.server import Address, ServerThread, serve_http, server_of
        from cachecraft_rag.cli.mcp.tools import DocumentTools

    config = settings.engine_config()
    allowed = AllowedFolders(chosen.allow)
    if not allowed:  # the agent could never add a document
        ask.require_index(Path(settings["store"]))
    asking: AskOptions = {"top_k": settings["top_k"], "sampling": settings.sampling()}
    asking["where"] = options.where_of(chosen.where)
    if chosen.server is not None:  # an engine in this process has it
        asking["config"] = config.reuse

    loaded: Future[CacheCraft] = Future()
    tools = DocumentTools(loaded, allowed=allowed, asking=asking, brief=chosen.is_brief(settings))
    is_verbose = logging.getLogger("cachecraft_rag").isEnabledFor(logging.INFO)
    server = server_of(tools, folders=str(allowed), verbose=is_verbose)
    if chosen.http is None:
        load_while_serving(settings, chosen, loaded, ServerThread(server.run))
        return
    address = Address.parse(chosen.http)
    with address.listen() as listening:
        host, port = listening.getsockname()[:2]
        err.print(
            f"listening on http://{f'[{host}]' if ':' in host else host}:{port}/mcp", soft_wrap=True
        )
        if not address.is_local:
            warn(
                "Everyone who reaches this address can read the documents; add a proxy that checks passwords."
            )
        load_while_serving(
            settings, chosen, loaded, ServerThread(lambda: serve_http(server, address, listening))
        )


def load_while_serving(
    settings: Settings, chosen: McpOptions, loaded: Future[CacheCraft], server: ServerThread
) -> None:
    """Start the server, and load the model meanwhile: clients give a server seconds to answer.

    Closes the model once the server ends: over stdio when its client leaves, over HTTP at Ctrl-C. If loading raises a
    CacheCraftError, it is printed and not raised: each call of a tool is answered with it (`loaded` holds it) until
    then, and the agent can report it. Any other error passes at once, and must end the process: `loaded` stays unset.
    So do the server's own, once it has ended.
    """
    server.start()
    try:
        rag = ask.load(settings, server=chosen.server)
    except CacheCraftError as error:
        print_error(error)
        loaded.set_exception(error)
        server.wait()
        return
    with rag:
        loaded.set_result(rag)
        server.wait()
