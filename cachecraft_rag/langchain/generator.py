"""LangChain's generation step: documents and a question in, the answer's text out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

from langchain_core.documents import Document
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, convert_to_messages
from langchain_core.messages.ai import add_ai_message_chunks
from langchain_core.prompts import BasePromptTemplate, format_document
from langchain_core.runnables import (
    Runnable,
    RunnableBinding,
    RunnableConfig,
    RunnableLambda,
    RunnableSerializable,
)
from langchain_core.runnables.utils import AddableDict
from pydantic import ConfigDict, SkipValidation, field_validator

from cachecraft_rag.checks import config_errors
from cachecraft_rag.engine.base import AnswerEngine, PathLike
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.langchain.chat_model import (
    ChatCacheCraft,
    check_settings,
    documents_of,
    history_of,
    parser_of,
    with_outcomes,
)
from cachecraft_rag.langchain.schemas import answer_schema
from cachecraft_rag.store.closeable import Closeable
from cachecraft_rag.types.documents import NOTE_KEYS, SEARCHED_KEY, Chunk


class CacheCraftGenerator(Closeable, RunnableSerializable[dict[str, object], str]):
    """Documents and a question in, the answer's text out: replaces `create_stuff_documents_chain(llm, prompt)`.

    The input is a dict: `input`, the question, a text or a list of its parts; `context`, documents, best first;
    optionally `chat_history`, messages in any form LangChain accepts. Without documents (an empty list) the model
    answers from the question and the history alone. Other key names can be set (`input_key="question"`). Keyword
    arguments of a call are those of `ChatCacheCraft`, such as `max_tokens`. Tokens of `llm` show in `astream_events`,
    its usage in LangChain's `UsageMetadataCallbackHandler`.

    The documents do not change. `with_context` also returns copies of them that say what became of each.

    llm              a `ChatCacheCraft`, or one with settings of its calls: `chat.bind(max_tokens=64)`
    document_prompt  formats a document for the model; None: its text alone. The formatted text is the chunk, so its
                     chunk id differs from the retriever's; "documents" in the statistics has the ids.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    llm: SkipValidation[Runnable[LanguageModelInput, AIMessage]]
    # langchain-core 1.0 cannot validate it
    document_prompt: SkipValidation[BasePromptTemplate[str] | None] = None
    input_key: str = "input"
    context_key: str = "context"
    history_key: str = "chat_history"

    def __init__(self, **settings: Any) -> None:
        with config_errors():
            super().__init__(**settings)

    @field_validator("llm", mode="before")
    @classmethod
    def _check_llm(cls, llm: object) -> object:
        """Refuse a model that takes no documents, and one whose answers are no text."""
        model = _unbound(llm)
        if not isinstance(model, ChatCacheCraft):
            raise ConfigError(
                f"llm must be a ChatCacheCraft, or one with settings (chat.bind(max_tokens=64)), not "
                f"{type(model).__name__}. For structured output write CacheCraftGenerator("
                "llm=chat.bind(json_schema=schema)) | JsonOutputParser(). For another chat model use LangChain's "
                "create_stuff_documents_chain"
            )
        if isinstance(llm, RunnableBinding) and llm.kwargs.get("tools"):
            raise ConfigError(
                "llm has tools, and a call of a tool is no text, which is all that a CacheCraftGenerator returns. Call "
                "the model itself: chat.bind_tools(…).invoke(question, documents=documents)"
            )
        return llm

    @classmethod
    def from_pretrained(
        cls,
        model: str = "demo",
        *,
        store: PathLike = "chunk-caches",
        config: EngineConfig | None = None,
        **settings: object,
    ) -> Self:
        """Return a generator over `ChatCacheCraft.from_pretrained`; close it, so that pending captures are written.

        `settings` are fields of this class and of `ChatCacheCraft`, and options of `EngineConfig`, which override
        `config`.
        """
        check_settings(settings, cls, ChatCacheCraft)
        names = cls.model_fields.keys() - ChatCacheCraft.model_fields.keys()
        own = {name: settings.pop(name) for name in names & settings.keys()}
        with ExitStack() as opened:
            chat = ChatCacheCraft.from_pretrained(model, store=store, config=config, **settings)
            generator = cls(llm=opened.enter_context(chat), **own)
            opened.pop_all()
        return generator

    @property
    def engine(self) -> AnswerEngine:
        """The engine of the chat model."""
        model = _unbound(self.llm)
        assert isinstance(model, ChatCacheCraft)
        return model.engine

    def chunks(self, documents: Iterable[Document]) -> list[Chunk]:
        """Return a chunk of each document as the model reads it, for `prime`, `remove` and `sync` of the engine."""
        given = documents_of(documents, "documents")
        passages = given if self.document_prompt is None else self._formatted(given)
        return [
            Chunk(passage.page_content, {"source": str(document.metadata.get("source") or "")})
            for document, passage in zip(given, passages, strict=True)
        ]

    def with_structured_output(
        self, schema: Any, **kwargs: Any
    ) -> Runnable[dict[str, object], Any]:
        """Return a chain's last step whose answers keep to a schema; see `ChatCacheCraft.with_structured_output`.

        A step of the same keys: an object of the pydantic model, or the JSON value, in place of the answer's text.
        `kwargs` are only settings of the calls, such as `max_tokens`; there is no `include_raw`.
        """
        kept_to = self.llm.bind(json_schema=answer_schema(schema), **kwargs)
        return self.model_copy(update={"llm": kept_to}) | parser_of(schema)

    def close(self) -> None:
        """Close the chat model, also one passed as `llm`: the engine stays open unless `from_pretrained` opened it."""
        model = _unbound(self.llm)
        if isinstance(model, ChatCacheCraft):
            model.close()

    def invoke(
        self, input: dict[str, object], config: RunnableConfig | None = None, **kwargs: object
    ) -> str:
        """Return the whole answer as a text, "" if the model ends it at once."""

        def answer(input: dict[str, object], config: RunnableConfig) -> str:
            asked = self._read(input)
            answered = self.llm.invoke(asked.messages, config, documents=asked.passages, **kwargs)
            return answered.text

        return RunnableLambda(answer, name=self.get_name()).invoke(input, config)

    async def ainvoke(
        self, input: dict[str, object], config: RunnableConfig | None = None, **kwargs: object
    ) -> str:
        """Same as `invoke`, without blocking the event loop. A cancelled task ends the answer."""

        async def answer(input: dict[str, object], config: RunnableConfig) -> str:
            asked = self._read(input)
            message = await self.llm.ainvoke(
                asked.messages, config, documents=asked.passages, **kwargs
            )
            return message.text

        text: str = await RunnableLambda(answer, name=self.get_name()).ainvoke(input, config)
        return text

    def stream(
        self, input: dict[str, object], config: RunnableConfig | None = None, **kwargs: object
    ) -> Iterator[str]:
        """Return an iterator of pieces, none empty; the input is checked, and the model runs, while they are read."""
        return self._streamed(kwargs).stream(input, config)

    def astream(
        self, input: dict[str, object], config: RunnableConfig | None = None, **kwargs: object
    ) -> AsyncIterator[str]:
        """Same as `stream`, asynchronously. A cancelled task ends the answer."""
        return self._streamed(kwargs).astream(input, config)

    def transform(
        self,
        input: Iterator[dict[str, object]],
        config: RunnableConfig | None = None,
        **kwargs: object,
    ) -> Iterator[str]:
        """Same as `stream`, for a chain that delivers the input in parts; all are read before the model starts."""
        return self._streamed(kwargs).transform(input, config)

    def atransform(
        self,
        input: AsyncIterator[dict[str, object]],
        config: RunnableConfig | None = None,
        **kwargs: object,
    ) -> AsyncIterator[str]:
        """Same as `transform`, asynchronously."""
        return self._streamed(kwargs).atransform(input, config)

    def with_context(self) -> Runnable[dict[str, object], dict[str, object]]:
        """Return a chain's last step: its input, the answer, and documents that say how each one was used.

        The result is a dict: the input, "answer", and under `context_key` copies of the documents as `with_outcomes`
        makes them. A stream has dicts of one piece of "answer" each, then one of the rest. A call of the step takes no
        settings: bind them to `llm`.
        """

        def parts(input: dict[str, object], config: RunnableConfig) -> Iterator[AddableDict]:
            asked = self._read(input)
            chunks: list[Any] = []
            for chunk in self.llm.stream(asked.messages, config, documents=asked.passages):
                chunks.append(chunk)
                yield AddableDict(answer=chunk.text)
            yield self._context(input, asked, chunks)

        async def aparts(
            input: dict[str, object], config: RunnableConfig
        ) -> AsyncIterator[AddableDict]:
            asked = self._read(input)
            chunks: list[Any] = []
            async for chunk in self.llm.astream(asked.messages, config, documents=asked.passages):
                chunks.append(chunk)
                yield AddableDict(answer=chunk.text)
            yield self._context(input, asked, chunks)

        untyped: Any = RunnableLambda  # LangChain's types know no generator with a config
        step: Runnable[dict[str, object], dict[str, object]] = untyped(
            parts, aparts, name=self.get_name()
        )
        return step

    def _context(
        self, input: Mapping[str, object], asked: _Asked, chunks: list[AIMessageChunk]
    ) -> AddableDict:
        """Return what follows the pieces of an answer: the input, with copies of its documents."""
        message = add_ai_message_chunks(*chunks)
        rest = {key: value for key, value in input.items() if key != "answer"}
        return AddableDict({**rest, self.context_key: with_outcomes(asked.documents, message)})

    def _streamed(self, options: dict[str, object]) -> Runnable[dict[str, object], str]:
        def pieces(input: dict[str, object], config: RunnableConfig) -> Iterator[str]:
            asked = self._read(input)
            for chunk in self.llm.stream(
                asked.messages, config, documents=asked.passages, **options
            ):
                if chunk.text:
                    yield chunk.text

        async def apieces(input: dict[str, object], config: RunnableConfig) -> AsyncIterator[str]:
            asked = self._read(input)
            async for chunk in self.llm.astream(
                asked.messages, config, documents=asked.passages, **options
            ):
                if chunk.text:
                    yield chunk.text

        untyped: Any = RunnableLambda  # LangChain's types know no generator with a config
        streamed: Runnable[dict[str, object], str] = untyped(pieces, apieces, name=self.get_name())
        return streamed

    def _read(self, input: dict[str, object]) -> _Asked:
        """Return the messages and the passages of an input."""
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
        question = input[self.input_key]
        if not isinstance(question, str | list):  # a list: text in parts, as in a message
            raise ConfigError(f"{self.input_key!r} must be the question, a text, not {question!r}")
        history = history_of(input, self.history_key)
        documents = documents_of(input[self.context_key], self.context_key)
        passages = documents if self.document_prompt is None else self._formatted(documents)
        return _Asked([*history, *convert_to_messages([("human", question)])], documents, passages)

    def _formatted(self, documents: list[Document]) -> list[Document]:
        """Return the documents as the prompt formats them: other texts, so without the notes about the old ones."""
        assert self.document_prompt is not None
        passages = []
        for document in documents:
            metadata = {
                key: value
                for key, value in document.metadata.items()
                if key == SEARCHED_KEY or key not in NOTE_KEYS
            }
            passages.append(
                Document(
                    format_document(document, self.document_prompt),
                    id=document.id,
                    metadata=metadata,
                )
            )
        return passages


def _unbound(llm: object) -> object:
    """Return the model under the settings that were bound to it."""
    while isinstance(llm, RunnableBinding):
        llm = llm.bound
    return llm


@dataclass(frozen=True)
class _Asked:
    """A question: its messages, the documents of the input, and these as the model reads them."""

    messages: list[BaseMessage]
    documents: list[Document]
    passages: list[Document]
