"""A survey of a model's layers in vLLM: the arguments of each one, and the form in which it rotates queries and keys.

Nothing is concluded from a model's name. Each layer runs over a few rows up to its attention, once with its own rotary
embedding and once with the identity. `model.layer_survey` does this for the layers of transformers, also where vLLM
runs them. Both kinds of layers hold vLLM's attention, whose forward is replaced; they differ in how they are called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cachecraft_rag.compute.stack import AttentionSettings
from cachecraft_rag.model.layer_survey import (
    SURVEY_TOKENS,
    LayerCall,
    RotaryKind,
    RotationForm,
    SeenAttention,
    SurveyError,
    rotation_form,
    survey_model,
)
from cachecraft_rag.vllm.refusals import SINKS_IN_SEVERAL_THREADS
from cachecraft_rag.vllm.worker.interfaces import Attention, DecoderLayer, SelfAttention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_POSITIONS = "positions"
_HIDDEN = "hidden_states"
_RESIDUAL = "residual"

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def self_attention_of(layer: object) -> SelfAttention | None:
    """Return the direct child of a layer that holds vLLM's attention as `attn`.

    None if there is not exactly one, such as for a layer that another rank holds.
    """
    children = layer.children() if isinstance(layer, torch.nn.Module) else ()
    holders: list[Any] = [
        child for child in children if hasattr(getattr(child, "attn", None), "impl")
    ]
    return holders[0] if len(holders) == 1 else None


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """A rotary module that some layers share, and their form of rotation; without a `module` they do not rotate."""

    module: Any
    form: RotationForm

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin at `positions`, int64 `[tokens]`, each `[tokens, rotary_dim]` in `dtype`.

        Without a module, `rotary_dim` is 0.
        """
        if self.module is None:
            empty = torch.empty(len(positions), 0, dtype=dtype, device=positions.device)
            return empty, empty
        return self.form.tables(*_cos_and_sin(self.module, positions, dtype))


@dataclass(frozen=True, eq=False)
class VLLMLayerCall:
    """A decoder layer written for vLLM, and how it is called; for one of transformers see `LayerCall`.

    layer             the layer
    rotary            the module that rotates its queries and keys; None if nothing does
    carries_residual  True if the layer takes and returns a residual beside its hidden states
    """

    layer: DecoderLayer
    rotary: Any
    carries_residual: bool

    def run(self, hidden: Tensor, positions: Tensor, *, rotates: bool = False) -> Tensor:
        """Run the layer and return its output; input and output are `[streams, rows, hidden]`.

        There are two streams, hidden states and residual, if the layer carries a residual; otherwise one.

        Args:
            hidden: the layer's input; the layer may overwrite it.
            positions: int64 `[rows]`, positions of the rows in their prompts.
            rotates: True to rotate queries and keys; otherwise they reach the attention raw.
        """
        is_replaced = self.rotary is not None and not rotates
        if is_replaced:
            self.rotary.forward = lambda _positions, query, key=None, *_unused, **_named: (
                query,
                key,
            )
        try:
            return self._called(hidden, positions)
        finally:
            if is_replaced:
                del self.rotary.forward

    def _called(self, hidden: Tensor, positions: Tensor) -> Tensor:
        if self.carries_residual:
            named = {_POSITIONS: positions, _HIDDEN: hidden[0], _RESIDUAL: hidden[1]}
            states, residual = self.layer(**named)
            if residual is None:  # MiniCPM adds it itself
                residual = torch.zeros_like(states)
            return torch.stack((states, residual))
        out = self.layer(**{_POSITIONS: positions, _HIDDEN: hidden[0]})
        # StableLM's layers also return a residual that is in the output already.
        output: Tensor = out[0] if isinstance(out, tuple) else out
        return output[None]


@dataclass(frozen=True, eq=False)
class WorkerLayer:
    """A decoder layer inside vLLM that can be run over some rows.

    call              the layer and how it is called
    attention         its vLLM attention
    settings          its attention settings
    order             index `[head_dim]` that puts a head's dimensions into the order of all models; None = they have it
    carries_residual  see `VLLMLayerCall`
    """

    call: VLLMLayerCall | LayerCall
    attention: Attention
    settings: AttentionSettings
    order: Tensor | None
    carries_residual: bool

    @cached_property
    def original_order(self) -> Tensor | None:
        """Index int64 `[head_dim]` that undoes `order`, on its device; None without an order. Computed once."""
        return None if self.order is None else torch.argsort(self.order)

    def run(self, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run the layer with raw queries and keys on `hidden`, `[streams, rows, hidden]`; return its output, alike.

        It may overwrite `hidden`. `positions` are int64 `[rows]`. `attend` takes queries, keys and values `[rows, heads
        · head_dim]`, in the model's own order of dimensions, and returns the result in the form of the queries.
        """
        with _attention_calls(self.attention, attend):
            return self.call.run(hidden, positions)


@contextmanager
def _attention_calls(attention: Attention, attend: Attend) -> Iterator[None]:
    """Replace the forward of a layer's attention by `attend`."""

    def forward(
        query: Tensor, key: Tensor, value: Tensor, *_unused: object, **_named: object
    ) -> Tensor:
        return attend(query, key, value)

    attention.forward = forward
    try:
        yield
    finally:
        del attention.forward


@contextmanager
def _all_attention_calls(
    attentions: Sequence[Attention],
    attend: Callable[[Attention, Tensor, Tensor, Tensor], Tensor],
) -> Iterator[None]:
    """Replace the forward of each attention by `attend`, which is also given the attention."""
    with ExitStack() as replaced:
        for attention in attentions:
            replaced.enter_context(_attention_calls(attention, partial(attend, attention)))
        yield


def survey_layers(
    modules: Sequence[DecoderLayer], *, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[WorkerLayer], list[RotaryTable], list[int]]:
    """Return the layers, their rotary tables, and for each layer the index of its table among them.

    Layers that rotate alike share a table; so do layers that do not rotate, whose table has no `module`. Every layer
    runs three times over a few rows up to its attention, and is unchanged afterwards. Every rank has to call this,
    because norms of queries and keys may be computed by all ranks together. Raises SurveyError with the reason if
    passes cannot compute them.

    Args:
        modules: the model's layers, in order.
        hidden_size: numbers in a row of hidden states.
        dtype: dtype of hidden states.
        device: device of the model.
    """
    layers: list[WorkerLayer] = []
    tables: list[RotaryTable] = []
    kind_of: list[int] = []
    for module in modules:
        holder = _holder_of(module)
        call = VLLMLayerCall(module, getattr(holder, "rotary_emb", None), _check_parameters(module))
        streams = 2 if call.carries_residual else 1
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(streams, SURVEY_TOKENS, hidden_size, generator=generator)
        noise = noise.to(device, dtype)
        table = _rotary_table(call, holder.attn, noise)
        kind = next(
            (
                number
                for number, known in enumerate(tables)
                if known.module is table.module and known.form == table.form
            ),
            len(tables),
        )
        if kind == len(tables):
            tables.append(table)
        kind_of.append(kind)
        layers.append(_worker_layer(call, holder.attn, table.form, device))
    if len({layer.carries_residual for layer in layers}) > 1:
        raise SurveyError("only some of its layers carry a residual")
    _check_heads(layers)
    _check_sinks(layers, device)
    return layers, tables, kind_of


def survey_transformers_layers(
    model: PreTrainedModel,
    *,
    embed: Callable[[Tensor], Tensor],
    forward_context: Callable[[], AbstractContextManager[None]],
) -> tuple[list[WorkerLayer], Sequence[RotaryKind], Sequence[int]]:
    """Return layers, kinds of rotation and each layer's kind, as `survey_layers`, for layers of transformers.

    Every rank has to call this, because the model's own forward runs over a few tokens. Raises SurveyError likewise.

    Args:
        model: the model without its head.
        embed: embeds token ids int64 `[rows]` as `[rows, hidden]`.
        forward_context: makes the context in which vLLM runs a model's forward; layers with experts ask for it.
    """
    layers = model.layers
    assert isinstance(layers, torch.nn.ModuleList), "found by `models`"
    attentions = [_holder_of(layer).attn for layer in layers]

    def forward(ids: Tensor) -> object:
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        with (
            forward_context(),
            # zeros, because only what enters the layers is looked at
            _all_attention_calls(attentions, lambda _, query, *_others: torch.zeros_like(query)),
        ):
            # not `model(…)`, which vLLM may have compiled
            return model.forward(input_ids=ids, position_ids=positions, use_cache=False)

    def watch(see: Callable[[SeenAttention], Tensor]) -> AbstractContextManager[None]:
        return _all_attention_calls(attentions, lambda *call: see(_seen(*call)))

    survey = survey_model(model, layers, forward=forward, watch=watch)
    embedded = embed(survey.ids[0])
    if not torch.allclose(survey.embedded[0], embedded, rtol=1e-2, atol=1e-5):
        raise SurveyError("something other than its token embeddings enters its first layer")
    worker_layers = [
        _worker_layer(call, attention, survey.kinds[kind].form, survey.embedded.device)
        for call, attention, kind in zip(survey.calls, attentions, survey.kind_of, strict=True)
    ]
    _check_heads(worker_layers)
    _check_sinks(worker_layers, survey.embedded.device)
    return worker_layers, survey.kinds, survey.kind_of


def _holder_of(layer: object) -> SelfAttention:
    """Return the module of a layer that holds its attention. Raises SurveyError if passes cannot replace it."""
    holder = self_attention_of(layer)
    if holder is None:
        raise SurveyError(
            "its layers are not laid out like Llama's, or another rank holds some of them"
        )
    _check_attention(holder.attn)
    return holder


def _worker_layer(
    call: VLLMLayerCall | LayerCall, attention: Attention, form: RotationForm, device: torch.device
) -> WorkerLayer:
    order = form.order
    return WorkerLayer(
        call=call,
        attention=attention,
        settings=_settings(attention),
        # on the device once: every pass indexes with it
        order=None if order is None else order.to(device),
        carries_residual=isinstance(call, VLLMLayerCall) and call.carries_residual,
    )


def _check_heads(layers: Sequence[WorkerLayer]) -> None:
    sizes = {(layer.attention.num_kv_heads, layer.attention.head_size) for layer in layers}
    if len(sizes) > 1:
        raise SurveyError("its layers have heads of several sizes")


def _check_sinks(layers: Sequence[WorkerLayer], device: torch.device) -> None:
    """Refuse what vLLM 0.32 computes wrongly on a CPU beside a connector: a token after keys outside of its window."""
    has_sinks = any(layer.settings.sinks is not None for layer in layers)
    has_windows = any(layer.settings.window is not None for layer in layers)
    if has_sinks and has_windows and device.type == "cpu" and torch.get_num_threads() > 1:
        raise SurveyError(SINKS_IN_SEVERAL_THREADS.reason, SINKS_IN_SEVERAL_THREADS.advice)


def _check_attention(attention: Attention) -> None:
    impl = attention.impl
    if not hasattr(impl, "do_kv_cache_update"):
        raise SurveyError(
            f"the attention backend {type(impl).__name__} writes keys and values together with its forward"
        )
    if getattr(impl, "alibi_slopes", None) is not None:
        raise SurveyError("its attention has ALiBi")
    if getattr(attention, "kv_sharing_target_layer_name", None) is not None:
        raise SurveyError("some layers use the keys and values of others")


def _check_parameters(module: DecoderLayer) -> bool:
    """Return True if a layer takes a residual. Raises SurveyError if it needs what a pass does not have."""
    parameters = inspect.signature(module.forward).parameters
    known = (_POSITIONS, _HIDDEN, _RESIDUAL)
    optional = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    unknown = [
        name
        for name, parameter in parameters.items()
        if name not in known
        and parameter.default is inspect.Parameter.empty
        and parameter.kind not in optional
    ]
    if unknown or _POSITIONS not in parameters or _HIDDEN not in parameters:
        names = ", ".join(unknown or parameters)
        raise SurveyError(f"its layers take {names} in place of positions and hidden states alone")
    return _RESIDUAL in parameters


def _settings(attention: Attention) -> AttentionSettings:
    impl = attention.impl
    softcap = getattr(impl, "logits_soft_cap", None) or getattr(impl, "softcap", None) or None
    sinks = getattr(impl, "sinks", None)
    return AttentionSettings(
        impl.scale,
        getattr(attention, "sliding_window", None),
        softcap,
        None if sinks is None else sinks.detach().float().contiguous(),
    )


class _Stop(Exception):  # ends a layer after its attention; nothing failed
    """Ends a layer that was run for its queries and keys only."""


def _seen(attention: Attention, query: Tensor, key: Tensor, value: Tensor) -> SeenAttention:
    """Return a call of vLLM's attention with `[rows, heads * head_dim]` in the form of transformers."""
    q, k, v = (
        states.clone().reshape(states.shape[0], -1, attention.head_size).transpose(0, 1)[None]
        for states in (query, key, value)
    )
    return SeenAttention(torch.nn.Identity(), q, k, v, _settings(attention))


@torch.no_grad()
def _rotary_table(call: VLLMLayerCall, attention: Attention, noise: Tensor) -> RotaryTable:
    """Return how a layer rotates. Raises SurveyError if its form of rotation is unknown."""
    positions = torch.arange(SURVEY_TOKENS, device=noise.device)

    def queries_and_keys(places: Tensor, *, rotates: bool) -> SeenAttention:
        seen: list[SeenAttention] = []

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            seen.append(_seen(attention, query, key, value))
            raise _Stop

        try:
            with _attention_calls(attention, attend):
                # a copy: vLLM's compiled norms on a GPU overwrite a layer's input
                call.run(noise.clone(), places, rotates=rotates)
        except _Stop:
            return seen[0]
        raise SurveyError("its layers do not call their attention")

    raw = queries_and_keys(positions, rotates=False)
    if not torch.equal(raw.key, queries_and_keys(positions + 3, rotates=False).key):
        raise SurveyError("its keys depend on their positions besides the rotary embedding")
    rotated = queries_and_keys(positions, rotates=True)
    if torch.equal(raw.key, rotated.key):  # position 0 alone would not be rotated
        return RotaryTable(None, RotationForm(attention.head_size, rotary_dim=0))
    given = _cos_and_sin(call.rotary, positions, noise.dtype)
    return RotaryTable(call.rotary, rotation_form(given, raw, rotated))


def _cos_and_sin(rotary: Any, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin of a rotary module of vLLM's, each `[tokens, rotary_dim / 2]`; SurveyError without a table."""
    table = getattr(rotary, "cos_sin_cache", None)
    if not getattr(rotary, "use_long_rope", True):
        table = getattr(rotary, "long_short_cos_sin_cache", None)  # the short frequencies are first
    if table is None:
        raise SurveyError("its rotary embedding has no table of positions, or two (LongRoPE)")
    cos, sin = table[positions].to(dtype).chunk(2, dim=-1)
    return cos, sin
