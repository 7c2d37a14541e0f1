"""From blocking iterators to asynchronous ones: the engine computes in threads, a web server waits in an event loop."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


async def iterate(pieces: Iterator[T]) -> AsyncGenerator[T, None]:
    """Yield what a blocking iterator yields, each step in a thread, so that the event loop never waits.

    A consumer that leaves early (`aclose`, a cancelled task) waits for the step under way, and then the iterator is
    closed where it has a `close`: no thread goes on computing for nobody, and the engine's turn is free again. One that
    merely breaks out of `async for` leaves that to Python, which does it soon after; `contextlib.aclosing` does it at
    once. Errors of the iterator are raised here.

    The default executor and not a pool of our own: whoever embeds us has sized it, and its queue is first come, first
    served, so no stream is kept waiting by the others.
    """
    loop = asyncio.get_running_loop()
    # One copy for all steps: a generator sees the same context variables in each, whatever thread it is in.
    context = contextvars.copy_context()

    def step() -> list[T]:
        return list(islice(pieces, 1))  # not `next`: a future cannot hold the StopIteration that ends it

    try:
        while piece := await _outlast(loop.run_in_executor(None, context.run, step)):
            yield piece[0]
    finally:
        if close := getattr(pieces, "close", None):
            await _outlast(loop.run_in_executor(None, context.run, close))


async def _outlast(future: asyncio.Future[T]) -> T:
    """The future's result. A cancellation is raised only once it is done: what a thread has begun cannot be stopped."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        future.exception()  # looked at, or asyncio would complain that nobody did
        raise cancelled
    return future.result()
