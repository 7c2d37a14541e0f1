"""Advice for an operator: the state of one engine's store, and two speeds measured on this machine.

Loading pays off where it is faster than computing, so both are measured here, with the model that runs. `examine`
gathers `Facts`; `findings` judges them, and does nothing else.
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
class Finding:
    """One judgement, and what to change; "" where nothing need be."""

    about: str
    level: Literal["ok", "advice", "error"]
    what: str
    change: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """The model, the store, and the two speeds.

    kernels         name of the CPU kernels in use (`kernels/cpu`), "torch" where there are none
    torch_because   why it is torch; "" where it is not
    fast_bfloat16   True for a CPU that computes bfloat16 faster than float32
    compute_speed   tokens per second of a prefill of `MEASURED_TOKENS`, without reuse
    disk_bytes_per_s  read past the system's cache; None where the folder cannot be written
    load_speed      tokens per second that the disk delivers with this store's codec; None likewise
    of_this_model   True where a stored chunk-cache is of this model
    problems        findings of a check of the store; None where it was not asked for
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


def examine(engine: Engine, *, check: bool = True) -> Facts:
    """Look and measure; takes seconds, and with `check` as long as reading every stored byte.

    The file written for measuring is removed again. Raises StoreError when the catalog cannot be read.
    """
    decoder, store = engine.decoder, engine.store
    cpu = torch.cpu.get_capabilities() if decoder.device.type == "cpu" else {}
    rate = None if store.read_only else read_speed(store.root)
    token_bytes = cache_bytes(decoder.layout, MEASURED_TOKENS, store.config.codec) / MEASURED_TOKENS
    found = store.check().findings if check else None
    return Facts(
        model=decoder.name,
        dtype=decoder.layout.dtype,
        device=str(decoder.device),
        threads=torch.get_num_threads(),
        cores=int(cpu.get("num_physical_cores") or os.cpu_count() or 1),
        fast_bfloat16=decoder.device.type == "cpu" and computes_bfloat16(),
        kernels=description(),
        torch_because=reason(),
        compute_speed=compute_speed(decoder),
        disk_bytes_per_s=rate,
        load_speed=None if rate is None else rate / token_bytes,
        store=store.stats(ask_remote=False),
        read_only=store.read_only,
        of_this_model=bool(store.rows(RowFilter(fingerprint=decoder.fingerprint), limit=1)),
        problems=None if found is None else tuple(f"{one.kind}: {one.path}: {one.what}" for one in found),
    )


def compute_speed(decoder: Decoder) -> float:
    """Tokens per second of a prefill; the second of two, because the first one warms up."""
    tokens = min(MEASURED_TOKENS, decoder.context_length)
    ids = torch.randint(0, int(decoder.model.config.vocab_size), (tokens,)).tolist()
    for _ in range(2):
        started = time.perf_counter()
        out = prefill(decoder, PrefillJob(ids, Rows.of((0, tokens), new=range(tokens))))
        int(decoder.next_logits(out.hidden).argmax())  # a GPU has then finished
    return tokens / (time.perf_counter() - started)


def read_speed(folder: Path, nbytes: int = DISK_BYTES) -> float | None:
    """Bytes per second of reading a file in this folder; None where it cannot be written."""
    block = os.urandom(1 << 20)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            for _ in range(nbytes >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):  # else the system's cache is measured
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            started = time.perf_counter()
            while file.read(1 << 20):
                pass
            return nbytes / (time.perf_counter() - started)
    except OSError:
        return None


def findings(facts: Facts) -> Iterator[Finding]:
    """Judge the facts: "ok", "advice" for what could be better, "error" for what is broken."""
    speed = f"{facts.model}: {facts.compute_speed:,.0f} tokens/s computed in {facts.dtype} on {facts.device}"
    yield Finding("model", "ok", f"{speed}, {facts.threads} threads")
    if facts.dtype == "float32" and facts.fast_bfloat16:
        change = "--dtype auto or bfloat16: faster, and chunk-caches of half the size; what is stored is computed again"
        yield Finding("dtype", "advice", "this CPU computes bfloat16, and the model runs in float32", change)
    if facts.dtype == "bfloat16" and facts.device == "cpu" and not facts.fast_bfloat16:
        change = "--dtype float32: faster, but the model and chunk-caches take twice the memory"
        yield Finding("dtype", "advice", "this CPU emulates bfloat16", change)
    if facts.device == "cpu":
        because = f"torch's, slower: {facts.torch_because}" if facts.torch_because else facts.kernels
        change = f"install again where there is a C compiler; unset {SETTING}" if facts.torch_because else ""
        yield Finding("kernels", "advice" if facts.torch_because else "ok", because, change)
    if facts.device == "cpu" and facts.threads != facts.cores:
        threads = f"{facts.threads} threads on {facts.cores} cores"
        yield Finding("threads", "advice", threads, f"--threads {facts.cores}")
    yield from _of_store(facts)
    if facts.load_speed is not None and facts.disk_bytes_per_s is not None:
        times = f"{facts.load_speed / facts.compute_speed:.1f} times as fast as computing"
        what = f"{facts.disk_bytes_per_s / 1e6:.0f} MB/s read: {facts.load_speed:,.0f} tokens/s loaded, {times}"
        change = "a smaller --codec (int8, entropy), more --host-bytes, or a faster disk; until then much is computed"
        slow = facts.load_speed < facts.compute_speed
        yield Finding("disk", "advice" if slow else "ok", what, change if slow else "")


def _of_store(facts: Facts) -> Iterator[Finding]:
    stats = facts.store
    yield Finding("store", "ok", f"{stats.variants} chunk-caches of {stats.chunks} chunks")
    if facts.problems:
        what = f"{len(facts.problems)} findings: {'; '.join(facts.problems[:3])}"
        yield Finding("check", "error", what, "cachecraft store check --repair")
    if facts.read_only:
        change = "make it writable, or use another --store"
        yield Finding("folder", "advice", "it cannot be written: nothing new is stored", change)
    if stats.variants and not facts.of_this_model:
        what = "everything stored is of other models, dtypes or tokenizers"
        change = "cachecraft index DIR --prime with this model, or go back; `store evict` removes the rest"
        yield Finding("other models", "advice", what, change)
    if stats.disk_bytes >= FULL * stats.disk_budget:
        what = f"{stats.disk_bytes} of {stats.disk_budget} bytes: chunk-caches leave for others"
        yield Finding("disk budget", "advice", what, "raise --disk-bytes, or choose --codec int8")
