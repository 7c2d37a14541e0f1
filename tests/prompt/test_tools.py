# ruff: noqa: E501  # templates are long lines
"""Tools in prompts: the form of calls is the chat template's own, and calls are found in answers as they come."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.prompt.builder import PromptBuilder, Turn
from cachecraft_rag.prompt.tools import CallFormat, CallReader, ToolCall
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.types.prompts import Prompt

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
        },
    },
}
HISTORY: list[Turn] = [
    ("user", "What is 1 + 2?"),
    ("assistant", "Let me see."),
    (
        "calls",
        json.dumps(
            [{"name": "add", "arguments": {"a": "<|end|>é"}}, {"name": "add", "arguments": {}}]
        ),
    ),
    ("result", "3<|end|>"),
    ("result", "4"),
]
TWO_CALLS = json.dumps([{"name": "add", "arguments": {}}] * 2)
_TURN = "{{ '<|' + m.role + '|>' + (m.content or '') }}"
# As Qwen and Hermes write calls, as Llama 3 does, and as Mistral does: all calls in one list, after a special token.
TEMPLATES = {
    "tagged": (
        "{% if tools %}<|system|>Tools: {{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}"
        + _TURN
        + "{% for c in "
        'm.tool_calls or [] %}\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | '
        "tojson }}}\n</tool_call>{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    "bare": (
        '{% for m in messages %}{% if m.tool_calls %}<|assistant|>{{ m.content }}{% for c in m.tool_calls %}{"name": "'
        '{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}{% else %}<|{{ m.role }}|>'
        "{% if loop.first and tools %}{{ tools | tojson }}{% endif %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    "list": (
        "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}<|{{ m.role }}|>{% if "
        'm.tool_calls %}{{ m.content }}<|user|>[{% for c in m.tool_calls %}{{ (c.function | tojson)[:-1] }}, "id": "'
        "{{ c.id }}\"}{{ ', ' if not loop.last }}{% endfor %}]{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
}
_PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OTHERS = {
    "no tools": _PLAIN,
    "calls that are no JSON": _PLAIN.replace(
        "{{ m.content }}", "{{ tools }}{{ m.content }}{{ m.tool_calls }}"
    ),
    "no role of results": "{% if messages[-1].role == 'tool' %}{{ raise_exception('no') }}{% endif %}"
    + TEMPLATES["tagged"],
}


def builder_of(tokenizer: Any, template: str, tools: Any = (ADD,)) -> PromptBuilder:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    return PromptBuilder(tokenizer, context_length=8192, system="Be brief.", tools=tools)


def text_of(builder: PromptBuilder, prompt: Prompt) -> str:
    text: str = builder._tokenizer.decode(prompt.token_ids)
    return text


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("tagged", CallFormat("name", "arguments", "<tool_call>", native=True)),
        ("bare", CallFormat("name", "parameters", "", native=True)),
        ("list", CallFormat("name", "arguments", "", native=True)),
    ],
)
def test_the_form_of_calls_is_the_templates_own(
    byte_tokenizer: Any, name: str, form: CallFormat
) -> None:
    builder = builder_of(byte_tokenizer, TEMPLATES[name])
    assert builder.calls == form
    prompt = builder.build("", [Chunk("The chunk.")], history=HISTORY)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Context:\nThe chunk.\n\nQuestion: What is 1 + 2?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [
                {
                    "id": "000000002",
                    "type": "function",
                    "function": {"name": "add", "arguments": {"a": "<|end|>é"}},
                },
                {
                    "id": "000000003",
                    "type": "function",
                    "function": {"name": "add", "arguments": {}},
                },
            ],
        },
        {"role": "tool", "name": "add", "tool_call_id": "000000002", "content": "3<|end|>"},
        {"role": "tool", "name": "add", "tool_call_id": "000000003", "content": "4"},
    ]
    expected = builder._tokenizer.apply_chat_template(
        messages, tools=[ADD], tokenize=False, add_generation_prompt=True
    )
    written = text_of(builder, prompt)
    # The second number is of the mark that was rendered, not of the call: equal but for ids.
    assert written.replace("000000002", "").replace("000000003", "") == expected.replace(
        "000000002", ""
    ).replace("000000003", "")
    end = builder._tokenizer.convert_tokens_to_ids("<|end|>")
    assert prompt.token_ids.count(end) == expected.count("<|end|>") - 2, "nobody's text ends a turn"
    assert '"add"' in builder._tokenizer.decode(prompt.segments[0].token_ids), (
        "tools stand before the chunks"
    )


@pytest.mark.parametrize("name", OTHERS)
def test_where_the_template_has_no_place_for_tools_they_are_plain_text(
    byte_tokenizer: Any, name: str
) -> None:
    builder = builder_of(byte_tokenizer, OTHERS[name])
    assert not builder.calls.native
    written = text_of(builder, builder.build("", [Chunk("The chunk.")], history=HISTORY))
    assert written.index('"description": "Adds two numbers."') < written.index("The chunk.")
    assert '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>' in written
    assert written.index("Let me see.") < written.index(
        "<tool_response>\n3<|end|>\n</tool_response>"
    )
    assert written.endswith("<|assistant|>")


@pytest.mark.parametrize(
    ("template", "between"),
    [
        *((template, "4<|end|><|user|>") for template in TEMPLATES.values()),
        (OTHERS["no tools"], "4\n</tool_response>\n"),
    ],
    ids=[*TEMPLATES, "no tools"],
)
def test_the_user_may_speak_directly_after_a_result(
    byte_tokenizer: Any, template: str, between: str
) -> None:
    builder = builder_of(byte_tokenizer, template)
    stopped: list[Turn] = [*HISTORY, ("user", "Stop.<|end|>"), ("assistant", "I stopped.")]
    end = builder._tokenizer.convert_tokens_to_ids("<|end|>")
    for question, history, last in (
        ("Go on?", HISTORY, f"{between}Go on?"),
        (
            "And now?",
            stopped,
            f"{between}Stop.<|end|><|end|><|assistant|>I stopped.<|end|><|user|>And now?",
        ),
    ):
        prompt = builder.build(question, [Chunk("The chunk.")], history=history)
        written = text_of(builder, prompt)
        assert written.endswith(f"{last}<|end|><|assistant|>")
        typed = sum(text.count("<|end|>") for _, text in history)
        assert prompt.token_ids.count(end) == written.count("<|end|>") - typed, (
            "nobody's text ends a turn"
        )


def test_a_template_that_refuses_the_user_after_a_result_says_what_to_send(
    byte_tokenizer: Any,
) -> None:
    """As Mistral's templates, which count turns but for calls and results."""
    alternates = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role in ('user', 'assistant') and not m.tool_calls %}"
        "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}"
    )
    builder = builder_of(byte_tokenizer, alternates + TEMPLATES["tagged"])
    assert builder.calls.native
    calls: list[Turn] = [HISTORY[0], *HISTORY[2:]]
    with pytest.raises(ConfigError, match=r"roles must alternate.*add an assistant turn between"):
        builder.build("Go on?", [], history=calls)
    answered: list[Turn] = [*calls, ("assistant", "7.")]
    assert text_of(builder, builder.build("Go on?", [], history=answered)).endswith(
        "7.<|end|><|user|>Go on?<|end|><|assistant|>"
    )


def test_other_tools_are_another_instruction(byte_tokenizer: Any) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    ids = [
        builder_of(byte_tokenizer, TEMPLATES["tagged"], tools).system.segment_id
        for tools in ([ADD], [other], [])
    ]
    assert len(set(ids)) == 3


@pytest.mark.parametrize(
    ("history", "complaint"),
    [
        ([("user", "a"), ("result", "b")], "alternate"),
        (
            [("user", "a"), ("calls", "[]"), ("assistant", "b"), ("user", "c"), ("calls", "[]")],
            "alternate",
        ),
        ([("calls", "[]"), ("result", "b")], "alternate"),
        ([("user", "a"), ("calls", "[]"), ("result", "b")], "more results than calls"),
        ([("user", "a"), ("calls", TWO_CALLS), ("result", "b")], "call of a tool without a result"),
        (
            [
                ("user", "a"),
                ("calls", TWO_CALLS),
                ("result", "b"),
                ("user", "c"),
                ("calls", TWO_CALLS),
                ("result", "d"),
                ("result", "e"),
            ],
            "call of a tool without a result",
        ),
        ([("user", "a"), ("calls", "{"), ("result", "b")], "calls must be JSON"),
        ([("user", "a"), ("calls", '[{"name": "add"}]'), ("result", "b")], "calls must be JSON"),
    ],
)
@pytest.mark.parametrize("template", [TEMPLATES["tagged"], OTHERS["no tools"]])
def test_results_follow_calls(
    byte_tokenizer: Any, template: str, history: Any, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        builder_of(byte_tokenizer, template).build(
            "" if history[-1][0] == "result" else "?", [], history=history
        )


@pytest.mark.parametrize("name", ["<|end|>", "", "a b", "x" * 65])
def test_names_that_are_no_names_are_refused(byte_tokenizer: Any, name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        builder_of(
            byte_tokenizer, TEMPLATES["tagged"], [{"type": "function", "function": {"name": name}}]
        )
    calls = json.dumps([{"name": name, "arguments": {}}])
    with pytest.raises(ConfigError, match="not the name of a tool"):
        builder_of(byte_tokenizer, TEMPLATES["tagged"]).build(
            "", [], history=[("user", "a"), ("calls", calls), ("result", "b")]
        )


@pytest.mark.parametrize(
    "tools",
    [
        5,
        [5],
        [{}],
        [{"function": {}}],
        [{"function": {"name": None}}],
        [{"function": {"name": 5}}],
        [{"type": "function", "function": {"name": "a", "parameters": 5}}],
    ],
)
def test_what_is_no_tool_is_refused(byte_tokenizer: Any, tools: Any) -> None:
    with pytest.raises(ConfigError, match=r"tool|parameters"):
        builder_of(byte_tokenizer, TEMPLATES["tagged"], tools)
    for extra in ({1, 2}, float("nan")):
        with pytest.raises(ConfigError, match="as JSON"):
            builder_of(byte_tokenizer, TEMPLATES["tagged"], [ADD | {"extra": extra}])


TAGGED, BARE = CallFormat(native=True), CallFormat("name", "parameters", "", native=True)
CALL = '{"name": "add", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("form", "answer", "text", "calls"),
    [
        (TAGGED, f"I add.\n<tool_call>\n{CALL}\n</tool_call>", "I add.\n", ['{"a": 1}']),
        (
            TAGGED,
            f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>",
            "",
            ['{"a": 1}'] * 2,
        ),
        (TAGGED, CALL, "", ['{"a": 1}']),
        (TAGGED, "3 < 4 <tool", "3 < 4 <tool", []),
        (
            TAGGED,
            f"<tool_call>{CALL.replace('add', 'other')}",
            f"<tool_call>{CALL.replace('add', 'other')}",
            [],
        ),
        (TAGGED, "<tool_call>{broken", "<tool_call>{broken", []),
        (TAGGED, "{a} is a set", "{a} is a set", []),
        (BARE, CALL.replace("arguments", "parameters"), "", ['{"a": 1}']),
        (BARE, f"[{CALL.replace('arguments', 'parameters')}]", "", ['{"a": 1}']),
        (BARE, "{}", "{}", []),
        (BARE, "Four. {}", "Four. {}", []),
        (TAGGED, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 2}"}', "", ['{"a": 2}']),
        (TAGGED, "", "", []),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_are_found_however_the_answer_is_cut(
    form: CallFormat, answer: str, text: str, calls: list[str], size: int
) -> None:
    reader = CallReader(form, ["add"])
    written = "".join(
        reader.push(answer[place : place + size]) for place in range(0, len(answer), size)
    )
    rest, found = reader.finish()
    assert written + rest == text
    assert found == [ToolCall("add", one) for one in calls]


def test_calls_that_are_nested_too_deeply_are_text() -> None:
    """JSON that can just be read may be too deep to be written."""
    for depth in range(800, 1010):
        reader = CallReader(TAGGED, ["add"])
        answer = '{"name": "add", "arguments": {"a": ' + "[" * depth + "]" * depth + "}}"
        assert reader.push(answer) == ""
        text, calls = reader.finish()
        assert text == ("" if calls else answer)
