"""Requests to vLLM from other threads, without vLLM."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from cachecraft_rag.vllm.calls import Calls


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop that runs in another thread."""
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join()
    made.close()


def test_a_request_that_begins_while_vllm_is_being_closed_says_so(
    loop: asyncio.AbstractEventLoop,
) -> None:
    with Calls(None, loop) as calls, pytest.raises(RuntimeError, match="vLLM is closed"):
        next(calls.generate({}, None))
