"""Captures on their way to the store: in the background, one at a time, and never in the way of an answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cachecraft_rag.compute.captures.write_back import CaptureContext, CaptureDescriber, Ended
from cachecraft_rag.compute.driver import Work, prefill, run
from cachecraft_rag.compute.job import PrefillJob, PrefillResult
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.prompts import Segment

MakeDecoder = Callable[..., Decoder]
BOUNDS = [0, 8, 20, 36, 40]
SEGMENTS = (
    Segment("system", "the system", tuple(range(8))),
    Segment("chunk", "first", tuple(range(12))),
    Segment("chunk", "second", tuple(range(16))),
    Segment("question", "question", tuple(range(4)), private=True),
)
IDS = [token for segment in SEGMENTS for token in segment.token_ids]
NAMES = ["the system", "first", "second"]


@pytest.fixture
def decoder(tiny_decoder: MakeDecoder) -> Decoder:
    return tiny_decoder("Llama")


class Background:
    """Runs captures in a thread, a step at a time in turns with the thread that holds `lock`."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self._thread, self.lock = decoder, ThreadPoolExecutor(1), threading.Lock()

    def start(self, steps: Work[Any], ended: Ended) -> None:
        self._thread.submit(self._work, steps, ended)

    def _work(self, steps: Work[Any], ended: Ended) -> None:
        try:
            stored = run(self._decoder, steps, lambda: self.lock)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is passed on
            ended(None, error)
        else:
            ended(stored, None)


@pytest.fixture
def background(decoder: Decoder) -> Background:
    return Background(decoder)


def describer_of(
    store: ChunkCacheStore, decoder: Decoder, background: Background, **settings: Any
) -> CaptureDescriber:
    given = {
        "namespace": "default",
        "fingerprint": decoder.fingerprint,
        "layout": decoder.layout,
        "start": background.start,
    }
    return CaptureDescriber(store, **(given | settings))


@pytest.fixture
def describer(
    store: ChunkCacheStore, decoder: Decoder, background: Background
) -> Iterator[CaptureDescriber]:
    made = describer_of(store, decoder, background)
    yield made
    made.close()


@pytest.fixture
def output(decoder: Decoder) -> PrefillResult:
    return prefill(decoder, PrefillJob(IDS, Rows.of(BOUNDS, new=range(40)), captures=[0, 1, 2]))


def context(segments: tuple[Segment, ...] = SEGMENTS, session: str | None = None) -> CaptureContext:
    return CaptureContext(segments, BOUNDS, [1.0, 1.0, 0.5, 0.5], session)


def stored(
    store: ChunkCacheStore, decoder: Decoder, session: str | None = None
) -> dict[str, list[Any]]:
    return store.find("default", decoder.fingerprint, NAMES, session=session).variants


def test_captures_arrive_with_their_identity_numbers_and_tensors(
    describer: CaptureDescriber, store: ChunkCacheStore, decoder: Decoder, output: PrefillResult
) -> None:
    describer.submit(output.recorder, output.buffer.kv[:, 0], context())
    describer.wait_for(NAMES)
    found = {name: variants[0] for name, variants in stored(store, decoder).items()}
    assert found["the system"].key.origin_prefix == ()
    assert found["second"].key.origin_prefix == ("the system", "first")
    assert [found[name].exact_share for name in NAMES] == [1.0, 1.0, 0.5]
    assert len(found["second"].inter) == 2
    assert found["second"].tokens_digest == SEGMENTS[2].tokens_digest
    scores = store.token_scores([found[name].variant_id for name in NAMES])
    assert [scores[found[name].variant_id].inter is None for name in NAMES] == [True, True, False]
    second = scores[found["second"].variant_id].inter
    assert second is not None
    assert second.shape == (found["second"].tokens,)
    # eq. 14 adds up to eq. 3
    assert second.sum() == pytest.approx(sum(found["second"].inter[1:]), rel=1e-4)
    for capture, name in zip(output.recorder.captures, NAMES, strict=True):
        loaded: Any = store.load(found[name])
        assert torch.equal(loaded.kv, capture.kv)


def test_the_buffers_of_prompts_count_as_waiting_until_their_captures_are_described(
    store: ChunkCacheStore, decoder: Decoder, background: Background, output: PrefillResult
) -> None:
    keys = output.buffer.kv[:, 0]
    assert output.recorder.needs_keys
    room = 4 * sum(capture.nbytes for capture in output.recorder.captures)
    describer = describer_of(store, decoder, background, max_bytes=room)
    with background.lock:  # nothing can be described meanwhile
        describer.submit(output.recorder, keys, context())
        assert describer.crowded, "the captures alone are within the limit"
    assert describer.wait_for(NAMES, timeout=60)
    assert not describer.crowded
    describer.close()


@pytest.mark.parametrize(
    ("private", "kept"), [(0, []), (1, ["the system"]), (2, ["the system", "first"])]
)
def test_what_private_text_stands_in_or_before_goes_to_its_session_or_nowhere(
    private: int,
    kept: list[str],
    describer: CaptureDescriber,
    store: ChunkCacheStore,
    decoder: Decoder,
    output: PrefillResult,
) -> None:
    segments = tuple(
        Segment(s.kind, s.segment_id, s.token_ids, private=s.private or place == private)
        for place, s in enumerate(SEGMENTS)
    )
    describer.submit(output.recorder, output.buffer.kv[:, 0], context(segments))
    describer.wait_for(NAMES)
    assert [name for name, variants in stored(store, decoder).items() if variants] == kept
    describer.submit(output.recorder, output.buffer.kv[:, 0], context(segments, session="ada"))
    describer.wait_for(NAMES)
    assert [
        name for name, variants in stored(store, decoder, session="bob").items() if variants
    ] == kept
    assert all(stored(store, decoder, session="ada").values())


def test_submitting_does_not_wait_and_describing_takes_the_lock(
    describer: CaptureDescriber,
    background: Background,
    output: PrefillResult,
    store: ChunkCacheStore,
) -> None:
    with background.lock:  # a request computes
        describer.submit(output.recorder, output.buffer.kv[:, 0], context())
        time.sleep(0.05)
        assert store.stats().variants == 0
    describer.wait_for(NAMES)
    assert store.stats().variants == 3


def test_two_captures_of_one_chunk_are_both_waited_for(
    store: ChunkCacheStore, decoder: Decoder, background: Background, output: PrefillResult
) -> None:
    """Two requests that asked for the same new document at once."""
    begun: list[Callable[[], None]] = []

    def start(steps: Work[Any], ended: Ended) -> None:
        begun.append(lambda: background.start(steps, ended))

    describer = describer_of(store, decoder, background, start=start)
    for _ in range(2):
        describer.submit(output.recorder, output.buffer.kv[:, 0], context())
    first, second = begun[: len(NAMES)], begun[len(NAMES) :]
    for capture in second:
        capture()
    assert not describer.wait_for(NAMES, timeout=0.2), "the first three have not begun"
    assert describer.pending() == set(NAMES)
    for capture in first:
        capture()
    assert describer.wait_for(NAMES, timeout=60)
    assert describer.pending() == frozenset()
    describer.close()


def test_captures_of_one_tenant_are_under_way_for_no_other(
    describer: CaptureDescriber, background: Background, output: PrefillResult
) -> None:
    with background.lock:  # nothing can be described meanwhile
        of_acme = replace(context(), namespace="acme")
        describer.submit(output.recorder, output.buffer.kv[:, 0], of_acme)
        assert describer.pending(NAMES, namespace="bolt") == frozenset()
        assert describer.pending(NAMES, namespace="default") == frozenset()
        assert describer.pending(NAMES, namespace="acme") == describer.pending() == set(NAMES)
        assert not describer.wait_for(NAMES, timeout=0), "removal waits for those of all tenants"
    assert describer.wait_for(NAMES, timeout=60)
    assert describer.pending(namespace="acme") == frozenset()


def test_a_capture_that_fails_is_logged_and_not_waited_for_forever(
    describer: CaptureDescriber,
    store: ChunkCacheStore,
    decoder: Decoder,
    output: PrefillResult,
    caplog: Any,
) -> None:
    describer.submit(output.recorder, output.buffer.kv[:2, 0], context())  # two of four layers
    waiting = threading.Thread(target=describer.wait_for, args=(NAMES,))
    waiting.start()
    waiting.join(60)
    assert not waiting.is_alive()
    assert store.stats().variants == 0
    failures: list[Any] = []
    until = time.monotonic() + 60
    # a future wakes its waiters before it is logged
    while len(failures) < 3 and time.monotonic() < until:
        failures = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(failures) == 3
    assert all(record.exc_info is not None for record in failures)
    describer.submit(output.recorder, output.buffer.kv[:, 0], context())
    describer.wait_for(NAMES)
    assert all(stored(store, decoder).values())  # and it goes on


def test_a_capture_that_cannot_begin_is_not_waited_for(
    store: ChunkCacheStore, decoder: Decoder, background: Background, output: PrefillResult
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    describer = describer_of(store, decoder, background, start=refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        describer.submit(output.recorder, output.buffer.kv[:, 0], context())
    describer.wait_for(NAMES)
    describer.close()
    assert store.stats().variants == 0


def test_a_store_that_is_closed_or_full_drops_captures_with_a_reason(
    decoder: Decoder, output: PrefillResult, tmp_path: Path, caplog: Any
) -> None:
    for disk_bytes, reason in (
        (1 << 30, "the store is closed"),
        (10, "larger than the whole byte budget"),
    ):
        store = ChunkCacheStore.open(tmp_path / str(disk_bytes), disk_bytes=disk_bytes)
        describer = describer_of(store, decoder, Background(decoder))
        if reason == "the store is closed":
            store.close()
        describer.submit(output.recorder, output.buffer.kv[:, 0], context())
        describer.wait_for(NAMES)
        describer.close()
        store.close()
        assert any(reason in record.message for record in caplog.records)
        assert not any(record.exc_info for record in caplog.records)


def test_closing_finishes_what_is_queued_and_takes_nothing_more(
    describer: CaptureDescriber, store: ChunkCacheStore, output: PrefillResult
) -> None:
    describer.submit(output.recorder, output.buffer.kv[:, 0], context())
    describer.close()
    assert store.stats().variants == 3
    describer.submit(output.recorder, output.buffer.kv[:, 0], context())
    describer.wait_for(NAMES)
    describer.close()


def test_waiting_for_a_chunk_without_a_capture_under_way_returns_at_once(
    describer: CaptureDescriber, background: Background, output: PrefillResult
) -> None:
    with background.lock:  # nothing can be described meanwhile
        describer.submit(output.recorder, output.buffer.kv[:, 0], context())
        waiting = threading.Thread(
            target=lambda: [
                describer.wait_for(["nothing", "of", "the kind"]),
                describer.wait_for([]),
            ]
        )
        waiting.start()
        waiting.join(60)
        assert not waiting.is_alive()


def test_captures_that_come_faster_than_they_are_stored_are_dropped(
    store: ChunkCacheStore,
    decoder: Decoder,
    background: Background,
    output: PrefillResult,
    caplog: pytest.LogCaptureFixture,
) -> None:
    describer = describer_of(store, decoder, background, max_bytes=0)
    with background.lock:  # nothing can be described meanwhile
        describer.submit(output.recorder, output.buffer.kv[:, 0], context())
        assert "captures are dropped" in caplog.text
    describer.close()
    assert store.stats().variants == 1  # one is always taken, however large
    late = describer_of(store, decoder, background, namespace="late")
    late.submit(output.recorder, output.buffer.kv[:, 0], context())
    late.close()
    assert store.stats().variants == 4
