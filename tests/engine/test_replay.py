"""A long stream of repeated questions with tiny budgets: reuse does not decay, nothing grows, nothing is mixed up.

TESTS_REPLAY_REQUESTS  so many requests instead of 200; 3,000 take ten minutes, on a busy machine more: then add
                       `-o faulthandler_timeout=0`
TESTS_REPLAY_REMOTE    the URL of an empty remote, unset: none
"""

from __future__ import annotations

import bisect
import gc
import itertools
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from cachecraft_rag.compute.decode import extend
from cachecraft_rag.compute.driver import prefill
from cachecraft_rag.compute.job import PrefillJob
from cachecraft_rag.compute.kv_buffer import KVBuffer, ResidentKV
from cachecraft_rag.compute.resolve import rows_of
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.serving.answering import Answering
from cachecraft_rag.serving.config import NewVariants
from cachecraft_rag.serving.request import Request, RequestProgress
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.serving.token_queue import TokenQueue
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.remote import RemoteConfig
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.types.variants import LoadedVariant

CHUNKS = [
    Chunk(f"Section {n}. The kettle of house {n} boils after {7 * n} minutes.") for n in range(20)
]
CONFIG = ReuseConfig(method=ReuseMethod(alpha=0.3, loading="layerwise"))
TOKENS = 4
TENTHS = 10
REQUESTS = int(os.environ.get("TESTS_REPLAY_REQUESTS", "200"))
REMOTE = os.environ.get("TESTS_REPLAY_REMOTE")


def questions() -> list[tuple[str, list[Chunk]]]:
    """Forty questions, each about three chunks that stand near one another."""
    dice = random.Random(1)
    found = []
    for number in range(40):
        first = dice.randrange(len(CHUNKS) - 4)
        found.append((f"Question {number}?", dice.sample(CHUNKS[first : first + 4], 3)))
    return found


def tenth(number: int, requests: int) -> list[tuple[str, list[Chunk]]]:
    """By Zipf's law the same questions in each tenth, in another order, so that tenths can be compared."""
    asked, dice = questions(), random.Random(2)
    weights = list(itertools.accumulate(1 / (n + 1) for n in range(len(asked))))
    drawn = [asked[bisect.bisect(weights, dice.random() * weights[-1])] for _ in range(requests)]
    random.Random(number).shuffle(drawn)
    return drawn


def greedy(decoder: Decoder, logits: torch.Tensor, buffer: Any, position: int) -> list[int]:
    tokens = [int(logits.argmax())]
    while len(tokens) < TOKENS and tokens[-1] not in decoder.end_tokens:
        logits = decoder.next_logits(extend(decoder, buffer, tokens[-1:], position))
        tokens.append(int(logits.argmax()))
        position += 1
    return tokens


class Watched(Answering):
    """Carries out the plan of every fiftieth answer once more, from the files and in a separate buffer."""

    answers = compared = 0

    def _decode(
        self,
        request: Request,
        progress: RequestProgress,
        logits: torch.Tensor,
        buffer: KVBuffer,
        queue: TokenQueue,
        **how: Any,
    ) -> Any:
        last = yield from super()._decode(request, progress, logits, buffer, queue, **how)
        self.answers += 1
        if self.answers % 50 == 0:
            self._compare(request, progress, logits)
        return last

    def _compare(self, request: Request, progress: RequestProgress, first: torch.Tensor) -> None:
        plan, bounds = progress.plan, request.prompt.bounds
        resident = []
        for index, planned in enumerate(plan):
            if planned.variant is not None:
                disk, variant = self.store._durable.disk, planned.variant
                loaded = disk.read(variant) if variant.home == "disk" else self.store.load(variant)
                assert isinstance(loaded, LoadedVariant)
                resident.append(ResidentKV(bounds[index], loaded.kv))
        job = PrefillJob(
            request.prompt.token_ids,
            rows_of(plan, bounds),
            resident=resident,
            capacity=bounds[-1] + TOKENS,
            reused=[index for index, planned in enumerate(plan) if planned.to_fix],
            drift=request.config.method.drift,
        )
        fresh = prefill(self.decoder, job)
        logits = self.decoder.next_logits(fresh.hidden)
        assert (logits - first).abs().max() <= 1e-3
        assert greedy(self.decoder, logits, fresh.buffer, bounds[-1]) == progress.tokens
        self.compared += 1


def tensors() -> int:
    gc.collect()
    return sum(type(thing) is torch.Tensor for thing in gc.get_objects())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_reuse_does_not_decay_and_nothing_grows(
    tiny_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    limits = {"disk_bytes": 2_400_000, "max_variants": 36, "host_bytes": 400_000}
    remote = None if REMOTE is None else RemoteConfig(REMOTE).with_tuning(lookup_timeout_s=5.0)
    reused: list[float] = []
    sizes: list[tuple[int, int, int]] = []
    resident: list[int] = []
    with (
        ChunkCacheStore.open(tmp_path / "caches", **limits, remote=remote) as store,
        Engine(
            tiny_decoder("Llama"),
            store,
            config=CONFIG,
            new_variants=NewVariants(share=2.0, waiting=16),
        ) as engine,
    ):
        engine._answering.__class__ = Watched
        watched = cast(Watched, engine._answering)
        for number in range(TENTHS):
            kept = total = 0
            for question, chunks in tenth(number, REQUESTS // TENTHS):
                answer = engine.stream(
                    question, chunks, sampling=SamplingParams(max_new_tokens=TOKENS)
                )
                for _ in answer:
                    pass
                assert engine.settle(300)
                kept += answer.stats.tokens_reused
                total += answer.stats.tokens_prompt
            reused.append(kept / total)
            del answer
            files = list(store.root.rglob("*.safetensors"))
            stats = store.stats()
            assert len(files) == stats.variants <= limits["max_variants"]
            assert sum(file.stat().st_size for file in files) <= limits["disk_bytes"]
            assert stats.host_bytes <= limits["host_bytes"]
            assert engine.new_variants.stats.waiting <= 16
            sizes.append((tensors(), len(os.listdir("/proc/self/fd")), threading.active_count()))
            resident.append(resident_bytes())
        made = engine.new_variants.stats
        assert watched.compared == REQUESTS // 50
    assert made.captured > 0
    assert "failed" not in made.dropped
    assert reused[-1] >= 0.98 * reused[2], reused
    for now, then in zip(sizes[-1], sizes[2], strict=True):
        # tensors in memory, which is full at both times; descriptors; threads
        assert now <= then + 10, sizes
    assert resident[-1] <= 1.05 * resident[2], resident
