"""A user's own reader of files and splitter of texts: a function, or an object of LangChain or LlamaIndex as it is.

They run in the process that indexes, on its thread: they may be closures, and no limit of time or memory holds for
them. Nothing of the frameworks is imported, unless an object of one needs it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from cachecraft_rag.checks import shown
from cachecraft_rag.errors import ConfigError, DocumentError
from cachecraft_rag.model.chunk_bound import ModelTokens
from cachecraft_rag.retrievers.index.filters import encoded
from cachecraft_rag.retrievers.reading.chunking import split
from cachecraft_rag.retrievers.reading.documents import clean
from cachecraft_rag.types.documents import Chunk, Document, Metadata, Scalar

_READING = ("load_data", "lazy_parse")
_SPLITTING = ("split_text", "get_nodes_from_documents")


class OwnReaderError(DocumentError):
    """The user's code failed, so nothing is known of the document, and an earlier reading of it stays."""


class OwnReaders:
    """The user's readers by suffix, or one for all files (under the suffix "").

    A reader is a function of a `Path`, or has `load_data` or `lazy_parse`. It gives a text, a document of LangChain or
    LlamaIndex, several of either, or None for the built-in reader. ConfigError for others, or a suffix without a dot.
    """

    def __init__(self, readers: Mapping[str, object] | object | None = None) -> None:
        by_suffix = readers if isinstance(readers, Mapping) else {"": readers}
        self._readers: dict[str, object] = {}
        for suffix, reader in by_suffix.items() if readers is not None else ():
            if not isinstance(suffix, str) or suffix[:1] not in ("", "."):
                raise ConfigError(
                    f"reader: a suffix begins with a dot, such as '.odt', unlike {shown(suffix)}"
                )
            _require("reader", reader, _READING, "a path")
            self._readers[suffix.lower()] = reader

    def __contains__(self, suffix: object) -> bool:
        """Return True if one of them reads files of this suffix, in lower case."""
        return suffix in self._readers or "" in self._readers

    def of(self, path: Path) -> object | None:
        """Return the reader for the file's suffix, in any case, or else the one for all files; None without either."""
        return self._readers.get(path.suffix.lower(), self._readers.get(""))


def require_splitter(splitter: object) -> None:
    """Raise ConfigError unless an object can be called, or has `split_text` or `get_nodes_from_documents`."""
    _require("splitter", splitter, _SPLITTING, "a text")


def identity(part: object) -> str:
    """Return name and plain settings of a reader or splitter ("" for None): if one changes, documents are read again.

    The code of a function is no part of it, but its attributes are: `read.version = 2` makes it another one.
    """
    if part is None:
        return ""
    named = part if hasattr(part, "__qualname__") else type(part)
    settings: dict[str, str] = {}
    for name, value in sorted(getattr(part, "__dict__", {}).items()):
        if name.startswith("__"):
            continue
        try:
            settings[name] = json.dumps(value)
        except (TypeError, ValueError):
            continue  # a function, or another object without a form that stays the same
    module = getattr(named, "__module__", "")  # which `str.splitlines` lacks
    return f", {module}.{named.__qualname__} {json.dumps(settings)}"


def read(reader: object, path: Path, doc_id: str) -> Document | None:
    """Return the document that a reader makes of a file; None if it leaves the file to the built-in readers.

    Of several parts the texts are joined by blank lines, and only scalar metadata that all have alike is kept; `format`
    is "markdown" unless they say another. Raises OwnReaderError if it raises, or returns something other than texts or
    documents, or metadata that the index cannot keep; DocumentError for no text.
    """
    given = _called("reader", _read, reader, path, doc_id)
    if given is None:
        return None
    parts = _parts("reader", reader, given, doc_id)
    text = clean("\n\n".join(part for part, _ in parts if part.strip()))
    if not text:
        raise DocumentError(f"{doc_id}: the reader {_name(reader)} found no text in it")
    first = parts[0][1]
    common = {
        key: first[key] for key in first if all(own.get(key) == first[key] for _, own in parts)
    }
    _require_storable("reader", reader, common, doc_id)
    return Document(doc_id, text, {"format": "markdown", **common})


def split_by(
    splitter: object,
    document: Document,
    *,
    count_tokens: Callable[[str], int],
    limit: int,
    model: ModelTokens | None = None,
) -> tuple[list[Chunk], str]:
    """Return the chunks that a splitter makes, and a sentence about those that had to be cut, or "".

    The embedding model would not see the end of a longer chunk, so such a chunk is split further; blank ones are left
    out. Arguments and metadata are as those of `split`, with the splitter's own metadata; but `heading` is "", `page`
    is not added, and `start` and `end` are there only if a chunk's text is in the document as it is.

    Raises OwnReaderError if the splitter raises, or returns something other than texts or documents, or metadata that
    the index cannot keep.
    """
    given = _called("splitter", _split, splitter, document, document.doc_id)
    chunks: list[Chunk] = []
    cut = 0
    at = 0
    for text, own in _parts("splitter", splitter, given, document.doc_id):
        _require_storable("splitter", splitter, own, document.doc_id)
        text = clean(text)
        plain = Document(document.doc_id, text, {"format": "text"})
        pieces = split(plain, count_tokens=count_tokens, limit=limit, model=model)
        cut += len(pieces) > 1
        for piece in [text] if len(pieces) == 1 else [piece.text for piece in pieces]:
            metadata: dict[str, Scalar] = {**document.metadata, **own}
            metadata |= {"source": document.doc_id, "heading": "", "ordinal": len(chunks)}
            start = document.text.find(piece, at)
            if start >= 0:
                at = start
                metadata |= {"start": start, "end": start + len(piece)}
            chunks.append(Chunk(piece, metadata))
    name = f"the splitter {_name(splitter)}"
    advice = (
        f"the embedding model reads {limit} tokens, or the answering model fewer; make smaller ones"
    )
    return (
        chunks,
        f"{document.doc_id}: {cut} of {name}'s chunks had to be cut: {advice}" if cut else "",
    )


def _require(name: str, given: object, methods: tuple[str, ...], argument: str) -> None:
    if not callable(given) and not any(hasattr(given, method) for method in methods):
        others = " or ".join(methods)
        raise ConfigError(
            f"{name} must be a function of {argument}, or an object with {others}, not {shown(given)}"
        )


def _read(reader: Any, path: Path) -> object:
    if hasattr(reader, "load_data"):
        return reader.load_data(path)
    if hasattr(reader, "lazy_parse"):
        from langchain_core.documents.base import Blob

        return list(reader.lazy_parse(Blob.from_path(path)))
    given = reader(path)
    # such as the class TextLoader, whose objects hold the path
    return given.load() if hasattr(given, "load") else given


def _split(splitter: Any, document: Document) -> object:
    if hasattr(splitter, "split_text"):
        return splitter.split_text(document.text)
    if hasattr(splitter, "get_nodes_from_documents"):
        from llama_index.core import Document as LlamaIndexDocument

        return splitter.get_nodes_from_documents([LlamaIndexDocument(text=document.text)])
    return splitter(document.text)


def _called(
    name: str, call: Callable[[Any, Any], object], part: object, argument: object, doc_id: str
) -> object:
    try:
        return call(part, argument)
    except Exception as error:  # the user's code
        what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise OwnReaderError(f"{doc_id}: the {name} {_name(part)} failed ({what})") from error


def _parts(
    name: str, part: object, given: object, doc_id: str
) -> list[tuple[str, dict[str, Scalar]]]:
    """Return (text, metadata) of a text, a document of either framework, or several of them."""
    is_one = (
        isinstance(given, str) or hasattr(given, "page_content") or hasattr(given, "get_content")
    )
    items = [given] if is_one else given
    parts: list[tuple[str, dict[str, Scalar]]] = []
    for item in items if isinstance(items, Iterable) else [items]:
        text = getattr(item, "page_content", item)
        if hasattr(item, "get_content"):
            text = item.get_content()
        if not isinstance(text, str):
            raise OwnReaderError(
                f"{doc_id}: the {name} {_name(part)} returned {shown(item)}; "
                "return a text, or a list of texts or of documents"
            )
        metadata = getattr(item, "metadata", None) or {}
        plain = {
            str(key): value
            for key, value in metadata.items()
            if isinstance(value, str | int | float | bool | None)
        }
        parts.append((text, plain))
    return parts


def _require_storable(name: str, part: object, metadata: Metadata, doc_id: str) -> None:
    try:
        encoded(metadata)
    except ConfigError as error:  # the index cannot keep it
        raise OwnReaderError(f"{doc_id}: the {name} {_name(part)}: {error}") from error


def _name(part: object) -> str:
    return str(getattr(part, "__qualname__", type(part).__qualname__))
