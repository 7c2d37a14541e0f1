"""Start and end of the server over an engine in this process."""

from __future__ import annotations

import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import uvicorn

from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.model.checkpoint import loading
from cachecraft_rag.model.fingerprint import snapshot_folder
from cachecraft_rag.server.local.app import LocalServer
from cachecraft_rag.server.local.embeddings import Embeddings
from cachecraft_rag.server.ready import ready_text
from cachecraft_rag.server.settings import EndpointSettings
from cachecraft_rag.server.wire import LOOPBACK
from cachecraft_rag.serving.sampling import SamplingParams

logger = logging.getLogger("cachecraft_rag.server")

# Longest wait in whole seconds for answers under way when the server is asked to end; then they are given up.
_CLOSING_S = 5
# Seconds after which a thread lets another one run Python. An answer passes several threads on its way to the client,
# and at each would wait Python's 5 ms for the thread that computes the next token.
SWITCH_S = 0.0005


@dataclass
class Address:
    """Address of a server, with the model name and key that a first request needs; see `ready.ServerArguments`."""

    host: str | None
    port: int
    model: str
    served_model_name: Sequence[str] | str | None = None
    api_key: Sequence[str] | None = None
    uds: str | None = None
    ssl_certfile: str | None = None


def serve(
    model: str,
    *,
    store: Path,
    config: EngineConfig,
    endpoint: EndpointSettings,
    defaults: SamplingParams,
    host: str,
    port: int,
    api_keys: Sequence[str] = (),
    embeddings: str,
    say: Callable[[str], object] = logger.info,
) -> None:
    """Serve a model until the process is asked to end (SIGINT, SIGTERM), then store captures and return.

    Answers under way have five seconds to end. To be called in the main thread; signal handlers are put back.

    Args:
        model: as in `Engine.from_pretrained`; also the name that clients use.
        store: folder of the store.
        config: settings of the engine.
        endpoint: settings of requests; its folder and name are filled in here.
        defaults: sampling parameters that a request leaves out, such as its temperature.
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        api_keys: keys of which requests to /v1 need one; (): no key, but on a loopback `host` a local name.
        embeddings: embedding model of `/v1/embeddings`, as in `Embedder`.
        say: called with a message once the server is ready; the message shows a first request.
    """
    endpoint = replace(endpoint, root=str(store), model=model)
    with _ended_by_signals(), _listening(host, port) as listening:
        address = Address(host, listening.getsockname()[1], model, api_key=tuple(api_keys) or None)
        with Engine.from_pretrained(model, store=store, config=config) as engine:
            server = LocalServer(
                engine,
                endpoint,
                system=config.system,
                best_last=config.best_last,
                defaults=defaults,
                embeddings=Embeddings(embeddings),
                folder=_folder_of(model),
                api_keys=api_keys,
                only_local_names=host in LOOPBACK and not api_keys,
                ready=lambda: say(ready_text(address, endpoint)),
            )
            run(server, listening)


def run(server: LocalServer, listening: socket.socket) -> None:
    """Answer requests on a socket until SIGINT or SIGTERM, which is raised again. `SWITCH_S` stays set afterwards."""
    sys.setswitchinterval(SWITCH_S)
    config = uvicorn.Config(
        server.app(),
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=_CLOSING_S,
        lifespan="on",
    )
    uvicorn.Server(config).run(sockets=[listening])


def _folder_of(model: str) -> Path | None:
    """Return the folder of a loaded model's files."""
    with loading(model) as source:
        return snapshot_folder(source)


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """Listen before the model is loaded: a port that is taken is reported at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror or error}); choose another --host or --port"
        ) from error
    with listening:
        yield listening


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """End the block at SIGINT and SIGTERM without an error: everything that it opened is closed.

    uvicorn raises a signal again once it has ended; its default would kill this process before the engine is closed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _frame: object) -> None:
        raise _EndRequested(number)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except _EndRequested as request:
        logger.info("Ended by %s", signal.Signals(request.number).name)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _EndRequested(BaseException):
    """A signal asked the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
