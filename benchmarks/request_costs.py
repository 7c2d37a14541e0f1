"""What one request costs over vLLM: counts of its launches, copies and waits, and Python's time in each phase.

Counted without a GPU, in two ways. Both serve the same prompt: an instruction, chunks that were captured in another
order, and a question.

device  the workers' side of the connector on a simulated GPU (`benchmarks.late_device`), with layers that launch
        nothing of their own: launches of this package, copies, and where the host waits for the device
vllm    vLLM's CPU build with a tiny model of as many layers: operations, calls, engine steps, SQL statements, and CPU
        time. It runs in an environment with vLLM; elsewhere it is left out

A GPU adds its own time to each launch; counts are the same on every machine. For 32 layers a cost model says how long
the request would take on a GPU (`benchmarks.request_model`).
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.request_model import model
from benchmarks.served_prompt import Requests, Size
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.options import print_json


def measure(size: Size, folder: Path, *, compiled: bool = False) -> dict[str, Any]:
    """Return the counts of one request; those over vLLM are None without vLLM.

    With `compiled`, vLLM compiles its model. The cost model is of the default size only, and None for others.
    """
    from benchmarks import device_costs

    figures: dict[str, Any] = {"size": asdict(size) | {"chunks": size.chunks}}
    parts: dict[str, Callable[[], dict[str, Any]]] = {}
    # a build for CUDA has kernels that would run instead of the simulated device
    if torch.version.cuda is None and importlib.util.find_spec("triton") is not None:
        parts["device"] = lambda: device_costs.count(size, Requests.of(size), folder / "device")
    if importlib.util.find_spec("vllm") is not None:
        parts["vllm"] = lambda: _vllm(size, folder / "vllm", compiled=compiled)
    for name in ("device", "vllm"):
        figures[name] = parts[name]() if name in parts else None
    figures["model"] = None
    if figures["device"] and size == Size():
        figures["model"] = model(figures["device"])
    return figures


def _vllm(size: Size, folder: Path, *, compiled: bool) -> dict[str, Any]:
    from benchmarks import vllm_costs

    return vllm_costs.measure(size, Requests.of(size), folder, compiled=compiled)


def main(
    tokens: Annotated[int, typer.Option(min=200, help="Tokens of the prompt, about.")] = 4232,
    chunk: Annotated[int, typer.Option(min=32, help="Tokens of a chunk.")] = 512,
    layers: Annotated[int, typer.Option(min=2, help="Layers of the model.")] = 32,
    compiled: Annotated[bool, typer.Option(help="Let vLLM compile its model.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Count what one request costs over vLLM: launches, copies, waits, steps, and Python's time in each phase."""
    with tempfile.TemporaryDirectory(prefix="cachecraft-costs-") as folder:
        figures = measure(Size(tokens, chunk, layers), Path(folder), compiled=compiled)
    if as_json:
        print_json(figures)
        return
    for part in ("device", "vllm", "model"):
        out.print(
            f"{part}:" if figures[part] else f"{part}: left out; it needs a suitable environment"
        )
        for name, value in (figures[part] or {}).items():
            out.print(f"  {name}: {value}")
