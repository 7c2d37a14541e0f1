"""JSON schemas of what LangChain takes as a schema of an answer; no part of a schema is left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel, TypeAdapter

from cachecraft_rag.errors import ConfigError

# keywords of which a JSON schema has at least one, if it restricts anything
_KEYWORDS = frozenset(
    ("type", "enum", "const", "anyOf", "oneOf", "allOf", "not", "$ref", "properties", "items")
) | {"prefixItems", "required", "additionalProperties", "patternProperties", "if"}


def answer_schema(given: Any) -> dict[str, Any]:
    """Return the whole JSON schema of a pydantic model, a dataclass, a TypedDict, or a schema in any known form.

    The forms are a JSON schema, OpenAI's `response_format` with or without its wrapper, and the descriptions of
    functions that OpenAI and Anthropic use.

    Raises ConfigError for a dict in another form, and what pydantic or LangChain raise for a type without a schema.
    """
    if isinstance(given, Mapping):
        return _of_dict(given)
    if isinstance(given, type) and is_basemodel_subclass(given):
        model: Any = given  # of pydantic's version 1 or 2
        schema = model.model_json_schema() if issubclass(given, BaseModel) else model.schema()
        return _without_titles(schema)
    if isinstance(given, type) and dataclasses.is_dataclass(given):
        return TypeAdapter(given).json_schema()
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
        raise ConfigError(
            f"{dict(given)!r} is no schema: pass a pydantic model, a TypedDict, a JSON schema with a 'type', or "
            "{'name': …, 'schema': {…}}"
        )
    return dict(given)


def _named(wrapper: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with the name and the description of its wrapper, which say what the answer is."""
    words = {"title": wrapper.get("name"), "description": wrapper.get("description")}
    return {key: value for key, value in words.items() if value} | dict(schema)
