"""Order of work on a GPU, on a device that computes as late as CUDA permits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.late_device import Device
from cachecraft_rag.compute import kv_buffer, overlapped
from cachecraft_rag.compute.balance.speed import ComputeSpeed
from cachecraft_rag.compute.captures.write_back import CaptureContext, CaptureDescriber, Ended
from cachecraft_rag.compute.driver import Work, prefill, run
from cachecraft_rag.compute.job import PrefillJob, PrefillResult
from cachecraft_rag.compute.kv_buffer import ResidentKV
from cachecraft_rag.compute.overlapped import OverlappedPrefill
from cachecraft_rag.compute.row_pass import RowPass, advance
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.compute.warm_up import launch_all
from cachecraft_rag.kernels.attention import attention_with_mass
from cachecraft_rag.kernels.attention_mass import segment_mass
from cachecraft_rag.kernels.gpu import streams
from cachecraft_rag.kernels.placing import place_all
from cachecraft_rag.kernels.visibility import Visibility
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.loading.pending import PendingLoads
from cachecraft_rag.types.prompts import Segment
from cachecraft_rag.types.variants import LoadedVariant

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.version.cuda is not None, reason="a build for CUDA has kernels that would run instead"
    ),
]

BOUNDS = [0, 8, 20, 36, 40]
SEGMENTS = (
    Segment("system", "the system", tuple(range(8))),
    Segment("chunk", "first", tuple(range(12))),
    Segment("chunk", "second", tuple(range(16))),
    Segment("question", "question", tuple(range(4)), private=True),
)
IDS = [token for segment in SEGMENTS for token in segment.token_ids]
WHOLE = PrefillJob(IDS, Rows.of(BOUNDS, new=range(40)), captures=[0, 1, 2])


def test_nothing_is_computed_before_something_waits_for_it(device: Device) -> None:
    computing = torch.cuda.Stream("cuda:1")
    with torch.cuda.stream(computing):
        doubled = torch.ones(3, device="cuda:1") * 2
    assert doubled.cpu().isnan().all(), "the default stream does not wait for another one"
    torch.cuda.current_stream("cuda:1").wait_stream(computing)
    assert doubled.cpu().tolist() == [2.0, 2.0, 2.0]


def test_a_prefill_on_a_late_device_gives_the_same_hidden_states(
    decoder: Decoder, decoder_on_device: Decoder
) -> None:
    expected = prefill(decoder, WHOLE)
    result = prefill(decoder_on_device, WHOLE)
    torch.testing.assert_close(result.hidden.cpu(), expected.hidden)


@pytest.mark.parametrize(("layers_per_copy", "copies"), [(1, 4), (2, 2), (3, 2), (4, 1)])
def test_chunk_caches_are_copied_in_groups_of_layers_and_placed_when_they_have_arrived(
    decoder: Decoder,
    decoder_on_device: Decoder,
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
    layers_per_copy: int,
    copies: int,
) -> None:
    monkeypatch.setattr(kv_buffer, "LAYERS_PER_COPY", layers_per_copy)
    kv = prefill(decoder, WHOLE).recorder.captures[1].kv
    rows = Rows.of(BOUNDS, new=[*range(8), *range(20, 40)])
    expected = prefill(decoder, PrefillJob(IDS, rows, resident=[ResidentKV(8, kv)]))
    result = prefill(decoder_on_device, PrefillJob(IDS, rows, resident=[ResidentKV(8, kv)]))
    torch.testing.assert_close(result.hidden.cpu(), expected.hidden)
    placed = slice(8, 20)
    torch.testing.assert_close(
        result.buffer.kv.cpu()[:, :, placed], expected.buffer.kv[:, :, placed]
    )
    sizes = [size for size in device.sizes_to_device if size >= kv.nbytes // 4]
    assert len(sizes) == copies
    assert sum(sizes) == kv.nbytes


def test_the_copies_of_a_request_begin_at_once_in_groups_that_hold_all_its_chunk_caches(
    decoder: Decoder,
    decoder_on_device: Decoder,
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _tensor: True)
    monkeypatch.setattr(kv_buffer, "LAYERS_PER_COPY", 2)
    captures = prefill(decoder, WHOLE).recorder.captures
    resident = [ResidentKV(8, captures[1].kv), ResidentKV(20, captures[2].kv)]
    job = PrefillJob(IDS, Rows.of(BOUNDS, new=[*range(8), *range(36, 40)]), resident=resident)
    expected = prefill(decoder, job)

    started = OverlappedPrefill(
        decoder_on_device,
        job,
        PendingLoads.of_nothing(decoder.layout.layers),
        ComputeSpeed(decoder.keys_per_row),
    )
    copies = [call for call in device.copy_calls if call.dtype.is_floating_point]
    assert [call.transfers for call in copies] == [2, 2], "two groups of layers, two chunk-caches"
    result = run(decoder_on_device, started.steps())
    assert len([call for call in device.copy_calls if call.dtype.is_floating_point]) == 2
    torch.testing.assert_close(result.hidden.cpu(), expected.hidden)
    torch.testing.assert_close(result.buffer.kv.cpu()[:, :, 8:36], expected.buffer.kv[:, :, 8:36])


@torch.inference_mode()
def test_a_loaded_layer_of_several_chunk_caches_is_copied_in_one_call(
    decoder: Decoder, decoder_on_device: Decoder, device: Device
) -> None:
    captures = prefill(decoder, WHOLE).recorder.captures
    chunks = [(captures[1].kv[2], 8), (captures[2].kv[2], 20)]
    expected = kv_buffer.KVBuffer(decoder, 40)
    expected.place_all(2, chunks)
    buffer = kv_buffer.KVBuffer(decoder_on_device, 40)
    buffer.place_all(2, chunks)
    copies = [call for call in device.copy_calls if call.dtype.is_floating_point]
    assert [call.transfers for call in copies] == [2]
    torch.testing.assert_close(buffer.kv.cpu()[2, :, 8:36], expected.kv[2, :, 8:36])


def test_copies_outlive_a_request_that_is_given_up(
    decoder: Decoder,
    decoder_on_device: Decoder,
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _tensor: True)
    kv = prefill(decoder, WHOLE).recorder.captures[1].kv
    buffer = kv_buffer.KVBuffer(decoder_on_device, 40)
    buffer.take([ResidentKV(8, kv)])
    memory = buffer.kv.memory.untyped_storage().data_ptr()  # type: ignore[attr-defined]
    copies = streams.copy_stream(decoder_on_device.device)
    assert (memory, id(copies)) in device.kept_for, (
        "the allocator could reuse it while it is written"
    )


@pytest.fixture
def describing() -> Callable[[Work[Any], Ended], None]:
    """Run captures in a thread that computes on the default stream, as a server does."""
    thread = ThreadPoolExecutor(1)
    lock = threading.Lock()

    def start(steps: Work[Any], ended: Ended) -> None:
        def work() -> None:
            try:
                stored = run(None, steps, lambda: lock)  # type: ignore[arg-type]  # captures have no layers to run
            except Exception as error:  # noqa: BLE001
                ended(None, error)
            else:
                ended(stored, None)

        thread.submit(work)

    return start


def test_captures_of_a_side_stream_hold_what_was_computed_there(
    decoder: Decoder,
    decoder_on_device: Decoder,
    device: Device,
    store: ChunkCacheStore,
    describing: Callable[[Work[Any], Ended], None],
) -> None:
    expected = {
        capture.segment: capture.kv for capture in prefill(decoder, WHOLE).recorder.captures
    }
    describer = CaptureDescriber(
        store,
        namespace="default",
        fingerprint=decoder.fingerprint,
        layout=decoder.layout,
        start=describing,
    )
    # as vLLM's worker does, for its main thread only
    torch.cuda.set_stream(torch.cuda.Stream("cuda:1"))
    result = prefill(decoder_on_device, WHOLE)
    assert not any(capture.queries for capture in result.recorder.captures), (
        "queries take twice as much memory as keys and values"
    )
    # Tensor-parallel ranks gather all heads after the pass, so these copies are not computed yet.
    with torch.inference_mode():
        recorder = result.recorder.with_all_heads(torch.clone, torch.clone)
        keys = result.buffer.kv[:, 0].clone()
    describer.submit(recorder, keys, CaptureContext(SEGMENTS, BOUNDS, [1.0] * 4, None))
    describer.close()

    names = [segment.segment_id for segment in SEGMENTS[:3]]
    stored = store.find("default", decoder.fingerprint, names, session=None).variants
    for segment, name in enumerate(names):
        (variant,) = stored[name]
        (loaded,) = store.open_variants([variant])
        assert isinstance(loaded, LoadedVariant)
        torch.testing.assert_close(loaded.kv, expected[segment])
        assert 0.5 <= variant.cci <= 1.0
    default_stream = device.default[1]
    for capture in recorder.captures:
        for tensor in capture.tensors():
            memory = tensor.memory.untyped_storage().data_ptr()  # type: ignore[attr-defined]
            assert (memory, id(default_stream)) in device.kept_for, (
                "the allocator could reuse it while it is read"
            )


def test_the_speed_of_computing_is_that_of_the_device_and_not_that_of_launching(
    decoder_on_device: Decoder, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlapped, "time", SimpleNamespace(perf_counter=lambda: device.clock))
    speed = ComputeSpeed(decoder_on_device.keys_per_row)
    no_loads = PendingLoads.of_nothing(decoder_on_device.layout.layers)
    steps = OverlappedPrefill(decoder_on_device, WHOLE, no_loads, speed).steps()
    run(decoder_on_device, steps)
    stream = device.stream_of(1)
    assert speed.whole_s(speed.rows(range(40))) >= 0.9 * stream.queued * Device.operation_s


def test_a_prefill_that_runs_ahead_waits_for_nothing_and_is_timed_once_it_is_computed(
    decoder: Decoder, decoder_on_device: Decoder, device: Device
) -> None:
    expected = prefill(decoder, WHOLE)
    job = PrefillJob(IDS, Rows.of(BOUNDS, new=range(40)))
    speed = ComputeSpeed(decoder_on_device.keys_per_row)
    no_loads = PendingLoads.of_nothing(decoder_on_device.layout.layers)
    device.host_waits.clear()
    ahead = OverlappedPrefill(decoder_on_device, job, no_loads, speed, runs_ahead=True)
    result = run(decoder_on_device, ahead.steps())
    assert "an event" not in device.host_waits
    assert not speed.known
    stream = device.stream_of(1)
    torch.testing.assert_close(result.hidden.cpu(), expected.hidden)
    assert speed.known
    assert speed.whole_s(speed.rows(range(40))) >= 0.8 * stream.queued * Device.operation_s


def in_passes(decoder: Decoder, job: PrefillJob, most_rows: int, **how: Any) -> PrefillResult:
    """Prefill in passes of at most so many rows."""
    speed = ComputeSpeed(decoder.keys_per_row)
    no_loads = PendingLoads.of_nothing(decoder.layout.layers)
    divided = OverlappedPrefill(decoder, job, no_loads, speed, most_rows=most_rows, **how)
    return run(decoder, divided.steps())


def test_captures_of_all_but_the_last_pass_leave_the_gpu_and_are_stored(
    decoder: Decoder,
    decoder_on_device: Decoder,
    store: ChunkCacheStore,
    describing: Callable[[Work[Any], Ended], None],
) -> None:
    expected = prefill(decoder, WHOLE)
    # two passes: of the instruction and the first chunk, and of the rest
    result = in_passes(decoder_on_device, WHOLE, 20)
    torch.testing.assert_close(result.buffer.kv.cpu(), expected.buffer.kv)
    captures = result.recorder.captures
    assert [capture.kv.device.type for capture in captures] == ["cpu", "cpu", "cuda"]
    on_gpu = sum(capture.kv.nbytes for capture in captures if capture.kv.device.type == "cuda")
    assert on_gpu == decoder.layout.nbytes(16), "instead of those of 36 tokens"

    with torch.inference_mode():  # as several ranks do, which gather heads on the GPU
        gathered = result.recorder.with_all_heads(torch.clone, torch.clone)
    assert [capture.kv.device.type for capture in gathered.captures] == ["cpu", "cpu", "cuda"]
    describer = CaptureDescriber(
        store,
        namespace="default",
        fingerprint=decoder.fingerprint,
        layout=decoder.layout,
        start=describing,
    )
    keys = result.buffer.kv[:, 0]
    describer.submit(gathered, keys, CaptureContext(SEGMENTS, BOUNDS, [1.0] * 4, None))
    describer.close()
    names = [segment.segment_id for segment in SEGMENTS[:3]]
    variants = store.find("default", decoder.fingerprint, names, session=None).variants
    for name, capture in zip(names, expected.recorder.captures, strict=True):
        (variant,) = variants[name]
        loaded = store.load(variant)
        assert isinstance(loaded, LoadedVariant)
        torch.testing.assert_close(loaded.kv, capture.kv)


def test_passes_that_run_ahead_take_chunk_caches_and_are_timed_by_the_device(
    decoder: Decoder, decoder_on_device: Decoder, device: Device
) -> None:
    kv = prefill(decoder, WHOLE).recorder.captures[1].kv
    rows = Rows.of(BOUNDS, new=[*range(8), *range(20, 40)], recomputed=range(8, 20, 3))
    job = PrefillJob(IDS, rows, resident=[ResidentKV(8, kv)], reused=[1], drift=0.5)
    expected = prefill(decoder, job)
    device.host_waits.clear()
    result = in_passes(decoder_on_device, job, 16, runs_ahead=True)
    assert "an event" not in device.host_waits
    torch.testing.assert_close(result.buffer.kv.cpu(), expected.buffer.kv)


def test_what_is_captured_is_computed_before_the_prefill_ends(
    decoder_on_device: Decoder, device: Device
) -> None:
    speed = ComputeSpeed(decoder_on_device.keys_per_row)
    no_loads = PendingLoads.of_nothing(decoder_on_device.layout.layers)
    ahead = OverlappedPrefill(decoder_on_device, WHOLE, no_loads, speed, runs_ahead=True)
    run(decoder_on_device, ahead.steps())
    assert speed.known


@torch.inference_mode()
def test_few_layers_are_launched_before_the_device_has_computed_them(
    decoder_on_device: Decoder, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cachecraft_rag.compute.kv_buffer import KVBuffer

    buffer = KVBuffer(decoder_on_device, 40)
    positions = torch.arange(8, 40).numpy()
    row_pass = RowPass(decoder_on_device, buffer, torch.tensor(IDS[8:], device="cuda:1"), positions)
    stream = device.stream_of(1)
    launched = []
    for _layer in range(decoder_on_device.layout.layers):
        advance(decoder_on_device, [row_pass])
        launched.append(stream.record_event())
        in_flight = [event for event in launched if not event.query()]
        assert len(in_flight) <= 2
    row_pass.wait()
    assert all(event.query() for event in launched)


def test_every_kernel_is_launched_on_the_device_of_its_tensors(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from triton.runtime.jit import JITFunction

    from cachecraft_rag.kernels.gpu import attention, choice, drift, place, received, rope, tiles

    launches: list[tuple[str, int]] = []

    def launcher(kernel: Any, _grid: object) -> Callable[..., None]:
        return lambda *_arguments, **_constants: launches.append(
            (kernel.__name__, torch.cuda.current_device())
        )

    properties = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=227 << 10)
    monkeypatch.setattr(JITFunction, "__getitem__", launcher)
    monkeypatch.setattr(choice, "_installed", lambda: True)
    monkeypatch.setattr(choice, "_launches", lambda _device: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    tiles._processors.cache_clear()
    tiles._shared_bytes.cache_clear()

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="cuda:1")

    q = zeros(4, 8, 64)
    k = zeros(1024, 2, 64)
    visible = Visibility(torch.arange(4, device="cuda:1"))
    bounds = torch.arange(0, 1025, 512, device="cuda:1")
    cos = zeros(1024, 64)
    merged = zeros(2, 2, 1024, 2, 64)
    attention.attend(q, k, k, visible, scale=1.0, bounds=bounds, splits=4)
    received.received(q, k, zeros(4, 8), visible, scale=1.0)
    rope.rotate(q, cos[:4], cos[:4])
    place.place(merged, [zeros(2, 2, 16, 2, 64)], [3], cos=cos, sin=cos)
    place_all(merged, [zeros(2, 2, 16, 2, 64)], [3], cos=cos, sin=cos, layers=[0, 1])
    owner = zeros(1024, dtype=torch.int32)
    drift.write_rows(merged[0], k, k, zeros(1, 2, 2, 64), owner, cos=cos, sin=cos)
    changed = {"rows": owner[:4], "positions": owner[:4], "edges": owner[:2]}
    drift.mean_change(merged[0], k, k, **changed, strength=0.4, cos=cos, sin=cos)

    assert torch.cuda.current_device() == 0
    names = {name for name, _device in launches}
    moves = {"_rotate", "_place", "_mean_change", "_write_rows"}
    assert names == {"_attend", "_combine", "_received"} | moves
    assert {current for _name, current in launches} == {1}

    launches.clear()
    place.place(merged, [zeros(2, 2, 16, 2, 64), zeros(2, 2, 9, 2, 64)], [3, 20], cos=cos, sin=cos)
    assert launches == [("_place", 1)], "chunks of different lengths share a launch"

    launches.clear()
    segment_mass(q, k, visible, bounds, scale=1.0)
    attention_with_mass(q, k, k, visible, bounds, scale=1.0)
    names = {name for name, _device in launches}
    assert names == {"_attend", "_combine"}, (
        "the attention that each key receives is not needed here"
    )


def test_without_a_c_compiler_torch_runs_instead_and_a_warning_says_why(
    decoder: Decoder,
    decoder_on_device: Decoder,
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("triton")
    from triton.runtime.jit import JITFunction

    from cachecraft_rag.kernels.gpu import choice

    def no_compiler(_kernel: Any, _grid: object) -> Any:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable")

    monkeypatch.setattr(JITFunction, "__getitem__", no_compiler)
    monkeypatch.setattr(choice, "_installed", lambda: True)
    choice._launches.cache_clear()
    expected = prefill(decoder, WHOLE)
    result = prefill(decoder_on_device, WHOLE)
    torch.testing.assert_close(result.hidden.cpu(), expected.hidden)
    assert [record.getMessage() for record in caplog.records] == [
        "Triton cannot run kernels on cuda:1, so torch's slower operations are used there: Failed to find C compiler. "
        "Please specify via CC environment variable. Triton needs a C compiler such as gcc (on Debian and Ubuntu: "
        "apt-get install gcc)"
    ]
    choice._launches.cache_clear()


def test_the_warm_up_launches_on_the_device(decoder_on_device: Decoder, device: Device) -> None:
    launch_all(decoder_on_device)
    assert device.launches > 100


def test_the_gpu_bench_compares_captures_of_a_side_stream(
    decoder_on_device: Decoder, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting: Any = SimpleNamespace(chunk=16, question=6, shape={"vocab_size": 256})
    own = gpu.captured_on(decoder_on_device, setting, None)
    side = gpu.captured_on(decoder_on_device, setting, torch.cuda.Stream("cuda:1"))
    assert len(own) >= 2
    for first, second in zip(own, side, strict=True):
        assert torch.equal(first, second)
    monkeypatch.setattr(streams, "wait_on_stream", lambda *_arguments: None)
    early = gpu.captured_on(decoder_on_device, setting, torch.cuda.Stream("cuda:1"))
    assert not torch.equal(own[0], early[0]), "captures are read before they are written"
