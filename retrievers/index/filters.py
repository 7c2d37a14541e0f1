"""Metadata in the database, and filters over it."""

from __future__ import annotations

import json
import operator
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Number
from typing import Any, cast

from cachecraft_rag.checks import check_mapping, check_names
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.types.documents import Metadata, Scalar

# Conditions on a chunk's metadata: values (1 is not True), or comparisons such as {"$in": ["a", "b"]}; or a predicate.
Where = (
    Mapping[str, "Scalar | Mapping[str, object] | Sequence[object]"] | Callable[[Metadata], bool]
)


def composed(text: str) -> str:
    """Return a text with composed characters (Unicode's form NFC), in which equal letters are equal.

    macOS writes file names decomposed: an "ö" as an "o" and its dots.
    """
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def _same(stored: object, wanted: object) -> bool:
    if isinstance(stored, str) and isinstance(wanted, str):
        return composed(stored) == composed(wanted)
    return stored == wanted and isinstance(stored, bool) == isinstance(wanted, bool)


def _ordered(compare: Callable[[Any, Any], bool]) -> Callable[[object, object], bool]:
    """Return a comparison of two numbers or two texts, which is false for anything else."""

    def holds(stored: object, wanted: object) -> bool:
        is_comparable = any(
            isinstance(stored, kind) and isinstance(wanted, kind) for kind in (int | float, str)
        )
        return is_comparable and compare(stored, wanted)

    return holds


def _among(stored: object, wanted: Any) -> bool:
    return any(_same(stored, value) for value in wanted)


# Those of LangChain's stores. A chunk without the key passes none of them but $ne and $nin.
OPERATORS: dict[str, Callable[[object, object], bool]] = {
    "$eq": _same,
    "$ne": lambda stored, wanted: not _same(stored, wanted),
    "$in": _among,
    "$nin": lambda stored, wanted: not _among(stored, wanted),
    "$gt": _ordered(operator.gt),
    "$gte": _ordered(operator.ge),
    "$lt": _ordered(operator.lt),
    "$lte": _ordered(operator.le),
}
DEEPEST_FILTER = 50
GROUPS: dict[str, Callable[[Iterable[bool]], bool]] = {"$and": all, "$or": any}


def check_where(where: Where | None, *, depth: int = 0) -> None:
    """Raise ConfigError for a filter of another form, with an unknown comparison, or nested more than 50 deep.

    An unknown group (`$not`), and a list, a date or another value that no metadata has are refused, because they would
    match nothing; a key without a comparison (`{}`), because it would match everything. Callers leave `depth` out.
    """
    if where is None or callable(where):
        return
    check_depth(depth)
    check_mapping("where", where)
    for key, wanted in where.items():
        if key in GROUPS:
            if not isinstance(wanted, list | tuple) or not wanted:
                raise ConfigError(f"where: {key} needs a list of filters")
            for part in wanted:
                check_where(part, depth=depth + 1)
        elif key.startswith("$"):
            raise ConfigError(
                f"where: {key}: no such group; use {', '.join(GROUPS)}, or the comparison $ne or $nin of a key"
            )
        elif isinstance(wanted, list | tuple | set | frozenset):
            raise ConfigError(f'where[{key!r}]: a list equals no value; write {{"$in": [...]}}')
        elif isinstance(wanted, Mapping):
            _check_comparisons(key, wanted)
        else:
            _check_values(key, [wanted])


def _check_comparisons(key: str, comparisons: Mapping[str, object]) -> None:
    check_names(comparisons, OPERATORS, what="comparison")
    if not comparisons:
        raise ConfigError(
            f"where[{key!r}]: {{}} compares nothing; write one of {', '.join(OPERATORS)}"
        )
    for name, value in comparisons.items():
        takes_many = name in ("$in", "$nin")
        if takes_many is not isinstance(value, list | tuple | set | frozenset):
            needed = "a list of values" if takes_many else "a single value"
            raise ConfigError(f"where[{key!r}]: {name} needs {needed}")
        _check_values(key, cast(Iterable[object], value) if takes_many else [value])


def _check_values(key: str, values: Iterable[object]) -> None:
    """Raise ConfigError for a value that no metadata has."""
    for value in values:
        if not isinstance(value, str | Number | None):
            raise ConfigError(
                f"where[{key!r}]: no metadata is a {type(value).__name__}; use text, a number, true, false or nothing"
            )


def check_depth(depth: int) -> None:
    """Raise ConfigError above `DEEPEST_FILTER`: filters that deep were made by mistake or to do harm."""
    if depth > DEEPEST_FILTER:
        raise ConfigError(
            f"filters are nested more than {DEEPEST_FILTER} deep; write them with fewer levels"
        )


def encoded(metadata: Metadata) -> str:
    """Return metadata as JSON with sorted keys: the same text for values that are equal and of the same type.

    Characters outside ASCII are escaped. NaN and infinities are written as Python does, which is not JSON. Raises
    ConfigError unless each value is a text, a number of at most 4,300 digits, True, False or None.

    >>> encoded({"page": 3, "format": "text"})
    '{"format":"text","page":3}'
    """
    for key, value in metadata.items():
        if not isinstance(value, str | int | float | bool | None):
            raise ConfigError(
                f"metadata {key!r} is a {type(value).__name__}; use text, a number, true, false or nothing"
            )
    try:
        return json.dumps(dict(metadata), sort_keys=True, separators=(",", ":"))
    except ValueError as error:  # Python writes no whole number of more digits
        raise ConfigError(f"metadata holds a number that is too long: {error}") from error


def accepts(where: Where | None, metadata: Metadata) -> bool:
    """Return True if metadata passes a filter that `check_where` accepts; everything passes None and an empty filter.

    Metadata fails a condition on a key that it lacks, unless all its comparisons are `$ne` or `$nin`. A comparison of
    order fails unless both are numbers or both are texts.

    >>> [accepts({"page": 1}, metadata) for metadata in ({"page": 1, "format": "text"}, {"page": True}, {})]
    [True, False, False]
    >>> [accepts({"page": {"$in": [1, 2], "$lt": 2}}, {"page": page}) for page in (1, 2, 3)]
    [True, False, False]
    """
    if where is None:
        return True
    if not isinstance(where, Mapping):
        return bool(where(metadata))
    return all(_passes(metadata, key, wanted) for key, wanted in where.items())


def _passes(metadata: Metadata, key: str, wanted: Any) -> bool:
    if key in GROUPS:
        return GROUPS[key](accepts(part, metadata) for part in wanted)
    if not isinstance(wanted, Mapping):
        return key in metadata and _same(metadata[key], wanted)
    missing = object()
    stored: object = metadata.get(key, missing)  # equal to no value
    return all(OPERATORS[name](stored, value) for name, value in wanted.items())


def fragments(where: Where) -> list[str]:
    """Return substrings of the JSON of all metadata that the filter accepts; rows without them need not be parsed.

    A key and its value are one substring, also those of filters in `$and`. Only for ASCII texts and None, whose JSON is
    unique here (so [] for a function); numbers such as 1 and 1.0 are equal but spelled differently, and so are letters
    with accents.

    >>> fragments({"$and": [{"format": "text"}, {"title": "Care", "page": 3}]})
    ['"format":"text"', '"title":"Care"']
    """
    if not isinstance(where, Mapping):
        return []
    exact = {
        key: value
        for key, value in where.items()
        if value is None or (isinstance(value, str) and value.isascii())
    }
    group: Any = where.get("$and", ())
    nested = [fragment for part in group for fragment in fragments(part)]
    return [encoded({key: value})[1:-1] for key, value in exact.items()] + nested
