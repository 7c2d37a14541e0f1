"""What an operator should know of one engine on this machine: facts, measured speeds, and what to change.

`examine` gathers `Facts`; `findings` judges them, and does nothing else. Loading pays off where it is faster than
computing, so both are measured here, with the model that runs.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from cachecraft_rag.compute.driver import prefill
from cachecraft_rag.compute.job import PrefillJob
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.engine.decoder import Decoder
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.engine.sizes import cache_bytes
from cachecraft_rag.kernels.gpu.choice import uses_triton
from cachecraft_rag.store import RowFilter, StoreStats
from cachecraft_rag.store.layout import READ_ERRORS, StoredVariant, encode, open_source
from cachecraft_rag.store.remote import RemoteConfig, RemoteStream, RemoteTier
from cachecraft_rag.types import KVLayout, TokenScores, Variant, VariantKey

Level = Literal["ok", "advice", "error"]
MEASURED_TOKENS = 256
DISK_BYTES = 64 << 20  # of the file that is written and read
FULL = 0.95
PATIENCE_S = 10.0
FAST_BFLOAT16 = ("amx_bf16", "avx512_bf16")  # what a CPU needs so that bfloat16 is also faster, not only smaller
_DOCTOR = "cachecraft-doctor"


@dataclass(frozen=True, slots=True)
class Finding:
    """One judgement: what is so, and what to change; "" where nothing need be."""

    about: str
    level: Level
    what: str
    change: str = ""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The model as it runs here.

    cpu_features   what matters of them: AVX2, AVX-512, AMX
    attention      what computes it: "triton", or "torch"
    tokens_per_s   of a prefill of `MEASURED_TOKENS`, without reuse
    kv_bytes       of a token's keys and values in memory
    """

    name: str
    fingerprint: str
    dtype: str
    device: str
    attention: str
    cpu_features: tuple[str, ...]
    threads: int
    cores: int
    tokens_per_s: float
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """The store folder.

    of_this_model    whether any chunk-cache is
    problems         what a check found; None where it was not asked for
    free_bytes       of the disk
    memory_bytes     that this machine has available now; None where the system does not say
    stored_bytes     of a token with this store's codec
    read_bytes_per_s, write_bytes_per_s  of the disk, past the system's cache; None where the folder cannot be written
    """

    stats: StoreStats
    max_variants: int
    of_this_model: bool
    read_only: bool
    problems: tuple[str, ...] | None
    free_bytes: int
    memory_bytes: int | None
    stored_bytes: float
    read_bytes_per_s: float | None
    write_bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class RemoteFacts:
    """The remote; `bytes_per_s` is None, and `problem` says why, where nothing came back from it."""

    url: str
    bytes_per_s: float | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """All that was found out.

    chunks    of a running engine, by outcome and reason, where its metrics were read
    captures  of the same, that were dropped, by reason
    """

    model: ModelFacts
    store: StoreFacts
    remote: RemoteFacts | None = None
    chunks: Mapping[tuple[str, str], int] = field(default_factory=dict)
    captures: Mapping[str, int] = field(default_factory=dict)


def examine(engine: Engine, *, remote: RemoteConfig | None = None, check: bool = True) -> Facts:
    """Look and measure; takes seconds, and with `check` as long as reading every stored byte.

    What is written for measuring is removed again. Raises StoreError when the catalog cannot be read.
    """
    model = _model_facts(engine.decoder)
    store = _store_facts(engine, check=check)
    there = None if remote is None else measure_remote(remote, engine.decoder.layout)
    counts, dropped = engine.tally.counts(), Counter(store.stats.captures)
    del dropped["stored"]
    return Facts(model, store, there, dict(counts.chunks), dict(dropped))


def _model_facts(decoder: Decoder) -> ModelFacts:
    device = decoder.device
    cpu = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    known = ("avx2", "avx512_f", *FAST_BFLOAT16)
    return ModelFacts(
        name=decoder.name,
        fingerprint=decoder.fingerprint,
        dtype=decoder.layout.dtype,
        device=str(device),
        attention="triton" if uses_triton(torch.empty(0, dtype=decoder.dtype, device=device)) else "torch",
        cpu_features=tuple(name for name in known if cpu.get(name)),
        threads=torch.get_num_threads(),
        cores=int(cpu.get("num_physical_cores") or os.cpu_count() or 1),
        tokens_per_s=_compute_speed(decoder),
        kv_bytes=decoder.layout.nbytes(1),
    )


def _compute_speed(decoder: Decoder) -> float:
    """Tokens per second of a prefill; the second of two, because the first one warms up."""
    tokens = min(MEASURED_TOKENS, decoder.context_length)
    ids = torch.randint(0, int(decoder.model.config.vocab_size), (tokens,)).tolist()
    for _ in range(2):
        started = time.perf_counter()
        out = prefill(decoder, PrefillJob(ids, Rows.of((0, tokens), new=range(tokens))))
        int(decoder.next_logits(out.hidden).argmax())  # a GPU has then finished
    return tokens / (time.perf_counter() - started)


def _store_facts(engine: Engine, *, check: bool) -> StoreFacts:
    store, layout = engine.store, engine.decoder.layout
    speed = None if store.read_only else measure_disk(store.root)
    report = store.check() if check else None
    return StoreFacts(
        stats=store.stats(ask_remote=False),
        max_variants=store.limits.max_variants,
        of_this_model=bool(store.rows(RowFilter(fingerprint=engine.decoder.fingerprint), limit=1)),
        read_only=store.read_only,
        problems=None if report is None else tuple(f"{one.kind}: {one.path}: {one.what}" for one in report.findings),
        free_bytes=shutil.disk_usage(store.root).free,
        memory_bytes=_available_memory(),
        stored_bytes=cache_bytes(layout, MEASURED_TOKENS, store.config.codec) / MEASURED_TOKENS,
        read_bytes_per_s=None if speed is None else speed[0],
        write_bytes_per_s=None if speed is None else speed[1],
    )


def _available_memory() -> int | None:
    try:
        pages: int = os.sysconf("SC_AVPHYS_PAGES")
        told = Path("/proc/meminfo").read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    found = [int(line.split()[1]) << 10 for line in told.splitlines() if line.startswith("MemAvailable:")]
    return found[0] if found else pages * os.sysconf("SC_PAGE_SIZE")


def measure_disk(folder: Path, nbytes: int = DISK_BYTES) -> tuple[float, float] | None:
    """Bytes per second of reading and of writing a file in this folder; None where it cannot be written."""
    block = os.urandom(1 << 20)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            started = time.perf_counter()
            for _ in range(nbytes >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            written = time.perf_counter() - started
            if hasattr(os, "posix_fadvise"):  # else the system's cache is measured
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            started = time.perf_counter()
            while file.read(1 << 20):
                pass
            return nbytes / (time.perf_counter() - started), nbytes / written
    except OSError:
        return None


def measure_remote(config: RemoteConfig, layout: KVLayout, tokens: int = MEASURED_TOKENS) -> RemoteFacts:
    """Send a chunk-cache of zeros, read it back, remove it."""
    shown = config.shown
    key = VariantKey(_DOCTOR, _DOCTOR, f"{_DOCTOR} {time.time_ns()}", ())
    dtype: torch.dtype = getattr(torch, layout.dtype)
    variant = Variant(
        key=key, variant_id=key.variant_id, tokens=tokens, tokens_digest=_DOCTOR, inter=(), intra=0.0, cci=1.0,
        exact_share=1.0, session=None, codec="raw", nbytes=layout.nbytes(tokens), reuse_frequency=0.0,
        created=time.time(),
    )  # fmt: skip
    with RemoteTier(_patient(config)) as tier:
        tier.put(variant, encode(variant, layout, torch.zeros(layout.shape(tokens), dtype=dtype)), TokenScores())
        sent = tier.flush(config.put_timeout_s)
        captures = tier.stats(ask=False).captures
        if not sent or not captures.get("sent"):
            why = ", ".join(captures) or "nothing was sent in time"
            return RemoteFacts(shown, None, f"a chunk-cache could not be sent: {why}")
        (there,) = tier.lookup(_DOCTOR, _DOCTOR, [key.chunk_id])[key.chunk_id] or (None,)
        if there is None:
            return RemoteFacts(shown, None, f"its look-up was {tier.last_outcome}")
        started = time.perf_counter()
        stream = tier.open(there)
        opened = open_source(stream, there) if isinstance(stream, RemoteStream) else stream
        try:
            if not isinstance(opened, StoredVariant):
                return RemoteFacts(shown, None, opened.reason)
            opened.allocate()
            opened.read_all()
            return RemoteFacts(shown, layout.nbytes(tokens) / (time.perf_counter() - started))
        except READ_ERRORS as error:
            return RemoteFacts(shown, None, f"it could not be read back: {type(error).__name__}")
        finally:
            if isinstance(opened, StoredVariant):
                opened.close()
            _remove(tier, there)


def _remove(tier: RemoteTier, variant: Variant) -> None:
    """Remove it, and wait until it is gone: closing the tier would give up what is under way."""
    until = time.monotonic() + PATIENCE_S
    tier.remove(variant)
    while tier.lookup(_DOCTOR, _DOCTOR, [variant.key.chunk_id])[variant.key.chunk_id] and time.monotonic() < until:
        time.sleep(0.01)


def _patient(config: RemoteConfig) -> RemoteConfig:
    """With time limits for somebody who waits for a number: a request would go on without the remote."""
    return replace(config, lookup_timeout_s=PATIENCE_S, read_timeout_s=PATIENCE_S, connect_timeout_s=PATIENCE_S)


# -- judging ----------------------------------------------------------------------------------------------------------


def findings(facts: Facts) -> list[Finding]:
    """What to say of these facts: "ok", "advice" for what could be better, "error" for what is broken."""
    return [
        *_of_model(facts.model),
        *_of_folder(facts.store),
        *_of_budgets(facts.store),
        *_of_loading(facts),
        *_of_remote(facts),
        *_of_misses(facts),
    ]


def _of_model(model: ModelFacts) -> Iterator[Finding]:
    speed = f"{model.name}: {model.tokens_per_s:.0f} tokens/s in {model.dtype} on {model.device}, {model.attention}"
    yield Finding("model", "ok", f"{speed}, {model.threads} threads")
    if model.dtype == "float32" and any(name in model.cpu_features for name in FAST_BFLOAT16):
        yield Finding(
            "dtype", "advice", "this CPU computes bfloat16, and the model runs in float32",
            "--dtype bfloat16: faster, and chunk-caches of half the size; what is stored in float32 is computed again",
        )  # fmt: skip
    if model.device == "cpu" and model.threads != model.cores:
        yield Finding(
            "threads", "advice", f"{model.threads} threads on {model.cores} cores", f"--threads {model.cores}"
        )


def _of_folder(store: StoreFacts) -> Iterator[Finding]:
    stats = store.stats
    yield Finding("store", "ok", f"{stats.variants} chunk-caches of {stats.chunks} chunks")
    if store.problems:
        some = "; ".join(store.problems[:3])
        yield Finding("check", "error", f"{len(store.problems)} findings: {some}", "cachecraft store check --repair")
    if store.read_only:
        yield Finding(
            "folder",
            "advice",
            "it cannot be written: nothing new is stored",
            "make it writable, or use another --store",
        )
    if stats.variants and not store.of_this_model:
        yield Finding(
            "other models", "advice", "all that is stored is of other models, dtypes or tokenizers",
            "cachecraft index DIR --prime with this model, or go back to the other one; `store evict` removes the rest",
        )  # fmt: skip


def _of_budgets(store: StoreFacts) -> Iterator[Finding]:
    stats = store.stats
    left = stats.disk_budget - stats.disk_bytes
    if stats.disk_bytes >= FULL * stats.disk_budget:
        yield Finding(
            "disk budget", "advice", f"{stats.disk_bytes} of {stats.disk_budget} bytes: chunk-caches leave for others",
            "cachecraft simulate says how much your traffic needs; then raise --disk-mb, or choose --codec int8",
        )  # fmt: skip
    elif left > store.free_bytes:
        yield Finding(
            "free disk", "advice", f"{left} bytes of the budget are left, and {store.free_bytes} of the disk",
            "lower --disk-mb, or make room: captures are dropped when the disk is full",
        )  # fmt: skip
    if stats.variants >= FULL * store.max_variants:
        yield Finding(
            "number of variants", "advice", f"{stats.variants} of {store.max_variants}: chunk-caches leave for others",
            "raise --max-variants",
        )  # fmt: skip
    to_come = stats.host_budget - stats.host_bytes
    if store.memory_bytes is not None and to_come > store.memory_bytes:
        yield Finding(
            "memory", "advice", f"{to_come} bytes of the memory budget are left, and {store.memory_bytes} of memory",
            "lower --memory-mb",
        )  # fmt: skip


def _of_loading(facts: Facts) -> Iterator[Finding]:
    rate = facts.store.read_bytes_per_s
    if rate is None:
        return
    loaded = rate / facts.store.stored_bytes
    what = f"{rate / 1e6:.0f} MB/s: {loaded:.0f} tokens/s, {_times(loaded, facts.model)}"
    if loaded >= facts.model.tokens_per_s:
        yield Finding("disk", "ok", what)
    else:
        yield Finding(
            "disk", "advice", what,
            "a smaller --codec (int8, entropy), more --memory-mb, or a faster disk; what is slower to load is computed",
        )  # fmt: skip


def _of_remote(facts: Facts) -> Iterator[Finding]:
    remote = facts.remote
    if remote is None:
        return
    if remote.bytes_per_s is None:
        yield Finding(
            "remote",
            "error",
            f"{remote.url}: {remote.problem}",
            "check the URL, the server and the key (docs/remote.md)",
        )
        return
    loaded = remote.bytes_per_s / facts.model.kv_bytes
    what = f"{remote.url}: {remote.bytes_per_s / 1e6:.0f} MB/s: {loaded:.0f} tokens/s, {_times(loaded, facts.model)}"
    if loaded >= facts.model.tokens_per_s:
        yield Finding("remote", "ok", what)
    else:
        yield Finding("remote", "advice", what, "a smaller --codec, a server nearby, or no remote: what it has is slow")


def _times(loaded: float, model: ModelFacts) -> str:
    return f"{loaded / model.tokens_per_s:.1f} times as fast as computing"


_BY_REASON = {
    "not_stored": ("cachecraft index DIR --prime; or a larger --disk-mb where chunk-caches leave for others", 0.5),
    "not_loaded": ("cachecraft store check; see load_failures in the metrics", 0.05),
    "refused": ("see the log for what is refused, and cachecraft store check", 0.05),
    "other_tokens": ("chunks are cut or formatted differently than when they were stored: prime again", 0.05),
    "prompt_full": ("fewer chunks (--top-k), or shorter ones", 0.05),
    "too_long": ("index again with this model, so that chunks fit its context", 0.05),
    "computed_faster": ("more --memory-mb, a smaller --codec or a faster disk", 0.5),
    "reuse_off": ("requests come with reuse switched off", 0.5),
}


def _of_misses(facts: Facts) -> Iterator[Finding]:
    total = sum(facts.chunks.values())
    reasons: Counter[str] = Counter()
    for (_, reason), count in facts.chunks.items():
        reasons[reason] += count
    reused = sum(count for (outcome, _), count in facts.chunks.items() if outcome in ("exact", "reused"))
    if total:
        yield Finding("reuse", "ok", f"{reused} of {total} chunks were reused")
    for reason, (change, share) in _BY_REASON.items():
        if total and reasons[reason] > share * total:
            yield Finding(f"reason {reason}", "advice", f"{reasons[reason] / total:.0%} of the chunks", change)
    for reason, count in facts.captures.items():
        larger = reason in ("queue_full", "write_back_full")
        change = "a larger queue_bytes (settings)" if larger else "see the log for what went wrong"
        yield Finding(f"captures dropped: {reason}", "advice", f"{count} so far", change)
