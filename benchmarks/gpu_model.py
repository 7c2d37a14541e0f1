"""Cost model of the time to the first token on a GPU, relative to full prefill.

Launches, copies and their bytes are counted: the package's own passes run on a simulated device
(`benchmarks.late_device`) that has the layers of the model and few dimensions. Speeds are constants, see `Machine`. The
model is no measurement on a GPU; it says which part of a request takes longest. On an H200 prefills took 1.3 to 2.1
times as long as it says (docs/results/gpu.md): it leaves out what the model's own layers launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import typer
from rich.table import Table

from benchmarks.late_device import Device, installed, to_device
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.options import print_json
from cachecraft_rag.compute.driver import prefill
from cachecraft_rag.compute.job import PrefillJob
from cachecraft_rag.compute.kv_buffer import ResidentKV
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.compute.stack import WholeModel
from cachecraft_rag.kernels.attention_paths import UNMEASURED
from cachecraft_rag.kernels.memory import Recycler
from cachecraft_rag.types.kv_layout import KVLayout

TOKENS = (2048, 8192, 16384, 32768)


@dataclass(frozen=True, slots=True)
class Model:
    """Shape of the model: Qwen3-8B.

    parameters   weights that each token is multiplied with
    layers       decoder layers
    heads        query heads
    kv_heads     key/value heads
    head_dim     dimensions of a head
    layer_calls  kernels that the model's own layer launches beside attention: norms, projections, gate, residuals
    """

    parameters: float = 7.6e9
    layers: int = 36
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    layer_calls: int = 16

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token in bfloat16, in bytes."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 2


@dataclass(frozen=True, slots=True)
class Machine:
    """Speeds of an H100 in a server; none was measured on one.

    An H200 copied 49e9 bytes a second from page-locked and 5.4e9 from pageable memory, and a launch took 9e-6 s there.

    flop_per_s           dense bfloat16 products as reached in practice (peak: 989e12)
    memory_bytes_per_s   device memory
    pinned_bytes_per_s   PCIe 5 from page-locked memory
    pageable_bytes_per_s  PCIe 5 from pageable memory, which the driver copies twice
    launch_s             a kernel launched from Python
    copy_s               a copy started from Python
    fixed_s              planning and bookkeeping of a request
    """

    flop_per_s: float = 550e12
    memory_bytes_per_s: float = 2.8e12
    pinned_bytes_per_s: float = 50e9
    pageable_bytes_per_s: float = 9e9
    launch_s: float = 10e-6
    copy_s: float = 10e-6
    fixed_s: float = 2e-3


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt: chunks of equal length, all reused, and a question.

    chunk_tokens     tokens of a chunk
    question_tokens  tokens of instruction and question, which are always computed
    recomputed       fraction of a chunk's tokens that is recomputed
    probed           tokens of the question that a probe runs through half the layers
    """

    chunk_tokens: int = 512
    question_tokens: int = 64
    recomputed: float = 0.15
    probed: int = 64


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of a pass with reuse.

    launches          kernels launched by this package, per layer of the pass
    place_launches    kernels launched to place a chunk, in all layers
    copies            copies of a chunk to the device
    bytes_per_token   bytes copied to the device per token of a chunk, relative to its keys and values
    first_fraction    fraction of a chunk that is copied before the first layer can be computed
    """

    launches: float
    place_launches: float
    copies: float
    bytes_per_token: float
    first_fraction: float


class CountedStack:
    """Layers that launch nothing themselves, to count what this package launches; a `Stack`.

    Args:
        layers: number of layers.
        heads: query heads.
        kv_heads: key/value heads.
    """

    keys_per_row = 1.0
    attention_paths = UNMEASURED
    whole_model: WholeModel | None = None

    def __init__(self, layers: int, *, heads: int = 1, kv_heads: int = 1) -> None:
        from cachecraft_rag.compute.stack import Alone, AttentionSettings

        self.layout = KVLayout(layers, kv_heads, 16, "float32")
        self._heads = heads
        self.device = torch.device("cuda:0")
        self.dtype = torch.float32
        self.memory = Recycler()
        self.ranks = Alone()
        self.rotary_kinds = [0] * layers
        self._settings = AttentionSettings(0.25)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return hidden states `[1, rows, 16]`."""
        return to_device(torch.zeros(1, len(ids), 16), "cuda:0")

    def rope(self, positions: torch.Tensor, kind: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin `[positions, 16]`."""
        zeros = torch.zeros(len(positions), 16)
        return to_device(zeros, "cuda:0"), to_device(zeros, "cuda:0")

    def layer(
        self, index: int, hidden: torch.Tensor, *, positions: torch.Tensor, layer_pass: Any
    ) -> torch.Tensor:
        """Run the attention of one layer."""
        queries, keys = self.states(hidden.shape[1])
        layer_pass.attend(index, queries, keys, keys, self._settings)
        return hidden

    def states(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries `[rows, heads, 16]`, and keys that are values as well `[rows, kv_heads, 16]`."""
        zeros = torch.zeros(rows, self._heads, 16)
        return to_device(zeros, "cuda:0"), to_device(zeros[:, : self.layout.kv_heads], "cuda:0")


def count(model: Model) -> Counts:
    """Count launches and copies of passes with two and with four chunks on the simulated device."""
    two = _run(model, chunks=2)
    four = _run(model, chunks=4)
    chunk_bytes = two.chunk_bytes
    copies = (len(four.sizes) - len(two.sizes)) / 2
    placed = (four.launches - two.launches) / 2
    return Counts(
        launches=(two.launches - 2 * placed) / model.layers,
        place_launches=placed,
        copies=copies,
        bytes_per_token=(sum(four.sizes) - sum(two.sizes)) / 2 / chunk_bytes,
        first_fraction=two.sizes[0] / chunk_bytes,
    )


def _run(model: Model, *, chunks: int) -> Any:
    """Run one pass over reused chunks; return its launches, the sizes of its copies, and the bytes of a chunk."""
    tokens = 16
    bounds = [0, *range(4, 4 + tokens * chunks + 1, tokens), 8 + tokens * chunks]
    launches = 0

    def launcher(_kernel: Any, _grid: object) -> Any:
        def launch(*_arguments: object, **_constants: object) -> None:
            nonlocal launches
            launches += 1

        return launch

    from triton.runtime.jit import JITFunction

    from cachecraft_rag.kernels.gpu import choice

    properties = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=227 << 10)
    with installed() as device, patch.object(choice, "_installed", lambda: True):
        with (
            patch.object(choice, "_launches", lambda _device: True),
            patch.object(JITFunction, "__getitem__", launcher),
            patch.object(torch.cuda, "get_device_properties", lambda _device: properties),
        ):
            stack: Any = CountedStack(model.layers)
            kv = torch.zeros(stack.layout.shape(tokens))
            resident = [ResidentKV(bounds[1] + tokens * chunk, kv) for chunk in range(chunks)]
            new = [*range(4), *range(bounds[-2], bounds[-1])]
            recomputed = [chunk.start for chunk in resident] + [
                chunk.start + 1 for chunk in resident
            ]
            reused = list(range(1, chunks + 1))
            rows = Rows.of(bounds, new=new, recomputed=recomputed)
            before: Device = device
            prefill(
                stack,
                PrefillJob([1] * bounds[-1], rows, resident=resident, reused=reused, drift=0.4),
            )
        sizes = [
            size
            for size in before.sizes_to_device
            if size % (kv.nbytes // model.layers) == 0 and size
        ]
        return SimpleNamespace(
            launches=launches + before.launches, sizes=sizes, chunk_bytes=kv.nbytes
        )


def compute_s(model: Model, machine: Machine, rows: float, mean_keys: float) -> float:
    """Return the seconds of the products of a pass: 2 per weight and row, 4 per dimension, row and key."""
    weights = 2.0 * model.parameters * rows
    attention = 4.0 * model.layers * model.heads * model.head_dim * rows * mean_keys
    return (weights + attention) / machine.flop_per_s


def full_s(model: Model, machine: Machine, tokens: int) -> float:
    """Return the seconds of full prefill."""
    launching = model.layers * (model.layer_calls + 3) * machine.launch_s
    return max(compute_s(model, machine, tokens, tokens / 2), launching)


def reuse_s(
    model: Model,
    machine: Machine,
    prompt: Prompt,
    counts: Counts,
    tokens: int,
    *,
    source: str,
    probe: bool = False,
) -> float:
    """Return the seconds of a prefill that reuses all chunks.

    Args:
        source: "device", "pinned" or "pageable": the memory that holds the chunk-caches.
        probe: run the question through half the layers first.
    """
    chunk_tokens = tokens - prompt.question_tokens
    chunks = chunk_tokens / prompt.chunk_tokens
    rows = prompt.question_tokens + prompt.recomputed * chunk_tokens
    kv_bytes = chunk_tokens * model.token_bytes * counts.bytes_per_token

    placing_s = 2.0 * chunk_tokens * model.token_bytes / machine.memory_bytes_per_s
    gpu_s = compute_s(model, machine, rows, tokens / 2) + placing_s
    per_layer = model.layer_calls + counts.launches
    host_s = (model.layers * per_layer + chunks * counts.place_launches) * machine.launch_s
    first_s = 0.0
    bus_s = 0.0
    if source != "device":
        rate = machine.pinned_bytes_per_s if source == "pinned" else machine.pageable_bytes_per_s
        bus_s = kv_bytes / rate
        copying_s = chunks * counts.copies * machine.copy_s
        first_s = bus_s * counts.first_fraction
        # Python waits for copies from pageable memory
        host_s += copying_s if source == "pinned" else bus_s
    seconds = machine.fixed_s + first_s + max(gpu_s, host_s, bus_s - first_s)
    if probe:
        half = model.layers / 2
        reading_s = model.parameters * 2 / machine.memory_bytes_per_s / 2
        seconds += max(reading_s, half * per_layer * machine.launch_s) + machine.fixed_s / 2
    return seconds


def ratios(
    model: Model, machine: Machine, prompt: Prompt, counts: Counts
) -> dict[str, dict[str, float]]:
    """Return reuse time / full prefill time by case and number of tokens."""
    cases = {
        "vllm": ("pinned", False),
        "vllm_with_probe": ("pinned", True),
        "vllm_pageable": ("pageable", False),
        "hf": ("pinned", False),
        "hf_with_probe": ("pinned", True),
        "hf_device": ("device", False),
    }
    table: dict[str, dict[str, float]] = {}
    for name, (source, probe) in cases.items():
        table[name] = {}
        for tokens in TOKENS:
            seconds = reuse_s(model, machine, prompt, counts, tokens, source=source, probe=probe)
            # the request's keys and values are written to vLLM's blocks
            if name.startswith("vllm"):
                seconds += 2.0 * tokens * model.token_bytes / machine.memory_bytes_per_s
            table[name][str(tokens)] = round(seconds / full_s(model, machine, tokens), 3)
    return table


def main(json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
    """Print reuse time relative to full prefill on a GPU, for Qwen3-8B on an H100, from a cost model."""
    counts = count(Model())
    table = ratios(Model(), Machine(), Prompt(), counts)
    if json:
        print_json(table)
        return
    shown = Table("chunk-caches", *(f"{tokens // 1024}k" for tokens in TOKENS))
    for name, row in table.items():
        shown.add_row(name, *(f"{ratio:.2f}" for ratio in row.values()))
    out.print(shown)
    out.print(
        f"Counted: {counts.launches:.1f} launches per layer, {counts.place_launches:.0f} launches and "
        f"{counts.copies:.0f} copies per chunk."
    )
