"""The self-check at loading: sound models pass, an attention that does anything unknown is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from cachecraft_rag.errors import UnsupportedModelError
from cachecraft_rag.kernels.attention import attention
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.model.layer_survey import RotaryKind, RotationForm
from cachecraft_rag.model.self_check import self_check

MakeDecoder = Callable[..., Decoder]


def tampered(decoder: Decoder, change: Callable[[Any], None]) -> Decoder:
    """A decoder of a changed copy of the model, so that the fixture's own stays as it is."""
    model = copy.deepcopy(decoder.model)
    change(model)
    return Decoder(model, decoder.tokenizer, name="tampered")


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "Gemma2"])
def test_sound_models_pass_with_an_error_of_rounding(
    family: str, tiny_decoder: MakeDecoder
) -> None:
    assert self_check(tiny_decoder(family)) <= 2e-6
    assert self_check(tiny_decoder(family, dtype="bfloat16")) <= 0.03


def test_the_demo_model_passes_in_every_dtype(demo_model: Any) -> None:
    assert self_check(Decoder.load(str(demo_model), dtype="bfloat16")) <= 0.03


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_layer_that_forgets_its_rotary_embedding_in_passes_is_refused(
    dtype: str, tiny_decoder: MakeDecoder
) -> None:
    # In bf16 the logits alone would not show a single layer.
    def forget_rotation(decoder: Decoder) -> None:
        kinds = list(decoder.rotary_kinds)
        form = decoder.survey.kinds[kinds[2]].form
        unrotated = RotaryKind(None, RotationForm(form.head_dim, rotary_dim=0))
        kinds[2] = 1
        decoder.survey = replace(
            decoder.survey, kinds=[*decoder.survey.kinds, unrotated], kind_of=kinds
        )

    decoder = tampered(tiny_decoder("Llama", dtype=dtype), lambda model: None)
    forget_rotation(decoder)
    with pytest.raises(UnsupportedModelError, match=r"llama.*layer 2 differs"):
        self_check(decoder)


def test_attention_sinks_are_served(tiny_decoder: MakeDecoder) -> None:
    decoder = tiny_decoder("GraniteSWA", num_hidden_layers=2, head_dim=16)
    assert self_check(decoder) <= 2e-6


def test_forgotten_attention_sinks_are_refused(
    tiny_decoder: MakeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_sinks(*args: Any, sinks: Any = None, **named: Any) -> Any:
        return attention(*args, **named)

    monkeypatch.setattr("cachecraft_rag.compute.row_pass.attention", without_sinks)
    with pytest.raises(UnsupportedModelError, match="granite_swa"):
        self_check(tiny_decoder("GraniteSWA", num_hidden_layers=2, head_dim=16))


def test_an_attention_that_the_model_computes_by_itself_is_refused(
    tiny_decoder: MakeDecoder,
) -> None:
    def compute_alone(model: Any) -> None:
        attention = model.model.layers[1].self_attn

        class Alone(type(attention)):  # type: ignore[misc]
            def forward(self, hidden_states: Any, *args: Any, **named: Any) -> Any:
                return self.o_proj(self.q_proj(hidden_states)), None

        attention.__class__ = Alone

    with pytest.raises(UnsupportedModelError, match="do not call the attention function"):
        tampered(tiny_decoder("Llama"), compute_alone)


def test_a_tampered_attention_is_refused(tiny_decoder: MakeDecoder) -> None:
    def stretch_the_rotation(model: Any) -> None:
        attention = model.model.layers[1].self_attn

        class Odd(type(attention)):  # type: ignore[misc]
            def forward(
                self, hidden_states: Any, position_embeddings: Any, *args: Any, **named: Any
            ) -> Any:
                cos, sin = position_embeddings
                return super().forward(hidden_states, (cos + 0.1, sin), *args, **named)

        attention.__class__ = Odd

    with pytest.raises(UnsupportedModelError, match=r"rotary embedding has an unknown form"):
        self_check(tampered(tiny_decoder("Llama"), stretch_the_rotation))


def test_not_a_number_anywhere_is_refused(tiny_decoder: MakeDecoder) -> None:
    def spoil(model: Any) -> None:
        with torch.no_grad():
            model.model.layers[3].mlp.down_proj.weight[0, 0] = torch.nan

    with pytest.raises(UnsupportedModelError, match="logits differ by nan"):
        self_check(tampered(tiny_decoder("Llama"), spoil))


def test_a_window_that_the_probe_is_too_short_to_see_is_checked_by_name(
    tiny_decoder: MakeDecoder,
) -> None:
    def forget_window(model: Any) -> None:
        model.model.layers[0].self_attn.sliding_window = None

    decoder = tiny_decoder("Gemma2")
    assert self_check(decoder) <= 2e-6
    with pytest.raises(UnsupportedModelError, match="within a window of None, not 512"):
        self_check(tampered(decoder, forget_window))


def test_the_model_is_left_as_it_was(tiny_decoder: MakeDecoder) -> None:
    decoder = tampered(tiny_decoder("Llama"), lambda model: None)

    def hooks() -> list[int]:
        return [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in decoder.model.modules()]

    before = hooks()
    assert self_check(decoder) == self_check(decoder)
    assert hooks() == before
