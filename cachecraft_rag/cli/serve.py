"""`cachecraft serve`: vLLM's OpenAI-compatible server, with chunk-caches."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cachecraft_rag.cli.options import ENGINE_KEYS, takes
from cachecraft_rag.engine.settings import Settings


@takes(*(key for key in ENGINE_KEYS if key not in ("model", "device", "threads")))
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
    *,
    settings: Settings,
) -> None:
    """Serve a model with vLLM: chat completions whose field `documents` holds chunks reuse their chunk-caches.

    Requests without `documents` are vLLM's own. Example: cachecraft serve demo --port 8000 -- --enforce-eager
    """
    own = ["--host", host, "--port", str(port), "--tensor-parallel-size", str(tensor_parallel_size)]
    if max_model_len is not None:
        own += ["--max-model-len", str(max_model_len)]
    from cachecraft_rag.vllm.server import serve as run

    run(
        model,
        store=Path(settings["store"]),
        config=settings.engine_config(),
        shared_system=shared_system,
        session_header=session_header,
        arguments=[*own, *(arguments or ())],
    )
