"""Order of work on a GPU: streams and events of the calling thread.

A GPU computes later than Python calls it. Work on one stream runs in order; a thread that reads what another stream
computes has to wait for an event. On a CPU nothing has to be ordered, and all but `copy_stream` and `sent` do nothing.
"""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Layers of a pass that may be launched before the GPU has computed them. With fewer, the GPU waits for Python between
# layers. With more, the times that decide between computing and loading would be those of launching.
LAYERS_IN_FLIGHT = 2


def launched(device: torch.device) -> torch.cuda.Event | None:
    """Return an event after all work that this thread has launched on the device's current stream; None on a CPU."""
    if device.type != "cuda":
        return None
    event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
    return event


def wait_on_stream(event: torch.cuda.Event | None, *tensors: Tensor) -> None:
    """Let this thread's later work wait for an event of `launched`, and keep `tensors`, which it reads, until then.

    At least one tensor is on the event's GPU; others may be in main memory. Nothing happens without an event.
    """
    if event is None:
        return
    on_device = [tensor for tensor in tensors if tensor.device.type != "cpu"]
    stream = torch.cuda.current_stream(on_device[0].device)
    stream.wait_event(event)
    for tensor in on_device:
        tensor.record_stream(stream)


def wait_on_host(device: torch.device) -> None:
    """Block until all work is done that this thread has launched on the device's current stream."""
    event = launched(device)
    if event is not None:
        event.synchronize()


def sent(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return a few numbers on a device, without waiting for it. Do not write to the array afterwards."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which this process copies chunk-caches to this GPU, beside computing; always the same."""
    return torch.cuda.Stream(device)


class LayersInFlight:
    """The layers of one pass that are launched and not yet computed.

    Args:
        device: device of the layers.
        most: number of layers in flight, so that time can be measured on the host; None = no limit, and the time is
            measured on a GPU, from here to the last layer.
    """

    def __init__(self, device: torch.device, most: int | None = LAYERS_IN_FLIGHT) -> None:
        self._device = device
        self._most = most
        self._events: deque[torch.cuda.Event] = deque()
        self._timed: list[torch.cuda.Event] = []  # before the first layer, after the last one
        if most is None and device.type == "cuda":
            self._timed = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._timed[0].record(torch.cuda.current_stream(device))

    def add(self) -> None:
        """Count the layer that was just launched; block while more than `most` are in flight on a GPU."""
        if self._timed:
            self._timed[1].record(torch.cuda.current_stream(self._device))
        if self._most is None:
            return
        event = launched(self._device)
        if event is None:
            return
        self._events.append(event)
        if len(self._events) > self._most:
            self._events.popleft().synchronize()

    def seconds(self) -> float | None:
        """Return a pass's seconds, after the last `add`; None on a CPU, with a limit, and until they are computed."""
        if not (self._timed and self._timed[1].query()):
            return None
        milliseconds: float = self._timed[0].elapsed_time(self._timed[1])
        return milliseconds / 1e3

    def wait(self) -> None:
        """Block until every layer that `add` counted is computed; returns at once on a CPU, or without limit."""
        while self._events:
            self._events.popleft().synchronize()
