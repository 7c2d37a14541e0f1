"""A row of the catalog as bytes and as a `Variant`, with its checksum.

SQLite keeps any type in any column, and a disk may return damaged bytes. So a row has a checksum over everything that
never changes (`reuse_frequency` does), and no type is trusted.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from cachecraft_rag.types.variants import PayloadFacts, Variant, VariantKey

_ID_BYTES = 16  # types.digest gives 32 hex digits
NOTHING = PayloadFacts()
_NUMBERS = struct.Struct("<4q4d2q?")
_HALF = 1 << 63  # SQLite's integers have a sign
_WRONG = (
    TypeError,
    AttributeError,
    LookupError,
    OverflowError,
    RecursionError,
    ValueError,
    struct.error,
)


class CatalogRow(NamedTuple):
    """The columns of a variant, in the order of the queries.

    Until the checksum has been compared, any column may hold any value.
    """

    chunk_id: str
    variant_id: str
    origin_prefix: bytes | str
    tokens: int
    tokens_digest: str
    inter: bytes
    intra: float
    cci: float
    exact_share: float
    session: str | None
    codec: str
    nbytes: int
    reuse_frequency: float
    created: float
    primed: int
    file_bytes: int
    row_sum: int | None = None


_UNCHANGED = ("variant_id", "tokens", "tokens_digest", "session", "codec", "nbytes")
_MEASURES = ("intra", "cci", "exact_share", "created")
COLUMNS = ", ".join(f"v.{name}" for name in CatalogRow._fields)


def pack_ids(ids: Sequence[str]) -> bytes | str:
    """Return segment ids as 16 bytes each, or as JSON text if one is not a digest (32 lower-case hex digits).

    >>> unpack_ids(pack_ids(("00" * 16, "ff" * 16))) == ("00" * 16, "ff" * 16)
    True
    >>> unpack_ids(pack_ids(("system", "a")))
    ('system', 'a')
    """
    try:
        packed = bytes.fromhex(text := "".join(ids))
    except ValueError:
        return json.dumps(ids)
    # Only ids that unpack unchanged may be packed: not upper case, not blanks, not ids of another length.
    unchanged = packed.hex() == text and all(map((2 * _ID_BYTES).__eq__, map(len, ids)))
    return packed if unchanged else json.dumps(ids)


def unpack_ids(packed: bytes | str) -> tuple[str, ...]:
    """Return the ids that `pack_ids` has packed. Damaged bytes give other ids, damaged text ValueError or TypeError."""
    if isinstance(packed, str):
        return tuple(json.loads(packed))
    text = packed.hex()
    return tuple(
        [text[start : start + 2 * _ID_BYTES] for start in range(0, len(text), 2 * _ID_BYTES)]
    )


def row_of(variant: Variant, *, file_bytes: int, frequency: float) -> CatalogRow:
    """Return the row of a variant, with its checksum, `frequency` as f_r, and `inter` as little-endian float32."""
    key = variant.key
    row = CatalogRow(
        chunk_id=key.chunk_id,
        origin_prefix=pack_ids(key.origin_prefix),
        inter=struct.pack(f"<{len(variant.inter)}f", *variant.inter),
        reuse_frequency=frequency,
        primed=int(variant.primed),
        file_bytes=file_bytes,
        **{name: getattr(variant, name) for name in _UNCHANGED},
        **{name: getattr(variant, name) + 0.0 for name in _MEASURES},  # no -0.0
    )
    return CatalogRow(*row[:-1], sum_of(key.namespace, key.fingerprint, row))


def sum_of(namespace: str, fingerprint: str, row: CatalogRow) -> int:
    """Return the xxh3 (64 bit, signed) of the names and all columns but `reuse_frequency` and `row_sum`."""
    ids = row.origin_prefix
    owner = "shared" if row.session is None else "of " + row.session
    names = (
        namespace,
        fingerprint,
        row.chunk_id,
        row.variant_id,
        row.tokens_digest,
        row.codec,
        owner,
    )
    text = "\0".join(names).encode()
    counts = (row.tokens, row.nbytes, row.primed, row.file_bytes)
    measures = (row.intra, row.cci, row.exact_share, row.created)
    numbers = _NUMBERS.pack(*counts, *measures, len(text), len(ids), type(ids) is str)
    packed_ids = ids.encode() if isinstance(ids, str) else ids
    return xxhash.xxh3_64_intdigest(b"".join((numbers, text, packed_ids, row.inter))) - _HALF


def sum_of_scores(inter: bytes | None) -> int:
    """Return the xxh3 (64 bit, signed) of a variant's token scores; None has a checksum too."""
    length = struct.pack("<q", -1 if inter is None else len(inter))
    return xxhash.xxh3_64_intdigest(length + (inter or b"")) - _HALF


def variant_of_row(
    namespace: str, fingerprint: str, row: CatalogRow, payload_facts: PayloadFacts = NOTHING
) -> Variant:
    """Return the variant of a row, with `payload_facts` for the look-up's facts about its bytes.

    Raises only ValueError, for a wrong checksum or a column of a wrong type. Ranges are not checked, see `row_error`.
    """
    try:
        if row.row_sum != sum_of(namespace, fingerprint, row):
            raise ValueError("its checksum is wrong")
        return Variant(
            key=VariantKey(namespace, fingerprint, row.chunk_id, unpack_ids(row.origin_prefix)),
            inter=struct.unpack(f"<{len(row.inter) // 4}f", row.inter),
            reuse_frequency=row.reuse_frequency,
            primed=bool(row.primed),
            payload_facts=payload_facts,
            **{name: getattr(row, name) for name in _UNCHANGED + _MEASURES},
        )
    except _WRONG as error:
        raise ValueError(f"its row in the catalog is damaged: {error}") from error


def unpacked(scores: bytes | None) -> np.ndarray | None:
    """Return token scores from a column of the catalog, float32 `[tokens]`, a writable copy; None for None."""
    return None if scores is None else np.frombuffer(scores, dtype="<f4").astype(np.float32)


def packed(scores: np.ndarray | None) -> bytes | None:
    """Return token scores `[tokens]` as bytes for the catalog, little-endian float32; None for None."""
    return None if scores is None else np.ascontiguousarray(scores, dtype="<f4").tobytes()
