"""Whole requests to vLLM with random weights, with and without reuse: a part of `benchmarks.gpu`.

Full prefill is vLLM's own, with its prefix cache switched off, so that every request is computed. Chunk-caches are in
page-locked host memory, because vLLM has the GPU's memory.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.gpu import Setting
    from cachecraft_rag.observability.stats import RequestStats
    from cachecraft_rag.planning.config import ReuseConfig
    from cachecraft_rag.types.documents import Chunk
    from cachecraft_rag.vllm.engine import VLLMEngine


@contextmanager
def started(setting: Setting, *, eager: bool) -> Iterator[VLLMEngine]:
    """vLLM with a model of this shape, for the block.

    Args:
        setting: the model's shape and dtype, and the longest prompt.
        eager: True to start vLLM without compiling and without CUDA graphs.
    """
    from cachecraft_rag.engine.config import EngineConfig
    from cachecraft_rag.vllm.engine import VLLMEngine

    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_PLUGINS", "cachecraft")
    # For vLLM's processes: on a CPU they have kernels in C, and Triton's interpreter would take minutes.
    os.environ.pop("TRITON_INTERPRET", None)
    server = {
        "load_format": "dummy",
        "max_model_len": max(setting.lengths) + 1024,
        "enable_prefix_caching": False,
        "enforce_eager": eager,
    }
    with tempfile.TemporaryDirectory(prefix="cachecraft-bench-") as folder:
        model = Path(folder) / "model"
        write_checkpoint(model, setting)
        with VLLMEngine.from_pretrained(
            str(model),
            store=Path(folder) / "store",
            dtype=setting.dtype,
            server=server,
            config=EngineConfig().with_tuning(queue_bytes=16 << 30),
            host_bytes=16 << 30,
            new_variants="off",
            best_last=False,
        ) as engine:
            yield engine


def write_checkpoint(folder: Path, setting: Setting) -> None:
    """Write config, tokenizer, and weights of one number: vLLM makes random ones (`load_format="dummy"`)."""
    import torch
    from safetensors.torch import save_file

    from benchmarks.gpu import byte_tokenizer, config_of

    tokenizer = byte_tokenizer()
    config = config_of(
        setting.shape,
        architectures=["LlamaForCausalLM"],
        dtype=setting.dtype,
        eos_token_id=tokenizer.eos_token_id,
    )
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file({"model.norm.weight": torch.ones(1)}, folder / "model.safetensors")


_PAIRS = 10  # fewest timings of each side at each length


def requests(setting: Setting, engine: VLLMEngine, tokens: int) -> dict[str, Any]:
    """Seconds to the first token of a prompt of about so many tokens, and the series of all timings.

    Timed in turns: vLLM's own prefill; reuse with chunk-caches in host memory; and the same with every token recomputed
    (`recompute_ratio` 1: it loads, probes and corrects too). Timed after these, because captures of one prompt are
    stored during the next: prompts of new chunks. Ratios compare the fastest times, which one-off costs of the first
    requests do not raise.
    """
    from benchmarks.first_token import Shape, chunks_of
    from cachecraft_rag.planning.config import ReuseConfig
    from cachecraft_rag.types.prompts import Prompt

    shape = Shape.of_prompt(tokens, longest=max(setting.chunk, 50))
    chunks = chunks_of(engine.decoder, count=shape.chunks, tokens=shape.chunk_tokens)
    # captured in another order, so that no chunk keeps its place
    moved = [engine.prompts.chunk_segment(chunk) for chunk in (*chunks[1:], chunks[0])]
    other = Prompt((engine.prompts.system, *moved))
    engine.capture(other, range(len(other.segments)), primed=True)

    reuse = ReuseConfig(recompute_ratio=setting.share, capture=False, min_prompt_tokens=0)
    whole = ReuseConfig(recompute_ratio=1.0, capture=False, min_prompt_tokens=0)
    capturing = ReuseConfig(recompute_ratio=setting.share, min_prompt_tokens=0)
    fresh = _new_chunks(engine.decoder, shape.chunks, shape.chunk_tokens)
    sides: dict[str, Callable[[], RequestStats]] = {
        "own": lambda: _ask(engine, chunks, ReuseConfig.full_prefill()),
        "host": lambda: _ask(engine, chunks, reuse),
        "recompute_ratio_1": lambda: _ask(engine, chunks, whole),
    }
    new_chunks = {"new_chunks": lambda: _ask(engine, next(fresh), capturing)}
    series: dict[str, list[float]] = {name: [] for name in (*sides, *new_chunks)}
    last: dict[str, RequestStats] = {}
    for group in (sides, new_chunks):
        for _ in range(max(_PAIRS, setting.repeats)):
            for name, side in group.items():
                last[name] = side()
                series[name].append(last[name].ttft_s)
    stats = last["host"]
    outcomes = {chunk.outcome for chunk in stats.chunks}
    assert outcomes == {"reused"}, f"chunks were {', '.join(sorted(outcomes))}: {stats.chunks[0]}"
    assert {chunk.outcome for chunk in last["new_chunks"].chunks} == {"computed"}
    fastest = {name: min(values) for name, values in series.items()}
    running: Any = engine._serving.vllm_config
    return {
        "tokens": stats.tokens_prompt,
        "own_s": fastest["own"],
        "plan_s": stats.plan_s,
        "prefill_s": stats.prefill_s,
        **{f"ratio_{name}": fastest[name] / fastest["own"] for name in list(series)[1:]},
        "token_ratio": (stats.tokens_recomputed + stats.tokens_computed) / stats.tokens_prompt,
        "tiers": "+".join(sorted({str(chunk.tier) for chunk in stats.chunks})),
        "measured_min_prompt_tokens": engine.min_prompt_tokens,
        "runner": 2 if running.use_v2_model_runner else 1,
        "async_scheduling": running.scheduler_config.async_scheduling,
        "series_ms": {
            name: [round(1e3 * seconds, 2) for seconds in values] for name, values in series.items()
        },
    }


def _new_chunks(model: Any, count: int, tokens: int) -> Iterator[list[Chunk]]:
    """Yield chunks of the same number of tokens that no prompt had before."""
    from benchmarks.first_token import chunks_of
    from cachecraft_rag.types.documents import Chunk

    texts = [chunk.text for chunk in chunks_of(model, count=count, tokens=tokens)]
    number = 0
    while True:
        number += 1
        label = f"{number:06d} "
        yield [Chunk(label + text[len(label) :]) for text in texts]


def _ask(engine: VLLMEngine, chunks: Sequence[Chunk], config: ReuseConfig) -> RequestStats:
    from benchmarks.first_token import QUESTION
    from cachecraft_rag.serving.sampling import SamplingParams

    answer = engine.stream(
        QUESTION, chunks, config=config, sampling=SamplingParams(max_new_tokens=1)
    )
    for _ in answer:
        pass
    return answer.stats
