"""Order of work on a GPU: streams and events of the calling thread.

A GPU computes later than Python calls it. Work on one stream runs in order; a thread that reads what another stream
computes has to wait for an event. On a CPU nothing has to be ordered, and all but `copy_stream` do nothing.
"""

from __future__ import annotations

from collections import deque
from functools import cache

import torch
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
    """Let this thread's later work wait for an event of `launched`, and keep the memory that it reads until then."""
    if event is None:
        return
    stream = torch.cuda.current_stream(tensors[0].device)
    stream.wait_event(event)
    for tensor in tensors:
        tensor.record_stream(stream)


def wait_on_host(device: torch.device) -> None:
    """Block until all work is done that this thread has launched on the device's current stream."""
    event = launched(device)
    if event is not None:
        event.synchronize()


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream on which this process copies chunk-caches to a GPU, beside computing."""
    return torch.cuda.Stream(device)


class LayersInFlight:
    """Limits the layers of one pass that are launched and not yet computed, so that time can be measured on the host.

    Args:
        device: device of the layers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: deque[torch.cuda.Event] = deque()

    def add(self) -> None:
        """Count the layer that was just launched; block while more than two are in flight on a GPU."""
        event = launched(self._device)
        if event is None:
            return
        self._events.append(event)
        if len(self._events) > LAYERS_IN_FLIGHT:
            self._events.popleft().synchronize()

    def wait(self) -> None:
        """Block until every layer that `add` counted is computed; returns at once on a CPU."""
        while self._events:
            self._events.popleft().synchronize()
