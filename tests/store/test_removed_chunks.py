"""Chunks removed with their documents: no chunk-cache holds their text or was shaped by it, in any process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError, StoreError
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.serving.config import NewVariants
from cachecraft_rag.serving.generation import Generation
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore, RowFilter, StoreConfig
from cachecraft_rag.store.durable import Evicted
from cachecraft_rag.store.remote import RemoteConfig, RemoteTuning
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.types.variants import Variant
from tests.engines import until

PRICE = Chunk("The kettle costs 30 euros until the end of May, and it is sold only in Oslo. " * 2)
DESCALING = Chunk("Empty the kettle before you descale it with vinegar, then rinse it twice. " * 2)
TOASTER = Chunk("The toaster has a crumb tray; pull it out to the left and wash it by hand. " * 2)
GARDEN = Chunk("Water the garden in the evening, and cover the roses before the first frost. " * 2)
QUESTION = "How do I descale the kettle?"
SHORT = SamplingParams(max_new_tokens=4)
LONG = SamplingParams(max_new_tokens=80)
CONFIG = ReuseConfig(method=ReuseMethod(alpha=0.3, loading="layerwise"))
Open = Callable[..., Engine]


@pytest.fixture(scope="module")
def decoder(tiny_decoder: Callable[..., Decoder]) -> Decoder:
    return tiny_decoder("Llama")


@pytest.fixture
def opened(decoder: Decoder, tmp_path: Path) -> Iterator[Open]:
    """Opens an engine over a folder; two engines on one folder share it as two processes do."""
    with ExitStack() as stack:

        def open_engine(folder: str = "caches", *, store: Any = None, **settings: Any) -> Engine:
            config = store or StoreConfig()
            caches = stack.enter_context(ChunkCacheStore.open(tmp_path / folder, config))
            given = {"config": CONFIG, "new_variants": "off", "best_last": False} | settings
            return stack.enter_context(Engine(decoder, caches, **given))

        yield open_engine


def ask(engine: Engine, *chunks: Chunk, **how: Any) -> Generation:
    answer = engine.stream(QUESTION, chunks, sampling=SHORT, **how)
    for _ in answer:
        pass
    assert engine.settle(60)
    return answer


def shaped(engine: Engine, chunk: Chunk) -> list[Variant]:
    """Stored variants that hold the chunk or were captured after it."""
    return [
        row.variant
        for row in engine.store.rows(limit=1000)
        if row.variant.key.holds({chunk.chunk_id})
    ]


def stored_chunks(engine: Engine) -> set[str]:
    return {row.variant.key.chunk_id for row in engine.store.rows(limit=1000)}


def first_logits(engine: Engine, *chunks: Chunk, **config: Any) -> torch.Tensor:
    asked = replace(CONFIG, capture=False, **config)
    scored = engine.score_answer(QUESTION, chunks, max_new_tokens=2, config=asked)
    return scored.logits[0]


def reasons(answer: Generation) -> dict[str, str]:
    return {chunk.chunk_id: str(chunk.reason_code) for chunk in answer.stats.chunks}


def test_a_request_that_still_holds_a_removed_text_stores_nothing_of_it(opened: Open) -> None:
    engine = opened()
    ask(engine, PRICE, TOASTER)
    engine.store.remove_chunks([PRICE.chunk_id])

    answer = ask(engine, PRICE, DESCALING)

    assert answer.text
    assert shaped(engine, PRICE) == []
    assert reasons(answer)[PRICE.chunk_id] == "removed"
    assert engine.store.stats().captures["removed"] == 2  # itself, and the one after it


def test_a_removed_text_is_not_stored_after_reopening_or_by_another_process(opened: Open) -> None:
    other = opened()
    with opened() as engine:
        ask(engine, PRICE)
        engine.store.remove_chunks([PRICE.chunk_id])

    for later in (other, opened()):
        assert reasons(ask(later, PRICE, DESCALING))[PRICE.chunk_id] == "removed"
        without_look_up = ReuseConfig(reuse=False, capture=True)
        ask(later, PRICE, DESCALING, config=without_look_up)
        assert shaped(later, PRICE) == []


def test_a_text_that_is_added_again_is_stored_and_reused_again(opened: Open) -> None:
    engine = opened()
    engine.store.remove_chunks([PRICE.chunk_id, TOASTER.chunk_id])
    assert engine.store.readmit_chunks([PRICE.chunk_id]) == {TOASTER.chunk_id}
    ask(engine, PRICE)
    assert [chunk.outcome for chunk in ask(engine, PRICE).stats.chunks] == ["exact"]


def test_an_eviction_refuses_nothing(opened: Open) -> None:
    engine = opened()
    ask(engine, PRICE)
    engine.store.evict(RowFilter(chunk_ids=(PRICE.chunk_id,)))
    ask(engine, PRICE)
    assert shaped(engine, PRICE) != []


def test_nothing_that_a_removed_chunk_has_shaped_is_left(opened: Open) -> None:
    engine = opened()
    ask(engine, TOASTER)
    ask(engine, PRICE, DESCALING)
    count = len(shaped(engine, PRICE))
    assert count == 2

    gone = engine.store.remove_chunks([PRICE.chunk_id])

    assert gone.variants == count
    assert gone.nbytes > 0
    assert shaped(engine, PRICE) == []
    assert engine.store.check().findings == ()
    never = opened("never")
    ask(never, TOASTER)
    for chunks in permutations((DESCALING, TOASTER)):
        assert torch.equal(first_logits(engine, *chunks), first_logits(never, *chunks))
    full = first_logits(engine, DESCALING, reuse=False)
    assert torch.allclose(first_logits(engine, DESCALING), full, atol=1e-5)


def test_what_a_reused_chunk_cache_has_passed_on_of_a_removed_chunk_leaves_too(
    opened: Open,
) -> None:
    engine = opened()
    ask(engine, PRICE, DESCALING)
    # the toaster is captured after a chunk-cache that the price has shaped, in a prompt without the price
    ask(engine, DESCALING, TOASTER)
    ask(engine, TOASTER, GARDEN)  # and the garden after that of the toaster
    before = stored_chunks(engine)

    assert engine.store.remove_chunks([PRICE.chunk_id]).variants == 4

    chunks = {chunk.chunk_id for chunk in (PRICE, DESCALING, TOASTER, GARDEN)}
    assert stored_chunks(engine) == before - chunks


def test_what_was_not_shaped_by_a_removed_chunk_stays(opened: Open) -> None:
    engine = opened()
    ask(engine, DESCALING, TOASTER)
    ask(engine, TOASTER, GARDEN)  # inexact, but the price has no part in it
    ask(engine, PRICE)
    before = stored_chunks(engine)
    engine.store.remove_chunks([PRICE.chunk_id])
    assert stored_chunks(engine) == before - {PRICE.chunk_id}


def test_a_request_that_reused_what_was_then_removed_stores_nothing_shaped_by_it(
    opened: Open,
) -> None:
    engine = opened()
    ask(engine, PRICE, DESCALING)
    answer = engine.stream(QUESTION, [DESCALING, TOASTER], sampling=LONG)
    next(answer)  # planned and computed; it captures once it has ended
    opened().store.remove_chunks([PRICE.chunk_id])  # as another process does
    for _ in answer:
        pass
    assert engine.settle(60)
    assert TOASTER.chunk_id not in stored_chunks(engine)


def test_private_chunk_caches_that_a_removed_chunk_has_shaped_leave_too(opened: Open) -> None:
    engine = opened(private_system=True)
    ask(engine, PRICE, DESCALING, session="ada")
    assert any(variant.session == "ada" for variant in shaped(engine, PRICE))
    engine.store.remove_chunks([PRICE.chunk_id])
    assert shaped(engine, PRICE) == []


def test_a_removal_for_one_tenant_leaves_the_others(opened: Open) -> None:
    ada = opened(namespace="ada")
    bob = opened(namespace="bob")
    ask(ada, PRICE, DESCALING)
    ask(bob, PRICE, DESCALING)
    ada.store.remove_chunks([PRICE.chunk_id], namespace="ada")
    assert {variant.key.namespace for variant in shaped(ada, PRICE)} == {"bob"}
    assert reasons(ask(ada, PRICE))[PRICE.chunk_id] == "removed"
    assert [chunk.outcome for chunk in ask(bob, PRICE).stats.chunks] == ["exact"]
    assert bob.store.readmit_chunks((), namespace="bob") == set()


def test_no_new_variant_is_computed_after_a_removed_chunk(opened: Open) -> None:
    engine = opened(new_variants=NewVariants(share=1e9))
    ask(engine, DESCALING)
    ask(engine, TOASTER)
    engine.store.remove_chunks([PRICE.chunk_id])
    ask(engine, PRICE, DESCALING, TOASTER)  # fixes two chunks after the removed one
    assert engine.new_variants.stats.tokens == 0
    assert engine.new_variants.stats.dropped == {"removed": 1}
    assert shaped(engine, PRICE) == []


def test_a_remote_offers_nothing_that_a_removed_chunk_has_shaped(
    opened: Open, tmp_path: Path
) -> None:
    (tmp_path / "shared").mkdir()
    patient = RemoteTuning(lookup_timeout_s=5.0, connect_timeout_s=5.0, read_timeout_s=5.0)
    remote = StoreConfig(remote=RemoteConfig(f"file://{tmp_path}/shared", tuning=patient))
    sender = opened("sender", store=remote)
    ask(sender, PRICE, DESCALING)
    engine = opened("engine", store=remote)
    ids = [PRICE.chunk_id, DESCALING.chunk_id]
    scope = (engine.namespace, engine.decoder.fingerprint)
    assert all(engine.store.find(*scope, ids).variants.values())

    engine.store.remove_chunks(ids[:1])

    assert engine.store.find(*scope, ids).variants == {name: [] for name in ids}
    ask(engine, PRICE, DESCALING)
    assert shaped(engine, PRICE) == []
    # they leave the remote too, in the background: another engine does not find them either
    third = opened("third", store=remote).store
    until(lambda: third.find(*scope, ids).variants == {name: [] for name in ids})


def test_rows_that_an_interrupted_removal_has_left_are_not_served(opened: Open) -> None:
    engine = opened()
    ask(engine, PRICE, DESCALING)
    engine.store.evict(RowFilter(chunk_ids=(PRICE.chunk_id,)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(engine.store._durable), "_remove_shaped", interrupted)
        with pytest.raises(StoreError, match="power"):
            engine.store.remove_chunks([PRICE.chunk_id])
    assert len(shaped(engine, PRICE)) == 1
    scope = (engine.namespace, engine.decoder.fingerprint)
    found = engine.store.find(*scope, [DESCALING.chunk_id])
    assert found.variants == {DESCALING.chunk_id: []}
    assert engine.store.remove_chunks([PRICE.chunk_id]).variants == 1


def interrupted(*_: object) -> None:
    raise StoreError("the power went off")


def test_nothing_to_remove_is_no_error_and_a_wrong_id_is(opened: Open) -> None:
    store = opened().store
    assert store.remove_chunks([]) == Evicted(0, 0)
    assert store.remove_chunks(["unknown"]) == Evicted(0, 0)
    for wrong in ([5], ["a\0b"]):
        with pytest.raises(ConfigError, match="chunk_ids"):
            store.remove_chunks(wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="chunk_ids"):
            store.readmit_chunks(wrong)  # type: ignore[arg-type]
    assert store.readmit_chunks(()) == {"unknown"}


def test_an_id_that_is_not_in_a_list_removes_nothing(opened: Open) -> None:
    engine = opened()
    ask(engine, PRICE, DESCALING)
    held = engine.store.stats().variants
    for change in (
        engine.store.remove_chunks,
        engine.store.readmit_chunks,
        engine.store.sync_chunks,
    ):
        with pytest.raises(ConfigError, match="chunk_ids must be a list"):
            change(PRICE.chunk_id)
    assert engine.store.stats().variants == held
    assert engine.store.readmit_chunks(()) == set()
