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
from cachecraft_rag.types.prompts import Prompt, Segment, token_array

logger = logging.getLogger("cachecraft_rag")

SHORTEST = 1024  # tokens of the first prompt that is measured
LONGEST = 32768  # and of the last one
CHUNK = 512  # tokens of each of its chunks
LONGEST_OVER = 128  # most tokens that a prompt has beyond its length, and those of the answer
_PAIRS = 10  # timings of each length, each in full and with reuse, after a pair that warms up
_AROUND = 64  # tokens of the instruction and of the question together
_GAIN = 0.95  # share of full prefill's time that reuse must stay below to count as sooner


@dataclass(frozen=True)
class Times:
    """Seconds to the first token of one prompt: with full prefill, and with reuse."""

    full_s: float
    reused_s: float


def lengths_up_to(longest: int) -> list[int]:
    """Return the lengths to measure, in tokens: 1,024 and each twice the last, up to `longest` and 32,768; maybe [].

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

    Sooner means less than 95 % of full prefill's time. If reuse is sooner at none, the result is one more than the last
    length measured, and a warning is logged. `lengths` ascend. `measure` gets each of them, up to the first that is
    sooner; if it returns None, because the prompt could not be reused, the measurement ends.

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
    config: ReuseConfig,
    ask: Callable[[ReuseConfig], float | None],
    *,
    tokens: int,
    least_s: float = 0.0,
) -> Times | None:
    """Time one prompt with full prefill and with reuse, in turn; None once it could not be reused.

    The fastest of ten or more counts for both, after one to warm up: what slows a request down may hit either.

    Args:
        config: settings of reuse; `DEFAULT_RATIO` replaces CFO, which says nothing about random tokens.
        ask: answers with these settings; returns seconds to the first token, None if reuse was on and failed.
        tokens: length of the prompt, for the log.
        least_s: go on for so many seconds at least, and for ten timings.
    """
    ratio = DEFAULT_RATIO if config.ratio_in_use is None else config.ratio_in_use
    reuse = replace(config, capture=False, recompute_ratio=ratio)
    full = ReuseConfig.full_prefill()
    seconds: dict[ReuseConfig, list[float]] = {full: [], reuse: []}
    started = time.perf_counter()
    while len(seconds[full]) <= _PAIRS or time.perf_counter() - started < least_s:
        for side, times in seconds.items():
            took = ask(side)
            if took is None:
                return None
            times.append(took)
    for side, times in seconds.items():
        logger.info(
            "Milliseconds of a prompt of %d tokens %s, the first warms up: %s",
            tokens,
            "with reuse" if side.reuse else "in full",
            " ".join(f"{1000 * took:.1f}" for took in times),
        )
    return Times(min(seconds[full][1:]), min(seconds[reuse][1:]))


def prompts_of(tokens: int, *, vocabulary: int) -> tuple[Prompt, Prompt]:
    """Return a prompt of about so many random tokens, and its instruction and chunks in another order to capture.

    The second one has no question, and every chunk another place, because none is to be reused exactly. There are two
    chunks of 512 tokens, or more. The same `tokens` give the same ids, below `vocabulary`, each call new segment ids.
    """
    dice = random.Random(tokens)
    start = secrets.token_hex(8)  # other engines on the same store use other names

    def segment(kind: str, length: int, number: int) -> Segment:
        ids = token_array([dice.randrange(vocabulary) for _ in range(length)])
        name = digest("shortest prompt", start, str(tokens), kind, str(number))
        return Segment(kind, name, ids, private=kind == "question")  # type: ignore[arg-type]

    system = segment("system", _AROUND // 2, 0)
    count = max(2, round((tokens - _AROUND) / CHUNK))
    chunks = [segment("chunk", CHUNK, number) for number in range(count)]
    question = segment("question", _AROUND // 2, 0)
    return Prompt((system, *chunks, question)), Prompt((system, *chunks[1:], chunks[0]))
