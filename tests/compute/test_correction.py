"""The learned correction: what it does to a chunk, where it is applied, what a fit finds, and the files it refuses."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from cachecraft_rag.compute.correction import (
    Correction,
    UnusableCorrectionError,
    correction_path,
    load_correction,
    unseen_share,
)
from cachecraft_rag.compute.correction_fit import LEAST_TOKENS, Moments, fit
from cachecraft_rag.compute.correction_fit import RANK as RANK_FITTED
from cachecraft_rag.compute.driver import prefill
from cachecraft_rag.compute.job import PrefillJob
from cachecraft_rag.compute.kv_buffer import KVBuffer, ResidentKV
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.compute.stack import Alone
from cachecraft_rag.engine.decoder import Decoder
from cachecraft_rag.errors import ConfigError, StoreError
from cachecraft_rag.types import KVLayout

MakeDecoder = Callable[..., Decoder]
LAYOUT = KVLayout(3, 2, 4, "float32")
WIDTH, RANK = 16, 5
BOUNDS = [0, 10, 40, 60, 75]
IDS = torch.randint(0, 256, (BOUNDS[-1],), generator=torch.Generator().manual_seed(9)).tolist()
QUESTION = range(60, 75)


def drawn(layout: KVLayout = LAYOUT, *, limit: float = 1.5, seed: int = 0) -> Correction:
    """A correction that changes every key and value."""
    draw = torch.Generator().manual_seed(seed)
    layers, width = layout.layers, 2 * layout.kv_heads * layout.head_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).bfloat16().float()  # as a file keeps it

    return Correction(
        "model",
        normal(layers, width, RANK),
        normal(layers, RANK),
        normal(layers, RANK, width),
        normal(layers, width),
        limit,
    )


def chunk(layout: KVLayout = LAYOUT, tokens: int = 7, seed: int = 1) -> Tensor:
    return torch.randn(layout.shape(tokens), generator=torch.Generator().manual_seed(seed))


def whole(tokens: int) -> Tensor:
    """Unseen shares of 1: everything before each token is new to it."""
    return torch.ones(tokens)


# -- what it does to a chunk ------------------------------------------------------------------------------------------


def test_each_token_moves_by_its_own_row() -> None:
    correction, kv = drawn(), chunk()
    before = kv.clone()
    unseen = torch.linspace(0.1, 0.9, 7)
    found = correction.apply(kv, unseen)
    assert torch.equal(kv, before)
    for layer in range(3):
        for token in range(7):
            x = torch.cat((kv[layer, 0, token].flatten(), kv[layer, 1, token].flatten()))
            z = (x @ correction.down[layer] + correction.offset[layer]).clamp(-1.5, 1.5)
            moved = x + unseen[token] * (correction.shift[layer] + z @ correction.up[layer])
            assert torch.allclose(found[layer, :, token].flatten(), moved, atol=1e-4)


def test_some_layers_are_corrected_as_they_are_among_all() -> None:
    correction, kv = drawn(), chunk()
    assert torch.allclose(correction.apply(kv[1:2], whole(7), 1), correction.apply(kv, whole(7))[1:2], atol=1e-5)


def test_an_outlier_moves_no_further_than_the_limit_allows() -> None:
    correction, kv = drawn(), chunk()
    usual = correction.shift.abs() + correction.limit * correction.up.abs().sum(1)
    change = correction.apply(1e4 * kv, whole(7)) - 1e4 * kv
    assert (change.transpose(1, 2).flatten(2).abs() <= 1.01 * usual[:, None] + 0.01).all()


def test_a_token_with_nothing_new_before_it_stays_bit_for_bit() -> None:
    kv = chunk()
    assert torch.equal(drawn().apply(kv, unseen_share(torch.arange(20, 27), 0)), kv)


def test_keys_and_values_of_half_width_stay_so() -> None:
    correction, kv = drawn(), chunk().bfloat16()
    assert correction.apply(kv, whole(7)).dtype is torch.bfloat16
    assert torch.allclose(correction.apply(kv, whole(7)).float(), correction.apply(kv.float(), whole(7)), atol=0.2)


# -- where it is applied ----------------------------------------------------------------------------------------------


@pytest.fixture
def decoder(tiny_decoder: MakeDecoder) -> Decoder:
    return tiny_decoder("Llama")


def test_a_chunk_is_corrected_before_its_keys_are_rotated(decoder: Decoder) -> None:
    correction, kv = drawn(decoder.layout), chunk(decoder.layout, 30)
    corrected = KVBuffer(decoder, 75, correction=correction, corrected={range(10, 40): 5})
    plain, unseen = KVBuffer(decoder, 75), 5 / torch.arange(10, 40)
    for layer in range(decoder.layout.layers):
        corrected.place(layer, kv[layer, :, 4:], 14)  # from its fifth token on: the others are computed
        plain.place(layer, correction.apply(kv, unseen)[layer, :, 4:], 14)
    assert torch.allclose(corrected.kv[:, :, 14:40], plain.kv[:, :, 14:40], atol=1e-5)


def test_a_chunk_elsewhere_is_placed_as_it_is_stored(decoder: Decoder) -> None:
    correction, kv = drawn(decoder.layout), chunk(decoder.layout, 30)
    corrected = KVBuffer(decoder, 75, correction=correction, corrected={range(40, 60): 30})
    plain = KVBuffer(decoder, 75)
    for buffer in (corrected, plain):
        buffer.place(2, kv[2], 10)
    assert torch.equal(corrected.kv[2, :, 10:40], plain.kv[2, :, 10:40])


def test_a_rank_corrects_all_heads_and_keeps_its_own(
    decoder: Decoder, on_ranks: Callable[[Decoder, Alone], Decoder]
) -> None:
    class SecondOfTwo(Alone):
        def own_heads(self, kv: Tensor) -> Tensor:
            return kv[:, :, kv.shape[2] // 2 :]

    layout = decoder.layout
    stack = on_ranks(decoder, SecondOfTwo())
    stack.layout = KVLayout(layout.layers, layout.kv_heads // 2, layout.head_dim, layout.dtype)
    correction, kv = drawn(layout), chunk(layout, 30)
    own, all_heads = (
        KVBuffer(one, 75, correction=correction, corrected={range(10, 40): 5}) for one in (stack, decoder)
    )
    for buffer in (own, all_heads):
        buffer.place(3, kv[3], 10)
    assert torch.equal(own.kv[3, :, 10:40], all_heads.kv[3, :, 10:40, layout.kv_heads // 2 :])


def job(decoder: Decoder, *, recomputed: range = range(0), corrected: tuple[int, ...] = ()) -> PrefillJob:
    """Two chunks captured alone and the second moved behind the first; `corrected` with a correction of `drawn`."""
    resident = []
    for start, stop in ((10, 40), (40, 60)):
        ids = [*IDS[:10], *IDS[start:stop]]
        alone = prefill(decoder, PrefillJob(ids, Rows.of([0, 10, len(ids)], new=range(len(ids))), captures=[1]))
        resident.append(ResidentKV(start, alone.recorder.captures[0].kv))
    rows = Rows.of(BOUNDS, new=[*range(10), *QUESTION], recomputed=recomputed)
    correction = drawn(decoder.layout) if corrected else None
    return PrefillJob(IDS, rows, resident=resident, correction=correction, corrected=corrected)


def test_what_is_not_named_stays_exact_bit_for_bit(decoder: Decoder) -> None:
    plain = prefill(decoder, job(decoder))
    with_one = prefill(decoder, job(decoder, corrected=(2,)))
    assert torch.equal(plain.buffer.kv[:, :, :40], with_one.buffer.kv[:, :, :40])
    assert not torch.equal(plain.buffer.kv[:, :, 40:60], with_one.buffer.kv[:, :, 40:60])
    nothing_named = prefill(decoder, replace(job(decoder), correction=drawn(decoder.layout)))
    assert torch.equal(nothing_named.hidden, plain.hidden)


@pytest.mark.gate
def test_with_everything_recomputed_it_changes_nothing(decoder: Decoder) -> None:
    plain = prefill(decoder, job(decoder, recomputed=range(10, 60)))
    corrected = prefill(decoder, job(decoder, recomputed=range(10, 60), corrected=(1, 2)))
    assert torch.equal(corrected.hidden, plain.hidden)
    assert torch.equal(corrected.buffer.kv[:, :, :75], plain.buffer.kv[:, :, :75])
    assert (decoder.next_logits(corrected.hidden) - decoder.own_logits(IDS)[0]).abs().max() <= 1e-3


def test_recomputed_tokens_are_computed_over_what_was_corrected(decoder: Decoder) -> None:
    plain = prefill(decoder, job(decoder, recomputed=range(40, 50), corrected=(2,)))
    placed = job(decoder, recomputed=range(40, 50), corrected=(2,))
    correction = placed.correction
    assert correction is not None
    first, second = placed.resident
    unseen = 30 / torch.arange(40, 60)  # the first chunk has 30 tokens
    by_hand = replace(placed, correction=None, resident=[first, ResidentKV(40, correction.apply(second.kv, unseen))])
    found = prefill(decoder, by_hand)
    assert torch.allclose(found.hidden, plain.hidden, atol=1e-4)


# -- what a fit finds -------------------------------------------------------------------------------------------------


def unseen_of(tokens: int) -> Tensor:
    return torch.linspace(0.9, 0.3, tokens)


def planted(tokens: int, *, seed: int = 3) -> tuple[Moments, Correction, Callable[[int], tuple[Tensor, Tensor]]]:
    """Sums over chunks that change by a known correction and a little noise; the first layer does not change."""
    truth = drawn(limit=1e9)
    truth.up[0], truth.shift[0] = 0, 0
    draw = torch.Generator().manual_seed(seed)

    def pair(count: int) -> tuple[Tensor, Tensor]:
        alone = torch.randn(LAYOUT.shape(count), generator=draw)
        noise = 0.1 * torch.randn(LAYOUT.shape(count), generator=draw)
        noise[0] = 0
        return alone, truth.apply(alone, unseen_of(count)) + noise

    moments = Moments(LAYOUT)
    for half in (0, 1):
        moments.add(*pair(tokens), unseen_of(tokens), half=half)
    return moments, truth, pair


def test_a_fit_finds_what_was_planted() -> None:
    moments, _, pair = planted(3000)
    assert moments.tokens == [3000, 3000]
    found = fit(moments, "model", rank=RANK, limit=100.0)
    alone, behind = pair(500)
    left = (found.apply(alone, unseen_of(500)) - behind).square().mean()
    assert left < 0.02 * (alone - behind).square().mean()
    assert torch.equal(found.apply(alone, unseen_of(500))[0], alone[0])  # the first layer


def test_directions_are_in_units_of_their_spread() -> None:
    moments, _, pair = planted(3000)
    found = fit(moments, "model", rank=RANK)
    x = pair(4000)[0].transpose(1, 2).flatten(2)
    z = x[1:] @ found.down[1:] + found.offset[1:, None]
    assert z.mean(1).abs().max() < 0.15
    assert (z.std(1) - 1).abs().max() < 0.15


def test_noise_alone_is_hardly_followed() -> None:
    draw = torch.Generator().manual_seed(5)
    moments = Moments(LAYOUT)
    for half in (0, 1):
        moments.add(
            torch.randn(LAYOUT.shape(2000), generator=draw),
            torch.randn(LAYOUT.shape(2000), generator=draw),
            whole(2000),
            half=half,
        )
    alone = torch.randn(LAYOUT.shape(500), generator=draw)
    behind = torch.randn(LAYOUT.shape(500), generator=draw)  # tells nothing of `alone`: the best guess is 0
    left = (fit(moments, "model").apply(alone, whole(500)) - behind).square().mean()
    assert left < 1.1 * behind.square().mean()


def test_sums_do_not_depend_on_how_chunks_were_cut() -> None:
    alone, behind = chunk(tokens=40), chunk(tokens=40, seed=2)
    once, parts = Moments(LAYOUT), Moments(LAYOUT)
    once.add(alone, behind, unseen_of(40), half=1)
    for part in (slice(0, 13), slice(13, 40)):
        parts.add(alone[:, :, part], behind[:, :, part], unseen_of(40)[part], half=1)
    for name in ("gram", "cross", "square"):
        assert torch.allclose(getattr(once, name), getattr(parts, name), rtol=1e-12)


def test_too_few_tokens_are_refused() -> None:
    moments = Moments(LAYOUT)
    moments.add(chunk(tokens=LEAST_TOKENS), chunk(tokens=LEAST_TOKENS, seed=2), whole(LEAST_TOKENS), half=0)
    with pytest.raises(ConfigError, match="not 0; give more documents"):
        fit(moments, "model")


def test_it_takes_little_of_a_full_prefill(demo_model: Path) -> None:
    """Counted in operations: what correcting every token takes, of what computing it takes."""
    decoder = Decoder.load(str(demo_model), dtype="float32")
    layers, _, _, heads, dim = decoder.layout.shape(1)
    width = 2 * heads * dim
    correction = Correction(
        decoder.fingerprint,
        torch.zeros(layers, width, RANK_FITTED),
        torch.zeros(layers, RANK_FITTED),
        torch.zeros(layers, RANK_FITTED, width),
        torch.zeros(layers, width),
        4.0,
    )
    tokens = 64
    with FlopCounterMode(display=False) as computing:
        prefill(decoder, PrefillJob([5] * tokens, Rows.of([0, tokens], new=range(tokens))))
    with FlopCounterMode(display=False) as correcting:
        correction.apply(torch.zeros(decoder.layout.shape(tokens)), whole(tokens))
    assert correcting.get_total_flops() == 2 * tokens * 2 * correction.down.numel()
    assert 0 < correcting.get_total_flops() <= 0.03 * computing.get_total_flops()


# -- files ------------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    correction, path = drawn(), correction_path(tmp_path, "model")
    correction.write(path)
    found = load_correction(tmp_path, "model", LAYOUT)
    assert found is not None
    assert torch.equal(found.apply(chunk(), whole(7)), correction.apply(chunk(), whole(7)))
    assert [file.name for file in path.parent.iterdir()] == ["model.safetensors"]


def test_no_file_is_no_correction(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_correction(tmp_path, "model", LAYOUT) is None
    assert not caplog.records


def test_one_of_another_model_is_refused_with_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    drawn().write(correction_path(tmp_path, "other"))  # its file says "model"
    with caplog.at_level(logging.WARNING, logger="cachecraft_rag"):
        assert load_correction(tmp_path, "other", LAYOUT) is None
    assert "fitted for another model" in caplog.text


def test_one_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "it.safetensors"
    drawn().write(path)
    with pytest.raises(UnusableCorrectionError, match="shapes"):
        Correction.read(path, "model", KVLayout(3, 1, 4, "float32"))


def test_a_file_cut_short_anywhere_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = correction_path(tmp_path, "model")
    drawn().write(path)
    whole = path.read_bytes()
    for length in (0, 3, 8, 40, 200, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        caplog.clear()
        assert load_correction(tmp_path, "model", LAYOUT) is None
        assert "is not used (damaged" in caplog.text


@pytest.mark.parametrize("seed", range(20))
def test_garbage_is_a_miss(tmp_path: Path, seed: int) -> None:
    path = correction_path(tmp_path, "model")
    drawn().write(path)
    data = bytearray(path.read_bytes())
    draw = torch.Generator().manual_seed(seed)
    for place in torch.randint(0, len(data), (3,), generator=draw).tolist():
        data[place] ^= 0x55
    path.write_bytes(data)
    assert load_correction(tmp_path, "model", LAYOUT) is None


@pytest.mark.parametrize("data", [b"", b"\xff" * 100, b"[]" * 50, (2).to_bytes(8, "little") + b"{}"])
def test_what_was_never_a_correction_is_a_miss(tmp_path: Path, data: bytes) -> None:
    path = correction_path(tmp_path, "model")
    path.parent.mkdir()
    path.write_bytes(data)
    assert load_correction(tmp_path, "model", LAYOUT) is None


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    correction, path = drawn(), tmp_path / "it.safetensors"
    correction.up[1, 2, 3] = torch.nan
    correction.write(path)
    with pytest.raises(UnusableCorrectionError, match="finite"):
        Correction.read(path, "model", LAYOUT)


def test_a_folder_that_cannot_be_written_to_is_said(tmp_path: Path) -> None:
    (tmp_path / "corrections").write_text("a file")
    with pytest.raises(StoreError, match="Name a folder"):
        drawn().write(correction_path(tmp_path, "model"))
