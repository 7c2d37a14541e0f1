"""LangChain's chat model over an engine; documents come with the call, as documents."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.documents import Document
from langchain_core.language_models.chat_models import BaseChatModel, agenerate_from_stream, generate_from_stream
from langchain_core.messages import AIMessageChunk, BaseMessage, ChatMessage, convert_to_messages
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from cachecraft_rag.checks import config_errors
from cachecraft_rag.engine.base import AnswerEngine, PathLike
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.engine.generation import Generation
from cachecraft_rag.engine.prompt import Turn
from cachecraft_rag.engine.sampling import SamplingParams
from cachecraft_rag.errors import ConfigError, UnsupportedCallError
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.retrievers.unreused import LongPromptWarning
from cachecraft_rag.store.closeable import Closeable
from cachecraft_rag.types import Chunk

SEARCHED = "cachecraft_searched"  # metadata key of a follow-up's documents: what was searched for
_FINISH = {"end": "stop", "stop": "stop", "length": "length", "closed": "closed"}  # in the words of other chat models
_SERVER_SETTINGS = {"api_key", "max_retries", "stream_usage", "streaming", "timeout"}  # meaningless for a local model
_SAMPLING = {"max_tokens", "temperature", "top_p", "seed"}
_ADVICE = "use CacheCraftGenerator in place of create_stuff_documents_chain, or pass them as documents=[…]"
logger = logging.getLogger("cachecraft_rag.langchain")


class ChatCacheCraft(Closeable, BaseChatModel):
    """A chat model over an engine. The documents to answer from are an argument of the call, not part of a message:

    >>> chat = ChatCacheCraft.from_pretrained("demo")  # doctest: +SKIP
    >>> chat.invoke("How do I descale the kettle?", documents=retriever.invoke("descale kettle"))  # doctest: +SKIP

    `usage_metadata["input_token_details"]` counts prompt tokens reused from chunk-caches (`cache_read`) and those of
    newly captured chunk-caches (`cache_creation`). `response_metadata["cachecraft"]` is `RequestStats.as_dict()` plus
    "documents": the `id` of each document, in the order given, and the `chunk_id` of the text the model read of it.
    "searched" is what `ConversationRetriever` searched for.

    The conversation follows the documents in the prompt, so no chunk-cache depends on it. The same goes for system
    messages, because they may hold a user's text. An instruction for all requests belongs in the engine (`system=`).

    engine       the caller closes it, unless it came from `from_pretrained`
    session      whose private chunk-caches may be used besides the shared ones (see `Engine`)
    reuse        how chunk-caches are reused; None: as the engine is configured
    max_tokens, temperature, top_p, seed, stop  see `SamplingParams`

    All but `engine` and `reuse` may also be given with a call. Raises `ConfigError` for an unknown setting, for
    messages that hold more than text and for a conversation whose last message is not the user's.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    engine: AnswerEngine = Field(exclude=True, repr=False)
    session: str | None = None
    reuse: ReuseConfig | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    _opened: ExitStack = PrivateAttr(default_factory=ExitStack)
    _long_prompt: LongPromptWarning = PrivateAttr(default_factory=lambda: LongPromptWarning(logger, _ADVICE))

    def __init__(self, **settings: Any) -> None:
        with config_errors():
            super().__init__(**settings)

    @model_validator(mode="before")
    @classmethod
    def _without_settings_of_servers(cls, values: Any) -> Any:
        """Ignore server settings (a timeout …), so that this model can replace a remote one in an application."""
        return {name: value for name, value in values.items() if name not in _SERVER_SETTINGS}

    @classmethod
    def from_pretrained(
        cls,
        model: str = "demo",
        *,
        store: PathLike = "chunk-caches",
        config: EngineConfig | None = None,
        **settings: Any,
    ) -> Self:
        """Load a model and open (or make) a store of chunk-caches, as `Engine.from_pretrained` does.

        Close the chat model when done (or use a `with` block), so that pending captures are written.

        Args:
            config: how to open the engine.
            settings: fields of this class, and options of `EngineConfig`, which override `config`.

        Raises:
            ConfigError: an unknown setting, before anything is loaded; others as `Engine.from_pretrained`.
        """
        check_settings(settings, cls)
        names = EngineConfig.option_names() - cls.model_fields.keys()
        options: Any = {name: settings.pop(name) for name in names & settings.keys()}
        with ExitStack() as opened:
            engine = opened.enter_context(Engine.from_pretrained(model, store=store, config=config, **options))
            chat = cls(engine=engine, **settings)
            chat._opened = opened.pop_all()
        return chat

    def close(self) -> None:
        """Write pending captures and close what `from_pretrained` opened."""
        self._opened.close()

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Any:
        """Not supported: raises UnsupportedCallError, which says what to do instead."""
        raise UnsupportedCallError(
            "ChatCacheCraft calls no tools, so it cannot be the model of create_agent with tools. Retrieve before the "
            "call (create_retrieval_chain(retriever, CacheCraftGenerator(llm=chat))), or let another model be the "
            "agent and give it that chain as a tool (chain.as_tool(…))."
        )

    def with_structured_output(self, schema: Any, **kwargs: Any) -> Any:
        """Not supported: raises UnsupportedCallError, which says what to do instead."""
        raise UnsupportedCallError(
            "ChatCacheCraft does not force its output into a schema. Ask for JSON in the question and parse the "
            "answer: put PydanticOutputParser(pydantic_object=…).get_format_instructions() into the question, then "
            "write chat | parser."
        )

    @property
    def model_name(self) -> str:
        """The decoder's name."""
        return self.engine.decoder.name

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids for trimming messages; LangChain's default would download GPT-2's tokenizer."""
        tokenizer = self.engine.decoder.tokenizer
        ids: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=False)["input_ids"]
        return ids

    @property
    def _llm_type(self) -> str:
        return "cachecraft"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        """Everything an answer depends on besides the messages; LangChain's own answer cache is keyed by it."""
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
    ) -> tuple[Generation, dict[str, Any]]:
        """The generation for a conversation, not started yet, and what its statistics say of the documents.

        given  settings of this call
        """
        given = dict(given)
        documents = documents_of(given.pop("documents", None) or (), "documents")
        session = given.pop("session", self.session)
        if unknown := given.keys() - _SAMPLING:
            known = ", ".join(sorted({"documents", "session", "stop"} | _SAMPLING))
            raise ConfigError(f"{', '.join(sorted(unknown))}: no setting of this model; a call may bring {known}")
        values: dict[str, Any] = {name: getattr(self, name) for name in _SAMPLING} | given
        chosen: Any = self.stop if stop is None else stop  # `SamplingParams` refuses a string in place of a list
        sampling = SamplingParams(max_new_tokens=values.pop("max_tokens"), stop=chosen, **values)
        history, question = conversation(messages)
        if not documents:
            self._long_prompt.check([question, *(text for role, text in history if role == "user")])
        chunks = [Chunk(document.page_content) for document in documents]
        read = [
            {"id": document.id, "chunk_id": chunk.chunk_id} for document, chunk in zip(documents, chunks, strict=True)
        ]
        # As `ConversationRetriever` notes it; a first question is its own search, as far as this model knows.
        searched = next((tuple(one.metadata[SEARCHED]) for one in documents if SEARCHED in one.metadata), ())
        generation = self.engine.stream(
            question, chunks, history=history, session=session, sampling=sampling, config=self.reuse
        )
        return generation, {"documents": read, "searched": searched}

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        """Stream the answer; the last chunk has no text, only the statistics. LangChain itself calls the callbacks."""
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
        """`_stream` that never blocks the event loop; tokenisation of the prompt runs in a thread."""
        generation, read = await asyncio.to_thread(self._open, messages, stop, kwargs)
        try:
            async for piece in generation:
                yield ChatGenerationChunk(message=AIMessageChunk(content=piece))
        finally:
            generation.close()
        yield self._last(generation, read, session=kwargs.get("session", self.session))

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
        # LangChain's default runs the whole answer in one thread; a few answers would then occupy the whole pool.
        return await agenerate_from_stream(self._astream(messages, stop, **kwargs))

    def _last(self, generation: Generation, read: dict[str, Any], *, session: str | None) -> ChatGenerationChunk:
        stats, engine = generation.stats, self.engine
        stored = (self.reuse or engine.config).capture and not (engine.prompts.system.private and session is None)
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
            "cachecraft": stats.as_dict() | read,
        }
        message = AIMessageChunk(content="", usage_metadata=usage, response_metadata=metadata, chunk_position="last")
        return ChatGenerationChunk(message=message)


def check_settings(settings: Mapping[str, Any], *classes: type[BaseModel]) -> None:
    """Raise ConfigError for a setting that is neither an option of `EngineConfig` nor a field of one of the classes."""
    fields = {name for owner in classes for name in owner.model_fields} - {"engine", "llm"}
    known = {"store", "config"} | EngineConfig.option_names() | fields
    if unknown := settings.keys() - known - _SERVER_SETTINGS:
        raise ConfigError(f"{', '.join(sorted(unknown))}: no such setting; there are {', '.join(sorted(known))}")


def documents_of(given: Any, name: str) -> list[Document]:
    """The documents passed as argument `name`; ConfigError for anything else."""
    documents = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    if not all(isinstance(document, Document) for document in documents):
        raise ConfigError(
            f"{name!r} must be a list of LangChain's documents (Document(text) makes one): leave out the step that "
            "joins them into one text, or nothing can be reused"
        )
    return documents


def history_of(input: Mapping[str, Any], key: str) -> list[BaseMessage]:
    """The messages under `key` of a chain's input, none where it is missing; ConfigError for anything else."""
    given = input.get(key) or []
    # LangChain would turn each letter, key or field of these into a message.
    if isinstance(given, str | Mapping | BaseMessage) or not isinstance(given, Iterable):
        raise ConfigError(f"{key!r} must be a list of messages, not {given!r}; write [('human', '…'), ('ai', '…')]")
    return convert_to_messages(given)


def conversation(messages: Iterable[BaseMessage]) -> tuple[list[Turn], str]:
    """The earlier turns and the question. System messages open the first turn; neighbours of one role are joined.

    Raises `ConfigError` for roles and contents that the model cannot read, and if the last message is not the user's.
    """
    *history, (role, question) = turns_of(messages)
    if role != "user":
        raise ConfigError("the conversation ends with the assistant; the last message must be the user's")
    return history, question


def turns_of(messages: Iterable[BaseMessage]) -> list[Turn]:
    """The messages as turns, as in `conversation`; the first is the user's, and is empty where the assistant began."""
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
    return [(role, "\n\n".join(texts)) for role, texts in turns]


def _role(message: BaseMessage) -> str:
    name = message.role if isinstance(message, ChatMessage) else message.type
    role = {"human": "user", "user": "user", "ai": "assistant", "assistant": "assistant", "system": "system"}.get(name)
    if role is None:
        raise ConfigError(f"the model knows no {name} messages; turn their text into a message of the user's")
    return role


def _text(message: BaseMessage) -> str:
    if isinstance(message.content, list) and message.type != "ai":  # an answer's reasoning parts are left out
        kinds = {part.get("type") for part in message.content if isinstance(part, dict)} - {"text"}
        if kinds:
            raise ConfigError(f"the model reads text only, and a message holds {', '.join(sorted(map(str, kinds)))}")
    return str(message.text)
