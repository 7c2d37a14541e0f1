"""Bytes that a request reads before its first token: nothing of what it recomputes in full."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.planning.reasons import Reason
from cachecraft_rag.serving.generation import Generation
from cachecraft_rag.store.catalog_records import RowFilter
from cachecraft_rag.store.layout import StoredVariant
from cachecraft_rag.types.documents import Chunk
from tests.engines import SHORT

MakeEngine = Callable[..., Engine]

NAMES = ("kettle", "toaster", "fridge", "oven", "lamp")
CHUNKS = [
    Chunk(f"The {name} has its own page. " + f"Clean the {name} with vinegar and water. " * 5)
    for name in NAMES
]
MOVED = [CHUNKS[place] for place in (3, 0, 4, 1, 2)]
QUESTION = "How do I descale the kettle?"
# takes what is stored, also where computing would be faster, and leaves no choice to clocks
LAYERWISE = ReuseConfig(
    nearest_share=0.35, capture=False, method=ReuseMethod(alpha=0.3, loading="layerwise")
)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Stored bytes that are read from now on, without headers, by chunk."""
    counted: Counter[str] = Counter()
    own = StoredVariant.read

    def reading(self: StoredVariant, layer: int, start: int, stop: int, **options: Any) -> None:
        layers = len(self.kv) if self.kv is not None else 1
        counted[self.variant.key.chunk_id] += round(self.token_bytes * (stop - start) / layers)
        own(self, layer, start, stop, **options)

    monkeypatch.setattr(StoredVariant, "read", reading)
    return counted


def ask(engine: Engine, chunks: list[Chunk], config: ReuseConfig) -> Generation:
    answer = engine.stream(QUESTION, chunks, config=config, sampling=SHORT)
    for _ in answer:
        pass
    return answer


@pytest.fixture
def make_cold(make_engine: MakeEngine) -> Callable[..., Engine]:
    """Makes engines over stored passages, none of which is in memory."""
    warm = make_engine(best_last=False)
    ask(warm, CHUNKS, replace(LAYERWISE, capture=True))
    assert warm.settle(60)

    def make(**settings: Any) -> Engine:
        return make_engine(best_last=False, **settings)

    return make


def stored_bytes(engine: Engine) -> dict[str, int]:
    """Bytes of each chunk-cache in memory, which the codec `raw` stores as they are."""
    return {
        row.variant.key.chunk_id: engine.decoder.layout.nbytes(row.variant.tokens)
        for row in engine.store.rows(RowFilter())
    }


@pytest.mark.parametrize("selector", ["question", "cache_craft"])
def test_a_passage_that_is_recomputed_in_full_is_not_read(
    make_cold: Callable[..., Engine], read: Counter[str], selector: str
) -> None:
    engine = make_cold()
    everything = stored_bytes(engine)
    stats = ask(engine, MOVED, LAYERWISE.with_method(selector=selector)).stats
    last = stats.chunks[-1]
    assert (last.reason_code, last.recomputed) == (Reason.NEAREST, last.tokens)
    assert last.tier is None
    assert {chunk.tier for chunk in stats.chunks[:-1]} == {"disk"}
    expected = {name: nbytes for name, nbytes in everything.items() if name != last.chunk_id}
    assert read == expected
    assert read.total() <= 0.85 * sum(everything.values())


def test_with_everything_recomputed_only_what_is_exact_is_read(
    make_cold: Callable[..., Engine], read: Counter[str]
) -> None:
    engine = make_cold()
    everything = stored_bytes(engine)
    config = replace(LAYERWISE, recompute_ratio=1.0)
    answer = ask(engine, MOVED, config)
    assert answer.stats.exact
    assert {chunk.outcome for chunk in answer.stats.chunks} == {"reused"}
    system = engine.prompts.system.segment_id
    assert read == {system: everything[system]}
    assert answer.text == ask(engine, MOVED, replace(config, reuse=False)).text


def test_a_quality_target_that_recomputes_everything_reads_only_what_is_exact(
    make_cold: Callable[..., Engine], read: Counter[str]
) -> None:
    engine = make_cold(
        config=LAYERWISE.with_method(alpha=None), audit="idle", quality_target=0.98, min_ratio=1.0
    )
    answer = engine.stream(QUESTION, MOVED, sampling=SHORT)
    for _ in answer:
        pass
    assert answer.stats.quality.startswith("r = 1")
    assert answer.stats.exact
    assert read.keys() == {engine.prompts.system.segment_id}


def test_memory_does_not_keep_what_was_not_read_as_if_it_were_whole(
    make_cold: Callable[..., Engine], read: Counter[str]
) -> None:
    engine = make_cold()
    last = MOVED[-1].chunk_id
    ask(engine, MOVED, LAYERWISE)
    read.clear()
    again = ask(engine, CHUNKS, LAYERWISE)  # all of them exact, the same one in the middle
    assert {chunk.outcome for chunk in again.stats.chunks} == {"exact"}
    tiers = {chunk.chunk_id: chunk.tier for chunk in again.stats.chunks}
    assert tiers == {
        chunk.chunk_id: "disk" if chunk.chunk_id == last else "host" for chunk in CHUNKS
    }
    assert read == {last: stored_bytes(engine)[last]}
    assert again.text == ask(engine, CHUNKS, replace(LAYERWISE, reuse=False)).text


def test_memory_does_not_keep_what_was_read_in_part_as_if_it_were_whole(
    make_cold: Callable[..., Engine], read: Counter[str]
) -> None:
    engine = make_cold()
    everything = stored_bytes(engine)
    config = replace(
        LAYERWISE.with_method(selector="leading", drift=0.0),
        recompute_ratio=0.8,
        nearest_share=0.0,
    )
    ask(engine, MOVED, config)
    for chunk in MOVED:
        assert 0 < read[chunk.chunk_id] < everything[chunk.chunk_id]
    read.clear()
    again = ask(engine, CHUNKS, LAYERWISE)
    assert {chunk.tier for chunk in again.stats.chunks} == {"disk"}
    assert again.text == ask(engine, CHUNKS, replace(LAYERWISE, reuse=False)).text


def test_the_same_is_recomputed_from_memory_and_from_the_disk(
    make_cold: Callable[..., Engine],
) -> None:
    engine = make_cold()
    cold = ask(engine, MOVED, LAYERWISE)
    ask(engine, CHUNKS, LAYERWISE)  # all of them are in memory from now on
    warm = ask(engine, MOVED, LAYERWISE)
    assert {chunk.tier for chunk in warm.stats.chunks[:-1]} == {"host"}
    assert [chunk.recomputed for chunk in warm.stats.chunks] == [
        chunk.recomputed for chunk in cold.stats.chunks
    ]
    assert warm.text == cold.text
