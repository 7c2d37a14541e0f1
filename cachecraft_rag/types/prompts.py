"""Prompts as segments of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from cachecraft_rag.types.digests import digest_of_tokens

TokenIds = NDArray[np.int32]


def token_array(token_ids: Sequence[int] | NDArray[np.integer]) -> TokenIds:
    """Return token ids as int32 `[tokens]`; an array of that kind is returned itself.

    Raises OverflowError for an id that does not fit 32 bits.
    """
    if isinstance(token_ids, np.ndarray):
        if token_ids.dtype == np.int32:
            return cast(TokenIds, token_ids)
        token_ids = token_ids.tolist()  # a cast would cut off bits
    # twice as fast as np.array
    return np.fromiter(token_ids, np.int32, len(token_ids))


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of prompt tokens.

    token_ids      int32 `[tokens]`, not to be written to; any sequence is accepted. Raises OverflowError for an id that
                   does not fit 32 bits
    private        True for text of one user, which must not affect chunk-caches of others
    closing        number of last tokens that come from the chat template and are the same for every question
    found          True if it was found in unmarked text: captured while the engine is idle, never with its own prompt
                   (`prompt.unmarked`)
    tokens_digest  digest of the token ids; a stored chunk-cache fits only a segment with the same digest
    """

    kind: Literal["system", "chunk", "question"]
    segment_id: str
    token_ids: TokenIds = field(compare=False)  # `tokens_digest` is compared
    private: bool = False
    closing: int = 0
    found: bool = False
    tokens_digest: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", token_array(self.token_ids))
        object.__setattr__(self, "tokens_digest", digest_of_tokens(self.token_ids))

    @property
    def is_captured(self) -> bool:
        """True if a prompt that computes this segment may capture it: not for questions, nor found passages."""
        return self.kind != "question" and not self.found


@dataclass(frozen=True, slots=True)
class Prompt:
    """Segments in order and, for the record, the chunks that had to be left out to fit the model's context.

    trimmed    ids of all that were left out, in the order they were ranked
    too_long   (id, tokens) of those among them that would not have fitted alone either
    room       tokens that the context had for chunks
    stale_ids  (id, id that the chunk brought) of chunks whose text was edited after they were retrieved
    """

    segments: tuple[Segment, ...]
    trimmed: tuple[str, ...] = ()
    too_long: tuple[tuple[str, int], ...] = ()
    room: int = 0
    stale_ids: tuple[tuple[str, str], ...] = ()

    @property
    def token_array(self) -> TokenIds:
        """The token ids of all segments, in order, as a new array: int32 `[tokens]`."""
        none = np.empty(0, np.int32)  # for a prompt without segments
        return np.concatenate([none, *(segment.token_ids for segment in self.segments)])

    @property
    def token_ids(self) -> list[int]:
        """The token ids of all segments, in order, as a new list, as vLLM and tokenizers take them."""
        ids: list[int] = self.token_array.tolist()
        return ids

    @property
    def bounds(self) -> list[int]:
        """`[segments + 1]`, from 0 to the prompt's tokens: segment i covers `bounds[i]:bounds[i + 1]`. A new list."""
        edges = [0]
        for segment in self.segments:
            edges.append(edges[-1] + len(segment.token_ids))
        return edges
