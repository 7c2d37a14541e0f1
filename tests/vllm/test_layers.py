"""The survey of layers in vLLM: how each one rotates, and which ones passes cannot run. Needs no vLLM."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from cachecraft_rag.kernels.rope import rotate
from cachecraft_rag.model.layer_survey import SurveyError, in_order
from cachecraft_rag.vllm.worker.layers import (
    WorkerLayer,
    survey_layers,
    survey_transformers_layers,
)

HIDDEN, HEAD, HEADS = 32, 16, 2


class Rotary(nn.Module):
    """Rotates the first `rotary_dim` dimensions of each head, as vLLM's module does."""

    def __init__(self, rotary_dim: int = HEAD, *, interleaved: bool = False, squares: bool = False):
        super().__init__()
        angles = torch.outer(torch.arange(64.0), 0.3 ** torch.arange(rotary_dim // 2))
        self.register_buffer("cos_sin_cache", torch.cat((angles.cos(), angles.sin()), -1))
        self.rotary_dim = rotary_dim
        self.interleaved = interleaved
        self.squares = squares

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.cos_sin_cache[positions][:, None].chunk(2, -1)

        def turned(states: Tensor) -> Tensor:
            heads = states.reshape(len(states), -1, HEAD)
            part, rest = heads[..., : self.rotary_dim], heads[..., self.rotary_dim :]
            if self.interleaved:
                first, second = part[..., 0::2], part[..., 1::2]
            else:
                first, second = part.chunk(2, -1)
            turned_pairs = (first * cos - second * sin, second * cos + first * sin)
            joined = (
                torch.stack(turned_pairs, -1).flatten(-2)
                if self.interleaved
                else torch.cat(turned_pairs, -1)
            )
            out = torch.cat((joined, rest), -1).reshape(states.shape)
            return out * out.abs() if self.squares else out

        return turned(query), turned(key)


class Attention(nn.Module):
    """The attributes of vLLM's attention."""

    def __init__(self, **impl: Any) -> None:
        super().__init__()
        self.impl = SimpleNamespace(**({"scale": 0.25, "do_kv_cache_update": print} | impl))
        self.num_heads = self.num_kv_heads = HEADS
        self.head_size = HEAD
        self.sliding_window = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return value


class SelfAttention(nn.Module):
    """An attention module; without `rotates` it has a rotary module, but does not call it."""

    def __init__(self, rotary: Rotary, *, rotates: bool = True, **impl: Any) -> None:
        super().__init__()
        self.rotary_emb = rotary
        self.rotates = rotates
        self.attn = Attention(**impl)
        self.projection = nn.Linear(HIDDEN, 3 * HIDDEN)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        q, k, v = self.projection(hidden_states).chunk(3, -1)
        if self.rotates:
            q, k = self.rotary_emb(positions, q, k)
        return self.attn(q, k, v)


class Layer(nn.Module):
    """A layer that carries a residual."""

    def __init__(self, attention: SelfAttention) -> None:
        super().__init__()
        self.self_attn = attention

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.self_attn(positions, hidden_states), residual


class LayerInPlace(Layer):
    """Adds to its input and normalises it in place, as vLLM's compiled norm does on a GPU."""

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        residual += hidden_states
        hidden_states.copy_(residual / residual.square().mean(-1, keepdim=True).sqrt())
        return super().forward(positions, hidden_states, residual)


class LayerOfOneStream(Layer):
    """A layer that adds its residual itself, as Granite's."""

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        return hidden_states + self.self_attn(positions, hidden_states)


class LayerWithPictures(Layer):
    """A layer that needs more than a pass has."""

    def forward(self, positions: Tensor, hidden_states: Tensor, pictures: Tensor) -> Tensor:  # type: ignore[override]
        return hidden_states


def survey(*layers: nn.Module) -> Any:
    torch.manual_seed(0)
    return survey_layers(
        layers,  # type: ignore[arg-type]
        hidden_size=HIDDEN,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [8, HEAD])
def test_stored_keys_rotate_as_the_layer_does(rotary_dim: int, interleaved: bool) -> None:
    rotary = Rotary(rotary_dim, interleaved=interleaved)
    (layer,), (table,), kinds = survey(Layer(SelfAttention(rotary)))
    assert kinds == [0]
    assert (table.form.rotary_dim, table.form.interleaved) == (rotary_dim, interleaved)
    keys = torch.randn(5, HEADS * HEAD)
    positions = torch.arange(3, 8)
    cos, sin = table.tables(positions, torch.float32)
    stored = in_order(keys.reshape(5, HEADS, HEAD), layer.order).contiguous()
    back = in_order(rotate(stored, cos, sin), layer.original_order)
    expected = rotary(positions, keys, keys)[1].reshape(5, HEADS, HEAD)
    torch.testing.assert_close(back, expected)


def test_a_layer_that_overwrites_its_input_is_surveyed_like_any_other() -> None:
    (_layer,), (table,), _kinds = survey(LayerInPlace(SelfAttention(Rotary(8))))
    assert table.form.rotary_dim == 8


def test_layers_are_grouped_by_their_rotary_modules() -> None:
    first, second = Rotary(), Rotary()
    layers = [
        Layer(SelfAttention(first)),
        Layer(SelfAttention(second)),
        Layer(SelfAttention(first, rotates=False)),
        Layer(SelfAttention(first)),
    ]
    _layers, tables, kinds = survey(*layers)
    assert kinds == [0, 1, 2, 0]
    assert [table.form.rotary_dim for table in tables] == [HEAD, HEAD, 0]
    assert tables[2].tables(torch.arange(4), torch.float32)[0].shape == (4, 0)


@pytest.mark.parametrize(("kind", "streams"), [(Layer, 2), (LayerOfOneStream, 1)])
def test_a_layer_runs_with_our_attention_and_is_left_as_it_was(
    kind: type[Layer], streams: int
) -> None:
    module = kind(SelfAttention(Rotary()))
    (layer,), _tables, _kinds = survey(module)
    assert layer.carries_residual == (streams == 2)
    hidden = torch.randn(streams, 4, HIDDEN)
    positions = torch.arange(4)
    out = layer.run(hidden, positions, lambda query, key, value: torch.zeros_like(value))
    expected = hidden if streams == 1 else torch.stack((torch.zeros(4, HIDDEN), hidden[1]))
    torch.testing.assert_close(out, expected)
    for part in (module.self_attn.attn, module.self_attn.rotary_emb):
        assert "forward" not in vars(part)


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (nn.Linear(1, 1), "not laid out like Llama's"),
        (LayerWithPictures(SelfAttention(Rotary())), "its layers take pictures"),
        (Layer(SelfAttention(Rotary(squares=True))), "rotary embedding has an unknown form"),
        (Layer(SelfAttention(Rotary(), alibi_slopes=[1.0])), "ALiBi"),
    ],
)
def test_layers_that_passes_cannot_run(layer: nn.Module, says: str) -> None:
    with pytest.raises(SurveyError, match=says):
        survey(layer)


def test_heads_of_several_sizes_are_refused() -> None:
    other = Layer(SelfAttention(Rotary()))
    other.self_attn.attn.num_kv_heads = 1
    with pytest.raises(SurveyError, match="heads of several sizes"):
        survey(Layer(SelfAttention(Rotary())), other)


@pytest.mark.parametrize("threads", [1, 2])
def test_sinks_and_windows_are_refused_on_several_threads_of_a_cpu(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with_sinks = Layer(SelfAttention(Rotary(), sinks=torch.zeros(HEADS)))
    with_window = Layer(SelfAttention(Rotary()))
    with_window.self_attn.attn.sliding_window = 32
    survey(with_sinks)
    survey(with_window)
    if threads == 1:
        survey(with_sinks, with_window)
        return
    with pytest.raises(SurveyError, match="in more than one thread") as refused:
        survey(with_sinks, with_window)
    assert refused.value.advice.startswith("Set OMP_NUM_THREADS=1")


def attention_of_vllm(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *_unused: Any, **_named: Any
) -> tuple[Tensor, None]:
    """Call the module's `attn` with rows of all heads, as vLLM's attention function does for transformers."""
    rows = (states[0].transpose(0, 1).flatten(1) for states in (query, key, value))
    return module.attn.forward(*rows), None


def transformers_model(family: str, **settings: Any) -> Any:
    """A tiny model of transformers that holds vLLM's attention, as vLLM's modelling backend makes it."""
    config = getattr(transformers, f"{family}Config")(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD,
        pad_token_id=0,
        **settings,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}Model")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(
                    0.2 * torch.randn(parameter.shape)
                )  # norms of some dimensions differ
    transformers.AttentionInterface.register("vllm's", attention_of_vllm)
    model.set_attn_implementation("vllm's")
    for layer in model.layers:
        layer.self_attn.attn = Attention()
    return model


def survey_of(model: Any, embed: Any = None) -> Any:
    return survey_transformers_layers(
        model, embed=embed or model.embed_tokens, forward_context=contextlib.nullcontext
    )


def keys_of(layer: WorkerLayer, hidden: Tensor, positions: Tensor) -> Tensor:
    """The keys `[rows, heads, head_dim]` that reach a layer's attention."""
    seen: list[Tensor] = []

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen.append(key.reshape(len(key), HEADS, HEAD))
        return torch.zeros_like(query)

    layer.run(hidden, positions, attend)
    (keys,) = seen
    return keys


TWO_TABLES = {
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
    },
}


@pytest.mark.parametrize(
    ("family", "settings", "rotary_dims", "kinds"),
    [
        ("Olmo2", {}, [HEAD], [0, 0]),
        ("Olmo3", TWO_TABLES, [HEAD, HEAD], [0, 1]),
        ("Glm", {"partial_rotary_factor": 0.5}, [HEAD // 2], [0, 0]),  # adjoining pairs
        ("SmolLM3", {"no_rope_layer_interval": 2}, [HEAD, 0], [0, 1]),
    ],
)
@torch.no_grad()
def test_layers_of_transformers_get_raw_keys_that_rotate_as_theirs_do(
    family: str, settings: dict[str, Any], rotary_dims: list[int], kinds: list[int]
) -> None:
    model = transformers_model(family, **settings)
    layers, tables, kind_of = survey_of(model)
    assert [table.form.rotary_dim for table in tables] == rotary_dims
    assert list(kind_of) == kinds
    hidden = torch.randn(1, 5, HIDDEN)
    positions = torch.arange(3, 8)
    types = settings.get("layer_types")
    for index, layer in enumerate(layers):
        kind = () if types is None else (types[index],)
        own_rotary = model.rotary_emb(hidden, positions[None], *kind)
        own = replace(layer, call=replace(layer.call, rotary=own_rotary))
        rotated = keys_of(own, hidden, positions)
        raw = keys_of(layer, hidden, positions)
        stored = in_order(raw, layer.order).contiguous()
        cos, sin = tables[kind_of[index]].tables(positions, torch.float32)
        back = in_order(rotate(stored, cos, sin), layer.original_order)
        torch.testing.assert_close(back, rotated)
        assert "forward" not in vars(layer.attention)


def test_keys_that_are_normalised_after_their_rotation_are_refused() -> None:
    with pytest.raises(SurveyError, match="rotary embedding has an unknown form"):
        survey_of(transformers_model("HunYuanDenseV1"))


def test_other_inputs_than_embeddings_are_refused() -> None:
    model = transformers_model("Olmo2")
    with pytest.raises(SurveyError, match="something other than its token embeddings"):
        survey_of(model, embed=lambda ids: 2 * model.embed_tokens(ids))
