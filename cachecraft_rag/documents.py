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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cachecraft_rag.errors import DocumentError
from cachecraft_rag.markup import html_to_markdown, rst_to_markdown
from cachecraft_rag.types import Document, Scalar

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


def list_files(path: str | os.PathLike[str]) -> Listing:
    """The files to read at `path`: the file itself, or every file below the folder whose suffix is in `SUFFIXES`.

    Names that begin with a dot are passed over silently, other kinds of file with a problem. Links are followed; each
    folder is entered once, under its own name rather than a link's, so loops end. Raises `DocumentError` as
    `require_readable`.
    """
    root = Path(path)
    require_readable(root)
    if root.is_file():
        return Listing((SourceFile(root, printable(root.name)),), ())
    files, problems = _walk(root)
    return Listing(
        tuple(sorted(files, key=lambda file: file.doc_id)), tuple(sorted(problems, key=lambda problem: problem.doc_id))
    )


def require_readable(path: Path) -> None:
    """Raise `DocumentError` unless a folder, or a file of a kind that can be indexed, is at `path` and within reach."""
    try:
        if path.is_dir():
            return
        if not path.is_file():
            raise DocumentError(
                f"{path}: there is no such file or folder; check the spelling. If it is gone for good, index an empty "
                "folder in its place: that removes its documents"
            )
    except OSError as error:  # a folder on the way to it may not be entered
        raise DocumentError(inaccessible(path, error)) from error
    if path.suffix.lower() not in SUFFIXES:
        raise DocumentError(_unsupported(path))


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
    return rst_to_markdown(_clean(text)), {"format": "markdown", **metadata}


def _parse_html(path: Path, data: bytes) -> tuple[str, dict[str, Scalar]]:
    from bs4.dammit import EncodingDetector

    html, metadata = _decode(path, data, EncodingDetector.find_declared_encoding(data, is_html=True))
    text, title = html_to_markdown(html)
    if title:
        metadata["title"] = title
    return text, {"format": "markdown", **metadata}


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
