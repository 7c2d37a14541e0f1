"""Reuse statistics in the responses of LlamaIndex's own engines, which know nothing of them.

A stock query engine calls the LLM somewhere inside `synthesize` and makes its response afterwards. LlamaIndex sends an
event when `synthesize` begins and another when it ends. Between the two, `CacheCraftLLM` notes its answers; at the end
their statistics go into `response.metadata`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator
from contextvars import ContextVar

from llama_index.core.base.response.schema import (
    RESPONSE_TYPE,
    AsyncStreamingResponse,
    StreamingResponse,
)
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]  # re-exported silently
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.base import BaseEvent  # type: ignore[attr-defined]
from llama_index.core.instrumentation.events.synthesis import (
    SynthesizeEndEvent,
    SynthesizeStartEvent,
)

from cachecraft_rag.serving.generation import Generation

# the dispatcher that sends both events
_SYNTHESIZERS = "llama_index.core.response_synthesizers.base"
_MOST_CALLS = 64  # bounds what is kept where `synthesize` fails, and so never ends

# Answers given in this task since `synthesize` began; None outside of it. Concurrent queries stay apart.
_answers: ContextVar[deque[Generation] | None] = ContextVar("cachecraft_answers", default=None)


class _StockStatistics(BaseEventHandler):
    """Collects the answers given within one `synthesize`."""

    @classmethod
    def class_name(cls) -> str:
        """Return "CacheCraftStockStatistics", the class name among LlamaIndex's event handlers."""
        return "CacheCraftStockStatistics"

    def handle(self, event: BaseEvent, **kwargs: object) -> None:
        """Begin to collect when `synthesize` begins; put the statistics into its response when it ends, or its stream.

        Other events, and responses that have statistics, are left alone.
        """
        if isinstance(event, SynthesizeStartEvent):
            _answers.set(deque(maxlen=_MOST_CALLS))
        elif isinstance(event, SynthesizeEndEvent):
            answers = _answers.get()
            _answers.set(None)
            if answers is not None:
                _attach(event.response, answers)


def observe_synthesizers() -> None:
    """Add, once in a process, the event handler that puts statistics of noted answers into responses."""
    dispatcher = get_dispatcher(_SYNTHESIZERS)
    if not any(isinstance(handler, _StockStatistics) for handler in dispatcher.event_handlers):
        dispatcher.add_event_handler(_StockStatistics())


def note_answer(generation: Generation) -> None:
    """Note an answer for the response that LlamaIndex is making in this task, if any; of many the last 64."""
    answers = _answers.get()
    if answers is not None:
        answers.append(generation)


def _attach(response: RESPONSE_TYPE, answers: deque[Generation]) -> None:
    """Put the statistics of the answers into a response, for a stream at its end."""
    if response.metadata is None:
        response.metadata = {}
    metadata = response.metadata
    if "cachecraft" in metadata:  # a `CacheCraftSynthesizer` made it
        return

    def fill() -> None:
        if answers:
            *earlier, last = (answer.stats.as_dict() for answer in answers)
            metadata["cachecraft"] = {**last, "earlier_calls": earlier}

    if isinstance(response, StreamingResponse):
        response.response_gen = _observed(response.response_gen, answers, fill)
    elif isinstance(response, AsyncStreamingResponse):
        response.response_gen = _aobserved(response.response_gen, answers, fill)
    else:
        fill()


def _observed(
    pieces: Generator[str, None, None], answers: deque[Generation], fill: Callable[[], None]
) -> Generator[str, None, None]:
    """Yield the pieces of a stream; the LLM is called only when the first one is asked for."""
    try:
        while True:
            token = _answers.set(answers)
            try:
                piece = next(pieces)
            except StopIteration:
                return
            finally:
                _answers.reset(token)
            yield piece
    finally:
        pieces.close()
        fill()


async def _aobserved(
    pieces: AsyncGenerator[str, None], answers: deque[Generation], fill: Callable[[], None]
) -> AsyncGenerator[str, None]:
    try:
        while True:
            token = _answers.set(answers)
            try:
                piece = await anext(pieces)
            except StopAsyncIteration:
                return
            finally:
                _answers.reset(token)
            yield piece
    finally:
        await pieces.aclose()
        fill()
