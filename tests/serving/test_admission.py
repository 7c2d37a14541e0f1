"""Requests in line: planned when their turn comes, computed once, refused or gone without a trace."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from cachecraft_rag.engine.config import EngineTuning
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import BusyError, WaitTimeoutError
from cachecraft_rag.langchain.chat_model import ChatCacheCraft
from cachecraft_rag.llama_index.llm import CacheCraftLLM
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.serving.generation import Generation
from cachecraft_rag.store.catalog_records import RowFilter
from cachecraft_rag.store.layout import StoredVariant
from cachecraft_rag.store.loading.pending import PendingLoads
from cachecraft_rag.types.captures import Capture
from cachecraft_rag.types.documents import Chunk
from tests.engines import SHORT, Asking, Turn, until, waiting

KETTLE = Chunk("Empty the kettle before you descale it with vinegar.")
TOASTER = Chunk("The toaster has a crumb tray; pull it out to the left.")
QUESTION = "How do I descale the kettle?"
FULL = ReuseConfig(reuse=False, capture=False)

MakeEngine = Callable[..., Engine]


def chunks_stored(engine: Engine) -> list[str]:
    """Of each stored variant, without the instruction's."""
    names = [row.variant.key.chunk_id for row in engine.store.rows()]
    return sorted(name for name in names if name != engine.prompts.system.segment_id)


# -- the plan of the moment -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 6])
def test_a_new_chunk_that_many_wait_for_is_computed_once(engine: Engine, count: int) -> None:
    with Turn(engine, [KETTLE, TOASTER]) as first:
        asked = [Asking(engine, [KETTLE, TOASTER], f"{QUESTION} ({n})") for n in range(count - 1)]
        waiting(engine, count - 1)
    assert [one.outcomes for one in [first, *asked]] == [["computed"] * 2] + [["exact"] * 2] * (
        count - 1
    )
    assert chunks_stored(engine) == sorted([KETTLE.chunk_id, TOASTER.chunk_id])
    assert all(one.ended().stats.queue_s > 0.0 for one in asked)
    assert len(engine._admission) == 0


def turned_away(engine: Engine, reason: str) -> float | None:
    """Requests that got no turn."""
    return engine.request_counts.registry.get_sample_value(
        "cachecraft_turned_away_total", {"reason": reason}
    )


def test_a_capture_does_not_wait_for_the_end_of_its_answer(engine: Engine) -> None:
    first = engine.stream(QUESTION, [KETTLE], sampling=SHORT)
    next(first)  # and its reader pauses
    assert Asking(engine, [KETTLE], "And then?").outcomes == ["exact"]
    assert "".join(first)
    engine.settle()
    assert chunks_stored(engine) == [KETTLE.chunk_id]
    again = Asking(engine, [KETTLE], QUESTION, config=FULL)
    assert again.ended().text == first.text  # handing its captures over has not touched it


def test_chunks_that_cannot_serve_are_not_waited_for(engine: Engine) -> None:
    Asking(engine, []).ended()  # the instruction
    engine.settle()
    first = engine.stream(QUESTION, [KETTLE, TOASTER], sampling=SHORT)
    next(first)  # its reader pauses; it has the toaster after the kettle
    assert Asking(
        engine, [KETTLE], config=ReuseConfig(method=ReuseMethod(scope="prefix"))
    ).outcomes == ["computed"]
    engine.settle()
    assert chunks_stored(engine) == [KETTLE.chunk_id]
    assert Asking(
        engine, [TOASTER], config=ReuseConfig(method=ReuseMethod(scope="prefix"))
    ).outcomes == ["exact"]
    first.close()


def test_private_captures_are_waited_for_by_their_own_session_only(make_engine: MakeEngine) -> None:
    engine = make_engine(system="You help Ann, who is 83.", private_system=True)
    first = engine.stream(QUESTION, [KETTLE], sampling=SHORT, session="ann")
    next(first)  # its reader pauses
    anonymous = engine.stream(QUESTION, [KETTLE], sampling=SHORT)
    next(anonymous)  # nothing of it is stored
    assert Asking(engine, [KETTLE], session="bob").outcomes == ["computed"]
    engine.settle()
    assert {row.variant.session for row in engine.store.rows()} == {"bob"}
    assert Asking(engine, [KETTLE], session="ann").outcomes == ["exact"]
    for answer in (first, anonymous):
        answer.close()


def test_private_captures_that_are_being_stored_delay_their_own_session_only(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the time to the first token would tell what others have sent."""
    engine = make_engine(system="You help Ann, who is 83.", private_system=True)
    put = engine.store.put
    gates: list[tuple[Capture, Future[Any]]] = []

    def wait_in_line(capture: Capture) -> Future[Any]:
        gates.append((capture, Future()))
        return gates[-1][1]

    monkeypatch.setattr(engine.store, "put", wait_in_line)
    Asking(engine, [KETTLE], session="ann").ended()
    until(lambda: len(gates) == 2)  # the instruction and the kettle
    monkeypatch.setattr(engine.store, "put", put)
    try:
        assert Asking(engine, [KETTLE], session="bob").outcomes == ["computed"]
        again = Asking(engine, [KETTLE], session="ann")
    finally:
        for capture, stored in gates:
            put(capture).add_done_callback(
                lambda done, stored=stored: stored.set_result(done.result())  # type: ignore[misc]
            )
    assert again.outcomes == ["exact"]


def test_when_the_first_one_fails_the_next_one_computes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = engine.decoder.layer

    def fail(*args: Any, **settings: Any) -> Any:
        monkeypatch.setattr(engine.decoder, "layer", layer)
        raise RuntimeError("no memory")

    with Turn(engine, [KETTLE]) as failing:
        other = Asking(engine, [KETTLE])
        waiting(engine, 1)
        monkeypatch.setattr(engine.decoder, "layer", fail)
    assert other.outcomes == ["computed"]
    failing.ended()
    assert isinstance(failing.error, RuntimeError)
    assert failing.answer.stats.finish == "failed"
    assert other.error is None


def test_the_plan_is_that_of_the_turn(engine: Engine) -> None:
    Asking(engine, [KETTLE]).ended()
    engine.settle()
    with Turn(engine, [TOASTER]) as first:
        other = Asking(engine, [KETTLE], QUESTION)
        waiting(engine, 1)
        engine.store.evict(RowFilter(chunk_ids=(KETTLE.chunk_id,)))
    assert other.outcomes == ["computed"]
    assert other.answer.text == Asking(engine, [KETTLE], QUESTION, config=FULL).ended().text
    first.ended()


def noted_loads(engine: Engine) -> list[PendingLoads]:
    """A list that takes up the loads that an engine begins from now on."""
    begun: list[PendingLoads] = []
    begin = engine._answering.loader.begin

    def noted(
        stored: Sequence[tuple[StoredVariant, int]], unused: Set[int] = frozenset()
    ) -> PendingLoads:
        begun.append(begin(stored, unused))
        return begun[-1]

    engine._answering.loader.begin = noted  # type: ignore[method-assign]
    return begun


def stored_by_another_engine(make_engine: MakeEngine, chunks: list[Chunk]) -> int:
    """Store these chunks; return the bytes of one of them in memory."""
    warm = make_engine()
    for chunk in chunks:
        Asking(warm, [chunk]).ended()
    warm.settle()
    rows = [row.variant for row in warm.store.rows()]
    return max(warm.decoder.layout.nbytes(variant.tokens) for variant in rows)


SEVERAL = [Chunk(f"{number}. The crumb tray of the toaster is pulled out.") for number in range(4)]


def test_all_that_wait_load_in_the_order_of_waiting(make_engine: MakeEngine) -> None:
    stored_by_another_engine(make_engine, SEVERAL)
    engine = make_engine(host_bytes=0, tuning=EngineTuning(preload_bytes=1 << 30))
    begun = noted_loads(engine)
    with Turn(engine, [TOASTER]) as first:
        others = []
        for chunk in SEVERAL:  # each in a thread, so they must come one after the other
            others.append(Asking(engine, [chunk], QUESTION))
            waiting(engine, len(others))
        layers = engine.decoder.layout.layers
        until(lambda: len(begun) == 4 and all(loads.depth() == layers for loads in begun))
        waiting(engine, 4)
        assert engine._admission.preloading_bytes > 0
    assert [other.outcomes for other in others] == [["exact"]] * 4
    assert len(begun) == 5  # of `first` too; what was loaded early serves
    names = [
        {stored.variant.key.chunk_id for stored in loads.chunks()}
        - {engine.prompts.system.segment_id}
        for loads in begun[:4]
    ]
    assert names == [{chunk.chunk_id} for chunk in SEVERAL]
    first.ended()
    assert engine._admission.preloading_bytes == 0
    assert all(loads._closed for loads in begun)


def test_preloading_keeps_to_its_budget(make_engine: MakeEngine) -> None:
    nbytes = stored_by_another_engine(make_engine, SEVERAL)
    engine = make_engine(host_bytes=0, tuning=EngineTuning(preload_bytes=2 * nbytes))
    begun = noted_loads(engine)
    with Turn(engine, [TOASTER]) as first:
        others = [Asking(engine, [chunk], QUESTION) for chunk in SEVERAL]
        waiting(engine, 4)
        until(lambda: len(engine._admission._preloads) >= 2)
        assert engine._admission.preloading_bytes <= 2 * nbytes
        assert len(begun) < 4
    assert [other.outcomes for other in others] == [["exact"]] * 4
    first.ended()
    assert engine._admission.preloading_bytes == 0


def test_a_request_that_leaves_gives_its_room_back(make_engine: MakeEngine) -> None:
    stored_by_another_engine(make_engine, SEVERAL)
    engine = make_engine(host_bytes=0, tuning=EngineTuning(preload_bytes=1 << 30))
    begun = noted_loads(engine)
    with Turn(engine, [TOASTER]) as first:
        others = [Asking(engine, [chunk], QUESTION) for chunk in SEVERAL]
        until(lambda: len(begun) == 4)
        before = engine._admission.preloading_bytes
        for other in others[2:]:
            other.answer.close()
        waiting(engine, 2)
        until(lambda: 0 < engine._admission.preloading_bytes < before)
        assert all(loads._closed for loads in begun[2:4])
    assert [other.outcomes for other in others[:2]] == [["exact"]] * 2
    first.ended()
    assert engine._admission.preloading_bytes == 0


@pytest.mark.parametrize("gone", [False, True])
def test_the_next_one_loads_while_it_waits(make_engine: MakeEngine, gone: bool) -> None:
    warm = make_engine()
    Asking(warm, [KETTLE]).ended()
    warm.settle()
    engine = make_engine(host_bytes=0)
    begun = noted_loads(engine)
    with Turn(engine, [TOASTER]) as first:
        other = Asking(engine, [KETTLE], QUESTION)
        # all of it is there already
        until(lambda: bool(begun) and begun[0].depth() == engine.decoder.layout.layers)
        if gone:
            engine.store.evict(RowFilter(chunk_ids=(KETTLE.chunk_id,)))
    assert other.outcomes == (["computed"] if gone else ["exact"])
    assert len(begun) == (3 if gone else 2)  # what was loaded early serves
    assert {chunk.tier for chunk in other.answer.stats.chunks} == ({None} if gone else {"disk"})
    first.ended()
    assert all(one._closed for one in begun)
    assert Asking(engine, [KETTLE], QUESTION, config=FULL).ended().text == other.answer.text


# -- those who get no turn --------------------------------------------------------------------------------------------


def test_one_too_many_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(tuning=EngineTuning(max_waiting=1))
    with Turn(engine, [KETTLE]) as first:
        second = Asking(engine, [TOASTER])
        waiting(engine, 1)
        refused = Asking(engine, [KETTLE])
        assert refused.outcomes == ["failed"]
        assert isinstance(refused.error, BusyError)
        assert refused.answer.stats.finish == "failed"
    assert first.outcomes == second.outcomes == ["computed"]
    assert turned_away(engine, "full") == 1
    assert Asking(engine, [KETTLE]).outcomes == ["exact"]


def test_a_request_that_waits_too_long_gets_no_answer(make_engine: MakeEngine) -> None:
    engine = make_engine(tuning=EngineTuning(wait_timeout_s=0.05))
    with Turn(engine, [KETTLE]) as first:
        late = Asking(engine, [TOASTER])
        late.ended()
        assert isinstance(late.error, WaitTimeoutError)
    assert first.outcomes == ["computed"]
    assert (len(engine._admission), turned_away(engine, "timeout")) == (0, 1)


def test_an_answer_that_is_closed_while_it_waits_leaves_the_line(engine: Engine) -> None:
    with Turn(engine, [KETTLE]) as first:
        closed = Asking(engine, [KETTLE])
        waiting(engine, 1)
        last = Asking(engine, [KETTLE])
        waiting(engine, 2)
        closed.answer.close()
        closed.ended()  # though the first one still has the turn
        assert (closed.error, closed.answer.text, closed.answer.stats.finish) == (
            None,
            "",
            "closed",
        )
        assert closed.outcomes == ["failed"]
        waiting(engine, 1)
    assert (first.outcomes, last.outcomes) == (["computed"], ["exact"])
    engine.settle()
    value = engine.request_counts.registry.get_sample_value
    ends = {
        end: value("cachecraft_requests_total", {"outcome": end})
        for end in ("length", "closed", "failed", "end")
    }
    assert (sum(ends.values()), ends["closed"]) == (3, 1)  # type: ignore[arg-type]
    assert value("cachecraft_chunks_total", {"outcome": "failed", "reason": "failed"}) == 1
    assert not engine.write_back.pending()


# -- event loops ------------------------------------------------------------------------------------------------------


async def everything(generation: Generation) -> str:
    return "".join([piece async for piece in generation])


def ways_to_ask(engine: Engine) -> dict[str, Callable[[], Any]]:
    """Each asynchronous door of the package."""
    chat, llm = ChatCacheCraft(engine=engine, max_tokens=8), CacheCraftLLM(engine, sampling=SHORT)
    return {
        "engine": lambda: everything(engine.stream(QUESTION, [KETTLE], sampling=SHORT)),
        "langchain": lambda: chat.ainvoke(QUESTION),
        "llama_index": lambda: llm.acomplete(QUESTION),
    }


@pytest.mark.parametrize("way", ["engine", "langchain", "llama_index"])
def test_a_cancelled_task_leaves_the_line_at_once(engine: Engine, way: str) -> None:
    async def cancel() -> None:
        task = asyncio.create_task(ways_to_ask(engine)[way]())
        while len(engine._admission) != 1:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while len(engine._admission):
            await asyncio.sleep(0.001)

    with Turn(engine, [KETTLE]) as first:
        asyncio.run(cancel())  # it ends while nothing is computed
    assert first.outcomes == ["computed"]
    assert Asking(engine, [KETTLE]).outcomes == ["exact"]


def test_tasks_need_no_thread_to_wait_and_to_read(make_engine: MakeEngine) -> None:
    engine = make_engine(tuning=EngineTuning(max_waiting=20))

    async def ask(turn: Turn) -> list[Any]:
        executor = ThreadPoolExecutor(1)
        asyncio.get_running_loop().set_default_executor(executor)
        executor.submit(blocked.wait, 60)  # no thread is free
        tasks = [asyncio.create_task(ways_to_ask(engine)["engine"]()) for _ in range(22)]
        while turned_away(engine, "full") != 2:
            await asyncio.sleep(0.001)
        turn.__exit__()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        blocked.set()
        return answers

    blocked, turn = threading.Event(), Turn(engine, [KETTLE])
    with turn as first:
        answers = asyncio.run(ask(turn))
    assert [type(answer) for answer in answers] == [str] * 20 + [BusyError] * 2
    assert len(set(answers[:20])) == 1
    assert answers[0]
    assert first.outcomes == ["computed"]
    assert len(engine._admission) == 0


def test_a_task_that_stops_reading_ends_the_answer(engine: Engine) -> None:
    async def read_one() -> Generation:
        answer = engine.stream(QUESTION, [KETTLE], sampling=SHORT)
        async for _ in answer:
            break
        await answer.aclose()
        return answer

    assert asyncio.run(read_one()).stats.finish == "closed"
    assert Asking(engine, [KETTLE]).outcomes == ["exact"]
