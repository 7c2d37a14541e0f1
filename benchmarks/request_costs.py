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
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.request_model import model
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.options import print_json
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.types.digests import digest
from cachecraft_rag.types.prompts import Prompt, Segment
from cachecraft_rag.vllm.messages import FIELD, Ask, Fill
from cachecraft_rag.vllm.worker.scheduling import Scheduling

KEY = "the key of the counts"
_SYSTEM_TOKENS = 32
_QUESTION_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Size:
    """Size of the counted request.

    tokens  about so many tokens of the prompt
    chunk   tokens of a chunk
    layers  layers of the model
    """

    tokens: int = 4232
    chunk: int = 512
    layers: int = 32

    @property
    def chunks(self) -> int:
        """Number of chunks, at least two."""
        return max(2, round((self.tokens - _SYSTEM_TOKENS - _QUESTION_TOKENS) / self.chunk))


@dataclass(frozen=True, slots=True)
class Requests:
    """The counted request, and the one that captures its chunks in another order first."""

    reuse: Ask
    capture: Ask

    @classmethod
    def of(cls, size: Size) -> Requests:
        """Return the requests of this size, with token ids below 256; the same ones each time."""
        generator = np.random.default_rng(0)

        def segment(kind: Any, tokens: int, number: int = 0) -> Segment:
            ids = tuple(generator.integers(0, 256, tokens).tolist())
            return Segment(kind, digest(kind, str(number)), ids, private=kind == "question")

        system = segment("system", _SYSTEM_TOKENS)
        chunks = [segment("chunk", size.chunk, number) for number in range(size.chunks)]
        question = segment("question", _QUESTION_TOKENS)
        config = ReuseConfig(recompute_ratio=0.15, capture=False, min_prompt_tokens=0)
        reuse = Ask(Prompt((system, *chunks, question)), config)
        moved = Prompt((system, *chunks[1:], chunks[0], question))
        capture = Ask(
            moved,
            ReuseConfig(reuse=False, capture=True, min_prompt_tokens=0),
            primed=True,
            captures=tuple(range(size.chunks + 1)),
            when_stored=True,
        )
        return cls(reuse, capture)


def fill_of(
    scheduling: Scheduling,
    message: dict[str, object],
    token_ids: list[int],
    *,
    block_size: int,
    name: str = "request",
) -> Fill:
    """Return the fill that the scheduler's side makes of a request of vLLM's with this message; blocks count from 0."""
    request: Any = SimpleNamespace(
        request_id=name,
        kv_transfer_params={FIELD: message},
        prompt_token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        prompt_embeds=None,
        mm_features=[],
        lora_request=None,
        skip_reading_prefix_cache=False,
        cache_salt=None,
        sampling_params=SimpleNamespace(prompt_logprobs=None),
        prefill_stats=None,
    )
    tokens = scheduling.matched(request, 0)
    assert tokens, "its chunks are stored"
    scheduling.allocated(request, tuple(range(-(-len(token_ids) // block_size))), tokens)
    (fill,) = scheduling.take_fills()
    return fill


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
