"""A device that computes late: for tests and counts without a GPU.

Its tensors call themselves CUDA tensors. Every operation on them is queued on the current stream of the calling thread
and runs only when something forces it: a copy to the host, an event that is waited for, or a synchronisation. Until
then its result is NaN. Streams run as late and as far out of step as CUDA permits, so code that reads what another
stream has not written yet, or that measures time by launching, fails here in every run.

`installed` replaces the parts of `torch.cuda` that the package uses and undoes this at its end.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

GARBAGE = {True: float("nan"), False: 0}  # by is_floating_point

# Operations whose result depends on values: the host waits for them, as on a GPU.
BLOCKING = {
    "_local_scalar_dense",
    "nonzero",
    "equal",
    "is_nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "repeat_interleave",
}

# Operations that only take memory: nothing is launched.
MEMORY = {"empty_like", "new_empty", "new_empty_strided"}

# Methods that return a Python value.
TO_HOST = {
    Tensor.tolist,
    Tensor.item,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__bool__,
    Tensor.__index__,
}


class Stream:
    """A queue of operations; none runs before something waits for it.

    Attributes:
        ran: number of operations that have run.
    """

    def __init__(self, device: int, lock: threading.RLock) -> None:
        self.device = torch.device("cuda", device)
        self.ran = 0
        self._lock = lock
        self._queue: list[Callable[[], object]] = []
        self.finished_at: list[float] = []  # time on the device at which each operation had run

    def add(self, operation: Callable[[], object]) -> None:
        """Queue an operation."""
        with self._lock:
            self._queue.append(operation)

    @property
    def queued(self) -> int:
        """Number of operations that were queued, including those that have run."""
        return len(self._queue)

    def run(self, stop: int | None = None) -> None:
        """Run operations up to the number `stop`, or all."""
        with self._lock:
            stop = self.queued if stop is None else stop
            while self.ran < stop:
                operation = self._queue[self.ran]
                self.ran += 1
                with torch.inference_mode():  # it may write to tensors that were made there
                    operation()
                if THE:
                    THE[0].clock += Device.operation_s
                self.finished_at.append(THE[0].clock if THE else 0.0)

    def synchronize(self) -> None:
        """Run everything; the host waits for it."""
        note_wait("a stream")
        self.run()

    def record_event(self, event: Event | None = None) -> Event:
        """Record the operations queued so far."""
        event = event or Event()
        event.stream = self
        event.index = self.queued
        return event

    def wait_event(self, event: Event) -> None:
        """Run later operations only after those that the event records."""
        self.add(event.reach)

    def wait_stream(self, stream: Stream) -> None:
        """Run later operations only after those that are queued on another stream."""
        self.wait_event(stream.record_event())


class Event:
    """A place in the queue of a stream."""

    def __init__(self, *_args: object, **_options: object) -> None:
        self.stream: Stream | None = None
        self.index = 0

    def record(self, stream: Stream | None = None) -> None:
        """Record the operations queued so far on a stream, the current one by default."""
        (stream or torch.cuda.current_stream()).record_event(self)  # type: ignore[arg-type]

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait for this event."""
        (stream or torch.cuda.current_stream()).wait_event(self)  # type: ignore[arg-type]

    def elapsed_time(self, later: Event) -> float:
        """Return the milliseconds between both on the device."""
        return 1e3 * (later.reached_at - self.reached_at)

    @property
    def reached_at(self) -> float:
        """Time on the device at which the recorded operations had run, in seconds."""
        assert self.stream is not None, "it is not recorded"
        assert self.query(), "the device has not computed them yet"
        return self.stream.finished_at[self.index - 1] if self.index else 0.0

    def query(self) -> bool:
        """Return True if the recorded operations have run."""
        return self.stream is None or self.stream.ran >= self.index

    def reach(self) -> None:
        """Run the recorded operations."""
        if self.stream is not None:
            self.stream.run(self.index)

    def synchronize(self) -> None:
        """Run the recorded operations; the host waits for them."""
        note_wait("an event")
        self.reach()


@dataclass(frozen=True, slots=True)
class CopyCall:
    """A call that copies tensors of one dtype from the host, with the number of its transfers."""

    dtype: torch.dtype
    transfers: int


@dataclass
class Device:
    """The state that `torch.cuda` would have: streams, and the current device and stream of each thread.

    clock            time in seconds on the device: each operation that has run takes `operation_s`
    sizes_to_device  bytes of each copy from the host
    sizes_to_host    bytes of each copy to the host
    copy_calls       calls that copy from the host
    host_waits       what the host waited for, each time: an event, or an operation that blocks it on a GPU
    launches         number of other operations
    kept_for         (address of a tensor's memory, stream) of each `record_stream`
    """

    operation_s = 1e-3

    lock: threading.RLock = field(default_factory=threading.RLock)
    local: threading.local = field(default_factory=threading.local)
    default: dict[int, Stream] = field(default_factory=dict)
    sizes_to_device: list[int] = field(default_factory=list)
    sizes_to_host: list[int] = field(default_factory=list)
    copy_calls: list[CopyCall] = field(default_factory=list)
    host_waits: list[str] = field(default_factory=list)
    launches: int = 0
    clock: float = 0.0
    kept_for: set[tuple[int, int]] = field(default_factory=set)

    def current_device(self) -> int:
        """Return the current device of this thread."""
        return getattr(self.local, "device", 0)

    def stream_of(self, device: int) -> Stream:
        """Return the current stream of this thread on a device."""
        streams: dict[int, Stream] = self.local.__dict__.setdefault("streams", {})
        if device in streams:
            return streams[device]
        return self.default.setdefault(device, Stream(device, self.lock))


THE: list[Device] = []  # the device in use; a list, because operations have no other way to it


def note_wait(reason: str) -> None:
    """Count a wait of the host."""
    if THE:
        THE[0].host_waits.append(reason)


class DeviceTensor(Tensor):
    """A tensor of the device: `memory` is a CPU tensor that queued operations read and write."""

    memory: Tensor

    @staticmethod
    def __new__(cls, memory: Tensor, device: torch.device) -> DeviceTensor:
        """Make a tensor on the device that has no memory."""
        made = Tensor._make_wrapper_subclass(
            cls,
            memory.shape,
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device=device,
        )
        made.memory = memory
        return made

    def __init__(self, memory: Tensor, device: torch.device) -> None:
        """See `__new__`."""

    def __repr__(self) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    def record_stream(self, stream: Any) -> None:
        """Note that this stream reads the tensor; queued operations hold its memory in any case."""
        THE[0].kept_for.add((self.memory.untyped_storage().data_ptr(), id(stream)))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "is_pinned":
            return False
        if func is Tensor.data_ptr:
            return args[0].memory.data_ptr()
        if func in TO_HOST:
            return func(args[0].cpu())
        if func is Tensor.__getitem__:
            return get_item(*args)
        if func is Tensor.__setitem__:
            return set_item(*args)
        if func is Tensor.copy_:
            return copy(*args, **(kwargs or {}))
        if func is torch.nn.functional.scaled_dot_product_attention:
            return queue(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


def memory_of(value: Any) -> Any:
    """Return the memory of a device tensor, anything else as it is."""
    return value.memory if isinstance(value, DeviceTensor) else value


def garbage(memory: Tensor) -> Tensor:
    """Fill memory with values that nothing should read."""
    return memory.fill_(GARBAGE[memory.is_floating_point()])


def device_of(args: Any, kwargs: Any) -> torch.device:
    """Return the device of an operation's first device tensor."""
    found: list[torch.device] = []
    tree_map(
        lambda x: found.append(x.device) if isinstance(x, DeviceTensor) else None, (args, kwargs)
    )
    return found[0]


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """Queue an operation, or run it if the host has to wait for it."""
    # composite operations arrive whole in inference mode
    decomposed = func.decompose(*args, **kwargs)
    if decomposed is not NotImplemented:
        return decomposed
    device = THE[0]
    name = func._schema.name.removeprefix("aten::")
    where = device_of(args, kwargs)
    stream = device.stream_of(where.index or 0)

    def with_memory() -> Any:
        plain = dict(kwargs)
        if "device" in plain:
            plain["device"] = "cpu"
        plain.pop("pin_memory", None)
        return func(*tree_map(memory_of, args), **tree_map(memory_of, plain))

    def wrapped(result: Any) -> Any:
        return tree_map(lambda x: DeviceTensor(x, where) if isinstance(x, Tensor) else x, result)

    if name == "_to_copy" and torch.device(kwargs.get("device") or where).type == "cpu":
        device.sizes_to_host.append(args[0].memory.nbytes)
        if not kwargs.get("non_blocking"):
            note_wait("a copy to the host")
            stream.run()
            result = with_memory()
            return result.clone() if result.data_ptr() == args[0].memory.data_ptr() else result
        result = garbage(torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype))
        stream.add(lambda: result.copy_(args[0].memory))
        return result
    if name in MEMORY:
        made = with_memory()
        return wrapped(garbage(made))
    if name == "copy_":
        return copy(*args, **kwargs)
    if name == "_foreach_copy_":
        return copy_all(*args, **kwargs)
    if name == "_fused_sdp_choice":
        return 0  # the products of torch's own composite operation
    if name in BLOCKING:
        note_wait(name)
        stream.run()
        return wrapped(with_memory())
    if func.is_view or name in ("detach", "alias", "lift_fresh", "_reshape_alias"):
        return wrapped(with_memory())
    if any(
        argument.alias_info is not None and argument.alias_info.is_write
        for argument in func._schema.arguments
    ):
        return queue_in_place(func, args, kwargs, with_memory)
    return queue(func, args, kwargs)


def queue(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Queue a function of tensors; its results hold garbage until it runs."""
    device = THE[0]
    device.launches += 1
    where = device_of(args, kwargs)
    plain = {
        key: "cpu" if key == "device" else value
        for key, value in kwargs.items()
        if key != "pin_memory"
    }

    def of_zeros(value: Any) -> Any:
        return torch.zeros_like(value.memory) if isinstance(value, DeviceTensor) else value

    shapes = func(*tree_map(of_zeros, args), **tree_map(of_zeros, plain))
    outputs = tree_map(lambda x: garbage(x.clone()) if isinstance(x, Tensor) else x, shapes)

    def compute() -> None:
        results = func(*tree_map(memory_of, args), **tree_map(memory_of, plain))
        tree_map(
            lambda out, value: out.copy_(value) if isinstance(out, Tensor) else None,
            outputs,
            results,
        )

    device.stream_of(where.index or 0).add(compute)
    return tree_map(lambda x: DeviceTensor(x, where) if isinstance(x, Tensor) else x, outputs)


def queue_in_place(func: Any, args: Any, kwargs: Any, compute: Callable[[], object]) -> Any:
    """Queue an operation that writes to its arguments, and return them."""
    device = THE[0]
    device.launches += 1
    device.stream_of(device_of(args, kwargs).index or 0).add(compute)
    written = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[number] if number < len(args) else kwargs.get(argument.name))
    if not func._schema.returns:
        return None
    return written[0] if len(func._schema.returns) == 1 else tuple(written)


def is_view_index(index: Any) -> bool:
    """Return True for an index that makes a view."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or isinstance(part, int | slice) for part in parts)


def get_item(tensor: Tensor, index: Any) -> Tensor:
    """Index a tensor; torch's own indexing needs a real device."""
    if not isinstance(tensor, DeviceTensor):
        return tensor[memory_of(index.cpu())]
    if is_view_index(index):
        return DeviceTensor(tensor.memory[index], tensor.device)
    return queue(operator.getitem, (tensor, index), {})


def set_item(tensor: Tensor, index: Any, value: Any) -> None:
    """Write to an indexed part of a tensor."""
    assert isinstance(tensor, DeviceTensor)
    device = THE[0]
    device.launches += 1
    plain = tree_map(memory_of, index)
    if isinstance(value, Tensor) and not isinstance(value, DeviceTensor):
        value = value.clone()
    stream = device.stream_of(tensor.device.index or 0)
    stream.add(lambda: tensor.memory.__setitem__(plain, memory_of(value)))


def copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy within the device, to it or from it."""
    device = THE[0]
    stream = device.stream_of(device_of((target, source), {}).index or 0)
    crosses = isinstance(target, DeviceTensor) != isinstance(source, DeviceTensor)
    if crosses:
        sizes = device.sizes_to_device if isinstance(target, DeviceTensor) else device.sizes_to_host
        sizes.append(source.nbytes)
        if isinstance(target, DeviceTensor):
            device.copy_calls.append(CopyCall(source.dtype, 1))
    else:
        device.launches += 1
    if not isinstance(target, DeviceTensor):
        if non_blocking:
            stream.add(lambda: target.copy_(memory_of(source)))
            return target
        note_wait("a copy to the host")
        stream.run()
        return target.copy_(memory_of(source))
    if not isinstance(source, DeviceTensor) and not non_blocking:
        note_wait("a blocking copy to the device")
        source = source.clone()  # what a blocking copy reads is what stands there now
    stream.add(lambda: target.memory.copy_(memory_of(source)))
    return target


def copy_all(
    targets: Sequence[Tensor], sources: Sequence[Tensor], non_blocking: bool = False
) -> None:
    """Copy several tensors in one call."""
    device = THE[0]
    calls = len(device.copy_calls)
    for target, source in zip(targets, sources, strict=True):
        copy(target, source, non_blocking)
    copied = device.copy_calls[calls:]
    if copied:
        device.copy_calls[calls:] = [CopyCall(copied[0].dtype, len(copied))]


def to_device(tensor: Tensor, device: str) -> Tensor:
    """Return a copy of a CPU tensor on the device, with nothing left to be run."""
    return DeviceTensor(tensor.detach().clone(), torch.device(device))


@contextlib.contextmanager
def installed() -> Iterator[Device]:
    """Replace the parts of `torch.cuda` that the package uses by a device that computes late."""
    device = Device()
    THE[:] = [device]
    library = torch.library.Library("aten", "IMPL")

    def empty(
        size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, **_: Any
    ) -> Tensor:
        where = torch.device("cuda", device.index or 0)
        return DeviceTensor(
            garbage(torch.empty(size, dtype=dtype or torch.get_default_dtype())), where
        )

    def empty_strided(
        size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any
    ) -> Tensor:
        where = torch.device("cuda", device.index or 0)
        memory = torch.empty_strided(size, stride, dtype=dtype or torch.get_default_dtype())
        return DeviceTensor(garbage(memory), where)

    def late(result: Tensor, where: Any) -> Tensor:
        made = DeviceTensor(garbage(result.clone()), torch.device("cuda", where.index or 0))
        device.stream_of(where.index or 0).add(lambda: made.memory.copy_(result))
        return made

    def arange(*limits: Any, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        return late(torch.arange(*limits, dtype=dtype), device)

    def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        made = original_tensor(data, **options)
        return made if device is None else made.to(device)

    original_tensor = torch.tensor
    for name in ("arange", "arange.start", "arange.start_step"):
        library.impl(name, arange, "CUDA")
    library.impl("empty.memory_format", empty, "CUDA")
    library.impl("empty_strided", empty_strided, "CUDA")

    @contextlib.contextmanager
    def with_stream(stream: Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        index = stream.device.index
        streams = device.local.__dict__.setdefault("streams", {})
        before = streams.get(index)
        streams[index] = stream
        try:
            yield
        finally:
            if before is None:
                del streams[index]
            else:
                streams[index] = before

    @contextlib.contextmanager
    def with_device(which: Any) -> Iterator[None]:
        before = device.current_device()
        device.local.device = index_of(which)
        try:
            yield
        finally:
            device.local.device = before

    def index_of(which: Any) -> int:
        if which is None:
            return device.current_device()
        return which if isinstance(which, int) else torch.device(which).index or 0

    def set_stream(stream: Stream) -> None:
        device.local.__dict__.setdefault("streams", {})[stream.device.index] = stream

    def synchronize(which: Any = None) -> None:
        note_wait("the device")
        device.stream_of(index_of(which)).run()

    replacements = {
        "_lazy_init": lambda: None,
        "Stream": lambda which=None, **_: Stream(index_of(which), device.lock),
        "Event": Event,
        "stream": with_stream,
        "device": with_device,
        "set_stream": set_stream,
        "set_device": lambda which: setattr(device.local, "device", index_of(which)),
        "current_stream": lambda which=None: device.stream_of(index_of(which)),
        "current_device": device.current_device,
        "synchronize": synchronize,
        "is_available": lambda: True,
    }
    from cachecraft_rag.kernels.gpu import choice, streams

    with contextlib.ExitStack() as patches:
        for name, value in replacements.items():
            patches.enter_context(patch.object(torch.cuda, name, value))
        patches.enter_context(patch.object(torch, "tensor", tensor))
        # Triton needs a real device
        patches.enter_context(patch.object(choice, "_installed", lambda: False))
        streams.copy_stream.cache_clear()
        try:
            yield device
        finally:
            streams.copy_stream.cache_clear()
            library._destroy()
            THE.clear()
