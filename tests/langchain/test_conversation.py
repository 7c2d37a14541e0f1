"""Conversations through LangChain: the second turn finds what it refers to, and reuses what the first captured."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_classic.chains import create_history_aware_retriever, create_retrieval_chain
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    HumanMessageChunk,
    SystemMessage,
)
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_core.runnables.history import RunnableWithMessageHistory
from langchain_core.vectorstores import InMemoryVectorStore

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.langchain import CacheCraftGenerator, ChatCacheCraft, ConversationRetriever
from cachecraft_rag.langchain.chat_model import turns_of
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.retrievers.langchain import CacheCraftEmbeddings, CacheCraftVectorStore
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.documents import chunk_id_of

FIRST, FOLLOW_UP = "How often must the Heron H5 be descaled?", "And how long does that take?"
HISTORY = [HumanMessage(FIRST), AIMessage("Every six weeks.")]
HOW_LONG = "Descaling the Heron H5 takes twenty minutes with the liquid from Brindle."
LEAVE = "A request for leave takes long: it is answered within ten days, and that is the rule."
DOCUMENTS = [
    Document(
        "The Heron H5 must be descaled every six weeks, or when its orange light is on.",
        metadata={"page": 1},
    ),
    Document(HOW_LONG, metadata={"page": 2}),
    Document(
        "The water filter of the Heron H5 lies behind the tank and is replaced twice a year.",
        metadata={"page": 3},
    ),
    Document(LEAVE, metadata={"page": 4}),
    Document(
        "How long a journey takes is written on the form for travel, and that is signed.",
        metadata={"page": 5},
    ),
]


@pytest.fixture(scope="module")
def embeddings() -> CacheCraftEmbeddings:
    return CacheCraftEmbeddings()


@pytest.fixture
def vectors(embeddings: CacheCraftEmbeddings, tmp_path: Path) -> Iterator[CacheCraftVectorStore]:
    with CacheCraftVectorStore.from_documents(
        DOCUMENTS, embeddings, folder=tmp_path / "index"
    ) as store:
        yield store


@pytest.fixture
def engine(tiny_decoder: Callable[..., Any], tmp_path: Path) -> Iterator[Engine]:
    """It captures nothing between answers: what is reused decides, by a little, what is said."""
    with (
        ChunkCacheStore.open(tmp_path / "caches") as store,
        Engine(
            tiny_decoder("Llama", seed=4),
            store,
            new_variants="off",
            config=ReuseConfig(recompute_ratio=0.15),
        ) as made,
    ):
        yield made


@pytest.fixture
def generator(engine: Engine) -> CacheCraftGenerator:
    return CacheCraftGenerator(
        llm=ChatCacheCraft(engine=engine, max_tokens=12, temperature=0.3, seed=1)
    )


class NoVectors(InMemoryVectorStore):
    """A store that cannot search by vector."""

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, **kwargs: Any
    ) -> list[Document]:
        raise NotImplementedError


def retrievers(
    embeddings: Embeddings, vectors: CacheCraftVectorStore, k: int = 3
) -> dict[str, Runnable[str, Any]]:
    """Every kind of retriever, over the same documents."""
    in_memory = InMemoryVectorStore.from_documents(DOCUMENTS, embeddings)
    return {
        "LangChain's store": in_memory.as_retriever(search_kwargs={"k": k}),
        "our store": vectors.as_retriever(search_kwargs={"k": k}),
        "mmr": vectors.as_retriever(search_type="mmr", search_kwargs={"k": k, "lambda_mult": 0.9}),
        "a store without vectors": NoVectors.from_documents(DOCUMENTS, embeddings).as_retriever(
            search_kwargs={"k": k}
        ),
        "a function": RunnableLambda(lambda text: in_memory.similarity_search(text, k=k)),
    }


KINDS = ["LangChain's store", "our store", "mmr", "a store without vectors", "a function"]


class Statistics(BaseCallbackHandler):
    """The statistics of every answer."""

    def __init__(self) -> None:
        self.of: list[dict[str, Any]] = []

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.of.append(response.generations[0][0].message.response_metadata["cachecraft"])


def settle(engine: Engine) -> None:
    ids = [chunk_id_of(document.page_content) for document in DOCUMENTS]
    engine.write_back.wait_for([engine.prompts.system.segment_id, *ids])
    engine.store.flush()


def share_reused(before: dict[str, Any], after: dict[str, Any]) -> float:
    """Of the tokens of chunks in both prompts, the share taken from chunk-caches the second time."""
    known = {chunk["chunk_id"] for chunk in before["chunks"]}
    repeated = [chunk for chunk in after["chunks"] if chunk["chunk_id"] in known]
    assert len(repeated) >= 2
    kept = sum(chunk["tokens"] - chunk["recomputed"] - chunk["computed"] for chunk in repeated)
    return float(kept / sum(chunk["tokens"] for chunk in repeated))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_chain_over_any_retriever_finds_and_reuses_on_the_second_turn(
    embeddings: CacheCraftEmbeddings,
    vectors: CacheCraftVectorStore,
    engine: Engine,
    generator: CacheCraftGenerator,
    kind: str,
    asynchronous: bool,
) -> None:
    retriever = retrievers(embeddings, vectors)[kind]
    chain = create_retrieval_chain(ConversationRetriever(retriever), generator)
    statistics = Statistics()

    def ask(given: dict[str, Any]) -> dict[str, Any]:
        config: Any = {"callbacks": [statistics]}
        return (
            asyncio.run(chain.ainvoke(given, config))
            if asynchronous
            else chain.invoke(given, config)
        )

    first = ask({"input": FIRST})
    settle(engine)
    answered = [HumanMessage(FIRST), AIMessage(first["answer"] or "Every six weeks.")]
    second = ask({"input": FOLLOW_UP, "chat_history": answered})
    assert retriever.invoke(FOLLOW_UP)[0].page_content == LEAVE  # what it finds alone
    found = [document.page_content for document in second["context"]]
    by_vector = kind in ("LangChain's store", "our store", "our retriever")
    # merged lists also have what each search alone puts first
    assert HOW_LONG in found[: 2 if by_vector else 3]
    assert len(found) == len(set(found)) == 3
    before, after = statistics.of
    assert before["tokens_reused"] == 0
    assert before["searched"] == ()
    assert after["searched"] == (FOLLOW_UP, f"{FIRST} {FOLLOW_UP}")
    assert share_reused(before, after) >= 0.8


# LangChain deprecates its own message histories, which applications still use.
@pytest.mark.filterwarnings("ignore::langchain_core._api.deprecation.LangChainDeprecationWarning")
def test_a_conversation_kept_by_langchain(
    vectors: CacheCraftVectorStore, engine: Engine, generator: CacheCraftGenerator
) -> None:
    """README's chain with LangChain's own message history around it."""
    history = InMemoryChatMessageHistory()
    chain = RunnableWithMessageHistory(
        create_retrieval_chain(
            ConversationRetriever(vectors.as_retriever(search_kwargs={"k": 3})), generator
        ),
        lambda: history,
        input_messages_key="input",
        history_messages_key="chat_history",
        output_messages_key="answer",
        history_factory_config=[],
    )
    statistics = Statistics()
    config: Any = {"callbacks": [statistics]}
    chain.invoke({"input": FIRST}, config)
    settle(engine)
    second = chain.invoke({"input": FOLLOW_UP}, config)
    assert second["context"][0].page_content == HOW_LONG
    assert share_reused(*statistics.of) >= 0.8
    assert len(history.messages) == 4


def test_langchains_own_history_aware_retriever_works_with_our_model(
    vectors: CacheCraftVectorStore, engine: Engine, generator: CacheCraftGenerator
) -> None:
    """The model itself rewrites the question; the chunks it finds again are reused."""
    prompt = ChatPromptTemplate.from_messages(
        [
            ("system", "Rewrite the question."),
            MessagesPlaceholder("chat_history"),
            ("human", "{input}"),
        ]
    )
    every = vectors.as_retriever(search_kwargs={"k": len(DOCUMENTS)})
    aware = create_history_aware_retriever(generator.llm, every, prompt)
    chain = create_retrieval_chain(aware, generator)
    statistics = Statistics()
    chain.invoke({"input": FIRST}, {"callbacks": [statistics]})
    settle(engine)
    chain.invoke({"input": FOLLOW_UP, "chat_history": HISTORY}, {"callbacks": [statistics]})
    first, rewriting, second = statistics.of
    assert rewriting["chunks"] == ()
    assert share_reused(first, second) >= 0.8


def test_a_first_question_goes_to_the_retriever_as_it_is(embeddings: CacheCraftEmbeddings) -> None:
    asked: list[str] = []

    def search(text: str) -> list[Document]:
        asked.append(text)
        return DOCUMENTS[:1]

    retriever = ConversationRetriever(RunnableLambda(search))
    assert retriever.invoke({"input": FIRST, "chat_history": []}) == DOCUMENTS[:1]
    assert asked == [FIRST]
    assert "cachecraft_searched" not in DOCUMENTS[0].metadata


def test_the_stores_own_documents_are_not_changed_and_prompts_keep_the_note(
    embeddings: CacheCraftEmbeddings, engine: Engine
) -> None:
    store = InMemoryVectorStore.from_documents(DOCUMENTS, embeddings)
    found = ConversationRetriever(store.as_retriever()).invoke(
        {"input": FOLLOW_UP, "chat_history": HISTORY}
    )
    assert all(document.metadata["cachecraft_searched"] for document in found)
    assert "cachecraft_searched" not in store.similarity_search(FIRST, k=1)[0].metadata
    prompted = CacheCraftGenerator(
        llm=ChatCacheCraft(engine=engine, max_tokens=4),
        document_prompt=PromptTemplate.from_template("{page_content}!"),
    )
    statistics = Statistics()
    prompted.invoke(
        {"input": FOLLOW_UP, "context": found, "chat_history": HISTORY}, {"callbacks": [statistics]}
    )
    assert statistics.of[0]["searched"] == (FOLLOW_UP, f"{FIRST} {FOLLOW_UP}")


@pytest.mark.parametrize(
    "history",
    [
        [("human", FIRST), ("ai", "Every six weeks.")],
        [SystemMessage("Be kind."), *HISTORY],
        [AIMessage("Good day! What is it?"), *HISTORY],
        [HumanMessageChunk(content=FIRST), AIMessageChunk(content="Every month.")],
    ],
)
def test_every_form_of_history_is_read(
    vectors: CacheCraftVectorStore, history: list[BaseMessage]
) -> None:
    retriever = ConversationRetriever(vectors.as_retriever(search_kwargs={"k": 3}))
    found = retriever.invoke({"input": FOLLOW_UP, "chat_history": history})
    assert json.loads(found[0].metadata["cachecraft_searched"]) == [
        FOLLOW_UP,
        f"{FIRST} {FOLLOW_UP}",
    ]


def test_options_of_a_call_hold_for_a_follow_up_too(
    vectors: CacheCraftVectorStore, embeddings: CacheCraftEmbeddings
) -> None:
    in_memory = InMemoryVectorStore.from_documents(DOCUMENTS, embeddings)
    for store in (vectors, in_memory):
        retriever = ConversationRetriever(store.as_retriever(search_kwargs={"k": 3}))
        for history in ([], HISTORY):
            asked: dict[str, object] = {"input": FOLLOW_UP, "chat_history": history}
            assert len(retriever.invoke(asked, k=1)) == 1
            assert len(asyncio.run(retriever.ainvoke(asked, k=1))) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("text", "must be a dict with 'input'"),
        ({"question": FIRST}, "must be a dict with 'input'"),
        ({"input": 3}, "must be the question"),
        ({"input": FIRST, "chat_history": "text"}, "must be a list of messages"),
    ],
)
def test_a_wrong_input_is_refused(vectors: CacheCraftVectorStore, given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ConversationRetriever(vectors.as_retriever()).invoke(given)


def test_streamed_chunks_and_an_assistants_chat_message_are_turns() -> None:
    thought = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Monthly."}]
    expected = [("user", "How often?"), ("assistant", "Monthly."), ("user", "And then?")]
    for answer in (
        AIMessageChunk(content="Month") + AIMessageChunk(content="ly."),
        AIMessageChunk(content=thought),  # type: ignore[arg-type]
        ChatMessage(role="assistant", content=thought),  # type: ignore[arg-type]
    ):
        question = HumanMessageChunk(content="How often?")
        assert turns_of([question, answer, HumanMessage("And then?")]) == expected


def test_what_is_no_retriever_is_refused() -> None:
    with pytest.raises(ConfigError, match="retriever must be a Runnable"):
        ConversationRetriever("retriever")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="keys"):
        ConversationRetriever(RunnableLambda(lambda text: []), keys="input")
