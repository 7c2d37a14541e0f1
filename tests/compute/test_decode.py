"""Decoding in a prefill's buffer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cachecraft_rag.compute.decode import extend
from cachecraft_rag.compute.driver import prefill
from cachecraft_rag.compute.job import PrefillJob
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.engine.decoder import Decoder

IDS = torch.randint(0, 256, (75,), generator=torch.Generator().manual_seed(9)).tolist()


def test_a_decode_step_writes_its_own_position_only(tiny_decoder: Callable[..., Decoder]) -> None:
    decoder = tiny_decoder("Llama")
    output = prefill(decoder, PrefillJob(IDS, Rows.of([0, 10, 60, 75], new=range(75)), capacity=80))
    output.buffer.kv[:, :, 76:] = 7.0
    before = output.buffer.kv[:, :, :75].clone()
    logits = decoder.next_logits(extend(decoder, output.buffer, [42], 75))
    assert torch.equal(output.buffer.kv[:, :, :75], before)
    assert (output.buffer.kv[:, :, 76:] == 7.0).all()
    assert torch.allclose(logits, decoder.own_logits([*IDS, 42])[0], atol=1e-3)


def test_several_tokens_at_once_are_as_many_steps(tiny_decoder: Callable[..., Decoder]) -> None:
    decoder = tiny_decoder("Llama")
    output = prefill(decoder, PrefillJob(IDS, Rows.of([0, 10, 60, 75], new=range(75)), capacity=80))
    found = decoder.logits(extend(decoder, output.buffer, [42, 7, 9], 75))
    assert torch.allclose(found, decoder.own_logits([*IDS, 42, 7, 9], keep=3), atol=1e-3)
