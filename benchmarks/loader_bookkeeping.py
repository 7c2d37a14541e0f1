"""Time that the loader spends on its own lists while a prompt is loaded: nothing is read, so nothing else counts."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Annotated, Any, cast

import torch
import typer

from cachecraft_rag.store.layout import EXTENT_TOKENS, StoredVariant
from cachecraft_rag.store.loading.pending import Extent, PendingLoads
from cachecraft_rag.store.loading.rate import Meter

_CHUNK_TOKENS = 512
_REPEATS = 5


class NothingToRead:
    """A stored chunk-cache without bytes."""

    sequential = False
    token_bytes = 0.0

    def __init__(self) -> None:
        self.variant = SimpleNamespace(variant_id="none")
        self._kv = torch.empty(2, 0)

    def own(self, layer: int, start: int, stop: int) -> torch.Tensor:
        """An empty tensor."""
        return self._kv

    def read(self, layer: int, start: int, stop: int, *, out: torch.Tensor) -> None:
        """Read nothing."""

    def close(self) -> None:
        """Close nothing."""


class NoBuffer:
    """A destination that keeps nothing."""

    def place(self, layer: int, chunk: torch.Tensor, start: int) -> None:
        """Place nothing."""

    def place_all(self, layer: int, chunks: Sequence[tuple[torch.Tensor, int]]) -> None:
        """Place nothing."""


def pending(tokens: int, layers: int) -> PendingLoads:
    """Loads of a prompt of chunks of 512 tokens that wait to be read."""
    extents = []
    for start in range(0, tokens, _CHUNK_TOKENS):
        stored = cast(StoredVariant, NothingToRead())
        for first in range(0, _CHUNK_TOKENS, EXTENT_TOKENS):
            extents.append(Extent(stored, start, first, first + EXTENT_TOKENS))
    return PendingLoads(layers, extents, Meter(1e9))


def load_all(loads: PendingLoads, *, layer_first: bool) -> float:
    """CPU seconds to read everything and to ask before each layer what a pass asks."""
    loads.layer_first = layer_first
    sink = NoBuffer()
    began = time.thread_time()
    loads.read()
    for layer in range(loads.layers):
        loads.failed()
        assert loads.depth() > layer
        loads.place(layer, sink)
    loads.close()
    return time.thread_time() - began


def main(
    tokens: Annotated[
        str, typer.Option(help="Prompt lengths, separated by commas.")
    ] = "8192,16384,32768",
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure the loader's bookkeeping per prompt, in milliseconds of CPU time."""
    report: dict[str, Any] = {"layers": layers, "extent_tokens": EXTENT_TOKENS, "milliseconds": {}}
    for count in map(int, tokens.split(",")):
        figures = {}
        for name, layer_first in (("layer by layer", True), ("extent by extent", False)):
            seconds = min(
                load_all(pending(count, layers), layer_first=layer_first) for _ in range(_REPEATS)
            )
            figures[name] = round(1e3 * seconds, 2)
        report["milliseconds"][count] = figures
    if as_json:
        print(json.dumps(report))
        return
    for count, figures in report["milliseconds"].items():
        print(
            f"{count} tokens: " + ", ".join(f"{value} ms {name}" for name, value in figures.items())
        )
