"""The store when processes die, race, or run out of disk: no wrong tensor, no exception, budgets hold.

Run as a script, this file is a server that imports torch once and then forks one writer per line on its standard input;
the tests kill those writers.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from cachecraft_rag.errors import StoreError
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.catalog import Catalog
from cachecraft_rag.types.captures import Capture, TokenScores
from cachecraft_rag.types.kv_layout import KVLayout
from cachecraft_rag.types.store_reasons import Unavailable
from cachecraft_rag.types.variants import LoadedVariant, Variant, VariantKey

LAYOUT = KVLayout(layers=4, kv_heads=2, head_dim=16, dtype="float32")
CHUNKS, PREFIXES = 24, 4
SETTINGS = {
    "disk_bytes": 400_000,
    "max_variants": 20,
    "variants_per_chunk": 2,
    "host_bytes": 100_000,
}


def content(key: VariantKey) -> torch.Tensor:
    """The one right tensor of a key: its length and every value follow from the variant's id."""
    seed = int(key.variant_id[:8], 16)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LAYOUT.shape(4 + seed % 60), generator=generator)


def capture(dice: random.Random) -> Capture:
    prefix = tuple(f"segment {n}" for n in range(dice.randrange(PREFIXES)))
    key = VariantKey("ns", "model", f"chunk {dice.randrange(CHUNKS)}", ("system", *prefix))
    kv = content(key)
    scores = TokenScores(np.full(kv.shape[2], 0.5, dtype=np.float32))
    return Capture(
        key, LAYOUT, "tokens", kv, scores, (0.1,) * len(key.origin_prefix), 0.3, 0.6, dice.random()
    )


def write_for_ever(root: str, seed: int) -> None:
    """Write captures, old and new, and uses until killed."""
    dice = random.Random(seed)
    store = ChunkCacheStore.open(root, **SETTINGS)
    while True:
        variant = store.put(capture(dice)).result()
        assert isinstance(variant, Variant) or "no room" in variant.reason, variant
        store.used(variant.variant_id, 0.5, 10)


def write_with_file_limit(root: str, seed: int) -> None:
    """Writes with no file allowed over 16 KiB, the catalog's included: what a full disk looks like without root."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    dice = random.Random(seed)
    with ChunkCacheStore.open(root, **SETTINGS) as store:
        results = [store.put(capture(dice)).result() for _ in range(3)]
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, resource.RLIM_INFINITY))
        results += [store.put(capture(dice)).result() for _ in range(10)]
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        stored = [isinstance(result, Variant) for result in results]
        assert all(stored[:3]), results
        assert not all(stored[3:]), results
        reasons = [result.reason for result in results if isinstance(result, Unavailable)]
        assert all("full" in reason or "cannot be written" in reason for reason in reasons), reasons
        # space again: the store goes on
        assert isinstance(store.put(capture(dice)).result(), Variant)


class Forks:
    """The server of this file, and the writers it has forked."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, job: str, root: Path, seed: int) -> int:
        """Fork one writer; returns its process id at once."""
        return int(self._ask(f"{job} {seed} {root}"))

    def wait(self, pid: int) -> int:
        """The exit status of a writer: negative is the signal that ended it."""
        return int(self._ask(f"wait {pid} -"))

    def close(self) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(10)
        self._server.stdout.close()

    def _ask(self, line: str) -> str:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(line + "\n")
        self._server.stdin.flush()
        return self._server.stdout.readline()


def serve() -> None:
    torch.randn(10)  # what torch does on its first use, before the forks
    jobs = {"write": write_for_ever, "limited": write_with_file_limit}
    for line in sys.stdin:
        job, number, root = line.rstrip("\n").split(" ", 2)
        if job == "wait":
            print(os.waitstatus_to_exitcode(os.waitpid(int(number), 0)[1]), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            try:
                jobs[job](root, int(number))
            finally:  # leave as a separate process, not through the server's loop
                if failure := sys.exc_info()[1]:
                    sys.excepthook(type(failure), failure, failure.__traceback__)
                sys.stderr.flush()
                os._exit(failure is not None)
        print(pid, flush=True)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    server = Forks()
    yield server
    server.close()


def bytes_on_disk(root: Path) -> int:
    return sum(path.stat().st_size for path in (root / "variants").rglob("*") if path.is_file())


def verify(store: ChunkCacheStore, *, all_there: bool = True) -> int:
    """Every row gives exactly its tensor (or, where allowed, a reason), and everything keeps to its bounds."""
    served = 0
    chunks = [f"chunk {n}" for n in range(CHUNKS)]
    found = store.find("ns", "model", chunks).variants
    for variants in found.values():
        assert len(variants) <= SETTINGS["variants_per_chunk"]
        for variant, loaded in zip(variants, map(store.load, variants), strict=True):
            if isinstance(loaded, LoadedVariant):
                assert torch.equal(loaded.kv, content(variant.key))
                served += 1
            else:
                assert loaded.reason
                assert not all_there, loaded
    stats = store.stats()
    assert stats.disk_bytes <= SETTINGS["disk_bytes"]
    assert stats.host_bytes <= SETTINGS["host_bytes"]
    assert stats.variants <= SETTINGS["max_variants"]
    return served


def interrupted(root: Path) -> bool:
    """Return True if a file is at risk: the writer was killed between file and row, or between row's and file's end."""
    if not (root / "catalog.sqlite").exists():
        return False
    catalog = Catalog(root / "catalog.sqlite")
    found = bool(catalog.at_risk())
    catalog.close()
    return found


def seconds_to_first_capture(forks: Forks, root: Path) -> float:
    """Seconds until a writer commits its first row on this machine."""
    pid = forks.start("write", root, 1000)
    start = time.monotonic()
    while not (root / "catalog.sqlite").exists():
        time.sleep(0.001)
    catalog = Catalog(root / "catalog.sqlite")
    while not catalog.totals().variants:
        time.sleep(0.001)
    seconds = time.monotonic() - start
    catalog.close()
    os.kill(pid, signal.SIGKILL)
    forks.wait(pid)
    return seconds


@pytest.mark.slow
def test_writers_killed_at_50_random_moments(forks: Forks, tmp_path: Path) -> None:
    dice, served, halfway = random.Random(), 0, 0
    longest, kills = 4 * seconds_to_first_capture(forks, tmp_path), 0
    # on a busy machine few writers get far
    while kills < 50 or (kills < 400 and (halfway < 5 or served < 50)):
        kills += 1
        pid = forks.start("write", tmp_path, kills)
        # from before the store is open to dozens of captures later
        time.sleep(dice.uniform(0.0, longest))
        os.kill(pid, signal.SIGKILL)
        assert forks.wait(pid) == -signal.SIGKILL  # not its own error
        halfway += interrupted(tmp_path)
        with ChunkCacheStore.open(tmp_path, **SETTINGS) as store:
            served += verify(store)
            # nothing of the dead is left, without any check
            assert bytes_on_disk(tmp_path) == store.stats().disk_bytes
            assert store.check(repair=True).findings == ()
            assert store.check().findings == ()
        assert list((tmp_path / "writers").iterdir()) == []
    print(
        f"{halfway} of {kills} kills in the middle of a write or an eviction; {served} chunk-caches verified"
    )
    assert halfway >= 5
    assert served >= 50


def test_check_repairs_what_a_killed_writer_left(forks: Forks, tmp_path: Path) -> None:
    """The same while another process has the store open, so that no opening tidies up first."""
    repaired = 0
    with ChunkCacheStore.open(tmp_path, **SETTINGS) as store:
        for seed in range(100, 112):
            pid = forks.start("write", tmp_path, seed)
            time.sleep(0.1 + seed % 7 / 100)
            os.kill(pid, signal.SIGKILL)
            forks.wait(pid)
            dry, wet = store.check(), store.check(repair=True)
            assert [finding.path for finding in dry.findings] == [
                finding.path for finding in wet.findings
            ]
            assert {finding.kind for finding in wet.findings} <= {"leftover of a writer"}
            repaired += len(wet.findings)
            assert store.check().findings == ()
            assert store.stats().disk_bytes == bytes_on_disk(tmp_path)
            verify(store)
    print(f"{repaired} leftovers repaired")


def test_two_processes_on_one_store(forks: Forks, tmp_path: Path) -> None:
    pids = [forks.start("write", tmp_path, seed) for seed in (1, 2)]
    with ChunkCacheStore.open(tmp_path, **SETTINGS) as store:
        served, began = 0, time.monotonic()
        while time.monotonic() < began + (1.5 if served else 60):
            # evicted between lookup and load: a reason, never a wrong tensor
            served += verify(store, all_there=False)
            store.put(capture(random.Random()))
        assert store.flush(60)
        captures = store.stats().captures
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            assert forks.wait(pid) == -signal.SIGKILL
        store.check(repair=True)
        assert store.check().findings == ()
        verify(store)
    assert served > 0
    assert captures["stored"] > 0


def fill_and_recover(root: Path) -> None:
    """Captures until the disk is full and beyond; then some space, and captures again."""
    settings = SETTINGS | {"disk_bytes": 1 << 30, "max_variants": 1000, "variants_per_chunk": 1000}
    dice = random.Random(5)
    ballast = root.parent / "ballast"
    ballast.write_bytes(b"x" * 300_000)
    with ChunkCacheStore.open(root, **settings) as store:
        results = [store.put(capture(dice)).result() for _ in range(120)]
        dropped = [result for result in results if isinstance(result, Unavailable)]
        assert dropped
        assert all("full" in result.reason for result in dropped), {
            result.reason for result in dropped
        }
        ids = {result.variant_id for result in results if isinstance(result, Variant)}
        assert ids
        assert not list((root / "variants").rglob("*.tmp"))
        for row in store.rows(limit=1000):
            loaded = store.load(row.variant)
            assert isinstance(loaded, LoadedVariant)
            assert torch.equal(loaded.kv, content(row.variant.key))
        ballast.unlink()
        assert isinstance(store.put(capture(dice)).result(), Variant)
        assert store.check(repair=True).findings == ()
        assert bytes_on_disk(root) == store.stats().disk_bytes


def test_a_full_disk_drops_captures_and_nothing_else(forks: Forks, tmp_path: Path) -> None:
    """On a file system of one megabyte where we may mount one, else with a limit on the size of files."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "cachecraft-test", str(small)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        assert forks.wait(forks.start("limited", tmp_path / "store", 7)) == 0
        return
    try:
        fill_and_recover(small / "store")
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_files_that_may_not_grow_drop_captures_and_nothing_else(
    forks: Forks, tmp_path: Path
) -> None:
    assert forks.wait(forks.start("limited", tmp_path / "store", 7)) == 0
    with ChunkCacheStore.open(tmp_path / "store", **SETTINGS) as store:
        assert verify(store) > 0
        assert store.check().findings == ()


def test_a_store_on_a_read_only_file_system_serves_and_refuses_changes(tmp_path: Path) -> None:
    root = tmp_path / "store"
    one = capture(random.Random(1))
    with ChunkCacheStore.open(root) as store:
        store.put(one).result()
    if os.geteuid() != 0:
        root.chmod(0o500)
        (root / "catalog.sqlite").chmod(0o400)
    else:
        subprocess.run(["mount", "--bind", "-r", root, root], capture_output=True, check=False)
        if not os.statvfs(root).f_flag & os.ST_RDONLY:
            pytest.skip("root may write everywhere, and this container may not mount")
    try:
        with ChunkCacheStore.open(root, **SETTINGS) as store:
            assert verify(store) == store.stats().variants == 1
            dropped = store.put(capture(random.Random(2))).result()
            assert isinstance(dropped, Unavailable)
            assert "read-only" in dropped.reason
            for change in (lambda: store.evict(down_to_bytes=0), lambda: store.check(repair=True)):
                with pytest.raises(StoreError, match="writable"):
                    change()
        with pytest.raises(StoreError, match="writable"):
            ChunkCacheStore.open(root / "another")
    finally:
        if os.geteuid() != 0:
            root.chmod(0o700)
        else:
            subprocess.run(["umount", root], check=True)


if __name__ == "__main__":
    serve()
