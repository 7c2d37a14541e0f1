"""Time of a prompt that this package leaves to vLLM, against the same tokens in a vLLM without this package.

Both servers run on this machine at the same time, and take turns. No block is in either prefix cache: each request has
a new salt.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer

# of a GPU's memory; both servers share it
_MEMORY = 0.4
_QUESTION = "Which of these parts wear out, and how often should each be replaced?"


def main(
    model: Annotated[str, typer.Option(help="Model to serve.")] = "demo",
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt, about.", min=1)] = 1500,
    pairs: Annotated[int, typer.Option(help="Pairs to time, after one that warms up.", min=1)] = 20,
) -> None:
    """Print the milliseconds of both sides to the first token, pair by pair, and the ratio of their minima."""
    with _servers(model) as (engine, plain):
        ask_left, ask_plain = _requests(engine, plain, tokens)
        milliseconds = in_turn({"left_to_vllm": ask_left, "plain": ask_plain}, pairs)
    ratio = min(milliseconds["left_to_vllm"]) / min(milliseconds["plain"])
    print(json.dumps({"tokens": tokens, "milliseconds": milliseconds, "ratio_of_minima": ratio}))


def in_turn(sides: Mapping[str, Callable[[], object]], pairs: int) -> dict[str, list[float]]:
    """Return the milliseconds of each call, side by side; each pair begins with another side than the one before it.

    One more pair warms up, and is not in the result.
    """
    milliseconds: dict[str, list[float]] = {name: [] for name in sides}
    order = list(sides)
    for number in range(pairs + 1):
        for name in order:
            began = time.perf_counter()
            sides[name]()
            if number:
                milliseconds[name].append(1e3 * (time.perf_counter() - began))
        order.reverse()
    return milliseconds


@contextmanager
def _servers(model: str) -> Iterator[tuple[Any, Any]]:
    """Yield this package's engine over vLLM, and a vLLM without this package's connector."""
    from cachecraft_rag.vllm.calls import Serving
    from cachecraft_rag.vllm.engine import VLLMEngine

    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # GiB; by itself vLLM would take nearly all of a CPU's memory
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    memory = {"gpu_memory_utilization": _MEMORY}
    with (
        tempfile.TemporaryDirectory(prefix="cachecraft-bench-") as folder,
        VLLMEngine.from_pretrained(
            model, store=folder, new_variants="off", server=memory
        ) as engine,
    ):
        served = engine.decoder
        arguments = {
            "model": str(served.folder),
            "dtype": served.layout.dtype,
            "max_model_len": served.context_length,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            **memory,
        }
        plain = Serving(arguments | served.arguments)
        try:
            yield engine, plain
        finally:
            plain.close()


def _requests(
    engine: Any, plain: Any, tokens: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return two functions that ask for the first token of the same prompt."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from benchmarks.first_token import Shape, chunks_of
    from cachecraft_rag.planning.config import ReuseConfig
    from cachecraft_rag.serving.sampling import SamplingParams as Sampling

    shape = Shape.of_prompt(tokens, longest=512)
    chunks = chunks_of(engine.decoder, count=shape.chunks, tokens=shape.chunk_tokens)
    config = ReuseConfig(min_prompt_tokens=10 * tokens)
    ids = engine.prompts.build(_QUESTION, chunks, reserve=1).token_ids

    def ask_left() -> object:
        answer = engine.stream(
            _QUESTION,
            chunks,
            config=config,
            session=secrets.token_hex(8),
            sampling=Sampling(max_new_tokens=1),
        )
        return list(answer)

    def ask_plain() -> object:
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": ids, "cache_salt": secrets.token_hex(8)}
        return list(plain.generate(prompt, params))

    return ask_left, ask_plain
