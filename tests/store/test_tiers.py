"""The tiers: a file gives back exactly its tensor or says why not; memory keeps to its budget."""

from __future__ import annotations

import json
import linecache
import math
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.kernels.memory import empty
from cachecraft_rag.store.catalog_records import FileRef
from cachecraft_rag.store.codecs import CODECS, codec_named
from cachecraft_rag.store.eviction import Use
from cachecraft_rag.store.files.disk import DiskTier, Throttle
from cachecraft_rag.store.files.writers import Writers
from cachecraft_rag.store.layout import Header, StoredVariant, encode, memory_of, size_of
from cachecraft_rag.store.memory import MemoryTier
from cachecraft_rag.types.digests import digest
from cachecraft_rag.types.kv_layout import KVLayout
from cachecraft_rag.types.store_reasons import Damaged, LoadFailure, Unavailable
from cachecraft_rag.types.variants import LoadedVariant, PayloadFacts, Variant, VariantKey

LAYOUT = KVLayout(layers=12, kv_heads=2, head_dim=4, dtype="float32")
ENCODED = [name for name in CODECS if not codec_named(name).in_place]
WHOLE = [name for name in CODECS if not codec_named(name).run(LAYOUT, 11, 3, 8)]


def make(
    name: str = "chunk", *, tokens: int = 3, layout: KVLayout = LAYOUT, created: float = 1.5
) -> Variant:
    key = VariantKey("tenant ☃", "model", digest(name), (digest("system"), digest("before")))
    nbytes = layout.nbytes(tokens)
    return Variant(
        key=key,
        variant_id=key.variant_id,
        tokens=tokens,
        tokens_digest=digest("tokens"),
        inter=(0.5, 0.25),
        intra=0.1,
        cci=0.6,
        exact_share=1.0,
        session=None,
        codec="raw",
        nbytes=nbytes,
        reuse_frequency=0.0,
        created=created,
    )


def tensor(variant: Variant, layout: KVLayout = LAYOUT) -> torch.Tensor:
    generator = torch.Generator().manual_seed(int(variant.variant_id[:8], 16))
    return torch.randn(layout.shape(variant.tokens), generator=generator).to(
        getattr(torch, layout.dtype)
    )


def store(tier: DiskTier, variant: Variant, layout: KVLayout = LAYOUT) -> tuple[torch.Tensor, Path]:
    kv = tensor(variant, layout)
    tier.write(variant, encode(variant, layout, kv), writer="ab")
    return kv, tier.path(variant.variant_id, variant.created)


def decoded(codec: str, kv: torch.Tensor) -> torch.Tensor:
    """The tensor after encoding and decoding, without a file."""
    out = torch.empty_like(kv)
    for layer, each in enumerate(kv):
        block = codec_named(codec).encode(each, layer=layer, layers=len(kv))
        codec_named(codec).decode(block, out=out[layer])
    return out


# -- disk -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("layers", "tokens"), [(1, 1), (3, 17), (120, 5)])
def test_a_file_gives_back_its_tensor_bit_by_bit(
    tmp_path: Path, dtype: str, layers: int, tokens: int
) -> None:
    layout = replace(LAYOUT, layers=layers, dtype=dtype)  # type: ignore[arg-type]
    variant = make(tokens=tokens, layout=layout)
    tier = DiskTier(tmp_path / "variants")
    kv, path = store(tier, variant, layout)
    loaded = tier.read(variant)
    assert isinstance(loaded, LoadedVariant)
    assert (loaded.variant_id, loaded.tier) == (variant.variant_id, "disk")
    assert loaded.kv.dtype == kv.dtype
    assert loaded.kv.shape == layout.shape(tokens)
    assert bytes(memory_of(loaded.kv)) == bytes(memory_of(kv))
    assert path.parent.parent.parent == tier.root
    assert path.parent == tier.root / variant.variant_id[:2] / variant.variant_id[2:4]
    assert path.stat().st_size == size_of(encode(variant, layout, kv))


def test_the_safetensors_library_reads_the_file_and_finds_one_block(tmp_path: Path) -> None:
    kv, path = store(DiskTier(tmp_path), make())
    names = [f"layer.{layer:03d}" for layer in range(12)]
    layers = load_file(path)
    assert sorted(layers) == names
    assert all(torch.equal(layers[name], kv[layer]) for layer, name in enumerate(names))
    content = path.read_bytes()
    start = len(content) - kv.nbytes
    assert start % 4096 == 0
    # [layers, 2, tokens, kv_heads, head_dim], nothing between
    assert content[start:] == bytes(memory_of(kv))
    entries = json.loads(content[8:start])
    offsets = [entries[name]["data_offsets"] for name in names]
    assert [end for _, end in offsets[:-1]] == [begin for begin, _ in offsets[1:]]


def test_the_header_tells_what_the_file_is(tmp_path: Path) -> None:
    variant = make()
    _, path = store(DiskTier(tmp_path), variant)
    with safe_open(path, "pt") as opened:
        metadata = opened.metadata()
    fields = json.loads(metadata["fields"])
    assert fields["layout_version"] == 3
    assert (fields["namespace"], fields["fingerprint"]) == ("tenant ☃", "model")
    assert (fields["chunk_id"], tuple(fields["origin_prefix"])) == (
        variant.key.chunk_id,
        variant.key.origin_prefix,
    )
    assert (fields["codec"], fields["tokens_digest"], fields["tokens"]) == (
        "raw",
        variant.tokens_digest,
        3,
    )
    assert [fields[name] for name in ("layers", "kv_heads", "head_dim", "dtype")] == [
        12,
        2,
        4,
        "float32",
    ]
    assert [len(sums) for sums in fields["extent_xxh3"]] == [16] * 12


def test_a_header_survives_its_encoding() -> None:
    header = Header(make().key, LAYOUT, 3, "digest", "raw", tuple((n,) for n in range(12)))
    assert Header.decode(header.encode()) == header
    with pytest.raises(ValueError, match="header damaged"):
        Header.decode(header.encode() + b" " * 4096)


def test_every_flipped_byte_of_the_header_and_every_spot_of_the_data_is_noticed(
    tmp_path: Path,
) -> None:
    tier, variant = DiskTier(tmp_path), make()
    kv, path = store(tier, variant)
    content = path.read_bytes()
    data = len(content) - kv.nbytes
    assert data == 4096
    with path.open("r+b", buffering=0) as file:
        for position in [*range(data), *range(data, len(content), 7), len(content) - 1]:
            os.pwrite(file.fileno(), bytes([content[position] ^ 1 << position % 8]), position)
            assert isinstance(tier.read(variant), Damaged), position
            os.pwrite(file.fileno(), content[position : position + 1], position)
    assert isinstance(tier.read(variant), LoadedVariant)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_damage_gives_a_tensor_or_an_exception(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    tier, variant = DiskTier(tmp_path_factory.mktemp("tier")), make()
    _, path = store(tier, variant)
    content = bytearray(path.read_bytes())
    begin = data.draw(st.integers(0, len(content) - 1))
    patch = data.draw(st.binary(min_size=1, max_size=64))
    damaged = (
        bytes(content[:begin])
        + patch
        + bytes(content[begin + data.draw(st.sampled_from([0, len(patch)])) :])
    )
    path.write_bytes(damaged)
    result = tier.read(variant)
    if damaged == content:
        assert isinstance(result, LoadedVariant)
    else:
        assert isinstance(result, Damaged)
        assert result.reason


@pytest.mark.parametrize("keep", [0, 5, 8, 100, 4095, 4096, 4097, -1])
def test_a_truncated_file_is_named_as_such(tmp_path: Path, keep: int) -> None:
    tier, variant = DiskTier(tmp_path), make()
    _, path = store(tier, variant)
    path.write_bytes(path.read_bytes()[:keep])
    result = tier.read(variant)
    assert isinstance(result, Damaged)
    assert "truncated" in result.reason or "length" in result.reason


def test_a_missing_and_a_longer_file_are_damaged_but_an_unreadable_one_may_pass(
    tmp_path: Path,
) -> None:
    tier, variant = DiskTier(tmp_path), make()
    assert tier.read(variant) == Damaged(variant.variant_id, LoadFailure.MISSING, "file is missing")
    _, path = store(tier, variant)
    with path.open("ab") as file:
        file.write(b"x")
    assert "too long" in str(tier.read(variant))
    path.unlink()
    path.mkdir()  # opens, but reading it is an error of the system
    result = tier.read(variant)
    assert isinstance(result, Unavailable)
    assert not isinstance(result, Damaged)


@pytest.mark.parametrize(
    "difference",
    [
        {
            "key": VariantKey(
                "another tenant", "model", digest("chunk"), (digest("system"), digest("before"))
            )
        },
        {
            "key": VariantKey(
                "tenant ☃", "another model", digest("chunk"), (digest("system"), digest("before"))
            )
        },
        {"key": VariantKey("tenant ☃", "model", digest("chunk"), (digest("system"),))},
        {"tokens_digest": "other token ids"},
        {"tokens": 4},
        {"codec": "int8"},
    ],
    ids=lambda difference: next(iter(difference)),
)
def test_a_file_of_another_identity_is_never_served(
    tmp_path: Path, difference: dict[str, object]
) -> None:
    tier, variant = DiskTier(tmp_path), make()
    store(tier, variant)
    result = tier.read(replace(variant, **difference))  # type: ignore[arg-type]
    assert isinstance(result, Damaged)
    assert "another variant" in result.reason


def test_an_unknown_codec_is_neither_guessed_at_nor_damage(tmp_path: Path) -> None:
    tier, variant = DiskTier(tmp_path), make()
    store(tier, variant)
    result = tier.read(replace(variant, codec="from the future"))
    assert isinstance(result, Unavailable)
    assert not isinstance(result, Damaged)  # a newer version may know it: row and file stay
    assert "codec unknown" in result.reason
    with pytest.raises(ConfigError, match="codec unknown"):
        encode(replace(variant, codec="from the future"), LAYOUT, tensor(variant))


def test_a_raw_file_is_byte_by_byte_what_layout_3_says(tmp_path: Path) -> None:
    kv, path = store(DiskTier(tmp_path), make())
    content = path.read_bytes()
    assert xxhash.xxh3_128_hexdigest(content[:4096]) == "b3bd7f0383d6968e7f5af71dfb039319"
    assert content[4096:] == bytes(memory_of(kv))


@pytest.mark.parametrize("codec", ENCODED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("layers", "tokens"), [(1, 1), (3, 17), (120, 5)])
def test_an_encoded_file_gives_what_its_codec_gives(
    tmp_path: Path, codec: str, dtype: str, layers: int, tokens: int
) -> None:
    layout = replace(LAYOUT, layers=layers, dtype=dtype)  # type: ignore[arg-type]
    variant = replace(make(tokens=tokens, layout=layout), codec=codec)
    tier = DiskTier(tmp_path)
    kv, path = store(tier, variant, layout)
    loaded = tier.read(variant)
    assert isinstance(loaded, LoadedVariant)
    assert torch.equal(loaded.kv, decoded(codec, kv))
    assert path.stat().st_size == size_of(encode(variant, layout, kv))


@pytest.mark.parametrize("codec", ENCODED)
def test_each_layer_of_a_file_decodes_alone(tmp_path: Path, codec: str) -> None:
    variant = replace(make(tokens=9), codec=codec)
    kv, path = store(DiskTier(tmp_path), variant)
    content = path.read_bytes()
    header = Header.decode(content[: 8 + int.from_bytes(content[:8], "little")])
    data = memoryview(bytearray(content))[len(header.encode()) :]
    assert sum(header.blocks()[-1]) == len(data)
    whole = decoded(codec, kv)
    for layer, (offset, nbytes) in reversed(list(enumerate(header.blocks()))):
        block = torch.frombuffer(data[offset : offset + nbytes], dtype=torch.uint8)
        out = torch.empty(kv.shape[1:])
        codec_named(codec).decode(block, out=out)
        assert torch.equal(out, whole[layer])


def test_the_safetensors_library_reads_an_int8_file(tmp_path: Path) -> None:
    layout = replace(LAYOUT, head_dim=5, kv_heads=3)
    variant = replace(make(tokens=7, layout=layout), codec="int8")
    kv, path = store(DiskTier(tmp_path), variant, layout)
    parts = load_file(path)
    assert len(parts) == 24
    for layer in range(12):
        scale, payload = parts[f"layer.{layer:03d}.scale"], parts[f"layer.{layer:03d}.int8"]
        assert (scale.dtype, payload.dtype) == (torch.bfloat16, torch.int8)
        assert (scale.shape, payload.shape) == ((2, 7, 3, 1), (2, 7, 3, 5))
        assert torch.equal(scale.float() * payload, decoded("int8", kv)[layer])


def test_the_safetensors_library_finds_the_blocks_of_an_entropy_file(tmp_path: Path) -> None:
    variant = replace(make(tokens=7), codec="entropy")
    kv, path = store(DiskTier(tmp_path), variant)
    parts = load_file(path)
    for layer in range(12):
        expected = codec_named("entropy").encode(kv[layer], layer=layer, layers=12)
        assert torch.equal(parts[f"layer.{layer:03d}"], expected)


@pytest.mark.parametrize("codec", ENCODED)
def test_every_damage_to_an_encoded_file_is_noticed(tmp_path: Path, codec: str) -> None:
    tier, variant = DiskTier(tmp_path), replace(make(), codec=codec)
    _, path = store(tier, variant)
    content = path.read_bytes()
    data = 8 + int.from_bytes(content[:8], "little")
    with path.open("r+b", buffering=0) as file:
        for position in [*range(0, data, 11), *range(data, len(content), 5), len(content) - 1]:
            os.pwrite(file.fileno(), bytes([content[position] ^ 1 << position % 8]), position)
            result = tier.read(variant)
            assert isinstance(result, Damaged), position
            assert result.reason
            os.pwrite(file.fileno(), content[position : position + 1], position)
    assert isinstance(tier.read(variant), LoadedVariant)
    path.write_bytes(content[:-1])
    assert "truncated" in str(tier.read(variant))
    path.write_bytes(content + b"x")
    assert "too long" in str(tier.read(variant))


def test_a_block_that_its_checksum_confirms_but_that_cannot_be_decoded_is_damaged(
    tmp_path: Path,
) -> None:
    tier, variant = DiskTier(tmp_path), replace(make(), codec="entropy")
    whole = encode(variant, LAYOUT, tensor(variant))
    blocks = tuple(bytes(len(block)) for block in whole[1:])
    sums = tuple((xxhash.xxh3_64_intdigest(block),) for block in blocks)
    header = replace(Header.decode(bytes(whole[0])), extent_sums=sums)
    tier.write(variant, tuple(map(memoryview, (header.encode(), *blocks))), writer="ab")
    result = tier.read(variant)
    assert isinstance(result, Damaged)
    assert "layer 0 cannot be decoded" in result.reason


def test_a_header_whose_fields_contradict_each_other_is_damaged() -> None:
    sizes = tuple(range(100, 112))
    header = Header(
        make().key, LAYOUT, 3, "digest", "entropy", tuple((n,) for n in range(12)), sizes
    )
    assert Header.decode(header.encode()) == header
    nothing = replace(LAYOUT, layers=0)
    for wrong in (
        replace(header, block_sizes=(1,)),
        replace(header, codec="raw"),
        replace(header, block_sizes=(-1, *sizes[1:])),
        replace(header, layout=nothing, block_sizes=()),
        replace(header, layout=nothing, block_sizes=(), codec="raw"),
    ):
        with pytest.raises(ValueError, match="block sizes"):
            wrong.blocks()
    with pytest.raises(ValueError, match="dtype"):
        replace(header, layout=replace(LAYOUT, dtype="int4")).blocks()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "layout",
    [
        replace(LAYOUT, kv_heads=4, head_dim=2),
        replace(LAYOUT, kv_heads=1, head_dim=8),
        replace(LAYOUT, layers=6),
    ],
)
def test_a_file_of_another_layout_is_damaged_for_who_knows_the_model(
    tmp_path: Path, layout: KVLayout
) -> None:
    """Of the same bytes, and with every checksum right: a hand has swapped it."""
    tier, variant = DiskTier(tmp_path), make()
    variant = replace(variant, nbytes=layout.nbytes(variant.tokens))
    store(tier, variant, layout)
    assert isinstance(tier.read(variant), LoadedVariant)
    result = tier.read(replace(variant, payload_facts=PayloadFacts(LAYOUT)))
    assert isinstance(result, Damaged)
    assert "header" in result.reason


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38, -3e38])
def test_impossible_values_are_damage_once_the_model_is_known(
    tmp_path: Path, dtype: str, value: float
) -> None:
    layout = replace(LAYOUT, dtype=dtype)  # type: ignore[arg-type]
    tier, variant = DiskTier(tmp_path), make(layout=layout, tokens=70)
    kv = tensor(variant, layout)
    known = replace(variant, payload_facts=PayloadFacts(layout))
    tier.write(variant, encode(variant, layout, kv), writer="ab")
    assert torch.equal(tier.read(known).kv, kv)  # type: ignore[union-attr]
    kv[5, 1, 69, 1, 3] = value
    tier.write(variant, encode(variant, layout, kv), writer="ab")
    result = tier.read(known)
    assert isinstance(result, Damaged)
    assert "layer 5 holds numbers that no model produces" in result.reason


def test_a_small_file_that_would_grow_is_left_alone_where_no_model_says_how_far(
    tmp_path: Path,
) -> None:
    layout = KVLayout(layers=1, kv_heads=8, head_dim=64, dtype="float32")
    tier, variant = DiskTier(tmp_path), replace(make(layout=layout, tokens=20_000), codec="entropy")
    tier.write(variant, encode(variant, layout, torch.zeros(layout.shape(20_000))), writer="ab")
    result = tier.read(variant)
    assert "it would grow too large" in str(result)
    assert not isinstance(result, Damaged)
    assert isinstance(
        tier.read(replace(variant, payload_facts=PayloadFacts(layout))), LoadedVariant
    )


@pytest.mark.parametrize("variant_id", ["../../../etc/passwd", "x" * 32, "0" * 31, b"0" * 32])
def test_no_id_of_a_damaged_row_leads_out_of_the_folder(tmp_path: Path, variant_id: str) -> None:
    tier = DiskTier(tmp_path / "tier")
    assert tier.path(variant_id, 1.0).parent == tmp_path / "tier"
    assert tier.path("0" * 32, "soon").parent == tmp_path / "tier"  # type: ignore[arg-type]
    tier.remove(variant_id, 1.0)
    assert all(
        path.parent == tmp_path / "tier" for path in tier.leftovers("0" * 32, 1.0, "../../x")
    )


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_extents_are_read_and_verified_alone(tmp_path: Path, codec: str, dtype: str) -> None:
    layout = replace(LAYOUT, layers=3, dtype=dtype)  # type: ignore[arg-type]
    variant = replace(make(tokens=150, layout=layout), codec=codec)
    tier = DiskTier(tmp_path)
    kv, path = store(tier, variant, layout)
    stored = tier.open(variant)
    assert isinstance(stored, StoredVariant)
    stored.allocate()
    stored.kv.fill_(7)
    assert stored.extents == ([(0, 150)] if codec in WHOLE else [(0, 64), (64, 128), (128, 150)])
    whole, (start, stop) = decoded(codec, kv), stored.extents[-1]
    stored.read(1, start, stop)
    assert torch.equal(stored.kv[1, :, start:stop], whole[1, :, start:stop])
    if codec not in WHOLE:
        assert (stored.kv[1, :, :start] == 7).all()
        stored.read(2, 0, 128)
        assert torch.equal(stored.kv[2, :, :128], whole[2, :, :128])
        assert (stored.kv[2, :, 128:] == 7).all()
    assert (stored.kv[0] == 7).all()
    with path.open("r+b") as file:  # the last byte: of the last run of the last layer
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises(ValueError, match="checksum of layer 2"):
        stored.read(2, start, stop)
    if codec not in WHOLE:
        stored.read(2, 0, 64)  # the others are what they were
    stored.close()
    with pytest.raises(OSError, match="closed"):
        stored.read(0, 0, 150)


def test_a_throttle_holds_its_rate_and_takes_a_new_one_in_the_middle(
    tmp_path: Path, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cachecraft_rag.store.files.disk.time", clock)
    layout = replace(LAYOUT, kv_heads=8, head_dim=64, layers=4)
    variant = make(tokens=250, layout=layout)  # 4 MB
    throttle = Throttle(20e6)
    tier = DiskTier(tmp_path, throttle)
    store(tier, variant, layout)

    def timed() -> float:
        started: float = clock.now
        assert isinstance(tier.read(variant), LoadedVariant)
        return clock.now - started

    assert timed() == pytest.approx(variant.nbytes / 20e6, abs=0.01)
    throttle.bytes_per_s = 4e6
    clock.alarm_at, clock.alarm = (
        clock.now + 0.1,
        lambda: setattr(throttle, "bytes_per_s", math.inf),
    )
    assert 0.1 <= timed() < 0.2  # at 4 MB/s alone it would be a second


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    tier, variant = DiskTier(tmp_path), make()
    encoded = encode(variant, LAYOUT, tensor(variant))
    tier.path(variant.variant_id, variant.created).mkdir(parents=True)  # so that the rename fails
    with pytest.raises(OSError):  # noqa: PT011  # which one differs between systems
        tier.write(variant, encoded, writer="ab")
    assert list(tier.scan()) == []


def test_scan_tells_files_temporary_files_and_strangers_apart(tmp_path: Path) -> None:
    tier, variant = DiskTier(tmp_path), make()
    _, path = store(tier, variant)
    temporary = path.with_name(f".{path.name}.cafe.tmp")
    temporary.write_bytes(b"half")
    (tmp_path / "notes.txt").write_bytes(b"mine")
    found = dict(tier.scan())
    assert set(found) == {path, temporary, tmp_path / "notes.txt"}
    assert found[path] == FileRef(variant.variant_id, 1.5, path.stat().st_size)
    assert found[temporary] == FileRef(variant.variant_id, 1.5, 4)
    assert found[tmp_path / "notes.txt"] == FileRef("", 0.0, 4)
    assert tier.leftovers(variant.variant_id, 1.5, "cafe") == [temporary, path]
    tier.remove(variant.variant_id, 1.5)
    tier.remove(variant.variant_id, 1.5)  # gone already: fine
    assert tier.leftovers(variant.variant_id, 1.5, "cafe") == [temporary]


def test_a_replacement_has_a_file_of_its_own(tmp_path: Path) -> None:
    tier, old = DiskTier(tmp_path), make(created=1.5)
    new = replace(old, created=1.5000001)
    store(tier, old)
    store(tier, new)
    tier.remove(old.variant_id, old.created)
    assert isinstance(tier.read(old), Damaged)
    assert isinstance(tier.read(new), LoadedVariant)


def test_memory_is_aligned_and_of_the_right_kind() -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        layout = replace(LAYOUT, dtype=dtype)  # type: ignore[arg-type]
        kv = empty(layout.shape(5), getattr(torch, dtype))
        assert kv.data_ptr() % 64 == 0
        assert kv.is_contiguous()
        assert (kv.shape, kv.dtype) == (layout.shape(5), getattr(torch, dtype))


# -- host -------------------------------------------------------------------------------------------------------------


def host_with(budget_tensors: int, *names: str) -> MemoryTier:
    host = MemoryTier(budget_tensors * LAYOUT.nbytes(3))
    for name in names:
        assert host.add(make(name), tensor(make(name)))
    return host


def held(host: MemoryTier, *names: str) -> str:
    return "".join(name for name in names if isinstance(host.read(make(name)), LoadedVariant))


def test_memory_gives_the_very_tensor() -> None:
    host, variant = MemoryTier(1 << 20), make()
    kv = tensor(variant)
    host.add(variant, kv)
    loaded = host.read(variant)
    assert isinstance(loaded, LoadedVariant)
    assert loaded.tier == "host"
    assert loaded.kv is kv
    assert host.used_bytes == kv.nbytes


def test_the_least_used_leave_memory_first() -> None:
    host = host_with(3, "a", "b", "c")
    host.record_use(make("a").variant_id, Use(3.0, 3.0))
    host.record_use(make("b").variant_id, Use(2.0, 2.0))
    host.record_use("unknown", Use(9.0, 9.0))
    host.add(make("d"), tensor(make("d")))
    assert held(host, "a", "b", "c", "d") == "abd"
    host.add(make("e"), tensor(make("e")))  # d has not been used either
    assert held(host, "a", "b", "c", "d", "e") == "abe"
    host.add(make("f"), tensor(make("f")))
    host.record_use(make("f").variant_id, Use(5.0, 5.0))
    host.add(make("g"), tensor(make("g")))
    assert held(host, "a", "b", "e", "f", "g") == "afg"


def test_equals_leave_in_the_order_they_came() -> None:
    host = host_with(2, "a", "b", "c")
    assert held(host, "a", "b", "c") == "bc"


def test_a_tensor_larger_than_the_memory_is_not_held() -> None:
    host = host_with(2, "a")
    big = make("big", tokens=100)
    assert not host.add(big, tensor(big))
    assert held(host, "a") == "a"
    off = MemoryTier(0)
    assert not off.add(make(), tensor(make()))
    assert off.used_bytes == 0


def test_replaced_and_removed_tensors_are_accounted_for() -> None:
    host = host_with(9, "a", "b")
    newer = replace(make("a"), created=9.0, tokens=6)
    host.add(newer, tensor(newer))
    assert held(host, "a", "b") == "b"  # the older one is no longer served
    assert isinstance(host.read(newer), LoadedVariant)
    host.remove(newer.variant_id, 1.5)  # that is the older one: nothing happens
    assert host.used_bytes == LAYOUT.nbytes(6) + LAYOUT.nbytes(3)
    host.remove(newer.variant_id, 9.0)
    host.remove(newer.variant_id, 9.0)
    assert host.used_bytes == LAYOUT.nbytes(3)


def test_many_uses_do_not_let_the_bookkeeping_grow() -> None:
    host = host_with(4, "a", "b", "c")
    for _ in range(5000):
        host.record_use(make("b").variant_id, Use(0.5, 0.5))
    assert len(host._lowest._heap) < 100
    host.add(make("d"), tensor(make("d")))
    host.add(make("e"), tensor(make("e")))
    assert held(host, "a", "b", "c", "d", "e") == "bcde"


def test_memory_keeps_to_its_budget_under_eight_threads() -> None:
    budget = 10 * LAYOUT.nbytes(3)
    host, over, errors = MemoryTier(budget), [], []
    variants = [make(str(n)) for n in range(40)]
    kv = tensor(variants[0])

    def work(seed: int) -> None:
        try:
            for n in range(400):
                variant = variants[(seed * 7 + n * 3) % 40]
                host.add(variant, kv)
                host.record_use(variants[(n * 5) % 40].variant_id, Use(1.0, 1.0))
                host.remove(variants[(n * 11) % 40].variant_id, 1.5)
                host.read(variant)
                if host.used_bytes > budget:
                    over.append(host.used_bytes)
        except (KeyError, IndexError, AssertionError) as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert not over
    assert host.used_bytes == len(host) * LAYOUT.nbytes(3)


def test_ctrl_c_at_any_line_leaves_a_memory_that_works_and_keeps_to_its_budget() -> None:
    variants = [make(name) for name in "abcdef"]
    kv = tensor(variants[0])
    budget = 3 * kv.nbytes
    left_after = -1

    def interrupted_at(line: int) -> bool:
        """Change a full memory with Ctrl-C at this line of the package; returns False once there is no such line."""
        nonlocal left_after
        host = host_with(3, "a", "b", "c")
        left_after = line

        def trace(frame: Any, event: str, _: object) -> Any:
            nonlocal left_after
            if "cachecraft_rag/store" not in frame.f_code.co_filename:
                return None
            # A signal never comes between a block's end and the release of its lock, which is one step of CPython.
            if event == "line" and "with " not in linecache.getline(
                frame.f_code.co_filename, frame.f_lineno
            ):
                left_after -= 1
                if left_after < 0:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            host.add(variants[3], kv)  # one leaves
            host.add(variants[0], kv)  # it may come back
            host.record_use(variants[3].variant_id, Use(1.0, 1.0))
            host.remove(variants[3].variant_id, 1.5)
            host.add(replace(variants[2], created=9.0), kv)  # a replacement
            return False
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
            assert host.used_bytes == len(host) * kv.nbytes <= budget
            for variant in variants * 2:
                assert host.add(variant, kv)
                assert isinstance(host.read(variant), LoadedVariant)
                assert host.used_bytes == len(host) * kv.nbytes <= budget
            assert len(host) == 3

    lines = 0
    while interrupted_at(lines):
        lines += 1
    assert lines > 60


# -- writers ----------------------------------------------------------------------------------------------------------


def test_a_token_too_long_for_a_file_name_is_no_running_writer(tmp_path: Path) -> None:
    assert not Writers(tmp_path).is_alive("a" * 300)


def test_a_writer_is_alive_until_it_leaves(tmp_path: Path) -> None:
    one, two = Writers(tmp_path), Writers(tmp_path)
    for writer in (one, two, two):
        writer.enter()
    assert one.token != two.token
    assert one.is_alive(one.token)
    one.remove_stale_locks()
    assert one.is_alive(two.token)
    two.leave()
    assert not one.is_alive(two.token)
    assert not one.is_alive("never seen")
    one.leave()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_file_that_no_process_holds_is_of_a_dead_writer(tmp_path: Path) -> None:
    (tmp_path / "cafe.lock").touch()
    writers = Writers(tmp_path)
    writers.remove_stale_locks()
    assert list(writers.folder.iterdir()) == []
    writers.leave()
