"""One prompt whose chunks are stored, for benchmarks that serve it through the connector's two sides without vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import torch

from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.captures import Capture, TokenScores
from cachecraft_rag.types.digests import digest
from cachecraft_rag.types.prompts import Prompt, Segment
from cachecraft_rag.types.variants import VariantKey
from cachecraft_rag.vllm.messages import FIELD, Ask, Fill
from cachecraft_rag.vllm.settings import ConnectorSettings
from cachecraft_rag.vllm.worker.scheduling import Scheduling
from cachecraft_rag.vllm.worker.working import Workers

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
    def of(cls, size: Size) -> Self:
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


def store_chunks(store: ChunkCacheStore, settings: ConnectorSettings, ask: Ask) -> None:
    """Store a chunk-cache of zeros for each segment before the question."""
    identity = settings.identity
    before: tuple[str, ...] = ()
    for segment in ask.prompt.segments[:-1]:
        tokens = len(segment.token_ids)
        scores = np.random.default_rng(tokens).random(tokens, np.float32) if before else None
        capture = Capture(
            VariantKey(settings.namespace, identity.fingerprint, segment.segment_id, before),
            identity.layout,
            segment.tokens_digest,
            torch.zeros(identity.layout.shape(tokens), dtype=getattr(torch, identity.layout.dtype)),
            TokenScores(scores),
            inter=tuple(0.1 for _ in before),
            intra=0.5,
            cci=0.5,
            exact_share=1.0,
            primed=True,
        )
        store.put(capture).result()
        before = (*before, segment.segment_id)


def serve(workers: Workers, fill: Fill) -> None:
    """Fill the request's blocks; raises AssertionError unless its chunks were reused."""
    workers.step([fill], [], rows=1 << 30)
    while not (finished := workers.finished()):  # a GPU takes longer than a step
        workers.step([], [], rows=1 << 30)
    assert finished == {fill.request_id}, "there is no other request"
    result = workers.take_result()
    assert result is not None
    report = result.reports[fill.request_id]
    assert "refused" not in report, report["refused"]
    outcomes = [segment["outcome"] for segment in report["segments"]]
    assert set(outcomes[1:-1]) == {"reused"}, outcomes
