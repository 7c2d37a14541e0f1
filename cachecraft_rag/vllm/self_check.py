"""A self-check when a server has started: is reuse exact on this very model, in this very vLLM?

The list of refusals cannot be complete: a model may scale its embeddings in its forward, a new backend may keep its
blocks in another way. So a prompt is computed by vLLM alone, by our passes, and from captures of those passes; all
three must predict the same. It is also the first pass, where vLLM compiles.
"""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cachecraft_rag.errors import UnsupportedModelError
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.types import Prompt, Segment, digest
from cachecraft_rag.vllm.messages import Ask

logger = logging.getLogger("cachecraft_rag.vllm")

TOKENS = 24  # of each of the three segments, at least; longer where vLLM's blocks are
LEAST = 8  # fewer prove nothing
# Largest differences of a log probability taken for rounding.
TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}


@dataclass(frozen=True)
class Predicted:
    """A server's prediction for a request.

    logprobs  of the likeliest next tokens, by id
    taken     tokens that came from chunk-caches
    refused   why vLLM computed the prompt alone; empty where it did not
    """

    logprobs: Mapping[int, float]
    taken: int = 0
    refused: str = ""


Predict = Callable[[Ask | list[int]], Predicted]


def check_prompt(vocabulary: int, *, block_size: int, context_length: int) -> Prompt | None:
    """An instruction, a chunk and a question of random ids below `vocabulary`, equally long.

    Each is longer than one of vLLM's blocks, so that a chunk-cache is written across blocks; in a small context they
    are as long as it allows. None where it has no room for a check.
    """
    length = min(max(TOKENS, block_size + 1), (context_length - 1) // 3)
    if length < LEAST:
        return None
    dice = random.Random(0)
    ids = [tuple(dice.randrange(vocabulary) for _ in range(length)) for _ in range(3)]
    # New names for each start: another server on the same store or remote removes its own ones only.
    start = secrets.token_hex(8)
    names = [digest("self-check", start, str(own)) for own in ids]
    return Prompt(
        (
            Segment("system", names[0], ids[0]),
            Segment("chunk", names[1], ids[1]),
            Segment("question", names[2], ids[2], private=True),
        )
    )


def self_check(name: str, prompt: Prompt, predict: Predict, *, kept: Callable[[], bool], dtype: str) -> bool:
    """Compare vLLM's own prefill, our passes, and reuse behind the same prefix.

    Args:
        prompt: of `check_prompt`.
        predict: serves a request; token ids alone: a plain one.
        kept: says whether the captures of the prompt are in the store.

    Returns:
        True if all three were compared. Where the store keeps nothing, which is logged, two of them were.

    Raises:
        UnsupportedModelError: a difference is beyond rounding, or our passes or the chunk-caches were not used, so that
            nothing was compared.
    """
    began, tokens = time.perf_counter(), prompt.bounds[-1]
    plain = predict(prompt.token_ids).logprobs

    def compare(what: str, found: Predicted, wanted: int) -> float:
        if found.refused or found.taken != wanted:
            why = found.refused or f"{found.taken} of {wanted} tokens came from chunk-caches"
            raise UnsupportedModelError(
                f"{name} cannot be served from chunk-caches in this vLLM: in a self-check on {tokens} tokens, nothing "
                f"was {what}: {why}; please report it."
            )
        # Not max() over floats: it passes over a NaN that does not come first.
        apart = [abs(found.logprobs.get(token, float("inf")) - logprob) for token, logprob in plain.items()]
        if not all(one <= TOLERANCE[dtype] for one in apart):
            raise UnsupportedModelError(
                f"{name} cannot be served from chunk-caches in this vLLM: in a self-check on {tokens} tokens, the "
                f"log probabilities {what} differ from vLLM's own by up to {max(apart):.3g}; please report it."
            )
        return max(apart)

    computed = predict(Ask(prompt, ReuseConfig(reuse=False), when_stored=True))
    apart = compare("computed by our passes", computed, 0)
    if not kept():
        logger.warning(
            "The self-check could not compare reuse: the store keeps no captures (is its folder read-only, or its "
            "budget too small?). Reuse is unchecked on %s.", name,
        )  # fmt: skip
        return False
    # Whole: otherwise late loads from a slow disk would be computed instead, and nothing compared.
    reused = predict(Ask(prompt, ReuseConfig(capture=False, loading="whole")))
    apart = max(apart, compare("reused from chunk-caches", reused, prompt.bounds[-2]))
    seconds = time.perf_counter() - began
    logger.info("Self-check on %d tokens: differences up to %.2g, in %.1f s", tokens, apart, seconds)
    return True
