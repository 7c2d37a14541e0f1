"""The length limit of chunks in tokens of the answering model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cachecraft_rag.types.digests import digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SMALLEST_LIMIT = 16
MODEL_TOKENS = 1024  # most tokens of a chunk; text in the model's languages stays far below


@dataclass(frozen=True, slots=True)
class ModelTokens:
    """The answering model's token count and limit for chunks, besides those of the embedding model.

    name   identifies the tokenizer and the limit
    count  number of tokens of a text. A tokenizer raises TypeError for half a surrogate pair, which indexed text never
           holds
    limit  the most tokens of a chunk
    """

    name: str
    count: Callable[[str], int]
    limit: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, *, context_length: int) -> ModelTokens:
        """Return the bound for a transformers tokenizer and its model's context length.

        The limit is a quarter of the context, at least 16 tokens and at most 1,024. `count` adds no special tokens, and
        reads those in a text as plain text. The tokenizer is copied, so later changes to it do not matter; a slow
        tokenizer, which has no backend to copy, is used itself, with its own treatment of special tokens.
        """
        limit = min(MODEL_TOKENS, max(SMALLEST_LIMIT, context_length // 4))
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            # A slow tokenizer is identified by its vocabulary.
            words = sorted(tokenizer.get_vocab().items())
            return cls(_name(repr(words), limit), lambda text: len(tokenizer.tokenize(text)), limit)
        from tokenizers import Tokenizer

        copy = Tokenizer.from_str(backend.to_str())  # calls of the original may enable truncation
        copy.no_truncation()
        copy.no_padding()
        copy.encode_special_tokens = True  # as plain text, as in prompts
        return cls(
            _name(copy.to_str(), limit),
            lambda text: len(copy.encode(text, add_special_tokens=False)),
            limit,
        )

    def share(self, text: str, limit: int) -> int:
        """Return a text's length in units of another limit: its tokens · `limit` / the model's limit, rounded up."""
        return -(-self.count(text) * limit // self.limit)

    def fits(self, text: str) -> bool:
        """Return True if a text has at most `limit` tokens; of a text of so few bytes the tokens are not counted."""
        return len(text.encode("utf-8", "replace")) <= self.limit or self.count(text) <= self.limit


def _name(vocabulary: str, limit: int) -> str:
    return f"{digest(vocabulary)[:16]}.{limit}"
