"""The response synthesizer: nodes in, an answer out, with LlamaIndex's events and the request's statistics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from functools import partial
from typing import Any, Self

from llama_index.core.base.llms.types import CompletionResponseAsyncGen, CompletionResponseGen
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
from llama_index.core.schema import QueryType as QueryTextType
from llama_index.core.types import RESPONSE_TEXT_TYPE

from cachecraft_rag.checks import check_flag, check_text
from cachecraft_rag.engine.base import AnswerEngine, PathLike
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.engine.generation import Generation
from cachecraft_rag.engine.sampling import SamplingParams
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.llama_index.llm import CacheCraftLLM, alast_of, aresponses_of, last_of, responses_of
from cachecraft_rag.retrievers.llama_index import without_paths
from cachecraft_rag.store.closeable import Closeable
from cachecraft_rag.types import chunk_id_of

SETTINGS = frozenset({"callback_manager", "empty_response", "sampling", "session", "streaming"})
dispatcher = get_dispatcher(__name__)

# Statistics of this task's answer, between `get_response` and the response object: LlamaIndex passes only the text from
# one to the other. A context variable keeps concurrent answers apart.
_statistics: ContextVar[dict[str, Any] | None] = ContextVar("cachecraft_statistics", default=None)


class AnswerStatsEvent(BaseEvent):
    """An answer has ended; `stats` is `RequestStats.as_dict()`, as in `response.metadata["cachecraft"]`."""

    stats: dict[str, Any]

    @classmethod
    def class_name(cls) -> str:
        """The class name among LlamaIndex's events."""
        return "CacheCraftAnswerStatsEvent"


class CacheCraftSynthesizer(BaseSynthesizer, Closeable):
    """A response synthesizer that passes the nodes to the engine as chunks, so that their chunk-caches are reused.

    A node's chunk is the text the model sees of it (`MetadataMode.LLM`), without its `file_path`.
    `response.metadata["cachecraft"]` is `RequestStats.as_dict()` plus `chunk_ids`, which maps node ids to chunk ids;
    for a stream it is complete at the stream's end. `get_response` returns text alone; its statistics are in the
    `AnswerStatsEvent`. Pass the nodes best first, as retrievers return them: the engine puts the best one nearest to
    the question.

    Args:
        engine: you close it yourself.
        streaming: return `StreamingResponse` and `AsyncStreamingResponse`.
        sampling, session: see `Engine.stream`.
        empty_response: the answer if there are no nodes, instead of LlamaIndex's "Empty Response".
    """

    def __init__(
        self,
        engine: AnswerEngine,
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
        # Otherwise both helpers would count with OpenAI's tokenizer. The engine, not they, makes the chunks fit.
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
        config: EngineConfig | None = None,
        **options: Any,
    ) -> Self:
        """Load a model and open (or make) a store folder, as `Engine.from_pretrained`; `close` closes both.

        Args:
            options: arguments of this class, and single options of `EngineConfig`, which override `config`.
        """
        settings: dict[str, Any] = {name: options.pop(name) for name in SETTINGS & options.keys()}
        with ExitStack() as opened:
            engine = opened.enter_context(Engine.from_pretrained(model, store=store, config=config, **options))
            made = cls(engine, **settings)
            made._opened = opened.pop_all()
        return made

    def close(self) -> None:
        """Write pending captures and close what `from_pretrained` opened."""
        self._opened.close()

    def synthesize(self, query: QueryTextType, nodes: list[NodeWithScore], *args: Any, **settings: Any) -> Any:
        """LlamaIndex's own; the model does not see the nodes' `file_path` (see `without_paths`)."""
        return super().synthesize(query, _without_paths(nodes), *args, **settings)

    async def asynthesize(self, query: QueryTextType, nodes: list[NodeWithScore], *args: Any, **settings: Any) -> Any:
        """`synthesize` with the model in threads."""
        return await super().asynthesize(query, _without_paths(nodes), *args, **settings)

    def get_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> RESPONSE_TEXT_TYPE:
        """Answer from texts, best first: a string, or a generator of pieces if this synthesizer streams."""
        text_chunks = text_chunks if isinstance(text_chunks, str) else list(text_chunks)
        dispatcher.event(GetResponseStartEvent(query_str=query_str, text_chunks=list(text_chunks)))
        generation = self.llm.begin(query_str, documents=text_chunks, **response_kwargs)
        responses = responses_of(generation)

        @llm_completion_callback()  # LlamaIndex's events of an LLM call
        def call(llm: CacheCraftLLM, prompt: str, *, documents: list[str]) -> Any:
            return responses if self._streaming else last_of(responses)

        called = call(self.llm, query_str, documents=list(text_chunks))
        ended = partial(_fill, _new_statistics(), generation)
        answer: RESPONSE_TEXT_TYPE
        if self._streaming:
            answer = _deltas(called, responses, ended)
        else:
            answer = called.text
            ended()
        dispatcher.event(GetResponseEndEvent())
        return answer

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """`get_response` with the model in threads; a stream is an asynchronous generator."""
        text_chunks = text_chunks if isinstance(text_chunks, str) else list(text_chunks)
        dispatcher.event(GetResponseStartEvent(query_str=query_str, text_chunks=list(text_chunks)))
        generation = await asyncio.to_thread(self.llm.begin, query_str, documents=text_chunks, **response_kwargs)
        responses = aresponses_of(generation)

        @llm_completion_callback()
        async def call(llm: CacheCraftLLM, prompt: str, *, documents: list[str]) -> Any:
            return responses if self._streaming else await alast_of(responses)

        called = await call(self.llm, query_str, documents=list(text_chunks))
        ended = partial(_fill, _new_statistics(), generation)
        answer: RESPONSE_TEXT_TYPE
        if self._streaming:
            answer = _adeltas(called, responses, ended)
        else:
            answer = called.text
            ended()
        dispatcher.event(GetResponseEndEvent())
        return answer

    def _prepare_response_output(
        self, response_str: RESPONSE_TEXT_TYPE | None, source_nodes: list[NodeWithScore]
    ) -> RESPONSE_TYPE:
        response = super()._prepare_response_output(response_str, source_nodes)
        statistics = _statistics.get()
        _statistics.set(None)
        if statistics is not None:
            statistics["chunk_ids"] = {
                found.node.node_id: chunk_id_of(found.node.get_content(metadata_mode=MetadataMode.LLM))
                for found in source_nodes
            }
            response.metadata = {**(response.metadata or {}), "cachecraft": statistics}
        return response

    def _get_prompts(self) -> PromptDictType:
        return {}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        if prompts:
            raise ConfigError(
                f"the prompt is the engine's, {', '.join(prompts)} cannot be set; give the engine another `system` text"
            )


def _without_paths(nodes: Sequence[NodeWithScore]) -> list[NodeWithScore]:
    return [NodeWithScore(node=without_paths(found.node), score=found.score) for found in nodes]


def _new_statistics() -> dict[str, Any]:
    """An empty record for the answer that begins now; `_prepare_response_output` puts it into the response."""
    statistics: dict[str, Any] = {}
    _statistics.set(statistics)
    return statistics


def _fill(statistics: dict[str, Any], generation: Generation) -> None:
    """Fill in the statistics of an answer that has ended, and send the event."""
    statistics.update(generation.stats.as_dict())
    dispatcher.event(AnswerStatsEvent(stats=dict(statistics)))


def _deltas(
    called: CompletionResponseGen, responses: CompletionResponseGen, ended: Callable[[], object]
) -> Generator[str, None, None]:
    """The pieces of `called`, LlamaIndex's wrapper around `responses`; `ended` is called at the end in any case."""
    try:
        for response in called:
            if response.delta:
                yield response.delta
    finally:
        called.close()
        responses.close()  # the wrapper does not close it, and event handlers may keep its frames alive
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
