"""The words of the package as frozen dataclasses; no behaviour beyond identity.

Shape legend, used in every docstring: `layers` decoder layers; `tokens` tokens of one chunk; `kv_heads` key/value
heads; `heads` query heads; `head_dim` width of a head; `rows` token positions computed in the current pass; `keys`
all positions of the prompt so far. A chunk-cache is `[layers, 2, tokens, kv_heads, head_dim]`: raw keys (before
rotary embedding) at index 0, values at index 1.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from cachecraft_rag.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import torch

LOSSLESS_CODECS = frozenset({"raw"})
LAYOUT_VERSION = 3  # of stored chunk-caches: part of their files and of every fingerprint
# Of the rule that makes a fingerprint, and its first letters. Goes up whenever `LAYOUT_VERSION` does: what an older
# version stored is then set aside.
IDENTITY_VERSION = 2

Scalar = str | int | float | bool | None
Metadata = Mapping[str, Scalar]
# Metadata keys of a framework's documents and nodes. Models and embedders never see them.
CHUNK_ID_KEY = "cachecraft_chunk_id"  # the id of its chunk, from our stores and retrievers
OUTCOME_KEY = "cachecraft_outcome"  # the fields of `ChunkStats`, once an answer has used it
NOTE_KEYS = frozenset({CHUNK_ID_KEY, OUTCOME_KEY})


def digest(*parts: str) -> str:
    """128-bit blake2b of the parts, as 32 hex digits; no two different sequences of parts share an encoding.

    >>> digest("ab", "c") == digest("a", "bc")
    False
    """
    encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
    whole = b"".join(
        [piece for part in encoded for piece in (len(part).to_bytes(8, "little"), part)]
    )
    return hashlib.blake2b(whole, digest_size=16).hexdigest()


def noted_chunk_id(metadata: Mapping[str, object]) -> str:
    """Return the chunk id in a document's or node's metadata, or "" without one; it may belong to another text."""
    return str(metadata.get(CHUNK_ID_KEY) or "")


def digest_of_tokens(token_ids: Sequence[int]) -> str:
    """128-bit blake2b of token ids, as 32 hex digits."""
    packed = struct.pack(f"<{len(token_ids)}q", *token_ids)
    return hashlib.blake2b(packed, digest_size=16).hexdigest()


def chunk_id_of(text: str) -> str:
    """The identity of a chunk: a hash of the exact text the model sees."""
    return digest("chunk", text)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a document's text; `metadata` (source, heading …) travels with it and is no part of its identity.

    The id is always that of the text: a wrong one would store or serve another text's chunk-cache. A `known_id` is
    compared with the text's digest here, once, and used as it is; nothing hashes the text again.

    known_id   the id that a retriever gave with the text
    chunk_id   its identity, the digest of its text: `known_id`, unless the text was edited after it was retrieved
    stale_id   `known_id` if it is the id of another text, else ""

    Raises ConfigError if text or id is not a str.
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
class Segment:
    """A run of prompt tokens.

    private        True for text of one user, which must not affect chunk-caches of others
    closing        number of last tokens that come from the chat template and are the same for every question
    found          True if it was found in unmarked text: captured while the engine is idle, never with its own prompt
                   (`prompt.unmarked`)
    tokens_digest  digest of the token ids; a stored chunk-cache fits only a segment with the same digest. Computed once
                   per segment: on demand it took a third of the time of planning
    """

    kind: Literal["system", "chunk", "question"]
    segment_id: str
    token_ids: tuple[int, ...]
    private: bool = False
    closing: int = 0
    found: bool = False
    tokens_digest: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens_digest", digest_of_tokens(self.token_ids))


@dataclass(frozen=True, slots=True)
class Prompt:
    """Segments in order and, for the record, the chunks that had to be left out to fit the model's context.

    trimmed   ids of all that were left out, in the order they were ranked
    too_long  (id, tokens) of those among them that would not have fitted alone either
    room      tokens that the context had for chunks
    stale_ids  (id, id that the chunk brought) of chunks whose text was edited after they were retrieved
    """

    segments: tuple[Segment, ...]
    trimmed: tuple[str, ...] = ()
    too_long: tuple[tuple[str, int], ...] = ()
    room: int = 0
    stale_ids: tuple[tuple[str, str], ...] = ()

    @property
    def token_ids(self) -> list[int]:
        """The ids of the whole prompt."""
        return [token for segment in self.segments for token in segment.token_ids]

    @property
    def bounds(self) -> list[int]:
        """`[segments + 1]`: segment i covers the positions `bounds[i]:bounds[i + 1]`."""
        edges = [0]
        for segment in self.segments:
            edges.append(edges[-1] + len(segment.token_ids))
        return edges


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A retrieved chunk with its similarity score (larger is nearer)."""

    chunk_id: str
    score: float
    text: str
    metadata: Metadata


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a long operation, passed to its `progress` callback.

    done, total  steps finished, and steps in all
    what         the step, in words for a progress bar
    """

    done: int
    total: int
    what: str


DTypeName = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of a model's chunk-caches, apart from the number of tokens."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: DTypeName

    def shape(self, tokens: int) -> tuple[int, int, int, int, int]:
        """`[layers, 2, tokens, kv_heads, head_dim]`."""
        return (self.layers, 2, tokens, self.kv_heads, self.head_dim)

    def nbytes(self, tokens: int) -> int:
        """Bytes of one uncompressed chunk-cache of so many tokens."""
        width = 4 if self.dtype == "float32" else 2
        return self.layers * 2 * tokens * self.kv_heads * self.head_dim * width


@dataclass(frozen=True, slots=True)
class VariantKey:
    """Identity of a shared chunk-cache. Nothing is ever served across a difference in any of these four.

    `fingerprint` covers weights, config (rope included), tokenizer, dtype and layout version.
    `origin_prefix` holds the ids of the segments that stood before the chunk, in order, the system segment first.
    """

    namespace: str
    fingerprint: str
    chunk_id: str
    origin_prefix: tuple[str, ...]

    @property
    def variant_id(self) -> str:
        """Hash of all four parts; names the row and the file of a shared chunk-cache."""
        return self.variant_id_in(None)

    def variant_id_in(self, session: str | None) -> str:
        """`variant_id`, or another for each session that keeps a chunk-cache to itself: those lie side by side.

        >>> key = VariantKey("default", "model", "chunk", ("system",))
        >>> len({key.variant_id, key.variant_id_in("ada"), key.variant_id_in("bob")})
        3
        """
        owner = ("private variant", session) if session is not None else ("variant",)
        return digest(*owner, self.namespace, self.fingerprint, self.chunk_id, *self.origin_prefix)


@dataclass(frozen=True, slots=True)
class Payload:
    """Facts about a variant's bytes, from the look-up; with them any process can open the variant.

    layout  that of the model that asked; None where no model did
    nbytes  on a remote: how many there are
    seal    on a signed remote: a keyed digest of each slice, see `store.remote.signing`
    """

    layout: KVLayout | None = None
    nbytes: int = 0
    seal: bytes = b""


@dataclass(frozen=True, slots=True)
class Variant:
    """A stored chunk-cache as the catalog describes it, without its tensors.

    inter          eq. 3 towards each segment of the origin prefix (same order), averaged over heads and layers
    intra          eq. 4, averaged over heads and layers
    cci            eq. 11
    exact_share    share of the origin prefix's tokens that were exact when this variant was captured: computed, or
                   taken from a lossless chunk-cache of the very same prefix (1.0 = exact capture)
    session        None if shared; otherwise the only session that may use it, because it was captured after private
                   text
    tokens_digest  digest of the token ids; a variant serves only a segment with the same ids
    reuse_frequency  f_r of Cache-Craft §3.3: grows by 1 / max(CFO, 1/tokens) at each use
    primed         True if it was captured by priming, after its neighbours in the document
    home           place where a look-up found it: this store's own catalog, or the remote that several engines share
    payload        facts about its bytes from the look-up; no part of its identity
    """

    key: VariantKey
    variant_id: str
    tokens: int
    tokens_digest: str
    inter: tuple[float, ...]
    intra: float
    cci: float
    exact_share: float
    session: str | None
    codec: str
    nbytes: int
    reuse_frequency: float
    created: float
    home: Literal["disk", "remote"] = "disk"
    primed: bool = False
    payload: Payload = field(default=Payload(), compare=False, repr=False)

    @property
    def lossless(self) -> bool:
        """True if its codec gives back every bit; False for a codec that is not known here."""
        return self.codec in LOSSLESS_CODECS


# arrays have no single truth value, so == could only fail
@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """Scores of a chunk's tokens from its capture, averaged over heads and layers.

    inter  float32 `[tokens]`, eq. 14's score: attention of the token to all chunks before it; None where there were
           none
    """

    inter: np.ndarray | None = None


@dataclass(frozen=True)
class Capture:
    """A newly computed chunk-cache that is to be stored.

    kv             `[layers, 2, tokens, kv_heads, head_dim]`: raw keys and values, contiguous, on the CPU
    extra_variant  True for a further variant of a stored chunk, which is dropped if a process has removed that chunk
    mark           mark by which its text is recognised in prompts, and the position of its last token
                   (`planning.found_text.marks`)
    """

    key: VariantKey
    layout: KVLayout
    tokens_digest: str
    kv: torch.Tensor
    token_scores: TokenScores
    inter: tuple[float, ...]
    intra: float
    cci: float
    exact_share: float
    session: str | None = None
    primed: bool = False
    extra_variant: bool = False
    mark: tuple[int, int] | None = None


TierName = Literal["device", "host", "disk", "remote"]


@dataclass(frozen=True)
class LoadedVariant:
    """A chunk-cache in memory, verified against its checksum. `kv` is shared and must not be written to."""

    variant_id: str
    kv: torch.Tensor
    tier: TierName


class LoadFailure(StrEnum):
    """Reasons for not loading a stored chunk-cache. The value is the code that statistics count by."""

    MISSING = "missing"  # its file or its payload on the remote
    DAMAGED = "damaged"
    UNKNOWN_FORMAT = "unknown_format"  # of a codec that is not installed
    UNREADABLE = "unreadable"  # the system refused; this may pass
    NO_MEMORY = "no_memory"
    NO_REMOTE = "no_remote"  # it is on a remote, and this store has none
    NOT_OFFERED = "not_offered"  # no look-up on the remote has returned it
    CIRCUIT_OPEN = "circuit_open"  # the remote is not asked after repeated failures
    CLOSED = "closed"


class CaptureDrop(StrEnum):
    """Reasons for not storing a capture. The value is the code that statistics count by."""

    CLOSED = "closed"
    TOO_LARGE = "too_large"  # larger than the whole byte budget
    QUEUE_FULL = "queue_full"  # see `StoreConfig.queue_bytes`
    FLAWED = "flawed"  # its scores cannot be stored
    NOT_ENCODABLE = "not_encodable"  # the codec cannot encode its values
    DISK_FULL = "disk_full"
    FILE_ERROR = "file_error"
    CATALOG_ERROR = "catalog_error"
    NO_ROOM = "no_room"  # other writers have taken the byte budget
    READ_ONLY = "read_only"
    FOLDER_GONE = "folder_gone"
    CANCELLED = "cancelled"
    PRIVATE = "private"  # captured after private text, without a session that could reuse it
    WRITE_BACK_FULL = "write_back_full"  # too many captures wait to be described
    FAILED = "failed"  # an exception while it was described
    REMOVED = "removed"  # its chunk was removed


class EvictionReason(StrEnum):
    """Reasons for a chunk-cache to leave the store. The value is the code that statistics count by."""

    BUDGET = "budget"  # the byte budget
    COUNT_CAP = "count_cap"  # max_variants
    CHUNK_CAP = "chunk_cap"  # variants_per_chunk
    ADMINISTRATOR = "administrator"
    REPLACED = "replaced"  # by a newer capture of the same identity
    DAMAGED = "damaged"  # or its file is missing


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A variant that the catalog lists but that could not be served (a miss), or a capture that is not stored.

    code    code that statistics count by
    reason  reason in words, specific to this variant
    """

    variant_id: str
    code: LoadFailure | CaptureDrop
    reason: str


@dataclass(frozen=True, slots=True)
class Damaged(Unavailable):
    """The bytes are missing or damaged permanently, so row and file should be removed. Other reasons may pass."""


class RemovedChunks(set[str]):
    """Ids of chunks that were removed after a capture of them had begun; see `compute.captures.write_back`."""

    __hash__ = object.__hash__  # type: ignore[assignment]  # by identity, to be held weakly
