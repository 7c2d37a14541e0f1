"""Async bridge: a blocking iterator as an asynchronous one, so that an event loop never waits for the model."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator, Callable, Iterator
from itertools import islice
from typing import TypeVar

from cachecraft_rag.engine.request_queue import ENTERED, Place

T = TypeVar("T")


async def iterate(pieces: Iterator[T], *, enter: Callable[[], Place | None] = lambda: None) -> AsyncGenerator[T, None]:
    """Yield the items of a blocking iterator; each step runs in a thread. Errors of the iterator are raised here.

    Args:
        enter: `AnswerEngine.enter` of the engine that the iterator asks. The place is taken here, in the event loop:
            requests that wait for a thread wait in the engine's queue as well, and a cancelled one leaves it at once.

    If the consumer stops early (`aclose`, a cancelled task), the current step finishes and then the iterator's `close`
    is called, so that the engine stops and its lock is free. After a mere `break` out of `async for` Python does that
    soon after; `contextlib.aclosing` does it at once.

    Steps run in the loop's default executor, not in a pool of our own: the application has chosen its size, and its
    queue is first come, first served, so that no stream starves.
    """
    loop = asyncio.get_running_loop()
    # One copy for all steps, so that a generator sees the same context variables in every thread.
    context = contextvars.copy_context()
    place = enter()

    def leave() -> None:
        if place is not None:
            place.leave()

    context.run(ENTERED.set, place)

    def step() -> list[T]:
        return list(islice(pieces, 1))  # not `next`: a future cannot hold the StopIteration that ends it

    try:
        while piece := await _outlast(loop.run_in_executor(None, context.run, step), leave):
            yield piece[0]
    finally:
        leave()
        if close := getattr(pieces, "close", None):
            await _outlast(loop.run_in_executor(None, context.run, close), leave)


async def _outlast(future: asyncio.Future[T], leave: Callable[[], object]) -> T:
    """The future's result. A cancellation is raised only when it is done, because a thread cannot be stopped; one that
    waits in the queue is told to leave.
    """
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
            leave()
    if cancelled is not None:
        future.exception()  # retrieved, or asyncio would log that it never was
        raise cancelled
    return future.result()
