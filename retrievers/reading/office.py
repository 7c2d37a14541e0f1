"""Word files, tables and JSON as text: .docx by mammoth (the extra `docx`), the others by Python's own readers.

A row of a table becomes a paragraph of `column: value` lines. So a chunk names its columns wherever the table is cut,
and rows that do not change keep their chunks when others do.
"""

from __future__ import annotations

import csv
import io
import json
import zipfile
from collections.abc import Iterator

from cachecraft_rag.retrievers.reading.markup import html_to_markdown

_SNIFFED = 64 << 10  # characters in which the separator of a .csv is looked for
_SEPARATORS = ",;\t|"
_LONGEST_FIELD = 1 << 24  # characters; Python's own limit of 131,072 is too small for a text in a cell
_LONGEST_NAME = 200  # characters of a name that stands before each of its values: a longer one would multiply the text


class FormatError(ValueError):
    """A file that cannot be read as its format; the message says what to do."""


class MissingReaderError(ImportError):
    """The package that reads this kind of file is not installed; the message says how to install it."""


def docx_to_markdown(data: bytes, *, most_bytes: int) -> str:
    """The text of a Word file, its headings and lists as Markdown. Pictures are left out.

    most_bytes  limit of the unpacked file: a .docx is a ZIP archive, and a small one can unpack to terabytes

    Raises:
        MissingReaderError: mammoth is not installed.
        FormatError: the file is no .docx, or unpacks to more than the limit.
    """
    try:
        import mammoth
    except ImportError as error:
        raise MissingReaderError(
            f"Word files need the package mammoth ({error}); type: pip install 'cachecraft-rag[docx]'"
        ) from error
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            unpacked = sum(part.file_size for part in archive.infolist())  # zipfile reads no more than this of a part
    except zipfile.BadZipFile as error:
        raise FormatError("it is no Word file of the kind .docx; save it anew in a word processor") from error
    if unpacked > most_bytes:
        raise FormatError(f"it unpacks to more than {most_bytes >> 20} MiB; split it or leave it out")
    # Neither pictures nor the file's own style map: both come from whoever wrote the document.
    found = mammoth.convert_to_html(io.BytesIO(data), include_embedded_style_map=False, convert_image=lambda _image: [])
    return html_to_markdown(f"<html><body>{found.value}</body></html>")[0]


def table_to_text(text: str, *, separator: str | None = None) -> str:
    """A table with a heading row as paragraphs, one a row; a cell that is empty is left out.

    separator  between the cells; None: whichever of comma, semicolon, tab and bar the table uses

    >>> print(table_to_text("name;litres\\nWren K2;1.7\\nOtter C6;"))
    name: Wren K2
    litres: 1.7
    <BLANKLINE>
    name: Otter C6
    """
    if separator is None:
        try:
            separator = csv.Sniffer().sniff(text[:_SNIFFED], _SEPARATORS).delimiter
        except csv.Error:  # a single column has no separator
            separator = ","
    before = csv.field_size_limit(_LONGEST_FIELD)
    try:
        rows = list(csv.reader(io.StringIO(text), delimiter=separator))
    except csv.Error as error:
        raise FormatError(f"its table cannot be read ({error}); save it anew as a table of UTF-8 text") from error
    finally:
        csv.field_size_limit(before)
    rows = [row for row in rows if any(cell.strip() for cell in row)]
    names = rows[0] if rows else []
    if len(rows) == 1:
        return ", ".join(names)
    paragraphs = ["\n".join(_cells([_shortened(name.strip()) for name in names], row)) for row in rows[1:]]
    whole = [name for name in names if len(name.strip()) > _LONGEST_NAME]  # said once
    return "\n\n".join(whole + paragraphs)


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


def _cells(names: list[str], row: list[str]) -> Iterator[str]:
    for place, cell in enumerate(row):
        name = names[place] if place < len(names) else ""
        if cell.strip():
            yield f"{name or f'column {place + 1}'}: {' '.join(cell.split())}"


def json_to_text(text: str) -> str:
    """JSON as `path: value` lines; the entries of a list at the top, and the lines of JSON Lines, are paragraphs.

    Raises FormatError for what is no JSON.

    >>> print(json_to_text('[{"name": "K2", "size": {"litres": 1.7}}, {"name": "C6", "parts": ["lid", "jug"]}]'))
    name: K2
    size.litres: 1.7
    <BLANKLINE>
    name: C6
    parts: lid
    parts: jug
    """
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise FormatError("it is nested too deep; flatten it or leave it out") from error
    except ValueError as error:
        try:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError:
            raise FormatError(f"it is no JSON ({error}); correct it or leave it out") from error
    entries = found if isinstance(found, list) else [found]
    paragraphs = ("\n".join(_lines("", entry)) for entry in entries)
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def _lines(path: str, value: object) -> Iterator[str]:
    """The leaves below a value, each with the end of its path; the entries of a list share the path of the list."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if len(name) > _LONGEST_NAME:
                yield name  # once, whole
            below = f"{path}.{name}" if path else name
            yield from _lines(below if len(below) <= _LONGEST_NAME else f"…{below[1 - _LONGEST_NAME :]}", inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _lines(path, inner)
    elif value is not None and value != "":
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        yield f"{path}: {shown}" if path else shown
