"""Recorded decode steps on a GPU against the same steps launched one by one."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from cachecraft_rag.compute.decode import extend
from cachecraft_rag.compute.decode_graph import _STEPS_BEFORE, DecodeGraph, GraphedSteps
from cachecraft_rag.compute.driver import prefill
from cachecraft_rag.compute.job import PrefillJob
from cachecraft_rag.compute.kv_buffer import KVBuffer
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.model.decoder import Decoder

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
STEPS = 8


def prefilled(decoder: Decoder, tokens: int) -> KVBuffer:
    """Keys and values of a random prompt, with room for an answer."""
    ids = torch.randint(0, 256, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()
    rows = Rows.of([0, 4, tokens], new=range(tokens))
    return prefill(decoder, PrefillJob(ids, rows, capacity=tokens + STEPS)).buffer


@on_a_gpu
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.inference_mode()
def test_recorded_steps_are_those_launched_one_by_one(
    family: str, dtype: str, tiny_decoder: Callable[..., Decoder]
) -> None:
    own = tiny_decoder(family, dtype=dtype)
    decoder = Decoder(own.model.to("cuda"), own.tokenizer, name=family)
    assert decoder.fused_layers is not None
    lengths = (600, 37)
    launched = [prefilled(decoder, tokens) for tokens in lengths]
    recorded = [prefilled(decoder, tokens) for tokens in lengths]
    for buffer, tokens in zip(launched, lengths, strict=True):
        extend(decoder, buffer, [1], tokens)
    graphs = [DecodeGraph(decoder, buffer) for buffer in recorded]
    # the answers take turns, as those of two requests do
    for step in range(STEPS):
        for graph, buffer, own_buffer, tokens in zip(
            graphs, recorded, launched, lengths, strict=True
        ):
            hidden = graph.step(3 * step, tokens + step)
            expected = extend(decoder, own_buffer, [3 * step], tokens + step)
            assert torch.allclose(hidden, expected, rtol=1e-2, atol=1e-4)
            assert torch.allclose(
                buffer.kv[:, :, : tokens + step + 1], own_buffer.kv[:, :, : tokens + step + 1]
            )


@on_a_gpu
def test_a_step_is_recorded_once_an_answer_is_long_enough(
    tiny_decoder: Callable[..., Decoder],
) -> None:
    own = tiny_decoder("Llama")
    decoder = Decoder(own.model.to("cuda"), own.tokenizer, name="Llama")
    steps = GraphedSteps(decoder, records=True)
    buffer = prefilled(decoder, 50)
    given = [steps.step(buffer, 7, 50 + place) for place in range(_STEPS_BEFORE + 2)]
    assert [hidden is not None for hidden in given] == [False] * _STEPS_BEFORE + [True] * 2


@on_a_gpu
def test_answers_one_after_the_other_are_recorded(tiny_decoder: Callable[..., Decoder]) -> None:
    own = tiny_decoder("Llama")
    decoder = Decoder(own.model.to("cuda"), own.tokenizer, name="Llama")
    for tokens in (40, 90, 60):  # the graph of the one before is gone
        buffer = prefilled(decoder, tokens)
        with torch.inference_mode():
            expected = extend(decoder, buffer, [5], tokens)
            hidden = DecodeGraph(decoder, buffer).step(5, tokens)
        assert torch.allclose(hidden, expected, rtol=1e-2, atol=1e-4)


def test_where_recording_fails_every_step_is_launched_and_one_warning_says_why(
    tiny_decoder: Callable[..., Decoder],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    own = tiny_decoder("Llama")
    decoder = Decoder(own.model.to(DEVICE), own.tokenizer, name="Llama")
    steps = GraphedSteps(decoder, records=True)
    buffer = KVBuffer(decoder, 20)
    if DEVICE == "cuda":  # torch's CPU build refuses by itself

        def refuse(*_: object, **__: object) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

        monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", refuse)
    with caplog.at_level(logging.WARNING, logger="cachecraft_rag"):
        given = [steps.step(buffer, 7, place) for place in range(_STEPS_BEFORE + 3)]
    assert given == [None] * (_STEPS_BEFORE + 3)
    assert len(caplog.records) == 1
    assert "CUDA graph" in caplog.text
