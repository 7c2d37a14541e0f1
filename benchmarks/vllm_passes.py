"""Python's time in a pass over vLLM: its layers one after the other, and all of them in one call of its own forward.

Runs in an environment with vLLM's CPU build. The model is tiny, so that little is computed, and as deep as Llama-3-8B.
Both sides take turns in one process; each figure is the least of its repeats.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.vllm_costs import save_tiny_llama
from benchmarks.vllm_families import ENVIRONMENT
from cachecraft_rag.compute.driver import prefill
from cachecraft_rag.compute.job import PrefillJob
from cachecraft_rag.compute.kv_buffer import ResidentKV
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.errors import UnsupportedModelError
from cachecraft_rag.vllm.options import VLLMOptions
from cachecraft_rag.vllm.served_model import VLLMModel
from cachecraft_rag.vllm.settings import ConnectorSettings

_CHUNK = 48  # tokens of each of seven chunks, as many chunks as a prompt of 4,000 tokens has
_CHUNKS = 7
_EVERY = 7  # every seventh token of a chunk is recomputed


def running(folder: Path, *, layers: int, compiled: bool) -> tuple[Any, Any]:
    """Start vLLM over a tiny Llama in this process; return it and its `WorkerStack`."""
    os.environ.update(ENVIRONMENT | {"TORCHDYNAMO_DISABLE": "0" if compiled else "1"})
    from vllm import LLM
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    model = save_tiny_llama(folder / "model", layers=layers)
    served = VLLMModel.load(str(model), dtype="float32", options=VLLMOptions())
    settings = ConnectorSettings(str(folder / "store"), served.identity, EngineConfig(), "a key")
    given: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 1024,
        "enforce_eager": not compiled,
        "max_num_seqs": 4,
        "block_size": 32,
        "kv_transfer_config": settings.transfer_config(),
        "disable_log_stats": True,
    }
    server: Any = LLM(model=str(model), **(given | served.arguments))
    connector: Any = get_kv_transfer_group()
    return server, connector._workers._stack


def job_of(stack: Any, *, drift: float) -> PrefillJob:
    """Return a prompt of an instruction, seven moved chunks in memory and a question."""
    bounds = [_CHUNK * number for number in range(_CHUNKS + 3)]
    chunks = range(bounds[1], bounds[-2])
    generator = torch.Generator().manual_seed(0)
    resident = [
        ResidentKV(start, torch.randn(stack.layout.shape(_CHUNK), generator=generator))
        for start in bounds[1:-2]
    ]
    new = [*range(bounds[1]), *range(bounds[-2], bounds[-1])]
    return PrefillJob(
        [token % 250 for token in range(bounds[-1])],
        Rows.of(bounds, new=new, recomputed=chunks[::_EVERY]),
        resident=resident,
        reused=range(1, _CHUNKS + 1),
        drift=drift,
    )


def least_ms(acts: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the least CPU milliseconds of this thread for each act; they take turns."""
    least = dict.fromkeys(acts, float("inf"))
    for _ in range(repeats):
        for name, act in acts.items():
            began = time.thread_time()
            act()
            least[name] = min(least[name], 1e3 * (time.thread_time() - began))
    return least


def main(
    *,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 32,
    compiled: Annotated[bool, typer.Option(help="Let vLLM compile its model.")] = False,
    repeats: Annotated[int, typer.Option(help="Passes of each kind.")] = 30,
) -> None:
    """Measure the milliseconds of a thread's CPU time per layer, on both sides."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        server, stack = running(Path(name), layers=layers, compiled=compiled)
        forward = stack.vllm_forward()

        def run(job: PrefillJob, model: Any) -> torch.Tensor:
            stack.whole_model = model
            return prefill(stack, job).buffer.kv

        acts: dict[str, Callable[[], object]] = {}
        for kind, drift in (("drift corrected", 0.5), ("no drift correction", 0.0)):
            job = job_of(stack, drift=drift)
            difference = float((run(job, None) - run(job, forward)).abs().max())
            if not difference < 1e-3:
                raise UnsupportedModelError(f"keys and values differ by up to {difference:.2g}")
            acts[f"layer by layer, {kind}"] = lambda job=job: run(job, None)  # type: ignore[misc]
            acts[f"at once, {kind}"] = lambda job=job: run(job, forward)  # type: ignore[misc]
        for name, ms in least_ms(acts, repeats).items():
            row = {
                "compiled": compiled,
                "layers": layers,
                "pass": name,
                "ms": round(ms, 2),
                "ms_per_layer": round(ms / layers, 3),
            }
            print(json.dumps(row), flush=True)
        server.llm_engine.engine_core.shutdown()
