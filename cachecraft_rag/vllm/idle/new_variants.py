"""New variants over vLLM: separate requests capture chunks that were fixed, and unmarked text that was seen before.

A chunk is captured after the prefix that it had in the earlier prompt. The scheduler holds these requests back while
others run, and the workers compute them in slices, so a request that arrives waits for one slice. Captures of unmarked
text are held back for at most ten seconds, several at once, and are not paused once they have begun. Statistics and the
budget are those of `serving.new_variants`.
"""

from __future__ import annotations

from collections.abc import Callable

from cachecraft_rag.planning.candidates import Candidate
from cachecraft_rag.serving.config import NewVariants
from cachecraft_rag.serving.new_variants import Captured, VariantWork
from cachecraft_rag.vllm.idle.threads import ThreadRunner

# Captures of unmarked text at once: on a busy server each waits ten seconds, so this is a rate of 24 in a minute.
_UNMARKED_AT_ONCE = 4


class IdleVariants(VariantWork):
    """Captures chunks by requests to vLLM. Any thread may call any method.

    Four threads are for unmarked text, which is captured on a busy server too, and one is for captures that need an
    idle server. A capture whose chunks are removed goes on; `removed` names these chunks.

    Args:
        config: when, and how much may be spent.
        capture: computes and stores the missing variants of a candidate.
    """

    def __init__(self, config: NewVariants, capture: Callable[[Candidate], Captured]) -> None:
        lanes = (*[_is_unmarked] * _UNMARKED_AT_ONCE, _is_marked)
        super().__init__(ThreadRunner("cachecraft-variants", capture, lanes), config)


def _is_unmarked(candidate: Candidate) -> bool:
    return bool(candidate.never_stored)


def _is_marked(candidate: Candidate) -> bool:
    return not candidate.never_stored
