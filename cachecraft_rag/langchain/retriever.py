"""LangChain's retrieval within a conversation: a follow-up is searched for with the questions before it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

import numpy as np
from langchain_core.callbacks import AsyncCallbackManagerForChainRun, CallbackManagerForChainRun
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, ChatMessage, HumanMessage
from langchain_core.runnables import Runnable, RunnableConfig, RunnableSerializable, run_in_executor
from langchain_core.vectorstores import VectorStoreRetriever
from pydantic import ConfigDict, SkipValidation

from cachecraft_rag.checks import check_kind, config_errors
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.langchain.chat_model import history_of, turns_of
from cachecraft_rag.prompt.builder import Turn
from cachecraft_rag.retrievers.conversation import search_texts
from cachecraft_rag.retrievers.langchain import CacheCraftVectorStore
from cachecraft_rag.types.documents import SEARCHED_KEY


class ConversationRetriever(RunnableSerializable[dict[str, object], list[Document]]):
    """Any retriever, for a question in its conversation: `create_retrieval_chain(ConversationRetriever(retriever), …)`.

    The input is a dict with the question, a text, and, from the second turn on, the `chat_history`, as for
    `CacheCraftGenerator`. A first question is passed to the retriever as it is. A follow-up is searched for alone and
    joined with the user's last two questions; no call of a model rewrites it. A vector store's search of type
    "similarity" runs once, with the mean of the two vectors, if the store can search by vector. Otherwise the two
    results are merged, best ranks first, equal texts once, up to the length of the longer one. With a
    `CacheCraftVectorStore`, documents of the turn before win near ties: their chunk-caches exist.

    `metadata["cachecraft_searched"]` of a follow-up's documents has what was searched for, a JSON list as text.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    retriever: SkipValidation[Runnable[str, list[Document]]]
    input_key: str = "input"
    history_key: str = "chat_history"

    def __init__(self, retriever: Runnable[str, list[Document]], **settings: Any) -> None:
        check_kind("retriever", retriever, Runnable, advice="vector_store.as_retriever() is one")
        with config_errors():
            super().__init__(retriever=retriever, **settings)  # type: ignore[call-arg]

    def invoke(
        self, input: dict[str, object], config: RunnableConfig | None = None, **kwargs: Any
    ) -> list[Document]:
        """Return the documents for the question, best first; `kwargs` are options of the retriever, such as `k`."""
        return self._call_with_config(self._retrieve, input, config, run_type="retriever", **kwargs)

    async def ainvoke(
        self, input: dict[str, object], config: RunnableConfig | None = None, **kwargs: Any
    ) -> list[Document]:
        """Same as `invoke`, without blocking the event loop: a search by vector runs in a thread."""
        return await self._acall_with_config(
            self._aretrieve, input, config, run_type="retriever", **kwargs
        )

    def _retrieve(
        self,
        input: dict[str, object],
        run_manager: CallbackManagerForChainRun,
        config: RunnableConfig,
        **kwargs: object,
    ) -> list[Document]:
        question, history = self._read(input)
        texts = search_texts(question, history)
        documents = self._by_vector(question, history, kwargs) if len(texts) > 1 else None
        if documents is None:
            documents = _merged([self.retriever.invoke(text, config, **kwargs) for text in texts])
        return _marked(documents, texts)

    async def _aretrieve(
        self,
        input: dict[str, object],
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
        **kwargs: object,
    ) -> list[Document]:
        question, history = self._read(input)
        texts = search_texts(question, history)
        documents = None
        if len(texts) > 1:
            documents = await run_in_executor(config, self._by_vector, question, history, kwargs)
        if documents is None:
            documents = _merged(
                [await self.retriever.ainvoke(text, config, **kwargs) for text in texts]
            )
        return _marked(documents, texts)

    def _by_vector(
        self, question: str, history: Sequence[Turn], given: Mapping[str, Any]
    ) -> list[Document] | None:
        """Search once by the mean vector; None if the retriever is not a plain search of a vector store."""
        retriever = self.retriever
        if not isinstance(retriever, VectorStoreRetriever) or retriever.search_type != "similarity":
            return None
        store = retriever.vectorstore
        options = {**retriever.search_kwargs, **given}
        if isinstance(store, CacheCraftVectorStore):
            return [
                document for document, _ in store.conversation_search(question, history, **options)
            ]
        if store.embeddings is None:
            return None
        vectors = [store.embeddings.embed_query(text) for text in search_texts(question, history)]
        try:
            return store.similarity_search_by_vector(np.mean(vectors, axis=0).tolist(), **options)
        except NotImplementedError:  # not every store can
            return None

    def _read(self, input: Mapping[str, object]) -> tuple[str, list[Turn]]:
        """Return the question and the turns before it."""
        if not isinstance(input, Mapping) or self.input_key not in input:
            raise ConfigError(
                f"the input must be a dict with {self.input_key!r}, not {input!r}; or set input_key"
            )
        question = input[self.input_key]
        if not isinstance(question, str):
            raise ConfigError(f"{self.input_key!r} must be the question, a text, not {question!r}")
        history = history_of(input, self.history_key)
        said = [
            message
            for message in history
            if isinstance(message, (HumanMessage, AIMessage, ChatMessage))
            and not getattr(message, "tool_calls", None)
        ]
        return question, turns_of(said)


def _merged(lists: Sequence[Sequence[Document]]) -> list[Document]:
    """One list, or several by rank: the last one first, without repetitions, as many as the longest has."""
    if len(lists) == 1:
        return list(lists[0])
    distinct: dict[str, Document] = {}
    for document in chain.from_iterable(zip_longest(*reversed(lists))):
        if document is not None:
            distinct.setdefault(document.page_content, document)
    return list(distinct.values())[: max(map(len, lists))]


def _marked(documents: list[Document], texts: Sequence[str]) -> list[Document]:
    """Copies with the texts of a follow-up in their metadata: some stores return the very documents that they hold."""
    if len(texts) == 1:
        return documents
    searched = json.dumps(list(texts), ensure_ascii=False)
    return [
        document.model_copy(update={"metadata": {**document.metadata, SEARCHED_KEY: searched}})
        for document in documents
    ]
