"""Tools through LlamaIndex: its messages with calls as turns, and an answer's calls as its blocks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    MessageRole,
    TextBlock,
    ToolCallBlock,
)
from llama_index.core.llms.llm import ToolSelection

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.prompt.builder import Turn
from cachecraft_rag.prompt.tools import CallFormat, CallReader, Tool, checked_tools

_ASSISTANTS = (MessageRole.ASSISTANT, MessageRole.CHATBOT, MessageRole.MODEL)


def turns_of(messages: Sequence[ChatMessage]) -> list[Turn]:
    """Return messages as turns: pairs of role ("user", "assistant", "calls" or "result") and text.

    Consecutive messages of a role are joined by an empty line; every role but the assistant counts as the user. The
    calls of a message follow its text as one turn of JSON, and then a turn for the result of each. A call without a
    result is left out, and a result without its call is text of the user. Parts of a message that are neither text nor
    calls are left out.
    """
    results = {
        _call_id_of(message): message.content or ""
        for message in messages
        if message.role == MessageRole.TOOL
    }
    answered: set[str] = set()
    turns: list[tuple[Any, list[str]]] = []
    for message in messages:
        calls = [call for call in calls_of(message) if call.tool_id in results]
        if message.role == MessageRole.TOOL and _call_id_of(message) in answered:
            continue
        text = message.content or ""
        role = "assistant" if message.role in _ASSISTANTS else "user"
        if turns and turns[-1][0] == role:
            turns[-1][1].append(text)
        elif text or not calls:
            turns.append((role, [text]))
        if calls:
            made = [{"name": call.tool_name, "arguments": call.tool_kwargs} for call in calls]
            turns.append(("calls", [json.dumps(made, ensure_ascii=False)]))
            turns += [("result", [results[call.tool_id]]) for call in calls]
            answered |= {call.tool_id for call in calls}
    return [(role, "\n\n".join(texts)) for role, texts in turns]


def question_of(messages: Sequence[ChatMessage]) -> tuple[str, list[Turn]]:
    """Return the text of the last messages, which must be the user's or results of tools, and the turns before them.

    After the result of a tool the text is "", and all turns, those of `turns_of`, are before it. ConfigError otherwise.
    """
    turns = turns_of(messages)
    if turns and turns[-1][0] == "result":
        return "", turns
    if not turns or turns[-1][0] != "user":
        raise ConfigError(
            "the last message must be the user's or a tool's result; there is nothing to answer"
        )
    return turns[-1][1], turns[:-1]


def calls_of(message: ChatMessage) -> list[ToolSelection]:
    """Return the calls of tools in a message, in order; arguments that are no JSON object are empty."""
    blocks = [block for block in message.blocks if isinstance(block, ToolCallBlock)]
    return [
        ToolSelection(
            tool_id=block.tool_call_id or "",
            tool_name=block.tool_name,
            tool_kwargs=_arguments(block.tool_kwargs),
        )
        for block in blocks
    ]


def only_first_call(response: ChatResponse) -> None:
    """Drop all calls of tools in a response but the first."""
    calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
    response.message.blocks = [
        block
        for block in response.message.blocks
        if not isinstance(block, ToolCallBlock) or block is calls[0]
    ]


def choice_of(choice: str | dict[str, Any] | None, tools: Sequence[Tool]) -> str:
    """Return "auto", "none", "any" or the name of a tool.

    `choice` may also be None ("auto"), "required" ("any") or OpenAI's dict that names a function. Raises ConfigError
    for anything else, and for a call that is asked for without tools.
    """
    names = [tool["function"]["name"] for tool in checked_tools(tools)]
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else choice.get("type")
    else:
        name = {None: "auto", "required": "any"}.get(choice, choice)
    known = ["auto", "none", *(["any", *names] if names else [])]
    if name not in known:
        raise ConfigError(f"tool_choice is {choice!r}; there are {', '.join(known)}")
    return str(name)


class CallingAnswer:
    """Makes chat responses of one answer's completions; the last one has the calls of tools as blocks.

    Args:
        form: the form in which the model writes calls.
        tools: the tools that it may call.
        forced: True if the whole answer is one call.
    """

    def __init__(self, form: CallFormat, tools: Sequence[Tool], *, forced: bool) -> None:
        names = [tool["function"]["name"] for tool in tools]
        self._reader = CallReader(form, names, forced=forced)
        self._text = ""

    def responses(self, completions: CompletionResponseGen) -> ChatResponseGen:
        """Yield a chat response for each completion, with the text so far. Errors of the completions pass."""
        for completion in completions:
            yield self._response(completion)

    async def aresponses(self, completions: CompletionResponseAsyncGen) -> ChatResponseAsyncGen:
        """Yield a chat response for each completion, asynchronously. Errors of the completions pass."""
        async for completion in completions:
            yield self._response(completion)

    def _response(self, completion: CompletionResponse) -> ChatResponse:
        calls: list[ToolCallBlock] = []
        # only the last completion has statistics
        if completion.raw is not None:
            text, finished_calls = self._reader.finish()
            request_id = completion.raw["cachecraft"]["request_id"]
            calls = [
                ToolCallBlock(
                    tool_call_id=f"call_{request_id}_{number}",
                    tool_name=call.name,
                    tool_kwargs=json.loads(call.arguments),
                )
                for number, call in enumerate(finished_calls)
            ]
        else:
            text = self._reader.push(completion.delta or "")
        self._text += text
        shown = [TextBlock(text=self._text)] if self._text or not calls else []
        message = ChatMessage(role=MessageRole.ASSISTANT, blocks=[*shown, *calls])
        return ChatResponse(message=message, delta=text, raw=completion.raw)


def _call_id_of(message: ChatMessage) -> str:
    return str(message.additional_kwargs.get("tool_call_id") or "")


def _arguments(given: dict[str, object] | str) -> dict[str, object]:
    if isinstance(given, dict):
        return given
    try:
        read = json.loads(given)
    except (ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}
