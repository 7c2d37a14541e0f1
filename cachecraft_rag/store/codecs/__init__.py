"""Codecs: how the bytes of a stored chunk-cache are made, one block per layer.

    codec = codec_named("int8")
    block = codec.encode(kv[layer], layer=layer, layers=len(kv))  # uint8 [bytes]
    codec.decode(block, out=kv[layer])                            # into memory that is already there

| name | block of a layer | error of a value | smaller than bf16 |
| --- | --- | --- | --- |
| `raw` | the tensor's own memory | none | 1 × |
| `int8` | a scale per token and head, 8 bits per value | 1/254 of the largest of its token and head | 1.9 × |
| `entropy` | deltas against an anchor, coded by zstandard | 1/8 to 1/5 of its head's spread | 4 × |

Errors are upper bounds; ratios are for heads of 64 values and chunks of at least about 100 tokens.

A new codec is a module in this folder and a line in `CODECS`. Its name is also in `codec` of `StoreConfig` (the help
and the settings page), the table above, the list in `store.layout`, `LOSSLESS_CODECS` of `types.variants` if it is
lossless, and pages that `grep -rnw entropy --include=*.md docs` finds. `tests/store/test_codecs.py` runs all of
`CODECS`; give it the codec's bound and ratio. `_LOSSY_SHARE` in `planning.planner` says how much error it may add.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.store.codecs.base import Codec
from cachecraft_rag.store.codecs.entropy import Entropy
from cachecraft_rag.store.codecs.int8 import Int8
from cachecraft_rag.store.codecs.raw import Raw

CODECS: Mapping[str, type[Raw | Int8 | Entropy]] = MappingProxyType(
    {"raw": Raw, "int8": Int8, "entropy": Entropy}
)


def codec_named(name: str) -> Codec:
    """Return a new codec of that name, one of `CODECS`.

    Raises ConfigError if it is unknown, or if it needs a missing package.
    """
    try:
        make = CODECS[name]
    except KeyError:
        raise ConfigError(f"codec unknown: {name!r}. Choose one of {', '.join(CODECS)}.") from None
    return make()


__all__ = ["CODECS", "Codec", "codec_named"]
