"""Fused layers against the model's own, in prefills and decode steps of one and several answers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cachecraft_rag.compute.decode import DecodeStep, extend, extend_all
from cachecraft_rag.compute.driver import prefill
from cachecraft_rag.compute.job import PrefillJob
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.kernels.cpu.library import SETTING, available
from cachecraft_rag.model.decoder import Decoder

pytestmark = pytest.mark.skipif(
    not available(), reason="the compiled kernels were not built: no C compiler"
)
FUSED = ["Llama", "Mistral", "Qwen2", "Qwen3"]
ODD = {"hidden_size": 36, "intermediate_size": 50, "head_dim": 6}  # no width fills a vector
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-1}
MakeDecoder = Callable[..., Decoder]


@pytest.fixture(params=list(available()) or ["torch"])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(SETTING, request.param)
    return str(request.param)


def ids_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def answers(decoder: Decoder, *, steps: int = 3) -> list[Tensor]:
    """Logits of prefills and of joint and separate decode steps of three answers of different lengths."""
    prompts = [ids_of(length + steps, seed) for seed, length in enumerate((7, 30, 19))]
    found, buffers = [], []
    for ids in prompts:
        length = len(ids) - steps
        done = prefill(
            decoder,
            PrefillJob(ids[:length], Rows.of([0, 5, length], new=range(length)), capacity=len(ids)),
        )
        found.append(decoder.next_logits(done.hidden))
        buffers.append(done.buffer)
    for step in range(steps - 1):
        places = [len(ids) - steps + step for ids in prompts]
        joint = [
            DecodeStep(*one)
            for one in zip(
                buffers,
                [ids[at] for ids, at in zip(prompts, places, strict=True)],
                places,
                strict=True,
            )
        ]
        found.extend(decoder.logits(extend_all(decoder, joint)))
    # two rows of one answer: the second one sees the first
    for ids, buffer in zip(prompts, buffers, strict=True):
        found.append(decoder.next_logits(extend(decoder, buffer, ids[-2:], len(ids) - 2)))
    return found


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        *((name, {}) for name in FUSED),
        ("Mistral", {"sliding_window": 8}),
        ("Qwen3", ODD),
        ("Llama", ODD),
    ],
)
def test_fused_layers_are_the_models_own(
    family: str,
    settings: dict[str, int],
    dtype: str,
    tiny_decoder: MakeDecoder,
    instructions: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = tiny_decoder(family, dtype=dtype, **settings)
    assert decoder.fused_layers is not None
    fused = answers(decoder)
    monkeypatch.setattr(decoder, "fused_layers", None)
    for ours, own in zip(fused, answers(decoder), strict=True):
        assert float((ours - own).abs().max()) <= TOLERANCE[dtype]


def test_other_families_keep_their_layers(tiny_decoder: MakeDecoder, instructions: str) -> None:
    assert tiny_decoder("Gemma2").fused_layers is None


def test_a_layer_with_hooks_runs_as_it_is(tiny_decoder: MakeDecoder) -> None:
    decoder = tiny_decoder("Llama", seed=7)
    answers(decoder)
    seen: list[str] = []
    for name in ("mlp", "self_attn", "mlp.down_proj"):
        part = decoder.model.model.layers[0].get_submodule(name)
        part.register_forward_hook(lambda *_, name=name: seen.append(name))
    answers(decoder)
    assert seen
    assert seen.count("mlp") == seen.count("self_attn") == seen.count("mlp.down_proj")


def test_weights_that_are_replaced_are_followed(
    tiny_decoder: MakeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = tiny_decoder("Qwen2", seed=7)
    before = answers(decoder)
    attention = decoder.model.model.layers[1].self_attn
    attention.k_proj.weight = torch.nn.Parameter(
        attention.k_proj.weight.detach().flip(0).contiguous()
    )
    attention.v_proj.bias = torch.nn.Parameter(attention.v_proj.bias.detach() + 1.0)
    mlp = decoder.model.model.layers[0].mlp
    mlp.up_proj = torch.nn.Sequential(mlp.up_proj)  # no plain product any more
    fused = answers(decoder)
    monkeypatch.setattr(decoder, "fused_layers", None)
    for ours, own, old in zip(fused, answers(decoder), before, strict=True):
        assert float((ours - own).abs().max()) <= 1e-4
        assert float((ours - old).abs().max()) > 1e-3
