"""Constrained decoding: only tokens that can lead to JSON of a schema are drawn. llguidance keeps the grammar."""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from cachecraft_rag.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

# No free white space: small models would fill the answer with it.
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_GRAMMARS = 64  # schemas whose grammar is kept


class Constraint:
    """The grammar of one answer, as far as it has been written.

    Args:
        matcher: llguidance's, for this answer alone.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def mask(self, logits: Tensor) -> Tensor:
        """`[vocabulary]` logits with -inf for tokens that the grammar does not allow next; the text's end is allowed
        once the JSON is complete, and nothing else is then.
        """
        import torch

        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = torch.from_numpy(np.unpackbits(bits, count=min(len(logits), 8 * len(bits)), bitorder="little"))
        masked = torch.full_like(logits, -torch.inf)
        place = allowed.nonzero()[:, 0].to(logits.device)
        masked[place] = logits[place]
        return masked

    def take(self, token: int) -> None:
        """Go on behind a token that was drawn."""
        self._matcher.consume_token(token)


class Constraints:
    """Makes constraints for one tokenizer. Thread-safe; the first one takes about half a second.

    Args:
        tokenizer: a fast transformers tokenizer.
        vocabulary: width of the model's logits.
        end_tokens: ids that end an answer.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, end_tokens: Collection[int]) -> None:
        self._tokenizer, self._width, self._end_tokens = tokenizer, vocabulary, sorted(end_tokens)
        self._grammar = lru_cache(_GRAMMARS)(self._checked)

    def json(self, schema: str) -> Constraint:
        """A new constraint to JSON of a schema. Raises ConfigError for a schema that cannot be kept to."""
        grammar = self._grammar(schema)
        import llguidance

        return Constraint(llguidance.LLMatcher(self._vocabulary, grammar, log_level=0))

    def _checked(self, schema: str) -> str:
        try:
            import llguidance
        except ImportError as error:
            raise ConfigError(
                'a json_schema needs llguidance, which is not installed: pip install "cachecraft-rag[structured]"'
            ) from error
        options: Any = _COMPACT
        grammar: str = llguidance.LLMatcher.grammar_from_json_schema(_closed(json.loads(schema)), overrides=options)
        if problem := llguidance.LLMatcher.validate_grammar(grammar, self._vocabulary):
            raise ConfigError(f"json_schema: an answer cannot be kept to this schema: {problem.strip()}")
        return grammar

    @cached_property
    def _vocabulary(self) -> Any:
        from llguidance.hf import from_tokenizer

        if not getattr(self._tokenizer, "is_fast", False):
            raise ConfigError("a json_schema needs a fast tokenizer, and the model has a slow one")
        width = max(self._width, len(self._tokenizer))
        return from_tokenizer(self._tokenizer, n_vocab=width, eos_token=self._end_tokens)


def asking_for(schema: str) -> str:
    """The end of a question whose answer keeps to a schema: drawing alone would not say what its fields mean."""
    return f"\n\nAnswer in JSON of this schema: {schema}"


def _closed(schema: Any) -> Any:
    """The schema with no properties but those it names, or a small model would go on to invent some.

    >>> _closed({"properties": {"a": {}}})
    {'properties': {'a': {}}, 'additionalProperties': False}
    """
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {
        name: {key: _closed(one) for key, one in value.items()}
        if name in ("properties", "$defs", "definitions") and isinstance(value, dict)
        else value
        if name in ("const", "enum", "default", "examples")
        else _closed(value)
        for name, value in schema.items()
    }
    open_by_others = {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"}
    if "properties" in schema and open_by_others.isdisjoint(schema):
        closed["additionalProperties"] = False
    return closed
