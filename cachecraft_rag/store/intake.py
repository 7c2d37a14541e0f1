"""A birth as the store takes it: its row, and what is wrong with it."""

from __future__ import annotations

import math
from array import array

from cachecraft_rag.errors import StoreError
from cachecraft_rag.types import Birth, Variant


def variant_of(birth: Birth, *, codec: str, created: float) -> Variant:
    """The row of a birth. Raises StoreError when its tensor is not what its layout says."""
    kv, layout = birth.kv, birth.layout
    tokens = kv.shape[2] if kv.dim() == 5 else 0
    dtype = str(kv.dtype).removeprefix("torch.")
    wrong = tuple(kv.shape) != layout.shape(tokens) or dtype != layout.dtype or kv.numel() == 0
    if wrong or not kv.is_contiguous() or kv.device.type != "cpu":
        raise StoreError(
            f"A birth needs a contiguous CPU tensor {list(layout.shape(tokens))} {layout.dtype} with at least one "
            f"token, not {list(kv.shape)} {dtype} on {kv.device}. Call .contiguous().cpu() and check the layout."
        )
    return Variant(
        key=birth.key,
        variant_id=birth.key.variant_id_in(birth.session),
        tokens=tokens,
        tokens_digest=birth.tokens_digest,
        inter=tuple(array("f", birth.inter)),  # as the catalog will give them back
        intra=float(birth.intra),
        cci=float(birth.cci),
        exact_share=float(birth.exact_share),
        session=birth.session,
        codec=codec,
        nbytes=layout.nbytes(tokens),
        reuse_frequency=0.0,
        created=created,
        primed=birth.primed,
    )


def flaw_of(birth: Birth, variant: Variant) -> str:
    """Why no row can be made of its scores, or ""."""
    scores = (variant.intra, variant.cci, variant.exact_share, *variant.inter)
    if not all(map(math.isfinite, scores)):  # half precision overflows; SQLite has no NaN
        return "its attention scores are not finite"
    for token_scores in (birth.token_scores.inter, birth.token_scores.received):
        if token_scores is not None and token_scores.shape != (variant.tokens,):
            return f"it has {token_scores.shape} token scores for {variant.tokens} tokens"
    return ""
