"""A row of the catalog as bytes and as a `Variant`; what lies in a column that does not belong there, and its checksum.

SQLite keeps whatever it is given in any column, and a disk gives back what it likes. So a row has a checksum over all
that never changes (`reuse_frequency` does), and is put together here without trusting a type.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from cachecraft_rag.types import Payload, TokenScores, Variant, VariantKey

_ID_BYTES = 16  # types.digest gives 32 hex digits
NOTHING = Payload()
_NUMBERS = struct.Struct("<4q4d2q?")
_HALF = 1 << 63  # SQLite's integers have a sign
_WRONG = (TypeError, AttributeError, LookupError, OverflowError, RecursionError, ValueError, struct.error)

COLUMNS = """v.chunk_id, v.variant_id, v.origin_prefix, v.tokens, v.tokens_digest, v.inter, v.intra, v.cci,
              v.exact_share, v.session, v.codec, v.nbytes, v.reuse_frequency, v.created, v.primed, v.file_bytes,
              v.row_sum"""
Row = Sequence[Any]  # as `COLUMNS` says, if all is well


def pack_ids(ids: Sequence[str]) -> bytes | str:
    """Segment ids as 16 bytes each; ids that are no digests as JSON text, which SQLite keeps apart by type.

    >>> unpack_ids(pack_ids(("00" * 16, "ff" * 16))) == ("00" * 16, "ff" * 16)
    True
    >>> unpack_ids(pack_ids(("system", "a")))
    ('system', 'a')
    """
    try:
        packed = bytes.fromhex("".join(ids))
    except ValueError:
        return json.dumps(ids)
    # Only what comes back unchanged may be packed: not upper case, not blanks, not ids of another length.
    return packed if unpack_ids(packed) == tuple(ids) else json.dumps(ids)


def unpack_ids(packed: bytes | str) -> tuple[str, ...]:
    """The inverse of `pack_ids`."""
    if isinstance(packed, str):
        return tuple(json.loads(packed))
    text = packed.hex()
    return tuple([text[start : start + 2 * _ID_BYTES] for start in range(0, len(text), 2 * _ID_BYTES)])


def columns_of(variant: Variant, *, file_bytes: int, frequency: float) -> list[Any]:
    """The row of a variant in the order of `COLUMNS`."""
    key = variant.key
    identity = (key.chunk_id, variant.variant_id, pack_ids(key.origin_prefix), variant.tokens, variant.tokens_digest)
    inter = struct.pack(f"<{len(variant.inter)}f", *variant.inter)
    # + 0.0: SQLite keeps no negative zero.
    scores = (inter, variant.intra + 0.0, variant.cci + 0.0, variant.exact_share + 0.0)
    rest = (variant.session, variant.codec, variant.nbytes, frequency, variant.created + 0.0, int(variant.primed))
    row = [*identity, *scores, *rest, file_bytes]
    return [*row, sum_of(key.namespace, key.fingerprint, row)]


def sum_of(namespace: str, fingerprint: str, row: Row) -> int:
    """xxh3 of all that never changes in a row, as SQLite's signed integer. Raises what wrong types raise."""
    chunk_id, variant_id, ids, tokens, tokens_digest, inter, intra, cci, exact_share, session, codec, nbytes = row[:12]
    created, primed, file_bytes = row[13:16]
    owner = "shared" if session is None else "of " + session
    text = "\0".join((namespace, fingerprint, chunk_id, variant_id, tokens_digest, codec, owner)).encode()
    numbers = _NUMBERS.pack(
        tokens, nbytes, primed, file_bytes, intra, cci, exact_share, created, len(text), len(ids), type(ids) is str
    )
    packed_ids = ids.encode() if type(ids) is str else ids
    return xxhash.xxh3_64_intdigest(b"".join((numbers, text, packed_ids, inter))) - _HALF


def sum_of_scores(inter: bytes | None, received: bytes | None) -> int:
    """xxh3 of a variant's token scores, as SQLite's signed integer."""
    lengths = struct.pack("<2q", *(-1 if one is None else len(one) for one in (inter, received)))
    return xxhash.xxh3_64_intdigest(lengths + (inter or b"") + (received or b"")) - _HALF


def variant_of_row(namespace: str, fingerprint: str, row: Row, payload: Payload = NOTHING) -> Variant:
    """The variant of a row; `payload` is what the look-up knows of its bytes.

    Raises ValueError when the row is not as it was written; rows of before have no checksum.
    """
    try:
        chunk_id, variant_id, prefix, tokens, tokens_digest, inter, *rest, primed, _file_bytes, row_sum = row
        if row_sum is not None and row_sum != sum_of(namespace, fingerprint, row):
            raise ValueError("its checksum is wrong")
        key = VariantKey(namespace, fingerprint, chunk_id, unpack_ids(prefix))
        scores: tuple[float, ...] = struct.unpack(f"<{len(inter) // 4}f", inter)
        known = (key, variant_id, tokens, tokens_digest, scores, *rest)  # 8 more columns, in order
        return Variant(*known, primed=bool(primed), payload=payload)  # type: ignore[misc]
    except _WRONG as error:
        raise ValueError(f"its row in the catalog is damaged: {error}") from error


def unpacked(scores: bytes | None) -> np.ndarray | None:
    """A copy, free to be changed. Raises ValueError or TypeError for what is no array."""
    return None if scores is None else np.frombuffer(scores, dtype="<f4").astype(np.float32)


def packed(scores: np.ndarray | None) -> bytes | None:
    """The inverse of `unpacked`."""
    return None if scores is None else np.ascontiguousarray(scores, dtype="<f4").tobytes()


def scores_of_row(row: Row, most: int) -> TokenScores:
    """Token scores from (tokens, checksum, inter, received); those of before have no checksum.

    Raises ValueError or TypeError for what is damaged. `most` tokens are believed.
    """
    _, told, inter, received = row
    if told is not None and told != sum_of_scores(inter, received):
        raise ValueError("checksum")
    if any(one is not None and len(one) > 4 * most for one in (inter, received)):
        raise ValueError("length")
    return TokenScores(unpacked(inter), unpacked(received))
