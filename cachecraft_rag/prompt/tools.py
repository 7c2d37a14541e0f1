"""Tools: how a chat template writes calls, found by having it write one, and calls in an answer's text.

A tool is a dict in OpenAI's form: `{"type": "function", "function": {"name": …, "description": …, "parameters": …}}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cachecraft_rag.checks import check_mapping, listed, shown
from cachecraft_rag.errors import ConfigError

Tool = Mapping[str, Any]
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_PROBE, _ARGUMENTS = "cachecraft_probe", {"cachecraft_key": ""}


class ToolCall(NamedTuple):
    """A call that an answer makes; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class CallFormat:
    """How a model writes a call: `begin`, then a JSON object with the tool's name and its arguments.

    begin   visible text before the JSON; empty if there is none
    native  the chat template itself writes tools, calls and results; otherwise they are plain text
    """

    name_key: str = "name"
    arguments_key: str = "arguments"
    begin: str = "<tool_call>"
    native: bool = False

    def schema(self, tools: Sequence[Tool]) -> dict[str, Any]:
        """The JSON schema of an answer that calls one of these tools."""
        calls = []
        for function in (tool["function"] for tool in tools):
            arguments = function.get("parameters") or {"type": "object", "properties": {}}
            properties = {self.name_key: {"const": function["name"]}, self.arguments_key: arguments}
            calls.append({"type": "object", "properties": properties, "required": list(properties)})
        return {"anyOf": calls}

    def instruction(self, tools: Sequence[Tool]) -> str:
        """The text of the tools for a model whose template has no place for them."""
        lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        return (
            f"You may call these functions:\n{lines}\nTo call one, answer with nothing but\n{self.text('NAME', '{…}')}"
        )

    def text(self, name: str, arguments: str) -> str:
        """A call as plain text."""
        call = f"{json.dumps({self.name_key: name})[:-1]}, {json.dumps(self.arguments_key)}: {arguments}}}"
        return f"{self.begin}\n{call}\n</tool_call>"


def checked_tools(tools: Iterable[Tool]) -> list[Tool]:
    """A list of tools. Raises ConfigError."""
    found: list[Tool] = listed("tools", tools)
    for tool in found:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not _NAME.fullmatch(str(function.get("name"))):
            raise ConfigError(
                'each tool must be {"type": "function", "function": {"name": …, "parameters": …}}, with a name of '
                f"letters, digits, _, . and -; not {shown(tool)}"
            )
        check_mapping(f"the parameters of {function['name']}", function.get("parameters") or {})
    try:
        json.dumps(found)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"tools cannot be written as JSON: {error}") from error
    return found


def format_of(render: Callable[..., str], tokenizer: Any) -> CallFormat:
    """The form of calls in a chat template; plain text where it has none, or none with a JSON object.

    Args:
        render: renders messages; keyword argument `tools`.
    """
    from jinja2.exceptions import TemplateError

    tool = {"name": _PROBE, "description": "", "parameters": {"type": "object", "properties": {}}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call_message(_PROBE, _ARGUMENTS, 0)]},
        result_message(_PROBE, "cachecraft_result", 0),
    ]
    try:
        before, whole = (
            render(messages[:count], tools=[{"type": "function", "function": tool}]) for count in (1, len(messages))
        )
    except (TemplateError, TypeError, ValueError):
        return CallFormat()
    start = next((n for n, (one, other) in enumerate(zip(before, whole, strict=False)) if one != other), len(before))
    if _PROBE not in before or "cachecraft_result" not in whole[start:]:
        return CallFormat()
    begins = [place.start() for place in re.finditer(r"\{", whole[start:])]
    for place in reversed(begins):
        found = _json_at(whole[start:], place)
        keys = {str(value): key for key, value in found.items()} if isinstance(found, dict) else {}
        if _PROBE in keys and str(_ARGUMENTS) in keys:
            ids = tokenizer(whole[start : start + place], add_special_tokens=False)["input_ids"]
            begin = tokenizer.decode(ids, skip_special_tokens=True).strip(" \n\t[")
            return CallFormat(keys[_PROBE], keys[str(_ARGUMENTS)], begin, native=True)
    return CallFormat()


def calls_in(text: str) -> list[dict[str, Any]]:
    """The calls of a turn. Raises ConfigError.

    >>> calls_in('[{"name": "add", "arguments": {"a": 1}}]')
    [{'name': 'add', 'arguments': {'a': 1}}]
    """
    found = _json_at(text, 0)
    if isinstance(found, list) and all(
        isinstance(one, dict) and isinstance(one.get("name"), str) and isinstance(one.get("arguments"), dict)
        for one in found
    ):
        for one in found:
            if not _NAME.fullmatch(one["name"]):
                raise ConfigError(f"{shown(one['name'])} is no name of a tool")
        return found
    raise ConfigError(f'calls must be JSON such as [{{"name": "add", "arguments": {{}}}}], not {shown(text)}')


def call_message(name: str, arguments: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A call as templates take it."""
    return {"id": f"{number:09}", "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def result_message(name: str, text: str, number: int) -> dict[str, Any]:
    """The result of a call as templates take it."""
    return {"role": "tool", "name": name, "tool_call_id": f"{number:09}", "content": text}


class CallReader:
    """Separates an answer's text from its calls while it comes.

    Args:
        form: of calls.
        names: of the tools; JSON about others is text.
        forced: the whole answer is one call.
    """

    def __init__(self, form: CallFormat, names: Iterable[str], *, forced: bool = False) -> None:
        self._form, self._names, self._forced = form, frozenset(names), forced
        self._held = ""
        self._reading = forced
        self._any = False

    def push(self, piece: str) -> str:
        """Take a piece; returns the text that belongs to no call."""
        self._held += piece
        if self._reading:
            return ""
        begin, stripped = self._form.begin, self._held.lstrip()
        if begin and (place := self._held.find(begin)) >= 0:
            self._reading = True
            text, self._held = self._held[:place], self._held[place:]
        elif not self._any and (not stripped or stripped[0] in "[{"):  # some models write the JSON alone
            self._reading, text = bool(stripped), ""
        else:
            kept = next((n for n in range(len(begin) - 1, 0, -1) if self._held.endswith(begin[:n])), 0)
            cut = len(self._held) - kept
            text, self._held = self._held[:cut], self._held[cut:]
        self._any |= bool(text)
        return text

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The rest that was held back, if it is no call, and the calls."""
        text, place, calls = self._held, 0, []
        while (place := text.find("{", place)) >= 0:
            try:
                found, place = json.JSONDecoder().raw_decode(text, place)
            except (ValueError, RecursionError):
                break
            if (call := self._call(found)) is not None:
                calls.append(call)
        return ("" if calls else text), calls

    def _call(self, found: Any) -> ToolCall | None:
        name, arguments = found.get(self._form.name_key), found.get(self._form.arguments_key, {})
        if isinstance(arguments, str):  # some models write the object as a string
            arguments = _json_at(arguments, 0)
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _json_at(text: str, place: int) -> Any:
    """The JSON value that begins there, or None."""
    try:
        return json.JSONDecoder().raw_decode(text, place)[0]
    except (ValueError, RecursionError):
        return None
