"""Refreshing while decoding: which tokens, that they become what recomputing gives, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from cachecraft_rag.compute.decode import DecodeStep, extend_all
from cachecraft_rag.compute.driver import prefill
from cachecraft_rag.compute.job import PrefillJob, PrefillResult
from cachecraft_rag.compute.kv_buffer import ResidentKV
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.compute.stale_tokens.refresh import Refresh
from cachecraft_rag.model.decoder import Decoder

MakeDecoder = Callable[..., Decoder]
BOUNDS = [0, 12, 52, 92, 110]  # system, two chunks, question
IDS = torch.randint(0, 256, (BOUNDS[-1],), generator=torch.Generator().manual_seed(4)).tolist()
FULL = PrefillJob(IDS, Rows.of(BOUNDS, new=range(BOUNDS[-1])), captures=[0, 1, 2], capacity=120)


@pytest.fixture
def decoder(tiny_decoder: MakeDecoder) -> Decoder:
    return tiny_decoder("Llama", num_hidden_layers=5)


def spoilt(
    decoder: Decoder, rows: int, *, recomputed: Sequence[int] = (60, 61), **job: object
) -> PrefillResult:
    """A prefill over exact chunk-caches, but for the second chunk's: its keys and values are somewhat off."""
    captures = prefill(decoder, FULL).recorder.captures
    noise = torch.randn(captures[2].kv.shape, generator=torch.Generator().manual_seed(1))
    kvs = [captures[0].kv.clone(), captures[1].kv.clone(), captures[2].kv + 0.3 * noise]
    resident = [ResidentKV(start, kv) for start, kv in zip(BOUNDS, kvs, strict=False)]
    own = Rows.of(BOUNDS, new=range(92, 110), recomputed=recomputed)
    made = PrefillJob(IDS, own, resident=resident, capacity=120, reused=[2], refresh_rows=rows)
    return prefill(decoder, replace(made, **job))


def steps(decoder: Decoder, result: PrefillResult, count: int) -> list[torch.Tensor]:
    """Logits of the first steps of an answer that is given."""
    return [
        decoder.logits(
            extend_all(decoder, [DecodeStep(result.buffer, 7 + n, 110 + n, result.refresh)])
        )[0]
        for n in range(count)
    ]


@pytest.mark.gate
def test_a_chunk_refreshed_whole_is_as_if_it_had_been_recomputed(decoder: Decoder) -> None:
    exact, result = prefill(decoder, FULL).buffer.kv, spoilt(decoder, 1000, recomputed=())
    chunk = slice(52, 92)
    assert (result.buffer.kv[:, :, chunk] - exact[:, :, chunk]).abs().max() > 0.1
    steps(decoder, result, 1)
    assert result.refresh is not None
    assert result.refresh.refreshed == 40
    assert (result.buffer.kv[:, :, chunk] - exact[:, :, chunk]).abs().max() <= 1e-3
    assert (result.buffer.kv[:, :, :52] - exact[:, :, :52]).abs().max() <= 1e-3


@pytest.mark.gate
def test_rows_that_refresh_leave_the_answers_own_row_alone(decoder: Decoder) -> None:
    """Over exact chunk-caches, refreshing writes what is there already."""
    captures = prefill(decoder, FULL).recorder.captures
    resident = [ResidentKV(one.start, one.kv.clone()) for one in captures]
    own = Rows.of(BOUNDS, new=range(92, 110))
    job = PrefillJob(IDS, own, resident=resident, capacity=120, reused=[1, 2], refresh_rows=8)
    for n, logits in enumerate(steps(decoder, prefill(decoder, job), 4)):
        expected = decoder.own_logits([*IDS, *range(7, 8 + n)])[0]
        assert (logits - expected).abs().max() <= 1e-3


def test_the_most_attended_stale_tokens_go_first_and_each_once(decoder: Decoder) -> None:
    stale, received = np.zeros(6, bool), np.array([9.0, 1, 5, 3, 8, 4], np.float32)
    stale[[1, 2, 3, 5]] = True
    refresh = Refresh(range(6), stale, received, rows=2, layers=5)
    assert refresh.begin(6)[0].tolist() == [2, 5]
    assert refresh.begin(6)[0].tolist() == [2, 5]  # the step failed
    assert refresh.refreshed == 2
    refresh._observer = None  # nothing was observed
    assert refresh.begin(7)[0].tolist() == [1, 3]
    refresh._observer = None
    assert refresh.begin(8)[0].tolist() == []
    assert refresh.refreshed == 4


def test_what_an_answer_attends_to_decides(decoder: Decoder) -> None:
    with decoder.stock() as model, torch.inference_mode():
        model.set_attn_implementation("eager")
        attentions = model(torch.tensor([[*IDS, 7]]), output_attentions=True).attentions
    captures = prefill(decoder, FULL).recorder.captures
    resident = [ResidentKV(one.start, one.kv.clone()) for one in captures]
    own = Rows.of(BOUNDS, new=range(92, 110))
    job = PrefillJob(IDS, own, resident=resident, capacity=120, reused=[1, 2], refresh_rows=4)
    result = prefill(decoder, job)
    assert result.refresh is not None
    first = sum(attentions[layer][0, :, 109].mean(0) for layer in (2, 3, 4))[12:92]
    assert result.refresh.begin(110)[0].tolist() == sorted(
        (first.argsort(descending=True)[:4] + 12).tolist()
    )


def test_steps_that_refresh_run_together_as_they_do_alone(decoder: Decoder) -> None:
    alone = [steps(decoder, spoilt(decoder, rows), 3) for rows in (0, 3, 8)]
    results = [spoilt(decoder, rows) for rows in (0, 3, 8)]
    for n in range(3):
        batch = [DecodeStep(result.buffer, 7 + n, 110 + n, result.refresh) for result in results]
        logits = decoder.logits(extend_all(decoder, batch))
        for row, one in zip(logits, alone, strict=True):
            assert torch.allclose(row, one[n], atol=1e-4)
    assert [result.refresh and result.refresh.refreshed for result in results] == [None, 9, 24]


@pytest.mark.parametrize(
    "job", [{"reused": []}, {"shared_until": 92}], ids=["exact", "captured for everybody"]
)
def test_exact_tokens_and_those_before_shared_captures_are_never_refreshed(
    decoder: Decoder, job: object
) -> None:
    assert isinstance(job, dict)
    assert spoilt(decoder, 8, **job).refresh is None
