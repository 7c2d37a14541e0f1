"""Captures of newly computed chunks: raw tensors, and statistics equal to the model's own attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cachecraft_rag.compute import overlapped
from cachecraft_rag.compute.captures.capture import (
    AttentionAccumulator,
    AttentionStatistics,
    CaptureRecorder,
)
from cachecraft_rag.compute.driver import prefill
from cachecraft_rag.compute.job import PrefillJob, PrefillResult
from cachecraft_rag.compute.kv_buffer import ResidentKV
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.kernels.rope import rotate
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.scoring import context_impact

MakeDecoder = Callable[..., Decoder]
BOUNDS = [0, 12, 40, 75, 95, 110]  # system, three chunks, question
IDS = torch.randint(0, 256, (BOUNDS[-1],), generator=torch.Generator().manual_seed(5)).tolist()
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {}),
    ("Qwen3", {}),
    ("Mistral", {"sliding_window": 24}),
    ("Gemma2", {"sliding_window": 24, "attn_logit_softcapping": 5.0}),
]


def described(
    output: PrefillResult, *, bounds: Sequence[int] = BOUNDS
) -> dict[int, AttentionStatistics]:
    """Segment index → statistics of its capture."""
    found = {}
    for capture in output.recorder.captures:
        accumulator = AttentionAccumulator(capture, output.recorder.settings, bounds=bounds)
        if capture.mass is None:
            for layer in range(len(output.recorder.settings)):
                accumulator.add_layer(layer, output.buffer.kv[layer, 0])
        found[capture.segment] = accumulator.statistics()
    return found


def own_attention(decoder: Decoder, ids: list[int]) -> np.ndarray:
    """The model's own attention weights, averaged over heads and layers `[rows, keys]`."""
    with decoder.stock() as model, torch.inference_mode():
        model.set_attn_implementation("eager")
        weights = model(input_ids=torch.tensor([ids]), output_attentions=True).attentions
    mean: np.ndarray = torch.stack([layer[0].mean(0) for layer in weights]).mean(0).double().numpy()
    return mean


def measure_in_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let passes measure attention themselves, as on a GPU."""
    recorder = partial(CaptureRecorder, measured=BOUNDS)
    monkeypatch.setattr(
        overlapped,
        "CaptureRecorder",
        lambda layout, like, spans, *, measured: recorder(layout, like, spans),
    )


@pytest.mark.parametrize("in_pass", [False, True], ids=["later", "in the pass"])
@pytest.mark.parametrize(("family", "settings"), FAMILIES, ids=[row[0] for row in FAMILIES])
def test_statistics_are_sums_over_the_models_own_attention(
    family: str,
    settings: dict[str, Any],
    in_pass: bool,
    tiny_decoder: MakeDecoder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = tiny_decoder(family, **settings)
    if in_pass:
        measure_in_passes(monkeypatch)
    output = prefill(
        decoder, PrefillJob(IDS, Rows.of(BOUNDS, new=range(BOUNDS[-1])), captures=[0, 1, 2, 3])
    )
    weights = own_attention(decoder, IDS)
    np.fill_diagonal(weights, 0.0)  # eq. 4 counts earlier tokens
    for capture in output.recorder.captures:
        assert (capture.mass is not None, not capture.queries) == (in_pass, in_pass)
    found = described(output)
    for segment in (0, 1, 2, 3):
        rows = weights[BOUNDS[segment] : BOUNDS[segment + 1]]
        towards = [rows[:, BOUNDS[i] : BOUNDS[i + 1]] for i in range(segment + 1)]
        # eq. 3
        assert found[segment].inter == pytest.approx(
            [part.sum() for part in towards[:-1]], abs=1e-4
        )
        assert found[segment].intra == pytest.approx(towards[-1].sum(), abs=1e-4)  # eq. 4
        scores, prior = found[segment].token_scores.inter, towards[1:-1]
        if segment < 2:
            assert scores is None
        else:
            assert scores is not None
            assert scores.dtype == np.float32
            assert scores == pytest.approx(sum(part.sum(1) for part in prior), abs=1e-5)  # eq. 14
        expected = context_impact(  # eq. 9 to 11
            inter=[part.sum() for part in prior],
            prefix_tokens=[part.shape[1] for part in prior],
            intra=towards[-1].sum(),
            tokens=BOUNDS[segment + 1] - BOUNDS[segment],
        )
        assert found[segment].cci == pytest.approx(expected, abs=1e-5)


def test_the_system_segment_has_nothing_before_it(tiny_decoder: MakeDecoder) -> None:
    output = prefill(
        tiny_decoder("Llama"), PrefillJob(IDS, Rows.of(BOUNDS, new=range(BOUNDS[-1])), captures=[0])
    )
    found = described(output)[0]
    assert (found.inter, found.token_scores.inter, found.cci) == ((), None, 0.5)


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2"])
def test_stored_keys_are_raw_and_values_are_the_models(
    family: str, tiny_decoder: MakeDecoder
) -> None:
    decoder = tiny_decoder(family)
    output = prefill(decoder, PrefillJob(IDS, Rows.of(BOUNDS, new=range(BOUNDS[-1])), captures=[2]))
    (capture,) = output.recorder.captures
    with decoder.stock() as model, torch.inference_mode():
        cache = model(input_ids=torch.tensor([IDS]), use_cache=True).past_key_values
    cos, sin = decoder.rope(torch.arange(capture.start, capture.stop))
    for layer in range(decoder.layout.layers):
        own: Tensor = cache.layers[layer].keys[0].transpose(0, 1)[capture.start : capture.stop]
        assert torch.allclose(rotate(capture.kv[layer, 0], cos, sin), own, atol=1e-4)
        assert not torch.allclose(capture.kv[layer, 0], own, atol=1e-2)
        values = cache.layers[layer].values[0].transpose(0, 1)[capture.start : capture.stop]
        assert torch.allclose(capture.kv[layer, 1], values, atol=1e-4)
    assert capture.kv.is_contiguous()
    assert capture.kv.shape == decoder.layout.shape(35)


def test_captures_among_reused_chunks_are_the_rows_of_that_pass(tiny_decoder: MakeDecoder) -> None:
    decoder = tiny_decoder("Llama")
    alone = prefill(decoder, PrefillJob(IDS[12:40], Rows.of([0, 28], new=range(28)), captures=[0]))
    # captured elsewhere: what follows differs from a full pass
    foreign = [ResidentKV(BOUNDS[1], alone.recorder.captures[0].kv)]
    rows = Rows.of(BOUNDS, new=[*range(12), *range(40, 110)], recomputed=[15, 20, 33])
    mixed = prefill(decoder, PrefillJob(IDS, rows, resident=foreign, captures=[0, 2, 3]))
    full = prefill(decoder, PrefillJob(IDS, Rows.of(BOUNDS, new=range(110)), captures=[0, 2, 3]))
    for capture, exact in zip(mixed.recorder.captures, full.recorder.captures, strict=True):
        merged = mixed.buffer.kv[:, :, capture.start : capture.stop]
        assert torch.equal(capture.kv[:, 1], merged[:, 1])
        cos, sin = decoder.rope(torch.arange(capture.start, capture.stop))
        for layer in range(decoder.layout.layers):
            assert torch.allclose(
                rotate(capture.kv[layer, 0], cos, sin), merged[layer, 0], atol=1e-6
            )
        same = torch.allclose(capture.kv, exact.kv, atol=1e-4)
        assert same == (capture.segment == 0)
    found = described(mixed)
    assert len(found[3].inter) == 3
    share = sum(found[2].inter) + found[2].intra
    assert 0 < share < 35  # a share of each row's attention: own positions are left out


def test_statistics_do_not_depend_on_the_default_dtype(tiny_decoder: MakeDecoder) -> None:
    # transformers changes the process's default while it loads a model, and captures are described in another thread.
    output = prefill(
        tiny_decoder("Llama"), PrefillJob(IDS, Rows.of(BOUNDS, new=range(BOUNDS[-1])), captures=[2])
    )
    wanted = described(output)[2]
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = described(output)[2]
    finally:
        torch.set_default_dtype(torch.float32)
    assert (found.inter, found.intra, found.cci) == (wanted.inter, wanted.intra, wanted.cci)
    assert np.array_equal(found.token_scores.inter, wanted.token_scores.inter)
