"""Decoding in a prefill's buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cachecraft_rag.compute.decode import DecodeStep, extend, extend_all
from cachecraft_rag.compute.driver import prefill
from cachecraft_rag.compute.job import PrefillJob
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.model.decoder import Decoder

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


FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {}),
    ("Mistral", {"sliding_window": 24}),
    ("Qwen2", {}),
    ("Qwen3", {}),
    ("Phi3", {"sliding_window": 24}),
    (
        "Gemma2",
        {"sliding_window": 24, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0},
    ),
    ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}),
]


@pytest.mark.gate
@pytest.mark.parametrize(("family", "settings"), FAMILIES, ids=[row[0] for row in FAMILIES])
def test_steps_of_several_answers_are_each_the_models_own_forward(
    tiny_decoder: Callable[..., Decoder], family: str, settings: dict[str, Any]
) -> None:
    """Greedy answers after prompts of different lengths, some beyond the window."""
    decoder, lengths = tiny_decoder(family, **settings), [12, 75, 31, 60]
    answers = [IDS[:length] for length in lengths]
    outputs = [
        prefill(
            decoder,
            PrefillJob(ids, Rows.of([0, 10, len(ids)], new=range(len(ids))), capacity=len(ids) + 9),
        )
        for ids in answers
    ]
    logits = torch.stack([decoder.next_logits(output.hidden) for output in outputs])
    for _ in range(9):
        for ids, found in zip(answers, logits, strict=True):
            own = decoder.own_logits(ids)[0]
            assert (found - own).abs().max() <= 1e-3
            assert int(found.argmax()) == int(own.argmax())
        tokens = logits.argmax(-1).tolist()
        answers = [[*ids, token] for ids, token in zip(answers, tokens, strict=True)]
        steps = [
            DecodeStep(output.buffer, ids[-1], len(ids) - 1)
            for output, ids in zip(outputs, answers, strict=True)
        ]
        logits = decoder.logits(extend_all(decoder, steps))
