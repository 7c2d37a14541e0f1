"""LangChain's generation step: documents and a question in, the answer's text out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Self

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage, convert_to_messages
from langchain_core.prompts import BasePromptTemplate, format_document
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda, RunnableSerializable
from pydantic import ConfigDict, SkipValidation

from cachecraft_rag.checks import config_errors
from cachecraft_rag.engine.base import PathLike
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.langchain.chat_model import ChatCacheCraft, check_settings, documents_of, history_of
from cachecraft_rag.store.closeable import Closeable
from cachecraft_rag.types import CHUNK_ID


class CacheCraftGenerator(Closeable, RunnableSerializable[dict[str, Any], str]):
    """Documents and a question in, the answer's text out: replaces `create_stuff_documents_chain(llm, prompt)`.

    The input is a dict: `input`, the question; `context`, documents, best first; optionally `chat_history`, messages in
    any form LangChain accepts. Other key names can be set (`input_key="question"`). Inside runs `llm`: its tokens show
    in `astream_events`, its usage in LangChain's `UsageMetadataCallbackHandler`.

    document_prompt  formats a document for the model; None: its text alone. The formatted text is the chunk, so its
                     chunk id differs from the retriever's; "documents" in the statistics has the ids.
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
    def from_pretrained(
        cls,
        model: str = "demo",
        *,
        store: PathLike = "chunk-caches",
        config: EngineConfig | None = None,
        **settings: Any,
    ) -> Self:
        """A generator over `ChatCacheCraft.from_pretrained`; `settings` may also be fields of this class."""
        check_settings(settings, cls, ChatCacheCraft)
        names = cls.model_fields.keys() - ChatCacheCraft.model_fields.keys()
        own = {name: settings.pop(name) for name in names & settings.keys()}
        with ExitStack() as opened:
            chat = ChatCacheCraft.from_pretrained(model, store=store, config=config, **settings)
            generator = cls(llm=opened.enter_context(chat), **own)
            opened.pop_all()
        return generator

    def close(self) -> None:
        """Close the chat model."""
        self.llm.close()

    def invoke(self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any) -> str:
        """The whole answer; `kwargs` as in a call of `ChatCacheCraft`, here and below."""

        def answer(input: dict[str, Any], config: RunnableConfig) -> str:
            messages, documents = self._read(input)
            return self.llm.invoke(messages, config, documents=documents, **kwargs).text

        return RunnableLambda(answer, name=self.get_name()).invoke(input, config)

    async def ainvoke(self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any) -> str:
        """The whole answer, without blocking the event loop."""

        async def answer(input: dict[str, Any], config: RunnableConfig) -> str:
            messages, documents = self._read(input)
            return (await self.llm.ainvoke(messages, config, documents=documents, **kwargs)).text

        text: str = await RunnableLambda(answer, name=self.get_name()).ainvoke(input, config)
        return text

    def stream(self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[str]:
        """The answer piece by piece."""
        return self._streamed(kwargs).stream(input, config)

    def astream(self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any) -> AsyncIterator[str]:
        """The answer piece by piece, without blocking the event loop."""
        return self._streamed(kwargs).astream(input, config)

    def transform(
        self, input: Iterator[dict[str, Any]], config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[str]:
        """`stream` for a chain whose earlier steps deliver the input in parts."""
        return self._streamed(kwargs).transform(input, config)

    def atransform(
        self, input: AsyncIterator[dict[str, Any]], config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[str]:
        """`astream` for a chain whose earlier steps deliver the input in parts."""
        return self._streamed(kwargs).atransform(input, config)

    def _streamed(self, options: dict[str, Any]) -> Runnable[dict[str, Any], str]:
        def pieces(input: dict[str, Any], config: RunnableConfig) -> Iterator[str]:
            messages, documents = self._read(input)
            for chunk in self.llm.stream(messages, config, documents=documents, **options):
                if chunk.text:
                    yield chunk.text

        async def apieces(input: dict[str, Any], config: RunnableConfig) -> AsyncIterator[str]:
            messages, documents = self._read(input)
            async for chunk in self.llm.astream(messages, config, documents=documents, **options):
                if chunk.text:
                    yield chunk.text

        untyped: Any = RunnableLambda  # LangChain's types know no generator with a config
        streamed: Runnable[dict[str, Any], str] = untyped(pieces, apieces, name=self.get_name())
        return streamed

    def _read(self, input: dict[str, Any]) -> tuple[list[BaseMessage], list[Document]]:
        """The messages and the documents of an input."""
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
        if self.document_prompt is not None:
            prompt = self.document_prompt
            documents = [
                Document(format_document(document, prompt), id=document.id, metadata=metadata)
                for document in documents
                for metadata in [{key: value for key, value in document.metadata.items() if key != CHUNK_ID}]
            ]
        return [*history, *convert_to_messages([("human", question)])], documents
