"""What an engine over vLLM sends: no message for a question that it leaves to vLLM, and new salts for captures."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.vllm.calls import Step
from cachecraft_rag.vllm.engine import VLLMEngine
from cachecraft_rag.vllm.messages import FIELD, Ask
from cachecraft_rag.vllm.served_model import ServedModel
from cachecraft_rag.vllm.worker import scheduling

CHUNKS = [Chunk("Kettle."), Chunk("Toaster.")]


@dataclass
class Played:
    """An engine whose vLLM answers each request with one token."""

    engine: VLLMEngine
    sent: list[dict[str, Any]]  # `extra_args` of each request
    prompts: list[dict[str, Any]]  # vLLM's prompt of each request

    def ask(self, **reuse: Any) -> Any:
        """Ask about the chunks; returns the statistics."""
        settings = ReuseConfig(**reuse)
        answer = self.engine.stream(
            "Is it?", CHUNKS, config=settings, sampling=SamplingParams(max_new_tokens=1)
        )
        for _ in answer:
            pass
        return answer.stats


@pytest.fixture
def played(
    tiny_decoder: Callable[..., Any],
    byte_tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Played]:
    sent: list[dict[str, Any]] = []
    prompts: list[dict[str, Any]] = []

    def generate(prompt: dict[str, object], params: Any) -> Iterator[Step]:
        sent.append(params.extra_args or {})
        prompts.append(prompt)
        yield Step((1,), finished=True)

    delta = SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA="delta"))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))  # type: ignore[misc]
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", delta)  # type: ignore[misc]
    decoder = tiny_decoder("Llama")
    facts = (decoder.fingerprint, decoder.layout, decoder.context_length, frozenset({1}))
    calls: Any = SimpleNamespace(generate=generate, reports={}, close=lambda: None)
    with ChunkCacheStore.open(tmp_path) as store:
        model = ServedModel("tiny", None, byte_tokenizer, *facts)
        engine = VLLMEngine(model, store, EngineConfig(), serving=calls, key="key")
        yield Played(engine, sent, prompts)
        engine.close()


@pytest.fixture
def work(count_calls: Callable[..., Counter[str]]) -> Counter[str]:
    """Counts messages, look-ups and plans."""
    return count_calls((Ask, "message"), (ChunkCacheStore, "find"), (scheduling, "make_plan"))


def test_a_question_that_may_be_reused_carries_one_message(
    played: Played, work: Counter[str]
) -> None:
    played.ask()
    assert FIELD in played.sent[-1]["kv_transfer_params"]
    assert work == {"message": 1}


@pytest.mark.parametrize(
    ("reuse", "reason"),
    [
        ({"min_prompt_tokens": 10_000}, "reuse begins at 10000 (min_prompt_tokens)"),
        ({"reuse": False, "capture": False}, "reuse is off"),
    ],
)
def test_a_question_that_is_left_to_vllm_carries_no_message_and_says_why(
    played: Played, work: Counter[str], reuse: dict[str, Any], reason: str
) -> None:
    stats = played.ask(**reuse)
    assert played.sent == [{}]
    assert not work
    assert all(reason in chunk.reason for chunk in stats.chunks)
    assert {chunk.reason_code for chunk in stats.chunks} == {"left_to_server"}


def test_a_shortest_length_that_was_measured_leaves_shorter_questions_to_vllm(
    played: Played, work: Counter[str]
) -> None:
    played.engine.min_prompt_tokens = 10_000
    stats = played.ask()
    assert played.sent == [{}]
    assert not work
    assert "min_prompt_tokens" in stats.chunks[0].reason


def test_what_is_captured_a_second_time_is_not_taken_from_the_prefix_cache(
    played: Played,
) -> None:
    """Blocks that vLLM still has would not be captured, such as of chunks that were evicted and primed again."""
    prompt = played.engine.prompts.build("Is it?", CHUNKS)
    for _ in range(2):
        played.engine.capture(prompt, (0, 1, 2), primed=True)
    first, second = played.prompts
    assert first["prompt_token_ids"] == second["prompt_token_ids"]
    assert first["cache_salt"] != second["cache_salt"]
