"""Sizes of chunk-caches from the shape of a model, before it is loaded.

    bytes per token = 2 · layers · key/value heads · head dimension · bytes per value

The 2 is for keys and values; a value takes 4 bytes in float32, 2 in bfloat16 and float16.
"""

from __future__ import annotations

from cachecraft_rag.errors import ConfigError, UnsupportedModelError
from cachecraft_rag.store.codecs import CODECS
from cachecraft_rag.types.kv_layout import KVLayout

DTYPES = ("float32", "bfloat16", "float16")


def cache_bytes(layout: KVLayout, tokens: int, codec: str = "raw") -> int:
    """Return the bytes of a chunk-cache on disk, without its header of a few kilobytes. Memory holds it raw.

    The number is exact for `raw` and `int8`, and an estimate for `entropy`, whose size depends on the values.

    >>> llama = KVLayout(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16")
    >>> cache_bytes(llama, 1000) == 2 * 32 * 8 * 128 * 2 * 1000
    True
    >>> [cache_bytes(llama, 1000, codec) for codec in ("raw", "int8", "entropy")]
    [131072000, 66560000, 32768000]
    """
    if codec not in CODECS:
        raise ConfigError(f"codec unknown: {codec!r}. Choose one of {', '.join(CODECS)}.")
    return CODECS[codec].typical_bytes(layout, tokens) * layout.layers


def layout_named(model: str, *, dtype: str = "auto") -> KVLayout:
    """Return the shape of a model's chunk-caches from its config alone; `model` as in `checkpoint.config_of`.

    `dtype` is one of `DTYPES`, or "auto" for that of `Decoder.load` on this machine. No weights are read or downloaded,
    except for "demo". Raises UnsupportedModelError if the config describes no key/value heads; otherwise the model is
    not checked.
    """
    if dtype not in ("auto", *DTYPES):
        raise ConfigError(f"unknown dtype {dtype!r}; choose one of auto, {', '.join(DTYPES)}")
    # torch and transformers: sizes need neither
    from cachecraft_rag.model.checkpoint import config_of, layout_of
    from cachecraft_rag.model.decoder import auto_dtype, device_of

    config = config_of(model)
    try:
        return layout_of(config, auto_dtype(config, device_of(model)) if dtype == "auto" else dtype)
    except AttributeError as error:
        raise UnsupportedModelError(
            f"{model!r} has no key/value heads that its config describes ({error})"
        ) from error
