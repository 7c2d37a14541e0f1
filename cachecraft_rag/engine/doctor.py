"""Advice for an operator: the state of one engine's store, and two speeds measured on this machine.

Loading pays off if it is faster than computing, so both are measured here, with the model that runs. `examine` gathers
`Facts`; `findings` judges them, and does nothing else.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from cachecraft_rag.compute.driver import prefill
from cachecraft_rag.compute.job import PrefillJob
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.kernels.cpu.library import SETTING, description, reason
from cachecraft_rag.model.decoder import Decoder, computes_bfloat16
from cachecraft_rag.model.sizes import cache_bytes
from cachecraft_rag.store import RowFilter, StoreStats

MEASURED_TOKENS = 256
DISK_BYTES = 64 << 20  # of the file that is written and read
FULL = 0.95


@dataclass(frozen=True, slots=True)
class Advice:
    """A finding and how to fix it.

    about   its subject
    level   "ok", "advice" for what could be better, "error" for what is broken
    what    the finding
    change  how to fix it; "" if nothing needs fixing
    """

    about: str
    level: Literal["ok", "advice", "error"]
    what: str
    change: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about the model and the store, and the two speeds.

    model             name of the model, as the engine was opened with it
    dtype, device     number format of its chunk-caches, such as "bfloat16", and torch's name of its device
    threads           CPU threads that torch uses
    cores             physical cores of this machine; with a model on a GPU its logical ones
    kernels           name of the CPU kernels in use (`kernels/cpu`); "torch" without them
    torch_because     why the kernels are torch's; "" if they are not
    fast_bfloat16     whether this CPU computes bfloat16 faster than float32
    compute_speed     tokens per second of a prefill of `MEASURED_TOKENS`, without reuse
    disk_bytes_per_s  speed of reading past the system's cache; None if the folder cannot be written
    load_speed        tokens per second that the disk delivers with this store's codec; None likewise
    store             statistics of the store; the remote is not asked
    read_only         whether the store could not be written when it was opened
    of_this_model     whether at least one stored chunk-cache belongs to this model
    problems          findings of a check of the store; None if it was not checked
    omp_num_threads   the environment variable OMP_NUM_THREADS; "" if it is not set
    """

    model: str
    dtype: str
    device: str
    threads: int
    cores: int
    kernels: str
    torch_because: str
    fast_bfloat16: bool
    compute_speed: float
    disk_bytes_per_s: float | None
    load_speed: float | None
    store: StoreStats
    read_only: bool
    of_this_model: bool
    problems: tuple[str, ...] | None
    omp_num_threads: str = ""


def examine(engine: Engine, *, check: bool = True) -> Facts:
    """Look and measure; takes seconds, and with `check` as long as reading every stored byte.

    Prefills run in the calling thread, and no question may be answered meanwhile; a file of 64 MiB is written into the
    store's folder, read, and removed again.
    """
    decoder = engine.decoder
    store = engine.store
    is_cpu = decoder.device.type == "cpu"
    cpu = torch.cpu.get_capabilities() if is_cpu else {}
    disk_speed = None if store.read_only else read_speed(store.root)
    token_bytes = cache_bytes(decoder.layout, MEASURED_TOKENS, store.config.codec) / MEASURED_TOKENS
    problems = None
    if check:
        problems = tuple(
            f"{problem.kind}: {problem.path}: {problem.what}" for problem in store.check().findings
        )
    return Facts(
        model=decoder.name,
        dtype=decoder.layout.dtype,
        device=str(decoder.device),
        threads=torch.get_num_threads(),
        cores=int(cpu.get("num_physical_cores") or os.cpu_count() or 1),
        fast_bfloat16=is_cpu and computes_bfloat16(),
        kernels=description(),
        torch_because=reason(),
        compute_speed=compute_speed(decoder),
        disk_bytes_per_s=disk_speed,
        load_speed=None if disk_speed is None else disk_speed / token_bytes,
        store=store.stats(ask_remote=False),
        read_only=store.read_only,
        of_this_model=bool(store.rows(RowFilter(fingerprint=decoder.fingerprint), limit=1)),
        problems=problems,
        omp_num_threads=os.environ.get("OMP_NUM_THREADS", ""),
    )


def compute_speed(decoder: Decoder) -> float:
    """Measure a prefill of up to 256 random tokens, and return its speed in tokens per second.

    Of two prefills the second counts, because the first warms up. No other pass may run meanwhile.
    """
    tokens = min(MEASURED_TOKENS, decoder.context_length)
    ids = torch.randint(0, int(decoder.model.config.vocab_size), (tokens,)).tolist()
    for _ in range(2):
        started = time.perf_counter()
        out = prefill(decoder, PrefillJob(ids, Rows.of((0, tokens), new=range(tokens))))
        int(decoder.next_logits(out.hidden).argmax())  # waits for a GPU
    return tokens / (time.perf_counter() - started)


def read_speed(folder: Path, nbytes: int = DISK_BYTES) -> float | None:
    """Write a file into this folder, and return the bytes per second of reading it, or None if that fails.

    It is read past the system's cache on Linux; elsewhere the speed may be that of the cache. `nbytes` is a multiple of
    1 MiB.
    """
    block = os.urandom(1 << 20)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            for _ in range(nbytes >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):  # without it the system's cache is measured
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            started = time.perf_counter()
            while file.read(1 << 20):
                pass
            return nbytes / (time.perf_counter() - started)
    except OSError:
        return None


def findings(facts: Facts) -> Iterator[Advice]:
    """Judge the facts: yield one `Advice` on each subject that applies, whether it is "ok" or to be changed."""
    speed = f"{facts.model}: {facts.compute_speed:,.0f} tokens/s computed in {facts.dtype} on {facts.device}"
    yield Advice("model", "ok", f"{speed}, {facts.threads} threads")
    if facts.dtype == "float32" and facts.fast_bfloat16:
        change = "--dtype auto or bfloat16: faster, and chunk-caches of half the size; all are computed a second time"
        yield Advice(
            "dtype", "advice", "this CPU computes bfloat16, and the model runs in float32", change
        )
    if facts.dtype == "bfloat16" and facts.device == "cpu" and not facts.fast_bfloat16:
        change = "--dtype float32: faster, but the model and chunk-caches take twice the memory"
        yield Advice("dtype", "advice", "this CPU emulates bfloat16", change)
    if facts.device == "cpu":
        because = (
            f"torch's, slower: {facts.torch_because}" if facts.torch_because else facts.kernels
        )
        change = (
            f"install a C compiler and reinstall this package; unset {SETTING}"
            if facts.torch_because
            else ""
        )
        yield Advice("kernels", "advice" if facts.torch_because else "ok", because, change)
    if facts.device == "cpu" and facts.threads != facts.cores:
        threads = f"{facts.threads} threads on {facts.cores} cores"
        if str(facts.threads) == facts.omp_num_threads:
            yield Advice("threads", "ok", f"{threads}, as OMP_NUM_THREADS says")
        else:
            yield Advice("threads", "advice", threads, f"--threads {facts.cores}")
    yield from _of_store(facts)
    if facts.load_speed is not None and facts.disk_bytes_per_s is not None:
        times = f"{facts.load_speed / facts.compute_speed:.1f} times as fast as computing"
        what = f"{facts.disk_bytes_per_s / 1e6:.0f} MB/s read: {facts.load_speed:,.0f} tokens/s loaded, {times}"
        change = "a smaller --codec (int8, entropy), more --host-bytes, or a faster disk; until then much is computed"
        slow = facts.load_speed < facts.compute_speed
        yield Advice("disk", "advice" if slow else "ok", what, change if slow else "")


def _of_store(facts: Facts) -> Iterator[Advice]:
    stats = facts.store
    yield Advice("store", "ok", f"{stats.variants} chunk-caches of {stats.chunks} chunks")
    if facts.problems:
        what = f"{len(facts.problems)} findings: {'; '.join(facts.problems[:3])}"
        yield Advice("check", "error", what, "cachecraft store check --repair")
    if facts.read_only:
        change = "make it writable, or use another --store"
        yield Advice("folder", "advice", "it cannot be written: nothing new is stored", change)
    if stats.variants and not facts.of_this_model:
        what = "all stored chunk-caches belong to other models, dtypes or tokenizers"
        change = "cachecraft index DIR --prime with this model, or use the model before; `store evict` removes the rest"
        yield Advice("other models", "advice", what, change)
    if stats.disk_bytes >= FULL * stats.disk_budget:
        what = f"{stats.disk_bytes} of {stats.disk_budget} bytes: new chunk-caches evict others"
        yield Advice("disk budget", "advice", what, "raise --disk-bytes, or choose --codec int8")
