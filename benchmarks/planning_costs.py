"""CPU time that this package plans for one request, from the question to the first row, phase by phase.

The layers, the weights and vLLM are left out: the model is tiny, and the scheduler's request is played. What remains is
Python over tokens. Chunk-caches are in memory, and every chunk is reused in a new context.
"""

from __future__ import annotations

import json
import random
import string
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.types.prompts import Prompt

if TYPE_CHECKING:
    from cachecraft_rag.engine.engine import Engine
    from cachecraft_rag.vllm.messages import Fill
    from cachecraft_rag.vllm.worker.filling import Filling

LENGTHS = (4096, 8192, 16384)  # tokens of the prompts

_KEY = "the benchmark's key"
_CHUNK_TOKENS = 512
_LAYERS = 4
_RATIO = 0.15
_QUESTION = "Which of these parts wear out, and how often should each be replaced?"


@dataclass(frozen=True)
class PlanningTimes:
    """CPU milliseconds of the thread that works, by phase of one request.

    tokens   number of tokens of the prompt
    prompt   question and chunks become a prompt
    message  the prompt becomes a signed message
    schedule the message is read, its chunks are looked up, and a first plan is made
    fill     the plan with its rows, and the prefill up to its first step
    begin    the rows of the probe are set up, and one layer of the chunk-caches is placed
    again    the plan after the probe, and the rows of the last pass
    """

    tokens: int
    prompt: float
    message: float
    schedule: float
    fill: float
    begin: float
    again: float

    @property
    def total(self) -> float:
        """Sum of all phases, in milliseconds."""
        return self.prompt + self.message + self.schedule + self.fill + self.begin + self.again


def planning_times(tokens: int, *, repeats: int = 20) -> PlanningTimes:
    """Return the least CPU time of each phase over several requests of this length, after one that warms up."""
    with ExitStack() as stack:
        engine = stack.enter_context(_engine(tokens))
        chunks = _chunks(tokens)
        _capture_elsewhere(engine, chunks)
        requests = [_Measured(engine, chunks) for _ in range(repeats + 1)]
        measured = [request.run() for request in requests][1:]
    best = [min(phase) for phase in zip(*measured, strict=True)]
    return PlanningTimes(requests[0].tokens, *best)


def main(
    repeats: Annotated[int, typer.Option(help="Requests of each length.", min=1)] = 20,
) -> None:
    """Print the milliseconds of each phase for prompts of 4,096, 8,192 and 16,384 tokens, a line of JSON each."""
    for tokens in LENGTHS:
        times = planning_times(tokens, repeats=repeats)
        print(json.dumps(asdict(times) | {"total": times.total}), flush=True)


class _Measured:
    """One request, whose phases are timed one after the other."""

    def __init__(self, engine: Engine, chunks: list[Chunk]) -> None:
        self._engine = engine
        self._chunks = chunks
        self._stack: Any = _StackWithTable(engine.decoder, tokens=20_000)
        self.tokens = 0

    def run(self) -> list[float]:
        """Return the CPU milliseconds of the phases, in the order of `PlanningTimes`."""
        prompt_ms, prompt = _timed(self._prompt)
        self.tokens = prompt.bounds[-1]
        ask = self._ask(prompt)
        message_ms, message = _timed(lambda: ask.message(_KEY))
        token_ids = list(prompt.token_ids)
        schedule_ms, fill = _timed(lambda: self._fill(message, token_ids))
        fill_ms, filling = _timed(lambda: self._filling(fill))
        begin_ms, _ = _timed(filling.go_on)
        again_ms = _again_ms(filling, self._stack)
        filling.give_up()
        return [prompt_ms, message_ms, schedule_ms, fill_ms, begin_ms, again_ms]

    def _prompt(self) -> Prompt:
        return self._engine.prompts.build(_QUESTION, self._chunks, reserve=1)

    def _ask(self, prompt: Prompt) -> Any:
        from cachecraft_rag.planning.config import ReuseConfig
        from cachecraft_rag.vllm.messages import Ask

        config = ReuseConfig(recompute_ratio=_RATIO, capture=False, min_prompt_tokens=0)
        return Ask(prompt, config)

    def _fill(self, message: dict[str, object], token_ids: list[int]) -> Fill:
        from benchmarks.served_prompt import fill_of
        from cachecraft_rag.vllm.worker.scheduling import Scheduling

        scheduling = Scheduling(
            self._engine.store, _settings(self._engine), block_size=16, prefix_caching=False
        )
        return fill_of(scheduling, message, token_ids, block_size=16)

    def _filling(self, fill: Fill) -> Filling:
        from cachecraft_rag.compute.balance.speed import ComputeSpeed
        from cachecraft_rag.store.loading.loader import Loader
        from cachecraft_rag.vllm.worker.filling import Filling

        return Filling(
            fill,
            stack=self._stack,
            store=self._engine.store,
            loader=Loader(self._engine.store, _LAYERS),
            speed=ComputeSpeed(self._stack.keys_per_row),
        )


class _StackWithTable:
    """A decoder that has cos and sin of all positions in a table, as vLLM's models have."""

    def __init__(self, decoder: Any, *, tokens: int) -> None:
        import torch

        self._decoder = decoder
        self._table = decoder.rope(torch.arange(tokens), 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def rope(self, positions: Any, kind: int = 0) -> tuple[Any, Any]:
        """Return cos and sin at these positions."""
        cos, sin = self._table
        return cos[positions], sin[positions]


def _again_ms(filling: Filling, stack: Any) -> float:
    """Run the probe's layers; return the CPU milliseconds from its last layer to the first layer of the next pass."""
    from cachecraft_rag.compute.row_pass import advance

    row_pass = filling.row_pass
    probe = row_pass
    took_ms = 0.0
    while row_pass is probe:
        assert row_pass is not None, "all chunk-caches are in memory"
        advance(stack, [row_pass])
        took_ms, _ = _timed(filling.end_layer)
        row_pass = filling.row_pass
    return took_ms


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.thread_time()
    result = call()
    return 1e3 * (time.thread_time() - began), result


def _settings(engine: Engine) -> Any:
    from cachecraft_rag.vllm.served_model import ModelIdentity
    from cachecraft_rag.vllm.settings import ConnectorSettings

    decoder = engine.decoder
    identity = ModelIdentity(decoder.fingerprint, decoder.layout, decoder.context_length)
    return ConnectorSettings("unused", identity, key=_KEY)


@contextmanager
def _engine(tokens: int) -> Iterator[Engine]:
    """An engine with a tiny model and a store in a temporary folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from benchmarks.gpu import byte_tokenizer
    from cachecraft_rag.engine.engine import Engine
    from cachecraft_rag.model.decoder import Decoder
    from cachecraft_rag.store import ChunkCacheStore
    from cachecraft_rag.store.config import StoreConfig

    config = LlamaConfig(
        vocab_size=260,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=_LAYERS,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    decoder = Decoder(
        LlamaForCausalLM(config), byte_tokenizer(), name="tiny", fingerprint="2-" + "0" * 32
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        ChunkCacheStore.open(Path(folder) / "caches", StoreConfig(host_bytes=1 << 30)) as store,
        Engine(decoder, store, best_last=False, new_variants="off") as engine,
    ):
        yield engine


def _chunks(tokens: int) -> list[Chunk]:
    """Chunks of random text, each of 512 tokens with the empty line after it."""
    dice = random.Random(tokens)
    letters = string.ascii_lowercase + " "
    count = tokens // _CHUNK_TOKENS
    return [
        Chunk("".join(dice.choice(letters) for _ in range(_CHUNK_TOKENS - 2))) for _ in range(count)
    ]


def _capture_elsewhere(engine: Engine, chunks: list[Chunk]) -> None:
    """Capture the chunks in another order than that of the prompt, so that none is reused exactly."""
    moved = [engine.prompts.chunk_segment(chunk) for chunk in (*chunks[1:], chunks[0])]
    prompt = Prompt((engine.prompts.system, *moved))
    engine.capture(prompt, range(len(prompt.segments)), primed=True)
    engine.store.flush()
