"""Text units with metadata: documents, the chunks that they are split into, and search results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.types.digests import digest

Scalar = str | int | float | bool | None
Metadata = Mapping[str, Scalar]
# Metadata keys of a framework's documents and nodes. Models and embedders never see them.
CHUNK_ID_KEY = "cachecraft_chunk_id"  # the id of its chunk, from our stores and retrievers
# Notes are text, because databases refuse or flatten anything nested.
OUTCOME_KEY = "cachecraft_outcome"  # `ChunkStats.outcome` of the answer that used it, "" before
REASON_KEY = "cachecraft_reason"  # `ChunkStats.reason`
SEARCHED_KEY = "cachecraft_searched"  # what a follow-up was searched for, a JSON list
NOTE_KEYS = frozenset({CHUNK_ID_KEY, OUTCOME_KEY, REASON_KEY, SEARCHED_KEY})
# Of LlamaIndex's nodes. Of no use to the model, and part of the text by default: a folder that is moved would lose all
# its chunk-caches.
PATH_KEYS = frozenset({"file_path"})


def noted_chunk_id(metadata: Mapping[str, object]) -> str:
    """Return the chunk id, maybe another text's, that a document's or node's metadata holds; "" if it holds none."""
    return str(metadata.get(CHUNK_ID_KEY) or "")


def outcome_notes(chunk: Mapping[str, object] | None) -> dict[str, str]:
    """Return the notes about a passage of an answer, from a `ChunkStats` as a dict; for None both are "".

    >>> outcome_notes({"chunk_id": "a", "outcome": "exact"})
    {'cachecraft_outcome': 'exact', 'cachecraft_reason': ''}
    """
    values = chunk or {}
    return {
        OUTCOME_KEY: str(values.get("outcome", "")),
        REASON_KEY: str(values.get("reason", "")),
    }


def chunk_id_of(text: str) -> str:
    """Return the identity of a chunk, 32 hex digits: a hash of the exact text that the model sees."""
    return digest("chunk", text)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a document's text; `metadata` (source, heading …) travels with it and is no part of its identity.

    The id is always that of the text: a wrong one would store or serve another text's chunk-cache. A `known_id` is
    compared with the text's digest here, once, and used as it is; nothing hashes the text again.

    known_id   the id that a retriever gave with the text; "" without one
    chunk_id   its identity, the digest of its text: `known_id`, unless the text was edited after it was retrieved
    stale_id   `known_id` if it is the id of another text, else ""
    """

    text: str
    metadata: Metadata = field(default_factory=dict)
    known_id: InitVar[str] = ""
    chunk_id: str = field(init=False, compare=False, repr=False)
    stale_id: str = field(init=False, compare=False, repr=False)

    def __post_init__(self, known_id: str) -> None:
        given: object = self.text
        if not isinstance(given, str):
            raise ConfigError(
                f"a chunk's text must be a str, not {type(given).__name__}: write Chunk(text)"
            )
        if not isinstance(known_id, str):
            raise ConfigError(
                f"a chunk's id must be a str, not {type(known_id).__name__}: write Chunk(text)"
            )
        text_id = chunk_id_of(self.text)
        is_stale = known_id not in ("", text_id)
        object.__setattr__(self, "chunk_id", text_id if is_stale else known_id or text_id)
        object.__setattr__(self, "stale_id", known_id if is_stale else "")


@dataclass(frozen=True, slots=True)
class Document:
    """A whole text before it is split; `doc_id` is stable across re-indexing (files: the path below the folder)."""

    doc_id: str
    text: str
    metadata: Metadata = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A retrieved chunk with its similarity score (larger is nearer).

    score  inner product of the vectors of question and chunk: their cosine, -1 to 1, for vectors of unit length
    """

    chunk_id: str
    score: float
    text: str
    metadata: Metadata
