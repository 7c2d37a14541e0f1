"""A self-check when a server has started: is reuse exact on this very model, in this very vLLM?

The list of refusals cannot be complete: a model may scale its embeddings in its forward, a new backend may keep its
blocks in another way. So a prompt is computed by vLLM alone, by our passes, and from captures of those passes; all
three must predict the same. It is also the first pass, where vLLM compiles. If the model's sliding windows are longer
than the prompt, a second one crosses them.
"""

from __future__ import annotations

import logging
import math
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cachecraft_rag.errors import UnsupportedModelError
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.types.digests import digest
from cachecraft_rag.types.prompts import Prompt, Segment, token_array
from cachecraft_rag.vllm.messages import Ask

logger = logging.getLogger("cachecraft_rag.vllm")

TOKENS = 24  # least tokens of each of the three segments, which are also longer than a vLLM block
LEAST = 8  # segments shorter than this prove nothing
MOST_TOKENS = 8192  # of the prompt that crosses sliding windows, which bounds its time
# Largest difference of log-probabilities that rounding explains, by dtype.
TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}
# Tolerance added for a KV cache in FP8, by the form of its numbers: vLLM's own prefill attends to rounded keys and
# values, our passes do not.
CACHE_TOLERANCE = {"fp8_e4m3": 0.5, "fp8_e5m2": 1.0}
# Fraction of `CACHE_TOLERANCE` allowed between our passes and reuse: both are rounded, few numbers differently.
_BOTH_ROUNDED = 0.1
_MISSING = "a token that is likely there is not among the likeliest here"


@dataclass(frozen=True)
class Predicted:
    """A server's prediction for a request.

    logprobs  token id → log probability, for the likeliest next tokens
    taken     number of tokens that came from chunk-caches
    refused   reason why vLLM computed the prompt without chunk-caches; "" if it used them
    """

    logprobs: Mapping[int, float]
    taken: int = 0
    refused: str = ""


Predict = Callable[[Ask | list[int]], Predicted]


def check_prompt(
    vocabulary: int, *, block_size: int, context_length: int, window: int = 0
) -> Prompt | None:
    """Return an instruction, a chunk and a question of random token ids below `vocabulary`, equally long.

    Each is longer than a vLLM block, so that a chunk-cache is written across blocks, unless the context is too short
    for that. Returns None if three segments of 8 tokens and one token of an answer do not fit it. The same arguments
    give the same token ids, but each call gives new segment ids.

    With a `window`, rows of the chunk and of the question see a part of what is before them, and the last one a part of
    the chunk. Returns None if that takes more than 8,192 tokens, or does not fit the context.

    Args:
        vocabulary: number of token ids of the model.
        block_size: tokens of a vLLM block.
        context_length: most tokens of prompt and answer together.
        window: tokens of the model's sliding windows; 0 if they are to be ignored.
    """
    most = context_length - 1
    length = max(TOKENS, block_size + 1, window // 2 + TOKENS if window else 0)
    if window and 3 * length > min(most, MOST_TOKENS):
        return None
    length = min(length, most // 3)
    if length < LEAST:
        return None
    dice = random.Random(0)
    ids = [tuple(dice.randrange(vocabulary) for _ in range(length)) for _ in range(3)]
    # New names for each start: another server on the same store or remote removes its own ones only.
    start = secrets.token_hex(8)
    names = [digest("self-check", start, str(own)) for own in ids]
    return Prompt(
        (
            Segment("system", names[0], token_array(ids[0])),
            Segment("chunk", names[1], token_array(ids[1])),
            Segment("question", names[2], token_array(ids[2]), private=True),
        )
    )


def self_check(
    name: str,
    prompt: Prompt,
    predict: Predict,
    *,
    kept: Callable[[], bool],
    dtype: str,
    cache_dtype: str = "",
    is_second: bool = False,
) -> bool:
    """Compare vLLM's own prefill, our passes, and reuse after the same prefix.

    These are three requests. The second one captures the instruction and the chunk; the caller removes the captures.

    Args:
        name: name of the model, for messages.
        prompt: the prompt of `check_prompt`.
        predict: serves a request, or a plain prompt if it is given token ids.
        kept: returns True if the captures of the prompt are in the store.
        dtype: dtype of the model's layout, a key of `TOLERANCE`.
        cache_dtype: form of FP8 numbers in vLLM's KV cache, a key of `CACHE_TOLERANCE`; "" if it has the model's dtype.
        is_second: True if a shorter prompt has passed, so this one may be too long for chunk-caches.

    Returns:
        True if all three were compared. False if the store keeps no captures: then only the first two were compared,
        and a warning is logged. False with a warning too if a second prompt is refused.

    Raises UnsupportedModelError if a difference is larger than rounding errors, or our passes or the chunk-caches were
    not used.
    """
    began = time.perf_counter()
    tokens = prompt.bounds[-1]
    plain = predict(prompt.token_ids).logprobs
    rounding = CACHE_TOLERANCE.get(cache_dtype, 0.0)

    def compare(
        what: str,
        prediction: Predicted,
        wanted: int,
        reference: Mapping[int, float],
        tolerance: float,
    ) -> float:
        differences = [
            _difference(prediction, token, logprob, is_rounded=bool(rounding))
            for token, logprob in reference.items()
        ]
        named = "vLLM's own" if reference is plain else "those computed by our passes"
        flaw = _flaw(what, prediction, wanted, differences, tolerance, reference=named)
        if flaw:
            raise UnsupportedModelError(
                f"{name} cannot be served from chunk-caches in this vLLM: in a self-check on {tokens} tokens, {flaw}; "
                "please report it."
            )
        return max(differences)

    computed = predict(Ask(prompt, ReuseConfig(reuse=False), when_stored=True))
    if is_second and computed.refused:
        logger.warning(
            "Reuse in prompts of %d tokens is unchecked, because vLLM computed one without chunk-caches: %s",
            tokens,
            computed.refused,
        )
        return False
    largest = compare("computed by our passes", computed, 0, plain, TOLERANCE[dtype] + rounding)
    if not kept():
        logger.warning(
            "The self-check could not compare reuse: the store keeps no captures (is its folder read-only, or its "
            "budget too small?). Reuse is unchecked on %s.",
            name,
        )
        return False
    # "whole": otherwise chunks that load late from a slow disk would be computed, and reuse would not be compared.
    reused = predict(Ask(prompt, ReuseConfig(capture=False, method=ReuseMethod(loading="whole"))))
    # with rounded keys and values, reuse is compared with our passes, which is stricter
    reference = _likelier_half(computed.logprobs) if rounding else plain
    tolerance = TOLERANCE[dtype] + _BOTH_ROUNDED * rounding
    taken = prompt.bounds[-2]
    largest = max(largest, compare("reused from chunk-caches", reused, taken, reference, tolerance))
    seconds = time.perf_counter() - began
    logger.info(
        "Self-check on %d tokens: differences up to %.2g, in %.1f s", tokens, largest, seconds
    )
    return True


def _flaw(
    what: str,
    prediction: Predicted,
    wanted: int,
    differences: Sequence[float],
    tolerance: float,
    *,
    reference: str,
) -> str:
    """Return why a prediction is not the expected one; "" if it is.

    `wanted` tokens should come from chunk-caches; `reference` names the log-probabilities that it was compared with.
    """
    if prediction.refused or prediction.taken != wanted:
        why = prediction.refused or f"{prediction.taken} of {wanted} tokens came from chunk-caches"
        return f"nothing was {what}: {why}"
    # Not max(differences): it ignores a NaN that is not the first value.
    if all(difference <= tolerance for difference in differences):
        return ""
    differ = f"the log-probabilities {what} differ from {reference}"
    if any(map(math.isnan, differences)):
        return f"{differ}: some are not a number"
    largest = max(differences)
    return f"{differ} by up to {largest:.3g}" if largest < math.inf else f"{differ}: {_MISSING}"


def _difference(prediction: Predicted, token: int, logprob: float, *, is_rounded: bool) -> float:
    """Return by how much a token's log-probability differs.

    A token that is not among the likeliest ones counts as infinitely far away. With rounded keys and values, tokens
    change places: such a token is at least as far away as the last of them.
    """
    predicted = prediction.logprobs.get(token)
    if predicted is not None:
        return abs(predicted - logprob)
    if not is_rounded:
        return math.inf
    last = min(prediction.logprobs.values(), default=-math.inf)
    return max(logprob - last, 0.0)  # in this order: NaN stays NaN


def _likelier_half(logprobs: Mapping[int, float]) -> dict[int, float]:
    likeliest = sorted(logprobs.items(), key=lambda item: -item[1])
    return dict(likeliest[: max(1, len(likeliest) // 2)])
