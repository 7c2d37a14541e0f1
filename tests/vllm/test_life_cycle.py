"""The order of calls in vLLM's default life cycle, replayed without vLLM: asynchronous scheduling and model runner V2.

CUDA servers use both by default; vLLM's CPU build uses neither. The order is that of these functions in the CUDA wheels
of 0.32.0 and 0.33.0, which agree in it:

    vllm.v1.engine.core.EngineCore.step_with_batch_queue     the next step is scheduled before this one's output is read
    vllm.v1.worker.gpu.kv_connector.ActiveKVConnector        start_load_kv after the forward, then what has finished
    vllm.v1.core.sched.scheduler.Scheduler.finish_requests   aborted while it loads: its blocks are kept until reported
    vllm.v1.core.sched.scheduler.Scheduler._update_from_kv_xfer_finished   each report is for a known request
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.serving.priming import Primer
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.vllm.messages import Ask, Fill, StepResult
from cachecraft_rag.vllm.served_model import ModelIdentity
from cachecraft_rag.vllm.settings import ConnectorSettings
from cachecraft_rag.vllm.worker import working
from cachecraft_rag.vllm.worker.fill_memory import FillMemory
from cachecraft_rag.vllm.worker.scheduling import Scheduling
from cachecraft_rag.vllm.worker.working import Workers
from tests.compute.whole_decoder import WholeDecoder
from tests.vllm.test_working import (
    BLOCK,
    CHUNKS,
    CONFIG,
    BlockStack,
    ask_of,
    expected,
    request_of,
)

BLOCKS = 40
ORDERS = [[0, 2, 1], [1, 0, 2], [2, 1, 0], [2, 0, 1]]


@dataclass
class Running:
    """A request in the scheduler.

    blocks  blocks that it holds
    status  waiting, loading (blocks are being filled), loaded, running (its last token is computed) or finished
    own     True if vLLM computes it itself
    """

    request: Any
    ask: Ask
    blocks: list[int] = field(default_factory=list)
    status: Literal["waiting", "loading", "loaded", "running", "finished"] = "waiting"
    own: bool = False


@dataclass
class Step:
    """A step that was scheduled, and its output once it has run."""

    fills: list[Fill]
    gone: list[str]
    idle: bool
    wanted: bool
    runs: list[str]
    rows: int
    finished: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)
    result: StepResult | None = None


class Core:
    """vLLM's scheduler, its loop and its worker, as far as they call the connector.

    Args:
        in_flight: steps that are scheduled before the first output is read: 2 with asynchronous scheduling.
        late: True if a step runs as late as it may, just before its output is read.
    """

    def __init__(
        self,
        scheduling: Scheduling,
        workers: Workers,
        stack: BlockStack,
        contents: Callable[[Ask], Tensor],
        *,
        in_flight: int,
        late: bool,
    ) -> None:
        self.scheduling = scheduling
        self.workers = workers
        self.stack = stack
        self.contents = contents
        self.in_flight = in_flight
        self.late = late
        self.free = list(range(BLOCKS))
        self.requests: dict[str, Running] = {}
        self.steps: deque[Step] = deque()
        self.finished_ids: set[str] = set()
        self.filled: list[str] = []
        self.reports: dict[str, Any] = {}

    def add(self, name: str, ask: Ask) -> None:
        """Take a request in."""
        self.requests[name] = Running(request_of(ask, name), ask)

    def step(self) -> None:
        """`step_with_batch_queue`: schedule, and read the oldest output once enough steps are in flight."""
        if any(running.status != "finished" for running in self.requests.values()) or (
            self.finished_ids or self.requests
        ):
            scheduled = self.schedule()
            if not self.late:
                self.execute(scheduled)
            self.steps.append(scheduled)
            if len(self.steps) < self.in_flight:
                return
        if self.steps:
            oldest = self.steps.popleft()
            if self.late:
                self.execute(oldest)
            self.update(oldest)

    def schedule(self) -> Step:
        """`Scheduler.schedule`."""
        runs = []
        for name, running in self.requests.items():
            if running.status == "waiting" and not self.begin(running):
                continue
            if running.status == "loaded" or (running.status == "waiting" and running.own):
                running.status = "running"
                runs.append(name)
                self.check(running)
        idle = self.scheduling.idle
        fills = self.scheduling.take_fills()
        gone = sorted({*self.finished_ids, *self.scheduling.take_given_up()})
        self.finished_ids = set()
        rows = 0 if self.scheduling.computes_first_token(runs) else 1
        return Step(fills, gone, idle, self.scheduling.take_captures_awaited(), runs, rows)

    def begin(self, running: Running) -> bool:
        """Ask the connector, and give the request its blocks; returns False if it has to wait."""
        tokens = self.scheduling.matched(running.request, 0)
        if tokens is None:
            return False
        needed = -(-running.ask.prompt.bounds[-1] // BLOCK)
        if needed > len(self.free):
            return False
        running.blocks = [self.free.pop() for _ in range(needed)]
        slots = torch.tensor(running.blocks)[:, None] * BLOCK + torch.arange(BLOCK)
        self.stack.slots[:, :, slots.flatten()] = torch.nan
        self.scheduling.allocated(running.request, tuple(running.blocks), tokens)
        running.own = tokens == 0
        if tokens:
            running.status = "loading"
        return True

    def execute(self, step: Step) -> None:
        """The worker's side of a step: `pre_forward`, the forward, and `post_forward`."""
        self.workers.step(
            step.fills,
            step.gone,
            rows=step.rows,
            vllm_is_free=not step.runs,
            idle=step.idle,
            captures_awaited=step.wanted,
        )
        step.finished = self.workers.finished()
        step.failed_blocks = self.workers.failed_blocks()
        step.result = self.workers.take_result()

    def update(self, step: Step) -> None:
        """`Scheduler.update_from_output`."""
        for running in self.requests.values():
            if running.status == "loading" and step.failed_blocks & set(running.blocks):
                running.own = True
        for name in step.runs:
            if name in self.requests and self.requests[name].status == "running":
                running = self.requests[name]
                self.check(running)
                if not running.own:
                    self.filled.append(name)
                self.finish(name)
        if step.result is not None:
            self.scheduling.take_result(step.result)
        self.scheduling.ended(step.finished)
        for name in step.finished:
            running = self.requests[name]  # vLLM asserts that it knows the request
            if running.status == "loading":
                running.status = "loaded"
            else:
                assert running.status == "finished"
                self.give_back(name)

    def finish(self, name: str) -> None:
        """`Scheduler.finish_requests`: the answer has ended, or the client has gone."""
        running = self.requests.get(name)
        if running is None or running.status == "finished":
            return
        keeps_blocks = running.status == "loading"
        running.status = "finished"
        self.reports[name] = self.scheduling.finished(running.request)
        self.finished_ids.add(name)
        if not keeps_blocks:
            self.give_back(name)

    def give_back(self, name: str) -> None:
        """Free the blocks of a request. Another one may have them at once."""
        self.free += self.requests.pop(name).blocks

    def check(self, running: Running) -> None:
        """Compare the blocks of a filled request with the Hugging Face engine's buffer."""
        if running.own:
            return
        last = running.ask.prompt.bounds[-1] - 1
        positions = torch.arange(last)
        slots = torch.tensor(running.blocks)[positions // BLOCK] * BLOCK + positions % BLOCK
        torch.testing.assert_close(
            self.stack.slots[:, :, slots], self.contents(running.ask), rtol=0, atol=1e-5
        )


@pytest.fixture
def engine(tiny_decoder: Callable[..., Decoder], tmp_path: Path) -> Iterator[Engine]:
    """Over a store that holds all chunks, primed."""
    with (
        ChunkCacheStore.open(tmp_path / "caches") as store,
        Engine(tiny_decoder("Llama"), store, config=CONFIG) as made,
    ):
        Primer(made).prime(CHUNKS)
        yield made


@pytest.fixture(params=["layer by layer", "all layers at once"])
def core_of(engine: Engine, request: pytest.FixtureRequest) -> Iterator[Callable[..., Core]]:
    """A core with room for two fillings at once, in blocks and in memory."""
    decoder = engine.decoder
    identity = ModelIdentity(decoder.fingerprint, decoder.layout, decoder.context_length)
    settings = ConnectorSettings("unused", identity, key="key")
    buffers: dict[tuple[int, ...], Tensor] = {}
    opened: list[Workers] = []

    def contents(ask: Ask) -> Tensor:
        key = tuple(ask.prompt.token_ids)
        if key not in buffers:
            buffers[key] = expected(engine, ask)
        return buffers[key]

    def make(**how: Any) -> Core:
        stack = BlockStack(decoder, blocks=BLOCKS)
        longest = max(ask_of(engine, order).prompt.bounds[-1] for order in ORDERS)
        memory = FillMemory(10, 5, 5, total=2 * 20 * longest)
        whole = WholeDecoder(decoder) if request.param == "all layers at once" else None
        opened.append(
            Workers(
                stack,  # type: ignore[arg-type]
                engine.store,
                settings,
                block_size=BLOCK,
                memory=memory,
                whole_model=whole,
            )
        )
        scheduling = Scheduling(
            engine.store, settings, block_size=BLOCK, prefix_caching=True, memory=memory
        )
        return Core(scheduling, opened[-1], stack, contents, **how)

    yield make
    for workers in opened:
        workers.close()


def run(core: Core, *, abort: Callable[[int], str | None] = lambda _step: None) -> None:
    """Steps until all requests have ended and all blocks are free."""
    for number in range(20_000):
        gone = abort(number)
        if gone is not None:
            core.finish(gone)
        core.step()
        if not core.requests and not core.steps:
            assert sorted(core.free) == list(range(BLOCKS))
            assert core.scheduling.idle
            assert not core.workers.finished()
            assert not core.scheduling._budget._filling
            return
        time.sleep(0.0005)
    raise AssertionError(f"it has not ended: {core.requests}")


ORDER_OF_CALLS = pytest.mark.parametrize(
    ("in_flight", "late"),
    [(1, False), (2, False), (2, True)],
    ids=["synchronous", "asynchronous, worker ahead", "asynchronous, worker behind"],
)


@ORDER_OF_CALLS
def test_all_requests_are_filled_in_any_order_of_calls(
    engine: Engine, core_of: Callable[..., Core], in_flight: int, late: bool
) -> None:
    core = core_of(in_flight=in_flight, late=late)
    names = [f"r{number}" for number in range(8)]
    for number, name in enumerate(names):
        core.add(name, ask_of(engine, ORDERS[number % len(ORDERS)]))
    run(core)
    assert sorted(core.filled) == names
    for name in names:
        assert core.reports[name]["cachecraft"]["segments"]


@ORDER_OF_CALLS
@pytest.mark.parametrize("seed", range(4))
def test_blocks_of_requests_that_have_gone_are_given_to_others_and_not_written(
    engine: Engine, core_of: Callable[..., Core], in_flight: int, late: bool, seed: int
) -> None:
    core = core_of(in_flight=in_flight, late=late)
    chance = random.Random(seed)
    names = [f"r{number}" for number in range(12)]
    for number, name in enumerate(names):
        core.add(name, ask_of(engine, ORDERS[number % len(ORDERS)]))
    gone = set()

    def abort(step: int) -> str | None:
        is_spared = step > 0 and chance.random() > 0.2
        if is_spared or len(gone) > 6 or not core.requests:
            return None
        name = chance.choice(list(core.requests))
        if core.requests[name].status != "finished":
            gone.add(name)
        return name

    run(core, abort=abort)
    assert gone
    assert set(core.filled) >= set(names) - gone


@ORDER_OF_CALLS
def test_requests_that_run_out_of_memory_are_left_to_vllm_and_the_others_are_filled(
    engine: Engine,
    core_of: Callable[..., Core],
    in_flight: int,
    late: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = core_of(in_flight=in_flight, late=late)
    advance = working.advance
    calls = 0

    def full(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls in (3, 14):
            raise torch.OutOfMemoryError("CUDA out of memory")
        advance(*arguments)

    monkeypatch.setattr(working, "advance", full)
    names = [f"r{number}" for number in range(8)]
    for number, name in enumerate(names):
        core.add(name, ask_of(engine, ORDERS[number % len(ORDERS)]))
    run(core)
    left = {name for name in names if "refused" in core.reports[name]["cachecraft"]}
    assert left
    assert all("OutOfMemoryError" in core.reports[name]["cachecraft"]["refused"] for name in left)
    assert set(core.filled) == set(names) - left
