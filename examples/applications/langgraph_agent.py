r"""Hold a conversation with LangGraph's ReAct agent, whose tool searches the sample handbook; print what was reused.

    pip install -e '.[demo,langchain]' langgraph langchain-openai      # in a checkout
    cachecraft serve demo --reuse-plain-prompts -- \
        --enforce-eager --enable-auto-tool-choice --tool-call-parser hermes  # in another terminal
    python examples/applications/langgraph_agent.py

The demo model is too small to decide when to search, and what for. So the first call of each turn is forced with
`tool_choice`, and the tool searches for the user's question. With a larger model leave `choose` out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Annotated, Any

from served import HANDBOOK, Server, table

try:
    from langchain_core.documents import Document
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.prebuilt import InjectedState, create_react_agent

    from cachecraft_rag.retrievers.langchain import CacheCraftEmbeddings, CacheCraftVectorStore
except ImportError as error:
    sys.exit(f"{error}; type: pip install -e '.[demo,langchain]' langgraph langchain-openai")

CONVERSATIONS = (
    (
        "How often is the filter of the Willow A3 replaced?",
        "Can the filter of the Willow A3 be washed?",
        "How large a room can the Willow A3 clean?",
    ),
    (
        "Where is the filter of the Willow A3?",
        "How loud is the Willow A3?",
        "Does the Willow A3 clean a room of 50 square metres?",
    ),
)


def main() -> None:
    """Hold two conversations, with the same passages in other orders."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--server", default="http://127.0.0.1:8000", help="address of cachecraft serve"
    )
    parser.add_argument("--top-k", type=int, default=2, help="pages that a search returns")
    given = parser.parse_args()
    server = Server(given.server)
    with tempfile.TemporaryDirectory() as folder:
        pages = [
            Document(page.read_text(encoding="utf-8")) for page in sorted(HANDBOOK.glob("*.md"))
        ]
        with CacheCraftVectorStore.from_documents(
            pages, CacheCraftEmbeddings(), folder=Path(folder)
        ) as vectors:
            retriever = vectors.as_retriever(search_kwargs={"k": given.top_k})
            agent = agent_of(server, retriever)
            for number, questions in enumerate(CONVERSATIONS, 1):
                rows = [turn(agent, server, question, number) for question in questions]
                table(f"conversation {number}", rows)


def agent_of(server: Server, retriever: Any) -> Any:
    """Return an agent that searches once per question and then answers."""

    @tool
    def search_handbook(state: Annotated[dict[str, Any], InjectedState]) -> str:
        """Search the handbook of the appliances for the user's question."""
        questions = [text for text in state["messages"] if isinstance(text, HumanMessage)]
        return "\n\n".join(page.page_content for page in retriever.invoke(questions[-1].content))

    chat = ChatOpenAI(
        model=server.model,
        base_url=f"{server.url}/v1",
        api_key="none",
        temperature=0,
        max_tokens=100,
    )

    def choose(state: dict[str, Any], _: object) -> Any:
        is_question = isinstance(state["messages"][-1], HumanMessage)
        choice = search_handbook.name if is_question else "none"
        return chat.bind_tools([search_handbook], tool_choice=choice, strict=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it has moved to the package langchain, as create_agent
        return create_react_agent(
            choose,
            [search_handbook],
            prompt="Answer from the handbook, in one sentence.",
            checkpointer=InMemorySaver(),
        )


def turn(agent: Any, server: Server, question: str, conversation: int) -> dict[str, object]:
    """Ask one question; return what the call that read the passages reused."""
    thread = {"configurable": {"thread_id": str(conversation)}}
    messages = agent.invoke({"messages": [("user", question)]}, thread)["messages"]
    answer = messages[-1]
    assert isinstance(answer, AIMessage)
    results = [message.content for message in messages if isinstance(message, ToolMessage)]
    usage = answer.usage_metadata
    stats = server.statistics(answer.response_metadata["id"])
    server.wait_for_captures()
    return {
        "prompt": usage["input_tokens"],
        "passages": sum(map(server.tokens_of, results)),
        "of this turn": server.tokens_of(results[-1]),
        "cached": usage["input_token_details"].get("cache_read", 0),
        "recomputed": stats.get("tokens_recomputed", 0),
    }


if __name__ == "__main__":
    main()
