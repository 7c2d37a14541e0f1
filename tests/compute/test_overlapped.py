"""Overlapped prefill: whatever is loaded and whatever goes wrong, the logits are those of full prefill."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from cachecraft_rag.compute import overlapped
from cachecraft_rag.compute.balance.load_split import (
    LoadingConstants,
    preload_depth,
    tokens_to_compute,
)
from cachecraft_rag.compute.balance.speed import ComputeSpeed
from cachecraft_rag.compute.driver import prefill, run
from cachecraft_rag.compute.job import EarlyTermination, PrefillJob, PrefillResult, ProbeRequest
from cachecraft_rag.compute.kv_buffer import ResidentKV
from cachecraft_rag.compute.overlapped import Forward, OverlappedPrefill, Steps
from cachecraft_rag.compute.row_pass import AtOnce, advance
from cachecraft_rag.compute.rows import RowReason, Rows
from cachecraft_rag.compute.stack import Alone, Ranks
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.config import Loading
from cachecraft_rag.planning.planner import Plan, SegmentPlan
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.files.disk import DiskTier, Throttle
from cachecraft_rag.store.layout import StoredVariant, encode
from cachecraft_rag.store.loading import rate as rate_module
from cachecraft_rag.store.loading.loader import Loader
from cachecraft_rag.store.loading.pending import Extent, KVSink, PendingLoads
from cachecraft_rag.store.loading.rate import Meter
from cachecraft_rag.types.captures import Capture, TokenScores
from cachecraft_rag.types.digests import digest
from cachecraft_rag.types.store_reasons import LoadFailure, Unavailable
from cachecraft_rag.types.variants import LoadedVariant, Variant, VariantKey
from tests.compute.whole_decoder import WholeDecoder

MakeDecoder = Callable[..., Decoder]
BOUNDS = [0, 20, 170, 320, 470, 500]  # system, three chunks of two extents and a bit, question
IDS = torch.randint(0, 256, (BOUNDS[-1],), generator=torch.Generator().manual_seed(3)).tolist()
QUESTION = range(BOUNDS[-2], BOUNDS[-1])
ONLY_QUESTION = PrefillJob(IDS, Rows.of(BOUNDS, new=QUESTION))
LOADINGS: list[Loading] = ["cake", "layerwise", "whole"]


@pytest.fixture(scope="module")
def decoder(tiny_decoder: MakeDecoder) -> Decoder:
    return tiny_decoder("Llama", num_hidden_layers=6)


@pytest.fixture(scope="module")
def reference(decoder: Decoder) -> Tensor:
    return decoder.own_logits(IDS)[0]


class Disk:
    """The prompt's segments, captured exact, in real files."""

    kept = True  # by memory, once it is loaded

    def __init__(self, decoder: Decoder, folder: Path) -> None:
        self.decoder, self.throttle = decoder, Throttle()
        self.tier = DiskTier(folder, self.throttle)
        captured = prefill(
            decoder, PrefillJob(IDS, Rows.of(BOUNDS, new=range(BOUNDS[-1])), captures=range(4))
        )
        self.variants = []
        for capture in captured.recorder.captures:
            key = VariantKey("tenant", decoder.fingerprint, digest(str(capture.segment)), ())
            tokens = capture.stop - capture.start
            nbytes = decoder.layout.nbytes(tokens)
            row = (
                key,
                key.variant_id,
                tokens,
                "tokens",
                (),
                0.0,
                0.6,
                1.0,
                None,
                "raw",
                nbytes,
                0.0,
                1.5,
            )
            variant = Variant(*row)
            self.tier.write(variant, encode(variant, decoder.layout, capture.kv), writer="ab")
            self.variants.append(variant)
        self.captures = captured.recorder.captures

    def path(self, segment: int) -> Path:
        variant = self.variants[segment]
        return self.tier.path(variant.variant_id, variant.created)

    def open(self, segment: int) -> StoredVariant:
        stored = self.tier.open(self.variants[segment])
        assert isinstance(stored, StoredVariant)
        stored.allocate()
        return stored

    def loads(
        self, segments: Sequence[int] = range(4), *, readers: int = 2, expected: float | None = None
    ) -> PendingLoads:
        """Loads whose reader threads are running."""
        opened = [(self.open(segment), BOUNDS[segment]) for segment in segments]
        extents = [
            Extent(stored, start, first, last, kept=self.kept)
            for stored, start in opened
            for first, last in stored.extents
        ]
        loads = PendingLoads(self.decoder.layout.layers, extents, Meter(expected))
        for _ in range(readers):
            read(loads)
        return loads


def read(loads: PendingLoads) -> None:
    """One more thread reads."""
    threading.Thread(target=loads.read, daemon=True).start()


@pytest.fixture
def disk(decoder: Decoder, tmp_path: Path, request: pytest.FixtureRequest) -> Disk:
    made = Disk(decoder, tmp_path)
    made.kept = getattr(request, "param", True)
    return made


def rarely(*values: Any) -> list[Any]:
    """Cells of a matrix that run with `make test-all` only."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


KEPT_OR_NOT = pytest.mark.parametrize("disk", [True, False], indirect=True, ids=["kept", "let go"])


def prefilled(
    decoder: Decoder,
    loads: PendingLoads,
    *,
    loading: Loading = "cake",
    speed: ComputeSpeed | None = None,
    **job: Any,
) -> PrefillResult:
    """Prefill, the question alone if `job` says no more, while the rest is loaded."""
    wanted = PrefillJob(IDS, job.pop("rows", ONLY_QUESTION.rows), loading=loading, **job)
    steps = OverlappedPrefill(
        decoder, wanted, loads, speed or ComputeSpeed(decoder.keys_per_row)
    ).steps()
    result = run(decoder, steps)
    loads.close()
    return result


def not_loaded(result: PrefillResult) -> list[int]:
    """Positions that were computed because they did not come, or computing them was faster."""
    return cast(
        list[int], np.flatnonzero(result.rows.reason == RowReason.COMPUTED_INSTEAD).tolist()
    )


@pytest.fixture
def assert_exact(decoder: Decoder, reference: Tensor) -> Callable[[PrefillResult], None]:
    def check(result: PrefillResult) -> None:
        logits = decoder.next_logits(result.hidden)
        assert (logits - reference).abs().max() <= 1e-3
        assert logits.argmax() == reference.argmax()

    return check


Exact = Callable[[PrefillResult], None]


def measured(decoder: Decoder) -> ComputeSpeed:
    """Computing speed as an engine knows it after its first answers."""
    speed = ComputeSpeed(decoder.keys_per_row)
    started = time.perf_counter()
    prefill(decoder, PrefillJob(IDS, Rows.of(BOUNDS, new=range(BOUNDS[-1]))))
    speed.measured(speed.rows(range(BOUNDS[-1])), time.perf_counter() - started)
    return speed


# -- gate G4: any meeting point ---------------------------------------------------------------------------------------


class Led(Alone):
    """A rank that follows another one's decisions: how many tokens the front takes, and whether the last pass does."""

    def __init__(self, decisions: Iterator[tuple[float, bool]]) -> None:
        self._decisions = decisions

    def lead(self, decision: Any) -> Any:
        # otherwise the positions, which follow from that
        return next(self._decisions) if isinstance(decision, tuple) else decision


@KEPT_OR_NOT
@pytest.mark.gate
@pytest.mark.parametrize("last_takes", [0, 30])
@pytest.mark.parametrize(
    "tokens", [0, 20, 83, 100, 470, *rarely(1, 19, 21, 84, 170, 233, 320, 469)]
)
def test_g4_whatever_the_front_takes_the_logits_are_those_of_full_prefill(
    decoder: Decoder,
    disk: Disk,
    assert_exact: Exact,
    on_ranks: Callable[[Decoder, Ranks], Decoder],
    tokens: int,
    last_takes: int,
) -> None:
    loads = disk.loads(readers=0)

    def decisions() -> Iterator[tuple[float, bool]]:
        for start in range(0, tokens, 90):  # pieces from the front
            yield min(90, tokens - start), False
        if not last_takes:
            loads.read()
            assert loads.depth() == decoder.layout.layers
            assert loads.incomplete() == []
        else:
            read(loads)  # beside the last pass
        yield last_takes, True

    decided = decisions()
    result = prefilled(on_ranks(decoder, Led(decided)), loads, loading="cake")
    assert_exact(result)
    assert next(decided, None) is None
    if not last_takes:
        assert not_loaded(result) == list(range(tokens))
        assert result.row_layers == (tokens + len(QUESTION)) * 6
        assert np.flatnonzero(result.rows.done).tolist() == list(range(tokens))
    else:  # what else had to be computed goes by how fast the reader was
        assert set(range(tokens)) <= set(not_loaded(result))


@KEPT_OR_NOT
@pytest.mark.gate
@pytest.mark.parametrize("spoilt", [math.nan, *rarely(7.0)])
@pytest.mark.parametrize("layer", [0, 3, 5, *rarely(1, 2, 4)])
@pytest.mark.parametrize("late", [range(100, 300), [5, 64, 65, 200, 469], range(470)])
def test_g4_rows_may_join_the_last_pass_before_any_layer(
    decoder: Decoder,
    disk: Disk,
    assert_exact: Exact,
    losing: Callable[..., PendingLoads],
    layer: int,
    late: Sequence[int],
    spoilt: float,
) -> None:
    plain = disk.loads(readers=0)
    plain.read()
    result = prefilled(decoder, losing(plain, late, before=layer, spoilt=spoilt))
    assert_exact(result)
    assert result.row_layers == (len(QUESTION) + len(late)) * 6
    assert not_loaded(result) == list(late)


@KEPT_OR_NOT
@pytest.mark.gate
@pytest.mark.parametrize(
    ("loading", "rate"),
    [
        *product(["cake"], (0.3e6, 1e6, 3e6, 10e6, math.inf)),
        *product(["layerwise", "whole"], (1e6, math.inf)),  # no front at any speed
        *(
            pytest.param(*cell, marks=pytest.mark.slow)
            for cell in product(["layerwise", "whole"], (3e6, 10e6))
        ),
    ],
)
def test_g4_at_any_speed_and_in_any_way_of_loading(
    decoder: Decoder, disk: Disk, assert_exact: Exact, rate: float, loading: Loading
) -> None:
    for speed in (ComputeSpeed(decoder.keys_per_row), measured(decoder)):
        disk.throttle.bytes_per_s = rate
        result = prefilled(decoder, disk.loads(), loading=loading, speed=speed)
        assert_exact(result)
        assert loading == "cake" or not not_loaded(result)


@KEPT_OR_NOT
@pytest.mark.gate
@pytest.mark.parametrize(("before", "after"), [(0.2e6, math.inf), (20e6, 0.05e6), (1e6, 0.01e6)])
@pytest.mark.parametrize("delay", [0.0, 0.06, *rarely(0.02)])
def test_g4_while_the_speed_changes_in_the_middle(
    decoder: Decoder, disk: Disk, assert_exact: Exact, before: float, after: float, delay: float
) -> None:
    speed = measured(decoder)
    disk.throttle.bytes_per_s = before
    loads = disk.loads(expected=before)  # as an earlier request found it
    timer = threading.Timer(delay, setattr, (disk.throttle, "bytes_per_s", after))
    timer.start()
    result = prefilled(decoder, loads, speed=speed)
    assert_exact(result)
    assert result.waited_s < 0.5 * sum(variant.nbytes for variant in disk.variants) / min(
        before, after
    )
    timer.cancel()
    timer.join()


@KEPT_OR_NOT
@pytest.mark.gate
@pytest.mark.parametrize("loading", LOADINGS)
@pytest.mark.parametrize("segment", [0, 3, *rarely(1, 2)])
@pytest.mark.parametrize("where", [0.5, *rarely(0.1, 0.99)])
def test_g4_with_a_file_that_is_damaged_in_the_middle(
    decoder: Decoder, disk: Disk, assert_exact: Exact, loading: Loading, segment: int, where: float
) -> None:
    loads = disk.loads(readers=0)
    size = disk.path(segment).stat().st_size
    with disk.path(segment).open("r+b") as file:
        file.seek(4096 + int((size - 4096) * where))
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 64]))
    read(loads)
    result = prefilled(decoder, loads, loading=loading)
    assert_exact(result)
    lost = loads.lost(
        next(extent.stored for extent in loads.extents if extent.start == BOUNDS[segment])
    )
    assert loading == "cake" or (lost is not None and "checksum" in lost.reason)
    assert loading == "cake" or set(not_loaded(result)) <= set(
        range(*BOUNDS[segment : segment + 2])
    )
    assert loading == "cake" or not_loaded(result)


@KEPT_OR_NOT
@pytest.mark.gate
@pytest.mark.parametrize("loading", LOADINGS)
def test_g4_with_reads_that_fail_half_way(
    decoder: Decoder, disk: Disk, assert_exact: Exact, loading: Loading
) -> None:
    disk.throttle.bytes_per_s = 4e6
    loads = disk.loads()
    timer = threading.Timer(0.03, lambda: [os.truncate(disk.path(n), 6000) for n in range(4)])
    timer.start()
    assert_exact(prefilled(decoder, loads, loading=loading))
    timer.join()


@KEPT_OR_NOT
@pytest.mark.gate
@pytest.mark.parametrize("rate", [0.2e6, 1e6, 5e6, math.inf])
@pytest.mark.parametrize("stored", [(1, 3), (0, 1, 3), *rarely((0, 2), (3,))])
def test_g4_with_chunks_in_memory_and_chunks_that_are_new_in_between(
    decoder: Decoder, disk: Disk, assert_exact: Exact, rate: float, stored: Sequence[int]
) -> None:
    first = disk.captures[0]
    resident = [] if 0 in stored else [ResidentKV(first.start, first.kv)]
    new = {0, 1, 2, 3} - set(stored) - {0}
    rows = Rows.of(
        BOUNDS, new=[*(p for n in new for p in range(BOUNDS[n], BOUNDS[n + 1])), *QUESTION]
    )
    disk.throttle.bytes_per_s = rate
    loads = disk.loads(stored)
    result = prefilled(
        decoder, loads, speed=measured(decoder), rows=rows, resident=resident, captures=sorted(new)
    )
    assert_exact(result)
    assert [capture.segment for capture in result.recorder.captures] == sorted(new)
    # what is captured beside loading is what is captured in one pass
    for capture in result.recorder.captures:
        assert torch.allclose(capture.kv, disk.captures[capture.segment].kv, atol=1e-4)
        assert len(capture.queries) == len(capture.layers) == decoder.layout.layers


@KEPT_OR_NOT
@pytest.mark.gate
@pytest.mark.parametrize("rate", [0.2e6, 2e6, math.inf])
def test_early_termination_beside_loading_leaves_no_position_without_keys(
    decoder: Decoder,
    disk: Disk,
    assert_exact: Exact,
    memory_holds: Callable[[float], None],
    rate: float,
) -> None:
    rows = Rows.of(
        BOUNDS, new=QUESTION, recomputed=[BOUNDS[n] + k for n in (1, 2, 3) for k in (0, 70, 149)]
    )
    speed = measured(decoder)
    disk.throttle.bytes_per_s = rate
    memory_holds(math.nan)  # what is read before it is written would spoil everything
    result = prefilled(
        decoder, disk.loads(), speed=speed, rows=rows, early_termination=EarlyTermination(2)
    )
    # the caches are exact: whatever is not recomputed any further is right as it is
    assert_exact(result)


@pytest.mark.gate
def test_no_deeper_layer_of_a_focused_chunk_that_is_recomputed_is_read(
    decoder: Decoder, disk: Disk, assert_exact: Exact, memory_holds: Callable[[float], None]
) -> None:
    """Of chunks that early termination has stopped all layers are read: their rows are as they were stored."""
    chunk_rows = [range(BOUNDS[n], BOUNDS[n + 1]) for n in (1, 2, 3)]
    rows = Rows.of(BOUNDS, new=QUESTION, recomputed=[row for span in chunk_rows for row in span])
    memory_holds(math.nan)  # what is read before it is written would spoil everything
    loads = disk.loads(readers=0)
    job = PrefillJob(IDS, rows, loading="layerwise", early_termination=EarlyTermination(1))
    steps = OverlappedPrefill(decoder, job, loads, ComputeSpeed(decoder.keys_per_row)).steps()

    def just_in_time() -> Generator[Any, Any, PrefillResult]:
        step = next(steps)
        while True:
            if isinstance(step, overlapped.Wait):
                while not step.ready():
                    read_one(loads)
            came = yield step
            try:
                step = steps.send(came)
            except StopIteration as end:
                return cast(PrefillResult, end.value)

    result = run(decoder, just_in_time())
    assert_exact(result)
    assert result.focus_layer == 0
    assert result.row_layers < len(rows.open()) * 6
    layers = [extent.layers for extent in loads.extents[1:]]
    by_chunk = [set(layers[first : first + 3]) for first in (0, 3, 6)]
    assert {1} in by_chunk  # of what is focused no layer after the first
    assert {6} in by_chunk


@pytest.mark.gate
@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_pass_runs_at_once_if_it_waits_for_nothing(
    decoder: Decoder, disk: Disk, monkeypatch: pytest.MonkeyPatch, *, is_loaded: bool
) -> None:
    """Keys and values are those of layers one after the other, with drift correction."""
    recomputed = [BOUNDS[chunk] + offset for chunk in (1, 2, 3) for offset in range(0, 90, 7)]
    rows = Rows.of(BOUNDS, new=QUESTION, recomputed=recomputed)
    job = PrefillJob(IDS, rows, loading="layerwise", reused=(1, 2, 3), drift=0.5)

    def result_of() -> PrefillResult:
        loads = disk.loads(readers=0)
        if is_loaded:
            loads.read()
        steps = OverlappedPrefill(decoder, job, loads, ComputeSpeed(decoder.keys_per_row)).steps()
        step = next(steps)
        while True:
            if isinstance(step, overlapped.Wait):
                while not step.ready():
                    read_one(loads)
            else:
                advance(decoder, [step.row_pass])
            try:
                step = steps.send(True)
            except StopIteration as end:
                return cast(PrefillResult, end.value)

    expected = result_of()
    model = WholeDecoder(decoder)
    monkeypatch.setattr(decoder, "whole_model", model)
    result = result_of()
    torch.testing.assert_close(result.buffer.kv, expected.buffer.kv, rtol=0, atol=1e-5)
    assert result.row_layers == expected.row_layers
    assert model.runs == ([(len(rows.open()), 6)] if is_loaded else [])


@pytest.mark.parametrize(("pass_s", "calls"), [(0.01, 1), (100.0, 0)])
def test_a_pass_that_would_take_long_runs_layer_by_layer_so_that_others_can_come_between(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, pass_s: float, calls: int
) -> None:
    job = PrefillJob(IDS, Rows.of(BOUNDS, new=range(BOUNDS[-1])))
    expected = prefill(decoder, job)
    model = WholeDecoder(decoder)
    monkeypatch.setattr(decoder, "whole_model", model)
    speed = ComputeSpeed(decoder.keys_per_row)
    speed.measured(speed.rows(range(BOUNDS[-1])), pass_s, kind="piece")
    no_loads = PendingLoads.of_nothing(decoder.layout.layers)
    result = run(decoder, OverlappedPrefill(decoder, job, no_loads, speed).steps())
    torch.testing.assert_close(result.buffer.kv, expected.buffer.kv, rtol=0, atol=1e-5)
    assert len(model.runs) == calls


@pytest.mark.gate
def test_a_pass_at_once_captures_what_layers_one_after_the_other_capture(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = PrefillJob(IDS, Rows.of(BOUNDS, new=range(BOUNDS[-1])), captures=(1, 2))
    expected = prefill(decoder, job)
    model = WholeDecoder(decoder)
    monkeypatch.setattr(decoder, "whole_model", model)
    prefill(decoder, job)
    assert model.runs == [], "it does not give raw keys"

    model.gives_raw = True
    result = prefill(decoder, job)
    assert model.runs == [(BOUNDS[-1], 6)]
    assert torch.equal(result.buffer.kv, expected.buffer.kv)
    assert [capture.segment for capture in result.recorder.captures] == [1, 2]
    pairs = zip(result.recorder.captures, expected.recorder.captures, strict=True)
    for capture, layer_by_layer in pairs:
        assert torch.equal(capture.kv, layer_by_layer.kv)
        for layer in range(6):
            assert torch.equal(capture.queries[layer], layer_by_layer.queries[layer])


def test_passes_with_captures_run_apart_from_others_at_once(decoder: Decoder) -> None:
    """Some get raw keys, the others rotated ones."""
    passes = []
    for captures in ((1,), (1,), ()):
        job = PrefillJob(IDS, Rows.of(BOUNDS, new=range(BOUNDS[-1])), captures=captures)
        no_loads = PendingLoads.of_nothing(decoder.layout.layers)
        speed = ComputeSpeed(decoder.keys_per_row)
        steps = OverlappedPrefill(decoder, job, no_loads, speed).steps()
        step = next(steps)
        while isinstance(step, overlapped.Wait):
            step = steps.send(True)
        passes.append(step.row_pass)
    assert passes[0].runs_with(passes[2]), "layer by layer"
    for row_pass in passes:
        row_pass.at_once = AtOnce(6, lambda _layer: None)
    assert passes[0].runs_with(passes[1])
    assert not passes[0].runs_with(passes[2])


def probe_of(chunks: Sequence[int] = (1, 2, 3), in_full: Sequence[int] = ()) -> ProbeRequest:
    """Chooses, of each of these chunks, the 15 tokens that were seen most and have not been lost."""

    def choose(
        seen: Mapping[int, NDArray[np.float32]], rows: Rows, focus: Mapping[int, float]
    ) -> Plan:
        assert list(seen) == list(chunks)
        plans = [SegmentPlan("exact"), *[SegmentPlan("reused")] * 3, SegmentPlan("computed")]
        for index in in_full:
            plans[index] = SegmentPlan("reused", recompute=np.arange(150))
        for index, scores in seen.items():
            assert np.isfinite(scores).all()
            lost = rows.offsets(index, RowReason.COMPUTED_INSTEAD, RowReason.NEW).tolist()
            recomputed = rows.offsets(index, RowReason.RECOMPUTED)
            done = recomputed[rows.done[rows.span(index)][recomputed]].tolist()
            free = [token for token in np.argsort(-scores).tolist() if token not in lost]
            plans[index] = SegmentPlan(
                "reused", recompute=np.array(sorted({*free[:15], *done}), np.int64)
            )
        return tuple(plans)

    return ProbeRequest(QUESTION, choose)


@KEPT_OR_NOT
@pytest.mark.gate
@pytest.mark.parametrize("rate", [0.2e6, 2e6, math.inf])
@pytest.mark.parametrize("broken", [False, True])
def test_probing_and_drift_correction_beside_loading_leave_exact_caches_exact(
    decoder: Decoder,
    disk: Disk,
    assert_exact: Exact,
    memory_holds: Callable[[float], None],
    rate: float,
    broken: bool,
) -> None:
    """Recomputed tokens of exact caches do not change, so nothing drifts, wherever both meet and whatever fails."""
    speed = measured(decoder)
    recomputed = [BOUNDS[n] + k for n in (1, 2, 3) for k in (0, 30, 70, 120, 149)]
    disk.throttle.bytes_per_s = rate
    loads = disk.loads()
    if broken:
        os.truncate(disk.path(2), 6000)
    memory_holds(math.nan)  # what is read before it is written would spoil everything
    result = prefilled(
        decoder,
        loads,
        speed=speed,
        rows=Rows.of(BOUNDS, new=QUESTION, recomputed=recomputed),
        reused=(1, 2, 3),
        drift=1.0,
        probe=probe_of(),
    )
    assert_exact(result)
    assert result.plan is not None


@KEPT_OR_NOT
@pytest.mark.gate
@pytest.mark.parametrize("rate", [0.2e6, 2e6, math.inf])
@pytest.mark.parametrize("probes", [False, True])
def test_a_chunk_that_is_recomputed_in_full_needs_nothing_stored(
    decoder: Decoder,
    disk: Disk,
    assert_exact: Exact,
    memory_holds: Callable[[float], None],
    rate: float,
    probes: bool,
) -> None:
    """Neither a probe nor drift correction, nor a front of any length, reads the places of such chunks."""
    speed = measured(decoder)
    unread = (1, 3) if not probes else (3,)
    whole = [position for n in unread for position in range(BOUNDS[n], BOUNDS[n + 1])]
    some = [BOUNDS[n] + k for n in (1, 2) for k in (0, 30, 70, 120, 149)]
    disk.throttle.bytes_per_s = rate
    loads = disk.loads([n for n in range(4) if n not in unread])
    memory_holds(math.nan)  # what is read before it is written would spoil everything
    result = prefilled(
        decoder,
        loads,
        speed=speed,
        rows=Rows.of(BOUNDS, new=QUESTION, recomputed=[*some, *whole]),
        reused=(1, 2, 3),
        unread=frozenset(unread),
        drift=1.0,
        probe=probe_of(chunks=[1, 2], in_full=[3]) if probes else None,
    )
    assert_exact(result)
    recomputed = np.flatnonzero(result.rows.reason == RowReason.RECOMPUTED)
    assert set(whole) <= set(recomputed.tolist())


class Hanging:
    """A file on a disk that stops answering: a real one up to some read, and nothing from then on."""

    def __init__(self, loads: PendingLoads, after: int) -> None:
        self.again, self.hangs, self.left = threading.Event(), threading.Event(), after
        self.answered = False
        for stored in {id(extent.stored): extent.stored for extent in loads.extents}.values():
            stored.read = self.wrapped(stored.read)  # type: ignore[method-assign]

    def wrapped(self, read: Callable[..., None]) -> Callable[..., None]:
        def slow(layer: int, start: int, stop: int, *, out: Tensor) -> None:
            self.left -= 1
            if self.left < 0:
                self.hangs.set()
                self.again.wait(60)
                self.answered = True
            read(layer, start, stop, out=out)

        return slow


class Clumsy(PendingLoads):
    """Loses a chunk at the worst moment: when the last pass has seen that a layer is there, but not placed it yet."""

    lost_now = False

    def place(self, layer: int, sink: KVSink, *, below: int | None = None) -> None:
        extent = next(
            (one for one in self.extents if layer < one.layers < self.layers and one.positions),
            None,
        )
        if below is None and extent is not None and not self.lost_now:
            self.lost_now = True
            with self._changed:
                self._lose(
                    extent.stored,
                    Unavailable(
                        extent.stored.variant.variant_id, LoadFailure.MISSING, "it went away"
                    ),
                )
        super().place(layer, sink, below=below)


@pytest.mark.gate
def test_g4_with_a_chunk_that_is_lost_between_looking_and_placing(
    decoder: Decoder, disk: Disk, assert_exact: Exact
) -> None:
    plain = disk.loads(readers=0)
    loads = Clumsy(plain.layers, plain.extents, Meter(None))
    while loads.depth() < 3:
        read_one(loads)
    threading.Timer(0.1, read, (loads,)).start()
    result = prefilled(decoder, loads, loading="layerwise")
    assert loads.lost_now
    assert_exact(result)


@KEPT_OR_NOT
@pytest.mark.gate
@pytest.mark.parametrize("after", [0, 3, 12, 20])
@pytest.mark.parametrize("known", [True, False])
def test_g4_on_a_disk_that_stops_answering(
    decoder: Decoder, disk: Disk, assert_exact: Exact, after: int, known: bool
) -> None:
    loads = disk.loads(readers=0, expected=2e9)
    hanging = Hanging(loads, after)
    speed = measured(decoder) if known else ComputeSpeed(decoder.keys_per_row)
    # a machine on which nothing is sooner computed than loaded, as long as loading goes on
    if known:
        speed.measured(1000.0, 5.0)
    for _ in range(2):
        read(loads)
    result = prefilled(decoder, loads, speed=speed)
    assert not hanging.answered  # within the minute that it hangs
    hanging.again.set()
    assert_exact(result)


@KEPT_OR_NOT
@pytest.mark.parametrize("loading", LOADINGS)
def test_a_read_that_raises_anything_is_not_waited_for(
    decoder: Decoder, disk: Disk, assert_exact: Exact, loading: Loading
) -> None:
    loads = disk.loads(readers=0)

    def no_memory(*_where: int, out: Tensor) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    loads.extents[-1].stored.read = no_memory  # type: ignore[method-assign]
    read(loads)
    assert_exact(prefilled(decoder, loads, loading=loading))


@pytest.mark.parametrize("loading", LOADINGS)
def test_a_store_that_is_closed_meanwhile_costs_the_saving(
    decoder: Decoder, disk: Disk, assert_exact: Exact, loading: Loading, tmp_path: Path
) -> None:
    store = ChunkCacheStore.open(tmp_path / "closed")
    store.close()
    opened = [(disk.open(segment), BOUNDS[segment]) for segment in range(4)]
    result = prefilled(decoder, Loader(store, decoder.layout.layers).begin(opened), loading=loading)
    assert_exact(result)
    assert not_loaded(result) == list(range(BOUNDS[-2]))


def test_a_capture_of_which_only_some_layers_were_computed_is_none(
    decoder: Decoder, disk: Disk, losing: Callable[..., PendingLoads], assert_exact: Exact
) -> None:
    late = [position for position in range(20, 170) if position % 5]
    result = prefilled(
        decoder,
        losing(PendingLoads.of_nothing(6), late, before=2, spoilt=math.nan),
        rows=Rows.of(BOUNDS, new=[*range(20, 170, 5), *QUESTION]),
        resident=[ResidentKV(capture.start, capture.kv) for capture in disk.captures],
        captures=[1],
    )
    assert result.recorder.captures == ()
    assert_exact(result)


@pytest.mark.parametrize(
    ("ends_early", "probed", "shared_until", "kept"),
    [
        (False, False, 0, True),
        (True, False, 0, False),
        (False, True, 0, False),
        (True, False, 170, True),  # what the question may shape follows it
    ],
)
def test_what_the_question_has_shaped_is_not_captured_for_everybody(
    decoder: Decoder,
    disk: Disk,
    losing: Callable[..., PendingLoads],
    ends_early: bool,
    probed: bool,
    shared_until: int,
    kept: bool,
) -> None:
    """A chunk that had to be computed after all, after one whose recomputed tokens go by the question."""
    reused = (1, 2, 3) if probed else (1,)
    result = prefilled(
        decoder,
        losing(PendingLoads.of_nothing(6), range(170, 320), before=0, spoilt=math.nan),
        rows=Rows.of(BOUNDS, new=QUESTION, recomputed=[30, 40, 50]),
        resident=[ResidentKV(capture.start, capture.kv) for capture in disk.captures],
        captures=[2],
        reused=reused,
        shared_until=shared_until,
        early_termination=EarlyTermination(1) if ends_early else None,
        probe=probe_of() if probed else None,
    )
    assert set(range(170, 320)) <= set(not_loaded(result))
    assert [capture.segment for capture in result.recorder.captures] == [2] * kept


def test_what_an_earlier_pass_captured_is_kept_whatever_the_question_shapes_later(
    decoder: Decoder, disk: Disk, on_ranks: Callable[[Decoder, Ranks], Decoder]
) -> None:
    loads = disk.loads([1], readers=0)

    def decisions() -> Iterator[tuple[float, bool]]:
        yield 150, False
        yield 0, True

    others = [
        ResidentKV(capture.start, capture.kv) for capture in disk.captures if capture.segment != 1
    ]
    result = prefilled(
        on_ranks(decoder, Led(decisions())),
        loads,
        rows=Rows.of(BOUNDS, new=QUESTION, recomputed=[5, 6]),
        resident=others,
        captures=[1],
        reused=(0, 2, 3),
        early_termination=EarlyTermination(1),
    )
    assert [capture.segment for capture in result.recorder.captures] == [1]


@KEPT_OR_NOT
def test_what_a_front_piece_has_computed_is_not_overwritten_by_what_was_stored(
    decoder: Decoder, disk: Disk, assert_exact: Exact, on_ranks: Callable[[Decoder, Ranks], Decoder]
) -> None:
    loads = disk.loads([1, 2, 3], readers=0)

    def decisions() -> Iterator[tuple[float, bool]]:
        yield 150, False
        loads.read()
        yield 0, True

    wrong = ResidentKV(0, torch.zeros_like(disk.captures[0].kv))
    rows = Rows.of(BOUNDS, new=QUESTION, recomputed=range(20))
    assert_exact(prefilled(on_ranks(decoder, Led(decisions())), loads, rows=rows, resident=[wrong]))


@pytest.mark.parametrize("layer", range(1, 6))
def test_a_running_row_whose_stored_values_did_not_come_is_no_evidence_of_drift(
    decoder: Decoder,
    disk: Disk,
    assert_exact: Exact,
    losing: Callable[..., PendingLoads],
    layer: int,
) -> None:
    result = prefilled(
        decoder,
        losing(PendingLoads.of_nothing(6), [40], before=layer, spoilt=math.nan),
        rows=Rows.of(BOUNDS, new=QUESTION, recomputed=[30, 40, 50, 60]),
        resident=[ResidentKV(capture.start, capture.kv) for capture in disk.captures],
        reused=(1, 2, 3),
        drift=1.0,
    )
    assert_exact(result)
    assert result.row_layers == (len(QUESTION) + 4) * 6  # it ran already


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loading", LOADINGS)
@pytest.mark.parametrize("ahead", [0, 3, 6])
def test_what_memory_does_not_keep_is_let_go_before_the_last_pass_has_run_a_layer(
    decoder: Decoder, disk: Disk, assert_exact: Exact, loading: Loading, ahead: int
) -> None:
    """Some layers may have come ahead of the request's turn; of the others there is never more than is being read."""
    disk.kept = False
    loads = disk.loads(readers=0)
    while loads.depth() < ahead:
        read_one(loads)
    chunks = {id(one.stored): one.stored for one in loads.extents}.values()
    whole = [weakref.ref(one.kv) for one in chunks if one.kv is not None]
    assert len(whole) == 4
    job = PrefillJob(IDS, ONLY_QUESTION.rows, loading=loading)
    steps = OverlappedPrefill(decoder, job, loads, ComputeSpeed(decoder.keys_per_row)).steps()
    held: list[int] = []

    def watched() -> Steps:
        step = next(steps)
        while True:
            if isinstance(step, Forward):
                held.append(sum(ref() is not None for ref in whole))
            try:
                step = steps.send((yield step))
            except StopIteration as end:
                return cast(PrefillResult, end.value)

    read(loads)
    result = run(decoder, watched())
    assert not any(held[-decoder.layout.layers :])
    assert loading == "cake" or not any(held)
    assert_exact(result)


def test_what_memory_keeps_stays_where_it_was_read(
    decoder: Decoder, disk: Disk, assert_exact: Exact
) -> None:
    loads = disk.loads()
    assert_exact(prefilled(decoder, loads, loading="whole"))
    chunks = {extent.start: extent.stored.kv for extent in loads.extents}
    for capture in disk.captures:
        kv = chunks[capture.start]
        assert kv is not None
        assert torch.equal(kv, capture.kv)


def test_a_layer_that_comes_after_its_tokens_were_taken_is_not_placed(
    decoder: Decoder, disk: Disk
) -> None:
    disk.kept = False
    loads, placed = disk.loads([1], readers=0), Placed()
    loads.send_to(placed)
    loads.reads = 1
    job = loads._next()
    assert job is not None
    assert job.own is None  # into the reader's own memory
    assert (job.extents[0].first, job.extents[-1].last) == (64, 150)
    assert loads.take(100) == list(range(20, 120))
    out = torch.zeros(decoder.layout.shape(86)[1:])
    loads._note(job, None, out)
    assert sorted(placed.positions) == list(range(120, 170))
    loads.close()
    loads._note(job, None, out)  # in flight when it was closed
    assert len(placed.positions) == 50


class Placed:
    """A sink that remembers where something was placed."""

    def __init__(self) -> None:
        self.positions: list[int] = []

    def place(self, layer: int, chunk: Tensor, start: int) -> None:
        self.positions += range(start, start + chunk.shape[1])

    def place_all(self, layer: int, chunks: Sequence[tuple[Tensor, int]]) -> None:
        for chunk, start in chunks:
            self.place(layer, chunk, start)


def read_one(loads: PendingLoads) -> None:
    """One read, as a reader does it before the request has its turn."""
    job = loads._next()
    assert job is not None
    job.extents[0].stored.read(job.layer, job.extents[0].first, job.extents[-1].last, out=job.own)
    loads._note(job, None, job.own)


# -- the parts --------------------------------------------------------------------------------------------------------


def test_a_slow_disk_is_left_for_computing_and_a_fast_one_is_not(
    decoder: Decoder, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    speed = measured(decoder)
    disk.throttle.bytes_per_s = 1e5  # 14 s for all of it
    loads = disk.loads()
    result = prefilled(decoder, loads, speed=speed)
    assert sum(extent.taken for extent in loads.extents) > 300
    assert len(not_loaded(result)) == sum(extent.taken for extent in loads.extents)
    disk.throttle.bytes_per_s = math.inf
    # On a busy machine the readers may not run for a long time.
    monkeypatch.setattr(overlapped, "LOADING_CONSTANTS", LoadingConstants(stall_s=math.inf))
    fast = disk.loads(expected=1e9)
    slow = ComputeSpeed(decoder.keys_per_row)
    slow.measured(1000.0, 50.0)  # a machine that takes 50 ms for a row
    assert not not_loaded(prefilled(decoder, fast, speed=slow))
    assert not any(extent.taken for extent in fast.extents)


def test_readers_take_extents_from_the_back_and_the_front_takes_tokens_from_the_first(
    disk: Disk,
) -> None:
    loads = disk.loads(readers=0)
    loads.layer_first, loads.reads = False, 1
    jobs = [(job.extents[0].first, job.extents[-1].last) for job in iter(loads._next, None)]
    assert jobs[:2] == [(64, 150), (0, 64)]  # of the last chunk: a quarter of what is left at most
    assert [last - first for first, last in jobs[-3:]] == [64, 64, 20]  # near the front one by one
    loads = disk.loads(readers=0)
    assert loads.take(30) == list(range(30))
    assert loads.take(1000)[-1] == BOUNDS[-2] - 1
    assert loads._next() is None  # nothing is left to be read
    assert loads.bytes_left() == 0.0


def reads_of(loads: PendingLoads, count: int) -> list[tuple[int, int, int]]:
    """The next reads: layer, first token, token after the last."""
    jobs = [job for _ in range(count) if (job := loads._next())]
    return [(job.layer, job.extents[0].first, job.extents[-1].last) for job in jobs]


def test_layer_first_reads_what_adjoins_at_once_from_the_back(disk: Disk) -> None:
    loads = disk.loads(readers=0)
    loads.reads = 1
    assert reads_of(loads, 4) == [*[(0, 0, 150)] * 3, (0, 0, 20)]


def test_the_first_reads_are_small_and_of_few_extents_each_reader_takes_half(disk: Disk) -> None:
    assert reads_of(disk.loads(readers=0), 2) == [(0, 128, 150), (0, 64, 128)]
    # how fast it comes is known
    assert reads_of(disk.loads(readers=0, expected=1e6), 1) == [(0, 0, 150)]
    assert reads_of(disk.loads([3], readers=0, expected=1e6), 2) == [(0, 64, 150), (0, 0, 64)]


@KEPT_OR_NOT
def test_what_is_left_out_is_read_no_further_and_is_neither_lost_nor_taken(disk: Disk) -> None:
    loads = disk.loads(readers=0)
    loads.send_to(Placed())
    for _ in range(
        4
    ):  # one extent of the last chunk, then two more of it, then a few of the chunk before
        read_one(loads)
    before = [extent.layers for extent in loads.extents]
    assert sum(before[-3:]) == 3
    # the last chunk as a whole, and of the one before more than its first extent
    loads.leave_out([*range(BOUNDS[2], BOUNDS[2] + 100), *range(BOUNDS[3], BOUNDS[4])])
    loads.read()
    layers = disk.decoder.layout.layers
    assert [extent.layers for extent in loads.extents] == [
        *[layers] * 4,
        before[4],
        *[layers] * 2,
        *before[-3:],
    ]
    assert loads.is_complete()
    assert loads.depth() == layers
    assert (loads.incomplete(), loads.failed(), loads.bytes_left()) == ([], [], 0.0)
    assert loads.take(math.inf) == []


def test_what_is_left_out_while_it_is_read_is_dropped_after_its_layer(disk: Disk) -> None:
    loads = disk.loads([1], readers=0)
    loads.send_to(placed := Placed())
    job = loads._next()
    assert job is not None
    loads.leave_out(range(BOUNDS[1], BOUNDS[2]))
    assert loads.is_complete()
    loads._note(job, Unavailable("", LoadFailure.UNREADABLE, "too late"), job.own)
    assert loads.failed() == []  # nothing waits for it, so that its loss matters to no one
    assert loads._next() is None
    assert placed.positions == []


def test_what_failed_is_told_once(disk: Disk) -> None:
    loads = disk.loads(readers=0)
    disk.path(2).unlink()
    os.truncate(disk.path(1), 4096 + 100)
    loads.read()
    failed = loads.failed()
    # 2 was open already: unlinking takes nothing from who reads it
    assert failed == list(range(BOUNDS[1], BOUNDS[2]))
    assert loads.failed() == []
    assert loads.incomplete() == []


def test_waiting_is_added_up(disk: Disk) -> None:
    loads = disk.loads(readers=0)
    assert not loads.wait(lambda: False, 0.0)
    before = loads.waited_s
    assert before > 0.0
    assert loads.wait(lambda: True)
    assert loads.waited_s > before


@settings(max_examples=60, deadline=None)
@given(layers=st.integers(1, 100), prefill_s=st.floats(0.001, 100), load_s=st.floats(0, 100))
def test_after_the_depth_of_equation_16_no_layer_is_waited_for(
    layers: int, prefill_s: float, load_s: float
) -> None:
    depth = preload_depth(layers, prefill_s=prefill_s, load_s=load_s)
    assert 1 <= depth <= layers
    begins = depth * load_s / layers
    # it is computed at `begins + layer · prefill_s / layers`, and read by then
    for layer in range(layers):
        assert (layer + 1) * load_s / layers <= begins + layer * prefill_s / layers + 1e-9


@settings(max_examples=60, deadline=None)
@given(
    load=st.floats(0, 50), compute=st.floats(0, 50), a=st.floats(0.001, 1), b=st.floats(0.001, 1)
)
def test_both_ends_are_done_at_the_same_moment(
    load: float, compute: float, a: float, b: float
) -> None:
    tokens = tokens_to_compute(load_s=load, compute_s=compute, load_token_s=a, compute_token_s=b)
    assert load - tokens * a == pytest.approx(compute + tokens * b, abs=1e-6)


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_a_meter_forgets_an_old_rate_and_counts_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(rate_module, "time", clock)
    meter = Meter(100e6)
    assert meter.bytes_per_s == pytest.approx(100e6, rel=0.1)
    for _ in range(30):
        meter.begin(1e5)
        clock.now += 0.01
        meter.end(1e5, came=True)
    assert 3e6 < meter.bytes_per_s < 20e6  # 10 MB/s by now, and a rest of what was expected
    before = meter.bytes_per_s
    clock.now += 0.2
    assert meter.bytes_per_s < 0.8 * before
    meter.stop()
    rate = meter.bytes_per_s
    clock.now += 0.05
    assert meter.bytes_per_s == rate


def test_what_is_in_flight_never_raises_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(rate_module, "time", clock)
    known, new = Meter(10e6), Meter(None)
    for meter in (known, new):
        meter.begin(1e6)
        meter.begin(1e6)
    clock.now += 0.01
    assert known.bytes_per_s == pytest.approx(10e6)
    assert new.bytes_per_s == pytest.approx(200e6, rel=0.02)  # nothing has come: so much at most
    clock.now += 0.09
    assert new.bytes_per_s == pytest.approx(20e6, rel=0.1)
    new.end(0.0, came=False)
    assert not new.came
    new.end(1e6, came=True)
    assert new.came
    assert new.bytes_per_s == pytest.approx(15e6, rel=0.1)  # the other one is half-way
    new.begin(1e6)
    assert new.bytes_per_s == pytest.approx(15e6, rel=0.1)


def test_a_meter_tells_how_many_cores_reading_keeps_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(rate_module, "time", clock)
    meter = Meter(100e6, cpu_s_per_byte=1e-8)  # as an earlier request found it
    assert meter.cores == pytest.approx(1.0, rel=0.1)
    for _ in range(100):
        meter.begin(1e6)
        clock.now += 0.02
        meter.end(1e6, came=True, cpu_s=0.015)
    assert meter.cores == pytest.approx(0.75, rel=0.1)
    assert Meter(None).cores == 0.0


def test_a_last_pass_on_all_cores_waits_for_busy_readers_and_not_for_others(
    decoder: Decoder, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = ComputeSpeed(decoder.keys_per_row)
    slow.measured(1000.0, 50.0)  # a machine that takes 50 ms for a row: no front is computed
    job = PrefillJob(IDS, ONLY_QUESTION.rows)
    for spare, busy in ((0, True), (100, False)):
        monkeypatch.setattr(overlapped, "_spare_cores", lambda spare=spare: spare)
        loads = disk.loads(readers=0, expected=1e9)
        loads.meter = Meter(1e9, cpu_s_per_byte=1e-8)
        steps = OverlappedPrefill(decoder, job, loads, slow).steps()
        wait = next(steps)
        assert isinstance(wait, overlapped.Wait)
        assert wait.ready() is not busy
        loads.read()
        assert wait.ready()
        steps.close()


def test_until_a_front_is_computed_loading_goes_layer_by_layer(
    decoder: Decoder, disk: Disk
) -> None:
    speed, loads = measured(decoder), disk.loads(readers=0)  # nothing comes
    steps = OverlappedPrefill(decoder, PrefillJob(IDS, ONLY_QUESTION.rows), loads, speed).steps()
    assert isinstance(next(steps), overlapped.Wait)
    assert isinstance(steps.send(False), overlapped.Wait)
    assert loads.layer_first
    assert isinstance(steps.send(True), Forward)
    assert not loads.layer_first
    assert loads.extents[0].taken
    steps.close()


def test_what_is_recomputed_of_a_stored_chunk_belongs_to_an_untouched_prompt_once(
    decoder: Decoder, disk: Disk
) -> None:
    """It is to be loaded and to be computed."""
    rows = ONLY_QUESTION.rows.mark(range(20, 60), RowReason.RECOMPUTED)
    loads = disk.loads(readers=0)
    prefill = OverlappedPrefill(decoder, PrefillJob(IDS, rows), loads, measured(decoder))
    assert prefill._split().is_untouched
    loads.read()
    assert not prefill._split().is_untouched


def test_an_engine_that_has_measured_nothing_looks_longer_before_it_computes_a_front(
    decoder: Decoder, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot know that a front pays. It goes on as soon as it sees that the rest will not take long."""
    monkeypatch.setattr(rate_module, "time", Clock())  # on a busy machine the look would be over
    loads = disk.loads(readers=0)
    unmeasured = ComputeSpeed(decoder.keys_per_row)
    steps = OverlappedPrefill(
        decoder, PrefillJob(IDS, ONLY_QUESTION.rows), loads, unmeasured
    ).steps()
    assert isinstance(next(steps), overlapped.Wait)
    look = steps.send(False)
    assert isinstance(look, overlapped.Wait)
    assert look.timeout_s
    assert not look.ready()
    loads.meter = Meter(1e9)  # what came by then
    assert look.ready()
    assert isinstance(steps.send(True), overlapped.Wait)  # the last pass waits for its first layer
    assert not loads.extents[0].taken
    steps.close()


def test_the_loader_keeps_what_came_whole_and_reports_what_is_damaged(
    decoder: Decoder, tmp_path: Path
) -> None:
    with ChunkCacheStore.open(tmp_path) as store:
        variants = [store.put(capture_of(decoder, name)).result() for name in ("good", "bad")]
        good, bad = (variant for variant in variants if isinstance(variant, Variant))
    path = DiskTier(tmp_path / "variants").path(bad.variant_id, bad.created)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with ChunkCacheStore.open(tmp_path) as store:
        loader = Loader(store, decoder.layout.layers)
        opened = [store.open_variant(variant) for variant in (good, bad)]
        assert all(isinstance(one, StoredVariant) for one in opened)
        loads = loader.begin(
            [(one, 100 * n) for n, one in enumerate(opened) if isinstance(one, StoredVariant)]
        )
        assert loads.wait(lambda: not loads.incomplete(), 60)
        loader.end(loads)
        store.flush()
        assert store.stats().loads == {"disk": 1}
        assert store.stats().load_failures == {"disk": {"damaged": 1}}
        assert store.stats().variants == 1
        assert isinstance(store.open_variant(good), LoadedVariant)  # from memory
        assert isinstance(store.load(bad), Unavailable)


def capture_of(decoder: Decoder, name: str) -> Capture:
    key = VariantKey("tenant", decoder.fingerprint, digest(name), ())
    kv = torch.randn(decoder.layout.shape(100))
    return Capture(key, decoder.layout, "tokens", kv, TokenScores(), (), 0.1, 0.6, 1.0)
