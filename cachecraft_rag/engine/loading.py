"""The engine in this process, imported when one is asked for: it needs torch, which a client may do without."""

from __future__ import annotations

from collections.abc import Callable

from cachecraft_rag.checks import from_extra
from cachecraft_rag.engine.base import AnswerEngine


def engine_loader() -> Callable[..., AnswerEngine]:
    """Return `Engine.from_pretrained`. Raises MissingPackageError without torch."""
    with from_extra("", "A model in this process"):
        from cachecraft_rag.engine.engine import Engine
    return Engine.from_pretrained
