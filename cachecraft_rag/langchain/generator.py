"""LangChain's generation step: documents and a question in, the answer's text out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForChainRun, CallbackManagerForChainRun
from langchain_core.documents import Document
from langchain_core.messages import BaseMessage, convert_to_messages
from langchain_core.prompts import BasePromptTemplate, format_document
from langchain_core.runnables import RunnableConfig, RunnableSerializable
from pydantic import ConfigDict, SkipValidation

from cachecraft_rag.checks import config_errors
from cachecraft_rag.engine.base import PathLike
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.langchain.chat_model import ChatCacheCraft, check_settings, documents_of
from cachecraft_rag.store.closeable import Closeable


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
        """`stream` for a chain whose earlier steps deliver the input in parts."""
        yield from self._transform_stream_with_config(input, self._pieces, config, **kwargs)

    async def atransform(
        self, input: AsyncIterator[dict[str, Any]], config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[str]:
        """`astream` for a chain whose earlier steps deliver the input in parts."""
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
        question, history = input[self.input_key], input.get(self.history_key) or []
        if not isinstance(question, str | list):  # a list: text in parts, as in a message
            raise ConfigError(f"{self.input_key!r} must be the question, a text, not {question!r}")
        # LangChain would turn each letter, key or field of these into a message.
        if isinstance(history, str | Mapping | BaseMessage) or not isinstance(history, Iterable):
            raise ConfigError(
                f"{self.history_key!r} must be a list of messages, not {history!r}; write [('human', '…'), ('ai', '…')]"
            )
        documents = documents_of(input[self.context_key], self.context_key)
        if self.document_prompt is not None:
            prompt = self.document_prompt
            documents = [
                Document(format_document(document, prompt), id=document.id, metadata=document.metadata)
                for document in documents
            ]
        return [*convert_to_messages(history), *convert_to_messages([("human", question)])], documents


def _joined(parts: Sequence[Any]) -> Any:
    """The sum of an input's parts; LangChain defines how parts are added."""
    whole = parts[0]
    for part in parts[1:]:
        whole = whole + part
    return whole
