"""Survey of a Hugging Face model: how it calls each of its layers, and how each layer rotates its queries and keys.

Nothing is concluded from a model's name. The model's own forward runs once over a few tokens while hooks watch what
each layer is given. Then each layer runs twice: once with the model's own rotary embedding, once with the identity
(cos = 1, sin = 0). The form of rotation that leads from the second result to the first is the layer's rotation.

A head's dimensions are then put into one order for all models: pairs as in Llama, dimension i with i + rotary_dim / 2,
and the dimensions that are not rotated after them. Attention scores do not depend on a common order of the dimensions
of queries and keys, so that stored keys, kernels and drift correction know one form only.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cachecraft_rag.compute.stack import AttentionSettings
from cachecraft_rag.kernels.rope import rotate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SURVEY_TOKENS = 6

# Largest relative error (L2) between our rotation and the model's own.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.005, torch.bfloat16: 0.02}

# Arguments of a layer that `LayerCall` replaces by those of the running pass.
_HIDDEN = "hidden_states"
_ROTARY = "position_embeddings"
_POSITIONS = ("position_ids", "cache_position")
_NOT_GIVEN = ("attention_mask", "past_key_values", "past_key_value")


class SurveyError(Exception):
    """Reason why a model's layers cannot be run one by one; the message completes "it cannot be served: …".

    `advice`: a sentence without its full stop; "" if another model is the only way.
    """

    def __init__(self, reason: str, advice: str = "") -> None:
        super().__init__(reason)
        self.advice = advice


@dataclass(frozen=True)
class LayerInputs:
    """Arguments of one layer, as the model's own forward gave them.

    hidden  `[1, tokens, hidden]`
    named   every other argument by name
    """

    hidden: Tensor
    named: Mapping[str, object]


@dataclass(frozen=True, eq=False)
class RotaryCall:
    """A call of a rotary module by the model's own forward, to be repeated for other positions.

    module  the module
    args    positional arguments; tensors of integers are positions, other tensors only show dtype and device
    named   arguments by name
    given   what the module returned in that call; layers get it as their rotary embedding
    """

    module: Callable[..., object]
    args: tuple[object, ...]
    named: Mapping[str, object]
    given: object

    def at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin as the module gives them at positions int64 `[tokens]`, each `[tokens, width]`.

        They have this dtype, and the module is called on the device of `positions`.
        """

        def replaced(value: object) -> object:
            if not isinstance(value, Tensor):
                return value
            if value.is_floating_point():
                return torch.empty(1, 1, 1, dtype=dtype, device=positions.device)
            return positions.expand(*value.shape[:-1], len(positions))

        args = [replaced(value) for value in self.args]
        named = {name: replaced(value) for name, value in self.named.items()}
        cos, sin = cos_and_sin(self.module(*args, **named))
        return cos.to(dtype), sin.to(dtype)


@dataclass(frozen=True)
class RotationForm:
    """Form in which a layer rotates its heads, given the cos and sin of its rotary module.

    head_dim     dimensions of a head of queries and keys
    rotary_dim   dimensions that are rotated; 0 = none
    interleaved  pairs are adjoining dimensions (GPT-J) instead of i and i + rotary_dim / 2 (Llama)
    last         the rotated dimensions are a head's last ones instead of its first
    table        cos and sin hold each angle once ("half"), all angles twice in a row ("halves"), or each angle twice
                 side by side ("pairs")
    backwards    rotates by the negative angles (NanoChat)
    """

    head_dim: int
    rotary_dim: int
    interleaved: bool = False
    last: bool = False
    table: str = "halves"
    backwards: bool = False

    @property
    def order(self) -> Tensor | None:
        """Indices that put a head's dimensions into the order of all models, int64 `[head_dim]` on the CPU.

        Rotated dimensions are first, paired as in Llama, then those that are not rotated. None if the model's heads
        have that order.

        >>> RotationForm(head_dim=6, rotary_dim=4, interleaved=True, last=True).order.tolist()
        [2, 4, 3, 5, 0, 1]
        """
        rotated = torch.arange(self.rotary_dim)
        if self.interleaved:
            rotated = torch.cat((rotated[0::2], rotated[1::2]))
        rest = torch.arange(self.rotary_dim, self.head_dim)
        if self.last:
            rotated = rotated + self.head_dim - self.rotary_dim
            rest = torch.arange(self.head_dim - self.rotary_dim)
        order = torch.cat((rotated, rest))
        return None if torch.equal(order, torch.arange(self.head_dim)) else order

    def tables(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin `[tokens, rotary_dim]` for heads in the order of all models.

        `cos` and `sin` `[tokens, width]` are as the rotary module returns them; a width that does not fit `table` is
        not noticed. The results may be the arguments themselves.
        """
        if self.rotary_dim == 0:
            return cos[:, :0].contiguous(), sin[:, :0].contiguous()
        if self.backwards:
            sin = -sin
        if self.table == "half":
            return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        if self.table == "pairs":
            return torch.cat((cos[:, 0::2], cos[:, 1::2]), -1), torch.cat(
                (sin[:, 0::2], sin[:, 1::2]), -1
            )
        return cos, sin

    @classmethod
    def candidates(cls, head_dim: int, width: int) -> Iterator[RotationForm]:
        """Yield all forms that cos and sin `[tokens, width]` allow for heads of `head_dim` dimensions.

        The usual forms are first. The last one rotates nothing (rotary_dim 0).
        """
        tables = (("halves", width), ("half", 2 * width), ("pairs", width))
        choices = (False, True)
        for (table, rotary_dim), interleaved, last, backwards in product(
            tables, choices, choices, choices
        ):
            if rotary_dim > head_dim or rotary_dim % 2 or (last and rotary_dim == head_dim):
                continue
            yield cls(head_dim, rotary_dim, interleaved, last, table, backwards)
        yield cls(head_dim, rotary_dim=0)


@dataclass(frozen=True)
class RotaryKind:
    """A rotary table that some layers share: the call that makes it (None: they do not rotate) and their form."""

    call: RotaryCall | None
    form: RotationForm

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin `[tokens, rotary_dim]` at positions int64 `[tokens]`, for heads in the common order."""
        if self.call is None or self.form.rotary_dim == 0:
            empty = torch.empty(len(positions), 0, dtype=dtype, device=positions.device)
            return empty, empty
        return self.form.tables(*self.call.at(positions, dtype))


@dataclass
class SeenAttention:
    """A layer's call of the attention function.

    Tensors are `[1, heads, tokens, dim]` as transformers passes them.
    """

    module: torch.nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    settings: AttentionSettings


Watch = Callable[[Callable[[SeenAttention], Tensor]], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True)
class LayerCall:
    """A layer of the model, and the arguments that it is called with.

    layer      the model's own module
    attention  the module that calls the attention function
    named      arguments other than hidden states, positions and rotary embedding
    takes      names of the arguments that `run` replaces
    rotary     rotary embedding that rotates nothing, in the form that the layer takes; None = it takes none
    """

    layer: torch.nn.Module
    attention: torch.nn.Module | None
    named: Mapping[str, object]
    takes: frozenset[str]
    rotary: object

    def run(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """Run the layer over `[1, tokens, hidden]`, without mask, cache or rotation, at positions int64 `[tokens]`.

        Returns its output, of the same shape.
        """
        given = dict(self.named)
        if "position_ids" in self.takes:
            given["position_ids"] = positions[None]
        if "cache_position" in self.takes:
            given["cache_position"] = positions
        if _ROTARY in self.takes:
            given[_ROTARY] = self.rotary
        for name in _NOT_GIVEN:
            if name in self.takes:
                given[name] = None
        out = self.layer(hidden, **given)
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result


@dataclass(frozen=True)
class ModelSurvey:
    """Findings about a model's layers.

    calls     for each layer, how it is called
    kinds     the rotary tables
    kind_of   for each layer, the number of its rotary table
    settings  for each layer, its attention settings
    heads     for each layer, the number of key/value heads
    dims      for each layer, the dimensions of a key's head and of a value's head
    embedded  `[1, tokens, hidden]`, input of the first layer for the token ids `ids`
    ids       int64 `[1, tokens]`
    """

    calls: Sequence[LayerCall]
    kinds: Sequence[RotaryKind]
    kind_of: Sequence[int]
    settings: Sequence[AttentionSettings]
    heads: Sequence[int]
    dims: Sequence[tuple[int, int]]
    embedded: Tensor
    ids: Tensor


def cos_and_sin(given: object) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each `[tokens, width]`, of what a rotary module returned.

    They are the two tensors of a pair, or the real and the imaginary part of a complex tensor; views where possible.
    Raises SurveyError for anything else.
    """
    if isinstance(given, Tensor) and given.is_complex():
        cos = given.real
        sin = given.imag
    elif (
        isinstance(given, tuple)
        and len(given) == 2
        and all(isinstance(part, Tensor) for part in given)
    ):
        cos, sin = given
    else:
        raise SurveyError("its rotary module returns no pair of cos and sin")
    width = cos.shape[-1]
    return cos.reshape(-1, width), sin.reshape(-1, width)


def identity_like(given: Any, dtype: torch.dtype) -> object:
    """Return a rotary embedding that rotates nothing, in the form of `given`.

    That is a pair of ones and zeros of one token, in `dtype`; a tensor of ones of one token, in that of `given`; or
    None. Raises SurveyError if `given` has another form.
    """
    if given is None:
        return None
    if isinstance(given, Tensor):
        return torch.ones_like(given[..., :1, :])
    if not (
        isinstance(given, Sequence) and [isinstance(turn, Tensor) for turn in given] == [True] * 2
    ):
        raise SurveyError(
            f"its layers take a rotary embedding that is neither cos and sin nor one tensor: {type(given).__name__}"
        )
    cos, _ = given
    shape = (1,) * (cos.dim() - 1) + (cos.shape[-1],)
    ones = torch.ones(shape, dtype=dtype, device=cos.device)
    return ones, torch.zeros_like(ones)


class _Stop(Exception):  # ends a layer after its attention; nothing failed
    """Ends a layer that was run for its attention only."""


@torch.no_grad()
def survey_model(
    model: PreTrainedModel,
    layers: torch.nn.ModuleList,
    *,
    forward: Callable[[Tensor], object],
    watch: Watch,
) -> ModelSurvey:
    """Return how a model calls its layers and how they rotate and attend, found by running them over six tokens.

    The model's own forward runs once over random tokens, then each layer up to its attention. Hooks are added to the
    model meanwhile. Raises SurveyError, with the reason, if the layers cannot be run one by one.

    Args:
        model: a decoder-only model of transformers, with or without its head.
        layers: its decoder layers.
        forward: runs the model's own forward over token ids int64 `[1, tokens]`; its attention is not ours.
        watch: makes a context in which the model's attention calls the given function.
    """
    parameter = next(model.parameters())
    vocabulary = int(model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (1, SURVEY_TOKENS), generator=generator).to(parameter.device)
    inputs, rotary_calls = _watched_forward(model, layers, forward, ids)
    positions = torch.arange(SURVEY_TOKENS, device=parameter.device)

    kinds: list[RotaryKind] = []
    kind_of: list[int] = []
    calls: list[LayerCall] = []
    attentions: list[SeenAttention] = []
    for layer, layer_inputs in zip(layers, inputs, strict=True):
        call = _layer_call(layer, layer_inputs)
        noise = torch.randn(layer_inputs.hidden.shape, generator=generator, dtype=torch.float32)
        noise = noise.to(parameter.device, layer_inputs.hidden.dtype)
        rotated = _attention_of(call, noise, positions, watch)
        identity = identity_like(call.rotary, noise.dtype)
        still = replace(call, rotary=identity)
        raw = _attention_of(still, noise, positions, watch)
        elsewhere = _attention_of(still, noise, positions + 3, watch)
        if not torch.equal(raw.key, elsewhere.key):
            raise SurveyError(
                "its keys depend on their positions besides the rotary embedding that layers are given"
            )
        rotary_call = _source(call.rotary, rotary_calls)
        form = rotation_form(call.rotary, raw, rotated)
        kind = RotaryKind(rotary_call if form.rotary_dim else None, form)
        if kind not in kinds:
            kinds.append(kind)
        kind_of.append(kinds.index(kind))
        calls.append(replace(still, attention=raw.module))
        attentions.append(raw)
    return ModelSurvey(
        calls=calls,
        kinds=kinds,
        kind_of=kind_of,
        settings=[seen.settings for seen in attentions],
        heads=[seen.key.shape[1] for seen in attentions],
        dims=[(seen.key.shape[3], seen.value.shape[3]) for seen in attentions],
        embedded=inputs[0].hidden,
        ids=ids,
    )


def _watched_forward(
    model: PreTrainedModel,
    layers: torch.nn.ModuleList,
    forward: Callable[[Tensor], object],
    ids: Tensor,
) -> tuple[list[LayerInputs], list[RotaryCall]]:
    """Run the model's own forward; return what its layers were given, and its calls of rotary modules."""
    inputs: list[LayerInputs] = []
    rotary_calls: list[RotaryCall] = []

    def before_layer(
        layer: torch.nn.Module, args: tuple[object, ...], named: dict[str, object]
    ) -> None:
        signature = inspect.signature(layer.forward)
        given = dict(signature.bind_partial(*args, **named).arguments)
        for parameter in signature.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                given |= given.pop(parameter.name, {})
        hidden = given.pop(_HIDDEN)
        inputs.append(LayerInputs(hidden.clone(), given))

    def after_rotary(
        module: torch.nn.Module, args: tuple[object, ...], named: dict[str, object], out: object
    ) -> None:
        rotary_calls.append(RotaryCall(module, args, named, out))

    with contextlib.ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_pre_hook(before_layer, with_kwargs=True).remove)
        for name, module in model.named_modules():
            if "rotary" in f"{name} {type(module).__name__}".lower():
                hooks.callback(module.register_forward_hook(after_rotary, with_kwargs=True).remove)
        forward(ids)
    if len(inputs) != len(layers):
        raise SurveyError(f"its forward ran {len(inputs)} layers of {len(layers)}")
    return inputs, rotary_calls


def _layer_call(layer: torch.nn.Module, inputs: LayerInputs) -> LayerCall:
    """Return how to call a layer. Raises SurveyError if it takes tensors that a pass does not have."""
    takes = {_ROTARY, *_POSITIONS, *_NOT_GIVEN} & set(inputs.named)
    named = {name: value for name, value in inputs.named.items() if name not in takes}
    for name, value in named.items():
        if _holds_tensors(value):
            raise SurveyError(f"its layers take {name} besides hidden states")
    return LayerCall(layer, None, named, frozenset(takes), inputs.named.get(_ROTARY))


def _holds_tensors(value: object) -> bool:
    if isinstance(value, Tensor):
        return True
    if isinstance(value, Mapping):
        return any(_holds_tensors(part) for part in value.values())
    return isinstance(value, list | tuple) and any(_holds_tensors(part) for part in value)


def _attention_of(
    call: LayerCall,
    hidden: Tensor,
    positions: Tensor,
    watch: Watch,
) -> SeenAttention:
    """Run a layer up to its attention. Raises SurveyError if it does not call the attention function."""
    seen: list[SeenAttention] = []

    def stop(attention: SeenAttention) -> Tensor:
        seen.append(attention)
        raise _Stop

    with contextlib.suppress(_Stop), watch(stop):
        call.run(hidden, positions)
    if not seen:
        raise SurveyError(
            "its layers do not call the attention function that transformers lets others provide"
        )
    return seen[0]


def _source(rotary: object, calls: Sequence[RotaryCall]) -> RotaryCall | None:
    """Return the call of a rotary module whose result a layer was given; None if no rotary embedding was given."""
    if rotary is None:
        return None
    cos, sin = cos_and_sin(rotary)
    for call in calls:
        made_cos, made_sin = cos_and_sin(call.given)
        if (
            made_cos.shape == cos.shape
            and torch.equal(made_cos, cos)
            and torch.equal(made_sin, sin)
        ):
            return call
    raise SurveyError("its rotary embedding is not made by a rotary module alone")


def rotation_form(rotary: object, raw: SeenAttention, rotated: SeenAttention) -> RotationForm:
    """Return the form of rotation that leads from raw queries and keys to rotated ones, with the smallest error.

    `rotary` is cos and sin in the model's own form, None without a rotary embedding; `raw` is a layer's attention with
    the identity as rotary embedding, `rotated` with the model's own. SurveyError if no known form is near enough.
    """
    head_dim = raw.key.shape[-1]
    pairs = [(raw.query, rotated.query), (raw.key, rotated.key)]
    if rotary is None:
        return RotationForm(head_dim, rotary_dim=0)
    cos, sin = cos_and_sin(rotary)
    errors: list[float] = []
    forms = list(RotationForm.candidates(head_dim, cos.shape[-1]))
    for form in forms:
        errors.append(
            max(_rotation_error(form, before, after, cos, sin) for before, after in pairs)
        )
    best = min(range(len(forms)), key=errors.__getitem__)
    if not errors[best] <= _TOLERANCE[raw.key.dtype]:
        raise SurveyError(
            f"its rotary embedding has an unknown form (the nearest one differs by {errors[best]:.1%})"
        )
    return forms[best]


def _rotation_error(
    form: RotationForm, before: Tensor, after: Tensor, cos: Tensor, sin: Tensor
) -> float:
    """Return the relative error of one form of rotation; `before` and `after` are `[1, heads, tokens, head_dim]`."""
    cos, sin = form.tables(cos.float(), sin.float())
    raw = in_order(before[0].transpose(0, 1).float(), form.order)
    expected = in_order(after[0].transpose(0, 1).float(), form.order)
    error = (rotate(raw.contiguous(), cos, sin) - expected).norm() / expected.norm()
    return float(error.nan_to_num(nan=torch.inf))


def in_order(heads: Tensor, order: Tensor | None) -> Tensor:
    """Return heads `[…, head_dim]` with their dimensions in this order, int64 `[head_dim]`; None: unchanged."""
    return heads if order is None else heads[..., order.to(heads.device)]
