"""The disk tier: one safetensors file per variant, written once, never changed.

Layout v1, frozen. The file is a plain safetensors file: the library opens it. Its data section is one block per layer,
in layer order and without gaps, so a layer is one contiguous read. What a block is, the codec says:

* `raw`: one tensor per layer named `layer.000`, `layer.001`, … each `[2, tokens, kv_heads, head_dim]` (raw keys, then
  values). The whole file goes straight into one tensor.
* `int8`: `layer.000.scale` and `layer.000.int8`, and so on.
* `entropy`: `layer.000`, and so on: bytes that only the codec understands. They differ in length from layer to layer,
  which the header's fields then say.

Names are zero-padded because safetensors sorts them. The header ends on a multiple of 4096 bytes, so that the data is
page-aligned. It carries the full identity, the codec, a checksum per layer's block and one over its own fields.

Header and data are written and read here, not by the safetensors library: its writer neither syncs nor works without
copies of all layers, its reader maps the file, which turns a truncated file into a crash of the process (SIGBUS).

A header is a pure function of its fields. A reader rebuilds it from what it parsed and compares all bytes, so a change
of any byte is noticed, also one in an offset or in the padding that no checksum covers.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import xxhash

from cachecraft_rag.codecs import Codec, codec_named
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.kernels.memory import empty
from cachecraft_rag.tiers import Damaged
from cachecraft_rag.types import LAYOUT_VERSION, KVLayout, LoadedVariant, Unavailable, Variant, VariantKey

_ALIGNMENT = 4096
_LONGEST_HEADER = 4 << 20  # a header claiming more is damaged; 200 layers and 1,000 prefix ids stay below 100 KiB
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NAME = re.compile(r"(?P<id>[0-9a-f]{32})-(?P<created>[0-9a-f]{16})\.safetensors")
_TEMPORARY = re.compile(r"\.[0-9a-f]{32}-[0-9a-f]{16}\.safetensors\.(?P<writer>[0-9a-f]+)\.tmp")


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself.

    layer_sums   xxh3 (64 bit) of each layer's block
    block_sizes  bytes of each layer's block, where the codec cannot tell without the values
    """

    key: VariantKey
    layout: KVLayout
    tokens: int
    tokens_digest: str
    codec: str
    layer_sums: tuple[int, ...]
    block_sizes: tuple[int, ...] = ()

    def blocks(self) -> list[tuple[int, int]]:
        """Where the block of each layer begins in the data section, and how many bytes it has.

        Raises ValueError when the fields contradict each other, ConfigError when the codec is unknown.
        """
        layers = self.layout.layers
        size = codec_named(self.codec).block_bytes(self.layout, self.tokens) if layers else None
        sizes = self.block_sizes if size is None else (size,) * layers
        if len(sizes) != layers or (size is not None and self.block_sizes) or min(sizes, default=0) < 1:
            raise ValueError("block sizes")
        if self.layout.dtype not in _DTYPES:
            raise ValueError("dtype")
        return list(zip(itertools.accumulate(sizes, initial=0), sizes, strict=False))

    def encode(self) -> bytes:
        """The first bytes of the file, up to its data: length, JSON, padding."""
        codec = codec_named(self.codec)
        entries: dict[str, object] = {"__metadata__": self._metadata()}
        for layer, (begin, nbytes) in enumerate(self.blocks()):
            for part in codec.parts(self.layout, self.tokens, nbytes):
                end = begin + part.nbytes
                entry = {"dtype": part.dtype, "shape": part.shape, "data_offsets": [begin, end]}
                entries[f"layer.{layer:03d}{part.suffix}"] = entry
                begin = end
        text = json.dumps(entries, separators=(",", ":")).encode("ascii")
        padded = -(-(8 + len(text)) // _ALIGNMENT) * _ALIGNMENT
        return struct.pack("<Q", padded - 8) + text.ljust(padded - 8)

    def _metadata(self) -> dict[str, str]:
        fields: dict[str, object] = {
            **asdict(self.key),
            "layout": asdict(self.layout),
            "tokens": self.tokens,
            "tokens_digest": self.tokens_digest,
            "codec": self.codec,
            "layer_xxh3": [f"{value:016x}" for value in self.layer_sums],
        }
        if self.block_sizes:
            fields["block_sizes"] = self.block_sizes
        text = json.dumps(fields, separators=(",", ":"))
        return {
            "format": "cachecraft chunk-cache",
            "layout_version": str(LAYOUT_VERSION),
            "fields": text,
            "fields_xxh3": xxhash.xxh3_64_hexdigest(text.encode("ascii")),
        }

    @classmethod
    def decode(cls, raw: bytes) -> Header:
        """The inverse of `encode`. Raises ValueError with the reason unless `raw` is exactly what `encode` gives."""
        try:
            metadata = json.loads(raw[8:])["__metadata__"]
            version = metadata["layout_version"]
            # Before anything is built from the fields: a damaged number of layers could ask for billions of entries.
            if xxhash.xxh3_64_hexdigest(metadata["fields"].encode("ascii")) != metadata["fields_xxh3"]:
                raise ValueError("checksum of the fields")
            fields = json.loads(metadata["fields"])
            parts = (fields["namespace"], fields["fingerprint"], fields["chunk_id"], tuple(fields["birth_prefix"]))
            sums = tuple(int(value, 16) for value in fields["layer_xxh3"])
            sizes = tuple(fields.get("block_sizes", ()))
            rest = (fields["tokens"], fields["tokens_digest"], fields["codec"], sums, sizes)
            header = cls(VariantKey(*parts), KVLayout(**fields["layout"]), *rest)
            rebuilt = header.encode()
        except (ValueError, LookupError, TypeError, AttributeError, ZeroDivisionError, RecursionError) as error:
            raise ValueError(f"header damaged: {type(error).__name__}") from error
        if version != str(LAYOUT_VERSION):
            raise ValueError(f"layout version unknown: {version}")
        if rebuilt != raw:
            raise ValueError("header damaged: not as it was written")
        return header


@dataclass(frozen=True)
class Encoded:
    """A variant ready to be written: its header and its blocks; raw ones are the tensor's own memory, not a copy."""

    header: bytes
    blocks: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(self.header) + sum(block.nbytes for block in self.blocks)


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file in the tier's folder; without `variant_id` it is none of ours, with `writer` it is a temporary one."""

    path: Path
    nbytes: int
    variant_id: str | None = None
    created: float = 0.0
    writer: str | None = None


def encode(variant: Variant, layout: KVLayout, kv: torch.Tensor) -> Encoded:
    """Header and blocks of `kv` `[layers, 2, tokens, kv_heads, head_dim]`, contiguous and on the CPU.

    Raises ConfigError when the variant's codec is unknown or not installed, ValueError when it cannot take the values.
    """
    codec = codec_named(variant.codec)
    blocks = tuple(memory_of(codec.encode(each, layer=n, layers=layout.layers)) for n, each in enumerate(kv))
    sums = tuple(xxhash.xxh3_64_intdigest(block) for block in blocks)
    known = codec.block_bytes(layout, variant.tokens) is not None
    sizes = () if known else tuple(len(block) for block in blocks)
    header = Header(variant.key, layout, variant.tokens, variant.tokens_digest, variant.codec, sums, sizes)
    return Encoded(header.encode(), blocks)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, shared with it."""
    array: np.ndarray = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)  # type: ignore[arg-type]  # NumPy's types know the buffer protocol from Python 3.12 on


class DiskTier:
    """Files below `root`, in two levels of folders named by the first digits of the variant's id."""

    def __init__(self, root: Path) -> None:
        """Use the folder `root`, which `write` creates."""
        self.root = root

    def path(self, variant_id: str, created: float) -> Path:
        """Where this variant lies.

        `created` is part of the name: a replacement gets a file of its own, so an old row never meets a new file.
        """
        name = f"{variant_id}-{struct.pack('>d', created).hex()}.safetensors"
        return self.root / variant_id[:2] / variant_id[2:4] / name

    def _temporary(self, path: Path, writer: str) -> Path:
        return path.with_name(f".{path.name}.{writer}.tmp")

    def write(self, variant: Variant, encoded: Encoded, *, writer: str) -> None:
        """Put the file in place, whole and synced, or raise OSError. `writer` marks the temporary file."""
        path = self.path(variant.variant_id, variant.created)
        temporary = self._temporary(path, writer)
        self._make_folder(path.parent)
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            try:
                _transfer(os.pwritev, descriptor, memoryview(encoded.header), at=0)
                at = len(encoded.header)
                for block in encoded.blocks:
                    at += _transfer(os.pwritev, descriptor, block, at=at)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.rename(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)

    def read(self, variant: Variant) -> LoadedVariant | Unavailable:
        """The tensor, every byte of it verified; see `Tier.read`. What can never become right again is `Damaged`.

        A codec that is not there is no damage: a newer version, or one more package, may know it.
        """
        try:
            codec = codec_named(variant.codec)
        except ConfigError as error:
            return Unavailable(variant.variant_id, str(error))
        try:
            descriptor = os.open(self.path(variant.variant_id, variant.created), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return Damaged(variant.variant_id, "file is missing")
        except OSError as error:
            return Unavailable(variant.variant_id, f"file cannot be opened: {error.strerror}")
        try:
            kv = _read_verified(descriptor, variant, codec)
        except ValueError as error:
            return Damaged(variant.variant_id, str(error))
        except OSError as error:
            return Unavailable(variant.variant_id, f"file cannot be read: {error.strerror}")
        except MemoryError:
            return Unavailable(variant.variant_id, "not enough memory")
        finally:
            os.close(descriptor)
        return LoadedVariant(variant.variant_id, kv, "disk")

    def remove(self, variant_id: str, created: float) -> None:
        """Delete the file, if there is one. Raises OSError when the system refuses."""
        self.path(variant_id, created).unlink(missing_ok=True)

    def leftovers(self, variant_id: str, created: float, writer: str) -> list[Path]:
        """What exists of a file that `writer` was about to create or delete: temporary, final, or nothing."""
        path = self.path(variant_id, created)
        return [found for found in (self._temporary(path, writer), path) if found.exists()]

    def scan(self) -> Iterator[FoundFile]:
        """Every file below the root. Files may come and go meanwhile."""
        for folder, _, names in os.walk(self.root):
            for name in names:
                path = Path(folder, name)
                try:
                    nbytes = path.lstat().st_size
                except FileNotFoundError:
                    continue
                temporary = _TEMPORARY.fullmatch(name)
                match = _NAME.fullmatch(name[1:].rpartition(".safetensors")[0] + ".safetensors" if temporary else name)
                if match is None:
                    yield FoundFile(path, nbytes)
                    continue
                created: float = struct.unpack(">d", bytes.fromhex(match["created"]))[0]
                yield FoundFile(path, nbytes, match["id"], created, temporary["writer"] if temporary else None)

    def _make_folder(self, folder: Path) -> None:
        """Create the folder and sync every parent that got a new entry: a power cut could lose a synced file else."""
        missing = [folder, *folder.parents]
        missing = missing[: next(i for i, parent in enumerate(missing) if parent.is_dir())]
        for new in reversed(missing):
            new.mkdir(exist_ok=True)  # another process may have been quicker
            _sync_folder(new.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _transfer(
    call: Callable[[int, list[memoryview], int], int], descriptor: int, buffer: memoryview, *, at: int
) -> int:
    """Repeat `preadv` or `pwritev` until the buffer is done or the file ends; returns the bytes moved.

    One call moves at most 2 GiB on Linux, and may move less whenever the system likes.
    """
    done = 0
    while done < len(buffer):
        moved = call(descriptor, [buffer[done:]], at + done)
        if moved == 0:
            break
        done += moved
    return done


def _read_header(descriptor: int) -> tuple[Header, int]:
    """The header and where the data begins. Raises ValueError when it is damaged, OSError."""
    first = bytearray(2 * _ALIGNMENT)
    got = _transfer(os.preadv, descriptor, memoryview(first), at=0)
    length = 8 + int.from_bytes(first[:8], "little")
    if got < 8 or length > _LONGEST_HEADER or length % _ALIGNMENT:
        raise ValueError("header damaged: length")
    if length > len(first):
        first = bytearray(length)
        got = _transfer(os.preadv, descriptor, memoryview(first), at=0)
    if got < length:
        raise ValueError("file is truncated: it ends in its header")
    return Header.decode(bytes(first[:length])), length


def _read_verified(descriptor: int, variant: Variant, codec: Codec) -> torch.Tensor:
    """The verified tensor `[layers, 2, tokens, kv_heads, head_dim]`.

    Raises ValueError with what is wrong with the file, OSError, MemoryError.
    """
    header, start = _read_header(descriptor)
    told = replace(
        header, key=variant.key, tokens=variant.tokens, tokens_digest=variant.tokens_digest, codec=variant.codec
    )
    if header != told:
        raise ValueError("file is of another variant: its header contradicts the catalog")
    blocks = header.blocks()
    size, expected = os.fstat(descriptor).st_size, start + sum(blocks[-1])
    if size != expected:
        raise ValueError(
            f"file is {'truncated' if size < expected else 'too long'}: {size} bytes instead of {expected}"
        )
    kv = empty(header.layout.shape(header.tokens), _DTYPES[header.layout.dtype])
    # One buffer for all blocks: it stays in the CPU's cache, and so do the layer's bytes between the three steps.
    scratch = torch.empty(0 if codec.in_place else max(nbytes for _, nbytes in blocks), dtype=torch.uint8)
    for layer, ((offset, nbytes), wanted) in enumerate(zip(blocks, header.layer_sums, strict=True)):
        block = scratch[:nbytes]
        memory = memory_of(kv[layer] if codec.in_place else block)
        if _transfer(os.preadv, descriptor, memory, at=start + offset) != nbytes:
            raise OSError(errno.EIO, "the file shrank while it was read")
        if xxhash.xxh3_64_intdigest(memory) != wanted:
            raise ValueError(f"data damaged: checksum of layer {layer}")
        if not codec.in_place:
            try:
                codec.decode(block, out=kv[layer])
            except ValueError as error:
                raise ValueError(f"data damaged: layer {layer} cannot be decoded: {error}") from error
    return kv
