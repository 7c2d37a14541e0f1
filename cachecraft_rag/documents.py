"""Read files and folders of text, Markdown, reStructuredText, HTML and PDF into documents.

What comes out is Markdown where the source has headings (Markdown, reStructuredText, HTML) and plain text where it has
none (.txt, PDF); `metadata["format"]` says which, and the splitter goes by it. Line ends become line feeds, so that the
same text saved on two systems gives the same chunks. In a PDF a form feed stands between pages.

Encodings, in order: a byte order mark, the character set an HTML page declares, UTF-8, and last Windows-1252, noted in
`metadata["encoding"]`. One bad file never loses the rest of a folder: it becomes a `Problem` beside the documents.
"""

from __future__ import annotations

import codecs
import io
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cachecraft_rag.errors import DocumentError
from cachecraft_rag.types import Document, Scalar

if TYPE_CHECKING:
    from bs4 import BeautifulSoup, Tag

SUFFIXES = (".txt", ".md", ".markdown", ".rst", ".html", ".htm", ".pdf")

# UTF-32 before UTF-16: the little-endian mark of the first begins with that of the second.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to read and the `doc_id` its document will have: the POSIX path below the folder that was listed."""

    path: Path
    doc_id: str


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a file or folder gave no document.

    kind  `unsupported`: not a kind of file this module reads; `inaccessible`: it is there but cannot be opened, so
          nothing is known of its content; `unreadable`: its content was seen and holds no text that can be read
    """

    doc_id: str
    kind: Literal["unsupported", "inaccessible", "unreadable"]
    reason: str


@dataclass(frozen=True, slots=True)
class Listing:
    """The readable files of a folder, sorted by `doc_id`, and what was passed over."""

    files: tuple[SourceFile, ...]
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """The documents of a folder, sorted by `doc_id`, and a problem for each file that gave none."""

    documents: tuple[Document, ...]
    problems: tuple[Problem, ...]


def list_files(path: str | os.PathLike[str]) -> Listing:
    """The files to read at `path`: the file itself, or every file below the folder whose suffix is in `SUFFIXES`.

    Names that begin with a dot are passed over silently, other kinds of file with a problem. Links are followed; each
    folder is entered once, under its own name rather than a link's, so loops end. Raises `DocumentError` where nothing
    is there.
    """
    root = Path(path)
    if root.is_file():
        if root.suffix.lower() not in SUFFIXES:
            raise DocumentError(_unsupported(root))
        return Listing((SourceFile(root, printable(root.name)),), ())
    if not root.is_dir():
        raise DocumentError(f"{root}: there is no such file or folder; check the spelling")
    files, problems = _walk(root)
    return Listing(
        tuple(sorted(files, key=lambda file: file.doc_id)), tuple(sorted(problems, key=lambda problem: problem.doc_id))
    )


def read_document(file: SourceFile | str | os.PathLike[str]) -> Document:
    """The document of one file. Raises `DocumentError`, which names the file and says what to do."""
    source = file if isinstance(file, SourceFile) else SourceFile(Path(file), printable(Path(file).name))
    try:
        data = source.path.read_bytes()
    except OSError as error:
        raise DocumentError(inaccessible(source.path, error)) from error
    return parse_document(source, data)


def read_documents(path: str | os.PathLike[str]) -> Reading:
    """Every document at `path`, a file or a folder (see `list_files`), and the problems of the others."""
    listing = list_files(path)
    documents: list[Document] = []
    problems = list(listing.problems)
    for file in listing.files:
        try:
            documents.append(read_document(file))
        except DocumentError as error:
            kind: Literal["inaccessible", "unreadable"] = (
                "inaccessible" if isinstance(error.__cause__, OSError) else "unreadable"
            )
            problems.append(Problem(file.doc_id, kind, str(error)))
    return Reading(tuple(documents), tuple(sorted(problems, key=lambda problem: problem.doc_id)))


def parse_document(file: SourceFile, data: bytes) -> Document:
    """The document that the bytes of a file hold. Raises `DocumentError` where they hold no text that can be read."""
    parsers: dict[str, Callable[[Path, bytes], tuple[str, dict[str, Scalar]]]] = {
        ".txt": _parse_text,
        ".md": _parse_markdown,
        ".markdown": _parse_markdown,
        ".rst": _parse_rst,
        ".html": _parse_html,
        ".htm": _parse_html,
        ".pdf": _parse_pdf,
    }
    parser = parsers.get(file.path.suffix.lower())
    if parser is None:
        raise DocumentError(_unsupported(file.path))
    text, metadata = parser(file.path, data)
    text = _clean(text)
    if not text.strip():
        advice = (
            "if it is a scan, run OCR first (for example ocrmypdf)" if "pages" in metadata else "add some or remove it"
        )
        raise DocumentError(f"{file.path}: holds no text; {advice}")
    return Document(file.doc_id, text, metadata)


def inaccessible(path: Path, error: OSError) -> str:
    """The message for a file or folder that is there but cannot be opened."""
    return f"{path}: cannot be opened ({error.strerror or error}); check its permissions and the disk"


def _unsupported(path: Path) -> str:
    kinds = ", ".join(SUFFIXES)
    return f"{path}: not a kind of file that can be indexed; convert it to one of {kinds}, or leave it out"


def printable(name: str) -> str:
    """A file name as valid Unicode: bytes that are not UTF-8 become `\\xNN`, because a database refuses them raw."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _walk(root: Path) -> tuple[list[SourceFile], list[Problem]]:
    """Files and problems below `root`, in no order. Links to folders wait until every real folder has been entered."""
    files: list[SourceFile] = []
    problems: list[Problem] = []
    entered: set[Path] = set()
    real_root = root.resolve()
    folders: list[tuple[Path, str]] = [(root, "")]
    links: list[tuple[Path, str]] = []
    while folders or links:
        folder, below = folders.pop() if folders else links.pop(0)
        real = folder.resolve()
        # A link to a folder that holds the root would bring in the root's neighbours: as much a loop as one below it.
        if real in entered or (real != real_root and real in real_root.parents):
            continue
        entered.add(real)
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            problems.append(Problem(below, "inaccessible", inaccessible(folder, error)))
            continue
        for entry in entries:
            if entry.name.startswith("."):
                continue
            path, doc_id = Path(entry.path), f"{below}/{printable(entry.name)}".lstrip("/")
            try:
                if entry.is_dir():
                    (links if entry.is_symlink() else folders).append((path, doc_id))
                elif entry.is_file() and path.suffix.lower() in SUFFIXES:
                    files.append(SourceFile(path, doc_id))
                elif entry.is_file():
                    problems.append(Problem(doc_id, "unsupported", _unsupported(path)))
                elif entry.is_symlink():
                    problems.append(
                        Problem(doc_id, "unsupported", f"{path}: a link that leads nowhere; mend or remove it")
                    )
            except OSError as error:
                problems.append(Problem(doc_id, "inaccessible", inaccessible(path, error)))
    return files, problems


def _clean(text: str) -> str:
    """Line ends as line feeds, no NUL, no lone surrogates: neither SQLite nor a tokenizer takes those."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "")
    return re.sub("[\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", text)


def _decode(path: Path, data: bytes, declared: str | None = None) -> tuple[str, dict[str, Scalar]]:
    """The text of some bytes, and `encoding` as metadata where it is not UTF-8."""
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            text = data[len(mark) :].decode(encoding, "replace")
            return text, {} if encoding == "utf-8" else {"encoding": encoding}
    if b"\0" in data:
        raise DocumentError(f"{path}: is not text (it holds NUL bytes); save it as UTF-8 text or leave it out")
    if declared is not None and declared.lower() not in ("utf-8", "utf8"):
        try:
            return data.decode(declared), {"encoding": declared.lower()}
        except (LookupError, UnicodeDecodeError):
            pass  # the declaration is wrong, as so often; go on as if there were none
    try:
        return data.decode("utf-8"), {}
    except UnicodeDecodeError:
        # Windows-1252 and not a guess by statistics: the same file must give the same text on every machine.
        return data.decode("cp1252", "replace"), {"encoding": "cp1252"}


def _parse_text(path: Path, data: bytes) -> tuple[str, dict[str, Scalar]]:
    text, metadata = _decode(path, data)
    return text, {"format": "text", **metadata}


def _parse_markdown(path: Path, data: bytes) -> tuple[str, dict[str, Scalar]]:
    text, metadata = _decode(path, data)
    return text, {"format": "markdown", **metadata}


def _parse_rst(path: Path, data: bytes) -> tuple[str, dict[str, Scalar]]:
    text, metadata = _decode(path, data)
    return _rst_to_markdown(_clean(text)), {"format": "markdown", **metadata}


def _rst_to_markdown(text: str) -> str:
    """reStructuredText with its underlined titles as `#` lines; all else stays as written.

    A level is the order in which a style of underline (and overline) first appears, as docutils has it.

    >>> print(_rst_to_markdown("Kettle\\n======\\n\\nCare\\n----\\nRinse it."))
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


def _parse_html(path: Path, data: bytes) -> tuple[str, dict[str, Scalar]]:
    from bs4 import BeautifulSoup
    from bs4.dammit import EncodingDetector

    declared = EncodingDetector.find_declared_encoding(data, is_html=True)
    html, metadata = _decode(path, data, declared)
    # Beautiful Soup warns about XML prologues and about text without a tag, which could be a file name.
    html = re.sub(r"\A\s*<\?xml[^>]*\?>", "", html)
    soup = BeautifulSoup(html if "<" in html else f"<p>{html}</p>", "html.parser")
    if soup.title is not None and soup.title.get_text().strip():
        metadata["title"] = " ".join(soup.title.get_text().split())
    return _HtmlRenderer().render(soup), {"format": "markdown", **metadata}


_UNSEEN = frozenset(("head", "script", "style", "nav", "template", "noscript", "svg", "iframe", "object", "select"))
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


def _parse_pdf(path: Path, data: bytes) -> tuple[str, dict[str, Scalar]]:
    from pypdf import PasswordType, PdfReader

    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and reader.decrypt("") == PasswordType.NOT_DECRYPTED:
            raise DocumentError(f"{path}: is locked with a password; save a copy without one")
        pages = [page.extract_text() for page in reader.pages]
    except DocumentError:
        raise
    except Exception as error:  # whatever the parser tripped over, from KeyError to RecursionError
        advice = "open it in a viewer and save or print it to PDF anew"
        raise DocumentError(f"{path}: is damaged or locked ({type(error).__name__}: {error}); {advice}") from error
    return "\f".join(page.replace("\f", "\n") for page in pages), {"format": "text", "pages": len(pages)}
