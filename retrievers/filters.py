"""Metadata in the database, and filters over it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.types import Metadata, Scalar

# Values that a chunk's metadata must have (1 is not True), or a predicate on its metadata.
Where = Mapping[str, Scalar] | Callable[[Metadata], bool]


def encoded(metadata: Metadata) -> str:
    """Metadata as JSON, always the same text for the same values. Raises `ConfigError` for a value that is no scalar.

    >>> encoded({"page": 3, "format": "text"})
    '{"format":"text","page":3}'
    """
    for key, value in metadata.items():
        if not isinstance(value, str | int | float | bool | None):
            raise ConfigError(
                f"metadata {key!r} is a {type(value).__name__}; use text, a number, true, false or nothing"
            )
    return json.dumps(dict(metadata), sort_keys=True, separators=(",", ":"))


def accepts(where: Where | None, metadata: Metadata) -> bool:
    """Whether metadata passes a filter; everything passes None.

    >>> [accepts({"page": 1}, metadata) for metadata in ({"page": 1, "format": "text"}, {"page": True}, {})]
    [True, False, False]
    """
    if where is None:
        return True
    if not isinstance(where, Mapping):
        return bool(where(metadata))
    return all(
        key in metadata and metadata[key] == value and isinstance(metadata[key], bool) == isinstance(value, bool)
        for key, value in where.items()
    )


def fragments(where: Where) -> list[str]:
    """Substrings of the JSON of all metadata that the filter accepts; rows without them need not be parsed.

    Only for texts, whose JSON is unique here; numbers such as 1 and 1.0 are equal but spelled differently.

    >>> fragments({"format": "text", "page": 3})
    ['"format":"text"']
    """
    if not isinstance(where, Mapping):
        return []
    return [encoded({key: value})[1:-1] for key, value in where.items() if not isinstance(value, int | float)]
