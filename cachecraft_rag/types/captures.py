"""New chunk-caches on their way to the store, with their attention scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cachecraft_rag.types.kv_layout import KVLayout
from cachecraft_rag.types.variants import Variant, VariantKey

if TYPE_CHECKING:
    import numpy as np
    import torch


# arrays have no single truth value, so == could only fail
@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """Scores of a chunk's tokens from its capture, averaged over heads and layers.

    inter  float32 `[tokens]`, eq. 14's score: attention of the token to all chunks before it; None where there were
           none
    """

    inter: np.ndarray | None = None


@dataclass(frozen=True)
class Capture:
    """A newly computed chunk-cache that is to be stored; attributes that are not listed are those of `Variant`.

    kv             `[layers, 2, tokens, kv_heads, head_dim]`: raw keys and values, contiguous, on the CPU; not to be
                   written to any more, because memory holds it
    extra_variant  True for a further variant of a stored chunk, which is dropped if a process has removed that chunk
    mark           mark by which its text is recognised in prompts, and the position of its last token
                   (`planning.found_text.marks`)
    sources        variants that were reused before it: what has shaped them has shaped it
    """

    key: VariantKey
    layout: KVLayout
    tokens_digest: str
    kv: torch.Tensor
    token_scores: TokenScores
    inter: tuple[float, ...]
    intra: float
    cci: float
    exact_share: float
    session: str | None = None
    primed: bool = False
    extra_variant: bool = False
    mark: tuple[int, int] | None = None
    sources: tuple[Variant, ...] = ()


class RemovedChunks(set[str]):
    """Ids of chunks that were removed after a capture of them had begun; see `compute.captures.write_back`."""

    __hash__ = object.__hash__  # type: ignore[assignment]  # by identity, to be held weakly
