"""Rows of a remote: one per variant in addition to its payload, and the names of both.

A row is 16 hex digits of `created`, 16 hex digits of an xxh3 over the rest, JSON, and on a signed remote a line with
its signature. A row that has changed, or was found under another name, is rejected.

The names in the JSON are the format, frozen by a test. Unknown fields are ignored, so later versions may add fields.
Rows of another layout are in another folder (`ROOT`).
"""

from __future__ import annotations

import base64
import json
import struct
from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import xxhash

from cachecraft_rag.store.remote.base import LONGEST_ROWS
from cachecraft_rag.store.row_checks import row_error, scores_are_wrong
from cachecraft_rag.types.captures import TokenScores
from cachecraft_rag.types.digests import digest
from cachecraft_rag.types.variants import PayloadFacts, Variant, VariantKey
from cachecraft_rag.types.versions import LAYOUT_VERSION

ROOT = f"cachecraft/v{LAYOUT_VERSION}"  # versions of the layout do not share chunk-caches
_AS_THEY_ARE = (
    "variant_id",
    "tokens",
    "tokens_digest",
    "inter",
    "intra",
    "cci",
    "exact_share",
    "codec",
    "nbytes",
    "reuse_frequency",
    "created",
    "primed",
)
_IMPOSSIBLE = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class Row:
    """A variant on a remote, with facts about its payload, and its token scores."""

    variant: Variant
    token_scores: TokenScores

    def encode(self) -> bytes:
        """Return the bytes of the row, without a signature or the session. NaN is written; `decode_row` refuses it."""
        variant = self.variant
        values = {
            "layout_version": LAYOUT_VERSION,
            **asdict(variant.key),
            **{name: getattr(variant, name) for name in _AS_THEY_ARE},
            "token_inter": _encoded(self.token_scores.inter),
            "payload_bytes": variant.payload_facts.nbytes,
        }
        if variant.payload_facts.seal:
            values["seal"] = base64.b64encode(variant.payload_facts.seal).decode()
        text = json.dumps(values, separators=(",", ":")).encode("ascii")
        return framed(created_hex(variant.created).encode("ascii"), text)


def name_of(variant: Variant) -> str:
    """Return the name of row and payload, `place_of` included; with `created`, so an old row names no newer payload."""
    return f"{place_of(variant.key)}/{variant.variant_id}-{created_hex(variant.created)}"


def framed(created: bytes, text: bytes, signature: bytes = b"") -> bytes:
    """Return a row: `created_hex`, a checksum over the rest, JSON (one line), and on a new line any signature."""
    rest = text + b"\n" + signature if signature else text
    return created + xxhash.xxh3_64_hexdigest(rest).encode("ascii") + rest


def unframed(raw: bytes) -> tuple[bytes, bytes, bytes]:
    """Take apart a row of `framed`: return `created`, the JSON, and the signature, b"" without one.

    Raises ValueError if the checksum is wrong. Neither `created` nor the JSON is checked.
    """
    if xxhash.xxh3_64_hexdigest(raw[32:]).encode("ascii") != raw[16:32]:
        raise ValueError("row damaged: checksum")
    text, _, signature = raw[32:].partition(b"\n")
    return raw[:16], text, signature


def created_hex(created: float) -> str:
    """Return the time (seconds since 1970) as 16 hex digits, which sort like times from 0 on."""
    return struct.pack(">d", created).hex()


def place_of(key: VariantKey) -> str:
    """Return the folder of a chunk of one tenant and model: digests, because ids may hold anything."""
    scope = digest("remote scope", key.namespace, key.fingerprint)
    return f"{scope}/{digest('remote chunk', key.chunk_id)}"


def decode_row(raw: bytes, *, namespace: str, fingerprint: str, chunk_id: str) -> Row:
    """Return the row of a variant of this chunk from its bytes.

    Its variant has `home` "remote", no session, `payload_facts` without a layout, and `reuse_frequency` 0: false uses
    could keep a variant in the local store forever. Neither the signature (see `signing`) nor the codec is checked
    here.

    Raises ValueError, never ConfigError, if the row has more than 4 MiB, is damaged, has impossible values or another
    layout version, or belongs to another namespace, fingerprint or chunk.
    """
    try:
        if len(raw) > LONGEST_ROWS:
            raise ValueError("length")
        created, text, _ = unframed(raw)
        given = json.loads(text)
        if given["layout_version"] != LAYOUT_VERSION:
            raise ValueError("layout version")
        row = Row(_variant_of(given), TokenScores(_decoded(given["token_inter"])))
        _require(row)
        variant = row.variant
        same = created.decode("ascii") == created_hex(variant.created)
    except _IMPOSSIBLE as error:
        raise ValueError(f"row damaged: {type(error).__name__}: {error}") from error
    key = variant.key
    if not same or key != replace(
        key, namespace=namespace, fingerprint=fingerprint, chunk_id=chunk_id
    ):
        raise ValueError("row of another variant")
    return replace(row, variant=replace(variant, reuse_frequency=0.0))


def _variant_of(row: Mapping[str, Any]) -> Variant:
    """Return the variant of a row's fields, without unknown ones."""
    key = VariantKey(**{field.name: row[field.name] for field in fields(VariantKey)})
    given = {name: row[name] for name in _AS_THEY_ARE} | {"inter": tuple(array("f", row["inter"]))}
    payload_facts = PayloadFacts(
        None, row["payload_bytes"], base64.b64decode(row.get("seal", ""), validate=True)
    )
    key = replace(key, origin_prefix=tuple(key.origin_prefix))
    return Variant(key=key, session=None, home="remote", payload_facts=payload_facts, **given)


def _encoded(scores: np.ndarray | None) -> str | None:
    if scores is None:
        return None
    content = np.ascontiguousarray(scores, dtype="<f4").tobytes()
    return base64.b64encode(content).decode()


def _decoded(text: str | None) -> np.ndarray | None:
    if text is None:
        return None
    content = base64.b64decode(text, validate=True)
    return np.frombuffer(content, dtype="<f4")


def _require(row: Row) -> None:
    """Raise ValueError unless every field has the type and range that the planner needs."""
    variant = row.variant
    payload_bytes = row.variant.payload_facts.nbytes
    if flaw := row_error(variant):
        raise ValueError(flaw)
    if variant.variant_id != variant.key.variant_id:
        raise ValueError("id")
    if type(payload_bytes) is not int or not 0 < payload_bytes < 1 << 62:
        raise ValueError("payload")
    if scores_are_wrong(row.token_scores, variant.tokens):
        raise ValueError("token scores")
