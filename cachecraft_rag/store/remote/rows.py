"""What a remote keeps besides payloads: a row per variant, and the names under which both lie.

A row is 16 hex digits of `created`, 16 of an xxh3 over the rest, JSON, and on a signed remote a line with its
signature. What is not exactly as it was written, or does not belong under the name it was found at, is no row.
"""

from __future__ import annotations

import base64
import json
import struct
from array import array
from dataclasses import asdict, dataclass, replace

import numpy as np
import xxhash

from cachecraft_rag.store.expected import unsound, unsound_scores
from cachecraft_rag.types import LAYOUT_VERSION, Payload, TokenScores, Variant, VariantKey, digest

ROOT = f"cachecraft/v{LAYOUT_VERSION}"  # another layout version is another world
LONGEST_ROW = 4 << 20
# Of a variant, as they are; the others are put together. A field more or less is no row of ours.
_FIELDS = (
    "variant_id", "tokens", "tokens_digest", "inter", "intra", "cci", "exact_share", "codec", "nbytes",
    "reuse_frequency", "created", "primed",
)  # fmt: skip
_IMPOSSIBLE = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class Row:
    """A variant as a remote lists it, its token scores, and the bytes of its payload."""

    variant: Variant
    token_scores: TokenScores
    payload_bytes: int

    @property
    def name(self) -> str:
        """See `name_of`."""
        return name_of(self.variant)

    def encode(self) -> bytes:
        """The row's bytes, not signed."""
        variant = self.variant
        fields = {name: getattr(variant, name) for name in _FIELDS}
        fields |= {
            "key": asdict(variant.key),
            "layout_version": LAYOUT_VERSION,
            "token_inter": _encoded(self.token_scores.inter),
            "token_received": _encoded(self.token_scores.received),
            "payload_bytes": self.payload_bytes,
        }
        if variant.payload.seal:
            fields["seal"] = base64.b64encode(variant.payload.seal).decode()
        text = json.dumps(fields, separators=(",", ":")).encode("ascii")
        return framed(created_hex(variant.created).encode("ascii"), text)


def name_of(variant: Variant) -> str:
    """Where the payload lies; `created` is part of it, so an old row never meets a newer payload."""
    return f"{place_of(variant.key)}/{variant.variant_id}-{created_hex(variant.created)}"


def framed(created: bytes, text: bytes, signature: bytes = b"") -> bytes:
    """A row: `created`, a checksum over what follows it, JSON, and behind a line's end what signs it, if anything does.

    JSON as we write it holds no line's end.
    """
    rest = text + b"\n" + signature if signature else text
    return created + xxhash.xxh3_64_hexdigest(rest).encode("ascii") + rest


def unframed(raw: bytes) -> tuple[bytes, bytes, bytes]:
    """The inverse of `framed`. Raises ValueError when the checksum is wrong."""
    if xxhash.xxh3_64_hexdigest(raw[32:]).encode("ascii") != raw[16:32]:
        raise ValueError("row damaged: checksum")
    text, _, signature = raw[32:].partition(b"\n")
    return raw[:16], text, signature


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
    """The row of a variant of exactly this chunk. Raises ValueError when it is damaged, or of something else.

    Its signature, if it has one, is for `signing` to judge. How often others say it was used is not believed: who could
    say so could keep it here for ever.
    """
    try:
        if len(raw) > LONGEST_ROW:
            raise ValueError("length")
        created, text, _ = unframed(raw)
        fields = json.loads(text)
        if fields.pop("layout_version") != LAYOUT_VERSION:
            raise ValueError("layout version")
        payload_bytes = fields.pop("payload_bytes")
        seal = base64.b64decode(fields.pop("seal", ""), validate=True)
        received = fields.pop("token_received", None)  # rows of before it was recorded lack it
        token_scores = TokenScores(_decoded(fields.pop("token_inter")), _decoded(received))
        key = fields.pop("key")
        key = VariantKey(key["namespace"], key["fingerprint"], key["chunk_id"], tuple(key["origin_prefix"]))
        fields["inter"] = tuple(array("f", fields["inter"]))
        fields.setdefault("primed", False)  # rows of before there was priming lack it
        if fields.keys() != set(_FIELDS):
            raise ValueError("fields")
        payload = Payload(None, payload_bytes, seal)
        variant = Variant(key=key, session=None, home="remote", payload=payload, **fields)
        _require(variant, payload_bytes, token_scores)
        same = created.decode("ascii") == created_hex(variant.created)
    except _IMPOSSIBLE as error:
        raise ValueError(f"row damaged: {type(error).__name__}: {error}") from error
    if not same or key != replace(key, namespace=namespace, fingerprint=fingerprint, chunk_id=chunk_id):
        raise ValueError("row of another variant")
    return Row(replace(variant, reuse_frequency=0.0), token_scores, payload_bytes)


def _encoded(scores: np.ndarray | None) -> str | None:
    return None if scores is None else base64.b64encode(np.ascontiguousarray(scores, dtype="<f4").tobytes()).decode()


def _decoded(text: str | None) -> np.ndarray | None:
    return None if text is None else np.frombuffer(base64.b64decode(text, validate=True), dtype="<f4")


def _require(variant: Variant, payload_bytes: int, token_scores: TokenScores) -> None:
    """Raise ValueError unless every field is what the planner may count on: JSON says nothing about types."""
    if flaw := unsound(variant):
        raise ValueError(flaw)
    if variant.variant_id != variant.key.variant_id:
        raise ValueError("id")
    if type(payload_bytes) is not int or not 0 < payload_bytes < 1 << 62:
        raise ValueError("payload")
    if unsound_scores(token_scores, variant.tokens):
        raise ValueError("token scores")
