"""Whole requests to vLLM with random weights, with and without reuse: a part of `benchmarks.gpu`.

The prompts are as long as those of the other parts. Full prefill is vLLM's own, with its prefix cache switched off, so
that every request is computed. Chunk-caches are in page-locked host memory, because vLLM has the GPU's memory.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from cachecraft_rag.planning.config import ReuseConfig
    from cachecraft_rag.types.documents import Chunk
    from cachecraft_rag.vllm.engine import VLLMEngine


@dataclass(frozen=True)
class VLLMSetting:
    """What to measure.

    Attributes:
        shape: the model's sizes, fields of `LlamaConfig`.
        dtype: dtype of weights, keys and values, such as "bfloat16".
        lengths: prompts to measure, in tokens.
        chunk: tokens of a chunk, at most.
        share: part of the stored tokens that is recomputed.
        repeats: timings of each side; the median counts.
        eager: True to start vLLM without compiling and without CUDA graphs.
    """

    shape: Mapping[str, int]
    dtype: str
    lengths: Sequence[int]
    chunk: int
    share: float
    repeats: int
    eager: bool


def vllm_rows(setting: VLLMSetting, tokenizer: PreTrainedTokenizerFast) -> Iterator[dict[str, Any]]:
    """Start vLLM and yield a row for each prompt length; raises what vLLM and the engine raise."""
    from cachecraft_rag.vllm.engine import VLLMEngine

    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_PLUGINS", "cachecraft")
    # for vLLM's processes: without a GPU they have compiled kernels of their own
    os.environ.pop("TRITON_INTERPRET", None)
    with tempfile.TemporaryDirectory(prefix="cachecraft-bench-") as folder:
        model = Path(folder) / "model"
        write_checkpoint(model, setting, tokenizer)
        server = {
            "load_format": "dummy",
            "max_model_len": max(setting.lengths) + 1024,
            "enable_prefix_caching": False,
            "enforce_eager": setting.eager,
        }
        with VLLMEngine.from_pretrained(
            str(model),
            store=Path(folder) / "store",
            dtype=setting.dtype,
            server=server,
            host_bytes=16 << 30,
            queue_bytes=16 << 30,
            new_variants="off",
            best_last=False,
        ) as engine:
            for tokens in setting.lengths:
                yield _row(engine, setting, tokens)


def write_checkpoint(
    folder: Path, setting: VLLMSetting, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Write config and tokenizer, and weights of one number: vLLM makes random ones (`load_format="dummy"`)."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    config = LlamaConfig(
        **setting.shape,
        architectures=["LlamaForCausalLM"],
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
        dtype=setting.dtype,
        eos_token_id=tokenizer.eos_token_id,
    )
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file({"model.norm.weight": torch.ones(1)}, folder / "model.safetensors")


def _row(engine: VLLMEngine, setting: VLLMSetting, tokens: int) -> dict[str, Any]:
    from benchmarks.first_token import Shape, chunks_of
    from cachecraft_rag.planning.config import ReuseConfig
    from cachecraft_rag.types.prompts import Prompt

    # The instruction and the template alone are some 130 tokens of the byte tokenizer.
    shape = Shape.of_prompt(max(tokens, 200), longest=max(setting.chunk, 50))
    chunks = chunks_of(engine.decoder, count=shape.chunks, tokens=shape.chunk_tokens)
    # Captured in another order, so that no chunk keeps its place.
    moved = [engine.prompts.chunk_segment(chunk) for chunk in (*chunks[1:], chunks[0])]
    other = Prompt((engine.prompts.system, *moved))
    engine.capture(other, range(len(other.segments)), primed=True)

    sides = {
        "own": ReuseConfig(reuse=False, capture=False),
        "host": ReuseConfig(recompute_ratio=setting.share, capture=False),
        "all_recomputed": ReuseConfig(recompute_ratio=1.0, capture=False),
    }
    for config in sides.values():  # warms up, and fills the memory tier
        _ask(engine, chunks, config)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(setting.repeats):
        for name, config in sides.items():
            times[name].append(_ask(engine, chunks, config).ttft_s)
    medians = {name: statistics.median(values) for name, values in times.items()}
    stats = _ask(engine, chunks, sides["host"])
    outcomes = {chunk.outcome for chunk in stats.chunks}
    assert outcomes == {"reused"}, f"chunks were {', '.join(sorted(outcomes))}: {stats.chunks[0]}"
    config: Any = engine._serving.vllm_config
    return {
        "tokens": stats.tokens_prompt,
        "own_s": medians["own"],
        "ratio_host": medians["host"] / medians["own"],
        "ratio_all_recomputed": medians["all_recomputed"] / medians["own"],
        "token_ratio": (stats.tokens_recomputed + stats.tokens_computed) / stats.tokens_prompt,
        "tiers": "+".join(sorted({str(chunk.tier) for chunk in stats.chunks})),
        "runner": 2 if config.use_v2_model_runner else 1,
        "async_scheduling": config.scheduler_config.async_scheduling,
    }


def _ask(engine: VLLMEngine, chunks: Sequence[Chunk], config: ReuseConfig) -> Any:
    from benchmarks.first_token import QUESTION
    from cachecraft_rag.serving.sampling import SamplingParams

    generation = engine.stream(
        QUESTION, chunks, config=config, sampling=SamplingParams(max_new_tokens=1)
    )
    for _ in generation:
        pass
    return generation.stats
