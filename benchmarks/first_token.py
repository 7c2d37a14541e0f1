"""Time to the first token: reuse against the model's own prefill, in one run, in the dtype of the fastest own prefill.

All chunks of the prompt were captured after *other* neighbours, so each of them is moved and partly recomputed. The
sides run alternately and are compared by medians, because the speed of a machine drifts.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, Self

import torch

from cachecraft_rag.compute.timing import Part, PartTimer, untimed
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.kernels.cpu.library import description
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.model.demo_model import handbook_folder
from cachecraft_rag.observability.stats import RequestStats
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.prompt.builder import PromptBuilder
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.config import StoreConfig, StoreTuning
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.types.progress import Progress
from cachecraft_rag.types.prompts import Prompt

QUESTION = "Which of these parts wear out, and how often should each be replaced?"
_DECODED = 25  # tokens of the answer that a decode step is timed on
_FULL = ReuseConfig(reuse=False, capture=False)
_HOST_BYTES = 16 << 30  # memory for the longest prompt of a model of 8 billion parameters
_DEVICE_BYTES = 16 << 30
_AROUND = 54  # tokens of a prompt that are in no chunk: the instruction, the question, the template


@dataclass(frozen=True, slots=True)
class Shape:
    """The chunks of a prompt: how many, and how long each is in tokens."""

    chunks: int = 5
    chunk_tokens: int = 400

    @classmethod
    def of_prompt(cls, tokens: int, *, longest: int = 400) -> Self:
        """Chunks of at most `longest` tokens, two at least, that make a prompt of about `tokens` tokens.

        >>> Shape.of_prompt(2054), Shape.of_prompt(1000)
        (Shape(chunks=5, chunk_tokens=400), Shape(chunks=3, chunk_tokens=315))
        """
        room = max(tokens - _AROUND, 2)
        chunks = max(2, -(-room // longest))
        return cls(chunks, room // chunks)


class Peer(Protocol):
    """Another engine with a decoder's weights."""

    def answer(self, ids: Sequence[int], tokens: int) -> tuple[float, float]:
        """Seconds to the first and to the last of `tokens` tokens after a prompt; no prefix is reused."""


@dataclass(frozen=True)
class TtftReport:
    """Medians over the pairs, in seconds, and ratios to the model's own prefill (transformers' sdpa, logits of the last
    token only).

    ratio_host, ratio_disk   reuse with the chunk-caches in memory, and on disk (page cache dropped if possible)
    device_s, ratio_device   the same with the chunk-caches on the GPU; None for a model on the CPU
    ratio_early_termination  as ratio_host, with early termination
    ratio_all_recomputed     this package's engine without reuse
    kernels                  instructions of the CPU kernels in use (`kernels/cpu`), or torch
    decode_ms                of one token of an answer after a reused prompt; None where answers end with the first
    to_64_tokens_s           host_s and 63 of these
    peers                    seconds of the whole prefill by each other engine with the same weights;
                             peers_decode_ms and peers_to_64_tokens_s as above
    token_ratio              rows computed / prompt tokens: the time ratio if time were proportional to rows
    parts                    with profile: seconds of each part (`timing.Timer`) of the fastest request with reuse from
                             memory, from question to answer
    parts_all_recomputed     the same of the fastest that computes everything
    """

    ratio_host: float
    ratio_disk: float
    ratio_early_termination: float
    ratio_all_recomputed: float
    token_ratio: float
    own_prefill_s: float
    host_s: float
    disk_s: float
    early_termination_s: float
    all_recomputed_s: float
    pairs: int
    prompt_tokens: int
    chunks: int
    recompute_ratio: float
    nearest_share: float
    model: str
    dtype: str
    threads: int
    kernels: str
    device_s: float | None = None
    ratio_device: float | None = None
    decode_ms: float | None = None
    to_64_tokens_s: float | None = None
    peers: Mapping[str, float] = field(default_factory=dict)
    peers_decode_ms: Mapping[str, float] = field(default_factory=dict)
    peers_to_64_tokens_s: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[Part, float] | None = None
    parts_all_recomputed: Mapping[Part, float] | None = None


def run(
    model: str | Decoder,
    shapes: Sequence[Shape],
    *,
    dtype: str = "auto",
    ratio: float = 0.15,
    nearest_share: float = ReuseConfig().nearest_share,
    pairs: int = 7,
    profile: bool = False,
    peers: Mapping[str, Callable[[Decoder], Peer]] = MappingProxyType({}),
    progress: Callable[[Progress], None] = lambda _: None,
) -> list[TtftReport]:
    """Measure prompts of each shape, with a model by its name or with a loaded one, whose dtype stays.

    `dtype="auto"` first finds the dtype in which the model's own prefill of the first one is fastest on this machine.
    With `profile`, as many requests again are timed part by part, apart from those that are compared. `peers` make
    other engines, by name, that prefill the same prompts in turn with the other sides.

    Raises:
        ConfigError: fewer than two chunks or one pair, or more tokens than the model's context or the text has.
    """
    if any(shape.chunks < 2 for shape in shapes) or pairs < 1:
        raise ConfigError(
            "the benchmark needs at least 2 chunks (to change their order) and 1 pair"
        )
    total = pairs * len(shapes)
    first = shapes[0]
    if isinstance(model, Decoder):
        decoder = model
    else:
        decoder = _fastest(
            model,
            dtype,
            first.chunks * first.chunk_tokens,
            lambda name: progress(Progress(0, total, f"prefill in {name}")),
        )
    config = ReuseConfig(recompute_ratio=ratio, nearest_share=nearest_share, capture=False)
    others = {name: make(decoder) for name, make in peers.items()}
    reports: list[TtftReport] = []
    for shape in shapes:

        def begun(pair: int) -> None:
            progress(Progress(len(reports) * pairs + pair, total, ""))

        with (
            tempfile.TemporaryDirectory(prefix="cachecraft-bench-") as folder,
            closing(_Bench(decoder, Path(folder), shape, config=config, peers=others)) as bench,
        ):
            report = bench.report(pairs, begun)
            reports.append(bench.with_parts(report, pairs) if profile else report)
    return reports


class _Bench:
    """One prepared prompt and the ways to prefill it."""

    def __init__(
        self,
        decoder: Decoder,
        folder: Path,
        shape: Shape,
        *,
        config: ReuseConfig,
        peers: Mapping[str, Peer],
    ) -> None:
        self.decoder, self.folder, self.peers = decoder, folder, peers
        self.config = config
        self.chunks = chunks_of(decoder, count=shape.chunks, tokens=shape.chunk_tokens)
        prompts = PromptBuilder(
            decoder.tokenizer, context_length=decoder.context_length, best_last=False
        )
        prompt = prompts.build(QUESTION, self.chunks, reserve=1)
        if prompt.trimmed:
            raise ConfigError(
                f"{shape.chunks} chunks of {shape.chunk_tokens} tokens do not fit the model's context of "
                f"{decoder.context_length}; choose fewer (--chunks) or shorter ones (--chunk-tokens)"
            )
        self.ids = prompt.token_ids
        on_gpu = decoder.device.type == "cuda"
        # The device tier is off, so that chunk-caches stay where they are looked for.
        self.store_config = StoreConfig(
            host_bytes=_HOST_BYTES,
            device=str(decoder.device) if on_gpu else None,
            device_bytes=0,
            tuning=StoreTuning(queue_bytes=_HOST_BYTES),
        )
        self.store = self._open_store()
        self.engine = self._engine_of(self.store)
        moved = [
            self.engine.prompts.chunk_segment(chunk) for chunk in (*self.chunks[1:], self.chunks[0])
        ]
        # in another order, so no chunk keeps its prefix
        other = Prompt((self.engine.prompts.system, *moved))
        self.engine.capture(other, range(len(other.segments)), primed=True)
        self.store.flush()
        self.device_store = self._open_store(device_bytes=_DEVICE_BYTES) if on_gpu else None
        self.device_engine = self._engine_of(self.device_store) if self.device_store else None

    def _open_store(self, **settings: Any) -> ChunkCacheStore:
        return ChunkCacheStore.open(self.folder / "caches", self.store_config, **settings)

    def _engine_of(self, store: ChunkCacheStore) -> Engine:
        return Engine(self.decoder, store, config=self.config, best_last=False, new_variants="off")

    def report(self, pairs: int, begun: Callable[[int], None]) -> TtftReport:
        """Run all sides alternately and compare their medians; `begun` is called with the number of each pair."""
        early = self.config.with_method(early_termination="published")
        sides: dict[str, Callable[[], float]] = {
            "own_prefill": self._own,
            "host": lambda: self._ask(self.engine, self.config).ttft_s,
            "early_termination": lambda: self._ask(self.engine, early).ttft_s,
            "disk": self._from_disk,
            "all_recomputed": lambda: self._ask(self.engine, _FULL).ttft_s,
        }
        if (on_device := self.device_engine) is not None:
            sides["device"] = lambda: self._ask(on_device, self.config).ttft_s
            for _ in range(2):  # from the disk to the host, and from there to the device
                self._ask(on_device, self.config)
            held = self._ask(on_device, self.config)
            assert all(chunk.tier == "device" for chunk in held.chunks), (
                "the chunk-caches are not on the device"
            )
        sides |= {
            name: lambda other=other: other.answer(self.ids, 1)[0]
            for name, other in self.peers.items()
        }  # type: ignore[misc]
        stats = self._ask(self.engine, self.config)  # warms up and fills the memory tier
        assert all(chunk.outcome == "reused" for chunk in stats.chunks), "a chunk kept its place"
        for side in (self._own, *(sides[name] for name in self.peers)):
            side()
        times: dict[str, list[float]] = {name: [] for name in sides}
        for pair in range(pairs):
            begun(pair)
            for name, side in sides.items():
                times[name].append(side())
        medians = {name: statistics.median(values) for name, values in times.items()}
        others = {name: medians.pop(name) for name in self.peers}
        own = medians["own_prefill"]
        found: dict[str, Any] = {f"{name}_s": seconds for name, seconds in medians.items()}
        found |= {
            f"ratio_{name}": seconds / own
            for name, seconds in medians.items()
            if name != "own_prefill"
        }
        step, peer_steps = self._decode_steps(min(pairs, 3))
        stats = self._ask(self.engine, self.config)
        return TtftReport(
            **found,
            token_ratio=(stats.tokens_recomputed + stats.tokens_computed) / stats.tokens_prompt,
            pairs=pairs,
            prompt_tokens=stats.tokens_prompt,
            chunks=len(self.chunks),
            recompute_ratio=self.config.recompute_ratio or 0.0,
            nearest_share=self.config.nearest_share,
            model=self.decoder.name,
            dtype=self.decoder.layout.dtype,
            threads=torch.get_num_threads(),
            decode_ms=None if step is None else 1000 * step,
            to_64_tokens_s=None if step is None else medians["host"] + 63 * step,
            kernels=description().partition("_")[0],
            peers=others,
            peers_decode_ms={name: 1000 * seconds for name, seconds in peer_steps.items()},
            peers_to_64_tokens_s={
                name: others[name] + 63 * seconds for name, seconds in peer_steps.items()
            },
        )

    def with_parts(self, report: TtftReport, rounds: int) -> TtftReport:
        """The report, and where the time goes in the fastest of some requests of each side."""
        timed = [(self._timed(self.config), self._timed(_FULL)) for _ in range(rounds)]
        reused, full = (
            min(side, key=lambda timer: timer.total).seconds for side in zip(*timed, strict=True)
        )
        return replace(report, parts=reused, parts_all_recomputed=full)

    def _timed(self, config: ReuseConfig) -> PartTimer:
        """The parts of one request."""
        timer = self.engine.loop.timer = PartTimer()
        try:
            with timer("other"):
                self._ask(self.engine, config)
        finally:
            self.engine.loop.timer = untimed
        return timer

    def close(self) -> None:
        """Close the engines and the stores."""
        if self.device_engine is not None and self.device_store is not None:
            self.device_engine.close()
            self.device_store.close()
        self.engine.close()
        self.store.close()

    def _decode_steps(self, rounds: int) -> tuple[float | None, dict[str, float]]:
        """Seconds of one token after the first one: here (None where answers end with the first), by each peer."""
        own: list[float] = []
        others: dict[str, list[float]] = {name: [] for name in self.peers}
        for _ in range(rounds):
            stats = self._ask(self.engine, self.config, tokens=_DECODED)
            if (later_tokens := stats.tokens_generated - 1) > 0:
                own.append((stats.total_s - stats.ttft_s) / later_tokens)
            for name, other in self.peers.items():
                first, last = other.answer(self.ids, _DECODED)
                others[name].append((last - first) / (_DECODED - 1))
        return statistics.median(own) if own else None, {
            name: statistics.median(all_) for name, all_ in others.items()
        }

    def _ask(self, engine: Engine, config: ReuseConfig, *, tokens: int = 1) -> RequestStats:
        generation = engine.stream(
            QUESTION, self.chunks, config=config, sampling=SamplingParams(max_new_tokens=tokens)
        )
        for _ in generation:
            pass
        return generation.stats

    def _own(self) -> float:
        started = time.perf_counter()
        self.decoder.own_logits(self.ids).argmax().item()
        return time.perf_counter() - started

    def _from_disk(self) -> float:
        """TTFT with a freshly opened store and files that are not in the page cache."""
        drop_page_cache(self.folder)
        with self._open_store() as store, self._engine_of(store) as engine:
            stats = self._ask(engine, self.config)
        assert all(chunk.tier == "disk" for chunk in stats.chunks), (
            "the caches did not come from the disk"
        )
        # The catalog is not in the page cache either now, and the next side would wait for it.
        self._ask(self.engine, self.config)
        return stats.ttft_s


def _fastest(model: str, dtype: str, tokens: int, trying: Callable[[str], None]) -> Decoder:
    """The model in the given dtype; for "auto" in the one whose own prefill of `tokens` tokens is fastest."""
    if dtype != "auto":
        return Decoder.load(model, dtype=dtype)
    own_prefill: dict[str, tuple[float, Decoder]] = {}
    for name in ("bfloat16", "float32"):
        trying(name)
        decoder = Decoder.load(model, dtype=name)
        for _ in range(2):  # the first one warms up
            started = time.perf_counter()
            decoder.own_logits([token % 1000 + 10 for token in range(tokens)])
            own_prefill[name] = time.perf_counter() - started, decoder
    return min(own_prefill.values(), key=lambda one: one[0])[1]


def chunks_of(decoder: Decoder, *, count: int, tokens: int) -> Sequence[Chunk]:
    """`count` chunks of `tokens` tokens each, cut from the sample handbook. Raises ConfigError if it is too short."""
    text = "\n\n".join(
        path.read_text(encoding="utf-8") for path in sorted(handbook_folder().glob("*.md"))
    )
    ids = decoder.tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) < count * tokens:
        raise ConfigError(f"the sample text has {len(ids)} tokens; choose fewer or shorter chunks")
    step = len(ids) // count
    return [
        Chunk(decoder.tokenizer.decode(ids[i * step : i * step + tokens - 1])) for i in range(count)
    ]


def drop_page_cache(folder: Path) -> None:
    """Drop all files in a folder from the page cache; does nothing on systems that cannot (macOS, Windows)."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)
