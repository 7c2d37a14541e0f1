"""Layout v3 of a stored chunk-cache: one safetensors file per variant, the same bytes on disk and in a remote store.

The file is a plain safetensors file, which the library can open. Its data section is one block per layer, in layer
order and without gaps, so a layer is one contiguous read. The codec defines the contents of a block:

* `raw`: one tensor per layer named `layer.000`, `layer.001`, … each `[2, tokens, kv_heads, head_dim]` (raw keys, then
  values). The whole file goes straight into one tensor.
* `int8`: `layer.000.scale` and `layer.000.int8`, and so on.
* `entropy`: `layer.000`, and so on: bytes that only the codec understands. Their lengths differ from layer to layer and
  are in the header.

Names are zero-padded because safetensors sorts them. The header ends on a multiple of 4096 bytes, so that the data is
page-aligned. It holds the full identity, the codec, a checksum over its own fields, and a checksum per extent. An
extent is `EXTENT_TOKENS` tokens of a layer, the smallest piece that can be read and verified alone; a block that can
only be decoded as a whole is one extent. The names of the fields are frozen by a test; unknown fields are ignored.

Header and data are written and read here, not by the safetensors library: its writer does not sync and needs copies of
all layers, and its reader maps the file, so a truncated file would crash the process (SIGBUS).

A header is a pure function of the text of its fields. A reader rebuilds it from the parsed fields and compares all
bytes, so a change of any byte is detected, even in an offset or in the padding, which have no checksum.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import xxhash

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.store.codecs import Codec, codec_named
from cachecraft_rag.types.kv_layout import HeadShare, KVLayout
from cachecraft_rag.types.store_reasons import Damaged, LoadFailure, Unavailable
from cachecraft_rag.types.variants import TierName, Variant, VariantKey
from cachecraft_rag.types.versions import LAYOUT_VERSION

if TYPE_CHECKING:
    import torch

# Exceptions of `StoredVariant.read`; torch raises RuntimeError if memory is exhausted.
READ_ERRORS = (OSError, ValueError, RuntimeError, MemoryError)
# a tenth of a second of the demo model's prefill on two cores; 16 more header bytes per layer
EXTENT_TOKENS = 64
_ALIGNMENT = 4096
# longer headers are damaged; 200 layers of 16,000 tokens stay below 1 MiB
_LONGEST_HEADER = 16 << 20
_MOST_GROWTH = 256  # most bytes in memory per byte of a file, if the model's layout is unknown
# largest key or value; no model has larger ones, which would make scores infinite and logits NaN
_LARGEST = 1e9
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Header:
    """The fields of a file's header.

    extent_sums  xxh3 (64 bit) of each extent of each layer, see `extents`
    block_sizes  bytes of each layer's block; empty if the codec makes all blocks equally long
    """

    key: VariantKey
    layout: KVLayout
    tokens: int
    tokens_digest: str
    codec: str
    extent_sums: tuple[tuple[int, ...], ...]
    block_sizes: tuple[int, ...] = ()

    def blocks(self) -> list[tuple[int, int]]:
        """Return a pair for each layer, in order: offset of its block in the data section, and its number of bytes.

        Raises ValueError if the fields contradict each other.
        """
        layers = self.layout.layers
        self._require_checksums()  # first: the number of checksums limits all other numbers
        size = codec_named(self.codec).block_bytes(self.layout, self.tokens) if layers else None
        sizes = self.block_sizes if size is None else (size,) * layers
        if (
            len(sizes) != layers
            or (size is not None and self.block_sizes)
            or min(sizes, default=0) < 1
        ):
            raise ValueError("block sizes")
        if max(sizes) > codec_named(self.codec).most_bytes(self.layout, self.tokens):
            raise ValueError("block sizes: larger than any block of that many tokens")
        return list(zip(itertools.accumulate(sizes, initial=0), sizes, strict=False))

    def _require_checksums(self) -> None:
        """Raise ValueError unless all counts are valid and each extent of each layer has a checksum."""
        layout = self.layout
        counts = (layout.layers, layout.kv_heads, layout.head_dim, self.tokens, *self.block_sizes)
        if layout.dtype not in _DTYPES:
            raise ValueError("dtype")
        if not all(type(count) is int for count in counts) or not all(
            count > 0 for count in counts[1:4]
        ):
            raise ValueError("counts")
        if layout.layers < 1:
            raise ValueError("block sizes of no layer")
        whole = not codec_named(self.codec).run(layout, self.tokens, 0, self.tokens)
        wanted = 1 if whole else -(-self.tokens // EXTENT_TOKENS)
        if len(self.extent_sums) != layout.layers or any(
            len(sums) != wanted for sums in self.extent_sums
        ):
            raise ValueError("checksums")

    def encode(self) -> bytes:
        """Return the first bytes of the file, up to its data: length, JSON, padding to a multiple of 4096 bytes."""
        return self._around(json.dumps(self._fields(), separators=(",", ":")))

    def _fields(self) -> dict[str, object]:
        fields: dict[str, object] = {
            "layout_version": LAYOUT_VERSION,
            **asdict(self.key),
            **asdict(self.layout),
            "tokens": self.tokens,
            "tokens_digest": self.tokens_digest,
            "codec": self.codec,
            "extent_xxh3": [
                "".join(f"{value:016x}" for value in sums) for sums in self.extent_sums
            ],
        }
        if self.block_sizes:
            fields["block_sizes"] = self.block_sizes
        return fields

    def _around(self, fields: str) -> bytes:
        """Return the header with these fields, which are JSON text."""
        codec = codec_named(self.codec)
        metadata = {
            "format": "cachecraft chunk-cache",
            "fields": fields,
            "fields_xxh3": xxhash.xxh3_64_hexdigest(fields.encode("ascii")),
        }
        entries: dict[str, object] = {"__metadata__": metadata}
        for layer, (begin, nbytes) in enumerate(self.blocks()):
            for part in codec.parts(self.layout, self.tokens, nbytes):
                end = begin + part.nbytes
                entry = {"dtype": part.dtype, "shape": part.shape, "data_offsets": [begin, end]}
                entries[f"layer.{layer:03d}{part.suffix}"] = entry
                begin = end
        text = json.dumps(entries, separators=(",", ":")).encode("ascii")
        padded = -(-(8 + len(text)) // _ALIGNMENT) * _ALIGNMENT
        return struct.pack("<Q", padded - 8) + text.ljust(padded - 8)

    @classmethod
    def decode(cls, raw: bytes) -> Header:
        """Return the header in the bytes of `encode`, which `raw` holds up to the data; unknown fields are ignored.

        Raises ValueError, never ConfigError, if any byte of `raw` differs from what this version would write for its
        fields, and for another layout version or an unknown codec.
        """
        try:
            metadata = json.loads(raw[8:])["__metadata__"]
            text = metadata["fields"]
            # Before the fields are used: a damaged number of layers could request billions of entries.
            if xxhash.xxh3_64_hexdigest(text.encode("ascii")) != metadata["fields_xxh3"]:
                raise ValueError("checksum of the fields")
            given = json.loads(text)
            if given["layout_version"] != LAYOUT_VERSION:
                raise ValueError("layout version")
            header = cls._of(given)
            rebuilt = header._around(text)
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            ZeroDivisionError,
            RecursionError,
        ) as error:
            raise ValueError(f"header damaged: {type(error).__name__}") from error
        if rebuilt != raw:
            raise ValueError("header damaged: not as it was written")
        return header

    @classmethod
    def _of(cls, given: Mapping[str, Any]) -> Header:
        key = VariantKey(**{field.name: given[field.name] for field in fields(VariantKey)})
        return cls(
            key=replace(key, origin_prefix=tuple(key.origin_prefix)),
            layout=KVLayout(**{field.name: given[field.name] for field in fields(KVLayout)}),
            tokens=given["tokens"],
            tokens_digest=given["tokens_digest"],
            codec=given["codec"],
            extent_sums=tuple(tuple(_sums(text)) for text in given["extent_xxh3"]),
            block_sizes=tuple(given.get("block_sizes", ())),
        )


# The bytes of a variant's file, in consecutive parts.
Encoded = tuple[memoryview, ...]


def size_of(encoded: Encoded) -> int:
    """Return the number of bytes of a variant's file."""
    return sum(part.nbytes for part in encoded)


def encode(variant: Variant, layout: KVLayout, kv: torch.Tensor) -> Encoded:
    """Return the bytes of a variant's file: the header, then a block for each layer.

    `kv` is `[layers, 2, tokens, kv_heads, head_dim]`, contiguous and on the CPU. It must have the layout and the tokens
    of `variant`, which is not checked. Raw blocks share its memory. Raises ValueError if the codec cannot encode the
    values (infinities, NaN).
    """
    codec = codec_named(variant.codec)
    blocks = tuple(
        memory_of(codec.encode(each, layer=n, layers=layout.layers)) for n, each in enumerate(kv)
    )
    pieces = extents(codec, layout, variant.tokens)
    sums = tuple(
        tuple(_sum_of(codec, layout, variant.tokens, run, [block]) for run in pieces)
        for block in blocks
    )
    known = codec.block_bytes(layout, variant.tokens) is not None
    sizes = () if known else tuple(len(block) for block in blocks)
    header = Header(
        variant.key, layout, variant.tokens, variant.tokens_digest, variant.codec, sums, sizes
    )
    return (memoryview(header.encode()), *blocks)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor of any shape as a flat, writable view: they share its memory."""
    import torch

    array: np.ndarray = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)  # type: ignore[arg-type]  # NumPy's types know the buffer protocol from Python 3.12 on


def extents(codec: Codec, layout: KVLayout, tokens: int) -> list[tuple[int, int]]:
    """Return (first token, end) of each piece of a layer that can be read and verified alone, in order.

    Pieces have `EXTENT_TOKENS` tokens, the last one perhaps fewer; a codec whose blocks are only decoded whole has one.
    """
    if not codec.run(layout, tokens, 0, tokens):  # can only be decoded as a whole
        return [(0, tokens)]
    return [
        (start, min(start + EXTENT_TOKENS, tokens)) for start in range(0, tokens, EXTENT_TOKENS)
    ]


class ByteSource(Protocol):
    """The bytes of a stored variant, in a file or on a remote."""

    tier: TierName
    sequential: bool  # True if the bytes can only be read in order

    @property
    def nbytes(self) -> int:
        """Number of bytes, header included; of a remote, the number that the look-up named."""

    def read(self, buffer: memoryview, at: int) -> None:
        """Fill all of `buffer` with the bytes from offset `at` on, and wait for them.

        Several threads may call it at the same time, of a `sequential` source only one, in order. Raises OSError if the
        bytes cannot be read or are too few, and ValueError if they are not those that were signed.
        """

    def close(self) -> None:
        """Release the bytes; a second call does nothing.

        A read in another thread ends soon, with OSError or with its bytes.
        """


class StoredVariant:
    """An open stored variant. Its header is verified; its layers can be read one by one, or in runs of tokens.

    Attributes:
        variant: its row in the catalog.
        kv: `[layers, 2, tokens, kv_heads, head_dim]`, raw keys and values, allocated by `allocate`, perhaps for the
            heads of one rank only, and filled by `read`; None before `allocate` and after `release`.
        source: source of its bytes.
        tier: where its bytes are: "disk" or "remote".
        extents: the smallest pieces for `read`, see `extents`; a single one if the bytes must be read in order.
        token_bytes: stored bytes of a token in all layers, on average.
        sequential: True if layers must be read in order, each as a whole.
    """

    kv: torch.Tensor | None = None

    def __init__(self, source: ByteSource, variant: Variant) -> None:
        """Read and verify the header; the source stays open after an error.

        Raises ValueError, with the reason, if it is damaged or another variant's, ConfigError for an unknown codec, and
        OSError if it cannot be read, or if the tensor would be implausibly large and no model's layout is known.
        """
        self._codec = codec_named(variant.codec)
        layout = variant.payload_facts.layout
        longest = _LONGEST_HEADER if layout is None else longest_header(variant, layout)
        header, self._begin = _read_header(source, longest)
        wanted = replace(
            header,
            key=variant.key,
            tokens=variant.tokens,
            tokens_digest=variant.tokens_digest,
            codec=variant.codec,
        )
        if header != wanted:
            raise ValueError("file is of another variant: its header contradicts the catalog")
        if layout not in (None, header.layout):
            raise ValueError("file is of another model: its header contradicts the model's layout")
        self._blocks = header.blocks()
        size = source.nbytes
        needed = self._begin + sum(self._blocks[-1])
        if size != needed:
            word = "truncated" if size < needed else "too long"
            raise ValueError(f"file is {word}: {size} bytes instead of {needed}")
        if layout is None and header.layout.nbytes(header.tokens) > _MOST_GROWTH * size:
            raise OSError(errno.EFBIG, "it would grow too large, and no model says that it must")
        self.source = source
        self._header = header
        self.variant = variant
        self.tier = source.tier
        self.sequential = source.sequential
        self._pieces = extents(self._codec, header.layout, header.tokens)
        self.extents = [(0, header.tokens)] if source.sequential else self._pieces
        self.token_bytes = (needed - self._begin) / header.tokens
        self._heads = slice(None)  # those that `kv` holds

    def allocate(self, *, pinned: bool = False, share: HeadShare | None = None) -> None:
        """Allocate `kv` in main memory, uninitialised, page-locked if `pinned`; a second call replaces it.

        With a `share` it holds these heads only.
        """
        import torch

        from cachecraft_rag.kernels.memory import empty

        layout = self._header.layout
        if share is not None:
            self._heads = share.of(layout.kv_heads)
            layout = replace(layout, kv_heads=layout.kv_heads // share.ranks)
        dtype = getattr(torch, layout.dtype)
        self.kv = empty(layout.shape(self._header.tokens), dtype, pinned=pinned)

    def release(self) -> None:
        """Set `kv` to None; its memory is freed once nothing else refers to it."""
        self.kv = None

    def own(self, layer: int, start: int, stop: int) -> torch.Tensor:
        """Return tokens of a layer of the allocated `kv`, `[2, stop - start, kv_heads, head_dim]`: a view, no copy."""
        assert self.kv is not None, "it was allocated, and is not released"
        return self.kv[layer, :, start:stop]

    def scratch(self, tokens: int, old: torch.Tensor | None) -> torch.Tensor:
        """Return an uninitialised tensor `[2, tokens, kv_heads, head_dim]` for `read`, of all heads, in `kv`'s dtype.

        It is in the memory of `old`, an earlier result, if that has this dtype and is large enough.
        """
        import torch

        from cachecraft_rag.kernels.memory import empty

        layout = self._header.layout
        shape = layout.shape(tokens)[1:]
        dtype = getattr(torch, layout.dtype)
        if (
            old is None
            or old.dtype != dtype
            or old.untyped_storage().nbytes() < math.prod(shape) * dtype.itemsize
        ):
            return empty(shape, dtype)
        return old.as_strided(shape, torch.empty(shape, device="meta").stride())

    def read(self, layer: int, start: int, stop: int, *, out: torch.Tensor | None = None) -> None:
        """Read a range of tokens of a layer into `kv[layer, :, start:stop]`, or `out` of that shape, and verify it.

        Both ends must be borders of `extents`, which is not checked; `out` is as `scratch` makes it. Several threads
        may read different ranges at the same time, of a `sequential` variant only one. Raises ValueError if the bytes
        are damaged, are not those that were signed, or, where the model's layout is known, hold infinities, NaN, or
        numbers beyond 1e9; then no value of the range may be used. Other `READ_ERRORS` may be temporary.
        """
        import torch

        layout = self._header.layout
        codec = self._codec
        tokens = self._header.tokens
        offset, nbytes = self._blocks[layer]
        whole = stop - start == tokens
        slices = (slice(0, nbytes),) if whole else codec.run(layout, tokens, start, stop)
        target = self.own(layer, start, stop) if out is None else out
        has_all_heads = target.shape[2] == layout.kv_heads
        out = target if has_all_heads else self.scratch(stop - start, None)
        block = torch.empty(
            0 if codec.in_place else sum(s.stop - s.start for s in slices), dtype=torch.uint8
        )
        # directly into the tensor: a piece consists of two ranges, keys and values
        if codec.in_place:
            parts = [memory_of(out)] if whole else [memory_of(out[0]), memory_of(out[1])]
        else:
            parts = _cut(memory_of(block), slices)
        for part, where in zip(parts, slices, strict=True):
            self.source.read(part, self._begin + offset + where.start)
        for (first, last), wanted in zip(
            self._pieces, self._header.extent_sums[layer], strict=True
        ):
            if start <= first < stop:
                checksum = _sum_of(
                    codec, layout, stop - start, (first - start, last - start), parts
                )
                if checksum != wanted:
                    raise ValueError(f"data damaged: checksum of layer {layer}")
        if not codec.in_place:
            try:
                codec.decode(block, out=out)
            except ValueError as error:
                raise ValueError(
                    f"data damaged: layer {layer} cannot be decoded: {error}"
                ) from error
        if self.variant.payload_facts.layout is not None and not in_range(out):
            raise ValueError(f"data damaged: layer {layer} holds numbers that no model produces")
        if not has_all_heads:
            with torch.inference_mode():  # a pass may have allocated it there
                target.copy_(out[:, :, self._heads])

    def read_all(self) -> torch.Tensor:
        """Read every layer, in order, and return `kv` itself; call `allocate` first. Raises as `read` does."""
        for layer in range(self._header.layout.layers):
            self.read(layer, 0, self._header.tokens)
        assert self.kv is not None, "there is room"
        return self.kv

    def close(self) -> None:
        """Release the bytes, but not `kv`; current and later reads end soon, with OSError or their bytes."""
        self.source.close()


def open_source(source: ByteSource, variant: Variant) -> StoredVariant | Unavailable:
    """Return the open variant with a verified header, or the reason why not; then the source is closed.

    The reason is a `Damaged` if the bytes are damaged or of another variant, and so of no use to anyone. An unknown
    codec does not count as damage (`UNKNOWN_FORMAT`), because a missing package may provide it, and neither do bytes
    that cannot be read or are gone from a remote (`UNREADABLE`).
    """
    opened: StoredVariant | Unavailable
    try:
        return StoredVariant(source, variant)
    except ConfigError as error:
        opened = Unavailable(variant.variant_id, LoadFailure.UNKNOWN_FORMAT, str(error))
    except (OSError, ValueError) as error:
        opened = unreadable(variant.variant_id, error)
    source.close()
    return opened


def unreadable(variant_id: str, error: Exception) -> Unavailable:
    """Return the miss for an exception of `StoredVariant`: a `Damaged` for ValueError, which means damage.

    For any other, `NO_MEMORY` or `UNREADABLE`: the system has refused, and reading may succeed later.
    """
    if isinstance(error, ValueError):
        return Damaged(variant_id, LoadFailure.DAMAGED, str(error))
    if isinstance(error, MemoryError):
        return Unavailable(variant_id, LoadFailure.NO_MEMORY, "not enough memory")
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return Unavailable(variant_id, LoadFailure.UNREADABLE, f"it cannot be read: {why}")


def longest_header(variant: Variant, layout: KVLayout) -> int:
    """Return an upper bound of the header's bytes, for a variant of this key, codec and number of tokens."""
    codec = codec_named(variant.codec)
    sums = ((0,) * len(extents(codec, layout, variant.tokens)),) * layout.layers
    known = codec.block_bytes(layout, variant.tokens) is not None
    sizes = () if known else (codec.most_bytes(layout, variant.tokens),) * layout.layers
    return len(
        Header(
            variant.key, layout, variant.tokens, variant.tokens_digest, variant.codec, sums, sizes
        ).encode()
    )


def longest_payload(variant: Variant, layout: KVLayout) -> int:
    """Return an upper bound of all bytes of a variant's file, header and blocks."""
    blocks = layout.layers * codec_named(variant.codec).most_bytes(layout, variant.tokens)
    return longest_header(variant, layout) + blocks


def in_range(values: torch.Tensor) -> bool:
    """Return True if all values are finite and none is larger than a key or value can be, 1e9 in size.

    `values` holds at least one, of any shape and a dtype of `KVLayout`, on the CPU. Compares bits, which sort like the
    values: positive numbers as signed, negative ones as unsigned integers. So NumPy needs a single pass without a copy;
    torch would divide it among threads, which wait for each other.

    >>> import torch
    >>> [in_range(torch.tensor([1.0, value])) for value in (-1e9, 2e9, float("-inf"), float("nan"))]
    [True, False, False, False]
    """
    import torch

    narrow = values.dtype != torch.float32
    kind = torch.int16 if narrow else torch.int32
    largest = torch.tensor(min(_LARGEST, torch.finfo(values.dtype).max), dtype=values.dtype)
    limit = int(largest.view(kind))
    bits: np.ndarray = values.view(kind).numpy()
    below = bits.view(np.uint16 if narrow else np.uint32)
    return int(bits.max()) <= limit and int(below.max()) <= limit + (1 << (15 if narrow else 31))


def _read_header(source: ByteSource, longest: int) -> tuple[Header, int]:
    """Return the header of a source, and the offset of its data; ValueError if it is damaged."""
    first = bytearray(_ALIGNMENT)
    if source.nbytes < len(first):
        raise ValueError("file is truncated: it ends in its header")
    source.read(memoryview(first), 0)
    length = 8 + int.from_bytes(first[:8], "little")
    if length > longest or length % _ALIGNMENT:
        raise ValueError("header damaged: length")
    if length > source.nbytes:
        raise ValueError("file is truncated: it ends in its header")
    rest = bytearray(length - len(first))
    source.read(memoryview(rest), len(first))
    return Header.decode(bytes(first + rest)), length


def _sums(text: str) -> list[int]:
    return [int(text[at : at + 16], 16) for at in range(0, len(text), 16)]


def _cut(memory: memoryview, slices: Sequence[slice]) -> list[memoryview]:
    """Cut `memory` into adjoining pieces with the lengths of `slices`."""
    ends = list(itertools.accumulate(s.stop - s.start for s in slices))
    return [memory[end - (s.stop - s.start) : end] for s, end in zip(slices, ends, strict=True)]


def _sum_of(
    codec: Codec, layout: KVLayout, tokens: int, run: tuple[int, int], parts: Sequence[memoryview]
) -> int:
    """Return the checksum of a run in a block of `tokens`, whose bytes are those of `parts` in order."""
    state = xxhash.xxh3_64()
    for where in codec.run(layout, tokens, *run) or (slice(0, sum(map(len, parts))),):
        at = where.start
        for part in parts:
            if at < len(part):  # no range of a run crosses into the next part
                state.update(part[at : at + where.stop - where.start])
                break
            at -= len(part)
    return state.intdigest()
