"""The exactness gates in bf16: no further from fp32 than the model's own bf16."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from cachecraft_rag.compute.capture import CaptureRecorder
from cachecraft_rag.compute.driver import prefill
from cachecraft_rag.compute.job import PrefillJob
from cachecraft_rag.compute.kv_buffer import KVBuffer, ResidentKV
from cachecraft_rag.compute.row_pass import RowPass
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.engine.decoder import Decoder

pytestmark = pytest.mark.gate

FAMILIES = ["Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "Gemma2"]
BOUNDS = [0, 20, 70, 150, 190, 210]  # system, three chunks of different lengths, question
QUESTION = range(BOUNDS[-2], BOUNDS[-1])

# An error of bf16 is a matter of luck at one position: a single token's logits may be twice as far off as the model's
# own, or half as far. So nothing here is decided by one: a layer is compared over all its numbers, given the input that
# the model's own layer had, and logits over hundreds of positions.


def token_ids(seed: int) -> list[int]:
    """Random tokens of every model's vocabulary."""
    return torch.randint(0, 256, (BOUNDS[-1],), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = 24
PATHS = ["everything computed", "same prefix reused"]


@dataclass(frozen=True)
class HalfPrecision:
    """A model in bf16, and the very same weights in fp32."""

    half: Decoder
    exact: Decoder


@pytest.fixture(scope="module", params=[*FAMILIES, "demo"])
def precisions(request: pytest.FixtureRequest, tiny_decoder: Callable[..., Decoder], demo_model: Path) -> HalfPrecision:
    if request.param == "demo":
        half = Decoder.load(str(demo_model), dtype="bfloat16")
    else:
        half = tiny_decoder(request.param, dtype="bfloat16")
    return HalfPrecision(half, Decoder(copy.deepcopy(half.model).float(), half.tokenizer, name="exact"))


@torch.inference_mode()
def layer_outputs(decoder: Decoder, ids: list[int], inputs: list[Tensor], path: str) -> Tensor:
    """What each layer's attention makes of its given input: `[layers, question's rows, hidden]`."""
    rows, question = torch.arange(len(ids)), torch.tensor(QUESTION)
    buffer, other = KVBuffer(decoder, len(ids)), KVBuffer(decoder, len(ids))
    recorder = CaptureRecorder(decoder.layout, buffer.kv, [(0, 0, QUESTION.start)])
    whole, found = RowPass(decoder, buffer, torch.tensor(ids), np.arange(len(ids)), recorder=recorder), []
    again = RowPass(decoder, other, torch.tensor(ids)[question], np.asarray(QUESTION))
    for layer, hidden in enumerate(inputs):
        given = hidden.to(decoder.dtype)
        with decoder.watched() as seen:
            decoder.layer(layer, given, positions=rows, layer_pass=whole)
            if path == "same prefix reused":
                ((capture, _),) = recorder.locate(np.arange(len(ids)))
                other.place(layer, capture.kv[layer], 0)
                decoder.layer(layer, given[:, question], positions=question, layer_pass=again)
        found.append(seen[-1][1][0, -len(question) :].float())
    return torch.stack(found)


def layer_errors(precisions: HalfPrecision, path: str, prompts: int = 4) -> tuple[Tensor, Tensor]:
    """Relative errors of each layer's attention in bf16, ours and the model's own: `[layers]` each, over prompts."""
    ours, own = [], []
    for seed in range(prompts):
        ids = token_ids(seed=seed)
        with precisions.half.watched() as seen:
            precisions.half.own_logits(ids)
        inputs = [hidden for hidden, _ in seen]
        theirs = torch.stack([out[0, -len(QUESTION) :].float() for _, out in seen])
        truth = layer_outputs(precisions.exact, ids, inputs, "everything computed")
        for errors, found in ((ours, layer_outputs(precisions.half, ids, inputs, path)), (own, theirs)):
            errors.append((found - truth).norm(dim=(1, 2)) / truth.norm(dim=(1, 2)))
    return torch.stack(ours).mean(0), torch.stack(own).mean(0)


def assert_layers_as_exact_as_the_models_own(precisions: HalfPrecision, path: str) -> None:
    ours, own = layer_errors(precisions, path)
    print(
        f"bf16, {path}: {float(ours.mean() / own.mean()):.3f} of the model's own error, worst {float((ours / own).max()):.3f}"
    )
    assert ours.mean() <= own.mean()
    assert (ours <= 1.1 * own).all()


@pytest.mark.parametrize("path", PATHS)
def test_no_layers_attention_in_bf16_is_further_from_fp32_than_the_models_own(
    precisions: HalfPrecision, path: str
) -> None:
    assert_layers_as_exact_as_the_models_own(precisions, path)


@pytest.mark.parametrize("path", PATHS)
def test_bf16_is_no_further_from_fp32_than_the_models_own_bf16(precisions: HalfPrecision, path: str) -> None:
    half, keep = precisions.half, len(QUESTION)
    ours, own = [], []
    for seed in range(PROMPTS):
        ids = token_ids(seed=seed)
        truth = precisions.exact.own_logits(ids, keep=keep)
        full = prefill(half, PrefillJob(ids, Rows.of(BOUNDS, new=range(len(ids))), captures=range(4)))
        if path == "same prefix reused":
            stored = [ResidentKV(one.start, one.kv) for one in full.recorder.captures]
            full = prefill(half, PrefillJob(ids, Rows.of(BOUNDS, new=QUESTION), resident=stored))
        ours.append(divergence(truth, half.logits(full.hidden[:, -keep:])))
        own.append(divergence(truth, half.own_logits(ids, keep=keep)))
    print(
        "E2E",
        float(torch.stack(ours).mean() / torch.stack(own).mean()),
        float((torch.stack(ours).mean(1) / torch.stack(own).mean(1)).log().mean().exp()),
        (torch.stack(ours).mean(1) / torch.stack(own).mean(1)).log().std(),
    )
    assert torch.stack(ours).mean() <= 1.25 * torch.stack(own).mean()


def divergence(truth: Tensor, found: Tensor) -> Tensor:
    """Relative errors of the logits `[positions]`."""
    return (found - truth).norm(dim=-1) / truth.norm(dim=-1)
