"""Tables and JSON as text, by Python's own readers.

A row of a table becomes a paragraph of `column: value` lines. A chunk therefore names its columns wherever the table is
cut, and rows that do not change keep their chunks when others do.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence

_SNIFFED = 64 << 10  # characters in which the separator of a .csv is looked for
_SEPARATORS = ",;\t|"
# characters; Python's own limit of 131,072 is too small for a text in a cell
_LONGEST_FIELD = 1 << 24
_LONGEST_NAME = 200  # characters of a name that stands before each of its values
# a text may be this many times as long as its file: names stand before each of their values
_MOST_GROWTH = 10
_ALWAYS_ALLOWED = 1 << 20  # characters


_MOST_TITLES = 10  # rows above the row of column names


class FormatError(ValueError):
    """A file that cannot be read as its format; the message says what to do."""


def table_to_text(text: str, *, separator: str | None = None) -> str:
    """Return the text of a table, see `rows_to_text`. A first line such as `sep=;`, which Excel writes, is obeyed.

    Args:
        text: the table.
        separator: the sign between the cells; None: whichever of comma, semicolon, tab and bar the table uses.

    Raises FormatError for a table that cannot be read, such as one with a cell above 16,777,216 characters, and if the
    result would be longer than ten times the text plus 1,048,576 characters; TypeError for a separator that is not one
    character.

    >>> print(table_to_text("name;litres\\nWren K2;1.7\\nOtter C6;"))
    name: Wren K2
    litres: 1.7
    <BLANKLINE>
    name: Otter C6
    """
    before = csv.field_size_limit(_LONGEST_FIELD)
    try:
        if named := re.match(r'"?sep=(.)"?[;,\t]*(\n|$)', text, re.IGNORECASE):
            separator = named[1]
            text = text[named.end() :]
        if separator is None:
            separator = _separator_of(text[:_SNIFFED])
        rows = list(csv.reader(io.StringIO(text), delimiter=separator))
    except csv.Error as error:
        raise FormatError(
            f"its table cannot be read ({error}); save it again as a table of UTF-8 text"
        ) from error
    finally:
        csv.field_size_limit(before)
    return rows_to_text(rows, len(text))


def rows_to_text(rows: Iterable[Sequence[str]], length: int) -> str:
    """Return rows, the first of which names the columns, as paragraphs, one a row; an empty cell is left out.

    A cell is a line `name: text`, its white space collapsed; a column without a name is `column N`, from 1. Rows
    without text do not count. Rows of one cell above the names are titles and become paragraphs. A table of one row
    gives its cells with commas between them, and one without rows "". A column name above 200 characters is shortened,
    and is once at the beginning as a whole. `length` is the file's. Raises FormatError for a text that grows too long.
    """
    rows = [row for row in rows if any(cell.strip() for cell in row)]
    titles = _titles(rows)
    rows = rows[len(titles) :]
    names = rows[0] if rows else []
    if len(rows) == 1:
        return "\n\n".join([*titles, ", ".join(names)])
    shortened = [_shortened(" ".join(name.split())) for name in names]
    long_names = [name for name in names if len(name.strip()) > _LONGEST_NAME]  # whole, once
    paragraphs = ("\n".join(_cells(shortened, row)) for row in rows[1:])
    return _joined(itertools.chain(titles, long_names, paragraphs), length)


def _titles(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the texts of the rows above the column names: each has one cell, and the rows below have several."""
    filled = [[cell for cell in row if cell.strip()] for row in rows[: _MOST_TITLES + 2]]
    count = next((place for place, cells in enumerate(filled) if len(cells) > 1), 0)
    # "Hello, world" below a heading is prose in one column, not two names
    is_prose = count and any(cell[0].isspace() for cell in filled[count])
    below = rows[count + 1 : count + 2]
    has_table = bool(below) and len(below[0]) > 1 and len(rows[count]) > 1
    return [cells[0].strip() for cells in filled[:count]] if has_table and not is_prose else []


def _separator_of(text: str) -> str:
    """Return the sign that divides most rows of a table into as many cells as its first row of several.

    Python's `csv.Sniffer` takes quadratic time: half a minute for 64 KB that were made for it.

    >>> _separator_of("size;price\\n1,5;3\\n2,5;4")
    ';'
    >>> _separator_of("one column")
    ','
    """

    def score(separator: str) -> tuple[int, int]:
        rows = [row for row in csv.reader(io.StringIO(text), delimiter=separator) if row]
        widths = [len(row) for row in rows[len(_titles(rows)) :]]
        if not widths or widths[0] == 1:
            return (0, 0)
        return (sum(width == widths[0] for width in widths), widths[0])

    return max(_SEPARATORS, key=score)  # the first of equals


def _joined(paragraphs: Iterable[str], length: int) -> str:
    """Return the paragraphs as one text. Raises FormatError if it is much longer than the file, of this length."""
    most = _MOST_GROWTH * length + _ALWAYS_ALLOWED
    total = 0
    kept: list[str] = []
    for paragraph in paragraphs:
        total += len(paragraph) + 2
        if total > most:
            raise FormatError(
                f"with a name before each value its text is {_MOST_GROWTH} times as long as the file; shorten the "
                "names of its columns or keys, or leave it out"
            )
        if paragraph:
            kept.append(paragraph)
    return "\n\n".join(kept)


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


def _cells(names: Sequence[str], row: Sequence[str]) -> Iterator[str]:
    for place, cell in enumerate(row):
        name = names[place] if place < len(names) else ""
        if cell.strip():
            yield f"{name or f'column {place + 1}'}: {' '.join(cell.split())}"


def json_to_text(text: str) -> str:
    """Return JSON as `path: value` lines, a paragraph a record.

    Records are the entries of a list at the top, of JSON Lines, and the objects in lists of an object, such as those of
    `{"total": 2, "items": [{}, {}]}`; the other values of such an object are the first paragraph.

    Values that are null or "" are left out, so the text may be "". A value directly in the list at the top, and one
    that is the whole JSON, has no path. Of a path above 200 characters the end is kept, after "…"; a name above 200
    characters stands before it as a whole.

    Raises FormatError for other text, for JSON that is nested too deep for Python, and if the result would be longer
    than ten times the text plus 1,048,576 characters.

    >>> print(json_to_text('[{"name": "K2", "size": {"litres": 1.7}}, {"name": "C6", "parts": ["lid", "jug"]}]'))
    name: K2
    size.litres: 1.7
    <BLANKLINE>
    name: C6
    parts: lid
    parts: jug
    """
    try:
        value = _json_or_lines(text)
        entries = _records(value)
        return _joined((_entry(entry, len(text)) for entry in entries), len(text))
    except RecursionError as error:
        raise FormatError("it is nested too deep; flatten it or leave it out") from error


def _json_or_lines(text: str) -> object:
    """Return the value of JSON, or a list of those of JSON Lines. Raises FormatError for other text."""
    try:
        return json.loads(text)
    except ValueError as error:
        values = []
        # not `splitlines`: texts may hold its other line ends, such as U+2028
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            try:
                values.append(json.loads(line))
            except ValueError as in_line:
                # If not even the first line is a value, it is no JSON Lines.
                wrong = f"line {number}: {in_line}" if values else str(error)
                raise FormatError(f"it is no JSON ({wrong}); correct it or leave it out") from error
        return values


def _records(value: object) -> list[object]:
    """Return the values that become a paragraph each: the other values of an object first, then its records."""
    if isinstance(value, list):
        return value
    wrapped = value
    around: dict[str, object] = {}
    while isinstance(wrapped, dict):
        lists = [name for name, inner in wrapped.items() if _is_records(inner)]
        around |= {
            name: inner
            for name, inner in wrapped.items()
            if name not in lists and (lists or not isinstance(inner, dict))
        }
        if lists:
            # with one list its name says nothing that the file's does not
            records = [
                record if len(lists) == 1 else {name: record}
                for name in lists
                for record in wrapped[name]
            ]
            return [around, *records]
        inner_objects = [inner for inner in wrapped.values() if isinstance(inner, dict)]
        wrapped = inner_objects[0] if len(inner_objects) == 1 else None
    return [value]


def _is_records(value: object) -> bool:
    return (
        isinstance(value, list) and len(value) > 0 and all(isinstance(item, dict) for item in value)
    )


def _entry(value: object, length: int) -> str:
    """Return an entry of the list at the top as one paragraph; `length` is the file's."""
    most = _MOST_GROWTH * length + _ALWAYS_ALLOWED
    lines: list[str] = []
    for line in _lines("", value):
        most -= len(line) + 1
        if most < 0:
            break  # `_joined` refuses it
        lines.append(line)
    else:
        return "\n".join(lines)
    return "\n".join([*lines, line])


def _lines(path: str, value: object) -> Iterator[str]:
    """Yield the leaves below a value, each with the end of its path; entries of a list share the path of the list."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if len(name) > _LONGEST_NAME:
                yield name  # once, whole
            below = f"{path}.{name}" if path else name
            yield from _lines(
                below if len(below) <= _LONGEST_NAME else f"…{below[1 - _LONGEST_NAME :]}", inner
            )
    elif isinstance(value, list):
        for inner in value:
            yield from _lines(path, inner)
    elif value is not None and value != "":
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        yield f"{path}: {shown}" if path else shown
