"""Digests of text and of token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def digest(*parts: str) -> str:
    """Return the 128-bit blake2b of any number of parts, as 32 hex digits; other sequences have other encodings.

    >>> digest("ab", "c") == digest("a", "bc")
    False
    """
    encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
    whole = b"".join(
        [piece for part in encoded for piece in (len(part).to_bytes(8, "little"), part)]
    )
    return hashlib.blake2b(whole, digest_size=16).hexdigest()


def passage_id(tokens_digest: str) -> str:
    """Return the segment id, 32 hex digits, of a passage of unmarked text (not of a document) by its token digest."""
    return digest("text", tokens_digest)


def digest_of_tokens(token_ids: Sequence[int] | NDArray[np.integer]) -> str:
    """Return the 128-bit blake2b of token ids in order, maybe none, as 32 hex digits; their dtype does not matter."""
    import numpy as np  # not needed by `Chunk`, and slow to import

    packed = np.asarray(token_ids, dtype="<i8").tobytes()
    return hashlib.blake2b(packed, digest_size=16).hexdigest()
