"""Peak memory of one request against its floor: the model's weights, and the keys and values of the whole prompt.

Measured in a separate process, which reads every chunk-cache from the disk and keeps none in memory. What the process
takes apart from that (libraries, tokenizer) is measured after a first short pass, and left out.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from benchmarks.first_token import QUESTION, Shape, chunks_of
from cachecraft_rag.cli import options
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.options import print_json, waiting
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.config import Loading, ReuseConfig, ReuseMethod
from cachecraft_rag.serving.priming import Primer
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.documents import Chunk

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # see proc(5)


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes.

    request_bytes, full_bytes         a request with reuse, and one without: its peak beyond the loaded model
    process_bytes                     of the whole process, the model loaded and used once
    weights_bytes, merged_kv_bytes    of the model, and of the prompt's keys and values
    peak_over_floor, full_over_floor  (weights + the request's peak) / (weights + merged keys and values)
    """

    peak_over_floor: float
    full_over_floor: float
    request_bytes: int
    full_bytes: int
    process_bytes: int
    weights_bytes: int
    merged_kv_bytes: int
    prompt_tokens: int
    chunks: int
    model: str
    dtype: str


def run(
    model: str,
    shape: Shape,
    *,
    dtype: str = "auto",
    ratio: float = 0.15,
    loading: Loading = "layerwise",
) -> MemoryReport:
    """Measure one request with reuse and one without. Raises ConfigError where the system does not report a peak."""
    if not _CLEAR.exists():
        raise ConfigError(
            "peak memory can be measured on Linux only: it needs /proc/self/clear_refs"
        )
    with tempfile.TemporaryDirectory(prefix="cachecraft-memory-") as folder:
        given = (model, dtype, folder, shape)
        _alone(_prime, *given)
        reused = _alone(
            _request,
            *given,
            ReuseConfig(recompute_ratio=ratio, capture=False, method=ReuseMethod(loading=loading)),
        )
        full = _alone(_request, *given, ReuseConfig(reuse=False, capture=False))
    weights = reused["weights_bytes"]
    floor = weights + reused["merged_kv_bytes"]
    return MemoryReport(
        peak_over_floor=(weights + reused["request_bytes"]) / floor,
        full_over_floor=(weights + full["request_bytes"]) / floor,
        full_bytes=full["request_bytes"],
        chunks=shape.chunks,
        **reused,
    )


def _alone(act: Any, *given: Any) -> Any:
    """Call a function in a new process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(act, *given).result()


def _prepared(model: str, dtype: str, shape: Shape) -> tuple[Decoder, Sequence[Chunk]]:
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    decoder = Decoder.load(model, dtype=dtype)
    return decoder, chunks_of(decoder, count=shape.chunks, tokens=shape.chunk_tokens)


def _prime(model: str, dtype: str, folder: str, shape: Shape) -> None:
    decoder, chunks = _prepared(model, dtype, shape)
    with ChunkCacheStore.open(folder) as store, Engine(decoder, store) as engine:
        Primer(engine, window=decoder.context_length).prime([*chunks[1:], chunks[0]])


def _request(
    model: str, dtype: str, folder: str, shape: Shape, config: ReuseConfig
) -> dict[str, Any]:
    decoder, chunks = _prepared(model, dtype, shape)
    with (
        ChunkCacheStore.open(folder, host_bytes=0) as store,
        Engine(decoder, store, best_last=False, new_variants="off") as engine,
    ):
        decoder.own_logits([10] * 16)  # weights in a file are read when they are first used
        loaded = _kilobytes("VmRSS")
        _CLEAR.write_text(_RESET_PEAK)
        answer = engine.stream(
            QUESTION, chunks, config=config, sampling=SamplingParams(max_new_tokens=1)
        )
        for _ in answer:
            pass
        peak = _kilobytes("VmHWM")
    if config.reuse and not all(chunk.tier == "disk" for chunk in answer.stats.chunks):
        raise ConfigError(
            "not every chunk-cache came from the disk; choose fewer or shorter chunks"
        )
    tokens = answer.stats.tokens_prompt
    weights = {id(one): one.numel() * one.element_size() for one in decoder.model.parameters()}
    return {
        "request_bytes": (peak - loaded) * 1024,
        "process_bytes": loaded * 1024,
        "weights_bytes": sum(weights.values()),
        "merged_kv_bytes": decoder.layout.nbytes(tokens),
        "prompt_tokens": tokens,
        "model": decoder.name,
        "dtype": decoder.layout.dtype,
    }


def _kilobytes(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise ConfigError(f"{_STATUS} does not report {name}")


def main(
    model: options.Model = "demo",
    dtype: options.Dtype = "float32",
    tokens: Annotated[int, typer.Option("--tokens", min=64, help="Length of the prompt.")] = 2000,
    recompute_ratio: Annotated[
        float, typer.Option("--recompute-ratio", min=0.0, max=1.0, help="Recompute ratio.")
    ] = 0.15,
    loading: Annotated[
        Literal["layerwise", "cake", "whole"],
        typer.Option("--loading", help="Way of loading from the disk."),
    ] = "layerwise",
    as_json: options.Json = False,
) -> None:
    """Peak memory of a request, against the weights and the keys and values of its prompt. Linux only."""
    with waiting("Three processes load the model, one after the other"):
        report = run(
            model, Shape.of_prompt(tokens), dtype=dtype, ratio=recompute_ratio, loading=loading
        )
    if as_json:
        print_json(asdict(report))
        return
    table = Table("what", "memory")
    rows = {
        "weights": report.weights_bytes,
        "keys and values of the prompt": report.merged_kv_bytes,
        "a request with reuse, from disk": report.request_bytes,
        "a request without reuse": report.full_bytes,
        "the whole process before": report.process_bytes,
    }
    for name, nbytes in rows.items():
        table.add_row(name, options.megabytes(nbytes))
    out.print(table)
    out.print(
        f"{report.peak_over_floor:.2f} × (weights + keys and values) with reuse, {report.full_over_floor:.2f} × "
        f"without; {report.prompt_tokens} tokens, {report.chunks} chunks; {report.model}, {report.dtype}"
    )
