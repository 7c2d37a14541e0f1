"""Checks of a stored row before use: rows come from files and servers that others may write.

`row_error` checks the row alone, `RowBounds` compares it with model and prompt. Both return the first flaw, or "". A
checksum proves that a row was not changed, not that it is correct. So every field that determines how much memory is
allocated, or which positions count as filled, is compared with the model and the segment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cachecraft_rag.types.captures import TokenScores
from cachecraft_rag.types.kv_layout import KVLayout
from cachecraft_rag.types.variants import Variant

# Variants of one chunk that a look-up on a remote accepts; remotes keep 8 by default.
MOST_VARIANTS = 64
_MOST_COUNT = 1 << 62  # tokens or bytes
_LATEST = 1e11  # seconds since the epoch: the year 5138
_MOST_USES = 1e15  # largest f_r; one use adds at most the chunk's number of tokens
_ROUNDING = 1.001  # tolerance for sums of attention, which is at most 1 per token


@dataclass(frozen=True)
class LookupResult:
    """Result of a look-up.

    variants  chunk id → variants in no order, for every given id; a list may be empty
    refused   chunk id → reason why a stored variant was refused; other variants of the chunk may have been found
    removed   those of the given chunks that were removed with their documents: nothing of them is stored
    remote    outcome of the remote look-up: "answered", "left alone", "too slow" or "failed"; None if the look-up did
              not need the remote, or the store has no remote
    """

    variants: dict[str, list[Variant]]
    refused: dict[str, str] = field(default_factory=dict)
    remote: str | None = None
    removed: frozenset[str] = frozenset()

    def outcomes(self) -> dict[str, int]:
        """Return outcome → number of chunks: "found", "not_stored", and "refused" if it is not 0.

        A chunk with a variant counts as "found", also if another was refused.
        """
        hits = sum(map(bool, self.variants.values()))
        refused = sum(name in self.refused for name, offers in self.variants.items() if not offers)
        counts = {"found": hits, "not_stored": len(self.variants) - hits - refused}
        return counts | ({"refused": refused} if refused else {})


@dataclass(frozen=True, slots=True)
class RowBounds:
    """Limits on the rows of a look-up, from model and prompt.

    layout          layout of the model's chunk-caches
    context_length  most tokens of a prompt, and so the most segments
    segments        chunk id → number of its tokens, and the digest of their ids, for every chunk that is looked up
    """

    layout: KVLayout
    context_length: int
    segments: Mapping[str, tuple[int, str]]

    def flaw(self, variant: Variant) -> str:
        """Return the first reason why this variant cannot belong to this model or prompt, or "".

        Another tokenisation is not a flaw: the planner ignores such a variant.
        """
        tokens, tokens_digest = self.segments[variant.key.chunk_id]
        prefix = variant.key.origin_prefix
        if variant.tokens_digest == tokens_digest and variant.tokens != tokens:
            return f"it says it has {variant.tokens} tokens, and the chunk has {tokens}"
        if variant.tokens + len(prefix) > self.context_length:
            return "it is longer than the model's context"
        if len(set(prefix)) != len(prefix):  # a prompt holds no segment twice
            return "a segment stands twice in its origin prefix"
        if variant.nbytes != self.layout.nbytes(variant.tokens):
            return f"it says it has {variant.nbytes} bytes, and the model's have {self.layout.nbytes(variant.tokens)}"
        if variant.variant_id != variant.key.variant_id_in(variant.session):
            return "its id is not that of its identity"
        return ""

    def with_layout(self, variant: Variant) -> Variant:
        """Return a copy of the variant with the model's layout in its `payload_facts`, to check its bytes."""
        return replace(variant, payload_facts=replace(variant.payload_facts, layout=self.layout))


def row_error(variant: Variant) -> str:
    """Return why the row is invalid, or "" if it is valid. Every look-up checks every row, so this is fast.

    It checks types and ranges of the fields, and that `inter` has one number per segment of the origin prefix.
    """
    key = variant.key
    tokens = variant.tokens
    nbytes = variant.nbytes
    inter = variant.inter
    most = _MOST_COUNT
    try:
        names = (
            key.namespace,
            key.fingerprint,
            key.chunk_id,
            variant.variant_id,
            variant.tokens_digest,
            variant.codec,
        )
        "".join((*names, variant.session or "", *key.origin_prefix)).encode()
        if not (type(tokens) is type(nbytes) is int and 0 < tokens < most and 0 < nbytes < most):
            return "its sizes are not valid"
        if type(variant.primed) is not bool or len(inter) != len(key.origin_prefix):
            return "its scores do not fit its origin prefix"
        attention = tokens * _ROUNDING
        # The sum is NaN if one of them is.
        if inter and not (min(inter) >= 0.0 and sum(inter) <= attention * len(inter)):
            return "its scores are out of range"
        if not (
            0.0 <= variant.cci <= _ROUNDING
            and 0.0 <= variant.exact_share <= 1.0
            and 0.0 <= variant.intra <= attention
            and 0.0 <= variant.reuse_frequency <= _MOST_USES
            and 0.0 <= variant.created <= _LATEST
        ):
            return "a number of it is out of range"
    # of another type; half a surrogate pair, which cannot be written down
    except (TypeError, ValueError):
        return "it has fields of the wrong kind"
    return ""


def scores_are_wrong(scores: TokenScores, tokens: int) -> bool:
    """Return True if token scores are not `[tokens]`, or not valid attention: below 0, above `tokens`, or NaN.

    The upper limit has a tolerance of 0.1 %. Unknown scores are not wrong.
    """
    inter = scores.inter
    if inter is None:
        return False
    return inter.shape != (tokens,) or not (
        float(inter.min()) >= 0.0 and float(inter.max()) <= tokens * _ROUNDING
    )
