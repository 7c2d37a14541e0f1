"""LangChain: a generator and a chat model that reuse the chunk-caches of the documents they are given.

    chain = create_retrieval_chain(any_retriever, CacheCraftGenerator.from_pretrained("demo", store="chunk-caches"))

Documents reach the model as documents and not as one long text, so the engine knows each by what the model sees of it.
Needs `langchain-core` and nothing else of LangChain: `pip install 'cachecraft-rag[langchain]'`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

from cachecraft_rag.checks import config_errors
from cachecraft_rag.engine.async_bridge import iterate
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.engine.engine import Engine, Generation, PathLike
from cachecraft_rag.engine.prompt import Turn
from cachecraft_rag.engine.sampling import SamplingParams
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.store.closeable import Closeable
from cachecraft_rag.types import Chunk

try:
    from langchain_core.callbacks import (
        AsyncCallbackManagerForChainRun,
        AsyncCallbackManagerForLLMRun,
        CallbackManagerForChainRun,
        CallbackManagerForLLMRun,
    )
    from langchain_core.documents import Document
    from langchain_core.language_models.chat_models import (
        BaseChatModel,
        agenerate_from_stream,
        generate_from_stream,
    )
    from langchain_core.messages import AIMessageChunk, BaseMessage, ChatMessage, convert_to_messages
    from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
    from langchain_core.outputs import ChatGenerationChunk, ChatResult
    from langchain_core.prompts import BasePromptTemplate, format_document
    from langchain_core.runnables import RunnableConfig, RunnableSerializable
    from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SkipValidation, model_validator
except ImportError as error:
    raise ImportError(f"{error}; type: pip install 'cachecraft-rag[langchain]'") from error

_FINISH = {"end": "stop", "stop": "stop", "length": "length", "closed": "closed"}  # as other chat models call it
_OF_SERVERS = {"api_key", "max_retries", "stream_usage", "streaming", "timeout"}  # no meaning for a model in process
_SAMPLING = {"max_tokens", "temperature", "top_p", "seed"}


class ChatCacheCraft(Closeable, BaseChatModel):
    """A chat model of an engine. Documents to answer over come with the call and not in a message:

    >>> chat = ChatCacheCraft.from_pretrained("demo")  # doctest: +SKIP
    >>> chat.invoke("How do I descale the kettle?", documents=retriever.invoke("descale kettle"))  # doctest: +SKIP

    `usage_metadata["input_token_details"]` tells the tokens taken from chunk-caches (`cache_read`) and those of
    chunk-caches that were captured (`cache_creation`); `response_metadata["cachecraft"]` is `RequestStats.as_dict()` and,
    under "documents", the `id` of each document, in the order given, with the `chunk_id` of what the model read of it.

    The conversation stands behind the documents, so it shapes no chunk-cache. That goes for system messages too: they
    may hold a user's text. What all requests share belongs in the engine's own instruction (`system=`).

    engine       what answers; it stays the caller's to close unless it came from `from_pretrained`
    session      whose private chunk-caches may be used besides the shared ones (see `Engine`)
    reuse        how caches are reused; None: as the engine does
    max_tokens, temperature, top_p, seed, stop  see `SamplingParams`

    All but `engine` and `reuse` may also be given with a call. Raises `ConfigError` for a setting that does not exist,
    for messages that hold more than text and for a conversation that does not end with the user.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    engine: Engine = Field(exclude=True, repr=False)
    session: str | None = None
    reuse: ReuseConfig | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    _opened: ExitStack = PrivateAttr(default_factory=ExitStack)

    def __init__(self, **settings: Any) -> None:
        with config_errors():
            super().__init__(**settings)

    @model_validator(mode="before")
    @classmethod
    def _without_settings_of_servers(cls, values: Any) -> Any:
        """Chat models are swapped for each other by name, and no timeout of a server must stop that."""
        return {name: value for name, value in values.items() if name not in _OF_SERVERS}

    @classmethod
    def from_pretrained(
        cls,
        model: str = "demo",
        *,
        store: PathLike = "chunk-caches",
        **settings: Any,
    ) -> Self:
        """Load a model and open (or make) a store of chunk-caches, as `Engine.from_pretrained` does.

        Retrieval stays with whatever the application has. `settings` are those of `EngineConfig` and the fields of
        this class. Close the model when done (or use a `with` block): chunk-caches still being captured are then written.
        Raises `ConfigError` for a setting that does not exist, before anything is loaded.
        """
        _check_names(settings, cls)
        names = EngineConfig.option_names() - cls.model_fields.keys()
        options: Any = {name: settings.pop(name) for name in names & settings.keys()}
        with ExitStack() as opened:
            engine = opened.enter_context(Engine.from_pretrained(model, store=store, **options))
            chat = cls(engine=engine, **settings)
            chat._opened = opened.pop_all()
        return chat

    def close(self) -> None:
        """Finish the captures under way and close what `from_pretrained` opened."""
        self._opened.close()

    @property
    def model_name(self) -> str:
        """The decoder's name."""
        return self.engine.decoder.name

    def get_token_ids(self, text: str) -> list[int]:
        """The model's own tokens, by which LangChain trims messages; its default would ask the hub for GPT-2's."""
        tokenizer = self.engine.decoder.tokenizer
        ids: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=False)["input_ids"]
        return ids

    @property
    def _llm_type(self) -> str:
        return "cachecraft"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        """All that an answer depends on: LangChain's own cache of answers serves by these and the messages."""
        engine = self.engine
        return {
            "model_name": self.model_name,
            "fingerprint": engine.decoder.fingerprint,
            "namespace": engine.namespace,
            "system": engine.prompts.system.segment_id,
            "session": self.session,
            "reuse": repr(self.reuse or engine.config),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "default_stop": list(self.stop),
        }

    def _open(
        self, messages: list[BaseMessage], stop: list[str] | None, given: dict[str, Any]
    ) -> tuple[Generation, list[dict[str, str | None]]]:
        """The engine's answer to a conversation, not begun yet, and which document is which chunk.

        `given` are the call's own settings.
        """
        given = dict(given)
        documents = _documents(given.pop("documents", None) or (), "documents")
        session = given.pop("session", self.session)
        if unknown := given.keys() - _SAMPLING:
            known = ", ".join(sorted({"documents", "session", "stop"} | _SAMPLING))
            raise ConfigError(f"{', '.join(sorted(unknown))}: no setting of this model's; a call may bring {known}")
        values: dict[str, Any] = {name: getattr(self, name) for name in _SAMPLING} | given
        chosen: Any = self.stop if stop is None else stop  # one string in place of a list is refused, not cut up
        sampling = SamplingParams(max_new_tokens=values.pop("max_tokens"), stop=chosen, **values)
        history, question = conversation(messages)
        chunks = [Chunk(document.page_content) for document in documents]
        read = [
            {"id": document.id, "chunk_id": chunk.chunk_id} for document, chunk in zip(documents, chunks, strict=True)
        ]
        generation = self.engine.stream(
            question,
            chunks,
            history=history,
            session=session,
            sampling=sampling,
            config=self.reuse,
        )
        return generation, read

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        """Piece by piece; the last chunk is empty and carries the numbers. LangChain itself tells the callbacks."""
        generation, read = self._open(messages, stop, kwargs)
        try:
            for piece in generation:
                yield ChatGenerationChunk(message=AIMessageChunk(content=piece))
        finally:
            generation.close()
        yield self._last(generation, read, session=kwargs.get("session", self.session))

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        """As `_stream`, tokenisation of the prompt included in what happens in threads."""
        async for chunk in iterate(self._stream(messages, stop, **kwargs)):
            yield chunk

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return generate_from_stream(self._stream(messages, stop, **kwargs))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        # Not in one thread from beginning to end, which is LangChain's default: a few answers would take all threads.
        return await agenerate_from_stream(self._astream(messages, stop, **kwargs))

    def _last(
        self, generation: Generation, read: list[dict[str, str | None]], *, session: str | None
    ) -> ChatGenerationChunk:
        stats, engine = generation.stats, self.engine
        stored = (self.reuse or engine.config).captures and not (engine.prompts.system.private and session is None)
        captured = sum(chunk.tokens for chunk in stats.chunks if chunk.outcome == "computed") if stored else 0
        usage = UsageMetadata(
            input_tokens=stats.tokens_prompt,
            output_tokens=stats.tokens_generated,
            total_tokens=stats.tokens_prompt + stats.tokens_generated,
            input_token_details=InputTokenDetails(cache_read=stats.tokens_reused, cache_creation=captured),
        )
        metadata = {
            "finish_reason": _FINISH[stats.finish or "closed"],
            "model_name": self.model_name,
            "model_provider": "cachecraft",
            "cachecraft": stats.as_dict() | {"documents": read},
        }
        message = AIMessageChunk(content="", usage_metadata=usage, response_metadata=metadata, chunk_position="last")
        return ChatGenerationChunk(message=message)


class CacheCraftGenerator(Closeable, RunnableSerializable[dict[str, Any], str]):
    """Documents and a question in, the answer's text out: in place of `create_stuff_documents_chain(llm, prompt)`.

    The input is a dict: `input`, the question; `context`, documents, best first; optionally `chat_history`, messages in
    any form LangChain knows. Where an application has other names for these, say so (`input_key="question"`). Pieces,
    callbacks and numbers are those of `llm`, which runs within: its tokens show in `astream_events`, its usage in
    LangChain's `UsageMetadataCallbackHandler`.

    document_prompt  how a document reads to the model; None: its text. What it says is part of the chunk's identity, so
                     a document's chunk is another than its retriever's: "documents" among the numbers says which.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    llm: ChatCacheCraft
    document_prompt: SkipValidation[BasePromptTemplate[str] | None] = None  # langchain-core 1.0 cannot validate it
    input_key: str = "input"
    context_key: str = "context"
    history_key: str = "chat_history"

    def __init__(self, **settings: Any) -> None:
        with config_errors():
            super().__init__(**settings)

    @classmethod
    def from_pretrained(cls, model: str = "demo", **settings: Any) -> Self:
        """A generator of `ChatCacheCraft.from_pretrained`; `settings` are those of that and this class's fields."""
        _check_names(settings, cls, ChatCacheCraft)
        names = cls.model_fields.keys() - ChatCacheCraft.model_fields.keys()
        own = {name: settings.pop(name) for name in names & settings.keys()}
        with ExitStack() as opened:
            made = cls(llm=opened.enter_context(ChatCacheCraft.from_pretrained(model, **settings)), **own)
            opened.pop_all()
        return made

    def close(self) -> None:
        """Close the chat model."""
        self.llm.close()

    def invoke(self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any) -> str:
        """The whole answer. `kwargs` are those of a call of `ChatCacheCraft`, here and below."""
        return self._call_with_config(self._answer, input, config, **kwargs)

    async def ainvoke(self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any) -> str:
        """The whole answer, computed in threads."""
        return await self._acall_with_config(self._aanswer, input, config, **kwargs)

    def stream(self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[str]:
        """The answer piece by piece."""
        yield from self.transform(iter([input]), config, **kwargs)

    async def astream(
        self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[str]:
        """The answer piece by piece, computed in threads."""

        async def once() -> AsyncIterator[dict[str, Any]]:
            yield input

        async for piece in self.atransform(once(), config, **kwargs):
            yield piece

    def transform(
        self, input: Iterator[dict[str, Any]], config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[str]:
        """As `stream`, for a chain whose earlier steps deliver the input in parts."""
        yield from self._transform_stream_with_config(input, self._pieces, config, **kwargs)

    async def atransform(
        self, input: AsyncIterator[dict[str, Any]], config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[str]:
        """As `astream`, for a chain whose earlier steps deliver the input in parts."""
        async for piece in self._atransform_stream_with_config(input, self._apieces, config, **kwargs):
            yield piece

    def _answer(
        self, input: dict[str, Any], run_manager: CallbackManagerForChainRun, config: RunnableConfig, **kwargs: Any
    ) -> str:
        messages, documents = self._read(input)
        return self.llm.invoke(messages, config, documents=documents, **kwargs).text

    async def _aanswer(
        self, input: dict[str, Any], run_manager: AsyncCallbackManagerForChainRun, config: RunnableConfig, **kwargs: Any
    ) -> str:
        messages, documents = self._read(input)
        return (await self.llm.ainvoke(messages, config, documents=documents, **kwargs)).text

    def _pieces(
        self,
        parts: Iterator[dict[str, Any]],
        run_manager: CallbackManagerForChainRun,
        config: RunnableConfig,
        **kwargs: Any,
    ) -> Iterator[str]:
        messages, documents = self._read(_joined(list(parts)))
        for chunk in self.llm.stream(messages, config, documents=documents, **kwargs):
            if chunk.text:
                yield chunk.text

    async def _apieces(
        self,
        parts: AsyncIterator[dict[str, Any]],
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
        **kwargs: Any,
    ) -> AsyncIterator[str]:
        messages, documents = self._read(_joined([part async for part in parts]))
        async for chunk in self.llm.astream(messages, config, documents=documents, **kwargs):
            if chunk.text:
                yield chunk.text

    def _read(self, input: dict[str, Any]) -> tuple[list[BaseMessage], list[Document]]:
        """The conversation and the documents of an input."""
        if not isinstance(input, Mapping):
            raise ConfigError(
                f"the input must be a dict with {self.input_key!r} and {self.context_key!r}, not {input!r}"
            )
        missing = [key for key in (self.input_key, self.context_key) if key not in input]
        if missing:
            raise ConfigError(
                f"the input has no {' and no '.join(map(repr, missing))}, only {', '.join(map(repr, input))}; "
                "rename it, or set input_key and context_key"
            )
        question, history = input[self.input_key], input.get(self.history_key) or []
        if not isinstance(question, str | list):  # a list: text in parts, as in a message
            raise ConfigError(f"{self.input_key!r} must be the question, a text, not {question!r}")
        # LangChain itself would make a message of every letter, of every key, of every field.
        if isinstance(history, str | Mapping | BaseMessage) or not isinstance(history, Iterable):
            raise ConfigError(
                f"{self.history_key!r} must be a list of messages, not {history!r}; write [('human', '…'), ('ai', '…')]"
            )
        documents = _documents(input[self.context_key], self.context_key)
        if self.document_prompt is not None:
            prompt = self.document_prompt
            documents = [Document(format_document(document, prompt), id=document.id) for document in documents]
        return [*convert_to_messages(history), *convert_to_messages([("human", question)])], documents


def _check_names(settings: Mapping[str, Any], *classes: type[BaseModel]) -> None:
    """Refuse settings of `from_pretrained` that are neither the engine's nor a field of one of the classes."""
    fields = {name for owner in classes for name in owner.model_fields} - {"engine", "llm"}
    known = {"store"} | EngineConfig.option_names() | fields
    if unknown := settings.keys() - known - _OF_SERVERS:
        raise ConfigError(f"{', '.join(sorted(unknown))}: no such setting; there are {', '.join(sorted(known))}")


def _documents(given: Any, name: str) -> list[Document]:
    """What was given under that name, if these are documents."""
    documents = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    if not all(isinstance(document, Document) for document in documents):
        raise ConfigError(
            f"{name!r} must be a list of LangChain's documents (Document(text) makes one): leave out the step that "
            "joins them into one text, or nothing can be reused"
        )
    return documents


def _joined(parts: Sequence[Any]) -> Any:
    """An input from its parts, which LangChain lets be added."""
    whole = parts[0]
    for part in parts[1:]:
        whole = whole + part
    return whole


def conversation(messages: Iterable[BaseMessage]) -> tuple[list[Turn], str]:
    """The earlier turns and the question. System messages open the first of them; messages of one role are joined.

    Raises `ConfigError` for roles and contents that the model does not know, and where the user does not speak last.
    """
    messages = list(messages)
    instructions = [_text(message) for message in messages if _role(message) == "system"]
    turns: list[tuple[Any, list[str]]] = [("user", instructions)]
    for message in messages:
        role = _role(message)
        if role == "system":
            continue
        if role != turns[-1][0]:
            turns.append((role, []))
        turns[-1][1].append(_text(message))
    *history, (role, question) = turns
    if role != "user":
        raise ConfigError("the conversation ends with the assistant; the last message must be the user's")
    return [(role, "\n\n".join(texts)) for role, texts in history], "\n\n".join(question)


def _role(message: BaseMessage) -> str:
    name = message.role if isinstance(message, ChatMessage) else message.type
    role = {"human": "user", "user": "user", "ai": "assistant", "assistant": "assistant", "system": "system"}.get(name)
    if role is None:
        raise ConfigError(f"the model knows no {name} messages; turn their text into a message of the user's")
    return role


def _text(message: BaseMessage) -> str:
    if isinstance(message.content, list) and message.type != "ai":  # of an answer, thoughts may be left out
        kinds = {part.get("type") for part in message.content if isinstance(part, dict)} - {"text"}
        if kinds:
            raise ConfigError(f"the model reads text only, and a message holds {', '.join(sorted(map(str, kinds)))}")
    return str(message.text)
