"""Requests in the engine's queue: planned when their turn comes, computed once, gone without a trace when closed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cachecraft_rag.engine import engine as engine_module
from cachecraft_rag.engine.async_bridge import iterate
from cachecraft_rag.engine.base import Generation
from cachecraft_rag.engine.decoder import Decoder
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.engine.prepared import Prepared
from cachecraft_rag.engine.sampling import SamplingParams
from cachecraft_rag.errors import BusyError, WaitTimeoutError
from cachecraft_rag.langchain.chat_model import ChatCacheCraft
from cachecraft_rag.llama_index.llm import CacheCraftLLM
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.catalog_records import RowFilter
from cachecraft_rag.types import Chunk

KETTLE = Chunk("Empty the kettle before you descale it with vinegar.")
TOASTER = Chunk("The toaster has a crumb tray; pull it out to the left.")
QUESTION = "How do I descale the kettle?"
SHORT = SamplingParams(max_new_tokens=8)
# Takes what is stored also where computing is faster, and leaves no choice to clocks.
CONFIG = ReuseConfig(alpha=0.3, loading="layerwise")
FULL = ReuseConfig(reuse=False, capture=False)


def until(holds: Callable[[], bool]) -> None:
    """Wait for something another thread does."""
    give_up = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.001)


@pytest.fixture(scope="module")
def decoder(decoder_of_letters: Callable[..., Decoder]) -> Decoder:
    return decoder_of_letters()


@pytest.fixture
def make_engine(decoder: Decoder, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Makes engines over one folder; `host_bytes` of the store."""
    opened: list[Any] = []

    def make(*, host_bytes: int = 1 << 30, **settings: Any) -> Engine:
        opened.append(ChunkCacheStore.open(tmp_path / "caches", host_bytes=host_bytes))
        opened.append(Engine(decoder, opened[-1], **({"config": CONFIG, "new_variants": "off"} | settings)))
        made: Engine = opened[-1]
        return made

    yield make
    for one in reversed(opened):
        one.close()


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine()


class Asking:
    """A question in a thread of its own."""

    def __init__(self, engine: Engine, chunks: list[Chunk], question: str = QUESTION, **how: Any) -> None:
        self.error: BaseException | None = None
        self.answer = engine.stream(question, chunks, **({"sampling": SHORT} | how))
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for _ in self.answer:
                pass
        except Exception as error:  # noqa: BLE001  # whatever it is, the test looks at it
            self.error = error

    def ended(self) -> Generation:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.answer

    @property
    def outcomes(self) -> list[str]:
        return [chunk.outcome for chunk in self.ended().stats.chunks]


def waiting(engine: Engine, count: int) -> None:
    until(lambda: engine.queue.counts().waiting == count)


def chunks_stored(engine: Engine) -> list[str]:
    """Of each stored variant, without the instruction's."""
    names = [row.variant.key.chunk_id for row in engine.store.rows()]
    return sorted(name for name in names if name != engine.prompts.system.segment_id)


def in_turn(engine: Engine, chunks: list[Chunk], **how: Any) -> Asking:
    """A question that has its turn, while the test holds the lock of the passes."""
    asking = Asking(engine, chunks, **how)
    until(lambda: engine.queue._turn is not None and bool(asking.answer.stats.chunks))
    return asking


# -- the plan of the moment -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 6])
def test_a_new_chunk_that_many_wait_for_is_computed_once(engine: Engine, count: int) -> None:
    with engine.lock.take():
        asked = [in_turn(engine, [KETTLE, TOASTER])]
        asked += [Asking(engine, [KETTLE, TOASTER], f"{QUESTION} ({n})") for n in range(count - 1)]
        waiting(engine, count - 1)
    assert [one.outcomes for one in asked] == [["computed"] * 2] + [["exact"] * 2] * (count - 1)
    assert chunks_stored(engine) == sorted([KETTLE.chunk_id, TOASTER.chunk_id])
    assert all(one.ended().stats.queue_s > 0.0 for one in asked[1:])
    assert engine.queue_counts().waiting == 0  # type: ignore[union-attr]


def test_a_capture_does_not_wait_for_the_end_of_its_answer(engine: Engine) -> None:
    first = engine.stream(QUESTION, [KETTLE], sampling=SHORT)
    next(first)  # and its reader pauses
    other = Asking(engine, [KETTLE], "And then?")
    assert other.outcomes == ["exact"]
    rest = "".join(first)
    assert rest
    first.close()
    engine.settle()
    assert chunks_stored(engine) == [KETTLE.chunk_id]
    again = Asking(engine, [KETTLE], config=FULL)
    assert again.ended().text == first.text  # handing its captures over has not touched it


def test_chunks_that_cannot_serve_are_not_waited_for(engine: Engine) -> None:
    Asking(engine, []).ended()  # the instruction
    engine.settle()
    first = engine.stream(QUESTION, [KETTLE, TOASTER], sampling=SHORT)
    next(first)  # its reader pauses; it has the kettle behind the toaster
    asking = Asking(engine, [KETTLE], config=ReuseConfig(scope="prefix"))
    assert asking.outcomes == ["computed"]
    engine.settle()
    assert chunks_stored(engine) == [KETTLE.chunk_id]
    assert Asking(engine, [TOASTER], config=ReuseConfig(scope="prefix")).outcomes == ["exact"]
    first.close()


def test_what_is_private_is_waited_for_by_its_own_session_only(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(system="You help Ann, who is 83.", private_system=True)
    first = engine.stream(QUESTION, [KETTLE], sampling=SHORT, session="ann")
    next(first)  # its reader pauses
    nobody = engine.stream(QUESTION, [KETTLE], sampling=SHORT)
    next(nobody)  # nothing of it is stored, so it announces nothing
    assert Asking(engine, [KETTLE], session="bob").outcomes == ["computed"]
    engine.settle()
    assert {row.variant.session for row in engine.store.rows()} == {"bob"}
    assert Asking(engine, [KETTLE], session="ann").outcomes == ["exact"]
    for answer in (first, nobody):
        answer.close()


def test_when_the_first_one_fails_the_next_one_computes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **settings: Any) -> None:
        monkeypatch.undo()
        raise RuntimeError("no memory")

    with engine.lock.take():
        failing = in_turn(engine, [KETTLE])
        other = Asking(engine, [KETTLE])
        waiting(engine, 1)
        monkeypatch.setattr("cachecraft_rag.compute.driver.advance", fail)
    assert other.outcomes == ["computed"]
    failing.ended()
    assert isinstance(failing.error, RuntimeError)
    assert other.error is None


def test_the_plan_is_that_of_the_turn(engine: Engine) -> None:
    Asking(engine, [KETTLE]).ended()
    engine.settle()
    with engine.lock.take():
        first = in_turn(engine, [TOASTER])
        other = Asking(engine, [KETTLE])
        waiting(engine, 1)
        engine.store.evict(RowFilter(chunk_ids=(KETTLE.chunk_id,)))
    assert other.outcomes == ["computed"]
    full = Asking(engine, [KETTLE], config=FULL)
    assert other.answer.text == full.ended().text
    first.ended()


@pytest.mark.parametrize("gone", [False, True])
def test_the_next_one_loads_while_it_waits(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    warm = make_engine()
    Asking(warm, [KETTLE]).ended()
    warm.settle()
    engine = make_engine(host_bytes=0)
    made: list[Prepared] = []

    class Noted(Prepared):
        def __init__(self, *fields: Any) -> None:
            super().__init__(*fields)
            made.append(self)

    monkeypatch.setattr(engine_module, "Prepared", Noted)
    with engine.lock.take():
        first = in_turn(engine, [TOASTER], config=FULL)  # it loads nothing, so it gives nobody way
        other = Asking(engine, [KETTLE])
        until(lambda: len(made) == 2)
        until(lambda: made[1].loads.depth() == engine.decoder.layout.layers)  # all of it is there already
        if gone:
            engine.store.evict(RowFilter(chunk_ids=(KETTLE.chunk_id,)))
    assert other.outcomes == (["computed"] if gone else ["exact"])
    assert len(made) == (3 if gone else 2)  # what was loaded early serves
    assert {chunk.tier for chunk in other.answer.stats.chunks} == ({None} if gone else {"disk"})
    first.ended()
    assert all(one.closed for one in made)
    assert Asking(engine, [KETTLE], config=FULL).ended().text == other.answer.text


# -- those who get no turn --------------------------------------------------------------------------------------------


def test_one_too_many_is_refused(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_waiting=1)
    with engine.lock.take():
        asked = [in_turn(engine, [KETTLE]), Asking(engine, [TOASTER])]
        waiting(engine, 1)
        refused = Asking(engine, [KETTLE])
        refused.ended()
        assert isinstance(refused.error, BusyError)
        assert refused.answer.stats.finish == "failed"
        assert refused.outcomes == ["failed"]
    assert [one.outcomes for one in asked] == [["computed"]] * 2
    assert engine.queue.counts().rejected == 1
    assert Asking(engine, [KETTLE]).outcomes == ["exact"]


def test_who_waits_too_long_gets_no_answer(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(wait_timeout_s=0.05)
    with engine.lock.take():
        first = in_turn(engine, [KETTLE])
        late = Asking(engine, [TOASTER])
        late.ended()
        assert isinstance(late.error, WaitTimeoutError)
    assert first.outcomes == ["computed"]
    assert (engine.queue.counts().waiting, engine.queue.counts().timed_out) == (0, 1)
    until(lambda: engine.activity.idle)


def test_an_answer_that_is_closed_while_it_waits_leaves_the_queue(engine: Engine) -> None:
    with engine.lock.take():
        first = in_turn(engine, [KETTLE])
        closed = Asking(engine, [KETTLE])
        waiting(engine, 1)
        last = Asking(engine, [KETTLE])
        waiting(engine, 2)
        closed.answer.close()
        closed.ended()  # though nobody computes
        assert (closed.error, closed.answer.text, closed.answer.stats.finish) == (None, "", "closed")
        assert closed.outcomes == ["failed"]
        waiting(engine, 1)
    assert (first.outcomes, last.outcomes) == (["computed"], ["exact"])
    engine.settle()
    counts = engine.tally.counts()
    assert sum(counts.requests.values()) == 3
    assert (counts.requests["closed"], counts.chunks["failed", "failed"]) == (1, 1)
    assert engine.activity.idle
    assert not engine._announcements._all


# -- event loops ------------------------------------------------------------------------------------------------------


async def everything(generation: Generation) -> str:
    return "".join([piece async for piece in iterate(generation, enter=generation.enter)])


def ways_to_ask(engine: Engine) -> dict[str, Callable[[], Any]]:
    """Each asynchronous door of the package."""
    chat, llm = ChatCacheCraft(engine=engine, max_tokens=8), CacheCraftLLM(engine, sampling=SHORT)
    return {
        "bridge": lambda: everything(engine.stream(QUESTION, [KETTLE], sampling=SHORT)),
        "langchain": lambda: chat.ainvoke(QUESTION),
        "llama_index": lambda: llm.acomplete(QUESTION),
    }


@pytest.mark.parametrize("way", ["bridge", "langchain", "llama_index"])
def test_a_cancelled_task_leaves_the_queue_at_once(engine: Engine, way: str) -> None:
    async def cancel() -> None:
        task = asyncio.create_task(ways_to_ask(engine)[way]())
        while engine.queue.counts().waiting != 1:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.queue.counts().waiting == 0

    with engine.lock.take():
        first = in_turn(engine, [KETTLE])
        asyncio.run(cancel())  # it ends while nobody computes
    assert first.outcomes == ["computed"]
    assert Asking(engine, [KETTLE]).outcomes == ["exact"]


def test_tasks_wait_in_the_queue_before_they_have_a_thread(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_waiting=2)

    async def ask_four() -> list[Any]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        tasks = [asyncio.create_task(ways_to_ask(engine)["bridge"]()) for _ in range(4)]
        while engine.queue.counts().rejected != 2:
            await asyncio.sleep(0.001)
        assert engine.queue.counts().waiting == 2
        go_on.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    def hold() -> None:
        with engine.lock.take():
            held.set()
            assert go_on.wait(60)

    held, go_on = threading.Event(), threading.Event()
    holding = threading.Thread(target=hold)
    holding.start()
    assert held.wait(60)
    first = in_turn(engine, [KETTLE])
    answers = asyncio.run(ask_four())
    assert [type(answer) for answer in answers] == [str, str, BusyError, BusyError]
    assert answers[0] == answers[1] != ""
    assert first.outcomes == ["computed"]
    holding.join(60)
    assert engine.queue.counts().waiting == 0


def test_a_task_whose_retrieval_fails_leaves_the_queue(engine: Engine) -> None:
    def failing() -> Iterator[str]:
        assert engine.queue.counts().waiting == 1
        raise ValueError("no index")
        yield

    async def ask() -> None:
        async for _ in iterate(failing(), enter=engine.enter):
            pass

    with pytest.raises(ValueError, match="no index"):
        asyncio.run(ask())
    assert engine.queue.counts().waiting == 0
    assert Asking(engine, [KETTLE]).outcomes == ["computed"]
