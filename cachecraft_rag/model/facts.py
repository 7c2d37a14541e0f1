"""Facts about a model and a store that are known without running the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from cachecraft_rag.model.chunk_bound import ModelTokens
from cachecraft_rag.types.kv_layout import KVLayout


class ModelFacts(Protocol):
    """A model as it is known without running it; see `decoder.Decoder`."""

    @property
    def name(self) -> str:
        """The name that the user asked for."""

    @property
    def tokenizer(self) -> Any:
        """The model's own."""

    @property
    def fingerprint(self) -> str:
        """Identity of checkpoint, tokenizer and dtype."""

    @property
    def layout(self) -> KVLayout:
        """Shape and dtype of its chunk-caches, with all heads."""

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together."""

    @property
    def chunk_bound(self) -> ModelTokens:
        """Bound of a document's chunks for this model."""


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """Sizes of a store's files in bytes: used, their limit, and free on the disk; and their codec."""

    used: int
    budget: int
    free: int
    codec: str
