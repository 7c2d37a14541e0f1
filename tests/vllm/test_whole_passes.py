"""Passes that run through all layers in one call of the model's own forward, without vLLM: blocks are the same."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from cachecraft_rag.compute import overlapped
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.vllm.messages import Ask
from cachecraft_rag.vllm.settings import ConnectorSettings
from cachecraft_rag.vllm.worker import working
from cachecraft_rag.vllm.worker.scheduling import Scheduling
from cachecraft_rag.vllm.worker.working import Workers
from tests.compute.whole_decoder import WholeDecoder
from tests.vllm.test_working import (
    BLOCK,
    CONFIG,
    BlockStack,
    ask_of,
    decoder,
    engine,
    expected,
    fill_of,
    filled,
    run,
    scheduling,
    settings,
    stack,
)

__all__ = ["decoder", "engine", "scheduling", "settings", "stack"]  # fixtures

# rows and layers of the check before the first filling: the prompt of the check, through all layers
CHECK_ROWS = 22


@pytest.fixture
def workers_with(
    engine: Engine, stack: BlockStack, settings: ConnectorSettings
) -> Iterator[Callable[..., Workers]]:
    """Workers with this whole model."""
    made: list[Workers] = []

    def make(model: WholeDecoder) -> Workers:
        made.append(
            Workers(stack, engine.store, settings, block_size=BLOCK, whole_model=model)  # type: ignore[arg-type]
        )
        return made[-1]

    yield make
    for workers in made:
        workers.close()


def report_of(workers: Workers, name: str = "r") -> Any:
    result = workers.take_result()
    assert result is not None
    return result.reports[name]


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"method": {"selector": "cache_craft"}},
        {"method": {"drift": 0.0}},
        {"recompute_ratio": 0.0},
        {"method": {"early_termination": "probe"}, "recompute_ratio": 0.5},
    ],
    ids=["probe and drift", "drift", "probe", "nothing recomputed", "focus by the probe"],
)
def test_blocks_are_those_of_layers_one_after_the_other(
    engine: Engine,
    scheduling: Scheduling,
    stack: BlockStack,
    decoder: Decoder,
    workers_with: Callable[..., Workers],
    changed: dict[str, Any],
) -> None:
    model = WholeDecoder(decoder)
    workers = workers_with(model)
    ask = ask_of(engine, [0, 2, 1], **changed)
    fill = fill_of(scheduling, ask)
    run(workers, [fill])
    torch.testing.assert_close(filled(stack, fill), expected(engine, ask), rtol=0, atol=1e-5)
    (_, layers), *runs = model.runs
    assert layers == decoder.layout.layers
    has_probe = (
        "selector" not in changed.get("method", {}) and changed.get("recompute_ratio") != 0.0
    )
    assert len(runs) == (2 if has_probe else 1)
    assert runs[-1][1] == layers
    assert all(probed < layers for _, probed in runs[:-1])
    assert "layer_by_layer" not in report_of(workers)


def test_requests_of_one_step_run_as_one_call_while_their_rows_fit(
    engine: Engine,
    scheduling: Scheduling,
    stack: BlockStack,
    decoder: Decoder,
    workers_with: Callable[..., Workers],
) -> None:
    asks = [
        ask_of(engine, [0, 2, 1], method={"selector": "cache_craft"}),
        ask_of(engine, [1, 0, 2], method={"selector": "cache_craft"}),
    ]
    alone = WholeDecoder(decoder)
    fills = [fill_of(scheduling, ask, f"r{i}", first_block=20 * i) for i, ask in enumerate(asks)]
    run(workers_with(alone), fills)
    assert len(alone.runs) == 2
    joint_rows = alone.runs[1][0]
    for fill, ask in zip(fills, asks, strict=True):
        torch.testing.assert_close(filled(stack, fill), expected(engine, ask), rtol=0, atol=1e-5)

    narrow = WholeDecoder(decoder, most_rows=joint_rows - 1)
    run(workers_with(narrow), fills)
    assert len(narrow.runs) == 3
    assert sum(rows for rows, _ in narrow.runs[1:]) == joint_rows


def test_requests_that_would_take_long_together_run_as_one_call_each(
    engine: Engine,
    scheduling: Scheduling,
    decoder: Decoder,
    workers_with: Callable[..., Workers],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(overlapped, "LONGEST_CALL_S", math.inf)
    monkeypatch.setattr(working, "LONGEST_CALL_S", 0.0)
    model = WholeDecoder(decoder)
    workers = workers_with(model)
    asks = [
        ask_of(engine, order, method={"selector": "cache_craft"})
        for order in ([2, 0, 1], [0, 2, 1], [1, 0, 2])
    ]
    run(workers, [fill_of(scheduling, asks[0], "first")])  # the speed is known from now on
    scheduling.ended({"first"})
    model.runs.clear()
    fills = [
        fill_of(scheduling, ask, f"r{i}", first_block=20 * i) for i, ask in enumerate(asks[1:])
    ]
    run(workers, fills)
    assert len(model.runs) == 2


def test_captures_longer_passes_and_passes_that_drop_rows_run_layer_by_layer(
    engine: Engine,
    scheduling: Scheduling,
    stack: BlockStack,
    decoder: Decoder,
    workers_with: Callable[..., Workers],
) -> None:
    fresh = engine.prompts.build("When was it built?", [Chunk("The inn of Arden leaks. ")])
    config = replace(CONFIG, capture=True)
    dropping = ask_of(
        engine,
        [0, 2, 1],
        recompute_ratio=0.5,
        method={
            "early_termination": "published",
            "early_termination_window": 1,
            "selector": "cache_craft",
        },
    )
    for name, ask, most_rows in (
        ("captures", Ask(fresh, config, captures=(1,), when_stored=True), 10_000),
        ("drops rows", dropping, 10_000),
        ("is long", ask_of(engine, [0, 2, 1], reuse=False), CHECK_ROWS),
    ):
        model = WholeDecoder(decoder, most_rows=most_rows)
        workers = workers_with(model)
        run(workers, [fill_of(scheduling, ask, name)])
        assert model.runs == [(CHECK_ROWS, decoder.layout.layers)], name
        assert "refused" not in report_of(workers, name), name
        scheduling.ended({name})
    assert [len(found) for found in engine.look_up(fresh.segments[1:-1]).variants.values()] == [1]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [({"positions_off": 3}, "differ by up to"), ({"error": "of this test"}, "of this test")],
)
def test_a_wrong_forward_is_not_used_and_the_report_says_why(
    engine: Engine,
    scheduling: Scheduling,
    stack: BlockStack,
    decoder: Decoder,
    workers_with: Callable[..., Workers],
    caplog: pytest.LogCaptureFixture,
    wrong: dict[str, Any],
    reason: str,
) -> None:
    model = WholeDecoder(decoder, **wrong)
    workers = workers_with(model)
    ask = ask_of(engine, [0, 2, 1])
    with caplog.at_level(logging.WARNING, "cachecraft_rag.vllm"):
        for name in ("first", "second"):
            fill = fill_of(scheduling, ask, name)
            run(workers, [fill])
            torch.testing.assert_close(
                filled(stack, fill), expected(engine, ask), rtol=0, atol=1e-5
            )
            assert reason in report_of(workers, name)["layer_by_layer"]
    assert len(model.runs) == 1
    assert sum("layer by layer" in message for message in caplog.messages) == 1


def test_a_forward_that_could_not_be_checked_is_not_used(
    engine: Engine,
    scheduling: Scheduling,
    stack: BlockStack,
    decoder: Decoder,
    workers_with: Callable[..., Workers],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = stack.layer
    failures = [MemoryError("of this test")]

    def fails_once(*arguments: Any, **how: Any) -> torch.Tensor:
        if failures:
            raise failures.pop()
        return layer(*arguments, **how)

    monkeypatch.setattr(stack, "layer", fails_once)
    model = WholeDecoder(decoder)
    workers = workers_with(model)
    ask = ask_of(engine, [0, 2, 1])
    fill = fill_of(scheduling, ask)
    run(workers, [fill])
    torch.testing.assert_close(filled(stack, fill), expected(engine, ask), rtol=0, atol=1e-5)
    assert "of this test" in report_of(workers)["layer_by_layer"]
    assert not model.runs
