"""HTML and reStructuredText as Markdown: headings stay headings, everything else stays readable text."""

from __future__ import annotations

import re
from collections.abc import Mapping


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

    Hidden parts, scripts and navigation are left out. Both are "" for an empty page and for one of comments alone. Half
    a surrogate pair is read as "?". Raises `MarkupError` for a page whose tags are nested so deep that parsing would
    take minutes.

    >>> html_to_markdown("<title>K2</title><h1>Kettle</h1><nav>Home</nav><p>Rinse <b>it</b>.</p>")
    ('# Kettle\\n\\nRinse it.', 'K2')
    """
    from lxml import etree

    page = _HtmlRenderer(closing_tags=html.count("</"))
    # huge_tree: otherwise libxml2 drops text nested deeper than 2,048 tags; the renderer has its own limit.
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
    return page.text(), page.title()


_UNSEEN = frozenset(
    (
        "head",
        "title",
        "script",
        "style",
        "nav",
        "template",
        "noscript",
        "svg",
        "iframe",
        "object",
        "select",
    )
)
_HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}
_DEEPEST_LIST = 20
_INLINE = frozenset(
    (
        "a",
        "abbr",
        "acronym",
        "b",
        "bdi",
        "bdo",
        "big",
        "button",
        "cite",
        "code",
        "data",
        "del",
        "dfn",
        "em",
        "font",
        "i",
        "img",
        "input",
        "ins",
        "kbd",
        "label",
        "mark",
        "meter",
        "q",
        "rp",
        "rt",
        "ruby",
        "s",
        "samp",
        "small",
        "span",
        "strike",
        "strong",
        "sub",
        "sup",
        "time",
        "tt",
        "u",
        "var",
        "wbr",
    )
)


# lxml handles a closing tag in time proportional to its depth. Real pages stay far below both limits.
_PIECE = 1 << 14  # bytes; lxml reports an exception of the renderer only at the end of a piece
_DEEP = 500  # levels that are always allowed
_CLOSING_STEPS = 200_000_000  # depth times closing tags; about a second


class _HtmlRenderer:
    """Turns a page into Markdown: headings, paragraphs, list items, table rows and preformatted blocks.

    A parser target of lxml: the parser calls it for each tag and text, and no tree is built. `closing_tags` is the
    number of closing tags on the page.
    """

    def __init__(self, *, closing_tags: int = 0) -> None:
        self.out: list[str] = []
        self.last = ""  # kind of the last block
        self.line: list[str] = []
        # kept, because joining `line` at each cell is quadratic in a row's cells
        self.line_has_text = False
        self.prefix = ""  # of the block that is being gathered
        self.pre = 0  # depth of <pre>
        self.lists = 0  # depth of lists
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
        if _unseen(name, attributes):
            self.unseen = self.depth
        else:
            self._open(name)

    def end(self, name: str) -> None:
        """Take a closing tag, which the parser adds if the page lacks it."""
        self.in_title = self.in_title and name != "title"
        self.depth -= 1
        if not self.unseen:
            self._close(name)
        elif self.depth < self.unseen:
            self.unseen = 0

    def data(self, text: str) -> None:
        """Take text between tags, with its references resolved."""
        if self.in_title:
            self.title_text.append(text)
        if not self.unseen:
            self.line.append(text if self.pre else re.sub(r"\s+", " ", text))
            self.line_has_text = self.line_has_text or bool(text.strip())

    def close(self) -> None:
        """Take the end of the page."""
        self._flush()

    def text(self) -> str:
        """Return the visible text."""
        return "".join(self.out)

    def title(self) -> str:
        """Return the words of the page's title."""
        return " ".join("".join(self.title_text).split())

    def _open(self, name: str) -> None:
        if name == "br":
            self.line.append("\n")
        elif name in ("td", "th"):
            if self.line_has_text:
                self.line.append(" | ")
        elif name not in _INLINE:
            # a list item's own paragraph keeps the dash
            if not (name in ("p", "div") and self.prefix.strip() == "-"):
                self._flush()
            self.pre += name == "pre"
            self.lists += name in ("ul", "ol")
            if name in _HEADINGS:
                self.prefix = _HEADINGS[name]
            elif name == "li":
                # Bounded: items of a list nested a thousand deep would begin with two thousand spaces.
                self.prefix = "  " * min(_DEEPEST_LIST, max(0, self.lists - 1)) + "- "

    def _close(self, name: str) -> None:
        if name in _INLINE or name in ("br", "td", "th"):
            return
        self._flush()
        self.pre -= name == "pre"
        self.lists -= name in ("ul", "ol")

    def _flush(self) -> None:
        """End the current block."""
        raw = "".join(self.line)
        prefix = self.prefix
        self.line = []
        self.line_has_text = False
        self.prefix = ""
        if not raw.strip():
            return
        if self.pre:
            fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", raw)), default=0))
            body = raw.strip("\n")
            self._block(f"{fence}\n{body}\n{fence}")
        elif prefix.startswith("#"):
            self._block(prefix + " ".join(raw.split()))
        else:
            lines = [_escape(" ".join(line.split())) for line in raw.split("\n")]
            lines = [line for line in lines if line]
            kind = "item" if prefix else "row" if " | " in raw else ""
            self._block(prefix + ("\n" + " " * len(prefix)).join(lines), kind)

    def _block(self, text: str, kind: str = "") -> None:
        """Write a block after a blank line, or after a line end if it continues a list or a table."""
        if self.out:
            self.out.append("\n" if kind and kind == self.last else "\n\n")
        self.out.append(text)
        self.last = kind


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
