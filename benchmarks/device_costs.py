"""Counts of one request on a simulated GPU: the workers' side of the connector, from the fill to the written blocks."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import late_device
from benchmarks.gpu_model import CountedStack
from benchmarks.late_device import Device
from benchmarks.served_prompt import KEY, Requests, Size, fill_of, serve, store_chunks
from cachecraft_rag.compute.stack import LayerPass, WholePass
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.vllm.served_model import ModelIdentity
from cachecraft_rag.vllm.settings import ConnectorSettings
from cachecraft_rag.vllm.worker.ranks import OneRank
from cachecraft_rag.vllm.worker.scheduling import Scheduling
from cachecraft_rag.vllm.worker.stack import WorkerStack
from cachecraft_rag.vllm.worker.working import Workers

_BLOCK = 16


class CountedForward:
    """A forward of all layers that launches nothing, in place of `VLLMForward`; a `WholeModel`."""

    most_rows = 1 << 30
    gives_raw = False

    def __init__(self, stack: BlockStack) -> None:
        """Run the layers of this stack."""
        self._stack = stack

    def run(self, ids: Any, _positions: Any, whole_pass: WholePass, layers: int) -> None:
        """Run rows through the first layers."""
        self._stack.run_whole(len(ids), whole_pass, layers)

    def run_raw(self, _ids: Any, _layer_pass: LayerPass, _layers: int) -> None:
        """Refuse: no request captures here."""
        raise AssertionError("a pass without captures was expected")


class BlockStack(CountedStack):
    """Layers that launch nothing, over vLLM's blocks; `block_writes` counts the calls that write to them.

    Heads are those of Llama-3-8B, because the attention kernel splits keys where few heads do not fill a GPU.
    """

    def __init__(self, layers: int) -> None:
        """Make as many layers, on the simulated device."""
        super().__init__(layers, heads=32, kv_heads=8)
        self.ranks = OneRank()  # type: ignore[assignment]
        self.whole_model = CountedForward(self)
        self.whole_passes = 0
        self.layer_calls = 0
        self.block_writes = 0
        attention = SimpleNamespace(
            impl=SimpleNamespace(do_kv_cache_update=self._wrote), kv_cache=None
        )
        layer = SimpleNamespace(attention=attention, original_order=None)
        self._layers = [layer] * layers

    def layer(self, index: int, hidden: Any, **how: Any) -> Any:
        """Run one layer, and count it."""
        self.layer_calls += 1
        return super().layer(index, hidden, **how)

    def run_whole(self, rows: int, whole_pass: WholePass, layers: int) -> None:
        """Run rows through the first layers as vLLM's forward does, and count this."""
        self.whole_passes += 1
        queries, keys = self.states(rows)
        out = torch.empty_like(queries)
        for index in range(layers):
            whole_pass.write_rotated(index, queries, keys, keys, self._settings)
            if index < layers - 1:
                whole_pass.attend_rotated(index, queries, self._settings, out)

    def _wrote(self, *_arguments: object) -> None:
        self.block_writes += 1

    def write_blocks(self, kv: Any, slots: Any, first: int) -> None:
        """Write blocks as the stack of vLLM's layers does."""
        WorkerStack.write_blocks(self, kv, slots, first)  # type: ignore[arg-type]


@contextlib.contextmanager
def _counted_device() -> Iterator[tuple[Device, Counter[str]]]:
    """A simulated GPU on which Triton's kernels count as launched and write nothing; results are 0, not NaN."""
    from triton.runtime.jit import JITFunction

    from cachecraft_rag.kernels.gpu import choice

    kernels: Counter[str] = Counter()

    def launcher(kernel: Any, _grid: object) -> Any:
        return lambda *_arguments, **_constants: kernels.update([kernel.__name__.removeprefix("_")])

    properties = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=227 << 10)
    with (
        patch.object(late_device, "GARBAGE", {True: 0.0, False: 0}),
        late_device.installed() as device,
        patch.object(choice, "_installed", lambda: True),
        patch.object(choice, "_launches", lambda _device: True),
        patch.object(JITFunction, "__getitem__", launcher),
        patch.object(torch.cuda, "get_device_properties", lambda _device: properties),
        patch.object(torch.Tensor, "is_pinned", lambda _tensor: True),
    ):
        yield device, kernels


def count(size: Size, requests: Requests, folder: Path) -> dict[str, Any]:
    """Return the counts of the request, from the fill to the written blocks.

    launches              operations and kernels of this package, those of the layers left out
    kernels               launches of each kernel
    whole_passes          calls that run all layers of a pass: the probe's and the last one
    layer_calls           calls of a single layer
    copies                calls that copy keys and values to the device
    transfers             copies that these calls make
    other_copies          calls that copy anything else to the device
    block_writes          calls that write to vLLM's blocks
    host_waits            reasons why the host waited for the device, with how often
    """
    with _counted_device() as (device, kernels):
        stack: Any = BlockStack(size.layers)
        identity = ModelIdentity("2-" + "0" * 32, stack.layout, 1 << 20)
        settings = ConnectorSettings(str(folder), identity, key=KEY)
        with ChunkCacheStore.open(folder, host_bytes=1 << 30) as store:
            store_chunks(store, settings, requests.capture)
            workers = Workers(stack, store, settings, block_size=_BLOCK)
            scheduling = Scheduling(store, settings, block_size=_BLOCK, prefix_caching=False)
            for name in ("warm-up", "counted"):
                device.launches = 0
                device.copy_calls.clear()
                device.host_waits.clear()
                kernels.clear()
                stack.layer_calls = 0
                stack.whole_passes = 0
                stack.block_writes = 0
                message = requests.reuse.message(KEY)
                token_ids = requests.reuse.prompt.token_ids
                fill = fill_of(scheduling, message, token_ids, block_size=_BLOCK, name=name)
                serve(workers, fill)
                scheduling.ended({name})
            copies = [call for call in device.copy_calls if call.dtype.is_floating_point]
            figures = {
                "launches": device.launches + kernels.total(),
                "kernels": dict(sorted(kernels.items())),
                "whole_passes": stack.whole_passes,
                "layer_calls": stack.layer_calls,
                "copies": len(copies),
                "transfers": sum(call.transfers for call in copies),
                "other_copies": len(device.copy_calls) - len(copies),
                "block_writes": stack.block_writes,
                "host_waits": dict(sorted(Counter(device.host_waits).items())),
            }
            workers.close()
    return figures
