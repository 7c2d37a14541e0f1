"""Documents as an application has them, read as chunks: the texts that the model sees of them.

No framework is imported: its documents are recognised by their attributes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from cachecraft_rag.checks import listed, shown
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.types.documents import NOTE_KEYS, PATH_KEYS, Chunk, Document

# metadata keys under which frameworks keep the document that a chunk was cut from
_SOURCE_KEYS = ("source", "source_id", "file_path")
_FOR_MODEL = "llm"  # LlamaIndex's MetadataMode.LLM


def chunks_of(documents: Iterable[object]) -> list[Chunk]:
    """Return a chunk for each document, in order, with the text that the model reads of it.

    Documents are texts, chunks, `Document` objects, LangChain's or Haystack's documents, or LlamaIndex's nodes, with or
    without a score. Raises ConfigError for anything else, and for a document of which the text is None; "" is a text.
    """
    return [chunk for _, chunk in map(_read, listed("documents", documents))]


def by_source(documents: Iterable[object]) -> list[tuple[str, list[Chunk]]]:
    """Return (name, chunks) of each document that the chunks of `chunks_of` were cut from.

    Documents and chunks are in the order of first appearance. A text without a source is a document of one chunk, named
    by its place, such as "text 3".
    """
    texts: dict[str | int, list[Chunk]] = {}
    for place, (source, chunk) in enumerate(map(_read, listed("documents", documents)), start=1):
        # a source is a text, so the number of a text without one is no other document's key
        texts.setdefault(source or place, []).append(chunk)
    return [
        (key if isinstance(key, str) else f"text {key}", chunks) for key, chunks in texts.items()
    ]


class Removing(Protocol):
    """An engine, as far as the deletes and updates of a database need it; see `AnswerEngine`."""

    def remove(self, documents: Iterable[object]) -> object:
        """Remove the chunk-caches of these documents."""

    def readmit(self, documents: Iterable[object]) -> None:
        """Let these documents be stored again."""


class HeldTexts:
    """The ids under which a database holds each text, because two documents may have the same text.

    It knows only the documents that were added through it. Any thread may call any method.

    Args:
        engine: the chunk-caches of a text are removed from it with the last known document of that text.
        read: returns the chunks that the model reads of documents.
    """

    def __init__(self, engine: Removing, read: Callable[[Iterable[Any]], list[Chunk]]) -> None:
        self._engine = engine
        self._read = read
        self._chunk_ids: dict[str, str] = {}  # by the database's id
        # otherwise a text that is added while it is removed could stay refused
        self._changing = threading.Lock()

    def add(self, ids: Sequence[str], documents: Sequence[object]) -> None:
        """Note documents that the database holds from now on, as many as ids, and let their chunk-caches be stored.

        An id that is known gets the new text; what is stored of its old one stays, unless `remove` was called first.
        """
        chunks = self._read(documents)
        added = {name: chunk.chunk_id for name, chunk in zip(ids, chunks, strict=True)}
        with self._changing:
            self._chunk_ids |= added
            self._engine.readmit(chunks)

    def remove(
        self, ids: Iterable[str], documents: Iterable[object], *, replaced_by: Iterable[object] = ()
    ) -> None:
        """Remove the chunk-caches of these documents, except for texts that are known under other ids too.

        Ids need not be known. The documents `replaced_by` will be added under these ids, so their texts stay too. If
        the engine raises an error, the ids stay known.
        """
        leaving = frozenset(ids)
        chunks = self._read(documents)
        new = {chunk.chunk_id for chunk in self._read(replaced_by)}
        with self._changing:
            kept = {name: text for name, text in self._chunk_ids.items() if name not in leaving}
            held = new.union(kept.values())
            gone = [chunk for chunk in chunks if chunk.chunk_id not in held]
            if gone:
                self._engine.remove(gone)
            self._chunk_ids = kept


def _read(document: object) -> tuple[str, Chunk]:
    """Return the source of a document, "" if it has none, and its chunk."""
    given: Any = document
    if isinstance(given, str):
        return "", Chunk(given)
    if isinstance(given, Chunk):
        return _source_of(given.metadata), given
    if isinstance(given, Document):
        return given.doc_id, Chunk(given.text, given.metadata)
    node = getattr(given, "node", given)
    if hasattr(node, "get_content"):
        return str(node.ref_doc_id or ""), Chunk(_text_of_node(node))
    for text, metadata in (("page_content", "metadata"), ("content", "meta")):
        if isinstance(getattr(given, text, None), str) and hasattr(given, metadata):
            return _source_of(getattr(given, metadata)), Chunk(getattr(given, text))
    raise ConfigError(
        f"each of documents must be a text, a Chunk, or a document of LangChain, LlamaIndex or Haystack with a text, "
        f"not {shown(given)}"
    )


def _text_of_node(node: Any) -> str:
    """Return what the model reads of a LlamaIndex node: by its templates, without paths and our notes."""
    hidden = [*node.excluded_llm_metadata_keys, *sorted(NOTE_KEYS | PATH_KEYS)]
    copy = node.model_copy(update={"excluded_llm_metadata_keys": hidden})
    return str(copy.get_content(metadata_mode=_FOR_MODEL))


def _source_of(metadata: Mapping[str, object]) -> str:
    named = (metadata.get(key) for key in _SOURCE_KEYS)
    return next((name for name in named if isinstance(name, str) and name), "")
