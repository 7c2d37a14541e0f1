"""Passes that run through all layers in one call of the model's own forward, without vLLM: blocks are the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cachecraft_rag.compute.balance.speed import ComputeSpeed
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.vllm.messages import Ask
from cachecraft_rag.vllm.settings import ConnectorSettings
from cachecraft_rag.vllm.worker import filling, working
from cachecraft_rag.vllm.worker.scheduling import Scheduling
from cachecraft_rag.vllm.worker.whole_model import check_raw_keys
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

# rows of the checks before the first filling: the rows that are computed of a prompt, and all of one that is captured
CHECK_ROWS = [22, 40]


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


def after_checks(model: WholeDecoder) -> list[tuple[int, int]]:
    """Rows and layers of each call after the checks."""
    layers = model.decoder.layout.layers
    assert model.runs[: len(CHECK_ROWS)] == [(rows, layers) for rows in CHECK_ROWS]
    return model.runs[len(CHECK_ROWS) :]


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
    runs = after_checks(model)
    layers = decoder.layout.layers
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
    ((joint_rows, _),) = after_checks(alone)
    for fill, ask in zip(fills, asks, strict=True):
        torch.testing.assert_close(filled(stack, fill), expected(engine, ask), rtol=0, atol=1e-5)

    narrow = WholeDecoder(decoder, most_rows=joint_rows - 1)
    run(workers_with(narrow), fills)
    runs = after_checks(narrow)
    assert len(runs) == 2
    assert sum(rows for rows, _ in runs) == joint_rows


def test_requests_that_would_take_long_together_run_as_one_call_each(
    engine: Engine,
    scheduling: Scheduling,
    decoder: Decoder,
    workers_with: Callable[..., Workers],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(working, "LONGEST_CALL_S", 0.25)
    monkeypatch.setattr(ComputeSpeed, "seconds", lambda *_: 0.2)
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


@pytest.mark.parametrize("wrong", [False, True])
def test_captures_run_at_once_if_the_forward_gives_right_raw_keys(
    engine: Engine,
    scheduling: Scheduling,
    stack: BlockStack,
    decoder: Decoder,
    workers_with: Callable[..., Workers],
    *,
    wrong: bool,
) -> None:
    """Otherwise they run layer by layer, and only requests that capture report why."""
    prompt = engine.prompts.build("When was it built?", [Chunk("The inn of Arden leaks. ")])
    model = WholeDecoder(decoder, raw_values_off=0.5 if wrong else 0.0)
    workers = workers_with(model)
    config = replace(CONFIG, capture=True)
    ask = Ask(prompt, config, captures=(1,), when_stored=True)
    fill = fill_of(scheduling, ask, "captures")
    run(workers, [fill])
    scheduling.ended({"captures"})
    (found,) = engine.look_up(prompt.segments[1:-1]).variants.values()
    assert len(found) == 1
    torch.testing.assert_close(filled(stack, fill), expected(engine, ask), rtol=0, atol=1e-5)
    reason = report_of(workers, "captures").get("layer_by_layer", "")
    if wrong:
        assert "the keys and values of captures differ by" in reason
        assert after_checks(model) == []
    else:
        assert not reason
        assert [layers for _, layers in after_checks(model)] == [decoder.layout.layers]
    again = ask_of(engine, [0, 2, 1], method={"selector": "cache_craft"})
    run(workers, [fill_of(scheduling, again, "reuses")])
    assert "layer_by_layer" not in report_of(workers, "reuses")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [("rope", "changes keys at position 0"), ("layer", "depend on positions besides")],
)
def test_raw_keys_are_not_taken_from_a_model_that_is_not_neutral_at_position_0(
    decoder: Decoder, stack: BlockStack, monkeypatch: pytest.MonkeyPatch, changed: str, reason: str
) -> None:
    """Some models scale rotated states (YaRN), or queries of late positions (Llama 4)."""
    rope, layer = decoder.rope, stack.layer

    def scaled(positions: torch.Tensor, kind: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = rope(positions, kind)
        return 1.1 * cos, 1.1 * sin

    def scales_late_queries(index: int, hidden: torch.Tensor, **how: Any) -> torch.Tensor:
        attend = how["layer_pass"].attend
        late = 1.0 + (how["positions"] >= 100)[:, None, None]
        how["layer_pass"] = SimpleNamespace(
            attend=lambda layer, q, k, v, settings: attend(layer, q * late, k, v, settings)
        )
        return layer(index, hidden, **how)

    replaced = scaled if changed == "rope" else scales_late_queries
    monkeypatch.setattr(stack, changed, replaced, raising=False)
    found = check_raw_keys(stack, WholeDecoder(decoder), last=200)  # type: ignore[arg-type]
    assert reason in found


@pytest.mark.parametrize(
    ("vllm_is_free", "idle", "calls"), [(True, False, 1), (False, False, 0), (True, True, 0)]
)
def test_a_long_pass_runs_at_once_while_vllm_has_nothing_to_compute(
    engine: Engine,
    scheduling: Scheduling,
    decoder: Decoder,
    workers_with: Callable[..., Workers],
    monkeypatch: pytest.MonkeyPatch,
    *,
    vllm_is_free: bool,
    idle: bool,
    calls: int,
) -> None:
    model = WholeDecoder(decoder)
    workers = workers_with(model)
    ask = ask_of(engine, [2, 0, 1], method={"selector": "cache_craft"})
    run(workers, [fill_of(scheduling, ask, "first")])  # the speed is known from now on
    scheduling.ended({"first"})
    monkeypatch.setattr(working, "LONGEST_CALL_S", 0.0)
    monkeypatch.setattr(working, "_IDLE_SLICE_S", 0.0)
    model.runs.clear()
    fills = [fill_of(scheduling, ask_of(engine, [0, 2, 1], method={"selector": "cache_craft"}))]
    run(workers, fills, vllm_is_free=vllm_is_free, idle=idle)
    assert len(model.runs) == calls


def test_a_call_does_not_take_long_once_vllm_has_something_to_compute(
    engine: Engine,
    scheduling: Scheduling,
    stack: BlockStack,
    decoder: Decoder,
    workers_with: Callable[..., Workers],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two prompts begin while vLLM is free; before the second one is computed, another user's request arrives."""
    model = WholeDecoder(decoder)
    workers = workers_with(model)
    changed = {"method": {"selector": "cache_craft"}}
    run(workers, [fill_of(scheduling, ask_of(engine, [2, 0, 1], **changed), "speed")])
    scheduling.ended({"speed"})
    monkeypatch.setattr(working, "LONGEST_CALL_S", 0.0)
    monkeypatch.setattr(working, "_LONG_SLICE_S", 0.0)
    monkeypatch.setattr(filling, "_SHORTEST_S", 0.0)
    monkeypatch.setattr(filling, "_SHARE", 0.0)
    model.runs.clear()
    asks = [ask_of(engine, order, **changed) for order in ([0, 2, 1], [1, 0, 2])]
    fills = [fill_of(scheduling, ask, f"r{i}", first_block=20 * i) for i, ask in enumerate(asks)]
    workers.step(fills, [], rows=10_000, vllm_is_free=True, idle=False)
    assert workers.finished() == {"r0"}
    assert len(model.runs) == 1
    while not workers.finished():
        workers.step([], [], rows=10_000, idle=False)
    assert len(model.runs) == 1
    torch.testing.assert_close(
        filled(stack, fills[1]), expected(engine, asks[1]), rtol=0, atol=1e-5
    )


def test_longer_passes_and_passes_that_drop_rows_run_layer_by_layer(
    engine: Engine,
    scheduling: Scheduling,
    stack: BlockStack,
    decoder: Decoder,
    workers_with: Callable[..., Workers],
) -> None:
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
        ("drops rows", dropping, 10_000),
        ("is long", ask_of(engine, [0, 2, 1], reuse=False), max(CHECK_ROWS)),
    ):
        model = WholeDecoder(decoder, most_rows=most_rows)
        workers = workers_with(model)
        run(workers, [fill_of(scheduling, ask, name)])
        assert after_checks(model) == [], name
        assert "refused" not in report_of(workers, name), name
        scheduling.ended({name})


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


def test_a_forward_that_takes_too_few_rows_for_its_check_is_not_used(
    engine: Engine, scheduling: Scheduling, decoder: Decoder, workers_with: Callable[..., Workers]
) -> None:
    model = WholeDecoder(decoder, most_rows=max(CHECK_ROWS) - 1)
    workers = workers_with(model)
    run(workers, [fill_of(scheduling, ask_of(engine, [0, 2, 1]))])
    assert "take 39 rows (--max-num-batched-tokens)" in report_of(workers)["layer_by_layer"]
    assert not model.runs


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
