"""The server of `cachecraft mcp`, over stdio or HTTP. Imports the official SDK, of the extra `mcp`."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from inspect import getdoc
from urllib.parse import urlsplit

import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.types import ToolAnnotations

from cachecraft_rag import __version__
from cachecraft_rag.cli.mcp.tools import DocumentTools
from cachecraft_rag.errors import ConfigError

LOOPBACK = "127.0.0.1"
PATH = "/mcp"
GRACE_S = 2  # seconds that open connections have when the server stops

_INSTRUCTIONS = (
    "Searches the user's own documents and answers questions about them with a local model. `search` returns passages "
    "to read, `ask` returns a finished answer with its sources."
)
_INDEX_INSTRUCTIONS = " `index` adds a file or folder below: {folders}."


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port to listen on; port 0 takes a free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Return the address in `HOST:PORT`, `:PORT` or `PORT`; without a host it is 127.0.0.1.

        >>> Address.parse("8080"), Address.parse("[::1]:8080").host
        (Address(host='127.0.0.1', port=8080), '::1')
        """
        try:
            parts = urlsplit(f"//{text if ':' in text else f':{text}'}")
            port = parts.port
            (parts.hostname or "").encode("idna")
        except ValueError:  # UnicodeError of the host is one, too
            port = None
        has_more = bool(parts.path or parts.username is not None or set("?#") & set(text))
        if port is None or has_more:
            raise ConfigError(f"--http is {text!r}; write HOST:PORT, for example {LOOPBACK}:8080")
        return cls(parts.hostname or LOOPBACK, port)

    @property
    def is_local(self) -> bool:
        """True for 127.0.0.1, ::1 and localhost, which only this computer reaches; False for any other host."""
        return self.host in (LOOPBACK, "localhost", "::1")

    def listen(self) -> socket.socket:
        """Return a socket that listens here; the caller closes it. ConfigError if the system refuses."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            return socket.create_server((self.host, self.port), family=family)
        except OSError as error:
            raise ConfigError(
                f"--http {self.host}:{self.port}: cannot listen there ({error.strerror or error}); choose another"
            ) from error


def server_of(tools: DocumentTools, *, folders: str, verbose: bool = False) -> MCPServer[None]:
    """Return a server with the tools `search`, `ask` and, if `folders` names allowed ones, `index`.

    The agent's model reads `folders`. The server logs from WARNING on, if `verbose` from INFO on.
    """
    instructions = _INSTRUCTIONS + (_INDEX_INSTRUCTIONS.format(folders=folders) if folders else "")
    server: MCPServer[None] = MCPServer(
        "cachecraft",
        instructions=instructions,
        version=__version__,
        log_level="INFO" if verbose else "WARNING",
    )
    only_reads = ToolAnnotations(read_only_hint=True, open_world_hint=False)
    for tool in (tools.search, tools.ask):
        server.add_tool(tool, description=getdoc(tool), annotations=only_reads)
    if folders:
        updates = ToolAnnotations(
            read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False
        )
        server.add_tool(tools.index, description=getdoc(tools.index), annotations=updates)
    return server


def serve_http(server: MCPServer[None], address: Address, listening: socket.socket) -> None:
    """Serve streamable HTTP at `/mcp` until stopped; on local addresses the SDK refuses other names (DNS rebinding)."""
    app = server.streamable_http_app(streamable_http_path=PATH, host=address.host)
    config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=GRACE_S)
    uvicorn.Server(config).run(sockets=[listening])


class ServerThread:
    """Runs a server beside the main thread.

    The SDK reads stdin in a thread that no signal wakes. Threads of a daemon thread are daemons too, so the main thread
    can leave at Ctrl-C without waiting for another line.
    """

    def __init__(self, serve: Callable[[], None]) -> None:
        self._serve = serve
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mcp", daemon=True)

    def start(self) -> None:
        """Begin to serve, in a daemon thread, and return at once. Only once."""
        self._thread.start()

    def wait(self) -> None:
        """Wait until the server ends (stdio: its client has left; HTTP: not before Ctrl-C). Raises its error."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001  # raised again in the main thread
            self._error = error
