"""Background jobs: in order, and safe when the garbage collector runs while a lock is held."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cachecraft_rag.engine.background import BackgroundJobs
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.engine.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types import Chunk

CHUNKS = [Chunk("Empty the kettle before you descale it."), Chunk("The toaster has a crumb tray.")]


def within(seconds: float, action: Callable[[], object]) -> bool:
    """Whether an action in a thread of its own ends in time."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def abandon(engine: Engine) -> weakref.ref[Any]:
    """An answer that was begun, and that only a cycle of references keeps."""
    answer = engine.stream("Which tray?", CHUNKS, sampling=SamplingParams(max_new_tokens=30))
    next(answer)

    class Knot:
        pass

    knot = Knot()
    knot.itself, knot.answer = knot, answer  # type: ignore[attr-defined]
    return weakref.ref(knot)


LOCKS: dict[str, Callable[[Engine], Any]] = {
    "store": lambda engine: engine.store._lock,
    "host memory": lambda engine: engine.store._memory.host._lock,
    "captures": lambda engine: engine.write_back._guard,
    "captures' thread": lambda engine: engine.write_back._worker._shutdown_lock,
    "queue": lambda engine: engine.store._writer._lock,
    "writer": lambda engine: engine.store._writer._thread._shutdown_lock,
    "deletions": lambda engine: engine.loader._store._durable._lock,
}


@pytest.mark.parametrize("name", LOCKS)
@pytest.mark.parametrize("closed_by", ["the collector", "a generator around it"])
def test_garbage_may_be_collected_while_a_lock_is_held(
    tiny_decoder: Any, tmp_path: Path, name: str, closed_by: str
) -> None:
    gc.disable()
    try:
        with ChunkCacheStore.open(tmp_path / "caches") as store, Engine(tiny_decoder("Llama"), store) as engine:
            if closed_by == "the collector":
                gone = abandon(engine)
            else:  # as integrations do: a generator that closes the answer at its end

                def pieces() -> Any:
                    answer = engine.stream("Which tray?", CHUNKS, sampling=SamplingParams(max_new_tokens=30))
                    try:
                        yield from answer
                    finally:
                        answer.close()

                made = pieces()
                next(made)
                knot: list[Any] = [made]
                knot.append(knot)
                gone = weakref.ref(made)
                del made, knot

            def collect() -> None:
                with LOCKS[name](engine):
                    gc.collect()

            assert within(10, collect), "the answer's end waits for a lock that its own thread holds"
            assert gone() is None
            engine._background.wait()
            engine.write_back.wait_for([chunk.chunk_id for chunk in CHUNKS])
            assert store.stats().captures == {"stored": 3}
    finally:
        gc.enable()


def test_jobs_are_done_in_order_and_a_mistake_ends_none_of_the_others(caplog: pytest.LogCaptureFixture) -> None:
    jobs, done = BackgroundJobs("test"), list[int]()
    with caplog.at_level(logging.ERROR, "cachecraft_rag"):
        for number in range(5):
            jobs.add(lambda number=number: done.append(10 // (number - 2)))
        jobs.wait()
    assert done == [-5, -10, 10, 5]
    assert "ZeroDivisionError" in caplog.text
    jobs.close()
    jobs.add(lambda: done.append(0))
    jobs.wait()
    jobs.close()
    assert done[-1] == 0


def test_the_thread_ends_when_the_jobs_are_deleted() -> None:
    jobs = BackgroundJobs("test")
    thread = jobs._thread
    del jobs
    thread.join(10)
    assert not thread.is_alive()
