"""The stream that a vLLM worker computes on, for a thread that continues with its results.

With several ranks, and for some quantised kernels, vLLM gives its worker another stream than the default one. A thread
begins with the default stream of device 0, which waits for no other stream: it might read results that are not written
yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class WorkerStream:
    """A device, and the stream that computes on it; None on a CPU."""

    device: torch.device
    stream: torch.cuda.Stream | None

    @classmethod
    def current(cls, device: torch.device) -> WorkerStream:
        """Return the device and the stream that the calling thread computes on; without a stream if it is no GPU."""
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        return cls(device, stream)

    @contextmanager
    def taken_over(self) -> Iterator[None]:
        """Return a context in which the calling thread, too, computes on this device and stream.

        Work of both threads runs in the order of submission.

        With a single stream no events are needed, and memory that one thread frees is reused in the same order. Does
        nothing on a CPU. Errors of the block pass.
        """
        if self.stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield
