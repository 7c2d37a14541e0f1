"""Tables and JSON as text, by Python's own readers.

A row of a table becomes a paragraph of `column: value` lines: a chunk names its columns wherever the table is cut, and
rows that do not change keep their chunks when others do.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, zip_longest

_SNIFFED = 64 << 10  # characters in which the separator of a .csv is looked for
_LONGEST_NAME = 200  # characters of a name that stands before each of its values
# a text may be this many times as long as its file: names stand before each of their values
_MOST_GROWTH = 10
_ALWAYS_ALLOWED = 1 << 20  # characters
_MOST_TITLES = 10  # rows above the row of column names


class FormatError(ValueError):
    """A file that cannot be read as its format; the message goes on after its name and says what to do."""


def table_to_text(text: str, *, separator: str | None = None) -> str:
    """Return the text of a table, see `rows_to_text`. A first line such as `sep=;`, which Excel writes, is obeyed.

    Without a `separator` it is whichever of comma, semicolon, tab and bar the table uses.

    >>> table_to_text("name;litres\\nWren K2;1.7\\nOtter C6;")
    'name: Wren K2\\nlitres: 1.7\\n\\nname: Otter C6'
    """
    # Python's limit of 131,072 characters a cell is for other uses than ours; a cell is no longer than its file
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    if named := re.match(r'"?sep=(.)"?[;,\t]*(\n|$)', text, re.IGNORECASE):
        separator = named[1]
        text = text[named.end() :]
    separator = separator or _separator_of(text[:_SNIFFED])
    return rows_to_text(csv.reader(io.StringIO(text), delimiter=separator), len(text))


def rows_to_text(rows: Iterable[Sequence[str]], length: int) -> str:
    """Return rows, the first of which names the columns, as paragraphs, one a row; an empty cell is left out.

    A column without a name is `column N`, from 1. Rows of one cell above the names are titles and become paragraphs. A
    table of one row gives its cells with commas between them. `length` is the file's, in characters or bytes: a text
    that is 1,048,576 characters longer than ten times that is a FormatError.
    """
    rows = [row for row in rows if any(cell.strip() for cell in row)]
    titles = _titles(rows)
    names, *lines = [[" ".join(cell.split()) for cell in row] for row in rows[len(titles) :]] or [
        []
    ]
    if not lines:
        return "\n\n".join(filter(None, [*titles, ", ".join(names)]))
    records = (
        [
            (_shortened(name) or f"column {number}", cell)
            for number, (cell, name) in enumerate(zip_longest(line, names, fillvalue=""), 1)
            if cell
        ]
        for line in lines
    )
    long_names = [name for name in names if len(name) > _LONGEST_NAME]  # whole, once
    return _paragraphs(chain([[("", text)] for text in [*titles, *long_names]], records), length)


def _titles(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the texts of the rows above the column names: each has one cell, and the rows below have several."""
    filled = [[cell for cell in row if cell.strip()] for row in rows[: _MOST_TITLES + 2]]
    count = next((place for place, cells in enumerate(filled) if len(cells) > 1), 0)
    # "Hello, world" below a heading is prose in one column, not two names
    is_prose = count and any(cell[0].isspace() for cell in filled[count])
    has_table = all(len(row) > 1 for row in rows[count : count + 2]) and len(rows) > count + 1
    return [cells[0].strip() for cells in filled[:count]] if has_table and not is_prose else []


def _separator_of(text: str) -> str:
    """Return the sign that divides most rows of a table into as many cells as its first row of several.

    Python's `csv.Sniffer` takes quadratic time: half a minute for 64 KB that were made for it.

    >>> _separator_of("size;price\\n1,5;3\\n2,5;4")
    ';'
    """

    def score(separator: str) -> tuple[int, int]:
        rows = [row for row in csv.reader(io.StringIO(text), delimiter=separator) if row]
        widths = [len(row) for row in rows[len(_titles(rows)) :]]
        is_table = bool(widths) and widths[0] > 1
        return (widths.count(widths[0]), widths[0]) if is_table else (0, 0)

    return max(",;\t|", key=score)  # the first of equals


def _paragraphs(records: Iterable[Iterable[tuple[str, str]]], length: int) -> str:
    """Return `name: value` lines, a paragraph a record. Raises FormatError for a text much longer than its file."""
    left = _MOST_GROWTH * length + _ALWAYS_ALLOWED
    paragraphs: list[str] = []
    for record in records:
        lines: list[str] = []
        for name, value in record:
            lines.append(f"{name}: {value}" if name else value)
            left -= len(lines[-1]) + 2
            if left < 0:
                raise FormatError(
                    f"cannot be read: with a name before each value its text is {_MOST_GROWTH} times as long as the "
                    "file; shorten the names of its columns or keys, or leave it out"
                )
        paragraphs.append("\n".join(lines))
    return "\n\n".join(filter(None, paragraphs))


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"…{name[1 - _LONGEST_NAME :]}"


def json_to_text(text: str) -> str:
    """Return JSON, or JSON Lines, as `path: value` lines, a paragraph a record (list entry); blank text gives "".

    Values that are null or "" are left out. Raises FormatError for other text, and for a result that is 1 MiB longer
    than ten times the text.

    >>> json_to_text('[{"name": "K2", "size": {"litres": 1.7}}, {"name": "C6", "parts": ["lid", "jug"]}]')
    'name: K2\\nsize.litres: 1.7\\n\\nname: C6\\nparts: lid\\nparts: jug'
    """
    try:
        return _paragraphs((_values("", record) for record in _records(_loaded(text))), len(text))
    except RecursionError as error:
        raise FormatError(
            "cannot be read: it is nested too deep; flatten it or leave it out"
        ) from error


def _loaded(text: str) -> object:
    """Return the value of JSON, or a list of those of JSON Lines. Raises FormatError for other text."""
    try:
        return json.loads(text)
    except ValueError as error:
        values = []
        # not `splitlines`: texts may hold its other line ends, such as U+2028
        for number, line in enumerate(text.split("\n"), 1):
            try:
                values += [json.loads(line)] if line.strip() else []
            except ValueError as in_line:
                # If not even the first line is a value, it is no JSON Lines.
                wrong = f"it is no JSON ({f'line {number}: {in_line}' if values else error})"
                raise FormatError(f"cannot be read: {wrong}; correct it or leave it out") from error
        return values


def _records(value: object) -> Iterator[object]:
    """Yield the values that become a paragraph each: the other values of an object first, then its records.

    Records are the entries of a list at the top, of JSON Lines, and the objects in lists of an object, such as those of
    `{"total": 2, "items": [{}, {}]}`. Of the objects around them only a name that comes again has its path.
    """
    around: dict[str, object] = {}
    path = ""
    lists: dict[str, list[object]] = {"": value} if isinstance(value, list) else {}
    inside = value
    while isinstance(inside, dict) and not lists:
        lists = {
            name: part
            for name, part in inside.items()
            if isinstance(part, list) and part and all(isinstance(item, dict) for item in part)
        }
        objects = [name for name, part in inside.items() if isinstance(part, dict)]
        around |= {
            f"{path}.{name}" if name in around else name: part
            for name, part in inside.items()
            if name not in lists and (lists or not isinstance(part, dict))
        }
        if len(objects) != 1:
            break
        path = f"{path}.{objects[0]}" if path else objects[0]
        inside = inside[objects[0]]
    yield around if lists else value
    for name, records in lists.items():
        # with one list its name says nothing that the file's does not
        yield from records if len(lists) == 1 else ({name: record} for record in records)


def _values(path: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield (path, text) for the leaves below a value; entries of a list share the path of the list."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if len(name) > _LONGEST_NAME:
                yield "", name  # once, whole
            yield from _values(_shortened(f"{path}.{name}" if path else name), inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _values(path, inner)
    elif value is not None and value != "":
        yield path, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
