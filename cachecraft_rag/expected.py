"""What a stored chunk-cache must be before anything of it is used: rows come from files and servers that others write.

`unsound` is about the row alone, `Expected` about the prompt and the model that ask. Both give the first flaw in words,
or "". A checksum says that a row is as somebody wrote it, not that it is true; so every field that decides how much is
allocated, or which positions count as filled, is compared with what the model and the segment say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from cachecraft_rag.types import KVLayout, TokenScores, Variant, VariantKey

MOST_VARIANTS = 64  # of one chunk that a look-up believes; stores keep 5, remotes 8
_LATEST = 1e11  # seconds since the epoch: the year 5138
_MOST_USES = 1e15  # what f_r may be: one use adds at most the chunk's number of tokens
_ROUNDING = 1.001  # sums of attention, which is 1 per token at most


@dataclass(frozen=True)
class Found:
    """What a look-up gives.

    variants  by chunk id; every asked id is a key
    refused   by chunk id: why something that is stored is not among them
    """

    variants: dict[str, list[Variant]]
    refused: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Expected:
    """What the model and the prompt say of the chunk-caches that are looked up.

    layout          of the model's chunk-caches
    context_length  most tokens of a prompt; no prompt has more segments
    segments        chunk id → how many tokens it has, and the digest of their ids
    """

    layout: KVLayout
    context_length: int
    segments: Mapping[str, tuple[int, str]]

    def flaw(self, variant: Variant) -> str:
        """Why this variant cannot be of this model, or "".

        One that was tokenised in another way is no flaw, but it serves nobody: the planner passes over it.
        """
        tokens, tokens_digest = self.segments[variant.key.chunk_id]
        prefix = variant.key.birth_prefix
        if variant.tokens_digest == tokens_digest and variant.tokens != tokens:
            return f"it says it has {variant.tokens} tokens, and the chunk has {tokens}"
        if variant.tokens + len(prefix) > self.context_length:
            return "it is longer than the model's context"
        if len(set(prefix)) != len(prefix):  # a prompt holds no segment twice
            return "a segment stands twice in its birth prefix"
        if variant.nbytes != self.layout.nbytes(variant.tokens):
            return f"it says it has {variant.nbytes} bytes, and the model's have {self.layout.nbytes(variant.tokens)}"
        if variant.variant_id != variant.key.variant_id:
            return "its id is not that of its identity"
        return ""

    def informed(self, variant: Variant) -> Variant:
        """The variant with what its payload must be, for whoever opens it."""
        return replace(variant, payload=replace(variant.payload, layout=self.layout))

    def sift(self, offered: Mapping[str, list[Variant]]) -> tuple[Found, list[tuple[Variant, str]]]:
        """What of these variants may serve, and those that never can, with their flaws."""
        flawed = [(one, flaw) for offers in offered.values() for one in offers if (flaw := self.flaw(one))]
        bad = {id(one) for one, _ in flawed}
        kept = {name: [self.informed(one) for one in offers if id(one) not in bad] for name, offers in offered.items()}
        return Found(kept, {one.key.chunk_id: flaw for one, flaw in flawed}), flawed


def unsound(variant: Variant) -> str:
    """Why no row may be like this, whatever the model; or ""."""
    key, tokens = variant.key, variant.tokens
    texts = (variant.variant_id, variant.tokens_digest, variant.codec, *key.birth_prefix)
    if not _are_texts(key) or not all(type(text) is str for text in texts):
        return "texts"
    if not all(type(count) is int and 0 < count < 1 << 62 for count in (tokens, variant.nbytes)):
        return "counts"
    if type(variant.primed) is not bool or not (variant.session is None or type(variant.session) is str):
        return "owner"
    if len(variant.inter) != len(key.birth_prefix):
        return "scores towards its birth prefix"
    most = tokens * _ROUNDING
    shares = ((variant.cci, _ROUNDING), (variant.exact_share, 1.0), (variant.intra, most))
    ages = ((variant.reuse_frequency, _MOST_USES), (variant.created, _LATEST))
    for value, limit in (*shares, *ages, *((score, most) for score in variant.inter)):
        if type(value) is not float and type(value) is not int:
            return "numbers"
        if not 0 <= value <= limit:  # NaN neither
            return f"a number out of range: {value:.3g}"
    return ""


def unsound_scores(scores: TokenScores, tokens: int) -> bool:
    """Whether token scores are of another number of tokens, or no attention at all."""
    for one in (scores.inter, scores.received):
        if one is not None and (one.shape != (tokens,) or not math.isfinite(total := float(one.sum())) or total < 0):
            return True
        if one is not None and not bool(np.all(one >= 0)):
            return True
    return False


def _are_texts(key: VariantKey) -> bool:
    """Whether an identity is made of text that can be written down: half a surrogate pair cannot."""
    parts = (key.namespace, key.fingerprint, key.chunk_id, *key.birth_prefix)
    if not all(type(part) is str for part in parts):
        return False
    try:
        "".join(parts).encode()
    except UnicodeEncodeError:
        return False
    return True
