"""Requests to vLLM from other threads, without vLLM."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from cachecraft_rag.vllm import calls as calls_module
from cachecraft_rag.vllm.calls import Calls, Serving


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


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("step", ["before the loop has ended", "after it"])
def test_a_request_that_comes_too_late_for_the_loop_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The loop has taken its last step, but it is not closed: it accepts requests and never runs them."""

    async def start(*_given: object) -> None:
        """Start no engine."""

    monkeypatch.setattr(calls_module, "_start", start)
    serving = Serving({})
    serving._loop.call_soon_threadsafe(serving._loop.stop)
    serving._thread.join()
    if step == "after it":
        serving._ended = True
        with pytest.raises(CancelledError):
            next(serving.generate({}, None))
    else:
        errors: list[BaseException] = []
        waiting = threading.Thread(target=lambda: errors.append(error_of(serving)))
        waiting.start()
        while not serving._jobs:
            time.sleep(0.001)
        monkeypatch.setattr(serving._loop, "call_soon_threadsafe", lambda *_: None)
        serving._end_loop()
        waiting.join()
        assert isinstance(errors[0], CancelledError)
    serving._loop.close()


def error_of(calls: Calls) -> BaseException:
    """The error that a request ends with."""
    try:
        next(calls.generate({}, None))
    except (CancelledError, RuntimeError) as error:
        return error
    raise AssertionError("the request was answered")
