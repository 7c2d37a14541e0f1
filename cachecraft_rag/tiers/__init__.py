"""Tiers: where the bytes of chunk-caches lie. `host` keeps tensors in memory, `disk` files, `remote` what is shared.

They share what `Tier` says and nothing more: memory holds whatever fits and may forget it at any moment, the
disk tier writes and deletes exactly what the catalog's rows say, so adding and evicting differ in meaning, not only in
code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cachecraft_rag.types import LoadedVariant, Unavailable, Variant


@dataclass(frozen=True, slots=True)
class Damaged(Unavailable):
    """The bytes are missing or wrong for good, so row and file should go; a plain `Unavailable` may pass."""


class Tier(Protocol):
    """What every tier can do. Both methods may be called from any thread at any time."""

    def read(self, variant: Variant) -> LoadedVariant | Unavailable:
        """The chunk-cache `[layers, 2, tokens, kv_heads, head_dim]`, or why it cannot be had. Never raises.

        The tensor stays valid for as long as the caller keeps it, whatever the tier evicts meanwhile. It is shared:
        nobody may write to it. Only the bytes of exactly this variant (same `created`) are returned, never of one that
        replaced it.
        """
        ...

    def remove(self, variant_id: str, created: float) -> None:
        """Forget the bytes of this variant, if they are here. The bytes of one that replaced it stay."""
        ...
