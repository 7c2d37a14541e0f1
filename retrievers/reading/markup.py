"""HTML and reStructuredText as Markdown: headings stay headings, everything else stays readable text.

html-to-markdown converts HTML. It loses superscripts, spanned cells and the numbers of list items, and text in deeply
nested tags, so `_Cleaner` rewrites a page before: all mending of HTML, and of what becomes HTML (Word, EPUB), is there.
"""

from __future__ import annotations

import html as html_text
import re
from collections.abc import Mapping
from dataclasses import dataclass, field


def rst_to_markdown(text: str) -> str:
    """Return reStructuredText with its underlined titles as `#` lines; the rest is unchanged.

    Levels follow the order in which styles of underline (and overline) first appear, as in docutils; the seventh and
    all later ones become `######`. A line that Markdown would take for a heading or a fence begins with a backslash.
    Raises nothing.

    >>> print(rst_to_markdown("Kettle\\n======\\n\\nCare\\n----\\nRinse it."))
    # Kettle
    <BLANKLINE>
    ## Care
    Rinse it.
    """
    rule = re.compile(r"([!-/:-@\[-`{-~])\1{2,}\s*$")
    lines = ["", *text.split("\n"), ""]
    out: list[str] = []
    styles: list[tuple[str, bool]] = []
    at = 1
    while at < len(lines) - 1:
        line = lines[at]
        after = lines[at + 1]
        over = (
            bool(rule.match(line))
            and at + 2 < len(lines)
            and lines[at + 2].rstrip() == line.rstrip()
        )
        title = after if over else line
        under = lines[at + 2] if over else after
        is_title = bool(rule.match(under)) and bool(title.strip()) and not rule.match(title)
        is_title = (
            is_title
            and len(under.rstrip()) >= len(title.strip())
            and (over or not title[0].isspace())
        )
        if is_title and not lines[at - 1].strip():
            style = (under[0], over)
            if style not in styles:
                styles.append(style)
            out.append(f"{'#' * min(6, styles.index(style) + 1)} {title.strip()}")
            at += 3 if over else 2
        else:
            out.append(_escape(line))
            at += 1
    return "\n".join(out)


def _escape(line: str) -> str:
    """Escape a line that Markdown would read as a heading or a fence."""
    return re.sub(r"^(?=#{1,6}(\s|$)|```|~~~)", r"\\", line)


class MarkupError(ValueError):
    """A page that would take minutes to parse; the message is the reason."""


def html_to_markdown(html: str) -> tuple[str, str]:
    """Return the visible text of a page as Markdown, and its title ("" if it has none), the words of the first <title>.

    Hidden parts, scripts and navigation are left out, and so are emphasis and the targets of links. Both are "" for an
    empty page and for one of comments alone. Half a surrogate pair is read as "?". Raises `MarkupError` for a page
    whose tags are nested so deep that parsing would take minutes.

    >>> html_to_markdown("<title>K2</title><h1>Kettle</h1><nav>Home</nav><p>45<sup>1</sup> <s>euros</s>.</p>")
    ('# Kettle\\n\\n45^1 ~~euros~~.', 'K2')
    """
    from html_to_markdown import ConversionOptions, convert
    from lxml import etree

    page = _Cleaner(len(html), closing_tags=html.count("</"))
    # huge_tree: otherwise libxml2 drops text nested deeper than 2,048 tags; the cleaner has its own limit.
    parser = etree.HTMLParser(target=page, huge_tree=True, encoding="utf-8")
    # The parser reads an XML prologue as a comment, but would use its encoding.
    html = re.sub(r"\A\s*<\?xml[^>]*\?>", "", html)
    data = html.encode("utf-8", "replace")
    for start in range(0, len(data), _PIECE):
        parser.feed(data[start : start + _PIECE])
    try:
        parser.close()
    except etree.XMLSyntaxError:  # "no element found": only comments and unfinished tags
        return "", ""
    options = ConversionOptions(compact_tables=True, bullets="-", extract_metadata=False)
    text = convert("".join(page.out), options).content or ""
    text = re.sub("- \ue000(-?\\d+)\ue001 ?", r"\1. ", text)
    return re.sub(r"(?<=\S)  $", "", text, flags=re.MULTILINE).strip("\n"), page.title()


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_UNSEEN = _names("head title script style nav template noscript svg iframe object annotation")
_INLINE = _names(
    "a abbr acronym b bdi bdo big button cite code data dfn em font i img ins kbd label mark meter q rp rt ruby samp "
    "select small span strong time tt u var wbr math mrow mi mn mo mtext mstyle semantics msup msub mfrac msqrt option "
    "sup sub input br thead tbody tfoot colgroup col"
)
_WRITTEN = {name: name for name in _names("p pre blockquote ul li h1 h2 h3 h4 h5 h6 hr del")}
_WRITTEN |= {"s": "del", "strike": "del", "ol": "ul"}
_SCRIPTS = {"sup": "^", "sub": "_"}
_ORDINALS = _names("st nd rd th e er re ª º")  # 1<sup>st</sup> is 1st
_SECOND_PART = {"msup": "^", "msub": "_", "mfrac": "/"}  # before the second child, in MathML

# lxml handles a closing tag in time proportional to its depth. Real pages stay far below both limits.
_PIECE = 1 << 14  # bytes; lxml reports an exception of the cleaner only at the end of a piece
_DEEP = 500  # levels that are always allowed
_CLOSING_STEPS = 200_000_000  # depth times closing tags; about a second
_DEEPEST_WRITTEN = 40  # levels of lists, quotes and blocks; the text of deeper ones stays
_DEEPEST_TABLE = 4
_WIDEST_TABLE = 200  # columns; wider ones become lines


@dataclass(slots=True)
class _Cell:
    html: str
    columns: int
    rows: int


@dataclass(slots=True)
class _Element:
    """An open element: its name, the end tag to write, its children so far, and the number of its next list item."""

    name: str
    end: str = ""
    children: int = 0
    number: int = 1
    step: int = 1


@dataclass(slots=True)
class _Table:
    """An open table; `is_layout`: its cells hold headings or tables, so it only arranges a page."""

    is_layout: bool = False
    rows: list[list[_Cell]] = field(default_factory=list)
    # for each open cell what is written around it, and its spans
    around: list[tuple[list[str], int, int]] = field(default_factory=list)


class _Cleaner:
    """Writes a page again as the few tags that the converter renders well, in `out`.

    A parser target of lxml: the parser calls it for each tag and text, and no tree is built. `length` is that of the
    page, `closing_tags` the number of its closing tags.
    """

    def __init__(self, length: int, *, closing_tags: int = 0) -> None:
        self.out: list[str] = []
        self.open: list[_Element] = []
        self.tables: list[_Table] = []
        self.flat_tables = 0  # depth of tables that are nested too deep
        self.spare = length + 1000  # characters that repeated cells may add
        self.written = 0  # depth of elements that are written
        self.script = ""  # sign to write before the text of a superscript or subscript
        self.after_script = False
        self.depth = 0
        self.unseen = 0  # depth at which a hidden part began, or 0
        self.titles = 0  # how many titles have begun
        self.in_title = False
        self.title_text: list[str] = []
        self.deepest = max(_DEEP, _CLOSING_STEPS // max(1, closing_tags))

    def start(self, name: str, attributes: Mapping[str, str]) -> None:
        """Take an opening tag."""
        self.depth += 1
        if self.depth > self.deepest:
            raise MarkupError(
                f"its tags are nested more than {self.deepest} deep; simplify the page"
            )
        if name == "title":
            self.titles += 1
            self.in_title = self.titles == 1
        if self.unseen:
            return
        is_choice = name == "option" and any(outer.name == "select" for outer in self.open[-2:])
        if _unseen(name, attributes) or (is_choice and "selected" not in attributes):
            self.unseen = self.depth
        else:
            self._open(name, attributes)

    def end(self, name: str) -> None:
        """Take a closing tag, which the parser adds if the page lacks it."""
        self.in_title = self.in_title and name != "title"
        self.depth -= 1
        if not self.unseen:
            self._close()
        elif self.depth < self.unseen:
            self.unseen = 0

    def data(self, text: str) -> None:
        """Take text between tags, with its references resolved."""
        if self.in_title:
            self.title_text.append(text)
        if self.unseen:
            return
        number = re.match(
            "\ue002(-?\\d{1,5})\ue003", text
        )  # from Word, where lists go on after other text
        if number and self.out and self.out[-1].startswith("\ue000"):
            self.out[-1] = f"\ue000{number[1]}\ue001 "
        text = re.sub("\ue002[^\ue003]*\ue003|[\ue000-\ue003]", "", text)  # marks of our own
        if not any(element.name == "pre" for element in self.open[-3:]):
            text = re.sub(r"\s+", " ", text)
        if self.script and text.strip():
            self.out.append("" if text.strip() in _ORDINALS else self.script)
            self.script = ""
        elif self.after_script and text[:1].isalnum():
            self.out.append(" ")  # 2<sup>3</sup>4 is no 2^34
        self.after_script = False
        self.out.append(html_text.escape(text, quote=False))

    def close(self) -> None:
        """Take the end of the page."""
        while self.open:
            self._close()

    def title(self) -> str:
        """Return the words of the page's title."""
        return " ".join("".join(self.title_text).split())

    def _open(self, name: str, attributes: Mapping[str, str]) -> None:
        element = _Element(name)
        parent = self.open[-1] if self.open else element
        parent.children += 1
        self.open.append(element)
        if parent.children == 2 and parent.name in _SECOND_PART:
            self.out.append(_SECOND_PART[parent.name])
        if name in _SCRIPTS:
            self.script = _SCRIPTS[name]
        elif name == "br":
            self.out.append("<br>")
        elif name == "input":
            self.out.append(html_text.escape(_shown_value(attributes)))
        elif name == "table":
            self._mark_layout()
            if len(self.tables) >= _DEEPEST_TABLE:
                self.flat_tables += 1
            else:
                self.tables.append(_Table())
        elif name == "tr" and self._is_in_table():
            self.tables[-1].rows.append([])
        elif name in ("td", "th") and self._is_in_table():
            columns = _whole(attributes.get("colspan"), 1)
            rows = _whole(attributes.get("rowspan"), 1)
            self.tables[-1].around.append((self.out, columns, rows))
            self.out = []
        elif "line-through" in attributes.get("style", "") and name in _INLINE:
            self._write(element, "del")
        elif name in ("p", "div") and parent.name == "li":
            if self.out and not self.out[-1].startswith(("<li>", "\ue000")):
                self.out.append("<br>")
        elif name not in _INLINE:
            self._write(element, _WRITTEN.get(name, "div"))
            if name in ("h1", "h2", "h3", "h4", "h5", "h6", "pre"):
                self._mark_layout()
        if name == "ol":
            element.step = -1 if "reversed" in attributes else 1
            element.number = _whole(attributes.get("start"), 1)
        elif name == "li" and parent.name == "ol" and element.end:
            parent.number = _whole(attributes.get("value"), parent.number)
            self.out.append(f"\ue000{parent.number}\ue001 ")
            parent.number += parent.step

    def _close(self) -> None:
        element = self.open.pop()
        if element.end:
            self.out.append(element.end)
            self.written -= 1
        if element.name in _SCRIPTS:
            self.script = ""
            self.after_script = True
        elif element.name == "table" and self.flat_tables:
            self.flat_tables -= 1
        elif element.name == "table":
            self._write_table(self.tables.pop())
        elif element.name in ("td", "th") and self._is_in_table():
            table = self.tables[-1]
            cell = "".join(self.out)
            self.out, columns, rows = table.around.pop()
            table.rows = table.rows or [[]]
            table.rows[-1].append(_Cell(cell, columns, rows))

    def _write(self, element: _Element, name: str) -> None:
        if self.written >= _DEEPEST_WRITTEN:
            self.out.append(" ")
            return
        self.written += 1
        self.out.append(f"<{name}>")
        element.end = f"</{name}>"

    def _is_in_table(self) -> bool:
        return bool(self.tables) and not self.flat_tables

    def _mark_layout(self) -> None:
        for table in self.tables:
            table.is_layout = True

    def _write_table(self, table: _Table) -> None:
        """Write a table with a text in each place; one that only arranges a page, as the texts of its cells."""
        width = max((len(row) for row in table.rows), default=0)
        if table.is_layout or width == 1:
            self.out += [f"<div>{cell.html}</div>" for row in table.rows for cell in row]
            return
        rows = self._grid(table.rows)
        width = max((len(row) for row in rows), default=0)
        self.spare -= sum(3 * (width - len(row)) for row in rows)  # the converter fills short rows
        if width > _WIDEST_TABLE or self.spare < 0:
            self.out += [f"<div>{' | '.join(row)}</div>" for row in rows]
            return
        lines = ("".join(f"<td>{cell}</td>" for cell in row) for row in rows)
        self.out += ["<table>", *(f"<tr>{line}</tr>" for line in lines), "</table>"]

    def _grid(self, rows: list[list[_Cell]]) -> list[list[str]]:
        """Return the texts of a table's rows; a cell that spans several places is in each, as far as `spare` goes."""
        below: dict[
            int, tuple[str, int]
        ] = {}  # column -> text of a cell above, rows it still spans
        grid: list[list[str]] = []
        for row in rows:
            line: list[str] = []
            cells = iter(row)
            while True:
                text, left = below.pop(len(line), ("", 0))
                if left:
                    columns = 1
                else:
                    cell = next(cells, None)
                    if cell is None:
                        break
                    text = cell.html
                    columns = min(cell.columns, _WIDEST_TABLE)
                    left = cell.rows
                for place in range(columns):
                    if place or left > 1:
                        self.spare -= len(text) + 9
                    if place and self.spare < 0:
                        break
                    if left > 1 and self.spare > 0:
                        below[len(line)] = (text, left - 1)
                    line.append(text)
            grid.append(line)
        return [line for line in grid if line]


def _shown_value(attributes: Mapping[str, str]) -> str:
    """Return the text of an input field: its value, or the state of a tick box."""
    kind = attributes.get("type", "text").lower()
    if kind in ("checkbox", "radio"):
        return "[x] " if "checked" in attributes else "[ ] "
    hidden = ("hidden", "password", "submit", "button", "image", "reset", "file")
    return "" if kind in hidden else attributes.get("value", "")


def _whole(text: str | None, default: int) -> int:
    """Return a whole number of up to five digits, or the default."""
    return int(text) if text and re.fullmatch(r"-?[0-9]{1,5}", text.strip()) else default


def _unseen(name: str, attributes: Mapping[str, str]) -> bool:
    """Return True if a browser hides the tag, or shows it only for navigation."""
    style = attributes.get("style", "").replace(" ", "").lower()
    return (
        name in _UNSEEN
        or "hidden" in attributes
        or attributes.get("aria-hidden") == "true"
        or attributes.get("role") == "navigation"
        or "display:none" in style
    )
