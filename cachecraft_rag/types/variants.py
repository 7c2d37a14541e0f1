"""Stored chunk-caches (variants): their identity, the catalog's row, and the loaded tensor."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from cachecraft_rag.types.digests import digest
from cachecraft_rag.types.kv_layout import KVLayout

if TYPE_CHECKING:
    import torch

LOSSLESS_CODECS = frozenset({"raw"})


@dataclass(frozen=True, slots=True)
class VariantKey:
    """Identity of a shared chunk-cache. It is never used for another namespace, fingerprint or chunk.

    `fingerprint` covers weights, config (rope included), tokenizer, dtype and layout version.
    `origin_prefix` holds the ids of the segments before the chunk, in order, the system segment first.
    """

    namespace: str
    fingerprint: str
    chunk_id: str
    origin_prefix: tuple[str, ...]

    def holds(self, chunk_ids: Set[str]) -> bool:
        """Return True if the chunk, or a segment before it, is one of these."""
        return self.chunk_id in chunk_ids or not chunk_ids.isdisjoint(self.origin_prefix)

    @property
    def variant_id(self) -> str:
        """The id of a shared chunk-cache, 32 hex digits: a hash of all four parts. It names the row and the file."""
        return self.variant_id_in(None)

    def variant_id_in(self, session: str | None) -> str:
        """Return the id, 32 hex digits, of a chunk-cache that only this session uses; for None it is `variant_id`.

        >>> key = VariantKey("default", "model", "chunk", ("system",))
        >>> len({key.variant_id, key.variant_id_in("ada"), key.variant_id_in("bob")})
        3
        """
        owner = ("private variant", session) if session is not None else ("variant",)
        return digest(*owner, self.namespace, self.fingerprint, self.chunk_id, *self.origin_prefix)


@dataclass(frozen=True, slots=True)
class PayloadFacts:
    """Facts about a variant's bytes, from the look-up; with them any process can open the variant.

    layout  layout of the asking model; None for a look-up without a model
    nbytes  number of bytes, if they are on a remote
    seal    keyed digest of each slice, if they are on a signed remote, see `store.remote.signing`
    """

    layout: KVLayout | None = None
    nbytes: int = 0
    seal: bytes = b""


@dataclass(frozen=True, slots=True)
class Variant:
    """A stored chunk-cache as the catalog describes it, without its tensors.

    variant_id     `key.variant_id_in(session)`
    tokens         number of tokens
    inter          eq. 3 towards each segment of the origin prefix (same order), averaged over heads and layers
    intra          eq. 4, averaged over heads and layers
    cci            eq. 11
    exact_share    share of the origin prefix's tokens that were exact when this variant was captured: computed, or
                   taken from a lossless chunk-cache with the same origin prefix (1.0 = exact capture)
    session        None if shared; otherwise the only session that may use it, because it was captured after private
                   text
    tokens_digest  digest of the token ids; a variant serves only a segment with the same ids
    codec          name in `store.codecs.CODECS`
    nbytes         bytes of the tensor, not encoded
    reuse_frequency  f_r of Cache-Craft §3.3: grows by 1 / max(CFO, 1/tokens) at each use
    created        time of the capture, in seconds since 1970
    primed         True if it was captured by priming, after its neighbours in the document or after similar chunks
    home           catalog in which a look-up found it: this store's, or that of a remote
    payload_facts  facts about its bytes from the look-up; no part of its identity
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
    payload_facts: PayloadFacts = field(default=PayloadFacts(), compare=False, repr=False)

    @property
    def lossless(self) -> bool:
        """True if its codec gives back every bit; False for a codec that is not known here."""
        return self.codec in LOSSLESS_CODECS


@dataclass(frozen=True, slots=True)
class HeldChunk:
    """A chunk as a store holds it.

    tokens     number of tokens of the chunk; 0 if the store has no chunk-cache of it
    in_memory  True if one of its chunk-caches is in memory, so that nothing has to be read from the disk
    """

    chunk_id: str
    tokens: int = 0
    in_memory: bool = False


TierName = Literal["device", "host", "disk", "remote"]


@dataclass(frozen=True)
class LoadedVariant:
    """A chunk-cache in memory, as it was computed here, or verified against its checksum.

    kv    `[layers, 2, tokens, kv_heads, head_dim]`, raw keys and values; shared, so it must not be written to
    tier  place that it was read from
    """

    variant_id: str
    kv: torch.Tensor
    tier: TierName
