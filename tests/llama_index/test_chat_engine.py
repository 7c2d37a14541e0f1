"""Conversations through LlamaIndex: reuse on the second turn in every way to call, follow-ups, memory, statistics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, MockEmbedding, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.chat_engine.types import (
    AgentChatResponse,
    BaseChatEngine,
    StreamingAgentChatResponse,
)
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.schema import QueryBundle, TextNode

from cachecraft_rag import Decoder, Engine, SamplingParams
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.llama_index import CacheCraftChatEngine, CacheCraftLLM
from cachecraft_rag.rag import CacheCraft
from cachecraft_rag.retrievers.index.faiss_store import FaissStore
from cachecraft_rag.retrievers.llama_index import (
    CacheCraftEmbedding,
    CacheCraftRetriever,
    ConversationQuery,
)
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.documents import Document as OwnDocument

SHORT = SamplingParams(max_new_tokens=10)
FIRST, FOLLOW_UP = "How often must the Heron H5 be descaled?", "And how long does that take?"
TEXTS = {
    "how often": "The Heron H5 must be descaled every six weeks, or when its orange light is on.",
    "how long": "Descaling the Heron H5 takes twenty minutes with the liquid from Brindle.",
    "filter": "The water filter of the Heron H5 lies behind the tank and is replaced twice a year.",
    "leave": "A request for leave takes long: it is answered within ten days, and that is the rule.",
    "travel": "How long a journey takes is written on the form for travel, and that is signed.",
}


@pytest.fixture(scope="module")
def embedding() -> CacheCraftEmbedding:
    return CacheCraftEmbedding()


@pytest.fixture(scope="module")
def index(embedding: CacheCraftEmbedding) -> VectorStoreIndex:
    """An index built the ordinary way: LlamaIndex's own vector store in memory."""
    return VectorStoreIndex.from_documents(
        [Document(id_=name, text=text) for name, text in TEXTS.items()], embed_model=embedding
    )


def chat_of(index: VectorStoreIndex, engine: Engine, **options: Any) -> CacheCraftChatEngine:
    return CacheCraftChatEngine.from_index(
        index, **({"engine": engine, "similarity_top_k": 3, "sampling": SHORT} | options)
    )


def memory() -> ChatMemoryBuffer:
    return ChatMemoryBuffer.from_defaults(token_limit=500, tokenizer_fn=list)


def names(response: Any) -> list[str]:
    """The documents of the response's nodes."""
    return [str(found.node.ref_doc_id) for found in response.source_nodes]


def settle(engine: Engine, stats: dict[str, Any]) -> None:
    engine.write_back.wait_for([engine.prompts.system.segment_id, *stats["chunk_ids"].values()])
    engine.store.flush()


# The ways to ask: each returns the response, complete.


def whole(chat: CacheCraftChatEngine, message: str) -> Any:
    return chat.chat(message)


def streamed(chat: CacheCraftChatEngine, message: str) -> Any:
    response = chat.stream_chat(message)
    assert isinstance(response, StreamingAgentChatResponse)
    assert "".join(response.response_gen).strip() == response.response
    return response


def awaited(chat: CacheCraftChatEngine, message: str) -> Any:
    return asyncio.run(chat.achat(message))


def async_streamed(chat: CacheCraftChatEngine, message: str) -> Any:
    async def ask() -> Any:
        response = await chat.astream_chat(message)
        pieces = [piece async for piece in response.async_response_gen()]
        assert "".join(pieces).strip() == response.response
        return response

    return asyncio.run(ask())


@pytest.mark.parametrize("ask", [whole, streamed, awaited, async_streamed])
def test_the_second_turn_finds_what_the_follow_up_means_and_reuses_it(
    index: VectorStoreIndex, engine: Engine, ask: Callable[[CacheCraftChatEngine, str], Any]
) -> None:
    chat = chat_of(index, engine)
    assert isinstance(chat, BaseChatEngine)
    first = ask(chat, FIRST)
    before = first.metadata["cachecraft"]
    assert before["searched"] == (FIRST,)
    assert before["tokens_reused"] == 0
    settle(engine, before)
    second = ask(chat, FOLLOW_UP)
    stats = second.metadata["cachecraft"]
    assert stats["searched"] == (FOLLOW_UP, f"{FIRST} {FOLLOW_UP}")
    assert names(second)[0] == "how long"
    # what it finds alone
    assert index.as_retriever().retrieve(FOLLOW_UP)[0].node.ref_doc_id == "leave"

    repeated = set(before["chunk_ids"].values()) & set(stats["chunk_ids"].values())
    chunks = [chunk for chunk in stats["chunks"] if chunk["chunk_id"] in repeated]
    assert len(chunks) >= 2
    # The one directly before the question is recomputed in full.
    chunks = [chunk for chunk in chunks if chunk["reason_code"] != "nearest"]
    kept = sum(chunk["tokens"] - chunk["recomputed"] - chunk["computed"] for chunk in chunks)
    assert kept >= 0.8 * sum(chunk["tokens"] for chunk in chunks)

    roles = [(said.role, said.content) for said in chat.chat_history]
    assert [role for role, _ in roles] == [MessageRole.USER, MessageRole.ASSISTANT] * 2
    assert [text for _, text in roles[::2]] == [FIRST, FOLLOW_UP]
    assert [str(text).strip() for _, text in roles[1::2]] == [
        str(first).strip(),
        str(second).strip(),
    ]
    assert second.sources[0].tool_name == "retriever"
    assert second.sources[0].raw_output == second.source_nodes


def test_llama_indexs_own_query_engine_reuses_passages_that_come_again(
    decoder: Decoder, tmp_path: Path
) -> None:
    """In another order, beside others."""
    passages = [
        f"The {name} is descaled every {len(name)} weeks, "
        + f"never before the {name} is cold. " * 3
        for name in ("kettle", "dishwasher", "coffee machine", "steam iron", "washing machine")
    ]
    shares = []
    with ChunkCacheStore.open(tmp_path / "own") as store, Engine(decoder, store) as engine:
        for order in ((0, 1, 2), (3, 2, 0, 1), (1, 4, 0, 2)):
            nodes = [
                TextNode(id_=str(rank), text=passages[place]) for rank, place in enumerate(order)
            ]
            index = VectorStoreIndex(nodes, embed_model=MockEmbedding(embed_dim=4))
            llm = CacheCraftLLM(engine, sampling=SHORT)
            before = reused_tokens(engine)
            response = index.as_query_engine(llm=llm, similarity_top_k=4).query(FIRST)
            assert [found.text for found in response.source_nodes] == [
                passages[place] for place in order
            ]
            instruction = len(engine.prompts.system.token_ids) if shares else 0
            shares.append(
                (reused_tokens(engine) - before - instruction) / sum(map(len, passages[:3]))
            )
            assert engine.settle(60)
    assert shares[:2] == [0.0, 0.0]
    assert shares[2] >= 0.75


def reused_tokens(engine: Engine) -> float:
    return float(
        engine.request_counts.registry.get_sample_value(
            "cachecraft_tokens_total", {"kind": "reused"}
        )
        or 0
    )


def test_our_own_index_prefers_the_chunks_of_the_turn_before(
    engine: Engine, embedding: CacheCraftEmbedding, tmp_path: Any
) -> None:
    embedder = embedding.embedder
    with FaissStore.open(
        tmp_path / "index", dim=embedder.dim, embedder_fingerprint=embedder.fingerprint
    ) as own:
        rag = CacheCraft(engine, own, embedder)
        rag.add_documents([OwnDocument(name, text) for name, text in TEXTS.items()])
        chat = CacheCraftChatEngine.from_defaults(
            CacheCraftRetriever(rag, top_k=2), engine=engine, sampling=SHORT
        )
        chat.chat(FIRST)
        second = chat.chat(FOLLOW_UP)
        history = [("user", FIRST), ("assistant", str(chat.chat_history[1].content))]
        expected = rag.retrieve(FOLLOW_UP, top_k=2, history=history)  # type: ignore[arg-type]
        assert [found.node.node_id for found in second.source_nodes] == [
            hit.chunk_id for hit in expected
        ]
        assert second.metadata is not None
        assert set(second.metadata["cachecraft"]["chunk_ids"].values()) == {
            hit.chunk_id for hit in expected
        }


def test_a_first_question_is_a_plain_query_and_a_follow_up_one_for_any_retriever() -> None:
    assert type(ConversationQuery.of(FIRST, [])) is QueryBundle
    query = ConversationQuery.of(FOLLOW_UP, [("user", FIRST), ("assistant", "Every six weeks.")])
    assert query.query_str == f"{FIRST} {FOLLOW_UP}"
    assert query.embedding_strs == [FOLLOW_UP, f"{FIRST} {FOLLOW_UP}"]


def test_postprocessors_session_and_instruction_are_the_query_engines(
    index: VectorStoreIndex, engine: Engine
) -> None:
    chat = chat_of(
        index,
        engine,
        node_postprocessors=[SimilarityPostprocessor(similarity_cutoff=2.0)],
        session="ann",
    )
    response = chat.chat(FIRST)
    assert response.source_nodes == []
    assert chat._llm.session == "ann"


def test_a_stream_that_is_closed_is_remembered_as_far_as_it_was_read(
    index: VectorStoreIndex, engine: Engine
) -> None:
    chat = chat_of(index, engine)
    response = chat.stream_chat(FIRST)
    pieces = response.response_gen
    read = next(pieces)
    assert response.chat_stream is not None
    pieces.close()
    response.chat_stream.close()
    assert [said.content for said in chat.chat_history] == [FIRST, read]
    assert response.metadata["cachecraft"]["finish"] == "closed"
    unread = chat.stream_chat(FOLLOW_UP)
    assert unread.chat_stream is not None
    unread.chat_stream.close()
    assert len(chat.chat_history) == 2  # nothing was said


def test_history_may_be_given_replaced_and_forgotten(
    index: VectorStoreIndex, engine: Engine
) -> None:
    earlier = [
        ChatMessage(role="user", content=FIRST),
        ChatMessage(role="assistant", content="Every six weeks."),
    ]
    chat = chat_of(index, engine, chat_history=earlier)
    assert names(chat.chat(FOLLOW_UP))[0] == "how long"
    assert len(chat.chat_history) == 4
    replaced = chat.chat(FIRST, chat_history=[])
    assert replaced.metadata is not None
    assert replaced.metadata["cachecraft"]["searched"] == (FIRST,)
    assert len(chat.chat_history) == 2
    chat.reset()
    assert chat.chat_history == []
    # A memory that was cut off may begin with an answer, and may hold instructions.
    cut = [
        ChatMessage(role="assistant", content="Yes."),
        ChatMessage(role="system", content="Be kind."),
        *earlier,
    ]
    response = chat.chat(FOLLOW_UP, chat_history=cut)
    assert isinstance(response, AgentChatResponse)
    assert response.metadata is not None
    assert response.metadata["cachecraft"]["searched"] == (FOLLOW_UP, f"{FIRST} {FOLLOW_UP}")


class Recorder(BaseEventHandler):
    events: list[str] = []  # noqa: RUF012  # pydantic copies it

    def handle(self, event: Any, **kwargs: Any) -> None:
        self.events.append(event.class_name())


@pytest.mark.parametrize("ask", [streamed, async_streamed])
def test_streams_send_llama_indexs_events_and_ours(
    index: VectorStoreIndex, engine: Engine, ask: Callable[[CacheCraftChatEngine, str], Any]
) -> None:
    recorder, root = Recorder(), get_dispatcher()
    root.add_event_handler(recorder)
    try:
        ask(chat_of(index, engine), FIRST)
    finally:
        root.event_handlers.remove(recorder)
    wanted = [
        "RetrievalStartEvent",
        "RetrievalEndEvent",
        "StreamChatStartEvent",
        "LLMChatStartEvent",
    ]
    wanted += [
        "LLMChatInProgressEvent",
        "LLMChatEndEvent",
        "CacheCraftAnswerStatsEvent",
        "StreamChatEndEvent",
    ]
    seen = list(dict.fromkeys(recorder.events))
    assert [name for name in seen if name in wanted] == wanted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chat_mode": "context"}, "chat_mode: the model is named by `model`"),
        ({"output_cls": dict}, "output_cls: a conversation cannot use"),
        ({"empty_response": "-"}, "empty_response: a conversation cannot use"),
        ({"system_prompt": "Be kind."}, "the instruction by `system`"),
        ({"memory": "long"}, "memory must be a BaseMemory"),
        (
            {
                "memory": ChatMemoryBuffer.from_defaults(token_limit=9, tokenizer_fn=list),
                "chat_history": [],
            },
            "give memory",
        ),
        ({"similarity_topk": 3}, "similarity_topk"),
    ],
)
def test_wrong_options_are_refused(
    index: VectorStoreIndex, engine: Engine, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        chat_of(index, engine, **options)
    with pytest.raises(ConfigError, match="query_engine must be"):
        CacheCraftChatEngine(index)  # type: ignore[arg-type]


def test_an_empty_message_is_refused_and_not_remembered(
    index: VectorStoreIndex, engine: Engine
) -> None:
    chat = chat_of(index, engine)
    with pytest.raises(ConfigError, match="the question is empty"):
        chat.chat("  ")
    with pytest.raises(ConfigError, match="message must be text"):
        chat.stream_chat(3)  # type: ignore[arg-type]
    assert chat.chat_history == []


def test_closing_closes_what_was_opened_here_only(index: VectorStoreIndex, engine: Engine) -> None:
    with chat_of(index, engine) as chat:
        stats = chat.chat(FIRST).metadata["cachecraft"]  # type: ignore[index]
    assert chat.engine is engine
    settle(engine, stats)  # the engine is still open
    assert engine.store.stats().chunks >= 3
