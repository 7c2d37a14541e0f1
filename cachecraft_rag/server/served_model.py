"""Facts about a model that runs in other processes or on another machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cachecraft_rag.model.chunk_bound import ModelTokens
from cachecraft_rag.types.kv_layout import KVLayout


@dataclass(frozen=True)
class ServedModel:
    """Facts about a served model; see `model.facts.ModelFacts`.

    folder      folder of the model's files; None if they are on another machine
    end_tokens  token ids that end an answer
    """

    name: str
    folder: Path | None
    tokenizer: Any
    fingerprint: str
    layout: KVLayout
    context_length: int
    end_tokens: frozenset[int]

    @cached_property
    def chunk_bound(self) -> ModelTokens:
        """Bound of a document's chunks: a quarter of the context's tokens, but at least 16 and at most 1,024."""
        return ModelTokens.of(self.tokenizer, context_length=self.context_length)
