"""Fields of requests in OpenAI's form: which are read, which change no answer, and which are refused with advice."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from cachecraft_rag.checks import check_flag, check_kind, check_mapping, check_names, check_text
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.prompt.tools import CallFormat, CallReader, Tool
from cachecraft_rag.server.documents import UNSUPPORTED, ChatRequest, Unsupported
from cachecraft_rag.server.response_input import messages_of
from cachecraft_rag.server.wire import FIELD
from cachecraft_rag.serving.sampling import SamplingParams

Body = Mapping[str, Any]

# Fields that say something about the client or about an account; they change no answer.
_WITHOUT_EFFECT = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
_READ = (
    "model",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "seed",
    "stop",
    "cache_salt",
    FIELD,
)
_OF_CHAT = (
    "messages",
    "documents",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "max_tokens",
    "max_completion_tokens",
    "stop_token_ids",
    "return_token_ids",
)
_OF_COMPLETIONS = ("prompt", "max_tokens")
_OF_RESPONSES = (
    "input",
    "instructions",
    "documents",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "text",
    "max_output_tokens",
)


def _one_of(*values: object) -> Callable[[object], bool]:
    """Return a check that accepts these values and null."""
    return lambda value: value is None or value in values


def _off(*values: object) -> Callable[[object], bool]:
    """Return a check that accepts these values, and null, false, 0 and anything empty."""
    return lambda value: not value or value in values


_NO_LOGPROBS = "this server gives no log-probabilities: leave it out"
_NO_PENALTY = "answers are drawn without penalties: leave it out"
_OLD_TOOLS = "write tools and tool_choice instead"
_REFUSED: Unsupported = {
    **UNSUPPORTED,
    "logprobs": (lambda value: value is None or value is False, _NO_LOGPROBS),
    "top_logprobs": (_one_of(0), _NO_LOGPROBS),
    "best_of": (_one_of(1), "ask once"),
    "suffix": (_off(), "the prompt's end is where the answer begins"),
    "logit_bias": (_off(), "leave it out"),
    "presence_penalty": (_one_of(0), _NO_PENALTY),
    "frequency_penalty": (_one_of(0), _NO_PENALTY),
    "repetition_penalty": (_one_of(1), _NO_PENALTY),
    "top_k": (_one_of(0, -1), "use top_p"),
    "min_p": (_one_of(0), "use top_p"),
    "ignore_eos": (_off(), "leave it out"),
    "functions": (_off(), _OLD_TOOLS),
    "function_call": (_off("none"), _OLD_TOOLS),
    "modalities": (_one_of(["text"]), "answers are text only"),
    "audio": (_off(), "answers are text only"),
    "prediction": (_off(), "leave it out"),
    "web_search_options": (_off(), "search yourself, and send the result as documents"),
    "reasoning": (_off(), "leave it out"),
    "reasoning_effort": (_one_of("none"), "leave it out"),
    "verbosity": (_one_of("medium"), "say in the instruction how long answers should be"),
    "background": (_off(), "wait for the answer, or stream it"),
    "previous_response_id": (_off(), "send the earlier turns in input: this server keeps none"),
    "conversation": (_off(), "send the earlier turns in input: this server keeps none"),
    "prompt_template": (_off(), "leave it out"),
    "include": (_off(), "leave it out"),
    "truncation": (_one_of("disabled"), "leave out earlier turns yourself"),
    "max_tool_calls": (_off(), "your application calls the tools, and can stop"),
}


def check_fields(body: Body, of_endpoint: Collection[str]) -> None:
    """Raise ConfigError for a field that is unknown, or whose value asks for something that this server cannot do.

    `of_endpoint` are fields that only this endpoint accepts.
    """
    check_names(body, (*_READ, *of_endpoint, *_WITHOUT_EFFECT, *_REFUSED), what="field")
    _check_values(body, of_endpoint)
    for name in ("stream", "return_token_ids"):
        check_flag(name, body.get(name) or False)
    _check_stream_options(body.get("stream_options"))


def _check_values(fields: Body, of_endpoint: Collection[str]) -> None:
    """Raise ConfigError for a value in `fields` that asks for something that this server cannot do."""
    for name, (is_harmless, advice) in _REFUSED.items():
        if name in fields and name not in of_endpoint and not is_harmless(fields[name]):
            raise ConfigError(f"{name} cannot be used here: {advice}")


def chat_fields(body: Body) -> ChatRequest:
    """Return a body of `/v1/chat/completions`, with documents [] where there are none.

    Raises ConfigError for fields that cannot be served; `Asked.read` checks the messages and documents in them.
    """
    check_fields(body, _OF_CHAT)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ConfigError('write "messages": [{"role": "user", "content": "…"}]')
    for name in ("max_tokens", "max_completion_tokens"):
        _check_count(name, body.get(name))
    return _request(body, messages)


def _request(body: Body, messages: Sequence[object]) -> ChatRequest:
    documents = body.get("documents")
    fields = SimpleNamespace(
        documents=[] if documents is None else documents,
        messages=messages,
        tools=_listed("tools", body.get("tools")),
        tool_choice=body.get("tool_choice"),
        max_tokens=body.get("max_tokens"),
        max_completion_tokens=body.get("max_completion_tokens"),
        cache_salt=_text_of("cache_salt", body.get("cache_salt")),
        model_extra=body,
    )
    return cast(ChatRequest, fields)


def response_as_chat(body: Body) -> dict[str, Any]:
    """Return a body of `/v1/responses` as one of `/v1/chat/completions`, without items of type "reasoning"."""
    check_fields(body, _OF_RESPONSES)
    given = body.get("input")
    if not isinstance(given, str | list):
        raise ConfigError('write "input": "…", or a list of messages')
    for item in given if isinstance(given, list) else ():
        check_mapping("each item of input", item)
    instructions = _text_of("instructions", body.get("instructions"))
    messages = messages_of(SimpleNamespace(instructions=instructions, input=given))
    messages = [
        message
        for message in messages[0 if instructions else 1 :]
        if message.get("type") != "reasoning"
    ]
    chat = {name: body[name] for name in _SHARED_WITH_CHAT if name in body}
    chat["messages"] = messages
    chat["max_completion_tokens"] = body.get("max_output_tokens")
    chat["tools"] = [_nested(tool) for tool in _listed("tools", body.get("tools"))]
    chat["tool_choice"] = _nested_choice(body.get("tool_choice"))
    chat["response_format"] = _nested_format(body.get("text"))
    return chat


_SHARED_WITH_CHAT = (
    *(name for name in _READ if name != "stream_options"),
    "documents",
    "parallel_tool_calls",
)


def _nested(tool: object) -> Mapping[str, Any]:
    """Return a tool of `/v1/responses`, which is flat, in the form of chat completions."""
    check_mapping("each of tools", tool)
    assert isinstance(tool, Mapping)
    if tool.get("type") != "function":
        raise ConfigError(
            f"a tool of type {tool.get('type')!r} would run on OpenAI's servers; pass a function instead"
        )
    if "function" in tool:
        return tool
    return {
        "type": "function",
        "function": {name: value for name, value in tool.items() if name != "type"},
    }


def _nested_choice(choice: object) -> object:
    if isinstance(choice, Mapping) and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _nested_format(text: object) -> object:
    if text is None:
        return None
    check_mapping("text", text)
    assert isinstance(text, Mapping)
    check_names(text, ("format", "verbosity"), what="field of text")
    _check_values(text, ("format",))
    form = text.get("format")
    if isinstance(form, Mapping) and form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": form}
    return form


def completion_fields(body: Body) -> ChatRequest:
    """Return a body of `/v1/completions` as a chat request whose question is the prompt.

    Raises ConfigError for one that cannot be served, such as with documents or several prompts.
    """
    if body.get("documents") is not None:
        raise ConfigError(
            "documents are taken by /v1/chat/completions and /v1/responses: send the question there, or write their "
            "texts into the prompt"
        )
    check_fields(body, _OF_COMPLETIONS)
    _check_count("max_tokens", body.get("max_tokens"))
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise ConfigError("prompt must be one text; send several prompts in requests of their own")
    check_text("prompt", prompt)
    return _request(body, [{"role": "user", "content": prompt}])


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request, and how its answer may use them.

    offered  tools that the prompt lists; none for tool_choice "none"
    called   names of the tools that may be called
    forced   True if the whole answer must be a call
    single   True if only one call may be made
    """

    offered: tuple[Tool, ...] = ()
    called: tuple[str, ...] = ()
    forced: bool = False
    single: bool = False

    @classmethod
    def of(cls, tools: Sequence[Tool], choice: object, *, parallel: object) -> ToolUse:
        """Return the use of checked tools that `tool_choice` (`choice`) and `parallel_tool_calls` (`parallel`) ask for.

        None stands for "auto" and true. Without tools, or with "none", none is offered; "required" is refused then.
        """
        names = tuple(tool["function"]["name"] for tool in tools)
        function = choice.get("function") if isinstance(choice, Mapping) else None
        wanted = function.get("name") if isinstance(function, Mapping) else choice
        allowed = (None, "auto", "none", "required") if function is None else names
        if wanted not in allowed:
            raise ConfigError(
                'tool_choice must be "auto", "none", "required", or {"type": "function", "function": {"name": …}} '
                "with the name of one of tools"
            )
        if wanted == "none" or not tools:
            if wanted == "required":
                raise ConfigError('tool_choice "required" needs tools: send some')
            return cls()
        check_kind(
            "parallel_tool_calls", parallel, bool, optional=True, advice="write true or false"
        )
        forced = wanted not in (None, "auto")
        called = names if function is None else (str(wanted),)
        return cls(tuple(tools), called, forced=forced, single=parallel is False)

    def reader(self, form: CallFormat) -> CallReader | None:
        """Return the reader of all calls in the answer, also if `single`; None without tools."""
        return CallReader(form, self.called, forced=self.forced) if self.offered else None

    def schema(self, form: CallFormat) -> dict[str, object] | None:
        """Return the JSON schema of an answer that must be a call; None if it may be text."""
        if not self.forced:
            return None
        return form.schema(
            [tool for tool in self.offered if tool["function"]["name"] in self.called]
        )


def answer_schema(response_format: object) -> Mapping[str, Any] | None:
    """Return the JSON schema that `response_format` asks for; None for text. Raises ConfigError for another form."""
    if response_format is None:
        return None
    form: Mapping[str, Any] = response_format if isinstance(response_format, Mapping) else {}
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    given = form.get("json_schema") if kind == "json_schema" else None
    schema = given.get("schema") if isinstance(given, Mapping) else None
    if not isinstance(schema, Mapping):
        raise ConfigError(
            'response_format must be {"type": "json_schema", "json_schema": {"name": "…", "schema": {…}}}, '
            '{"type": "json_object"} or {"type": "text"}'
        )
    return schema


def sampling_of(
    body: Body,
    defaults: SamplingParams,
    *,
    max_tokens: int | None,
    room: int,
    schema: Mapping[str, Any] | None = None,
) -> SamplingParams:
    """Return the sampling parameters of a body; the server's settings fill in what it leaves out.

    Args:
        max_tokens: longest answer that was asked for; None: the server's setting, or `room` if that is less.
        room: tokens that the context has left after the prompt; below 1 counts as 1.
        schema: JSON schema of the answer; None: any text.
    """
    stop = body.get("stop")
    values = {name: body.get(name) for name in ("temperature", "top_p", "seed")}
    given = {name: value for name, value in values.items() if value is not None}
    fallback = {name: getattr(defaults, name) for name in values}
    return SamplingParams(
        max_new_tokens=max(1, min(defaults.max_new_tokens, room))
        if max_tokens is None
        else max_tokens,
        stop=defaults.stop if stop is None else (stop,) if isinstance(stop, str) else stop,
        json_schema=schema,
        **(fallback | given),
    )


def includes_usage(body: Body) -> bool:
    """Return True if a checked body asks for the usage at the end of a stream."""
    options = body.get("stream_options") or {}
    return bool(options.get("include_usage"))


def _check_stream_options(options: object) -> None:
    if options is None:
        return
    check_mapping("stream_options", options)
    assert isinstance(options, Mapping)
    check_names(
        options, ("include_usage", "include_obfuscation", "continuous_usage_stats"), what="option"
    )
    if options.get("continuous_usage_stats"):
        raise ConfigError(
            "continuous_usage_stats cannot be used here: the last event has the usage"
        )
    check_flag("include_usage", options.get("include_usage") or False)


def _check_count(name: str, value: object) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")


def _text_of(name: str, value: object) -> str | None:
    check_text(name, value, optional=True)
    return None if value is None else str(value)


def _listed(name: str, value: object) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise ConfigError(f"{name} must be a list")
    return [] if value is None else list(value)
