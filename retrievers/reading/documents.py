"""Read files into documents: text, Markdown, reStructuredText, HTML, PDF, Office, EPUB, tables and JSON.

The text is plain for .txt, PDF, tables and JSON, and Markdown for all that may have headings; the splitter goes by
`metadata["format"]`. Line ends become line feeds, so that the same text saved on two systems gives the same chunks.
Encodings, in order: a byte order mark, the character set an HTML page declares, UTF-8 (with U+FFFD for a bad byte or
two), and last Windows-1252.

To add a format, write a converter and register its suffix: in `_TEXTS` if it is text, else in `office.CONVERTERS`. The
table is in docs/guides/documents.md, the tests are in `tests/retrievers/test_documents.py`.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cachecraft_rag.errors import CacheCraftError, DocumentError
from cachecraft_rag.retrievers.reading.markup import Reading, html_to_markdown, rst_to_markdown
from cachecraft_rag.retrievers.reading.office import CONVERTERS, require_reader
from cachecraft_rag.retrievers.reading.pdf import pdf_to_text
from cachecraft_rag.retrievers.reading.tables import FormatError, json_to_text, table_to_text

if TYPE_CHECKING:
    import webencodings

LARGEST_FILE = 256 << 20  # bytes; a text of this size would be a million chunks
_LONGEST_TITLE = 200  # characters; each chunk has a copy
_LONGEST_REASON = 300  # characters of a parser's message, which may quote half the document

# UTF-32 before UTF-16: the little-endian mark of the first begins with that of the second.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)

# The character set that a page declares in its first kilobytes, as in the HTML standard.
_DECLARATION = re.compile(
    rb"""(?i:\A\s*<\?xml\b[^>]*?\bencoding|<meta\b[^>]*?\bcharset)\s*=\s*["']?\s*([\w.:-]{1,40})""",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to read, and the `doc_id` of its document; from `list_files`, its POSIX path below the folder."""

    path: Path
    doc_id: str


def require_known_kind(path: Path, nbytes: int) -> None:
    """Raise DocumentError for a suffix that is not in `SUFFIXES`, or more bytes than `LARGEST_FILE` (256 MiB)."""
    if path.suffix.lower() not in SUFFIXES:
        raise DocumentError(unsupported(path))
    if nbytes > LARGEST_FILE:
        raise DocumentError(too_large(path))


def read_text(path: Path, data: bytes) -> Reading:
    """Return the text in the bytes of a file, the document's metadata, and what the text lacks.

    Of `path` only the suffix is used, and the name in messages. The metadata has `format` ("markdown" or "text"), and
    where they are known `title`, `pages` (their number), and `encoding` if it is not UTF-8. A file without text gives
    "". A parser of an untrusted document may take hours or all memory: `limited_reader` calls this within limits.
    Raises DocumentError if the suffix is not in `SUFFIXES`, there are more than 256 MiB, or the file cannot be parsed
    (if memory runs out, a MemoryError is its cause), and MissingPackageError if the suffix needs a package that is not
    installed.
    """
    require_known_kind(path, len(data))
    suffix = path.suffix.lower()
    require_reader(suffix)
    with parsing(printable(path)):
        convert = _BINARIES.get(suffix)
        text, metadata, losses = convert(data) if convert else _read_text(suffix, data)
        title = clean(str(metadata.pop("title", "")))[:_LONGEST_TITLE]
        metadata |= {"title": title} if title else {}
        text = clean(text)
        text = _joined_words(text) if suffix in (".pdf", ".txt") else text
        return Reading(text, metadata, losses)


@contextlib.contextmanager
def parsing(name: str) -> Iterator[None]:
    """Turn any exception of a parser into a `DocumentError` that names the document; our own errors pass unchanged.

    Python's recursion limit and a MemoryError too: documents are untrusted, and none may end a run.
    """
    try:
        yield
    except CacheCraftError:
        raise
    except FormatError as error:
        raise DocumentError(f"{name}: {error}") from error
    except Exception as error:  # whatever a parser raises
        what = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
        what = what[:_LONGEST_REASON]
        advice = "it may be damaged: save it again with another program, or leave it out"
        raise DocumentError(f"{name}: cannot be read ({what}); {advice}") from error


def too_large(path: Path) -> str:
    """Return the message for a file above `LARGEST_FILE`."""
    return f"{printable(path)}: is larger than {LARGEST_FILE >> 20} MiB; split it or leave it out"


def unsupported(path: Path) -> str:
    """Return the message for a file whose suffix is not in `SUFFIXES`."""
    kinds = ", ".join(SUFFIXES)
    return f"{printable(path)}: not a kind of file that can be indexed; convert it to one of {kinds}, or leave it out"


def printable(name: str | os.PathLike[str]) -> str:
    r"""Return a file's name or path as valid Unicode, which the database needs: other bytes become `\xNN`."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def clean(text: str) -> str:
    """Return text with LF line ends and ligatures written out, without NUL and soft hyphens; surrogates are U+FFFD."""
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


def _decode(data: bytes, declared: str) -> Reading:
    """Return the decoded bytes, and `encoding` as metadata if it is not UTF-8."""
    for mark, name in _MARKS:
        if data.startswith(mark):
            text = data[len(mark) :].decode(name, "replace")
            return Reading(text, {} if name == "utf-8" else {"encoding": name})
    if b"\0" in data:
        raise FormatError("is not text (it holds NUL bytes); save it as UTF-8 text or leave it out")
    encoding = _declared_encoding(declared)
    # A page in UTF-16 could not be read as far as its declaration; a wrong one, which is common, is ignored.
    if encoding is not None and not encoding.name.startswith(("utf-", "replacement")):
        with contextlib.suppress(UnicodeDecodeError):
            return Reading(encoding.codec_info.decode(data)[0], {"encoding": declared})
    text = data.decode("utf-8", "replace")
    bad = text.count("\ufffd") - data.count("\ufffd".encode())
    # Letters with accents in Windows-1252 are hardly ever good UTF-8, so a text with more good than bad ones is UTF-8.
    if not bad or len(re.findall(r"[^\x00-\x7f\ufffd]", text)) > bad:
        losses = [f"{bad} characters whose bytes are no UTF-8, now \ufffd"] if bad else []
        return Reading(text, {}, losses)
    # Windows-1252 rather than a statistical guess: the same file must give the same text on every machine.
    return Reading(data.decode("cp1252", "replace"), {"encoding": "cp1252"})


def _read_text(suffix: str, data: bytes) -> Reading:
    kind, convert = _TEXTS[suffix]
    declaration = _DECLARATION.search(data[:4096]) if convert is html_to_markdown else None
    source = _decode(data, declaration[1].decode().lower() if declaration else "")
    made = convert(clean(source.text))
    text, metadata, _ = Reading(made, {"format": kind}) if isinstance(made, str) else made
    return Reading(text, {**metadata, **source.metadata}, source.losses)


def _declared_encoding(name: str) -> webencodings.Encoding | None:
    """Return the encoding that a page declares, as browsers read its name; None for "" and for an unknown name."""
    if not name:
        return None
    import webencodings

    return webencodings.lookup(name)


# Converters of decoded text, and the format of what they give.
_TEXTS: dict[str, tuple[str, Callable[[str], str | Reading]]] = {
    ".txt": ("text", str),
    **dict.fromkeys((".md", ".markdown"), ("markdown", str)),
    ".rst": ("markdown", rst_to_markdown),
    **dict.fromkeys((".html", ".htm"), ("markdown", html_to_markdown)),
    ".csv": ("text", table_to_text),
    ".tsv": ("text", partial(table_to_text, separator="\t")),
    **dict.fromkeys((".json", ".jsonl"), ("text", json_to_text)),
}
_BINARIES: dict[str, Callable[[bytes], Reading]] = {".pdf": pdf_to_text, **CONVERTERS}
SUFFIXES = (*_TEXTS, *_BINARIES)
