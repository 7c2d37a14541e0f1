"""Where a request's time goes on a GPU: parts of `benchmarks.gpu` that measure one thing each.

Each part yields rows. On a CPU, with a toy model, all of them run as on a GPU, except that nothing is recorded as a
CUDA graph.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gpu import (
    TINY,
    Setting,
    Tiers,
    decoder_of,
    first_logits,
    job_of,
    prompt,
    requests,
    seconds,
    series,
)

TILE = 128  # rows of a tile of the largest products and of attention
SMALL = {
    "Qwen2.5-0.5B": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "Qwen2.5-1.5B": {
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
}
_BLOCK = 16
_GROUP = 4  # layers that a request copies and places together


def recorded(setting: Setting, run: Callable[[], object]) -> Callable[[], object]:
    """Return a function that replays what `run` launches, as a CUDA graph; on a CPU `run` itself."""
    if not setting.on_gpu:
        return run
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def graph_s(setting: Setting, run: Callable[[], object]) -> float | str:
    """Return the fastest seconds of `run` as a CUDA graph, or why it cannot be recorded."""
    try:
        return seconds(setting, recorded(setting, run), calls=_calls(setting))
    # whatever torch or Triton raises: the launches are measured nevertheless
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {str(error).splitlines()[:1]}"


def _calls(setting: Setting) -> int:
    return 10 if setting.on_gpu else 1


def _kind(setting: Setting) -> dict[str, Any]:
    return {"dtype": getattr(torch, setting.dtype), "device": setting.device}


def _heads(setting: Setting) -> tuple[int, int, int]:
    """Return the numbers of heads and key/value heads, and the dimensions of a head."""
    heads = setting.shape["num_attention_heads"]
    head_dim = setting.shape["hidden_size"] // heads
    return heads, setting.shape["num_key_value_heads"], head_dim


# -- ceilings ---------------------------------------------------------------------------------------------------------


def ceilings(setting: Setting) -> Iterator[dict[str, Any]]:
    """Yield what the machine can do: products of as many rows as occur, copies on the device, launches."""
    for rows in row_counts(setting):
        yield {
            "ceiling": f"product of {rows} rows, TFLOP/s",
            "reached": product_rate(setting, rows),
        }
    nbytes = (256 << 20) if setting.on_gpu else 1 << 16
    source = torch.zeros(nbytes, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    copying_s = seconds(setting, lambda: target.copy_(source), calls=_calls(setting))
    yield {
        "ceiling": "copy on the device, GB/s read and written",
        "reached": 2e-9 * nbytes / copying_s,
    }
    number = torch.zeros(1, device=setting.device)

    def launch_hundred() -> None:
        for _ in range(100):
            number.add_(1)

    yield {"ceiling": "a launch, µs", "reached": 1e4 * seconds(setting, launch_hundred)}
    replayed = graph_s(setting, launch_hundred)
    reached = replayed if isinstance(replayed, str) else 1e4 * replayed
    yield {"ceiling": "a launch in a graph, µs", "reached": reached}


def row_counts(setting: Setting) -> list[int]:
    """Return the numbers of rows that forward passes of this setting have, each also as whole tiles."""
    counts = {1, setting.question}
    for tokens in setting.lengths:
        rows = len(job_of(setting, tokens, setting.share).rows.open())
        counts |= {rows, -(-rows // TILE) * TILE, tokens}
    return sorted(counts)


def product_rate(setting: Setting, rows: int) -> float:
    """Return the TFLOP/s of these rows times a layer's largest weights."""
    width = setting.shape["hidden_size"]
    weights = torch.randn(2 * setting.shape["intermediate_size"], width, **_kind(setting))
    hidden = torch.randn(rows, width, **_kind(setting))
    spent = seconds(
        setting, lambda: torch.nn.functional.linear(hidden, weights), calls=_calls(setting)
    )
    return 2e-12 * rows * weights.numel() / spent


# -- attention and copies ---------------------------------------------------------------------------------------------


def row_sets(setting: Setting, tokens: int) -> Mapping[str, NDArray[np.int64]]:
    """Return positions of rows that passes have: the probe's, a pass's, the same in whole tiles and in runs, all."""
    chosen = np.asarray(job_of(setting, tokens, setting.share).rows.open(), np.int64)
    others = np.setdiff1d(np.arange(tokens), chosen)
    missing = min(-len(chosen) % TILE, len(others))
    filled = np.sort(np.concatenate([chosen, others[:missing]]))
    runs = np.arange(tokens).reshape(-1, _BLOCK) if tokens % _BLOCK == 0 else None
    sets = {"question": np.arange(tokens - setting.question, tokens), "pass": chosen}
    sets["pass in whole tiles"] = filled
    if runs is not None:
        every = max(1, len(runs) * _BLOCK // len(chosen))
        sets["runs of 16"] = runs[::every].flatten()
    sets["everything"] = np.arange(tokens)
    return sets


def attention_sets(setting: Setting) -> Iterator[dict[str, Any]]:
    """Yield a row for each length and row set: attention as launches and as a graph."""
    from cachecraft_rag.kernels.attention import attention
    from cachecraft_rag.kernels.visibility import Visibility

    heads, kv_heads, head_dim = _heads(setting)
    for tokens in setting.lengths:
        k, v = (torch.randn(tokens, kv_heads, head_dim, **_kind(setting)) for _ in range(2))
        for name, positions in row_sets(setting, tokens).items():
            q = torch.randn(len(positions), heads, head_dim, **_kind(setting))
            visible = Visibility(torch.from_numpy(positions).to(setting.device))

            def attend(q: Any = q, k: Any = k, v: Any = v, visible: Any = visible) -> Any:
                return attention(q, k, v, visible, scale=head_dim**-0.5)

            launched_s = seconds(setting, attend, calls=_calls(setting))
            work = 4e-12 * heads * head_dim * float((positions + 1).sum())
            replayed = graph_s(setting, attend)
            yield {
                "tokens": tokens,
                "row_set": name,
                "rows": len(positions),
                "launched_us": 1e6 * launched_s,
                "graph_us": replayed if isinstance(replayed, str) else 1e6 * replayed,
                "tflops": work / launched_s,
            }


def copies(setting: Setting) -> Iterator[dict[str, Any]]:
    """Yield a row for each length and way to copy or place all chunk-caches of a prompt."""
    for tokens in setting.lengths:
        if len(prompt(setting, tokens)[1]) < 4:  # so short that it has no chunk
            continue
        ways, nbytes = _moves(setting, tokens)
        for name, move in ways.items():
            spent = seconds(setting, move)
            yield {
                "tokens": tokens,
                "way": name,
                "ms": 1e3 * spent,
                "gb_per_s": 1e-9 * nbytes / spent,
            }


def _moves(setting: Setting, tokens: int) -> tuple[dict[str, Callable[[], object]], int]:
    """Return the ways to copy and to place the chunk-caches of a prompt, and their bytes."""
    from cachecraft_rag.kernels.placing import place_all

    _, kv_heads, head_dim = _heads(setting)
    layers = setting.shape["num_hidden_layers"]
    starts = prompt(setting, tokens)[1][1:-2]
    shape = (layers, 2, setting.chunk, kv_heads, head_dim)
    pageable = [torch.zeros(shape, dtype=getattr(torch, setting.dtype)) for _ in starts]
    pinned = [chunk.pin_memory() for chunk in pageable] if setting.on_gpu else pageable
    there = [torch.zeros(shape, **_kind(setting)) for _ in starts]
    merged = torch.zeros(layers, 2, tokens, kv_heads, head_dim, **_kind(setting))
    cos, sin = (torch.zeros(tokens, head_dim, **_kind(setting)) for _ in range(2))
    every = range(layers)
    groups = [slice(first, first + _GROUP) for first in range(0, layers, _GROUP)]

    def copy_each(sources: Sequence[Any]) -> None:
        for target, source in zip(there, sources, strict=True):
            target.copy_(source, non_blocking=True)

    def copy_groups() -> None:
        for group in groups:
            targets = [chunk[group] for chunk in there]
            torch._foreach_copy_(targets, [chunk[group] for chunk in pinned], non_blocking=True)

    def place_each() -> None:
        for chunk, start in zip(there, starts, strict=True):
            place_all(merged, [chunk], [start], cos=cos, sin=sin, layers=every)

    def place_groups() -> None:
        for group in groups:
            chunks = [chunk[group] for chunk in there]
            layers_there = range(len(merged[group]))
            place_all(merged[group], chunks, starts, cos=cos, sin=sin, layers=layers_there)

    ways: dict[str, Callable[[], object]] = {
        "copy, pageable, chunk by chunk": lambda: copy_each(pageable),
        "copy, page-locked, chunk by chunk": lambda: copy_each(pinned),
        "copy, page-locked, four layers of all chunks": copy_groups,
        "place, chunk by chunk": place_each,
        "place, four layers of all chunks": place_groups,
        "place, everything at once": partial(
            place_all, merged, there, starts, cos=cos, sin=sin, layers=every
        ),
    }
    return ways, sum(chunk.nbytes for chunk in there)


# -- passes -----------------------------------------------------------------------------------------------------------


def passes(setting: Setting, decoder: Any, tokens: int) -> dict[str, Any]:
    """Return milliseconds of prefills through all layers: own, and with chunk-caches on the device, in each variant."""
    job = job_of(setting, tokens, setting.share)
    with tempfile.TemporaryDirectory() as folder:
        tiers = Tiers(setting, decoder, tokens, Path(folder))
        on_device, on_host = tiers.resident("device"), tiers.resident("host")
    variants: dict[str, tuple[Any, Callable[[], list[Any]]]] = {
        "pass": (job, on_device),
        "pass_without_drift": (replace(job, drift=0.0), on_device),
        "pass_from_host": (job, on_host),
        "probe_and_pass": (replace(job, probe=_probe(job)), on_device),
        "question_only": (replace(job_of(setting, tokens, 0.0), drift=0.0), on_device),
    }
    row: dict[str, Any] = {"tokens": tokens, "rows": len(job.rows.open())}
    times = {"own": series(setting, lambda: decoder.own_logits(job.token_ids))}
    for name, (variant, chunks) in variants.items():
        times[name] = series(
            setting,
            lambda variant=variant, chunks=chunks: first_logits(  # type: ignore[misc]
                decoder, replace(variant, resident=chunks())
            ),
        )
    return row | _in_ms(times)


def _probe(job: Any) -> Any:
    """Return a probe's request that keeps the selection of the job, whatever the probe sees."""
    from cachecraft_rag.compute.job import ProbeRequest
    from cachecraft_rag.compute.rows import RowReason

    plan = {
        segment: SimpleNamespace(recompute=job.rows.offsets(segment, RowReason.RECOMPUTED))
        for segment in job.reused
    }
    bounds = job.rows.bounds
    choose: Any = lambda *_seen: plan  # noqa: E731
    return ProbeRequest(range(bounds[-2], bounds[-1]), choose)


def new_documents(setting: Setting, decoder: Any, tokens: int) -> dict[str, Any]:
    """Return milliseconds of prefills of new chunks: own, computed here, and computed here and captured."""
    from cachecraft_rag.compute.job import PrefillJob
    from cachecraft_rag.compute.rows import Rows

    ids, bounds = prompt(setting, tokens)
    computed = PrefillJob(ids, Rows.of(bounds, new=range(tokens)))
    captured = replace(computed, captures=range(len(bounds) - 2))
    times = {
        "own": series(setting, lambda: decoder.own_logits(ids)),
        "computed": series(setting, lambda: first_logits(decoder, computed)),
        "captured": series(setting, lambda: first_logits(decoder, captured)),
    }
    return {"tokens": tokens} | _in_ms(times)


def _in_ms(times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the fastest milliseconds of each series, ratios to `own`, and the series."""
    fastest = {name: min(values) for name, values in times.items()}
    ratios = {
        f"ratio_{name}": spent / fastest["own"] for name, spent in fastest.items() if name != "own"
    }
    in_ms = {f"{name}_ms": 1e3 * spent for name, spent in fastest.items()}
    kept = {name: [round(1e3 * spent, 2) for spent in values] for name, values in times.items()}
    return in_ms | ratios | {"series_ms": kept}


def small_models(setting: Setting) -> Iterator[dict[str, Any]]:
    """Yield whole requests to small models, of prompts of 1,024 and 2,048 tokens."""
    shapes = SMALL if setting.on_gpu else {"toy": TINY}
    for name, shape in shapes.items():
        small = replace(setting, shape=shape, chunk=setting.chunk // 2)
        decoder = decoder_of(small)
        for tokens in (1024, 2048) if setting.on_gpu else (200,):
            yield {"model": name} | requests(small, decoder, tokens)


# -- the connector's side ---------------------------------------------------------------------------------------------


class PagedStack:
    """A model's layers over a cache of blocks, written layer by layer, in place of a `WorkerStack`."""

    whole_model = None

    def __init__(self, decoder: Any, tokens: int) -> None:
        """Make blocks for a prompt of so many tokens."""
        from cachecraft_rag.vllm.worker.ranks import OneRank

        self._decoder = decoder
        self.ranks = OneRank()
        self._slots = torch.zeros(
            decoder.layout.shape(tokens), dtype=decoder.dtype, device=decoder.device
        )

    def __getattr__(self, name: str) -> Any:
        """Return what the model has."""
        return getattr(self._decoder, name)

    def write_blocks(self, kv: Any, slots: Any, first: int) -> None:
        """Copy a finished buffer into the blocks, see `WorkerStack.write_blocks`."""
        for layer, computed in zip(self._slots, kv, strict=True):
            layer.index_copy_(1, slots, computed[:, first : first + len(slots)])


@contextmanager
def served(setting: Setting, decoder: Any, tokens: int) -> Iterator[Callable[[int], float]]:
    """Yield a function that serves request number n through the connector's two sides: the seconds of planning.

    Chunk-caches are in host memory, page-locked on a GPU.
    """
    from benchmarks.served_prompt import KEY, Requests, Size, fill_of, serve, store_chunks
    from cachecraft_rag.store import ChunkCacheStore
    from cachecraft_rag.vllm.served_model import ModelIdentity
    from cachecraft_rag.vllm.settings import ConnectorSettings
    from cachecraft_rag.vllm.worker.scheduling import Scheduling
    from cachecraft_rag.vllm.worker.working import Workers

    asked = Requests.of(Size(tokens, setting.chunk, decoder.layout.layers))
    ids = asked.reuse.prompt.token_ids
    where = {"device": str(decoder.device), "device_bytes": 0} if setting.on_gpu else {}
    stack: Any = PagedStack(decoder, len(ids) + _BLOCK)
    with (
        tempfile.TemporaryDirectory(prefix="cachecraft-bench-") as folder,
        ChunkCacheStore.open(folder, host_bytes=16 << 30, **where) as store,
    ):
        identity = ModelIdentity(decoder.fingerprint, decoder.layout, 1 << 20)
        settings = ConnectorSettings(folder, identity, key=KEY)
        store_chunks(store, settings, asked.capture)
        scheduling = Scheduling(store, settings, block_size=_BLOCK, prefix_caching=False)
        workers = Workers(stack, store, settings, block_size=_BLOCK)

        def serve_one(number: int) -> float:
            name = f"request-{number}"
            began = time.perf_counter()
            message = asked.reuse.message(KEY)
            fill = fill_of(scheduling, message, ids, block_size=_BLOCK, name=name)
            planned_s = time.perf_counter() - began
            serve(workers, fill)
            scheduling.ended({name})
            if setting.on_gpu:
                torch.cuda.synchronize()
            return planned_s

        try:
            yield serve_one
        finally:
            workers.close()


def steps(setting: Setting, decoder: Any, tokens: int) -> dict[str, Any]:
    """Return milliseconds of requests in a row through the connector: planning, and until their blocks are written."""
    count = 40 if setting.on_gpu else 2
    planning: list[float] = []
    whole: list[float] = []
    with served(setting, decoder, tokens) as serve_one:
        for number in range(count):
            began = time.perf_counter()
            planning.append(1e3 * serve_one(number))
            whole.append(1e3 * (time.perf_counter() - began))
    return {
        "tokens": tokens,
        "requests": count,
        "first_ms": whole[0],
        "second_ms": whole[1],
        "fastest_ms": min(whole),
        "median_ms": statistics.median(whole),
        "planning_ms": min(planning),
        "series_ms": {"request": [round(spent, 2) for spent in whole]},
    }


def traces(
    setting: Setting, decoder: Any, tokens: int, folder: Path | None
) -> Iterator[dict[str, Any]]:
    """Yield a row for each trace written: of one prefill with reuse, and of one request through the connector."""
    with tempfile.TemporaryDirectory() as temporary:
        there = folder or Path(temporary)
        job = job_of(setting, tokens, setting.share)
        chunks = Tiers(setting, decoder, tokens, Path(temporary)).resident("device")
        prefill = lambda: first_logits(decoder, replace(job, resident=chunks()))  # noqa: E731
        yield _traced(setting, prefill, there / "trace-prefill.json.gz")
        with served(setting, decoder, tokens) as serve_one:
            for number in range(2):  # warm up
                serve_one(number)
            yield _traced(setting, lambda: serve_one(2), there / "trace-request.json.gz")


def _traced(setting: Setting, run: Callable[[], object], file: Path) -> dict[str, Any]:
    """Write a trace that chrome://tracing and Perfetto show."""
    from torch.profiler import ProfilerActivity, profile

    run()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.on_gpu else [])]
    began = time.perf_counter()
    with profile(activities=kinds) as recorded_run:
        run()
        if setting.on_gpu:
            torch.cuda.synchronize()
    spent = time.perf_counter() - began
    recorded_run.export_chrome_trace(str(file))
    return {"trace": file.name, "profiled_ms": 1e3 * spent, "bytes": file.stat().st_size}
