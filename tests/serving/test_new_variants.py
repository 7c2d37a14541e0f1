"""New variants: computed exactly and in the background, never in the way of an answer, within what may be spent."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from cachecraft_rag.compute.driver import Until, prefill
from cachecraft_rag.compute.job import PrefillJob
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.serving.config import NewVariants
from cachecraft_rag.serving.generation import Generation
from cachecraft_rag.serving.loop import ready_steps
from cachecraft_rag.serving.loop.ready_steps import Computed, ReadySteps
from cachecraft_rag.serving.loop.task import LoopTask, Priority
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.catalog_records import RowFilter
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.types.store_reasons import Damaged, LoadFailure
from cachecraft_rag.types.variants import LoadedVariant, Variant
from tests.engines import until

CHUNKS = [
    Chunk("Empty the kettle before you descale it with vinegar."),
    Chunk("The toaster has a crumb tray; pull it out to the left."),
    Chunk("Set the fridge to four degrees."),
]
ORDERS = [list(order) for order in permutations(CHUNKS)]
QUESTION = "How do I descale the kettle?"
SHORT = SamplingParams(max_new_tokens=4)
# not all of it is computed before its reader has read a part
LONG = SamplingParams(max_new_tokens=80)
# takes what is stored, also where computing is faster
CONFIG = ReuseConfig(method=ReuseMethod(alpha=0.3, loading="layerwise"))
UNLIMITED = NewVariants(share=1e9)

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def decoder(tiny_decoder: Callable[..., Decoder]) -> Decoder:
    return tiny_decoder("Llama")


@pytest.fixture
def make_engine(decoder: Decoder, store: ChunkCacheStore) -> Iterator[MakeEngine]:
    with ExitStack() as opened:
        given = {"decoder": decoder, "store": store, "config": CONFIG, "new_variants": UNLIMITED}
        yield lambda **settings: opened.enter_context(Engine(**(given | settings)))


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine()


def ask(engine: Engine, chunks: list[Chunk], *, settle: bool = True, **how: Any) -> Generation:
    """A whole answer; with `settle`, what follows from it is done."""
    answer = engine.stream(QUESTION, chunks, **({"sampling": SHORT} | how))
    for _ in answer:
        pass
    if settle:
        assert engine.settle(60)
    return answer


def variants_of(engine: Engine, chunk: Chunk, session: str | None = None) -> list[Variant]:
    found = engine.store.find(
        engine.namespace, engine.decoder.fingerprint, [chunk.chunk_id], session=session
    ).variants
    return found[chunk.chunk_id]


class Layers:
    """Records whose layer ran, in order; `hold` makes the background stop inside its next layer until `release`."""

    def __init__(self, decoder: Decoder, patch: pytest.MonkeyPatch) -> None:
        self.run: list[str] = []
        self._gate, self.reached = threading.Event(), threading.Event()
        self._gate.set()
        layer, advance = decoder.layer, ReadySteps._advance
        level: list[Priority] = []

        def noted(ready: ReadySteps, tasks: Any) -> list[Computed]:
            level[:] = [tasks[0].priority]
            return advance(ready, tasks)

        def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
            background = level == [Priority.IDLE]
            self.run.append("background" if background else "answer")
            if background:
                self.reached.set()
                assert self._gate.wait(60)
            level.clear()
            return layer(*args, **kwargs)

        patch.setattr(ReadySteps, "_advance", noted)
        patch.setattr(decoder, "layer", counted)

    def hold(self) -> None:
        self.reached.clear()
        self._gate.clear()

    def release(self) -> None:
        self._gate.set()


@pytest.fixture
def layers(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> Layers:
    return Layers(decoder, monkeypatch)


# -- what they are good for -------------------------------------------------------------------------------------------


def test_repeated_questions_grow_variants_and_recompute_less_and_less(engine: Engine) -> None:
    recomputed, counts = [], []
    for _ in range(3):
        answers = [ask(engine, order) for order in ORDERS]
        recomputed.append(sum(answer.stats.tokens_recomputed for answer in answers))
        counts.append(len(engine.store.rows(RowFilter())))
    assert recomputed[0] > 0
    assert recomputed[1:] == [0, 0]
    # The instruction, and each chunk after nothing, after one of the others, and after both in either order.
    assert counts == [16, 16, 16]
    assert all(answer.stats.exact for answer in answers)
    assert [len(variants_of(engine, chunk)) for chunk in CHUNKS] == [5, 5, 5]
    stats = engine.new_variants.stats
    assert stats.captured == 12
    assert (stats.waiting, stats.dropped) == (0, {})


def test_without_them_everything_is_fixed_again_and_again(make_engine: MakeEngine) -> None:
    engine = make_engine(new_variants="off")
    recomputed = [
        sum(ask(engine, order).stats.tokens_recomputed for order in ORDERS) for _ in range(2)
    ]
    assert recomputed[1] == recomputed[0] > 0
    assert [len(variants_of(engine, chunk)) for chunk in CHUNKS] == [1, 1, 1]
    assert engine.new_variants.stats.captured == 0


def test_a_new_prompt_takes_the_variant_with_the_greatest_overlap(engine: Engine) -> None:
    fourth = Chunk("The oven door comes off if you pull both levers.")
    ask(engine, [CHUNKS[1], CHUNKS[2], fourth])  # in the prompt the fourth comes first
    first = ask(engine, [CHUNKS[1], CHUNKS[2]])
    system = engine.prompts.system.segment_id
    (_, new) = sorted(variants_of(engine, CHUNKS[1]), key=lambda variant: variant.created)
    assert new.key.origin_prefix == (system, CHUNKS[2].chunk_id)
    second = ask(engine, [CHUNKS[1], CHUNKS[2], CHUNKS[0]])  # the same two after another
    before, after = first.stats.chunks[1], second.stats.chunks[2]
    assert before.chunk_id == after.chunk_id == CHUNKS[1].chunk_id
    assert before.beta_prime is not None
    assert 0.0 < before.beta_prime < 1.0
    assert before.cfo is not None
    assert before.cfo > 0.0
    assert (after.variant_id, after.beta_prime, after.cfo) == (new.variant_id, 1.0, 0.0)


def test_a_new_variant_is_exact(engine: Engine, decoder: Decoder) -> None:
    """The gate in fp32, on chunks that were all reused and fixed."""
    order = CHUNKS[::-1]
    ask(engine, CHUNKS)
    assert {chunk.outcome for chunk in ask(engine, order).stats.chunks} == {"reused"}
    prompt = engine.prompts.build(QUESTION, order, reserve=4)
    bounds = prompt.bounds
    rows = Rows.of(bounds[:-1], new=range(bounds[-2]))
    full = prefill(
        decoder, PrefillJob(prompt.token_ids[: bounds[-2]], rows, captures=range(len(bounds) - 2))
    )
    names = [segment.segment_id for segment in prompt.segments[:-1]]
    for place, capture in enumerate(full.recorder.captures):
        offers = engine.look_up([prompt.segments[place]]).variants[names[place]]
        (variant,) = (one for one in offers if one.key.origin_prefix == tuple(names[:place]))
        loaded = engine.store.load(variant)
        assert isinstance(loaded, LoadedVariant)
        assert (loaded.kv - capture.kv).abs().max() <= 1e-3
        assert variant.exact_share == 1.0
    scored = engine.score_answer(QUESTION, order, max_new_tokens=1)
    assert {chunk.outcome for chunk in scored.stats.chunks} == {"exact"}
    own = decoder.own_logits(prompt.token_ids)[0]
    assert (scored.logits[0] - own).abs().max() <= 1e-3
    assert int(scored.logits[0].argmax()) == int(own.argmax())


def test_a_new_variant_is_exact_if_passes_measure_attention_as_on_a_gpu(
    engine: Engine, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cachecraft_rag.compute.overlapped.passes_measure", lambda _device: True)
    test_a_new_variant_is_exact(engine, decoder)
    stats = engine.new_variants.stats
    assert stats.captured
    assert not stats.dropped


def test_an_inexact_capture_is_replaced_by_an_exact_one(engine: Engine) -> None:
    ask(engine, CHUNKS[:2])
    new = Chunk("The oven door comes off if you pull both levers.")
    # in the prompt the new one is last, after two that were moved
    order = [new, CHUNKS[1], CHUNKS[0]]
    ask(engine, order)
    (first,) = variants_of(engine, new)
    assert first.exact_share < 1.0
    assert "reused" in {chunk.outcome for chunk in ask(engine, order).stats.chunks}
    (second,) = variants_of(engine, new)
    assert (second.variant_id, second.exact_share) == (first.variant_id, 1.0)
    assert {chunk.outcome for chunk in ask(engine, order).stats.chunks} == {"exact"}


def test_from_a_lossy_codec_no_chunk_is_reused_for_a_new_variant(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    with ChunkCacheStore.open(tmp_path / "lossy", codec="int8", host_bytes=0) as store:
        engine = make_engine(store=store)
        ask(engine, ORDERS[0])
        answer = ask(engine, ORDERS[1])
        assert answer.stats.tokens_recomputed > 0
        stats = engine.new_variants.stats
        chunks = [chunk.chunk_id for chunk in ORDERS[1]]
        exact = len(engine.prompts.system.token_ids)  # which is always stored without a loss
        # all chunks: none that is stored is exact
        assert stats.tokens >= answer.stats.tokens_prompt - exact - 60
        assert all(
            variant.exact_share == 1.0
            for name in chunks
            for variant in variants_of(engine, Chunk(_text(name)))
        )
        assert ask(engine, ORDERS[1]).stats.tokens_recomputed == 0
        assert engine.new_variants.stats == stats


def _text(chunk_id: str) -> str:
    return next(chunk.text for chunk in CHUNKS if chunk.chunk_id == chunk_id)


# -- not in the way of answers ----------------------------------------------------------------------------------------


def test_a_request_waits_for_one_layer_at_most(
    engine: Engine, layers: Layers, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(engine, ORDERS[0])
    layers.hold()
    ask(engine, ORDERS[1], settle=False)
    assert layers.reached.wait(60)  # in the first layer of the first capture, with the lock
    arrived = len(layers.run)
    has_arrived = threading.Event()
    start = engine.loop.start

    def start_and_note(task: LoopTask) -> None:
        start(task)
        if task.priority is Priority.ANSWER:
            has_arrived.set()

    monkeypatch.setattr(engine.loop, "start", start_and_note)
    asking = threading.Thread(target=ask, args=(engine, ORDERS[2]), kwargs={"settle": False})
    asking.start()
    assert has_arrived.wait(60)
    layers.release()
    asking.join(60)
    first = layers.run.index("answer", arrived)
    assert first - arrived <= 1
    last = len(layers.run) - layers.run[::-1].index("answer")
    assert "background" not in layers.run[first:last]  # nor does it come between its tokens
    assert engine.settle(60)
    assert engine.new_variants.stats.captured > 0
    assert ask(engine, ORDERS[1]).stats.tokens_recomputed == 0


def test_always_takes_turns_with_an_answer_that_is_under_way(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready_steps, "_PAUSE_S", 1e9)
    engine = make_engine(new_variants=NewVariants("always", share=1e9))
    ask(engine, ORDERS[0])
    open_answer = engine.stream(QUESTION, ORDERS[0], sampling=SHORT)
    next(open_answer)
    ask(engine, ORDERS[1])  # settles although the other answer is open
    assert engine.new_variants.stats.captured > 0
    for _ in open_answer:
        pass


def test_a_reader_who_pauses_does_not_stop_it_for_good(
    make_engine: MakeEngine,
    decoder_of_letters: Callable[..., Decoder],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(decoder=decoder_of_letters())
    monkeypatch.setattr(ready_steps, "_PAUSE_S", 1e9)
    ask(engine, ORDERS[0])
    open_answer = engine.stream(QUESTION, ORDERS[0], sampling=LONG)
    next(open_answer)
    ask(engine, ORDERS[1], settle=False)
    assert not engine.settle(0.5)
    assert engine.new_variants.stats.captured == 0
    monkeypatch.setattr(ready_steps, "_PAUSE_S", 0.0)
    assert engine.settle(60)
    assert engine.new_variants.stats.captured > 0
    open_answer.close()


def test_an_abandoned_answer_does_not_stop_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready_steps, "_PAUSE_S", 1e9)
    ask(engine, ORDERS[0])
    open_answer = engine.stream(QUESTION, ORDERS[1], sampling=LONG)
    next(open_answer)
    del open_answer
    assert engine.settle(60)
    assert engine.new_variants.stats.captured > 0


def test_a_request_that_fails_does_not_stop_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(engine, ORDERS[0])
    with monkeypatch.context() as patch:
        patch.setattr(engine._answering, "look_up", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ask(engine, ORDERS[1])
    assert ask(engine, ORDERS[1]).stats.finish == "length"
    assert engine.new_variants.stats.captured > 0


# -- what may go wrong ------------------------------------------------------------------------------------------------


@contextmanager
def answering(engine: Engine) -> Iterator[None]:
    """An answer is under way, whose reader is about to ask for the next piece."""
    waits = LoopTask(
        lambda _: (step for step in [Until(gate.is_set)]), lambda *_: None, Priority.ANSWER
    )
    gate = threading.Event()
    engine.loop.start(waits)
    try:
        yield
    finally:
        gate.set()
        engine.loop.wake()


def stop_in_the_first_capture(engine: Engine, layers: Layers) -> None:
    """Five captures wait, and one is held at a separate layer until `layers.release`."""
    ask(engine, ORDERS[0])
    layers.hold()
    with answering(engine):
        for order in ORDERS[1:]:
            ask(engine, order, settle=False)
    assert layers.reached.wait(60)


def test_close_gives_up_what_waits_before_the_next_layer(
    make_engine: MakeEngine, layers: Layers
) -> None:
    engine = make_engine()
    stop_in_the_first_capture(engine, layers)
    ran = layers.run.count("background")
    closing = threading.Thread(target=engine.close)
    closing.start()
    until(lambda: not engine.loop._inbox.empty())
    layers.release()
    closing.join(60)
    assert layers.run.count("background") == ran
    stats = engine.new_variants.stats
    assert (stats.captured, stats.waiting) == (0, 0)
    assert stats.dropped == {"closed": 5}
    assert engine.loop._thread is None


def test_an_engine_that_ends_without_close_drops_what_waits(engine: Engine) -> None:
    ask(engine, ORDERS[0])
    with answering(engine):
        for order in ORDERS[1:]:
            ask(engine, order, settle=False)
        engine.loop.end()
    until(lambda: not engine.loop.alive)
    stats = engine.new_variants.stats
    assert (stats.waiting, stats.dropped) == (0, {"closed": 4})
    assert stats.captured > 0  # of the one that was under way


def test_a_removed_chunk_does_not_come_back(engine: Engine, layers: Layers) -> None:
    stop_in_the_first_capture(engine, layers)
    removed = [chunk.chunk_id for chunk in CHUNKS[:1]]
    removing = threading.Thread(
        target=engine.store.evict, args=(RowFilter(chunk_ids=tuple(removed)),)
    )
    removing.start()
    until(lambda: not engine.loop._inbox.empty())
    layers.release()
    removing.join(60)
    assert engine.settle(60)
    assert engine.store.rows(RowFilter(chunk_ids=tuple(removed))) == []
    stats = engine.new_variants.stats
    assert (stats.captured, stats.waiting, stats.dropped) == (0, 0, {"removed": 5})
    ask(engine, ORDERS[0])  # a request that sends it again has it again
    assert engine.store.rows(RowFilter(chunk_ids=tuple(removed))) != []


def test_a_removed_chunk_ends_a_capture_that_was_asked_for_again(
    engine: Engine, layers: Layers
) -> None:
    stop_in_the_first_capture(engine, layers)
    ran = layers.run.count("background")
    (running,) = engine.new_variants.under_way()
    engine.loop.call_soon(lambda: engine.new_variants.answered(0, replace(running)))
    removed = RowFilter(chunk_ids=(CHUNKS[0].chunk_id,))
    removing = threading.Thread(target=engine.store.evict, args=(removed,))
    removing.start()
    until(lambda: engine.loop._inbox.qsize() >= 2)
    layers.release()
    removing.join(60)
    assert engine.settle(60)
    assert layers.run.count("background") == ran


REMOVE = """
import sys
from cachecraft_rag.store import ChunkCacheStore, RowFilter

with ChunkCacheStore.open(sys.argv[1]) as store:
    print(store.evict(RowFilter(chunk_ids=(sys.argv[2],))).variants)
"""


@pytest.mark.slow  # it imports torch once more
def test_what_another_process_removed_is_not_served_and_does_not_come_back(
    engine: Engine, layers: Layers
) -> None:
    stop_in_the_first_capture(engine, layers)
    removed, root = CHUNKS[0].chunk_id, str(engine.store.root)
    done = subprocess.run(
        [sys.executable, "-c", REMOVE, root, removed], capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n"
    layers.release()
    assert engine.settle(60)
    assert engine.store.rows(RowFilter(chunk_ids=(removed,))) == []
    stats = engine.new_variants.stats
    assert stats.captured > 0  # the others are captured, after it too
    assert set(stats.dropped) == {"removed"}
    assert stats.waiting == 0
    # memory still has the tensor, and a request that sends the chunk again has it again
    answer = ask(engine, ORDERS[0])
    assert {chunk.chunk_id: chunk.outcome for chunk in answer.stats.chunks}[removed] == "computed"
    assert len(engine.store.rows(RowFilter(chunk_ids=(removed,)))) == 1


def test_a_capture_that_cannot_be_computed_is_dropped(
    engine: Engine,
    decoder: Decoder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ask(engine, ORDERS[0])
    with monkeypatch.context() as patch:
        patch.setattr(ReadySteps, "_advance", failing_in_idle_time(RuntimeError("out of memory")))
        ask(engine, ORDERS[1])
    assert engine.new_variants.stats.dropped == {"failed": 1}
    assert "could not be computed" in caplog.text
    ask(engine, ORDERS[1])
    assert ask(engine, ORDERS[1]).stats.tokens_recomputed == 0


def failing_in_idle_time(error: Exception) -> Callable[[ReadySteps, Any], list[Computed]]:
    own = ReadySteps._advance

    def advance(ready: ReadySteps, tasks: Any) -> list[Computed]:
        if tasks[0].priority is Priority.IDLE:
            return [Computed(tasks[0], None, error)]
        return own(ready, tasks)

    return advance


def test_a_mistake_ends_new_variants_but_no_answer(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ReadySteps, "_advance", failing_in_idle_time(KeyError("a mistake")))
    for order in ORDERS[:3]:
        ask(engine, order)
    stats = engine.new_variants.stats
    assert (stats.captured, stats.waiting, caplog.text.count("KeyError: 'a mistake'")) == (0, 0, 1)


def test_a_full_disk_costs_more_and_more_of_the_budget(
    make_engine: MakeEngine, full_disk: Callable[[], AbstractContextManager[None]]
) -> None:
    engine = make_engine(new_variants=NewVariants(share=3.0))
    ask(engine, ORDERS[0])
    with full_disk():
        asked = [ask(engine, order) for _ in range(2) for order in ORDERS[1:]]
    stats = engine.new_variants.stats
    assert stats.captured == 0
    assert stats.dropped["store_refused"] >= 1
    # it stopped trying
    assert stats.tokens <= 0.5 * 3.0 * sum(answer.stats.tokens_prompt for answer in asked)
    assert stats.waiting > 0


def test_what_vanished_meanwhile_is_computed(
    engine: Engine, store: ChunkCacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(engine, ORDERS[0])
    open_variants = store.open_variants

    calls: list[int] = []

    def nothing(variants: list[Variant]) -> list[Any]:
        calls.append(len(variants))
        if len(calls) == 1:  # of the answer
            return open_variants(variants)
        return [
            Damaged(variant.variant_id, LoadFailure.MISSING, "its file is missing")
            for variant in variants
        ]

    monkeypatch.setattr(store, "open_variants", nothing)
    ask(engine, ORDERS[1])
    monkeypatch.undo()
    assert ask(engine, ORDERS[1]).stats.tokens_recomputed == 0
    assert engine.new_variants.stats.dropped == {}


def test_what_was_stored_meanwhile_is_not_computed_again(make_engine: MakeEngine) -> None:
    engine, other = make_engine(), make_engine()  # as two processes on one folder
    ask(engine, ORDERS[0])
    with answering(other):
        ask(other, ORDERS[1], settle=False)
        ask(engine, ORDERS[1])
    assert other.settle(60)
    assert engine.new_variants.stats.captured > 0
    stats = other.new_variants.stats
    assert (stats.captured, stats.tokens, stats.dropped) == (0, 0, {"stored_meanwhile": 1})


# -- sessions ---------------------------------------------------------------------------------------------------------


def test_what_a_private_instruction_shaped_stays_with_its_session(make_engine: MakeEngine) -> None:
    engine = make_engine(system="My name is Ada.", private_system=True)
    for order in (ORDERS[0], ORDERS[1]):
        ask(engine, order, session="ada")
    assert engine.new_variants.stats.captured > 0
    assert ask(engine, ORDERS[1], session="ada").stats.tokens_recomputed == 0
    assert {
        variant.session for chunk in CHUNKS for variant in variants_of(engine, chunk, "ada")
    } == {"ada"}
    for other in ("bob", None):
        assert [variants_of(engine, chunk, other) for chunk in CHUNKS] == [[], [], []]
    before = engine.new_variants.stats
    for order in ORDERS:
        ask(engine, order)  # without a session nothing is kept, nor computed for it
    assert engine.new_variants.stats == before


def test_what_is_shared_is_served_to_other_sessions(engine: Engine) -> None:
    for order in (ORDERS[0], ORDERS[1]):
        ask(engine, order, session="ada")
    assert ask(engine, ORDERS[1], session="bob").stats.tokens_recomputed == 0
    assert {variant.session for chunk in CHUNKS for variant in variants_of(engine, chunk)} == {None}


# -- what may be spent ------------------------------------------------------------------------------------------------


def test_no_more_is_computed_than_a_share_of_the_prompts(make_engine: MakeEngine) -> None:
    engine = make_engine(new_variants=NewVariants(share=0.02))
    prompts, longest = 0, len(engine.prompts.build(QUESTION, CHUNKS, reserve=4).token_ids)
    for order in ORDERS * 3:
        prompts += ask(engine, order).stats.tokens_prompt
        assert engine.new_variants.stats.tokens <= 0.02 * prompts + longest
    stats = engine.new_variants.stats
    assert stats.tokens > 0
    assert stats.waiting > 0


def test_a_share_of_nothing_computes_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(new_variants=NewVariants(share=0))
    for order in ORDERS:
        ask(engine, order)
    stats = engine.new_variants.stats
    assert (stats.captured, stats.tokens, stats.waiting) == (0, 0, 5)


def test_of_more_than_may_wait_some_are_dropped(make_engine: MakeEngine) -> None:
    engine = make_engine(new_variants=NewVariants(share=0, waiting=2))
    for order in ORDERS:
        ask(engine, order)
    assert engine.new_variants.stats.waiting == 2
    assert engine.new_variants.stats.dropped == {"too_many_waiting": 3}


@pytest.mark.parametrize("config", [ReuseConfig(capture=False), ReuseConfig(reuse=False)])
def test_requests_that_capture_or_reuse_nothing_ask_for_nothing(
    engine: Engine, config: ReuseConfig
) -> None:
    ask(engine, ORDERS[0])
    for order in ORDERS:
        ask(engine, order, config=config)
    stats = engine.new_variants.stats
    assert (stats.captured, stats.waiting) == (0, 0)


def test_settings_are_checked_and_a_word_is_enough() -> None:
    assert EngineConfig().new_variants == NewVariants("idle")
    assert EngineConfig().with_options(new_variants="off").new_variants == NewVariants("off")
    for wrong in ("sometimes", 3):
        with pytest.raises(ConfigError, match="new_variants"):
            EngineConfig(new_variants=wrong)  # type: ignore[arg-type]
    for settings in ({"share": -1}, {"share": float("nan")}, {"waiting": 0}):
        with pytest.raises(ConfigError):
            NewVariants(**settings)  # type: ignore[arg-type]
