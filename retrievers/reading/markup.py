"""HTML and reStructuredText as Markdown: headings stay headings, everything else stays readable text.

html-to-markdown drops deeply nested text, spanned cells, numbers of list items and values of fields, so a page's tree
is mended before: for HTML, and for what becomes HTML (Word, PowerPoint, EPUB).
"""

from __future__ import annotations

import copy
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cachecraft_rag.retrievers.reading.tables import FormatError
from cachecraft_rag.types.documents import Scalar


def rst_to_markdown(text: str) -> str:
    """Return reStructuredText with its underlined titles as `#` lines; the rest is unchanged.

    Levels follow the order in which styles of underline (and overline) first appear, as in docutils, up to six. A line
    that Markdown would take for a heading or a fence begins with a backslash.

    >>> print(rst_to_markdown("Kettle\\n======\\n\\nCare\\n----\\nRinse it."))
    # Kettle
    <BLANKLINE>
    ## Care
    Rinse it.
    """
    rule = re.compile(r"([!-/:-@\[-`{-~])\1{2,}")
    lines = ["", *text.split("\n"), "", ""]
    styles: list[tuple[str, bool]] = []
    out: list[str] = []
    at = 1
    while at < len(lines) - 2:
        before, first, second, third = (line.rstrip() for line in lines[at - 1 : at + 3])
        over = bool(rule.fullmatch(first)) and first == third
        title, under = (second, third) if over else (first, second)
        is_title = title != "" and rule.fullmatch(under) and not rule.fullmatch(title)
        if (
            is_title
            and len(under) >= len(title.strip())
            and (over or not title[0].isspace())
            and not before
        ):
            style = (under[0], over)
            styles += [style] if style not in styles else []
            out.append(f"{'#' * min(6, styles.index(style) + 1)} {title.strip()}")
            at += 2 + over
        else:
            out.append(re.sub(r"^(?=#{1,6}(\s|$)|```|~~~)", r"\\", lines[at]))
            at += 1
    return "\n".join(out)


_UNSEEN = "head,title,script,style,nav,template,noscript,svg,iframe,object,annotation"
_PLAIN = "a,abbr,b,big,cite,code,em,font,i,img,ins,kbd,mark,q,samp,small,strong,tt,u,var"
_ORDINALS = frozenset(("st", "nd", "rd", "th", "e", "er", "re", "ª", "º"))  # 1<sup>st</sup> is 1st
_ATTRIBUTES = "hidden,style,start,value,reversed,colspan,rowspan,type,checked,selected"
_VALUELESS = ("hidden", "password", "submit", "button", "image", "reset", "file")

_DEEPEST_KEPT = 100  # levels of elements; the text of deeper ones stays
# lxml searches all open elements for each closing tag that fits none of them. So the more closing tags a page has, the
# less deep it may be nested, but never less than real pages are.
_DEEP = 500  # levels
_CLOSING_STEPS = (
    1_000_000_000  # levels times closing tags: two seconds on one thread of an `epyc-zen4`
)
_PIECE = 1 << 14  # bytes; lxml raises an exception of its target only at the end of a piece
_WIDEST_TABLE = 200  # columns; wider ones become lines


class Reading(NamedTuple):
    """The text of a file, the document's metadata, and a phrase for each thing that was left out."""

    text: str
    metadata: dict[str, Scalar]
    losses: Sequence[str] = ()


def html_to_markdown(html: str) -> Reading:
    """Return the visible text of a page as Markdown, with the words of its first <title>.

    Hidden parts, scripts and navigation are left out, and so are emphasis and the targets of links. Raises FormatError
    for a page whose tags are nested so deep that parsing would take minutes.

    >>> html_to_markdown("<title>K2</title><h1>Kettle</h1><nav>Home</nav><p>45<sup>1</sup> <s>euros</s>.</p>")
    Reading(text='# Kettle\\n\\n45^1 ~~euros~~.', metadata={'format': 'markdown', 'title': 'K2'}, losses=())
    """
    from html_to_markdown import ConversionOptions, convert
    from lxml import etree

    target = _ShallowTree(etree.TreeBuilder(), closing_tags=html.count("</"))
    # huge_tree: otherwise libxml2 drops text nested deeper than 2,048 tags
    parser = etree.HTMLParser(target=target, huge_tree=True, encoding="utf-8")
    # The parser reads an XML prologue as a comment, but would use its encoding.
    data = re.sub(r"\A\s*<\?xml[^>]*\?>", "", html).encode("utf-8", "replace")
    for start in range(0, len(data), _PIECE):
        parser.feed(data[start : start + _PIECE])
    try:
        root = parser.close()
    except etree.XMLSyntaxError:  # "no element found": only comments and unfinished tags
        return Reading("", {"format": "markdown"})
    _mend_text(root)
    _mend_lists(root)
    _mend_tables(root, spare=len(html) + 1000)
    options = ConversionOptions(
        compact_tables=True,
        bullets="-",
        extract_metadata=False,
        exclude_selectors=_UNSEEN.split(","),
        strip_tags=_PLAIN.split(","),
    )
    text = convert(etree.tostring(root, encoding="unicode", method="html"), options).content or ""
    text = re.sub("- \ue000(-?\\d+)\ue001 ?", r"\1. ", text)
    text = re.sub(r"(?<=\S)  $", "", text, flags=re.MULTILINE).strip("\n")
    titles = (" ".join("".join(title.itertext()).split()) for title in root.iter("title"))
    return Reading(text, {"format": "markdown", "title": next(titles, "")})


class _ShallowTree:
    """A parser target of lxml: builds a tree of some levels, of which deeper elements give only their text."""

    def __init__(self, builder: Any, *, closing_tags: int) -> None:
        self._builder = builder
        self._deepest = max(_DEEP, _CLOSING_STEPS // max(1, closing_tags))
        self._depth = 0

    def start(self, name: str, attributes: Mapping[str, str]) -> None:
        """Take an opening tag. Raises FormatError if it is nested too deep."""
        self._depth += 1
        if self._depth > self._deepest:
            raise FormatError(
                f"cannot be read: its tags are nested more than {self._deepest} deep; simplify the page"
            )
        if self._depth > _DEEPEST_KEPT:
            self._builder.data(" ")
            return
        kept = {key: _xml(attributes[key]) for key in _ATTRIBUTES.split(",") if key in attributes}
        is_hidden = (
            attributes.get("aria-hidden") == "true"
            or attributes.get("role") == "navigation"
            or "display:none" in attributes.get("style", "").replace(" ", "").lower()
        )
        self._builder.start(_xml_name(name), {"hidden": ""} if is_hidden else kept)

    def end(self, name: str) -> None:
        """Take a closing tag, which the parser adds if the page lacks it."""
        if self._depth <= _DEEPEST_KEPT:
            self._builder.end(_xml_name(name))
        self._depth -= 1

    def data(self, text: str) -> None:
        """Take text between tags, with its references resolved."""
        self._builder.data(_xml(text))

    def close(self) -> Any:
        """Return the root of the tree; None after an exception, which lxml then raises."""
        return None if self._depth else self._builder.close()


def _xml(text: str) -> str:
    """Return a text without what a tree cannot hold, and without our own marks of list numbers."""
    return re.sub("[^\t\n\r -\ud7ff\ue002-\ufffd\U00010000-\U0010ffff]", " ", text)


def _xml_name(name: str) -> str:
    return name if re.fullmatch(r"[a-z][\w.-]*", name, re.ASCII | re.IGNORECASE) else "span"


def _mend_text(root: Any) -> None:
    """Write out superscripts, struck-out text and the values of form fields."""
    for script in root.iter("sup", "sub"):
        text = (script.text or "").lstrip()
        if "".join(script.itertext()).strip() not in _ORDINALS:
            script.text = f"{'^' if script.tag == 'sup' else '_'}{text}"
        if (script.tail or "")[:1].isalnum():
            script.tail = f" {script.tail}"  # 2<sup>3</sup>4 is no 2^34
        script.tag = "span"
    for struck in root.xpath("//*[contains(@style, 'line-through')]"):
        for element in list(struck.iter("td", "th", "li")) or [struck]:
            inner = element.makeelement("del")
            inner.text = element.text
            inner.extend(list(element))
            element.text = None
            element.append(inner)
    for option in root.xpath("//select//option[not(@selected)]"):
        option.text = None
    for field in root.iter("input"):
        kind = field.get("type", "text").lower()
        if kind in ("checkbox", "radio"):
            field.text = "[x] " if "checked" in field.attrib else "[ ] "
        elif kind not in _VALUELESS:
            field.text = field.get("value")
        field.tag = "span"


def _mend_lists(root: Any) -> None:
    """Mark the items of ordered lists with their numbers, and keep the paragraphs of an item in its line."""
    for part in root.xpath("//li/p|//li/div[not(.//div|.//p|.//ul|.//ol|.//table)]"):
        if part.getprevious() is not None or (part.getparent().text or "").strip():
            part.addprevious(part.makeelement("br"))
        part.tag = "span"
    for ordered in root.iter("ol"):
        step = -1 if "reversed" in ordered.attrib else 1
        number = _whole(ordered.get("start"))
        for item in ordered.iterchildren("li"):
            number = _whole(item.get("value"), number)
            item.text = f"\ue000{number}\ue001 {(item.text or '').lstrip()}"
            number += step
        ordered.tag = "ul"


def _mend_tables(root: Any, *, spare: int) -> None:
    """Give each table a text in each place, or make it lines; `spare` characters may be added.

    A table whose cells hold headings or tables only arranges a page: its cells become paragraphs.
    """
    for table in list(root.iter("table")):
        parts = [
            part
            for part in table.iter("thead", "tbody", "tfoot", "tr", "td", "th")
            if next(part.iterancestors("table")) is table
        ]
        rows = [part for part in parts if part.tag == "tr"]
        cells = [part for part in parts if part.tag in ("td", "th")]
        is_grid = all(cell.getparent().tag == "tr" for cell in cells) and len(cells) > len(rows)
        if not is_grid or table.xpath(".//table|.//h1|.//h2|.//h3|.//h4|.//h5|.//h6|.//pre"):
            for part in [table, *parts]:
                part.tag = "div"
            continue
        spare = _fill_spans(rows, spare)
        width = max(len(row) for row in rows)
        spare -= sum(3 * (width - len(row)) for row in rows)  # the converter fills short rows
        if width > _WIDEST_TABLE or spare < 0:
            table.tag = "div"
            for row in rows:
                row.tag = "div"
                for cell in row:
                    cell.tag = "span"
                    cell.tail = " | " if cell.getnext() is not None else None


def _fill_spans(rows: list[Any], spare: int) -> int:
    """Repeat each cell that spans several places in all of them, as far as `spare` goes; return what is left of it."""
    above: dict[int, tuple[Any, int]] = {}  # column -> a cell above, rows it still spans
    for row in rows:
        line: list[Any] = []
        cells = deque(row)
        while cells or len(line) in above:
            if len(line) in above:
                source, rows_left = above.pop(len(line))
                columns = 1
            else:
                source = cells.popleft()
                rows_left = _whole(source.attrib.pop("rowspan", None))
                columns = min(_whole(source.attrib.pop("colspan", None)), _WIDEST_TABLE)
            length = sum(map(len, source.itertext())) + 9 if columns > 1 or rows_left > 1 else 0
            for place in range(max(1, columns)):
                is_again = place > 0 or source.getparent() is not row
                spare -= length if is_again else 0
                if is_again and spare < 0:
                    break
                if rows_left > 1:
                    above[len(line)] = (source, rows_left - 1)
                line.append(copy.deepcopy(source) if is_again else source)
        row[:] = line
    return spare


def _whole(text: str | None, default: int = 1) -> int:
    """Return a whole number of up to five digits, or the default."""
    return int(text) if text and re.fullmatch(r"-?[0-9]{1,5}", text.strip()) else default
