"""Corrections to vLLM's statistics: reused tokens are hits, unless vLLM's own prefix cache has them. Needs no vLLM."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from cachecraft_rag.planning.reasons import Reason
from cachecraft_rag.serving.request import SegmentReport
from cachecraft_rag.types.prompts import Prompt, Segment
from cachecraft_rag.vllm.records import reused_tokens
from cachecraft_rag.vllm.worker.corrections import StatsCorrections

PROMPT = Prompt(
    (
        Segment("system", "s", tuple(range(40))),
        Segment("chunk", "a", tuple(range(60))),
        Segment("chunk", "b", tuple(range(50))),
        Segment("question", "q", tuple(range(10))),
    )
)
TOKENS = PROMPT.bounds[-1]
STORED = SegmentReport("exact", variant_id="s")
COMPUTED = SegmentReport("computed", Reason.NOT_STORED)


class Prefill:
    """vLLM's statistics of a prompt."""

    def __init__(self, local: int) -> None:
        self.num_local_cached_tokens = local
        self.numbers: dict[str, int] = {}

    def set(self, **numbers: int) -> None:
        self.numbers = numbers


@pytest.mark.parametrize(
    ("instruction", "local", "hits"),
    [
        (COMPUTED, 0, 60 + 42),
        (COMPUTED, 32, 60 + 42),  # in vLLM's prefix cache, but not in the store
        (STORED, 0, 40 + 60 + 42),
        (STORED, 32, 8 + 60 + 42),
        (STORED, 64, 36 + 42),
    ],
)
def test_hits_are_the_reused_tokens_after_those_of_vllm_s_own_prefix_cache(
    instruction: SegmentReport, local: int, hits: int
) -> None:
    segments = (
        instruction,
        SegmentReport("exact", variant_id="a"),
        SegmentReport("reused", recomputed=8, variant_id="b"),
        SegmentReport("computed", Reason.QUESTION),
    )
    report: Any = {"segments": [segment.as_dict() for segment in segments], "row_layers": 0}
    prefill = Prefill(local)
    request: Any = SimpleNamespace(request_id="r", num_prompt_tokens=TOKENS, prefill_stats=prefill)
    corrections = StatsCorrections()
    corrections.allocated(request, TOKENS - 1 - local)
    corrections.ended("r", partial(reused_tokens, PROMPT, report))
    corrections.finished("r")
    totals = corrections.totals()
    assert (totals["requests"], totals["queries"], totals["hits"]) == (0, 0, hits)
    assert prefill.numbers["num_external_cached_tokens"] == hits
    assert prefill.numbers["num_local_cached_tokens"] == local
