"""Read files and folders into documents: text, Markdown, reStructuredText, HTML, PDF, Office, EPUB, tables and JSON.

The text is plain for .txt, PDF, tables and JSON, and Markdown for all that may have headings; the splitter goes by
`metadata["format"]`. Line ends become line feeds, so that the same text saved on two systems gives the same chunks. In
a PDF a form feed is between pages. Ligatures become their letters.

Encodings, in order: a byte order mark, the character set an HTML page declares, UTF-8 (with U+FFFD for a bad byte or
two), and last Windows-1252, noted in `metadata["encoding"]`. One bad file never loses the rest of a folder: it becomes
a `Problem` beside the documents.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from cachecraft_rag.errors import CacheCraftError, DocumentError
from cachecraft_rag.retrievers.reading.markup import MarkupError, html_to_markdown, rst_to_markdown
from cachecraft_rag.retrievers.reading.office import (
    MissingReaderError,
    docx_to_markdown,
    epub_to_markdown,
    pptx_to_markdown,
    xlsx_to_markdown,
)
from cachecraft_rag.retrievers.reading.pdf import pdf_pages
from cachecraft_rag.retrievers.reading.tables import FormatError, json_to_text, table_to_text
from cachecraft_rag.types.documents import Document, Scalar

Opener = Callable[[str, int], int]  # as for Python's `open`
LARGEST_FILE = 256 << 20  # bytes; a text of this size would be a million chunks
_LONGEST_TITLE = 200  # characters; each chunk has a copy
_LONGEST_REASON = 300  # characters of a parser's message, which may quote half the document

# UTF-32 before UTF-16: the little-endian mark of the first begins with that of the second.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)

# Encodings that a page may declare, by Python's names. Not all that Python knows: its "undefined" raises, "punycode"
# is not for pages. A page in UTF-16 could not be read far enough to find the declaration, so the HTML standard takes
# "utf-16" for UTF-8. It also takes Latin-1 and ASCII for Windows-1252.
_PAGE_CODECS = re.compile(
    r"iso8859-\d+|cp(866|874|932|949|125\d)|koi8-[ru]|mac-(roman|cyrillic)|gb2312|gbk|gb18030|big5(hkscs)?|euc_(jp|kr)"
    r"|iso2022_jp|shift_jis"
)
_READ_AS = {
    "ascii": "cp1252",
    "iso8859-1": "cp1252",
    "iso8859-9": "cp1254",
    "iso8859-11": "cp874",
    "tis-620": "cp874",
}
_DECLARED_WITHIN = 4096
_XML_DECLARATION = re.compile(
    rb"""\s*<\?xml\b[^>]*?\bencoding\s*=\s*["']([\w.:-]{1,40})""", re.ASCII
)
_META_DECLARATION = re.compile(
    rb"""<meta\b[^>]*?\bcharset\s*=\s*["']?\s*([\w.:-]{1,40})""", re.ASCII | re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to read and the `doc_id` its document will have: the POSIX path below the folder that was listed."""

    path: Path
    doc_id: str


@dataclass(frozen=True, slots=True)
class Problem:
    """A file or folder that gave no document, or not all of it, and the reason.

    kind  `incomplete`: it gave a document that lacks something; `unsupported`: not a kind of file this module reads;
          `inaccessible`: it is there but cannot be opened, so nothing is known of its content; `unreadable`: its
          content was seen and holds no text that can be read; `outside`: it leads out of the folder, or was replaced
          by something that may, and was not read
    """

    doc_id: str
    kind: Literal["incomplete", "unsupported", "inaccessible", "unreadable", "outside"]
    reason: str


class OutsideError(DocumentError):
    """A file or folder is no longer where it may be read: the kind of its problem is `outside`."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The readable files of a folder, sorted by `doc_id`, and the problems with others."""

    files: tuple[SourceFile, ...]
    problems: tuple[Problem, ...]


def list_files(
    path: str | os.PathLike[str], *, follow_links: bool = False, opener: Opener | None = None
) -> Listing:
    """List the files to read at `path`: the file itself, or every file below the folder whose suffix is in `SUFFIXES`.

    Names that begin with a dot are skipped silently, other kinds of file are problems. A link is followed if it leads
    to a place in the folder; a link out of the folder is a problem, unless `follow_links`. Each folder is entered once,
    under its own name rather than a link's, so loops end. What cannot be opened is a problem, too.

    Both parts of the result are sorted by `doc_id`, and empty for an empty folder. A `doc_id` is the POSIX path below
    `path`, "" for `path` itself if its entries cannot be listed; of a single file it is its name. No file is opened.
    With an `opener`, folders are opened by it instead of by name; those that it refuses with OutsideError are problems.

    Raises DocumentError if there is nothing at `path`, it cannot be reached, or it is a file of a kind that is not
    read; and TypeError if `path` is no path.
    """
    root = Path(path)
    require_readable(root)
    if root.is_file():
        return Listing((SourceFile(root, printable(root.name)),), ())
    walk = _Walk(root, follow_links=follow_links, opener=opener)
    files: dict[str, SourceFile] = {}
    for file in sorted(walk.files, key=lambda file: (file.doc_id, file.path)):
        # `\xff.md` may be a name, or how a byte is written
        if files.setdefault(file.doc_id, file) is not file:
            reason = f"{shown(file.path)}: another file's name is written the same way; rename it"
            walk.problems.append(Problem(file.doc_id, "unsupported", reason))
    return Listing(
        tuple(files.values()), tuple(sorted(walk.problems, key=lambda problem: problem.doc_id))
    )


def require_readable(path: Path) -> None:
    """Raise DocumentError unless a folder, or a file of a kind that can be indexed, is at `path`; return None else.

    The kind is that of the suffix (`SUFFIXES`, in upper or lower case). Nothing is opened. A path that cannot be
    reached raises DocumentError too.
    """
    try:
        if path.is_dir():
            return
        if path.exists() and not path.is_file():
            raise DocumentError(_no_file(path))
        if not path.is_file():
            raise DocumentError(
                f"{shown(path)}: there is no such file or folder; check the spelling. If it was deleted on "
                "purpose, index an empty folder in its place: that removes its documents"
            )
    except OSError as error:  # a folder on the way to it may not be entered
        raise DocumentError(inaccessible(path, error)) from error
    if path.suffix.lower() not in SUFFIXES:
        raise DocumentError(_unsupported(path))


def require_known_kind(path: Path, nbytes: int) -> None:
    """Raise DocumentError for a suffix that is not in `SUFFIXES`, or more bytes than `LARGEST_FILE`; return None else.

    Args:
        path: the file, which is not opened.
        nbytes: its size.
    """
    if path.suffix.lower() not in _PARSERS:
        raise DocumentError(_unsupported(path))
    if nbytes > LARGEST_FILE:
        raise DocumentError(too_large(path))


class Reading(NamedTuple):
    """The text of a file, the document's metadata, and a phrase for each thing that was left out."""

    text: str
    metadata: dict[str, Scalar]
    losses: Sequence[str] = ()


def read_text(path: Path, data: bytes) -> Reading:
    """Return the text in the bytes of a file, the document's metadata, and what the text lacks.

    The text may be empty. Its line ends are line feeds; it holds no NUL, and U+FFFD in place of half a surrogate pair.
    Only the suffix of `path` is used, and its name in messages; nothing is opened. The metadata has `format`
    ("markdown" or "text"), and where they are known `title`, `pages`, and `encoding` if it is not UTF-8. A parser of an
    untrusted document may take hours or all memory: `limited_reader` calls this within limits.

    Raises DocumentError if the bytes cannot be read (MemoryError is then its cause if the parser has no memory),
    MissingReaderError if the package that reads this kind of file is not installed, and KeyError for a kind of file
    that is not read.
    """
    parser = _PARSERS[path.suffix.lower()]
    with parsing(shown(path)):
        reading = parser(path, data)
        return reading._replace(text=_clean(reading.text))


def document_of(file: SourceFile, text: str, metadata: dict[str, Scalar]) -> Document:
    """Return the document of a file, with its doc_id, this text and this metadata, which is not copied.

    Raises DocumentError if the text is empty or white space alone.
    """
    if not text.strip():
        advice = "add some or remove it"
        if "pages" in metadata:
            advice = "if it is a scan, run OCR first (for example ocrmypdf)"
        raise DocumentError(f"{shown(file.path)}: holds no text; {advice}")
    return Document(file.doc_id, text, metadata)


@contextlib.contextmanager
def parsing(name: str) -> Iterator[None]:
    """Turn any exception of a parser into a `DocumentError` that names the document.

    Parsers are third-party code and documents are untrusted: one page must not end a run, whether it triggers a bug, a
    parser's limit, Python's recursion limit or a MemoryError. Our own errors (`CacheCraftError`, such as ConfigError)
    and MissingReaderError pass unchanged, and so do KeyboardInterrupt and SystemExit. The block gets None.
    """
    try:
        yield
    except (CacheCraftError, MissingReaderError):
        raise
    except (MarkupError, FormatError) as error:
        raise DocumentError(f"{name}: cannot be read: {error}") from error
    except Exception as error:  # whatever a parser raises
        what = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_REASON]
        advice = "save it again with another program, or leave it out"
        raise DocumentError(f"{name}: cannot be read ({what}); {advice}") from error


def inaccessible(path: Path, error: OSError) -> str:
    """Return the message for a file or folder that exists but cannot be opened, with the reason that `error` names.

    Raises nothing for a path of this system.
    """
    return f"{shown(path)}: cannot be opened ({error.strerror or error}); check its permissions and the disk"


def too_large(path: Path) -> str:
    """Return the message for a file above `LARGEST_FILE`. The file is not looked at.

    Raises UnicodeEncodeError for half a surrogate pair that stands for no byte, never for a path that the system gave.
    """
    return f"{shown(path)}: is larger than {LARGEST_FILE >> 20} MiB; split it or leave it out"


def shown(path: Path) -> str:
    """Return a path as valid Unicode, for messages; see `printable`.

    Raises nothing for a path of this system, and UnicodeEncodeError for half a surrogate pair that stands for no byte.
    """
    return printable(str(path))


def _no_file(path: Path) -> str:
    return f"{shown(path)}: is a pipe, socket or device, not a file; copy its content into a file, or leave it out"


def _unsupported(path: Path) -> str:
    kinds = ", ".join(SUFFIXES)
    return f"{shown(path)}: not a kind of file that can be indexed; convert it to one of {kinds}, or leave it out"


def printable(name: str) -> str:
    r"""Return a file name as valid Unicode, which the database needs: bytes that are not UTF-8 become `\xNN`.

    Raises nothing for a name of this system, and UnicodeEncodeError for half a surrogate pair that stands for no byte.
    """
    return os.fsencode(name).decode("utf-8", "backslashreplace")


class _Walk:
    """Files and problems below a root, in no order. Links to folders wait until every real folder has been entered."""

    def __init__(self, root: Path, *, follow_links: bool, opener: Opener | None) -> None:
        self.files: list[SourceFile] = []
        self.problems: list[Problem] = []
        self._follow_links = follow_links
        self._opener = opener
        self._root = root.resolve()
        self._folders: list[tuple[Path, str]] = [(root, "")]
        self._links: list[tuple[Path, str]] = []
        entered: set[Path] = set()
        while self._folders or self._links:
            folder, below = self._folders.pop() if self._folders else self._links.pop(0)
            real = folder.resolve()
            # A link to a folder that holds the root would bring in the root's neighbours: as much a loop as one below.
            if real in entered or (real != self._root and real in self._root.parents):
                continue
            entered.add(real)
            try:
                with self._opened(folder) as place:
                    for entry in sorted(os.scandir(place), key=lambda entry: entry.name):
                        if not entry.name.startswith("."):
                            doc_id = f"{below}/{printable(entry.name)}".lstrip("/")
                            self._look(entry, folder / entry.name, doc_id)
            except OSError as error:
                self.problems.append(Problem(below, "inaccessible", inaccessible(folder, error)))
            except OutsideError as error:
                self.problems.append(Problem(below, "outside", str(error)))

    @contextlib.contextmanager
    def _opened(self, folder: Path) -> Iterator[Path | int]:
        """Yield what `os.scandir` lists: the folder's name, or the descriptor that the opener gives."""
        if self._opener is None or os.scandir not in os.supports_fd:
            yield folder
            return
        descriptor = self._opener(str(folder), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _look(self, entry: os.DirEntry[str], path: Path, doc_id: str) -> None:
        try:
            if self._leads_out(entry, path):
                reason = (
                    f"{shown(path)}: a link that leads out of the folder is not followed; if you trust it, pass "
                    "--follow-links (follow_links=True)"
                )
                self.problems.append(Problem(doc_id, "outside", reason))
            elif entry.is_dir():
                (self._links if entry.is_symlink() else self._folders).append((path, doc_id))
            elif entry.is_file() and path.suffix.lower() in SUFFIXES:
                self.files.append(SourceFile(path, doc_id))
            elif entry.is_file():
                self.problems.append(Problem(doc_id, "unsupported", _unsupported(path)))
            elif entry.is_symlink() and not path.exists():
                reason = f"{shown(path)}: a link that leads nowhere; mend or remove it"
                self.problems.append(Problem(doc_id, "unsupported", reason))
            else:
                self.problems.append(Problem(doc_id, "unsupported", _no_file(path)))
        except OSError as error:
            self.problems.append(Problem(doc_id, "inaccessible", inaccessible(path, error)))

    def _leads_out(self, entry: os.DirEntry[str], path: Path) -> bool:
        """Return True for a link out of the root that may not be followed. Raises OSError for a loop."""
        if self._follow_links or not entry.is_symlink():
            return False
        try:
            # a link to itself raises here; the error of resolve() differs between Python versions
            entry.stat()
        except FileNotFoundError:
            return False  # a dangling link
        return not path.resolve().is_relative_to(self._root)


def _clean(text: str) -> str:
    """Return text that SQLite, tokenizers and a search take: no NUL, lone surrogate, soft hyphen or ligature."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "")
    text = re.sub("\u00ad\n?", "", text)
    text = re.sub("[\ufb00-\ufb06]", lambda sign: unicodedata.normalize("NFKC", sign[0]), text)
    return re.sub("[\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", text)


def _joined_words(text: str) -> str:
    """Return a text with words whole that are hyphenated at a line end, as typesetting leaves them.

    A hyphen stays where the same word has it elsewhere, and before a word such as `and`, which follows `pre-`.
    """
    kept = set(re.findall(r"\w+-\w+", text.lower()))

    def whole(broken: re.Match[str]) -> str:
        first, second = broken.groups()
        if second in ("and", "or", "to", "und", "oder", "bis", "et", "ou", "y", "o"):
            return broken[0]
        word = second.rstrip(".,;:)")
        hyphen = "-" if f"{first}-{word}".lower() in kept else ""
        return f"{first}{hyphen}{second}\n"

    return re.sub(
        r"(?<!\w)([^\W\d_]{2,40})-\n[ \t]*([^\W\d_A-Z]{1,40}(?!\w)[.,;:)]?) ?", whole, text
    )


def _decode(path: Path, data: bytes, declared: str | None = None) -> Reading:
    """Return the decoded bytes, and `encoding` as metadata if it is not UTF-8."""
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            text = data[len(mark) :].decode(encoding, "replace")
            return Reading(text, {} if encoding == "utf-8" else {"encoding": encoding})
    if b"\0" in data:
        raise DocumentError(
            f"{shown(path)}: is not text (it holds NUL bytes); save it as UTF-8 text or leave it out"
        )
    if declared is not None and (codec := _codec(declared)) is not None:
        # a wrong declaration, which is common, is ignored
        with contextlib.suppress(UnicodeDecodeError):
            return Reading(data.decode(codec), {"encoding": declared})
    text = data.decode("utf-8", "replace")
    bad = text.count("\ufffd") - data.count("\ufffd".encode())
    # Letters with accents in Windows-1252 are hardly ever good UTF-8, so a text with more good than bad ones is UTF-8.
    if bad and len(re.findall(r"[^\x00-\x7f\ufffd]", text)) > bad:
        return Reading(text, {}, [f"{bad} characters whose bytes are no UTF-8, now \ufffd"])
    # Windows-1252 rather than a statistical guess: the same file must give the same text on every machine.
    return (
        Reading(data.decode("cp1252", "replace"), {"encoding": "cp1252"})
        if bad
        else Reading(text, {})
    )


def _codec(declared: str) -> str | None:
    """Return Python's codec for a declared character set; None if the page should be read as UTF-8."""
    try:
        name = codecs.lookup(declared).name
    except LookupError:
        return None
    return _READ_AS.get(name) or (name if _PAGE_CODECS.fullmatch(name) else None)


def _reading(source: Reading, text: str, kind: str) -> Reading:
    """Return what a parser made of decoded bytes."""
    return Reading(text, {"format": kind, **source.metadata}, source.losses)


def _parse_text(path: Path, data: bytes) -> Reading:
    source = _decode(path, data)
    return _reading(source, _joined_words(_clean(source.text)), "text")


def _parse_markdown(path: Path, data: bytes) -> Reading:
    source = _decode(path, data)
    is_rst = path.suffix.lower() == ".rst"
    text = rst_to_markdown(_clean(source.text)) if is_rst else source.text
    return _reading(source, text, "markdown")


def _parse_html(path: Path, data: bytes) -> Reading:
    source = _decode(path, data, _declared_encoding(data))
    text, title = html_to_markdown(_clean(source.text))
    return _titled(_reading(source, text, "markdown"), title)


def _titled(reading: Reading, title: str) -> Reading:
    if title:
        reading.metadata["title"] = _clean(title)[:_LONGEST_TITLE]
    return reading


def _declared_encoding(data: bytes) -> str | None:
    """Return the character set that a page declares in its first kilobytes, as in the HTML standard."""
    head = data[:_DECLARED_WITHIN]
    declaration = _XML_DECLARATION.match(head) or _META_DECLARATION.search(head)
    return declaration[1].decode("ascii").lower() if declaration else None


def _parse_pdf(path: Path, data: bytes) -> Reading:
    try:
        pages = pdf_pages(data)
    except FormatError as error:
        raise DocumentError(f"{shown(path)}: {error}") from error
    except Exception as error:  # the parser raises anything from KeyError to RecursionError
        advice = "open it in a viewer and save or print it as PDF again"
        what = f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
        raise DocumentError(f"{shown(path)}: is damaged or locked ({what}); {advice}") from error
    empty = [str(number) for number, page in enumerate(pages, 1) if not page.strip()]
    losses = [f"pages without text, which may be scans ({', '.join(empty[:20])}): run OCR"]
    text = "\f".join(_joined_words(_clean(page.replace("\f", "\n"))) for page in pages)
    metadata: dict[str, Scalar] = {"format": "text", "pages": len(pages)}
    return Reading(text, metadata, losses if empty else ())


def _parse_office(path: Path, data: bytes) -> Reading:
    losses: list[str] = []
    title = ""
    suffix = path.suffix.lower()
    if suffix == ".epub":
        text, title = epub_to_markdown(data, most_bytes=LARGEST_FILE, losses=losses)
    elif suffix == ".xlsx":
        text = xlsx_to_markdown(data, most_bytes=LARGEST_FILE)
    else:
        convert = docx_to_markdown if suffix == ".docx" else pptx_to_markdown
        text = convert(data, most_bytes=LARGEST_FILE, losses=losses)
    return _titled(Reading(text, {"format": "markdown"}, losses), title)


def _parse_table(path: Path, data: bytes) -> Reading:
    source = _decode(path, data)
    separator = "\t" if path.suffix.lower() == ".tsv" else None
    return _reading(source, table_to_text(_clean(source.text), separator=separator), "text")


def _parse_json(path: Path, data: bytes) -> Reading:
    source = _decode(path, data)
    return _reading(source, json_to_text(_clean(source.text)), "text")


_PARSERS: dict[str, Callable[[Path, bytes], Reading]] = {
    ".txt": _parse_text,
    **dict.fromkeys((".md", ".markdown", ".rst"), _parse_markdown),
    **dict.fromkeys((".html", ".htm"), _parse_html),
    ".pdf": _parse_pdf,
    **dict.fromkeys((".docx", ".pptx", ".xlsx", ".epub"), _parse_office),
    **dict.fromkeys((".csv", ".tsv"), _parse_table),
    **dict.fromkeys((".json", ".jsonl"), _parse_json),
}
SUFFIXES = tuple(_PARSERS)
