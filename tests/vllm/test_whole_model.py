"""vLLM's own forward while a pass runs through it: its attention is the pass, and is vLLM's again afterwards."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")

from cachecraft_rag.compute.stack import AttentionSettings
from cachecraft_rag.errors import UnsupportedModelError
from cachecraft_rag.vllm.worker.whole_model import VLLMForward

HEAD = 4
LAYERS = 3


class Implementation:
    """vLLM's attention of one layer, after which every row holds ones."""

    def forward(self, *_arguments: object, output: Tensor, **_named: object) -> Tensor:
        return output.fill_(1.0)


class Model:
    """Layers that attend and add the result to what enters them.

    Args:
        scale: scale of quantised outputs that compiled code asks its attention for.
    """

    def __init__(self, scale: Tensor | None = None) -> None:
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
            model_config=SimpleNamespace(
                supports_multimodal_inputs=False, enable_prompt_embeds=False, mrope_num_dims=0
            ),
        )
        self.layers = [
            SimpleNamespace(
                attention=SimpleNamespace(impl=Implementation(), head_size=HEAD),
                order=None,
                settings=AttentionSettings(1.0),
            )
            for _ in range(LAYERS)
        ]
        self.scale = scale
        self.entered: list[Tensor] = []
        self.dtypes: list[torch.dtype] = []
        self.positions: list[list[int]] = []

    def __call__(self, ids: Tensor, positions: Tensor, _intermediate: None) -> Tensor:
        self.positions.append(positions.tolist())
        self.dtypes.append(ids.dtype)
        hidden = ids.float()[:, None, None].expand(-1, 1, HEAD)
        for layer in self.layers:
            self.entered.append(hidden)
            output = torch.full((len(ids), 1, HEAD), torch.nan)
            attention = layer.attention
            attention.impl.forward(
                attention,
                hidden,
                hidden,
                hidden,
                None,
                None,
                output=output,
                output_scale=self.scale,
            )
            hidden = hidden + output
        return hidden


class Doubling:
    """A pass whose attention returns its queries; it may fail in one layer."""

    def __init__(self, fails_in: int = -1) -> None:
        self.fails_in = fails_in
        self.written: list[int] = []

    def write_rotated(self, layer: int, _q: Tensor, _k: Tensor, _v: Tensor, _how: Any) -> None:
        if layer == self.fails_in:
            raise MemoryError("of this test")
        self.written.append(layer)

    def attend_rotated(
        self, _layer: int, q: Tensor, _how: Any, out: Tensor | None = None
    ) -> Tensor:
        return q if out is None else out.copy_(q)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, how: Any) -> Tensor:
        self.write_rotated(layer, q, k, v, how)
        return q


@pytest.fixture(autouse=True)
def _no_forward_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.forward_context.set_forward_context", lambda *_a, **_k: nullcontext())


def run(model: Model, whole_pass: Doubling, layers: int = LAYERS, *, raw: bool = False) -> None:
    forward = VLLMForward(model, model.layers)  # type: ignore[arg-type]
    assert forward.most_rows == 64
    if raw:
        forward.run_raw(torch.tensor([1, 2]), whole_pass, layers)
    else:
        forward.run(torch.tensor([1, 2]), torch.tensor([5, 9]), whole_pass, layers)


def assert_vllm_attends(model: Model) -> None:
    output = model(torch.tensor([0]), torch.tensor([0]), None)
    assert output.eq(LAYERS).all()


@pytest.mark.parametrize("layers", [1, 2, LAYERS])
def test_the_forward_ends_once_the_last_wanted_layer_is_written(layers: int) -> None:
    model, whole_pass = Model(), Doubling()
    run(model, whole_pass, layers)
    assert whole_pass.written == list(range(layers))
    assert [states[1, 0, 0].item() for states in model.entered] == [2.0, 4.0, 8.0][:layers]
    assert model.dtypes == [torch.int32]  # compiled code reads int64 as something else
    assert_vllm_attends(model)


def test_rows_of_which_raw_keys_are_wanted_are_all_at_position_0() -> None:
    model, whole_pass = Model(), Doubling()
    forward = VLLMForward(model, model.layers)  # type: ignore[arg-type]
    assert not forward.gives_raw, "before it is checked"
    forward.run_raw(torch.tensor([1, 2]), whole_pass, LAYERS)
    assert whole_pass.written == list(range(LAYERS))
    assert [states[1, 0, 0].item() for states in model.entered] == [2.0, 4.0, 8.0]
    assert model.positions == [[0, 0]]
    assert_vllm_attends(model)


@pytest.mark.parametrize("raw", [False, True])
def test_after_an_error_the_layers_continue_for_the_other_ranks(*, raw: bool) -> None:
    model, whole_pass = Model(), Doubling(fails_in=1)
    with pytest.raises(MemoryError, match="of this test"):
        run(model, whole_pass, raw=raw)
    assert whole_pass.written == [0]
    assert [states[1, 0, 0].item() for states in model.entered] == [2.0, 4.0, 4.0]
    assert_vllm_attends(model)


class Multimodal(Model):
    """Takes embeddings and three positions per token; images of vLLM's running step add to its layers."""

    def __init__(self) -> None:
        super().__init__()
        config = self.vllm_config.model_config
        config.supports_multimodal_inputs = True
        config.mrope_num_dims = 3
        self.deepstack_input_embeds = [torch.ones(64, HEAD)]
        self.deepstack_input_embeds_num_tokens = 7
        self.images: list[Tensor] = []

    def embed_input_ids(self, ids: Tensor) -> Tensor:
        return ids[:, None].expand(-1, HEAD)

    def __call__(
        self,
        ids: Tensor | None,
        positions: Tensor,
        _intermediate: None,
        embedded: Tensor | None = None,
    ) -> Tensor:
        assert ids is None
        assert embedded is not None
        self.images += self.deepstack_input_embeds
        return super().__call__(embedded[:, 0], positions, None)


def test_a_multimodal_model_gets_a_text_as_vllm_gives_it_one() -> None:
    model, whole_pass = Multimodal(), Doubling()
    step = model.deepstack_input_embeds
    run(model, whole_pass)
    assert [states[1, 0, 0].item() for states in model.entered] == [2.0, 4.0, 8.0]
    assert model.positions == [[[5, 9]] * 3], "mRoPE: all positions of a token are equal in a text"
    assert [image.shape for image in model.images] == [(2, HEAD)]
    assert not any(image.any() for image in model.images)
    assert model.deepstack_input_embeds is step, "vLLM's own step has its images again"
    assert model.deepstack_input_embeds_num_tokens == 7


def test_quantised_outputs_are_refused() -> None:
    model = Model(scale=torch.ones(1))
    with pytest.raises(UnsupportedModelError, match="quantised"):
        run(model, Doubling())
    assert_vllm_attends(model)
