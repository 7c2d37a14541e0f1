"""What a remote keeps besides payloads: a row per variant, and the names under which both lie.

A row is 16 hex digits of `created`, 16 of an xxh3 over the rest, JSON, and on a signed remote a line with its
signature. What is not exactly as it was written, or does not belong under the name it was found at, is no row.

The names in the JSON are the format: frozen by a test, and written out here one by one. A field that is not known is
ignored, so a later version may add some. A row with a higher `layout_version` is left alone.
"""

from __future__ import annotations

import base64
import json
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash

from cachecraft_rag.store.expected import unsound, unsound_scores
from cachecraft_rag.store.layout import NewerVersionError, OlderVersionError, require_version
from cachecraft_rag.types import LAYOUT_VERSION, Payload, TokenScores, Variant, VariantKey, digest

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
        """See `name_of`."""
        return name_of(self.variant)

    def encode(self) -> bytes:
        """The row's bytes, not signed."""
        variant = self.variant
        fields = {
            "layout_version": LAYOUT_VERSION,
            "namespace": variant.key.namespace,
            "fingerprint": variant.key.fingerprint,
            "chunk_id": variant.key.chunk_id,
            "origin_prefix": variant.key.origin_prefix,
            "variant_id": variant.variant_id,
            "tokens": variant.tokens,
            "tokens_digest": variant.tokens_digest,
            "inter": variant.inter,
            "intra": variant.intra,
            "cci": variant.cci,
            "exact_share": variant.exact_share,
            "codec": variant.codec,
            "nbytes": variant.nbytes,
            "reuse_frequency": variant.reuse_frequency,
            "created": variant.created,
            "primed": variant.primed,
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
    """The row of a variant of exactly this chunk. Raises ValueError when it is damaged, or of something else,
    OlderVersionError (a ValueError) or NewerVersionError when an older or a newer version wrote it.

    Its signature, if it has one, is for `signing` to judge. How often others say it was used is not believed: who could
    say so could keep it here for ever.
    """
    try:
        if len(raw) > LONGEST_ROW:
            raise ValueError("length")
        created, text, _ = unframed(raw)
        fields = json.loads(text)
        require_version(fields["layout_version"])
        payload_bytes = fields["payload_bytes"]
        seal = base64.b64decode(fields.get("seal", ""), validate=True)
        token_scores = TokenScores(_decoded(fields["token_inter"]), _decoded(fields.get("token_received")))
        variant = _variant_of(fields, Payload(None, payload_bytes, seal))
        _require(variant, payload_bytes, token_scores)
        same = created.decode("ascii") == created_hex(variant.created)
    except (OlderVersionError, NewerVersionError):
        raise
    except _IMPOSSIBLE as error:
        raise ValueError(f"row damaged: {type(error).__name__}: {error}") from error
    key = variant.key
    if not same or key != replace(key, namespace=namespace, fingerprint=fingerprint, chunk_id=chunk_id):
        raise ValueError("row of another variant")
    return Row(replace(variant, reuse_frequency=0.0), token_scores, payload_bytes)


def _variant_of(fields: Mapping[str, Any], payload: Payload) -> Variant:
    """The variant of a row's fields; what else there is, a later version added. Raises LookupError, TypeError."""
    return Variant(
        key=VariantKey(
            namespace=fields["namespace"],
            fingerprint=fields["fingerprint"],
            chunk_id=fields["chunk_id"],
            origin_prefix=tuple(fields["origin_prefix"]),
        ),
        variant_id=fields["variant_id"],
        tokens=fields["tokens"],
        tokens_digest=fields["tokens_digest"],
        inter=tuple(array("f", fields["inter"])),
        intra=fields["intra"],
        cci=fields["cci"],
        exact_share=fields["exact_share"],
        session=None,
        codec=fields["codec"],
        nbytes=fields["nbytes"],
        reuse_frequency=fields["reuse_frequency"],
        created=fields["created"],
        home="remote",
        primed=fields["primed"],
        payload=payload,
    )


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
