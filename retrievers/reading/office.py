"""Word, PowerPoint, Excel and EPUB files as Markdown, within a limit of what they unpack to.

Libraries read them (the extra `office`): mammoth .docx, python-pptx .pptx, python-calamine .xlsx. All but
workbooks become HTML, which `markup` converts, so that tables, lists and struck-out text are treated alike.
"""

from __future__ import annotations

import io
import posixpath
import zipfile
from collections.abc import Iterable, Iterator
from datetime import date, datetime, time
from html import escape
from importlib.util import find_spec
from typing import Any
from urllib.parse import unquote

from cachecraft_rag.retrievers.reading.markup import html_to_markdown
from cachecraft_rag.retrievers.reading.tables import FormatError, rows_to_text

_PACKAGES = {
    ".docx": ("mammoth", "mammoth", "docx"),
    ".pptx": ("pptx", "python-pptx", "office"),
    ".xlsx": ("python_calamine", "python-calamine", "office"),
}
_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_MATH = "{http://schemas.openxmlformats.org/officeDocument/2006/math}"


class MissingReaderError(ImportError):
    """The package that reads this kind of file is not installed; the message says how to install it."""


def require_reader(suffix: str) -> None:
    """Raise `MissingReaderError` if the package that reads files of this suffix is not installed; return None else."""
    module, package, extra = _PACKAGES.get(suffix, ("", "", ""))
    if module and not find_spec(module):
        raise MissingReaderError(
            f"{suffix} files need the package {package}; type: pip install 'cachecraft-rag[{extra}]'"
        )


def docx_to_markdown(data: bytes, *, most_bytes: int, losses: list[str] | None = None) -> str:
    """Return the text of a Word file, its headings, lists and tables as Markdown. Pictures are left out.

    Args:
        data: the file's bytes.
        most_bytes: limit of the unpacked file: a .docx is a ZIP archive, and a small one can unpack to terabytes.
        losses: takes a sentence about each kind of content that was left out.

    Raises:
        MissingReaderError: mammoth is not installed.
        FormatError: the file is not a .docx, or unpacks to more than the limit.
        MarkupError: its text is nested so deep that parsing would take minutes.

    Other errors of zipfile and mammoth for a damaged file pass; `documents.parsing` catches them.
    """
    require_reader(".docx")
    import mammoth

    # Neither pictures nor the file's own style map: both are untrusted.
    converted = mammoth.convert_to_html(
        io.BytesIO(_written_out(data, most_bytes)),
        include_embedded_style_map=False,
        convert_image=lambda _image: [],
    )
    ignored = {message.message for message in converted.messages if "ignored" in message.message}
    if losses is not None:
        losses += sorted(ignored)[:3]
    return html_to_markdown(f"<html><body>{converted.value}</body></html>")[0]


def _unpacked(data: bytes, most_bytes: int, kind: str) -> zipfile.ZipFile:
    """Open a ZIP archive. Raises FormatError for other data, or if it unpacks to more than `most_bytes`."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except zipfile.BadZipFile as error:
        raise FormatError(f"it is no {kind}; save it again in the program that made it") from error
    # zipfile reads no more than this of a part
    if sum(part.file_size for part in archive.infolist()) > most_bytes:
        raise FormatError(
            f"it unpacks to more than {most_bytes >> 20} MiB; split it or leave it out"
        )
    return archive


def _written_out(data: bytes, most_bytes: int) -> bytes:
    """Return a Word file whose equations, numbers of list items and choices are text: mammoth leaves them out."""
    from lxml import etree

    parser = etree.XMLParser(resolve_entities=False, no_network=True, huge_tree=True)
    made = io.BytesIO()
    with _unpacked(data, most_bytes, "Word file of the kind .docx") as archive:
        names = archive.namelist()
        trees = {
            name: etree.fromstring(archive.read(name), parser)
            for name in names
            if name.startswith("word/") and name.endswith(".xml")
        }
        numbering = _Numbering(trees.get("word/numbering.xml"), trees.get("word/styles.xml"))
        with zipfile.ZipFile(made, "w") as written:
            for name in names:
                if name in trees:
                    _write_out(trees[name], numbering)
                    written.writestr(name, etree.tostring(trees[name]))
                elif name.endswith((".xml", ".rels")):
                    written.writestr(name, archive.read(name))
    return made.getvalue()


def _write_out(tree: Any, numbering: _Numbering) -> None:
    for equation in list(tree.iter(f"{_MATH}oMath")):
        equation.getparent().replace(equation, _run(_math(equation), equation.tail))
    for choices in list(tree.iter(f"{_WORD}ddList")):
        entries = [entry.get(f"{_WORD}val") for entry in choices.iter(f"{_WORD}listEntry")]
        chosen = choices.find(f"{_WORD}result")
        place = int(chosen.get(f"{_WORD}val")) if chosen is not None else 0
        field = next(choices.iterancestors(f"{_WORD}r"), None)
        if field is not None and place < len(entries):
            field.addnext(_run(entries[place]))
    for paragraph in tree.iter(f"{_WORD}p"):
        number = numbering.next_of(paragraph)
        if number is not None:
            properties = paragraph.find(f"{_WORD}pPr")
            properties.addnext(_run(f"\ue002{number}\ue003"))


def _run(text: str, tail: str | None = None) -> Any:
    from lxml import etree

    run = etree.Element(f"{_WORD}r")
    etree.SubElement(run, f"{_WORD}t", {"{http://www.w3.org/XML/1998/namespace}space": "preserve"})
    run[0].text = text
    run.tail = tail
    return run


def _math(node: Any) -> str:
    """Return an equation of Word on one line: `(a+b)/2`, `x^2`, `√(y)`.

    >>> from lxml import etree
    >>> space = 'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"'
    >>> _math(etree.fromstring(f"<m:f {space}><m:num><m:t>a+b</m:t></m:num><m:den><m:t>2</m:t></m:den></m:f>"))
    '(a+b)/2'
    """
    name = node.tag.removeprefix(_MATH) if isinstance(node.tag, str) else ""
    if name == "t":
        return node.text or ""
    parts = [(child.tag, _math(child)) for child in node if isinstance(child.tag, str)]
    part = {tag.removeprefix(_MATH): _grouped(text) for tag, text in parts}
    if name == "f":
        return f"{part.get('num', '')}/{part.get('den', '')}"
    if name in ("sSup", "sSub", "sSubSup", "nary", "rad"):
        sign = next((sign.get(f"{_MATH}val", "") for sign in node.iter(f"{_MATH}chr")), "∫")
        start = {"nary": sign, "rad": "√"}.get(name, part.get("e", ""))
        end = part.get("e", "") if name in ("nary", "rad") else ""
        below = f"_{part['sub']}" if part.get("sub") else ""
        above = f"^{part['sup']}" if part.get("sup") else ""
        degree = part.get("deg", "")
        return f"{degree}{start}{below}{above}{end}"
    text = "".join(inner for _, inner in parts)
    return f"({text})" if name == "d" else text


def _grouped(text: str) -> str:
    is_group = text.startswith("(") and text.endswith(")")
    return text if len(text) < 2 or text.isalnum() or is_group else f"({text})"


class _Numbering:
    """Counts the numbered paragraphs of a Word file, which may go on after other text."""

    def __init__(self, numbering: Any, styles: Any) -> None:
        self._list_of: dict[str, str] = {}
        self._starts: dict[tuple[str, str], int] = {}
        self._style_lists: dict[str, tuple[str, int]] = {}
        self._counts: dict[tuple[str, int], int] = {}
        self._started: set[tuple[str, int]] = set()
        for number in (
            [] if numbering is None else numbering.iter(f"{_WORD}num", f"{_WORD}abstractNum")
        ):
            kind = "abstract" if number.tag == f"{_WORD}abstractNum" else "list"
            key = kind + (
                number.get(f"{_WORD}{'abstractNumId' if kind == 'abstract' else 'numId'}") or ""
            )
            base = number.find(f"{_WORD}abstractNumId")
            if base is not None:
                self._list_of[key] = f"abstract{base.get(f'{_WORD}val')}"
            for level in number.iter(f"{_WORD}lvl", f"{_WORD}lvlOverride"):
                for start in level.iter(f"{_WORD}start", f"{_WORD}startOverride"):
                    value = int(start.get(f"{_WORD}val", "1"))
                    self._starts[key, level.get(f"{_WORD}ilvl", "0")] = value
        for style in [] if styles is None else styles.iter(f"{_WORD}style"):
            found = _list_and_level(style)
            if found is not None:
                self._style_lists[style.get(f"{_WORD}styleId", "")] = found

    def next_of(self, paragraph: Any) -> int | None:
        """Return the number of a paragraph in its list, or None if it is in none."""
        properties = paragraph.find(f"{_WORD}pPr")
        if properties is None:
            return None
        style = properties.find(f"{_WORD}pStyle")
        found = _list_and_level(properties)
        if found is None and style is not None:
            found = self._style_lists.get(style.get(f"{_WORD}val", ""))
        if found is None or f"list{found[0]}" not in self._list_of:
            return None
        key = f"list{found[0]}"
        level = found[1]
        base = self._list_of[key]
        start = self._starts.get((key, str(level)))
        if start is not None and (key, level) not in self._started:
            self._counts[base, level] = start - 1
        self._started.add((key, level))
        number = self._counts.get((base, level), self._starts.get((base, str(level)), 1) - 1) + 1
        self._counts[base, level] = number
        for deeper in range(level + 1, 9):
            self._counts.pop((base, deeper), None)
        return number


def _list_and_level(properties: Any) -> tuple[str, int] | None:
    """Return (list, level) that the properties of a paragraph or a style name, or None."""
    number = next(properties.iter(f"{_WORD}numId"), None)
    level = next(properties.iter(f"{_WORD}ilvl"), None)
    if number is None or number.get(f"{_WORD}val") in (None, "0"):
        return None
    return number.get(f"{_WORD}val"), int(level.get(f"{_WORD}val", "0")) if level is not None else 0


def pptx_to_markdown(data: bytes, *, most_bytes: int, losses: list[str] | None = None) -> str:
    """Return the text of a presentation: a heading for each slide, its texts, tables and notes.

    Args, and errors, as in `docx_to_markdown`; the package is python-pptx.
    """
    require_reader(".pptx")
    from pptx import Presentation

    _unpacked(data, most_bytes, "PowerPoint file of the kind .pptx").close()
    parts: list[str] = []
    for number, slide in enumerate(Presentation(io.BytesIO(data)).slides, 1):
        title = slide.shapes.title
        name = title.text_frame.text if title is not None else ""
        parts.append(f"<h2>{escape(name.strip() or f'Slide {number}')}</h2>")
        shapes = list(_shapes(slide.shapes))
        parts += [_shape_html(shape) for shape in shapes if shape != title]
        if losses is not None and any(getattr(shape, "has_chart", False) for shape in shapes):
            losses.append(f"the chart on slide {number}")
        if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
            notes = slide.notes_slide.notes_text_frame.text.strip()
            parts.append(f"<p>Notes: {escape(notes)}</p>" if notes else "")
    return html_to_markdown("".join(parts))[0]


def _shapes(shapes: Iterable[Any]) -> Iterator[Any]:
    for shape in shapes:
        if hasattr(shape, "shapes"):  # a group
            yield from _shapes(shape.shapes)
        else:
            yield shape


def _shape_html(shape: Any) -> str:
    if getattr(shape, "has_table", False):
        rows = (
            "".join(
                f"<td colspan={cell.span_width} rowspan={cell.span_height}>{escape(cell.text_frame.text)}</td>"
                for cell in row.cells
                if not cell.is_spanned
            )
            for row in shape.table.rows
        )
        return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
    if not shape.has_text_frame:
        return ""
    return "".join(f"<p>{escape(paragraph.text)}</p>" for paragraph in shape.text_frame.paragraphs)


def xlsx_to_markdown(data: bytes, *, most_bytes: int) -> str:
    """Return the visible sheets of a workbook: a heading for each, and its rows as paragraphs of `column: value` lines.

    Formulas give the values that were saved with them. Args, and errors, as in `docx_to_markdown`; the package is
    python-calamine.
    """
    require_reader(".xlsx")
    from python_calamine import CalamineWorkbook, SheetTypeEnum, SheetVisibleEnum

    _unpacked(data, most_bytes, "Excel file of the kind .xlsx").close()
    parts: list[str] = []
    workbook = CalamineWorkbook.from_filelike(io.BytesIO(data))
    for sheet in workbook.sheets_metadata:
        if sheet.typ != SheetTypeEnum.WorkSheet or sheet.visible != SheetVisibleEnum.Visible:
            continue
        cells = workbook.get_sheet_by_name(sheet.name)
        rows = [
            [_cell_text(value) for value in row] for row in cells.to_python(skip_empty_area=False)
        ]
        for (top, left), (bottom, right) in cells.merged_cell_ranges or ():
            for row in rows[top : bottom + 1]:
                row[left : right + 1] = [rows[top][left]] * len(row[left : right + 1])
        text = rows_to_text(rows, len(data))
        if text:
            parts.append(f"# {sheet.name}\n\n{text}")
    return "\n\n".join(parts)


def _cell_text(value: object) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, datetime) and value.time() == time():
        return value.date().isoformat()
    return (
        value.isoformat(" ")
        if isinstance(value, datetime)
        else (value.isoformat() if isinstance(value, date | time) else str(value))
    )


def epub_to_markdown(
    data: bytes, *, most_bytes: int, losses: list[str] | None = None
) -> tuple[str, str]:
    """Return the chapters of a book in their order, and its title. Args, and errors, as in `docx_to_markdown`.

    EPUB is a ZIP archive of web pages: ebooklib, the usual package, has a licence (AGPL) that this one cannot take on.
    """
    from lxml import etree

    with _unpacked(data, most_bytes, "book of the kind .epub") as archive:
        parser = etree.XMLParser(resolve_entities=False, no_network=True)
        container = etree.fromstring(archive.read("META-INF/container.xml"), parser)
        package = str(container.xpath("string(//*[local-name()='rootfile']/@full-path)"))
        book = etree.fromstring(archive.read(package), parser)
        hrefs = {item.get("id"): item.get("href") for item in book.iter("{*}item")}
        chapters: list[str] = []
        for reference in book.iter("{*}itemref"):
            name = unquote(hrefs.get(reference.get("idref")) or "")
            try:
                page = archive.read(posixpath.join(posixpath.dirname(package), name))
            except KeyError:
                if losses is not None:
                    losses.append(f"the chapter {name}, which is missing in the file")
                continue
            chapters.append(html_to_markdown(page.decode("utf-8", "replace"))[0])
        title = str(book.xpath("string(//*[local-name()='title'])")).strip()
    return "\n\n".join(filter(None, chapters)), title
