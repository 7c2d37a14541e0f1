"""Time of a prompt of which nothing is reused, against the same tokens in a vLLM without this package.

The prompt is left to vLLM, or its documents are new, so that they are captured. Both servers run on this machine at the
same time, and take turns. No block is in either prefix cache: each request has a new salt, or new documents.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from cachecraft_rag.store.catalog_records import RowFilter

# of a GPU's memory; both servers share it
_MEMORY = 0.4
# longest time between two captures that are stored, in seconds
_STORED_S = 1.0
_QUESTION = "Which of these parts wear out, and how often should each be replaced?"


def main(
    model: Annotated[str, typer.Option(help="Model to serve.")] = "demo",
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt, about.", min=1)] = 1500,
    pairs: Annotated[int, typer.Option(help="Pairs to time, after one that warms up.", min=1)] = 20,
    new_documents: Annotated[
        bool,
        typer.Option(help="Have new documents captured in place of leaving the prompt to vLLM."),
    ] = False,
) -> None:
    """Print the milliseconds of both sides to the first token, pair by pair, and the ratio of their minima."""
    ours = "new_documents" if new_documents else "left_to_vllm"
    with _servers(model) as (engine, plain):
        ask_ours, ask_plain = _requests(engine, plain, tokens, new_documents=new_documents)
        milliseconds = in_turn(
            {ours: ask_ours, "plain": ask_plain}, pairs, between=lambda: _wait_for_captures(engine)
        )
    ratio = min(milliseconds[ours]) / min(milliseconds["plain"])
    medians = {name: statistics.median(times) for name, times in milliseconds.items()}
    print(
        json.dumps(
            {
                "tokens": tokens,
                "milliseconds": milliseconds,
                "ratio_of_minima": ratio,
                "ratio_of_medians": medians[ours] / medians["plain"],
            }
        )
    )


def in_turn(
    sides: Mapping[str, Callable[[], object]],
    pairs: int,
    *,
    between: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Return the milliseconds of each call, side by side; each pair begins with another side than the one before it.

    One more pair warms up, and is not in the result. `between` is called after each call, and is not timed.
    """
    milliseconds: dict[str, list[float]] = {name: [] for name in sides}
    order = list(sides)
    for number in range(pairs + 1):
        for name in order:
            began = time.perf_counter()
            sides[name]()
            if number:
                milliseconds[name].append(1e3 * (time.perf_counter() - began))
            between()
        order.reverse()
    return milliseconds


def _wait_for_captures(engine: Any) -> None:
    """Wait until the worker has described and stored all captures, which takes cores from the other side."""
    count = -1
    while (stored := len(engine.store.rows(RowFilter()))) != count:
        count = stored
        time.sleep(_STORED_S)


@contextmanager
def _servers(model: str) -> Iterator[tuple[Any, Any]]:
    """Yield this package's engine over vLLM, and a vLLM without this package's connector."""
    from cachecraft_rag.vllm.calls import Serving
    from cachecraft_rag.vllm.engine import VLLMEngine

    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # GiB; otherwise vLLM would take nearly all of a CPU's memory
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
    engine: Any, plain: Any, tokens: int, *, new_documents: bool
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return two functions that ask for the first token of the same prompt, or of prompts of the same length."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from benchmarks.first_token import Shape, chunks_of
    from cachecraft_rag.planning.config import ReuseConfig
    from cachecraft_rag.serving.sampling import SamplingParams as Sampling
    from cachecraft_rag.types.documents import Chunk

    shape = Shape.of_prompt(tokens, longest=512)
    chunks = chunks_of(engine.decoder, count=shape.chunks, tokens=shape.chunk_tokens)
    config = ReuseConfig(min_prompt_tokens=0 if new_documents else 10 * tokens)

    def documents() -> list[Chunk]:
        number = secrets.token_hex(4)
        return [Chunk(f"{number} {chunk.text}") for chunk in chunks] if new_documents else chunks

    ids = engine.prompts.build(_QUESTION, documents(), reserve=1).token_ids

    def ask_ours() -> object:
        answer = engine.stream(
            _QUESTION,
            documents(),
            config=config,
            session=None if new_documents else secrets.token_hex(8),
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

    return ask_ours, ask_plain
