"""The input of `/v1/responses` as chat messages, to find the passages in it.

A response's input is a text or a list of items: messages, calls of tools and their outputs. vLLM reads an item as a
mapping or as one of the openai package's objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from cachecraft_rag.vllm.server.unmarked import MARK, Message, marked


class ResponseRequest(Protocol):
    """The fields of vLLM's `ResponsesRequest` that are read here."""

    instructions: str | None
    input: object


class _Item(Protocol):
    """An object of the openai package."""

    def model_dump(self) -> dict[str, Any]:
        """Return the object as JSON values."""

    def model_copy(self, *, update: Mapping[str, Any]) -> object:
        """Return a copy with other values."""


def messages_of(request: ResponseRequest) -> list[Message]:
    """Return the instruction as a system message, which may be empty, then one message for each item.

    An input that is a text becomes one message of the user. An item whose type ends in `_call_output`, a tool's result,
    becomes a message of role "tool" with its output as content. Other items keep their values, so some have no role.
    An empty list gives the instruction alone. The request stays as it is. Raises nothing for a request that vLLM has
    validated.
    """
    system = {"role": "system", "content": request.instructions or ""}
    if isinstance(request.input, str):
        return [system, {"role": "user", "content": request.input}]
    return [system, *map(_message, _items(request))]


def _items(request: ResponseRequest) -> Sequence[Mapping[str, Any] | _Item]:
    return cast(Sequence[Mapping[str, Any] | _Item], request.input)


def _message(item: Mapping[str, Any] | _Item) -> Message:
    values = item if isinstance(item, Mapping) else item.model_dump()
    if str(values.get("type")).endswith("_call_output"):
        return {"role": "tool", "content": values.get("output")}
    return values


def with_mark(request: ResponseRequest, place: int) -> dict[str, object]:
    """Return the fields of the request that change if the text of message `place` is replaced by `MARK`: one field.

    Args:
        request: the request, which stays as it is.
        place: index in the list of `messages_of`; 0 is the instruction.

    The field is "instructions" or "input". If the input is a text, every other place than 0 means that text. Raises
    IndexError if the input is a list without such an item, and KeyError if the item has no role.
    """
    if place == 0:
        return {"instructions": MARK}
    if isinstance(request.input, str):
        return {"input": MARK}
    items = list(_items(request))
    item = items[place - 1]
    if _message(item)["role"] == "tool":
        output = {"output": MARK}
        changed: object = (
            {**item, **output} if isinstance(item, Mapping) else item.model_copy(update=output)
        )
    else:
        values = item if isinstance(item, Mapping) else item.model_dump()
        (changed,) = marked([values], 0)
    return {"input": [*items[: place - 1], changed, *items[place:]]}
