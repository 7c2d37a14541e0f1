"""The class of engine that a backend has, imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable

from cachecraft_rag.checks import from_extra
from cachecraft_rag.engine.base import AnswerEngine


def engine_loader(backend: str = "transformers") -> Callable[..., AnswerEngine]:
    """Return `from_pretrained` of the engine of a backend: "transformers", in this process, or "vllm".

    Raises MissingPackageError if torch is missing, as where only the client is installed.
    """
    with from_extra("", "A model in this process"):
        if backend == "vllm":
            from cachecraft_rag.vllm.engine import VLLMEngine

            return VLLMEngine.from_pretrained
        from cachecraft_rag.engine.engine import Engine

        return Engine.from_pretrained
