"""Signed remotes: engines with the same key accept only rows and payloads that one of them has signed.

A row ends in an HMAC-SHA256 over its content. It holds the seal of its payload: a keyed digest (HMAC-SHA256, cut to 128
bits) of each slice of 256 KiB, in order. The stream verifies a slice before it returns any byte of it, so layers are
still loaded one by one; a single digest of the whole payload could be verified only at its end. The checksum xxh3 needs
no key, so an attacker who changes bytes can change it too.

Signatures bind row and payload to each other and to their identity. They do not prove that a row is the newest one: an
attacker with write access can restore an older chunk-cache of the same identity with its row.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cachecraft_rag.store.remote.rows import ROOT, framed, unframed

SLICE_BYTES = 256 << 10
DIGEST_BYTES = 16


@dataclass(frozen=True)
class Signer:
    """Signs with the first of its keys and believes all of them, so that keys can be changed one engine at a time.

    `keys` are those of `RemoteConfig.keys`, at least one. A row with a wrong checksum raises ValueError.
    """

    keys: Sequence[bytes] = field(repr=False)

    def sign(self, row: bytes) -> bytes:
        """Return the row with a signature of the first key, in place of an earlier one, and a new checksum."""
        created, text, _ = unframed(row)
        return framed(created, text, _row_mac(self.keys[0], created, text))

    def is_signed(self, row: bytes) -> bool:
        """Return True if one of the keys signed this row; False without a signature."""
        created, text, signature = unframed(row)
        return any(
            hmac.compare_digest(_row_mac(key, created, text), signature) for key in self.keys
        )

    def seal(self, payload: Iterable[memoryview]) -> bytes:
        """Return the seal of a payload in consecutive parts: 16 bytes for each 256 KiB, and for the rest."""
        seal = bytearray()
        rest = bytearray()
        for part in payload:
            at = 0
            while at < part.nbytes:
                step = min(SLICE_BYTES - len(rest), part.nbytes - at)
                rest += part[at : at + step]
                at += step
                if len(rest) == SLICE_BYTES:
                    seal += _slice_mac(self.keys[0], rest)
                    rest.clear()
        return bytes(seal + _slice_mac(self.keys[0], rest)) if rest else bytes(seal)

    def confirms(self, seal: bytes, number: int, data: bytes | bytearray) -> bool:
        """Return True if `data` is slice `number` (from 0) of the payload of this seal, by any of the keys."""
        digest = seal[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        return any(hmac.compare_digest(_slice_mac(key, data), digest) for key in self.keys)


def _row_mac(key: bytes, created: bytes, text: bytes) -> bytes:
    return (
        hmac.digest(key, b"row\0" + ROOT.encode() + b"\0" + created + text, "sha256").hex().encode()
    )


def _slice_mac(key: bytes, data: bytes | bytearray) -> bytes:
    # so that a signed slice can never pass for a row
    separate = hmac.digest(key, b"payload", "sha256")
    return hmac.digest(separate, data, "sha256")[:DIGEST_BYTES]
