"""Speculative decoding with drafts from tokens: filled prompts are decoded with drafts, and texts stay the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from benchmarks.vllm_families import random_prompt
from cachecraft_rag.vllm.messages import Ask
from tests.vllm.conftest import Server
from tests.vllm.test_equality import BASE
from tests.vllm.test_families import assert_passes_the_self_check

DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
ALL_RECOMPUTED = replace(BASE, recompute_ratio=1.0)


@pytest.fixture(scope="module")
def server(
    model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Has chunks 1 to 4 stored, captured in this order."""
    made = Server(
        model_folder("Llama"),
        tmp_path_factory.mktemp("drafts") / "caches",
        speculative_config=DRAFTS,
        max_model_len=1024,
        enable_prefix_caching=True,
    )
    capture = Ask(
        random_prompt(1, 2, 3, 4), replace(BASE, reuse=False, capture=True), when_stored=True
    )
    made.ask([capture], tokens=1)
    yield made
    made.close()


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of accepted drafts of each decoded step."""
    from vllm.v1.core.sched.scheduler import Scheduler

    numbers: list[int] = []
    real = Scheduler.make_spec_decoding_stats

    def noted(self: Scheduler, *given: Any, **named: Any) -> Any:
        numbers.append(named["num_accepted_tokens"])
        return real(self, *given, **named)

    monkeypatch.setattr(Scheduler, "make_spec_decoding_stats", noted)
    return numbers


@pytest.mark.slow
def test_reuse_is_exact(server: Server) -> None:
    assert_passes_the_self_check(server, dtype="float32")


@pytest.mark.slow
def test_filled_prompts_are_decoded_with_drafts_and_give_vllms_own_tokens(
    server: Server, accepted: list[int]
) -> None:
    """One after the other, then all at once with plain requests among them."""
    prompts = [random_prompt(*order) for order in ((3, 1, 2), (2, 4), (4, 3, 2, 1))]
    plain = [server.ask([prompt.token_ids], tokens=48)[0] for prompt in prompts]
    asks = [Ask(prompt, ALL_RECOMPUTED, captures=()) for prompt in prompts]
    for ask, own in zip(asks, plain, strict=True):
        accepted.clear()
        (found,) = server.ask([ask], tokens=48)
        assert found.tokens == own.tokens
        assert "reused" in {segment["outcome"] for segment in found.report["segments"]}
        assert sum(accepted) > 0
    mixed: list[Any] = [*asks, *(prompt.token_ids for prompt in prompts)]
    for found, own in zip(server.ask(mixed, tokens=48), plain + plain, strict=True):
        assert found.tokens == own.tokens
