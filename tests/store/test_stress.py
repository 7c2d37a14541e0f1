"""Mixed load on one store: eight threads that bear, load, use and evict, and a second process that is killed at random.

`pytest tests/test_stress.py` takes half a minute, on a busy machine until everything has happened often enough;
`TESTS_STRESS_S=600` makes it ten minutes.
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore, RowFilter
from cachecraft_rag.store.layout import StoredVariant
from cachecraft_rag.store.loading.loader import Loader
from cachecraft_rag.types.captures import Capture, TokenScores
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.types.kv_layout import KVLayout
from cachecraft_rag.types.variants import LoadedVariant, VariantKey

SECONDS = float(os.environ.get("TESTS_STRESS_S", "20"))
LAYOUT = KVLayout(layers=4, kv_heads=2, head_dim=16, dtype="float32")
CHUNKS, PREFIXES = 40, 4
BUDGETS = {
    "disk_bytes": 2_000_000,
    "host_bytes": 600_000,
    "max_variants": 60,
    "variants_per_chunk": 3,
}
WORDS = [
    "kettle",
    "descale",
    "weeks",
    "filter",
    "drum",
    "belt",
    "spring",
    "motor",
    "valve",
    "lamp",
    "hinge",
]


def content(key: VariantKey) -> torch.Tensor:
    """The one right tensor of a key: its length and every value follow from the variant's id."""
    seed = int(key.variant_id[:8], 16)
    return torch.randn(LAYOUT.shape(4 + seed % 197), generator=torch.Generator().manual_seed(seed))


def capture(dice: random.Random) -> Capture:
    prefix = tuple(f"segment {n}" for n in range(dice.randrange(PREFIXES)))
    key = VariantKey("ns", "model", f"chunk {dice.randrange(CHUNKS)}", ("system", *prefix))
    return Capture(
        key,
        LAYOUT,
        "tokens",
        content(key),
        TokenScores(),
        (0.1,) * len(key.origin_prefix),
        0.3,
        0.6,
        dice.random(),
    )


def step(store: ChunkCacheStore, loader: Loader, dice: random.Random) -> str:
    """One thing that a request or an administrator does; every tensor that comes is compared with the right one."""
    kind = dice.choices(["capture", "load", "run", "evict", "use"], [30, 40, 25, 1, 10])[0]
    if kind == "capture":
        future = store.put(capture(dice))
        if dice.random() < 0.5:
            future.result()
        return kind
    if kind == "evict":
        store.evict(RowFilter(chunk_ids=(f"chunk {dice.randrange(CHUNKS)}",)))
        return kind
    chunks = [f"chunk {dice.randrange(CHUNKS)}" for _ in range(4)]
    variants = [
        variant
        for found in store.find("ns", "model", chunks).variants.values()
        for variant in found
    ]
    if kind == "use":
        for variant in variants:
            store.used(variant.variant_id, dice.random(), tokens=variant.tokens)
    elif kind == "load":
        for loaded in map(store.load, variants):
            if isinstance(loaded, LoadedVariant):
                right = next(content(v.key) for v in variants if v.variant_id == loaded.variant_id)
                assert torch.equal(loaded.kv, right)
    else:
        opened = [
            one for one in map(store.open_variant, variants) if isinstance(one, StoredVariant)
        ]
        loads = loader.begin([(one, 1000 * n) for n, one in enumerate(opened)])
        loads.take(dice.randrange(300))
        loads.layer_first = dice.random() < 0.5
        # often left before its end
        loads.wait(lambda: not loads.incomplete(), dice.random() * 0.02)
        loader.end(loads)
        for run in loads.extents:
            if run.layers == LAYOUT.layers:
                right = content(run.stored.variant.key)[:, :, run.first : run.last]
                assert torch.equal(run.stored.kv[:, :, run.first : run.last], right)
    return kind


def write_for_ever(root: str) -> None:
    """The process that is killed."""
    torch.set_num_threads(1)
    dice = random.Random()
    with ChunkCacheStore.open(root, **BUDGETS) as store:
        loader = Loader(store, LAYOUT.layers)
        print("ready", flush=True)
        while True:
            step(store, loader, dice)


def ask_for_ever(store: ChunkCacheStore, decoder: Decoder, load: Load, seed: int) -> None:
    """Questions over chunks that come and go. With everything recomputed the answer is that of full prefill."""
    dice = random.Random(seed)
    chunks = [Chunk(" ".join(dice.choices(WORDS, k=dice.randrange(5, 40)))) for _ in range(12)]
    with Engine(decoder, store, namespace=f"tenant {dice.random()}") as engine:
        while not load.done():
            given, sampling = dice.sample(chunks, 4), SamplingParams(max_new_tokens=4)
            full = "".join(
                engine.stream(
                    "How often?", given, sampling=sampling, config=ReuseConfig(reuse=False)
                )
            )
            everything = ReuseConfig(recompute_ratio=1.0)
            assert (
                "".join(engine.stream("How often?", given, sampling=sampling, config=everything))
                == full
            )
            load.counts[f"answers {seed}"] += 1


def bytes_on_disk(root: Path) -> int:
    sizes: dict[str, int] = {}  # by variant: a file that is renamed while we look would count twice
    for path in (root / "variants").rglob("*.safetensors*"):
        try:
            sizes[path.name.lstrip(".").partition(".")[0]] = path.stat().st_size
        except FileNotFoundError:
            continue
    return sum(sizes.values())


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def memory_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Load:
    """The threads, what they did, and what went wrong."""

    def __init__(self, store: ChunkCacheStore, decoder: Decoder) -> None:
        self.ends = time.monotonic() + SECONDS
        self.kills = 0
        self.counts = dict.fromkeys(
            ("capture", "load", "run", "evict", "use", "answers 0", "answers 1"), 0
        )
        self.errors: list[BaseException] = []
        loader = Loader(store, LAYOUT.layers)
        self._threads = [
            threading.Thread(target=self._steps, args=(store, loader, n)) for n in range(6)
        ]
        self._threads += [
            threading.Thread(target=self._asks, args=(store, decoder, n)) for n in range(2)
        ]
        for thread in self._threads:
            thread.start()

    def done(self) -> bool:
        late = time.monotonic() - self.ends
        enough = self.kills >= 2 and min(self.counts.values()) > 0
        return (late > 0 and enough) or late > 600 or bool(self.errors)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _steps(self, store: ChunkCacheStore, loader: Loader, seed: int) -> None:
        dice = random.Random(seed)
        try:
            while not self.done():
                kind = step(store, loader, dice)
                self.counts[kind] += 1
        except BaseException as error:  # noqa: BLE001 - raised in the main thread
            self.errors.append(error)

    def _asks(self, store: ChunkCacheStore, decoder: Decoder, seed: int) -> None:
        try:
            ask_for_ever(store, decoder, self, seed)
        except BaseException as error:  # noqa: BLE001 - raised in the main thread
            self.errors.append(error)


@pytest.mark.slow
def test_nothing_is_wrong_nothing_leaks_and_no_budget_is_exceeded(
    tiny_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    decoder, seen = tiny_decoder("Llama"), []
    dice = random.Random(7)
    store = ChunkCacheStore.open(tmp_path, **BUDGETS)
    load = Load(store, decoder)
    while not load.done():
        command = [sys.executable, __file__, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(dice.uniform(0.1, 2.0))
            process.kill()
            load.kills += 1
        stats = store.stats()
        seen.append((memory_bytes(), open_files(), threading.active_count()))
        assert stats.host_bytes <= BUDGETS["host_bytes"]
        assert stats.disk_bytes <= BUDGETS["disk_bytes"]
        # looking takes a while, and no thread may make room meanwhile
        with store._durable.catalog.standstill():
            assert bytes_on_disk(tmp_path) <= BUDGETS["disk_bytes"]
    load.join()
    assert not load.errors, load.errors
    assert load.kills >= 2
    assert min(load.counts.values()) > 0
    store.close()
    assert bytes_on_disk(tmp_path) <= BUDGETS["disk_bytes"]
    early, late = seen[len(seen) // 3], seen[-1]
    assert late[0] <= early[0] + 150e6, f"memory grows: {seen}"
    assert late[1] <= early[1] + 20, f"open files grow: {seen}"
    assert late[2] <= early[2] + 8, f"threads grow: {seen}"
    with ChunkCacheStore.open(tmp_path, **BUDGETS) as again:
        again.check(repair=True)
        assert not again.check().findings
        for row in again.rows(RowFilter(namespace="ns"), limit=1000):
            loaded = again.load(row.variant)
            assert isinstance(loaded, LoadedVariant)
            assert torch.equal(loaded.kv, content(row.variant.key))
    memory = f"{early[0] / 1e6:.0f} → {late[0] / 1e6:.0f} MB"
    print(f"{load.kills} kills, {load.counts}, memory {memory}, open files {early[1]} → {late[1]}")


if __name__ == "__main__":
    write_for_ever(sys.argv[1])
