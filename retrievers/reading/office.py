"""Word, PowerPoint, Excel and EPUB files as Markdown, within a limit of what they unpack to.

Libraries read them (the extra `office`): mammoth .docx, python-pptx .pptx, python-calamine .xlsx. All but workbooks
become HTML, which `markup` converts, so that tables, lists and struck-out text are treated alike. Converters raise
FormatError for a file that is no ZIP archive or unpacks to more than `MOST_UNPACKED` (256 MiB), and whatever the
libraries raise; `parsing` makes a DocumentError of both.
"""

from __future__ import annotations

import io
import itertools
import posixpath
import re
import zipfile
from collections import defaultdict
from html import escape
from importlib.util import find_spec
from typing import Any
from urllib.parse import unquote

from cachecraft_rag.checks import missing_package
from cachecraft_rag.retrievers.reading.markup import Reading, html_to_markdown
from cachecraft_rag.retrievers.reading.tables import FormatError, rows_to_text

MOST_UNPACKED = 256 << 20  # bytes: a small ZIP archive can unpack to terabytes
# suffix → the modules that read such files, and the extra that brings them
_PACKAGES = {
    ".docx": (("mammoth", "lxml", "html_to_markdown"), "docx"),
    ".epub": (("lxml", "html_to_markdown"), "retrieval"),
    ".htm": (("lxml", "html_to_markdown", "webencodings"), "retrieval"),
    ".html": (("lxml", "html_to_markdown", "webencodings"), "retrieval"),
    ".pdf": (("pypdf",), "retrieval"),
    ".pptx": (("pptx", "lxml", "html_to_markdown"), "office"),
    ".xlsx": (("python_calamine",), "office"),
}
_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_OFF = ("0", "false", "off")  # values of a setting that has none if it is on
_MATH = "{http://schemas.openxmlformats.org/officeDocument/2006/math}"


def require_reader(suffix: str) -> None:
    """Raise MissingPackageError if a package that reads files of this suffix (".pdf") is not installed."""
    modules, extra = _PACKAGES.get(suffix, ((), ""))
    missing = ", ".join(module for module in modules if not find_spec(module))
    if missing:
        raise missing_package(extra, f"A file of the kind {suffix}", f"No module named {missing}")


def docx_to_markdown(data: bytes) -> Reading:
    """Return a Word file's text with headings, lists, tables, equations and drop-down choices, but no pictures."""
    import mammoth

    written, has_hidden = _written_out(data)
    # Neither pictures nor the file's own style map: both are untrusted.
    converted = mammoth.convert_to_html(
        written, include_embedded_style_map=False, convert_image=lambda _image: []
    )
    html = re.sub("<li>\ue000(\\d+)\ue001", r'<li value="\1">', converted.value)
    html = re.sub("\ue000\\d+\ue001", "", html)
    ignored = {note.message for note in converted.messages if "ignored" in note.message}
    losses = [*sorted(ignored)[:3], *_left_out(data), *(["hidden text"] if has_hidden else [])]
    return html_to_markdown(html)._replace(losses=losses)


def _unpacked(data: bytes) -> zipfile.ZipFile:
    """Return the archive. Raises FormatError if it is not a ZIP archive, or unpacks to more than `MOST_UNPACKED`."""
    if not zipfile.is_zipfile(io.BytesIO(data)):
        raise FormatError(
            "is of another kind than its name says, or locked with a password; save it again in its program"
        )
    archive = zipfile.ZipFile(io.BytesIO(data))
    # zipfile reads no more than this of a part
    if sum(part.file_size for part in archive.infolist()) > MOST_UNPACKED:
        raise FormatError(
            f"unpacks to more than {MOST_UNPACKED >> 20} MiB; split it or leave it out"
        )
    return archive


def _left_out(data: bytes) -> list[str]:
    """Return the kinds of content of a Word or PowerPoint file that its library leaves out without a word."""
    names = " ".join(_unpacked(data).namelist())
    parts = {
        "/charts/chart": "charts",
        "/diagrams/data": "diagrams",
        "/embeddings/": "embedded files",
    }
    return [kind for part, kind in parts.items() if part in names]


def _written_out(data: bytes) -> tuple[io.BytesIO, bool]:
    """Return a Word file for mammoth, and True if hidden text was taken out of it.

    Equations, numbers of list items and choices are text in it: mammoth leaves them out.
    """
    from lxml import etree

    parser = etree.XMLParser(resolve_entities=False, no_network=True, huge_tree=True)
    made = io.BytesIO()
    has_hidden = False
    with _unpacked(data) as archive, zipfile.ZipFile(made, "w") as written:
        names = archive.namelist()
        numbering, styles = (
            etree.fromstring(archive.read(name) if name in names else b"<nothing/>", parser)
            for name in ("word/numbering.xml", "word/styles.xml")
        )
        lists = _Lists(numbering, styles)
        for name in names:
            if name.startswith("word/") and name.endswith(".xml"):
                tree = etree.fromstring(archive.read(name), parser)
                has_hidden |= _drop_hidden(tree, styles)
                _write_out(tree, lists)
                written.writestr(name, etree.tostring(tree))
            elif name.endswith((".xml", ".rels")):
                written.writestr(name, archive.read(name))
    return made, has_hidden


def _drop_hidden(tree: Any, styles: Any) -> bool:
    """Take out the text that Word hides; return True if there was any."""
    hiding = {
        style.get(f"{_WORD}styleId")
        for style in styles.iter(f"{_WORD}style")
        if _value(style.find(f"{_WORD}rPr/{_WORD}vanish"), "0") not in _OFF
    }
    hidden = ""
    for run in tree.iter(f"{_WORD}r"):
        paragraph = next(run.iterancestors(f"{_WORD}p"), run)
        names = {
            _value(run.find(f"{_WORD}rPr/{_WORD}rStyle")),
            _value(paragraph.find(f"{_WORD}pPr/{_WORD}pStyle")),
        }
        by_style = "1" if hiding & names else "0"
        if _value(run.find(f"{_WORD}rPr/{_WORD}vanish"), by_style) not in _OFF:
            for text in run.iter(f"{_WORD}t"):
                hidden += text.text or ""
                text.text = None
    return bool(hidden.strip())


def _write_out(tree: Any, lists: _Lists) -> None:
    for equation in list(tree.iter(f"{_MATH}oMath")):
        run = _run(_math(equation))
        run.tail = equation.tail
        equation.getparent().replace(equation, run)
    for choices in list(tree.iter(f"{_WORD}ddList")):
        entries = [_value(entry) for entry in choices.iter(f"{_WORD}listEntry")]
        place = int(_value(choices.find(f"{_WORD}result")) or 0)
        for field in itertools.islice(choices.iterancestors(f"{_WORD}r"), 1):
            field.addnext(_run("".join(entries[place : place + 1])))
    for properties in tree.iterfind(f".//{_WORD}p/{_WORD}pPr"):
        number = lists.next_number(properties)
        if number is not None:
            properties.addnext(_run(f"\ue000{number}\ue001"))


def _run(text: str) -> Any:
    from lxml import etree

    run = etree.Element(f"{_WORD}r")
    etree.SubElement(run, f"{_WORD}t").text = text
    return run


def _value(element: Any, missing: str = "") -> str:
    return missing if element is None else element.get(f"{_WORD}val", "")


def _math(node: Any) -> str:
    """Return an equation of Word on one line: `(a+b)/2`, `x^2`, `√(y)`.

    >>> from lxml import etree
    >>> space = 'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"'
    >>> _math(etree.fromstring(f"<m:f {space}><m:num><m:t>a+b</m:t></m:num><m:den><m:t>2</m:t></m:den></m:f>"))
    '(a+b)/2'
    """
    name = str(node.tag).removeprefix(_MATH)
    texts = [(str(child.tag).removeprefix(_MATH), _math(child)) for child in node]
    part = defaultdict(str, {tag: _grouped(text) for tag, text in texts})
    below = f"_{part['sub']}" if part["sub"] else ""
    above = f"^{part['sup']}" if part["sup"] else ""
    if name == "f":
        return f"{part['num']}/{part['den']}"
    if name == "rad":
        return f"{part['deg']}√{part['e']}"
    if name == "nary":
        sign = next((sign.get(f"{_MATH}val", "") for sign in node.iter(f"{_MATH}chr")), "∫")
        return f"{sign}{below}{above}{part['e']}"
    if name in ("sSup", "sSub", "sSubSup"):
        return f"{part['e']}{below}{above}"
    text = "".join(inner for _, inner in texts) or (node.text or "" if name == "t" else "")
    return f"({text})" if name == "d" else text


def _grouped(text: str) -> str:
    is_group = text.startswith("(") and text.endswith(")")
    return text if len(text) < 2 or text.isalnum() or is_group else f"({text})"


class _Lists:
    """Counts the paragraphs of a Word file's lists, which may go on after other text."""

    def __init__(self, numbering: Any, styles: Any) -> None:
        self._kinds = {  # list -> the kind of list that it shares its numbers with
            number.get(f"{_WORD}numId"): _value(number.find(f"{_WORD}abstractNumId"))
            for number in numbering.iter(f"{_WORD}num")
        }
        self._starts: dict[tuple[str | None, str | None, int], int] = {}  # list, kind, level
        for level in numbering.iter(f"{_WORD}lvl", f"{_WORD}lvlOverride"):
            owner = level.getparent()
            ids = (owner.get(f"{_WORD}numId"), owner.get(f"{_WORD}abstractNumId"))
            for start in level.iter(f"{_WORD}start", f"{_WORD}startOverride"):
                place = int(level.get(f"{_WORD}ilvl", 0))
                self._starts[ids[0], ids[1], place] = int(_value(start) or 1)
        self._of_style = {
            style.get(f"{_WORD}styleId"): _list_and_level(style)
            for style in styles.iter(f"{_WORD}style")
        }
        self._counts: dict[tuple[str, int], int] = {}  # kind, level
        self._begun: set[tuple[str, int]] = set()

    def next_number(self, properties: Any) -> int | None:
        """Count a paragraph with these properties; return its number in its list, or None if it is in none."""
        style = _value(properties.find(f"{_WORD}pStyle"))
        place = _list_and_level(properties) or self._of_style.get(style)
        if place is None or place[0] not in self._kinds:
            return None
        kind = self._kinds[place[0]]
        level = place[1]
        before = self._counts.get((kind, level), self._starts.get((None, kind, level), 1) - 1)
        if place not in self._begun:
            before = self._starts.get((place[0], None, level), before + 1) - 1
        self._begun.add(place)
        kept = {
            key: count for key, count in self._counts.items() if key[0] != kind or key[1] < level
        }
        self._counts = {**kept, (kind, level): before + 1}
        return before + 1


def _list_and_level(properties: Any) -> tuple[str, int] | None:
    """Return (list, level) that the properties of a paragraph or a style name, or None."""
    number = _value(next(properties.iter(f"{_WORD}numId"), None))
    level = _value(next(properties.iter(f"{_WORD}ilvl"), None))
    return (number, int(level or 0)) if number not in ("", "0") else None


def pptx_to_markdown(data: bytes) -> Reading:
    """Return each visible slide's title as a heading, its texts, tables and notes; `losses` names hidden slides."""
    from pptx import Presentation

    losses = _left_out(data)
    parts: list[str] = []
    for number, slide in enumerate(Presentation(io.BytesIO(data)).slides, 1):
        if slide.element.get("show") in _OFF:
            losses.append(f"the hidden slide {number}")
            continue
        title = slide.shapes.title
        name = title.text_frame.text.strip() if title is not None else ""
        parts.append(f"<h2>{escape(name or f'Slide {number}')}</h2>")
        parts += [_shape_html(shape) for shape in slide.shapes if shape != title]
        notes = slide.notes_slide.notes_text_frame if slide.has_notes_slide else None
        if notes is not None and notes.text.strip():
            parts.append(f"<p>Notes: {escape(notes.text.strip())}</p>")
    return html_to_markdown("".join(parts))._replace(losses=losses)


def _shape_html(shape: Any) -> str:
    if hasattr(shape, "shapes"):  # a group
        return "".join(map(_shape_html, shape.shapes))
    if getattr(shape, "has_table", False):
        rows = (
            "".join(
                f"<td colspan={cell.span_width} rowspan={cell.span_height}>{escape(cell.text_frame.text)}</td>"
                for cell in row.cells
                if not cell.is_spanned
            )
            for row in shape.table.rows
        )
        return f"<table><tr>{'<tr>'.join(rows)}</table>"
    paragraphs = shape.text_frame.paragraphs if shape.has_text_frame else ()
    return "".join(f"<p>{escape(paragraph.text)}</p>" for paragraph in paragraphs)


def xlsx_to_markdown(data: bytes) -> Reading:
    """Return a heading for each visible sheet and its rows as paragraphs of `column: value` lines.

    The first row names the columns (`rows_to_text`). Formulas give their saved values. `losses` names hidden sheets.
    """
    from python_calamine import CalamineWorkbook, SheetTypeEnum, SheetVisibleEnum

    _unpacked(data).close()
    parts: list[str] = []
    losses: list[str] = []
    workbook = CalamineWorkbook.from_filelike(io.BytesIO(data))
    for sheet in workbook.sheets_metadata:
        if sheet.visible != SheetVisibleEnum.Visible:
            losses.append(f"the hidden sheet {sheet.name}")
        if sheet.typ != SheetTypeEnum.WorkSheet or sheet.visible != SheetVisibleEnum.Visible:
            continue
        cells = workbook.get_sheet_by_name(sheet.name)
        rows = [
            [_cell_text(cell) for cell in row] for row in cells.to_python(skip_empty_area=False)
        ]
        for (top, left), (bottom, right) in cells.merged_cell_ranges or ():
            for row in rows[top : bottom + 1]:
                row[left : right + 1] = [rows[top][left]] * len(row[left : right + 1])
        text = rows_to_text(rows, len(data))
        if text:
            parts.append(f"# {sheet.name}\n\n{text}")
    return Reading("\n\n".join(parts), {"format": "markdown"}, losses)


def _cell_text(value: object) -> str:
    is_whole = isinstance(value, float) and value.is_integer()
    return f"{value:.0f}" if is_whole else str(value).removesuffix(" 00:00:00")


def epub_to_markdown(data: bytes) -> Reading:
    """Return the chapters of a book in their order, and its title; `losses` names those missing in the file.

    EPUB is a ZIP archive of web pages: ebooklib, the usual package, has a licence (AGPL) that this one cannot take on.
    """
    from lxml import etree

    parser = etree.XMLParser(resolve_entities=False, no_network=True)
    chapters: list[str] = []
    losses: list[str] = []
    with _unpacked(data) as archive:
        container = etree.fromstring(archive.read("META-INF/container.xml"), parser)
        package = str(container.xpath("string(//*[local-name()='rootfile']/@full-path)"))
        book = etree.fromstring(archive.read(package), parser)
        hrefs = {item.get("id"): item.get("href") for item in book.iter("{*}item")}
        for reference in book.iter("{*}itemref"):
            name = unquote(hrefs.get(reference.get("idref")) or "")
            try:
                page = archive.read(posixpath.join(posixpath.dirname(package), name))
            except KeyError:
                losses.append(f"the chapter {name}, which is missing in the file")
            else:
                chapters.append(html_to_markdown(page.decode("utf-8", "replace")).text)
        title = str(book.xpath("string(//*[local-name()='title'])")).strip()
    text = "\n\n".join(filter(None, chapters))
    return Reading(text, {"format": "markdown", "title": title}, losses)


CONVERTERS = {
    ".docx": docx_to_markdown,
    ".pptx": pptx_to_markdown,
    ".xlsx": xlsx_to_markdown,
    ".epub": epub_to_markdown,
}
