"""JSON schemas of what LangChain takes as a schema of an answer; no part of a schema is left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import EllipsisType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typing_extensions
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel, Field, TypeAdapter
from pydantic.errors import PydanticUserError

from cachecraft_rag.errors import ConfigError

# keywords of which a JSON schema has at least one, if it restricts anything
_KEYWORDS = frozenset(
    ("type", "enum", "const", "anyOf", "oneOf", "allOf", "not", "$ref", "properties", "items")
) | {"prefixItems", "required", "additionalProperties", "patternProperties", "if"}
_ADVICE = (
    "pass a pydantic model, a TypedDict, a JSON schema with a 'type', or {'name': …, 'schema': {…}}"
)


def answer_schema(given: Any) -> dict[str, Any]:
    """Return the JSON schema of a pydantic model, dataclass, TypedDict or function, or of a schema in a known form.

    The forms are a JSON schema, OpenAI's `response_format` with or without its wrapper, and the descriptions of
    functions that OpenAI and Anthropic use. ConfigError for anything else, and for a type that JSON cannot hold.
    """
    if isinstance(given, Mapping):
        return _of_dict(given)
    try:
        return _of_type(given)
    except (TypeError, ValueError, PydanticUserError) as error:
        raise ConfigError(f"{given!r} is no schema ({error}): {_ADVICE}") from error


def _of_type(given: Any) -> dict[str, Any]:
    """Return the schema of a pydantic model, a dataclass, a TypedDict or a function."""
    if isinstance(given, type) and is_basemodel_subclass(given):
        model: Any = given  # of pydantic's version 1 or 2
        schema = model.model_json_schema() if issubclass(given, BaseModel) else model.schema()
        return _without_titles(schema)
    if isinstance(given, type) and dataclasses.is_dataclass(given):
        return TypeAdapter(given).json_schema()
    if typing_extensions.is_typeddict(given):
        return _without_titles(TypeAdapter(_for_pydantic(given, {})).json_schema())
    return convert_to_json_schema(given)


def _without_titles(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a pydantic model's schema in LangChain's form: its name first, and no titles made of field names."""
    fields = {
        name: {key: value for key, value in field.items() if key != "title"}
        for name, field in schema.get("properties", {}).items()
    }
    whole = {**schema, "properties": fields} if fields else schema
    first = ("title", "description", "type", "properties", "required")
    return {key: whole[key] for key in first if key in whole} | whole


def _for_pydantic(given: Any, known: dict[Any, Any]) -> Any:
    """Return a type in which pydantic reads every TypedDict, with the descriptions that LangChain's form gives.

    Before Python 3.12 pydantic refuses `typing.TypedDict`, so each becomes one of typing_extensions. `known` takes up
    the copies.
    """
    if typing_extensions.is_typeddict(given):
        return known[given] if given in known else _copy_of(given, known)
    origin = get_origin(given)
    arguments = get_args(given)
    if not arguments or origin is Literal:
        return given
    if origin is Annotated:
        kind, *notes = arguments
        return Annotated[(_for_pydantic(kind, known), *_field_notes(notes))]
    kinds = tuple(_for_pydantic(kind, known) for kind in arguments)
    if origin is UnionType:
        return Union[kinds]  # noqa: UP007
    # NotRequired and its like take no tuple
    return origin[kinds if len(kinds) > 1 else kinds[0]]


def _copy_of(given: Any, known: dict[Any, Any]) -> Any:
    """Return a copy of a TypedDict for pydantic; it is known before its fields are read, as these may hold it."""
    copy: Any = typing_extensions.TypedDict(given.__name__, {})  # type: ignore[misc]
    known[given] = copy
    copy.__doc__ = given.__doc__
    copy.__required_keys__ = given.__required_keys__
    copy.__annotations__ = {
        name: _for_pydantic(hint, known)
        for name, hint in get_type_hints(given, include_extras=True).items()
    }
    return copy


def _field_notes(notes: Sequence[object]) -> list[object]:
    """Return the notes of an `Annotated` for pydantic, which passes over texts and values that are LangChain's.

    LangChain's are a default (`...`: none) and a description; a text alone is a description.
    """
    match notes:
        case [str() as description] | [EllipsisType(), str() as description]:
            return [Field(description=description)]
        case [str() | int() | float() | list() | dict() | None as default, str() as description]:
            return [Field(description=description, json_schema_extra={"default": default})]
    return list(notes)


def _of_dict(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema inside the wrappers that APIs put around it."""
    for wrapper in ("json_schema", "function"):
        if given.get("type") == wrapper and isinstance(given.get(wrapper), Mapping):
            return _of_dict(given[wrapper])
    is_json_schema = not given.keys().isdisjoint(_KEYWORDS)
    if not is_json_schema or given.get("type") in ("json_schema", "function"):
        for name in ("schema", "parameters", "input_schema"):
            if isinstance(given.get(name), Mapping):
                return _named(given, given[name])
        raise ConfigError(f"{dict(given)!r} is no schema: {_ADVICE}")
    return dict(given)


def _named(wrapper: Mapping[str, object], schema: Mapping[str, object]) -> dict[str, object]:
    """Return a schema with the name and the description of its wrapper, which say what the answer is."""
    words = {"title": wrapper.get("name"), "description": wrapper.get("description")}
    return {key: value for key, value in words.items() if value} | dict(schema)
