"""HTML and reStructuredText as Markdown: headings stay headings, and all else stays readable text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bs4 import BeautifulSoup, Tag


def rst_to_markdown(text: str) -> str:
    """reStructuredText with its underlined titles as `#` lines; all else stays as written.

    A level is the order in which a style of underline (and overline) first appears, as docutils has it.

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
        line, after = lines[at], lines[at + 1]
        over = bool(rule.match(line)) and at + 2 < len(lines) and lines[at + 2].rstrip() == line.rstrip()
        title, under = (after, lines[at + 2]) if over else (line, after)
        is_title = bool(rule.match(under)) and bool(title.strip()) and not rule.match(title)
        is_title = is_title and len(under.rstrip()) >= len(title.strip()) and (over or not title[0].isspace())
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
    """A line of other text so that Markdown does not take it for a heading or a fence."""
    return re.sub(r"^(?=#{1,6}(\s|$)|```|~~~)", r"\\", line)


def html_to_markdown(html: str) -> tuple[str, str]:
    """The visible text of a page and its title ("" where it has none).

    >>> html_to_markdown("<title>K2</title><h1>Kettle</h1><nav>Home</nav><p>Rinse <b>it</b>.</p>")
    ('# Kettle\\n\\nRinse it.', 'K2')
    """
    from bs4 import BeautifulSoup

    # Beautiful Soup warns about XML prologues and about text without a tag, which could be a file name.
    html = re.sub(r"\A\s*<\?xml[^>]*\?>", "", html)
    soup = BeautifulSoup(html if "<" in html else f"<p>{html}</p>", "html.parser")
    title = " ".join(soup.title.get_text().split()) if soup.title is not None else ""
    return _HtmlRenderer().render(soup), title


_UNSEEN = frozenset((
    "head", "title", "script", "style", "nav", "template", "noscript", "svg", "iframe", "object", "select",
))  # fmt: skip
_HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}
_INLINE = frozenset((
    "a", "abbr", "acronym", "b", "bdi", "bdo", "big", "button", "cite", "code", "data", "del", "dfn", "em", "font",
    "i", "img", "input", "ins", "kbd", "label", "mark", "meter", "q", "rp", "rt", "ruby", "s", "samp", "small",
    "span", "strike", "strong", "sub", "sup", "time", "tt", "u", "var", "wbr",
))  # fmt: skip


class _HtmlRenderer:
    """Turns a parsed page into Markdown: headings, paragraphs, list items, table rows and preformatted blocks."""

    def __init__(self) -> None:
        self.out: list[str] = []
        self.last = ""  # kind of the last block
        self.line: list[str] = []
        self.prefix = ""  # of the block that is being gathered
        self.pre = 0  # depth of <pre>
        self.lists = 0  # depth of lists

    def render(self, soup: BeautifulSoup) -> str:
        """The visible text of the page."""
        from bs4 import Tag

        for event, node in _html_events(soup):
            if not isinstance(node, Tag):
                self.line.append(str(node) if self.pre else re.sub(r"\s+", " ", str(node)))
            elif event == "open":
                self._open(node.name)
            else:
                self._close(node.name)
        self._flush()
        return "".join(self.out)

    def _open(self, name: str) -> None:
        if name == "br":
            self.line.append("\n")
        elif name in ("td", "th"):
            if "".join(self.line).strip():
                self.line.append(" | ")
        elif name not in _INLINE:
            if not (name in ("p", "div") and self.prefix.strip() == "-"):  # a list item's own paragraph keeps the dash
                self._flush()
            self.pre += name == "pre"
            self.lists += name in ("ul", "ol")
            if name in _HEADINGS:
                self.prefix = _HEADINGS[name]
            elif name == "li":
                self.prefix = "  " * max(0, self.lists - 1) + "- "

    def _close(self, name: str) -> None:
        if name in _INLINE or name in ("br", "td", "th"):
            return
        self._flush()
        self.pre -= name == "pre"
        self.lists -= name in ("ul", "ol")

    def _flush(self) -> None:
        """End the current block."""
        raw, prefix = "".join(self.line), self.prefix
        self.line, self.prefix = [], ""
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
        """Write a block behind a blank line; the next item of a list or row of a table behind a line end only."""
        if self.out:
            self.out.append("\n" if kind and kind == self.last else "\n\n")
        self.out.append(text)
        self.last = kind


def _html_events(soup: BeautifulSoup) -> Iterator[tuple[str, object]]:
    """`open` and `close` of every visible tag and its text, in order.

    A stack of our own and not recursion: pages nest deeper than Python lets functions nest.
    """
    from bs4 import Tag
    from bs4.element import NavigableString

    stack: list[tuple[str, object]] = [("open", soup)]
    while stack:
        event, node = stack.pop()
        if isinstance(node, Tag):
            if event == "open" and _unseen(node):
                continue
            yield event, node
            if event == "open":
                stack.append(("close", node))
                stack.extend(("open", child) for child in reversed(node.contents))
        elif type(node) is NavigableString:  # its subclasses are comments, scripts and declarations
            yield event, node


def _unseen(tag: Tag) -> bool:
    """Whether a browser would not show the tag, or shows it only to move about the site."""
    style = str(tag.get("style", "")).replace(" ", "").lower()
    return (
        tag.name in _UNSEEN
        or tag.has_attr("hidden")
        or tag.get("aria-hidden") == "true"
        or tag.get("role") == "navigation"
        or "display:none" in style
    )
