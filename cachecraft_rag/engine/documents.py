"""Documents as an application has them, read as chunks: the texts that the model sees of them.

Nothing of a framework is imported: its documents are known by their attributes.
"""

from __future__ import annotations

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
    without a score. Raises ConfigError for anything else, and for a document without text.
    """
    return [chunk for _, chunk in map(_read, listed("documents", documents))]


def by_source(documents: Iterable[object]) -> list[tuple[str, list[Chunk]]]:
    """Return the chunks of `chunks_of` by the document that they were cut from, each with its name.

    The order is that of the documents. A text without a source is a document of one chunk.
    """
    texts: dict[str, list[Chunk]] = {}
    for place, (source, chunk) in enumerate(map(_read, listed("documents", documents)), start=1):
        # a number names no source, so it is no other text's name
        texts.setdefault(source or f"text {place}", []).append(chunk)
    return list(texts.items())


class Removing(Protocol):
    """An engine, as far as the deletes and updates of a database need it; see `AnswerEngine`."""

    def remove(self, documents: Iterable[object]) -> object:
        """Remove the chunk-caches of these documents."""

    def readmit(self, documents: Iterable[object]) -> None:
        """Let these documents be stored again."""


class HeldTexts:
    """The texts of a database under its ids, as far as this process added them: two documents may have the same text.

    Args:
        engine: its chunk-caches leave with the last document of a text.
        read: returns the chunks that the model reads of documents.
    """

    def __init__(self, engine: Removing, read: Callable[[Iterable[Any]], list[Chunk]]) -> None:
        self._engine = engine
        self._read = read
        self._held: dict[str, str] = {}

    def add(self, ids: Sequence[str], documents: Sequence[object]) -> None:
        """Note documents that the database holds from now on."""
        chunks = self._read(documents)
        self._held |= {name: chunk.chunk_id for name, chunk in zip(ids, chunks, strict=True)}
        self._engine.readmit(chunks)

    def remove(
        self, ids: Iterable[str], documents: Iterable[object], *, replaced_by: Iterable[object] = ()
    ) -> None:
        """Remove the chunk-caches of these documents, but for texts that the database holds under other ids.

        The documents `replaced_by` will be added under these ids.
        """
        for name in ids:
            self._held.pop(name, None)
        held = {*self._held.values(), *(chunk.chunk_id for chunk in self._read(replaced_by))}
        gone = [chunk for chunk in self._read(documents) if chunk.chunk_id not in held]
        if gone:
            self._engine.remove(gone)


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
