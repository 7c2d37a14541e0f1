"""Two ranks load layer by layer while they compute, in lockstep, however much their disks differ.

Each rank runs all heads of a small model, so its blocks must hold what one rank alone writes.
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cachecraft_rag.compute.balance import load_split
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.serving.priming import Primer
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.layout import StoredVariant
from cachecraft_rag.vllm.messages import Ask, Fill, FillReport
from cachecraft_rag.vllm.served_model import ModelIdentity
from cachecraft_rag.vllm.settings import ConnectorSettings
from cachecraft_rag.vllm.worker.ranks import TensorParallel
from cachecraft_rag.vllm.worker.scheduling import Scheduling
from cachecraft_rag.vllm.worker.working import Workers
from tests.vllm.test_working import BLOCK, CHUNKS, CONFIG, BlockStack, expected, fill_of, filled

CAKE = CONFIG.with_method(loading="cake")
EXACT, MOVED = [2, 1, 0], [0, 2, 1]  # orders of the chunks, which were captured in the first one


class Signal:
    """A signal from one process to the other; any thread may wait for it."""

    def __init__(self, file: str) -> None:
        # kept: the file is removed once two of these were let go
        self._store = torch.distributed.FileStore(file, 2)

    def wait(self) -> None:
        self._store.wait(["set"], timedelta(minutes=5))

    def set(self) -> None:
        self._store.set("set", "")


class WholeRanks(TensorParallel):
    """Ranks that hold all heads each, and count their meetings about layers."""

    counts: Counter[str]

    def own_heads(self, kv: Tensor) -> Tensor:
        return kv

    def least(self, own: int) -> int:
        self.counts["depth"] += own > 1  # not a yes or no
        return super().least(own)


@dataclass
class Rank:
    """One of two ranks, with a store, blocks and workers of its own."""

    number: int
    stack: BlockStack
    workers: Workers
    counts: Counter[str]
    disk: Disk
    reports: dict[str, FillReport] = field(default_factory=dict)

    def step(self, fills: Sequence[Fill] = (), ended: Sequence[str] = ()) -> set[str]:
        """Step once, and return what is finished."""
        self.workers.step(fills, ended, rows=10_000)
        result = self.workers.take_result()
        self.reports |= {} if result is None else result.reports
        return self.workers.finished()

    def fill(self, *fills: Fill) -> None:
        """Step until one of them is filled."""
        done = self.step(fills)
        while not done:
            done = self.step()

    def step_to_layer(self, layer: int, fill: Fill) -> None:
        """Step until this many layers are computed, and once more, which computes none."""
        self.step([fill])
        while len(self.stack.forwards) < layer:
            assert not self.step()
        assert not self.step()
        assert len(self.stack.forwards) == layer


class Disk:
    """How this process's files behave from some layer on: reads wait for a signal, or fail."""

    def __init__(self) -> None:
        self._read = StoredVariant.read
        self._first, self._act = 1 << 30, lambda: None

    def from_layer(self, layer: int, act: Callable[[], None]) -> None:
        """Call `act` before each read of this layer and later ones."""
        self._first, self._act = layer, act

    def install(self) -> None:
        """Replace the reads of this process."""
        disk = self

        def read(stored: StoredVariant, layer: int, *where: Any, **how: Any) -> Any:
            if layer >= disk._first:
                disk._act()
            return disk._read(stored, layer, *where, **how)

        StoredVariant.read = read  # type: ignore[method-assign]


def fails() -> None:
    raise OSError("of this test")


# -- scenes, played by both ranks ------------------------------------------------------------------------------------


def one_disk_is_slow(rank: Rank, fill: Fill, signal: Signal) -> None:
    """Both compute the layers that both have, and no further one before the slow disk has delivered it."""
    if rank.number == 1:
        rank.disk.from_layer(1, signal.wait)
    rank.step_to_layer(1, fill)
    if rank.number == 0:
        signal.set()
    done = rank.step()
    while not done:
        done = rank.step()
    assert done == {"r"}


def one_disk_fails(rank: Rank, fill: Fill, _signal: Signal) -> None:
    """Neither uses the chunk-caches that one rank could not read, and both compute the same rows."""
    if rank.number == 1:
        rank.disk.from_layer(2, fails)
    rank.fill(fill)
    outcomes = {one["outcome"] for one in rank.reports["r"]["segments"][1:-1]}
    assert outcomes == {"computed"}
    why = {one["detail"] for one in rank.reports["r"]["segments"][1:-1]}
    assert any(("another rank could not read it" in text) == (rank.number == 0) for text in why), (
        why
    )


def it_ends_between_layers(rank: Rank, fill: Fill, signal: Signal) -> None:
    """A request that ends while one rank waits for its disk; the next one is filled as ever."""
    if rank.number == 1:
        rank.disk.from_layer(1, signal.wait)
    rank.step_to_layer(1, replace(fill, request_id="aborted"))
    assert rank.step(ended=["aborted"]) == {"aborted"}
    if rank.number == 0:
        signal.set()
    rank.fill(fill)


def one_has_it_in_memory(rank: Rank, fill: Fill, _signal: Signal) -> None:
    """One rank cannot read what the other one has in memory: both compute and capture it."""
    rank.fill(replace(fill, request_id="before"))
    if rank.number == 1:
        rank.disk.from_layer(2, fails)
    rank.fill(fill)
    assert "refused" not in rank.reports["r"], rank.reports["r"]


def all_is_loaded_first(rank: Rank, fill: Fill, _signal: Signal) -> None:
    """One meeting says that all layers are there, for the probe and for the pass."""
    rank.fill(fill)
    assert rank.counts["depth"] == 1


def the_first_rank_computes_a_front(rank: Rank, fill: Fill, signal: Signal) -> None:
    """Both compute the tokens that the first rank lacked, also where the other one has them."""
    front = 100.0 if rank.number == 0 else 0.0
    load_split.FrontInLastPass.next_piece = lambda *_split: (front, True)  # type: ignore[assignment]
    if rank.number == 0:
        rank.disk.from_layer(1, signal.wait)
    rank.step_to_layer(1, fill)
    if rank.number == 1:
        signal.set()
    done = rank.step()
    while not done:
        done = rank.step()
    question = fill.stop - fill.ask.prompt.bounds[-2]
    layers = rank.stack.decoder.layout.layers
    assert rank.reports["r"]["row_layers"] == (100 + question) * layers


Scene = Callable[[Rank, Fill, Signal], None]


def ranks_of(number: int, rendezvous: str) -> WholeRanks:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=number, world_size=2
    )

    def make_meetings() -> Any:
        return torch.distributed.new_group(
            [0, 1],
            timeout=timedelta(seconds=120),
            backend="gloo",
            use_local_synchronization=True,
        )

    def all_reduce(tensor: Tensor) -> Tensor:
        torch.distributed.all_reduce(tensor)
        return tensor

    def all_gather(tensor: Tensor, dim: int) -> Tensor:
        return tensor  # each rank has all heads here

    group = SimpleNamespace(
        rank_in_group=number, world_size=2, all_reduce=all_reduce, all_gather=all_gather
    )
    ranks = WholeRanks(group, make_meetings)
    ranks.counts = Counter()
    return ranks


def play(number: int, folder: str, fill: Fill, scene: Scene) -> None:
    """Play a scene on one rank of two, and keep its blocks in a file."""
    torch.set_num_threads(1)
    there = Path(folder)
    ranks = ranks_of(number, str(there / "rendezvous"))
    # as if computing took longer than loading: a pass begins once its first layer is there
    load_split.preload_depth = lambda *_layers, **_seconds: 1
    try:
        decoder = Decoder.load(str(there / "model"), dtype="float32")
        stack = BlockStack(decoder, blocks=64)
        stack.ranks = ranks  # type: ignore[assignment]
        # only a rank with memory keeps what it has read
        keeps = scene is one_has_it_in_memory and number == 0
        with ChunkCacheStore.open(there / "caches", host_bytes=1 << 30 if keeps else 0) as store:
            workers = Workers(stack, store, settings_of(decoder), block_size=BLOCK)  # type: ignore[arg-type]
            disk = Disk()
            disk.install()
            scene(
                Rank(number, stack, workers, ranks.counts, disk),
                fill,
                Signal(str(there / "signal")),
            )
            torch.save(filled(stack, fill), there / f"blocks-{number}")
            workers.close()
        torch.distributed.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        raise


def settings_of(decoder: Decoder) -> ConnectorSettings:
    identity = ModelIdentity(decoder.fingerprint, decoder.layout, decoder.context_length)
    return ConnectorSettings("unused", identity, key="key", fill_at_once=2)


@pytest.fixture
def engine(tiny_decoder: Callable[..., Decoder], tmp_path: Path) -> Iterator[Engine]:
    """Over a store on disk that holds all chunks, primed, and a model that the ranks can load."""
    made = tiny_decoder("Llama")
    made.model.save_pretrained(tmp_path / "model")
    made.tokenizer.save_pretrained(tmp_path / "model")
    decoder = Decoder.load(str(tmp_path / "model"), dtype="float32")
    with (
        ChunkCacheStore.open(tmp_path / "caches") as store,
        Engine(decoder, store, config=CONFIG) as engine,
    ):
        Primer(engine).prime(CHUNKS)
        store.flush()
        yield engine


@pytest.mark.parametrize(
    ("scene", "order", "changed"),
    [
        (one_disk_is_slow, EXACT, {}),
        (one_disk_is_slow, MOVED, {}),
        (the_first_rank_computes_a_front, EXACT, {}),
        # exact, so that it does not matter after which layer the ranks notice it
        (one_disk_fails, EXACT, {}),
        (it_ends_between_layers, MOVED, {}),
        (one_has_it_in_memory, EXACT, {"capture": True}),
        (all_is_loaded_first, MOVED, {"method": {"loading": "whole"}}),
    ],
)
def test_two_ranks_fill_the_blocks_as_one(
    scene: Scene,
    order: list[int],
    changed: dict[str, Any],
    engine: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = engine.prompts.build("When was it built?", [CHUNKS[i] for i in order])
    config = CAKE.changed_by(changed)
    ask = Ask(prompt, config, captures=None if config.capture else ())
    settings = settings_of(engine.decoder)
    scheduling = Scheduling(engine.store, settings, block_size=BLOCK, prefix_caching=True)
    fill = fill_of(scheduling, ask)
    right = expected(engine, ask)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))  # for the ranks' processes
    # which would run the app that Streamlit's tests leave there
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    torch.multiprocessing.spawn(play, (str(tmp_path), fill, scene), nprocs=2)
    for number in range(2):
        blocks = torch.load(tmp_path / f"blocks-{number}")
        torch.testing.assert_close(blocks, right, rtol=0, atol=1e-4)
