"""vLLM's own models, each as a subclass whose instances are remembered: vLLM gives a connector no model.

The subclasses are made on demand and compute the same.
"""

from __future__ import annotations

import importlib
import threading
import weakref
from typing import Any

from cachecraft_rag.vllm.plugin import ARCHITECTURES

_lock = threading.Lock()
_living: list[weakref.ReferenceType[Any]] = []  # of this process; one for each engine or rank that runs in it


def model_of(vllm_config: Any) -> Any | None:
    """The model that was built with this config, or None: another plugin may have registered its architecture too."""
    layers = vllm_config.compilation_config.static_forward_context  # by name; they belong to one model only
    with _lock:
        models = [model for reference in _living if (model := reference()) is not None]
    for model in reversed(models):
        attention = model.model.layers[0].self_attn.attn
        if layers.get(attention.layer_name) is attention:
            return model
    return None


def __getattr__(name: str) -> object:
    if name not in ARCHITECTURES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = getattr(importlib.import_module(f"vllm.model_executor.models.{ARCHITECTURES[name]}"), name)

    def __init__(self: Any, *, vllm_config: Any, prefix: str = "", **more: Any) -> None:
        base.__init__(self, vllm_config=vllm_config, prefix=prefix, **more)
        with _lock:
            _living[:] = [reference for reference in _living if reference() is not None]
            _living.append(weakref.ref(self))

    made = type(name, (base,), {"__init__": __init__, "__module__": __name__, "__qualname__": name})
    globals()[name] = made
    return made
