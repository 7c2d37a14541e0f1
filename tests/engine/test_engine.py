"""The engine over a real store: what it reuses, what it never serves, and what no failure may spoil."""

from __future__ import annotations

import gc
import logging
import math
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from cachecraft_rag.compute.balance import load_split
from cachecraft_rag.compute.job import PrefillResult
from cachecraft_rag.compute.overlapped import OverlappedPrefill
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError, ContextLengthError, StoreError
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.observability.stats import RequestStats
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.planning.early_termination import EarlyTerminationRule
from cachecraft_rag.planning.reasons import Reason
from cachecraft_rag.prompt.builder import Turn
from cachecraft_rag.serving.generation import Generation
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.catalog_records import RowFilter
from cachecraft_rag.store.layout import StoredVariant
from cachecraft_rag.store.remote.tier import RemoteTier
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.types.store_reasons import CaptureDrop
from cachecraft_rag.types.variants import LoadedVariant

KETTLE = Chunk("Empty the kettle before you descale it with vinegar.")
TOASTER = Chunk("The toaster has a crumb tray; pull it out to the left.")
FRIDGE = Chunk("Set the fridge to four degrees.")
CHUNKS = [KETTLE, TOASTER, FRIDGE]
QUESTION = "How do I descale the kettle?"
SHORT = SamplingParams(max_new_tokens=12)
# Another α than the default, so that its calibration changes nothing here.
CONFIG = ReuseConfig(method=ReuseMethod(alpha=0.3))
# takes what is stored, also where computing is faster
LAYERWISE = ReuseConfig(method=ReuseMethod(alpha=0.3, loading="layerwise"))

MakeDecoder = Callable[..., Decoder]
MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def decoder(decoder_of_letters: MakeDecoder) -> Decoder:
    return decoder_of_letters()


@pytest.fixture
def make_engine(decoder: Decoder, store: ChunkCacheStore) -> Iterator[MakeEngine]:
    """Makes engines over one store that are closed in the end."""
    with ExitStack() as opened:
        given = {"decoder": decoder, "store": store, "config": CONFIG}
        yield lambda **settings: opened.enter_context(Engine(**(given | settings)))


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine()


def ask(
    engine: Engine, chunks: list[Chunk] = CHUNKS, question: str = QUESTION, **how: Any
) -> Generation:
    """A whole answer, its captures in the store."""
    answer = engine.stream(question, chunks, **({"sampling": SHORT} | how))
    for _ in answer:
        pass
    engine.write_back.wait_for(
        [segment.chunk_id for segment in chunks] + [engine.prompts.system.segment_id]
    )
    return answer


def test_what_is_on_its_way_to_the_store_is_removed_too(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, go_on, put, wait_for = (
        threading.Event(),
        threading.Event(),
        engine.store.put,
        engine.write_back.wait_for,
    )

    def late_put(capture: Any) -> Future[Any]:
        late: Future[Any] = Future()

        def store() -> None:
            assert go_on.wait(60)
            late.set_result(put(capture).result())

        threading.Thread(target=store, daemon=True).start()
        return late

    def seen(*given: Any, **options: Any) -> bool:
        waiting.set()
        return wait_for(*given, **options)

    monkeypatch.setattr(engine.store, "put", late_put)
    assert "".join(engine.stream(QUESTION, CHUNKS, sampling=SHORT))
    monkeypatch.setattr(engine.write_back, "wait_for", seen)
    removed = RowFilter(chunk_ids=tuple(chunk.chunk_id for chunk in CHUNKS))
    removing = threading.Thread(target=engine.store.evict, args=(removed,))
    removing.start()
    while removing.is_alive() and not waiting.is_set():
        removing.join(0.01)
    go_on.set()
    removing.join(60)
    assert engine.settle(60)
    assert engine.store.rows(removed) == []


def rows_of(engine: Engine, *chunks: Chunk) -> int:
    return len(engine.store.rows(RowFilter(chunk_ids=tuple(chunk.chunk_id for chunk in chunks))))


def test_a_prompt_that_is_too_short_to_gain_is_computed_and_captures_nothing(
    engine: Engine,
) -> None:
    ask(engine, [KETTLE])
    stored = rows_of(engine, *CHUNKS)
    tokens = ask(engine).stats.tokens_prompt
    captured = rows_of(engine, *CHUNKS)
    assert captured > stored
    engine.store.evict(RowFilter(chunk_ids=(FRIDGE.chunk_id,)))
    left = rows_of(engine, *CHUNKS)

    short = ask(engine, config=replace(CONFIG, min_prompt_tokens=tokens + 1)).stats
    assert {(chunk.outcome, chunk.reason_code) for chunk in short.chunks} == {
        ("computed", "short_prompt")
    }
    assert rows_of(engine, *CHUNKS) == left
    full = ask(engine, config=ReuseConfig.full_prefill())
    assert {chunk.reason_code for chunk in full.stats.chunks} == {"reuse_off"}

    engine.min_prompt_tokens = tokens + 1  # as a server on a GPU measures it
    assert ask(engine).stats.tokens_reused == 0
    long_enough = ask(engine, config=replace(CONFIG, min_prompt_tokens=tokens)).stats
    assert long_enough.tokens_reused > 0
    assert rows_of(engine, *CHUNKS) > left  # the removed chunk was captured again


def test_what_is_removed_under_an_answer_is_not_captured_by_it(engine: Engine) -> None:
    answer = engine.stream(QUESTION, CHUNKS, sampling=SHORT)
    next(answer)  # computed, and its captures wait for the end of the answer
    engine.store.evict(RowFilter(chunk_ids=(KETTLE.chunk_id, FRIDGE.chunk_id)))
    assert "".join(answer)
    assert engine.settle(60)
    # the toaster's page was captured after one of them, which has shaped it
    assert rows_of(engine, *CHUNKS) == 0
    assert engine.store.stats().captures[CaptureDrop.REMOVED] == 3
    ask(engine)  # a request from then on may capture them
    assert engine.settle(60)
    assert [rows_of(engine, chunk) for chunk in CHUNKS] == [1, 1, 1]


def test_what_is_removed_while_a_request_has_not_begun_is_not_captured_by_it(
    engine: Engine,
) -> None:
    # the model runs when the first piece is asked for
    answer = engine.stream(QUESTION, CHUNKS, sampling=SHORT)
    engine.store.evict(RowFilter(chunk_ids=(KETTLE.chunk_id,)))
    assert "".join(answer)
    assert engine.settle(60)
    assert (rows_of(engine, KETTLE), rows_of(engine, TOASTER, FRIDGE)) == (0, 2)


def test_what_is_removed_while_it_is_primed_is_not_captured(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = engine.loop.run

    def removed_first(*given: Any) -> Any:
        engine.store.evict(RowFilter(chunk_ids=(TOASTER.chunk_id,)))
        return run(*given)

    monkeypatch.setattr(engine.loop, "run", removed_first)
    engine.primer().prime(CHUNKS)
    assert engine.settle(60)
    # What was captured after the removed one is not kept either.
    prefixes = [row.variant.key.origin_prefix for row in engine.store.rows()]
    assert not any(TOASTER.chunk_id in prefix for prefix in prefixes)
    assert (rows_of(engine, TOASTER), rows_of(engine, KETTLE, FRIDGE)) == (0, 1)


def outcomes(answer: Generation) -> dict[str, str]:
    """Chunk id → what happened to it."""
    return {chunk.chunk_id: chunk.outcome for chunk in answer.stats.chunks}


def all_of(outcome: str, chunks: list[Chunk] = CHUNKS) -> dict[str, str]:
    return {chunk.chunk_id: outcome for chunk in chunks}


def files(store: ChunkCacheStore) -> list[Path]:
    return sorted(store.root.rglob("*.safetensors"))


def assert_adds_up(stats: RequestStats) -> None:
    """Every token of the prompt is counted once, and times are in order."""
    assert (
        stats.tokens_reused + stats.tokens_recomputed + stats.tokens_computed == stats.tokens_prompt
    )
    assert min(stats.tokens_reused, stats.tokens_recomputed, stats.tokens_computed) >= 0
    assert sum(chunk.recomputed for chunk in stats.chunks) == stats.tokens_recomputed
    assert stats.ttft_s == pytest.approx(
        stats.queue_s + stats.plan_s + stats.load_s + stats.prefill_s
    )
    assert 0 < stats.ttft_s <= stats.total_s
    assert 0 < stats.recompute_share <= 1


def test_an_answer_that_is_kept_keeps_no_tensors(engine: Engine, decoder: Decoder) -> None:
    ask(engine)
    engine.store.flush()
    with (
        ChunkCacheStore.open(engine.store.root, host_bytes=0) as cold,
        Engine(decoder, cold, config=replace(LAYERWISE, capture=False)) as other,
    ):
        kept = [ask(other) for _ in range(3)]
        assert {chunk.tier for answer in kept for chunk in answer.stats.chunks} == {"disk"}
        gc.collect()
        assert not [
            thing for thing in gc.get_objects() if type(thing) in (StoredVariant, PrefillResult)
        ]
        assert all(answer.stats.recompute_share > 0 for answer in kept)


def test_a_text_in_place_of_a_chunk_is_refused(engine: Engine) -> None:
    with pytest.raises(ConfigError, match=r"write Chunk\(text\)"):
        engine.stream(QUESTION, ["a text"])  # type: ignore[list-item]


# -- reuse ------------------------------------------------------------------------------------------------------------


def test_the_second_identical_question_is_exact_and_gets_the_same_answer(engine: Engine) -> None:
    first, second = ask(engine), ask(engine)
    assert outcomes(first) == all_of("computed")
    assert outcomes(second) == all_of("exact")
    assert first.text == second.text != ""
    assert (first.stats.tokens_reused, first.stats.recompute_share) == (0, 1.0)
    assert second.stats.tokens_computed < 0.4 * second.stats.tokens_prompt
    assert second.stats.tokens_recomputed == 0
    assert {chunk.tier for chunk in second.stats.chunks} == {"host"}
    for answer in (first, second):
        assert_adds_up(answer.stats)


def test_another_question_over_the_same_chunks_is_exact_too(engine: Engine) -> None:
    ask(engine)
    history = [("user", "Hello?"), ("assistant", "Hello.")]
    other = ask(engine, question="And the toaster?", history=history)
    assert outcomes(other) == all_of("exact")
    full = ask(
        engine,
        question="And the toaster?",
        history=history,
        config=ReuseConfig(reuse=False, capture=False),
    )
    assert other.text == full.text
    assert outcomes(full) == all_of("computed")


def test_moved_chunks_are_reused_and_partly_recomputed(engine: Engine) -> None:
    ask(engine)
    moved = ask(
        engine,
        [FRIDGE, KETTLE],
        config=ReuseConfig(
            method=ReuseMethod(alpha=0.25, budget_scope="chunk", selector="cache_craft")
        ),
    )
    assert set(outcomes(moved).values()) == {"reused"}
    assert 0 < moved.stats.tokens_recomputed < 0.3 * moved.stats.tokens_prompt
    for chunk in moved.stats.chunks:
        assert chunk.cfo is not None
        assert chunk.recomputed >= chunk.cfo * chunk.tokens
        assert chunk.variant_id is not None
    assert_adds_up(moved.stats)
    assert moved.stats.recompute_share == pytest.approx(
        (moved.stats.tokens_recomputed + moved.stats.tokens_computed) / moved.stats.tokens_prompt
    )


def test_recomputing_every_moved_token_gives_the_full_answer(engine: Engine) -> None:
    ask(engine)
    moved = ask(
        engine,
        [FRIDGE, KETTLE],
        config=ReuseConfig(recompute_ratio=1.0, method=ReuseMethod(alpha=0.3)),
    )
    full = ask(engine, [FRIDGE, KETTLE], config=ReuseConfig(reuse=False, capture=False))
    assert moved.text == full.text


def test_a_new_chunk_among_reused_ones_is_computed_and_born_impure(
    engine: Engine, store: ChunkCacheStore
) -> None:
    ask(engine, [KETTLE, TOASTER])
    # laid out the other way round: the best one last
    mixed = ask(engine, [FRIDGE, TOASTER, KETTLE])
    assert outcomes(mixed) == {
        KETTLE.chunk_id: "reused",
        TOASTER.chunk_id: "reused",
        FRIDGE.chunk_id: "computed",
    }
    (captured,) = store.rows(RowFilter(chunk_ids=(FRIDGE.chunk_id,)))
    # the system segment was exact, the chunks were not
    assert 0 < captured.variant.exact_share < 0.7
    again = ask(engine, [FRIDGE, TOASTER, KETTLE])
    assert outcomes(again)[FRIDGE.chunk_id] == "reused"


def test_an_overhead_of_one_computes_and_bears_a_variant(
    engine: Engine, store: ChunkCacheStore
) -> None:
    ask(engine)
    costly = ask(engine, [FRIDGE, KETTLE], config=ReuseConfig(method=ReuseMethod(alpha=5.0)))
    assert set(outcomes(costly).values()) == {"computed"}
    assert all("CFO is 1" in chunk.reason for chunk in costly.stats.chunks)
    assert len(store.rows(RowFilter(chunk_ids=(KETTLE.chunk_id,)))) == 2
    assert outcomes(
        ask(engine, [FRIDGE, KETTLE], config=ReuseConfig(method=ReuseMethod(alpha=5.0)))
    ) == all_of("exact", [FRIDGE, KETTLE])


def test_reuse_counts_uses(engine: Engine, store: ChunkCacheStore) -> None:
    ask(engine)
    ask(engine)
    store.flush()
    rows = store.rows()
    assert len(rows) == 4
    assert all(row.variant.reuse_frequency == pytest.approx(row.variant.tokens) for row in rows)


def test_without_births_nothing_is_stored(engine: Engine, store: ChunkCacheStore) -> None:
    ask(engine, config=ReuseConfig(capture=False))
    assert store.stats().variants == 0


def test_early_termination_computes_less(engine: Engine) -> None:
    ask(engine)
    order = [FRIDGE, KETTLE, TOASTER]
    plain = ask(
        engine,
        order,
        config=ReuseConfig(recompute_ratio=0.8, capture=False, method=ReuseMethod(alpha=0.3)),
    )
    focused = ask(
        engine,
        order,
        config=ReuseConfig(
            recompute_ratio=0.8,
            capture=False,
            method=ReuseMethod(
                alpha=0.3, early_termination="published", early_termination_window=1
            ),
        ),
    )
    assert plain.stats.focus_layer is None
    assert focused.stats.focus_layer == 0
    assert focused.stats.tokens_recomputed == plain.stats.tokens_recomputed
    assert focused.stats.recompute_share < plain.stats.recompute_share
    assert_adds_up(focused.stats)


def test_a_restart_reuses_from_disk(tmp_path: Path, decoder: Decoder) -> None:
    texts = []
    for _ in range(2):
        with ChunkCacheStore.open(tmp_path / "lasting") as store:
            engine = Engine(decoder, store, config=LAYERWISE)
            answer = ask(engine)
            texts.append(answer.text)
            engine.close()
    assert {chunk.tier for chunk in answer.stats.chunks} == {"disk"}
    assert texts[0] == texts[1]


@pytest.mark.parametrize("codec", ["int8", "entropy"])
def test_what_was_computed_after_a_lossy_chunk_cache_is_not_called_exact(
    codec: str, decoder: Decoder, tmp_path: Path
) -> None:
    """A store of a lossy codec, opened for lossless captures later on."""
    first, both = [KETTLE], [TOASTER, KETTLE]  # the best one stands last: kettle, toaster
    with (
        ChunkCacheStore.open(tmp_path / "caches", codec=codec) as store,
        Engine(decoder, store, config=CONFIG) as one,
    ):
        ask(one, first)
        again = ask(one, first)
        assert outcomes(again) == {KETTLE.chunk_id: "reused"}
        assert (again.stats.tokens_recomputed, again.stats.chunks[0].beta_prime) == (0, 1.0)
        assert codec in again.stats.chunks[0].reason
    with (
        ChunkCacheStore.open(tmp_path / "caches", codec="raw") as store,
        Engine(decoder, store, config=CONFIG) as one,
    ):
        assert outcomes(ask(one, both)) == {KETTLE.chunk_id: "reused", TOASTER.chunk_id: "computed"}
        (row,) = store.rows(RowFilter(chunk_ids=(TOASTER.chunk_id,)))
        assert (row.variant.codec, row.variant.exact_share < 1.0) == ("raw", True)
        assert outcomes(ask(one, both)) == all_of("reused", both)


# -- what must never be served ----------------------------------------------------------------------------------------


def test_no_other_namespace_model_or_system_is_served(
    make_engine: MakeEngine, tiny_decoder: MakeDecoder
) -> None:
    ask(make_engine(namespace="a"))
    assert outcomes(ask(make_engine(namespace="b"))) == all_of("computed")
    assert outcomes(
        ask(make_engine(namespace="a", decoder=tiny_decoder("Llama", seed=1)))
    ) == all_of("computed")
    assert outcomes(ask(make_engine(namespace="a"))) == all_of("exact")
    assert (
        "exact" not in outcomes(ask(make_engine(namespace="a", system="Answer in verse."))).values()
    )


def test_what_is_captured_after_private_text_is_kept_to_its_session(
    make_engine: MakeEngine, store: ChunkCacheStore
) -> None:
    private = {"system": "The user is Ada.", "private_system": True}
    ask(make_engine(**private))
    assert store.stats().variants == 0  # without a session no request could ever use it
    ask(make_engine(**private), session="ada")
    assert {row.variant.session for row in store.rows()} == {"ada"}
    assert outcomes(ask(make_engine(**private), session="ada")) == all_of("exact")
    assert outcomes(
        ask(make_engine(**private), session="bob", config=ReuseConfig(capture=False))
    ) == all_of("computed")
    assert outcomes(ask(make_engine(), config=ReuseConfig(capture=False))) == all_of("computed")


def test_sessions_with_the_same_private_instruction_do_not_evict_each_other(
    make_engine: MakeEngine, store: ChunkCacheStore
) -> None:
    engine = make_engine(system="The user is a nurse.", private_system=True)
    for session in ("ada", "bob"):
        ask(engine, session=session)
    stored = store.stats().captures["stored"]
    assert len(store.rows()) == stored == 2 * (len(CHUNKS) + 1)
    for session in ("ada", "bob") * 2:
        assert outcomes(ask(engine, session=session)) == all_of("exact")
    assert store.stats().captures["stored"] == stored
    assert {row.variant.session for row in store.rows()} == {"ada", "bob"}


def test_a_session_shares_what_nothing_private_stood_before(
    engine: Engine, store: ChunkCacheStore
) -> None:
    ask(
        engine,
        question="I am Ada. Why?",
        session="ada",
        history=[("user", "secret"), ("assistant", "noted")],
    )
    assert {row.variant.session for row in store.rows()} == {None}
    assert outcomes(ask(engine, session="bob")) == all_of("exact")


OVEN = Chunk("Let the oven cool down for an hour before you wipe it.")
KNOWN = [KETTLE, TOASTER, FRIDGE]
SECRETS = ["My name is Ada and I have burnt my hand on the toaster; who pays for that?", "Vinegar?"]
ORDERS = {
    "new in front": [FRIDGE, TOASTER, KETTLE, OVEN],
    "new in the middle": [TOASTER, KETTLE, OVEN, FRIDGE],
}
ORDERS |= {"new at the end": [OVEN, TOASTER, FRIDGE, KETTLE]}  # the first one stands last


def captured(
    folder: Path,
    decoder: Decoder,
    question: str,
    order: list[Chunk],
    config: ReuseConfig,
    **settings: Any,
) -> torch.Tensor:
    """The stored variants of the oven chunk, where it was computed among chunks known from another prompt."""
    with (
        ChunkCacheStore.open(folder, **settings) as store,
        Engine(decoder, store, config=config) as engine,
    ):
        ask(engine, KNOWN)
        answer = ask(engine, order, question=question)
        assert outcomes(answer)[OVEN.chunk_id] == "computed"
        assert answer.stats.tokens_recomputed > 20
        (row,) = store.rows(RowFilter(chunk_ids=(OVEN.chunk_id,)))
        assert row.variant.session is None
        loaded = store.load(row.variant)
        assert isinstance(loaded, LoadedVariant)
        return loaded.kv


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("rule", get_args(EarlyTerminationRule))
@pytest.mark.parametrize("selector", ["question", "cache_craft"])
def test_no_question_shapes_what_others_are_served(
    selector: str, rule: EarlyTerminationRule, order: list[Chunk], decoder: Decoder, tmp_path: Path
) -> None:
    method = ReuseMethod(selector=selector, early_termination=rule, early_termination_window=1)
    config = ReuseConfig(recompute_ratio=0.3, method=method)
    one, other = (
        captured(tmp_path / str(place), decoder, secret, order, config)
        for place, secret in enumerate(SECRETS)
    )
    assert torch.allclose(one, other, rtol=0.0, atol=1e-6 * float(one.abs().max()))


def test_no_question_shapes_what_others_are_served_from_a_disk(
    decoder: Decoder, tmp_path: Path
) -> None:
    config = ReuseConfig(
        recompute_ratio=0.3, method=ReuseMethod(probe_min_rows=0, loading="layerwise")
    )
    one, other = (
        captured(
            tmp_path / str(place), decoder, secret, ORDERS["new at the end"], config, host_bytes=0
        )
        for place, secret in enumerate(SECRETS)
    )
    assert torch.allclose(one, other, rtol=0.0, atol=1e-6 * float(one.abs().max()))


def test_a_question_still_chooses_after_the_last_chunk_that_is_captured(
    decoder: Decoder, tmp_path: Path
) -> None:
    """And among all, where nothing is captured or what is captured is its session's own."""
    looks = []
    for number, (order, settings) in enumerate(
        [
            (ORDERS["new at the end"], {}),
            (ORDERS["new in the middle"], {}),
            ([FRIDGE, TOASTER, KETTLE], {}),
            (ORDERS["new at the end"], {"private_system": True}),
        ]
    ):
        asked = {"sampling": SHORT, "session": "ada"}
        with ChunkCacheStore.open(tmp_path / str(number)) as store:
            config = ReuseConfig(recompute_ratio=0.3, method=ReuseMethod(probe_min_rows=0))
            engine = Engine(decoder, store, config=config, **settings)
            ask(engine, KNOWN, **asked)
            plain = replace(config.with_method(selector="cache_craft"), capture=False)
            share = ask(engine, order, config=plain, **asked).stats.recompute_share
            looks.append(ask(engine, order, **asked).stats.recompute_share > share)
            engine.close()
    assert looks == [False, True, True, True]


@pytest.mark.parametrize("rule", get_args(EarlyTerminationRule))
def test_what_is_computed_because_its_file_is_damaged_is_not_captured_after_a_questions_choice(
    rule: EarlyTerminationRule, decoder: Decoder, tmp_path: Path
) -> None:
    config = ReuseConfig(
        recompute_ratio=0.3,
        nearest_share=0.0,
        method=ReuseMethod(
            probe_min_rows=0,
            loading="layerwise",
            early_termination=rule,
            early_termination_window=1,
        ),
    )
    order = [FRIDGE, KETTLE, TOASTER]  # the fridge stands last
    with (
        ChunkCacheStore.open(tmp_path / "caches") as store,
        Engine(decoder, store, config=config, new_variants="off") as engine,
    ):
        ask(engine, KNOWN)
    with (
        ChunkCacheStore.open(tmp_path / "caches") as store,
        Engine(decoder, store, config=config, new_variants="off") as engine,
    ):
        # these are in memory now
        ask(engine, [KETTLE, TOASTER], config=replace(config, capture=False))
        (row,) = store.rows(RowFilter(chunk_ids=(FRIDGE.chunk_id,)))
        (path,) = [path for path in files(store) if row.variant.variant_id in path.name]
        content = bytearray(path.read_bytes())
        content[-100] ^= 1  # seen only when the last layer is read
        path.write_bytes(content)
        # "reused" where the pass was in its last layer by then
        found = outcomes(ask(engine, order))
        assert found | {FRIDGE.chunk_id: "computed"} == all_of("reused") | {
            FRIDGE.chunk_id: "computed"
        }
        store.flush()
        assert store.rows(RowFilter(chunk_ids=(FRIDGE.chunk_id,))) == []
        assert outcomes(ask(engine, order)) == all_of("reused") | {FRIDGE.chunk_id: "computed"}
        assert len(store.rows(RowFilter(chunk_ids=(FRIDGE.chunk_id,)))) == 1


def test_an_answer_is_not_called_exact_where_a_moved_chunk_was_computed_after_others_had_attended_to_it(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, lost = StoredVariant.read, set[str]()
    wait_for_layer = OverlappedPrefill._wait_for_layer
    last = decoder.layout.layers - 1
    others_attended = threading.Event()  # in all layers before the last one

    def fails_at_the_end(self: StoredVariant, layer: int, *where: Any, **out: Any) -> None:
        if layer == last and self.variant.key.chunk_id in lost:
            others_attended.wait(60)
            raise OSError("the disk fails")
        read(self, layer, *where, **out)

    def waits(self: OverlappedPrefill, layer: int, *args: Any, **how: Any) -> Any:
        if layer == last:
            others_attended.set()
        return (yield from wait_for_layer(self, layer, *args, **how))

    monkeypatch.setattr(StoredVariant, "read", fails_at_the_end)
    monkeypatch.setattr(OverlappedPrefill, "_wait_for_layer", waits)
    # A slow machine would load all layers before it computes the first one.
    monkeypatch.setattr(load_split, "preload_depth", lambda *_, **__: 1)
    whole = replace(LAYERWISE, recompute_ratio=1.0)
    with (
        ChunkCacheStore.open(tmp_path / "caches", host_bytes=0) as store,
        Engine(decoder, store, config=LAYERWISE, best_last=False, new_variants="off") as engine,
    ):
        ask(engine, [KETTLE, TOASTER])
        lost.add(TOASTER.chunk_id)
        others_attended.clear()
        moved = [TOASTER, KETTLE, FRIDGE]
        stats = ask(engine, moved).stats
        assert others_attended.is_set()
        late = next(chunk for chunk in stats.chunks if chunk.chunk_id == TOASTER.chunk_id)
        assert (late.outcome, late.reason_code, late.reason) == (
            "reused",
            Reason.COMPUTED_LATE,
            f"{Reason.COMPUTED_LATE.sentence}: it cannot be read: the disk fails",
        )
        assert late.recomputed + late.computed == late.tokens
        assert not stats.exact
        lost.clear()
        assert engine.settle(60)
        (behind,) = store.rows(RowFilter(chunk_ids=(FRIDGE.chunk_id,)))
        assert behind.variant.exact_share < 1.0
        again = ask(engine, moved, config=whole)
        assert again.stats.exact
        assert again.text == ask(engine, moved, config=replace(LAYERWISE, reuse=False)).text


@pytest.mark.parametrize("damage", ["deleted", "flipped", "cut"])
def test_a_damaged_file_is_a_miss_with_a_reason_and_the_answer_stays_right(
    damage: str, decoder: Decoder, tmp_path: Path
) -> None:
    with ChunkCacheStore.open(tmp_path / "caches", host_bytes=0) as store:
        # no part of a chunk is computed in another pass
        engine = Engine(decoder, store, config=LAYERWISE)
        right = ask(engine).text
        for path in files(store):
            content = bytearray(path.read_bytes())
            if damage == "deleted":
                path.unlink()
            elif damage == "flipped":
                content[-100] ^= 1
                path.write_bytes(content)
            else:
                path.write_bytes(content[: len(content) // 2])
        answer = ask(engine)
        assert outcomes(answer) == all_of("computed")
        assert all(
            chunk.reason and chunk.reason != "no chunk-cache stored"
            for chunk in answer.stats.chunks
        )
        assert answer.text == right
        assert_adds_up(answer.stats)
        assert outcomes(ask(engine)) == all_of("exact")  # it was captured again
        engine.close()


def test_one_damaged_file_leaves_the_others_in_use(decoder: Decoder, tmp_path: Path) -> None:
    with ChunkCacheStore.open(tmp_path / "caches", host_bytes=0) as store:
        engine = Engine(decoder, store, config=LAYERWISE)
        right = ask(engine).text
        (row,) = store.rows(RowFilter(chunk_ids=(TOASTER.chunk_id,)))
        (path,) = [path for path in files(store) if row.variant.variant_id in path.name]
        path.unlink()
        answer = ask(engine)
        assert outcomes(answer) == all_of("exact") | {TOASTER.chunk_id: "computed"}
        assert answer.text == right
        engine.close()


# -- failures and endings ---------------------------------------------------------------------------------------------


def test_a_store_that_takes_nothing_does_not_matter_to_the_answer(
    decoder: Decoder, tmp_path: Path, caplog: Any
) -> None:
    with ChunkCacheStore.open(tmp_path / "full", disk_bytes=100) as store:
        engine = Engine(decoder, store, config=CONFIG)
        assert ask(engine).text == ask(engine).text != ""
        engine.close()
        assert store.stats().variants == 0
    assert any("larger than the whole byte budget" in record.message for record in caplog.records)


def test_a_stream_that_outlives_its_engine_still_ends_well(
    make_engine: MakeEngine, store: ChunkCacheStore
) -> None:
    engine = make_engine()
    answer = engine.stream(QUESTION, CHUNKS, sampling=SHORT)
    next(answer)
    engine.close()
    for _ in answer:
        pass
    assert answer.stats.finish in ("length", "end")
    assert store.stats().variants == 0


def test_closing_a_stream_early_keeps_what_was_born(engine: Engine, store: ChunkCacheStore) -> None:
    answer = engine.stream(QUESTION, CHUNKS, sampling=SHORT)
    first = next(answer)
    assert answer.stats.finish is None
    answer.close()
    assert (answer.text, answer.stats.finish) == (first, "closed")
    assert list(answer) == []
    assert outcomes(ask(engine)) == all_of("exact")
    unread = engine.stream(QUESTION, CHUNKS)
    unread.close()
    assert list(unread) == []


def test_an_abandoned_stream_keeps_what_was_born(engine: Engine) -> None:
    answer = engine.stream(QUESTION, CHUNKS, sampling=SHORT)
    next(answer)
    del answer
    assert outcomes(ask(engine)) == all_of("exact")


def test_the_space_of_a_deleted_folder_is_a_store_error(
    engine: Engine, store: ChunkCacheStore
) -> None:
    shutil.rmtree(store.root)
    with pytest.raises(StoreError, match="out of reach"):
        engine.disk_space()


def test_the_space_on_the_disk_asks_no_remote(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(RemoteTier, "stats", lambda _, *, ask=True: asked.append(ask))
    with (
        ChunkCacheStore.open(tmp_path, remote="memory://") as store,
        Engine(decoder, store, config=CONFIG) as engine,
    ):
        assert engine.disk_space().budget > 0
    assert asked == [False]


def test_a_question_after_the_store_was_closed_is_a_store_error(
    engine: Engine, store: ChunkCacheStore
) -> None:
    store.close()
    answer = engine.stream(QUESTION, CHUNKS, sampling=SHORT)
    with pytest.raises(StoreError, match="closed"):
        next(answer)


def test_a_wrong_request_is_refused_at_once(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="empty"):
        engine.stream(" ", CHUNKS)
    with pytest.raises(ContextLengthError, match="2048"):
        engine.stream(QUESTION, CHUNKS, sampling=SamplingParams(max_new_tokens=2048))


def test_a_prompt_in_segments_is_checked_as_a_question_is(engine: Engine) -> None:
    prompt = engine.prompts.build("What?", [])
    with pytest.raises(ConfigError, match="prompt must be a Prompt"):
        engine.generate("What?")  # type: ignore[arg-type]
    for option in ("sampling", "config"):
        with pytest.raises(ConfigError, match=f"{option} must be a "):
            engine.generate(prompt, **{option: {"seed": 3}})  # type: ignore[arg-type]


def test_what_a_generator_gives_is_read_once_and_kept(engine: Engine) -> None:
    turns: list[Turn] = [("user", "First?"), ("assistant", "One.")]
    full = replace(CONFIG, reuse=False, capture=False)
    expected = ask(engine, config=full, history=turns)
    found = engine.stream(
        QUESTION,
        (chunk for chunk in CHUNKS),
        history=(turn for turn in turns),
        sampling=SHORT,
        config=full,
    )
    assert ("".join(found), outcomes(found)) == (expected.text, all_of("computed"))
    once = engine.score_answer(QUESTION, iter(CHUNKS), max_new_tokens=4, config=full)
    again = engine.score_answer(
        QUESTION, iter(CHUNKS), target=iter(once.tokens), max_new_tokens=4, config=full
    )
    assert (again.text, len(again.stats.chunks)) == (once.text, len(CHUNKS))
    for wrong in (KETTLE, 3, None):
        with pytest.raises(ConfigError, match="chunks must be a list"):
            engine.stream(QUESTION, wrong)  # type: ignore[arg-type]


def test_an_edited_chunk_with_its_old_id_is_computed_under_its_own_id(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    carried = Chunk(KETTLE.text, {}, KETTLE.chunk_id)
    assert carried == KETTLE
    assert replace(carried, text="Another one.").chunk_id == Chunk("Another one.").chunk_id
    ask(engine, [KETTLE])
    edited = Chunk("Put the kettle into the dishwasher.", {}, KETTLE.chunk_id)
    # a splitter after retrieval keeps the metadata
    halves = [edited, Chunk("Never do that.", {}, KETTLE.chunk_id)]
    answers = [ask(engine, halves) for _ in range(2)]
    expected = ask(
        engine,
        [Chunk(chunk.text) for chunk in halves],
        config=ReuseConfig(reuse=False, capture=False),
    )
    assert [answer.text for answer in answers] == [expected.text] * 2
    for answer, outcome in zip(answers, ("computed", "exact"), strict=True):
        assert {(chunk.chunk_id, chunk.stale_id) for chunk in answer.stats.chunks} == {
            (Chunk(chunk.text).chunk_id, KETTLE.chunk_id) for chunk in halves
        }
        assert {chunk.outcome for chunk in answer.stats.chunks} == {outcome}
    assert [
        record.message
        for record in caplog.records
        if "was edited after it was retrieved" in record.message
    ] == [caplog.records[0].message]
    unedited = ask(engine, [KETTLE])
    assert [(chunk.outcome, chunk.stale_id) for chunk in unedited.stats.chunks] == [("exact", "")]


def test_a_chunk_longer_than_the_context_is_passed_over_and_the_others_are_used(
    engine: Engine,
) -> None:
    glyphs = Chunk("\U00013000" * 3000)  # 12,000 tokens of this tokenizer
    answer = ask(engine, [glyphs, *CHUNKS])
    *kept, last = answer.stats.chunks
    assert {chunk.chunk_id for chunk in kept} == {chunk.chunk_id for chunk in CHUNKS}
    assert "trimmed" not in {chunk.outcome for chunk in kept}
    assert last.outcome == "trimmed"
    assert "it has 12002 tokens and the model's context has room for" in last.reason
    assert "split its document into smaller chunks" in last.reason
    assert_adds_up(answer.stats)


def test_chunks_that_do_not_fit_are_named(engine: Engine) -> None:
    many = [Chunk(f"{number} " * 300) for number in range(5)]
    answer = ask(engine, many)
    left_out = [chunk for chunk in answer.stats.chunks if chunk.outcome == "trimmed"]
    assert [chunk.chunk_id for chunk in left_out] == [chunk.chunk_id for chunk in many[3:]]
    assert all("full" in chunk.reason for chunk in left_out)
    assert answer.stats.tokens_prompt + SHORT.max_new_tokens <= 2048
    assert_adds_up(answer.stats)


def test_without_chunks_there_is_an_answer_too(engine: Engine) -> None:
    assert ask(engine, []).text == ask(engine, []).text != ""


# -- sampling ---------------------------------------------------------------------------------------------------------


def test_an_answer_ends_at_the_length_at_a_stop_string_or_at_an_end_token(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ask(engine, sampling=SamplingParams(max_new_tokens=30))
    assert (whole.stats.tokens_generated, whole.stats.finish) == (30, "length")
    stop = whole.text[5:8]
    stopped = ask(engine, sampling=SamplingParams(max_new_tokens=30, stop=(stop,)))
    assert (stopped.text, stopped.stats.finish) == (whole.text[: whole.text.index(stop)], "stop")
    assert stopped.stats.tokens_generated < 30
    one = ask(engine, sampling=SamplingParams(max_new_tokens=1))
    assert one.stats.tokens_generated == 1
    monkeypatch.setattr(engine.decoder, "end_tokens", frozenset(range(260)))
    ended = ask(engine)
    assert (ended.text, ended.stats.finish, ended.stats.tokens_generated) == ("", "end", 0)
    assert ended.stats.ttft_s > 0


def test_a_seed_gives_the_same_answer_again(engine: Engine) -> None:
    warm = {"max_new_tokens": 20, "temperature": 1.5, "top_p": 0.95}
    texts = [ask(engine, sampling=SamplingParams(**warm, seed=seed)).text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


# -- at once ----------------------------------------------------------------------------------------------------------


def test_two_threads_get_the_answers_they_would_get_one_after_the_other(
    make_engine: MakeEngine, decoder: Decoder, tmp_path: Path
) -> None:
    asked = [
        (QUESTION, CHUNKS),
        ("And the toaster <|end|>?", [TOASTER, KETTLE]),
        ("How cold?", [FRIDGE]),
    ]
    with ChunkCacheStore.open(tmp_path / "one by one") as other:
        plain = Engine(decoder, other, config=ReuseConfig(reuse=False, capture=False))
        expected = [ask(plain, chunks, question).text for question, chunks in asked]
        plain.close()
    # every path then gives the full answer
    engine = make_engine(config=ReuseConfig(recompute_ratio=1.0, method=ReuseMethod(alpha=0.3)))
    found: dict[tuple[int, int], str] = {}

    def run(thread: int) -> None:
        for turn in range(4):
            place = (thread + turn) % len(asked)
            question, chunks = asked[place]
            found[thread, turn] = ask(engine, chunks, question).text

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {
        (t, turn): expected[(t + turn) % len(asked)] for t in range(3) for turn in range(4)
    }


def test_a_question_waits_for_the_births_of_the_one_before(engine: Engine, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            answer = engine.stream(QUESTION, CHUNKS, sampling=SHORT)
            for _ in answer:
                pass
    assert outcomes(answer) == all_of("exact")
    assert caplog.records == []


# -- examining ---------------------------------------------------------------------------------------------------------


def test_an_examination_of_its_own_answer_says_what_streaming_says(engine: Engine) -> None:
    streamed = ask(engine, config=replace(CONFIG, reuse=False))
    own = engine.score_answer(
        QUESTION, CHUNKS, max_new_tokens=12, config=replace(CONFIG, reuse=False)
    )
    assert own.text == streamed.text
    assert own.logits.argmax(-1).tolist() == list(own.tokens)
    assert 0 < own.stats.ttft_s <= own.stats.total_s
    assert own.stats.tokens_generated == streamed.stats.tokens_generated


@pytest.mark.parametrize("same", [0, 1, 5, 12])
def test_the_answer_does_not_depend_on_the_one_it_is_compared_with(
    engine: Engine, same: int
) -> None:
    """Up to the first difference the other answer's tokens are taken over; the rest is decoded again."""
    own = engine.score_answer(
        QUESTION, CHUNKS, max_new_tokens=12, config=replace(CONFIG, reuse=False)
    )
    assert len(own.tokens) == 12
    other = [*own.tokens[:same], *((token + 1) % 250 for token in own.tokens[same:])]
    led = engine.score_answer(
        QUESTION, CHUNKS, target=other, max_new_tokens=12, config=replace(CONFIG, reuse=False)
    )
    assert (led.text, led.tokens) == (own.text, own.tokens)
    assert led.logits.shape == own.logits.shape
    assert torch.allclose(led.logits[: same + 1], own.logits[: same + 1], atol=1e-4)
    if same < 11:
        assert not torch.allclose(led.logits[same + 1], own.logits[same + 1], atol=1e-4)


def test_an_answer_too_long_to_go_along_is_refused(engine: Engine) -> None:
    for along in ([], [1] * 13):
        with pytest.raises(ConfigError, match="needs 1 to 12"):
            engine.score_answer(QUESTION, CHUNKS, target=along, max_new_tokens=12)


def test_an_answer_says_which_chunks_are_in_focus_and_what_that_spared(engine: Engine) -> None:
    letter = Chunk("N")  # no question attends to it as much as to a sentence
    ask(engine, [TOASTER, letter, KETTLE, OVEN, FRIDGE])
    config = replace(CONFIG, capture=False, recompute_ratio=0.5, nearest_share=0.0)
    order = [KETTLE, letter, FRIDGE, TOASTER, OVEN]
    focused = ask(engine, order, config=config.with_method(early_termination="probe")).stats
    everything = ask(engine, order, config=config.with_method(early_termination="off")).stats
    assert_adds_up(focused)
    chunks = {chunk.chunk_id: chunk for chunk in focused.chunks}
    assert chunks[KETTLE.chunk_id].in_focus
    assert max(chunk.focus or 0.0 for chunk in focused.chunks) == 1.0
    assert chunks[letter.chunk_id].in_focus is False
    assert chunks[letter.chunk_id].reason_code == "unfocused"
    assert chunks[letter.chunk_id].spared == focused.tokens_spared == 2  # half, rounded up
    assert everything.tokens_spared == 0
    assert focused.tokens_recomputed == everything.tokens_recomputed - focused.tokens_spared
    assert focused.recompute_share < everything.recompute_share
    assert not focused.exact


def test_a_probe_chooses_what_is_recomputed_and_counts_for_it(engine: Engine) -> None:
    ask(engine)
    config = replace(CONFIG.with_method(probe_min_rows=0), capture=False, recompute_ratio=0.3)
    moved = ask(engine, [FRIDGE, TOASTER, KETTLE], config=config)
    plain = ask(
        engine, [FRIDGE, TOASTER, KETTLE], config=config.with_method(selector="cache_craft")
    )
    assert_adds_up(moved.stats)
    assert moved.stats.tokens_recomputed == plain.stats.tokens_recomputed  # the same budget
    assert moved.stats.recompute_share > plain.stats.recompute_share  # and what it took to look
    everything = ask(engine, [FRIDGE, TOASTER, KETTLE], config=replace(config, recompute_ratio=1.0))
    assert (
        everything.text
        == ask(engine, [FRIDGE, TOASTER, KETTLE], config=replace(config, reuse=False)).text
    )


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_a_use_counts_with_what_it_saved_at_a_fixed_ratio(engine: Engine, ratio: float) -> None:
    chosen = RowFilter(chunk_ids=tuple(chunk.chunk_id for chunk in CHUNKS))
    ask(engine)
    assert engine.store.flush(10)
    before = {
        row.variant.variant_id: row.variant.reuse_frequency for row in engine.store.rows(chosen)
    }
    config = replace(
        CONFIG.with_method(budget_scope="chunk"),
        capture=False,
        recompute_ratio=ratio,
        nearest_share=0.0,
    )
    ask(engine, [FRIDGE, TOASTER, KETTLE], config=config)
    assert engine.store.flush(10)
    gained = {}
    for row in engine.store.rows(chosen):
        variant = row.variant
        gained[variant.variant_id] = variant.reuse_frequency - before[variant.variant_id]
        recomputed = math.ceil(ratio * variant.tokens) / variant.tokens
        by_one_use = 1 / max(recomputed, 1 / variant.tokens)
        assert gained[variant.variant_id] in (0.0, pytest.approx(by_one_use))
    assert any(gained.values())


def test_a_small_pass_has_no_probe(engine: Engine) -> None:
    ask(engine)
    config = replace(CONFIG, capture=False, recompute_ratio=0.3)
    shares = {
        rows: ask(
            engine, CHUNKS[::-1], config=config.with_method(probe_min_rows=rows)
        ).stats.recompute_share
        for rows in (0, 50, 1000)
    }
    assert shares[0] == shares[50] > shares[1000]  # it has some 70 rows


def test_set_cache_reorders_what_one_prompt_left(engine: Engine) -> None:
    ask(engine)
    config = replace(CONFIG.with_method(scope="set"), capture=False)
    moved = ask(engine, [TOASTER, KETTLE, FRIDGE], config=config)
    # the best chunk stands last
    assert outcomes(moved) == all_of("reused") | {FRIDGE.chunk_id: "exact"}
    assert moved.stats.tokens_recomputed == 0
    assert outcomes(ask(engine, config=config)) == all_of("exact")


def test_prefix_cache_is_exact(engine: Engine) -> None:
    ask(engine)
    config = replace(CONFIG.with_method(scope="prefix"), capture=False)
    order = [KETTLE, TOASTER, FRIDGE][::-1]
    found = engine.score_answer(QUESTION, order, max_new_tokens=12, config=config)
    full = engine.score_answer(
        QUESTION, order, target=found.tokens, max_new_tokens=12, config=replace(config, reuse=False)
    )
    assert found.text == full.text
    assert (found.logits - full.logits).abs().max() <= 1e-3


def test_captures_of_an_answer_that_its_reader_closed_are_stored(
    make_engine: MakeEngine, store: ChunkCacheStore
) -> None:
    """As `cachecraft ask` does, which ends after the first sentence of an answer."""
    for number in range(10):
        engine = make_engine()
        answer = engine.stream(QUESTION, CHUNKS, sampling=SamplingParams(max_new_tokens=30))
        next(answer)
        answer.close()
        engine.close()
        assert answer.stats.finish == "closed"
        stored = store.rows(RowFilter(chunk_ids=tuple(chunk.chunk_id for chunk in CHUNKS)))
        assert len(stored) == len(CHUNKS), number
        store.evict(down_to_bytes=0)


def test_closing_the_engine_of_a_tenant_closes_the_engine(
    make_engine: MakeEngine, store: ChunkCacheStore
) -> None:
    engine = make_engine(new_variants="idle")
    tenant = engine.for_tenant("acme")
    ask(tenant)
    ask(tenant, CHUNKS[::-1])
    tenant.close()
    assert not engine.new_variants.busy
    assert store.before_removal == []
    engine.close()


def test_a_tenant_without_a_name_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(ConfigError, match="namespace must be text with something in it"):
        engine.for_tenant("")


def test_what_one_tenant_removes_is_still_captured_for_another(
    make_engine: MakeEngine, store: ChunkCacheStore
) -> None:
    engine = make_engine()
    acme = engine.for_tenant("acme")
    answer = acme.stream(QUESTION, CHUNKS, sampling=SamplingParams(max_new_tokens=30))
    next(answer)
    engine.for_tenant("bolt").remove(CHUNKS)
    for _ in answer:
        pass
    engine.settle()
    assert all(chunk.tokens for chunk in acme.held(CHUNKS))
    assert store.stats().captures.get(CaptureDrop.REMOVED, 0) == 0
