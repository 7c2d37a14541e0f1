"""Driving a prefill: which rows run, in which order, and what takes a turn."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cachecraft_rag.compute.balance.speed import ComputeSpeed
from cachecraft_rag.compute.driver import prefill, run
from cachecraft_rag.compute.job import PrefillJob, PrefillResult, ProbeRequest
from cachecraft_rag.compute.kv_buffer import ResidentKV
from cachecraft_rag.compute.overlapped import Forward, OverlappedPrefill, Step, Steps, Wait
from cachecraft_rag.compute.row_pass import advance
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.model.decoder import Decoder
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


def test_rows_are_counted_and_the_stored_caches_stay_as_they_are(
    decoder: Decoder, caches: list[ResidentKV]
) -> None:
    before = [resident.kv.clone() for resident in caches]
    rows = Rows.of(BOUNDS, new=QUESTION, recomputed=[5, 12])
    output = prefill(decoder, PrefillJob(IDS, rows, resident=caches))
    assert output.row_layers == 17 * LAYERS
    assert output.hidden.shape[1] == 17
    assert output.recorder.captures == ()
    assert (output.plan, output.focus_layer) == (None, None)
    assert all(
        torch.equal(resident.kv, kept) for resident, kept in zip(caches, before, strict=True)
    )


@pytest.mark.parametrize("why", ["new", "recomputed"])
def test_computed_rows_replace_what_was_stored(
    decoder: Decoder, caches: list[ResidentKV], why: str
) -> None:
    spoilt = [caches[0], ResidentKV(10, torch.zeros_like(caches[1].kv)), caches[2]]
    rows = Rows.of(
        BOUNDS, **{"new": QUESTION, why: [*range(10, 40), *(QUESTION if why == "new" else ())]}
    )
    output = prefill(decoder, PrefillJob(IDS, rows, resident=spoilt))
    assert torch.allclose(decoder.next_logits(output.hidden), decoder.own_logits(IDS)[0], atol=1e-3)


# -- the steps --------------------------------------------------------------------------------------------------------


def taken(
    stack: Decoder, steps: Steps, positions: list[list[int]] | None = None
) -> tuple[list[Step], PrefillResult]:
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


def test_a_probe_runs_its_layers_before_the_last_pass_does(
    decoder: Decoder, caches: list[ResidentKV]
) -> None:
    plan = (
        SegmentPlan("exact"),
        *[SegmentPlan("reused", recompute=np.array([3]))] * 2,
        SegmentPlan("computed"),
    )
    job = PrefillJob(
        IDS,
        Rows.of(BOUNDS, new=QUESTION, recomputed=[11, 41]),
        resident=caches,
        reused=(1, 2),
        probe=ProbeRequest(QUESTION, lambda seen, rows, focus: plan),
    )
    steps, result = taken(decoder, steps_of(decoder, job), positions := [])
    assert [type(step) for step in steps] == [Wait, Wait, *[Forward] * (2 + LAYERS)]
    assert positions == [list(QUESTION)] * 2 + [[13, 43, *QUESTION]] * LAYERS
    assert result.plan is plan


# -- the turns --------------------------------------------------------------------------------------------------------


def watched(decoder: Decoder, see: Callable[[int, Tensor], Any]) -> Decoder:
    """The same model; `see` is called before each layer."""
    other = copy.copy(decoder)

    def layer(index: int, hidden: Tensor, **named: Any) -> Tensor:
        see(index, hidden)
        return decoder.layer(index, hidden, **named)

    other.layer = layer  # type: ignore[method-assign,assignment]
    return other


def test_a_turn_surrounds_each_layer_and_no_wait(
    decoder: Decoder, caches: list[ResidentKV]
) -> None:
    events: list[str] = []

    @contextmanager
    def turn() -> Iterator[None]:
        events.append("begin")
        yield
        events.append("end")

    class Noted(PendingLoads):
        def wait(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
            events.append("wait")
            return super().wait(ready, timeout)

    loads = Noted(LAYERS, (), PendingLoads.of_nothing(LAYERS).meter)
    stack = watched(decoder, lambda *_: events.append("layer"))
    run(
        stack,
        steps_of(stack, PrefillJob(IDS, Rows.of(BOUNDS, new=QUESTION), resident=caches), loads),
        turn,
    )
    first = events.index("begin")
    assert set(events[:first]) <= {"wait"}
    assert events[first:] == ["begin", "layer", "end"] * LAYERS


@pytest.mark.parametrize("fails_in", [0, 2])
def test_an_exception_in_a_layer_closes_the_steps(decoder: Decoder, fails_in: int) -> None:
    def fail(index: int, hidden: Tensor) -> None:
        if index == fails_in:
            raise MemoryError("no room")

    stack = watched(decoder, fail)
    steps = steps_of(stack, PrefillJob(IDS, Rows.of(BOUNDS, new=range(75))))
    with pytest.raises(MemoryError, match="no room"):
        run(stack, steps)
    assert inspect.getgeneratorstate(steps) == inspect.GEN_CLOSED


def test_an_exception_while_waiting_closes_the_steps(decoder: Decoder) -> None:
    class Interrupted(PendingLoads):
        def wait(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
            raise KeyboardInterrupt

    loads = Interrupted(LAYERS, (), PendingLoads.of_nothing(LAYERS).meter)
    steps = steps_of(decoder, PrefillJob(IDS, Rows.of(BOUNDS, new=range(75))), loads)
    with pytest.raises(KeyboardInterrupt):
        run(decoder, steps)
    assert inspect.getgeneratorstate(steps) == inspect.GEN_CLOSED


def test_an_exception_in_the_steps_themselves_is_the_callers(
    decoder: Decoder, caches: list[ResidentKV]
) -> None:
    def choose(seen: object, rows: Rows, focus: object) -> Plan:
        raise ValueError("no plan")

    probe = ProbeRequest(QUESTION, choose)
    steps = steps_of(
        decoder, PrefillJob(IDS, Rows.of(BOUNDS, new=QUESTION), caches, reused=(1, 2), probe=probe)
    )
    with pytest.raises(ValueError, match="no plan"):
        run(decoder, steps)
    assert inspect.getgeneratorstate(steps) == inspect.GEN_CLOSED


def test_steps_that_end_without_a_pass_have_a_result_too(decoder: Decoder) -> None:
    def steps() -> Steps:
        return wanted
        yield

    wanted = prefill(decoder, PrefillJob(IDS, Rows.of(BOUNDS, new=range(75))))
    assert run(decoder, steps()) is wanted
