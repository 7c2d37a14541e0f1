"""Captures and reuse under a running vLLM: what it captures serves both engines, and load changes no answer."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.vllm.messages import FIELD, Ask
from tests.vllm.conftest import TEXTS, Server
from tests.vllm.test_equality import CASES, assert_equal, greedy

CHUNKS = [Chunk(text) for text in (*TEXTS, "N")]  # those of `CASES`
CONFIG = ReuseConfig(method=ReuseMethod(probe_min_rows=0, alpha=0.5, loading="whole"))
QUIET = replace(CONFIG, capture=False)
TOKENS = 24
REQUESTS = int(os.environ.get("TESTS_MIXED", "60"))


def outcomes(served: Any) -> list[str]:
    return [one["outcome"] for one in served.report["segments"]]


@pytest.mark.slow
def test_what_vllm_captures_serves_both_engines(
    model_folder: Callable[[str], Path], make_server: Callable[..., Server], tmp_path: Path
) -> None:
    folder, root = model_folder("Llama"), tmp_path / "caches"
    server = make_server(folder, root)
    with (
        ChunkCacheStore.open(root) as store,
        Engine(Decoder.load(str(folder)), store, config=QUIET) as engine,
    ):
        orders = [[2, 1, 0], [0, 2, 1]]
        prompts = [
            engine.prompts.build("How is it descaled?", [CHUNKS[i] for i in order])
            for order in orders
        ]
        (plain,) = server.ask([prompts[0].token_ids])
        (cold,) = server.ask([Ask(prompts[0], CONFIG, when_stored=True)])
        assert (cold.tokens, outcomes(cold)) == (plain.tokens, ["computed"] * 5)
        (warm,) = server.ask([Ask(prompts[0], QUIET)])
        assert (warm.tokens, outcomes(warm)) == (plain.tokens, ["exact"] * 4 + ["computed"])
        assert warm.report["row_layers"] < cold.report["row_layers"] / 3
        (moved,) = server.ask([Ask(prompts[1], QUIET, details=True)])
        assert "reused" in outcomes(moved)
        expected = greedy(engine, "How is it descaled?", [CHUNKS[i] for i in orders[1]], QUIET)
        assert expected.prompt.segments == prompts[1].segments
        assert_equal(moved, expected, engine.decoder.layout.layers)
        found = engine.look_up(prompts[0].segments[:-1]).variants
        assert all(
            one.exact_share == 1.0 and not one.primed for some in found.values() for one in some
        )
        assert [len(some) for some in found.values()] == [1, 1, 1, 1]


@pytest.mark.slow
def test_load_preemption_and_cancelling_change_no_answer(
    model_folder: Callable[[str], Path], make_server: Callable[..., Server], tmp_path: Path
) -> None:
    """TESTS_MIXED says how many requests."""
    folder, root = model_folder("Llama"), tmp_path / "caches"
    with (
        ChunkCacheStore.open(root) as store,
        Engine(Decoder.load(str(folder)), store, config=QUIET) as engine,
    ):
        for one in (CHUNKS[:3], CHUNKS[3:]):
            from cachecraft_rag.serving.priming import Primer

            Primer(engine).prime(one)
        prompts = {
            name: engine.prompts.build(question, [CHUNKS[i] for i in order])
            for name, (question, order, _) in CASES.items()
        }
    server = make_server(
        folder,
        root,
        enable_prefix_caching=True,
        num_gpu_blocks_override=66,
        max_num_batched_tokens=1024,
        max_model_len=1024,
        disable_log_stats=False,
    )
    core = server.llm.llm_engine.engine_core.engine_core
    scheduler = core.scheduler
    preempted: list[str] = []
    preempt = scheduler._preempt_request

    def counted(request: Any, *arguments: Any, **named: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *arguments, **named)

    scheduler._preempt_request = counted
    asks = {
        name: Ask(prompt, QUIET.changed_by(CASES[name][2]), captures=())
        for name, prompt in prompts.items()
    }
    lone: dict[tuple[str, bool], list[int]] = {}
    for name, ask in asks.items():
        lone[name, True] = server.ask([ask], tokens=TOKENS)[0].tokens
        lone[name, False] = server.ask([ask.prompt.token_ids], tokens=TOKENS)[0].tokens
        server.llm.reset_prefix_cache()
    # reuse shows, or a leak could not
    assert any(lone[name, True] != lone[name, False] for name in asks)
    dice, engine_ = random.Random(3), server.llm.llm_engine
    waiting = [(f"m{i}", dice.choice(list(asks)), i % 2 == 0) for i in range(REQUESTS)]
    under_way: dict[str, tuple[str, bool]] = {}
    found: dict[str, list[int]] = {}
    cancelled, steps = 0, 0
    while waiting or engine_.has_unfinished_requests():
        while waiting and len(under_way) < 8:
            name, case, planned = waiting.pop()
            under_way[add(server, asks[case], name, planned=planned)] = (case, planned)
        for output in engine_.step():
            name = output.request_id
            case, planned = (
                under_way.get(name)
                or under_way[next(one for one in under_way if one.startswith(name))]
            )
            found[name] = list(output.outputs[0].token_ids)
            assert found[name] == lone[case, planned][: len(found[name])], (name, case, planned)
            if output.finished:
                under_way = {
                    one: what for one, what in under_way.items() if not one.startswith(name)
                }
        if steps % 23 == 5 and under_way:
            victim = dice.choice(list(under_way))
            engine_.abort_request([victim], internal=True)
            del under_way[victim]
            cancelled += 1
        steps += 1
        assert steps < 100_000
    assert cancelled >= 3
    assert preempted
    # no plain request was served a block that was filled for another
    for name, ask in asks.items():
        assert server.ask([ask.prompt.token_ids], tokens=TOKENS)[0].tokens == lone[name, False]
    assert scheduler.kv_cache_manager.usage == 0.0
    assert not scheduler.requests
    assert not scheduler.connector._scheduling._known


def add(server: Server, ask: Ask, name: str, *, planned: bool) -> str:
    """Queue one request; returns vLLM's own id of it."""
    from vllm import SamplingParams

    prompt: dict[str, Any] = {"prompt_token_ids": ask.prompt.token_ids}
    extra = None
    if planned:
        prompt["cache_salt"] = ask.cache_salt(server.namespace)
        extra = {"kv_transfer_params": {FIELD: ask.message(server.key)}}
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, extra_args=extra)
    return str(server.llm.llm_engine.add_request(name, prompt, params))
