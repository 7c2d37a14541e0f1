"""The stream that a vLLM worker computes on, for a thread that goes on with its results.

vLLM gives its worker a stream apart from the default one with several ranks and for some quantised kernels. A thread
begins with the default stream of device 0, which waits for no other stream: what it reads may not be written yet.
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
        """The stream that the calling thread computes on."""
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        return cls(device, stream)

    @contextmanager
    def taken_over(self) -> Iterator[None]:
        """Compute on this device and stream in the calling thread too: in the order in which work was given to it.

        One stream for both needs no events, and memory that one thread frees is reused in the same order.
        """
        if self.stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield
