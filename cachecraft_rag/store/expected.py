"""What a stored chunk-cache must be before anything of it is used: rows come from files and servers that others write.

`unsound` is about the row alone, `Expected` about the prompt and the model that ask. Both give the first flaw in words,
or "". A checksum says that a row is as somebody wrote it, not that it is true; so every field that decides how much is
allocated, or which positions count as filled, is compared with what the model and the segment say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cachecraft_rag.types import KVLayout, TokenScores, Variant

MOST_VARIANTS = 64  # of one chunk that a look-up believes; stores keep 5, remotes 8
_MOST_COUNT = 1 << 62  # tokens or bytes
_LATEST = 1e11  # seconds since the epoch: the year 5138
_MOST_USES = 1e15  # what f_r may be: one use adds at most the chunk's number of tokens
_ROUNDING = 1.001  # sums of attention, which is 1 per token at most


@dataclass(frozen=True)
class Found:
    """What a look-up gives.

    variants  by chunk id; every asked id is a key
    refused   by chunk id: why something that is stored is not among them
    remote    how the remote took it: "answered", or why not; None where it was not asked
    """

    variants: dict[str, list[Variant]]
    refused: dict[str, str] = field(default_factory=dict)
    remote: str | None = None

    def outcomes(self) -> dict[str, int]:
        """How many chunks were "found", how many not: "refused" or "not_stored"; of the second only where there are."""
        hits = sum(map(bool, self.variants.values()))
        refused = sum(name in self.refused for name, offers in self.variants.items() if not offers)
        counts = {"found": hits, "not_stored": len(self.variants) - hits - refused}
        return counts | ({"refused": refused} if refused else {})


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

        One that was tokenised in another way is no flaw, but it serves no request: the planner passes over it. Whether
        its id is that of its identity shows when it is opened: a hash for each would take as long as the rest.
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
        # The second is that of a private variant from before sessions had ids of their own.
        if variant.variant_id not in (variant.key.variant_id_in(variant.session), variant.key.variant_id):
            return "its id is not that of its identity"
        return ""

    def informed(self, variant: Variant) -> Variant:
        """The variant with what its payload must be, for the one who opens it."""
        return replace(variant, payload=replace(variant.payload, layout=self.layout))

    def sift(self, offered: Mapping[str, list[Variant]]) -> tuple[Found, list[tuple[Variant, str]]]:
        """What of these variants may serve, and those that never can, with their flaws."""
        flawed = [(one, flaw) for offers in offered.values() for one in offers if (flaw := self.flaw(one))]
        bad = {id(one) for one, _ in flawed}
        kept = {name: [one for one in offers if id(one) not in bad] for name, offers in offered.items()}
        return Found(kept, {one.key.chunk_id: flaw for one, flaw in flawed}), flawed


def unsound(variant: Variant) -> str:
    """Why no row may be like this, whatever the model; or "". Every look-up asks it of every row, so it is short."""
    key, tokens, nbytes, inter = variant.key, variant.tokens, variant.nbytes, variant.inter
    most = _MOST_COUNT
    try:
        names = (key.namespace, key.fingerprint, key.chunk_id, variant.variant_id, variant.tokens_digest, variant.codec)
        "".join((*names, variant.session or "", *key.origin_prefix)).encode()
        if not (type(tokens) is type(nbytes) is int and 0 < tokens < most and 0 < nbytes < most):
            return "its sizes are not valid"
        if type(variant.primed) is not bool or len(inter) != len(key.origin_prefix):
            return "its scores do not fit its origin prefix"
        attention = tokens * _ROUNDING
        # The sum, because it is NaN where one of them is.
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
    except (TypeError, ValueError):  # of another type; half a surrogate pair, which cannot be written down
        return "it has fields of the wrong kind"
    return ""


def unsound_scores(scores: TokenScores, tokens: int) -> bool:
    """Whether token scores are of another number of tokens, or no attention: a token pays 1 and is paid `tokens`."""
    there = [one for one in (scores.inter, scores.received) if one is not None]
    return any(
        one.shape != (tokens,) or not (float(one.min()) >= 0.0 and float(one.max()) <= tokens * _ROUNDING)
        for one in there
    )
