"""JSON schemas of TypedDicts: each part of the type has its place in the schema."""

from __future__ import annotations

import typing
from typing import Annotated, Any, Literal, NotRequired

import pytest
import typing_extensions
from pydantic import Field

from cachecraft_rag.langchain.schemas import answer_schema


class Part(typing.TypedDict):
    """A part of a kettle."""

    name: str
    weight: float | None


class Kettle(typing.TypedDict):
    """A kettle."""

    colour: Annotated[Literal["red", "blue"], ..., "The colour of the lid."]
    litres: Annotated[float, Field(ge=0, le=9)]
    weeks: Annotated[int, 8, "Weeks until descaling."]
    base: Part
    parts: typing.Optional[list[Part]]  # noqa: UP045
    by_name: dict[str, Part]
    note: NotRequired[Annotated[str, "What else is known."]]


class Loose(typing_extensions.TypedDict, total=False):
    """Mostly optional."""

    litres: typing_extensions.Required[int]
    weeks: int


class Tree(typing.TypedDict):
    """A tree."""

    weight: Literal[3, 7]
    children: list[Tree]


def test_no_part_of_a_typed_dict_is_lost() -> None:
    schema = answer_schema(Kettle)
    fields = schema["properties"]
    assert (schema["title"], schema["description"]) == ("Kettle", "A kettle.")
    assert fields["colour"] == {
        "description": "The colour of the lid.",
        "enum": ["red", "blue"],
        "type": "string",
    }
    assert fields["litres"] == {"minimum": 0, "maximum": 9, "type": "number"}
    assert fields["weeks"] == {
        "default": 8,
        "description": "Weeks until descaling.",
        "type": "integer",
    }
    assert fields["note"] == {"description": "What else is known.", "type": "string"}
    assert set(schema["required"]) == set(fields) - {"note"}
    part = {"$ref": "#/$defs/Part"}
    assert fields["base"] == part
    assert fields["parts"] == {"anyOf": [{"type": "array", "items": part}, {"type": "null"}]}
    assert fields["by_name"] == {"type": "object", "additionalProperties": part}
    weight = schema["$defs"]["Part"]["properties"]["weight"]
    assert weight["anyOf"] == [{"type": "number"}, {"type": "null"}]


def test_only_required_keys_of_a_typed_dict_are_required() -> None:
    assert answer_schema(Loose)["required"] == ["litres"]


def test_a_typed_dict_may_hold_itself() -> None:
    schema = answer_schema(Tree)
    tree = {"$ref": "#/$defs/Tree"}
    assert schema["$ref"] == tree["$ref"]
    assert schema["$defs"]["Tree"]["properties"]["children"]["items"] == tree


@pytest.mark.parametrize("notes", [("Litres.",), (..., "Litres."), (None, "Litres.")])
def test_descriptions_are_found_in_each_form(notes: tuple[Any, ...]) -> None:
    fields = {"litres": Annotated[(int, *notes)]}
    given: Any = typing_extensions.TypedDict("Given", fields)  # type: ignore[operator]
    assert answer_schema(given)["properties"]["litres"]["description"] == "Litres."
