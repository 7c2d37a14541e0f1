"""Both ends of the connector without vLLM: its scheduler and its blocks are played, the layers are Hugging Face's."""

from __future__ import annotations

import hashlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cachecraft_rag.compute.balance.speed import ComputeSpeed
from cachecraft_rag.compute.captures.capture import AttentionAccumulator
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.kernels.memory import Recycler
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.serving.new_variants import EXACT
from cachecraft_rag.serving.priming import Primer
from cachecraft_rag.store import ChunkCacheStore, RowFilter
from cachecraft_rag.store.config import StoreTuning
from cachecraft_rag.store.loading.pending import PendingLoads
from cachecraft_rag.store.row_checks import LookupResult
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.types.kv_layout import KVLayout
from cachecraft_rag.types.prompts import Prompt, Segment
from cachecraft_rag.vllm.messages import FIELD, Ask, Fill, StepResult
from cachecraft_rag.vllm.served_model import ModelIdentity
from cachecraft_rag.vllm.settings import ConnectorSettings
from cachecraft_rag.vllm.worker import filling, working
from cachecraft_rag.vllm.worker import scheduling as scheduling_module
from cachecraft_rag.vllm.worker.fill_memory import FillMemory
from cachecraft_rag.vllm.worker.filling import Filling
from cachecraft_rag.vllm.worker.ranks import OneRank
from cachecraft_rag.vllm.worker.scheduling import Scheduling
from cachecraft_rag.vllm.worker.working import Workers
from tests.compute.whole_decoder import WholeDecoder

BLOCK = 16
CHUNKS = [
    Chunk(f"The {thing} of Arden dates from {year} and leaks. ")
    for thing, year in (("mill", 1701), ("bridge", 1802), ("tower", 1903))
]
CONFIG = ReuseConfig(
    capture=False, method=ReuseMethod(alpha=0.5, probe_min_rows=0, loading="whole")
)


class BlockStack:
    """A Hugging Face decoder with blocks to write into, as a `WorkerStack` has vLLM's."""

    def __init__(self, decoder: Decoder, blocks: int) -> None:
        self.decoder, layout = decoder, decoder.layout
        self.slots = torch.full(layout.shape(blocks * BLOCK), torch.nan)
        self.forwards: list[int] = []
        self.ranks = OneRank()
        self.whole_model: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)

    def layer(self, index: int, hidden: Tensor, **how: Any) -> Tensor:
        self.forwards.append(hidden.shape[1])
        return self.decoder.layer(index, hidden, **how)

    def write_blocks(self, kv: Tensor, slots: Tensor, first: int) -> None:
        self.slots[:, :, slots] = kv[:, :, first : first + len(slots)]


@pytest.fixture
def decoder(tiny_decoder: Callable[..., Decoder]) -> Decoder:
    return tiny_decoder("Llama")


@pytest.fixture
def engine(decoder: Decoder, tmp_path: Path) -> Iterator[Engine]:
    """Over a store that holds all chunks, primed."""
    with (
        ChunkCacheStore.open(tmp_path / "caches") as store,
        Engine(decoder, store, config=CONFIG) as made,
    ):
        Primer(made).prime(CHUNKS)
        yield made


@pytest.fixture
def stack(decoder: Decoder) -> BlockStack:
    return BlockStack(decoder, blocks=64)


@pytest.fixture
def settings(decoder: Decoder) -> ConnectorSettings:
    identity = ModelIdentity(decoder.fingerprint, decoder.layout, decoder.context_length)
    return ConnectorSettings("unused", identity, key="key", fill_at_once=2)


@pytest.fixture
def workers(engine: Engine, stack: BlockStack, settings: ConnectorSettings) -> Iterator[Workers]:
    made = Workers(stack, engine.store, settings, block_size=BLOCK)  # type: ignore[arg-type]
    yield made
    made.close()


@pytest.fixture
def scheduling(engine: Engine, settings: ConnectorSettings) -> Scheduling:
    return Scheduling(engine.store, settings, block_size=BLOCK, prefix_caching=True)


def ask_of(engine: Engine, order: list[int], **changed: Any) -> Ask:
    prompt = engine.prompts.build("When was it built?", [CHUNKS[i] for i in order])
    return Ask(prompt, CONFIG.changed_by(changed), captures=(), details=True)


class HashedRequest(SimpleNamespace):
    """A request whose blocks are hashed as in vLLM: each with the hash before it, the first with the salt."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.answer: list[int] = []
        self.block_hashes: list[bytes] = []
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        ids = [*(self.prompt_token_ids or ()), *self.answer]
        for number in range(len(self.block_hashes), len(ids) // BLOCK):
            before = self.block_hashes[-1] if number else str(self.cache_salt).encode()
            text = repr((before, ids[number * BLOCK : (number + 1) * BLOCK]))
            self.block_hashes.append(hashlib.sha256(text.encode()).digest())


def request_of(ask: Ask, name: str = "r", **changed: Any) -> Any:
    """A request of vLLM's, as far as the connector reads it."""
    given = {
        "request_id": name,
        "kv_transfer_params": {FIELD: ask.message("key")},
        "prompt_token_ids": ask.prompt.token_ids,
        "num_prompt_tokens": ask.prompt.bounds[-1],
        "prompt_embeds": None,
        "mm_features": [],
        "lora_request": None,
        "skip_reading_prefix_cache": False,
        "cache_salt": None,
        "sampling_params": SimpleNamespace(prompt_logprobs=None),
        "prefill_stats": None,
    }
    return HashedRequest(**(given | changed))


def blocks_of(ask: Ask, first: int = 0) -> tuple[int, ...]:
    """Blocks for the prompt, not in order."""
    needed = -(-ask.prompt.bounds[-1] // BLOCK)
    return tuple(first + place for place in reversed(range(needed)))


def fill_of(
    scheduling: Scheduling, ask: Ask, name: str = "r", *, computed: int = 0, first_block: int = 0
) -> Fill:
    request = request_of(ask, name)
    tokens = scheduling.matched(request, computed)
    assert tokens
    scheduling.allocated(request, blocks_of(ask, first_block), tokens)
    (fill,) = scheduling.take_fills()
    return fill


def run(
    workers: Workers,
    fills: list[Fill],
    *,
    rows: int = 10_000,
    vllm_is_free: bool = False,
    idle: bool = True,
) -> int:
    """Steps until all are filled; between them the threads that read and store have their time."""
    wanted, done, steps = {fill.request_id for fill in fills}, set(), 0
    while done != wanted:
        workers.step(
            fills if not steps else [], [], rows=rows, vllm_is_free=vllm_is_free, idle=idle
        )
        done |= workers.finished()
        steps += 1
        assert steps < 60_000
        time.sleep(0.001)
    return steps


def filled(stack: BlockStack, fill: Fill) -> Tensor:
    """The contents of a request's blocks, in the order of its prompt."""
    positions = torch.arange(fill.start, fill.stop)
    slots = torch.tensor(fill.blocks)[positions // BLOCK] * BLOCK + positions % BLOCK
    return stack.slots[:, :, slots]


def expected(engine: Engine, ask: Ask) -> Tensor:
    """The Hugging Face engine's buffer for the same prompt."""
    return prefilled(engine, ask)[0]


def prefilled(engine: Engine, ask: Ask) -> tuple[Tensor, Any]:
    """The Hugging Face engine's buffer for the same prompt, and its progress."""
    from cachecraft_rag.serving.chunks_in_progress import ExpectedCaptures
    from cachecraft_rag.serving.request import Request, RequestProgress
    from cachecraft_rag.serving.sampling import SamplingParams

    request = Request(
        ask.prompt, replace(ask.config, capture=False), SamplingParams(max_new_tokens=1), None, 0.0
    )
    progress = RequestProgress()
    _, buffer = engine.loop.run(
        lambda run: engine._answering.prefill(run, request, progress, ExpectedCaptures())
    )
    return buffer.kv[:, :, : ask.prompt.bounds[-1] - 1], progress


@pytest.mark.parametrize("order", [[2, 1, 0], [0, 2, 1]])
def test_blocks_hold_what_the_engine_has_in_its_buffer(
    engine: Engine, scheduling: Scheduling, workers: Workers, stack: BlockStack, order: list[int]
) -> None:
    ask = ask_of(engine, order)
    fill = fill_of(scheduling, ask)
    run(workers, [fill])
    torch.testing.assert_close(filled(stack, fill), expected(engine, ask), rtol=0, atol=1e-5)
    result = workers.take_result()
    assert result is not None
    report = result.reports["r"]
    assert {one["outcome"] for one in report["segments"][:-1]} == (
        {"exact"} if order == [2, 1, 0] else {"exact", "reused"}
    )


@pytest.mark.parametrize("window", [1, 3])
def test_early_termination_drops_the_same_rows(
    window: int,
    engine: Engine,
    scheduling: Scheduling,
    workers: Workers,
    stack: BlockStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In buffers that hold NaN wherever nothing is written."""
    fresh = Recycler.empty
    monkeypatch.setattr(Recycler, "empty", lambda *asked: fresh(*asked).fill_(math.nan))
    ask = ask_of(
        engine,
        [0, 2, 1],
        method={"early_termination": "published", "early_termination_window": window},
        recompute_ratio=0.5,
    )
    fill = fill_of(scheduling, ask)
    run(workers, [fill])
    buffer, progress = prefilled(engine, ask)
    result = workers.take_result()
    assert result is not None
    report, layers = result.reports["r"], stack.decoder.layout.layers
    assert report["focus_layer"] == progress.focus_layer
    assert report["row_layers"] == progress.row_layers - layers
    assert report["recomputed"] == [list(one.recompute) for one in progress.plan]
    torch.testing.assert_close(filled(stack, fill), buffer, rtol=0, atol=1e-5)
    assert progress.focus_layer is not None or window > 1


def test_what_the_probe_finds_in_focus_is_reported_and_spares_the_same_rows(
    engine: Engine, scheduling: Scheduling, workers: Workers, stack: BlockStack
) -> None:
    letter = Chunk("N")  # no question attends to it as much as to a sentence
    inn = Chunk("The inn of Arden dates from 1604 and leaks. ")
    Primer(engine).prime([letter, inn])
    chunks = [CHUNKS[0], letter, CHUNKS[2], CHUNKS[1], inn]
    prompt = engine.prompts.build("When was it built?", chunks)
    config = replace(
        CONFIG.with_method(early_termination="probe"), recompute_ratio=0.5, nearest_share=0.0
    )
    ask = Ask(prompt, config, captures=(), details=True)
    fill = fill_of(scheduling, ask)
    run(workers, [fill])
    buffer, progress = prefilled(engine, ask)
    result = workers.take_result()
    assert result is not None
    report, layers = result.reports["r"], stack.decoder.layout.layers
    assert report["row_layers"] == progress.row_layers - layers
    torch.testing.assert_close(filled(stack, fill), buffer, rtol=0, atol=1e-5)
    told = [(one["in_focus"], one["spared"]) for one in report["segments"]]
    assert told == [(one.in_focus, one.spared) for one in progress.plan]
    assert told[4] == (False, 2)  # half of the letter and its separator, rounded up
    assert max(one["focus"] for one in report["segments"][1:-1]) == 1.0


@pytest.mark.parametrize("read_bytes_per_s", [50_000.0, math.inf])
def test_both_ends_meet_wherever_the_disk_is_fast_or_slow(
    read_bytes_per_s: float, engine: Engine, stack: BlockStack, settings: ConnectorSettings
) -> None:
    """What is stored is exact here, so the blocks hold full prefill, whatever was loaded and whatever computed."""
    root = engine.store.root
    engine.store.flush()
    with ChunkCacheStore.open(
        root, host_bytes=0, tuning=StoreTuning(read_bytes_per_s=read_bytes_per_s)
    ) as slow:
        made = Workers(stack, slow, settings, block_size=BLOCK)  # type: ignore[arg-type]
        scheduling = Scheduling(slow, settings, block_size=BLOCK, prefix_caching=True)
        ask = ask_of(engine, [2, 1, 0], method={"loading": "cake"})
        for name in ("first", "second"):  # the second time, the speed of computing is known
            fill = fill_of(scheduling, ask, name)
            run(made, [fill])
            result = made.take_result()
            assert result is not None
            segments = result.reports[name]["segments"][:-1]
            # computed: nothing of it was loaded
            assert {one["outcome"] for one in segments} <= {"exact", "computed"}
            computed = any(one["not_loaded"] or one["outcome"] == "computed" for one in segments)
            assert computed or read_bytes_per_s == math.inf
            full = expected(engine, ask_of(engine, [2, 1, 0], reuse=False))
            torch.testing.assert_close(filled(stack, fill), full, rtol=0, atol=1e-3)
        made.close()


class TwoRanks(OneRank):
    """The first of two ranks; the other one does the same at the same time."""

    size = 2


@pytest.mark.parametrize("ranks", [OneRank(), TwoRanks()])
def test_a_step_ends_after_a_slow_layer_with_one_rank_and_with_several(
    ranks: OneRank,
    engine: Engine,
    scheduling: Scheduling,
    stack: BlockStack,
    settings: ConnectorSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stack.ranks = ranks
    run_layer = BlockStack.layer

    def slow_layer(*given: Any, **how: Any) -> Tensor:
        time.sleep(0.06)  # longer than a step may take
        return run_layer(*given, **how)

    monkeypatch.setattr(BlockStack, "layer", slow_layer)
    made = Workers(stack, engine.store, settings, block_size=BLOCK)  # type: ignore[arg-type]
    fill = fill_of(scheduling, ask_of(engine, [2, 1, 0], reuse=False))
    made.step([fill], [], rows=10_000)
    layers_of_steps = [len(stack.forwards)]
    while not made.finished():
        made.step([], [], rows=10_000)
        layers_of_steps.append(len(stack.forwards) - sum(layers_of_steps))
    made.close()
    assert layers_of_steps == [1] * stack.decoder.layout.layers


class Clock:
    """Stands for the module `time`; it goes on by itself only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize("ranks", [OneRank(), TwoRanks()])
@pytest.mark.parametrize(("own_s", "layers_of_a_step"), [(0.01, 1), (0.025, 2), (0.045, 4)])
def test_fillings_take_eight_times_as_long_as_a_step_of_vllms_own(
    own_s: float,
    layers_of_a_step: int,
    ranks: OneRank,
    engine: Engine,
    scheduling: Scheduling,
    stack: BlockStack,
    settings: ConnectorSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps in which prompts are filled tell nothing: on a GPU vLLM waits for the filling."""
    clock = Clock()
    for module in (working, filling):
        monkeypatch.setattr(module, "time", clock)
    stack.ranks = ranks
    run_layer = BlockStack.layer

    def slow_layer(*given: Any, **how: Any) -> Tensor:
        clock.now += 0.101
        return run_layer(*given, **how)

    monkeypatch.setattr(BlockStack, "layer", slow_layer)
    made = Workers(stack, engine.store, settings, block_size=BLOCK)  # type: ignore[arg-type]
    for _ in range(5):
        made.step([], [], rows=10_000, idle=False)
        clock.now += own_s
    fills = [fill_of(scheduling, ask_of(engine, [2, 1, 0], reuse=False))]
    layers = stack.decoder.layout.layers
    steps = []
    while not made.finished():
        before = len(stack.forwards)
        made.step(fills, [], rows=10_000, idle=False)
        steps.append(len(stack.forwards) - before)
        fills = []
        clock.now += 5.0
    made.close()
    assert steps[0] == min(layers_of_a_step, layers)
    assert len(steps) == -(-layers // layers_of_a_step)


def test_long_prompts_are_filled_one_after_the_other(
    engine: Engine,
    scheduling: Scheduling,
    workers: Workers,
    stack: BlockStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Together they would all end as late as the last one."""
    monkeypatch.setattr(ComputeSpeed, "known", True)
    monkeypatch.setattr(ComputeSpeed, "seconds", lambda *_: 0.2)
    fills = [
        fill_of(scheduling, ask_of(engine, order, reuse=False), name, first_block=first)
        for name, first, order in (("first", 0, [0, 2, 1]), ("second", 20, [1, 0, 2]))
    ]
    stack.forwards.clear()
    workers.step(fills, [], rows=1)
    done_after = {}
    while len(done_after) < 2:
        workers.step([], [], rows=1)  # one layer
        done_after |= dict.fromkeys(workers.finished(), len(stack.forwards))
    layers = stack.decoder.layout.layers
    assert done_after == {"first": layers, "second": 2 * layers}


def test_a_step_without_rows_begins_fillings_and_computes_nothing(
    engine: Engine, scheduling: Scheduling, workers: Workers, stack: BlockStack
) -> None:
    """So is the step that computes the first token of a filled request."""
    fill = fill_of(scheduling, ask_of(engine, [2, 1, 0], reuse=False), "r")
    stack.forwards.clear()
    workers.step([fill], [], rows=0, idle=False)
    assert stack.forwards == []
    assert workers.is_filling
    run(workers, [fill])
    scheduling.ended({"r"})
    assert not scheduling.computes_first_token(["another"])
    assert scheduling.computes_first_token(["r", "another"])
    assert not scheduling.computes_first_token(["r", "another"])


def test_a_local_hit_is_not_written_over(
    engine: Engine, scheduling: Scheduling, workers: Workers, stack: BlockStack
) -> None:
    ask = ask_of(engine, [0, 2, 1])
    fill = fill_of(scheduling, ask, computed=2 * BLOCK)
    assert fill.start == 2 * BLOCK
    run(workers, [fill])
    untouched = torch.tensor(fill.blocks[:2])[:, None] * BLOCK + torch.arange(BLOCK)
    assert stack.slots[:, :, untouched.flatten()].isnan().all()
    assert not filled(stack, fill).isnan().any()


def test_requests_of_one_step_run_as_one_forward(
    engine: Engine, scheduling: Scheduling, workers: Workers, stack: BlockStack
) -> None:
    asks = [
        ask_of(engine, [0, 2, 1], method={"selector": "cache_craft"}),
        ask_of(engine, [1, 0, 2], method={"selector": "cache_craft"}),
    ]
    fills = [fill_of(scheduling, ask, f"r{i}", first_block=20 * i) for i, ask in enumerate(asks)]
    stack.forwards.clear()
    run(workers, fills)
    assert len(stack.forwards) == stack.decoder.layout.layers
    for fill, ask in zip(fills, asks, strict=True):
        torch.testing.assert_close(filled(stack, fill), expected(engine, ask), rtol=0, atol=1e-5)


def test_a_forward_holds_no_more_rows_than_memory_is_reserved_for(
    engine: Engine, settings: ConnectorSettings, scheduling: Scheduling, stack: BlockStack
) -> None:
    asks = [
        ask_of(engine, [0, 2, 1], reuse=False),
        ask_of(engine, [1, 0, 2], reuse=False),
    ]
    fills = [fill_of(scheduling, ask, f"r{i}", first_block=20 * i) for i, ask in enumerate(asks)]
    rows = max(fill.stop for fill in fills)
    memory = FillMemory(1, 1, 1, total=3 * (rows + 1), pass_rows=rows + 1)
    made = Workers(stack, engine.store, settings, block_size=BLOCK, memory=memory)  # type: ignore[arg-type]
    stack.forwards.clear()
    run(made, fills)
    made.close()
    assert len(stack.forwards) == 2 * stack.decoder.layout.layers
    assert max(stack.forwards) <= rows
    for fill, ask in zip(fills, asks, strict=True):
        torch.testing.assert_close(filled(stack, fill), expected(engine, ask), rtol=0, atol=1e-5)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    ("order", "changed"),
    [
        ([0, 2, 1], {"reuse": False}),
        ([0, 2, 1], {"recompute_ratio": 1.0}),
        ([2, 1, 0], {}),  # exact
        ([0, 2, 1], {"recompute_ratio": 0.7, "method": {"probe_min_rows": 10**6}}),
    ],
)
def test_a_prompt_with_more_rows_than_fit_is_filled_in_several_passes_as_in_one(
    at_once: bool,
    order: list[int],
    changed: dict[str, Any],
    engine: Engine,
    settings: ConnectorSettings,
    scheduling: Scheduling,
    stack: BlockStack,
) -> None:
    ask = ask_of(engine, order, **changed)
    most_rows = 40
    memory = FillMemory(1, 1, 1, total=10**6, pass_rows=most_rows)
    whole = WholeDecoder(engine.decoder) if at_once else None
    made = Workers(
        stack,  # type: ignore[arg-type]
        engine.store,
        settings,
        block_size=BLOCK,
        memory=memory,
        whole_model=whole,
    )
    fill = fill_of(scheduling, ask)
    stack.forwards.clear()
    run(made, [fill])
    made.close()
    if whole is None:
        assert max(stack.forwards) <= most_rows
        assert len(stack.forwards) > stack.decoder.layout.layers or order == [2, 1, 0]
    torch.testing.assert_close(filled(stack, fill), expected(engine, ask), rtol=0, atol=1e-5)


def test_a_request_waits_until_memory_is_given_back(
    engine: Engine, settings: ConnectorSettings
) -> None:
    ask = ask_of(engine, [0, 2, 1])
    tokens = ask.prompt.bounds[-1]

    def scheduling_of(memory: FillMemory) -> Scheduling:
        return Scheduling(
            engine.store, settings, block_size=BLOCK, prefix_caching=True, memory=memory
        )

    scheduling = scheduling_of(FillMemory(10, 5, 0, total=15 * tokens))
    fill_of(scheduling, ask, "first")
    second = request_of(ask, "second")
    assert scheduling.matched(second, 0) is None
    scheduling.ended({"first"})
    assert scheduling.matched(second, 0)

    scheduling = scheduling_of(FillMemory(10, 5, 0, total=15 * tokens))
    scheduling.allocated(
        request_of(ask, "aborted"),
        blocks_of(ask),
        scheduling.matched(request_of(ask, "aborted"), 0) or 0,
    )
    scheduling.finished(request_of(ask, "aborted"))  # before the workers have heard of it
    assert scheduling.take_fills() == []
    assert scheduling.matched(second, 0)

    scheduling = scheduling_of(FillMemory(10, 5, 0, total=15 * (tokens - 1)))
    assert scheduling.matched(second, 0) == 0
    report = scheduling.finished(second)
    assert report is not None
    assert f"it has {tokens} tokens" in report[FIELD]["refused"]


def test_a_step_computes_no_more_rows_than_it_may(
    engine: Engine, scheduling: Scheduling, workers: Workers, stack: BlockStack
) -> None:
    ask = ask_of(engine, [0, 2, 1], reuse=False)
    fill = fill_of(scheduling, ask)
    layers, rows = stack.decoder.layout.layers, fill.stop
    # one layer in each step, so that there is progress
    assert run(workers, [fill], rows=1) == layers
    assert stack.forwards[-layers:] == [rows] * layers


def test_a_request_that_is_gone_is_returned_once(
    engine: Engine, scheduling: Scheduling, workers: Workers
) -> None:
    fill = fill_of(scheduling, ask_of(engine, [0, 2, 1]))
    workers.step([fill], [], rows=1)
    assert not workers.finished()
    workers.step([], ["r", "never heard of"], rows=1)
    assert workers.finished() == {"r"}
    workers.step([], ["r"], rows=1)
    assert not workers.finished()
    assert workers.take_result() is None


def test_one_mistake_is_one_request_s(
    engine: Engine,
    scheduling: Scheduling,
    workers: Workers,
    stack: BlockStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM computes its blocks, and the report says why; the next request is filled again."""

    def broken(*_args: Any, **_how: Any) -> Any:
        raise RuntimeError("of this test")

    ask = ask_of(engine, [0, 2, 1])
    fill, other = (
        fill_of(scheduling, ask, computed=2 * BLOCK),
        fill_of(scheduling, ask, "other", first_block=20),
    )
    places = [
        (working, "advance"),
        (Workers, "_finish"),
        (Workers, "_group"),
        (PendingLoads, "place"),
    ]
    places += [(filling, "resolve"), (filling, "OverlappedPrefill"), (Filling, "give_up")]
    for number, (owner, name) in enumerate(places):
        mine, fine = (
            replace(fill, request_id=f"r{number}"),
            replace(other, request_id=f"fine{number}"),
        )
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, broken)
            if name == "give_up":
                workers.step([mine], [], rows=1)
                workers.step([], [mine.request_id], rows=1)
                assert workers.finished() == {mine.request_id}
                continue
            run(workers, [mine])
        assert workers.failed_blocks() == set(fill.blocks[2:])
        assert not workers.failed_blocks()
        result = workers.take_result()
        assert result is not None
        assert "of this test" in result.reports[mine.request_id]["refused"]
        run(workers, [fine])
        torch.testing.assert_close(filled(stack, fine), expected(engine, ask), rtol=0, atol=1e-5)
        assert not workers.failed_blocks()
        workers.take_result()
    request = request_of(ask)
    scheduling.ended({"r", "other"})
    assert scheduling.matched(request, 0)
    scheduling.take_result(StepResult({"r": {"refused": "of this test"}}))
    assert scheduling.matched(request, 0) == 0  # or it would be filled, and fail, again and again
    assert scheduling.finished(request) == {FIELD: {"refused": "of this test"}}


def test_captures_are_stored_before_the_answer_where_that_is_asked(
    decoder: Decoder, tmp_path: Path, stack: BlockStack, settings: ConnectorSettings
) -> None:
    with (
        ChunkCacheStore.open(tmp_path / "empty") as store,
        Engine(decoder, store, config=CONFIG) as engine,
    ):
        made = Workers(stack, store, settings, block_size=BLOCK)  # type: ignore[arg-type]
        scheduling = Scheduling(store, settings, block_size=BLOCK, prefix_caching=True)
        ask = replace(
            ask_of(engine, [0, 2, 1], reuse=False),
            captures=(0, 1, 3),
            when_stored=True,
            primed=True,
        )
        run(made, [fill_of(scheduling, ask)])
        found = engine.look_up(ask.prompt.segments[:-1]).variants
        assert [len(found[one.segment_id]) for one in ask.prompt.segments[:-1]] == [1, 1, 0, 1]
        assert all(one.primed for some in found.values() for one in some)
        again = replace(fill_of(scheduling, ask, "again"), again=True)
        run(made, [again])
        assert not made._write_back.pending()
        made.close()


@pytest.mark.parametrize("vllm_is_free", [False, True])
def test_descriptions_rest_while_requests_are_computed_until_one_waits_for_them(
    decoder: Decoder,
    tmp_path: Path,
    stack: BlockStack,
    settings: ConnectorSettings,
    monkeypatch: pytest.MonkeyPatch,
    *,
    vllm_is_free: bool,
) -> None:
    """Also if vLLM computes nothing in that step: the request's own first token is next."""
    monkeypatch.setattr(working, "_RESTS", 1e9)
    with (
        ChunkCacheStore.open(tmp_path / "empty") as store,
        Engine(decoder, store, config=CONFIG) as engine,
    ):
        made = Workers(stack, store, settings, block_size=BLOCK)  # type: ignore[arg-type]
        scheduling = Scheduling(store, settings, block_size=BLOCK, prefix_caching=True)
        ask = replace(ask_of(engine, [0, 2, 1], capture=True), captures=None)
        run(made, [fill_of(scheduling, ask)], vllm_is_free=vllm_is_free, idle=False)
        result = made.take_result()
        assert result is not None
        scheduling.take_result(result)
        scheduling.ended({"r"})
        assert result.capturing == made._write_back.pending() != frozenset()
        assert not scheduling.take_captures_awaited()
        assert scheduling.matched(request_of(ask_of(engine, [2, 1]), "waits"), 0) is None
        assert scheduling.take_captures_awaited()
        made.step([], [], rows=0, idle=False, captures_awaited=True)
        assert made._write_back.wait_for(made._write_back.pending(), 60)
        made.close()


def test_descriptions_wait_until_no_prompt_is_filled(
    decoder: Decoder,
    tmp_path: Path,
    stack: BlockStack,
    settings: ConnectorSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(working, "_RESTS", 0)
    while_filling: list[bool] = []  # of each part
    second_part = threading.Event()
    add_layer = AttentionAccumulator.add_layer

    with (
        ChunkCacheStore.open(tmp_path / "empty") as store,
        Engine(decoder, store, config=CONFIG) as engine,
    ):
        made = Workers(stack, store, settings, block_size=BLOCK)  # type: ignore[arg-type]

        def noted(accumulator: AttentionAccumulator, layer: int, keys: Tensor) -> None:
            if while_filling:
                second_part.set()
            while_filling.append(made.is_filling)
            add_layer(accumulator, layer, keys)

        monkeypatch.setattr(AttentionAccumulator, "add_layer", noted)
        scheduling = Scheduling(store, settings, block_size=BLOCK, prefix_caching=True)
        capturing = replace(ask_of(engine, [0, 2, 1], capture=True), captures=None)
        short = fill_of(scheduling, capturing, "captures")
        long = fill_of(scheduling, ask_of(engine, [1, 2], reuse=False), "long", first_block=20)
        made.step([short], [], rows=1, idle=False)
        made.step([long], [], rows=1, idle=False)
        while "captures" not in made.finished():
            made.step([], [], rows=1, idle=False)
        assert made.is_filling
        second_part.wait(0.5)  # it does not begin, however long this waits
        while made.is_filling:
            made.step([], [], rows=1, idle=False)
        assert second_part.wait(60)
        assert sum(while_filling) <= 1  # the part that had begun, or the first
        made.close()


# -- the scheduler's end ----------------------------------------------------------------------------------------------


def test_the_answer_stays_the_same_while_a_request_lives(
    engine: Engine, scheduling: Scheduling
) -> None:
    request = request_of(ask_of(engine, [0, 2, 1]))
    tokens = scheduling.matched(request, 0)
    assert tokens == request.num_prompt_tokens - 1
    scheduling.allocated(request, (0, 1), tokens)
    (first,) = scheduling.take_fills()
    scheduling.ended({"r"})
    engine.store.evict(down_to_bytes=0)
    assert scheduling.matched(request, 0) == tokens  # after a preemption
    scheduling.allocated(request, (2, 3), tokens)
    (second,) = scheduling.take_fills()
    assert (first.again, second.again, first.found) == (False, True, second.found)
    assert scheduling.finished(request) == {
        FIELD: {"refused": "it ended before its prompt was filled"}
    }
    assert scheduling.finished(request) is None


def test_what_is_refused_is_refused_by_name(engine: Engine, scheduling: Scheduling) -> None:
    ask = ask_of(engine, [0, 2, 1])
    cases: list[tuple[dict[str, Any], str]] = [
        ({"prompt_token_ids": ask.prompt.token_ids[:-1]}, "sealed"),
        ({"prompt_token_ids": None}, "sealed"),
        ({"kv_transfer_params": {FIELD: {"segments": []}}}, "sealed"),
        ({"mm_features": [1]}, "images"),
        (
            {"lora_request": SimpleNamespace(lora_int_id=1, lora_path="/nowhere")},
            "/nowhere holds no adapter_config.json",
        ),
        ({"prompt_embeds": 1}, "embeddings"),
        ({"sampling_params": None}, "no text"),
        ({"sampling_params": SimpleNamespace(prompt_logprobs=1)}, "log-probabilities"),
        ({"skip_reading_prefix_cache": True}, "log-probabilities"),
    ]
    for changed, reason in cases:
        request = request_of(ask, **changed)
        tokens = (scheduling.matched(request, 0), scheduling.matched(request, 0))
        assert tokens == (0, 0), reason
        report = scheduling.finished(request)
        assert report is not None
        assert reason in report[FIELD]["refused"]
    plain = request_of(ask, kv_transfer_params=None)
    assert (scheduling.matched(plain, 0), scheduling.finished(plain)) == (0, None)


def arrive(scheduling: Scheduling, ask: Ask, **changed: Any) -> Any:
    """The request once the scheduler has noted it, with its block hashes."""
    request = request_of(ask, repr(changed), **changed)
    scheduling.arrived(request)
    return request


def shared_blocks(first: Any, second: Any) -> int:
    """Number of first blocks that two requests share in the prefix cache."""
    pairs = zip(first.block_hashes, second.block_hashes, strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


def test_blocks_before_the_first_chunk_are_shared_and_no_others(
    engine: Engine, scheduling: Scheduling
) -> None:
    ask = ask_of(engine, [0, 2, 1])
    exact_blocks = ask.prompt.bounds[1] // BLOCK
    assert exact_blocks > 0
    request = arrive(scheduling, ask)
    for other in (
        ask_of(engine, [0, 1, 2]),
        ask_of(engine, [0, 2, 1], recompute_ratio=0.5),
        replace(ask, client_salt="theirs"),
        replace(ask, session="ann"),
    ):
        assert shared_blocks(request, arrive(scheduling, other, number=repr(other))) == exact_blocks
    without_message = request_of(ask, "plain", kv_transfer_params=None)
    assert shared_blocks(request, without_message) == exact_blocks
    assert request.block_hashes == arrive(scheduling, ask, number=2).block_hashes
    for salt in ("theirs", ask.cache_salt("default")):
        assert shared_blocks(request, arrive(scheduling, ask, cache_salt=salt)) == 0


@pytest.mark.parametrize("length", range(2, 2 * BLOCK + 3))
@pytest.mark.parametrize("instruction", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_blocks_of_answers_to_short_prompts_are_not_shared(
    scheduling: Scheduling, instruction: int, length: int
) -> None:
    """A block with a chunk may become whole only with the answer."""

    def answered(chunk: str, **changed: Any) -> Any:
        ids = tuple(range(instruction + length))
        segments = (
            Segment("system", "instruction", ids[:instruction]),
            Segment("chunk", chunk, ids[instruction : instruction + 1]),
            Segment("question", "question", (*ids[instruction + 1 :], 7), private=True),
        )
        request = arrive(scheduling, Ask(Prompt(segments), CONFIG), chunk=chunk, **changed)
        request.answer = [9] * (2 * BLOCK)
        request.update_block_hashes()
        return request

    first = answered("first")
    assert len(first.block_hashes) == (instruction + length + 1 + 2 * BLOCK) // BLOCK
    for other in (answered("second"), answered("first", kv_transfer_params=None)):
        assert shared_blocks(first, other) <= instruction // BLOCK


def test_nothing_is_shared_if_vllm_hashes_blocks_of_another_size(
    engine: Engine, settings: ConnectorSettings
) -> None:
    other_size = Scheduling(engine.store, settings, block_size=3 * BLOCK, prefix_caching=True)
    asks = [ask_of(engine, [0, 2, 1]), ask_of(engine, [0, 1, 2])]
    first, second = (arrive(other_size, ask, number=number) for number, ask in enumerate(asks))
    assert shared_blocks(first, second) == 0


def test_blocks_of_a_request_that_is_left_to_vllm_stay_vllms_own(
    engine: Engine, scheduling: Scheduling
) -> None:
    ask = replace(ask_of(engine, [0, 2, 1], reuse=False, capture=False), captures=None)
    plain = request_of(ask, "plain", kv_transfer_params=None)
    assert arrive(scheduling, ask).block_hashes == plain.block_hashes
    images = arrive(scheduling, ask_of(engine, [0, 2, 1]), mm_features=[1])
    assert images.block_hashes == plain.block_hashes


def test_an_instruction_in_the_prefix_cache_does_not_stand_for_a_short_chunk(
    engine: Engine, scheduling: Scheduling
) -> None:
    """The chunk begins and ends in a block that vLLM has not computed."""
    instruction = tuple(range(2 * BLOCK))
    segments = (
        Segment("system", "new instruction", instruction),
        Segment("chunk", "new chunk", (5, 6)),
        Segment("question", "question", (7,) * BLOCK, private=True),
    )
    ask = Ask(Prompt(segments), replace(CONFIG, capture=True))
    left = ask.prompt.bounds[-1] - 1 - 2 * BLOCK
    assert scheduling.matched(request_of(ask), 2 * BLOCK) == left


def test_requests_wait_their_turn_and_for_captures(engine: Engine, scheduling: Scheduling) -> None:
    ask = ask_of(engine, [0, 2, 1])
    for name in ("a", "b"):
        fill_of(scheduling, ask, name)
    third = request_of(ask, "c")
    assert scheduling.matched(third, 0) is None
    scheduling.ended({"a"})
    scheduling.take_result(StepResult({}, frozenset({ask.prompt.segments[1].segment_id})))
    assert scheduling.matched(third, 0)
    scheduling.ended({"b"})
    unknown = engine.prompts.build(
        "When was it built?", [Chunk("The lock of Arden leaks, too. "), CHUNKS[0]]
    )
    fourth = request_of(replace(ask, prompt=unknown), "d")
    scheduling.take_result(StepResult({}, frozenset({unknown.segments[2].segment_id})))
    assert scheduling.matched(fourth, 0) is None  # a chunk that is stored nowhere is being captured
    scheduling.take_result(StepResult({}, frozenset()))
    assert scheduling.matched(fourth, 0) is None  # it looks up again
    assert scheduling.matched(fourth, 0)


def save_adapters(root: Path) -> list[Any]:
    """Save two LoRA adapters; return what requests say about them."""
    adapters = []
    for number in (1, 2):
        folder = root / str(number)
        folder.mkdir()
        save_file({"lora_A.weight": torch.full((1,), number)}, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text("{}")
        adapters.append(SimpleNamespace(lora_int_id=number, lora_path=str(folder)))
    return adapters


@pytest.mark.parametrize("tenant", ["", "a tenant"])
def test_blocks_with_chunks_serve_one_adapter_alone(
    tenant: str, engine: Engine, scheduling: Scheduling, tmp_path: Path
) -> None:
    ask = replace(ask_of(engine, [0, 2, 1]), namespace=tenant)
    users = [None, *save_adapters(tmp_path)]
    hashes = [arrive(scheduling, ask, lora_request=user).block_hashes[-1] for user in users]
    assert len(set(hashes)) == 3


def test_a_request_waits_for_no_captures_of_another_adapter(
    engine: Engine, scheduling: Scheduling, tmp_path: Path
) -> None:
    adapters = save_adapters(tmp_path)
    unknown = engine.prompts.build("When was it built?", [Chunk("The lock of Arden leaks, too. ")])
    ask = Ask(unknown, CONFIG.changed_by({"capture": True}))
    first = request_of(ask, "first", lora_request=adapters[0])
    scheduling.allocated(first, blocks_of(ask), scheduling.matched(first, 0) or 0)
    (fill,) = scheduling.take_fills()
    assert fill.adapter is not None
    segments = {segment.segment_id for segment in unknown.segments[:-1]}
    for is_filled in (False, True):
        if is_filled:
            scheduling.take_result(StepResult({}, frozenset(segments)))
            scheduling.ended({"first"})
        for name, adapter in (("same", adapters[0]), ("other", adapters[1]), ("base", None)):
            request = request_of(ask, f"{name} {is_filled}", lora_request=adapter)
            assert (scheduling.matched(request, 0) is None) == (name == "same"), name


@pytest.mark.parametrize(
    ("owner", "other"), [("namespace", "another tenant"), ("session", "another session")]
)
def test_a_request_waits_for_no_captures_that_it_may_not_use(
    engine: Engine, scheduling: Scheduling, owner: str, other: str
) -> None:
    """Otherwise the time to the first token would tell what others have sent."""
    unknown = engine.prompts.build("When was it built?", [Chunk("The lock of Arden leaks, too. ")])
    system, *rest = unknown.segments
    private = Prompt((replace(system, private=owner == "session"), *rest))
    ask = Ask(private, CONFIG.changed_by({"capture": True}), **{owner: "first"})
    fill_of(scheduling, ask, "first")
    segments = {segment.segment_id for segment in private.segments[:-1]}
    for is_filled in (False, True):
        if is_filled:
            scheduling.take_result(StepResult({}, frozenset(segments)))
            scheduling.ended({"first"})
        for name in ("first", other):
            request = request_of(replace(ask, **{owner: name}), f"{name} {is_filled}")
            assert (scheduling.matched(request, 0) is None) == (name == "first"), name


def test_a_tenant_waits_for_no_capture_that_none_of_its_requests_has_announced(
    engine: Engine, scheduling: Scheduling
) -> None:
    unknown = engine.prompts.build("When was it built?", [Chunk("The lock of Arden leaks, too. ")])
    ask = Ask(unknown, CONFIG.changed_by({"capture": True}))
    segments = {segment.segment_id for segment in unknown.segments[:-1]}
    scheduling.take_result(StepResult({}, frozenset(segments)))
    own = request_of(ask, "own")
    assert scheduling.matched(own, 0) is None
    tenants = request_of(replace(ask, namespace="a tenant"), "a tenant's")
    assert scheduling.matched(tenants, 0) is not None


@pytest.mark.parametrize("clients", [2, 4, 8])
def test_new_chunks_are_computed_once_however_many_ask_for_them(
    clients: int, decoder: Decoder, tmp_path: Path, stack: BlockStack, settings: ConnectorSettings
) -> None:
    """They arrive together; the last one wants another chunk too, which it computes after those of the others."""
    settings = replace(settings, fill_at_once=8)
    with (
        ChunkCacheStore.open(tmp_path / "empty") as store,
        Engine(decoder, store, config=CONFIG) as engine,
    ):
        made = Workers(stack, store, settings, block_size=BLOCK)  # type: ignore[arg-type]
        scheduling = Scheduling(store, settings, block_size=BLOCK, prefix_caching=True)
        own = Chunk("The well of Arden is dry. ")
        orders = [[CHUNKS[0], CHUNKS[1], CHUNKS[2]]] * (clients - 1) + [[own, CHUNKS[1], CHUNKS[2]]]
        config = replace(CONFIG, capture=True)
        asks = [
            Ask(engine.prompts.build(f"When? {i}", chunks), config)
            for i, chunks in enumerate(orders)
        ]
        reports = serve(scheduling, made, [request_of(ask, f"r{i}") for i, ask in enumerate(asks)])
        computed = [
            segment.segment_id
            for i, ask in enumerate(asks)
            for segment, report in zip(
                ask.prompt.segments[:-1], reports[f"r{i}"]["segments"], strict=False
            )
            if report["outcome"] == "computed"
        ]
        assert sorted(computed) == sorted(
            [
                asks[0].prompt.segments[0].segment_id,
                own.chunk_id,
                *(chunk.chunk_id for chunk in CHUNKS),
            ]
        )
        made.close()
        assert len(store.rows()) == len(computed)


def serve(scheduling: Scheduling, workers: Workers, requests: list[Any]) -> dict[str, Any]:
    """Fill them all, as vLLM's scheduler and its steps do; returns their reports."""
    waiting, reports, steps = list(requests), dict[str, Any](), 0
    while len(reports) < len(requests):
        for place, request in enumerate(list(waiting)):
            if tokens := scheduling.matched(request, 0):
                blocks = tuple(range(8 * place, 8 * place + -(-request.num_prompt_tokens // BLOCK)))
                scheduling.allocated(request, blocks, tokens)
                waiting.remove(request)
        workers.step(scheduling.take_fills(), [], rows=10_000)
        if (result := workers.take_result()) is not None:
            scheduling.take_result(result)
            reports |= result.reports
        scheduling.ended(workers.finished())
        steps += 1
        assert steps < 60_000
        time.sleep(0.001)
    return reports


@pytest.mark.parametrize("capture", [True, False])
def test_the_same_new_chunks_come_from_vllms_own_prefix_cache(
    capture: bool, decoder: Decoder, tmp_path: Path, settings: ConnectorSettings
) -> None:
    """No capture is waited for, and none is needed; another question, so vLLM may compute the rest of a block."""
    with (
        ChunkCacheStore.open(tmp_path / "empty") as store,
        Engine(decoder, store, config=CONFIG) as engine,
    ):
        asks = [
            Ask(engine.prompts.build(f"When? {i}", CHUNKS), replace(CONFIG, capture=True))
            for i in range(2)
        ]
        asks = [replace(ask, captures=None if capture else ()) for ask in asks]
        question = asks[0].prompt.bounds[-2]
        for caching in (True, False):
            made = Scheduling(store, settings, block_size=BLOCK, prefix_caching=caching)
            fill_of(made, asks[0], "first")
            second = request_of(asks[1], "second")
            assert (made.matched(second, 0) is None) == (caching or capture)
            if caching:
                assert made.matched(second, question - BLOCK) is None
                assert made.matched(second, question - BLOCK + 1) == 0  # the first one is filled


def test_a_request_waits_no_longer_than_computing_takes(
    decoder: Decoder, tmp_path: Path, settings: ConnectorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(scheduling_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with (
        ChunkCacheStore.open(tmp_path / "empty") as store,
        Engine(decoder, store, config=CONFIG) as engine,
    ):
        made = Scheduling(store, settings, block_size=BLOCK, prefix_caching=True)
        asks = [
            Ask(engine.prompts.build(f"When? {i}", CHUNKS), replace(CONFIG, capture=True))
            for i in range(3)
        ]
        fill_of(made, asks[0], "first")  # it is unknown how long it takes
        second, rows = request_of(asks[1], "second"), asks[0].prompt.bounds[-2]
        assert made.matched(second, 0) is None
        now[0] += 9.9
        assert made.matched(second, 0) is None
        now[0] += 0.2
        assert made.matched(second, 0)
        made.finished(second)
        layers, tokens = decoder.layout.layers, asks[0].prompt.bounds[-1]
        now[0] = 100.0 + 2.0 * tokens
        made.take_result(StepResult({"first": {"row_layers": tokens * layers}}))  # 2 s for a row
        third = request_of(asks[2], "third")
        assert made.matched(third, 0) is None
        now[0] += 2 * 2.0 * rows - 0.1
        assert made.matched(third, 0) is None
        now[0] += 0.2
        assert made.matched(third, 0)


def test_vllm_computes_what_is_nearly_there(engine: Engine, scheduling: Scheduling) -> None:
    ask = ask_of(engine, [0, 2, 1])
    question = ask.prompt.bounds[-2]
    assert scheduling.matched(request_of(ask), question - BLOCK + 1) == 0
    assert (
        scheduling.matched(request_of(ask), question - BLOCK)
        == ask.prompt.bounds[-1] - 1 - question + BLOCK
    )
    scheduling.allocated(request_of(ask), tuple(range(100)), 20)  # and then it is preempted
    assert scheduling.matched(request_of(ask), question) == 0
    scheduling.ended({request_of(ask).request_id})
    assert scheduling.matched(request_of(ask), question - 1) == ask.prompt.bounds[-1] - question
    nothing = replace(ask_of(engine, [0]), captures=None)
    other = replace(
        nothing,
        prompt=replace(
            nothing.prompt,
            segments=tuple(
                replace(one, segment_id="new " + one.segment_id) for one in nothing.prompt.segments
            ),
        ),
    )
    assert scheduling.matched(request_of(other, "new"), 0) == 0


def test_a_prompt_that_was_filled_before_is_filled_alike(
    engine: Engine, scheduling: Scheduling
) -> None:
    """With blocks that vLLM computed itself, the same request would be answered differently."""
    # the other one has another salt
    asks = [ask_of(engine, [0, 2, 1]), ask_of(engine, [0, 2, 1], method={"alpha": 0.7})]
    question = asks[0].prompt.bounds[-2]
    fill_of(scheduling, asks[0])
    scheduling.finished(request_of(asks[0]))
    assert (
        scheduling.matched(request_of(asks[0], "again"), question - 1)
        == asks[0].prompt.bounds[-1] - question
    )
    assert scheduling.matched(request_of(asks[0], "whole"), question) == 0
    assert scheduling.matched(request_of(asks[1], "other"), question - 1) == 0


def test_a_preempted_request_is_filled_again_also_when_its_prompt_is_forgotten(
    engine: Engine, scheduling: Scheduling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cachecraft_rag.vllm.worker.scheduling._REMEMBERED", 0)
    ask = ask_of(engine, [0, 2, 1])
    question = ask.prompt.bounds[-2]
    fill_of(scheduling, ask)
    scheduling.ended({"r"})
    assert scheduling.matched(request_of(ask), question - 1) == ask.prompt.bounds[-1] - question
    assert scheduling.matched(request_of(ask, "new"), question - 1) == 0


@pytest.mark.parametrize(
    "config",
    [ReuseConfig.paper(method=ReuseMethod.paper(early_termination_window=1)), ReuseConfig()],
    ids=["paper", "default"],
)
def test_variants_focus_and_tail_loading_act_in_one_request(
    decoder: Decoder,
    stack: BlockStack,
    settings: ConnectorSettings,
    tmp_path: Path,
    front_is_late: Callable[..., None],
    config: ReuseConfig,
) -> None:
    """From the disk, as through the frameworks."""
    texts = [
        f"The {thing} of Arden dates from 1701 and leaks wherever it can. "
        for thing in ("inn", "mill", "well")
    ]
    front, second, third = chunks = [Chunk(text) for text in texts]
    with (
        ChunkCacheStore.open(tmp_path / "cold") as store,
        Engine(decoder, store, new_variants="off") as engine,
    ):
        for before in ([front], [CHUNKS[0], third], [second, third], [CHUNKS[0], second]):
            list(engine.stream("Why?", before[::-1], config=replace(config, reuse=False)))
            engine.settle()
        prompt = engine.prompts.build("When was it built?", chunks[::-1])
        front_is_late(engine.prompts, front)
    with ChunkCacheStore.open(tmp_path / "cold") as store:
        scheduling = Scheduling(store, settings, block_size=BLOCK, prefix_caching=True)
        workers = Workers(stack, store, settings, block_size=BLOCK)  # type: ignore[arg-type]
        run(workers, [fill_of(scheduling, Ask(prompt, config, captures=(), details=True))])
        result = workers.take_result()
        workers.close()
        assert result is not None
        report = result.reports["r"]
        variants = {row.variant.variant_id: row.variant for row in store.rows()}
    _, first, *behind, _ = report["segments"]
    assert second.chunk_id in variants[behind[1]["variant_id"]].key.origin_prefix
    assert first["reason"] == "computed_faster"
    assert [one["tier"] for one in behind] == ["disk", "disk"]
    decided = [one["in_focus"] for one in (first, *behind)]
    if config.method.early_termination == "published":
        assert report["focus_layer"] == 0
    else:  # the probe decides, and nothing is spared
        assert True in decided
        assert None not in decided
        assert [one["spared"] for one in report["segments"]] == [0] * 5


@pytest.mark.parametrize(
    ("changed", "outcome"),
    [
        ({"recompute_ratio": 0.3}, "reused"),
        ({"recompute_ratio": 1.0}, "exact"),
        ({"recompute_ratio": 1.0, "method": {"early_termination": "published"}}, "reused"),
        ({"reuse": False, "capture": True}, "exact"),
    ],
)
def test_chunks_in_the_prefix_cache_are_exact_if_their_settings_were(
    scheduling: Scheduling, engine: Engine, changed: dict[str, Any], outcome: str
) -> None:
    """Only requests with the same settings share blocks of the prefix cache."""
    ask = ask_of(engine, [0, 1], **changed)
    request = request_of(ask)
    assert matched_later(scheduling, request, ask.prompt.bounds[-2]) == 0
    report = scheduling.finished(request)
    assert report is not None
    segments = report[FIELD]["segments"]
    assert segments[0]["outcome"] == "exact", "blocks of the instruction always are"
    assert {part["outcome"] for part in segments[1:-1]} == {outcome}


def test_a_request_without_reuse_and_captures_says_that_reuse_is_off(
    scheduling: Scheduling, engine: Engine
) -> None:
    ask = replace(ask_of(engine, [0], reuse=False, capture=False), captures=None)
    request = request_of(ask)
    assert matched_later(scheduling, request, 0) == 0
    says = "reuse is off, and nothing is to be captured"
    assert scheduling.finished(request) == {FIELD: {"refused": says}}


def matched_later(scheduling: Scheduling, request: Any, computed: int) -> int:
    """What `matched` returns once the look-up has ended."""
    while (tokens := scheduling.matched(request, computed)) is None:
        time.sleep(0.001)
    return tokens


def test_a_prompt_shorter_than_a_block_is_filled(
    engine: Engine, settings: ConnectorSettings
) -> None:
    ask = ask_of(engine, [0])
    long = Scheduling(engine.store, settings, block_size=4096, prefix_caching=True)
    assert long.matched(request_of(ask), 0) == ask.prompt.bounds[-1] - 1


def test_layouts_are_those_of_all_ranks() -> None:
    from cachecraft_rag.vllm.worker.ranks import TensorParallel

    kv = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    parts = [
        TensorParallel(SimpleNamespace(rank_in_group=r, world_size=2), list).own_heads(kv)
        for r in (0, 1)
    ]
    torch.testing.assert_close(torch.cat(parts, dim=2), kv)
    assert KVLayout(1, 4, 5, "float32").kv_heads == sum(part.shape[2] for part in parts)


# -- new variants ----------------------------------------------------------------------------------------------------


def idle_ask(engine: Engine, order: list[int]) -> Ask:
    return replace(ask_of(engine, order), config=EXACT, captures=None, idle=True)


def test_work_in_idle_time_waits_uncounted_until_vllm_computes_it(
    engine: Engine, scheduling: Scheduling
) -> None:
    variant, asked = (
        request_of(idle_ask(engine, [2, 1, 0]), "variant"),
        request_of(ask_of(engine, [1, 0, 2]), "asked"),
    )

    def waiting() -> int:
        return scheduling.corrections.totals()["idle_waiting"]

    scheduling.arrived(variant)  # vLLM may not ask about it for a while
    scheduling.arrived(asked)
    assert waiting() == 1
    scheduling.matched(asked, 0)
    assert scheduling.matched(variant, 0) is None
    assert waiting() == 1
    scheduling.corrections.scheduled(["asked", "variant"])
    assert waiting() == 0
    late = request_of(idle_ask(engine, [2, 0]), "late")
    scheduling.matched(late, 0)
    assert waiting() == 1
    scheduling.finished(late)
    assert waiting() == 0


def test_a_filling_counts_as_a_look_up_once_it_has_ended_with_what_it_reused(
    engine: Engine, scheduling: Scheduling, workers: Workers
) -> None:
    class Prefill:
        """vLLM's statistics of a prompt."""

        num_local_cached_tokens = 0
        numbers: tuple[int, ...] = ()

        def set(self, **numbers: int) -> None:
            self.numbers = tuple(numbers.values())

    ask = ask_of(engine, [0, 2, 1], reuse=False)
    tokens = ask.prompt.bounds[-1]
    for name, is_served in (("computed", True), ("aborted", False)):
        prefill = Prefill()
        request = request_of(ask, name, prefill_stats=prefill)
        filled = scheduling.matched(request, 0)
        assert filled == tokens - 1
        scheduling.allocated(request, blocks_of(ask), filled)
        totals = scheduling.corrections.totals()
        assert (totals["requests"], totals["queries"], totals["hits"]) == (-1, -tokens, 0)
        (fill,) = scheduling.take_fills()
        if is_served:
            run(workers, [fill])
            result = workers.take_result()
            assert result is not None
            scheduling.take_result(result)
        scheduling.ended({name})
        scheduling.finished(request)
        totals = scheduling.corrections.totals()
        assert (totals["requests"], totals["queries"], totals["hits"]) == (0, 0, 0)
        assert prefill.numbers == (tokens, 0, 0)
    reused = ask_of(engine, [0, 2, 1])
    prefill = Prefill()
    request = request_of(reused, "reused", prefill_stats=prefill)
    filled = scheduling.matched(request, 0)
    assert filled
    scheduling.allocated(request, blocks_of(ask), filled)
    run(workers, scheduling.take_fills())
    result = workers.take_result()
    assert result is not None
    scheduling.take_result(result)
    totals = scheduling.corrections.totals()
    assert 0 < totals["hits"] < filled
    assert prefill.numbers == (tokens, 0, totals["hits"])


def test_a_request_goes_first_and_a_new_variant_makes_room_for_it(
    engine: Engine,
    scheduling: Scheduling,
    workers: Workers,
) -> None:
    """It comes while a new variant is computed: that stands still, and ends where the request gets no blocks."""
    making, asked = (
        request_of(idle_ask(engine, [2, 1, 0]), "making"),
        request_of(ask_of(engine, [1, 0, 2]), "asked"),
    )
    plain = request_of(ask_of(engine, [0]), "plain", kv_transfer_params=None)
    assert scheduling.matched(plain, 0) == 0
    assert scheduling.matched(making, 0) is None  # while vLLM's own are under way, too
    assert not scheduling.idle
    scheduling.finished(plain)
    fill = fill_of(scheduling, idle_ask(engine, [2, 1, 0]), "making", first_block=30)
    assert scheduling.idle
    workers.step([fill], [], rows=1, idle=True)
    (layer,) = [
        one.row_pass.layer for one in workers._fillings.values() if one.row_pass is not None
    ]
    answer = fill_of(scheduling, ask_of(engine, [1, 0, 2]), "asked")
    assert (scheduling.idle, scheduling.take_given_up()) == (False, [])
    run(workers, [answer], idle=False)
    (still,) = [
        one.row_pass.layer for one in workers._fillings.values() if one.row_pass is not None
    ]
    assert still == layer
    scheduling.ended({"asked"})
    scheduling.finished(asked)
    assert scheduling.idle
    late = request_of(ask_of(engine, [2, 0]), "late")
    assert scheduling.matched(late, 0)  # and vLLM has no blocks for it
    assert scheduling.take_given_up() == ["making"]
    workers.step([], ["making"], rows=1, idle=False)
    assert workers.finished() == {"making"}
    scheduling.ended({"making"})
    assert scheduling.finished(making) == {FIELD: {"given_up": True}}
    assert scheduling.take_given_up() == []


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The scheduler's clock."""
    seconds = [100.0]
    monkeypatch.setattr(scheduling_module, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    return seconds


def test_unmarked_text_does_not_wait_for_ever(
    engine: Engine, scheduling: Scheduling, now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it goes before those that wait, and is captured as exactly as in an idle moment."""
    ask = idle_ask(engine, [2, 1, 0])
    variant, text = request_of(ask, "variant"), request_of(replace(ask, never_stored=(1,)), "text")
    find = engine.store.find

    def approximated(*what: Any, **how: Any) -> LookupResult:
        found = find(*what, **how)
        some = {
            name: [replace(one, exact_share=0.5) for one in ones]
            for name, ones in found.variants.items()
        }
        return replace(found, variants=some)

    monkeypatch.setattr(engine.store, "find", approximated)
    plain = request_of(ask_of(engine, [0]), "plain", kv_transfer_params=None)
    assert scheduling.matched(plain, 0) == 0
    for seconds, waits in ((0.0, True), (9.9, True), (0.2, False)):
        now[0] += seconds
        assert scheduling.matched(variant, 0) is None
        assert (scheduling.matched(text, 0) is None) == waits
    scheduling.finished(plain)
    assert scheduling.matched(variant, 0) is None
    scheduling.allocated(text, blocks_of(ask), ask.prompt.bounds[-1] - 1)
    (fill,) = scheduling.take_fills()
    assert not any(fill.found.variants.values())
    scheduling.matched(request_of(ask_of(engine, [0]), "late"), 0)  # and vLLM has no blocks for it
    assert scheduling.take_given_up() == []


def test_unmarked_text_goes_on_once_it_has_begun(
    engine: Engine, scheduling: Scheduling, workers: Workers
) -> None:
    begun = fill_of(scheduling, replace(idle_ask(engine, [2, 1, 0]), never_stored=(1,)), "text")
    assert scheduling.idle
    workers.step([begun], [], rows=1, idle=True)
    assert not workers.finished()
    assert (
        scheduling.matched(request_of(ask_of(engine, [0]), "plain", kv_transfer_params=None), 0)
        == 0
    )
    assert not scheduling.idle
    for _ in range(1000):
        workers.step([], [], rows=10_000, idle=False)
        if workers.finished():
            return
        time.sleep(0.001)
    raise AssertionError("it stands still")


def test_a_new_variant_that_waited_for_an_idle_server_waits_for_captures_too(
    engine: Engine, scheduling: Scheduling, now: list[float]
) -> None:
    ask = idle_ask(engine, [0, 2, 1])
    variant, plain = request_of(ask, "variant"), request_of(ask, "plain", kv_transfer_params=None)
    assert scheduling.matched(plain, 0) == 0
    assert scheduling.matched(variant, 0) is None
    now[0] += 11.0
    scheduling.finished(plain)
    scheduling.take_result(StepResult({}, frozenset({ask.prompt.segments[1].segment_id})))
    assert scheduling.matched(variant, 0) is None  # it is being described
    now[0] += 11.0
    assert scheduling.matched(variant, 0)


def test_it_is_captured_exactly_after_its_prefix_and_counts_as_no_use(
    monkeypatch: pytest.MonkeyPatch,
    engine: Engine,
    scheduling: Scheduling,
    workers: Workers,
) -> None:
    ask = idle_ask(engine, [2, 1, 0])
    used: list[str] = []
    monkeypatch.setattr(engine.store, "used", lambda name, **_how: used.append(name))
    run(workers, [fill_of(scheduling, replace(ask, when_stored=True), "making")])
    engine.store.flush()
    found = engine.look_up(ask.prompt.segments[:-1]).variants
    for place, segment in enumerate(ask.prompt.segments[1:-1], 1):
        prefix = tuple(one.segment_id for one in ask.prompt.segments[:place])
        assert [
            one.exact_share for one in found[segment.segment_id] if one.key.origin_prefix == prefix
        ] == [1.0]
    assert not used


def test_a_removed_chunk_is_not_stored_beside_unmarked_text(
    engine: Engine, scheduling: Scheduling, workers: Workers
) -> None:
    ask = replace(idle_ask(engine, [0, 2, 1]), never_stored=(2,), when_stored=True)
    names = [segment.segment_id for segment in ask.prompt.segments[1:-1]]
    fill = fill_of(scheduling, ask)
    engine.store.evict(RowFilter(chunk_ids=tuple(names)))
    run(workers, [fill])
    assert [
        row.variant.key.chunk_id for row in engine.store.rows(RowFilter(chunk_ids=tuple(names)))
    ] == [names[1]]


def test_what_an_answer_fixed_is_reported(
    engine: Engine, scheduling: Scheduling, workers: Workers
) -> None:
    for capture in (True, False):
        ask = ask_of(engine, [2, 1, 0], capture=capture)
        run(workers, [fill_of(scheduling, ask, f"r{capture}")])
        result = workers.take_result()
        assert result is not None
        report = result.reports[f"r{capture}"]
        scheduling.ended({f"r{capture}"})
        assert ("fixed" in report) == capture
    assert all(report["segments"][place]["recomputed"] for place, _ in report.get("fixed", ()))
