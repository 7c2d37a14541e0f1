"""A survey of a model's layers in vLLM: the arguments of each one, and the form in which it rotates queries and keys.

Nothing is concluded from a model's name. Each layer runs over a few rows up to its attention, once with its own rotary
embedding and once with the identity, as `model.layer_survey` does for Hugging Face's layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from cachecraft_rag.compute.stack import AttentionSettings
from cachecraft_rag.model.layer_survey import (
    SURVEY_TOKENS,
    RotationForm,
    SeenAttention,
    SurveyError,
    rotation_form,
)
from cachecraft_rag.vllm.worker.interfaces import Attention, DecoderLayer, SelfAttention

_POSITIONS = "positions"
_HIDDEN = "hidden_states"
_RESIDUAL = "residual"

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def self_attention_of(layer: object) -> SelfAttention | None:
    """Return the module of a layer that holds vLLM's attention as `attn`; None if there is not exactly one."""
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

    def at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin at these positions, each `[tokens, rotary_dim]`."""
        if self.module is None:
            empty = torch.empty(len(positions), 0, dtype=dtype, device=positions.device)
            return empty, empty
        return self.form.tables(*_cos_and_sin(self.module, positions, dtype))


@dataclass(frozen=True, eq=False)
class WorkerLayer:
    """A decoder layer of vLLM's that can be run over some rows.

    module            the layer
    attention         its vLLM attention
    settings          its attention settings
    rotary            the module that rotates its queries and keys; None if nothing does
    order             index `[head_dim]` that puts a head's dimensions into the order of all models; None = they have it
    carries_residual  True if the layer takes and returns a residual beside its hidden states
    """

    module: DecoderLayer
    attention: Attention
    settings: AttentionSettings
    rotary: Any
    order: Tensor | None
    carries_residual: bool

    @cached_property
    def original_order(self) -> Tensor | None:
        """Index `[head_dim]` that undoes `order`; None without an order."""
        return None if self.order is None else torch.argsort(self.order)

    def run(self, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run the layer over `[streams, rows, hidden]` with raw queries and keys; its attention calls `attend`."""
        with _taken_apart(self.attention, self.rotary, attend):
            return call_layer(self.module, hidden, positions, self.carries_residual)


def call_layer(
    module: Callable[..., Any], hidden: Tensor, positions: Tensor, carries_residual: bool
) -> Tensor:
    """Call a layer over `[streams, rows, hidden]`, and return its output in the same form."""
    if carries_residual:
        named = {_POSITIONS: positions, _HIDDEN: hidden[0], _RESIDUAL: hidden[1]}
        return torch.stack(module(**named))
    out = module(**{_POSITIONS: positions, _HIDDEN: hidden[0]})
    # StableLM's layers also return a residual that is in the output already.
    states: Tensor = out[0] if isinstance(out, tuple) else out
    return states[None]


@contextmanager
def _taken_apart(
    attention: Attention, rotary: Any, attend: Attend, *, rotates: bool = False
) -> Iterator[None]:
    """Replace a layer's attention, and its rotary module by the identity unless `rotates`."""

    def attention_forward(
        query: Tensor, key: Tensor, value: Tensor, *_unused: object, **_named: object
    ) -> Tensor:
        return attend(query, key, value)

    is_replaced = rotary is not None and not rotates
    if is_replaced:
        rotary.forward = lambda _positions, query, key=None, *_unused, **_named: (query, key)
    attention.forward = attention_forward
    try:
        yield
    finally:
        del attention.forward
        if is_replaced:
            del rotary.forward


def survey_layers(
    modules: Sequence[DecoderLayer], *, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[WorkerLayer], list[RotaryTable], list[int]]:
    """Return the layers, their rotary tables, and the number of its table for each layer.

    Every rank has to call this, because norms of queries and keys may be computed by all ranks together.

    Raises:
        SurveyError: passes cannot run these layers, with the reason.
    """
    layers: list[WorkerLayer] = []
    tables: list[RotaryTable] = []
    kind_of: list[int] = []
    for module in modules:
        holder = self_attention_of(module)
        if holder is None:
            raise SurveyError(
                "its layers are not laid out like Llama's, or another rank holds some of them"
            )
        _check_attention(holder.attn)
        carries_residual = _check_parameters(module)
        streams = 2 if carries_residual else 1
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(streams, SURVEY_TOKENS, hidden_size, generator=generator)
        noise = noise.to(device, dtype)
        table = _rotary_table(module, holder, noise, carries_residual)
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
        order = table.form.order
        layers.append(
            WorkerLayer(
                module=module,
                attention=holder.attn,
                settings=_settings(holder.attn),
                rotary=getattr(holder, "rotary_emb", None),
                # on the device once: every pass indexes with it
                order=None if order is None else order.to(device),
                carries_residual=carries_residual,
            )
        )
    sizes = {(layer.attention.num_kv_heads, layer.attention.head_size) for layer in layers}
    if len(sizes) > 1:
        raise SurveyError("its layers have heads of several sizes")
    if len({layer.carries_residual for layer in layers}) > 1:
        raise SurveyError("only some of its layers carry a residual")
    return layers, tables, kind_of


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


@torch.no_grad()
def _rotary_table(
    module: DecoderLayer, holder: SelfAttention, noise: Tensor, carries_residual: bool
) -> RotaryTable:
    """Return how a layer rotates. Raises SurveyError if its form of rotation is unknown."""
    attention = holder.attn
    rotary = getattr(holder, "rotary_emb", None)
    positions = torch.arange(SURVEY_TOKENS, device=noise.device)

    def queries_and_keys(places: Tensor, *, rotates: bool) -> SeenAttention:
        seen: list[SeenAttention] = []

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            q, k, v = (
                states.clone()
                .reshape(states.shape[0], -1, attention.head_size)
                .transpose(0, 1)[None]
                for states in (query, key, value)
            )
            seen.append(SeenAttention(torch.nn.Identity(), q, k, v, _settings(attention)))
            raise _Stop

        try:
            with _taken_apart(attention, rotary, attend, rotates=rotates):
                call_layer(module, noise, places, carries_residual)
        except _Stop:
            return seen[0]
        raise SurveyError("its layers do not call their attention")

    raw = queries_and_keys(positions, rotates=False)
    if not torch.equal(raw.key, queries_and_keys(positions + 3, rotates=False).key):
        raise SurveyError("its keys depend on their positions besides the rotary embedding")
    rotated = queries_and_keys(positions, rotates=True)
    if torch.equal(raw.key, rotated.key):  # position 0 alone would not be rotated
        return RotaryTable(None, RotationForm(attention.head_size, rotary_dim=0))
    given = _cos_and_sin(rotary, positions, noise.dtype)
    return RotaryTable(rotary, rotation_form(given, raw, rotated))


def _cos_and_sin(rotary: Any, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin of a rotary module of vLLM's, each `[tokens, rotary_dim / 2]`.

    Raises SurveyError if it has no table of positions.
    """
    table = getattr(rotary, "cos_sin_cache", None)
    if not getattr(rotary, "use_long_rope", True):
        table = getattr(rotary, "long_short_cos_sin_cache", None)  # the short frequencies are first
    if table is None:
        raise SurveyError("its rotary embedding has no table of positions, or two (LongRoPE)")
    cos, sin = table[positions].to(dtype).chunk(2, dim=-1)
    return cos, sin
