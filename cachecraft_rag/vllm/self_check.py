"""A self-check when a server has started: is reuse exact on this very model, in this very vLLM?

The list of what is refused cannot be complete: a model may scale its embeddings in its forward, a new backend may keep
its blocks in another way. So a few tokens are computed by vLLM alone, by our passes, and from captures of those passes;
all three must predict the same. It is also the first pass, which compiles what has to be compiled.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from cachecraft_rag.errors import UnsupportedModelError
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.types import Prompt, Segment, digest
from cachecraft_rag.vllm.messages import Ask

TOKENS = 24  # of each of the three segments
# Largest differences of a log probability taken for rounding.
TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}

Predict = Callable[[Ask | list[int]], Mapping[int, float]]


def self_check(name: str, predict: Predict, *, vocabulary: int, dtype: str) -> list[str]:
    """Compare vLLM's own prefill, our passes, and reuse behind the same prefix.

    Args:
        predict: serves a request (token ids alone: a plain one) and gives the log probabilities of the likeliest next
            tokens, by id.
        vocabulary: ids below it are used.

    Returns:
        The ids of the segments that are stored now.

    Raises:
        UnsupportedModelError: a difference is beyond rounding.
    """
    dice = random.Random(0)
    ids = [tuple(dice.randrange(vocabulary) for _ in range(TOKENS)) for _ in range(3)]
    names = [digest("self-check", str(own)) for own in ids]
    prompt = Prompt(
        (
            Segment("system", names[0], ids[0]),
            Segment("chunk", names[1], ids[1]),
            Segment("question", names[2], ids[2], private=True),
        )
    )
    plain = predict(prompt.token_ids)
    computed = predict(Ask(prompt, ReuseConfig(reuse=False), when_stored=True))
    reused = predict(Ask(prompt, ReuseConfig(capture=False)))
    for what, found in (("computed by our passes", computed), ("reused from chunk-caches", reused)):
        # Not max() over floats: it passes over a NaN that does not come first.
        apart = [abs(found.get(token, float("inf")) - logprob) for token, logprob in plain.items()]
        if not all(one <= TOLERANCE[dtype] for one in apart):
            raise UnsupportedModelError(
                f"{name} cannot be served from chunk-caches in this vLLM: in a self-check on {3 * TOKENS} tokens, the "
                f"log probabilities {what} differ from vLLM's own by up to {max(apart):.3g}; please report it."
            )
    return names[:-1]
