"""`cachecraft serve`: vLLM's OpenAI-compatible server, with chunk-caches."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, cast

import typer

from cachecraft_rag.checks import check_whole
from cachecraft_rag.cli.options import ENGINE_KEYS, takes, warn
from cachecraft_rag.engine.settings import Settings
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.store.remote.config import keys_in

# Settings of a computer that vLLM divides up itself, and what to do instead.
_NOT_HERE = {
    "threads": "vLLM binds its threads itself: set VLLM_CPU_OMP_THREADS_BIND",
    "metrics_port": "the server has its own /metrics",
}
_REUSE_KEYS = [
    f"reuse.{field.name}" for field in fields(ReuseConfig) if field.name != "plain_prompts"
]
_KEYS = [
    key
    for key in (*ENGINE_KEYS, "best_last", "private_system", "audit", "quality_target")
    if key not in ("model", "device", "threads")
]


@dataclass(frozen=True)
class ServerOptions:
    """Options of the server.

    host                  address to listen on; 0.0.0.0 for all
    port                  port to listen on
    tensor_parallel_size  GPUs that share the model
    max_model_len         most tokens of prompt and answer; the model's without it
    session_header        header that names a request's session. Use it only with a proxy that sets it
    client_settings       settings of reuse that requests may bring: none; safe: those that do not shape the
                          chunk-caches of other clients; all
    reuse_plain_prompts   reuse passages that repeat in requests without documents too, see
                          docs/guides/any_application.md
    search_system         with reuse_plain_prompts: search the system message, too, for applications that put the
                          context there
    admin_key_file        file of keys, one on each line; prime and evict ask for one
    """

    host: str = "127.0.0.1"
    port: int = 8000
    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    session_header: str | None = None
    client_settings: str = "safe"
    reuse_plain_prompts: bool = False
    search_system: bool = False
    admin_key_file: Path | None = None

    def __post_init__(self) -> None:
        """Check the numbers that vLLM is not the first to use; raises ConfigError."""
        check_whole("--port", self.port, least=1, most=65535)
        check_whole("--tensor-parallel-size", self.tensor_parallel_size, least=1)

    def for_vllm(self) -> list[str]:
        """Return the arguments for vLLM's server: host, port, number of GPUs, and `max_model_len` unless it is None.

        The other options are not vLLM's, and are not among them.
        """
        arguments = ["--host", self.host]
        arguments += ["--port", str(self.port)]
        arguments += ["--tensor-parallel-size", str(self.tensor_parallel_size)]
        if self.max_model_len is not None:
            arguments += ["--max-model-len", str(self.max_model_len)]
        return arguments


@takes(*_KEYS, *_REUSE_KEYS, server=ServerOptions)
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
    """Serve a model with vLLM: chat completions whose field `documents` holds chunks reuse their chunk-caches.

    Requests without `documents` are vLLM's own (but see --reuse-plain-prompts). Exit code 2 if a setting, the key
    file or the model cannot be used, before vLLM starts.
    Example: cachecraft serve demo --port 8000 -- --enforce-eager
    """
    # Raises ConfigError, ModelNotFoundError, UnsupportedModelError, and the exceptions of vLLM;
    # see `app.main` for exit codes.
    from cachecraft_rag.vllm.versions import require_installed

    require_installed()  # the other imports take seconds
    from cachecraft_rag.observability.request_log import JsonFormatter
    from cachecraft_rag.server.settings import ClientSettings, EndpointSettings
    from cachecraft_rag.serving.sampling import SamplingParams
    from cachecraft_rag.vllm.server.launch import serve as run

    for key, advice in _NOT_HERE.items():
        if settings[key] is not None:
            raise ConfigError(f"{settings.entries[key].origin}: {key} has no effect here: {advice}")
    of_clients = {"embeddings", "top_k", *(field.name for field in fields(SamplingParams))}
    # no error: one file may be the clients', too
    for key in sorted(of_clients & settings.given().keys()):
        warn(f"{settings.entries[key].origin}: {key} has no effect here: clients decide it")
    # settings and self-check; requests have a line each only with --verbose or --log-json
    for name in ("cachecraft_rag.vllm", "cachecraft_rag.server"):
        logging.getLogger(name).setLevel(logging.INFO)
    handlers = logging.getLogger("cachecraft_rag").handlers
    plain = server.reuse_plain_prompts or settings.given().get("reuse.plain_prompts") == "reuse"
    run(
        model,
        store=Path(settings["store"]),
        config=settings.engine_config(),
        endpoint=EndpointSettings(
            session_header=server.session_header,
            client_settings=cast(ClientSettings, server.client_settings),
            plain_prompts="reuse" if plain else "off",
            search_system=server.search_system,
            admin_keys=()
            if server.admin_key_file is None
            else tuple(keys_in(server.admin_key_file)),
        ),
        arguments=[*server.for_vllm(), *(arguments or ())],
        json_logs=any(isinstance(handler.formatter, JsonFormatter) for handler in handlers),
    )
