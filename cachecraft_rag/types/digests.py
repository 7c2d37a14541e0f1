"""Digests of text and of token ids."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence


def digest(*parts: str) -> str:
    """Return the 128-bit blake2b of any parts, as 32 hex digits; no two different sequences share an encoding.

    >>> digest("ab", "c") == digest("a", "bc")
    False
    """
    encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
    whole = b"".join(
        [piece for part in encoded for piece in (len(part).to_bytes(8, "little"), part)]
    )
    return hashlib.blake2b(whole, digest_size=16).hexdigest()


def digest_of_tokens(token_ids: Sequence[int]) -> str:
    """Return the 128-bit blake2b of token ids in their order, as 32 hex digits; an empty sequence has a digest too."""
    packed = struct.pack(f"<{len(token_ids)}q", *token_ids)
    return hashlib.blake2b(packed, digest_size=16).hexdigest()
