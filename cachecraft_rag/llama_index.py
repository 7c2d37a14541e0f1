"""LlamaIndex: a query engine whose answers reuse chunk-caches, behind any LlamaIndex retriever and vector store.

    from cachecraft_rag.llama_index import CacheCraftQueryEngine

    query_engine = CacheCraftQueryEngine.from_index(index, model="demo", store="chunk-caches/")
    response = query_engine.query("How do I descale the kettle?")
    response.metadata["cachecraft"]["tokens_reused"]

It takes the place of `index.as_query_engine()`. Retrieval stays as it is; in place of LlamaIndex's synthesizer and LLM
stand `CacheCraftSynthesizer` and an `Engine`. Nothing here ever asks for `Settings.llm`, which would be OpenAI's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import ExitStack, aclosing
from functools import partial
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

try:
    from llama_index.core.base.base_retriever import BaseRetriever
    from llama_index.core.base.llms.generic_utils import (
        astream_completion_response_to_chat_response,
        completion_response_to_chat_response,
        stream_completion_response_to_chat_response,
    )
    from llama_index.core.base.llms.types import (
        ChatMessage,
        ChatResponse,
        ChatResponseAsyncGen,
        ChatResponseGen,
        CompletionResponse,
        CompletionResponseAsyncGen,
        CompletionResponseGen,
        LLMMetadata,
        MessageRole,
    )
    from llama_index.core.base.response.schema import RESPONSE_TYPE
    from llama_index.core.bridge.pydantic import PrivateAttr
    from llama_index.core.callbacks import CallbackManager
    from llama_index.core.indices.base import BaseIndex
    from llama_index.core.indices.prompt_helper import ChatPromptHelper, PromptHelper
    from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]  # re-exported silently
    from llama_index.core.instrumentation.events.base import BaseEvent  # type: ignore[attr-defined]
    from llama_index.core.instrumentation.events.synthesis import GetResponseEndEvent, GetResponseStartEvent
    from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
    from llama_index.core.llms.custom import CustomLLM
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.prompts.mixin import PromptDictType
    from llama_index.core.query_engine import RetrieverQueryEngine
    from llama_index.core.response_synthesizers import BaseSynthesizer
    from llama_index.core.schema import MetadataMode, NodeWithScore
    from llama_index.core.types import RESPONSE_TEXT_TYPE
except ImportError as error:
    raise ImportError(
        f"the LlamaIndex integration needs llama-index-core ({error}); type: pip install 'cachecraft-rag[llama-index]'"
    ) from error

from cachecraft_rag.bridge import iterate
from cachecraft_rag.closing import Closing
from cachecraft_rag.config import ReuseConfig, SamplingParams
from cachecraft_rag.engine import Engine, Generation
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.models import Decoder
from cachecraft_rag.prompt import DEFAULT_SYSTEM, Turn
from cachecraft_rag.rag import CACHE_FOLDER, PathLike
from cachecraft_rag.selfcheck import self_check
from cachecraft_rag.stats import RequestStats
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types import Chunk, chunk_id_of

# Of `index.as_query_engine`, what would have another LLM or another prompt than the engine's answer.
_LLAMA_INDEX_ONLY = frozenset(
    {"chat_content_qa_template", "chat_content_refine_template", "llm", "multimodal", "output_cls", "refine_template"}
    | {"response_mode", "response_synthesizer", "simple_template", "summary_template", "text_qa_template", "use_async"}
)
# What `from_index` hands to `from_defaults` besides `EngineOptions`.
_OWN_OPTIONS = frozenset(
    {"engine", "streaming", "sampling", "session", "empty_response", "node_postprocessors", "callback_manager"}
)
dispatcher = get_dispatcher(__name__)


class EngineOptions(TypedDict, total=False):
    """How an engine is opened; all of them as in `CacheCraft.from_pretrained`."""

    dtype: str
    device: str
    namespace: str
    reuse: ReuseConfig | None
    system: str
    host_bytes: int | None
    disk_bytes: int | None
    codec: str


class AnswerStatsEvent(BaseEvent):
    """An answer has ended; `stats` are its numbers, as under `response.metadata["cachecraft"]`."""

    stats: dict[str, Any]

    @classmethod
    def class_name(cls) -> str:
        """Its name among LlamaIndex's events."""
        return "CacheCraftAnswerStatsEvent"


class CacheCraftLLM(CustomLLM):
    """The engine as a LlamaIndex LLM, for `Settings.llm` and whatever asks for one.

    A call may bring `documents`, texts to draw on, best first: each is a chunk, and its chunk-cache is reused. Text
    that stands in the prompt itself is computed afresh each time and never stored. Earlier chat turns become the
    history; what a system message says is put in front of the next user turn, because the engine's own instruction
    stands before every chunk. The last response of a stream and every whole one has the numbers in `raw`:
    `raw["usage"]`, which LlamaIndex counts tokens by, and `raw["cachecraft"]`.

    Args:
        engine: it stays yours to close.
        sampling: how tokens are drawn, unless a call brings its own `sampling=`.
        session: see `Engine.stream`.
    """

    model_name: str
    context_window: int
    num_output: int
    session: str | None = None
    _engine: Engine = PrivateAttr()
    _sampling: SamplingParams = PrivateAttr()

    def __init__(
        self,
        engine: Engine,
        *,
        sampling: SamplingParams | None = None,
        session: str | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        sampling = sampling or SamplingParams()
        super().__init__(
            model_name=engine.decoder.name,
            context_window=engine.decoder.context_length,
            num_output=sampling.max_new_tokens,
            session=session,
            callback_manager=callback_manager or CallbackManager([]),
        )
        self._engine, self._sampling = engine, sampling

    @classmethod
    def class_name(cls) -> str:
        """Its name in events."""
        return "CacheCraftLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex asks of a model."""
        return LLMMetadata(
            context_window=self.context_window,
            num_output=self.num_output,
            model_name=self.model_name,
            is_chat_model=True,
        )

    def begin(
        self,
        question: str,
        *,
        documents: Sequence[str] = (),
        history: Sequence[Turn] = (),
        sampling: SamplingParams | None = None,
        config: ReuseConfig | None = None,
    ) -> Generation:
        """The answer as the engine gives it, without LlamaIndex's events; the model runs on the first piece."""
        chunks = [Chunk(text) for text in documents if text.strip()]
        return self._engine.stream(
            question,
            chunks,
            history=history,
            session=self.session,
            sampling=sampling or self._sampling,
            config=config,
        )

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer; keyword arguments as in `begin`."""
        return _last(_responses(self.begin(prompt, **kwargs)))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Answer piece by piece."""
        return _responses(self.begin(prompt, **kwargs))

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """`complete`, the model in a thread."""
        return await _alast(_aresponses(await asyncio.to_thread(self.begin, prompt, **kwargs)))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """`stream_complete`, the model in a thread."""
        return _aresponses(await asyncio.to_thread(self.begin, prompt, **kwargs))

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer the last message; keyword arguments as in `begin`, apart from `history`."""
        question, history = _turns(messages)
        answer = _last(_responses(self.begin(question, history=history, **kwargs)))
        return completion_response_to_chat_response(answer)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer the last message piece by piece."""
        question, history = _turns(messages)
        return stream_completion_response_to_chat_response(_responses(self.begin(question, history=history, **kwargs)))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """`chat`, the model in a thread."""
        question, history = _turns(messages)
        generation = await asyncio.to_thread(self.begin, question, history=history, **kwargs)
        return completion_response_to_chat_response(await _alast(_aresponses(generation)))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """`stream_chat`, the model in a thread."""
        question, history = _turns(messages)
        generation = await asyncio.to_thread(self.begin, question, history=history, **kwargs)
        return astream_completion_response_to_chat_response(_aresponses(generation))


class CacheCraftSynthesizer(BaseSynthesizer, Closing):
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
        **opening: Unpack[EngineOptions],
    ) -> Self:
        """Load a model and open (or make) a store folder, as `CacheCraft.from_pretrained`; `close` closes both."""
        engine, opened = _open_engine(model, store, opening)
        with opened:
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
        """Finish the births under way and close what `from_pretrained` opened."""
        self._opened.close()

    def get_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> RESPONSE_TEXT_TYPE:
        """Answer over texts, best first: a string, or a generator of pieces where this synthesizer streams."""
        dispatcher.event(GetResponseStartEvent(query_str=query_str, text_chunks=list(text_chunks)))
        generation = self.llm.begin(query_str, documents=text_chunks, **response_kwargs)
        responses = _responses(generation)

        @llm_completion_callback()  # LlamaIndex's events of an LLM call, around the generation that is ours to close
        def call(llm: CacheCraftLLM, prompt: str, *, documents: list[str]) -> Any:
            return responses if self._streaming else _last(responses)

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
        dispatcher.event(GetResponseStartEvent(query_str=query_str, text_chunks=list(text_chunks)))
        generation = await asyncio.to_thread(self.llm.begin, query_str, documents=text_chunks, **response_kwargs)
        responses = _aresponses(generation)

        @llm_completion_callback()
        async def call(llm: CacheCraftLLM, prompt: str, *, documents: list[str]) -> Any:
            return responses if self._streaming else await _alast(responses)

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


class CacheCraftQueryEngine(RetrieverQueryEngine, Closing):
    """Any LlamaIndex retriever, then `CacheCraftSynthesizer`. Make it with `from_index` or `from_defaults`.

    Close it at the end (or use it in a `with` block), or chunk-caches that are still being written may be lost.
    """

    def __init__(
        self,
        retriever: BaseRetriever,
        response_synthesizer: CacheCraftSynthesizer,
        node_postprocessors: list[BaseNodePostprocessor] | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        if not isinstance(response_synthesizer, CacheCraftSynthesizer):
            raise ConfigError(
                "CacheCraftQueryEngine needs a CacheCraftSynthesizer; from_defaults and from_index make one"
            )
        super().__init__(retriever, response_synthesizer, node_postprocessors, callback_manager)
        self.synthesizer = response_synthesizer

    @classmethod
    def from_index(
        cls,
        index: BaseIndex[Any],
        *,
        model: str = "demo",
        store: PathLike = "chunk-caches",
        **options: Any,
    ) -> Self:
        """In place of `index.as_query_engine()`, over any LlamaIndex index.

        Args:
            model, store: as in `CacheCraft.from_pretrained`.
            options: those of `from_defaults`; all others go to `index.as_retriever` (`similarity_top_k`, `filters` …).

        Raises:
            ConfigError: an option of `as_query_engine` that is about LlamaIndex's own LLM and prompts.
        """
        if refused := sorted(_LLAMA_INDEX_ONLY.intersection(options)):
            raise ConfigError(
                f"{', '.join(refused)}: the model is named by `model`, the prompt by `system`, and every answer is one "
                "pass over all chunks; leave these options out"
            )
        names = _OWN_OPTIONS | EngineOptions.__annotations__.keys()
        own = {name: options.pop(name) for name in list(options) if name in names}
        return cls.from_defaults(index.as_retriever(**options), model=model, store=store, **own)

    @classmethod
    def from_defaults(
        cls,
        retriever: BaseRetriever,
        *,
        engine: Engine | None = None,
        model: str = "demo",
        store: PathLike = "chunk-caches",
        streaming: bool = False,
        sampling: SamplingParams | None = None,
        session: str | None = None,
        empty_response: str | None = None,
        node_postprocessors: list[BaseNodePostprocessor] | None = None,
        callback_manager: CallbackManager | None = None,
        **opening: Unpack[EngineOptions],
    ) -> Self:
        """Over any LlamaIndex retriever.

        Args:
            engine: one that is open already, in place of `model`, `store` and `opening`; it stays yours to close.
            model, store, opening: as in `CacheCraft.from_pretrained`.
            streaming, sampling, session, empty_response: see `CacheCraftSynthesizer`.
            node_postprocessors, callback_manager: LlamaIndex's own.
        """
        settings: dict[str, Any] = {"streaming": streaming, "sampling": sampling, "session": session}
        settings |= {"empty_response": empty_response, "callback_manager": callback_manager}
        if engine is not None:
            if opening:
                raise ConfigError(f"{', '.join(opening)}: the engine is open already; leave these options out")
            synthesizer = CacheCraftSynthesizer(engine, **settings)
        else:
            synthesizer = CacheCraftSynthesizer.from_pretrained(model, store=store, **settings, **opening)
        return cls(retriever, synthesizer, node_postprocessors, callback_manager)

    @classmethod
    def from_args(cls, retriever: BaseRetriever, **options: Any) -> Self:  # type: ignore[override]
        """`from_defaults`: LlamaIndex's own would ask for OpenAI."""
        return cls.from_defaults(retriever, **options)

    @property
    def engine(self) -> Engine:
        """The engine that answers."""
        return self.synthesizer.engine

    def with_retriever(self, retriever: BaseRetriever) -> CacheCraftQueryEngine:
        """The same with another retriever; both share the engine."""
        return type(self)(retriever, self.synthesizer, self._node_postprocessors, self.callback_manager)

    def close(self) -> None:
        """Finish the births under way and close what was opened here; an engine that was given stays open."""
        self.synthesizer.close()


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


def _open_engine(model: str, store: str | os.PathLike[str], opening: EngineOptions) -> tuple[Engine, ExitStack]:
    """An engine over the chunk-caches below a store folder, and what closes both."""
    options = dict(opening)
    decoder = Decoder.load(model, dtype=opening.get("dtype", "auto"), device=opening.get("device", "auto"))
    self_check(decoder)
    given: dict[str, Any] = {
        name: options[name] for name in ("host_bytes", "disk_bytes", "codec") if options.get(name) is not None
    }
    with ExitStack() as opened:
        caches = opened.enter_context(ChunkCacheStore.open(Path(store) / CACHE_FOLDER, **given))
        engine = Engine(
            decoder,
            caches,
            namespace=opening.get("namespace", "default"),
            config=opening.get("reuse"),
            system=opening.get("system", DEFAULT_SYSTEM),
        )
        opened.enter_context(engine)
        return engine, opened.pop_all()


def _turns(messages: Sequence[ChatMessage]) -> tuple[str, list[Turn]]:
    """(The last message, the turns before it), those of one side in a row joined."""
    turns: list[Turn] = []
    for message in messages:
        role = (
            "assistant" if message.role in (MessageRole.ASSISTANT, MessageRole.CHATBOT, MessageRole.MODEL) else "user"
        )
        text = message.content or ""
        if turns and turns[-1][0] == role:
            turns[-1] = (turns[-1][0], f"{turns[-1][1]}\n\n{text}")
        else:
            turns.append(("assistant" if role == "assistant" else "user", text))
    if not turns or turns[-1][0] != "user":
        raise ConfigError("the last message must be the user's; there is nothing to answer")
    return turns[-1][1], turns[:-1]


def _raw(stats: RequestStats) -> dict[str, Any]:
    usage = {"prompt_tokens": stats.tokens_prompt, "completion_tokens": stats.tokens_generated}
    return {"usage": usage | {"total_tokens": sum(usage.values())}, "cachecraft": stats.as_dict()}


def _responses(generation: Generation) -> CompletionResponseGen:
    """A response per piece, and one without a piece but with the numbers at the end."""
    try:
        for piece in generation:
            yield CompletionResponse(text=generation.text, delta=piece)
    finally:
        generation.close()
    yield CompletionResponse(text=generation.text, delta="", raw=_raw(generation.stats))


async def _aresponses(generation: Generation) -> CompletionResponseAsyncGen:
    async with aclosing(iterate(generation)) as pieces:
        async for piece in pieces:
            yield CompletionResponse(text=generation.text, delta=piece)
    yield CompletionResponse(text=generation.text, delta="", raw=_raw(generation.stats))


def _last(responses: CompletionResponseGen) -> CompletionResponse:
    *_, last = responses
    return last


async def _alast(responses: CompletionResponseAsyncGen) -> CompletionResponse:
    async with aclosing(responses):
        return [response async for response in responses][-1]


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
