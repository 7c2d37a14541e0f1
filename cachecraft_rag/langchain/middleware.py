"""A middleware for `create_agent`: documents that a tool returned reach the model as documents."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import AnyMessage, HumanMessage, ToolMessage

try:
    from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
except ImportError as error:
    raise ImportError(f"{error}; type: pip install 'cachecraft-rag[langchain-agents]'") from error

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.langchain.chat_model import ChatCacheCraft


class DocumentsMiddleware(AgentMiddleware[Any, Any, Any]):
    """Gives the documents of an agent's searches to the model as documents, so that their chunk-caches are reused.

        agent = create_agent(chat, tools=[search], middleware=[DocumentsMiddleware()])

    Documents are those in the artifacts of tools since the user's last message
    (`@tool(response_format="content_and_artifact")`), in that order, equal texts once. In place of such a result the
    model reads how many it has, in this call only: the agent's messages stay. Without documents nothing is changed.

    Raises ConfigError, when the agent runs, for another model than `ChatCacheCraft`.
    """

    def wrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], ModelResponse[Any]],
    ) -> Any:
        """Return what `handler` returns for the request with the documents."""
        return handler(_with_documents(request))

    async def awrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
    ) -> Any:
        """Same as `wrap_model_call`, for an agent that runs asynchronously."""
        return await handler(_with_documents(request))


def _with_documents(request: ModelRequest[Any]) -> ModelRequest[Any]:
    if not isinstance(request.model, ChatCacheCraft):
        raise ConfigError(
            f"DocumentsMiddleware needs a ChatCacheCraft, not {type(request.model).__name__}: leave it out"
        )
    asked = max(
        (place for place, said in enumerate(request.messages) if isinstance(said, HumanMessage)),
        default=0,
    )
    found: dict[str, Document] = {}
    messages: list[AnyMessage] = []
    for place, message in enumerate(request.messages):
        documents = _documents_in(message) if place > asked else []
        for document in documents:
            found.setdefault(document.page_content, document)
        if documents:
            message = message.model_copy(
                update={"content": f"{len(documents)} documents were found; they are above"}
            )
        messages.append(message)
    if not found:
        return request
    settings = {**request.model_settings, "documents": list(found.values())}
    return request.override(messages=messages, model_settings=settings)


def _documents_in(message: AnyMessage) -> list[Document]:
    artifact = message.artifact if isinstance(message, ToolMessage) else None
    items = artifact if isinstance(artifact, list) else [artifact]
    return [item for item in items if isinstance(item, Document)]
