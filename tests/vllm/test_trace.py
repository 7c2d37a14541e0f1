"""A trace of many questions on a small disk: what vLLM serves from chunk-caches does not decay as others come.

TESTS_TRACE           a trace, one JSON object with a list "chunks" a line; unset: conversations that are drawn here
TESTS_TRACE_REQUESTS  how many requests; a shorter trace begins again; 60
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from benchmarks.simulation.trace import read_trace
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.prompt.builder import PromptBuilder
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.vllm.messages import Ask
from tests.vllm.conftest import Server

CONFIG = ReuseConfig(method=ReuseMethod(probe_min_rows=0, alpha=0.5, loading="whole"))
REQUESTS = int(os.environ.get("TESTS_TRACE_REQUESTS", "60"))
MOST_CHUNKS = 24  # of a prompt: more do not fit the model's context
CHUNK_BYTES = 160_000  # of one chunk-cache of the tiny model: some 50 tokens
# so much the shares of a short drawn trace differ by themselves; one that is given has none
SLACK = 0.02


def drawn_trace(path: Path, *, seed: int = 7) -> Path:
    """Conversations of four turns about topics with Zipf's popularity; a turn keeps most chunks of the one before."""
    dice = random.Random(seed)
    lines = []
    for session in range(100):
        topic = dice.choices(range(12), weights=[1 / (rank + 1) for rank in range(12)])[0]
        known: list[int] = []
        for turn in range(1, 5):
            new = [5 * topic + dice.randrange(5) for _ in range(2)]
            known = list(dict.fromkeys([*new, *known]))[:5]
            dice.shuffle(known)
            lines.append(
                {"session": session, "turn": turn, "chunks": known, "prompt_chars": 60 * len(known)}
            )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.slow
def test_reuse_does_not_decay(
    model_folder: Callable[[str], Path], make_server: Callable[..., Server], tmp_path: Path
) -> None:
    folder, root = model_folder("Llama"), tmp_path / "caches"
    given = os.environ.get("TESTS_TRACE")
    trace = read_trace(Path(given) if given else drawn_trace(tmp_path / "trace.jsonl"))
    requests = [one[:MOST_CHUNKS] for one in trace.requests if one]
    budget = len(trace.tokens) * CHUNK_BYTES // 4
    server = make_server(folder, root, caches={"disk_bytes": budget, "host_bytes": budget // 4})
    decoder = Decoder.load(str(folder))
    prompts = PromptBuilder(decoder.tokenizer, context_length=2048, system="Answer.")
    shares = []
    for number in range(REQUESTS):
        chunks = [
            Chunk(f"Chunk {one} is about {one * 7919 % 1000}.")
            for one in requests[number % len(requests)]
        ]
        prompt = prompts.build(f"What is asked at {number}?", chunks, reserve=1)
        (served,) = server.ask([Ask(prompt, replace(CONFIG), when_stored=True)], tokens=1)
        parts = [
            (len(segment.token_ids), one)
            for segment, one in zip(prompt.segments, served.report["segments"], strict=True)
            if segment.kind == "chunk"
        ]
        asked = sum(tokens for tokens, _ in parts)
        stored = sum(
            tokens - one["not_loaded"] for tokens, one in parts if one["variant_id"] is not None
        )
        shares.append((stored, asked))
    third = REQUESTS // 3
    parts = [shares[place : place + third] for place in (0, third, REQUESTS - third)]
    first, second, last = (
        sum(hit for hit, _ in part) / sum(asked for _, asked in part) for part in parts
    )
    print(f"\nreused of the chunks' tokens, by thirds: {first:.3f} {second:.3f} {last:.3f}")
    with ChunkCacheStore.open(root) as store:
        stats = store.stats()
        assert stats.disk_bytes <= budget  # and it was too small for all of them
        assert stats.chunks < len(trace.tokens)
    assert last >= second - (0.0 if given else SLACK)
    assert second > first / 2 > 0
