"""What a remote keeps besides payloads: a row per variant, and the names under which both lie.

A row is 16 hex digits of `created`, 16 of an xxh3 over the rest, and JSON. What is not exactly as it was written, or
does not belong under the name it was found at, is no row.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from array import array
from dataclasses import asdict, dataclass, replace

import numpy as np
import xxhash

from cachecraft_rag.types import LAYOUT_VERSION, TokenScores, Variant, VariantKey, digest

ROOT = f"cachecraft/v{LAYOUT_VERSION}"  # another layout version is another world
LONGEST_ROW = 4 << 20
_IMPOSSIBLE = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class Row:
    """A variant as a remote lists it, its token scores, and the bytes of its payload."""

    variant: Variant
    token_scores: TokenScores
    payload_bytes: int

    @property
    def name(self) -> str:
        """Where the payload lies; `created` is part of it, so an old row never meets a newer payload."""
        return f"{place_of(self.variant.key)}/{self.variant.variant_id}-{created_hex(self.variant.created)}"

    def encode(self) -> bytes:
        """The row's bytes."""
        fields = {
            **asdict(self.variant),
            "layout_version": LAYOUT_VERSION,
            "token_inter": _encoded(self.token_scores.inter),
            "token_received": _encoded(self.token_scores.received),
            "payload_bytes": self.payload_bytes,
        }
        del fields["home"], fields["session"]
        text = json.dumps(fields, separators=(",", ":")).encode("ascii")
        return created_hex(self.variant.created).encode("ascii") + xxhash.xxh3_64_hexdigest(text).encode("ascii") + text


def created_hex(created: float) -> str:
    """16 hex digits that sort as the times do."""
    return struct.pack(">d", created).hex()


def scope_of(namespace: str, fingerprint: str) -> str:
    """The folder of everything that one tenant's model may be served."""
    return digest("remote scope", namespace, fingerprint)


def place_of(key: VariantKey) -> str:
    """The folder of one chunk; a digest, because ids are up to the caller and could contain anything."""
    return f"{scope_of(key.namespace, key.fingerprint)}/{digest('remote chunk', key.chunk_id)}"


def decode_row(raw: bytes, *, namespace: str, fingerprint: str, chunk_id: str) -> Row:
    """The row of a variant of exactly this chunk. Raises ValueError when it is damaged, or of something else."""
    try:
        if len(raw) > LONGEST_ROW:
            raise ValueError("length")
        text = raw[32:]
        if xxhash.xxh3_64_hexdigest(text).encode("ascii") != raw[16:32]:
            raise ValueError("checksum")
        fields = json.loads(text)
        if fields.pop("layout_version") != LAYOUT_VERSION:
            raise ValueError("layout version")
        payload_bytes = fields.pop("payload_bytes")
        received = fields.pop("token_received", None)  # rows of before it was recorded lack it
        token_scores = TokenScores(_decoded(fields.pop("token_inter")), _decoded(received))
        key = fields.pop("key")
        key = VariantKey(key["namespace"], key["fingerprint"], key["chunk_id"], tuple(key["birth_prefix"]))
        inter = tuple(array("f", fields.pop("inter")))
        variant = Variant(key=key, inter=inter, session=None, home="remote", **fields)
        _require(variant, payload_bytes, token_scores)
        same = raw[:16].decode("ascii") == created_hex(variant.created)
    except _IMPOSSIBLE as error:
        raise ValueError(f"row damaged: {type(error).__name__}: {error}") from error
    if not same or key != replace(key, namespace=namespace, fingerprint=fingerprint, chunk_id=chunk_id):
        raise ValueError("row of another variant")
    return Row(variant, token_scores, payload_bytes)


def _encoded(scores: np.ndarray | None) -> str | None:
    return None if scores is None else base64.b64encode(np.ascontiguousarray(scores, dtype="<f4").tobytes()).decode()


def _decoded(text: str | None) -> np.ndarray | None:
    return None if text is None else np.frombuffer(base64.b64decode(text, validate=True), dtype="<f4")


def _require(variant: Variant, payload_bytes: int, token_scores: TokenScores) -> None:
    """Raise ValueError unless every field is what the planner may count on: JSON says nothing about types."""
    texts = (variant.tokens_digest, variant.codec, *variant.key.birth_prefix)
    counts = (variant.tokens, variant.nbytes, payload_bytes)
    numbers = (variant.intra, variant.cci, variant.exact_share, variant.reuse_frequency, variant.created)
    sound = (
        variant.variant_id == variant.key.variant_id
        and all(isinstance(text, str) for text in texts)
        and all(type(count) is int and count > 0 for count in counts)
        and all(isinstance(number, int | float) and math.isfinite(number) for number in (*numbers, *variant.inter))
        and type(variant.primed) is bool
        and len(variant.inter) == len(variant.key.birth_prefix)
        and all(
            scores is None or scores.shape == (variant.tokens,)
            for scores in (token_scores.inter, token_scores.received)
        )
    )
    if not sound:
        raise ValueError("fields")
