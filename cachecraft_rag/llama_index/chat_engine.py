"""The chat engine: a conversation over any LlamaIndex retriever, whose answers reuse chunk-caches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from typing import Any, Self

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole
from llama_index.core.callbacks import trace_method
from llama_index.core.chat_engine.types import (
    AgentChatResponse,
    BaseChatEngine,
    StreamingAgentChatResponse,
)
from llama_index.core.indices.base import BaseIndex
from llama_index.core.instrumentation.events.chat_engine import (
    StreamChatEndEvent,
    StreamChatStartEvent,
)
from llama_index.core.memory import BaseMemory, ChatMemoryBuffer
from llama_index.core.tools import ToolOutput

from cachecraft_rag.checks import check_kind, check_text
from cachecraft_rag.engine.base import AnswerEngine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.llama_index.llm import CacheCraftLLM, aobserved, observed
from cachecraft_rag.llama_index.query_engine import CacheCraftQueryEngine
from cachecraft_rag.llama_index.sources import Sources
from cachecraft_rag.llama_index.synthesizer import AnswerStatsEvent, dispatcher
from cachecraft_rag.llama_index.tools import question_of, turns_of
from cachecraft_rag.retrievers.llama_index import ConversationQuery
from cachecraft_rag.serving.generation import Generation
from cachecraft_rag.store.closeable import Closeable

# Arguments of `index.as_chat_engine` about LlamaIndex's own prompts; the engine has its own.
_LLAMA_INDEX_ONLY = frozenset(
    {
        "chat_mode",
        "condense_prompt",
        "context_prompt",
        "context_refine_prompt",
        "context_refine_template",
    }
    | {
        "context_template",
        "llm",
        "prefix_messages",
        "skip_condense",
        "streaming",
        "system_prompt",
        "verbose",
    }
)
# Options of a query engine that a conversation has no use for.
_QUERY_ENGINE_ONLY = frozenset({"empty_response", "output_cls", "text_qa_template"})
# one token in this many of the model's context is for earlier turns; documents need the rest
_MEMORY_SHARE = 4


@dataclass
class CacheCraftStreamingChatResponse(StreamingAgentChatResponse):
    """An answer as a stream; `metadata["cachecraft"]` has its statistics once the stream has ended."""

    metadata: dict[str, Any] = field(default_factory=dict)


class CacheCraftChatEngine(BaseChatEngine, Closeable):
    """A conversation over a query engine's retriever and engine. Make it with `from_index` or `from_defaults`.

    Each answer is one pass over the nodes as chunks, whose chunk-caches are reused; earlier turns follow them in the
    prompt. A follow-up is searched for with the questions before it (`search_texts`), and never costs a call of the
    model. `metadata["cachecraft"]` of a response is `RequestStats.as_dict()` with `searched`, the texts searched for,
    and `chunk_ids`, node id → chunk id. Each source node's metadata has its chunk id and its outcome, unless
    `with_outcomes` is False.

    The model runs while a stream is being read. Its turn is remembered when the stream ends, fails or is closed after
    its first piece; to leave a stream early, close `response.chat_stream` (`achat_stream`), not only `response_gen`. A
    turn without any text of an answer is not remembered. If retrieval finds no nodes, the model answers from the
    conversation alone.

    Args:
        query_engine: closed with this chat engine, as far as it opened anything.
        memory: where turns are kept; by default a buffer of a quarter of the model's context.
        chat_history: earlier turns, with the default memory.
    """

    def __init__(
        self,
        query_engine: CacheCraftQueryEngine,
        *,
        memory: BaseMemory | None = None,
        chat_history: Sequence[ChatMessage] | None = None,
    ) -> None:
        check_kind(
            "query_engine", query_engine, CacheCraftQueryEngine, advice="from_index makes one"
        )
        _check_memory(memory, chat_history)
        self.callback_manager = query_engine.callback_manager
        self._query_engine = query_engine
        self._llm: CacheCraftLLM = query_engine.synthesizer.llm
        self._sources = query_engine.synthesizer.sources
        self.memory = memory or ChatMemoryBuffer.from_defaults(
            chat_history=list(chat_history or ()),
            token_limit=max(1, self._llm.context_window // _MEMORY_SHARE),
            # otherwise it would count with OpenAI's
            tokenizer_fn=self.engine.decoder.tokenizer.encode,
        )

    @classmethod
    def from_index(
        cls,
        index: BaseIndex[Any],
        *,
        memory: BaseMemory | None = None,
        chat_history: Sequence[ChatMessage] | None = None,
        **options: Any,
    ) -> Self:
        """Return a chat engine over any LlamaIndex index; write it in place of `index.as_chat_engine(…)`.

        `options` are those of `CacheCraftQueryEngine.from_index` without `streaming`, `output_cls`, `text_qa_template`
        and `empty_response`; `memory` and `chat_history` exclude each other.
        """
        _refuse(options)
        _check_memory(memory, chat_history)
        engine = CacheCraftQueryEngine.from_index(index, **options)
        return cls(engine, memory=memory, chat_history=chat_history)

    @classmethod
    def from_defaults(
        cls,
        retriever: BaseRetriever,
        *,
        memory: BaseMemory | None = None,
        chat_history: Sequence[ChatMessage] | None = None,
        **options: Any,
    ) -> Self:
        """Return a chat engine over any LlamaIndex retriever; arguments of `from_index`, without a retriever's."""
        _refuse(options)
        _check_memory(memory, chat_history)
        engine = CacheCraftQueryEngine.from_defaults(retriever, **options)
        return cls(engine, memory=memory, chat_history=chat_history)

    @property
    def engine(self) -> AnswerEngine:
        """The engine that answers."""
        return self._query_engine.engine

    @property
    def chat_history(self) -> list[ChatMessage]:
        """All messages of the memory, oldest first, also those that no longer fit a prompt; not to be changed."""
        return self.memory.get_all()

    def reset(self) -> None:
        """Forget the conversation: empty the memory. Chunk-caches stay."""
        self.memory.reset()

    def close(self) -> None:
        """Close the query engine, and with it an engine that it opened, after pending captures; others stay open."""
        self._query_engine.close()

    @trace_method("chat")
    def chat(
        self, message: str, chat_history: list[ChatMessage] | None = None
    ) -> AgentChatResponse:
        """Retrieve, answer, and remember both messages of the turn.

        `chat_history` replaces what the memory holds, also if an error follows. The statistics of the whole answer are
        under `metadata["cachecraft"]`.
        """
        if chat_history is not None:
            self.memory.set(chat_history)
        turn = _Turn(self._checked(message), self.memory.get(input=message))
        sources = self._sources(self._query_engine.retrieve(turn.query))
        response = self._llm.chat(turn.messages, **sources.documents())
        for said in turn.said(response.message.content or ""):
            self.memory.put(said)
        return _whole(turn, sources, response)

    @trace_method("chat")
    async def achat(
        self, message: str, chat_history: list[ChatMessage] | None = None
    ) -> AgentChatResponse:
        """Same as `chat`, without blocking the event loop."""
        if chat_history is not None:
            await self.memory.aset(chat_history)
        turn = _Turn(self._checked(message), await self.memory.aget(input=message))
        sources = self._sources(await self._query_engine.aretrieve(turn.query))
        response = await self._llm.achat(turn.messages, **sources.documents())
        for said in turn.said(response.message.content or ""):
            await self.memory.aput(said)
        return _whole(turn, sources, response)

    @trace_method("chat")
    def stream_chat(
        self, message: str, chat_history: list[ChatMessage] | None = None
    ) -> CacheCraftStreamingChatResponse:
        """Retrieve, then answer piece by piece: `for piece in response.response_gen`.

        The model starts with the first piece. The statistics are there, and the turn is remembered, once the stream has
        ended: of an answer that an error or its reader ends early, the text so far. An answer that is never read leaves
        neither. For `chat_history` see `chat`.
        """
        if chat_history is not None:
            self.memory.set(chat_history)
        turn = _Turn(self._checked(message), self.memory.get(input=message))
        sources = self._sources(self._query_engine.retrieve(turn.query))
        generation = self._llm.begin(turn.question, history=turn.history, **sources.documents())
        streamed = _Streamed(turn, sources, self._llm, generation)
        streamed.response.chat_stream = streamed.pieces(self.memory)
        return streamed.response

    @trace_method("chat")
    async def astream_chat(
        self, message: str, chat_history: list[ChatMessage] | None = None
    ) -> CacheCraftStreamingChatResponse:
        """Retrieve, then answer piece by piece: `async for piece in response.async_response_gen()`.

        Otherwise the same as `stream_chat`; the prompt is tokenised in a thread.
        """
        if chat_history is not None:
            await self.memory.aset(chat_history)
        turn = _Turn(self._checked(message), await self.memory.aget(input=message))
        sources = self._sources(await self._query_engine.aretrieve(turn.query))
        documents = sources.documents()
        generation = await asyncio.to_thread(
            self._llm.begin, turn.question, history=turn.history, **documents
        )
        streamed = _Streamed(turn, sources, self._llm, generation)
        streamed.response.achat_stream = streamed.apieces(self.memory)
        return streamed.response

    def _checked(self, message: str) -> str:
        check_text("message", message, damaged=True)
        if not message.strip():
            raise ConfigError("the question is empty; ask something")
        return message


class _Turn:
    """A question with the conversation before it."""

    def __init__(self, message: str, earlier: Sequence[ChatMessage]) -> None:
        first = next(
            (at for at, said in enumerate(earlier) if said.role != MessageRole.ASSISTANT),
            len(earlier),
        )
        self.message = message
        self.messages = [*earlier[first:], ChatMessage(role=MessageRole.USER, content=message)]
        self.question, self.history = question_of(self.messages)
        instructions = (MessageRole.SYSTEM, MessageRole.DEVELOPER)  # nothing to search for
        asked = [said for said in self.messages[:-1] if said.role not in instructions]
        self.query = ConversationQuery.of(message, turns_of(asked))

    def said(self, answer: str) -> list[ChatMessage]:
        """The two messages to remember; none for an answer that was stopped before its first token."""
        roles = ((MessageRole.USER, self.message), (MessageRole.ASSISTANT, answer))
        return [ChatMessage(role=role, content=text) for role, text in roles] if answer else []


def _check_memory(memory: object, chat_history: object) -> None:
    """Raise ConfigError for a memory of another type, or one together with a history."""
    check_kind(
        "memory",
        memory,
        BaseMemory,
        optional=True,
        advice="ChatMemoryBuffer.from_defaults makes one",
    )
    if memory is not None and chat_history is not None:
        raise ConfigError("give memory or chat_history: a memory has its own history")


def _refuse(options: dict[str, object]) -> None:
    if refused := sorted(_LLAMA_INDEX_ONLY.intersection(options)):
        raise ConfigError(
            f"{', '.join(refused)}: the model is named by `model`, the instruction by `system`, every answer is one "
            "pass over all chunks, and no call of the model condenses a question; leave these options out"
        )
    if refused := sorted(_QUERY_ENGINE_ONLY.intersection(options)):
        raise ConfigError(
            f"{', '.join(refused)}: a conversation cannot use what is for single questions; leave it out, or use "
            "CacheCraftQueryEngine"
        )


def _statistics(turn: _Turn, sources: Sources, counted: dict[str, object]) -> dict[str, object]:
    """Return the statistics of an answer that has ended, and put outcomes into its nodes; sends the event too."""
    sources.note_outcomes(counted)
    stats: dict[str, object] = {
        **counted,
        "searched": tuple(turn.query.embedding_strs),
        "chunk_ids": sources.chunk_ids,
    }
    dispatcher.event(AnswerStatsEvent(stats=dict(stats)))
    return stats


def _reported(turn: _Turn, sources: Sources) -> dict[str, Any]:
    """Return the retrieval as LlamaIndex's own chat engines report it."""
    output = ToolOutput(
        tool_name="retriever",
        content=str(sources.nodes),
        raw_input={"message": turn.message},
        raw_output=sources.nodes,
    )
    return {"sources": [output], "source_nodes": sources.nodes}


def _whole(turn: _Turn, sources: Sources, response: ChatResponse) -> AgentChatResponse:
    raw: Any = response.raw
    metadata = {"cachecraft": _statistics(turn, sources, raw["cachecraft"])}
    return AgentChatResponse(
        response.message.content or "", metadata=metadata, **_reported(turn, sources)
    )


class _Streamed:
    """A response whose stream is the answer's; at its end the turn is remembered and its statistics are filled in."""

    def __init__(
        self, turn: _Turn, sources: Sources, llm: CacheCraftLLM, generation: Generation
    ) -> None:
        self._turn = turn
        self._sources = sources
        self._llm = llm
        self._generation = generation
        # Not LlamaIndex's thread that writes to the memory: its reader polls without pause, on a core of the model's.
        self.response = CacheCraftStreamingChatResponse(
            is_writing_to_memory=False, **_reported(turn, sources)
        )

    def pieces(self, memory: BaseMemory) -> Generator[ChatResponse, None, None]:
        dispatcher.event(StreamChatStartEvent())
        responses = observed(
            self._llm, self._turn.messages, self._generation, self._sources.documents()
        )
        try:
            with closing(responses):
                yield from responses
        finally:
            for said in self._ended():
                memory.put(said)

    async def apieces(self, memory: BaseMemory) -> AsyncGenerator[ChatResponse, None]:
        dispatcher.event(StreamChatStartEvent())
        responses = await aobserved(
            self._llm, self._turn.messages, self._generation, self._sources.documents()
        )
        try:
            async with aclosing(responses):
                async for response in responses:
                    yield response
        finally:
            for said in self._ended():
                await memory.aput(said)

    def _ended(self) -> list[ChatMessage]:
        """Complete the response; returns what to remember."""
        self.response.is_done = True
        self.response.metadata["cachecraft"] = _statistics(
            self._turn, self._sources, self._generation.stats.as_dict()
        )
        dispatcher.event(StreamChatEndEvent())
        return self._turn.said(self._generation.text)
