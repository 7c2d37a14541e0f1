"""Loading beside computing: whatever the two ends do, and whatever goes wrong, the logits are those of full prefill."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cachecraft_rag.config import Loading
from cachecraft_rag.focus import FocusMonitor
from cachecraft_rag.loading.balance import preload_depth, tokens_to_compute
from cachecraft_rag.loading.cake import TwoEnds
from cachecraft_rag.loading.loader import Loader
from cachecraft_rag.loading.speeds import ComputeSpeed, Meter
from cachecraft_rag.loading.tail import Run, Tail
from cachecraft_rag.models import Decoder
from cachecraft_rag.planner import Plan, SegmentPlan
from cachecraft_rag.prefill import AtHand, MergedKV, PartialPrefill, PrefillInput, PrefillOutput, Reused, prefill
from cachecraft_rag.scouting import SCOUTS, Scout, Tokens
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.throttle import Throttle
from cachecraft_rag.tiers.disk import DiskTier
from cachecraft_rag.tiers.layout import StoredVariant, encode
from cachecraft_rag.turns import FairLock
from cachecraft_rag.types import Birth, LoadedVariant, TokenScores, Unavailable, Variant, VariantKey, digest

MakeDecoder = Callable[..., Decoder]
BOUNDS = [0, 20, 170, 320, 470, 500]  # system, three chunks of two runs and a bit, question
IDS = torch.randint(0, 256, (BOUNDS[-1],), generator=torch.Generator().manual_seed(3)).tolist()
QUESTION = range(BOUNDS[-2], BOUNDS[-1])


@pytest.fixture(scope="module")
def decoder(tiny_decoder: MakeDecoder) -> Decoder:
    return tiny_decoder("Llama", num_hidden_layers=6)


@pytest.fixture(scope="module")
def reference(decoder: Decoder) -> Tensor:
    return decoder.own_logits(IDS)[0]


class Disk:
    """The prompt's segments, born exact, in real files."""

    def __init__(self, decoder: Decoder, folder: Path) -> None:
        self.decoder, self.throttle = decoder, Throttle()
        self.tier = DiskTier(folder, self.throttle)
        born = prefill(decoder, PrefillInput(IDS, BOUNDS, range(BOUNDS[-1]), births=range(4)))
        self.variants = []
        for birth in born.recorder.births:
            key = VariantKey("tenant", decoder.fingerprint, digest(str(birth.segment)), ())
            tokens = birth.stop - birth.start
            nbytes = decoder.layout.nbytes(tokens)
            row = (key, key.variant_id, tokens, "tokens", (), 0.0, 0.6, 1.0, None, "raw", nbytes, 0.0, 1.5)
            variant = Variant(*row)
            self.tier.write(variant, encode(variant, decoder.layout, birth.kv), writer="ab")
            self.variants.append(variant)
        self.births = born.recorder.births

    def path(self, segment: int) -> Path:
        variant = self.variants[segment]
        return self.tier.path(variant.variant_id, variant.created)

    def open(self, segment: int) -> StoredVariant:
        stored = self.tier.open(self.variants[segment])
        assert isinstance(stored, StoredVariant)
        stored.allocate()
        return stored

    def tail(self, segments: Sequence[int] = range(4), *, readers: int = 2, expected: float | None = None) -> Tail:
        """What the loader begins with, its threads started."""
        opened = [(self.open(segment), BOUNDS[segment]) for segment in segments]
        runs = [Run(stored, start, first, last) for stored, start in opened for first, last in stored.runs]
        tail = Tail(self.decoder.layout.layers, runs, Meter(expected))
        for _ in range(readers):
            threading.Thread(target=tail.read, daemon=True).start()
        return tail


@pytest.fixture
def disk(decoder: Decoder, tmp_path: Path) -> Disk:
    return Disk(decoder, tmp_path)


def passes_of(decoder: Decoder) -> PartialPrefill:
    return PartialPrefill(decoder, IDS, BOUNDS)


def race(
    decoder: Decoder, tail: Tail, *, loading: Loading = "cake", speed: ComputeSpeed | None = None
) -> tuple[PrefillOutput, TwoEnds]:
    rows = dict.fromkeys(QUESTION, -1)
    speed = speed or ComputeSpeed(decoder.keys_per_row)
    ends = TwoEnds(passes_of(decoder), rows, (), tail=tail, speed=speed, turn=FairLock(), loading=loading)
    output = ends.run()
    tail.close()
    return output, ends


def ended(call: Callable[[], tuple[PrefillOutput, TwoEnds]]) -> tuple[PrefillOutput, TwoEnds]:
    """What `call` returns, where waiting for what never comes would hang the test."""
    found: list[tuple[PrefillOutput, TwoEnds]] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(120)
    assert found, "it waits for what never comes, or it failed"
    return found[0]


def assert_exact(output: PrefillOutput, reference: Tensor) -> None:
    assert (output.logits - reference).abs().max() <= 1e-3
    assert output.logits.argmax() == reference.argmax()


def measured(decoder: Decoder) -> ComputeSpeed:
    """What an engine has measured that has answered before."""
    speed = ComputeSpeed(decoder.keys_per_row)
    started = time.perf_counter()
    prefill(decoder, PrefillInput(IDS, BOUNDS, range(BOUNDS[-1])))
    speed.measured(speed.rows(range(BOUNDS[-1])), time.perf_counter() - started)
    return speed


# -- gate G4: any meeting point ---------------------------------------------------------------------------------------


@pytest.mark.gate
@pytest.mark.parametrize("tokens", [0, 1, 19, 20, 21, 83, 84, 100, 170, 233, 320, 469, 470])
def test_g4_whatever_the_front_takes_the_logits_are_those_of_full_prefill(
    decoder: Decoder, disk: Disk, reference: Tensor, tokens: int
) -> None:
    tail = disk.tail(readers=0)
    taken = tail.take(tokens)
    assert taken == list(range(tokens))
    passes = passes_of(decoder)
    for start in range(0, tokens, 90):  # pieces from the front
        passes.compute(taken[start : start + 90], AtHand(()))
    tail.read()
    assert tail.depth() == decoder.layout.layers
    assert tail.incomplete() == []
    supply = Placed(tail)
    assert_exact(passes.finish(QUESTION, supply), reference)


@pytest.mark.gate
@pytest.mark.parametrize("layer", range(6))
@pytest.mark.parametrize("late", [range(100, 300), [5, 64, 65, 200, 469], range(470)])
def test_g4_rows_may_join_the_last_pass_before_any_layer(
    decoder: Decoder, disk: Disk, reference: Tensor, layer: int, late: Sequence[int]
) -> None:
    tail = disk.tail(readers=0)
    tail.read()
    output = passes_of(decoder).finish(QUESTION, Placed(tail, joins={layer: late}))
    assert_exact(output, reference)
    assert output.row_layers == (len(QUESTION) + len(late)) * 6


class Placed:
    """A supply that has everything, lets rows join all the same, and then spoils what it has of them."""

    def __init__(self, tail: Tail, joins: dict[int, Sequence[int]] | None = None) -> None:
        self.tail, self.joins = tail, joins or {}

    def place(self, layer: int, merged: MergedKV) -> Sequence[int]:
        self.tail.place(layer, merged)
        for joined, positions in self.joins.items():
            if layer >= joined:
                merged.kv[layer, :, list(positions)] = 7.0
        return self.joins.get(layer, ())


@pytest.mark.gate
@pytest.mark.parametrize(
    ("loading", "rate"),
    [("cake", 0.3e6), *product(("cake", "layerwise", "whole"), (1e6, 3e6, 10e6, math.inf))],
)
def test_g4_at_any_speed_and_in_any_way_of_loading(
    decoder: Decoder, disk: Disk, reference: Tensor, rate: float, loading: Loading
) -> None:
    for speed in (ComputeSpeed(decoder.keys_per_row), measured(decoder)):
        disk.throttle.bytes_per_s = rate
        output, _ = race(decoder, disk.tail(), loading=loading, speed=speed)
        assert_exact(output, reference)


@pytest.mark.gate
@pytest.mark.parametrize(("before", "after"), [(0.2e6, math.inf), (20e6, 10.0), (1e6, 10.0)])  # 10 B/s: two days
@pytest.mark.parametrize("delay", [0.0, 0.02, 0.06])
def test_g4_while_the_speed_changes_in_the_middle(
    decoder: Decoder, disk: Disk, reference: Tensor, before: float, after: float, delay: float
) -> None:
    disk.throttle.bytes_per_s = before
    tail = disk.tail(expected=before)  # as an earlier request found it
    timer = threading.Timer(delay, setattr, (disk.throttle, "bytes_per_s", after))
    timer.start()
    output, _ = ended(lambda: race(decoder, tail, speed=measured(decoder)))
    assert_exact(output, reference)
    timer.join()
    disk.throttle.bytes_per_s = math.inf  # lets the readers go


@pytest.mark.gate
@pytest.mark.parametrize("loading", ["cake", "layerwise", "whole"])
@pytest.mark.parametrize("segment", [0, 1, 2, 3])
@pytest.mark.parametrize("where", [0.1, 0.5, 0.99])
def test_g4_with_a_file_that_is_damaged_in_the_middle(
    decoder: Decoder, disk: Disk, reference: Tensor, loading: Loading, segment: int, where: float
) -> None:
    tail = disk.tail(readers=0)
    size = disk.path(segment).stat().st_size
    with disk.path(segment).open("r+b") as file:
        file.seek(4096 + int((size - 4096) * where))
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 64]))
    threading.Thread(target=tail.read, daemon=True).start()
    output, _ = race(decoder, tail, loading=loading)
    assert_exact(output, reference)
    lost = tail.lost(next(run.stored for run in tail.runs if run.start == BOUNDS[segment]))
    assert loading == "cake" or (lost is not None and "checksum" in lost.reason)


@pytest.mark.gate
@pytest.mark.parametrize("loading", ["cake", "layerwise", "whole"])
def test_g4_with_reads_that_fail_half_way(decoder: Decoder, disk: Disk, reference: Tensor, loading: Loading) -> None:
    disk.throttle.bytes_per_s = 4e6
    tail = disk.tail()
    timer = threading.Timer(0.03, lambda: [os.truncate(disk.path(n), 6000) for n in range(4)])
    timer.start()
    output, _ = race(decoder, tail, loading=loading)
    assert_exact(output, reference)
    timer.join()


@pytest.mark.gate
@pytest.mark.parametrize("rate", [0.2e6, 1e6, 5e6, math.inf])
@pytest.mark.parametrize("stored", [(1, 3), (0, 2), (3,), (0, 1, 3)])
def test_g4_with_chunks_in_memory_and_chunks_that_are_new_in_between(
    decoder: Decoder, disk: Disk, reference: Tensor, rate: float, stored: Sequence[int]
) -> None:
    memory = [Reused(birth.start, birth.kv) for birth in disk.births if birth.segment == 0 and 0 not in stored]
    new = {0, 1, 2, 3} - set(stored) - {0}
    rows = {p: -1 for n in new for p in range(BOUNDS[n], BOUNDS[n + 1])} | dict.fromkeys(QUESTION, -1)
    disk.throttle.bytes_per_s = rate
    tail = disk.tail(stored)
    passes = PartialPrefill(decoder, IDS, BOUNDS, births=sorted(new))
    ends = TwoEnds(passes, rows, memory, tail=tail, speed=measured(decoder), turn=FairLock())
    output = ends.run()
    tail.close()
    assert_exact(output, reference)
    assert [birth.segment for birth in output.recorder.births] == sorted(new)
    for birth in output.recorder.births:  # what is born beside loading is what is born in one pass
        assert torch.allclose(birth.kv, disk.births[birth.segment].kv, atol=1e-4)
        assert len(birth.queries) == decoder.layout.layers


@pytest.mark.gate
@pytest.mark.parametrize("rate", [0.2e6, 2e6, math.inf])
def test_early_termination_beside_loading_leaves_no_position_without_keys(
    decoder: Decoder, disk: Disk, reference: Tensor, rate: float
) -> None:
    rows = dict.fromkeys(QUESTION, -1) | {BOUNDS[n] + k: n for n in (1, 2, 3) for k in (0, 70, 149)}
    disk.throttle.bytes_per_s = rate
    tail = disk.tail()
    ends = TwoEnds(passes_of(decoder), rows, (), tail=tail, speed=measured(decoder), turn=FairLock())
    output = ends.run(FocusMonitor(3, rule="gap", window=2))
    tail.close()
    assert_exact(output, reference)  # the caches are exact: whatever is not recomputed any further is right as it is


def scout_of(kind: str) -> Scout:
    """Chooses, of each chunk, the 15 tokens that were seen most and are not there otherwise."""
    reused = (1, 2, 3)

    def choose(seen: Mapping[int, np.ndarray], recomputed: Tokens, gone: Tokens) -> Plan:
        plans = [SegmentPlan("exact"), *[SegmentPlan("reused")] * 3, SegmentPlan("computed")]
        for index in reused:
            assert np.isfinite(seen[index]).all()
            free = [token for token in np.argsort(-seen[index]).tolist() if token not in gone[index]]
            plans[index] = SegmentPlan("reused", recompute=tuple(sorted({*free[:15], *recomputed[index]})))
        return Plan(tuple(plans))

    plan = Plan((SegmentPlan("exact"), *[SegmentPlan("reused")] * 3, SegmentPlan("computed")))
    return SCOUTS[kind](plan, BOUNDS, QUESTION, choose)


@pytest.mark.gate
@pytest.mark.parametrize("kind", sorted(SCOUTS))
@pytest.mark.parametrize("rate", [0.2e6, 2e6, math.inf])
@pytest.mark.parametrize("broken", [False, True])
def test_scouting_and_drift_beside_loading_leave_exact_caches_exact(
    decoder: Decoder, disk: Disk, reference: Tensor, kind: str, rate: float, broken: bool
) -> None:
    """Recomputed tokens of exact caches do not change, so nothing drifts, wherever the ends meet and whatever fails."""
    rows = dict.fromkeys(QUESTION, -1) | {BOUNDS[n] + k: n for n in (1, 2, 3) for k in (0, 30, 70, 120, 149)}
    disk.throttle.bytes_per_s = rate
    tail = disk.tail()
    if broken:
        os.truncate(disk.path(2), 6000)
    passes = passes_of(decoder)
    passes.merged.kv[:] = float("nan")  # what is read before it is written would spoil everything
    ends = TwoEnds(
        passes,
        rows,
        (),
        tail=tail,
        speed=measured(decoder),
        turn=FairLock(),
        chunks={n: range(BOUNDS[n], BOUNDS[n + 1]) for n in (1, 2, 3)},
        drift=1.0,
        scout=scout_of(kind),
    )
    output = ends.run()
    tail.close()
    assert_exact(output, reference)


@pytest.mark.parametrize("loading", ["cake", "layerwise", "whole"])
def test_a_request_that_waits_for_its_turn_is_loaded_meanwhile(
    decoder: Decoder, disk: Disk, reference: Tensor, loading: Loading
) -> None:
    disk.throttle.bytes_per_s = 5e6
    tail, turn = disk.tail(), FairLock()
    speed = measured(decoder)
    rows = dict.fromkeys(QUESTION, -1)
    ends = TwoEnds(passes_of(decoder), rows, (), tail=tail, speed=speed, turn=turn, loading=loading)
    outputs: list[PrefillOutput] = []
    thread = threading.Thread(target=lambda: outputs.append(ends.run()))
    with turn.take():  # another request computes
        thread.start()
        assert tail.wait(lambda: not tail.incomplete(), 60)
    thread.join()
    assert not any(run.taken for run in tail.runs)
    assert_exact(outputs[0], reference)


@pytest.mark.parametrize("loading", ["layerwise", "whole"])
def test_others_may_compute_while_a_request_waits_for_the_disk(decoder: Decoder, disk: Disk, loading: Loading) -> None:
    disk.throttle.bytes_per_s = 10.0  # two days for all of it
    turn, tail, waiting = FairLock(), disk.tail(expected=10.0), threading.Event()
    wait = tail.wait

    def wait_and_tell(ready: Callable[[], bool], timeout: float | None = None) -> bool:
        waiting.set()
        return wait(ready, timeout)

    tail.wait = wait_and_tell  # type: ignore[method-assign]
    ends = TwoEnds(
        passes_of(decoder),
        dict.fromkeys(QUESTION, -1),
        (),
        tail=tail,
        speed=measured(decoder),
        turn=turn,
        loading=loading,
    )
    asking = threading.Thread(target=ends.run)
    asking.start()
    assert waiting.wait(60)
    computed = threading.Event()

    def compute() -> None:
        with turn.take():
            computed.set()

    threading.Thread(target=compute, daemon=True).start()
    assert computed.wait(60)
    assert asking.is_alive()
    disk.throttle.bytes_per_s = math.inf
    asking.join(60)
    assert not asking.is_alive()


class Clumsy(Tail):
    """Loses a chunk at the worst moment: when the last pass has seen that a layer is there, but not placed it yet."""

    lost_now = False

    def place(self, layer: int, merged: MergedKV, *, below: int | None = None) -> None:
        run = next((run for run in self.runs if layer < run.layers < self.layers and run.positions), None)
        if below is None and run is not None and not self.lost_now:
            self.lost_now = True
            with self._changed:
                self._lose(run.stored, Unavailable(run.stored.variant.variant_id, "it went away"))
        super().place(layer, merged, below=below)


@pytest.mark.gate
def test_g4_with_a_chunk_that_is_lost_between_looking_and_placing(
    decoder: Decoder, disk: Disk, reference: Tensor
) -> None:
    plain = disk.tail(readers=0)
    tail = Clumsy(plain.layers, plain.runs, Meter(None), layer_first=True)
    while tail.depth() < 3:
        job = tail._next()
        assert job is not None
        job.runs[0].stored.read(job.layer, job.runs[0].first, job.runs[-1].last)
        tail._note(job.runs, None)
    threading.Timer(0.1, lambda: threading.Thread(target=tail.read, daemon=True).start()).start()
    output, _ = race(decoder, tail, loading="layerwise")
    assert tail.lost_now
    assert_exact(output, reference)


class Hanging:
    """A file on a disk that stops answering: a real one up to some read, and nothing from then on."""

    def __init__(self, tail: Tail, after: int) -> None:
        self.again, self.left = threading.Event(), after
        for stored in {id(run.stored): run.stored for run in tail.runs}.values():
            stored.read = self.wrapped(stored.read)  # type: ignore[method-assign]

    def wrapped(self, read: Callable[[int, int, int], None]) -> Callable[[int, int, int], None]:
        def slow(layer: int, start: int, stop: int) -> None:
            self.left -= 1
            if self.left < 0:
                self.again.wait()
            read(layer, start, stop)

        return slow


@pytest.mark.gate
@pytest.mark.parametrize("after", [0, 3, 12, 20])
@pytest.mark.parametrize("known", [True, False])
def test_g4_on_a_disk_that_stops_answering(
    decoder: Decoder, disk: Disk, reference: Tensor, after: int, known: bool
) -> None:
    tail = disk.tail(readers=0, expected=2e9)
    hanging = Hanging(tail, after)
    for _ in range(2):
        threading.Thread(target=tail.read, daemon=True).start()
    speed = measured(decoder) if known else ComputeSpeed(decoder.keys_per_row)
    if known:  # a machine on which nothing is sooner computed than loaded, as long as loading goes on
        speed.measured(1000.0, 5.0)
    try:
        output, _ = ended(lambda: race(decoder, tail, speed=speed))
    finally:
        hanging.again.set()
    assert_exact(output, reference)


@pytest.mark.parametrize("loading", ["cake", "layerwise", "whole"])
def test_whatever_a_read_raises_nobody_waits_for_it(
    decoder: Decoder, disk: Disk, reference: Tensor, loading: Loading
) -> None:
    tail = disk.tail(readers=0)

    def no_memory(layer: int, start: int, stop: int) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    tail.runs[-1].stored.read = no_memory  # type: ignore[method-assign]
    threading.Thread(target=tail.read, daemon=True).start()
    output, _ = race(decoder, tail, loading=loading)
    assert_exact(output, reference)


@pytest.mark.parametrize("loading", ["cake", "layerwise", "whole"])
def test_a_store_that_is_closed_meanwhile_costs_the_saving(
    decoder: Decoder, disk: Disk, reference: Tensor, loading: Loading, tmp_path: Path
) -> None:
    store = ChunkCacheStore.open(tmp_path / "closed")
    store.close()
    opened = [(disk.open(segment), BOUNDS[segment]) for segment in range(4)]
    output, _ = race(decoder, Loader(store, decoder.layout.layers).begin(opened), loading=loading)
    assert_exact(output, reference)


def test_a_birth_of_which_only_some_layers_were_computed_is_none(decoder: Decoder, disk: Disk) -> None:
    class Late:
        def place(self, layer: int, merged: MergedKV) -> Sequence[int]:
            for birth in disk.births:
                merged.place(layer, birth.kv[layer], birth.start)
            return [position for position in range(20, 170) if position % 5] if layer == 2 else ()

    passes = PartialPrefill(decoder, IDS, BOUNDS, births=[1])
    output = passes.finish([*range(20, 170, 5), *QUESTION], Late())
    assert output.recorder.births == ()


# -- the parts --------------------------------------------------------------------------------------------------------


def test_a_slow_disk_is_left_for_computing_and_a_fast_one_is_not(
    decoder: Decoder, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.throttle.bytes_per_s = 1e3  # 25 minutes for all of it
    tail = disk.tail()
    ended(lambda: race(decoder, tail, speed=measured(decoder)))
    assert sum(len(tail.taken(stored)) for stored in {id(r.stored): r.stored for r in tail.runs}.values()) > 300
    disk.throttle.bytes_per_s = math.inf
    # Readers may get no core for a while: neither says that the disk is slow.
    monkeypatch.setattr("cachecraft_rag.loading.cake._STALL_S", 60.0)
    fast = disk.tail(expected=1e9)
    slow = ComputeSpeed(decoder.keys_per_row)
    slow.measured(1000.0, 50.0)  # a machine that takes 50 ms for a row
    race(decoder, fast, speed=slow)
    assert not any(fast.taken(run.stored) for run in fast.runs)


def test_readers_take_runs_from_the_back_and_the_front_takes_tokens_from_the_first(disk: Disk) -> None:
    tail = disk.tail(readers=0)
    assert [job.runs[0].first for job in iter(tail._next, None)][:3] == [128, 64, 0]  # of the last chunk
    tail = disk.tail(readers=0)
    assert tail.take(30) == list(range(30))
    assert tail.take(1000)[-1] == BOUNDS[-2] - 1
    assert tail._next() is None  # nothing is left to be read
    assert tail.bytes_left() == 0.0


def test_layer_first_reads_what_adjoins_at_once(disk: Disk) -> None:
    tail = disk.tail(readers=0)
    tail.layer_first = True
    jobs = [tail._next() for _ in range(4)]
    assert [(job.layer, job.runs[0].first, job.runs[-1].last) for job in jobs if job] == [
        (0, 0, 20),
        *[(0, 0, 150)] * 3,
    ]


def test_a_hole_is_told_once(disk: Disk) -> None:
    tail = disk.tail(readers=0)
    disk.path(2).unlink()
    os.truncate(disk.path(1), 4096 + 100)
    tail.read()
    holes = tail.holes()
    assert holes == list(range(BOUNDS[1], BOUNDS[2]))  # 2 was open already: unlinking takes nothing from who reads it
    assert tail.holes() == []
    assert tail.incomplete() == []


@settings(max_examples=60, deadline=None)
@given(layers=st.integers(1, 100), prefill_s=st.floats(0.001, 100), load_s=st.floats(0, 100))
def test_after_the_depth_of_equation_16_no_layer_is_waited_for(layers: int, prefill_s: float, load_s: float) -> None:
    depth = preload_depth(layers, prefill_s=prefill_s, load_s=load_s)
    assert 1 <= depth <= layers
    begins = depth * load_s / layers
    for layer in range(layers):  # it is computed at `begins + layer · prefill_s / layers`, and read by then
        assert (layer + 1) * load_s / layers <= begins + layer * prefill_s / layers + 1e-9


@settings(max_examples=60, deadline=None)
@given(load=st.floats(0, 50), compute=st.floats(0, 50), a=st.floats(0.001, 1), b=st.floats(0.001, 1))
def test_both_ends_are_done_at_the_same_moment(load: float, compute: float, a: float, b: float) -> None:
    tokens = tokens_to_compute(load_s=load, compute_s=compute, load_token_s=a, compute_token_s=b)
    assert load - tokens * a == pytest.approx(compute + tokens * b, abs=1e-6)


def test_a_meter_forgets_an_old_rate_and_counts_silence(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachecraft_rag.loading.speeds.time", clock)
    meter = Meter(100e6)
    assert meter.bytes_per_s == pytest.approx(100e6, rel=0.1)
    for _ in range(30):
        meter.begin(1e5)
        clock.sleep(0.01)
        meter.end(1e5, came=True)
    assert 3e6 < meter.bytes_per_s < 20e6
    before = meter.bytes_per_s
    clock.sleep(0.2)
    assert meter.bytes_per_s < 0.8 * before
    meter.stop()
    rate = meter.bytes_per_s
    clock.sleep(0.05)
    assert meter.bytes_per_s == rate


def test_compute_speed_separates_the_pass_from_its_rows() -> None:
    speed = ComputeSpeed(keys_per_row=1000.0)
    assert not speed.known
    assert speed.rows([0, 1000, 3000]) == 1 + 2 + 4
    for _ in range(50):
        speed.stepped(0.02)
    speed.measured(100.0, 0.02 + 0.5)
    assert speed.seconds(10.0) == pytest.approx(0.02 + 0.05)
    speed.measured(10.0, 5.0)  # few rows tell nothing of a row
    assert speed.seconds(10.0) == pytest.approx(0.07)


def test_the_loader_keeps_what_came_whole_and_reports_what_is_damaged(decoder: Decoder, tmp_path: Path) -> None:
    with ChunkCacheStore.open(tmp_path) as store:
        variants = [store.put(birth_of(decoder, name)).result() for name in ("good", "bad")]
        good, bad = (variant for variant in variants if isinstance(variant, Variant))
    path = DiskTier(tmp_path / "variants").path(bad.variant_id, bad.created)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with ChunkCacheStore.open(tmp_path) as store:
        loader = Loader(store, decoder.layout.layers)
        opened = [store.open_variant(variant) for variant in (good, bad)]
        assert all(isinstance(one, StoredVariant) for one in opened)
        tail = loader.begin([(one, 100 * n) for n, one in enumerate(opened) if isinstance(one, StoredVariant)])
        assert tail.wait(lambda: not tail.incomplete(), 60)
        loader.end(tail)
        store.flush()
        assert store.stats().loads == {"disk": 1, "data damaged": 1}
        assert store.stats().variants == 1
        assert isinstance(store.open_variant(good), LoadedVariant)  # from memory
        assert isinstance(store.load(bad), Unavailable)


def birth_of(decoder: Decoder, name: str) -> Birth:
    key = VariantKey("tenant", decoder.fingerprint, digest(name), ())
    kv = torch.randn(decoder.layout.shape(100))
    return Birth(key, decoder.layout, "tokens", kv, TokenScores(), (), 0.1, 0.6, 1.0)
