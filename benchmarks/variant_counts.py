"""The number of variants of a store's chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cachecraft_rag.engine.engine import Engine
    from cachecraft_rag.vllm.engine import VLLMEngine


def variant_counts(engine: Engine | VLLMEngine) -> dict[int, int]:
    """Number of variants → number of chunks that have so many, ascending; the instruction is left out."""
    variants: Counter[str] = Counter()
    while page := engine.store.rows(offset=variants.total(), limit=1000):
        variants.update(row.variant.key.chunk_id for row in page)
    del variants[engine.prompts.system.segment_id]
    return dict(sorted(Counter(variants.values()).items()))


def variants_per_chunk(counts: Mapping[int, int]) -> float:
    """The mean.

    >>> variants_per_chunk({1: 3, 3: 1})
    1.5
    """
    return sum(n * chunks for n, chunks in counts.items()) / max(sum(counts.values()), 1)
