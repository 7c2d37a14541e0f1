"""Answers that claim exactness (`RequestStats.exact`) are those of transformers.

Random requests over each codec, with sessions, removals, threads, budgets, loadings, and a disk on which single layers
come late or not at all.

TESTS_CLAIMS  number of claims of each codec; 14 by default, 700 take ten minutes
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.observability.stats import RequestStats
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.prompt.builder import PromptBuilder, Turn
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.catalog_records import RowFilter
from cachecraft_rag.store.codecs import CODECS
from cachecraft_rag.store.layout import StoredVariant
from cachecraft_rag.types.documents import Chunk

CLAIMS = int(os.environ.get("TESTS_CLAIMS", "14"))  # of each codec
CHUNKS = [
    Chunk(f"House {n}: the kettle on floor {3 * n} boils after {7 * n} minutes.") for n in range(8)
]
TOKENS = 4
PLAIN = ReuseConfig(method=ReuseMethod(probe_min_rows=16))
CONFIGS = [
    PLAIN,
    replace(PLAIN, recompute_ratio=1.0),
    replace(PLAIN.with_method(loading="layerwise"), recompute_ratio=1.0),
    replace(PLAIN.with_method(loading="whole"), recompute_ratio=1.0),
    replace(
        PLAIN.with_method(selector="cache_craft", budget_scope="chunk", drift=0.0),
        recompute_ratio=1.0,
    ),
    replace(
        PLAIN.with_method(early_termination="published", early_termination_window=1),
        recompute_ratio=1.0,
    ),
    replace(PLAIN, reuse=False),
    PLAIN.with_method(scope="prefix"),
    PLAIN.with_method(alpha=1.0, loading="layerwise"),
]


@dataclass(frozen=True)
class Asked:
    """One question, and how it is asked; with `scored`, logits are compared too."""

    question: str
    chunks: Sequence[Chunk]
    config: ReuseConfig
    session: str | None = None
    history: Sequence[Turn] = ()
    scored: bool = False


@dataclass(frozen=True)
class Answered:
    """Result of one answer."""

    text: str
    stats: RequestStats
    logits: Tensor | None = None


def drawn(dice: random.Random) -> Asked:
    """Few orders of few chunks, so that many follow the prefix that they were captured after."""
    first, count = dice.choice((0, 0, 1, 4)), dice.randint(1, 4)
    chunks = CHUNKS[first : first + count]
    if dice.random() < 0.4:
        chunks = dice.sample(chunks, len(chunks))
    question, config = f"Which house is number {dice.randint(0, 3)}?", dice.choice(CONFIGS)
    if dice.random() < 0.5:
        return Asked(question, chunks, config, scored=True)
    history: list[Turn] = (
        [("user", "Where is Ada?"), ("assistant", "Upstairs.")] if dice.random() < 0.5 else []
    )
    return Asked(question, chunks, config, dice.choice((None, "ada", "bob")), history)


def answered(engine: Engine, asked: Asked) -> Answered:
    if asked.scored:
        found = engine.score_answer(
            asked.question, asked.chunks, max_new_tokens=TOKENS, config=asked.config
        )
        return Answered(found.text, found.stats, found.logits)
    answer = engine.stream(
        asked.question,
        asked.chunks,
        history=asked.history,
        session=asked.session,
        sampling=SamplingParams(max_new_tokens=TOKENS),
        config=asked.config,
    )
    return Answered("".join(answer), answer.stats)


def own_answer(decoder: Decoder, ids: Sequence[int]) -> tuple[str, Tensor]:
    """The greedy answer of the unmodified model and its logits, prefilled again for each token."""
    tokens: list[int] = []
    logits: list[Tensor] = []
    while len(tokens) < TOKENS and not (tokens and tokens[-1] in decoder.end_tokens):
        logits.append(decoder.own_logits([*ids, *tokens])[0])
        tokens.append(int(logits[-1].argmax()))
    return decoder.tokenizer.decode(tokens, skip_special_tokens=True), torch.stack(logits)


def world(
    decoder: Decoder, folder: Path, codec: str, dice: random.Random
) -> Iterator[tuple[Asked, Answered]]:
    """Thirty requests to one engine and its store, two at a time, with removals between and beside them."""
    limits = {
        "host_bytes": dice.choice((0, 0, 300_000, 1 << 30)),
        "disk_bytes": dice.choice((400_000, 1 << 30)),
    }
    with (
        ChunkCacheStore.open(folder, codec=codec, **limits) as store,
        Engine(decoder, store, best_last=False) as engine,
        ThreadPoolExecutor(3) as threads,
    ):
        for _ in range(15):
            pair = [drawn(dice), drawn(dice)]
            running = [threads.submit(answered, engine, asked) for asked in pair]
            if dice.random() < 0.3:
                gone = dice.choice(
                    [*(chunk.chunk_id for chunk in CHUNKS), engine.prompts.system.segment_id]
                )
                threads.submit(store.evict, RowFilter(chunk_ids=(gone,))).result()
            found = [one.result() for one in running]
            if dice.random() < 0.7:
                assert engine.settle(120)
            yield from zip(pair, found, strict=True)


@pytest.fixture
def unsteady_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """One read in ten of a layer after the first is late, and half of these fail."""
    read, dice = StoredVariant.read, random.Random(0)

    def unsteady(self: StoredVariant, layer: int, *args: Any, **more: Any) -> Any:
        if layer and dice.random() < 0.1:
            time.sleep(0.03)
            if dice.random() < 0.5:
                raise OSError("the disk fails")
        return read(self, layer, *args, **more)

    monkeypatch.setattr(StoredVariant, "read", unsteady)


@pytest.mark.usefixtures("unsteady_disk")
@pytest.mark.parametrize("codec", sorted(CODECS))
def test_an_answer_that_claims_exactness_is_that_of_transformers(
    codec: str, decoder_of_letters: Callable[..., Decoder], tmp_path: Path
) -> None:
    decoder = decoder_of_letters(gain=3.0)
    claims: list[tuple[Asked, Answered]] = []
    requests = exact_with_reuse = 0
    while len(claims) < CLAIMS:
        seed = requests
        for asked, answer in world(decoder, tmp_path / str(seed), codec, random.Random(seed)):
            requests += 1
            if answer.stats.exact:
                claims.append((asked, answer))
                exact_with_reuse += answer.stats.tokens_reused > 0
    assert exact_with_reuse
    prompts = PromptBuilder(decoder.tokenizer, context_length=2048, best_last=False)
    known: dict[tuple[int, ...], tuple[str, Tensor]] = {}
    for asked, answer in claims[:CLAIMS]:
        ids = tuple(prompts.build(asked.question, asked.chunks, history=asked.history).token_ids)
        text, logits = known[ids] = known.get(ids) or own_answer(decoder, ids)
        assert answer.text == text, asked
        if answer.logits is not None:
            assert (answer.logits - logits).abs().max() <= 1e-3, (asked, answer.stats)
