"""Codecs: decoded values are as near as promised, layer by layer, and nothing half right is passed on."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.store.codecs import CODECS, base, codec_named, entropy, int8
from cachecraft_rag.types.kv_layout import KVLayout
from cachecraft_rag.types.variants import LOSSLESS_CODECS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((2, 1, 1, 1), (2, 1, 2, 8), (2, 7, 3, 5), (2, 33, 2, 64), (2, 130, 1, 17))
LOSSY = [name for name in CODECS if name not in LOSSLESS_CODECS]
ENCODED = [name for name in CODECS if not codec_named(name).in_place]
WHOLE = [
    name for name in CODECS if not codec_named(name).run(KVLayout(2, 3, 5, "float32"), 11, 3, 8)
]


def layer_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Values as a model makes them: channels with means of their own, a first token unlike the others."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) + 4 * torch.randn(
        (1, 1, *shape[2:]), generator=generator
    )
    values[:, 0] *= 8
    return values.to(dtype)


def ordinary_layer(shape: tuple[int, ...]) -> torch.Tensor:
    """The same without the first token of a prompt, which no chunk holds."""
    return layer_of((shape[0], shape[1] + 1, *shape[2:]), torch.float32)[:, 1:].contiguous()


def around(name: str, kv: torch.Tensor, *, layer: int = 0, layers: int = 1) -> torch.Tensor:
    codec = codec_named(name)
    out = torch.full_like(kv, 7.0)
    codec.decode(codec.encode(kv, layer=layer, layers=layers), out=out)
    return out


def allowed(name: str, kv: torch.Tensor) -> torch.Tensor:
    """The largest error that the codec's page promises, and the rounding of the dtype on top."""
    values = kv.double()
    if name == "int8":
        bound = values.abs().amax(-1, keepdim=True) / 127 * (1 + 2**-7) / 2
    elif name != "entropy":
        pytest.fail(f"no bound of {name} here: add the one that its module promises")
    else:
        rest = (values - values.mean(1, keepdim=True)).abs()
        spread = rest.square().mean((1, 3), keepdim=True).sqrt() * 0.4
        fits = torch.maximum(
            rest.amax((1, 3), keepdim=True) / 126, values.abs().amax((1, 3), keepdim=True) / 32767
        )
        bound = torch.maximum(spread, fits) * 1.001 / 2
    kind = torch.finfo(kv.dtype)
    return bound + values.abs() * kind.eps + kind.tiny * kind.eps + torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", sorted(LOSSLESS_CODECS))
def test_a_lossless_codec_gives_back_every_bit_of_any_values(
    name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    kv = layer_of(shape, dtype)
    kv[0, 0, 0, 0], kv[1, 0, 0, 0] = float("nan"), float("-inf")
    block = codec_named(name).encode(kv, layer=0, layers=1)
    assert (block.data_ptr() == kv.data_ptr()) == codec_named(name).in_place  # no copy
    assert torch.equal(around(name, kv).view(torch.uint8), kv.view(torch.uint8))


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_errors_keep_to_their_bound(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    kv = layer_of(shape, dtype)
    for layer in range(3):
        error = (around(name, kv, layer=layer, layers=3).double() - kv.double()).abs()
        assert (error <= allowed(name, kv)).all()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_errors_keep_to_their_bound_for_any_finite_values(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(LOSSY))
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = (2, *data.draw(st.tuples(*[st.integers(1, 5)] * 3)))
    end = min(torch.finfo(dtype).max, 2.0**59) if name == "entropy" else torch.finfo(dtype).max
    kv = layer_of(shape, torch.float32, data.draw(st.integers(0, 99)))
    kv = kv / kv.abs().max() * 10.0 ** data.draw(st.integers(-44, 38))
    spots = data.draw(
        st.lists(
            st.tuples(st.integers(0, kv.numel() - 1), st.floats(-end, end, width=32)), max_size=4
        )
    )
    for spot, value in spots:
        kv.view(-1)[spot] = value
    kv = kv.clamp(-end, end).to(dtype).clamp(-end, end)
    decoded = around(name, kv)
    assert torch.isfinite(decoded).all()
    assert ((decoded.double() - kv.double()).abs() <= allowed(name, kv)).all()


@pytest.mark.parametrize("name", LOSSY)
def test_zeros_and_single_tokens_come_back_nearly_whole(name: str) -> None:
    zeros = torch.zeros(2, 6, 2, 8, dtype=torch.bfloat16)
    assert torch.equal(around(name, zeros), zeros)
    constant = torch.full((2, 6, 2, 8), 3.0)
    assert torch.allclose(around(name, constant), constant, rtol=1e-2)


def test_one_outlier_costs_the_other_tokens_nothing_with_int8() -> None:
    kv = layer_of((2, 9, 2, 16), torch.float32)
    loud = kv.clone()
    loud[:, 4, 1, 3] = 1e6
    same = torch.ones(9, 2, dtype=torch.bool)
    same[4, 1] = False
    assert torch.equal(around("int8", kv)[:, same], around("int8", loud)[:, same])


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_that_are_not_finite_are_refused(
    name: str, value: float, dtype: torch.dtype
) -> None:
    kv = layer_of((2, 5, 2, 8), dtype)
    kv[1, 2, 0, 3] = value
    with pytest.raises(ValueError, match="NaN"):
        codec_named(name).encode(kv, layer=0, layers=1)


def test_values_get_coarser_with_depth_and_keys_do_not() -> None:
    kv = ordinary_layer((2, 200, 2, 64))
    first, last = (
        (around("entropy", kv, layer=layer, layers=6) - kv).square().mean((1, 2, 3))
        for layer in (0, 5)
    )
    assert torch.isclose(first[0], last[0])
    assert first[1] * 1.5 < last[1]


@pytest.mark.parametrize("name", CODECS)
def test_a_codec_says_whether_it_loses_anything(name: str) -> None:
    kv = layer_of((2, 40, 3, 16), torch.float32)
    out = torch.empty_like(kv)
    codec_named(name).decode(codec_named(name).encode(kv, layer=0, layers=1), out=out)
    assert (name in LOSSLESS_CODECS) == torch.equal(kv, out)


@pytest.mark.parametrize("name", CODECS)
def test_a_block_is_as_long_and_holds_what_the_codec_says(name: str) -> None:
    layout, codec = KVLayout(layers=4, kv_heads=3, head_dim=5, dtype="bfloat16"), codec_named(name)
    for tokens in (1, 4, 19):
        block = codec.encode(layer_of(layout.shape(tokens)[1:], torch.bfloat16), layer=1, layers=4)
        assert codec.block_bytes(layout, tokens) in (None, len(block))
        assert sum(part.nbytes for part in codec.parts(layout, tokens, len(block))) == len(block)
        with pytest.raises(ValueError, match=r"\w+ \w+"):  # with the reason
            codec.decode(
                block[: len(block) - 1],
                out=torch.empty(layout.shape(tokens)[1:], dtype=torch.bfloat16),
            )


@pytest.mark.parametrize("name", [name for name in CODECS if name not in WHOLE])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_run_of_tokens_is_slices_of_the_block(name: str, dtype: str) -> None:
    layout = replace(KVLayout(layers=2, kv_heads=3, head_dim=5, dtype="float32"), dtype=dtype)  # type: ignore[arg-type]
    codec, kv = codec_named(name), layer_of((2, 11, 3, 5), getattr(torch, dtype))
    block, whole = codec.encode(kv, layer=0, layers=2), around(name, kv)
    for start, stop in ((0, 11), (0, 1), (3, 8), (10, 11)):
        pieces = [block[piece] for piece in codec.run(layout, 11, start, stop)]
        out = torch.empty(2, stop - start, 3, 5, dtype=kv.dtype)
        codec.decode(torch.cat(pieces), out=out)
        assert torch.equal(out, whole[:, start:stop])


def test_a_block_of_entropy_decodes_only_as_a_whole() -> None:
    assert WHOLE == ["entropy"]


@pytest.mark.parametrize(("name", "ratio"), [("int8", 1.9), ("entropy", 4.0)])
def test_blocks_are_as_small_as_promised(name: str, ratio: float) -> None:
    kv = ordinary_layer((2, 256, 3, 64))
    blocks = [codec_named(name).encode(kv, layer=layer, layers=6) for layer in range(6)]
    assert 6 * kv.numel() * 2 / sum(map(len, blocks)) >= ratio


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_damaged_block_decodes_to_something_or_is_refused_with_a_reason(
    data: st.DataObject,
) -> None:
    name = data.draw(st.sampled_from(ENCODED))
    kv = layer_of((2, 9, 2, 8), torch.bfloat16)
    codec = codec_named(name)
    block = codec.encode(kv, layer=0, layers=1)
    begin = data.draw(st.integers(0, len(block) - 1))
    patch = torch.tensor(list(data.draw(st.binary(min_size=1, max_size=16))), dtype=torch.uint8)
    damaged = torch.cat(
        [block[:begin], patch, block[begin + data.draw(st.sampled_from([0, len(patch)])) :]]
    )
    try:
        codec.decode(damaged, out=torch.empty_like(kv))
    except ValueError as error:
        assert str(error)  # noqa: PT017  # most patches decode: the checksum is what notices


def test_unknown_names_and_missing_packages_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=", ".join(CODECS)):
        codec_named("zip")
    monkeypatch.setitem(sys.modules, "zstandard", None)  # how Python remembers that an import fails
    with pytest.raises(ConfigError, match=r"pip install 'cachecraft-rag\[codecs\]'"):
        codec_named("entropy")
    codec_named("int8")


@pytest.mark.parametrize("size_in_frame", [True, False])
def test_a_frame_that_grows_is_refused_before_it_does(size_in_frame: bool) -> None:
    """64 MB of zeros in 6 KB, where 1 KB of deltas is expected."""
    import resource

    import zstandard

    codec = codec_named("entropy")
    kv = torch.randn(2, 64, 2, 8)
    sound = codec.encode(kv, layer=0, layers=1)
    start = 2 * 2 * 4 + 2 * 2 * 8 * 2
    for grown in (1 << 26, 64 * 2 * 8 + 1, 64 * 2 * 8 - 1):
        frame = zstandard.ZstdCompressor(level=1, write_content_size=size_in_frame).compress(
            bytes(grown)
        )
        block = sound[:start].numpy().tobytes() + len(frame).to_bytes(4, "little") + frame * 2
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(ValueError, match="a frame holds other than the deltas"):
            codec.decode(
                torch.frombuffer(bytearray(block), dtype=torch.uint8), out=torch.empty_like(kv)
            )
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10  # KiB


@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_no_block_is_larger_than_its_codec_says(codec: str, tokens: int) -> None:
    layout = KVLayout(layers=1, kv_heads=3, head_dim=5, dtype="float32")
    noise = torch.rand(2, tokens, 3, 5).mul_(2).sub_(1).pow_(9)
    for kv in (noise, torch.randn(2, tokens, 3, 5), torch.zeros(2, tokens, 3, 5)):
        block = codec_named(codec).encode(kv, layer=0, layers=1)
        assert len(block) <= codec_named(codec).most_bytes(layout, tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["int8", "entropy"])
def test_a_chunk_is_decoded_in_runs_and_each_number_as_if_alone(
    name: str, dtype: torch.dtype
) -> None:
    """Runs are short enough for one thread; where they end is not to be seen in what is decoded."""
    kv = ordinary_layer((2, 300, 3, 64)).to(dtype)
    codec, whole, at_once = codec_named(name), torch.empty_like(kv), torch.empty_like(kv)
    block = codec.encode(kv, layer=0, layers=1)
    runs = list(base.stretches(kv))
    assert len(runs) > 3
    assert all(kv[:, run].numel() < 32_768 for run in runs)
    codec.decode(block, out=whole)
    with pytest.MonkeyPatch.context() as patch:
        for module in (int8, entropy):
            patch.setattr(module, "stretches", lambda out: [slice(0, out.shape[1])])
        codec.decode(block, out=at_once)
    assert torch.equal(whole, at_once)
