"""A blocking iterator in an event loop: nothing blocks, nothing leaks, errors arrive."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing

import pytest

from cachecraft_rag.engine.async_bridge import iterate


class Steps(Iterator[int]):
    """Counts; each step waits for `gate`. Knows whether it was closed, and fails if it is closed within a step."""

    def __init__(self, stop: int = 1_000_000) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.stop, self.at, self.closed, self._within = stop, 0, 0, False

    def __next__(self) -> int:
        self._within = True
        self.entered.set()
        assert self.gate.wait(20)
        self._within = False
        if self.at == self.stop:
            raise StopIteration
        self.at += 1
        return self.at

    def close(self) -> None:
        assert not self._within
        self.closed += 1


def test_everything_arrives_in_order_and_the_iterator_is_closed_at_the_end() -> None:
    async def collect(steps: Steps) -> list[int]:
        return [piece async for piece in iterate(steps)]

    steps = Steps(5)
    assert asyncio.run(collect(steps)) == [1, 2, 3, 4, 5]
    assert steps.closed == 1
    assert asyncio.run(collect(iter([1, 2]))) == [1, 2]  # type: ignore[arg-type]  # an iterator without `close`


def test_the_event_loop_runs_while_a_step_blocks() -> None:
    async def ticks_during_a_step() -> int:
        steps = Steps(1)
        steps.gate.clear()
        step = asyncio.ensure_future(anext(iterate(steps)))
        ticks = 0
        while ticks < 20:
            await asyncio.sleep(0.001)
            ticks += 1
        assert not step.done()
        steps.gate.set()
        assert await step == 1
        return ticks

    assert asyncio.run(ticks_during_a_step()) == 20


def test_a_consumer_that_leaves_closes_the_iterator() -> None:
    async def leave(steps: Steps) -> None:
        async with aclosing(iterate(steps)) as pieces:
            async for piece in pieces:
                if piece == 2:
                    break
        assert steps.closed == 1

    steps = Steps()
    asyncio.run(leave(steps))
    assert (steps.at, steps.closed) == (2, 1)


@pytest.mark.parametrize("cancellations", [1, 3])
def test_a_cancelled_consumer_waits_for_the_step_under_way(cancellations: int) -> None:
    async def cancel(steps: Steps) -> None:
        async def consume() -> None:
            async for _ in iterate(steps):
                pass

        steps.gate.clear()
        task = asyncio.create_task(consume())
        await asyncio.to_thread(steps.entered.wait, 20)
        for _ in range(cancellations):
            task.cancel()
            await asyncio.sleep(0.02)
            assert not task.done()  # the thread is still in its step
        assert steps.closed == 0
        steps.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert steps.closed == 1
        await asyncio.sleep(0.02)
        assert steps.at == 1  # no further step

    asyncio.run(cancel(Steps()))


def test_errors_of_the_iterator_are_raised_and_it_is_closed() -> None:
    closed = []

    def failing() -> Iterator[int]:
        try:
            yield 1
            raise ValueError("in the thread")
        finally:
            closed.append(threading.current_thread())

    async def collect() -> list[int]:
        return [piece async for piece in iterate(failing())]

    with pytest.raises(ValueError, match="in the thread"):
        asyncio.run(collect())
    assert len(closed) == 1
    assert closed[0] is not threading.main_thread()


def test_context_variables_reach_every_step() -> None:
    variable = contextvars.ContextVar("variable", default="unset")

    def values() -> Iterator[str]:
        yield variable.get()
        variable.set("set by the iterator")
        yield variable.get()

    async def collect() -> list[str]:
        variable.set("set by the caller")
        return [piece async for piece in iterate(values())]

    assert asyncio.run(collect()) == ["set by the caller", "set by the iterator"]


def test_more_streams_than_threads_all_move_on() -> None:
    """Every stream takes a step before any takes its third: the executor's queue is fair."""
    order: list[int] = []

    def named(name: int) -> Iterator[int]:
        for _ in range(6):
            order.append(name)
            time.sleep(0.002)
            yield name

    async def together() -> None:
        async def consume(name: int) -> None:
            async for _ in iterate(named(name)):
                pass

        await asyncio.gather(*(consume(name) for name in range(40)))

    asyncio.run(together())
    assert len(order) == 240
    third = next(at for at in range(len(order)) if order[: at + 1].count(order[at]) == 3)
    assert set(order[:third]) == set(range(40))
