"""Counts and CPU time of one request over vLLM's CPU build, with a tiny model, in this process."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.served_prompt import KEY, Requests, Size
from benchmarks.vllm_families import ENVIRONMENT, byte_tokenizer
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.store import StoreConfig
from cachecraft_rag.vllm.messages import FIELD, Ask
from cachecraft_rag.vllm.options import VLLMOptions
from cachecraft_rag.vllm.served_model import VLLMModel
from cachecraft_rag.vllm.settings import ConnectorSettings

_NAMESPACE = "default"
_REPEATS = 5  # requests of which the fastest counts, phase by phase


class Operations(TorchDispatchMode):
    """Counts torch's operations that compute, without views, in the block."""

    def __init__(self, total: Counter[str], part: str) -> None:
        """Count them for this part."""
        super().__init__()
        self._total = total
        self._part = part

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one operation, and run it."""
        name = func._schema.name.removeprefix("aten::")
        if not func.is_view and name not in ("detach", "alias", "empty", "lift_fresh"):
            self._total[self._part] += 1
        return func(*args, **(kwargs or {}))


class Tally:
    """Counts of calls, operations and SQL statements, and CPU milliseconds by phase, of one request."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.calls: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        self.sql: Counter[str] = Counter()
        self.cpu_ms: dict[str, float] = defaultdict(float)
        self.counts_operations = False
        self._thread = threading.current_thread()

    def clear(self) -> None:
        """Forget everything that was counted."""
        for counted in (self.calls, self.operations, self.sql, self.cpu_ms):
            counted.clear()

    def statement(self, _text: str) -> None:
        """Count an SQL statement; those of other threads are in the background."""
        on_path = threading.current_thread() is self._thread
        self.sql["on the path" if on_path else "in the background"] += 1

    def wrapped(self, function: Callable[..., Any], phase: str, *, operations: bool = False) -> Any:
        """Return the function, with its calls, its CPU time and, on demand, its operations counted for a phase."""

        def run(*args: Any, **named: Any) -> Any:
            self.calls[phase] += 1
            counting = operations and self.counts_operations
            counted = Operations(self.operations, phase) if counting else contextlib.nullcontext()
            began = time.thread_time()
            try:
                with counted:
                    return function(*args, **named)
            finally:
                self.cpu_ms[phase] += 1e3 * (time.thread_time() - began)

        return run


def measure(
    size: Size, requests: Requests, folder: Path, *, compiled: bool = False
) -> dict[str, Any]:
    """Return counts and CPU milliseconds of the request, and the operations of vLLM's own prefill of the prompt.

    With `compiled`, vLLM compiles its model, as it does by default; then operations are not counted.

    engine_steps      steps of vLLM's engine core, and how many of them compute nothing of vLLM's
    operations        torch's operations without views: of this package's steps, and of vLLM's own forwards
    layer_calls, attend_calls, block_writes  calls of a layer, of its attention, and of vLLM's write to its blocks
    sql               statements that the request waits for, and others
    python_ms         Python's part of `cpu_ms` for each phase, and of all phases together: measured again while
                      attention, drift correction, placing and writing compute nothing. vLLM's layers still compute, but
                      their widths are tiny
    cpu_ms            CPU time of the engine's thread: planning (in vLLM's scheduler), begin (plan, buffers, rows),
                      layers (probe and pass), end (written blocks, report), rest of the filling (placing on a CPU, the
                      plan after the probe), the token step, and the whole request with vLLM's own parts
    own               operations, steps and CPU time of vLLM's own prefill of the same prompt
    """
    tally = Tally()
    with _served(size, folder, tally, compiled=compiled) as serve:
        assert "refused" not in (report := serve(requests.capture)), report
        for _ in range(2):  # warm up
            report = serve(requests.reuse)
        outcomes = [segment["outcome"] for segment in report["segments"]]
        assert set(outcomes[1:-1]) == {"reused"}, outcomes
        with _instrumented(tally):
            tally.counts_operations = not compiled
            counted = _counted(tally, lambda: serve(requests.reuse))
            own = _counted(tally, lambda: serve(requests.reuse.prompt.token_ids))
            tally.counts_operations = False
            counted["cpu_ms"] = _fastest(tally, lambda: serve(requests.reuse))
            with _without_arithmetic():
                python_ms = _fastest(tally, lambda: serve(requests.reuse))
            del python_ms["whole request"]
            python_ms["critical path"] = round(sum(python_ms.values()), 2)
            counted["python_ms"] = python_ms
            own["cpu_ms"] = _fastest(tally, lambda: serve(requests.reuse.prompt.token_ids))
    kept = ("engine_steps", "operations", "cpu_ms")
    return counted | {"own": {name: own[name] for name in kept}}


def _counted(tally: Tally, serve: Callable[[], object]) -> dict[str, Any]:
    tally.clear()
    serve()
    calls = tally.calls
    operations = tally.operations
    return {
        "engine_steps": {
            "all": calls["token step"] + calls["empty step"],
            "empty": calls["empty step"],
        },
        "operations": {
            "this package": operations["filling"],
            "vLLM": operations["token step"],
        },
        "layer_calls": calls["layer"],
        "attend_calls": calls["attend"],
        "block_writes": calls["block write"],
        "sql": dict(sorted(tally.sql.items())),
    }


def _fastest(tally: Tally, serve: Callable[[], object]) -> dict[str, float]:
    """Return the lowest CPU milliseconds of each phase."""
    lowest: dict[str, float] = {}
    for _ in range(_REPEATS):
        tally.clear()
        serve()
        spent = tally.cpu_ms
        inner = spent["begin"] + spent["layers"] + spent["end"]
        phases = {
            "planning": spent["planning"],
            "begin": spent["begin"],
            "layers": spent["layers"],
            "end": spent["end"],
            "rest of the filling": spent["filling"] - inner,
            "token step": spent["token step"],
            "whole request": spent["request"],
        }
        lowest = {name: min(ms, lowest.get(name, ms)) for name, ms in phases.items()}
    return {name: round(ms, 2) for name, ms in lowest.items()}


@contextlib.contextmanager
def _instrumented(tally: Tally) -> Iterator[None]:
    """Count the calls of vLLM's and this package's parts in the block."""
    from vllm import LLM
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    from cachecraft_rag.compute.row_pass import RowPass
    from cachecraft_rag.vllm.worker import working
    from cachecraft_rag.vllm.worker.connector import CacheCraftConnector
    from cachecraft_rag.vllm.worker.filling import Filling
    from cachecraft_rag.vllm.worker.stack import WorkerStack
    from cachecraft_rag.vllm.worker.working import Workers

    def forward(executor: Any, output: Any, *args: Any, **named: Any) -> Any:
        if not output.total_num_scheduled_tokens:
            tally.calls["empty step"] += 1
            return execute(executor, output, *args, **named)
        return tally.wrapped(execute, "token step", operations=True)(
            executor, output, *args, **named
        )

    execute = UniProcExecutor.execute_model
    backend = _attention_backend()
    wraps = [
        (LLM, "generate", "request", False),
        (CacheCraftConnector, "on_new_request", "planning", False),
        (CacheCraftConnector, "get_num_new_matched_tokens", "planning", False),
        (CacheCraftConnector, "start_load_kv", "filling", True),
        (Filling, "__init__", "begin", False),
        (working, "advance", "layers", False),
        (Workers, "_finish", "end", False),
        (WorkerStack, "layer", "layer", False),
        (RowPass, "attend", "attend", False),
    ]
    with contextlib.ExitStack() as patches:
        for owner, name, phase, operations in wraps:
            wrapped = tally.wrapped(getattr(owner, name), phase, operations=operations)
            patches.enter_context(patch.object(owner, name, _method(wrapped)))
        patches.enter_context(patch.object(UniProcExecutor, "execute_model", _method(forward)))
        write_blocks = WorkerStack.write_blocks

        def counted_writes(stack: Any, *args: Any) -> None:
            writes = tally.wrapped(backend.do_kv_cache_update, "block write")
            with patch.object(backend, "do_kv_cache_update", _method(writes)):
                write_blocks(stack, *args)

        patches.enter_context(patch.object(WorkerStack, "write_blocks", counted_writes))
        yield


@contextlib.contextmanager
def _without_arithmetic() -> Iterator[None]:
    """Replace what a GPU would compute for this package by functions that compute nothing."""
    from cachecraft_rag.compute import row_pass
    from cachecraft_rag.compute.kv_buffer import KVBuffer
    from cachecraft_rag.compute.stale_tokens import probe
    from cachecraft_rag.kernels.cpu import calls

    def attention(q: torch.Tensor, *_: Any, out: Any = None, **_named: Any) -> Any:
        return q if out is None else out

    def received(_q: Any, k: torch.Tensor, *_: Any, **_named: Any) -> torch.Tensor:
        return torch.linspace(0.0, 1.0, len(k))

    def nothing(*_: Any, **_named: Any) -> None:
        """Compute nothing."""

    replaced: list[tuple[Any, str, Any]] = [
        (row_pass, "attention", attention),
        (row_pass, "scatter_rows", nothing),
        (KVBuffer, "place", nothing),  # a GPU places all chunks and four layers in one launch
        (probe, "attention_received", received),
        (calls.Drift, "correct", nothing),
        (_attention_backend(), "do_kv_cache_update", nothing),
    ]
    with contextlib.ExitStack() as patches:
        for owner, name, function in replaced:
            patches.enter_context(patch.object(owner, name, function))
        yield


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a plain function, which a class binds to its objects."""

    def call(*args: Any, **named: Any) -> Any:
        return function(*args, **named)

    return call


def _attention_backend() -> Any:
    """Return the class whose `do_kv_cache_update` writes to the blocks on a CPU."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    return CPUAttentionBackendImpl


@contextlib.contextmanager
def _served(
    size: Size, folder: Path, tally: Tally, *, compiled: bool
) -> Iterator[Callable[[Ask | list[int]], dict[str, Any]]]:
    """Yield a function that serves one request for one token and returns its report ({} for a plain prompt)."""
    os.environ.update(ENVIRONMENT | {"TORCHDYNAMO_DISABLE": "0" if compiled else "1"})
    connect = sqlite3.connect

    def traced(*args: Any, **named: Any) -> sqlite3.Connection:
        connection = connect(*args, **named)
        connection.set_trace_callback(tally.statement)
        return connection

    model = save_tiny_llama(folder / "model", layers=size.layers)
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    served = VLLMModel.load(str(model), dtype="float32", options=VLLMOptions.from_values({}))
    config = EngineConfig(namespace=_NAMESPACE, store=StoreConfig(host_bytes=1 << 30))
    settings = ConnectorSettings(str(folder / "store"), served.identity, config, KEY)
    longest = size.tokens + 1024
    arguments: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": longest,
        "max_num_batched_tokens": longest,
        "enforce_eager": not compiled,
        "max_num_seqs": 8,
        "block_size": 32,
        "enable_prefix_caching": False,
        "seed": 0,
        "kv_transfer_config": settings.transfer_config(),
        "disable_log_stats": True,
    }
    with patch.object(sqlite3, "connect", traced):
        llm: Any = LLM(model=str(model), **(arguments | served.arguments))

    def serve(ask: Ask | list[int]) -> dict[str, Any]:
        prompt: dict[str, Any] = {"prompt_token_ids": ask}
        extra: dict[str, Any] | None = None
        if isinstance(ask, Ask):
            prompt = {
                "prompt_token_ids": ask.prompt.token_ids,
                "cache_salt": ask.cache_salt(_NAMESPACE),
            }
            extra = {"kv_transfer_params": {FIELD: ask.message(KEY)}}
        params = SamplingParams(max_tokens=1, temperature=0, detokenize=False, extra_args=extra)
        (output,) = llm.generate([prompt], [params], use_tqdm=False)
        report: dict[str, Any] = (output.kv_transfer_params or {}).get(FIELD, {})
        return report

    try:
        yield serve
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def save_tiny_llama(folder: Path, *, layers: int) -> Path:
    """Save a random Llama with this many layers, which computes little, and its tokenizer; return the folder."""
    import transformers

    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1 << 15,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    transformers.LlamaForCausalLM(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
