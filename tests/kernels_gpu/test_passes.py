"""Whole passes over small models with the Triton kernels: what the torch kernels make of them, and the gates."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cachecraft_rag.compute import overlapped
from cachecraft_rag.compute.captures.capture import AttentionAccumulator, CaptureRecorder
from cachecraft_rag.compute.driver import prefill
from cachecraft_rag.compute.job import EarlyTermination, PrefillJob, PrefillResult
from cachecraft_rag.compute.kv_buffer import KVBuffer, ResidentKV
from cachecraft_rag.compute.row_pass import RowPass, advance
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.compute.stale_tokens.probe import QuestionProbe
from cachecraft_rag.kernels.gpu import choice
from cachecraft_rag.model.decoder import Decoder

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUNDS = [0, 4, 15, 24, 30]  # system, two chunks, question
QUESTION = range(BOUNDS[-2], BOUNDS[-1])
IDS = torch.randint(0, 256, (BOUNDS[-1],), generator=torch.Generator().manual_seed(0)).tolist()
MODELS = [
    ("Llama", {}),
    (
        "Phi3",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            }
        },
    ),
    ("Gemma2", {"sliding_window": 9, "attn_logit_softcapping": 5.0}),
]


@pytest.fixture(params=MODELS, ids=lambda case: case[0])
def decoder(request: pytest.FixtureRequest, tiny_decoder: Callable[..., Decoder]) -> Decoder:
    """Two layers of a family, where the kernels run."""
    family, settings = request.param
    own = tiny_decoder(family, num_hidden_layers=2, **settings)
    return Decoder(own.model.to(DEVICE), own.tokenizer, name=family)


def in_torch(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Tensor]) -> Tensor:
    """Result of `run` with the torch kernels."""
    with monkeypatch.context() as patch:
        patch.setattr(choice, "_installed", lambda: False)
        return run()


def captured(decoder: Decoder) -> PrefillResult:
    """A prefill that computes everything and captures the system segment and the chunks."""
    return prefill(
        decoder, PrefillJob(IDS, Rows.of(BOUNDS, new=range(BOUNDS[-1])), captures=(0, 1, 2))
    )


def resident(found: PrefillResult, *, moved: bool) -> list[ResidentKV]:
    """Captured chunk-caches at their places; `moved` exchanges the chunks, which makes them wrong."""
    first, one, two = (ResidentKV(capture.start, capture.kv) for capture in found.recorder.captures)
    if not moved:
        return [first, one, two]
    return [first, ResidentKV(4, two.kv), ResidentKV(4 + two.kv.shape[2], one.kv)]


def test_the_kernels_of_this_process_are_tritons() -> None:
    assert choice.uses_triton(torch.zeros(1, device=DEVICE))
    assert (DEVICE == "cuda") != (os.environ.get("TRITON_INTERPRET") == "1")


def test_recomputing_everything_and_exact_reuse_are_the_models_own_forward(
    decoder: Decoder,
) -> None:
    whole = captured(decoder)
    own = decoder.own_logits(IDS)[0]
    assert (decoder.next_logits(whole.hidden) - own).abs().max() <= 1e-3
    reused = prefill(
        decoder,
        PrefillJob(IDS, Rows.of(BOUNDS, new=QUESTION), resident=resident(whole, moved=False)),
    )
    assert reused.row_layers == 2 * len(QUESTION)
    assert (decoder.next_logits(reused.hidden) - own).abs().max() <= 1e-3


def test_drift_and_probe_are_as_in_torch(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = [0, 4, 13, 24, 30]
    rows = Rows.of(bounds, new=QUESTION, recomputed=[5, 7, 12, 13, 18, 20])
    chunks = resident(captured(decoder), moved=True)
    job = PrefillJob(IDS, rows, resident=chunks, reused=(1, 2), drift=0.4)

    def hidden() -> Tensor:
        found = prefill(decoder, job)
        return torch.cat((found.hidden.flatten(), found.buffer.kv.flatten()))

    def looked() -> Tensor:
        buffer = KVBuffer(decoder, bounds[-1])
        probe = QuestionProbe(rows.mark([14, 15], 1), QUESTION, buffer, 2)
        for layer in range(2):
            for one in chunks:
                buffer.place(layer, one.kv[layer], one.start)
        ids = torch.tensor(IDS, device=DEVICE)[probe.positions.tolist()]
        run = RowPass(decoder, buffer, ids, probe.positions, observer=probe, absent=probe.absent)
        for _ in range(probe.layers):
            advance(decoder, [run])
        return probe.seen()

    for run in (hidden, looked):
        found = run()
        assert torch.allclose(found, in_torch(monkeypatch, run), atol=1e-4)
    assert not torch.allclose(
        hidden(), in_torch(monkeypatch, lambda: undrifted(decoder, job)), atol=1e-4
    )


def undrifted(decoder: Decoder, job: PrefillJob) -> Tensor:
    found = prefill(decoder, replace(job, drift=0.0))
    return torch.cat((found.hidden.flatten(), found.buffer.kv.flatten()))


def test_statistics_of_captures_and_focus_are_as_in_torch(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(measured: list[int] | None) -> None:
        """Let prefills sum up the attention to these segments in the pass, or record queries for later."""
        monkeypatch.setattr(
            overlapped,
            "CaptureRecorder",
            lambda *given, **_: CaptureRecorder(*given, measured=measured),
        )

    record(None)
    whole = captured(decoder)

    def statistics() -> Tensor:
        capture = whole.recorder.captures[2]
        describer = AttentionAccumulator(capture, whole.recorder.settings, bounds=BOUNDS)
        for layer in range(2):
            describer.add_layer(layer, whole.buffer.kv[layer, 0])
        found = describer.statistics()
        assert found.token_scores.inter is not None
        return torch.tensor((*found.inter, found.intra, found.cci, *found.token_scores.inter))

    assert torch.allclose(statistics(), in_torch(monkeypatch, statistics), atol=1e-5)
    record(BOUNDS)
    in_pass = captured(decoder).recorder
    measured = AttentionAccumulator(in_pass.captures[2], in_pass.settings, bounds=BOUNDS)
    found = measured.statistics()
    assert found.token_scores.inter is not None
    assert not in_pass.captures[2].queries
    values = torch.tensor((*found.inter, found.intra, found.cci, *found.token_scores.inter))
    assert torch.allclose(values, statistics(), atol=1e-5)
    # of two chunks, none is dropped
    rows = Rows.of([0, 4, 15, 20, 24, 30], new=QUESTION, recomputed=[5, 16, 21])
    chunks = resident(whole, moved=False)
    early = EarlyTermination(1)
    job = PrefillJob(IDS, rows, resident=chunks, early_termination=early)
    result = prefill(decoder, job)
    with monkeypatch.context() as patch:
        patch.setattr(choice, "_installed", lambda: False)
        expected = prefill(decoder, job)
    assert (result.focus_layer, result.row_layers) == (expected.focus_layer, expected.row_layers)
    assert torch.allclose(result.hidden, expected.hidden, atol=1e-4)
