"""An agent of LangChain's whose searches reach the model as documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from langchain.agents import create_agent
from langchain_core.documents import Document
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.langchain import ChatCacheCraft
from cachecraft_rag.langchain.middleware import DocumentsMiddleware
from cachecraft_rag.store import ChunkCacheStore

if TYPE_CHECKING:
    from cachecraft_rag.model.decoder import Decoder

DOCUMENTS = [
    Document("The Wren K2 holds 1.7 litres.", metadata={"source": "wren.md"}),
    Document("Descale the Wren K2 every 8 weeks.", metadata={"source": "wren.md"}),
]


@tool(response_format="content_and_artifact")
def search(query: str) -> tuple[str, list[Document]]:
    """Search the handbook."""
    return "\n\n".join(document.page_content for document in DOCUMENTS), DOCUMENTS


@pytest.fixture
def chat(tiny_decoder: Callable[..., Decoder], store: ChunkCacheStore) -> Iterator[ChatCacheCraft]:
    with Engine(tiny_decoder("Llama", seed=4), store, new_variants="off") as engine:
        yield ChatCacheCraft(engine=engine, max_tokens=4)


def searched(question: str = "How often?") -> list[Any]:
    """A conversation in which the agent has just searched; a tiny model would not call a tool."""
    call = {"type": "tool_call", "id": "1", "name": "search", "args": {"query": question}}
    return [HumanMessage(question), AIMessage("", tool_calls=[call]), search.invoke(call)]


def last(state: Any) -> Any:
    return state["messages"][-1].response_metadata["cachecraft"]


async def test_documents_of_a_search_are_reused_and_the_messages_stay(chat: ChatCacheCraft) -> None:
    agent = create_agent(chat, tools=[search], middleware=[DocumentsMiddleware()])
    chat.engine.prime(DOCUMENTS)
    state = agent.invoke({"messages": searched()})
    assert [chunk["outcome"] for chunk in last(state)["chunks"]] in (
        [one, other] for one in ("exact", "reused") for other in ("exact", "reused")
    )
    (result,) = [said for said in state["messages"] if isinstance(said, ToolMessage)]
    assert "1.7 litres" in result.text
    assert len(last(await agent.ainvoke({"messages": searched("And how much?")}))["chunks"]) == 2


def test_documents_of_an_earlier_question_are_left_out(chat: ChatCacheCraft) -> None:
    agent = create_agent(chat, tools=[search], middleware=[DocumentsMiddleware()])
    conversation = [*searched(), AIMessage("Every 8 weeks."), HumanMessage("Thanks. Why?")]
    assert last(agent.invoke({"messages": conversation}))["documents"] == []


def test_another_model_is_refused() -> None:
    model = FakeListChatModel(responses=["Every 8 weeks."])
    agent = create_agent(model, tools=[], middleware=[DocumentsMiddleware()])
    with pytest.raises(ConfigError, match="FakeListChatModel"):
        agent.invoke({"messages": searched()})
