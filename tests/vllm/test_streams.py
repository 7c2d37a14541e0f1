"""Captures are described on the worker's own stream, shown on a device that computes late."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from cachecraft_rag.compute.driver import Call
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.vllm.served_model import ModelIdentity
from cachecraft_rag.vllm.settings import ConnectorSettings
from cachecraft_rag.vllm.worker.ranks import OneRank
from cachecraft_rag.vllm.worker.working import Workers, WorkerStream

GPU = torch.device("cuda:1")


class LateStream:
    """A stream: its work runs when the stream is synchronised, in order."""

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []

    def synchronize(self) -> None:
        work, self.work = self.work, []
        for act in work:
            act()


class LateDevice:
    """In the place of `torch.cuda`: each thread begins with the default stream of device 0, as with CUDA."""

    def __init__(self) -> None:
        self.default = LateStream()
        self._thread = threading.local()

    def current_stream(self, _device: torch.device) -> LateStream:
        stream: LateStream = getattr(self._thread, "stream", self.default)
        return stream

    @property
    def current_device(self) -> torch.device:
        device: torch.device = getattr(self._thread, "device", torch.device("cuda:0"))
        return device

    @contextmanager
    def stream(self, stream: LateStream) -> Iterator[None]:
        before = self.current_stream(GPU)
        self._thread.stream = stream
        yield
        self._thread.stream = before

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before = self.current_device
        self._thread.device = device
        yield
        self._thread.device = before

    def copy_to_host(self, value: list[float]) -> list[float]:
        """As `tensor.cpu()`: waits for the thread's current stream, and for no other."""
        self.current_stream(GPU).synchronize()
        return list(value)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    device = LateDevice()
    for name in ("current_stream", "stream", "device"):
        monkeypatch.setattr(torch.cuda, name, getattr(device, name))
    return device


class GPUStack:
    """A decoder that says it is on the second GPU."""

    device = GPU
    ranks = OneRank()

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)


def test_a_capture_is_read_after_the_worker_s_stream_has_written_it(
    late: LateDevice, tiny_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    """vLLM computes on a stream apart from the default one, with several ranks for instance."""
    decoder = tiny_decoder("Llama")
    identity = ModelIdentity(decoder.fingerprint, decoder.layout, decoder.context_length)
    stack: Any = GPUStack(decoder)
    keys = [0.0]
    seen: list[tuple[list[float], torch.device]] = []

    def steps() -> Iterator[Call]:
        yield Call(lambda: seen.append((late.copy_to_host(keys), late.current_device)))

    ended: list[Any] = []
    with ChunkCacheStore.open(tmp_path) as store, late.stream(LateStream()):
        workers = Workers(
            stack, store, ConnectorSettings("unused", identity, key="key"), block_size=16
        )
        late.current_stream(GPU).work.append(lambda: keys.__setitem__(0, 1.0))
        workers._describe(steps(), lambda _stored, error: ended.append(error))  # type: ignore[arg-type]
        workers.close()
    assert ended == [None]
    assert seen == [([1.0], GPU)]


def test_a_thread_on_a_cpu_takes_nothing_over() -> None:
    stream = WorkerStream.current(torch.device("cpu"))
    assert stream.stream is None
    with stream.taken_over():
        pass
