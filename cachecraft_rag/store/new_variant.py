"""From a capture to the variant that the catalog will list, or to the reason why it cannot be stored."""

from __future__ import annotations

import math
from array import array

from cachecraft_rag.errors import StoreError
from cachecraft_rag.types import Capture, Variant


def variant_of(capture: Capture, *, codec: str, created: float) -> Variant:
    """The row of a capture. Raises StoreError when its tensor is not what its layout says."""
    kv, layout = capture.kv, capture.layout
    tokens = kv.shape[2] if kv.dim() == 5 else 0
    dtype = str(kv.dtype).removeprefix("torch.")
    wrong = tuple(kv.shape) != layout.shape(tokens) or dtype != layout.dtype or kv.numel() == 0
    if wrong or not kv.is_contiguous() or kv.device.type != "cpu":
        raise StoreError(
            f"A capture needs a contiguous CPU tensor {list(layout.shape(tokens))} {layout.dtype} with at least one "
            f"token, not {list(kv.shape)} {dtype} on {kv.device}. Call .contiguous().cpu() and check the layout."
        )
    return Variant(
        key=capture.key,
        variant_id=capture.key.variant_id_in(capture.session),
        tokens=tokens,
        tokens_digest=capture.tokens_digest,
        inter=tuple(array("f", capture.inter)),  # as the catalog will give them back
        intra=float(capture.intra),
        cci=float(capture.cci),
        exact_share=float(capture.exact_share),
        session=capture.session,
        codec=codec,
        nbytes=layout.nbytes(tokens),
        reuse_frequency=0.0,
        created=created,
        primed=capture.primed,
    )


def flaw_of(capture: Capture, variant: Variant) -> str:
    """Why no row can be made of its scores, or ""."""
    scores = (variant.intra, variant.cci, variant.exact_share, *variant.inter)
    if not all(map(math.isfinite, scores)):  # half precision overflows; SQLite has no NaN
        return "its attention scores are not finite"
    for token_scores in (capture.token_scores.inter, capture.token_scores.received):
        if token_scores is not None and token_scores.shape != (variant.tokens,):
            return f"it has {token_scores.shape} token scores for {variant.tokens} tokens"
    return ""
