"""A short self-check when a model is loaded: is reuse exact on this very model?

Structure can look right and still be wrong: a layer without rotary embedding, a sink parameter in the attention,
another order of dimensions. Garbled answers are the worst way to find out, so a model whose numbers do not agree with
its own forward is refused.
"""

from __future__ import annotations

import torch

from cachecraft_rag.errors import UnsupportedModelError
from cachecraft_rag.models import Decoder
from cachecraft_rag.prefill import PrefillInput, Reused, prefill

PROBE_TOKENS = 48
# Largest relative error (L2 of the logits) taken for rounding. Half precision: 0.02 was the largest seen on sound
# models.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.1}


def self_check(decoder: Decoder) -> float:
    """Compare recomputing everything (gate G1) and reusing everything (gate G2) with the model's own forward on a few
    tokens.

    Returns:
        The larger of the two relative errors.

    Raises:
        UnsupportedModelError: it is beyond rounding.
    """
    generator = torch.Generator().manual_seed(0)
    size = int(decoder.model.config.vocab_size)
    ids = torch.randint(0, size, (PROBE_TOKENS,), generator=generator).tolist()
    own = decoder.own_logits(ids)[0]
    half = PROBE_TOKENS // 2
    bounds = [0, half, PROBE_TOKENS]
    full = prefill(decoder, PrefillInput(ids, bounds, range(PROBE_TOKENS), births=[0]))
    births = full.recorder.births if full.recorder is not None else ()
    reused = [Reused(birth.start, birth.kv) for birth in births]
    partial = prefill(decoder, PrefillInput(ids, bounds, range(half, PROBE_TOKENS), reused=reused))
    error = max(float((out.logits - own).norm() / own.norm()) for out in (full, partial))
    if not error <= TOLERANCE[decoder.dtype]:
        kind = decoder.model.config.model_type
        raise UnsupportedModelError(
            f"{decoder.name} ({kind}) cannot be served from chunk-caches: a self-check on {PROBE_TOKENS} tokens "
            f"differs from the model's own forward by {error:.1%}. Its attention does something this package does not "
            "know; please report it."
        )
    return error
