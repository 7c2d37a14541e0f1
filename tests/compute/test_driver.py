"""Driving a prefill: which rows run, in which order, and when the lock is held."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from cachecraft_rag.compute.driver import prefill, run
from cachecraft_rag.compute.job import PrefillJob, PrefillResult, ProbeRequest
from cachecraft_rag.compute.kv_buffer import ResidentKV
from cachecraft_rag.compute.overlapped import Forward, OverlappedPrefill, Step, Steps, Wait
from cachecraft_rag.compute.row_pass import advance
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.compute.speed import ComputeSpeed
from cachecraft_rag.compute.stack import Alone, Ranks
from cachecraft_rag.engine.decoder import Decoder
from cachecraft_rag.engine.scheduling import FairLock
from cachecraft_rag.planning.config import Loading
from cachecraft_rag.planning.planner import Plan, SegmentPlan
from cachecraft_rag.store.loading.pending import PendingLoads

MakeDecoder = Callable[..., Decoder]
BOUNDS = [0, 10, 40, 60, 75]
IDS = torch.randint(0, 256, (BOUNDS[-1],), generator=torch.Generator().manual_seed(9)).tolist()
QUESTION = range(60, 75)
LAYERS = 4


@pytest.fixture
def decoder(tiny_decoder: MakeDecoder) -> Decoder:
    return tiny_decoder("Llama")


@pytest.fixture
def caches(decoder: Decoder) -> list[ResidentKV]:
    """System and both chunks as they are in the full prompt."""
    output = prefill(decoder, PrefillJob(IDS, Rows.of(BOUNDS, new=range(75)), captures=[0, 1, 2]))
    return [ResidentKV(capture.start, capture.kv) for capture in output.recorder.captures]


def steps_of(decoder: Decoder, job: PrefillJob, loads: PendingLoads | None = None) -> Steps:
    loads = loads or PendingLoads.of_nothing(LAYERS)
    return OverlappedPrefill(decoder, job, loads, ComputeSpeed(decoder.keys_per_row)).steps()


# -- what is computed -------------------------------------------------------------------------------------------------


def test_rows_are_counted_and_the_stored_caches_stay_as_they_are(decoder: Decoder, caches: list[ResidentKV]) -> None:
    before = [resident.kv.clone() for resident in caches]
    rows = Rows.of(BOUNDS, new=QUESTION, recomputed=[5, 12])
    output = prefill(decoder, PrefillJob(IDS, rows, resident=caches))
    assert output.row_layers == 17 * LAYERS
    assert output.hidden.shape[1] == 17
    assert output.recorder.captures == ()
    assert (output.plan, output.focus_layer) == (None, None)
    assert all(torch.equal(resident.kv, kept) for resident, kept in zip(caches, before, strict=True))


@pytest.mark.parametrize("why", ["new", "recomputed"])
def test_computed_rows_replace_what_was_stored(decoder: Decoder, caches: list[ResidentKV], why: str) -> None:
    spoilt = [caches[0], ResidentKV(10, torch.zeros_like(caches[1].kv)), caches[2]]
    rows = Rows.of(BOUNDS, **{"new": QUESTION, why: [*range(10, 40), *(QUESTION if why == "new" else ())]})
    output = prefill(decoder, PrefillJob(IDS, rows, resident=spoilt))
    assert torch.allclose(decoder.next_logits(output.hidden), decoder.own_logits(IDS)[0], atol=1e-3)


# -- the steps --------------------------------------------------------------------------------------------------------


def taken(stack: Decoder, steps: Steps, positions: list[list[int]] | None = None) -> tuple[list[Step], PrefillResult]:
    """Take all steps, as the simplest driver would; `positions` fills with those of each layer's rows."""
    positions = [] if positions is None else positions
    seen: list[Step] = []
    came: Any = None
    while True:
        try:
            step = steps.send(came)
        except StopIteration as end:
            return seen, end.value
        seen.append(step)
        came = step.loads.wait(step.ready, step.timeout_s) if isinstance(step, Wait) else True
        if isinstance(step, Forward):
            before = step.row_pass.layer
            positions.append(step.row_pass.positions.tolist())
            advance(stack, [step.row_pass])
            assert step.row_pass.layer == before + 1


@pytest.mark.parametrize(("loading", "looks"), [("cake", 1), ("layerwise", 0), ("whole", 0)])
def test_with_everything_at_hand_it_looks_once_and_runs_its_layers(
    decoder: Decoder, caches: list[ResidentKV], loading: Loading, looks: int
) -> None:
    job = PrefillJob(IDS, Rows.of(BOUNDS, new=QUESTION), resident=caches, loading=loading)
    steps, result = taken(decoder, steps_of(decoder, job))
    assert [type(step) for step in steps] == [Wait] * (looks + 1) + [Forward] * LAYERS
    for step in steps[: looks + 1]:
        assert isinstance(step, Wait)
        assert not step.in_pass
        assert step.ready()  # nothing is waited for
    assert len({id(step.row_pass) for step in steps if isinstance(step, Forward)}) == 1
    assert torch.equal(result.hidden, prefill(decoder, job).hidden)
    assert result.row_layers == len(QUESTION) * LAYERS


def test_the_buffer_is_made_and_nothing_is_computed_before_the_first_step(decoder: Decoder) -> None:
    calls: list[int] = []
    stack = watched(decoder, lambda *_: calls.append(0))
    steps = steps_of(stack, PrefillJob(IDS, Rows.of(BOUNDS, new=range(75))))
    assert isinstance(next(steps), Wait)
    assert not calls
    steps.close()


def test_a_probe_runs_its_layers_before_the_last_pass_does(decoder: Decoder, caches: list[ResidentKV]) -> None:
    plan = Plan((SegmentPlan("exact"), *[SegmentPlan("reused", recompute=(3,))] * 2, SegmentPlan("computed")))
    job = PrefillJob(
        IDS,
        Rows.of(BOUNDS, new=QUESTION, recomputed=[11, 41]),
        resident=caches,
        reused=(1, 2),
        probe=ProbeRequest("question", QUESTION, lambda seen, rows: plan),
    )
    steps, result = taken(decoder, steps_of(decoder, job), positions := [])
    assert [type(step) for step in steps] == [Wait, Wait, *[Forward] * (2 + LAYERS)]
    assert positions == [list(QUESTION)] * 2 + [[13, 43, *QUESTION]] * LAYERS
    assert result.plan is plan


# -- the lock ---------------------------------------------------------------------------------------------------------


class Lock:
    """Notes when it is taken and given back."""

    def __init__(self) -> None:
        self.held, self.times = False, 0

    @contextmanager
    def take(self) -> Iterator[None]:
        assert not self.held
        self.held = True
        self.times += 1
        try:
            yield
        finally:
            self.held = False


def watched(decoder: Decoder, see: Callable[[int, Tensor], Any]) -> Decoder:
    """The same model; `see` is called before each layer."""
    import copy

    other = copy.copy(decoder)

    def layer(index: int, hidden: Tensor, **named: Any) -> Tensor:
        see(index, hidden)
        return decoder.layer(index, hidden, **named)

    other.layer = layer  # type: ignore[method-assign,assignment]
    return other


class Noted(PendingLoads):
    """Loads of nothing that note how they are waited for, and pretend a gap before some layers."""

    lock: Lock
    gaps: frozenset[int] = frozenset()
    layer = 0

    def wait(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        self.events.append(("wait", self.lock.held))
        self.gaps -= {self.layer}
        return super().wait(ready, timeout)

    def depth(self) -> int:
        return self.layer if self.layer in self.gaps else super().depth()

    def place(self, layer: int, sink: Any, *, below: int | None = None) -> None:
        self.layer = layer + 1
        super().place(layer, sink, below=below)

    @property
    def events(self) -> list[tuple[str, bool]]:
        return self.__dict__.setdefault("_events", [])  # type: ignore[no-any-return]


def noted(decoder: Decoder, job: PrefillJob, gaps: set[int]) -> tuple[list[tuple[str, bool]], Lock]:
    """What happened in order, and whether the lock was held: waits and layers."""
    lock, loads = Lock(), Noted(LAYERS, (), PendingLoads.of_nothing(LAYERS).meter)
    loads.lock, loads.gaps = lock, frozenset(gaps)
    stack = watched(decoder, lambda *_: loads.events.append(("layer", lock.held)))
    run(stack, steps_of(stack, job, loads), lock.take)
    return loads.events, lock


def test_the_lock_is_held_during_the_pass_and_never_while_waiting_before_it(
    decoder: Decoder, caches: list[ResidentKV]
) -> None:
    job = PrefillJob(IDS, Rows.of(BOUNDS, new=QUESTION), resident=caches)
    events, lock = noted(decoder, job, set())
    assert events == [("wait", False), ("wait", False), *[("layer", True)] * LAYERS]
    assert not lock.held


def test_a_wait_within_a_pass_keeps_the_lock(decoder: Decoder, caches: list[ResidentKV]) -> None:
    job = PrefillJob(IDS, Rows.of(BOUNDS, new=QUESTION), resident=caches, loading="whole")
    events, lock = noted(decoder, job, {1, 3})
    layer, wait = ("layer", True), ("wait", True)
    assert events == [("wait", False), layer, wait, layer, layer, wait, layer]
    assert lock.times == 1


def test_the_lock_is_given_back_between_passes(decoder: Decoder, on_ranks: Callable[[Decoder, Ranks], Decoder]) -> None:
    """Two front pieces and the last pass; nothing is computed in the first two, which shows the waits alone."""

    class Led(Alone):
        def __init__(self) -> None:
            self.decisions: list[Any] = [(0, False), (0, False), (0, True)]

        def lead(self, decision: Any) -> Any:
            return self.decisions.pop(0)

    events, lock = noted(on_ranks(decoder, Led()), PrefillJob(IDS, Rows.of(BOUNDS, new=range(75))), set())
    assert events == [*[("wait", False)] * 4, *[("layer", True)] * LAYERS]
    assert lock.times == 4


def test_another_request_gets_the_lock_while_this_one_waits(decoder: Decoder, caches: list[ResidentKV]) -> None:
    come, waits, lock = threading.Event(), threading.Event(), FairLock()

    class Later(PendingLoads):
        def wait(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
            waits.set()
            return come.wait(60)

    loads = Later(LAYERS, (), PendingLoads.of_nothing(LAYERS).meter)
    job = PrefillJob(IDS, Rows.of(BOUNDS, new=QUESTION), resident=caches, loading="whole")
    results: list[PrefillResult] = []
    thread = threading.Thread(target=lambda: results.append(run(decoder, steps_of(decoder, job, loads), lock.take)))
    thread.start()
    assert waits.wait(60)
    with lock.take():  # or this test would never end
        assert thread.is_alive()
        come.set()
        thread.join(0.2)
        assert thread.is_alive()  # it waits for its turn
    thread.join()
    assert torch.equal(results[0].hidden, prefill(decoder, job).hidden)


@pytest.mark.parametrize("fails_in", [0, 2])
def test_an_exception_in_a_layer_closes_the_steps_and_gives_the_lock_back(decoder: Decoder, fails_in: int) -> None:
    lock = Lock()

    def fail(index: int, hidden: Tensor) -> None:
        if index == fails_in:
            raise MemoryError("no room")

    stack = watched(decoder, fail)
    steps = steps_of(stack, PrefillJob(IDS, Rows.of(BOUNDS, new=range(75))))
    with pytest.raises(MemoryError, match="no room"):
        run(stack, steps, lock.take)
    assert inspect.getgeneratorstate(steps) == inspect.GEN_CLOSED
    assert (lock.held, lock.times) == (False, 2)


def test_an_exception_while_waiting_closes_the_steps_and_takes_no_lock(decoder: Decoder) -> None:
    class Interrupted(PendingLoads):
        def wait(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
            raise KeyboardInterrupt

    lock, loads = Lock(), Interrupted(LAYERS, (), PendingLoads.of_nothing(LAYERS).meter)
    steps = steps_of(decoder, PrefillJob(IDS, Rows.of(BOUNDS, new=range(75))), loads)
    with pytest.raises(KeyboardInterrupt):
        run(decoder, steps, lock.take)
    assert inspect.getgeneratorstate(steps) == inspect.GEN_CLOSED
    assert (lock.held, lock.times) == (False, 0)


def test_an_exception_in_the_steps_themselves_is_the_callers(decoder: Decoder, caches: list[ResidentKV]) -> None:
    def choose(seen: object, rows: Rows) -> Plan:
        raise ValueError("no plan")

    lock = Lock()
    probe = ProbeRequest("question", QUESTION, choose)
    steps = steps_of(decoder, PrefillJob(IDS, Rows.of(BOUNDS, new=QUESTION), caches, reused=(1, 2), probe=probe))
    with pytest.raises(ValueError, match="no plan"):
        run(decoder, steps, lock.take)
    assert inspect.getgeneratorstate(steps) == inspect.GEN_CLOSED
    assert not lock.held


def test_what_ends_without_a_pass_is_a_result_all_the_same(decoder: Decoder) -> None:
    """A driver knows nothing of passes: it takes what steps it gets."""

    def steps() -> Steps:
        return wanted
        yield

    wanted = prefill(decoder, PrefillJob(IDS, Rows.of(BOUNDS, new=range(75))))
    assert run(decoder, steps(), Lock().take) is wanted
