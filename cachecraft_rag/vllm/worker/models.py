"""Subclasses of vLLM's models that remember their instances, because vLLM does not pass its model to a connector.

They also reserve the memory of fillings, because vLLM sizes its KV cache once the model is loaded. The subclasses are
made on demand and compute the same as their base classes.
"""

from __future__ import annotations

import importlib
import threading
import weakref
from typing import cast

from cachecraft_rag.vllm.options import VLLMConfig
from cachecraft_rag.vllm.plugin import ARCHITECTURES
from cachecraft_rag.vllm.worker.fill_memory import reserve
from cachecraft_rag.vllm.worker.interfaces import TextModel, VLLMModule
from cachecraft_rag.vllm.worker.layers import self_attention_of

_lock = threading.Lock()
# The models of this process; one for each engine or rank that runs in it.
_living: list[weakref.ReferenceType[VLLMModule]] = []


def model_of(vllm_config: VLLMConfig) -> VLLMModule | None:
    """Return the model of this process that was built with this config, the latest if there are several.

    A model whose first layer does not hold one attention of vLLM's counts as built with any config. None if the model
    that vLLM runs is no class of this package, such as when another plugin has registered its architecture too.
    """
    # by name; they belong to one model only
    layers = vllm_config.compilation_config.static_forward_context
    with _lock:
        models = [model for reference in _living if (model := reference()) is not None]
    for model in reversed(models):
        holder = self_attention_of(text_part(model).model.layers[0])
        # a model without one is found too, so that it is refused with its own reason
        if holder is None or layers.get(holder.attn.layer_name) is holder.attn:
            return model
    return None


def text_part(model: VLLMModule) -> TextModel:
    """Return the language model inside a multimodal model; any other model itself."""
    language_model = getattr(model, "get_language_model", None)
    return cast(TextModel, model if language_model is None else language_model())


def __getattr__(name: str) -> object:
    if name not in ARCHITECTURES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, base_name = ARCHITECTURES[name].partition(":")
    base = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), base_name)

    def __init__(
        self: VLLMModule, *, vllm_config: VLLMConfig, prefix: str = "", **more: object
    ) -> None:
        base.__init__(self, vllm_config=vllm_config, prefix=prefix, **more)
        if prefix:  # the text part of a multimodal model, which is remembered itself
            return
        self.vllm_config = vllm_config
        # as a list, because it is no part of the model's state
        self.reserved_memory = reserve(vllm_config, next(self.parameters()).device)
        with _lock:
            _living[:] = [reference for reference in _living if reference() is not None]
            _living.append(weakref.ref(self))

    # With vLLM's own name: by it vLLM recognises the models that it runs with the layers of transformers.
    made = type(
        base_name, (base,), {"__init__": __init__, "__module__": __name__, "__qualname__": name}
    )
    globals()[name] = made
    return made
