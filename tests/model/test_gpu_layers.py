"""The layers of a GPU against the model's own. Their operations are torch's, so they run on a CPU too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cachecraft_rag.compute.driver import prefill
from cachecraft_rag.compute.job import PrefillJob
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.model.fused_layers import GPULayer, fused_layers

TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-1}
IDS = torch.randint(0, 256, (30,), generator=torch.Generator().manual_seed(0)).tolist()
MakeDecoder = Callable[..., Decoder]


def logits_of(decoder: Decoder) -> Tensor:
    """Logits of all tokens of a prompt."""
    rows = Rows.of([0, 5, len(IDS)], new=range(len(IDS)))
    return decoder.logits(prefill(decoder, PrefillJob(IDS, rows)).hidden)


def gpu_layers(decoder: Decoder) -> list[GPULayer]:
    """The layers that a GPU would run; they were compared with the model's own."""
    kinds = [decoder.survey.kinds[kind] for kind in decoder.survey.kind_of]
    layers = fused_layers(
        decoder._layers,
        decoder.model.config.hidden_size,
        decoder.dtype,
        decoder.device,
        rotary_dims=[kind.form.rotary_dim for kind in kinds],
        run=decoder._stock_layer,
        kind=GPULayer,
    )
    assert layers is not None
    return layers


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_a_gpus_layers_are_the_models_own(
    family: str, dtype: str, tiny_decoder: MakeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = tiny_decoder(family, dtype=dtype, seed=11)  # other tests leave hooks in theirs
    monkeypatch.setattr(decoder, "fused_layers", None)
    own = logits_of(decoder)
    used: list[int] = []

    class Counted(GPULayer):
        def __call__(self, *given: object) -> Tensor | None:
            used.append(self._index)
            return super().__call__(*given)

    layers = gpu_layers(decoder)
    for layer in layers:
        layer.__class__ = Counted
    monkeypatch.setattr(decoder, "fused_layers", layers)
    assert float((logits_of(decoder) - own).abs().max()) <= TOLERANCE[dtype]
    assert used == list(range(decoder.layout.layers))


@pytest.mark.parametrize("name", ["mlp", "self_attn.q_norm", "input_layernorm"])
def test_a_gpus_layer_with_hooks_runs_as_it_is(
    name: str, tiny_decoder: MakeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = tiny_decoder("Qwen3", seed=11)
    monkeypatch.setattr(decoder, "fused_layers", gpu_layers(decoder))
    seen: list[str] = []
    part = decoder.model.model.layers[1].get_submodule(name)
    handle = part.register_forward_hook(lambda *_: seen.append(name))
    logits_of(decoder)
    handle.remove()
    assert seen == [name]
