"""LoRA adapters: each shares chunk-caches with nothing but itself, and several are served at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest

from benchmarks.vllm_families import random_prompt
from cachecraft_rag.types.prompts import Prompt, token_array
from cachecraft_rag.vllm.messages import Ask
from tests.vllm.adapters import RANK, save_adapter
from tests.vllm.conftest import Served, Server
from tests.vllm.test_equality import BASE, LOGPROBS_APART
from tests.vllm.test_families import assert_passes_the_self_check

pytestmark = pytest.mark.slow

ALL_RECOMPUTED = replace(BASE, recompute_ratio=1.0)
CAPTURING = replace(ALL_RECOMPUTED, capture=True)
ROWS = 256
LONG = random_prompt(1, 2, 3, 4, 5, 10)  # more tokens than `ROWS`
LONG_CHUNK = Prompt(
    tuple(
        replace(segment, segment_id="long", token_ids=token_array([*range(ROWS + 1)]))
        if segment.kind == "chunk"
        else segment
        for segment in random_prompt(1).segments
    )
)


@pytest.fixture(scope="module")
def save(
    model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """`save(3)`: adapter 3 on disk; with `seed` its weights are others."""
    root = tmp_path_factory.mktemp("adapters")

    def saved(number: int, *, seed: int | None = None) -> Any:
        folder = root / str(number)
        save_adapter(model_folder("Llama"), folder, seed=number if seed is None else seed)
        return LoRARequest(f"adapter {number}", number, str(folder))

    return saved


@pytest.fixture(scope="module")
def server(
    model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Has the chunks of `LONG` stored for the base model.

    One place for an adapter stays empty: beside rows with adapters, vLLM's CPU build gives rows of the base model the
    adapter in the last place.
    """
    made = Server(
        model_folder("Llama"),
        tmp_path_factory.mktemp("served") / "caches",
        enable_lora=True,
        max_loras=4,
        max_lora_rank=max(8, RANK),
        max_model_len=1024,
        max_num_batched_tokens=ROWS,
        enable_prefix_caching=True,
    )
    made.ask([Ask(LONG, replace(BASE, reuse=False, capture=True), when_stored=True)], tokens=1)
    yield made
    made.close()


@pytest.fixture(scope="module")
def adapters(server: Server, save: Callable[..., Any]) -> list[Any]:
    """Two adapters that vLLM has loaded."""
    saved = [save(1), save(2)]
    server.ask([random_prompt(5).token_ids] * 2, adapters=saved)
    return saved


def ask_of(prompt: Prompt, *, salt: str, capture: bool = False) -> Ask:
    """Return a request; vLLM's prefix cache has nothing of it but what has the same salt."""
    config = CAPTURING if capture else ALL_RECOMPUTED
    return Ask(prompt, config, client_salt=salt, captures=None if capture else ())


def assert_same(found: Served, own: Served) -> None:
    assert found.tokens == own.tokens
    assert found.logprobs == pytest.approx(own.logprobs, abs=LOGPROBS_APART)


def outcomes(served: Served) -> list[str]:
    return [segment["outcome"] for segment in served.report["segments"][:-1]]


def test_reuse_is_exact_while_adapters_are_loaded(server: Server, adapters: list[Any]) -> None:
    assert adapters
    assert_passes_the_self_check(server, dtype="float32")


def test_what_is_captured_under_an_adapter_serves_that_adapter_alone(
    server: Server, adapters: list[Any]
) -> None:
    prompt, moved = random_prompt(6, 7), random_prompt(7, 6)
    users = [None, *adapters]
    own = [server.ask([prompt.token_ids], adapters=[user])[0] for user in users]
    own_moved = [server.ask([moved.token_ids], adapters=[user])[0] for user in users]
    assert len({tuple(one.tokens) for one in own}) == 3, "each adapter changes the answer"
    for user, wanted in zip(users, own, strict=True):
        captured = replace(ask_of(prompt, salt="first", capture=True), when_stored=True)
        (found,) = server.ask([captured], adapters=[user])
        # the base model has the instruction from another prompt
        assert outcomes(found) == ["computed" if user else "exact", "computed", "computed"]
        assert_same(found, wanted)
    for user, wanted, wanted_moved in zip(users, own, own_moved, strict=True):
        (found,) = server.ask([ask_of(prompt, salt="second")], adapters=[user])
        assert outcomes(found) == ["exact"] * 3
        assert_same(found, wanted)
        (found,) = server.ask([ask_of(moved, salt="second")], adapters=[user])
        assert "reused" in outcomes(found)
        assert_same(found, wanted_moved)
    asks = [ask_of(moved, salt="together") for _ in users]
    for found, wanted in zip(server.ask(asks, adapters=users), own_moved, strict=True):
        assert "reused" in outcomes(found)
        assert_same(found, wanted)


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
    for salt in ("one", "two"):
        asks = [ask_of(prompt, salt=salt) for prompt in prompts]
        mixed: list[Any] = [others[0], *asks, others[1]]
        found = server.ask(mixed, adapters=using, tokens=48)
        for served, wanted in zip(found[1:3], own, strict=True):
            assert "reused" in outcomes(served)
            assert served.tokens[:16] == wanted.tokens
            assert served.logprobs[:16] == pytest.approx(wanted.logprobs, abs=LOGPROBS_APART)
        for served, wanted in zip((found[0], found[3]), own_others, strict=True):
            assert_same(served, wanted)


def test_a_prompt_that_is_longer_than_a_pass_with_an_adapter_is_filled_in_several(
    server: Server, adapters: list[Any]
) -> None:
    moved = random_prompt(5, 1, 3, 2, 4, 10)
    for user in adapters:
        for prompt, salt in ((LONG, "long"), (moved, "moved")):
            (own,) = server.ask([prompt.token_ids], adapters=[user])
            assert len(prompt.token_ids) > ROWS
            captured = replace(ask_of(prompt, salt=salt, capture=True), when_stored=True)
            (found,) = server.ask([captured], adapters=[user])
            assert "refused" not in found.report
            assert_same(found, own)
        assert "reused" in outcomes(found)


def test_a_request_whose_adapter_cannot_be_used_is_left_to_vllm_and_says_why(
    server: Server, adapters: list[Any], save: Callable[..., Any]
) -> None:
    prompt = random_prompt(1, 2)

    def left(user: Any, asked: Prompt = prompt) -> str:
        (found,) = server.ask([ask_of(asked, salt="left", capture=True)], adapters=[user])
        (own,) = server.ask([asked.token_ids], adapters=[user])
        assert_same(found, own)
        return str(found.report["refused"])

    third = save(3)
    assert "not loaded yet" in left(third)
    (found,) = server.ask([ask_of(prompt, salt="loaded", capture=True)], adapters=[third])
    assert outcomes(found) == ["computed"] * 3
    refused = left(third, LONG_CHUNK)
    assert f"{ROWS + 1} tokens, and a pass with a LoRA adapter takes {ROWS}: divide" in refused
    (found,) = server.ask([ask_of(LONG_CHUNK, salt="whole")], adapters=[third])
    assert "refused" not in found.report, "what is not captured is divided"
    save(3, seed=30)
    assert "have changed since it was loaded" in left(third)
    missing = LoRARequest("missing", 3, str(Path(third.lora_path) / "elsewhere"))
    assert "holds no adapter_config.json" in left(missing)
