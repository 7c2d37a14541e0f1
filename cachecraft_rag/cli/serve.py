"""`cachecraft serve`: vLLM's OpenAI-compatible server, with chunk-caches."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from cachecraft_rag.cli.options import ENGINE_KEYS, takes
from cachecraft_rag.engine.settings import Settings
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.store.remote.config import keys_in

# Settings of a computer that vLLM divides up itself, and what to do instead.
_NOT_HERE = {
    "threads": "vLLM binds its threads itself: set VLLM_CPU_OMP_THREADS_BIND",
    "metrics_port": "the server has its own /metrics",
}
_KEYS = [key for key in (*ENGINE_KEYS, "best_last", "private_system") if key not in ("model", "device", "threads")]


@takes(*_KEYS, *(f"reuse.{one.name}" for one in fields(ReuseConfig) if one.name != "plain_prompts"))
def serve(
    model: Annotated[str, typer.Argument(help='Hugging Face name or folder, or "demo" for the bundled one.')],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="After --: further arguments of vLLM's server.", metavar="[-- VLLM ARGUMENTS]"),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")] = 8000,
    tensor_parallel_size: Annotated[
        int, typer.Option("--tensor-parallel-size", "-tp", min=1, help="GPUs that share the model.")
    ] = 1,
    max_model_len: Annotated[
        int | None,
        typer.Option("--max-model-len", min=1, help="Most tokens of prompt and answer.", show_default="the model's"),
    ] = None,
    shared_system: Annotated[
        bool,
        typer.Option(
            "--shared-system",
            help="Clients' system messages hold nobody's private text: what is captured behind them serves everybody.",
        ),
    ] = False,
    session_header: Annotated[
        str | None,
        typer.Option(
            "--session-header", help="Header that names a request's session. Only behind a proxy that sets it itself."
        ),
    ] = None,
    client_settings: Annotated[
        str,
        typer.Option(
            "--client-settings",
            help="Settings of reuse that requests may bring: none; safe: those that shape nobody else's chunk-caches; "
            "all.",
        ),
    ] = "safe",
    reuse_plain_prompts: Annotated[
        bool,
        typer.Option(
            "--reuse-plain-prompts",
            help="Of requests without documents, too: reuse passages that come again, see docs/any_application.md.",
        ),
    ] = False,
    admin_key_file: Annotated[
        Path | None,
        typer.Option("--admin-key-file", help="File of keys, one on each line; prime and evict ask for one."),
    ] = None,
    *,
    settings: Settings,
) -> None:
    """Serve a model with vLLM: chat completions whose field `documents` holds chunks reuse their chunk-caches.

    Requests without `documents` are vLLM's own (but see --reuse-plain-prompts).
    Example: cachecraft serve demo --port 8000 -- --enforce-eager
    """
    own = ["--host", host, "--port", str(port), "--tensor-parallel-size", str(tensor_parallel_size)]
    if max_model_len is not None:
        own += ["--max-model-len", str(max_model_len)]
    from cachecraft_rag.vllm.server import serve as run
    from cachecraft_rag.vllm.settings import EndpointSettings

    for key, advice in _NOT_HERE.items():
        if settings[key] is not None:
            raise ConfigError(f"{settings.entries[key].origin}: {key} has no effect here: {advice}")
    plain = reuse_plain_prompts or settings.given().get("reuse.plain_prompts") == "reuse"
    run(
        model,
        store=Path(settings["store"]),
        config=settings.engine_config(),
        endpoint=EndpointSettings(
            shared_system=shared_system,
            session_header=session_header,
            client_settings=cast(Any, client_settings),
            plain_prompts="reuse" if plain else "off",
            admin_keys=() if admin_key_file is None else tuple(keys_in(admin_key_file)),
        ),
        arguments=[*own, *(arguments or ())],
    )
