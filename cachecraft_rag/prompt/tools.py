"""Tools: calls in an answer's text, and the form in which a chat template writes them, found by having it write one.

A tool is a dict in OpenAI's form: `{"type": "function", "function": {"name": …, "description": …, "parameters": …}}`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

from cachecraft_rag.checks import check_mapping, listed, shown
from cachecraft_rag.errors import ConfigError

logger = logging.getLogger("cachecraft_rag.prompt")
Tool = Mapping[str, Any]
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_PROBE_NAME = "cachecraft_probe"
_PROBE_ARGUMENTS = {"cachecraft_key": ""}
_PROBE_RESULT = "cachecraft_result"


class ToolCall(NamedTuple):
    """A call that an answer makes; `arguments` is the text of a JSON object, as Python's `json` reads and writes it."""

    name: str
    arguments: str


class PastCall(TypedDict):
    """A call of a tool earlier in the conversation."""

    name: str
    arguments: dict[str, object]


@dataclass(frozen=True)
class CallFormat:
    """The form in which a model writes a call: `begin`, then a JSON object with the tool's name and its arguments.

    begin   visible text before the JSON; empty if the model writes the JSON alone
    native  whether the chat template itself writes tools, calls and results; otherwise they are plain text
    """

    name_key: str = "name"
    arguments_key: str = "arguments"
    begin: str = "<tool_call>"
    native: bool = False

    def schema(self, tools: Sequence[Tool]) -> dict[str, object]:
        """Return the JSON schema of an answer that calls one of these checked tools."""
        calls = []
        for tool in tools:
            function = tool["function"]
            arguments = function.get("parameters") or {"type": "object", "properties": {}}
            properties = {
                self.name_key: {"const": function["name"]},
                self.arguments_key: arguments,
            }
            calls.append({"type": "object", "properties": properties, "required": list(properties)})
        return {"anyOf": calls}

    def instruction(self, tools: Sequence[Tool]) -> str:
        """Return checked tools as text with an example of a call, for a chat template without tools."""
        lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        example = self.text("NAME", "{…}")
        return f"You may call these functions:\n{lines}\nTo call one, answer with nothing but\n{example}"

    def text(self, name: str, arguments: str) -> str:
        """Return a call as plain text; `arguments` is the text of a JSON object and inserted unchanged."""
        name_part = json.dumps({self.name_key: name}).removesuffix("}")
        call = f"{name_part}, {json.dumps(self.arguments_key)}: {arguments}}}"
        return f"{self.begin}\n{call}\n</tool_call>"


def checked_tools(tools: Iterable[Tool]) -> list[Tool]:
    """Return the tools as a list, in order.

    Raises ConfigError unless each is a mapping with a function, whose name has 1 to 64 letters, digits, _, . and -,
    whose parameters are a mapping with text keys or missing, and which can be written as JSON.
    """
    checked: list[Tool] = listed("tools", tools)
    for tool in checked:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if function is None or not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(
                'each tool must be {"type": "function", "function": {"name": …, "parameters": …}}, with a name of '
                f"letters, digits, _, . and -; not {shown(tool)}"
            )
        check_mapping(f"the parameters of {name}", function.get("parameters") or {})

    try:
        json.dumps(checked, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"tools cannot be written as JSON: {error}") from error
    return checked


def format_of(render: Callable[..., str], tokenizer: Any) -> CallFormat:
    """Return the form of calls in a chat template, found by letting it write a call.

    It is `CallFormat()`, plain text, if the template fails, or does not write tools, results and calls as JSON objects.

    Args:
        render: renders a list of messages with the chat template; takes the keyword argument `tools`.
        tokenizer: a transformers tokenizer; it tells which text before the JSON consists of special tokens.
    """
    tool = {
        "name": _PROBE_NAME,
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    }
    tools = [{"type": "function", "function": tool}]
    messages = [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call_message(_PROBE_NAME, _PROBE_ARGUMENTS, 0)],
        },
        result_message(_PROBE_NAME, _PROBE_RESULT, 0),
    ]
    try:
        without_call = render(messages[:1], tools=tools)
        with_call = render(messages, tools=tools)
    except Exception as error:  # noqa: BLE001  # a template may raise anything; tools are plain text then
        logger.debug("The chat template cannot write calls, so tools are plain text: %s", error)
        return CallFormat()

    pairs = enumerate(zip(without_call, with_call, strict=False))
    start = next((place for place, (old, new) in pairs if old != new), len(without_call))
    added = with_call[start:]
    if _PROBE_NAME not in without_call or _PROBE_RESULT not in added:
        return CallFormat()

    braces = [match.start() for match in re.finditer(r"\{", added)]
    for brace in reversed(braces):
        call = _json_at(added, brace)
        keys = {str(value): key for key, value in call.items()} if isinstance(call, dict) else {}
        if _PROBE_NAME in keys and str(_PROBE_ARGUMENTS) in keys:
            ids = tokenizer(added[:brace], add_special_tokens=False)["input_ids"]
            begin = tokenizer.decode(ids, skip_special_tokens=True).strip(" \n\t[")
            return CallFormat(
                name_key=keys[_PROBE_NAME],
                arguments_key=keys[str(_PROBE_ARGUMENTS)],
                begin=begin,
                native=True,
            )
    return CallFormat()


def calls_in(text: str) -> list[PastCall]:
    """Return the calls of a turn, in order, from its text: a JSON list of objects with a name and arguments.

    Text after the list is ignored. Raises ConfigError for text that does not begin with such a list, or for a name that
    no tool may have.

    >>> calls_in('[{"name": "add", "arguments": {"a": 1}}]')
    [{'name': 'add', 'arguments': {'a': 1}}]
    """
    calls = _json_at(text, 0)
    if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
        raise ConfigError(
            f'calls must be JSON such as [{{"name": "add", "arguments": {{}}}}], not {shown(text)}'
        )
    for call in calls:
        if not _NAME.fullmatch(call["name"]):
            raise ConfigError(
                f"{shown(call['name'])} is not the name of a tool; names hold up to 64 letters, digits, _, . and -"
            )
    return calls


def _is_call(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("name"), str)
        and isinstance(value.get("arguments"), dict)
    )


def call_message(name: str, arguments: Mapping[str, object], number: int) -> dict[str, object]:
    """Return a call in the form that templates take; its id is `number`, unique in the conversation, in nine digits."""
    function = {"name": name, "arguments": dict(arguments)}
    return {"id": f"{number:09}", "type": "function", "function": function}


def result_message(name: str, text: str, number: int) -> dict[str, object]:
    """Return the result of a call as a chat message; `number` is that of its `call_message`."""
    return {"role": "tool", "name": name, "tool_call_id": f"{number:09}", "content": text}


class CallReader:
    """Separates one answer's text from its calls while it arrives.

    Args:
        form: the form in which the model writes calls.
        names: names of the tools; JSON that names another tool is text.
        forced: True if the whole answer is one call; `push` then returns "" for every piece.
    """

    def __init__(self, form: CallFormat, names: Iterable[str], *, forced: bool = False) -> None:
        self._form = form
        self._names = frozenset(names)
        self._forced = forced
        self._held = ""
        self._is_reading_call = forced
        self._has_text = False

    def push(self, piece: str) -> str:
        """Take a piece of the answer; return the text that certainly belongs to no call.

        Holds back text that may be the beginning of a call, and everything after a call has begun.
        """
        self._held += piece
        if self._is_reading_call:
            return ""

        begin = self._form.begin
        stripped = self._held.lstrip()
        call_start = self._held.find(begin) if begin else -1
        if call_start >= 0:
            self._is_reading_call = True
            text = self._release(call_start)
        # some models write the JSON alone
        elif not self._has_text and (not stripped or stripped[0] in "[{"):
            self._is_reading_call = bool(stripped)
            text = ""
        else:
            text = self._release(len(self._held) - self._begun_length())
        self._has_text |= bool(text)
        return text

    def _release(self, length: int) -> str:
        """Remove the first `length` letters from what is held back, and return them."""
        text = self._held[:length]
        self._held = self._held[length:]
        return text

    def _begun_length(self) -> int:
        """Return how many of the last letters may be the beginning of `begin`."""
        begin = self._form.begin
        for length in range(len(begin) - 1, 0, -1):
            if self._held.endswith(begin[:length]):
                return length
        return 0

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Return the text that is still held back (empty if it holds calls) and the calls, in order.

        Damaged JSON ends the search, JSON that calls no tool is skipped, and text around calls is dropped.
        """
        text = self._held
        calls = []
        place = text.find("{")
        while place >= 0:
            try:
                value, stop = json.JSONDecoder().raw_decode(text, place)
                call = self._call(value)
            except (ValueError, RecursionError):
                break
            if call is not None:
                calls.append(call)
            place = text.find("{", stop)
        return ("" if calls else text), calls

    def _call(self, value: Mapping[str, object]) -> ToolCall | None:
        name = value.get(self._form.name_key)
        arguments = value.get(self._form.arguments_key, {})
        if isinstance(arguments, str):  # some models write the object as a string
            arguments = _json_at(arguments, 0)
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _json_at(text: str, place: int) -> object:
    """Return the JSON value that begins at this place, or None."""
    try:
        return json.JSONDecoder().raw_decode(text, place)[0]
    except (ValueError, RecursionError):
        return None
