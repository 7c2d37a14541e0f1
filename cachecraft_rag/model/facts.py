"""Facts about a model and a store that are known without running the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from cachecraft_rag.model.chunk_bound import ModelTokens
from cachecraft_rag.types.kv_layout import KVLayout


class ModelFacts(Protocol):
    """A model as it is known without running it; see `decoder.Decoder`. Reading a property raises nothing."""

    @property
    def name(self) -> str:
        """The name that the user asked for: a Hugging Face name, a folder or "demo"."""

    @property
    def tokenizer(self) -> Any:
        """The model's own tokenizer, in the form of transformers."""

    @property
    def fingerprint(self) -> str:
        """Identity of checkpoint, tokenizer and dtype, as text; chunk-caches of another fingerprint are never used."""

    @property
    def layout(self) -> KVLayout:
        """Shape and dtype of its chunk-caches, with all heads."""

    @property
    def context_length(self) -> int:
        """Limit of prompt and answer together, in tokens."""

    @property
    def chunk_bound(self) -> ModelTokens:
        """Token count of this model and its limit for a document's chunks in tokens, see `ModelTokens`."""


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """Sizes of a store's files in bytes: used, their limit, and free on the disk; and their codec."""

    used: int
    budget: int
    free: int
    codec: str
