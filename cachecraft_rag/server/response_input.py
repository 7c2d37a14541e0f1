"""The input of `/v1/responses` as chat messages.

A response's input is a text or a list of items: messages, calls of tools and their outputs. vLLM reads an item as a
mapping or as one of the openai package's objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from cachecraft_rag.server.wire import Message


class ResponseRequest(Protocol):
    """The fields of a request that are read here."""

    instructions: str | None
    input: object


class _Item(Protocol):
    """An object of the openai package."""

    def model_dump(self) -> dict[str, Any]:
        """Return the object as JSON values."""


def messages_of(request: ResponseRequest) -> list[Message]:
    """Return the instruction as a system message, which may be empty, then the messages of the items.

    An input that is a text becomes one message of the user. An item whose type ends in `_call_output`, a tool's result,
    becomes a message of role "tool" with its output as content; neighbouring calls of functions become one message of
    the assistant. Other items keep their values, so some have no role.
    """
    messages: list[Message] = [{"role": "system", "content": request.instructions or ""}]
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    calls: list[object] = []
    for item in cast(Sequence[Mapping[str, Any] | _Item], request.input):
        values = item if isinstance(item, Mapping) else item.model_dump()
        if values.get("type") != "function_call":
            calls = []
            messages.append(_message(values))
            continue
        if not calls:
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        function = {"name": values.get("name"), "arguments": values.get("arguments")}
        calls.append({"id": values.get("call_id"), "type": "function", "function": function})
    return messages


def _message(values: Mapping[str, Any]) -> Message:
    if str(values.get("type")).endswith("_call_output"):
        return {
            "role": "tool",
            "content": values.get("output"),
            "tool_call_id": values.get("call_id"),
        }
    return values
