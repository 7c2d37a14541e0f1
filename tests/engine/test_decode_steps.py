"""Decode steps of several answers in one pass: when they meet, what they give, and that nobody is lost or held up."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cachecraft_rag.compute.decode import extend
from cachecraft_rag.compute.driver import prefill
from cachecraft_rag.compute.job import PrefillJob
from cachecraft_rag.compute.kv_buffer import KVBuffer
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.compute.speed import ComputeSpeed
from cachecraft_rag.engine import decode_steps as module
from cachecraft_rag.engine.decode_steps import DecodeSteps, LoneSteps
from cachecraft_rag.engine.decoder import Decoder
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.engine.sampling import Sampler, SamplingParams
from cachecraft_rag.engine.scheduling import FairLock
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types import Chunk
from tests.compute.test_decode import FAMILIES
from tests.engine.conftest import Interruption, interrupt

KETTLE = Chunk("Empty the kettle before you descale it with vinegar.")
LAYERS = 4


def until(holds: Callable[[], bool]) -> None:
    """Wait for something another thread does."""
    give_up = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.001)


@pytest.fixture
def decoder(tiny_decoder: Callable[..., Decoder]) -> Decoder:
    return tiny_decoder("Llama")


class Wanting(threading.Thread):
    """A thread that wants one step."""

    def __init__(self, steps: DecodeSteps, buffer: KVBuffer, position: int) -> None:
        super().__init__(daemon=True)
        self._wanted = (buffer, 42, position)
        self._steps, self.logits, self.error = steps, torch.empty(0), None
        self.start()

    error: Exception | None

    def run(self) -> None:
        try:
            self.logits = self._steps.next_logits(*self._wanted)
        except Exception as error:  # noqa: BLE001  # whatever it is, the test looks at it
            self.error = error

    def ended(self) -> Wanting:
        self.join(60)
        assert not self.is_alive()
        return self


class Bench:
    """Prompts of different lengths, and what computes their steps; `passes` are the rows of each layer that ran."""

    def __init__(self, decoder: Decoder, monkeypatch: pytest.MonkeyPatch, *, most: int = 8) -> None:
        self.decoder, self.lock, self.passes = decoder, FairLock(), list[int]()
        self.steps = DecodeSteps(decoder, self.lock.take, ComputeSpeed(1.0), most=most)
        own = decoder.layer

        def layer(index: int, hidden: Tensor, **named: Any) -> Tensor:
            if index == 0:
                self.passes.append(hidden.shape[1])
            return own(index, hidden, **named)

        monkeypatch.setattr(decoder, "layer", layer)

    def prompt(self, number: int) -> tuple[KVBuffer, int]:
        """A prefilled prompt, and how long it is."""
        length = 20 + 7 * number
        ids = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(number)).tolist()
        job = PrefillJob(ids, Rows.of([0, 10, length], new=range(length)), capacity=length + 200)
        buffer = prefill(self.decoder, job).buffer
        self.passes.clear()
        return buffer, length

    def joined(self, count: int) -> None:
        """Wait until so many stand in the group that is open."""
        until(lambda: self.steps._open is not None and len(self.steps._open.left()) == count)

    def together(self, prompts: Sequence[tuple[KVBuffer, int]]) -> list[Wanting]:
        """A step of each, all of which wait for the same turn."""
        with self.lock.take():
            wanting = []
            for prompt in prompts:
                room = 1 if self.steps.counts().alone else self.steps._most
                place = len(wanting) % room + 1
                before = self.steps._open
                wanting.append(Wanting(self.steps, *prompt))
                until(lambda before=before, place=place: place > 1 or self.steps._open is not before)
                self.joined(place)
        return [one.ended() for one in wanting]

    def alone(self, prompt: tuple[KVBuffer, int]) -> Tensor:
        buffer, position = prompt
        return self.decoder.next_logits(extend(self.decoder, buffer, [42], position))


@pytest.fixture
def bench(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(decoder, monkeypatch)


# -- when steps meet --------------------------------------------------------------------------------------------------


def test_steps_that_wait_together_are_one_pass_and_give_what_each_gives_alone(bench: Bench) -> None:
    prompts = [bench.prompt(number) for number in range(5)]
    expected = [bench.alone(prompt) for prompt in prompts]
    bench.passes.clear()
    first = bench.together(prompts)
    assert bench.passes == [5, 1, 1, 1, 1, 1]  # the first time they are compared
    bench.passes.clear()
    second = bench.together(prompts)
    assert bench.passes == [5]
    for one, other, logits in zip(first, second, expected, strict=True):
        assert torch.equal(one.logits, logits)
        assert (other.logits - logits).abs().max() <= 1e-3
        assert int(other.logits.argmax()) == int(logits.argmax())
    counts = bench.steps.counts()
    assert counts.alone is None
    assert (counts.rows.total, sum(counts.rows.counts)) == (15.0, 7)


def test_one_answer_alone_takes_the_path_of_one(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "extend_all", lambda *_: pytest.fail("nobody else was there"))
    monkeypatch.setattr(module, "SimpleQueue", NeverWaitedFor)
    buffer, position = bench.prompt(1)
    heads: list[int] = []
    bench.decoder.model.lm_head.register_forward_hook(lambda _module, args, _out: heads.append(args[0].shape[1]))
    for place in range(5):
        bench.steps.next_logits(buffer, 42, position + place)
    bench.decoder.model.lm_head._forward_hooks.clear()
    assert bench.passes == heads == [1] * 5
    assert bench.steps.counts().rows.counts[0] == 5


class NeverWaitedFor:
    """In place of the queue that who waits for others is woken by."""

    def put(self, _item: object) -> None:
        """Tell."""

    def get(self, **_how: object) -> None:
        """Wait."""
        pytest.fail("it waited for others")


@pytest.mark.parametrize(("most", "passes"), [(1, [1] * 5), (2, [2, 2, 1]), (3, [3, 2])])
def test_a_pass_has_no_more_rows_than_the_settings_say(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, most: int, passes: list[int]
) -> None:
    bench = Bench(decoder, monkeypatch, most=most)
    prompts = [bench.prompt(number) for number in range(5)]
    bench.together(prompts)
    bench.passes.clear()
    bench.together(prompts)
    assert bench.passes == passes
    assert bench.steps.counts().alone == (LoneSteps.OFF if most == 1 else None)


def test_a_step_that_comes_later_joins_and_whoever_stands_between_is_next(bench: Bench) -> None:
    (one, two), passes = [bench.prompt(number) for number in range(2)], bench.passes
    between = threading.Thread(target=lambda: bench_pass(bench))
    with bench.lock.take():
        first = Wanting(bench.steps, *one)
        bench.joined(1)
        until(lambda: bench.lock._last is not None and bench.lock._last.before is not None)
        before = bench.lock._last
        between.start()
        until(lambda: bench.lock._last is not before)
        second = Wanting(bench.steps, *two)
        bench.joined(2)
    for thread in (first, second, between):
        thread.join(60)
    assert passes == [2, 1, 1, 17]  # two steps, compared; then the pass


def bench_pass(bench: Bench) -> None:
    """A pass of a prefill."""
    with bench.lock.take():
        prefill(bench.decoder, PrefillJob(list(range(17)), Rows.of([0, 17], new=range(17))))


def test_who_was_just_served_is_waited_for_and_a_reader_that_pauses_only_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [bench.prompt(number) for number in range(3)]
    bench.together(prompts)
    monkeypatch.setattr(module, "_PAUSE", 1e9)  # for as long as it takes
    bench.together(prompts)
    bench.passes.clear()
    waiting = [Wanting(bench.steps, *prompts[0])]
    bench.joined(1)  # and it has the lock
    waiting += [Wanting(bench.steps, *prompt) for prompt in prompts[1:]]
    for one in waiting:
        one.ended()
    assert bench.passes == [3]
    monkeypatch.setattr(module, "_PAUSE", 1e-9)
    bench.together(prompts)
    bench.passes.clear()
    for _ in range(2):  # the others' readers pause
        Wanting(bench.steps, *prompts[0]).ended()
    assert bench.passes == [1, 1]
    assert not bench.steps._served._away - {id(prompts[0][0])}


# -- what cannot be computed together ---------------------------------------------------------------------------------


def test_a_model_whose_rows_depend_on_each_other_computes_each_step_alone(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [bench.prompt(number) for number in range(3)]
    mlp = bench.decoder.model.model.layers[1].mlp
    scaled = mlp.register_forward_hook(lambda _module, _args, out: out / out.shape[1])  # by how many rows there are
    try:
        expected = [bench.alone(prompt) for prompt in prompts]
        found = bench.together(prompts)
        bench.passes.clear()
        bench.together(prompts)
    finally:
        scaled.remove()
    for one, logits in zip(found, expected, strict=True):
        assert torch.equal(one.logits, logits)
    assert bench.passes == [1, 1, 1]
    assert bench.steps.counts().alone == LoneSteps.DIFFERS
    assert "computed on its own from now on (differs): the logits of tiny Llama" in caplog.text


def test_a_pass_that_fails_is_tried_alone_and_given_up_after_the_third(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompts, tries, own = [bench.prompt(number) for number in range(2)], list[int](), module.extend_all
    expected = [bench.alone(prompt) for prompt in prompts]

    def fail(_decoder: Decoder, steps: Sequence[Any]) -> Tensor:
        tries.append(len(steps))
        if len(tries) == 2:
            return own(bench.decoder, steps)
        raise RuntimeError("no memory")

    monkeypatch.setattr(module, "extend_all", fail)
    for _ in range(7):
        for one, logits in zip(bench.together(prompts), expected, strict=True):
            assert (one.logits - logits).abs().max() <= 1e-3
    assert tries == [2] * 5  # the second went well, the three behind it in a row did not
    assert bench.steps.counts().alone == LoneSteps.FAILED
    assert "no memory" in caplog.text


def test_a_step_that_fails_on_its_own_fails_for_its_reader_only(bench: Bench) -> None:
    prompts = [bench.prompt(number) for number in range(3)]
    buffer, position = prompts[1]
    expected = [bench.alone(prompt) for prompt in prompts]
    first, broken, last = bench.together([prompts[0], (buffer, position + 10_000), prompts[2]])
    assert isinstance(broken.error, IndexError | RuntimeError)
    for one, logits in zip((first, last), (expected[0], expected[2]), strict=True):
        assert one.error is None
        assert torch.equal(one.logits, logits)  # on its own, since the pass had failed
    assert bench.steps._failures == 1
    assert [one.error for one in bench.together([prompts[0], prompts[2]])] == [None, None]
    assert bench.steps._failures == 0


# -- whole answers ----------------------------------------------------------------------------------------------------

SAMPLED = [
    SamplingParams(max_new_tokens=12),
    SamplingParams(max_new_tokens=9, temperature=0.8, seed=5),
    SamplingParams(max_new_tokens=14, temperature=1.1, top_p=0.7, seed=6),
    SamplingParams(max_new_tokens=5),
]


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    opened: list[Any] = []

    def make(decoder: Decoder, **settings: Any) -> Engine:
        opened.append(ChunkCacheStore.open(tmp_path / "caches"))
        config = ReuseConfig(reuse=False, capture=False)
        opened.append(Engine(decoder, opened[-1], config=config, new_variants="off", **settings))
        made: Engine = opened[-1]
        return made

    yield make
    for one in reversed(opened):
        one.close()


def read_all(engine: Engine, sampling: Sequence[SamplingParams]) -> list[list[str]]:
    """The pieces of answers that are decoded at the same time."""
    answers = [engine.stream(f"Question {n}?", [KETTLE], sampling=one) for n, one in enumerate(sampling)]
    pieces = [[next(answer)] for answer in answers]

    def read(number: int) -> None:
        pieces[number].extend(answers[number])

    threads = [threading.Thread(target=read, args=(number,)) for number in range(len(answers))]
    with engine.lock.take():
        for thread in threads:
            thread.start()
        until(lambda: engine.decode_steps._open is not None and len(engine.decode_steps._open.left()) == len(answers))
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return pieces


@pytest.mark.gate
@pytest.mark.parametrize(("family", "settings"), FAMILIES, ids=[row[0] for row in FAMILIES])
def test_answers_that_are_decoded_together_are_those_of_each_alone(
    tiny_decoder: Callable[..., Decoder], make_engine: Callable[..., Engine], family: str, settings: dict[str, Any]
) -> None:
    decoder = tiny_decoder(family, **settings)
    # A random model writes little that is text: an answer's tokens are compared as they are drawn.
    engine, apart = make_engine(decoder), make_engine(decoder, decode_rows=1)
    drawn = {True: tokens_of(engine, SAMPLED), False: tokens_of(apart, SAMPLED)}
    assert drawn[True] == drawn[False]
    assert all(drawn[True])
    rows = engine.decode_counts().rows  # type: ignore[union-attr]
    assert engine.decode_steps.counts().alone is None
    assert rows.total > sum(rows.counts)  # they did meet
    assert apart.decode_steps.counts().rows.counts[1:] == (0,) * len(rows.bounds)


def tokens_of(engine: Engine, sampling: Sequence[SamplingParams]) -> list[list[int]]:
    """The tokens of answers whose first steps, at least, wait at the same time."""
    found: list[list[int]] = [[] for _ in sampling]
    prefilled, going = threading.Barrier(len(sampling) + 1), threading.Event()

    def read(number: int) -> None:
        request = engine._request(
            f"Question {number}?", [KETTLE], history=(), session=None, sampling=sampling[number], config=None
        )
        output = engine._prefill(request)
        prefilled.wait(60)
        assert going.wait(60)
        tokens = engine._tokens(request, output, ())
        found[number] = [next(tokens) for _ in range(sampling[number].max_new_tokens)]

    threads = [threading.Thread(target=read, args=(number,), daemon=True) for number in range(len(sampling))]
    for thread in threads:
        thread.start()
    prefilled.wait(60)
    with engine.lock.take():
        going.set()
        until(lambda: waits_at_the_lock(engine, len(sampling)))
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


def waits_at_the_lock(engine: Engine, count: int) -> bool:
    """Whether the steps of so many answers wait: as one group, or one by one where each goes alone."""
    if engine.decode_steps.counts().alone is None:
        group = engine.decode_steps._open
        return group is not None and len(group.left()) == count
    ticket, found = engine.lock._last, 0
    while ticket is not None and ticket.before is not None:
        ticket, found = ticket.before, found + 1
    return found == count


def test_a_reader_that_pauses_or_leaves_holds_nobody_up(
    decoder_of_letters: Callable[..., Decoder], make_engine: Callable[..., Engine]
) -> None:
    engine, sampling = make_engine(decoder_of_letters()), SamplingParams(max_new_tokens=10)
    expected = ["".join(pieces) for pieces in read_all(engine, [sampling] * 3)]
    pausing, leaving = (engine.stream(f"Question {n}?", [KETTLE], sampling=sampling) for n in (0, 1))
    begun = [next(pausing), next(pausing)], [next(leaving)]
    leaving.close()
    assert "".join(engine.stream("Question 2?", [KETTLE], sampling=sampling)) == expected[2]
    assert "".join(begun[0]) + "".join(pausing) == expected[0]
    assert leaving.text == expected[1][: len(leaving.text)]


def test_an_error_while_one_answers_token_is_drawn_is_its_own(
    decoder_of_letters: Callable[..., Decoder], make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, sampling = make_engine(decoder_of_letters()), SamplingParams(max_new_tokens=10)
    broken = SamplingParams(max_new_tokens=10, temperature=0.5, seed=1)
    expected = ["".join(pieces) for pieces in read_all(engine, [sampling] * 3)]
    draws, own = list[int](), Sampler.draw

    def draw(sampler: Sampler, logits: Tensor) -> int:
        if sampler._params.temperature:
            draws.append(1)
            if len(draws) == 4:
                raise ZeroDivisionError
        return own(sampler, logits)

    monkeypatch.setattr(Sampler, "draw", draw)
    answers = [engine.stream(f"Question {n}?", [KETTLE], sampling=one) for n, one in enumerate((sampling, broken))]
    begun = [next(answer) for answer in answers]
    failed: list[BaseException] = []

    def read() -> None:
        try:
            for _ in answers[1]:
                pass
        except ZeroDivisionError as error:
            failed.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert begun[0] + "".join(answers[0]) == expected[0]
    thread.join(60)
    assert (len(failed), answers[1].stats.finish) == (1, "failed")
    assert "".join(engine.stream("Question 2?", [KETTLE], sampling=sampling)) == expected[2]


# -- interruptions ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("untraced")
def test_when_the_one_that_computes_is_interrupted_another_goes_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, own = [bench.prompt(number) for number in range(3)], module.extend_all
    expected = [bench.alone(prompt) for prompt in prompts]
    leaders: list[threading.Thread] = []

    def interrupted(decoder: Decoder, steps: Sequence[Any]) -> Tensor:
        leaders.append(threading.current_thread())
        found = own(decoder, steps)
        if len(leaders) == 1:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(module, "extend_all", interrupted)
    monkeypatch.setattr(threading, "excepthook", lambda _told: None)
    wanting = bench.together(prompts)
    assert len(set(leaders)) == 2
    for one, logits in zip(wanting, expected, strict=True):
        if one is leaders[0]:
            assert not len(one.logits)
        else:
            assert torch.equal(one.logits, logits)


@pytest.mark.usefixtures("untraced")
def test_interruptions_at_any_moment_lose_no_step(bench: Bench) -> None:
    prompts = [bench.prompt(number) for number in range(3)]
    expected = [bench.alone(prompt) for prompt in prompts]
    bench.together(prompts)  # compared
    stop, caught, done, wrong = threading.Event(), 0, [0] * len(prompts), 0

    def work(number: int) -> None:
        nonlocal wrong
        while not stop.is_set():
            logits = bench.steps.next_logits(prompts[number][0], 42, prompts[number][1])
            wrong += not bool((logits - expected[number]).abs().max() <= 1e-3)
            done[number] += 1

    def guarded(number: int) -> None:
        nonlocal caught
        while not stop.is_set():
            try:
                work(number)
            except Interruption:
                caught += 1

    def doubly(number: int) -> None:  # also between two blocks of `guarded`
        while not stop.is_set():
            try:
                guarded(number)
            except Interruption:
                continue

    threads = [threading.Thread(target=doubly, args=(number,), daemon=True) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    dice, interval = random.Random(1), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        deadline = time.monotonic() + 300  # a busy machine takes its time; a step that is lost stops the count
        while caught < 200 and time.monotonic() < deadline:
            interrupt(threads[dice.randrange(len(threads))])
            time.sleep(dice.random() * 2e-2)
    finally:
        sys.setswitchinterval(interval)
    before = list(done)
    until(lambda: all(now > then for now, then in zip(done, before, strict=True)))  # nobody waits for good
    stop.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert caught >= 200
    assert wrong == 0
    assert bench.steps.counts().alone is None
    assert bench.together(prompts)[0].error is None
