"""The length from which prompts are answered sooner with reuse, measured when an engine starts on a GPU.

A GPU computes a short prompt in the time that looking up, copying and launching take. How short depends on the GPU, the
model and the processor, so it is measured with the model that runs: full prefill against reuse, on prompts of random
tokens, each twice as long as the one before. Over vLLM, full prefill is vLLM's own.
"""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cachecraft_rag.planning.config import DEFAULT_RATIO, ReuseConfig
from cachecraft_rag.types.digests import digest
from cachecraft_rag.types.prompts import Prompt, Segment

logger = logging.getLogger("cachecraft_rag")

SHORTEST = 1024  # tokens of the first prompt that is measured
LONGEST = 32768  # and of the last one
CHUNK = 512  # tokens of each of its chunks
LONGEST_OVER = 128  # most tokens that a prompt has beyond its length, and those of the answer
# prompts that are timed with and without reuse for each length; the first of each warms up
_TIMINGS = 5
_AROUND = 64  # tokens of the instruction and of the question together
_GAIN = 0.95  # share of full prefill's time that reuse must stay below to count as sooner


@dataclass(frozen=True)
class Times:
    """Seconds to the first token of one prompt: with full prefill, and with reuse."""

    full_s: float
    reused_s: float


def lengths_up_to(longest: int) -> list[int]:
    """Return the lengths of the prompts to measure, in tokens, ascending; [] if the context is too short for any.

    The first one is 1,024, each other one is twice the one before, and the last one is at most 32,768.

    Args:
        longest: most tokens of a prompt that the engine can fill from chunk-caches.

    >>> lengths_up_to(5000)
    [1024, 2048, 4096]
    """
    lengths = []
    tokens = SHORTEST
    while tokens <= min(longest, LONGEST):
        lengths.append(tokens)
        tokens *= 2
    return lengths


def shortest_prompt(lengths: Sequence[int], measure: Callable[[int], Times | None]) -> int:
    """Return the smallest of these lengths at which reuse is sooner; 0 if it is the first one, or none was measured.

    Reuse counts as sooner if it takes less than 95 % of full prefill's time. Lengths are measured in order up to the
    first one at which it is sooner. If it is sooner at none of those measured, the result is one more than the last of
    them, and a warning is logged. The times and the result are logged at level INFO. Errors of `measure` pass.

    Args:
        lengths: lengths of prompts in tokens, ascending.
        measure: times a prompt of this length; None if it could not be reused, which ends the measurement.

    >>> shortest_prompt([1024, 2048], lambda tokens: Times(1.0, 1.5 if tokens < 2000 else 0.5))
    2048
    """
    measured: dict[int, str] = {}
    is_sooner = False
    for tokens in lengths:
        times = measure(tokens)
        if times is None:
            break
        measured[tokens] = f"{1000 * times.full_s:.0f} / {1000 * times.reused_s:.0f}"
        is_sooner = times.reused_s < _GAIN * times.full_s
        if is_sooner:
            break
    if not measured:
        return 0

    last = max(measured)
    logger.info(
        "Tokens of a prompt: milliseconds in full / with reuse: %s",
        ", ".join(f"{tokens}: {pair}" for tokens, pair in measured.items()),
    )
    if not is_sooner:
        logger.warning(
            "Reuse is no faster than computing for prompts of up to %d tokens here, so those are computed in full. "
            "Set min_prompt_tokens to reuse chunk-caches all the same.",
            last,
        )
        return last + 1
    if len(measured) == 1:
        return 0
    logger.info("Prompts of fewer than %d tokens are computed in full (min_prompt_tokens)", last)
    return last


def timed(
    config: ReuseConfig, ask: Callable[[ReuseConfig], float | None], *, least_s: float = 0.0
) -> Times | None:
    """Time one prompt with full prefill and with reuse, in turn; None once it could not be reused.

    The fastest of several counts for both, because what slows a single request down may hit either. Errors of `ask`
    pass.

    Args:
        config: settings of reuse. Where CFO would decide, `DEFAULT_RATIO` does: CFO says nothing about random
            tokens.
        ask: answers the prompt with these settings, and returns the seconds to the first token; None if it was to be
            reused, and was not.
        least_s: go on for so many seconds at least.
    """
    ratio = DEFAULT_RATIO if config.fixed_ratio is None else config.fixed_ratio
    reuse = replace(config, capture=False, recompute_ratio=ratio)
    full = ReuseConfig.full_prefill()
    seconds: dict[ReuseConfig, list[float]] = {full: [], reuse: []}
    started = time.perf_counter()
    while len(seconds[full]) < _TIMINGS or time.perf_counter() - started < least_s:
        for side, times in seconds.items():
            took = ask(side)
            if took is None:
                return None
            times.append(took)
    # the first of each has warmed up
    return Times(min(seconds[full][1:]), min(seconds[reuse][1:]))


def prompts_of(tokens: int, *, vocabulary: int) -> tuple[Prompt, Prompt]:
    """Return a prompt of about so many random tokens, and its instruction and chunks in another order to capture.

    The second one has no question. Every chunk has another place in it, because none is to be reused exactly. The
    instruction and the question have 32 tokens each, and each chunk has 512; there are at least two chunks. The same
    `tokens` give the same token ids, but each call gives new segment ids.

    Args:
        tokens: length of the first prompt, at least `SHORTEST`; it is met to half a chunk.
        vocabulary: number of token ids of the model. Raises ValueError if it is below 1.
    """
    dice = random.Random(tokens)
    start = secrets.token_hex(8)  # other engines on the same store use other names

    def segment(kind: str, length: int, number: int) -> Segment:
        ids = tuple(dice.randrange(vocabulary) for _ in range(length))
        name = digest("shortest prompt", start, str(tokens), kind, str(number))
        return Segment(kind, name, ids, private=kind == "question")  # type: ignore[arg-type]

    system = segment("system", _AROUND // 2, 0)
    count = max(2, round((tokens - _AROUND) / CHUNK))
    chunks = [segment("chunk", CHUNK, number) for number in range(count)]
    question = segment("question", _AROUND // 2, 0)
    return Prompt((system, *chunks, question)), Prompt((system, *chunks[1:], chunks[0]))
