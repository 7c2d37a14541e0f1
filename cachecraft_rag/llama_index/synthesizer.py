"""The response synthesizer: nodes in, an answer out, with LlamaIndex's events around it and the numbers beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

from llama_index.core.base.llms.types import (
    CompletionResponseAsyncGen,
    CompletionResponseGen,
)
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks import CallbackManager
from llama_index.core.indices.prompt_helper import ChatPromptHelper, PromptHelper
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]  # re-exported silently
from llama_index.core.instrumentation.events.base import BaseEvent  # type: ignore[attr-defined]
from llama_index.core.instrumentation.events.synthesis import GetResponseEndEvent, GetResponseStartEvent
from llama_index.core.llms.callbacks import llm_completion_callback
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import MetadataMode, NodeWithScore
from llama_index.core.types import RESPONSE_TEXT_TYPE

from cachecraft_rag.checks import check_flag, check_text
from cachecraft_rag.engine.engine import Engine, Generation, PathLike
from cachecraft_rag.engine.sampling import SamplingParams
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.llama_index.llm import CacheCraftLLM, alast_of, aresponses_of, last_of, responses_of
from cachecraft_rag.store.closeable import Closeable
from cachecraft_rag.types import chunk_id_of

dispatcher = get_dispatcher(__name__)


class AnswerStatsEvent(BaseEvent):
    """An answer has ended; `stats` are its numbers, as under `response.metadata["cachecraft"]`."""

    stats: dict[str, Any]

    @classmethod
    def class_name(cls) -> str:
        """Its name among LlamaIndex's events."""
        return "CacheCraftAnswerStatsEvent"


class CacheCraftSynthesizer(BaseSynthesizer, Closeable):
    """A response synthesizer that hands the engine the nodes as chunks, so that their chunk-caches are reused.

    A node's chunk is the text the model sees of it (`MetadataMode.LLM`), whoever retrieved it. The response's metadata
    has `RequestStats` as a dictionary under "cachecraft", and in it `chunk_ids`, the chunk of each node id. Of a stream
    it is complete once the stream has ended. Nodes should come best first, as retrievers give them: the engine lays
    them out with the best one nearest to the question.

    Args:
        engine: it stays yours to close.
        streaming: answers come as `StreamingResponse` and `AsyncStreamingResponse`.
        sampling, session: see `Engine.stream`.
        empty_response: the answer where no node was found, which is LlamaIndex's "Empty Response" otherwise.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        streaming: bool = False,
        sampling: SamplingParams | None = None,
        session: str | None = None,
        empty_response: str | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        check_flag("streaming", streaming)
        check_text("empty_response", empty_response, optional=True)
        llm = CacheCraftLLM(engine, sampling=sampling, session=session)
        sizes: dict[str, Any] = {"context_window": llm.context_window, "num_output": llm.num_output}
        # Both helpers would otherwise count with OpenAI's tokenizer. Nothing here cuts chunks to size: the engine does.
        count = engine.decoder.tokenizer.encode
        super().__init__(
            llm=llm,
            callback_manager=callback_manager,
            prompt_helper=PromptHelper(tokenizer=count, **sizes),
            chat_prompt_helper=ChatPromptHelper(tokenizer=count, **sizes),
            streaming=streaming,
            empty_response=empty_response,
        )
        self.engine, self.llm = engine, llm
        self._opened = ExitStack()

    @classmethod
    def from_pretrained(
        cls,
        model: str = "demo",
        *,
        store: PathLike = "chunk-caches",
        streaming: bool = False,
        sampling: SamplingParams | None = None,
        session: str | None = None,
        empty_response: str | None = None,
        callback_manager: CallbackManager | None = None,
        **opening: Any,
    ) -> Self:
        """Load a model and open (or make) a store folder, as `CacheCraft.from_pretrained`; `close` closes both."""
        with ExitStack() as opened:
            engine = opened.enter_context(Engine.from_pretrained(model, store=store, **opening))
            made = cls(
                engine,
                streaming=streaming,
                sampling=sampling,
                session=session,
                empty_response=empty_response,
                callback_manager=callback_manager,
            )
            made._opened = opened.pop_all()
        return made

    def close(self) -> None:
        """Finish the captures under way and close what `from_pretrained` opened."""
        self._opened.close()

    def get_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> RESPONSE_TEXT_TYPE:
        """Answer over texts, best first: a string, or a generator of pieces where this synthesizer streams."""
        text_chunks = text_chunks if isinstance(text_chunks, str) else list(text_chunks)
        dispatcher.event(GetResponseStartEvent(query_str=query_str, text_chunks=list(text_chunks)))
        generation = self.llm.begin(query_str, documents=text_chunks, **response_kwargs)
        responses = responses_of(generation)

        @llm_completion_callback()  # LlamaIndex's events of an LLM call, around the generation that is ours to close
        def call(llm: CacheCraftLLM, prompt: str, *, documents: list[str]) -> Any:
            return responses if self._streaming else last_of(responses)

        called = call(self.llm, query_str, documents=list(text_chunks))
        record: dict[str, Any] = {}
        answer: RESPONSE_TEXT_TYPE
        if self._streaming:
            answer = _Pieces(_deltas(called, responses, partial(_recorded, generation, record)), record)
        else:
            answer = _Text.of(called.text, _recorded(generation, record))
        dispatcher.event(GetResponseEndEvent())
        return answer

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """`get_response`, the model in threads; a stream is an asynchronous generator."""
        text_chunks = text_chunks if isinstance(text_chunks, str) else list(text_chunks)
        dispatcher.event(GetResponseStartEvent(query_str=query_str, text_chunks=list(text_chunks)))
        generation = await asyncio.to_thread(self.llm.begin, query_str, documents=text_chunks, **response_kwargs)
        responses = aresponses_of(generation)

        @llm_completion_callback()
        async def call(llm: CacheCraftLLM, prompt: str, *, documents: list[str]) -> Any:
            return responses if self._streaming else await alast_of(responses)

        called = await call(self.llm, query_str, documents=list(text_chunks))
        record: dict[str, Any] = {}
        answer: RESPONSE_TEXT_TYPE
        if self._streaming:
            answer = _AsyncPieces(_adeltas(called, responses, partial(_recorded, generation, record)), record)
        else:
            answer = _Text.of(called.text, _recorded(generation, record))
        dispatcher.event(GetResponseEndEvent())
        return answer

    def _prepare_response_output(
        self, response_str: RESPONSE_TEXT_TYPE | None, source_nodes: list[NodeWithScore]
    ) -> RESPONSE_TYPE:
        response = super()._prepare_response_output(response_str, source_nodes)
        if isinstance(response_str, _Text | _Pieces | _AsyncPieces):
            record = response_str.record
            record["chunk_ids"] = {
                found.node.node_id: chunk_id_of(found.node.get_content(metadata_mode=MetadataMode.LLM))
                for found in source_nodes
            }
            response.metadata = {**(response.metadata or {}), "cachecraft": record}
        return response

    def _get_prompts(self) -> PromptDictType:
        return {}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        if prompts:
            raise ConfigError(
                f"the prompt is the engine's, {', '.join(prompts)} cannot be set; give the engine another `system` text"
            )


class _Text(str):
    """An answer's text with its numbers, on the way from `get_response` to the response object."""

    record: dict[str, Any]

    @classmethod
    def of(cls, text: str, record: dict[str, Any]) -> _Text:
        made = cls(text)
        made.record = record
        return made


class _Pieces(Generator[str, None, None]):
    """A generator of an answer's pieces with its numbers; they come when it ends."""

    def __init__(self, steps: Generator[str], record: dict[str, Any]) -> None:
        self._steps, self.record = steps, record

    def send(self, value: None) -> str:
        return self._steps.send(value)

    def throw(self, *error: Any) -> str:
        return self._steps.throw(*error)


class _AsyncPieces(AsyncGenerator[str, None]):
    """`_Pieces` for an event loop."""

    def __init__(self, steps: AsyncGenerator[str], record: dict[str, Any]) -> None:
        self._steps, self.record = steps, record

    def asend(self, value: None) -> Any:
        return self._steps.asend(value)

    def athrow(self, *error: Any) -> Any:
        return self._steps.athrow(*error)


def _recorded(generation: Generation, record: dict[str, Any]) -> dict[str, Any]:
    """Fill in the numbers of an answer that has ended, and tell whoever listens."""
    record.update(generation.stats.as_dict())
    dispatcher.event(AnswerStatsEvent(stats=dict(record)))
    return record


def _deltas(
    called: CompletionResponseGen, responses: CompletionResponseGen, ended: Callable[[], object]
) -> Generator[str, None, None]:
    """The pieces of `called`, which is LlamaIndex's wrapping of `responses`; then `ended` is called, come what may."""
    try:
        for response in called:
            if response.delta:
                yield response.delta
    finally:
        called.close()
        responses.close()  # the wrapping leaves that to the reference count, and listeners may keep its frames alive
        ended()


async def _adeltas(
    called: CompletionResponseAsyncGen, responses: CompletionResponseAsyncGen, ended: Callable[[], object]
) -> AsyncGenerator[str, None]:
    try:
        async for response in called:
            if response.delta:
                yield response.delta
    finally:
        await called.aclose()
        await responses.aclose()
        ended()
