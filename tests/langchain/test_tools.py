"""Tools and structured output through LangChain: what is asked for is kept to, whatever the model would write."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict

import pytest
from langchain_core.documents import Document
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel, Field

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.langchain import CacheCraftGenerator, ChatCacheCraft
from cachecraft_rag.store import ChunkCacheStore

if TYPE_CHECKING:
    from cachecraft_rag.model.decoder import Decoder

DOCUMENTS = [
    Document("The Wren K2 holds 1.7 litres."),
    Document("Descale the Wren K2 every 8 weeks."),
]


@tool
def litres(kettle: str = "") -> str:
    """How much a kettle holds."""
    return f"{kettle} holds 1.7 litres"


@tool
def weeks() -> int:
    """Weeks until descaling."""
    return 8


class Answer(BaseModel):
    """An answer with its source."""

    litres: int = Field(ge=0, le=99)
    sure: bool


class Typed(TypedDict):
    """The same as a dict."""

    sure: bool


class Part(TypedDict):
    """A part of an order."""

    name: Literal["lid", "base"]
    grams: int | None


class Order(TypedDict):
    """Order parts."""

    parts: list[Part]
    note: NotRequired[str]


@pytest.fixture
def chat(tiny_decoder: Callable[..., Decoder], store: ChunkCacheStore) -> Iterator[ChatCacheCraft]:
    """A random model: what is right in its answers was forced."""
    with Engine(tiny_decoder("Llama", seed=4), store, new_variants="off") as engine:
        yield ChatCacheCraft(engine=engine, max_tokens=400)


def merged(chunks: Any) -> AIMessage:
    whole: Any = None
    for chunk in chunks:
        whole = chunk if whole is None else whole + chunk
    assert isinstance(whole, AIMessage)
    return whole


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "astream"])
def test_a_call_that_is_asked_for_comes(chat: ChatCacheCraft, way: str) -> None:
    model: Any = chat.bind_tools([litres, weeks], tool_choice="weeks")

    async def streamed() -> list[Any]:
        return [chunk async for chunk in model.astream("Hello!", documents=DOCUMENTS)]

    answer = {
        "invoke": lambda: model.invoke("Hello!", documents=DOCUMENTS),
        "ainvoke": lambda: asyncio.run(model.ainvoke("Hello!", documents=DOCUMENTS)),
        "stream": lambda: merged(model.stream("Hello!", documents=DOCUMENTS)),
        "astream": lambda: merged(asyncio.run(streamed())),
    }[way]()
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("weeks", {})]
    assert answer.tool_calls[0]["id"]
    assert answer.text == ""
    assert answer.response_metadata["cachecraft"]["tokens_prompt"] > 0


def test_the_loop_of_an_agent_goes_on_after_results(chat: ChatCacheCraft) -> None:
    model = chat.bind_tools([litres, weeks], tool_choice="any")
    asked = HumanMessage("When is it descaled?")
    first = model.invoke([asked], documents=DOCUMENTS)
    assert len(first.tool_calls) == 1
    results = [ToolMessage("8", tool_call_id=call["id"]) for call in first.tool_calls]
    second = chat.bind_tools([litres, weeks]).invoke(
        [asked, first, *results], documents=DOCUMENTS, max_tokens=5
    )
    stats = second.response_metadata["cachecraft"]
    assert stats["tokens_generated"] == 5
    assert {chunk["outcome"] for chunk in stats["chunks"]} == {"exact"}, (
        "after the same tools chunks are reused"
    )


def test_without_a_choice_the_model_may_answer_in_text(chat: ChatCacheCraft) -> None:
    plain = chat.invoke("Hello!", max_tokens=20)
    for choice in (None, "auto", "none"):
        answer = chat.bind_tools([weeks], tool_choice=choice).invoke("Hello!", max_tokens=20)
        assert answer.tool_calls == []
        assert answer.text
        assert answer.usage_metadata is not None
        assert plain.usage_metadata is not None
        assert answer.usage_metadata["input_tokens"] > plain.usage_metadata["input_tokens"]


def test_a_typed_dict_is_a_tool_with_all_parts_of_its_type(chat: ChatCacheCraft) -> None:
    bound: Any = chat.bind_tools([Order])
    function = bound.kwargs["tools"][0]["function"]
    assert (function["name"], function["description"]) == ("Order", "Order parts.")
    parameters = function["parameters"]
    assert parameters["required"] == ["parts"]
    part = parameters["properties"]["parts"]["items"]
    assert part["properties"]["name"]["enum"] == ["lid", "base"]
    assert part["properties"]["grams"]["anyOf"] == [{"type": "integer"}, {"type": "null"}]


@pytest.mark.parametrize(
    "choice",
    [
        "other",
        {"type": "function", "function": {"name": "other"}},
        {"function": "other"},
        {"type": "allowed_tools", "mode": "auto", "tools": []},
        {},
        5,
    ],
)
def test_a_choice_must_be_one_of_the_tools(chat: ChatCacheCraft, choice: Any) -> None:
    with pytest.raises(ConfigError, match="litres, weeks"):
        chat.bind_tools([litres, weeks], tool_choice=choice)


def test_no_call_can_be_asked_for_without_tools(chat: ChatCacheCraft) -> None:
    with pytest.raises(ConfigError, match="there are auto, none"):
        chat.bind_tools([], tool_choice="any")
    assert chat.bind_tools([], tool_choice="auto").invoke("Hello!", max_tokens=2).text


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "tool", "name": "weeks"}, "weeks"),
        ({"type": "any"}, "any"),
        ({"type": "none"}, "none"),
        ({"type": "auto"}, "auto"),
    ],
)
def test_choices_in_anthropics_form(chat: ChatCacheCraft, choice: Any, name: str) -> None:
    bound: Any = chat.bind_tools([litres, weeks], tool_choice=choice)
    assert bound.kwargs["tool_choice"] == name


@pytest.mark.parametrize(
    ("tool", "says"),
    [
        ({"type": "web_search"}, "web_search.*pass a function"),
        ({"type": "web_search_20250305", "name": "web_search"}, "pass a function"),
        ({"type": "function", "function": {}}, "with a name"),
    ],
)
def test_a_tool_that_is_no_function_is_refused(
    chat: ChatCacheCraft, tool: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        chat.bind_tools([weeks, tool])


def test_openais_flat_form_of_a_tool(chat: ChatCacheCraft) -> None:
    flat = {"type": "function", "name": "find", "parameters": {"type": "object", "properties": {}}}
    bound: Any = chat.bind_tools([flat], tool_choice="find")
    assert [tool["function"]["name"] for tool in bound.kwargs["tools"]] == ["find"]


def test_a_single_document_needs_no_list(chat: ChatCacheCraft) -> None:
    answer = chat.invoke("How much?", documents=DOCUMENTS[0], max_tokens=2)
    assert len(answer.response_metadata["cachecraft"]["chunks"]) == 1


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_answers_keep_to_a_schema(chat: ChatCacheCraft, method: Any) -> None:
    found = chat.with_structured_output(Answer, method=method).invoke(
        "How much?", documents=DOCUMENTS
    )
    assert isinstance(found, Answer)
    assert found.litres <= 99
    for schema in (Typed, {"title": "Typed", **Answer.model_json_schema()}):
        known = chat.with_structured_output(schema, method=method).invoke(
            "How much?", documents=DOCUMENTS
        )
        assert isinstance(known["sure"], bool)


def test_what_was_written_comes_along_and_so_does_its_error(chat: ChatCacheCraft) -> None:
    whole = chat.with_structured_output(Answer, include_raw=True).invoke("How much?")
    assert whole["parsed"] == Answer(**json.loads(whole["raw"].text))
    assert whole["parsing_error"] is None
    short = chat.with_structured_output(Answer, include_raw=True, max_tokens=3).invoke("How much?")
    assert short["parsed"] is None
    assert short["parsing_error"] is not None
    assert short["raw"].response_metadata["finish_reason"] == "length"


def test_another_method_is_refused(chat: ChatCacheCraft) -> None:
    with pytest.raises(ConfigError, match="json_mode"):
        chat.with_structured_output(Answer, method="xml")  # type: ignore[arg-type]


class Node(BaseModel):
    """A tree, so that its schema refers to itself."""

    weight: Literal[3, 7]
    children: list[Node] = Field(max_length=1)


@dataclass
class Fan:
    """A fan as a dataclass."""

    speeds: Literal[2, 3]


SPEEDS = {
    "type": "object",
    "properties": {"speeds": {"enum": [2, 3]}},
    "required": ["speeds"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("schema", "is_kept"),
    [
        (
            {
                "title": "L",
                "type": "array",
                "items": {"enum": [4, 5]},
                "minItems": 2,
                "maxItems": 3,
            },
            lambda found: 2 <= len(found) <= 3 and set(found) <= {4, 5},
        ),
        ({"title": "Colour", "enum": ["red", "blue"]}, lambda found: found in ("red", "blue")),
        ({"anyOf": [{"const": 1}, {"const": True}]}, lambda found: found in (1, True)),
        ({"$defs": {"one": {"const": "x"}}, "$ref": "#/$defs/one"}, lambda found: found == "x"),
        (
            {"name": "Fan", "strict": True, "schema": SPEEDS},
            lambda found: found["speeds"] in (2, 3),
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "Fan", "schema": SPEEDS}},
            lambda found: found["speeds"] in (2, 3),
        ),
        ({"name": "Fan", "parameters": SPEEDS}, lambda found: found["speeds"] in (2, 3)),
        ({"name": "Fan", "input_schema": SPEEDS}, lambda found: found["speeds"] in (2, 3)),
        (Fan, lambda found: found["speeds"] in (2, 3)),
    ],
)
def test_no_part_of_a_schema_is_lost(
    chat: ChatCacheCraft, schema: Any, is_kept: Callable[[Any], bool]
) -> None:
    found = chat.with_structured_output(schema).invoke("Which one?", documents=DOCUMENTS)
    assert is_kept(found), found


def test_a_schema_may_refer_to_itself(chat: ChatCacheCraft) -> None:
    model = chat.with_structured_output(Node, include_raw=True, max_tokens=60)
    text = model.invoke("Which tree?")["raw"].text
    assert re.match(r'{"weight": [37], "children": \[({"weight": [37], |\])', text)


def test_a_dict_that_is_no_schema_is_refused(chat: ChatCacheCraft) -> None:
    for nothing in ({}, {"title": "Fan"}, {"name": "Fan", "strict": True}):
        with pytest.raises(ConfigError, match="pass a pydantic model"):
            chat.with_structured_output(nothing)


def test_a_generator_takes_a_model_with_settings_and_says_which_it_cannot_take(
    chat: ChatCacheCraft,
) -> None:
    asked: dict[str, object] = {"input": "Which one?", "context": DOCUMENTS}
    bound = CacheCraftGenerator(llm=chat.bind(json_schema={"enum": ["red", "blue"]}))
    assert json.loads(bound.invoke(asked)) in ("red", "blue")
    assert json.loads("".join(bound.stream(asked))) in ("red", "blue")
    assert json.loads(asyncio.run(bound.ainvoke(asked))) in ("red", "blue")
    for form in (Answer, json.dumps(Answer.model_json_schema())):
        kept = CacheCraftGenerator(llm=chat.bind(json_schema=form, max_tokens=64))
        Answer.model_validate_json(kept.invoke(asked))
    bound.close()
    others: list[Any] = [
        chat.with_structured_output(Answer),
        FakeListChatModel(responses=["x"]),
        FakeListChatModel(responses=["x"]).bind(stop=["y"]),
        chat.bind_tools([litres]),
        "demo",
    ]
    for other in others:
        with pytest.raises(ConfigError, match=r"chat\.bind"):
            CacheCraftGenerator(llm=other)


def test_a_chain_ends_with_structured_output(chat: ChatCacheCraft) -> None:
    generator = CacheCraftGenerator(llm=chat.bind(max_tokens=64), input_key="question")
    given = {"question": "How much?", "context": DOCUMENTS}
    answer = generator.with_structured_output(Answer).invoke(given)
    assert isinstance(answer, Answer)
    assert isinstance(generator.with_structured_output(Typed).invoke(given)["sure"], bool)
    assert isinstance(generator.invoke(given), str)  # it stays as it is
