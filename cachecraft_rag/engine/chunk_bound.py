"""What bounds the chunks of a document for one answering model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cachecraft_rag.types import digest

SMALLEST_LIMIT = 16
MODEL_TOKENS = 1024  # of the answering model in a chunk; texts in its own languages stay far below


@dataclass(frozen=True, slots=True)
class ModelTokens:
    """The answering model's tokens, which bound a chunk as the embedding model's do.

    name   tells tokenizers and limits apart that may split a text differently
    count  tokens of a text
    limit  the most that a chunk may have
    """

    name: str
    count: Callable[[str], int]
    limit: int

    @classmethod
    def of(cls, tokenizer: Any, *, context_length: int) -> ModelTokens:
        """From a transformers tokenizer and how many tokens its model takes; four chunks should always fit."""
        limit = min(MODEL_TOKENS, max(SMALLEST_LIMIT, context_length // 4))
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:  # a slow tokenizer, known by its words
            words = sorted(tokenizer.get_vocab().items())
            return cls(_name(repr(words), limit), lambda text: len(tokenizer.tokenize(text)), limit)
        from tokenizers import Tokenizer

        copy = Tokenizer.from_str(backend.to_str())  # calls of the original would set this one to truncate
        copy.no_truncation()
        copy.no_padding()
        copy.encode_special_tokens = True  # as plain text, which is how prompts hold them
        return cls(_name(copy.to_str(), limit), lambda text: len(copy.encode(text, add_special_tokens=False)), limit)

    def share(self, text: str, limit: int) -> int:
        """The text's tokens, so scaled that this model's limit becomes `limit`."""
        return -(-self.count(text) * limit // self.limit)

    def fits(self, text: str) -> bool:
        """Whether a chunk of this text is within the limit; hardly a tokenizer makes more tokens than bytes."""
        return len(text.encode("utf-8", "replace")) <= self.limit or self.count(text) <= self.limit


def _name(vocabulary: str, limit: int) -> str:
    return f"{digest(vocabulary)[:16]}.{limit}"
