"""LoRA adapters: their requests are left to vLLM and share nothing; the base model's are served from chunk-caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest

from benchmarks.vllm_families import random_prompt
from cachecraft_rag.vllm.messages import Ask
from tests.vllm.adapters import RANK, save_adapter
from tests.vllm.conftest import Served, Server
from tests.vllm.test_equality import BASE, LOGPROBS_APART
from tests.vllm.test_families import assert_passes_the_self_check

pytestmark = pytest.mark.slow

ALL_RECOMPUTED = replace(BASE, recompute_ratio=1.0)
CAPTURE = replace(BASE, reuse=False, capture=True)


@pytest.fixture(scope="module")
def adapters(
    model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> list[Any]:
    folder = tmp_path_factory.mktemp("adapters")
    return [
        LoRARequest(
            f"adapter {number}",
            number,
            str(save_adapter(model_folder("Llama"), folder / str(number), seed=number)),
        )
        for number in (1, 2)
    ]


@pytest.fixture(scope="module")
def server(
    model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Has chunks 1 to 4 stored for the base model. A pass over five segments has more rows than a step of vLLM's.

    The third place for an adapter stays empty: beside rows with adapters, vLLM's CPU build gives rows of the base model
    the adapter in the last place.
    """
    made = Server(
        model_folder("Llama"),
        tmp_path_factory.mktemp("served") / "caches",
        enable_lora=True,
        max_loras=3,
        max_lora_rank=max(8, RANK),
        max_model_len=1024,
        max_num_batched_tokens=128,
        enable_prefix_caching=True,
    )
    made.ask([Ask(random_prompt(1, 2, 3, 4), CAPTURE, when_stored=True)], tokens=1)
    yield made
    made.close()


def assert_same(found: Served, own: Served) -> None:
    assert found.tokens == own.tokens
    assert found.logprobs == pytest.approx(own.logprobs, abs=LOGPROBS_APART)


def outcomes(served: Served) -> list[str]:
    return [segment["outcome"] for segment in served.report["segments"][:-1]]


def test_reuse_is_exact_while_adapters_are_loaded(server: Server, adapters: list[Any]) -> None:
    server.ask([random_prompt(5).token_ids] * 2, adapters=adapters)
    assert_passes_the_self_check(server, dtype="float32")


def test_requests_with_an_adapter_are_left_to_vllm_and_capture_nothing(
    server: Server, adapters: list[Any]
) -> None:
    prompt = random_prompt(6, 7)
    plain = [server.ask([prompt.token_ids], adapters=[one])[0] for one in (None, *adapters)]
    assert len({tuple(one.tokens) for one in plain}) == 3, "each adapter changes the answer"
    ask = Ask(prompt, replace(ALL_RECOMPUTED, capture=True))
    for adapter, own in zip(adapters, plain[1:], strict=True):
        for _ in range(2):
            (found,) = server.ask([ask], adapters=[adapter])
            assert "it uses a LoRA adapter" in found.report["refused"]
            assert_same(found, own)
    (base,) = server.ask([ask])
    assert set(outcomes(base)) <= {"computed", "exact"}  # the instruction is stored
    assert outcomes(base)[1:] == ["computed"] * 2
    assert_same(base, plain[0])


def test_passes_add_no_adapter_of_the_requests_in_the_same_step(
    server: Server, adapters: list[Any]
) -> None:
    """Each of two rounds has requests with both adapters before and after those of the base model."""
    prompts = [random_prompt(3, 1, 2), random_prompt(4, 2)]
    others = [random_prompt(8).token_ids, random_prompt(9).token_ids]
    own = [server.ask([prompt.token_ids])[0] for prompt in prompts]
    own_others = [
        server.ask([ids], adapters=[adapter], tokens=48)[0]
        for ids, adapter in zip(others, adapters, strict=True)
    ]
    using = [adapters[0], None, None, adapters[1]]
    for salt in ("first", "second"):  # vLLM's prefix cache has the prompts otherwise
        asks = [Ask(prompt, ALL_RECOMPUTED, captures=(), client_salt=salt) for prompt in prompts]
        mixed: list[Any] = [others[0], *asks, others[1]]
        found = server.ask(mixed, adapters=using, tokens=48)
        for served, wanted in zip(found[1:3], own, strict=True):
            assert "reused" in outcomes(served)
            assert served.tokens[:16] == wanted.tokens
            assert served.logprobs[:16] == pytest.approx(wanted.logprobs, abs=LOGPROBS_APART)
        for served, wanted in zip((found[0], found[3]), own_others, strict=True):
            assert_same(served, wanted)
