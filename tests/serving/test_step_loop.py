"""The step loop: joint forwards, waits passed over, and readers that pause, leave, fail or are interrupted."""

from __future__ import annotations

import contextvars
import gc
import math
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cachecraft_rag.compute.decode import DecodeStep
from cachecraft_rag.compute.driver import Call, Until, Work
from cachecraft_rag.engine.config import EngineTuning
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import UnsupportedModelError
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.serving.loop import joint_rows, ready_steps
from cachecraft_rag.serving.loop.step_loop import StepLoop
from cachecraft_rag.serving.loop.task import LoopTask, Priority
from cachecraft_rag.serving.sampling import Sampler, SamplingParams
from cachecraft_rag.serving.token_queue import MAX_UNREAD
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.documents import Chunk
from tests.compute.test_decode import FAMILIES
from tests.engines import SHORT, Asking, Interruption, interrupt, until

KETTLE = Chunk("Empty the kettle before you descale it with vinegar.")
TOASTER = Chunk("The toaster has a crumb tray; pull it out to the left.")
FULL = ReuseConfig(reuse=False, capture=False)
SAMPLED = [
    SamplingParams(max_new_tokens=12),
    SamplingParams(max_new_tokens=9, temperature=0.8, seed=5),
    SamplingParams(max_new_tokens=14, temperature=1.1, top_p=0.7, seed=6),
    SamplingParams(max_new_tokens=5),
]

MakeEngine = Callable[..., Engine]


@contextmanager
def held(engine: Engine) -> Iterator[None]:
    """Keep the loop between two turns."""
    inside, gate = threading.Event(), threading.Event()
    engine.loop._send(lambda: (inside.set(), gate.wait(60)))
    assert inside.wait(60)
    try:
        yield
    finally:
        gate.set()


@contextmanager
def noted_rows(engine: Engine) -> Iterator[list[tuple[int, int]]]:
    """(Layer, rows) of each forward of a layer."""
    rows, own = list[tuple[int, int]](), engine.decoder.layer

    def layer(index: int, hidden: Tensor, **named: Any) -> Tensor:
        rows.append((index, hidden.shape[1]))
        return own(index, hidden, **named)

    engine.decoder.layer = layer  # type: ignore[method-assign]
    try:
        yield rows
    finally:
        del engine.decoder.layer


def decoded(engine: Engine) -> tuple[float, float, bool]:
    """Rows and forwards of all decode steps, and whether each is computed alone."""
    value = engine.request_counts.registry.get_sample_value
    rows, forwards = value("cachecraft_decode_rows_sum"), value("cachecraft_decode_rows_count")
    assert rows is not None
    assert forwards is not None
    return rows, forwards, engine.loop.joint.most == 1


def ask_together(engine: Engine, sampling: Sequence[SamplingParams]) -> list[Asking]:
    """Questions that come to the loop at the same moment."""
    with held(engine):
        asked = [
            Asking(engine, [KETTLE], f"Question {n}?", sampling=one, config=FULL)
            for n, one in enumerate(sampling)
        ]
        until(lambda: engine.loop._inbox.qsize() >= len(asked))
    for one in asked:
        one.ended()
    return asked


# -- together ---------------------------------------------------------------------------------------------------------


@pytest.mark.gate
@pytest.mark.parametrize(("family", "settings"), FAMILIES, ids=[row[0] for row in FAMILIES])
def test_answers_decoded_together_are_those_of_each_alone(
    tiny_decoder: Callable[..., Decoder],
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    settings: dict[str, Any],
) -> None:
    """A random model writes little that is text, so an answer's tokens are compared as they are drawn."""
    drawn: dict[tuple[bool, float, int], list[int]] = {}
    together, own = True, Sampler.draw

    def draw(sampler: Sampler, logits: Tensor) -> int:
        token = own(sampler, logits)
        params = sampler._params
        drawn.setdefault((together, params.temperature, params.max_new_tokens), []).append(token)
        return token

    monkeypatch.setattr(Sampler, "draw", draw)
    decoder = tiny_decoder(family, **settings)
    engine, apart = (
        make_engine(decoder=decoder),
        make_engine(decoder=decoder, tuning=EngineTuning(decode_rows=1)),
    )
    ask_together(engine, SAMPLED)
    together = False
    ask_together(apart, SAMPLED)
    for one in SAMPLED:
        key = (one.temperature, one.max_new_tokens)
        assert drawn[True, *key] == drawn[False, *key]
    rows, forwards, alone = decoded(engine)
    assert (rows > forwards, alone) == (True, False)  # they did meet
    rows, forwards, alone = decoded(apart)
    assert (rows == forwards, alone) == (True, True)


@pytest.mark.gate
@pytest.mark.parametrize(("family", "settings"), FAMILIES, ids=[row[0] for row in FAMILIES])
def test_small_prefills_that_begin_together_are_one_forward_and_give_the_same(
    tiny_decoder: Callable[..., Decoder],
    make_engine: MakeEngine,
    family: str,
    settings: dict[str, Any],
) -> None:
    decoder = tiny_decoder(family, **settings)
    engine, apart = (
        make_engine(decoder=decoder),
        make_engine(decoder=decoder, tuning=EngineTuning(decode_rows=1)),
    )
    engine.loop.joint.speed.stepped(1.0)
    # a forward's fixed part takes as long as a thousand rows
    engine.loop.joint.speed.measured(1000.0, 2.0)

    def first_logits(one: Engine) -> list[Tensor]:
        found: list[Tensor] = []
        own = one.decoder.next_logits
        one.decoder.next_logits = lambda hidden: found.append(own(hidden)) or found[-1]  # type: ignore[method-assign,func-returns-value]
        with noted_rows(one) as rows:
            ask_together(one, [SamplingParams(max_new_tokens=1)] * 2)
        del one.decoder.next_logits
        seen.append(rows)
        return found

    seen: list[list[tuple[int, int]]] = []
    alone = first_logits(apart)
    size = min(count for _, count in seen[0])
    for _ in range(30):  # on so small a model the first may be through before the second is planned
        jointly = first_logits(engine)
        if max(count for _, count in seen[-1]) >= 2 * size:
            break
    else:
        pytest.fail("they were never joined")
    assert len(jointly) == len(alone) == 2
    for one, other in zip(jointly, alone, strict=True):
        assert (one - other).abs().max() <= 1e-3
        assert int(one.argmax()) == int(other.argmax())


def test_large_prefills_run_one_after_the_other(engine: Engine) -> None:
    engine.loop.joint.speed.stepped(0.001)
    engine.loop.joint.speed.measured(1000.0, 1.0)  # the fixed part is worth one row
    with noted_rows(engine) as rows:
        asked = ask_together(engine, [SamplingParams(max_new_tokens=1)] * 2)
    layers = engine.decoder.layout.layers
    lengths = [one.answer.stats.tokens_prompt for one in asked]
    assert sorted(rows) == sorted((layer, length) for length in lengths for layer in range(layers))
    # the second does not interrupt the first
    assert [layer for layer, _ in rows] == [*range(layers)] * 2


def test_a_model_whose_rows_depend_on_each_other_computes_each_request_alone(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    mlp = engine.decoder.model.model.layers[1].mlp
    # by how many rows there are
    scaled = mlp.register_forward_hook(lambda _module, _args, out: out / out.shape[1])
    try:
        ask_together(engine, SAMPLED)
    finally:
        scaled.remove()
    rows, forwards, alone = decoded(engine)
    assert (rows == forwards, alone) == (True, True)
    assert "computed separately from now on: the logits of tiny Llama" in caplog.text


def test_without_memory_for_the_comparison_each_request_is_computed_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_given: object) -> Tensor:
        raise RuntimeError("no memory")

    monkeypatch.setattr(joint_rows.JointRows, "_last_logits", fail)
    ask_together(engine, SAMPLED)
    rows, forwards, alone = decoded(engine)
    assert (rows == forwards, alone) == (True, True)
    assert "comparing joint with single forwards failed: no memory" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError, UnsupportedModelError])
def test_joint_forwards_that_fail_are_repeated_alone_and_given_up_after_the_third(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: type[Exception],
) -> None:
    expected = [one.answer.text for one in ask_together(engine, SAMPLED)]

    own = joint_rows.extend_all

    def fail(decoder: Decoder, steps: Sequence[DecodeStep]) -> Tensor:
        if len(steps) > 1:
            raise error("no memory")
        return own(decoder, steps)

    monkeypatch.setattr(joint_rows, "extend_all", fail)
    assert [one.answer.text for one in ask_together(engine, SAMPLED)] == expected
    assert decoded(engine)[2]
    assert "no memory" in caplog.text
    assert "from now on: 3 joint forwards in a row failed" in caplog.text


def test_an_error_while_one_answers_token_is_drawn_is_its_own(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [
        SamplingParams(max_new_tokens=10),
        SamplingParams(max_new_tokens=10, temperature=0.5, seed=1),
    ]
    expected = ask_together(engine, params)[0].answer.text
    draws, own = list[int](), Sampler.draw

    def draw(sampler: Sampler, logits: Tensor) -> int:
        if sampler._params.temperature:
            draws.append(1)
            if len(draws) == 4:
                raise ZeroDivisionError
        return own(sampler, logits)

    monkeypatch.setattr(Sampler, "draw", draw)
    good, broken = ask_together(engine, params)
    assert (good.error, good.answer.text) == (None, expected)
    assert isinstance(broken.error, ZeroDivisionError)
    assert broken.answer.stats.finish == "failed"


def test_a_mistake_in_the_loop_itself_reaches_every_reader_and_the_loop_goes_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine.loop.joint, "decode", lambda _steps: 1 / 0)
        assert [type(one.error) for one in ask_together(engine, SAMPLED)] == [ZeroDivisionError] * 4
    assert "A turn of the step loop failed" in caplog.text
    assert [one.error for one in ask_together(engine, SAMPLED)] == [None] * 4


def test_a_mistake_in_what_follows_from_work_is_logged_and_disturbs_no_other_work(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    def work() -> Work[None]:
        yield Call(lambda: None)

    with held(engine):
        engine.loop.start(LoopTask(lambda _: work(), lambda *_: 1 / 0, Priority.JOB))
        asked = Asking(engine, [KETTLE])
        until(lambda: engine.loop._inbox.qsize() >= 2)
    assert asked.ended().stats.finish == "length"
    assert "ZeroDivisionError" in caplog.text
    assert "A turn of the step loop failed" not in caplog.text


# -- waiting ----------------------------------------------------------------------------------------------------------


def test_others_compute_while_a_request_waits_for_the_disk(make_engine: MakeEngine) -> None:
    warm = make_engine()
    Asking(warm, [KETTLE]).ended()
    warm.settle()
    engine, gate = make_engine(host_bytes=0), threading.Event()
    begin, begun = engine._answering.loader.begin, list[Any]()

    def hanging(stored: Any, *rest: Any) -> Any:
        if not begun:
            for one, _ in stored:
                read = one.read
                one.read = lambda *given, read=read, **named: (gate.wait(60), read(*given, **named))
        begun.append(begin(stored, *rest))
        return begun[-1]

    engine._answering.loader.begin = hanging  # type: ignore[method-assign]
    waits = Asking(engine, [KETTLE])
    until(lambda: bool(begun))
    assert Asking(engine, [TOASTER], config=FULL).outcomes == ["computed"]
    assert waits.thread.is_alive()
    gate.set()
    assert waits.outcomes == ["exact"]
    assert waits.answer.stats.load_s > 0.0


def test_an_answer_is_decoded_a_few_pieces_ahead_of_its_reader(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws, own = list[int](), Sampler.draw
    monkeypatch.setattr(
        Sampler, "draw", lambda sampler, logits: draws.append(1) or own(sampler, logits)
    )
    answer = engine.stream("Why?", [KETTLE], sampling=SamplingParams(max_new_tokens=40))
    next(answer)
    other = Asking(engine, [KETTLE], sampling=SamplingParams(max_new_tokens=40), config=FULL)
    other.ended()  # a reader who pauses delays no other
    ahead = len(draws) - 40
    assert 1 < ahead <= MAX_UNREAD + 2  # the first piece may have taken two tokens
    assert answer.stats.tokens_generated < ahead
    # and nothing is computed, nor looked at
    assert engine.loop.call(engine.loop._sleep_s) == math.inf
    answer.close()
    assert answer.stats.finish == "closed"


def test_an_idle_loop_sleeps_until_it_is_asked_and_ends_with_its_engine(
    make_engine: MakeEngine, decoder_of_letters: Callable[..., Decoder], tmp_path: Path
) -> None:
    with ChunkCacheStore.open(tmp_path / "own") as store:
        engine = Engine(decoder_of_letters(), store)
        Asking(engine, [KETTLE]).ended()
        assert engine.settle(60)
        thread = engine.loop._thread
        assert thread is not None
        assert engine.loop.call(engine.loop._sleep_s) == math.inf
        store.before_removal.clear()  # as when the store goes with it
        gone = weakref.ref(engine)
        del engine
        gc.collect()
        assert gone() is None
        thread.join(60)
        assert not thread.is_alive()


def test_an_idle_engine_sleeps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = engine.stream("Why?", [KETTLE], sampling=SamplingParams(max_new_tokens=40))
    next(answer)  # so does one whose reader pauses
    assert engine.settle(60)
    turns, turn = list[None](), StepLoop._turn

    def counted(loop: StepLoop) -> None:
        turns.append(None)
        turn(loop)

    monkeypatch.setattr(StepLoop, "_turn", counted)
    engine.loop.call(lambda: None)
    time.sleep(0.5)
    # the call may have ended a turn that was not counted yet; a loop that polls would take hundreds
    assert len(turns) <= 3
    answer.close()


def test_a_wait_that_ends_early_leaves_nothing_in_the_loop(engine: Engine) -> None:
    assert not engine.loop.wait_until(lambda: False, 0.01)
    assert engine.loop.call(lambda: len(engine.loop._watchers)) == 0


def test_an_engine_that_computed_nothing_closes_without_a_thread(engine: Engine) -> None:
    engine.close()
    assert not engine.loop.alive
    engine.close()


def test_a_loop_whose_start_was_interrupted_starts_with_the_next_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, times = threading.Thread.start, list[str]()

    def start(thread: threading.Thread) -> None:
        if thread.name == "cachecraft-steps" and len(times) < 2:
            times.append(thread.name)
            if len(times) == 2:
                own(thread)
            raise Interruption
        own(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    for _ in range(2):  # before the thread starts, and after
        with pytest.raises(Interruption):
            "".join(engine.stream("Why?", [KETTLE], sampling=SHORT, config=FULL))
    assert "".join(engine.stream("Why?", [KETTLE], sampling=SHORT, config=FULL))
    assert [one.name for one in threading.enumerate()].count("cachecraft-steps") == 1


def test_work_is_not_kept_for_a_later_thread_if_none_can_start(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ran: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="start new thread"):
            engine.loop._send(lambda: ran.append("the first"))
    done = threading.Event()
    engine.loop._send(done.set)
    assert done.wait(60)
    assert ran == []


def test_work_whose_steps_cannot_be_made_ends_with_the_error(engine: Engine) -> None:
    with pytest.raises(ZeroDivisionError):
        engine.loop.run(lambda _task: 1 / 0, Priority.ANSWER)  # type: ignore[arg-type, return-value]


# -- endings ----------------------------------------------------------------------------------------------------------


def test_a_reader_closed_by_another_thread_gets_no_further_piece(engine: Engine) -> None:
    asking = Asking(engine, [KETTLE], sampling=SamplingParams(max_new_tokens=400), config=FULL)
    until(lambda: len(asking.answer.text) > 3)
    asking.answer.close()
    assert asking.ended().stats.finish == "closed"
    assert asking.error is None
    until(lambda: not engine.loop.call(lambda: engine.loop.under_way(Priority.ANSWER)))


@pytest.mark.parametrize("closes", [True, False])
def test_every_thread_that_reads_one_answer_comes_to_its_end(engine: Engine, closes: bool) -> None:
    answer = engine.stream(
        "Why?", [KETTLE], sampling=SamplingParams(max_new_tokens=30), config=FULL
    )
    with held(engine):
        readers = [threading.Thread(target=lambda: list(answer), daemon=True) for _ in range(3)]
        for one in readers:
            one.start()
        if closes:
            answer.close()
    for one in readers:
        one.join(60)
        assert not one.is_alive()


LOCKS: dict[str, Callable[[Engine], Any]] = {
    "store": lambda engine: engine.store._lock,
    "host memory": lambda engine: engine.store._memory.host._lock,
    "captures": lambda engine: engine.write_back._guard,
    "loop": lambda engine: engine.loop._guard,
    "writer": lambda engine: engine.store._writer._lock,
    "planners": lambda engine: engine.loop._planners._shutdown_lock,
}


@pytest.mark.parametrize("name", LOCKS)
def test_garbage_may_be_collected_while_a_lock_is_held(engine: Engine, name: str) -> None:
    gc.disable()
    try:
        answer = engine.stream("Which tray?", [KETTLE], sampling=SamplingParams(max_new_tokens=30))
        next(answer)
        knot: list[Any] = [answer]
        knot.append(knot)
        gone = weakref.ref(answer)
        del answer, knot

        def collect() -> None:
            with LOCKS[name](engine):
                gc.collect()

        thread = threading.Thread(target=collect, daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive(), "the answer's end waits for a lock that its own thread holds"
        assert gone() is None
        assert engine.settle(60)
        assert engine.store.stats().captures == {"stored": 2}
        closed = engine.request_counts.registry.get_sample_value(
            "cachecraft_requests_total", {"outcome": "closed"}
        )
        assert closed == 1
    finally:
        gc.enable()


@pytest.mark.usefixtures("untraced")
def test_interruptions_at_any_moment_lose_nothing(engine: Engine) -> None:
    expected = Asking(engine, [KETTLE], config=FULL).ended().text
    stop, caught, done, wrong = threading.Event(), 0, 0, 0

    def work() -> None:
        nonlocal done, wrong
        while not stop.is_set():
            answer = engine.stream("How do I descale it?", [KETTLE], sampling=SHORT, config=FULL)
            wrong += "".join(answer) != expected
            done += 1

    def guarded() -> None:
        nonlocal caught
        while not stop.is_set():
            try:
                work()
            except Interruption:
                caught += 1

    def doubly() -> None:  # also between two blocks of `guarded`
        while not stop.is_set():
            try:
                guarded()
            except Interruption:
                continue

    threads = [threading.Thread(target=doubly, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    dice = random.Random(1)
    # a busy machine takes its time; work that is lost stops the count
    deadline = time.monotonic() + 120
    while caught < 150 and time.monotonic() < deadline:
        interrupt(threads[dice.randrange(3)])
        time.sleep(dice.random() * 2e-2)
    before = done
    until(lambda: done > before + 3)
    stop.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert caught >= 150
    assert wrong == 0
    # the loop holds nothing of those who left
    until(lambda: not engine.loop.call(lambda: engine.loop._tasks))
    assert len(engine._admission) == 0


def test_the_callers_context_variables_hold_where_its_request_runs(engine: Engine) -> None:
    variable, seen = contextvars.ContextVar("variable", default="unset"), list[str]()
    look_up, layer = engine._answering.look_up, engine.decoder.layer
    engine._answering.look_up = lambda *given, **named: (
        seen.append(variable.get()) or look_up(*given, **named)
    )
    variable.set("mine")
    assert "".join(engine.stream("Why?", [KETTLE], sampling=SHORT))
    assert seen == ["mine"]
    assert layer is not None


def test_a_generation_reads_an_engine_that_blocks_in_threads() -> None:
    """Engines whose model runs in a server give a plain generator; a task may read it."""
    import asyncio

    from cachecraft_rag.serving.generation import Generation
    from cachecraft_rag.serving.request import Request, RequestProgress
    from cachecraft_rag.types.prompts import Prompt, Segment

    def pieces() -> Iterator[str]:
        try:
            yield "a"
            threads.append(threading.current_thread())
            yield "b"
        finally:
            ended.append("generator")

    threads, ended = list[threading.Thread](), list[Any]()
    request = Request(
        Prompt((Segment("question", "q", (1,)),)), ReuseConfig(), SHORT, None, time.perf_counter()
    )
    answer = Generation(
        request,
        RequestProgress(),
        pieces(),
        layers=1,
        ended=lambda _stats, error: ended.append(error),
        later=ended.append,
    )

    async def read() -> list[str]:
        return [piece async for piece in answer]

    assert asyncio.run(read()) == ["a", "b"]
    assert threads[0] is not threading.main_thread()
    assert ended == ["generator", None]


@pytest.mark.slow  # it imports torch once more
def test_a_program_that_forgets_to_close_ends_and_keeps_its_captures(tmp_path: Path) -> None:
    program = """
import sys
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.types.documents import Chunk

engine = Engine.from_pretrained("demo", store=sys.argv[1])
answer = engine.stream("Why?", [Chunk("The toaster has a crumb tray.")], sampling=SamplingParams(max_new_tokens=50))
next(answer)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    with ChunkCacheStore.open(tmp_path / "caches") as store:
        assert store.stats().variants == 2


def test_no_tensor_is_kept_by_the_loop_between_requests(engine: Engine) -> None:
    Asking(engine, [KETTLE]).ended()
    assert engine.settle(60)
    engine.loop.call(lambda: None)
    gc.collect()
    from cachecraft_rag.compute.kv_buffer import KVBuffer

    assert not [one for one in gc.get_objects() if type(one) is KVBuffer]
    assert torch.get_num_threads() >= 1


def test_a_long_pause_of_one_reader_does_not_keep_the_loop_awake(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work for idle time waits until the other reader has paused as long, too."""
    monkeypatch.setattr(ready_steps, "_PAUSE_S", 500.0)
    loop = StepLoop(engine.decoder, engine.loop.joint)
    now = time.perf_counter()
    for priority, paused_s in (
        (Priority.ANSWER, 1000.0),
        (Priority.ANSWER, 1.0),
        (Priority.IDLE, 0.0),
    ):
        task = LoopTask(lambda _: iter(()), lambda *_: None, priority)  # type: ignore[arg-type,return-value]
        task.step = Until(lambda: False, for_reader=priority is Priority.ANSWER)
        task.since = now - paused_s
        loop._tasks.append(task)
    assert 100.0 < loop._sleep_s() <= 499.0
